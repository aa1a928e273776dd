"""Attention inside (shifted) windows in one Triton kernel, raster order in and out; the backward pass is beside it.

Algorithm: a program serves one head and `rows` queries of a window, and walks over its keys `keys` at a time (flash attention,
arXiv 2205.14135). Up to 64 tokens are one tile: then it serves `per` windows, whose bias it looks up once.
Shift, padding, partition, mask and reverse are arithmetic on the slots of a window (vitrel.ops.window says what they mean):
padding is neither loaded nor stored, and the mask is computed only in windows that hold a border. Rotary terms turn q and k in
float32, before they are rounded to the type of the matrix products, which accumulate in float32. Logits are in base 2.

Tile: 64 x 64 for windows of 33 to 64 tokens (7 x 7, 8 x 8), 64 x 32 above, the next power of two below; 4 warps.
Kept in registers, floats: logits and bias, 2 * rows * keys (64 a thread), and the output, rows * D.
Bytes moved: 4 * D elements a token and head: qkv is read once, the output written once. Programs of one window and of its
heads run side by side: they find its keys and values in the cache. So is the bias, R floats a head. Nothing has N * N elements.
"""

import contextlib
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrel.ops.window import check_window

WIDTHS = (16, 32, 48, 64)  # of a head
MOST_TOKENS = 256  # of a window
LOG2_E = tl.constexpr(1.4426950408889634)
VARYING = ("h", "w", "windows")  # not to be specialised: a sweep over grids compiles a kernel once
PROGRAMS = 4096  # at most per launch; each serves several windows and reuses their bias


class Tile(NamedTuple):
    """How a kernel is cut: queries and keys of a tile, warps of a program, and the depth of its software pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


class WindowSizes(NamedTuple):
    """What a kernel is compiled for. A window has n = wh * ww slots; dp is the head width d as a power of two."""

    heads: tl.constexpr
    wh: tl.constexpr
    ww: tl.constexpr
    n: tl.constexpr
    sy: tl.constexpr
    sx: tl.constexpr
    d: tl.constexpr
    dp: tl.constexpr
    per: tl.constexpr  # windows of a program
    rows: tl.constexpr
    keys: tl.constexpr


def window_tile(tokens: int) -> Tile:
    """Of the forward kernel, for windows of N tokens."""
    side = min(64, padded_tokens(tokens))
    return Tile(side, side, 4, 2) if tokens <= side else Tile(side, 32, 4, 1)


def window_refuses(dtype: torch.dtype, width: int, window: tuple[int, int]) -> str:
    """Why the kernels do not serve this type, head width D and window (h, w) in tokens, or ""."""
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the Triton window kernels compute in float32, float16 and bfloat16, not {dtype}"
    if width not in WIDTHS:
        return f"the Triton window kernels take heads of width {', '.join(map(str, WIDTHS))}, not {width}"
    if window[0] * window[1] > MOST_TOKENS:
        return f"the Triton window kernels hold windows of at most {MOST_TOKENS} tokens, not {window[0]}x{window[1]}"
    return ""


def window_forward(
    qkv: Tensor,
    bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    window: tuple[int, int],
    shift: tuple[int, int],
    num_heads: int,
    scale: float,
) -> Tensor:
    """Attention inside (shifted) windows: [B, h, w, 3C] -> [B, h, w, C]; geometry of vitrel.ops.window.

    bias: [H, R] by offset class of Grid(*window), query minus key in tokens, not scaled. cos, sin: [H|1, N, D/2], the angles of
    the slots of a window, turning the pairs (p, p + D/2) of q and k. scale multiplies q . k. window, shift: (h, w) in tokens.
    Raises ValueError where `window_refuses` says so, and for an impossible window or shift.
    """
    check_qkv(qkv, window, shift, num_heads)
    _check_tables(bias, cos, sin, window, num_heads, qkv.shape[-1] // (3 * num_heads))
    out = torch.empty(*qkv.shape[:-1], qkv.shape[-1] // 3, dtype=qkv.dtype, device=qkv.device)
    turn = packed_angles(cos, sin, num_heads)
    shared = {"QKV": qkv.contiguous(), "BIAS": rows_of(bias), "TURN": turn, "GRAD": None, "scale": scale}
    launch_window_forward(window, shift, num_heads, **shared, OUT=out, STATS=None)
    return out


def launch_window_forward(
    window: tuple[int, int], shift: tuple[int, int], num_heads: int, **arguments: Tensor | float | None
) -> None:
    """Run the forward kernel, whose arguments are named as it names them."""
    tile = window_tile(window[0] * window[1])
    tiles = triton.cdiv(window[0] * window[1], tile.rows)
    per = windows_per_program(window_count(arguments["QKV"], window), num_heads, PROGRAMS) if tiles == 1 else 1
    launch_window(_forward, tile, tiles, per, window, shift, num_heads, **arguments)


def launch_window(
    kernel: triton.JITFunction,
    tile: Tile,
    tiles: int,
    per: int,
    window: tuple[int, int],
    shift: tuple[int, int],
    num_heads: int,
    **arguments: Tensor | float | None,
) -> None:
    """Run a kernel: `tiles` programs for each head and each `per` windows."""
    qkv = arguments["QKV"]
    windows, width = window_count(qkv, window), qkv.shape[-1] // (3 * num_heads)
    shape = (num_heads, *window, window[0] * window[1], *shift, width, triton.next_power_of_2(width), per, tile.rows, tile.keys)
    programs = triton.cdiv(windows, per) * tiles * num_heads
    if programs == 0:
        return
    # Triton launches on the current device.
    with torch.cuda.device(qkv.device) if qkv.is_cuda else contextlib.nullcontext():
        kernel[(programs,)](
            **arguments,
            h=qkv.shape[1],
            w=qkv.shape[2],
            windows=windows,
            sizes=WindowSizes(*map(tl.constexpr, shape)),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


def check_qkv(qkv: Tensor, window: tuple[int, int], shift: tuple[int, int], num_heads: int) -> None:
    """ValueError for what the kernels refuse, and for an impossible window or shift."""
    check_window(window, shift)
    if reason := window_refuses(qkv.dtype, qkv.shape[-1] // (3 * num_heads), window):
        raise ValueError(reason)


def _check_tables(
    bias: Tensor | None, cos: Tensor | None, sin: Tensor | None, window: tuple[int, int], num_heads: int, width: int
) -> None:
    """ValueError for tables of other shapes, beyond which the kernels would read."""
    (h, w), turn = window, (window[0] * window[1], width // 2)
    if bias is not None and bias.shape != (num_heads, (2 * h - 1) * (2 * w - 1)):
        wanted = [num_heads, (2 * h - 1) * (2 * w - 1)]
        raise ValueError(f"bias of shape {list(bias.shape)}; windows of {h}x{w} take {wanted}")
    for angle in (cos, sin):
        if angle is not None and angle.shape not in ((1, *turn), (num_heads, *turn)):
            raise ValueError(f"cos or sin of shape {list(angle.shape)}; windows of {h}x{w} take {[num_heads, *turn]}")


def window_count(qkv: Tensor, window: tuple[int, int]) -> int:
    """Windows of all images of qkv [B, h, w, 3C]."""
    return qkv.shape[0] * triton.cdiv(qkv.shape[1], window[0]) * triton.cdiv(qkv.shape[2], window[1])


def padded_tokens(tokens: int) -> int:
    """NP: tokens of a window, padded to what a matrix product takes."""
    return max(16, triton.next_power_of_2(tokens))


def windows_per_program(windows: int, jobs: int, programs: int) -> int:
    """Windows that share a program, for at most about `programs` with `jobs` for each set of windows: a power of two, since a
    kernel is compiled for it.
    """
    return triton.next_power_of_2(max(1, triton.cdiv(windows * jobs, programs)))


def rows_of(bias: Tensor | None) -> Tensor | None:
    """A table [H, R] as the kernels read it, contiguous and float32."""
    return None if bias is None else bias.detach().float().contiguous()


def packed_angles(cos: Tensor | None, sin: Tensor | None, num_heads: int) -> Tensor | None:
    """cos and sin [H|1, N, D/2] as the kernels read them, [H, 2, N, D/2] float32."""
    if cos is None:
        return None
    return torch.stack((cos.detach(), sin.detach()), 1).float().expand(num_heads, -1, -1, -1).contiguous()


@triton.jit(do_not_specialize=VARYING)
def _forward(
    QKV,  # [B, h, w, 3, H, D]
    BIAS,  # [H, R] float32, or None
    TURN,  # [H, 2, N, D/2] float32, or None
    GRAD,  # [B, h, w, H, D] of the output, where STATS are asked for
    scale,
    OUT,  # as GRAD, or None
    STATS,  # [B, h, w, H, 2] float32, or None: log2 of the sum of exponentials of every row, and grad . out
    h,
    w,
    windows,
    sizes,
):
    N: tl.constexpr = sizes.n
    C: tl.constexpr = sizes.heads * sizes.d
    head, tile, chunk = _job(sizes, (N + sizes.rows - 1) // sizes.rows)
    i = tile * sizes.rows + tl.arange(0, sizes.rows)
    if sizes.keys >= N:
        bias = _bias(BIAS, head, i[:, None], tl.arange(0, sizes.keys)[None, :], sizes)
    for window in range(chunk * sizes.per, tl.minimum((chunk + 1) * sizes.per, windows)):
        corner = _corner(window, h, w, sizes)
        token, region = _place(i, corner, sizes)
        q = _rotated_rows(QKV, token * (3 * C) + head * sizes.d, region, TURN, head, i, sizes)
        most = tl.full((sizes.rows,), -1e30, tl.float32)
        total = tl.zeros((sizes.rows,), tl.float32)
        out = tl.zeros((sizes.rows, sizes.dp), tl.float32)
        for first in range(0, N, sizes.keys):
            j = first + tl.arange(0, sizes.keys)
            other, other_region = _place(j, corner, sizes)
            to = other * (3 * C) + head * sizes.d
            k = _rotated_rows(QKV + C, to, other_region, TURN, head, j, sizes)
            v = _rows(QKV + 2 * C, to, other_region, sizes)
            if sizes.keys < N:
                bias = _bias(BIAS, head, i[:, None], j[None, :], sizes)
            s = _logits(q, k, bias, region, other_region, corner, scale)
            higher = tl.maximum(most, tl.max(s, 1))
            p = tl.exp2(s - higher[:, None])
            shrink = tl.exp2(most - higher)
            total = total * shrink + tl.sum(p, 1)
            out = out * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            most = higher
        total = tl.maximum(total, 1.0)  # it is at least that, but for padding that sees no key
        out = out / total[:, None]
        if OUT is not None:
            _store_rows(OUT, token * C + head * sizes.d, region, out, sizes)
        if STATS is not None:
            grad = _rows(GRAD, token * C + head * sizes.d, region, sizes)
            at = (token * sizes.heads + head) * 2
            tl.store(STATS + at, most + tl.log2(total), mask=region >= 0)
            tl.store(STATS + at + 1, tl.sum(grad * out, 1), mask=region >= 0)


@triton.jit
def _job(sizes, TILES: tl.constexpr):
    """(head, tile of the window, chunk of windows) of this program; heads first: their rows lie side by side in memory."""
    rest = tl.program_id(0) // sizes.heads
    return tl.program_id(0) % sizes.heads, rest % TILES, rest // TILES


@triton.jit
def _corner(window, h, w, sizes):
    """A window's image, its first row and column, the shift, the grid, and whether it holds padding or the cyclic border."""
    down = (h + sizes.wh - 1) // sizes.wh
    across = (w + sizes.ww - 1) // sizes.ww
    sy = tl.where(h > sizes.wh, sizes.sy, 0)  # none along an axis that fits into one window
    sx = tl.where(w > sizes.ww, sizes.sx, 0)
    top = (window // across) % down * sizes.wh + sy
    left = window % across * sizes.ww + sx
    border = (top + sizes.wh > h) | (left + sizes.ww > w)
    return (window // (down * across)).to(tl.int64), top, left, sy, sx, h, w, border


@triton.jit
def _place(slot, corner, sizes):
    """Token of each slot, counted over the batch, and its region: tokens of one see each other; -1 where there is no token."""
    image, top, left, sy, sx, h, w, _ = corner
    bottom = (h + sizes.wh - 1) // sizes.wh * sizes.wh
    right = (w + sizes.ww - 1) // sizes.ww * sizes.ww
    y = top + slot // sizes.ww
    x = left + slot % sizes.ww
    y = tl.where(y >= bottom, y - bottom, y)
    x = tl.where(x >= right, x - right, x)
    there = (slot < sizes.n) & (y < h) & (x < w)
    region = tl.where(y < sy, 2, 0) + tl.where(x < sx, 1, 0)
    return image * h * w + y * w + x, tl.where(there, region, -1)


@triton.jit
def _logits(q, k, bias, region, other_region, corner, scale):
    """[ROWS, KEYS] in units of log 2, -inf where a query does not see a key."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2_E) + bias
    if corner[7]:
        s = tl.where(region[:, None] == other_region[None, :], s, float("-inf"))
    return s


@triton.jit
def _bias(BIAS, head, query, key, sizes):
    """Bias of the slots `query` and `key` (broadcast against each other), in log 2; -inf for keys beyond the window."""
    if BIAS is None:
        bias = tl.where(key < sizes.n, 0.0, float("-inf"))
    else:
        query = tl.minimum(query, sizes.n - 1)
        row = query // sizes.ww - key // sizes.ww + sizes.wh - 1
        column = query % sizes.ww - key % sizes.ww + sizes.ww - 1
        at = (head * (2 * sizes.wh - 1) + row) * (2 * sizes.ww - 1) + column
        bias = tl.load(BIAS + at, mask=(key < sizes.n) & (query >= 0), other=float("-inf")) * LOG2_E
    return bias


@triton.jit
def _channels(sizes):
    """Channel of each column of a tile, and whether it has one: each half of a head is padded for itself, to turn its pairs."""
    column = tl.arange(0, sizes.dp)
    pair = column % (sizes.dp // 2)
    return column // (sizes.dp // 2) * (sizes.d // 2) + pair, pair < sizes.d // 2


@triton.jit
def _rows(base, offset, region, sizes):
    """Rows of D elements at base + offset, zeros where the region is -1."""
    channel, there = _channels(sizes)
    mask = (region >= 0)[:, None]
    if sizes.d != sizes.dp:
        mask = mask & there[None, :]
    return tl.load(base + offset[:, None] + channel[None, :], mask=mask, other=0.0)


@triton.jit
def _store_rows(base, offset, region, value, sizes):
    """The converse of _rows, rounded to the type of `base`."""
    channel, there = _channels(sizes)
    mask = (region >= 0)[:, None]
    if sizes.d != sizes.dp:
        mask = mask & there[None, :]
    tl.store(base + offset[:, None] + channel[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _rotated_rows(base, offset, region, TURN, head, slot, sizes):
    """_rows of queries or keys, rotated by the angles of their slots where there are any."""
    x = _rows(base, offset, region, sizes)
    if TURN is not None:
        cos, sin = _angles(TURN, head, slot, sizes)
        x = _rotated(x, cos, sin).to(x.dtype)
    return x


@triton.jit
def _angles(TURN, head, slot, sizes):
    """cos and sin of the slots for every column, sin with the sign that the other half of a pair has in `_rotated`."""
    HALF: tl.constexpr = sizes.d // 2
    column = tl.arange(0, sizes.dp)
    pair = column % (sizes.dp // 2)
    at = (head * 2 * sizes.n + slot)[:, None] * HALF + pair[None, :]
    mask = (slot < sizes.n)[:, None] & (pair < HALF)[None, :]
    cos = tl.load(TURN + at, mask=mask, other=0.0)
    sin = tl.load(TURN + sizes.n * HALF + at, mask=mask, other=0.0)
    return cos, tl.where((column < sizes.dp // 2)[None, :], -sin, sin)


@triton.jit
def _rotated(x, cos, sin):
    """x in float32, each pair (p, p + D/2) rotated; with -sin rotated back."""
    x = x.to(tl.float32)
    return x * cos + _swapped(x) * sin


@triton.jit
def _swapped(x):
    """x with the halves of its columns exchanged."""
    ROWS: tl.constexpr = x.shape[0]
    HALF: tl.constexpr = x.shape[1] // 2
    a, b = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, HALF)), (0, 2, 1)))
    return tl.reshape(tl.permute(tl.join(b, a), (0, 2, 1)), (ROWS, 2 * HALF))
