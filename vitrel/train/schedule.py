"""The learning rate over a run, as a factor on every group's own rate."""

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

FALLING = ("cosine", "linear", "poly")  # those that end at final_lr


@dataclass(frozen=True)
class Schedule:
    """What follows the warm-up; all in epochs, fractions too, and counted per update.

    Args:
        sched: "cosine", "linear" and "poly" fall to `optim.final_lr` at the end of the run, "step" and "multistep" multiply by
            `decay_rate` now and then, "constant" stays.
        warmup_lr: share of `optim.lr` that the warm-up rises from.
        cooldown_epochs: last epochs of the run, spent at `final_lr`; of cosine, linear and poly.
        decay_epochs: epochs between two steps of "step".
        decay_milestones: epochs, in rising order, at whose beginning "multistep" steps.
        decay_rate: factor of a step.
        power: of "poly": final_lr + (1 - final_lr) * (1 - progress)**power.
    """

    sched: Literal["cosine", "linear", "poly", "step", "multistep", "constant"] = "cosine"
    warmup_lr: float = 0.0
    cooldown_epochs: float = 0.0
    decay_epochs: float = 30.0
    decay_milestones: tuple[float, ...] = (90.0, 180.0, 270.0)
    decay_rate: float = 0.1
    power: float = 0.9

    def __post_init__(self) -> None:
        if not 0 <= self.warmup_lr <= 1:
            raise ValueError(f"model.optim.schedule.warmup_lr is a share of model.optim.lr, within 0..1, not {self.warmup_lr}")
        if self.cooldown_epochs < 0 or (self.cooldown_epochs and self.sched not in FALLING):
            raise ValueError(
                f"model.optim.schedule.cooldown_epochs ({self.cooldown_epochs}) is >= 0, and 0 unless sched is one of "
                f"{', '.join(FALLING)}: {self.sched} has no final rate to stay at"
            )
        if not (self.decay_epochs > 0 and self.decay_rate > 0 and self.power > 0):
            raise ValueError(
                f"model.optim.schedule.decay_epochs ({self.decay_epochs}), decay_rate ({self.decay_rate}) and "
                f"power ({self.power}) must be positive"
            )
        if list(self.decay_milestones) != sorted(self.decay_milestones):
            raise ValueError(f"model.optim.schedule.decay_milestones rise, these do not: {list(self.decay_milestones)}")

    def factor(self, updates: int, per_epoch: int, warmup_epochs: float = 0.0, final: float = 0.0) -> Callable[[int], float]:
        """Factor at update 0, 1, ... of a run of `updates`, of which an epoch has `per_epoch`.

        Raises:
            ValueError: warm-up and cool-down take the whole run.
        """
        warmup, cooldown = round(warmup_epochs * per_epoch), round(self.cooldown_epochs * per_epoch)
        end = updates - cooldown
        if warmup >= end:
            rest = f" and cool-down of {cooldown}" if cooldown else ""
            raise ValueError(
                f"warm-up of {warmup} updates{rest} in a run of {updates}: lower model.optim.warmup_epochs or train longer"
            )

        def at(update: int) -> float:
            if update < warmup:
                return self.warmup_lr + (1 - self.warmup_lr) * (update + 1) / warmup
            if self.sched in FALLING:
                return final + (1 - final) * self._left(min(1.0, (update - warmup) / (end - warmup)))
            return self.decay_rate ** self._steps(update / per_epoch)

        return at

    def _left(self, progress: float) -> float:
        """What is left of the way to the final rate, 1 to 0."""
        if self.sched == "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        return (1 - progress) ** (self.power if self.sched == "poly" else 1)

    def _steps(self, epoch: float) -> int:
        if self.sched == "step":
            return int(epoch // self.decay_epochs)
        return bisect.bisect_right(self.decay_milestones, epoch) if self.sched == "multistep" else 0
