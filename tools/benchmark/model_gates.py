"""No model is timed that is not right: logits, or loss and every gradient, against our definition in float64, same weights.

Ours may be wrong by as much as rounding, or twice what the yardstick (timm's own model, with the same weights) makes of it;
peers, which may be less exact but not something else, have CAPS. Ours are checked first at a size that nothing divides, where
timm looks into padding: there our plain model is the yardstick.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from tools.benchmark.gates import CAPS, FLOORS, relative_errors
from tools.benchmark.model_cases import ModelCase, ModelContender
from tools.benchmark.models import our_model, under_our_names
from tools.benchmark.processes import Worker

HARD = (200, 232)  # pixels: neither windows nor patches divide it, and it is not square
_BUILD = "tools.benchmark.models:model_call"
_PATIENCE = 900.0  # seconds, for the longest compilation
_HALF_GRADIENT = 0.99  # sums that nearly cancel (of norms' biases) have no exact digit in bf16, 0.7; one that is missing has 1
_SHOWN = 4  # errors in a row: there is one of every parameter


def model_worker(
    one: ModelContender, case: ModelCase, device: str, threads: int, image: tuple[int, int] | None = None
) -> Worker:
    """A contender of a case in its process. image: another size of images than the model is built for."""
    return Worker(_BUILD, one.args(case) | dict(device=device, image=image), threads, one.env, device, patience=1200.0)


def model_truth(
    model: str, weights: str, case: ModelCase, device: str, threads: int, image: tuple[int, int] | None = None
) -> dict[str, Tensor]:
    """What a case has to give, with a library's weights: by the reference backend in float64."""
    library = "ours" if weights == "ours" else f"ours/{weights}"
    one = ModelContender("the definition", "ours", model, library, "reference")
    with model_worker(one, case._replace(dtype="float64"), device, threads, image) as worker:
        worker.start()
        return worker.outcome()


class ModelGate:
    """The truth of a model in a case with one library's weights, and what it takes to pass."""

    def __init__(self, truth: Mapping[str, Tensor], dtype: str):
        self.truth, self.yardstick = truth, None
        half = dtype != "float32"
        kind = torch.bfloat16 if half else torch.float32
        self.floor, self.cap = FLOORS[kind], CAPS[kind]
        self.gradient_cap = _HALF_GRADIENT if half else self.cap

    def check(self, found: Mapping[str, Tensor], strict: bool) -> tuple[str, dict[str, float]]:
        """(what is wrong or "", the worst errors). strict: for ours; the first that is not becomes the yardstick."""
        errors = {name: relative_errors(found.get(name), true)[0] for name, true in self.truth.items()}
        limits = {name: self._limit(name, strict) for name in errors}
        wrong = [
            f"{name} {error:.1e} (limit {limits[name]:.1e})" for name, error in errors.items() if not error <= limits[name]
        ]
        if not strict and self.yardstick is None and not wrong:
            self.yardstick = errors
        worst = sorted(errors, key=lambda name: errors[name] / limits[name], reverse=True)[:_SHOWN]
        said = {name: errors[name] for name in errors if name in worst or name in ("output", "loss")}
        return "error of " + ", ".join(wrong[:_SHOWN]) if wrong else "", said

    def _limit(self, name: str, strict: bool) -> float:
        cap = self.cap if name in ("output", "loss") else self.gradient_cap
        if not strict:
            return cap
        if self.yardstick is None:
            return self.floor if name in ("output", "loss") else cap
        return min(cap, max(self.floor, 2 * self.yardstick[name]))


def in_our_names(one: ModelContender, case: ModelCase, found: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a contender returned, gradients under the names of our parameters."""
    if one.library == "ours" or case.mode != "training":
        return found
    loss = {"loss": found.pop("loss")}
    return loss | under_our_names(our_model(one.library, one.model, case.size), found, one.library)
