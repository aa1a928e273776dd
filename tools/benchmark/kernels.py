"""Registers and spills of the Triton kernels on four architectures, by the compiler ahead of time; needs no GPU.

    python -m tools.benchmark.kernels                 # compile all shapes (minutes): results/kernel_registers
    python -m tools.benchmark.kernels --triton 3.6.0  # the same with this Triton, that of the oldest torch we allow
    python -m tools.benchmark.kernels --table         # table.md again, from the rows

What is launched is the code of vitrel.ops.backends with the tiles that it chooses for the architecture. A kernel that does not
compile ends the command with the compiler's error, and one in half precision that spills more than 64 bytes a thread with exit
status 1. Another Triton than the installed one is put by pip into a temporary folder, in front of the path of one process.
"""

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget

from tools.benchmark.samples import ROOT
from tools.benchmark.tables import markdown
from vitrel.common.files import atomic_write
from vitrel.grid import Grid
from vitrel.ops.backends import triton_global, triton_tiles, triton_window

if TYPE_CHECKING:  # the tests of the kernels run where there is no pandas
    import pandas as pd

ROWS, PAGE = Path("results/kernel_registers/registers.csv"), Path("results/kernel_registers/table.md")
ARCHITECTURES = (80, 89, 90, 100)
MOST_SPILLED = 64  # maximum bytes of stack of a thread in half precision
COMPILER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Shape(NamedTuple):
    """Shape of an attention call: windows of a size, or else global attention of a grid.

    rotary: angles in the window kernel.
    """

    window: tuple[int, int] | None = None
    grid: Grid | None = None
    width: int = 32
    dtype: torch.dtype = torch.bfloat16
    rotary: bool = False

    def __str__(self) -> str:
        h, w = self.window or self.grid[:2]  # type: ignore[index]
        what = f"windows {h}×{w}" if self.window else f"global {h}×{w}"
        if self.grid and self.grid.prefix:
            what += f" + {self.grid.prefix}"
        what += ", rotary" if self.rotary else ""
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
    Shape(grid=Grid(64, 64), width=64),
    Shape(grid=Grid(14, 14, 1), width=64, dtype=torch.float16),
    Shape(grid=Grid(14, 14, 1), width=64, dtype=_FLOAT),
    Shape(grid=Grid(32, 32), width=64, dtype=_FLOAT),
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


def cuobjdump(cubin: bytes, option: str) -> str:
    """Return what cuobjdump says of a compiled kernel."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([COMPILER / "cuobjdump", option, file.name], capture_output=True, text=True, check=True).stdout


@contextmanager
def compiling(capability: int) -> Iterator[list[Compiled]]:
    """Compile kernels for a compute capability (90 is sm_90) where they are launched, and run none; yields those compiled."""
    if not (tool := COMPILER / "cuobjdump").is_file():
        raise RuntimeError(f"this triton brings no cuobjdump, which counts registers: {tool}")
    found: list[Compiled] = []
    launch = triton.runtime.jit.JITFunction.run

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = launch(self, *args, grid=grid, warmup=True, **kwargs)
        usage = cuobjdump(kernel.asm["cubin"], "--dump-resource-usage")
        registers, stack = (int(re.search(rf"{what}:(\d+)", usage)[1]) for what in ("REG", "STACK"))  # type: ignore[index]
        sizes = kernel.metadata.num_warps, registers, stack, kernel.metadata.shared
        found.append(Compiled(self.__name__, *sizes, dict(kernel.asm)))
        return kernel

    with (
        mock.patch.object(triton.runtime.jit.JITFunction, "run", run),
        mock.patch.object(triton.runtime.driver, "_active", Driver(capability)),
        mock.patch.object(triton_tiles, "architecture", return_value=capability),
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
    inputs = x, x, x, torch.zeros(heads, grid.classes())
    out, lse = triton_global.biased_forward(*inputs, grid, 1.0)
    triton_global.biased_backward(out, *inputs, out, lse, grid, 1.0)


def table(rows: "pd.DataFrame") -> str:
    """Return a Markdown table: a line per shape, a column per architecture with the registers of each kernel and any spills."""
    body = []
    for shape, of_shape in rows.groupby("shape", sort=False):
        cells = [shape, ", ".join(dict.fromkeys(of_shape["kernel"]))]
        for architecture in ARCHITECTURES:
            found = of_shape[of_shape["architecture"] == architecture]
            spills = [f"{r} (**{s} B**)" if s else str(r) for r, s in zip(found["registers"], found["stack"], strict=True)]
            cells.append(", ".join(spills))
        body.append(cells)
    head = ["", "kernels", *(f"sm_{n}" for n in ARCHITECTURES)]
    return "\n".join(markdown(head, "|---|---|" + "---|" * len(ARCHITECTURES), body))


def page(rows: "pd.DataFrame") -> str:
    """Return the page: a table per version of Triton, the newest first."""
    lines = ["# Registers of the Triton kernels", ""]
    lines += ["Computed by the compiler, no GPU; registers of a thread, at most 255, and in brackets bytes that spill."]
    for version in sorted(rows["triton"].unique(), key=_number, reverse=True):
        found = rows[rows["triton"] == version]
        lines += ["", f"## Triton {version} (torch {', '.join(found['torch'].unique())})", "", table(found)]
    return "\n".join(lines) + "\n"


def _number(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]


def compiled(shape: Shape, architecture: int) -> list[Compiled]:
    """Return the kernels of a shape for an architecture."""
    with compiling(architecture) as found:
        launch(shape)
    return found


def measure() -> "pd.DataFrame":
    """Compile every shape for every architecture, in as many processes as there are cores: a row per kernel."""
    import pandas as pd

    rows = []
    versions = {"triton": triton.__version__, "torch": torch.__version__}
    jobs = list(itertools.product(SHAPES, ARCHITECTURES))
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn")) as pool:
        for (shape, architecture), found in zip(jobs, pool.map(compiled, *zip(*jobs, strict=True)), strict=True):
            for kernel in found:
                row = {"shape": str(shape), "architecture": architecture, "kernel": kernel.name.strip("_")}
                row |= {name: getattr(kernel, name) for name in ("warps", "registers", "stack", "shared")}
                rows.append(row | versions)
            print(f"{shape}, sm_{architecture}: {', '.join(f'{k.name} {k.registers}/{k.stack}' for k in found)}", flush=True)
    return pd.DataFrame(rows)


def with_triton(version: str) -> int:
    """Run this command in a process with another version of Triton and return its exit status."""
    with tempfile.TemporaryDirectory() as folder:
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, f"triton=={version}"]
        subprocess.run(pip, check=True)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(ROOT)])}
        return subprocess.run([sys.executable, "-m", __spec__.name], env=environment, check=False).returncode


def main() -> None:
    """Run the command line."""
    import pandas as pd

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--triton", metavar="VERSION", help="compile with this version instead of the installed one")
    parser.add_argument("--table", action="store_true", help="compile nothing, write the table from the results")
    args = parser.parse_args()
    if args.triton and args.triton != triton.__version__:
        sys.exit(with_triton(args.triton))
    rows = pd.read_csv(ROOT / ROWS)
    if not args.table:
        new = measure()
        rows = pd.concat([rows[~rows["triton"].isin(new["triton"])], new])
        with atomic_write(ROOT / ROWS) as part:
            rows.to_csv(part, index=False)
    with atomic_write(ROOT / PAGE) as part:
        part.write_text(page(rows), "utf-8")
    spilled = rows[(rows["stack"] > MOST_SPILLED) & ~rows["shape"].str.endswith("float32")]
    if len(spilled):
        sys.exit(f"these kernels spill more than {MOST_SPILLED} bytes:\n{spilled.to_string(index=False)}")


if __name__ == "__main__":
    main()
