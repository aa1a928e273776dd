"""Methods of attention: every backend, and the usual code of peers."""

import functools
import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.benchmark.shapes import Problem, Shape
from vitrel.ops import BACKENDS, attention, window_attention
from vitrel.ops.reference import rotated
from vitrel.position.terms import Terms

Function = Callable[[Shape, Sequence[Tensor], Terms, Sequence[Tensor]], Tensor]
FLOOR = "sdpa without bias"
GATHERED = "sdpa + gathered bias"
_SLOW = 1024  # tokens above which the definition takes minutes on a CPU


class Method(NamedTuple):
    """One way to compute attention, `function(shape, inputs, terms, fixed)` (see Problem).

    kind: "ours", "peer", or "floor", which has no position and is therefore not comparable.
    """

    name: str
    function: Function
    kind: str


def methods(shape: Shape, gpu: bool) -> list[Method]:
    """Return all methods for a shape; one that does not support it raises when called."""
    chosen = [_backend("sdpa", "peer")]
    if gpu or os.environ.get("TRITON_INTERPRET") == "1":
        chosen.append(_backend("triton", "ours"))
    chosen += [_backend(name, "ours") for name in ("auto", *BACKENDS) if name not in ("triton", "sdpa", "reference")]
    if gpu or shape.grid.tokens <= _SLOW:
        chosen.append(_backend("reference", "peer"))
    softmax = window_softmax if shape.window else global_softmax
    chosen.append(Method("softmax", softmax, "peer"))
    if shape.encoding != "rope" or shape.window:  # else there is no bias, and it would be the backend
        chosen.append(Method(GATHERED, gathered_sdpa, "peer"))
    if not shape.window or shape.tokens % (shape.window[0] * shape.window[1]) == 0:
        chosen.append(Method(FLOOR, _floor, "floor"))
    if not shape.compiled:
        return chosen
    peers = [method for method in chosen if method.name in ("sdpa", "softmax", GATHERED)]
    return [*chosen, *(Method(f"{method.name} compiled", _compile(method.function), "peer") for method in peers)]


def _compile(function: Function) -> Function:
    made = functools.cache(lambda: torch.compile(function, dynamic=False))  # importing a compiler takes seconds
    return lambda *given: made()(*given)


def _backend(backend: str, kind: str) -> Method:
    def run(shape: Shape, inputs: Sequence[Tensor], terms: Terms, fixed: Sequence[Tensor]) -> Tensor:
        if shape.window:
            return window_attention(inputs[0], terms, shape.grid, shape.window, shape.shift, shape.heads, backend=backend)
        return attention(*inputs, terms, shape.grid, backend=backend)

    return Method(backend, run, kind)


def global_softmax(shape: Shape, inputs: Sequence[Tensor], terms: Terms, fixed: Sequence[Tensor]) -> Tensor:
    """Global attention as explicit products and softmax in the inputs' dtype: q, k, v [B, H, N, D] -> [B, H, N, D]."""
    q, k, v = inputs
    bias = _global_bias(shape, q, terms, fixed)
    q, k = rotated(q, k, terms)
    logits = q @ k.mT * q.shape[-1] ** -0.5
    return (logits if bias is None else logits + bias).softmax(-1) @ v


def gathered_sdpa(shape: Shape, inputs: Sequence[Tensor], terms: Terms, fixed: Sequence[Tensor]) -> Tensor:
    """SDPA with a bias as in common models: gathered by a cached index, permuted to [1, H, N, N]; if shifted, per window."""
    if not shape.window:
        q, k, v = inputs
        bias = _global_bias(shape, q, terms, fixed)
        q, k = rotated(q, k, terms)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
    q, k, v = _partitioned(shape, inputs[0])  # [B*L, H, N, D]
    bias = _gathered(terms, fixed[2:])
    q, k = rotated(q, k, terms)
    if any(map(any, _steps(shape))):
        penalty = fixed[1][:, None]  # [L, 1, N, N]
        bias = (penalty if bias is None else bias + penalty).expand(len(penalty), shape.heads, -1, -1)
        bias = bias.repeat(len(q) // len(penalty), 1, 1, 1)
    bias = None if bias is None else bias.to(q.dtype)
    return _reversed(shape, F.scaled_dot_product_attention(q, k, v, attn_mask=bias))


def _gathered(terms: Terms, indices: Sequence[Tensor]) -> Tensor | None:
    """Return the sum of the tables' biases, gathered by rows and permuted to [1, H, N, N]."""
    if not terms.tables:
        return None
    biases = [
        table.bias.mT.contiguous()[index.flatten()].unflatten(0, index.shape).permute(2, 0, 1).contiguous()[None]
        for table, index in zip(terms.tables, indices, strict=True)
    ]
    return sum(biases[1:], biases[0])


def _global_bias(shape: Shape, q: Tensor, terms: Terms, indices: Sequence[Tensor]) -> Tensor | None:
    if shape.encoding != "decomposed":
        bias = _gathered(terms, indices)
        return None if bias is None else bias.to(q.dtype)
    grid, scale = shape.grid, q.shape[-1] ** -0.5
    rows, columns = (
        table.query[0].to(q.dtype)[index] for table, index in zip(terms.tables, indices, strict=True)
    )  # [h, h, D], [w, w, D]
    x = (q * scale).unflatten(2, (grid.h, grid.w))
    of_rows = torch.einsum("bnyxd,ykd->bnyxk", x, rows)[..., :, None]
    of_columns = torch.einsum("bnyxd,xkd->bnyxk", x, columns)[..., None, :]
    return (of_rows + of_columns).flatten(4).flatten(2, 3)  # [B, H, N, N]


def window_softmax(shape: Shape, inputs: Sequence[Tensor], terms: Terms, fixed: Sequence[Tensor]) -> Tensor:
    """Shifted-window attention as in common models: pad, roll, partition, softmax, reverse, roll, crop."""
    q, k, v = _partitioned(shape, inputs[0])  # [B*L, H, N, D]
    visible = fixed[0]
    bias = _gathered(terms, fixed[2:])
    q, k = rotated(q, k, terms)
    logits = q @ k.mT * q.shape[-1] ** -0.5
    logits = logits if bias is None else logits + bias.to(q.dtype)
    if any(map(any, _steps(shape))):
        logits = logits.unflatten(0, (-1, len(visible))).masked_fill(~visible[:, None], float("-inf")).flatten(0, 1)
    return _reversed(shape, logits.softmax(-1) @ v)


def _floor(shape: Shape, inputs: Sequence[Tensor], terms: Terms, fixed: Sequence[Tensor]) -> Tensor:
    """SDPA over as many scores without position; windows are consecutive tokens in memory, not regions of the image."""
    if not shape.window:
        return F.scaled_dot_product_attention(*inputs)
    (qkv,), (h, w) = inputs, shape.window
    heads = qkv.flatten(0, 2).unflatten(0, (-1, h * w)).unflatten(2, (3, shape.heads, shape.width))
    q, k, v = heads.permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(*qkv.shape[:3], -1)


def _steps(shape: Shape) -> tuple[list[int], list[int]]:
    """Return padding (at the bottom and right) and shift (0 along an axis that fits into one window), (h, w) each."""
    sides = list(zip(shape.grid[:2], shape.window, shape.shift, strict=True))
    return [-n % m for n, m, _ in sides], [s if n > m else 0 for n, m, s in sides]


def _partitioned(shape: Shape, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    padding, shift = _steps(shape)
    x = F.pad(qkv, (0, 0, 0, padding[1], 0, padding[0])) if any(padding) else qkv
    x = x.roll((-shift[0], -shift[1]), (1, 2)) if any(shift) else x
    (h, w), (b, rows, columns, _) = shape.window, x.shape
    x = x.view(b, rows // h, h, columns // w, w, 3, shape.heads, shape.width)
    return x.permute(5, 0, 1, 3, 6, 2, 4, 7).reshape(3, -1, shape.heads, h * w, shape.width).unbind(0)


def _reversed(shape: Shape, out: Tensor) -> Tensor:
    """Reverse `_partitioned`: [B*L, H, N, D] -> [B, h, w, C]."""
    padding, shift = _steps(shape)
    (h, w), rows, columns = shape.window, shape.grid.h + padding[0], shape.grid.w + padding[1]
    x = out.view(shape.batch, rows // h, columns // w, shape.heads, h, w, shape.width)
    x = x.permute(0, 1, 4, 2, 5, 3, 6).reshape(shape.batch, rows, columns, -1)
    x = x.roll(tuple(shift), (1, 2)) if any(shift) else x
    return x[:, : shape.grid.h, : shape.grid.w]


def outcome(problem: Problem, function: Function, training: bool) -> dict[str, Tensor]:
    """Return the output of a method and, if `training`, the gradients of the inputs and tables that it uses."""
    groups = [problem.inputs, problem.leaves]
    if training:
        groups = [{name: x.detach().requires_grad_() for name, x in group.items()} for group in groups]
    problem = problem._replace(inputs=groups[0], leaves=groups[1])
    with torch.set_grad_enabled(training):
        out = function(problem.shape, tuple(problem.inputs.values()), problem.terms(), problem.fixed)
    leaves = groups[0] | groups[1] if training else {}
    gradients = torch.autograd.grad(out, list(leaves.values()), problem.grad, allow_unused=True) if training else ()
    named = zip(leaves, gradients, strict=True)
    return {"output": out.detach()} | {name: x for name, x in named if x is not None}  # the floor uses no tables
