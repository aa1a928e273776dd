"""Nothing is timed that is not right: output and every gradient against the definition in float64, on the same numbers.

Of every tensor the error has two measures, norm over norm and largest over largest. The first is, for our backends, at most
twice what SDPA makes of it in the same type, or FLOORS; the second, which sees a single wrong token, at most CAPS. Peers, which
may be less exact but not something else, have to keep CAPS alone.
"""

import gc
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tools.benchmark.cases import Case, Problem
from tools.benchmark.contenders import Contender, Function, contenders
from vitrel.ops import BACKENDS
from vitrel.position.terms import Terms

FLOORS = {torch.float32: 2e-6, torch.float16: 3e-4, torch.bfloat16: 2.4e-3}  # what rounding once or twice gives
CAPS = {torch.float32: 3e-5, torch.float16: 2e-2, torch.bfloat16: 1e-1}
_PARTS = 8  # of a batch, for each of which the definition is computed alone: it holds every score in float64

_LARGEST = "largest of "

Outcome = dict[str, Tensor]  # "output", and the gradients by the names of inputs and leaves


class Verdict(NamedTuple):
    """What a gate found. text: "" where the contender may be timed."""

    text: str
    errors: dict[str, float]
    limits: dict[str, float]


class Gate:
    """The truth of a problem, and what it takes to pass. training: gradients too."""

    def __init__(self, problem: Problem, training: bool):
        self.problem, self.training = problem, training
        self.dtype = next(iter(problem.inputs.values())).dtype
        self.truth = _truth(problem, training)
        try:
            self.yardstick = self._errors(contenders(problem.case, gpu=False)[0])
        except Exception:  # it will be said where SDPA itself is checked; the others keep CAPS
            self.yardstick = {}

    def check(self, contender: Contender) -> Verdict:
        """Runs it once. What it raises is raised."""
        errors, limits = self._errors(contender), {}
        for name in errors:
            limits[name] = CAPS[self.dtype]
            if contender.kind != "peer" and not name.startswith(_LARGEST):
                limits[name] = min(limits[name], max(FLOORS[self.dtype], 2 * self.yardstick.get(name, float("inf"))))
        wrong = [f"{name} {errors[name]:.1e} (limit {limits[name]:.1e})" for name in errors if not errors[name] <= limits[name]]
        return Verdict("error of " + ", ".join(wrong) if wrong else "", errors, limits)

    def _errors(self, contender: Contender) -> dict[str, float]:
        with contender.around():
            found = outcome(self.problem, contender.function, self.training)
        errors = {}
        for name, true in self.truth.items():
            errors[name], errors[_LARGEST + name] = relative_errors(found[name], true)
        return errors


def outcome(problem: Problem, function: Function, training: bool) -> Outcome:
    """Output of a contender's function, and where `training` the gradients of inputs and leaves."""
    if not training:
        with torch.no_grad():
            return {"output": function(problem.case, tuple(problem.inputs.values()), problem.terms(), problem.fixed)}
    differentiated = attached(problem)
    out, gradients = step(differentiated, function)
    names = (*problem.inputs, *problem.leaves)
    return {"output": out.detach(), **dict(zip(names, gradients, strict=True))}


def attached(problem: Problem) -> Problem:
    """The same numbers as tensors that require gradients."""
    inputs, leaves = ({n: x.detach().requires_grad_() for n, x in group.items()} for group in (problem.inputs, problem.leaves))
    return problem._replace(inputs=inputs, leaves=leaves)


def step(problem: Problem, function: Function) -> tuple[Tensor, Sequence[Tensor]]:
    """Forward and backward of a problem that is `attached`: output and gradients."""
    out = function(problem.case, tuple(problem.inputs.values()), problem.terms(), problem.fixed)
    leaves = [*problem.inputs.values(), *problem.leaves.values()]
    return out, torch.autograd.grad(out, leaves, problem.grad, allow_unused=True)  # the floor uses no tables


def relative_errors(found: Tensor | None, true: Tensor) -> tuple[float, float]:
    """Norm of the difference over that of `true`, and largest element over largest; infinite for nothing or another shape."""
    if found is None or found.shape != true.shape:
        return float("inf"), float("inf")
    off = found.double() - true
    return (off.norm() / true.norm()).item(), (off.abs().max() / true.abs().max()).item()


def _truth(problem: Problem, training: bool) -> Outcome:
    batch = problem.grad.shape[0]
    size, found = -(-batch // _PARTS), []
    for first in range(0, batch, size):
        found.append(outcome(problem.part(first, first + size).to(torch.float64), _definition, training))
    return {
        name: sum(part[name] for part in found) if name in problem.leaves else torch.cat([part[name] for part in found])
        for name in found[0]
    }


def _definition(case: Case, inputs: Sequence[Tensor], terms: Terms, fixed: Sequence[Tensor]) -> Tensor:
    reference = BACKENDS["reference"]
    if case.window:
        return reference.window_attention(inputs[0], terms, case.grid, case.window, case.shift, case.heads)
    return reference.attention(*inputs, terms, case.grid)


def free() -> None:
    """Gives back what the last contender held."""
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()
