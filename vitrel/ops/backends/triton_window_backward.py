"""Backward kernels of vitrel.ops.backends.triton_window: gradients of qkv, of the bias table, and of learned rotary angles.

Algorithm for windows of at most 64 tokens (`_whole`): a program owns one head and iterates over `per` windows. For each it
computes the softmax again, then the gradients of q, k and v, and sums the gradient of the bias of every pair of slots in
registers.

Larger windows (`_tiles`): a program owns one head and iterates over `per` windows, their tiles of keys, and for each over the
tiles of queries, with the row statistics and the output that the forward pass saved. Each pair of tiles takes five products: q
k^T, grad v^T, and those of dv, dk and dq. dk and dv stay in registers. dq (float32) and the gradient of the bias of every pair
of slots are added up in memory that this program alone uses, again for each of its windows, so that it stays in cache. Keys are
the outer loop, since queries would need two such sums, dk and dv.

The threads that read a sum are not those that write it (their layouts differ), so in every pair a barrier of the program lies
between reading and writing. A window has at least two tiles of queries, so a barrier also lies between a write and the next
read of the same sum.

Every program writes its sums separately, and torch adds them in a fixed order, so two runs are bitwise equal, without atomics.

Tiles: see `window_backward_tile`. Four warps of Hopper and Blackwell multiply 64 rows together; before, a warp multiplied 16.
Registers (floats): `_whole` bias, logits, their gradient and its sum, 4 * 64 * 64, and three gradients of 64 * D; `_tiles` the
same without the sum, which it holds for one addition.
Bytes moved: up to 64 tokens 7 * D elements per token and head (qkv and the output's gradient read, the gradient of qkv
written), and N * N floats per program.
Larger windows read D more (the output) and 12 bytes of statistics; in cache, for t tiles of keys,
8 * N bytes for the table, 8 * D * (t-1) for dq, and 2 * D * (t-1) elements of q and grad again.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrel.ops.backends.triton_window import (
    LOG2_E,
    MOST_IN_ONE_TILE,
    VARYING,
    WARP_GROUPS,
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
    architecture,
    check_qkv,
    contiguous_bias,
    launch_window,
    packed_angles,
    padded_tokens,
    saves_lse,
    window_count,
    windows_per_program,
)

_PROGRAMS = 2048  # maximum per launch
_SCRATCH = 64 * 2**20  # bytes of sums of all programs together, about; it limits the programs for windows of several tiles


def window_backward_tile(tokens: int, dtype: torch.dtype, width: int, device: torch.device) -> Tile:
    """Tile of the backward kernel for windows of N tokens; one that does not spill registers (tools/benchmark/kernels.py)."""
    if tokens <= MOST_IN_ONE_TILE:
        return Tile(padded_tokens(tokens), padded_tokens(tokens), 8, 1)
    if dtype != torch.float32 and architecture(device) in WARP_GROUPS:
        return Tile(64, 64, 8, 1)
    return Tile(16, 64, 4 if width <= 32 else 8, 1)


def window_backward(
    grad_out: Tensor,
    qkv: Tensor,
    bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    out: Tensor,
    lse: Tensor,
    window: tuple[int, int],
    shift: tuple[int, int],
    num_heads: int,
    scale: float,
    bias_grad: bool = True,
    rotary_grad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of qkv, bias, cos and sin of `window_forward`, given the gradient of its output [B, h, w, C].

    out, lse: the results of `window_forward` with grad; not read where not `saves_lse`. The gradients of bias [H, R] and of cos
    and sin [H|1, N, D/2] are float32; that of bias is None without bias_grad, those of cos and sin without rotary_grad.
    Deterministic. Raises ValueError as `window_forward` does, and without lse where it is needed.
    """
    check_qkv(qkv, window, shift, num_heads)
    tokens, width, windows = window[0] * window[1], qkv.shape[-1] // (3 * num_heads), window_count(qkv, window)
    several = saves_lse(window)
    if several and lse.shape != (*qkv.shape[:3], num_heads):
        raise ValueError(f"lse of shape {list(lse.shape)}; call window_forward with grad=True for a backward pass")
    tile, learned = window_backward_tile(tokens, qkv.dtype, width, qkv.device), rotary_grad and cos is not None
    line = triton.cdiv(tokens, 4) * 4 if bias is not None and bias_grad else 0  # so that 16 bytes are read at a time
    of_angles = (2 if several else 1) * 2 * width if learned else 0
    slots, columns = triton.cdiv(tokens, tile.rows) * tile.rows, triton.next_power_of_2(width) if several else 0
    floats = tokens * (line + of_angles) + slots * columns  # sums of a program
    programs = min(_PROGRAMS, max(1, _SCRATCH // (4 * floats))) if several else _PROGRAMS
    per = windows_per_program(windows, num_heads, programs)
    sums = (triton.cdiv(windows, per), num_heads)
    float32 = {"dtype": torch.float32, "device": qkv.device}
    grad_qkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    table = torch.empty(*sums, tokens, line, **float32) if line else None
    angle_sums = torch.empty(*sums, of_angles // width, tokens, width, **float32) if learned else None
    call = {"QKV": qkv.contiguous(), "GRAD": grad_out.to(qkv.dtype).contiguous(), "DQKV": grad_qkv, "scale": scale}
    call |= {"BIAS": contiguous_bias(bias), "ANGLES": packed_angles(cos, sin, num_heads), "TABLE": table, "DANGLES": angle_sums}
    if several:
        call |= {"OUT": out.contiguous(), "LSE": lse.contiguous(), "DELTA": torch.empty_like(lse)}
        call["DQ"] = torch.empty(*sums, slots, columns, **float32)
    launch_window(_tiles if several else _whole, tile, 1, per, window, shift, num_heads, **call)
    grad_bias = None if table is None else by_offset(table.sum(0)[..., :tokens], window)
    if angle_sums is None:
        return grad_qkv, grad_bias, None, None
    return grad_qkv, grad_bias, *angle_gradients(angle_sums.sum(0).unflatten(1, (-1, 2)).sum(1), cos.shape[0])


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
    TABLE,  # [chunks, H, N, N or a little more] float32, or None
    DANGLES,  # [chunks, H, 2, N, D] float32, or None
    h,
    w,
    windows,
    per,
    sizes,
):
    C: tl.constexpr = sizes.heads * sizes.d
    head, _, chunk = _job(sizes, 1)
    i = tl.arange(0, sizes.rows)
    bias = _bias(BIAS, head, i[:, None], i[None, :], sizes)
    table = tl.zeros((sizes.rows, sizes.keys), tl.float32)
    dcos, dsin = tl.zeros((sizes.rows, sizes.dp), tl.float32), tl.zeros((sizes.rows, sizes.dp), tl.float32)
    for window in range(chunk * per, tl.minimum((chunk + 1) * per, windows)):
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
        place, there = _table_place(chunk, head, i, i, sizes)
        tl.store(TABLE + place, table, mask=there)
    if DANGLES is not None:
        _store_angle_gradients(DANGLES, chunk * sizes.heads + head, i, dcos, dsin, sizes)


@triton.jit(do_not_specialize=VARYING)
def _tiles(
    QKV,
    BIAS,
    ANGLES,
    GRAD,
    scale,
    OUT,  # as GRAD
    LSE,  # [B, h, w, H] float32
    DELTA,  # as LSE; written and read by this kernel alone
    DQKV,
    DQ,  # [chunks, H, N and padding, dp] float32; as DELTA
    TABLE,
    DANGLES,  # [chunks, H, 4, N, D] float32, or None; queries, then keys
    h,
    w,
    windows,
    per,
    sizes,
):
    N: tl.constexpr = sizes.n
    C: tl.constexpr = sizes.heads * sizes.d
    SLOTS: tl.constexpr = (N + sizes.rows - 1) // sizes.rows * sizes.rows
    LAST: tl.constexpr = (N - 1) // sizes.keys * sizes.keys
    head, _, chunk = _job(sizes, 1)
    for window in range(chunk * per, tl.minimum((chunk + 1) * per, windows)):
        corner = _corner(window, h, w, sizes)
        summed = tl.where(window > chunk * per, N, 0)  # slots whose sums over windows have a value
        for start in range(0, N, sizes.rows):
            token, region = _place(start + tl.arange(0, sizes.rows), corner, sizes)
            at = token * C + head * sizes.d
            delta = tl.sum(_rows(GRAD, at, region, sizes).to(tl.float32) * _rows(OUT, at, region, sizes).to(tl.float32), 1)
            tl.store(DELTA + token * sizes.heads + head, delta, mask=region >= 0)
        tl.debug_barrier()
        for first in tl.range(0, N, sizes.keys, disable_licm=True):
            j = first + tl.arange(0, sizes.keys)
            other, other_region = _place(j, corner, sizes)
            to = other * (3 * C) + head * sizes.d
            k = _rotated_rows(QKV + C, to, other_region, ANGLES, head, j, sizes)
            v = _rows(QKV + 2 * C, to, other_region, sizes)
            dk = tl.zeros((sizes.keys, sizes.dp), tl.float32)
            dv = tl.zeros((sizes.keys, sizes.dp), tl.float32)
            for start in tl.range(0, N, sizes.rows, disable_licm=True):
                i = start + tl.arange(0, sizes.rows)
                token, region = _place(i, corner, sizes)
                at = token * (3 * C) + head * sizes.d
                q = _rotated_rows(QKV, at, region, ANGLES, head, i, sizes)
                grad = _rows(GRAD, token * C + head * sizes.d, region, sizes)
                lse = tl.load(LSE + token * sizes.heads + head, mask=region >= 0, other=1e30)  # weights of padding are 0
                delta = tl.load(DELTA + token * sizes.heads + head, mask=region >= 0, other=0.0)
                bias = _bias(BIAS, head, i[:, None], j[None, :], sizes)
                p = tl.exp2(_logits(q, k, bias, region, other_region, corner, scale) - (lse * LOG2_E)[:, None])
                dv = tl.dot(tl.trans(p.to(v.dtype)), grad, dv, input_precision="ieee")
                ds = p * (tl.dot(grad, tl.trans(v), input_precision="ieee") - delta[:, None])
                sums = DQ + (((chunk * sizes.heads + head) * SLOTS + i) * sizes.dp)[:, None] + tl.arange(0, sizes.dp)[None, :]
                dq = tl.load(sums, mask=(i < tl.where(first > 0, SLOTS, 0))[:, None], other=0.0)
                if TABLE is not None:
                    place, there = _table_place(chunk, head, i, j, sizes)
                    table = tl.load(TABLE + place, mask=there & (i < summed)[:, None], other=0.0)
                tl.debug_barrier()
                if TABLE is not None:
                    tl.store(TABLE + place, table + ds, mask=there)
                ds = ds.to(k.dtype)
                dk = tl.dot(tl.trans(ds), q, dk, input_precision="ieee")
                dq += tl.dot(ds, k, input_precision="ieee")
                if first < LAST:
                    tl.store(sums, dq)
                else:
                    dq *= scale
                    _store_rotated(DQKV, at, region, dq, ANGLES, head, i, sizes)
                    if DANGLES is not None:
                        x = _rows(QKV, at, region, sizes)
                        _add_stored_angle_gradients(DANGLES, (chunk * sizes.heads + head) * 2, i, x, dq, summed, sizes)
            dk *= scale
            _store_rotated(DQKV + C, to, other_region, dk, ANGLES, head, j, sizes)
            _store_rows(DQKV + 2 * C, to, other_region, dv, sizes)
            if DANGLES is not None:
                x = _rows(QKV + C, to, other_region, sizes)
                _add_stored_angle_gradients(DANGLES, (chunk * sizes.heads + head) * 2 + 1, j, x, dk, summed, sizes)


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
def _add_stored_angle_gradients(DANGLES, part, slot, x, grad, summed, sizes):
    """Add as `_add_angle_gradients` to the sums number `part` in memory, which have a value for `summed` slots."""
    base = DANGLES + part * (2 * sizes.n * sizes.d)
    region = tl.where(slot < summed, 0, -1)
    dcos = _rows(base, slot * sizes.d, region, sizes)
    dsin = _rows(base + sizes.n * sizes.d, slot * sizes.d, region, sizes)
    dcos, dsin = _add_angle_gradients(dcos, dsin, x, grad)
    tl.debug_barrier()  # all have read before any writes
    _store_angle_gradients(DANGLES, part, slot, dcos, dsin, sizes)


@triton.jit
def _store_angle_gradients(DANGLES, part, slot, dcos, dsin, sizes):
    """Store sums for cos and sin, [2, N, D], as number `part`."""
    base = DANGLES + part * (2 * sizes.n * sizes.d)
    region = tl.where(slot < sizes.n, 0, -1)
    _store_rows(base, slot * sizes.d, region, dcos, sizes)
    _store_rows(base + sizes.n * sizes.d, slot * sizes.d, region, dsin, sizes)


@triton.jit
def _table_place(chunk, head, i, j, sizes):
    """Index in TABLE of pairs of slots, and whether it is in range; lines are padded to 16 bytes."""
    LINE: tl.constexpr = (sizes.n + 3) // 4 * 4
    row = (chunk * sizes.heads + head) * sizes.n + i
    return row[:, None] * LINE + j[None, :], (i < sizes.n)[:, None] & (j < LINE)[None, :]
