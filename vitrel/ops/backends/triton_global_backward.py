"""Backward kernels of vitrel.ops.backends.triton_global, in Triton: no [N, N] tensor, and bitwise equal results in every run.

Algorithm: three kernels compute the weights again, p = exp(logit - lse), and ds = p (grad_out.v - out.grad_out), tile by tile.

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

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrel.grid import Grid
from vitrel.ops.backends.triton_global import (
    LOG2E,
    PREFIX_LANES,
    _column_terms,
    _constants,
    _head_line,
    _in_log2,
    _key_tile,
    _like_tokens,
    _load_tokens,
    _packed,
    _prefix_line,
    _prefix_logits,
    _query_lanes,
    _query_tile,
    _row_lanes,
    _row_terms,
    _sizes_for,
    _store_tokens,
    _strided,
    _token_logits,
)
from vitrel.ops.backends.triton_window import WARP_GROUPS, architecture


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
    """Gradients of q, k, v, bias, row_scores and column_scores of `biased_forward`, the last three float32 or None.

    grad_out [B, H, M, D] may have any strides; out and lse are those of `biased_forward`. The bias gradient is None without
    bias_grad. Deterministic.
    """
    inputs = (_strided(q), _strided(k), _strided(v), _strided(out), _strided(grad_out.to(q.dtype)))
    tables = (_in_log2(bias), _packed(row_scores), _packed(column_scores))
    stats = (lse, torch.empty_like(lse))
    with torch.cuda.device_of(q):
        dq, drow, dcolumn, to_prefix = _query_gradients(inputs, stats, tables, grid, scale)  # first, since it computes delta
        dk, dv = _key_gradients(inputs, stats, tables, grid, scale)
        dbias = _table_gradient(inputs, stats, tables, to_prefix, grid, scale) if bias is not None and bias_grad else None
    return dq, dk, dv, dbias, drow, dcolumn


def _keys_tile(dtype: torch.dtype, width: int, aligned: bool, device: torch.device) -> tuple[int, int, int, int]:
    """Return (queries of a tile, keys of a tile, warps, stages) of the kernel whose programs own keys."""
    if dtype == torch.float32:
        return 32, 32, 8, 1
    if architecture(device) not in WARP_GROUPS:
        return 32, 64, 8 if aligned or width > 64 else 4, 1
    if architecture(device) > 90 and not aligned and width <= 64:
        return 64, 64, 8, 1
    return (32, 64, 8, 2) if aligned or width > 64 else (64, 64, 4, 2)


def _table_tile(dtype: torch.dtype, width: int, device: torch.device) -> tuple[int, int, int]:
    """Return (queries and keys of a tile, warps, stages) of the kernel whose programs own offsets."""
    if dtype == torch.float32:
        return 32, 8, 2
    return (64, 8, 2) if architecture(device) in WARP_GROUPS else (64, 4 if width <= 64 else 8, 1)


def _query_gradients(
    inputs: tuple, stats: tuple, tables: tuple, grid: Grid, scale: float
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    q = inputs[0][0]
    batch, heads, queries, width = q.shape
    bias, row, column = tables
    aligned = row is not None or column is not None
    block_m, block_n, *_ = tile = _query_tile(q.dtype, width, aligned)
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
    batch, heads, queries, width = q.shape
    aligned = tables[1] is not None or tables[2] is not None
    tile = _keys_tile(q.dtype, width, aligned, q.device)
    shape = _sizes_for(grid, heads, queries, tile[1], aligned)
    dk, dv = _like_tokens(k), _like_tokens(k)
    tiles = shape.groups * shape.chunks + (grid.prefix > 0)
    gradients = (_strided(dk), _strided(dv))
    _keys[(tiles * batch * heads,)](inputs, stats, tables, gradients, shape, float(scale), **_constants(grid, q, tile))
    return dk, dv


def _table_gradient(inputs: tuple, stats: tuple, tables: tuple, to_prefix: Tensor | None, grid: Grid, scale: float) -> Tensor:
    q = inputs[0][0]
    batch, heads, queries, width = q.shape
    block, warps, stages = _table_tile(q.dtype, width, q.device)
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
    """Gradient ds [queries, keys] with respect to the logits, given s, the logits divided by log 2.

    norm: log-sum-exp of each query divided by log 2. mean: out . grad_out of each query. dout: grad_out [queries, D].
    """
    p = tl.exp2(s - norm[:, None])
    return p * (tl.dot(dout, tl.trans(value), input_precision="ieee") - mean[:, None])


@triton.jit
def _sums_by(ds, place, LANES: tl.constexpr, PRECISION: tl.constexpr):
    """Sums [queries, LANES] of ds [queries, keys] over the keys whose `place` is the lane."""
    lanes = place[:, None] == tl.arange(0, LANES)[None, :]
    return tl.dot(ds, lanes.to(tl.float32), input_precision=PRECISION)


@triton.jit
def _store_row_gradient(drow, ds, bh, i, exist, group, chunk, y, sizes, PACKED: tl.constexpr, PRECISION: tl.constexpr):
    """Write the sums of ds [BLOCK_M, keys] over each image row of the tile (group, chunk) into drow [chunks, B*H, M, h].

    Each element is written by one tile, and chunks remain to be summed. drow: (pointer, B*H).
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
    norm = tl.load(lse + first + i, mask=exist, other=float("inf")) * LOG2E
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
        norm = tl.load(lse + first + i, mask=exist, other=float("inf")) * LOG2E
        mean = tl.load(delta + first + i, mask=exist, other=0.0)
        s = tl.dot(key, tl.trans(query), input_precision="ieee") * (scale * LOG2E)
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
            s += tl.load(row + first * h + ((i * h)[None, :] + y[:, None]), mask=both, other=0.0).to(tl.float32) * LOG2E
        if column is not None:
            s += tl.load(column + first * w + ((i * w)[None, :] + x[:, None]), mask=both, other=0.0).to(tl.float32) * LOG2E
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
        norm = tl.load(lse + first + i, mask=exist, other=float("inf")) * LOG2E
        mean = tl.load(delta + first + i, mask=exist, other=0.0)
        y, _x, j, inside = _key_tile(group - below, chunk - right, sizes, BLOCK, True)
        key, value = _load_tokens(k, b, head, j, inside, D), _load_tokens(v, b, head, j, inside, D)
        s = tl.dot(query, tl.trans(key), input_precision="ieee") * (scale * LOG2E) + logits
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
