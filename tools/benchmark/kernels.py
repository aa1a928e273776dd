"""Registers, stack and shared memory of the Triton kernels, compiled ahead of time for four architectures; needs no GPU."""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from vitrel.grid import Grid
from vitrel.ops.backends import triton_global, triton_global_backward, triton_window, triton_window_backward

CAPABILITIES = (80, 89, 90, 100)
_TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Shape(NamedTuple):
    """Shape of an attention call. window: of windowed attention, else `grid` attends globally. scores: with query tables of both
    axes instead of a bias table.
    """

    title: str
    window: tuple[int, int] | None = None
    grid: Grid | None = None
    width: int = 32
    dtype: torch.dtype = torch.bfloat16
    rotary: bool = False
    scores: bool = False


class Compiled(NamedTuple):
    """A compiled kernel: registers of a thread, bytes of stack of a thread (spilled registers), bytes of shared memory."""

    name: str
    warps: int
    registers: int
    stack: int
    shared: int
    assembly: dict[str, Any]


class _Driver:
    """A driver for launches that compile and do not run; no device of this number exists, so that nothing else finds them."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_device(self) -> int:
        return 1000 + self.capability

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


@contextmanager
def compiling(capability: int) -> Iterator[list[Compiled]]:
    """Compile kernels for a compute capability (90 is sm_90) where they are launched, and run none; yields those compiled."""
    if not _TOOL.is_file():
        raise RuntimeError(f"this triton brings no cuobjdump, which counts registers: {_TOOL}")
    found: list[Compiled] = []
    launch = triton.runtime.jit.JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            usage = subprocess.run(
                [_TOOL, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
            ).stdout
        registers, stack = (int(re.search(rf"{what}:(\d+)", usage)[1]) for what in ("REG", "STACK"))  # type: ignore[index]
        found.append(Compiled(self.__name__, kernel.metadata.num_warps, registers, stack, kernel.metadata.shared, kernel.asm))
        return kernel

    with (
        mock.patch.object(triton.runtime.jit.JITFunction, "run", run),
        mock.patch.object(triton.runtime.driver, "_active", _Driver(capability)),
    ):
        yield found


def launch(shape: Shape) -> None:
    """Launch forward and backward kernels of a shape with tensors on the CPU; for use inside `compiling`."""
    if shape.window is None:
        _launch_global(shape)
    else:
        _launch_windowed(shape)


def _launch_windowed(shape: Shape) -> None:
    window, heads = shape.window, 2
    n, classes = window[0] * window[1], (2 * window[0] - 1) * (2 * window[1] - 1)
    qkv = torch.zeros(2, 32, 32, 3 * heads * shape.width, dtype=shape.dtype)
    angle = torch.zeros(1, n, shape.width // 2) if shape.rotary else None
    inputs = qkv, torch.zeros(heads, classes), angle, angle
    how = window, (1, 1), heads, 1.0
    out, lse = triton_window.window_forward(*inputs, *how, grad=True)
    triton_window_backward.window_backward(out, *inputs, out, lse, *how)


def _launch_global(shape: Shape) -> None:
    grid, heads = shape.grid, 2
    x = torch.zeros(2, grid.tokens, heads, shape.width, dtype=shape.dtype).transpose(1, 2)

    def scores(n: int) -> Tensor | None:
        return torch.zeros(2, heads, grid.tokens, n, dtype=shape.dtype) if shape.scores else None

    inputs = x, x, x, torch.zeros(heads, grid.classes()), scores(grid.h), scores(grid.w)
    out, lse = triton_global.biased_forward(*inputs, grid, 1.0)
    triton_global_backward.biased_backward(out, *inputs, out, lse, grid, 1.0, not shape.scores)
