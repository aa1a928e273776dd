"""The two entries through which position meets content, and the choice of the backend that serves them.

A backend is a module with `refuses(call) -> reason or ""`, `pays(call) -> bool`, whether "auto" takes it where it serves, and
the two functions of the signatures below without `backend`. "auto" takes the first of BACKENDS that pays and serves the call;
"auto+onednn" considers a backend of OPT_IN too. One asked for by name that refuses raises with its reason.
"""

import os
from types import ModuleType

import torch
from torch import Tensor

from vitrel.grid import Grid
from vitrel.ops import reference, sdpa
from vitrel.ops.backends import augmented_qk, bias_by_row, flex, onednn, triton_backend, window_kinds
from vitrel.ops.reference import Call
from vitrel.ops.window import check_window
from vitrel.position.terms import Terms

BACKENDS: dict[str, ModuleType] = {  # in the order in which "auto" tries them
    "triton": triton_backend,
    "onednn": onednn,
    "bias_by_row": bias_by_row,
    "augmented_qk": augmented_qk,
    "window_kinds": window_kinds,
    "flex": flex,
    "sdpa": sdpa,
    "reference": reference,
}
OPT_IN = ("onednn",)  # "auto" considers them where they are named beside it
chosen: dict[str, str] = {"auto": os.environ.get("VITREL_BACKEND", "auto")}  # what "auto" stands for, see use_backend


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Terms,
    grid: Grid,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Softmax attention with position terms: [B, H, M, D], [B, H, N, D], [B, H, N, D] -> [B, H, M, D].

    grid: of the keys, N = grid.tokens; the queries are its last M tokens (memory is simply earlier rows).
    mask: broadcastable to [B, H, M, N]; bool with True = attend, or additive. A query that sees no key returns 0, with finite
    gradients. dropout_p: share of the attention weights dropped; the caller passes 0 in evaluation.
    Raises ValueError for shapes that do not fit the grid, an unknown backend, or a named backend that refuses.
    """
    if not torch.compiler.is_compiling():
        _check_tokens(q, k, v, grid)
        check_terms(terms, grid, q.shape[-3], q.shape[-1])
    if mask is not None:
        mask = _check_mask(mask)
    shape, how = (q.shape[-3], q.shape[-1], q.shape[-2]), (q.dtype, q.device, _differentiated(q, k, v))
    call = Call("attention", terms, grid, None, *shape, *how, mask, dropout_p, batch=q.shape[0])
    return choose(backend, call).attention(q, k, v, terms, grid, mask, dropout_p)


def window_attention(
    qkv: Tensor,
    terms: Terms,
    grid: Grid,
    window: tuple[int, int],
    shift: tuple[int, int],
    num_heads: int,
    dropout_p: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Attention inside (shifted) windows, raster order in and out: [B, h, w, 3C] -> [B, h, w, C].

    qkv: q, k and v along the last dimension, heads inside each. terms: on the grid of the window, Grid(*window). grid: of the
    image. window, shift: (h, w) in tokens; the window never shrinks, a grid it does not divide is padded and masked.
    Raises ValueError for shapes that do not fit, an impossible window, an unknown backend, or one that refuses.
    """
    window, shift = (window[0], window[1]), (shift[0], shift[1])
    check_window(window, shift)
    if grid.prefix:
        raise ValueError(f"windows hold patch tokens only, but the grid has {grid.prefix} prefix tokens")
    if not torch.compiler.is_compiling():
        if tuple(qkv.shape[1:3]) != (grid.h, grid.w) or qkv.shape[3] % (3 * num_heads):
            wanted = f"[B, {grid.h}, {grid.w}, 3 * C] with C divisible by {num_heads} heads"
            raise ValueError(f"qkv has shape {tuple(qkv.shape)}; expected {wanted}")
        check_terms(terms, Grid(*window), num_heads, qkv.shape[3] // (3 * num_heads))
    shape = num_heads, qkv.shape[3] // (3 * num_heads), qkv.shape[1] * qkv.shape[2]
    how = qkv.dtype, qkv.device, _differentiated(qkv), None, dropout_p
    call = Call("window_attention", terms, grid, window, *shape, *how, qkv.shape[0])
    return choose(backend, call).window_attention(qkv, terms, grid, window, shift, num_heads, dropout_p)


def choose(backend: str, call: Call) -> ModuleType:
    """The backend that serves a call. ValueError for an unknown name, and for one asked for by name that refuses."""
    if is_auto(backend) and chosen["auto"] != "auto":
        backend = chosen["auto"]
    if is_auto(backend):
        modules = (module for name, module in BACKENDS.items() if considers(backend, name))
        return next(module for module in modules if module.pays(call) and not module.refuses(call))
    if backend not in BACKENDS:
        raise ValueError(f"unknown backend {backend!r}; choose auto, {', '.join(BACKENDS)}")
    if reason := BACKENDS[backend].refuses(call):
        raise ValueError(f"backend {backend!r} refuses: {reason}; use backend='auto'")
    return BACKENDS[backend]


def is_auto(backend: str) -> bool:
    """Whether the backend is left to be chosen: "auto", or "auto+" and one of OPT_IN."""
    return backend == "auto" or backend in [f"auto+{name}" for name in OPT_IN]


def considers(backend: str, name: str) -> bool:
    """Whether "auto" or "auto+..." may take the backend of this name."""
    return name not in OPT_IN or backend == f"auto+{name}"


def _differentiated(*inputs: Tensor) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in inputs)


def check_terms(terms: Terms, grid: Grid, heads: int, width: int) -> None:
    """ValueError unless every term has the rows of `grid`, the heads and the width: a lookup would silently be wrong."""
    place = f"the {grid.h}x{grid.w} grid with {grid.prefix} prefix tokens"
    way_out = "compute the terms on this grid (inside windows, on Grid(*window))"
    for table in terms.tables:
        rows = grid.classes(table.axis)
        for name, value in (("bias", table.bias), ("query", table.query), ("key", table.key), ("value", table.value)):
            if value is None:
                continue
            wanted = (heads, rows) if name == "bias" else (heads, rows, width)
            if tuple(value.shape) != wanted and (name == "bias" or tuple(value.shape) != (1, rows, width)):
                raise ValueError(
                    f"{name} table over {table.axis!r} has shape {tuple(value.shape)}, {place} needs {wanted}: {way_out}"
                )
        if table.gated is not None:
            shapes = tuple(table.gated[0].shape), tuple(table.gated[1].shape)
            both = (heads, shapes[0][1], width), (heads, rows, shapes[0][1])
            if any(s != w and s != (1, *w[1:]) for s, w in zip(shapes, both, strict=True)):
                raise ValueError(f"gated table over {table.axis!r} has shapes {shapes}, {place} needs {both}: {way_out}")
    for angle in (*(terms.rotary or ()), *(terms.key_rotary or ())):
        wanted = (heads, grid.tokens, width // 2)
        if tuple(angle.shape) not in (wanted, (1, *wanted[1:])):
            raise ValueError(f"rotary terms have shape {tuple(angle.shape)}, {place} needs {wanted}: {way_out}")


def _check_mask(mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"a mask is bool (True = attend) or additive floats, not {mask.dtype}; use mask.bool() for ones and zeros"
        )
    return mask if mask.dim() >= 2 else mask.view((1,) * (2 - mask.dim()) + mask.shape)


def _check_tokens(q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> None:
    if k.shape[-2] != grid.tokens or v.shape[-2] != grid.tokens:
        raise ValueError(
            f"{k.shape[-2]} keys and {v.shape[-2]} values do not fit the {grid.h}x{grid.w} grid with {grid.prefix} prefix "
            f"tokens ({grid.tokens} in all); pass the grid of the keys"
        )
    if q.shape[-2] > grid.tokens:
        raise ValueError(f"{q.shape[-2]} queries, but only {grid.tokens} keys: queries are the last tokens of the key grid")
