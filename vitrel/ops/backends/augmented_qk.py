"""Position as extra columns of q and k, so that plain flash attention runs it: exact, and nothing of size [N, N] exists.

A table over one axis is a sum over the places of that axis: with a one-hot column of k for every row of the grid, whatever a
query adds to the keys of a row is one number in its own column, logit[i, j] += scale * sum_y c[i, y] [y_j = y], where
c[i, y] = B_h[y_i - y] / scale for biases and q_i . R_h[y_i - y] for query tables. Key tables are the mirror image, one-hot
columns of q. One-hot columns of v return the attention that falls on every row, which value tables turn into their output.
Prefix tokens are one more place of the axis. A bias is rounded once to q's type, as a mask would be, and products with one-hots
are exact: unlike the coordinates y_i^2 - 2 y_i y_j + y_j^2 of a squared distance, nothing cancels, so no precision is refused.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrel.grid import Grid
from vitrel.ops.reference import Call, gather_bias, meets_content, query_logits, rotated, with_query_bias
from vitrel.ops.sdpa import KEY_ROTARY
from vitrel.position.terms import Table, Terms

_WIDEST = 256  # head width that flash attention takes
_WINDOWED = "shifted and padded windows need a mask, and flash attention takes none; the [N, N] of a window is small anyway"


def refuses(call: Call) -> str:
    terms, grid = call.terms, call.grid
    if call.entry == "window_attention":
        return _WINDOWED
    if any(table.axis == "hw" for table in terms.tables):
        return "a table over 'hw' is in general no sum of one over 'h' and one over 'w', which could be columns"
    if not terms.tables:
        return "there is no table to write as columns: scaled_dot_product_attention runs these terms as they are"
    if terms.key_rotary is not None:
        return KEY_ROTARY
    if call.mask is not None:
        return "flash attention takes no mask"
    if call.dropout_p and call.device.type == "cpu":
        return "flash attention has no dropout on a CPU"
    if call.dtype == torch.float64 and call.device.type != "cpu":
        return f"flash attention has no float64 on {call.device.type}"
    extra = _columns(terms, grid)
    if call.width + extra > _WIDEST:
        return (
            f"the {grid.h}x{grid.w} grid with {grid.prefix} prefix tokens needs {extra} columns beside the head width of "
            f"{call.width}, and flash attention takes {_WIDEST} in all"
        )
    return ""


def pays(call: Call) -> bool:
    """Whether "auto" should come here: on a CPU, for grids on which it was measured to be faster than any other.

    Over sdpa, one image, one thread of an EPYC: content tables forward 0.96 at 28x28 and 2.75 at 64x64, in training 0.81 and
    1.46 (results/benchmark/amd-epyc/ops). Not in a graph that serves other sizes too: under torch.compile the choice would cost
    another graph, torch.export refuses it.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or call.device.type != "cpu":
        return False
    tables, tokens = call.terms.tables, call.grid.tokens
    if any(table.value is not None for table in tables):  # else the plain reference serves them
        return tokens >= 196
    # A mask of biases alone is made once for all images, while the extra columns are multiplied for every one. (Of these calls
    # "auto" brings here only what bias_by_row refuses, which is faster and comes first.)
    shared = not meets_content(tables)
    if shared and 10 * call.batch * _columns(call.terms, call.grid) > tokens:
        return False
    return tokens >= ((4096 if shared else 2304) if call.grad else 1024)


def attention(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, grid: Grid, mask: Tensor | None = None, dropout_p: float = 0.0
) -> Tensor:
    """See vitrel.ops.attention. A bias of -inf acts as the lowest number of q's type: the same, unless it hides every key."""
    q = with_query_bias(q, terms)
    scale = terms.scale * q.shape[-1] ** -0.5
    factor = 1.0 if terms.temperature is None else terms.temperature.to(q.dtype)  # in q and in all columns but the biases
    turned_q, turned_k = rotated(q, k, terms)
    queries, keys, values, rows = [turned_q * factor], [turned_k], [v], []
    for axis in _axes(terms):
        tables = [table for table in terms.tables if table.axis == axis]
        classes, place = _places(grid, axis, q.device)
        own = place[-q.shape[-2] :]  # [M]
        one_hot = (place[:, None] == torch.arange(len(classes), device=q.device)).to(q.dtype)  # [N, K]
        if any(map(_asks_queries, tables)):
            queries.append(_query_columns(q, tables, classes[own], scale, factor))
            keys.append(one_hot)
        for table in tables:
            if table.key is not None:
                queries.append(one_hot[-q.shape[-2] :] * factor)
                score, index = k @ table.key.to(k.dtype).mT, classes.mT[place]  # [B, H, N, R], [N, K]
                keys.append(score.gather(-1, index.expand(*score.shape[:-1], -1)))
            if table.value is not None:
                values.append(one_hot)
                rows.append((table.value, classes[own]))
    wide_q, wide_k, wide_v = _joined(queries, keys, values)
    out = F.scaled_dot_product_attention(wide_q, wide_k, wide_v, dropout_p=dropout_p, scale=scale)
    return _with_values(out, v.shape[-1], rows)


def _asks_queries(table: Table) -> bool:
    return table.bias is not None or table.query is not None or table.gated is not None


def _axes(terms: Terms) -> list[str]:
    return [axis for axis in ("h", "w") if any(table.axis == axis for table in terms.tables)]


def _columns(terms: Terms, grid: Grid) -> int:
    """Columns beside the head width, of q and k or of v, whichever has more."""
    logits = values = 0
    for axis in _axes(terms):
        tables = [table for table in terms.tables if table.axis == axis]
        places = (grid.h if axis == "h" else grid.w) + (1 if grid.prefix else 0)
        logits += places * (any(map(_asks_queries, tables)) + sum(table.key is not None for table in tables))
        values += places * sum(table.value is not None for table in tables)
    return max(logits, values)


def _places(grid: Grid, axis: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Of the K places of an axis, prefix tokens being the first: offset classes [K, K], and the place of every token [N]."""
    line = Grid(grid.h if axis == "h" else grid.w, 1, 1 if grid.prefix else 0)
    place = grid.coordinates(device)[:, "hw".index(axis)] + line.prefix
    return line.index("h", device), F.pad(place, (grid.prefix, 0))


def _query_columns(q: Tensor, tables: list[Table], index: Tensor, scale: float, factor: float | Tensor) -> Tensor:
    """What queries add to the keys of every place, over `scale`: [(B,) H, M, K] by the offset classes [M, K]."""
    columns = []
    for table in tables:
        if table.bias is not None:
            bias = gather_bias(table.bias, index)
            columns.append(bias.to(torch.promote_types(bias.dtype, q.dtype)) / scale)
        columns += query_logits(q, table, index, factor)
    largest = torch.finfo(_computed_in(q)).max  # -inf times the zeros of a one-hot would be NaN
    return sum(columns[1:], columns[0]).clamp(-largest, largest).to(q.dtype)


def _computed_in(q: Tensor) -> torch.dtype:
    """The type in which scaled_dot_product_attention takes q, which autocast rounds."""
    device = q.device.type
    rounds = torch.is_autocast_enabled(device) and q.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return torch.get_autocast_dtype(device) if rounds else q.dtype


def _joined(*sides: list[Tensor]) -> list[Tensor]:
    """Each side's columns in one tensor [B, H, M or N, W], zeros behind: flash wants one W, in steps of 8."""
    width = -(-max(sum(part.shape[-1] for part in side) for side in sides) // 8) * 8
    joined = []
    for side in sides:
        x = torch.cat([part.expand(*side[0].shape[:-1], -1) for part in side], -1)
        joined.append(F.pad(x, (0, width - x.shape[-1])))
    return joined


def _with_values(out: Tensor, width: int, rows: list[tuple[Tensor, Tensor]]) -> Tensor:
    """[B, H, M, W] -> [B, H, M, D], with value tables [H|1, R, D] times the attention on their places, by classes [M, K]."""
    total, at = out[..., :width], width
    for value, index in rows:
        mass = out[..., at : at + index.shape[-1]]  # of all keys of a place, so of an offset class
        at += index.shape[-1]
        by_class = mass.new_zeros(*mass.shape[:-1], value.shape[-2]).scatter(-1, index.expand(mass.shape), mass)
        total = total + by_class @ value.to(mass.dtype)
    return total
