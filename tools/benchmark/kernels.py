"""Registers and spills of the Triton kernels on four architectures, by the compiler ahead of time; needs no GPU.

    python -m tools.benchmark.kernels          # compile all shapes (minutes): results/kernel_registers
    python -m tools.benchmark.kernels --table  # table.md again, from the rows

What is launched is the code of vitrel.ops.backends with the tiles that it chooses for the architecture.
"""

import argparse
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pandas as pd
import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget

from tools.benchmark.samples import ROOT
from tools.benchmark.tables import markdown
from vitrel.common.files import atomic_write
from vitrel.grid import Grid
from vitrel.ops.backends import triton_global, triton_window

ROWS, PAGE = Path("results/kernel_registers/registers.csv"), Path("results/kernel_registers/table.md")
ARCHITECTURES = (80, 89, 90, 100)
_TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Shape(NamedTuple):
    """Shape of an attention call: windows of a size, or else global attention of a grid.

    rotary: angles in the window kernel. scores: query tables of both axes instead of a bias table.
    """

    window: tuple[int, int] | None = None
    grid: Grid | None = None
    width: int = 32
    dtype: torch.dtype = torch.bfloat16
    rotary: bool = False
    scores: bool = False

    def __str__(self) -> str:
        h, w = self.window or self.grid[:2]  # type: ignore[index]
        what = f"windows {h}×{w}" if self.window else f"global {h}×{w}"
        if self.grid and self.grid.prefix:
            what += f" + {self.grid.prefix}"
        what += ", rotary" if self.rotary else ", row and column scores" if self.scores else ""
        return f"{what}, D {self.width}, {str(self.dtype).removeprefix('torch.')}"


_FLOAT = torch.float32
SHAPES = (
    *(Shape((n, n), rotary=rotary) for n in (7, 8, 12, 16) for rotary in (False, True)),
    *(Shape((16, 16), width=64, rotary=rotary) for rotary in (False, True)),
    Shape((9, 9)),
    Shape((12, 12), dtype=torch.float16),
    *(Shape((n, n), dtype=_FLOAT) for n in (7, 8, 12, 16)),
    Shape((7, 7), dtype=_FLOAT, rotary=True),
    Shape((16, 16), width=64, dtype=_FLOAT, rotary=True),
    *(Shape(grid=Grid(n, n, prefix), width=64) for n in (14, 32) for prefix in (0, 1)),
    *(Shape(grid=Grid(n, n), width=64, scores=True) for n in (14, 32, 64)),
    Shape(grid=Grid(14, 14, 1), width=64, dtype=torch.float16),
    Shape(grid=Grid(14, 14, 1), width=64, dtype=_FLOAT),
    Shape(grid=Grid(32, 32), width=64, dtype=_FLOAT),
    Shape(grid=Grid(14, 14), width=64, dtype=_FLOAT, scores=True),
)


class Compiled(NamedTuple):
    """A compiled kernel: registers of a thread, bytes of stack of a thread (spilled registers), bytes of shared memory."""

    name: str
    warps: int
    registers: int
    stack: int
    shared: int
    assembly: dict[str, Any]


class Driver:
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
        mock.patch.object(triton.runtime.driver, "_active", Driver(capability)),
    ):
        yield found


def launch(shape: Shape) -> None:
    """Launch forward and backward kernels of a shape with tensors on the CPU; for use inside `compiling`."""
    if shape.window is None:
        _launch_global(shape)
    else:
        _launch_windowed(shape)


def _launch_windowed(shape: Shape) -> None:
    window, heads = shape.window or (1, 1), 2
    n, classes = window[0] * window[1], (2 * window[0] - 1) * (2 * window[1] - 1)
    qkv = torch.zeros(2, 32, 32, 3 * heads * shape.width, dtype=shape.dtype)
    angle = torch.zeros(1, n, shape.width // 2) if shape.rotary else None
    inputs = qkv, torch.zeros(heads, classes), angle, angle
    how = window, (1, 1), heads, 1.0
    out, lse = triton_window.window_forward(*inputs, *how, grad=True)
    triton_window.window_backward(out, *inputs, out, lse, *how)


def _launch_global(shape: Shape) -> None:
    grid, heads = shape.grid or Grid(1, 1), 2
    x = torch.zeros(2, grid.tokens, heads, shape.width, dtype=shape.dtype).transpose(1, 2)

    def scores(n: int) -> Tensor | None:
        return torch.zeros(2, heads, grid.tokens, n, dtype=shape.dtype) if shape.scores else None

    inputs = x, x, x, torch.zeros(heads, grid.classes()), scores(grid.h), scores(grid.w)
    out, lse = triton_global.biased_forward(*inputs, grid, 1.0)
    triton_global.biased_backward(out, *inputs, out, lse, grid, 1.0, not shape.scores)


def table(rows: pd.DataFrame) -> str:
    """Return a Markdown table: a line per shape, a column per architecture with the registers of each kernel and any spills."""
    body = []
    for shape, of_shape in rows.groupby("shape", sort=False):
        cells = [shape, ", ".join(dict.fromkeys(of_shape["kernel"]))]
        for architecture in ARCHITECTURES:
            found = of_shape[of_shape["architecture"] == architecture]
            spills = [f"{r} (**{s} B**)" if s else str(r) for r, s in zip(found["registers"], found["stack"], strict=True)]
            cells.append(", ".join(spills))
        body.append(cells)
    versions = "; ".join(f"{name} {', '.join(map(str, rows[name].unique()))}" for name in ("triton", "torch"))
    lines = markdown(["", "kernels", *(f"sm_{n}" for n in ARCHITECTURES)], "|---|---|" + "---|" * len(ARCHITECTURES), body)
    return "\n".join([f"Computed by the compiler ({versions}), no GPU; registers of a thread, at most 255.", "", *lines])


def measure() -> pd.DataFrame:
    """Compile every shape for every architecture: a row per kernel."""
    rows = []
    versions = {"triton": triton.__version__, "torch": torch.__version__}
    for shape in SHAPES:
        for architecture in ARCHITECTURES:
            with compiling(architecture) as found:
                launch(shape)
            for kernel in found:
                row = {"shape": str(shape), "architecture": architecture, "kernel": kernel.name.strip("_")}
                row |= {name: getattr(kernel, name) for name in ("warps", "registers", "stack", "shared")}
                rows.append(row | versions)
            print(f"{shape}, sm_{architecture}: {', '.join(f'{k.name} {k.registers}/{k.stack}' for k in found)}", flush=True)
    return pd.DataFrame(rows)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", action="store_true", help="compile nothing, write the table from the results")
    if not parser.parse_args().table:
        rows = measure()
        (ROOT / ROWS).parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(ROOT / ROWS) as part:
            rows.to_csv(part, index=False)
    with atomic_write(ROOT / PAGE) as part:
        part.write_text(f"# Registers of the Triton kernels\n\n{table(pd.read_csv(ROOT / ROWS))}\n", "utf-8")


if __name__ == "__main__":
    main()
