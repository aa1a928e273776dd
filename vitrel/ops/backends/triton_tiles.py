"""What the Triton kernels share: their tiles, compiler options, dtypes, and a few numbers.

A tile is the work of one program, its warps and pipeline stages, by kernel and architecture. The rows of HALF are for half
precision and the shapes that matter most; `python -m tools.gpu sweep` times variants of them on a GPU. Tiles of other calls
are those that compile without spilling registers (tools.benchmark.kernels).
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LOG2_E = tl.constexpr(1.4426950408889634)  # logits are multiplied by it, since the hardware has exp2


class Tile(NamedTuple):
    """Shape of the work of one program of a kernel.

    Attributes:
        rows: queries of a tile.
        keys: keys of a tile.
        warps: of a program.
        stages: of the software pipeline.
        hold: read by "whole" alone, the backward pass of windows of up to 64 tokens: whether the bias stays in registers for
            all windows of a program; False: it is loaded for each.
    """

    rows: int
    keys: int
    warps: int
    stages: int
    hold: bool = True


MOST_IN_ONE_TILE = 64  # maximum tokens of a window that one tile holds

# {kernel: {generation: tile}}. A tile serves its generation and later ones that have none of their own. They were chosen by the
# compiler's output, and are not yet timed.
HALF: dict[str, dict[int, Tile]] = {
    # Backward pass of windows that are one tile, without angles. For sm_90 (Triton 3.6, 7 x 7) by the compiler: two programs
    # of four warps on a multiprocessor as against one of eight, loads of the next window under way, 4,488 instructions of warps
    # for a window as against 6,896.
    "whole": {80: Tile(64, 64, 8, 1), 90: Tile(64, 64, 4, 2), 100: Tile(64, 64, 8, 1)},
    "tiles": {80: Tile(16, 64, 4, 1), 90: Tile(64, 64, 8, 1)},  # of larger windows
    # Global attention with a bias table and heads of up to 64 channels: forward and the two kernels of the backward pass,
    # chosen by the instructions of the inner loop and the warps that fit a multiprocessor.
    "forward": {80: Tile(64, 64, 4, 2), 90: Tile(128, 64, 8, 2), 100: Tile(128, 64, 4, 2)},
    "queries": {80: Tile(64, 64, 4, 2), 100: Tile(64, 64, 4, 1)},
    "keys": {80: Tile(64, 64, 4, 2), 90: Tile(64, 128, 8, 2), 100: Tile(64, 128, 8, 1)},
}


@functools.cache
def architecture(device: torch.device) -> int:
    """Return the compute capability, such as 90 for sm_90, for which kernels are compiled on a device.

    90 is also the result on a CPU (as in the interpreter) and where fake tensors stand for those of a GPU that is not there.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        return 90
    with torch.cuda.device(device):
        return triton.runtime.driver.active.get_current_target().arch


def generation(arch: int) -> int:
    """Return a compute capability's generation, as in HALF: 90 for Hopper, 100 for the Blackwell of data centers, else 80."""
    return {90: 90, 100: 100, 103: 100}.get(arch, 80)


def half_tile(kernel: str, arch: int) -> Tile:
    """Return a kernel's tile in HALF for the generation of `arch` (see `architecture`), or else for the last one before it."""
    rows, of = HALF[kernel], generation(arch)
    return rows[max(first for first in rows if first <= of)]


def window_tile(tokens: int, dtype: torch.dtype, rotary: bool, arch: int) -> Tile:
    """Return the tile of the forward kernel for windows of `tokens` tokens, with or without rotary angles (`rotary`)."""
    side = min(MOST_IN_ONE_TILE, padded_tokens(tokens))
    warps = 8 if dtype == torch.float32 or (rotary and generation(arch) > 80) else 4
    return Tile(side, side, warps, 2) if tokens <= side else Tile(side, 32, warps, 1)


def window_backward_tile(tokens: int, dtype: torch.dtype, width: int, rotary: bool, arch: int) -> Tile:
    """Return the tile of the backward kernel for windows of `tokens` tokens and heads of `width`; `rotary`: with angles."""
    if tokens <= MOST_IN_ONE_TILE:
        side = padded_tokens(tokens)
        many = dtype == torch.float32 or rotary or width > 32  # registers of a thread with four warps
        return (Tile(64, 64, 8, 1) if many else half_tile("whole", arch))._replace(rows=side, keys=side)
    if dtype == torch.float32 or (generation(arch) == 80 and width > 32):
        return Tile(16, 64, 4 if width <= 32 else 8, 1)
    return half_tile("tiles", arch)


def global_tile(kernel: str, dtype: torch.dtype, width: int, arch: int) -> Tile:
    """Return the tile of a kernel of global attention, by its name in HALF.

    Args:
        kernel: "forward", "queries" (backward pass: gradients of q and the table) or "keys" (of k and v).
        dtype: of q, k and v.
        width: width D of a head.
        arch: see `architecture`.
    """
    if dtype == torch.float32:
        return Tile(32, 32, 8, 1)
    if width <= 64:
        return half_tile(kernel, arch)
    if kernel == "keys":
        return Tile(32, 64, 8, 2 if generation(arch) > 80 else 1)
    return Tile(64, 32, 8, 1 if kernel == "queries" and generation(arch) == 80 else 2)


def table_tile(tile: Tile, columns: int, arch: int) -> Tile:
    """Return the tile of "queries" where the gradient of a table is computed: square, and smaller where it would spill.

    Args:
        tile: that of "queries" without a table's gradient.
        columns: columns of the grid. A tile that holds several image rows needs more registers.
        arch: see `architecture`.
    """
    side = min(tile.rows, tile.keys)
    if 2 * columns <= side and generation(arch) == 80:
        side = min(side, 32)
    return tile._replace(rows=side, keys=side)


def compiler_options(tile: Tile, dtype: torch.dtype) -> dict[str, int]:
    """Return Triton's options num_warps, num_stages and, in float32, maxnreg for kernels with this tile, inputs of `dtype`."""
    options = {"num_warps": tile.warps, "num_stages": tile.stages}
    if dtype == torch.float32:
        options["maxnreg"] = 255  # otherwise the assembler spills a few registers for a higher occupancy
    return options


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up; triton.cdiv takes microseconds for it, since kernels call it as well."""
    return -(-a // b)


def padded_tokens(tokens: int) -> int:
    """Return the number of lanes for a window's tokens: the next power of two, at least 16, as matrix products need."""
    return max(16, 1 << (tokens - 1).bit_length())  # triton.next_power_of_2 takes microseconds
