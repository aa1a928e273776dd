"""Attention in (shifted) windows in one Triton kernel, raster order in and out; forward pass.

Algorithm: a program computes `rows` queries of a window for one head and iterates over its keys, `keys` at a time (flash
attention, arXiv 2205.14135). A window of up to 64 tokens is one tile; a program then computes `per` windows and looks up their
bias once. Shift, padding, partition, mask and the inverse layout are arithmetic on the slots of a window (defined in
vitrel.ops.window): padding is neither loaded nor stored, and the mask is computed only in windows that contain a border. q and
k are rotated in float32, before they are rounded for the matrix products, which accumulate in float32. Logits are in base 2.

Tile: 64 x 64 for windows of 33 to 64 tokens (7 x 7, 8 x 8), 64 x 32 above, the next power of two below; 4 warps.
Registers (floats): logits and bias, 2 * rows * keys (64 per thread), and the output, rows * D.
Bytes moved: 4 * D elements per token and head, as qkv is read once and the output written once. Programs of one window and of
its heads run side by side, so keys, values and the bias (R floats per head) stay in cache. No tensor has N * N elements.
"""

import contextlib
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrel.ops.window import check_window

WIDTHS = (16, 32, 48, 64)  # head widths D
MOST_TOKENS = 256  # maximum tokens of a window
MOST_IN_ONE_TILE = 64  # maximum tokens of a window that one tile holds
LOG2_E = tl.constexpr(1.4426950408889634)
VARYING = ("h", "w", "windows", "per")  # not specialised, so that a kernel is compiled once for all grids and batches
WARP_GROUPS = (90, 100, 103)  # architectures on which four warps multiply a tile of 64 rows together
PROGRAMS = 4096  # maximum per launch; each computes several windows, with one lookup of their bias


class Tile(NamedTuple):
    """Tile of a kernel: its queries and keys, warps of a program, and stages of the software pipeline."""

    rows: int
    keys: int
    warps: int
    stages: int


class WindowSizes(NamedTuple):
    """Compile-time sizes of a kernel. A window has n = wh * ww slots; dp is the head width d padded to a power of two."""

    heads: tl.constexpr
    wh: tl.constexpr
    ww: tl.constexpr
    n: tl.constexpr
    sy: tl.constexpr
    sx: tl.constexpr
    d: tl.constexpr
    dp: tl.constexpr
    rows: tl.constexpr
    keys: tl.constexpr


def window_tile(tokens: int, dtype: torch.dtype, rotary: bool, device: torch.device) -> Tile:
    """Tile of the forward kernel for windows of N tokens; one that does not spill registers (tools/benchmark/kernels.py)."""
    side = min(MOST_IN_ONE_TILE, padded_tokens(tokens))
    warps = 8 if dtype == torch.float32 or (rotary and architecture(device) in WARP_GROUPS) else 4
    return Tile(side, side, warps, 2) if tokens <= side else Tile(side, 32, warps, 1)


def architecture(device: torch.device) -> int:
    """Compute capability for which kernels are compiled on a device: 90 for sm_90 and in the interpreter, 0 if not NVIDIA's."""
    if triton.knobs.runtime.interpret:
        return 90
    with _current(device):
        arch = triton.runtime.driver.active.get_current_target().arch
    return arch if isinstance(arch, int) else 0


def _current(device: torch.device) -> contextlib.AbstractContextManager:
    """Make a GPU the current device, on which Triton compiles and launches."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def window_refuses(dtype: torch.dtype, width: int, window: tuple[int, int]) -> str:
    """Reason why the kernels do not serve this dtype, head width D and window (h, w) in tokens, or ""."""
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the Triton window kernels support float32, float16 and bfloat16, not {dtype}"
    if width not in WIDTHS:
        return f"the Triton window kernels support head widths {', '.join(map(str, WIDTHS))}, not {width}"
    if window[0] * window[1] > MOST_TOKENS:
        return f"the Triton window kernels support windows of at most {MOST_TOKENS} tokens, not {window[0]}x{window[1]}"
    return ""


def saves_lse(window: tuple[int, int]) -> bool:
    """Whether the backward pass of this window (h, w) reads the output and log-sum-exp of the forward pass."""
    return window[0] * window[1] > MOST_IN_ONE_TILE


def window_forward(
    qkv: Tensor,
    bias: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    window: tuple[int, int],
    shift: tuple[int, int],
    num_heads: int,
    scale: float,
    grad: bool = False,
) -> tuple[Tensor, Tensor]:
    """Attention in (shifted) windows, [B, h, w, 3C] -> [B, h, w, C], and its log-sum-exp; geometry as in vitrel.ops.window.

    bias: [H, R] by offset class of Grid(*window), not scaled. cos, sin: [H|1, N, D/2], of the angles by which the slots of a
    window rotate the pairs (p, p + D/2) of q and k. scale multiplies q . k. window, shift: (h, w) in tokens. grad: whether
    `window_backward` will follow.

    The log-sum-exp is [B, h, w, H] float32 (natural logarithm), or empty where no backward pass reads it: without grad, or
    where not `saves_lse`. Raises ValueError where `window_refuses` gives a reason, for other shapes, and for an impossible
    window or shift.
    """
    check_qkv(qkv, window, shift, num_heads)
    _check_tables(bias, cos, sin, window, num_heads, qkv.shape[-1] // (3 * num_heads))
    out = torch.empty(*qkv.shape[:-1], qkv.shape[-1] // 3, dtype=qkv.dtype, device=qkv.device)
    saved = grad and saves_lse(window)
    lse = torch.empty((*qkv.shape[:-1], num_heads) if saved else (0,), dtype=torch.float32, device=qkv.device)
    tokens, windows = window[0] * window[1], window_count(qkv, window)
    tile = window_tile(tokens, qkv.dtype, cos is not None, qkv.device)
    tiles = triton.cdiv(tokens, tile.rows)
    per = windows_per_program(windows, num_heads, PROGRAMS) if tiles == 1 else 1
    tables = {"BIAS": contiguous_bias(bias), "ANGLES": packed_angles(cos, sin, num_heads)}
    call = {"QKV": qkv.contiguous(), **tables, "scale": scale, "OUT": out, "LSE": lse if saved else None}
    launch_window(_forward, tile, tiles, per, window, shift, num_heads, **call)
    return out, lse


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
    """Launch a kernel with `tiles` programs for each head and each group of `per` windows; does nothing for an empty batch.

    arguments: the kernel's parameters except h, w, windows, per and sizes.
    """
    qkv = arguments["QKV"]
    windows, width = window_count(qkv, window), qkv.shape[-1] // (3 * num_heads)
    shape = (num_heads, *window, window[0] * window[1], *shift, width, triton.next_power_of_2(width), tile.rows, tile.keys)
    programs = triton.cdiv(windows, per) * tiles * num_heads
    if programs == 0:
        return
    if qkv.dtype == torch.float32 and not torch.version.hip:
        arguments["maxnreg"] = 255  # as in triton_global
    with _current(qkv.device):
        kernel[(programs,)](
            **arguments,
            h=qkv.shape[1],
            w=qkv.shape[2],
            windows=windows,
            per=per,
            sizes=WindowSizes(*map(tl.constexpr, shape)),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


def check_qkv(qkv: Tensor, window: tuple[int, int], shift: tuple[int, int], num_heads: int) -> None:
    """ValueError for a call that the kernels refuse, and for an impossible window or shift."""
    check_window(window, shift)
    if reason := window_refuses(qkv.dtype, qkv.shape[-1] // (3 * num_heads), window):
        raise ValueError(reason)


def _check_tables(
    bias: Tensor | None, cos: Tensor | None, sin: Tensor | None, window: tuple[int, int], num_heads: int, width: int
) -> None:
    """ValueError for shapes with which the kernels would read out of bounds."""
    (h, w), angles = window, (window[0] * window[1], width // 2)
    if bias is not None and bias.shape != (num_heads, (2 * h - 1) * (2 * w - 1)):
        expected = [num_heads, (2 * h - 1) * (2 * w - 1)]
        raise ValueError(f"bias of shape {list(bias.shape)}; windows of {h}x{w} need {expected}")
    for angle in (cos, sin):
        if angle is not None and angle.shape not in ((1, *angles), (num_heads, *angles)):
            raise ValueError(f"cos or sin of shape {list(angle.shape)}; windows of {h}x{w} need {[num_heads, *angles]}")


def window_count(qkv: Tensor, window: tuple[int, int]) -> int:
    """Number of windows in all images of qkv [B, h, w, 3C]."""
    return qkv.shape[0] * triton.cdiv(qkv.shape[1], window[0]) * triton.cdiv(qkv.shape[2], window[1])


def padded_tokens(tokens: int) -> int:
    """Return the number of lanes for the tokens of a window: a power of two of at least 16, as matrix products need."""
    return max(16, triton.next_power_of_2(tokens))


def windows_per_program(windows: int, jobs: int, programs: int) -> int:
    """Number of windows that one program computes in turn, so that at most about `programs` programs are launched.

    jobs: programs needed per window without sharing, heads times tiles.
    """
    return max(1, triton.cdiv(windows * jobs, programs))


def contiguous_bias(bias: Tensor | None) -> Tensor | None:
    """Return a bias table [H, R] in the kernels' format, contiguous and float32, or None."""
    return None if bias is None else bias.detach().float().contiguous()


def packed_angles(cos: Tensor | None, sin: Tensor | None, num_heads: int) -> Tensor | None:
    """Return cos and sin [H|1, N, D/2] in the kernels' format, [H, 2, N, D/2] float32, or None."""
    if cos is None:
        return None
    return torch.stack((cos.detach(), sin.detach()), 1).float().expand(num_heads, -1, -1, -1).contiguous()


@triton.jit(do_not_specialize=VARYING)
def _forward(
    QKV,  # [B, h, w, 3, H, D]
    BIAS,  # [H, R] float32, or None
    ANGLES,  # [H, 2, N, D/2] float32, or None
    scale,
    OUT,  # [B, h, w, H, D]
    LSE,  # [B, h, w, H] float32, or None
    h,
    w,
    windows,
    per,
    sizes,
):
    N: tl.constexpr = sizes.n
    C: tl.constexpr = sizes.heads * sizes.d
    head, tile, chunk = _job(sizes, (N + sizes.rows - 1) // sizes.rows)
    i = tile * sizes.rows + tl.arange(0, sizes.rows)
    if sizes.keys >= N:
        bias = _bias(BIAS, head, i[:, None], tl.arange(0, sizes.keys)[None, :], sizes)
    for window in range(chunk * per, tl.minimum((chunk + 1) * per, windows)):
        corner = _corner(window, h, w, sizes)
        token, region = _place(i, corner, sizes)
        q = _rotated_rows(QKV, token * (3 * C) + head * sizes.d, region, ANGLES, head, i, sizes)
        most = tl.full((sizes.rows,), -1e30, tl.float32)
        total = tl.zeros((sizes.rows,), tl.float32)
        out = tl.zeros((sizes.rows, sizes.dp), tl.float32)
        for first in range(0, N, sizes.keys):
            j = first + tl.arange(0, sizes.keys)
            other, other_region = _place(j, corner, sizes)
            to = other * (3 * C) + head * sizes.d
            k = _rotated_rows(QKV + C, to, other_region, ANGLES, head, j, sizes)
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
        total = tl.maximum(total, 1.0)  # less only for padding, which sees no key
        _store_rows(OUT, token * C + head * sizes.d, region, out / total[:, None], sizes)
        if LSE is not None:
            tl.store(LSE + token * sizes.heads + head, (most + tl.log2(total)) / LOG2_E, mask=region >= 0)


@triton.jit
def _job(sizes, TILES: tl.constexpr):
    """(head, tile of the window, chunk of windows) of this program; heads vary fastest, since they are adjacent in memory."""
    rest = tl.program_id(0) // sizes.heads
    return tl.program_id(0) % sizes.heads, rest % TILES, rest // TILES


@triton.jit
def _corner(window, h, w, sizes):
    """Image, first row and first column of a window, the shift, the grid, and whether it contains padding or the cyclic border.

    The shift is 0 along an axis that fits into one window. Rows and columns count on the padded grid, with the shift added.
    """
    down = (h + sizes.wh - 1) // sizes.wh
    across = (w + sizes.ww - 1) // sizes.ww
    sy = tl.where(h > sizes.wh, sizes.sy, 0)  # no shift along an axis that fits into one window
    sx = tl.where(w > sizes.ww, sizes.sx, 0)
    top = (window // across) % down * sizes.wh + sy
    left = window % across * sizes.ww + sx
    border = (top + sizes.wh > h) | (left + sizes.ww > w)
    return (window // (down * across)).to(tl.int64), top, left, sy, sx, h, w, border


@triton.jit
def _place(slot, corner, sizes):
    """Token of each slot, numbered over the batch, and its region: tokens of the same region see each other; -1 where there is
    no token.
    """
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
    """Logits [ROWS, KEYS] divided by log 2, with `bias` as of `_bias`; -inf where a query does not see a key."""
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2_E) + bias
    if corner[7]:
        s = tl.where(region[:, None] == other_region[None, :], s, float("-inf"))
    return s


@triton.jit
def _bias(BIAS, head, query, key, sizes):
    """Bias of the slots `query` and `key`, which broadcast, divided by log 2; -inf for keys beyond the window."""
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
    """Channel of each column of a tile, and whether it exists; each half of a head is padded
    separately, to keep rotary pairs.
    """
    column = tl.arange(0, sizes.dp)
    pair = column % (sizes.dp // 2)
    return column // (sizes.dp // 2) * (sizes.d // 2) + pair, pair < sizes.d // 2


@triton.jit
def _rows(base, offset, region, sizes):
    """Load rows of D elements at base + offset, padded to [rows, dp]; zeros in the padding and where the region is -1."""
    channel, there = _channels(sizes)
    mask = (region >= 0)[:, None]
    if sizes.d != sizes.dp:
        mask = mask & there[None, :]
    return tl.load(base + offset[:, None] + channel[None, :], mask=mask, other=0.0)


@triton.jit
def _store_rows(base, offset, region, value, sizes):
    """Store rows of D elements, the inverse of `_rows`, rounded to the dtype of `base`; nothing where the region is -1."""
    channel, there = _channels(sizes)
    mask = (region >= 0)[:, None]
    if sizes.d != sizes.dp:
        mask = mask & there[None, :]
    tl.store(base + offset[:, None] + channel[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _rotated_rows(base, offset, region, ANGLES, head, slot, sizes):
    """Load rows of queries or keys by `_rows`, rotated by the angles of their slots if there are any."""
    x = _rows(base, offset, region, sizes)
    if ANGLES is not None:
        cos, sin = _angles(ANGLES, head, slot, sizes)
        x = _rotated(x, cos, sin).to(x.dtype)
    return x


@triton.jit
def _angles(ANGLES, head, slot, sizes):
    """cos and sin of the slots for every column, [rows, dp]; sin is negated in the first half, for `_rotated`."""
    HALF: tl.constexpr = sizes.d // 2
    column = tl.arange(0, sizes.dp)
    pair = column % (sizes.dp // 2)
    at = (head * 2 * sizes.n + slot)[:, None] * HALF + pair[None, :]
    mask = (slot < sizes.n)[:, None] & (pair < HALF)[None, :]
    cos = tl.load(ANGLES + at, mask=mask, other=0.0)
    sin = tl.load(ANGLES + sizes.n * HALF + at, mask=mask, other=0.0)
    return cos, tl.where((column < sizes.dp // 2)[None, :], -sin, sin)


@triton.jit
def _rotated(x, cos, sin):
    """Return x in float32 with each pair (p, p + D/2) rotated by cos and sin as of `_angles`; -sin rotates back."""
    x = x.to(tl.float32)
    return x * cos + _swapped(x) * sin


@triton.jit
def _swapped(x):
    """Return x with the two halves of its columns exchanged."""
    ROWS: tl.constexpr = x.shape[0]
    HALF: tl.constexpr = x.shape[1] // 2
    a, b = tl.split(tl.permute(tl.reshape(x, (ROWS, 2, HALF)), (0, 2, 1)))
    return tl.reshape(tl.permute(tl.join(b, a), (0, 2, 1)), (ROWS, 2 * HALF))
