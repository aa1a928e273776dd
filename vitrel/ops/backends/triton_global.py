"""Kernels of global attention with a bias table, in Triton: forward and backward, without an [N, N] tensor.

Forward: flash attention (online softmax, arXiv 2205.14135). A program computes BLOCK_M queries of one head and iterates over
the keys in tiles. It stores the log-sum-exp of every query, from which the backward pass computes the weights again.

Bias table: the offset class of query i and key j is line(i) - cell(j), with line(i) = (y + h-1)(2w-1) + x + w-1 and cell(j) = y
(2w-1) + x, so one subtraction per score gives it. A tile of a rows of queries and b rows of keys reads a+b-1 lines of the
table, each contiguous and at most 2w-1 long (from L1). Prefix keys are a tile of 16 lanes.

A tile of keys is aligned with image rows where that leaves no lane without a key (w a multiple of the lanes, or whole rows that
fill them; ROW): then there are no masks, the offsets within a tile are known to the compiler, and from tile to tile one number
changes for all scores. Elsewhere a tile is any BLOCK_N consecutive patch keys, so that no lane is wasted for any w.

Registers (float32): logits, then weights [BLOCK_M, BLOCK_N], out [BLOCK_M, D], maximum and sum per query. Matrix products read
queries, keys and values from shared memory.
Bytes moved, per head: q, out and lse once; k and v once per tile of queries (from L2); the table once.

Backward: two kernels compute the weights again, p = exp(logit - lse), and ds = p (grad_out.v - out.grad_out), tile by tile.
Their results are bitwise equal in every run.

- `_queries`: a program takes tiles of BLOCK_M queries of one head and iterates over keys: dq, the sum of ds at prefix keys, and
  the gradient of the table.
- `_keys`: a program owns BLOCK_N keys and iterates over queries, with transposed logits: dk and dv.

The gradient of a table sums ds over pairs with the same offset. In a square tile within one image row these are its diagonals;
in tiles of several whole rows a diagonal has two offsets. ds goes through shared memory once, and comes back so that diagonals
are columns, whose sums the program adds to a table of its own; torch sums these tables in a fixed order. This avoids an atomic
addition per score, and a third kernel that would compute all logits and weights again. Tiles of queries and of keys are then
aligned with image rows: a tile holds as many whole rows as fit (two rows of 14 fill 28 of 32 lanes), or a part of a wider row.

Registers (float32): logits and ds of a tile; dq [BLOCK_M, D]; dk and dv [BLOCK_N, D]. Shared memory: twice ds.

Bytes moved, per head: `_queries` as the forward kernel, and out, grad_out and dq once; `_keys` k, v, dk and dv once, q and
grad_out once per tile of keys. Scratch memory (float32): [B, H, M], twice with prefix tokens; the tables of the programs, at
most as many elements as q.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrel.grid import Grid
from vitrel.ops.backends import triton_tiles
from vitrel.ops.backends.triton_tiles import DTYPES, LOG2_E, Tile, ceil_div, compiler_options, global_tile, table_tile

WIDTHS = (16, 32, 64, 128)  # head widths D
MOST_PATCHES = 2**20  # see `_row_of`
TABLES = 768  # maximum programs that compute the gradient of a table, each in one of its own
PREFIX_LANES = tl.constexpr(16)  # lanes of the tile of prefix keys or queries, the minimum of a matrix product
PLAIN_LOADS = tl.constexpr(triton.knobs.runtime.interpret)  # it does not run PTX


def global_limits(dtype: torch.dtype, width: int, grid: Grid, queries: int) -> str:
    """Return the reason why the kernels of global attention do not serve a call, "" if they do.

    Args:
        dtype: of q, k and v.
        width: width D of a head.
        grid: of the keys.
        queries: number of queries M.
    """
    if dtype not in DTYPES:
        return f"the kernel supports float32, float16 and bfloat16, not {dtype}"
    if width not in WIDTHS:
        return f"the kernel supports head widths {', '.join(map(str, WIDTHS))}, not {width}"
    if grid.prefix > PREFIX_LANES.value:
        return f"the kernel supports up to {PREFIX_LANES.value} prefix tokens, not {grid.prefix}"
    if grid.h * grid.w > MOST_PATCHES:
        return f"the kernel supports grids of up to {MOST_PATCHES} tokens, not {grid.h} x {grid.w}"
    if queries != grid.tokens and (queries % grid.w or not 0 < queries <= grid.h * grid.w):
        return f"{queries} queries are neither all {grid.tokens} tokens of the grid nor its last whole rows of {grid.w}"
    return ""


def biased_forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, grid: Grid, scale: float) -> tuple[Tensor, Tensor]:
    """Return softmax(scale * q . k + bias[class]) v and the log-sum-exp of its logits.

    Args:
        q: [B, H, M, D], of one dtype with k and v, any strides; the last M tokens of the key grid, all tokens or whole rows.
        k: [B, H, N, D].
        v: [B, H, N, D].
        bias: [H, R] by offset class (query minus key, Grid.index("hw")).
        grid: of the keys.
        scale: factor of q . k.

    Returns:
        The output [B, H, M, D] in v's dtype, in memory [B, M, H, D], and the log-sum-exp [B, H, M] float32 (natural logarithm),
            used by the backward pass.

    Raises:
        ValueError: `global_limits` gives a reason, or a shape is another.
    """
    if reason := global_limits(q.dtype, q.shape[-1], grid, q.shape[-2]):
        raise ValueError(reason)
    _check_shapes(q, k, v, bias, grid)
    batch, heads, queries, _ = q.shape
    out = like_tokens(q)
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    block_m, block_n, *_ = tile = _tile_for("forward", q)
    with torch.cuda.device_of(q):
        _forward[(ceil_div(queries, block_m) * batch * heads,)](
            (_strided(q), _strided(k), _strided(v)),
            _strided(out),
            lse,
            _in_log2(bias),
            _sizes_for(grid, heads, queries, block_n, aligned=False),
            float(scale),
            ROW=_whole_rows(grid.h, grid.w, block_n),
            **_constants(grid, q, tile),
        )
    return out, lse


def _check_shapes(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, grid: Grid) -> None:
    """Raise ValueError if q, k and v have several dtypes, or for shapes with which the kernels would read out of bounds."""
    keys = (*q.shape[:2], grid.tokens, q.shape[-1])
    if q.dim() != 4 or k.shape != keys or v.shape != keys or not q.dtype == k.dtype == v.dtype:
        actual = ", ".join(f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in (q, k, v))
        raise ValueError(f"q, k, v are {actual}; expected [B, H, M, D] and twice [B, H, {grid.tokens}, D], of one dtype")
    if bias.shape != (q.shape[1], grid.classes()):
        raise ValueError(f"bias of shape {list(bias.shape)}; expected {[q.shape[1], grid.classes()]} on this grid")


class _Sizes(NamedTuple):
    """Sizes that the kernels receive: heads, grid, queries M, and the division of the patch keys into groups * chunks tiles.

    Aligned tiles hold `rows` whole image rows, in `groups` tiles down (chunks = 1); where a row is wider than a tile, rows = 1,
    and a row is divided into `chunks` tiles. Other tiles hold any consecutive patch keys: `groups` is their number, chunks = 1,
    and `rows` is not used. h, w and prefix are those of the key grid.
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
    """Return the `_Sizes` for a launch whose programs iterate over tiles of `lanes` keys.

    Args:
        grid: of the keys.
        heads: number of heads H.
        queries: number of queries of a head in all (M, not BLOCK_M).
        lanes: keys of a tile (BLOCK_N).
        aligned: True: tiles follow the image rows, as the gradient of the table needs. False: they do so where no lane is
            wasted; otherwise they hold any consecutive patch keys.
    """
    rows = max(1, lanes // grid.w)
    if not aligned and not _whole_rows(grid.h, grid.w, lanes):
        return _Sizes(heads, *grid, queries, rows, ceil_div(grid.h * grid.w, lanes), 1)
    return _Sizes(heads, *grid, queries, rows, ceil_div(grid.h, rows), ceil_div(grid.w, lanes))


def _constants(grid: Grid, x: Tensor, tile: Tile) -> dict[str, int]:
    """Return the kernels' constexpr arguments, without ROW, QUERY_ROW and SEVERAL, and compiler options for queries like x."""
    sizes = {"PREFIX": grid.prefix > 0, "D": x.shape[-1], "BLOCK_M": tile.rows, "BLOCK_N": tile.keys}
    return sizes | compiler_options(tile, x.dtype)


def _whole_rows(rows: int, columns: int, lanes: int) -> int:
    """Return min(columns, lanes), the lanes in one image row, if tiles aligned with image rows have a token in every lane.

    Else 0. The kernels receive the result as ROW: if it is not 0, they have no masks, and the place of a lane relative to the
    first one of its tile is known when they are compiled. rows and columns are the grid's, lanes a tile's tokens.
    """
    if columns % lanes == 0:
        return lanes
    return columns if lanes % columns == 0 and rows % (lanes // columns) == 0 else 0


def _strided(x: Tensor) -> tuple[Tensor, int, int, int]:
    """Return (x, its strides of batch, head and token) of x [B, H, N, D]; a copy of x if its last stride is not 1."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    batch, head, token, _ = x.stride()
    return x, batch, head, token


def _in_log2(bias: Tensor) -> Tensor:
    """Return a bias table [H, R] in the kernels' format: contiguous, float32, divided by the natural logarithm of 2."""
    return (bias.float() * LOG2_E.value).contiguous()


def like_tokens(x: Tensor) -> Tensor:
    """Return an uninitialized tensor of x's shape [B, H, N, D], stored as [B, N, H, D], so that merging heads needs no copy."""
    return x.new_empty((x.shape[0], x.shape[2], x.shape[1], x.shape[3])).transpose(1, 2)


@triton.jit
def _row_of(token, w):
    """Return token // w for tokens below 2^20, by a product in float32: an integer division takes twenty instructions."""
    return ((token + 0.5) * (1.0 / w)).to(tl.int32)


@triton.jit
def _head_line(head, sizes, PREFIX: tl.constexpr):
    """Return the index in the flat table [H, R] at which the R entries of a head start, with `sizes` as of `_Sizes`."""
    return head.to(tl.int32) * ((2 * sizes.h - 1) * (2 * sizes.w - 1) + (3 if PREFIX else 0))


@triton.jit
def _query_lanes(i, head, sizes, PREFIX: tl.constexpr):
    """Return the index of queries i [BLOCK_M] in the flat bias table [H, R], and True where a query is a prefix token.

    The index is that of the offset to the key at (0, 0); for a key at (y, x), subtract y * (2w-1) + x. Prefix tokens have the
    index of patch 0, only to keep loads in range. Lanes beyond the last query repeat the last query. `sizes`: see `_Sizes`.
    """
    h, w = sizes.h, sizes.w
    patch = tl.minimum(i, sizes.queries - 1) + (h * w - sizes.queries)
    at = tl.maximum(patch, 0)
    y = _row_of(at, w)
    return _head_line(head, sizes, PREFIX) + (y + h - 1) * (2 * w - 1) + (at - y * w) + w - 1, patch < 0


@triton.jit
def _prefix_line(head, sizes):
    """Return the index in the flat table [H, R] at which a head's prefix classes start: prefix query, prefix key, both."""
    return _head_line(head, sizes, True) + (2 * sizes.h - 1) * (2 * sizes.w - 1)


@triton.jit
def _key_tile(group, chunk, sizes, LANES: tl.constexpr, ALIGNED: tl.constexpr):
    """Return row y and column x of each lane of a tile of patch keys, and whether the key exists.

    Lanes without a key have values out of range. The token of the first lane is that of `_first_key`.

    Args:
        group: index of the tile down the image.
        chunk: index of the tile within an image row.
        sizes: see `_Sizes`.
        LANES: keys of a tile.
        ALIGNED: tiles are aligned with image rows, see `_Sizes`; otherwise group numbers the tiles, and chunk is ignored.
    """
    lane = tl.arange(0, LANES)
    if ALIGNED:
        r = _row_of(lane, sizes.w)
        y = group * sizes.rows + r
        x = chunk * LANES + lane - r * sizes.w
        return y, x, (r < sizes.rows) & (y < sizes.h) & (x < sizes.w)
    else:
        patch = group * LANES + lane
        y = _row_of(patch, sizes.w)
        return y, patch - y * sizes.w, patch < sizes.h * sizes.w


@triton.jit
def _first_key(group, chunk, sizes, LANES: tl.constexpr, ALIGNED: tl.constexpr):
    """Return the token of the first lane of the tile of `_key_tile`, counted with the prefix tokens; the others follow it."""
    if ALIGNED:
        return sizes.prefix + group * sizes.rows * sizes.w + chunk * LANES
    else:
        return sizes.prefix + group * LANES


@triton.jit
def _row_cells(LANES: tl.constexpr, ROW: tl.constexpr):
    """Return y (2w-1) + x for the token (y, x) of each lane of an aligned tile, minus the same for lane 0: [LANES].

    These are distances in a flat bias table. ROW, of `_whole_rows` and not 0, is the grid's width w, or LANES where the tile
    lies in one image row.
    """
    lane = tl.arange(0, LANES)
    return lane + lane // ROW * (ROW - 1)


@triton.jit
def _load_tokens(x, b, head, first, lane, exist, D: tl.constexpr, ALL: tl.constexpr):
    """Load [len(lane), D] of x [B, H, N, D], given as of `_strided`: tokens first + lane; zeros where `exist` is False.

    With ALL, `exist` is not read: every token exists.
    """
    base, of_batch, of_head, of_token = x
    base += b * of_batch + head * of_head + tl.cast(first, tl.int64) * of_token
    at = base + (lane[:, None] * of_token + tl.arange(0, D)[None, :])
    if ALL:
        return tl.load(at)
    else:
        return tl.load(at, mask=exist[:, None], other=0.0)


@triton.jit
def _store_tokens(x, b, head, first, lane, exist, value, D: tl.constexpr):
    """Write `value` into the tokens first + lane of x [B, H, N, D], given as of `_strided`, where `exist` is True."""
    base, of_batch, of_head, of_token = x
    base += b * of_batch + head * of_head + tl.cast(first, tl.int64) * of_token
    at = base + (lane[:, None] * of_token + tl.arange(0, D)[None, :])
    tl.store(at, value.to(base.dtype.element_ty), mask=exist[:, None])


@triton.jit
def _look_up(at):
    """Return the values of a bias table at the pointers `at`, one for each score.

    tl.load would read them in the order of a copy, and exchange them between the threads through shared memory. This
    instruction leaves each to the thread that holds its score, and constant distances between its pointers cost nothing.
    """
    if PLAIN_LOADS:
        return tl.load(at)
    else:
        return tl.inline_asm_elementwise("ld.global.nc.f32 $0, [$1];", "=f,l", [at], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _token_logits(
    query, key, bias, line, is_prefix, group, chunk, y, x, inside, head, scale, sizes, ROW: tl.constexpr, PREFIX: tl.constexpr
):
    """Return content and table logits [BLOCK_M, BLOCK_N] of patch keys at (y, x), divided by log 2; -inf where no key is.

    line and is_prefix are those of `_query_lanes`; group, chunk, y, x and inside those of `_key_tile`; ROW is that of
    `_whole_rows`.
    """
    LANES: tl.constexpr = key.shape[0]
    s = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * LOG2_E)
    if ROW:
        first = group * sizes.rows * (2 * sizes.w - 1) + chunk * LANES
        table = _look_up((bias - first + line)[:, None] - _row_cells(LANES, ROW)[None, :])
    else:
        cell = tl.where(inside, y * (2 * sizes.w - 1) + x, 0)  # in range for every lane, so loads need no mask
        table = _look_up(bias + (line[:, None] - cell[None, :]))
    if PREFIX:
        table = tl.where(is_prefix[:, None], tl.load(bias + _prefix_line(head, sizes)), table)
    s += table
    if ROW:
        return s
    else:
        return tl.where(inside[None, :], s, float("-inf"))


@triton.jit
def _prefix_logits(query, key, bias, is_prefix, head, scale, sizes):
    """Return content and table logits of the prefix keys, [BLOCK_M, PREFIX_LANES], divided by log 2; -inf where no key is."""
    s = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * LOG2_E)
    s += tl.load(bias + _prefix_line(head, sizes) + tl.where(is_prefix, 2, 1))[:, None]
    return tl.where((tl.arange(0, PREFIX_LANES) < sizes.prefix)[None, :], s, float("-inf"))


@triton.jit
def _attend(s, v, acc, top, total):
    """Return acc, top and total after one step of the online softmax over a tile of keys.

    Args:
        s: logits [BLOCK_M, keys] divided by log 2.
        v: values of the keys, [keys, D].
        acc: output [BLOCK_M, D] so far, not yet divided by total.
        top: maximum of each query's logits so far.
        total: sum of exp2(logit - top) so far.
    """
    new = tl.maximum(top, tl.max(s, 1))
    shift = tl.where(new == float("-inf"), 0.0, new)  # all keys so far may be masked
    p = tl.exp2(s - shift[:, None])
    old = tl.exp2(top - shift)
    acc = acc * old[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
    return acc, new, total * old + tl.sum(p, 1)


@triton.jit
def _forward(
    inputs,  # q, k and v, each as of `_strided`
    out,  # as of `_strided`
    lse,  # [B, H, M]
    bias,  # as of `_in_log2`
    sizes,  # as of `_sizes_for`
    scale,
    PREFIX: tl.constexpr,
    ROW: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    q, k, v = inputs
    ALIGNED: tl.constexpr = ROW > 0
    heads, prefix, queries = sizes.heads, sizes.prefix, sizes.queries
    tiles = tl.cdiv(queries, BLOCK_M)
    bh = (tl.program_id(0) // tiles).to(tl.int64)
    b, head = bh // heads, bh % heads
    start = tl.program_id(0) % tiles * BLOCK_M
    lane = tl.arange(0, BLOCK_M)
    i = start + lane
    exist, first = i < queries, bh * queries
    query = _load_tokens(q, b, head, start, lane, exist, D, False)
    line, is_prefix = _query_lanes(i, head, sizes, PREFIX)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    if PREFIX:
        key_lane = tl.arange(0, PREFIX_LANES)
        first_key = _load_tokens(k, b, head, 0, key_lane, key_lane < prefix, D, False)
        first_value = _load_tokens(v, b, head, 0, key_lane, key_lane < prefix, D, False)
        first_logits = _prefix_logits(query, first_key, bias, is_prefix, head, scale, sizes)
        acc, top, total = _attend(first_logits, first_value, acc, top, total)
    for chunk in range(sizes.chunks):
        for group in range(sizes.groups):
            y, x, inside = _key_tile(group, chunk, sizes, BLOCK_N, ALIGNED)
            j = _first_key(group, chunk, sizes, BLOCK_N, ALIGNED)
            key = _load_tokens(k, b, head, j, tl.arange(0, BLOCK_N), inside, D, ROW > 0)
            value = _load_tokens(v, b, head, j, tl.arange(0, BLOCK_N), inside, D, ROW > 0)
            s = _token_logits(query, key, bias, line, is_prefix, group, chunk, y, x, inside, head, scale, sizes, ROW, PREFIX)
            acc, top, total = _attend(s, value, acc, top, total)
    fully_masked = total == 0.0  # fully masked queries return 0
    total = tl.where(fully_masked, 1.0, total)
    _store_tokens(out, b, head, start, lane, exist, acc / total[:, None], D)
    tl.store(lse + first + i, (tl.where(fully_masked, 0.0, top) + tl.log2(total)) / LOG2_E, mask=exist)


def biased_backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    out: Tensor,
    lse: Tensor,
    grid: Grid,
    scale: float,
    bias_grad: bool = True,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v (in their dtypes) and bias (float32) of `biased_forward`.

    Two runs give equal bits. The inputs are not checked.

    Args:
        grad_out: gradient of the output, [B, H, M, D], any strides.
        q: as in `biased_forward`, and so are k, v, bias, grid and scale.
        out: result of `biased_forward`.
        lse: result of `biased_forward`.
        bias_grad: False: the gradient of bias is not computed, and is None.
    """
    inputs = (_strided(q), _strided(k), _strided(v), _strided(out), _strided(grad_out.to(q.dtype)))
    table, stats = _in_log2(bias), (lse, torch.empty_like(lse))
    with torch.cuda.device_of(q):
        # First the queries, since they compute delta.
        dq, dbias = _query_gradients(inputs, stats, table, grid, scale, bias_grad)
        dk, dv = _key_gradients(inputs, stats, table, grid, scale)
    return dq, dk, dv, dbias


def _tile_for(kernel: str, q: Tensor) -> Tile:
    """Return the tile of the kernel "forward", "queries" or "keys" (see `global_tile`) for queries like q on their device."""
    return global_tile(kernel, q.dtype, q.shape[-1], triton_tiles.architecture(q.device))


def _query_gradients(
    inputs: tuple, stats: tuple, table: Tensor, grid: Grid, scale: float, bias_grad: bool
) -> tuple[Tensor, Tensor | None]:
    """Launch `_queries`: return the gradients of the queries and, with bias_grad, of the table [H, R], else None.

    inputs: q, k, v, out and grad_out, each as of `_strided`. stats: lse, and delta (out . grad_out), which is written here.
    table: the bias as of `_in_log2`.
    """
    q = inputs[0][0]
    batch, heads, queries, width = q.shape
    tile = _tile_for("queries", q)
    if bias_grad:
        tile = table_tile(tile, grid.w, triton_tiles.architecture(q.device))
    keys = _sizes_for(grid, heads, queries, tile.keys, bias_grad)
    down = min(queries // grid.w, grid.h)  # image rows of the queries
    of_queries = _sizes_for(Grid(down, grid.w), heads, queries, tile.rows, bias_grad)
    tiles = of_queries.groups * of_queries.chunks + (queries > down * grid.w)
    programs = batch * tiles  # of a head
    dq, parts = like_tokens(q), None
    if bias_grad:  # a program sums the gradient of a table over its tiles; all sums have no more elements than q
        programs = min(programs, ceil_div(TABLES, heads), max(1, batch * queries * width // grid.classes()))
        parts = torch.zeros((heads, programs, grid.classes()), dtype=torch.float32, device=q.device)
    to_prefix = torch.empty_like(stats[0]) if bias_grad and grid.prefix else None
    _queries[(programs * heads,)](
        inputs,
        stats,
        table,
        (_strided(dq), parts, to_prefix),
        keys,
        (of_queries.groups, of_queries.chunks, batch * tiles, programs),
        float(scale),
        ROW=_whole_rows(grid.h, grid.w, tile.keys),
        SEVERAL=tile.keys >= 2 * grid.w,
        **_constants(grid, q, tile),
    )
    if parts is None:
        return dq, None
    dbias = parts.sum(1)
    if to_prefix is not None:
        first, prefix = grid.offset_classes(), grid.prefix if queries == grid.tokens else 0
        dbias[:, first + 1] = to_prefix[:, :, prefix:].sum((0, 2))
        dbias[:, first + 2] = to_prefix[:, :, :prefix].sum((0, 2))
        dbias[:, first] = -dbias[:, first + 2]  # the softmax of a prefix query depends on their difference only
    return dq, dbias


def _key_gradients(inputs: tuple, stats: tuple, table: Tensor, grid: Grid, scale: float) -> tuple[Tensor, Tensor]:
    """Launch `_keys`: return the gradients of keys and values. Arguments as of `_query_gradients`, which must run before."""
    q, k = inputs[0][0], inputs[1][0]
    batch, heads, queries, _ = q.shape
    tile = _tile_for("keys", q)
    shape = _sizes_for(grid, heads, queries, tile.keys, aligned=False)
    dk, dv = like_tokens(k), like_tokens(k)
    tiles = shape.groups * shape.chunks + (grid.prefix > 0)
    gradients = (_strided(dk), _strided(dv))
    _keys[(tiles * batch * heads,)](
        inputs,
        stats,
        table,
        gradients,
        shape,
        float(scale),
        ROW=_whole_rows(grid.h, grid.w, tile.keys),
        QUERY_ROW=_whole_rows(min(queries // grid.w, grid.h), grid.w, tile.rows),
        **_constants(grid, q, tile),
    )
    return dk, dv


@triton.jit
def _logit_gradient(s, norm, mean, dout, value):
    """Return the gradient [queries, keys] with respect to the logits themselves, not divided by log 2.

    Args:
        s: the logits [queries, keys] divided by log 2.
        norm: log-sum-exp of each query divided by log 2.
        mean: out . grad_out of each query.
        dout: grad_out [queries, D].
        value: values of the keys.
    """
    p = tl.exp2(s - norm[:, None])
    return p * (tl.dot(dout, tl.trans(value), input_precision="ieee") - mean[:, None])


@triton.jit
def _queries(
    inputs,  # q, k, v, out and grad_out, each as of `_strided`
    stats,  # lse [B, H, M], and delta [B, H, M], out . grad_out of each query, which is written here
    bias,
    grads,  # dq as of `_strided`; parts [H, programs, R] and to_prefix [B, H, M], sums of ds at prefix keys, or None
    sizes,
    work,
    scale,
    PREFIX: tl.constexpr,
    ROW: tl.constexpr,
    SEVERAL: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    groups, chunks, items, programs = work  # tiles of queries down and across, tiles and programs of a head
    head = (tl.program_id(0) // programs).to(tl.int64)
    tiles = groups * chunks + (1 if sizes.queries > sizes.h * sizes.w else 0)
    for item in range(tl.program_id(0) % programs, items, programs):
        b = (item // tiles).to(tl.int64)
        tile = item % tiles, groups, chunks
        _query_tile(inputs, stats, bias, grads, sizes, b, head, tile, scale, PREFIX, ROW, SEVERAL, D, BLOCK_M, BLOCK_N)


@triton.jit
def _query_tile(
    inputs,
    stats,
    bias,
    grads,
    sizes,
    b,
    head,
    tile,
    scale,
    PREFIX: tl.constexpr,
    ROW: tl.constexpr,
    SEVERAL: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write dq and delta of a tile of patch queries, or, as the last tile, of the prefix queries.

    The bias gradient is added to `parts`, that of prefix keys written to `to_prefix`, both in `grads`, unless these are None.
    Arguments as of `_queries`; tile: (its index, tiles of patch queries down, across).
    """
    q, k, v, out, grad_out = inputs
    lse, delta = stats
    dq, parts, to_prefix = grads
    tile, query_groups, query_chunks = tile
    ALIGNED: tl.constexpr = parts is not None or ROW > 0
    h, w, prefix, queries = sizes.h, sizes.w, sizes.prefix, sizes.queries
    bh = b * sizes.heads + head
    first = bh * queries
    prefixes = tl.maximum(queries - h * w, 0)  # queries that are prefix tokens
    patches = queries - prefixes
    lane = BLOCK_M - 1 - tl.arange(0, BLOCK_M)  # backwards, as `_diagonals` needs
    is_prefix = tile == query_groups * query_chunks
    if parts is not None:  # tiles of queries are aligned with image rows
        rows = tl.maximum(BLOCK_M // w, 1)
        down, right = tile // query_chunks * rows, tile % query_chunks * BLOCK_M
        start = prefixes + down * w + right
        r = _row_of(lane, w)
        exist = (r < rows) & ((down + r) * w < patches) & (right + lane - r * w < w)
        down += h - patches // w
        down = tl.where(is_prefix, 2 * h + BLOCK_M, down)  # outside of the table, so nothing is added to it
    else:
        start = prefixes + tile * BLOCK_M
        exist = tile * BLOCK_M + lane < patches
    if PREFIX:
        start, exist = tl.where(is_prefix, 0, start), tl.where(is_prefix, lane < prefixes, exist)
    i = start + lane
    query = _load_tokens(q, b, head, start, lane, exist, D, False)
    dout = _load_tokens(grad_out, b, head, start, lane, exist, D, False)
    mean = tl.sum(dout.to(tl.float32) * _load_tokens(out, b, head, start, lane, exist, D, False).to(tl.float32), 1)
    tl.store(delta + first + i, mean, mask=exist)
    norm = tl.load(lse + first + i, mask=exist, other=float("inf")) * LOG2_E
    line, of_prefix = _query_lanes(i, head, sizes, PREFIX)
    acc = tl.zeros((BLOCK_M, D), tl.float32)
    if PREFIX:
        key_lane = tl.arange(0, PREFIX_LANES)
        first_key = _load_tokens(k, b, head, 0, key_lane, key_lane < prefix, D, False)
        first_value = _load_tokens(v, b, head, 0, key_lane, key_lane < prefix, D, False)
        first_logits = _prefix_logits(query, first_key, bias, of_prefix, head, scale, sizes)
        dfirst = _logit_gradient(first_logits, norm, mean, dout, first_value)
        acc = tl.dot(dfirst.to(first_key.dtype), first_key, acc, input_precision="ieee")
        if to_prefix is not None:
            tl.store(to_prefix + first + i, tl.sum(dfirst, 1), mask=exist)
    for chunk in range(sizes.chunks):
        for group in range(sizes.groups):
            y, x, inside = _key_tile(group, chunk, sizes, BLOCK_N, ALIGNED)
            j = _first_key(group, chunk, sizes, BLOCK_N, ALIGNED)
            key = _load_tokens(k, b, head, j, tl.arange(0, BLOCK_N), inside, D, ROW > 0)
            value = _load_tokens(v, b, head, j, tl.arange(0, BLOCK_N), inside, D, ROW > 0)
            s = _token_logits(query, key, bias, line, of_prefix, group, chunk, y, x, inside, head, scale, sizes, ROW, PREFIX)
            ds = _logit_gradient(s, norm, mean, dout, value)
            acc = tl.dot(ds.to(key.dtype), key, acc, input_precision="ieee")
            if parts is not None:
                classes = (2 * h - 1) * (2 * w - 1) + (3 if PREFIX else 0)
                of_program = parts + tl.program_id(0).to(tl.int64) * classes
                _add_diagonals(of_program, ds, down - group * sizes.rows, right - chunk * BLOCK_N, sizes, SEVERAL)
    _store_tokens(dq, b, head, start, lane, exist, acc * scale, D)


@triton.jit
def _add_diagonals(table, ds, down, right, sizes, SEVERAL: tl.constexpr):
    """Add ds [queries backwards, keys] of a square tile to `table`, a program's sums by offset class (query minus key).

    Lane 0 of the queries lies `down` rows below and `right` columns to the right of lane 0 of the keys. Lanes i and j with the
    same i - j have one offset in tiles that lie in one image row. In tiles of SEVERAL rows they have two, depending on whether
    the end of an image row lies between them.
    """
    h, w = sizes.h, sizes.w
    BLOCK: tl.constexpr = ds.shape[0]
    apart = -tl.arange(0, 2 * BLOCK) + (BLOCK - 1)  # i - j
    if SEVERAL:
        query_lane, key_lane = -tl.arange(0, BLOCK) + (BLOCK - 1), tl.arange(0, BLOCK)
        in_order = (query_lane - _row_of(query_lane, w) * w)[:, None] >= (key_lane - _row_of(key_lane, w) * w)[None, :]
        rows = _row_of(apart + w * BLOCK, w) - BLOCK  # made positive, since conversion truncates
        columns = apart - rows * w
        _add_line(table, _diagonals(tl.where(in_order, ds, 0.0)), down + rows, right + columns, h, w)
        _add_line(table, _diagonals(tl.where(in_order, 0.0, ds)), down + rows + 1, right + columns - w, h, w)
    else:
        _add_line(table, _diagonals(ds), down + tl.zeros_like(apart), right + apart, h, w)


@triton.jit
def _add_line(table, sums, dy, dx, h, w):
    """Add `sums` in memory to a table [(2h-1)(2w-1)] at the offsets (dy, dx) that it has; no two offsets may be equal."""
    inside = (tl.abs(dy) < h) & (tl.abs(dx) < w)
    tl.atomic_add(table + (dy + h - 1) * (2 * w - 1) + dx + w - 1, sums, mask=inside, sem="relaxed")


@triton.jit
def _diagonals(x):
    """Return the sums of x [n, n] over its diagonals from the upper right to the lower left, [2n]; the last one is empty.

    The elements of diagonal d have i + j = d. Each row is followed by as many zeros, so that in memory they are 2n-1 apart, and
    what else lies at this distance from those of a shorter diagonal are zeros.
    """
    n: tl.constexpr = x.shape[0]
    flat = tl.reshape(tl.permute(tl.join(x, tl.zeros_like(x)), (0, 2, 1)), (2 * n * n,))
    at = tl.arange(0, n)[:, None] * (2 * n - 1) + tl.arange(0, 2 * n)[None, :]
    return tl.sum(tl.reshape(tl.gather(flat, tl.reshape(at, (2 * n * n,)), 0), (n, 2 * n)), 0)


@triton.jit
def _add_queries(dkey, dvalue, key, value, query, dout, norm, mean, logits, scale):
    """Return the gradients of a tile of keys and values plus what some queries add to them, with transposed logits.

    Args:
        dkey: gradient of the keys so far, [BLOCK_N, D], without the factor `scale`.
        dvalue: gradient of the values so far, [BLOCK_N, D].
        key: keys of the tile.
        value: their values.
        query: queries.
        dout: their gradients of the output.
        norm: their log-sum-exp divided by log 2; infinity where no query is.
        mean: their out . grad_out.
        logits: what position terms add to the logits [keys, queries], divided by log 2.
        scale: factor of the content logits.
    """
    s = tl.dot(key, tl.trans(query), input_precision="ieee") * (scale * LOG2_E) + logits
    p = tl.exp2(s - norm[None, :])
    dvalue = tl.dot(p.to(dout.dtype), dout, dvalue, input_precision="ieee")
    ds = p * (tl.dot(value, tl.trans(dout), input_precision="ieee") - mean[None, :])
    return tl.dot(ds.to(query.dtype), query, dkey, input_precision="ieee"), dvalue


@triton.jit
def _load_queries(inputs, stats, b, head, bh, first, exist, queries, LANES: tl.constexpr, D: tl.constexpr, ALL: tl.constexpr):
    """Return (query, dout, norm, mean), see `_add_queries`, of LANES queries from `first` on, loaded from inputs and stats.

    Where `exist` is False norm is infinite and the others are 0; with ALL, it is not read.
    """
    lse, delta = stats
    lane = tl.arange(0, LANES)
    query = _load_tokens(inputs[0], b, head, first, lane, exist, D, ALL)
    dout = _load_tokens(inputs[4], b, head, first, lane, exist, D, ALL)
    at = bh * queries + first + lane
    if ALL:
        return query, dout, tl.load(lse + at) * LOG2_E, tl.load(delta + at)
    else:
        norm = tl.load(lse + at, mask=exist, other=float("inf")) * LOG2_E
        return query, dout, norm, tl.load(delta + at, mask=exist, other=0.0)


@triton.jit
def _keys(
    inputs,  # as of `_queries`
    stats,
    bias,
    grads,  # dk and dv, each as of `_strided`
    sizes,
    scale,
    PREFIX: tl.constexpr,
    ROW: tl.constexpr,
    QUERY_ROW: tl.constexpr,
    D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    k, v = inputs[1], inputs[2]
    dk, dv = grads
    ALIGNED: tl.constexpr = ROW > 0
    heads, h, w, prefix, queries = sizes.heads, sizes.h, sizes.w, sizes.prefix, sizes.queries
    tiles = sizes.groups * sizes.chunks + (1 if PREFIX else 0)
    tile, bh = tl.program_id(0) % tiles, (tl.program_id(0) // tiles).to(tl.int64)
    b, head = bh // heads, bh % heads
    y, x, inside = _key_tile(tile // sizes.chunks, tile % sizes.chunks, sizes, BLOCK_N, ALIGNED)
    j = _first_key(tile // sizes.chunks, tile % sizes.chunks, sizes, BLOCK_N, ALIGNED)
    cell = tl.where(inside, y * (2 * w - 1) + x, 0)  # in range for every lane, so loads need no mask
    if PREFIX:
        to_prefix = tile == tiles - 1
        j, inside = tl.where(to_prefix, 0, j), tl.where(to_prefix, tl.arange(0, BLOCK_N) < prefix, inside)
    lane = tl.arange(0, BLOCK_N)
    key = _load_tokens(k, b, head, j, lane, inside, D, False)
    value = _load_tokens(v, b, head, j, lane, inside, D, False)
    dkey, dvalue = tl.zeros((BLOCK_N, D), tl.float32), tl.zeros((BLOCK_N, D), tl.float32)
    first_patch = tl.maximum(queries - h * w, 0)  # of the queries; before it are prefix tokens
    if PREFIX:
        is_query = tl.arange(0, PREFIX_LANES) < first_patch
        first_query, first_dout, first_norm, first_mean = _load_queries(
            inputs, stats, b, head, bh, 0, is_query, queries, PREFIX_LANES, D, False
        )
        first_logits = tl.load(bias + _prefix_line(head, sizes) + tl.where(to_prefix, 2, 0))
        dkey, dvalue = _add_queries(
            dkey, dvalue, key, value, first_query, first_dout, first_norm, first_mean, first_logits, scale
        )
    patches = queries - first_patch
    if QUERY_ROW:
        down: tl.constexpr = BLOCK_M // QUERY_ROW  # image rows of a tile
        chunks = w // BLOCK_M if QUERY_ROW == BLOCK_M else 1
        groups = patches // (w * down)
    else:
        chunks, groups = 1, tl.cdiv(patches, BLOCK_M)
    for chunk in range(chunks):
        for group in range(groups):
            if QUERY_ROW:
                first = first_patch + group * down * w + chunk * BLOCK_M
            else:
                first = first_patch + group * BLOCK_M
            i = first + tl.arange(0, BLOCK_M)
            exist = i < queries
            query, dout, norm, mean = _load_queries(
                inputs, stats, b, head, bh, first, exist, queries, BLOCK_M, D, QUERY_ROW > 0
            )
            if QUERY_ROW:
                top = h - patches // w + group * down  # image row
                line = _head_line(head, sizes, PREFIX) + (top + h - 1) * (2 * w - 1) + chunk * BLOCK_M + w - 1
                logits = _look_up((bias + line - cell)[:, None] + _row_cells(BLOCK_M, QUERY_ROW)[None, :])
            else:
                line, _ = _query_lanes(i, head, sizes, PREFIX)
                logits = _look_up(bias + (line[None, :] - cell[:, None]))
            if PREFIX:
                logits = tl.where(to_prefix, tl.load(bias + _prefix_line(head, sizes) + 1), logits)
            dkey, dvalue = _add_queries(dkey, dvalue, key, value, query, dout, norm, mean, logits, scale)
    _store_tokens(dk, b, head, j, lane, inside, dkey * scale, D)
    _store_tokens(dv, b, head, j, lane, inside, dvalue, D)
