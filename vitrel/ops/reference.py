"""The definition of attention with position terms, in plain PyTorch, computed in at least float32.

Tests compare the outputs and all gradients of every other backend with this one. It serves every call.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrel.grid import Grid
from vitrel.ops.window import windows
from vitrel.position.terms import PositionEncoding, Table, Terms, no_autocast, parts_of


class Call(NamedTuple):
    """Description of one call of `attention` or `window_attention`, by which backends decide whether they serve it.

    It is built by keyword.

    Attributes:
        terms: on `grid`; for window_attention, on the window's grid.
        grid: of the keys; for window_attention, of the image.
        heads: number of heads H.
        width: width D of a head.
        queries: number of queries M; for window_attention, the tokens of the image.
        dtype: of q, k and v.
        device: of q, k and v.
        grad: whether q, k, v, the mask or a tensor of the terms needs a derivative.
        window: (h, w) in tokens for window_attention; None for attention.
        mask: as given to attention.
        dropout_p: probability of dropping an attention weight.
    """

    terms: Terms
    grid: Grid
    heads: int
    width: int
    queries: int
    dtype: torch.dtype
    device: torch.device
    grad: bool
    window: tuple[int, int] | None = None
    mask: Tensor | None = None
    dropout_p: float = 0.0


def refuses(call: Call) -> str:
    """Return "", since the reference serves every call; another backend returns the reason why it refuses one."""
    return ""


def needs_gradient(*tensors: Tensor | None) -> bool:
    """Return whether one of the tensors requires a gradient, and gradients are enabled; in forward-mode AD always True.

    Under torch.func.vmap, which hides that a tensor requires a gradient, the tensor inside its wrapper is asked.
    """
    if in_forward_mode():
        return True
    if not torch.is_grad_enabled():
        return False
    if not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None:
        return any([x is not None and _requires_grad(x) for x in tensors])
    return any([x is not None and x.requires_grad for x in tensors])


def in_forward_mode() -> bool:
    """Return whether this runs in torch.autograd.forward_ad.dual_level or torch.func.jvp, where tensors may carry tangents."""
    return torch.autograd.forward_ad._current_level >= 0  # noqa: SLF001  there is no public name


def _requires_grad(x: Tensor) -> bool:
    """Return whether x, or a tensor that transforms of torch.func have wrapped into it, requires a gradient."""
    functorch = torch._C._functorch
    while not x.requires_grad and functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return x.requires_grad


def attention(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, grid: Grid, mask: Tensor | None = None, dropout_p: float = 0.0
) -> Tensor:
    """Compute attention as vitrel.ops.attention, in at least float32 without autocast; the result has v's dtype.

    q, k and v may have any dimensions before [H, N, D]. Shapes are not checked.
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    with no_autocast(q.device):
        out = _attention(q.to(dtype), k.to(dtype), v.to(dtype), terms, grid, mask, dropout_p)
    return out.to(v.dtype)


def _attention(q: Tensor, k: Tensor, v: Tensor, terms: Terms, grid: Grid, mask: Tensor | None, dropout_p: float) -> Tensor:
    logits = masked_logits(q, k, terms, grid, mask)
    fully_masked = (logits == float("-inf")).all(-1, keepdim=True)  # fully masked queries return 0, not NaN
    p = logits.masked_fill(fully_masked, 0.0).softmax(-1).masked_fill(fully_masked, 0.0)
    p = F.dropout(p, dropout_p)
    out = p @ v
    for table in terms.tables:
        if table.value is not None:
            index = grid.index(table.axis, q.device)[-q.shape[-2] :]
            # The attention weights summed per offset class, times the value of the class.
            mass = p.new_zeros(*p.shape[:-1], table.value.shape[-2]).scatter_add(-1, index.expand(p.shape), p)
            out = out + mass @ table.value.to(p.dtype)
    return out


def masked_logits(q: Tensor, k: Tensor, terms: Terms, grid: Grid, mask: Tensor | None = None) -> Tensor:
    """Return the logits before the softmax with all position terms and the mask, [..., H, M, N].

    Args:
        q: [..., H, M, D], without rotation, query_bias and scale, which are applied here; the last M tokens of the key grid.
        k: [..., H, N, D], without rotation.
        terms: what an encoding returns for `grid`.
        grid: of the keys, N = grid.tokens.
        mask: broadcastable to the logits; a bool mask gives -inf where it is False, any other mask is added.
    """
    scale = terms.content_scale(q.shape[-1])
    q = with_query_bias(q, terms)
    rotated_q, rotated_k = rotated(q, k, terms)
    logits = rotated_q @ rotated_k.mT * scale
    bias = table_logits(q, k, terms.tables, grid, scale)
    logits = logits if bias is None else logits + in_range(bias, logits.dtype).to(logits.dtype)
    if mask is not None and mask.dtype == torch.bool:
        return logits.masked_fill(~mask, float("-inf"))
    return logits if mask is None else logits + in_range(mask, logits.dtype).to(logits.dtype)


def window_attention(
    qkv: Tensor,
    terms: Terms,
    grid: Grid,
    window: tuple[int, int],
    shift: tuple[int, int],
    num_heads: int,
    dropout_p: float = 0.0,
) -> Tensor:
    """Compute attention in windows, as vitrel.ops.window_attention: gather windows, apply `attention`, scatter back."""
    layout, batch = windows(grid.h, grid.w, window, shift, qkv.device), qkv.shape[0]
    n = window[0] * window[1]
    x = qkv.flatten(1, 2)[:, layout.source].flatten(0, 1)  # [B*L*N, 3C]
    x = x.unflatten(1, (3, num_heads, -1)).unflatten(0, (-1, n))  # [B*L, N, 3, H, D]
    q, k, v = x.permute(2, 0, 3, 1, 4).unbind(0)  # [B*L, H, N, D] each
    visible = layout.visible.repeat(batch, 1).unflatten(0, (-1, 1, n))  # [B*L, 1, N, N]
    out = attention(q, k, v, terms, Grid(*window), visible, dropout_p)
    out = out.transpose(1, 2).flatten(2).flatten(0, 1).unflatten(0, (batch, layout.source.shape[0]))  # [B, L*N, C]
    return out[:, layout.inverse].unflatten(1, (grid.h, grid.w))


def with_query_bias(q: Tensor, terms: Terms) -> Tensor:
    """Return q [..., H, M, D] plus Terms.query_bias in q's dtype; q itself if there is none."""
    return q if terms.query_bias is None else q + terms.query_bias[:, None].to(q.dtype)


def rotated(q: Tensor, k: Tensor, terms: Terms) -> tuple[Tensor, Tensor]:
    """Return q [..., H, M, D] and k [..., H, N, D] rotated by Terms.rotary, or as they are if it is None.

    Keys are rotated by Terms.key_rotary instead if it is given. Queries, the last M of the N tokens, take the last M angles.
    """
    if terms.rotary is None:
        return q, k
    if terms.key_rotary is None and q.shape == k.shape:  # both in one call: half as many operators
        q, k = rotate(torch.stack((q, k)), *(t.to(q.dtype) for t in terms.rotary)).unbind(0)
        return q, k
    cos, sin = (t[..., -q.shape[-2] :, :].to(q.dtype) for t in terms.rotary)
    key_rotary = terms.rotary if terms.key_rotary is None else terms.key_rotary
    return rotate(q, cos, sin), rotate(k, *(t.to(k.dtype) for t in key_rotary))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the channel pairs (p, p + D/2) of queries or keys, (a, b) to (a cos - b sin, b cos + a sin), as RoPE in DINOv3.

    The result has the type to which x and the angles promote, so cast the angles to x's dtype in half precision. Queries and
    keys of code that pairs channels (2p, 2p + 1) have to be reordered first, x.unflatten(-1, (-1, 2)).mT.flatten(-2) of both;
    their logits stay the same.

    Args:
        x: [..., N, D], D even.
        cos: cosines of the angles, broadcastable to [..., N, D/2]; 1 leaves a token as it is (class and register tokens).
        sin: sines of the angles, of the shape of cos; 0 leaves a token as it is.

    Returns:
        [..., N, D].
    """
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def table_logits(q: Tensor, k: Tensor, tables: Sequence[Table], grid: Grid, scale: float | Tensor) -> Tensor | None:
    """Return the sum of what bias, query, gated and key rows of all tables add to the logits; None if there are none.

    It is broadcastable to [..., H, M, N]. Value rows, which add to the output, are ignored.

    Args:
        q: [..., H, M, D], before rotation, with its query_bias: the last M of the grid's N tokens.
        k: [..., H, N, D], before rotation.
        tables: on `grid`.
        grid: of the N keys, prefix tokens included.
        scale: Terms.content_scale(D), a factor of all but the biases.
    """
    total = None
    for table in tables:
        index = grid.index(table.axis, q.device)[-q.shape[-2] :]  # [M, N]
        for logits in _of_table(q, k, table, index, scale):  # one at a time, since each may have all pairs
            total = logits if total is None else total + logits
    return total


def _of_table(q: Tensor, k: Tensor, table: Table, index: Tensor, scale: float | Tensor) -> Iterator[Tensor]:
    if table.bias is not None:
        yield gather_bias(table.bias, index)
    yield from query_logits(q, table, index, scale)
    if table.key is not None:
        score = (k * scale) @ table.key.to(k.dtype).mT  # [..., H, N, R]
        yield score.gather(-1, index.mT.expand(*score.shape[:-2], *index.mT.shape)).mT


def gather_bias(bias: Tensor, index: Tensor) -> Tensor:
    """Return the bias of every query and key, [H, M, N], from a table `bias` [H, R] and the offset classes `index` [M, N]."""
    return bias.index_select(1, index.flatten()).unflatten(1, index.shape)


def query_logits(q: Tensor, table: Table, index: Tensor, scale: float | Tensor) -> list[Tensor]:
    """Return a list of one tensor, the logits [..., H, M, N] that query and gated rows of a table add; [] if it has neither.

    Args:
        q: [..., H, M, D], before rotation, with its query_bias.
        table: whose rows are read.
        index: offset class of each pair, [M, N].
        scale: factor of these logits.
    """
    scores = []
    if table.query is not None:
        scores.append((q * scale) @ table.query.to(q.dtype).mT)  # [..., H, M, R]
    if table.gated is not None:
        scores.append(gated_scores(q, table.gated, scale))
    return [sum(scores[1:], scores[0]).gather(-1, index.expand(*q.shape[:-2], *index.shape))] if scores else []


def gated_scores(q: Tensor, gated: tuple[Tensor, Tensor], scale: float | Tensor) -> Tensor:
    """Return scale * softplus(q gates^T) rows^T, what Table.gated = (gates, rows) adds to the logits, [..., H, M, R].

    R counts offset classes. The result is in at least float32. Tables of several axes can cancel (vitrel.position.pape), so the
    caller adds them all before it rounds the sum.
    """
    gates, rows = (t.to(torch.promote_types(q.dtype, torch.float32)) for t in gated)
    with no_autocast(q.device):
        return F.softplus(q.to(gates.dtype) @ gates.mT) * scale @ rows.mT


def in_range(bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a bias or additive mask, limited except -inf to the range of `dtype`, in which it will be added to logits.

    Else a large penalty would become -inf, which hides a pair, and a large bonus inf, whose softmax is NaN. The
    result is not rounded to `dtype`. Every backend applies this rule where a bias enters a type of smaller range.
    """
    limits = torch.finfo(dtype)
    if torch.finfo(bias.dtype).max <= limits.max:
        return bias
    bias = bias.to(torch.promote_types(bias.dtype, dtype))  # bfloat16 has no 65504
    return torch.where(bias == float("-inf"), bias, bias.clamp(limits.min, limits.max))


def lattice_bias(terms: Terms, grid: Grid, dtype: torch.dtype) -> Tensor | None:
    """Return the sum of all bias tables, of any axis, as one table over the offsets (dy, dx); None if there is no bias.

    Args:
        terms: whose tables are summed.
        grid: of the tables.
        dtype: in which the bias will be added to logits, see `in_range`; the table is not rounded to it.

    Returns:
        [H, R], with the prefix classes last.
    """
    tables = [table for table in terms.tables if table.bias is not None]
    if not tables:
        return None
    return in_range(sum((_on_lattice(table, grid) for table in tables[1:]), _on_lattice(tables[0], grid)), dtype)


def position_bias(layer: nn.Module, grid: Grid | tuple[int, int] | tuple[int, int, int] | None = None) -> Tensor:
    """Return what position adds to the attention logits on a grid, [H, N, N] for query i and key j, before softmax.

    An encoding without a bias ("none") gives zeros [1, N, N]. A temperature, which multiplies content, is no part of it.

    >>> vitrel.position_bias(model.blocks[0])

    Args:
        layer: an encoding, from `create_position`; or a block or RelativeAttention, which holds one as `position`.
        grid: (h, w), or (h, w, prefix) with class and register tokens, in tokens; None: that of training.

    Raises:
        TypeError: the layer holds no encoding, as a block of a model whose blocks share one (model.shared_position).
        ValueError: the encoding depends on content (it rotates, or its rows multiply queries or keys), or adds to tokens; or
            it has no training grid, and none is given.
    """
    encoding = layer if isinstance(layer, PositionEncoding) else getattr(layer, "position", None)
    if not isinstance(encoding, PositionEncoding):
        where = "of vitrel.inspect.attention.record(model, images) for any model, or of model.shared_position"
        raise TypeError(f"{type(layer).__name__} holds no encoding of vitrel: take the position {where}")
    if grid is None:
        grid = next((part.grid for part in parts_of(encoding) if part.grid is not None), None)
        if grid is None:
            raise ValueError(f"{type(encoding).__name__} has no training grid: pass grid=(h, w)")
    grid = Grid(*grid)
    terms = encoding(grid)
    name = type(encoding).__name__
    if terms.tokens is not None:
        raise ValueError(f"{name} adds rows to the tokens, and nothing to attention logits: see encoding(grid).tokens")
    if terms.rotary is not None or terms.query_bias is not None or has_content_terms(terms.tables):
        what = "rotates queries and keys" if terms.rotary is not None else "has rows for queries, keys or values"
        raise ValueError(f"{name} {what}, so what it adds depends on content: see vitrel.explain for given queries and keys")
    bias = lattice_bias(terms, grid, torch.float32)
    if bias is None:
        return torch.zeros(1, grid.tokens, grid.tokens)
    return gather_bias(bias, grid.index(device=bias.device))


def _on_lattice(table: Table, grid: Grid) -> Tensor:
    """Return a table's bias over any axis as one over "hw": [H, R], by offset (dy, dx), with the prefix classes last."""
    if table.axis == "hw":
        return table.bias  # type: ignore[return-value]  # lattice_bias passes tables with a bias only
    rows = rows_by_offset(table.bias[..., None], table.axis, grid).expand(-1, 2 * grid.h - 1, 2 * grid.w - 1, -1)
    return torch.cat((rows.flatten(1), table.bias[:, grid.offset_classes(table.axis) :]), 1)


def rows_by_offset(rows: Tensor, axis: str, grid: Grid) -> Tensor:
    """Return the rows of a table arranged by their ascending offsets (dy, dx): [H, R, D] -> [H, 2h-1, 2w-1, D], a view.

    A table over "h" gives [H, 2h-1, 1, D], one over "w" [H, 1, 2w-1, D]. In one over "h+w" (diagonals) a row serves all offsets
    with one sum dy + dx, which share its memory. The rows of prefix tokens, which come last, are dropped.

    Args:
        rows: [H, R, D], by offset class; D is any number of values.
        axis: of the table: "hw", "h", "w" or "h+w".
        grid: of the table, h x w.
    """
    rows = rows[:, : grid.offset_classes(axis)]
    if axis == "h+w":
        return rows.unfold(1, 2 * grid.w - 1, 1).mT
    return rows.unflatten(1, (2 * grid.h - 1 if "h" in axis else 1, 2 * grid.w - 1 if "w" in axis else 1))


def has_content_terms(tables: Sequence[Table]) -> bool:
    """Return whether a table has rows for queries, keys, values or gates, and so is more than a bias."""
    return any(part is not None for table in tables for part in (table.query, table.key, table.value, table.gated))
