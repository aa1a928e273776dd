"""Forward kernel of global attention with a bias table or per-axis query scores, in Triton, without an [N, N] tensor.

Algorithm: flash attention (online softmax, arXiv 2205.14135). A program computes BLOCK_M queries of one head and iterates over
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
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrel.grid import Grid

WIDTHS = (16, 32, 64, 128)  # head widths D
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
PREFIX_LANES = tl.constexpr(16)  # lanes of the tile of prefix keys, the minimum of a matrix product
LOG2E = tl.constexpr(1.4426950408889634)  # logits are multiplied by it, since the hardware has exp2


def biased_refuses(dtype: torch.dtype, width: int, grid: Grid, queries: int, axis_scores: bool = False) -> str:
    """Reason why the kernels do not serve this dtype, head width, key grid and number of queries, or "". axis_scores: with row
    or column scores.
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

    q [B, H, M, D], k, v [B, H, N, D] of one dtype, any strides; queries are the last M tokens of the key grid `grid`, all
    tokens or whole rows. bias [H, R] by offset class (query minus key, Grid.index("hw")). row_scores [B, H, M, h],
    column_scores [B, H, M, w].

    out is [B, H, M, D] in v's dtype, in memory [B, M, H, D]; lse is [B, H, M] float32 (natural logarithm), used by the
    backward pass. Raises ValueError where `biased_refuses` gives a reason, and for other shapes.
    """
    aligned = row_scores is not None or column_scores is not None
    if reason := biased_refuses(q.dtype, q.shape[-1], grid, q.shape[-2], aligned):
        raise ValueError(reason)
    _check_shapes(q, k, v, (bias, row_scores, column_scores), grid)
    batch, heads, queries, width = q.shape
    out = _like_tokens(q)
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    block_m, block_n, *_ = tile = _query_tile(q.dtype, width, aligned)
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
    """ValueError for mixed dtypes, and for shapes with which the kernels would read out of bounds."""
    keys = (*q.shape[:2], grid.tokens, q.shape[-1])
    if q.dim() != 4 or k.shape != keys or v.shape != keys or not q.dtype == k.dtype == v.dtype:
        actual = ", ".join(f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in (q, k, v))
        raise ValueError(f"q, k, v are {actual}; expected [B, H, M, D] and twice [B, H, {grid.tokens}, D], of one dtype")
    shapes = (q.shape[1], grid.classes()), (*q.shape[:3], grid.h), (*q.shape[:3], grid.w)
    for name, table, shape in zip(("bias", "row scores", "column scores"), tables, shapes, strict=True):
        if table is not None and table.shape != shape:
            raise ValueError(f"{name} of shape {list(table.shape)}; expected {list(shape)} on this grid")


def _query_tile(dtype: torch.dtype, width: int, aligned: bool) -> tuple[int, int, int, int]:
    """Return (queries of a tile, keys of a tile, warps, stages) of the kernels whose programs own queries."""
    if dtype == torch.float32:
        return 32, 32, 8, 1
    return (64, 32, 8, 2) if aligned or width > 64 else (64, 64, 4, 2)


class _Sizes(NamedTuple):
    """Sizes that the kernels receive: heads, grid, queries M, and the division of the patch keys into groups * chunks tiles.

    Aligned tiles (for row or column scores) hold `rows` whole image rows, in `groups` tiles down (chunks = 1); where a row is
    wider than a tile, rows = 1, and a row is divided into `chunks` tiles. Other tiles hold any consecutive patch keys: `groups`
    is their number, chunks = 1, and `rows` is not used.
    """

    heads: int
    h: int
    w: int
    prefix: int
    queries: int
    rows: int
    groups: int
    chunks: int


def _sizes_for(grid: Grid, heads: int, queries: int, lanes: int, aligned: bool) -> _Sizes:
    """Return the kernels' sizes for `queries` queries of a head in all (M, not BLOCK_M) and tiles of `lanes` keys (BLOCK_N).

    aligned: tiles follow the image rows, as row and column scores need; otherwise they hold any consecutive patch keys.
    """
    rows = max(1, lanes // grid.w)
    if not aligned:
        return _Sizes(heads, *grid, queries, rows, triton.cdiv(grid.h * grid.w, lanes), 1)
    return _Sizes(heads, *grid, queries, rows, triton.cdiv(grid.h, rows), triton.cdiv(grid.w, lanes))


def _constants(grid: Grid, x: Tensor, tile: tuple[int, int, int, int]) -> dict[str, int]:
    """Compile-time arguments of the kernels for queries like x, except PACKED."""
    names = ("BLOCK_M", "BLOCK_N", "num_warps", "num_stages")
    constants = {"PREFIX": grid.prefix > 0, "D": x.shape[-1], **dict(zip(names, tile, strict=True))}
    if x.dtype == torch.float32 and not torch.version.hip:
        constants["maxnreg"] = 255  # otherwise the assembler spills a few registers for a higher occupancy
    return constants


def _row_lanes(columns: int, lanes: int) -> int:
    """Lanes for one value per image row of a tile of `lanes` keys, a power of two; 0 if a tile is one row or part of it.

    columns: width of the grid. The kernels receive the result as PACKED.
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
    return None if bias is None else (bias.float() * LOG2E.value).contiguous()


def _like_tokens(x: Tensor) -> Tensor:
    """Return an uninitialised tensor like x [B, H, N, D], stored as [B, N, H, D], so that merging the heads needs no copy."""
    return x.new_empty((x.shape[0], x.shape[2], x.shape[1], x.shape[3])).transpose(1, 2)


@triton.jit
def _head_line(head, sizes, PREFIX: tl.constexpr):
    """Index in [H, R] at which the table of a head starts."""
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
    """Index at which the three prefix classes of a head start (order as in Grid)."""
    return _head_line(head, sizes, True) + (2 * sizes.h - 1) * (2 * sizes.w - 1)


@triton.jit
def _key_tile(group, chunk, sizes, LANES: tl.constexpr, ALIGNED: tl.constexpr):
    """Row y, column x and token (prefix tokens counted) of each lane of a tile of patch keys, and whether the key exists.

    ALIGNED: tiles are aligned with image rows, see `_Sizes`; otherwise group numbers the tiles, and chunk is ignored. Lanes
    without a key have values out of range.
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
    """Content and table logits [BLOCK_M, BLOCK_N] of patch keys at (y, x), divided by log 2; -inf where there is no key."""
    s = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * LOG2E)
    if bias is not None:
        cell = tl.where(inside, y * (2 * sizes.w - 1) + x, 0)  # in range for every lane, so loads need no mask
        table = tl.load(bias + (line[:, None] - cell[None, :]))
        if PREFIX:
            table = tl.where(is_prefix[:, None], tl.load(bias + _prefix_line(head, sizes)), table)
        s += table
    return tl.where(inside[None, :], s, float("-inf"))


@triton.jit
def _prefix_logits(query, key, bias, is_prefix, head, scale, sizes):
    """Content and table logits of the prefix keys, [BLOCK_M, PREFIX_LANES], as `_token_logits`."""
    s = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * LOG2E)
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
    return score.to(tl.float32) * LOG2E


@triton.jit
def _column_terms(column, bh, i, exist, chunk, sizes, LANES: tl.constexpr):
    """Return the column scores [BLOCK_M, LANES] of queries i at the keys of an aligned tile of `chunk`, divided by log 2.

    They are the same for every group. `column` points to the scores [B*H, M, w]. Zeros where there is no query or key.
    """
    _, x, _, inside = _key_tile(0, chunk, sizes, LANES, True)
    column += bh * sizes.queries * sizes.w
    score = tl.load(column + ((i * sizes.w)[:, None] + x[None, :]), mask=exist[:, None] & inside[None, :], other=0.0)
    return score.to(tl.float32) * LOG2E


@triton.jit
def _attend(s, v, acc, top, total):
    """One step of the online softmax with logits s [BLOCK_M, keys] in base 2 and values v; returns updated acc, top and total.

    acc: output [BLOCK_M, D], not yet divided by total. top: maximum of the logits. total: sum of the weights.
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
    tl.store(lse + first + i, (tl.where(fully_masked, 0.0, top) + tl.log2(total)) / LOG2E, mask=exist)
