"""Averaged weights: what is evaluated, and what a checkpoint's `state_dict` holds."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor


@dataclass(frozen=True)
class Ema:
    """Exponential moving average of the weights, after every update; as timm's, it begins with those after the first.

    Args:
        decay: share of the average that an update keeps.
        warmup: a smaller share at first, 1 - (1 + n)**(-2/3) after n updates of the average, as timm's `use_warmup`.
        start_epoch: until that epoch, counted from 0, the average is the weights themselves.
        every: updates of the weights between two of the average.
    """

    decay: float = 0.9998
    warmup: bool = False
    start_epoch: int = 0
    every: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"model.ema.decay is the share that the average keeps, 0 <= decay < 1, not {self.decay}")
        if self.start_epoch < 0 or self.every < 1:
            raise ValueError(
                f"model.ema.start_epoch ({self.start_epoch}) is >= 0 and model.ema.every ({self.every}) at least 1"
            )

    def decay_at(self, n: int) -> float:
        """The share kept by the update after n others."""
        return min(self.decay, 1 - (1 + n) ** (-2 / 3)) if self.warmup else self.decay


class AveragedWeights(WeightAveraging):
    """Lightning's averaging with timm's decay, exact whenever it is saved.

    Lightning validates on the average by exchanging it with the weights. A checkpoint written in between would hold each in the
    other's place, so here the exchange is known and undone before anything is saved.
    """

    def __init__(self, settings: Ema) -> None:
        super().__init__(multi_avg_fn=self._average)
        self.settings = settings
        self.exchanged = False

    @torch.no_grad()
    def _average(self, averages: Sequence[Tensor], weights: Sequence[Tensor], n: Tensor) -> None:
        if averages[0].is_floating_point():
            torch._foreach_lerp_(averages, weights, 1 - self.settings.decay_at(int(n)))
        else:
            torch._foreach_copy_(averages, weights)  # counters

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """After every `every`-th update; never at the end of an epoch."""
        return step_idx is not None and (step_idx + 1) % self.settings.every == 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        with warnings.catch_warnings():
            # the hook it finds shares weights out, with strategies that are refused beside an average
            warnings.filterwarnings("ignore", message=".*WeightAveraging callback with a model that overrides.*")
            super().setup(trainer, pl_module, stage)
        if stage == TrainerFn.FITTING:
            self.exchanged = False

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.current_epoch >= self.settings.start_epoch:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        elif trainer.global_step > self._latest_update_step:
            self._average_model.update_parameters(pl_module)  # a copy, while nothing counts as averaged
            self._average_model.n_averaged.zero_()
            self._latest_update_step = trainer.global_step

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.exchanged:  # as it is after training
            super().on_validation_epoch_start(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            super().on_validation_epoch_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._swap_models(pl_module)  # Lightning would overwrite the weights, and a checkpoint saved from here on lose them

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.exchanged:
            self._swap_models(pl_module)  # the checkpoint's tensors are the module's own and change with them
            super().on_save_checkpoint(trainer, pl_module, checkpoint)
            for part in ("state_dict", "current_model_state"):
                checkpoint[part] = {name: value.detach().clone() for name, value in checkpoint[part].items()}
            self._swap_models(pl_module)
        else:
            super().on_save_checkpoint(trainer, pl_module, checkpoint)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self.exchanged:
            self._swap_models(pl_module)

    def _swap_models(self, pl_module: LightningModule) -> None:
        super()._swap_models(pl_module)
        self.exchanged = not self.exchanged
