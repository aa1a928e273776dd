"""The suite of attention alone: every backend against its peers."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tools.benchmark.engine import DEFINITION, Case, Contender, Visit
from tools.benchmark.methods import methods, outcome
from tools.benchmark.shapes import CPU_SHAPES, QUICK_SHAPES, SHAPES, Shape, make_problem
from tools.benchmark.worker import Repeats
from vitrel.ops import BACKENDS

MODES = ("forward", "training")
_RATE = 5e10  # assumed operations per second of one core, to choose the number of repeats
_QUICK_PLAN = Repeats(2, 3, 0.0, 1)
_BUILD = f"{__name__}:AttentionCall"


def attention_cases(gpu: bool, quick: bool) -> list[Case]:
    """Return the cases of backends against peers, in shapes for the device."""
    shapes = QUICK_SHAPES if quick else SHAPES if gpu else CPU_SHAPES
    return [backend_case(shape, mode, gpu, quick) for shape in shapes for mode in MODES]


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


class AttentionCall:
    """The call of a worker: a method by its name, or the definition in float64, on random numbers of a shape."""

    isolated = True

    def __init__(self, shape: Shape, method: str, training: bool, dtype: str, device: str):
        self.training, definition = training, method == DEFINITION
        self.problem = make_problem(shape, getattr(torch, dtype), torch.device(device), not definition)
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
