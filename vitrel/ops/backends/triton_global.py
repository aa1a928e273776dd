"""Kernels of global attention with a bias table or per-axis query scores, in Triton: forward and backward, no [N, N] tensor.

Forward: flash attention (online softmax, arXiv 2205.14135). A program computes BLOCK_M queries of one head and iterates over
the keys in tiles. It stores the log-sum-exp of every query, from which the backward pass computes the weights again.

Bias table: the offset class of query i and key j is line(i) - cell(j), with line(i) = (y + h-1)(2w-1) + x + w-1 and cell(j) = y
(2w-1) + x, so one subtraction per score gives it. A tile of a rows of queries and b rows of keys reads a+b-1 lines of the
table, each contiguous and at most 2w-1 long (from L1; staged through shared memory as the keys are). A tile is any BLOCK_N
consecutive patch keys, so no lane is wasted for any w. Prefix keys are a tile of 16 lanes.

Row and column scores need tiles aligned with image rows: a tile then holds as many whole rows as fit (two rows of 14 fill 28 of
32 lanes), or a chunk of a wider row. A row score is one value per query and row of the tile; the column scores of a chunk stay
in registers for all rows of the image.

Registers (float32): logits, then weights [BLOCK_M, BLOCK_N], out [BLOCK_M, D], maximum and sum per query, and with column
scores another [BLOCK_M, BLOCK_N]. Matrix products read queries, keys and values from shared memory.
Bytes moved, per head: q, out and lse once; k and v once per tile of queries (from L2); table, row and column scores once.

Backward: three kernels compute the weights again, p = exp(logit - lse), and ds = p (grad_out.v - out.grad_out), tile by tile.
Their results are bitwise equal in every run.

- `_queries`: a program owns BLOCK_M queries and iterates over keys: dq, row and column gradients, the sum of ds at prefix keys.
- `_keys`: a program owns BLOCK_N keys and iterates over queries, with transposed logits: dk and dv.
- `_table`: a program owns one offset between tiles aligned with image rows (as many whole rows as fit into BLOCK lanes, or a
  chunk of one row) and iterates over all pairs of tiles with that offset, so that each pair of lanes has a fixed offset class
  and ds is summed in registers. At the end one gather rotates the rows of this sum, so that diagonals become columns, whose
  sums are added to the table. This computes 2 of the 9 matrix products of the backward pass, and avoids one atomic addition per
  score. At most two programs add to one class, so their order does not matter; if there are too few programs, the batch is
  split, and torch sums the parts.

Registers (float32): logits and ds of a tile; dq [BLOCK_M, D] and the column gradient [BLOCK_M, BLOCK_N]; dk and dv [BLOCK_N,
D]; the table's logits and ds [BLOCK, BLOCK].

Bytes moved, per head: `_queries` as the forward kernel, and out, grad_out and dq once; `_keys` k, v, dk and dv once, q and
grad_out once per tile of keys; `_table` q, k, v and grad_out once per offset of tiles (from L2). Scratch memory (float32): [B,
H, M], twice with a bias and prefix tokens; [splits, H, R], with at most B and 1024 / programs per head splits; for rows of
several chunks, the row gradient once per chunk.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrel.grid import Grid
from vitrel.ops.backends import triton_tiles
from vitrel.ops.backends.triton_tiles import Tile, global_tile
from vitrel.ops.backends.triton_window import LOG2_E

WIDTHS = (16, 32, 64, 128)  # head widths D
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PREFIX_LANES = tl.constexpr(16)  # lanes of the tile of prefix keys, the minimum of a matrix product


def global_limits(dtype: torch.dtype, width: int, grid: Grid, queries: int, axis_scores: bool = False) -> str:
    """Return the reason why the kernels do not serve a call, or "".

    Args:
        dtype: of q, k and v.
        width: width D of a head.
        grid: of the keys.
        queries: number of queries M.
        axis_scores: with row or column scores.
    """
    if dtype not in DTYPES:
        return f"the kernel supports float32, float16 and bfloat16, not {dtype}"
    if width not in WIDTHS:
        return f"the kernel supports head widths {', '.join(map(str, WIDTHS))}, not {width}"
    if grid.prefix > PREFIX_LANES.value:
        return f"the kernel supports up to {PREFIX_LANES.value} prefix tokens, not {grid.prefix}"
    if grid.prefix and axis_scores:
        return "the kernel has no row and column scores for prefix tokens, and the grid has prefix tokens"
    if queries != grid.tokens and (queries % grid.w or not 0 < queries <= grid.h * grid.w):
        return f"{queries} queries are neither all {grid.tokens} tokens of the grid nor its last whole rows of {grid.w}"
    return ""


def biased_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    row_scores: Tensor | None,
    column_scores: Tensor | None,
    grid: Grid,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return softmax(scale * q.k + bias[class] + row_scores[.., y of key] + column_scores[.., x of key]) v and its log-sum-exp.

    Args:
        q: [B, H, M, D], of one dtype with k and v, any strides; the last M tokens of the key grid, all tokens or whole rows.
        k: [B, H, N, D].
        v: [B, H, N, D].
        bias: [H, R] by offset class (query minus key, Grid.index("hw")), or None.
        row_scores: [B, H, M, h], or None.
        column_scores: [B, H, M, w], or None.
        grid: of the keys.
        scale: factor of q . k.

    Returns:
        The output [B, H, M, D] in v's dtype, in memory [B, M, H, D], and the log-sum-exp [B, H, M] float32 (natural logarithm),
            used by the backward pass.

    Raises:
        ValueError: `global_limits` gives a reason, or a shape is another.
    """
    aligned = row_scores is not None or column_scores is not None
    if reason := global_limits(q.dtype, q.shape[-1], grid, q.shape[-2], aligned):
        raise ValueError(reason)
    _check_shapes(q, k, v, (bias, row_scores, column_scores), grid)
    batch, heads, queries, _ = q.shape
    out = _like_tokens(q)
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    block_m, block_n, *_ = tile = _tile_for("forward", q, aligned)
    with torch.cuda.device_of(q):
        _forward[(triton.cdiv(queries, block_m) * batch * heads,)](
            (_strided(q), _strided(k), _strided(v)),
            _strided(out),
            lse,
            (_in_log2(bias), _packed(row_scores), _packed(column_scores)),
            _sizes_for(grid, heads, queries, block_n, aligned),
            float(scale),
            PACKED=_row_lanes(grid.w, block_n),
            **_constants(grid, q, tile),
        )
    return out, lse


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, tables: tuple[Tensor | None, ...], grid: Grid) -> None:
    """Raise ValueError for mixed dtypes, and for shapes with which the kernels would read out of bounds."""
    keys = (*q.shape[:2], grid.tokens, q.shape[-1])
    if q.dim() != 4 or k.shape != keys or v.shape != keys or not q.dtype == k.dtype == v.dtype:
        actual = ", ".join(f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in (q, k, v))
        raise ValueError(f"q, k, v are {actual}; expected [B, H, M, D] and twice [B, H, {grid.tokens}, D], of one dtype")
    shapes = (q.shape[1], grid.classes()), (*q.shape[:3], grid.h), (*q.shape[:3], grid.w)
    for name, table, shape in zip(("bias", "row scores", "column scores"), tables, shapes, strict=True):
        if table is not None and table.shape != shape:
            raise ValueError(f"{name} of shape {list(table.shape)}; expected {list(shape)} on this grid")


class _Sizes(NamedTuple):
    """Sizes that the kernels receive: heads, grid, queries M, and the division of the patch keys into groups * chunks tiles.

    Aligned tiles (for row or column scores) hold `rows` whole image rows, in `groups` tiles down (chunks = 1); where a row is
    wider than a tile, rows = 1, and a row is divided into `chunks` tiles. Other tiles hold any consecutive patch keys: `groups`
    is their number, chunks = 1, and `rows` is not used.
    """

    heads: int  # H
    h: int  # rows of the key grid
    w: int  # columns of the key grid
    prefix: int  # prefix tokens of the key grid
    queries: int  # M
    rows: int  # image rows of an aligned tile
    groups: int  # tiles down, or all tiles
    chunks: int  # tiles of an image row


def _sizes_for(grid: Grid, heads: int, queries: int, lanes: int, aligned: bool) -> _Sizes:
    """Return the kernels' sizes.

    Args:
        grid: of the keys.
        heads: number of heads H.
        queries: number of queries of a head in all (M, not BLOCK_M).
        lanes: keys of a tile (BLOCK_N).
        aligned: tiles follow the image rows, as row and column scores need; otherwise they hold any consecutive patch keys.
    """
    rows = max(1, lanes // grid.w)
    if not aligned:
        return _Sizes(heads, *grid, queries, rows, triton.cdiv(grid.h * grid.w, lanes), 1)
    return _Sizes(heads, *grid, queries, rows, triton.cdiv(grid.h, rows), triton.cdiv(grid.w, lanes))


def _constants(grid: Grid, x: Tensor, tile: Tile) -> dict[str, int]:
    """Return the compile-time arguments of the kernels for queries like x, except PACKED."""
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    constants = {"PREFIX": grid.prefix > 0, "D": x.shape[-1], **dict(zip(names, tile[:4], strict=True))}
    if x.dtype == torch.float32 and not torch.version.hip:
        constants["maxnreg"] = 255  # otherwise the assembler spills a few registers for a higher occupancy
    return constants


def _row_lanes(columns: int, lanes: int) -> int:
    """Return the lanes for one value per image row of a tile, a power of two; 0 if a tile is one row or part of it.

    The kernels receive the result as PACKED.

    Args:
        columns: width of the grid.
        lanes: keys of a tile.
    """
    rows = lanes // columns
    return max(16, triton.next_power_of_2(rows)) if rows > 1 else 0


def _strided(x: Tensor) -> tuple[Tensor, int, int, int]:
    """Return x [B, H, N, D] and its strides of batch, head and token; a copy of x if its last stride is not 1."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, head, token, _ = x.stride()
    return x, batch, head, token


def _packed(x: Tensor | None) -> Tensor | None:
    """Return x contiguous, or None."""
    return None if x is None else x.contiguous()


def _in_log2(bias: Tensor | None) -> Tensor | None:
    """Return a bias table in the kernels' format: contiguous, float32, divided by log 2."""
    return None if bias is None else (bias.float() * LOG2_E.value).contiguous()


def _like_tokens(x: Tensor) -> Tensor:
    """Return an uninitialized tensor like x [B, H, N, D], stored as [B, N, H, D], so that merging the heads needs no copy."""
    return x.new_empty((x.shape[0], x.shape[2], x.shape[1], x.shape[3])).transpose(1, 2)


@triton.jit
def _head_line(head, sizes, PREFIX: tl.constexpr):
    """Return the index in [H, R] at which the table of a head starts."""
    return head.to(tl.int32) * ((2 * sizes.h - 1) * (2 * sizes.w - 1) + (3 if PREFIX else 0))


@triton.jit
def _query_lanes(i, head, sizes, PREFIX: tl.constexpr):
    """Return the index of queries i [BLOCK_M] in the flat tables [H, R], and True where a query is a prefix token.

    The index is that of the offset to the key at (0, 0); for a key at (y, x), subtract y * (2w-1) + x. Prefix tokens have the
    index of patch 0, only to keep loads in range. Lanes beyond the last query repeat the last query.
    """
    h, w = sizes.h, sizes.w
    patch = tl.minimum(i, sizes.queries - 1) + (h * w - sizes.queries)
    at = tl.maximum(patch, 0)
    y = at // w
    return _head_line(head, sizes, PREFIX) + (y + h - 1) * (2 * w - 1) + (at - y * w) + w - 1, patch < 0


@triton.jit
def _prefix_line(head, sizes):
    """Return the index at which the three prefix classes of a head start (order as in Grid)."""
    return _head_line(head, sizes, True) + (2 * sizes.h - 1) * (2 * sizes.w - 1)


@triton.jit
def _key_tile(group, chunk, sizes, LANES: tl.constexpr, ALIGNED: tl.constexpr):
    """Return row y, column x and token of each lane of a tile of patch keys, and whether the key exists.

    Tokens are counted with the prefix tokens. Lanes without a key have values out of range.

    Args:
        ALIGNED: tiles are aligned with image rows, see `_Sizes`; otherwise group numbers the tiles, and chunk is ignored.
    """
    lane = tl.arange(0, LANES)
    if ALIGNED:
        r = lane // sizes.w
        y = group * sizes.rows + r
        x = chunk * LANES + lane - r * sizes.w
        return y, x, sizes.prefix + y * sizes.w + x, (r < sizes.rows) & (y < sizes.h) & (x < sizes.w)
    else:
        patch = group * LANES + lane
        y = patch // sizes.w
        return y, patch - y * sizes.w, sizes.prefix + patch, patch < sizes.h * sizes.w


@triton.jit
def _load_tokens(x, b, head, tokens, exist, D: tl.constexpr):
    """Load [len(tokens), D] of x [B, H, N, D], given as of `_strided`; zeros where `exist` is False."""
    base, of_batch, of_head, of_token = x
    at = b * of_batch + head * of_head + tokens.to(tl.int64)[:, None] * of_token + tl.arange(0, D)[None, :]
    return tl.load(base + at, mask=exist[:, None], other=0.0)


@triton.jit
def _store_tokens(x, b, head, tokens, exist, value, D: tl.constexpr):
    """Write `value` [len(tokens), D] into x [B, H, N, D], given as of `_strided`, in its dtype, where `exist` is True."""
    base, of_batch, of_head, of_token = x
    at = b * of_batch + head * of_head + tokens.to(tl.int64)[:, None] * of_token + tl.arange(0, D)[None, :]
    tl.store(base + at, value.to(base.dtype.element_ty), mask=exist[:, None])


@triton.jit
def _token_logits(query, key, bias, line, is_prefix, y, x, inside, head, scale, sizes, PREFIX: tl.constexpr):
    """Return content and table logits [BLOCK_M, BLOCK_N] of patch keys at (y, x), divided by log 2; -inf where no key is."""
    s = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * LOG2_E)
    if bias is not None:
        cell = tl.where(inside, y * (2 * sizes.w - 1) + x, 0)  # in range for every lane, so loads need no mask
        table = tl.load(bias + (line[:, None] - cell[None, :]))
        if PREFIX:
            table = tl.where(is_prefix[:, None], tl.load(bias + _prefix_line(head, sizes)), table)
        s += table
    return tl.where(inside[None, :], s, float("-inf"))


@triton.jit
def _prefix_logits(query, key, bias, is_prefix, head, scale, sizes):
    """Return content and table logits of the prefix keys, [BLOCK_M, PREFIX_LANES], as `_token_logits`."""
    s = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * LOG2_E)
    if bias is not None:
        s += tl.load(bias + _prefix_line(head, sizes) + tl.where(is_prefix, 2, 1))[:, None]
    return tl.where((tl.arange(0, PREFIX_LANES) < sizes.prefix)[None, :], s, float("-inf"))


@triton.jit
def _row_terms(row, bh, i, exist, group, y, inside, sizes, PACKED: tl.constexpr):
    """Return the row scores of queries i at the keys of a tile, divided by log 2; `row` points to the scores [B*H, M, h].

    PACKED (not 0): a tile holds several image rows, and the result is [BLOCK_M, keys], for the row y of each key. Otherwise the
    tile lies in image row `group`, and the result is [BLOCK_M, 1].
    """
    row += bh * sizes.queries * sizes.h
    if PACKED:
        score = tl.load(row + ((i * sizes.h)[:, None] + y[None, :]), mask=exist[:, None] & inside[None, :], other=0.0)
    else:
        score = tl.load(row + (i * sizes.h + group), mask=exist, other=0.0)[:, None]
    return score.to(tl.float32) * LOG2_E


@triton.jit
def _column_terms(column, bh, i, exist, chunk, sizes, LANES: tl.constexpr):
    """Return the column scores [BLOCK_M, LANES] of queries i at the keys of an aligned tile of `chunk`, divided by log 2.

    They are the same for every group. `column` points to the scores [B*H, M, w]. Zeros where there is no query or key.
    """
    _, x, _, inside = _key_tile(0, chunk, sizes, LANES, True)
    column += bh * sizes.queries * sizes.w
    score = tl.load(column + ((i * sizes.w)[:, None] + x[None, :]), mask=exist[:, None] & inside[None, :], other=0.0)
    return score.to(tl.float32) * LOG2_E


@triton.jit
def _attend(s, v, acc, top, total):
    """Return acc, top and total after one step of the online softmax.

    Args:
        s: logits [BLOCK_M, keys] in base 2.
        v: values of the keys.
        acc: output [BLOCK_M, D], not yet divided by total.
        top: maximum of the logits.
        total: sum of the weights.
    """
    new = tl.maximum(top, tl.max(s, 1))
    shift = tl.where(new == float("-inf"), 0.0, new)  # all keys so far may be masked
    p = tl.exp2(s - shift[:, None])
    old = tl.exp2(top - shift)
    acc = acc * old[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return acc, new, total * old + tl.sum(p, 1)


@triton.jit
def _forward(
    inputs,
    out,
    lse,
    tables,
    sizes,
    scale,
    PREFIX: tl.constexpr,
    PACKED: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    q, k, v = inputs
    bias, row, column = tables
    ALIGNED: tl.constexpr = row is not None or column is not None
    heads, prefix, queries = sizes.heads, sizes.prefix, sizes.queries
    tiles = tl.cdiv(queries, BLOCK_M)
    bh = (tl.program_id(0) // tiles).to(tl.int64)
    b, head = bh // heads, bh % heads
    i = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    exist, first = i < queries, bh * queries
    query = _load_tokens(q, b, head, i, exist, D)
    line, is_prefix = _query_lanes(i, head, sizes, PREFIX)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if PREFIX:
        lane = tl.arange(0, PREFIX_LANES)
        first_key, first_value = (
            _load_tokens(k, b, head, lane, lane < prefix, D),
            _load_tokens(v, b, head, lane, lane < prefix, D),
        )
        first_logits = _prefix_logits(query, first_key, bias, is_prefix, head, scale, sizes)
        acc, top, total = _attend(first_logits, first_value, acc, top, total)
    for chunk in range(sizes.chunks):
        if column is not None:
            columns = _column_terms(column, bh, i, exist, chunk, sizes, BLOCK_N)
        for group in range(sizes.groups):
            y, x, j, inside = _key_tile(group, chunk, sizes, BLOCK_N, ALIGNED)
            key, value = _load_tokens(k, b, head, j, inside, D), _load_tokens(v, b, head, j, inside, D)
            s = _token_logits(query, key, bias, line, is_prefix, y, x, inside, head, scale, sizes, PREFIX)
            if row is not None:
                s += _row_terms(row, bh, i, exist, group, y, inside, sizes, PACKED)
            if column is not None:
                s += columns
            acc, top, total = _attend(s, value, acc, top, total)
    fully_masked = total == 0.0  # fully masked queries return 0
    total = tl.where(fully_masked, 1.0, total)
    _store_tokens(out, b, head, i, exist, acc / total[:, None], D)
    tl.store(lse + first + i, (tl.where(fully_masked, 0.0, top) + tl.log2(total)) / LOG2_E, mask=exist)


def biased_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    row_scores: Tensor | None,
    column_scores: Tensor | None,
    out: Tensor,
    lse: Tensor,
    grid: Grid,
    scale: float,
    bias_grad: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of q, k, v, bias, row_scores and column_scores of `biased_forward`, the last three float32 or None.

    It is deterministic.

    Args:
        grad_out: gradient of the output, [B, H, M, D], any strides.
        q: as in `biased_forward`, and so are k, v, bias, row_scores, column_scores, grid and scale.
        out: result of `biased_forward`.
        lse: result of `biased_forward`.
        bias_grad: False: the bias gradient is None.
    """
    inputs = (_strided(q), _strided(k), _strided(v), _strided(out), _strided(grad_out.to(q.dtype)))
    tables = (_in_log2(bias), _packed(row_scores), _packed(column_scores))
    stats = (lse, torch.empty_like(lse))
    with torch.cuda.device_of(q):
        dq, drow, dcolumn, to_prefix = _query_gradients(inputs, stats, tables, grid, scale)  # first, since it computes delta
        dk, dv = _key_gradients(inputs, stats, tables, grid, scale)
        dbias = _table_gradient(inputs, stats, tables, to_prefix, grid, scale) if bias is not None and bias_grad else None
    return dq, dk, dv, dbias, drow, dcolumn


def _tile_for(kernel: str, q: Tensor, aligned: bool) -> Tile:
    return global_tile(kernel, q.dtype, q.shape[-1], aligned, triton_tiles.architecture(q.device))


def _query_gradients(
    inputs: tuple, stats: tuple, tables: tuple, grid: Grid, scale: float
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    q = inputs[0][0]
    batch, heads, queries, _ = q.shape
    bias, row, column = tables
    aligned = row is not None or column is not None
    block_m, block_n, *_ = tile = _tile_for("queries", q, aligned)
    shape = _sizes_for(grid, heads, queries, block_n, aligned)
    dq, drow = _like_tokens(q), None
    if row is not None:
        drow = row.new_empty((shape.chunks, *row.shape), dtype=torch.float32)
    dcolumn = None if column is None else torch.empty_like(column, dtype=torch.float32)
    to_prefix = None if bias is None or not grid.prefix else torch.empty_like(stats[0])
    _queries[(triton.cdiv(queries, block_m) * batch * heads,)](
        inputs,
        stats,
        tables,
        (_strided(dq), None if drow is None else (drow, batch * heads), dcolumn, to_prefix),
        shape,
        float(scale),
        PACKED=_row_lanes(grid.w, block_n),
        **_constants(grid, q, tile),
    )
    if drow is not None:
        drow = drow[0] if shape.chunks == 1 else drow.sum(0)
    return dq, drow, dcolumn, to_prefix


def _key_gradients(inputs: tuple, stats: tuple, tables: tuple, grid: Grid, scale: float) -> tuple[Tensor, Tensor]:
    q, k = inputs[0][0], inputs[1][0]
    batch, heads, queries, _ = q.shape
    aligned = tables[1] is not None or tables[2] is not None
    tile = _tile_for("keys", q, aligned)
    shape = _sizes_for(grid, heads, queries, tile[1], aligned)
    dk, dv = _like_tokens(k), _like_tokens(k)
    tiles = shape.groups * shape.chunks + (grid.prefix > 0)
    gradients = (_strided(dk), _strided(dv))
    _keys[(tiles * batch * heads,)](inputs, stats, tables, gradients, shape, float(scale), **_constants(grid, q, tile))
    return dk, dv


def _table_gradient(inputs: tuple, stats: tuple, tables: tuple, to_prefix: Tensor | None, grid: Grid, scale: float) -> Tensor:
    q = inputs[0][0]
    batch, heads, queries, width = q.shape
    block, _, warps, stages, _ = _tile_for("table", q, True)
    shape = _sizes_for(grid, heads, queries, block, True)
    pairs = (2 * shape.groups - 1) * (2 * shape.chunks - 1)
    splits = min(batch, triton.cdiv(1024, pairs * heads))
    parts = torch.zeros((splits, heads, grid.classes()), dtype=torch.float32, device=q.device)
    _table[(pairs, heads, splits)](
        inputs,
        stats,
        tables,
        parts,
        shape,
        float(scale),
        batch,
        PREFIX=grid.prefix > 0,
        PACKED=_row_lanes(grid.w, block),
        D=width,
        BLOCK=block,
        num_warps=warps,
        num_stages=stages,
    )
    dbias = parts[0] if splits == 1 else parts.sum(0)
    if to_prefix is not None:
        first, prefix = grid.offset_classes(), grid.prefix if queries == grid.tokens else 0
        dbias[:, first + 1] = to_prefix[:, :, prefix:].sum((0, 2))
        dbias[:, first + 2] = to_prefix[:, :, :prefix].sum((0, 2))
        dbias[:, first] = -dbias[:, first + 2]  # the softmax of a prefix query depends on their difference only
    return dbias


@triton.jit
def _logit_gradient(s, norm, mean, dout, value):
    """Return the gradient ds [queries, keys] with respect to the logits.

    Args:
        s: the logits divided by log 2.
        norm: log-sum-exp of each query divided by log 2.
        mean: out . grad_out of each query.
        dout: grad_out [queries, D].
        value: values of the keys.
    """
    p = tl.exp2(s - norm[:, None])
    return p * (tl.dot(dout, tl.trans(value), input_precision="ieee") - mean[:, None])


@triton.jit
def _sums_by(ds, place, LANES: tl.constexpr, PRECISION: tl.constexpr):
    """Return the sums [queries, LANES] of ds [queries, keys] over the keys whose `place` is the lane."""
    lanes = place[:, None] == tl.arange(0, LANES)[None, :]
    return tl.dot(ds, lanes.to(tl.float32), input_precision=PRECISION)


@triton.jit
def _store_row_gradient(drow, ds, bh, i, exist, group, chunk, y, sizes, PACKED: tl.constexpr, PRECISION: tl.constexpr):
    """Write the sums of ds [BLOCK_M, keys] over each image row of the tile (group, chunk) into drow [chunks, B*H, M, h].

    Each element is written by one tile, and chunks remain to be summed. drow is given as (pointer, B*H).
    """
    h, rows = sizes.h, sizes.rows
    drow, of_chunk = drow
    drow += (chunk * of_chunk + bh) * sizes.queries * h  # 64-bit, as bh is
    if PACKED:
        r = tl.arange(0, PACKED)
        place = drow + ((i * h + group * rows)[:, None] + r[None, :])
        inside = (r < rows) & (group * rows + r < h)
        tl.store(place, _sums_by(ds, y - group * rows, PACKED, PRECISION), mask=exist[:, None] & inside[None, :])
    else:
        place = drow + (i * h + group)
        tl.store(place, tl.sum(ds, 1), mask=exist)


@triton.jit
def _store_column_gradient(dcolumn, ds, bh, i, exist, chunk, sizes, PACKED: tl.constexpr, PRECISION: tl.constexpr):
    """Write ds [BLOCK_M, LANES], already summed over the groups of a chunk, into dcolumn [B*H, M, w].

    With PACKED (several image rows per tile) the lanes of a column are summed first.
    """
    LANES: tl.constexpr = ds.shape[1]
    _, x, _, inside = _key_tile(0, chunk, sizes, LANES, True)
    if PACKED:
        ds = _sums_by(ds, x, LANES, PRECISION)
        x = tl.arange(0, LANES)
        inside = x < sizes.w
    place = dcolumn + bh * sizes.queries * sizes.w + ((i * sizes.w)[:, None] + x[None, :])
    tl.store(place, ds, mask=exist[:, None] & inside[None, :])


@triton.jit
def _queries(
    inputs,
    stats,
    tables,
    grads,
    sizes,
    scale,
    PREFIX: tl.constexpr,
    PACKED: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    q, k, v, out, grad_out = inputs
    lse, delta = stats
    bias, row, column = tables
    dq, drow, dcolumn, to_prefix = grads
    ALIGNED: tl.constexpr = row is not None or column is not None
    heads, prefix, queries = sizes.heads, sizes.prefix, sizes.queries
    tiles = tl.cdiv(queries, BLOCK_M)
    bh = (tl.program_id(0) // tiles).to(tl.int64)
    b, head = bh // heads, bh % heads
    i = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    exist, first = i < queries, bh * queries
    query, dout = _load_tokens(q, b, head, i, exist, D), _load_tokens(grad_out, b, head, i, exist, D)
    mean = tl.sum(dout.to(tl.float32) * _load_tokens(out, b, head, i, exist, D).to(tl.float32), 1)
    tl.store(delta + first + i, mean, mask=exist)
    PRECISION: tl.constexpr = "ieee" if query.dtype == tl.float32 else "tf32"
    norm = tl.load(lse + first + i, mask=exist, other=float("inf")) * LOG2_E
    line, is_prefix = _query_lanes(i, head, sizes, PREFIX)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    if PREFIX:
        lane = tl.arange(0, PREFIX_LANES)
        first_key, first_value = (
            _load_tokens(k, b, head, lane, lane < prefix, D),
            _load_tokens(v, b, head, lane, lane < prefix, D),
        )
        first_logits = _prefix_logits(query, first_key, bias, is_prefix, head, scale, sizes)
        dfirst = _logit_gradient(first_logits, norm, mean, dout, first_value)
        acc = tl.dot(dfirst.to(first_key.dtype), first_key, acc, input_precision="ieee")
        if to_prefix is not None:
            tl.store(to_prefix + first + i, tl.sum(dfirst, 1), mask=exist)
    for chunk in range(sizes.chunks):
        if column is not None:
            columns = _column_terms(column, bh, i, exist, chunk, sizes, BLOCK_N)
            dcolumns = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for group in range(sizes.groups):
            y, x, j, inside = _key_tile(group, chunk, sizes, BLOCK_N, ALIGNED)
            key, value = _load_tokens(k, b, head, j, inside, D), _load_tokens(v, b, head, j, inside, D)
            s = _token_logits(query, key, bias, line, is_prefix, y, x, inside, head, scale, sizes, PREFIX)
            if row is not None:
                s += _row_terms(row, bh, i, exist, group, y, inside, sizes, PACKED)
            if column is not None:
                s += columns
            ds = _logit_gradient(s, norm, mean, dout, value)
            acc = tl.dot(ds.to(key.dtype), key, acc, input_precision="ieee")
            if row is not None:
                _store_row_gradient(drow, ds, bh, i, exist, group, chunk, y, sizes, PACKED, PRECISION)
            if column is not None:
                dcolumns += ds
        if column is not None:
            _store_column_gradient(dcolumn, dcolumns, bh, i, exist, chunk, sizes, PACKED, PRECISION)
    _store_tokens(dq, b, head, i, exist, acc * scale, D)


@triton.jit
def _keys(
    inputs,
    stats,
    tables,
    grads,
    sizes,
    scale,
    PREFIX: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    q, k, v, grad_out = inputs[0], inputs[1], inputs[2], inputs[4]
    lse, delta = stats
    bias, row, column = tables
    dk, dv = grads
    ALIGNED: tl.constexpr = row is not None or column is not None
    heads, h, w, prefix, queries = sizes.heads, sizes.h, sizes.w, sizes.prefix, sizes.queries
    tiles = sizes.groups * sizes.chunks + (1 if PREFIX else 0)
    tile, bh = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    b, head = bh // heads, bh % heads
    y, x, j, inside = _key_tile(tile // sizes.chunks, tile % sizes.chunks, sizes, BLOCK_N, ALIGNED)
    cell = tl.where(inside, y * (2 * w - 1) + x, 0)  # in range for every lane, so loads need no mask
    if PREFIX:
        to_prefix, lane = tile == tiles - 1, tl.arange(0, BLOCK_N)
        j, inside = tl.where(to_prefix, lane, j), tl.where(to_prefix, lane < prefix, inside)
    key, value = _load_tokens(k, b, head, j, inside, D), _load_tokens(v, b, head, j, inside, D)
    dkey, dvalue = tl.zeros((BLOCK_N, D), tl.float32), tl.zeros((BLOCK_N, D), tl.float32)
    for n in range(tl.cdiv(queries, BLOCK_M)):
        i = n * BLOCK_M + tl.arange(0, BLOCK_M)
        exist, first = i < queries, bh * queries
        query, dout = _load_tokens(q, b, head, i, exist, D), _load_tokens(grad_out, b, head, i, exist, D)
        norm = tl.load(lse + first + i, mask=exist, other=float("inf")) * LOG2_E
        mean = tl.load(delta + first + i, mask=exist, other=0.0)
        s = tl.dot(key, tl.trans(query), input_precision="ieee") * (scale * LOG2_E)
        both = inside[:, None] & exist[None, :]
        if bias is not None:
            line, is_prefix = _query_lanes(i, head, sizes, PREFIX)
            table = tl.load(bias + (line[None, :] - cell[:, None]))
            if PREFIX:
                kind = tl.where(to_prefix, tl.where(is_prefix, 2, 1), 0)
                of_kind = tl.load(bias + _prefix_line(head, sizes) + kind)
                table = tl.where((is_prefix | to_prefix)[None, :], of_kind[None, :], table)
            s += table
        if row is not None:
            s += tl.load(row + first * h + ((i * h)[None, :] + y[:, None]), mask=both, other=0.0).to(tl.float32) * LOG2_E
        if column is not None:
            s += tl.load(column + first * w + ((i * w)[None, :] + x[:, None]), mask=both, other=0.0).to(tl.float32) * LOG2_E
        p = tl.exp2(s - norm[None, :])
        dvalue = tl.dot(p.to(dout.dtype), dout, dvalue, input_precision="ieee")
        ds = p * (tl.dot(value, tl.trans(dout), input_precision="ieee") - mean[None, :])
        dkey = tl.dot(ds.to(query.dtype), query, dkey, input_precision="ieee")
    _store_tokens(dk, b, head, j, inside, dkey * scale, D)
    _store_tokens(dv, b, head, j, inside, dvalue, D)


@triton.jit
def _table(
    inputs,
    stats,
    tables,
    parts,
    sizes,
    scale,
    batch,
    PREFIX: tl.constexpr,
    PACKED: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    q, k, v, grad_out = inputs[0], inputs[1], inputs[2], inputs[4]
    lse, delta = stats
    bias, row, column = tables
    heads, h, w, prefix, queries, rows = sizes.heads, sizes.h, sizes.w, sizes.prefix, sizes.queries, sizes.rows
    groups, chunks = sizes.groups, sizes.chunks
    below = tl.program_id(0) // (2 * chunks - 1) - (groups - 1)  # groups from the key tile down to the query tile
    right = tl.program_id(0) % (2 * chunks - 1) - (chunks - 1)
    head = tl.program_id(1).to(tl.int64)
    hidden = h - tl.minimum(queries // w, h)  # rows without queries
    top, bottom = tl.maximum(below, hidden // rows), tl.minimum(groups, groups + below)
    left, across = tl.maximum(right, 0), chunks - tl.maximum(right, -right)
    down = tl.maximum(bottom - top, 0)
    lane = tl.arange(0, BLOCK)
    r = lane // w
    cell = r * (2 * w - 1) + lane - r * w
    offset = cell[:, None] - cell[None, :] + (below * rows + h - 1) * (2 * w - 1) + right * BLOCK + w - 1
    classes = (2 * h - 1) * (2 * w - 1)
    logits = tl.load(bias + _head_line(head, sizes, PREFIX) + offset, mask=(offset >= 0) & (offset < classes), other=0.0)
    acc = tl.zeros((BLOCK, BLOCK), tl.float32)
    batches = tl.cdiv(batch - tl.program_id(2), tl.num_programs(2))
    for n in range(batches * down * across):
        b = (tl.program_id(2) + n // (down * across) * tl.num_programs(2)).to(tl.int64)
        group, chunk = top + n // across % down, left + n % across
        _y, _x, i, exist = _key_tile(group, chunk, sizes, BLOCK, True)
        i += queries - prefix - h * w
        exist = exist & (i >= 0)
        bh = b * heads + head
        first = bh * queries
        query, dout = _load_tokens(q, b, head, i, exist, D), _load_tokens(grad_out, b, head, i, exist, D)
        norm = tl.load(lse + first + i, mask=exist, other=float("inf")) * LOG2_E
        mean = tl.load(delta + first + i, mask=exist, other=0.0)
        y, _x, j, inside = _key_tile(group - below, chunk - right, sizes, BLOCK, True)
        key, value = _load_tokens(k, b, head, j, inside, D), _load_tokens(v, b, head, j, inside, D)
        s = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * LOG2_E) + logits
        if row is not None:
            s += _row_terms(row, bh, i, exist, group - below, y, inside, sizes, PACKED)
        if column is not None:
            s += _column_terms(column, bh, i, exist, chunk - right, sizes, BLOCK)
        acc += _logit_gradient(tl.where(inside[None, :], s, float("-inf")), norm, mean, dout, value)
    parts += tl.program_id(2) * heads * (classes + (3 if PREFIX else 0))
    _add_diagonals(parts + _head_line(head, sizes, PREFIX), acc, below * rows, right * BLOCK, sizes)


@triton.jit
def _add_diagonals(table, acc, down, right, sizes):
    """Add acc [BLOCK queries, BLOCK keys] to a head's table, in place, by offset class (query minus key).

    Lane 0 of the queries lies `down` rows below and `right` columns to the right of lane 0 of the keys. Lanes i and j with the
    same i - j have two possible offsets, depending on whether the end of an image row lies between them.
    """
    h, w = sizes.h, sizes.w
    BLOCK: tl.constexpr = acc.shape[0]
    lane = tl.arange(0, BLOCK)
    j = (lane[:, None] - lane[None, :]) & (BLOCK - 1)
    rotated = tl.gather(acc, j, 1)  # the diagonal i - j = d, and that of d - BLOCK, are now column d
    wrapped = lane[None, :] > lane[:, None]
    in_order = (lane % w)[:, None] >= j % w
    for upper in tl.static_range(2):
        for crossing in tl.static_range(2):
            sums = tl.sum(tl.where((wrapped == (upper == 1)) & (in_order == (crossing == 0)), rotated, 0.0), 0)
            apart = lane - upper * BLOCK + w * BLOCK  # made positive, since division truncates
            dy = down + apart // w - BLOCK + crossing
            dx = right + apart % w - crossing * w
            inside = (tl.abs(dy) < h) & (tl.abs(dx) < w)
            tl.atomic_add(table + (dy + h - 1) * (2 * w - 1) + dx + w - 1, sums, mask=inside, sem="relaxed")
