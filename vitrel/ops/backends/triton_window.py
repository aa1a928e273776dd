"""Attention in (shifted) windows in one Triton kernel, raster order in and out; forward and backward, with the gradients of the
bias table and of learned rotary angles.

Forward: a program computes `rows` queries of a window for one head and iterates over its keys, `keys` at a time (flash
attention, arXiv 2205.14135). A window of up to 64 tokens is one tile; a program then computes `per` windows and looks up their
bias once. Shift, padding, partition, mask and the inverse layout are arithmetic on the slots of a window (defined in
vitrel.ops.window): padding is neither loaded nor stored, and the mask is computed only in windows that contain a border. q and
k are rotated in float32, before they are rounded for the matrix products, which accumulate in float32. Logits are in base 2.

Tile: 64 x 64 for windows of 33 to 64 tokens (7 x 7, 8 x 8), 64 x 32 above, the next power of two below; 4 warps.
Registers (floats): logits and bias, 2 * rows * keys (64 per thread), and the output, rows * D.
Bytes moved: 4 * D elements per token and head, as qkv is read once and the output written once. Programs of one window and of
its heads run side by side, so keys, values and the bias (R floats per head) stay in cache. No tensor has N * N elements.

Backward, windows of at most 64 tokens (`_whole`): a program owns one head and iterates over `per` windows. For each it
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

Tiles: see vitrel.ops.backends.triton_tiles.
Registers (floats): `_whole` bias, logits, their gradient and its sum, 4 * 64 * 64, and three gradients of 64 * D; `_tiles` the
same without the sum, which it holds for one addition.
Bytes moved: up to 64 tokens 7 * D elements per token and head (qkv and the output's gradient read, the gradient of qkv
written), and N * N floats per program.
Larger windows read D more (the output) and 12 bytes of statistics; in cache, for t tiles of keys, 8 * N bytes for the table, 8
* D * (t-1) for dq, and 2 * D * (t-1) elements of q and grad again.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vitrel.ops.backends import triton_tiles
from vitrel.ops.backends.triton_tiles import (
    DTYPES,
    LOG2_E,
    MOST_IN_ONE_TILE,
    Tile,
    ceil_div,
    compiler_options,
    padded_tokens,
    window_backward_tile,
    window_tile,
)
from vitrel.ops.window import check_window

WIDTHS = (16, 32, 48, 64)  # head widths D
MOST_TOKENS = 256  # maximum tokens of a window
VARYING = ("h", "w", "windows", "per")  # not specialized, so that a kernel is compiled once for all grids and batches
PROGRAMS = 4096  # maximum per launch; each computes several windows, with one lookup of their bias
BACKWARD_PROGRAMS = 2048  # the same of the backward pass
_PAIRS_AT_ONCE = 4096  # of slots, which a program of `_by_offset` sums
_SCRATCH = 64 * 2**20  # bytes of sums of all programs together, about; it limits the programs for windows of several tiles


class Plan(NamedTuple):
    """How a kernel is compiled: the same for all calls with windows of one kind, whatever the grid and the batch.

    `sizes` are compile-time sizes, numbered by the constants HEADS to HOLD; `options` are those of Triton's compiler.
    """

    tile: Tile
    sizes: tuple[int | bool, ...]
    options: dict[str, int]


# Sizes of a kernel. A window has N = WH * WW slots; DP is the head width D padded to a power of two. They are a tuple with
# numbered entries, as inductor writes them into the code that launches the kernels of a compiled model. In a shape, Triton 3.6
# takes none of them as they are, only constants with a name.
HEADS, WH, WW, N, SY, SX, D, DP, ROWS, KEYS, HOLD = map(tl.constexpr, range(11))


def window_limits(dtype: torch.dtype, width: int, window: tuple[int, int]) -> str:
    """Return why the window kernels do not serve this dtype, head width D and window (h, w) in tokens; "" if they do."""
    if dtype not in DTYPES:
        return f"the Triton window kernels support float32, float16 and bfloat16, not {dtype}"
    if width not in WIDTHS:
        return f"the Triton window kernels support head widths {', '.join(map(str, WIDTHS))}, not {width}"
    if window[0] * window[1] > MOST_TOKENS:
        return f"the Triton window kernels support windows of at most {MOST_TOKENS} tokens, not {window[0]}x{window[1]}"
    return ""


def saves_lse(window: tuple[int, int]) -> bool:
    """Return whether the backward pass of this window (h, w) reads output and log-sum-exp: with more than 64 tokens."""
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
    """Compute attention in (shifted) windows, [B, h, w, 3C] -> [B, h, w, C], and its log-sum-exp.

    The geometry of windows is that of vitrel.ops.window.

    Args:
        qkv: q, k and v along the last dimension, [B, h, w, 3C].
        bias: [H, R] by offset class of Grid(*window), not scaled, or None.
        cos: [H|1, N, D/2], of the angles by which the slots of a window rotate the pairs (p, p + D/2) of q and k, or None.
        sin: as cos.
        window: (h, w) in tokens.
        shift: (h, w) in tokens.
        num_heads: number of heads H.
        scale: factor of q . k.
        grad: whether `window_backward` will follow.

    Returns:
        The output, and the log-sum-exp [B, h, w, H] float32 (natural logarithm), empty where no backward pass reads it: without
            grad, or where not `saves_lse`.

    Raises:
        ValueError: `window_limits` gives a reason, a shape is another, or the window or shift is impossible.
    """
    width = int(qkv.shape[-1]) // (3 * num_heads)
    plan = forward_plan(window, shift, num_heads, width, qkv.dtype, cos is not None, triton_tiles.architecture(qkv.device))
    _check_tables(bias, cos, sin, window, num_heads, width)
    out = torch.empty(*qkv.shape[:-1], num_heads * width, dtype=qkv.dtype, device=qkv.device)
    saved = grad and saves_lse(window)
    lse = torch.empty((*qkv.shape[:-1], num_heads) if saved else (0,), dtype=torch.float32, device=qkv.device)
    windows = window_count(qkv, window)
    tiles = ceil_div(window[0] * window[1], plan.tile.rows)
    per = windows_per_program(windows, num_heads, PROGRAMS) if tiles == 1 else 1
    tables = contiguous_bias(bias), packed_angles(cos, sin, num_heads)
    call = qkv.contiguous(), *tables, scale, out, lse if saved else None
    _launch(_forward, plan, tiles, windows, per, call)
    return out, lse


@functools.lru_cache(1024)
def forward_plan(
    window: tuple[int, int], shift: tuple[int, int], heads: int, width: int, dtype: torch.dtype, rotary: bool, arch: int
) -> Plan:
    """Return the plan of the forward kernel, cached; ValueError for a window, shift, width or dtype that is not served."""
    return _plan(window_tile(window[0] * window[1], dtype, rotary, arch), window, shift, heads, width, dtype)


@functools.lru_cache(1024)
def backward_plan(
    window: tuple[int, int], shift: tuple[int, int], heads: int, width: int, dtype: torch.dtype, rotary: bool, arch: int
) -> Plan:
    """Return the plan of the backward kernel, cached; ValueError for a window, shift, width or dtype that is not served."""
    return _plan(window_backward_tile(window[0] * window[1], dtype, width, rotary, arch), window, shift, heads, width, dtype)


def _plan(tile: Tile, window: tuple[int, int], shift: tuple[int, int], heads: int, width: int, dtype: torch.dtype) -> Plan:
    check_window(window, shift)
    if reason := window_limits(dtype, width, window):
        raise ValueError(reason)
    of_tile = tile.rows, tile.keys, tile.hold
    sizes = (heads, *window, window[0] * window[1], *shift, width, triton.next_power_of_2(width), *of_tile)
    return Plan(tile, sizes, compiler_options(tile, dtype))


def _launch(kernel: triton.JITFunction, plan: Plan, tiles: int, windows: int, per: int, arguments: tuple) -> None:
    """Launch a kernel with `tiles` programs for each head and each group of `per` windows; does nothing for an empty batch.

    Args:
        kernel: to launch.
        plan: of the kernel.
        tiles: programs per window and head.
        windows: number of windows of all images.
        per: windows that a program computes in turn.
        arguments: the kernel's parameters before h; the first is qkv.
    """
    if windows == 0:
        return
    qkv = arguments[0]
    grid = (ceil_div(windows, per) * tiles * plan.sizes[HEADS.value],)
    _run(kernel, grid, (*arguments, qkv.shape[1], qkv.shape[2], windows, per, plan.sizes), plan.options)


def _run(kernel: triton.JITFunction, grid: tuple[int], arguments: tuple, options: dict[str, int]) -> None:
    """Launch a kernel, or put it into a graph that is being traced. Nothing is launched for tensors on the meta device.

    Args:
        kernel: to launch.
        grid: number of programs.
        arguments: all parameters of the kernel; the first is a tensor.
        options: for Triton's compiler.
    """
    x = arguments[0]
    if is_plain(x):
        if x.is_cuda:
            with torch.cuda.device(x.device):  # on which Triton compiles and launches
                kernel[grid](*arguments, **options)
        elif not x.is_meta:
            kernel[grid](*arguments, **options)
    elif isinstance(kernel, triton.JITFunction):  # in the interpreter it is not one, and a graph calls the operator
        # Without a limit of registers, which wrap_triton does not take: in a graph a kernel in float32 may spill a few.
        known = {name: value for name, value in options.items() if name != "maxnreg"}
        torch.library.wrap_triton(kernel)[grid](*arguments, **known)


def is_plain(x: Tensor) -> bool:
    """Return whether a tensor is a plain one, not of a subclass that sees every operator, such as FakeTensor."""
    return type(x) in (Tensor, torch.nn.Parameter)


def _check_tables(
    bias: Tensor | None, cos: Tensor | None, sin: Tensor | None, window: tuple[int, int], num_heads: int, width: int
) -> None:
    """Raise ValueError for shapes of bias, cos or sin with which the window kernels would read out of bounds."""
    (h, w), angles = window, (window[0] * window[1], width // 2)
    if bias is not None and bias.shape != (num_heads, (2 * h - 1) * (2 * w - 1)):
        expected = [num_heads, (2 * h - 1) * (2 * w - 1)]
        raise ValueError(f"bias of shape {list(bias.shape)}; windows of {h}x{w} need {expected}")
    for angle in (cos, sin):
        if angle is not None and angle.shape not in ((1, *angles), (num_heads, *angles)):
            raise ValueError(f"cos or sin of shape {list(angle.shape)}; windows of {h}x{w} need {[num_heads, *angles]}")


def window_count(qkv: Tensor, window: tuple[int, int]) -> int:
    """Return the number of windows in all images of qkv [B, h, w, 3C]."""
    batch, h, w, _ = qkv.shape
    return batch * ceil_div(h, window[0]) * ceil_div(w, window[1])


def windows_per_program(windows: int, jobs: int, programs: int) -> int:
    """Return the number of windows that one program computes in turn, so that at most about `programs` programs are launched.

    Args:
        windows: number of windows in all.
        jobs: programs needed per window without sharing, heads times tiles.
        programs: number that is enough to fill the GPU.
    """
    # In a graph, the number of windows is a symbol.
    return torch.sym_max(1, ceil_div(windows * jobs, programs))  # type: ignore[return-value]


def contiguous_bias(bias: Tensor | None) -> Tensor | None:
    """Return a bias table [H, R] in the kernels' format, contiguous and float32, or None."""
    return None if bias is None else bias.float().contiguous()


def packed_angles(cos: Tensor | None, sin: Tensor | None, num_heads: int) -> Tensor | None:
    """Return cos and sin [H|1, N, D/2] in the kernels' format, [H, 2, N, D/2] float32; None if cos is None."""
    if cos is None:
        return None
    return torch.stack((cos, sin), 1).float().expand(num_heads, -1, -1, -1).contiguous()


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
    sizes: tl.constexpr,
):
    TOKENS: tl.constexpr = sizes[N]
    QUERIES: tl.constexpr = sizes[ROWS]
    COLUMNS: tl.constexpr = sizes[DP]
    C: tl.constexpr = sizes[HEADS] * sizes[D]
    scale = tl.cast(scale, tl.float32)  # inductor passes a double
    head, tile, chunk = _job(sizes, (TOKENS + sizes[ROWS] - 1) // sizes[ROWS])
    i = tile * sizes[ROWS] + tl.arange(0, sizes[ROWS])
    if sizes[KEYS] >= TOKENS:
        bias = _bias(BIAS, head, i[:, None], tl.arange(0, sizes[KEYS])[None, :], sizes)
    for window in range(chunk * per, tl.minimum((chunk + 1) * per, windows)):
        corner = _corner(window, h, w, sizes)
        token, region = _place(i, corner, sizes)
        q = _rotated_rows(QKV, token * (3 * C) + head * sizes[D], region, ANGLES, head, i, sizes)
        most = tl.full((QUERIES,), -1e30, tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        out = tl.zeros((QUERIES, COLUMNS), tl.float32)
        for first in range(0, TOKENS, sizes[KEYS]):
            j = first + tl.arange(0, sizes[KEYS])
            other, other_region = _place(j, corner, sizes)
            to = other * (3 * C) + head * sizes[D]
            k = _rotated_rows(QKV + C, to, other_region, ANGLES, head, j, sizes)
            v = _rows(QKV + 2 * C, to, other_region, sizes)
            if sizes[KEYS] < TOKENS:
                bias = _bias(BIAS, head, i[:, None], j[None, :], sizes)
            s = _logits(q, k, bias, region, other_region, corner, scale)
            higher = tl.maximum(most, tl.max(s, 1))
            p = tl.exp2(s - higher[:, None])
            shrink = tl.exp2(most - higher)
            total = total * shrink + tl.sum(p, 1)
            out = out * shrink[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
            most = higher
        total = tl.maximum(total, 1.0)  # less only for padding, which sees no key
        _store_rows(OUT, token * C + head * sizes[D], region, out / total[:, None], sizes)
        if LSE is not None:
            tl.store(LSE + token * sizes[HEADS] + head, (most + tl.log2(total)) / LOG2_E, mask=region >= 0)


@triton.jit
def _job(sizes: tl.constexpr, TILES: tl.constexpr):
    """Return (head, tile, chunk) of this program, heads varying fastest: TILES tiles per window, chunks of several windows."""
    rest = tl.program_id(0) // sizes[HEADS]
    return tl.program_id(0) % sizes[HEADS], rest % TILES, rest // TILES


@triton.jit
def _corner(window, h, w, sizes: tl.constexpr):
    """Return where a window lies: (image, top row, left column, sy, sx, h, w, whether it has padding or the cyclic border).

    The shift (sy, sx) is 0 along an axis that fits into one window. Rows and columns count on the padded grid, with the shift
    added. `window` counts those of all images; `sizes` are those of `Plan`, here and below.
    """
    down = (h + sizes[WH] - 1) // sizes[WH]
    across = (w + sizes[WW] - 1) // sizes[WW]
    sy = tl.where(h > sizes[WH], sizes[SY], 0)  # no shift along an axis that fits into one window
    sx = tl.where(w > sizes[WW], sizes[SX], 0)
    top = (window // across) % down * sizes[WH] + sy
    left = window % across * sizes[WW] + sx
    border = (top + sizes[WH] > h) | (left + sizes[WW] > w)
    return (window // (down * across)).to(tl.int64), top, left, sy, sx, h, w, border


@triton.jit
def _place(slot, corner, sizes: tl.constexpr):
    """Return the token of each slot of a window (`corner`), numbered over the batch, and its region, -1 where no token is.

    Tokens of one window and the same region see each other.
    """
    image, top, left, sy, sx, h, w, _ = corner
    bottom = (h + sizes[WH] - 1) // sizes[WH] * sizes[WH]
    right = (w + sizes[WW] - 1) // sizes[WW] * sizes[WW]
    y = top + slot // sizes[WW]
    x = left + slot % sizes[WW]
    y = tl.where(y >= bottom, y - bottom, y)
    x = tl.where(x >= right, x - right, x)
    there = (slot < sizes[N]) & (y < h) & (x < w)
    region = tl.where(y < sy, 2, 0) + tl.where(x < sx, 1, 0)
    return image * h * w + y * w + x, tl.where(there, region, -1)


@triton.jit
def _logits(q, k, bias, region, other_region, corner, scale):
    """Return q . k * scale [ROWS, KEYS] divided by log 2, plus `bias` of `_bias`; -inf for keys that a query does not see.

    The regions of queries and keys, and the window's `corner`, are those of `_place` and `_corner`.
    """
    s = tl.dot(q, tl.trans(k), input_precision="ieee") * (scale * LOG2_E) + bias
    if corner[7]:
        s = tl.where(region[:, None] == other_region[None, :], s, float("-inf"))
    return s


@triton.jit
def _bias(BIAS, head, query, key, sizes: tl.constexpr):
    """Return the bias (0 for BIAS None) of slots query and key, which broadcast, divided by log 2; -inf beyond the window."""
    if BIAS is None:
        bias = tl.where(key < sizes[N], 0.0, float("-inf"))
    else:
        query = tl.minimum(query, sizes[N] - 1)
        row = query // sizes[WW] - key // sizes[WW] + sizes[WH] - 1
        column = query % sizes[WW] - key % sizes[WW] + sizes[WW] - 1
        at = (head * (2 * sizes[WH] - 1) + row) * (2 * sizes[WW] - 1) + column
        bias = tl.load(BIAS + at, mask=(key < sizes[N]) & (query >= 0), other=float("-inf")) * LOG2_E
    return bias


@triton.jit
def _channels(sizes: tl.constexpr):
    """Return the channel of each column of a tile of the width DP, and whether it exists.

    DP is D padded to a power of two, each half of a head separately, to keep rotary pairs.
    """
    column = tl.arange(0, sizes[DP])
    pair = column % (sizes[DP] // 2)
    return column // (sizes[DP] // 2) * (sizes[D] // 2) + pair, pair < sizes[D] // 2


@triton.jit
def _rows(base, offset, region, sizes: tl.constexpr):
    """Load rows of D elements at base + offset, padded to [rows, DP]; zeros in the padding and where the region is -1."""
    channel, there = _channels(sizes)
    mask = (region >= 0)[:, None]
    if sizes[D] != sizes[DP]:
        mask = mask & there[None, :]
    return tl.load(base + offset[:, None] + channel[None, :], mask=mask, other=0.0)


@triton.jit
def _store_rows(base, offset, region, value, sizes: tl.constexpr):
    """Store rows of D elements, the inverse of `_rows`, rounded to the dtype of `base`; nothing where the region is -1."""
    channel, there = _channels(sizes)
    mask = (region >= 0)[:, None]
    if sizes[D] != sizes[DP]:
        mask = mask & there[None, :]
    tl.store(base + offset[:, None] + channel[None, :], value.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _rotated_rows(base, offset, region, ANGLES, head, slot, sizes: tl.constexpr):
    """Load rows of queries or keys by `_rows`, rotated by the angles of their slots if there are any."""
    x = _rows(base, offset, region, sizes)
    if ANGLES is not None:
        cos, sin = _angles(ANGLES, head, slot, sizes)
        x = _rotated(x, cos, sin).to(x.dtype)
    return x


@triton.jit
def _angles(ANGLES, head, slot, sizes: tl.constexpr):
    """Return cos and sin of the slots for every column, [rows, DP]; sin is negated in the first half, for `_rotated`."""
    HALF: tl.constexpr = sizes[D] // 2
    column = tl.arange(0, sizes[DP])
    pair = column % (sizes[DP] // 2)
    at = (head * 2 * sizes[N] + slot)[:, None] * HALF + pair[None, :]
    mask = (slot < sizes[N])[:, None] & (pair < HALF)[None, :]
    cos = tl.load(ANGLES + at, mask=mask, other=0.0)
    sin = tl.load(ANGLES + sizes[N] * HALF + at, mask=mask, other=0.0)
    return cos, tl.where((column < sizes[DP] // 2)[None, :], -sin, sin)


@triton.jit
def _rotated(x, cos, sin):
    """Return x in float32 with each pair (p, p + D/2) rotated by cos and sin as of `_angles`; -sin rotates back."""
    x = x.to(tl.float32)
    return x * cos + _swapped(x) * sin


@triton.jit
def _swapped(x):
    """Return x with the two halves of its columns exchanged."""
    LINES: tl.constexpr = x.shape[0]
    HALF: tl.constexpr = x.shape[1] // 2
    a, b = tl.split(tl.permute(tl.reshape(x, (LINES, 2, HALF)), (0, 2, 1)))
    return tl.reshape(tl.permute(tl.join(b, a), (0, 2, 1)), (LINES, 2 * HALF))


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
    """Return the gradients of qkv (in its dtype), bias, cos and sin of `window_forward`; None for an input that is None.

    Two runs give equal bits. The gradients of bias [H, R] and of cos and sin [H|1, N, D/2] are float32.

    Args:
        grad_out: gradient of the output, [B, h, w, C].
        qkv: as in `window_forward`, and so are bias, cos, sin, window, shift, num_heads and scale.
        out: result of `window_forward` with grad; not read where not `saves_lse`.
        lse: result of `window_forward` with grad; not read where not `saves_lse`.
        bias_grad: False: the gradient of bias is None.
        rotary_grad: False: the gradients of cos and sin are None.

    Raises:
        ValueError: as in `window_forward`, and without lse where it is needed.
    """
    tokens, width, windows = window[0] * window[1], int(qkv.shape[-1]) // (3 * num_heads), window_count(qkv, window)
    several = saves_lse(window)
    arch = triton_tiles.architecture(qkv.device)
    plan = backward_plan(window, shift, num_heads, width, qkv.dtype, cos is not None, arch)
    if several and lse.shape != (*qkv.shape[:3], num_heads):
        raise ValueError(f"lse of shape {list(lse.shape)}; call window_forward with grad=True for a backward pass")
    learned = rotary_grad and cos is not None
    line = ceil_div(tokens, 4) * 4 if bias is not None and bias_grad else 0  # so that 16 bytes are read at a time
    of_angles = (2 if several else 1) * 2 * width if learned else 0
    rows = plan.tile.rows
    slots, columns = ceil_div(tokens, rows) * rows, plan.sizes[DP.value] if several else 0
    floats = tokens * (line + of_angles) + slots * columns  # sums of a program
    programs = min(BACKWARD_PROGRAMS, max(1, _SCRATCH // (4 * floats))) if several else BACKWARD_PROGRAMS
    per = windows_per_program(windows, num_heads, programs)
    sums = (ceil_div(windows, per), num_heads)
    float32: dict[str, Any] = {"dtype": torch.float32, "device": qkv.device}
    grad_qkv = torch.empty(qkv.shape, dtype=qkv.dtype, device=qkv.device)
    table = torch.empty(*sums, tokens, line, **float32) if line else None
    angle_sums = torch.empty(*sums, of_angles // width, tokens, width, **float32) if learned else None
    tables = contiguous_bias(bias), packed_angles(cos, sin, num_heads)
    inputs: tuple = qkv.contiguous(), *tables, grad_out.to(qkv.dtype).contiguous(), scale
    if several:
        parts = torch.empty(*sums, slots, columns, **float32)
        inputs += out.contiguous(), lse.contiguous(), torch.empty_like(lse), grad_qkv, parts
    else:
        inputs += (grad_qkv,)
    _launch(_tiles if several else _whole, plan, 1, windows, per, (*inputs, table, angle_sums))
    grad_bias = None if table is None else by_offset(table.sum(0), window)
    if angle_sums is None:
        return grad_qkv, grad_bias, None, None
    return grad_qkv, grad_bias, *angle_gradients(angle_sums.sum(0).unflatten(1, (-1, 2)).sum(1), cos.shape[0])


def by_offset(pairs: Tensor, window: tuple[int, int]) -> Tensor:
    """Sum a gradient per pair of slots [H, N queries, N keys or a little more] by offset class of Grid(*window), [H, R]."""
    classes = (2 * window[0] - 1) * (2 * window[1] - 1)
    out = torch.empty(pairs.shape[0], classes, dtype=pairs.dtype, device=pairs.device)
    lanes = padded_tokens(window[0] * window[1])
    block = _PAIRS_AT_ONCE // lanes
    grid = (pairs.shape[0] * ceil_div(classes, block),)
    _run(_by_offset, grid, (pairs, out, *window, pairs.shape[2], block, lanes), {"num_warps": 4})
    return out


def angle_gradients(sums: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of cos and sin, [heads, N, D/2] each.

    Args:
        sums: of the kernels, [H, 2 (cos, sin), N, D], in which sin has the signs of `_angles`.
        heads: those of cos and sin: H, or 1 if they are shared, where the sum over all heads is returned.
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
    sizes: tl.constexpr,
):
    QUERIES: tl.constexpr = sizes[ROWS]
    LANES: tl.constexpr = sizes[KEYS]
    COLUMNS: tl.constexpr = sizes[DP]
    C: tl.constexpr = sizes[HEADS] * sizes[D]
    scale = tl.cast(scale, tl.float32)  # inductor passes a double
    head, _, chunk = _job(sizes, 1)
    i = tl.arange(0, sizes[ROWS])
    if sizes[HOLD]:
        bias = _bias(BIAS, head, i[:, None], i[None, :], sizes)
    table = tl.zeros((QUERIES, LANES), tl.float32)
    dcos, dsin = tl.zeros((QUERIES, COLUMNS), tl.float32), tl.zeros((QUERIES, COLUMNS), tl.float32)
    for window in tl.range(chunk * per, tl.minimum((chunk + 1) * per, windows), disable_licm=not sizes[HOLD]):
        corner = _corner(window, h, w, sizes)
        token, region = _place(i, corner, sizes)
        at = token * (3 * C) + head * sizes[D]
        q = _rotated_rows(QKV, at, region, ANGLES, head, i, sizes)
        k = _rotated_rows(QKV + C, at, region, ANGLES, head, i, sizes)
        v = _rows(QKV + 2 * C, at, region, sizes)
        grad = _rows(GRAD, token * C + head * sizes[D], region, sizes)
        if not sizes[HOLD]:
            bias = _bias(BIAS, head, i[:, None], i[None, :], sizes)
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
        _store_angle_gradients(DANGLES, chunk * sizes[HEADS] + head, i, dcos, dsin, sizes)


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
    sizes: tl.constexpr,
):
    TOKENS: tl.constexpr = sizes[N]
    LANES: tl.constexpr = sizes[KEYS]
    COLUMNS: tl.constexpr = sizes[DP]
    C: tl.constexpr = sizes[HEADS] * sizes[D]
    scale = tl.cast(scale, tl.float32)  # inductor passes a double
    SLOTS: tl.constexpr = (TOKENS + sizes[ROWS] - 1) // sizes[ROWS] * sizes[ROWS]
    LAST: tl.constexpr = (TOKENS - 1) // sizes[KEYS] * sizes[KEYS]
    head, _, chunk = _job(sizes, 1)
    for window in range(chunk * per, tl.minimum((chunk + 1) * per, windows)):
        corner = _corner(window, h, w, sizes)
        summed = tl.where(window > chunk * per, TOKENS, 0)  # slots whose sums over windows have a value
        for start in range(0, TOKENS, sizes[ROWS]):
            token, region = _place(start + tl.arange(0, sizes[ROWS]), corner, sizes)
            at = token * C + head * sizes[D]
            delta = tl.sum(_rows(GRAD, at, region, sizes).to(tl.float32) * _rows(OUT, at, region, sizes).to(tl.float32), 1)
            tl.store(DELTA + token * sizes[HEADS] + head, delta, mask=region >= 0)
        tl.debug_barrier()
        for first in tl.range(0, TOKENS, sizes[KEYS], disable_licm=True):
            j = first + tl.arange(0, sizes[KEYS])
            other, other_region = _place(j, corner, sizes)
            to = other * (3 * C) + head * sizes[D]
            k = _rotated_rows(QKV + C, to, other_region, ANGLES, head, j, sizes)
            v = _rows(QKV + 2 * C, to, other_region, sizes)
            dk = tl.zeros((LANES, COLUMNS), tl.float32)
            dv = tl.zeros((LANES, COLUMNS), tl.float32)
            for start in tl.range(0, TOKENS, sizes[ROWS], disable_licm=True):
                i = start + tl.arange(0, sizes[ROWS])
                token, region = _place(i, corner, sizes)
                at = token * (3 * C) + head * sizes[D]
                q = _rotated_rows(QKV, at, region, ANGLES, head, i, sizes)
                grad = _rows(GRAD, token * C + head * sizes[D], region, sizes)
                lse = tl.load(LSE + token * sizes[HEADS] + head, mask=region >= 0, other=1e30)  # weights of padding are 0
                delta = tl.load(DELTA + token * sizes[HEADS] + head, mask=region >= 0, other=0.0)
                bias = _bias(BIAS, head, i[:, None], j[None, :], sizes)
                p = tl.exp2(_logits(q, k, bias, region, other_region, corner, scale) - (lse * LOG2_E)[:, None])
                dv = tl.dot(tl.trans(p.to(v.dtype)), grad, dv, input_precision="ieee")
                ds = p * (tl.dot(grad, tl.trans(v), input_precision="ieee") - delta[:, None])
                line = ((chunk * sizes[HEADS] + head) * SLOTS + i) * sizes[DP]
                sums = DQ + line[:, None] + tl.arange(0, sizes[DP])[None, :]
                dq = tl.load(sums, mask=(i < tl.where(first > 0, SLOTS, 0))[:, None], other=0.0)
                if TABLE is not None:
                    place, there = _table_place(chunk, head, i, j, sizes)
                    table = tl.load(TABLE + place, mask=there & (i < summed)[:, None], other=0.0)
                tl.debug_barrier()
                if TABLE is not None:
                    tl.store(TABLE + place, table + ds, mask=there)
                ds = ds.to(k.dtype)
                dk = tl.dot(tl.trans(ds), q, dk, input_precision="ieee")
                dq += tl.dot(ds, k, input_precision="ieee") * scale  # without a factor, Triton 3.6 cannot compile it for sm_90
                if first < LAST:
                    tl.store(sums, dq)
                else:
                    _store_rotated(DQKV, at, region, dq, ANGLES, head, i, sizes)
                    if DANGLES is not None:
                        x = _rows(QKV, at, region, sizes)
                        _add_stored_angle_gradients(DANGLES, (chunk * sizes[HEADS] + head) * 2, i, x, dq, summed, sizes)
            dk *= scale
            _store_rotated(DQKV + C, to, other_region, dk, ANGLES, head, j, sizes)
            _store_rows(DQKV + 2 * C, to, other_region, dv, sizes)
            if DANGLES is not None:
                x = _rows(QKV + C, to, other_region, sizes)
                _add_stored_angle_gradients(DANGLES, (chunk * sizes[HEADS] + head) * 2 + 1, j, x, dk, summed, sizes)


@triton.jit
def _store_rotated(base, offset, region, grad, ANGLES, head, slot, sizes: tl.constexpr):
    """Store the gradient of queries or keys by `_store_rows`, given that of the rotated ones (ANGLES None: not rotated)."""
    if ANGLES is not None:
        cos, sin = _angles(ANGLES, head, slot, sizes)
        grad = _rotated(grad, cos, -sin)
    _store_rows(base, offset, region, grad, sizes)


@triton.jit
def _add_angle_gradients(dcos, dsin, x, grad):
    """Return the sums dcos and dsin plus what x (queries or keys) and the gradient `grad` of rotated x contribute.

    The signs are those of `_angles`.
    """
    x = x.to(tl.float32)
    return dcos + grad * x, dsin + grad * _swapped(x)


@triton.jit
def _add_stored_angle_gradients(DANGLES, part, slot, x, grad, summed, sizes: tl.constexpr):
    """Add in memory, as `_add_angle_gradients`, to part `part` of the sums DANGLES; from slot `summed` on they count as 0."""
    base = DANGLES + part * (2 * sizes[N] * sizes[D])
    region = tl.where(slot < summed, 0, -1)
    dcos = _rows(base, slot * sizes[D], region, sizes)
    dsin = _rows(base + sizes[N] * sizes[D], slot * sizes[D], region, sizes)
    dcos, dsin = _add_angle_gradients(dcos, dsin, x, grad)
    tl.debug_barrier()  # all have read before any writes
    _store_angle_gradients(DANGLES, part, slot, dcos, dsin, sizes)


@triton.jit
def _store_angle_gradients(DANGLES, part, slot, dcos, dsin, sizes: tl.constexpr):
    """Store the sums dcos and dsin of the slots as part `part` of DANGLES, whose parts are [2, N, D]."""
    base = DANGLES + part * (2 * sizes[N] * sizes[D])
    region = tl.where(slot < sizes[N], 0, -1)
    _store_rows(base, slot * sizes[D], region, dcos, sizes)
    _store_rows(base + sizes[N] * sizes[D], slot * sizes[D], region, dsin, sizes)


@triton.jit
def _table_place(chunk, head, i, j, sizes: tl.constexpr):
    """Return the index in TABLE of the pairs of slots i and j of a window, and whether it is in range: [len(i), len(j)] each.

    TABLE has a line of N float32, padded to 16 bytes, for each chunk of windows, head and slot i.
    """
    LINE: tl.constexpr = (sizes[N] + 3) // 4 * 4
    row = (chunk * sizes[HEADS] + head) * sizes[N] + i
    return row[:, None] * LINE + j[None, :], (i < sizes[N])[:, None] & (j < LINE)[None, :]


@triton.jit
def _by_offset(
    PAIRS,  # [H, N, LINE]
    OUT,  # [H, R]
    WH: tl.constexpr,
    WW: tl.constexpr,
    LINE: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Write to OUT the sums of PAIRS over the pairs of slots of BLOCK offset classes of one head; LANES is N padded."""
    CLASSES: tl.constexpr = (2 * WH - 1) * (2 * WW - 1)
    PROGRAMS: tl.constexpr = (CLASSES + BLOCK - 1) // BLOCK
    head = tl.program_id(0) // PROGRAMS
    offset = tl.program_id(0) % PROGRAMS * BLOCK + tl.arange(0, BLOCK)
    key = tl.arange(0, LANES)
    row = (key // WW)[None, :] + (offset // (2 * WW - 1) - (WH - 1))[:, None]
    column = (key % WW)[None, :] + (offset % (2 * WW - 1) - (WW - 1))[:, None]
    there = (key < WH * WW)[None, :] & (row >= 0) & (row < WH) & (column >= 0) & (column < WW)
    at = (head * (WH * WW) + row * WW + column) * LINE + key[None, :]
    sums = tl.sum(tl.load(PAIRS + at, mask=there, other=0.0), 1)
    tl.store(OUT + head * CLASSES + offset, sums, mask=offset < CLASSES)
