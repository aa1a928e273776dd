"""Python's share of a call of the window kernels in eager mode: launches do nothing, and everything else is counted.

    python -m tools.benchmark.overhead   # half a minute; on one core: taskset -c 0 python -m ...

Tensors lie on the CPU and are new for every call; shapes like those of a Swin-T take turns. Two clocks are shown, since another
process on the same core adds to the first: time from call to end, and time of the processor.
"""

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: then the kernels take tensors of a CPU

import torch
from triton.runtime.interpreter import InterpretedFunction

from vitrel.grid import Grid
from vitrel.ops import window_attention
from vitrel.position.terms import Table, Terms


class Shape(NamedTuple):
    """Windows over a square grid; heads have 32 channels."""

    side: int
    heads: int
    window: int = 7
    shift: int = 0


SHAPES = (
    *(Shape(side, heads, shift=shift) for side, heads in ((28, 3), (14, 6), (7, 12)) for shift in (0, 3)),
    Shape(16, 3, window=8, shift=4),
    Shape(24, 3, window=12, shift=6),
)


@contextmanager
def no_launches() -> Iterator[None]:
    """Context in which a launch of a kernel does nothing."""

    def launch(*args: object, **kwargs: object) -> None:
        pass

    def of_grid(self: InterpretedFunction, grid: object) -> Callable:
        return launch

    with mock.patch.object(InterpretedFunction, "__getitem__", of_grid):
        yield


def seconds(shape: Shape, training: bool) -> tuple[float, float]:
    """Return the time from call to end of one call, with its backward pass if training, and the time of the processor."""
    channels, classes = 32 * shape.heads, (2 * shape.window - 1) ** 2
    qkv = torch.zeros(1, shape.side, shape.side, 3 * channels, requires_grad=training)
    table = torch.zeros(shape.heads, classes, requires_grad=training)
    grad = torch.zeros(1, shape.side, shape.side, channels)
    terms, grid = Terms(tables=(Table(bias=table),)), Grid(shape.side, shape.side)
    window, shift = (shape.window, shape.window), (shape.shift, shape.shift)
    start = time.perf_counter(), time.process_time()
    with torch.set_grad_enabled(training):
        out = window_attention(qkv, terms, grid, window, shift, shape.heads, backend="triton")
    if training:
        torch.autograd.grad(out, (qkv, table), grad)
    return time.perf_counter() - start[0], time.process_time() - start[1]


def measure(rounds: int) -> dict[str, tuple[float, float]]:
    """Return the median over rounds and shapes, in microseconds, of both times of `seconds`, for "forward" and "training"."""
    torch.set_num_threads(1)
    with no_launches():
        for _ in range(3):
            for shape in SHAPES:
                seconds(shape, True)
        found = {
            mode: [seconds(shape, mode == "training") for _ in range(rounds) for shape in SHAPES]
            for mode in ("forward", "training")
        }
    return {mode: tuple(statistics.median(of) * 1e6 for of in zip(*times, strict=True)) for mode, times in found.items()}  # type: ignore[misc]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=100, help="calls of each shape (%(default)s)")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    print("| one call | microseconds | of the processor |\n|---|---|---|")
    for mode, times in measure(args.rounds).items():
        print(f"| {mode} | {times[0]:.0f} | {times[1]:.0f} |")


if __name__ == "__main__":
    main()
