"""Per-axis tables as extra columns of q and k, so that plain flash attention computes them exactly and without an [N, N]
tensor.

k receives a one-hot column for every row of the grid, and q a column with what the query adds to all keys of that row: logit[i,
j] += scale * sum_y c[i, y] [y_j = y], with c[i, y] = B_h[y_i - y] / scale for a bias table and q_i . R_h[y_i - y] for a query
table; likewise for grid columns and diagonals ("h+w"). For key tables the one-hot columns are in q. One-hot columns of v return
the attention weights summed over each row, from which value tables give their output. Prefix tokens count as one more row. A
bias is rounded once to q's type, as in a mask, and products with one-hot columns are exact, so every precision is served; gated
tables, which may cancel (`reference.gated_scores`), are served in full precision only.

In place of 1, k's one-hot columns hold a power of two between 2 / scale and 4 / scale, and q's columns are divided by it. So
they hold, in half precision, every bias that a mask of that precision can hold, and in place of -inf a number twice as low.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrel.grid import Grid
from vitrel.ops.reference import Call, gather_bias, query_logits, rotated, with_query_bias
from vitrel.ops.sdpa import HALF, SCALED_KEYS, computed_in, fused
from vitrel.position.terms import Table, Terms

_WIDEST = 256  # largest head width of flash attention on a GPU; on a CPU there is none


def refuses(call: Call) -> str:
    """Return the reason why a call cannot be computed by extra columns of q and k and flash attention, "" if it can."""
    tables, on_cpu = call.terms.tables, call.device.type == "cpu"
    if call.window is not None:
        return "shifted and padded windows need a mask, which flash attention does not take"
    if any([table.axis == "hw" for table in tables]):
        return "a table over 'hw' cannot be written as columns: it is in general not a sum of tables over 'h' and 'w'"
    if not tables:
        return "there is no table to write as columns: plain scaled_dot_product_attention computes these terms"
    if call.terms.key_rotary is not None:
        return SCALED_KEYS
    if call.mask is not None:
        return "flash attention takes no mask"
    if call.dropout_p and on_cpu:
        return "flash attention has no dropout on a CPU"
    if call.dtype == torch.float64 and not on_cpu:
        return f"flash attention has no float64 on {call.device.type}"
    if computed_in(call) in HALF and any([table.gated is not None for table in tables]):
        return "gated tables of several axes can cancel, so columns in half precision would be too coarse"
    grid, extra = call.grid, _columns(call.terms, call.grid)
    if not on_cpu and call.width + extra > _WIDEST:  # in a graph for any size, SDPA makes the same comparison
        return (
            f"the {grid.h}x{grid.w} grid with prefix={grid.prefix} needs {extra} columns besides the head width of "
            f"{call.width}, and flash attention takes {_WIDEST} in all"
        )
    return ""


def attention(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, grid: Grid, mask: Tensor | None = None, dropout_p: float = 0.0
) -> Tensor:
    """Compute attention with position terms, as vitrel.ops.attention, for calls of which `refuses` returns "".

    `mask` is not read. A bias of -inf becomes a finite number, which changes the result only for queries that see no key.
    """
    q = with_query_bias(q, terms)
    scale = terms.scale * q.shape[-1] ** -0.5
    factor = 1.0 if terms.temperature is None else terms.temperature.to(q.dtype)  # of q and all columns but those of biases
    one = 2.0 ** (math.ceil(-math.log2(scale)) + 1)
    rotated_q, rotated_k = rotated(q, k, terms)
    queries, keys, values, rows = [rotated_q * factor], [rotated_k], [v], []
    for axis in _axes(terms):
        tables = [table for table in terms.tables if table.axis == axis]
        classes, place = _places(grid, axis, q.device)
        query_place = place[-q.shape[-2] :]  # [M]
        one_hot = (place[:, None] == torch.arange(len(classes), device=q.device)).to(q.dtype)  # [N, K]
        if any(map(_adds_query_columns, tables)):
            queries.append(_query_columns(q, tables, classes[query_place], scale, factor, one))
            keys.append(one_hot * one)
        for table in tables:
            if table.key is not None:
                queries.append(one_hot[-q.shape[-2] :] * factor)
                score, index = k @ table.key.to(k.dtype).mT, classes.mT[place]  # [B, H, N, R], [N, K]
                keys.append(score.gather(-1, index.expand(*score.shape[:-1], -1)))
            if table.value is not None:
                values.append(one_hot)
                rows.append((table.value, classes[query_place]))
    all_q, all_k, all_v = _joined(queries, keys, values)
    out = fused(all_q, all_k, all_v, None, dropout_p, scale)
    return _with_values(out, v.shape[-1], rows)


def _adds_query_columns(table: Table) -> bool:
    return table.bias is not None or table.query is not None or table.gated is not None


def _axes(terms: Terms) -> list[str]:
    """Return the axes of the tables, each once, in the order "h", "w", "h+w" (diagonals, offset dy + dx); none is "hw"."""
    return [axis for axis in ("h", "w", "h+w") if any(table.axis == axis for table in terms.tables)]


def _columns(terms: Terms, grid: Grid) -> int:
    """Return by how many columns the tables on a grid widen each head: those of q and k or those of v, whichever are more."""
    logits = values = 0
    for axis in _axes(terms):
        tables = [table for table in terms.tables if table.axis == axis]
        places = grid.places(axis) + (1 if grid.prefix else 0)
        logits += places * (any(map(_adds_query_columns, tables)) + sum(table.key is not None for table in tables))
        values += places * sum(table.value is not None for table in tables)
    return max(logits, values)


def _places(grid: Grid, axis: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return offset classes [K, K] (query, key) between the K places of an axis, and the index of each token's place, [N].

    Places: one for all prefix tokens together, if there are any, then one for each row ("h"), column ("w") or diagonal ("h+w")
    of the grid.
    """
    line = Grid(grid.places(axis), 1, 1 if grid.prefix else 0)
    y, x = grid.coordinates(device).unbind(-1)
    place = (y if axis == "h" else x if axis == "w" else y + x) + line.prefix
    return line.index("h", device), F.pad(place, (grid.prefix, 0))


def _query_columns(q: Tensor, tables: list[Table], index: Tensor, scale: float, factor: float | Tensor, one: float) -> Tensor:
    """Return q's extra columns for bias, query and gated tables: what these add to the logits, divided by scale * one.

    Args:
        q: queries [B, H, M, D], before rotation, with its query_bias.
        tables: of one axis.
        index: offset class of query and place (of `_places`), [M, K].
        scale: of the content logits, without the temperature.
        factor: the temperature, which multiplies all but the biases.
        one: what the one-hot columns hold in place of 1.

    Returns:
        [B, H, M, K], or [H, M, K] from biases alone.
    """
    largest = torch.finfo(computed_in(q)).max
    columns = [logits for table in tables for logits in query_logits(q, table, index, factor / one)]
    biases = [gather_bias(table.bias, index) for table in tables if table.bias is not None]
    if biases:
        bias = sum(biases[1:], biases[0])
        bias = bias.to(torch.promote_types(bias.dtype, q.dtype))
        # As `reference.in_range`. The product of both columns, bias / scale, is in float32. -inf, which times the zeros of a
        # one-hot column would be NaN, is lower than all other biases.
        limit = min(largest, torch.finfo(torch.float32).max * scale / 4)
        columns.append(torch.where(bias == float("-inf"), -2 * limit, bias.clamp(-limit, limit)) / (scale * one))
    return sum(columns[1:], columns[0]).clamp(-largest, largest).to(q.dtype)


def _joined(*sides: list[Tensor]) -> list[Tensor]:
    """Return each list of columns (for queries, keys, values) joined and padded with zeros to a common W: [B, H, M or N, W].

    W is a multiple of 8, as flash attention requires.
    """
    width = -(-max(sum(part.shape[-1] for part in side) for side in sides) // 8) * 8
    joined = []
    for side in sides:
        x = torch.cat([part.expand(*side[0].shape[:-1], -1) for part in side], -1)
        joined.append(F.pad(x, (0, width - x.shape[-1])))
    return joined


def _with_values(out: Tensor, width: int, rows: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the output of attention, [B, H, M, D]: that of v plus that of the value tables.

    Args:
        out: SDPA's output [B, H, M, W], whose first D columns are the output of v.
        width: D.
        rows: (value table [H|1, R, D], offset class of query and place [M, K]) for each group of K further columns, which hold
            the attention weights summed over the keys of each place (row, column or diagonal); the rest is padding.
    """
    total, at = out[..., :width], width
    for value, index in rows:
        mass = out[..., at : at + index.shape[-1]]  # summed over all keys of a place, which share an offset class
        at += index.shape[-1]
        # Added, since a prefix query has one class for all rows.
        by_class = mass.new_zeros(*mass.shape[:-1], value.shape[-2]).scatter_add(-1, index.expand(mass.shape), mass)
        total = total + by_class @ value.to(mass.dtype)
    return total
