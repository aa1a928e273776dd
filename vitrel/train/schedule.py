"""Learning-rate schedule: warm-up, decay and cool-down, as a factor on the peak rate of every parameter group."""

import bisect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

FALLING = ("cosine", "linear", "poly")  # the schedules that end at final_lr


@dataclass(frozen=True)
class Schedule:
    """Learning-rate schedule after the warm-up. Durations are in epochs, fractions allowed; the rate changes at every update.

    Args:
        sched: "cosine", "linear" and "poly" fall to `optim.final_lr` at the end of the run; "step" and "multistep" multiply the
            rate by `decay_rate` at certain epochs; "constant" keeps the peak rate.
        warmup_lr: learning rate at the start of the warm-up, as a share of `optim.lr`.
        cooldown_epochs: number of epochs at the end of the run that are trained at `optim.final_lr`; only with cosine, linear
            and poly.
        decay_epochs: epochs between two decays of "step".
        decay_milestones: epochs, in increasing order, at whose beginning "multistep" decays.
        decay_rate: factor of a decay of "step" and "multistep".
        power: exponent of "poly": factor = final_lr + (1 - final_lr) * (1 - progress)**power.
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
            raise ValueError(
                f"model.optim.schedule.warmup_lr must be a share of model.optim.lr, within 0..1, not {self.warmup_lr}"
            )
        if self.cooldown_epochs < 0 or (self.cooldown_epochs and self.sched not in FALLING):
            raise ValueError(
                f"model.optim.schedule.cooldown_epochs ({self.cooldown_epochs}) must be at least 0, and 0 with sched "
                f"{self.sched}, since only {', '.join(FALLING)} have a final rate"
            )
        if not (self.decay_epochs > 0 and self.decay_rate > 0 and self.power > 0):
            raise ValueError(
                f"model.optim.schedule.decay_epochs ({self.decay_epochs}), decay_rate ({self.decay_rate}) and "
                f"power ({self.power}) must be positive"
            )
        if list(self.decay_milestones) != sorted(self.decay_milestones):
            raise ValueError(
                f"model.optim.schedule.decay_milestones must be in increasing order, not {list(self.decay_milestones)}"
            )

    def factor(self, updates: int, per_epoch: int, warmup_epochs: float = 0.0, final: float = 0.0) -> Callable[[int], float]:
        """Return the function that maps an update (0, 1, ...) to the factor on the peak learning rate.

        Args:
            updates: number of updates of the run.
            per_epoch: number of updates per epoch.
            warmup_epochs: length of the linear warm-up, epochs.
            final: factor at the end of a cosine, linear or poly schedule (`optim.final_lr`).

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
        """Factor of a cosine, linear or poly schedule between its peak, 1, and its end, 0; `progress` is 0 to 1."""
        if self.sched == "cosine":
            return 0.5 * (1 + math.cos(math.pi * progress))
        return (1 - progress) ** (self.power if self.sched == "poly" else 1)

    def _steps(self, epoch: float) -> int:
        """Number of decays of "step" or "multistep" up to and at `epoch` (fractional, from the start of the run); else 0."""
        if self.sched == "step":
            return int(epoch // self.decay_epochs)
        return bisect.bisect_right(self.decay_milestones, epoch) if self.sched == "multistep" else 0
