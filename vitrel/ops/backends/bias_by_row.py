"""Bias tables on a CPU, one row of the image after the other, forward and backward: nothing of size [N, N] exists.

With the keys in raster order, a query at (y, x) reads B[y - y', x - x'] along a line of N numbers. For every x the lines of all
rows y are windows into one longer line (they differ by where they begin), so that the lattice expanded to [H, w, (2h-1) w]
holds every bias: the queries of a row of the image read a slice of it. Its size is 2 N w a head, on a square grid that of
N**1.5. scaled_dot_product_attention then runs a few rows at a time, in its flash kernel, and the backward pass recomputes them.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrel.grid import Grid
from vitrel.ops.reference import Call, lattice_bias, meets_content
from vitrel.ops.sdpa import KEY_ROTARY, prepare
from vitrel.position.terms import Terms, no_autocast, upcast

_WINDOWED = "windows are small: their biases are no burden"
QUERIES = 256  # at most in one block; the backward pass holds all scores of a block
_NUMBERS = 1 << 23  # at most in the biases of a block: arrays above 32 MB come fresh from the system, page by page


def refuses(call: Call) -> str:
    tables = call.terms.tables
    if call.entry == "window_attention":
        return _WINDOWED
    if meets_content(tables):
        return "a table that meets queries, keys, values or gates is no bias of the image's rows"
    if all(table.bias is None for table in tables):
        return "there is no table whose biases could be a burden"
    if call.terms.key_rotary is not None:
        return KEY_ROTARY
    if call.device.type != "cpu":
        return f"it is slow on {call.device.type}, which would have to start a kernel for every row of the image"
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return "a graph would hold every row of the image by itself, and serve no other grid"
    if torch._C._are_functorch_transforms_active():
        return "its backward pass is for backward() alone, not for transforms of torch.func"
    if call.mask is not None or call.dropout_p:
        return "it takes no mask and no dropout of attention weights"
    if call.queries != call.grid.tokens:
        return "it takes the queries of the whole grid, not of its last rows"
    return ""


def pays(call: Call) -> bool:
    """Whether it was measured to be faster than a mask of [H, N, N]; it needs far less memory anywhere.

    Over sdpa, one thread of an EPYC (results/benchmark/amd-epyc/ops): forward 0.98 at 14x14, 1.21 at 28x28, 2.6 at 64x64; in
    training 0.97 at 28x28 with one table and 1.05 with two, 1.68 at 64x64. With biases that nothing learns SDPA's backward pass
    is a flash kernel too, and faster until masks are large.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False  # a question about the size would cost another compiled graph
    biases = [table.bias for table in call.terms.tables if table.bias is not None]
    if call.grad and not any(bias.requires_grad for bias in biases):
        return call.grid.tokens >= 4096
    return call.grid.tokens >= (784 if len(biases) > 1 or not call.grad else 1024)


def attention(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, grid: Grid, mask: Tensor | None = None, dropout_p: float = 0.0
) -> Tensor:
    """See vitrel.ops.attention."""
    if torch.is_autocast_enabled("cpu"):  # SDPA would cast them inside, where the backward pass does not know of it
        q, k, v = (x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype("cpu")) for x in (q, k, v))
    shape = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    q, k, _, scale = prepare(q, k, terms._replace(tables=()), grid)
    q, k, v = (x.expand(*shape, *x.shape[-2:]).reshape(-1, shape[-1], *x.shape[-2:]) for x in (q, k, v))
    lines, prefix = expanded(lattice_bias(terms, grid), grid)
    out = _Rows.apply(q, k, v, lines, prefix, grid, scale)
    return out.view(*shape, *out.shape[-2:])


def expanded(bias: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Lattice [H, R] -> its lines [H, w, (2h-1) w] and the biases of the prefix tokens [H, 3] (or [H, 0]).

    The bias of the query (y, x) at the key (y', x') is lines[:, x, (h-1 - y + y') w + x'].
    """
    n = grid.offset_classes()
    lattice = bias[:, :n].unflatten(1, (2 * grid.h - 1, 2 * grid.w - 1)).flip(1)  # keys further down come later
    x = torch.arange(grid.w, device=bias.device)
    column = x[:, None] - x + grid.w - 1  # [w, w]
    lines = lattice.index_select(2, column.flatten()).unflatten(2, column.shape)  # [H, 2h-1, w, w]
    return lines.transpose(1, 2).flatten(2), bias[:, n:]


class QueryBlock(NamedTuple):
    """Some queries, all in the prefix or whole rows of the image: their tokens, and their first row, None in the prefix."""

    tokens: slice
    first: int | None


def query_blocks(grid: Grid, queries: int) -> list[QueryBlock]:
    """All queries of a grid in the order of tokens, in blocks of at most `queries`, but of at least one row."""
    step, p = max(1, queries // grid.w), grid.prefix
    found = [QueryBlock(slice(0, p), None)] if p else []
    for y in range(0, grid.h, step):
        found.append(QueryBlock(slice(p + y * grid.w, p + min(y + step, grid.h) * grid.w), y))
    return found


def row_bias(lines: Tensor, prefix: Tensor, grid: Grid, rows: QueryBlock) -> Tensor:
    """Biases of some queries [H, M, N], from what `expanded` returns."""
    (h, w, p), count = grid, rows.tokens.stop - rows.tokens.start
    if rows.first is None:
        return torch.cat((prefix[:, 2:].expand(-1, p), prefix[:, :1].expand(-1, h * w)), 1)[:, None].expand(-1, count, -1)
    if not p and count == w:
        return lines[:, :, line(grid, rows.first)]
    out = lines.new_empty(lines.shape[0], count, grid.tokens)
    if p:
        out[..., :p] = prefix[:, 1, None, None]
    for at in range(0, count, w):
        out[:, at : at + w, p:] = lines[:, :, line(grid, rows.first + at // w)]
    return out


def line(grid: Grid, y: int) -> slice:
    """Where the queries of row y find their biases along `lines`."""
    return slice((grid.h - 1 - y) * grid.w, (2 * grid.h - 1 - y) * grid.w)


def softmax_under(*biases: Tensor) -> Callable[..., Tensor]:
    """The softmax for logits with these biases: where one hides a key, the slower that gives 0 to a query that sees none."""
    return torch._safe_softmax if any(bias.isneginf().any() for bias in biases) else torch.softmax


class _Rows(torch.autograd.Function):
    """(q, k, v [B, H, N, D], lines, prefix) -> [B, H, N, D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, lines: Tensor, prefix: Tensor, grid: Grid, scale: float) -> Tensor:
        out = v.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)  # as a linear layer takes it
        own = lines.to(q.dtype), prefix.to(q.dtype)
        for rows in query_blocks(grid, min(QUERIES, _NUMBERS // (q.shape[1] * q.shape[2]))):
            bias = row_bias(*own, grid, rows)[None]
            part = F.scaled_dot_product_attention(q[:, :, rows.tokens], k, v, attn_mask=bias, scale=scale)
            out[:, :, rows.tokens] = part
        ctx.save_for_backward(q, k, v, lines, prefix, out)
        ctx.grid, ctx.scale = grid, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # else the second derivative would silently lack this part
            raise RuntimeError("backend 'bias_by_row' has no second derivatives; use vitrel.ops.use_backend('reference')")
        saved = ctx.saved_tensors
        q, k, v, lines, prefix, out = map(upcast, saved)
        dq, dk, dv, dlines, dprefix = found = [torch.zeros_like(x) for x in (q, k, v, lines, prefix)]
        biases = lines.to(saved[0].dtype), prefix.to(saved[0].dtype)  # rounded as in the forward pass
        softmax = softmax_under(*biases)
        with no_autocast(q.device):
            for rows in query_blocks(ctx.grid, QUERIES):
                own, do = q[:, :, rows.tokens] * ctx.scale, upcast(grad[:, :, rows.tokens])
                bias = upcast(row_bias(*biases, ctx.grid, rows))
                weights = softmax((own @ k.mT).add_(bias), -1)  # [B, H, M, N]
                dv += weights.mT @ do
                d = do @ v.mT
                d.sub_((do * out[:, :, rows.tokens]).sum(-1, keepdim=True)).mul_(weights)
                dq[:, :, rows.tokens] = (d @ k).mul_(ctx.scale)
                dk += d.mT @ own
                if ctx.needs_input_grad[3]:
                    _add_row_bias(dlines, dprefix, d.sum(0), ctx.grid, rows)
                del bias, weights, d  # before those of the next block exist
        return *(g.to(x.dtype) for g, x in zip(found, saved, strict=False)), None, None


def _add_row_bias(lines: Tensor, prefix: Tensor, bias: Tensor, grid: Grid, rows: QueryBlock) -> None:
    """The transpose of `row_bias`: adds biases of some queries [H, M, N] to what they were read from."""
    p, w = grid.prefix, grid.w
    if p:
        prefix[:, 2 if rows.first is None else 1] += bias[..., :p].sum((1, 2))
    if rows.first is None:
        prefix[:, 0] += bias[..., p:].sum((1, 2))
        return
    for at in range(0, bias.shape[1], w):
        lines[:, :, line(grid, rows.first + at // w)] += bias[:, at : at + w, p:]
