"""Exponential moving average (EMA) of the weights, which is evaluated and saved as a checkpoint's `state_dict`."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor


@dataclass(frozen=True)
class Ema:
    """Settings of the exponential moving average of the weights; like timm's, it starts from the weights after update 1.

    Args:
        decay: weight of the old average: average = decay * average + (1 - decay) * weights.
        warmup: use a smaller decay at first: at most 1 - (1 + n)**(-2/3) after n updates of the average, as with timm's
            `use_warmup`.

    Raises:
        ValueError: a decay that is not within 0 <= decay < 1.
    """

    decay: float = 0.9998
    warmup: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"model.ema.decay must satisfy 0 <= decay < 1, not {self.decay}")

    def decay_at(self, n: int) -> float:
        """Return the decay of the next update of the average, after `n` updates of it."""
        return min(self.decay, 1 - (1 + n) ** (-2 / 3)) if self.warmup else self.decay


class AveragedWeights(WeightAveraging):
    """Callback that averages the weights after every update with the decay of `Ema`; Lightning's has no warm-up of it."""

    def __init__(self, settings: Ema) -> None:
        super().__init__(multi_avg_fn=self._average)
        self.settings = settings

    @torch.no_grad()
    def _average(self, averages: Sequence[Tensor], weights: Sequence[Tensor], n: Tensor) -> None:
        if averages[0].is_floating_point():
            n = self._average_model.n_averaged  # on the CPU, unlike the argument: reading that would wait for a GPU
            torch._foreach_lerp_([*averages], [*weights], 1 - self.settings.decay_at(int(n)))
        else:
            torch._foreach_copy_(averages, weights)  # counters

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning copied the weights in `setup`, before they were moved to a GPU, and would leave the copy on the CPU: every
        # update would wait for the GPU and copy all weights.
        self._average_model.module.to(pl_module.device)
