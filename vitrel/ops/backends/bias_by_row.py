"""Attention with bias tables on a CPU, by blocks of image rows, forward and backward, without an [N, N] tensor.

It is for about 1,000 tokens and more, from which it was measured faster than `sdpa` (docs/concepts/backends.md).

With keys in raster order, the query at (y, x) needs a line of N biases B[y - y', x - x']. For one x, the lines of all rows y
are windows into one longer line that differ in where they begin. So the table, expanded to [H, w, (2h-1) w], holds every bias,
and the queries of an image row read a slice of it. That is about 2 N w numbers per head, on a square grid 2 N^1.5.
scaled_dot_product_attention runs its flash kernel on a few rows at a time; the backward pass computes the weights again.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrel.grid import Grid
from vitrel.ops.reference import lattice_bias
from vitrel.ops.sdpa import prepare
from vitrel.position.terms import Terms, no_autocast, upcast

QUERIES = 256  # maximum in a block, of which the backward pass stores all scores
_NUMBERS = 1 << 23  # maximum biases of a block (32 MB); larger arrays are slow to allocate, page by page


def attention(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, grid: Grid, mask: Tensor | None = None, dropout_p: float = 0.0
) -> Tensor:
    """Compute attention with position terms; arguments and result as in vitrel.ops.attention."""
    if torch.is_autocast_enabled("cpu"):  # cast here, since the backward pass would not see casts inside SDPA
        q, k, v = (x if x.dtype == torch.float64 else x.to(torch.get_autocast_dtype("cpu")) for x in (q, k, v))
    shape = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    q, k, _, scale = prepare(q, k, terms._replace(tables=()), grid)
    q, k, v = (x.expand(*shape, *x.shape[-2:]).reshape(-1, shape[-1], *x.shape[-2:]) for x in (q, k, v))
    lines, prefix = expanded(lattice_bias(terms, grid, q.dtype), grid)
    out = _Rows.apply(q, k, v, lines, prefix, grid, scale)
    return out.view(*shape, *out.shape[-2:])


def expanded(bias: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """Expand a table [H, R] to its lines [H, w, (2h-1) w], and return the biases of prefix tokens [H, 3] (or [H, 0]) beside it.

    The bias of query (y, x) at key (y', x') is lines[:, x, (h-1 - y + y') w + x'].
    """
    n = grid.offset_classes()
    lattice = bias[:, :n].unflatten(1, (2 * grid.h - 1, 2 * grid.w - 1)).flip(1)  # lower keys come later
    x = torch.arange(grid.w, device=bias.device)
    column = x[:, None] - x + grid.w - 1  # [w, w]
    lines = lattice.index_select(2, column.flatten()).unflatten(2, column.shape)  # [H, 2h-1, w, w]
    return lines.transpose(1, 2).flatten(2), bias[:, n:]


class QueryBlock(NamedTuple):
    """A block of queries, either the prefix tokens or whole image rows."""

    tokens: slice  # of the block, among all queries
    first: int | None  # first image row; None: prefix tokens


def query_blocks(grid: Grid, queries: int) -> list[QueryBlock]:
    """Split the queries of a grid, in token order: all prefix tokens as one block, if any, then blocks of whole image rows.

    A block has as many rows as fit into `queries` queries, but at least one.
    """
    step, p = max(1, queries // grid.w), grid.prefix
    blocks = [QueryBlock(slice(0, p), None)] if p else []
    for y in range(0, grid.h, step):
        blocks.append(QueryBlock(slice(p + y * grid.w, p + min(y + step, grid.h) * grid.w), y))
    return blocks


def row_bias(lines: Tensor, prefix: Tensor, grid: Grid, rows: QueryBlock) -> Tensor:
    """Return the biases of a block of queries, [H, M, N]. Not to be changed in place: it may be a view.

    Args:
        lines: of `expanded`.
        prefix: of `expanded`.
        grid: of the tokens.
        rows: the block.
    """
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
    """Return the slice of the last dimension of `lines` (see `expanded`) for the queries of image row y at patch keys."""
    return slice((grid.h - 1 - y) * grid.w, (2 * grid.h - 1 - y) * grid.w)


def softmax_under(*biases: Tensor) -> Callable[..., Tensor]:
    """Return the softmax for logits with these biases: if one is -inf, a slower one that gives 0 to fully masked queries."""
    return torch._safe_softmax if any(bias.isneginf().any() for bias in biases) else torch.softmax


class _Rows(torch.autograd.Function):
    """Autograd function of (q, k, v [B, H, N, D], lines and prefix as of `expanded`, grid, scale) -> [B, H, N, D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, lines: Tensor, prefix: Tensor, grid: Grid, scale: float) -> Tensor:
        out = v.new_empty(q.shape[0], q.shape[2], q.shape[1], v.shape[3]).transpose(1, 2)  # as the next layer needs it
        biases = lines.to(q.dtype), prefix.to(q.dtype)
        for rows in query_blocks(grid, min(QUERIES, _NUMBERS // (q.shape[1] * q.shape[2]))):
            bias = row_bias(*biases, grid, rows)[None]
            part = F.scaled_dot_product_attention(q[:, :, rows.tokens], k, v, attn_mask=bias, scale=scale)
            out[:, :, rows.tokens] = part
        ctx.save_for_backward(q, k, v, lines, prefix, out)
        ctx.grid, ctx.scale = grid, scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # otherwise second derivatives would silently lack this part
            raise RuntimeError("backend 'bias_by_row' has no second derivatives; use vitrel.ops.use_backend('reference')")
        saved = ctx.saved_tensors
        q, k, v, lines, prefix, out = map(upcast, saved)
        dq, dk, dv, dlines, dprefix = grads = [torch.zeros_like(x) for x in (q, k, v, lines, prefix)]
        biases = lines.to(saved[0].dtype), prefix.to(saved[0].dtype)  # rounded as in the forward pass
        softmax = softmax_under(*biases)
        with no_autocast(q.device):
            for rows in query_blocks(ctx.grid, QUERIES):
                block_q, do = q[:, :, rows.tokens] * ctx.scale, upcast(grad[:, :, rows.tokens])
                bias = upcast(row_bias(*biases, ctx.grid, rows))
                weights = softmax((block_q @ k.mT).add_(bias), -1)  # [B, H, M, N]
                dv += weights.mT @ do
                d = do @ v.mT
                d.sub_((do * out[:, :, rows.tokens]).sum(-1, keepdim=True)).mul_(weights)
                dq[:, :, rows.tokens] = (d @ k).mul_(ctx.scale)
                dk += d.mT @ block_q
                if ctx.needs_input_grad[3]:
                    _add_row_bias(dlines, dprefix, d.sum(0), ctx.grid, rows)
                del bias, weights, d  # free them before the next block allocates its own
        return *(g.to(x.dtype) for g, x in zip(grads, saved, strict=False)), None, None


def _add_row_bias(lines: Tensor, prefix: Tensor, bias: Tensor, grid: Grid, rows: QueryBlock) -> None:
    """Add the gradient of a block's biases [H, M, N] to the gradients `lines` and `prefix`, in place.

    It is the transpose of `row_bias`.
    """
    p, w = grid.prefix, grid.w
    if p:
        prefix[:, 2 if rows.first is None else 1] += bias[..., :p].sum((1, 2))
    if rows.first is None:
        prefix[:, 0] += bias[..., p:].sum((1, 2))
        return
    for at in range(0, bias.shape[1], w):
        lines[:, :, line(grid, rows.first + at // w)] += bias[:, at : at + w, p:]
