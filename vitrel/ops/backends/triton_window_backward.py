"""Backward kernels of vitrel.ops.backends.triton_window: gradients of qkv, of the bias table, and of learned rotary angles.

Algorithm for windows of at most 64 tokens (`_whole`): a program owns one head and iterates over `per` windows. For each it
computes the softmax again, then the gradients of q, k and v, and sums the gradient of the bias of every pair of slots in
registers.

Larger windows do not fit into registers: the forward kernel runs again for the row statistics of the softmax (8 bytes per token
and head). Then tiles of queries against all keys give the gradient of q (`_queries`), tiles of keys against all queries those
of k and v (`_keys`), and each pair of tiles, over many windows, that of its bias (`_table`).

Every program writes its sums separately, and torch adds them in a fixed order, so two runs are bitwise equal, without atomics.

Tile: 64 x 64 on 8 warps. Registers (floats): bias, logits, their gradient and its sum over windows, 4 * 64 * 64 (64 per
thread), and three gradients of 64 * D.
Bytes moved, up to 64 tokens: 7 * D elements per token and head (qkv and the output's gradient read, the gradient of qkv
written), and N * N floats per program, for at most 2048 programs. Larger windows read 12 * D more.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrel.ops.backends.triton_window import (
    VARYING,
    Tile,
    _angles,
    _bias,
    _corner,
    _job,
    _logits,
    _place,
    _rotated,
    _rotated_rows,
    _rows,
    _store_rows,
    _swapped,
    check_qkv,
    contiguous_bias,
    launch_window,
    launch_window_forward,
    packed_angles,
    padded_tokens,
    window_count,
    windows_per_program,
)

_PROGRAMS = 2048  # maximum per launch, with 64 * 64 floats of sums each (32 MB)


def window_backward_tile(tokens: int) -> Tile:
    """Tile of the backward kernels for windows of N tokens, with as many keys as queries."""
    side = min(64, padded_tokens(tokens))
    return Tile(side, side, 8, 1)


def window_backward(
    grad_out: Tensor,
    qkv: Tensor,
    bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    window: tuple[int, int],
    shift: tuple[int, int],
    num_heads: int,
    scale: float,
    rotary_grad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of qkv, bias, cos and sin of `window_forward`, given the gradient of its output [B, h, w, C].

    The gradients of bias [H, R] and of cos and sin [H|1, N, D/2] are float32; those of cos and sin are None without
    rotary_grad. Deterministic. Raises ValueError as `window_forward` does.
    """
    check_qkv(qkv, window, shift, num_heads)
    tokens, width = window[0] * window[1], qkv.shape[-1] // (3 * num_heads)
    tile, windows, learned = window_backward_tile(tokens), window_count(qkv, window), rotary_grad and cos is not None
    tiles = triton.cdiv(tokens, tile.rows)
    pairs = windows_per_program(windows, num_heads * tiles**2, _PROGRAMS)
    single = windows_per_program(windows, num_heads * tiles, _PROGRAMS) if learned else 1
    float32 = {"dtype": torch.float32, "device": qkv.device}
    grad_qkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    table, angle_sums = None, (None, None)
    if bias is not None:
        table = torch.empty(triton.cdiv(windows, pairs), num_heads, tokens, tokens, **float32)
    if learned:
        angle_sums = torch.empty(min(tiles, 2), triton.cdiv(windows, single), num_heads, 2, tokens, width, **float32)
    call = {"window": window, "shift": shift, "num_heads": num_heads, "scale": scale}
    call |= {"QKV": qkv.contiguous(), "GRAD": grad_out.contiguous()}
    call |= {"BIAS": contiguous_bias(bias), "ANGLES": packed_angles(cos, sin, num_heads)}
    if tiles == 1:
        launch_window(_whole, tile, 1, pairs, **call, DQKV=grad_qkv, TABLE=table, DANGLES=angle_sums[0])
    else:
        call["STATS"] = torch.empty(*qkv.shape[:3], num_heads, 2, **float32)
        launch_window_forward(**call, OUT=None)
        launch_window(_queries, tile, tiles, single, **call, DQKV=grad_qkv, DANGLES=angle_sums[0])
        launch_window(_keys, tile, tiles, single, **call, DQKV=grad_qkv, DANGLES=angle_sums[1])
        if table is not None:
            launch_window(_table, tile, tiles**2, pairs, **call, TABLE=table)
    grad_bias = None if table is None else by_offset(table.sum(0), window)
    return grad_qkv, grad_bias, *(angle_gradients(angle_sums.sum((0, 1)), cos.shape[0]) if learned else (None, None))


def by_offset(pairs: Tensor, window: tuple[int, int]) -> Tensor:
    """Sum a gradient per pair of slots [H, N queries, N keys] by offset class of Grid(*window), [H, R], in a fixed order."""
    x = pairs.unflatten(2, window).unflatten(1, window).permute(0, 2, 4, 1, 3)  # [H, ww, ww, wh, wh]
    return _diagonal_sums(_diagonal_sums(x).permute(0, 3, 1, 2)).flatten(1)


def _diagonal_sums(x: Tensor) -> Tensor:
    """Sum x [..., n, n] over its diagonals, [..., 2n-1], by i - j + n-1."""
    n = x.shape[-1]
    flat = torch.nn.functional.pad(x.flip(-1), (0, n)).flatten(-2)  # element (i, j) is at 2n i + n-1-j = (2n-1) i + i-j + n-1
    return flat[..., : n * (2 * n - 1)].unflatten(-1, (n, 2 * n - 1)).sum(-2)


def angle_gradients(sums: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Gradients of cos and sin [heads, N, D/2] from the kernels' sums [H, 2, N, D], in which sin has the signs of `_angles`.

    heads: those of cos and sin, H, or 1 if they are shared, where the sum over all heads is returned.
    """
    cos, sin = sums.sum(0, keepdim=True).unbind(1) if heads == 1 else sums.unbind(1)
    (first, second), (minus, plus) = cos.chunk(2, -1), sin.chunk(2, -1)
    return first + second, plus - minus


@triton.jit(do_not_specialize=VARYING)
def _whole(
    QKV,  # [B, h, w, 3, H, D]
    BIAS,  # [H, R] float32, or None
    ANGLES,  # [H, 2, N, D/2] float32, or None
    GRAD,  # [B, h, w, H, D]
    scale,
    DQKV,  # as QKV
    TABLE,  # [chunks, H, N, N] float32, or None
    DANGLES,  # [chunks, H, 2, N, D] float32, or None
    h,
    w,
    windows,
    sizes,
):
    C: tl.constexpr = sizes.heads * sizes.d
    head, _, chunk = _job(sizes, 1)
    i = tl.arange(0, sizes.rows)
    bias = _bias(BIAS, head, i[:, None], i[None, :], sizes)
    table = tl.zeros((sizes.rows, sizes.keys), tl.float32)
    dcos, dsin = tl.zeros((sizes.rows, sizes.dp), tl.float32), tl.zeros((sizes.rows, sizes.dp), tl.float32)
    for window in range(chunk * sizes.per, tl.minimum((chunk + 1) * sizes.per, windows)):
        corner = _corner(window, h, w, sizes)
        token, region = _place(i, corner, sizes)
        at = token * (3 * C) + head * sizes.d
        q = _rotated_rows(QKV, at, region, ANGLES, head, i, sizes)
        k = _rotated_rows(QKV + C, at, region, ANGLES, head, i, sizes)
        v = _rows(QKV + 2 * C, at, region, sizes)
        grad = _rows(GRAD, token * C + head * sizes.d, region, sizes)
        s = _logits(q, k, bias, region, region, corner, scale)
        p = tl.exp2(s - tl.maximum(tl.max(s, 1), -1e30)[:, None])
        p = p / tl.maximum(tl.sum(p, 1), 1.0)[:, None]  # as in the forward kernel
        dv = tl.dot(tl.trans(p.to(v.dtype)), grad, input_precision="ieee")
        _store_rows(DQKV + 2 * C, at, region, dv, sizes)
        dp = tl.dot(grad, tl.trans(v), input_precision="ieee")
        ds = p * (dp - tl.sum(p * dp, 1)[:, None])
        table += ds
        ds = ds.to(v.dtype)
        dq = tl.dot(ds, k, input_precision="ieee") * scale
        _store_rotated(DQKV, at, region, dq, ANGLES, head, i, sizes)
        dk = tl.dot(tl.trans(ds), q, input_precision="ieee") * scale
        _store_rotated(DQKV + C, at, region, dk, ANGLES, head, i, sizes)
        if DANGLES is not None:
            dcos, dsin = _add_angle_gradients(dcos, dsin, _rows(QKV, at, region, sizes), dq)
            dcos, dsin = _add_angle_gradients(dcos, dsin, _rows(QKV + C, at, region, sizes), dk)
    if TABLE is not None:
        _store_table(TABLE, chunk, head, i, i, table, sizes)
    if DANGLES is not None:
        _store_angle_gradients(DANGLES, chunk, head, i, dcos, dsin, sizes)


@triton.jit(do_not_specialize=VARYING)
def _queries(
    QKV,
    BIAS,
    ANGLES,
    GRAD,
    scale,
    STATS,  # of the forward kernel
    DQKV,
    DANGLES,
    h,
    w,
    windows,
    sizes,
):
    N: tl.constexpr = sizes.n
    C: tl.constexpr = sizes.heads * sizes.d
    head, tile, chunk = _job(sizes, (N + sizes.rows - 1) // sizes.rows)
    i = tile * sizes.rows + tl.arange(0, sizes.rows)
    dcos, dsin = tl.zeros((sizes.rows, sizes.dp), tl.float32), tl.zeros((sizes.rows, sizes.dp), tl.float32)
    for window in range(chunk * sizes.per, tl.minimum((chunk + 1) * sizes.per, windows)):
        corner = _corner(window, h, w, sizes)
        token, region = _place(i, corner, sizes)
        at = token * (3 * C) + head * sizes.d
        q = _rotated_rows(QKV, at, region, ANGLES, head, i, sizes)
        grad = _rows(GRAD, token * C + head * sizes.d, region, sizes)
        level, mean = _stats(STATS, token, region, head, sizes)
        dq = tl.zeros((sizes.rows, sizes.dp), tl.float32)
        for first in range(0, N, sizes.keys):
            j = first + tl.arange(0, sizes.keys)
            other, other_region = _place(j, corner, sizes)
            to = other * (3 * C) + head * sizes.d
            k = _rotated_rows(QKV + C, to, other_region, ANGLES, head, j, sizes)
            v = _rows(QKV + 2 * C, to, other_region, sizes)
            bias = _bias(BIAS, head, i[:, None], j[None, :], sizes)
            p = tl.exp2(_logits(q, k, bias, region, other_region, corner, scale) - level[:, None])
            ds = p * (tl.dot(grad, tl.trans(v), input_precision="ieee") - mean[:, None])
            dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee") * scale
        _store_rotated(DQKV, at, region, dq, ANGLES, head, i, sizes)
        if DANGLES is not None:
            dcos, dsin = _add_angle_gradients(dcos, dsin, _rows(QKV, at, region, sizes), dq)
    if DANGLES is not None:
        _store_angle_gradients(DANGLES, chunk, head, i, dcos, dsin, sizes)


@triton.jit(do_not_specialize=VARYING)
def _keys(
    QKV,
    BIAS,
    ANGLES,
    GRAD,
    scale,
    STATS,  # of the forward kernel
    DQKV,
    DANGLES,
    h,
    w,
    windows,
    sizes,
):
    N: tl.constexpr = sizes.n
    C: tl.constexpr = sizes.heads * sizes.d
    head, tile, chunk = _job(sizes, (N + sizes.keys - 1) // sizes.keys)
    j = tile * sizes.keys + tl.arange(0, sizes.keys)
    dcos, dsin = tl.zeros((sizes.keys, sizes.dp), tl.float32), tl.zeros((sizes.keys, sizes.dp), tl.float32)
    for window in range(chunk * sizes.per, tl.minimum((chunk + 1) * sizes.per, windows)):
        corner = _corner(window, h, w, sizes)
        other, other_region = _place(j, corner, sizes)
        to = other * (3 * C) + head * sizes.d
        k = _rotated_rows(QKV + C, to, other_region, ANGLES, head, j, sizes)
        v = _rows(QKV + 2 * C, to, other_region, sizes)
        dk = tl.zeros((sizes.keys, sizes.dp), tl.float32)
        dv = tl.zeros((sizes.keys, sizes.dp), tl.float32)
        for first in range(0, N, sizes.rows):
            i = first + tl.arange(0, sizes.rows)
            token, region = _place(i, corner, sizes)
            at = token * (3 * C) + head * sizes.d
            q = _rotated_rows(QKV, at, region, ANGLES, head, i, sizes)
            grad = _rows(GRAD, token * C + head * sizes.d, region, sizes)
            level, mean = _stats(STATS, token, region, head, sizes)
            bias = _bias(BIAS, head, i[:, None], j[None, :], sizes)
            p = tl.exp2(_logits(q, k, bias, region, other_region, corner, scale) - level[:, None])
            ds = p * (tl.dot(grad, tl.trans(v), input_precision="ieee") - mean[:, None])
            dv += tl.dot(tl.trans(p.to(v.dtype)), grad, input_precision="ieee")
            dk += tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision="ieee") * scale
        _store_rotated(DQKV + C, to, other_region, dk, ANGLES, head, j, sizes)
        _store_rows(DQKV + 2 * C, to, other_region, dv, sizes)
        if DANGLES is not None:
            dcos, dsin = _add_angle_gradients(dcos, dsin, _rows(QKV + C, to, other_region, sizes), dk)
    if DANGLES is not None:
        _store_angle_gradients(DANGLES, chunk, head, j, dcos, dsin, sizes)


@triton.jit(do_not_specialize=VARYING)
def _table(
    QKV,
    BIAS,
    ANGLES,
    GRAD,
    scale,
    STATS,  # of the forward kernel
    TABLE,
    h,
    w,
    windows,
    sizes,
):
    N: tl.constexpr = sizes.n
    C: tl.constexpr = sizes.heads * sizes.d
    TILES: tl.constexpr = (N + sizes.keys - 1) // sizes.keys
    head, tile, chunk = _job(sizes, (N + sizes.rows - 1) // sizes.rows * TILES)
    i = tile // TILES * sizes.rows + tl.arange(0, sizes.rows)
    j = tile % TILES * sizes.keys + tl.arange(0, sizes.keys)
    bias = _bias(BIAS, head, i[:, None], j[None, :], sizes)
    table = tl.zeros((sizes.rows, sizes.keys), tl.float32)
    for window in range(chunk * sizes.per, tl.minimum((chunk + 1) * sizes.per, windows)):
        corner = _corner(window, h, w, sizes)
        token, region = _place(i, corner, sizes)
        at = token * (3 * C) + head * sizes.d
        q = _rotated_rows(QKV, at, region, ANGLES, head, i, sizes)
        grad = _rows(GRAD, token * C + head * sizes.d, region, sizes)
        level, mean = _stats(STATS, token, region, head, sizes)
        other, other_region = _place(j, corner, sizes)
        to = other * (3 * C) + head * sizes.d
        k = _rotated_rows(QKV + C, to, other_region, ANGLES, head, j, sizes)
        v = _rows(QKV + 2 * C, to, other_region, sizes)
        p = tl.exp2(_logits(q, k, bias, region, other_region, corner, scale) - level[:, None])
        ds = p * (tl.dot(grad, tl.trans(v), input_precision="ieee") - mean[:, None])
        table += ds
    _store_table(TABLE, chunk, head, i, j, table, sizes)


@triton.jit
def _stats(STATS, token, region, head, sizes):
    """For each row, log2 of its sum of exponentials (for padding so large that its weights are 0), and grad . out."""
    at = STATS + (token * sizes.heads + head) * 2
    return tl.load(at, mask=region >= 0, other=1e30), tl.load(at + 1, mask=region >= 0, other=0.0)


@triton.jit
def _store_rotated(base, offset, region, grad, ANGLES, head, slot, sizes):
    """Store the gradient of queries or keys, given the gradient of the rotated queries or keys."""
    if ANGLES is not None:
        cos, sin = _angles(ANGLES, head, slot, sizes)
        grad = _rotated(grad, cos, -sin)
    _store_rows(base, offset, region, grad, sizes)


@triton.jit
def _add_angle_gradients(dcos, dsin, x, grad):
    """Return the sums for cos and sin plus the contribution of x (queries or keys) and the gradient of rotated x; signs as in
    `_angles`.
    """
    x = x.to(tl.float32)
    return dcos + grad * x, dsin + grad * _swapped(x)


@triton.jit
def _store_angle_gradients(DANGLES, chunk, head, slot, dcos, dsin, sizes):
    """Store this program's sums for cos and sin."""
    base = DANGLES + (chunk * sizes.heads + head) * (2 * sizes.n * sizes.d)
    region = tl.where(slot < sizes.n, 0, -1)
    _store_rows(base, slot * sizes.d, region, dcos, sizes)
    _store_rows(base + sizes.n * sizes.d, slot * sizes.d, region, dsin, sizes)


@triton.jit
def _store_table(TABLE, chunk, head, i, j, table, sizes):
    """Store this program's sums for the bias of pairs of slots."""
    at = ((chunk * sizes.heads + head) * sizes.n + i)[:, None] * sizes.n + j[None, :]
    tl.store(TABLE + at, table, mask=(i < sizes.n)[:, None] & (j < sizes.n)[None, :])
