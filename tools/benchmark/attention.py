"""The suite of attention alone: every backend against its peers, and cost against size.

Cost against size is time and memory of global attention from 196 to 16384 tokens. Memory is the peak of one call minus the
memory held before it, outputs and gradients included; the index [N, N] that some peers cache is added to it. A process that
needs more than `memory_limit` fails, which is a row of the results.
"""

import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tools.benchmark.engine import DEFINITION, Case, Contender, Visit
from tools.benchmark.methods import FLOOR, GATHERED, methods, outcome
from tools.benchmark.shapes import CPU_SHAPES, QUICK_SHAPES, SHAPES, Shape, make_problem
from tools.benchmark.worker import Repeats
from vitrel.grid import Grid
from vitrel.ops import BACKENDS

MODES = ("forward", "training")
TOKENS = ((14, 14), (28, 28), (24, 72), (56, 56), (64, 64), (96, 96), (128, 128))
QUICK_TOKENS = ((4, 6), (8, 8))
_CHECKED = 2000  # tokens up to which calls are checked, since the definition in float64 holds all scores
_RATE = 5e10  # assumed operations per second of one core, to choose the number of repeats
_STATM = Path("/proc/self/statm")  # its first number is the size of the address space in pages
_QUICK_PLAN = Repeats(2, 3, 0.0, 1)
_BUILD = f"{__name__}:AttentionCall"


def attention_cases(gpu: bool, quick: bool) -> list[Case]:
    """Return the cases: backends against peers in shapes for the device, then cost against size."""
    shapes = QUICK_SHAPES if quick else SHAPES if gpu else CPU_SHAPES
    cases = [backend_case(shape, mode, gpu, quick) for shape in shapes for mode in MODES]
    if gpu or _STATM.exists():  # the memory of a process is read from /proc
        sizes, lines = QUICK_TOKENS if quick else TOKENS, lineup(gpu, quick)
        cases += [sized_case(lines, size, mode, gpu) for mode in MODES for size in sizes]
    return cases


def backend_case(shape: Shape, mode: str, gpu: bool, quick: bool = False) -> Case:
    """Return the case of all methods for a shape."""
    training = mode == "training"
    common = dict(shape=shape, training=training, dtype=_dtype(gpu))
    truth = common | dict(method=DEFINITION)
    contenders = tuple(
        Contender(method.name, method.kind, common | dict(method=method.name), None if method.kind == "floor" else truth)
        for method in methods(shape, gpu)
    )
    row = shape._asdict() | {"grid": list(shape.grid), "tokens": shape.tokens, "flops": shape.flops(training)}
    del row["name"], row["compiled"]
    plan = _QUICK_PLAN if quick else Repeats() if gpu else cpu_repeats(shape, training)
    return Case(shape.name, _BUILD, contenders, (Visit(mode),), plan, _dtype(gpu), row=row, patience=300.0)


def cpu_repeats(shape: Shape, training: bool) -> Repeats:
    """Return the repeats on a CPU: 20 calls of warm-up for a shape that takes milliseconds, 2 for one that takes seconds."""
    seconds = shape.flops(training) / _RATE
    return Repeats(warmup=max(2, min(20, int(2 / seconds))), seconds=0.1)


class Sized(NamedTuple):
    """A line of the plot of cost against size: a method by its name, with an encoding."""

    name: str
    encoding: str = "table"

    @property
    def label(self) -> str:
        """Its name in rows and tables."""
        return self.name if self.encoding == "table" else f"{self.name}, {self.encoding}"

    @property
    def keeps(self) -> bool:
        """Whether the method caches the int64 index [N, N]."""
        return self.name.startswith(("softmax", GATHERED))


def lineup(gpu: bool, quick: bool) -> list[Sized]:
    """Return the methods measured against size, vitrel's first."""
    if quick:
        return [Sized("auto"), Sized(GATHERED)]
    ours = [name for name in ("triton" if gpu else "bias_by_row",) if name in BACKENDS]
    peers = ["sdpa", GATHERED, f"{GATHERED} compiled", "flex" if gpu else "flex compiled", "softmax", FLOOR]
    return [Sized("auto"), *map(Sized, ours), Sized("auto", "factorized"), Sized("auto", "rope"), *map(Sized, peers)]


def sized_case(lines: list[Sized], size: tuple[int, int], mode: str, gpu: bool = False) -> Case:
    """Return the case of one size: ViT-S on one image of h x w tokens, without prefix tokens, in `memory_limit`."""
    (h, w), contenders, kinds = size, [], {}
    for line in lines:
        shape = Shape(f"size {h}x{w}", line.encoding, Grid(h, w), 1, 6, 64)
        kinds = kinds or {method.name: method.kind for method in methods(shape, gpu)}
        common = dict(shape=shape, training=mode == "training", dtype=_dtype(gpu))
        args = common | dict(method=line.name, keep=line.keeps, limit=memory_limit())
        truth = None if line.name == FLOOR or shape.tokens > _CHECKED else common | dict(method=DEFINITION)
        row = {"tokens": shape.tokens, "kept_bytes": 8 * shape.tokens**2 if line.keeps else 0}
        env = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # no pool of processes
        contenders.append(Contender(line.label, kinds[line.name], args, truth, row, env))
    plan = Repeats(1, 1, 1.5, 15)
    return Case(f"size {h}x{w}", _BUILD, tuple(contenders), (Visit(mode),), plan, _dtype(gpu), kind="size", together=False)


def memory_limit() -> int:
    """Return how many bytes a process may allocate: 16 GiB, or 0.7 of the free memory if that is less."""
    info = Path("/proc/meminfo")
    lines = info.read_text().splitlines() if info.exists() else []
    free = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable")]
    return min([16 * 2**30, *(7 * count // 10 for count in free)])


class AttentionCall:
    """The call of a worker: a method by its name, or the definition in float64, on random numbers of a shape.

    keep: whether tensors that peers cache are made. limit: bytes that the process may still allocate; 0: no limit.
    """

    isolated = True

    def __init__(self, shape: Shape, method: str, training: bool, dtype: str, device: str, keep: bool = True, limit: int = 0):
        if limit and device == "cpu":
            limit += int(_STATM.read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        self.training, definition = training, method == DEFINITION
        self.problem = make_problem(shape, getattr(torch, dtype), torch.device(device), keep and not definition)
        if definition:
            self.problem, self.function = self.problem.double(), _definition
        else:
            self.function: Callable = next(m.function for m in methods(shape, device == "cuda") if m.name == method)

    def __call__(self) -> dict[str, Tensor]:
        return outcome(self.problem, self.function, self.training)


def _definition(shape: Shape, inputs: Any, terms: Any, fixed: Any) -> Tensor:
    reference = BACKENDS["reference"]
    if shape.window:
        return reference.window_attention(inputs[0], terms, shape.grid, shape.window, shape.shift, shape.heads)
    return reference.attention(*inputs, terms, shape.grid)


def _dtype(gpu: bool) -> str:
    return "bfloat16" if gpu else "float32"
