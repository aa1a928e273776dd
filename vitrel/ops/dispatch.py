"""The functions `attention` and `window_attention`, and the choice of the backend that computes them.

A backend is a module with one or both of the functions below, without their argument `backend`, and `refuses(call)`, the reason
why it does not serve a call, or "". "auto" takes the backend of the first row of vitrel.ops.auto that applies to the call and
whose backend serves it. If a backend given by name refuses a call, ValueError is raised with the reason.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from types import ModuleType

import torch
from torch import Tensor

from vitrel.grid import Grid
from vitrel.ops import reference, sdpa
from vitrel.ops.auto import Row, rows_of
from vitrel.ops.backends import augmented_qk, triton_backend
from vitrel.ops.reference import Call, needs_gradient
from vitrel.ops.window import check_window
from vitrel.position.terms import Terms

BACKENDS: dict[str, ModuleType] = {
    "triton": triton_backend,
    "augmented_qk": augmented_qk,
    "sdpa": sdpa,
    "reference": reference,
}
chosen: dict[str, str] = {"auto": os.environ.get("VITREL_BACKEND", "auto")}  # backend that "auto" means, see use_backend
_records: list[Callable[[str, Call, str], object]] = []  # see `recording`


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Terms,
    grid: Grid | tuple[int, int] | tuple[int, int, int],
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Compute softmax attention with position terms: q [B, H, M, D], k and v [B, H, N, D] -> [B, H, M, D].

    Args:
        q: queries [B, H, M, D], the last M tokens of the key grid, so cached keys of earlier rows come first.
        k: keys [B, H, N, D].
        v: values [B, H, N, D].
        terms: what an encoding returns for `grid`, or your own tables and angles; Terms() adds nothing.
        grid: of the keys, (h, w) or (h, w, prefix) with class and register tokens; N = prefix + h * w.
        mask: broadcastable to [B, H, M, N]; bool with True = attend, or floats that are added to the logits. A fully masked
            query returns 0, with finite gradients.
        dropout_p: probability of dropping an attention weight, also in evaluation mode: pass 0 there.
        backend: a key of BACKENDS ("triton", "augmented_qk", "sdpa", "reference"), or "auto": see `choose`.

    Raises:
        ValueError: shapes do not fit the grid (not checked inside torch.compile), the mask has integers, the backend is
            unknown, or one given by name refuses the call.
    """
    grid = Grid(*grid)
    if not torch.compiler.is_compiling():
        _check_tokens(q, k, v, grid)
        check_terms(terms, grid, q.shape[-3], q.shape[-1])
    if mask is not None:
        mask = _check_mask(mask)
    call = Call(
        terms=terms,
        grid=grid,
        heads=q.shape[-3],
        width=q.shape[-1],
        queries=q.shape[-2],
        dtype=q.dtype,
        device=q.device,
        grad=needs_gradient(q, k, v, mask) or needs_gradient(*terms.in_attention),
        mask=mask,
        dropout_p=dropout_p,
    )
    return choose(backend, call).attention(q, k, v, terms, grid, mask, dropout_p)


def window_attention(
    qkv: Tensor,
    terms: Terms,
    grid: Grid | tuple[int, int],
    window: tuple[int, int],
    shift: tuple[int, int],
    num_heads: int,
    dropout_p: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Compute attention within (shifted) windows of an image in raster order: [B, h, w, 3C] -> [B, h, w, C].

    Args:
        qkv: q, k and v along the last dimension, each split into heads, [B, h, w, 3C].
        terms: on the window's grid, Grid(*window), the same for all windows: what an encoding returns for it, or your own.
        grid: of the image, (h, w).
        window: (h, w) in tokens, of this size on every grid; a grid that it does not divide is padded and masked.
        shift: (h, w) in tokens by which windows are shifted, less than the window, (0, 0) for none. Tokens at opposite borders
            do not see each other. An axis that fits into one window is not shifted.
        num_heads: number of heads H.
        dropout_p: as in `attention`.
        backend: as in `attention`.

    Raises:
        ValueError: shapes do not fit, the grid has prefix tokens, the window or shift is impossible, the backend is unknown, or
            one given by name refuses the call.
    """
    grid, window, shift = Grid(*grid), (window[0], window[1]), (shift[0], shift[1])
    check_window(window, shift)
    if grid.prefix:
        raise ValueError(f"windows contain patch tokens only, but the grid has prefix={grid.prefix}")
    if not torch.compiler.is_compiling():
        if tuple(qkv.shape[1:3]) != (grid.h, grid.w) or qkv.shape[3] % (3 * num_heads):
            expected = f"[B, {grid.h}, {grid.w}, 3 * C] with C divisible by {num_heads} heads"
            raise ValueError(f"qkv has shape {tuple(qkv.shape)}; expected {expected}")
        check_terms(terms, Grid(*window), num_heads, qkv.shape[3] // (3 * num_heads))
    call = Call(
        terms=terms,
        grid=grid,
        window=window,
        heads=num_heads,
        width=qkv.shape[3] // (3 * num_heads),
        queries=qkv.shape[1] * qkv.shape[2],
        dtype=qkv.dtype,
        device=qkv.device,
        grad=needs_gradient(qkv) or needs_gradient(*terms.in_attention),
        dropout_p=dropout_p,
    )
    return choose(backend, call).window_attention(qkv, terms, grid, window, shift, num_heads, dropout_p)


def choose(backend: str, call: Call) -> ModuleType:
    """Return the backend module that computes a call, the one named or for "auto" that of `row_of`, and tell `recording`.

    Args:
        backend: a key of BACKENDS, or "auto". If `use_backend` or VITREL_BACKEND has set a backend, "auto" means that one.
        call: what is to be computed.

    Raises:
        ValueError: the name is unknown, or a backend given by name (or set by the above) refuses the call.
    """
    name = chosen["auto"] if backend == "auto" else backend
    if name == "auto":
        name = row_of(call).backend
    elif name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; choose auto, {', '.join(BACKENDS)}")
    elif reason := BACKENDS[name].refuses(call):
        raise ValueError(f"backend {name!r} refuses: {reason}; use backend='auto'")
    for record in _records:
        record(backend, call, name)
    return BACKENDS[name]


def row_of(call: Call) -> Row:
    """Return the first row of vitrel.ops.auto that applies to a call and whose backend serves it, as "auto" chooses.

    Triton's kernels may be run on zeros to find out (see `triton_backend.serves`).
    """
    return next(row for row in rows_of(call) if _serves(row.backend, call))


def _serves(name: str, call: Call) -> bool:
    return triton_backend.serves(call) if name == "triton" else not BACKENDS[name].refuses(call)


@contextlib.contextmanager
def recording(record: Callable[[str, Call, str], object]) -> Iterator[None]:
    """Context manager in which every attention call, of any thread, calls record(backend given, its `Call`, backend chosen)."""
    _records.append(record)
    try:
        yield
    finally:
        _records.remove(record)


def check_terms(terms: Terms, grid: Grid, heads: int, width: int) -> None:
    """Check that tables and rotary terms have the shapes that a grid needs, since lookups with others can be wrong silently.

    A bias needs a row of its own for each of the H heads; other tables and angles may have 1 head, which serves all.
    Terms.tokens and Terms.query_bias are not checked.

    Args:
        terms: what an encoding returns for `grid`.
        grid: of the keys, or of the window.
        heads: number of heads H.
        width: width D of a head.

    Raises:
        ValueError: a tensor has another shape; the message names it, with the shape that it needs.
    """
    on_grid = f"the {grid.h}x{grid.w} grid with prefix={grid.prefix}"
    advice = "compute the terms on this grid (in windows, on Grid(*window))"
    for table in terms.tables:
        rows = grid.classes(table.axis)
        for name, value in (("bias", table.bias), ("query", table.query), ("key", table.key), ("value", table.value)):
            if value is None:
                continue
            expected = (heads, rows) if name == "bias" else (heads, rows, width)
            if tuple(value.shape) != expected and (name == "bias" or tuple(value.shape) != (1, rows, width)):
                raise ValueError(
                    f"{name} table over {table.axis!r} has shape {tuple(value.shape)}, but {on_grid} needs {expected}: {advice}"
                )
        if table.gated is not None:
            shapes = tuple(table.gated[0].shape), tuple(table.gated[1].shape)
            both = (heads, shapes[0][1], width), (heads, rows, shapes[0][1])
            if any(s != e and s != (1, *e[1:]) for s, e in zip(shapes, both, strict=True)):
                raise ValueError(f"gated table over {table.axis!r} has shapes {shapes}, but {on_grid} needs {both}: {advice}")
    for angle in (*(terms.rotary or ()), *(terms.key_rotary or ())):
        expected = (heads, grid.tokens, width // 2)
        if tuple(angle.shape) not in (expected, (1, *expected[1:])):
            raise ValueError(f"rotary terms have shape {tuple(angle.shape)}, but {on_grid} needs {expected}: {advice}")


def _check_mask(mask: Tensor) -> Tensor:
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"a mask is bool (True = attend) or additive floats, not {mask.dtype}; use mask.bool() for ones and zeros"
        )
    return mask if mask.dim() >= 2 else mask.view((1,) * (2 - mask.dim()) + mask.shape)


def _check_tokens(q: Tensor, k: Tensor, v: Tensor, grid: Grid) -> None:
    if k.shape[-2] != grid.tokens or v.shape[-2] != grid.tokens:
        raise ValueError(
            f"{k.shape[-2]} keys and {v.shape[-2]} values do not fit the {grid.h}x{grid.w} grid with prefix={grid.prefix} "
            f"({grid.tokens} tokens in all); pass the grid of the keys"
        )
    if q.shape[-2] > grid.tokens:
        raise ValueError(f"{q.shape[-2]} queries, but only {grid.tokens} keys: queries are the last tokens of the key grid")
