"""Exponential moving average (EMA) of the weights, which is evaluated and saved as a checkpoint's `state_dict`."""

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
    """Settings of the exponential moving average of the weights; like timm's, it starts from the weights after update 1.

    Args:
        decay: weight of the old average: average = decay * average + (1 - decay) * weights.
        warmup: use a smaller decay at first: at most 1 - (1 + n)**(-2/3) after n updates of the average, as with timm's
            `use_warmup`.
        start_epoch: first epoch, counted from 0, that is averaged; before it, the average is a copy of the weights.
        every: number of optimizer updates per update of the average.
    """

    decay: float = 0.9998
    warmup: bool = False
    start_epoch: int = 0
    every: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.decay < 1:
            raise ValueError(f"model.ema.decay must satisfy 0 <= decay < 1, not {self.decay}")
        if self.start_epoch < 0 or self.every < 1:
            raise ValueError(
                f"model.ema.start_epoch ({self.start_epoch}) must be at least 0, model.ema.every ({self.every}) at least 1"
            )

    def decay_at(self, n: int) -> float:
        """Return the decay of the next update of the average, after `n` updates of it."""
        return min(self.decay, 1 - (1 + n) ** (-2 / 3)) if self.warmup else self.decay


class AveragedWeights(WeightAveraging):
    """Lightning's WeightAveraging with timm's decay, and correct checkpoints during an evaluation.

    Lightning evaluates the average by swapping it with the weights. A checkpoint written while they are swapped would hold the
    average as the weights and the weights as the average, so this class undoes the swap while a checkpoint is saved.
    """

    def __init__(self, settings: Ema) -> None:
        super().__init__(multi_avg_fn=self._average)
        self.settings = settings
        self.exchanged = False

    @torch.no_grad()
    def _average(self, averages: Sequence[Tensor], weights: Sequence[Tensor], n: Tensor) -> None:
        if averages[0].is_floating_point():
            n = self._average_model.n_averaged  # on the CPU, unlike the argument: reading that would wait for a GPU
            torch._foreach_lerp_([*averages], [*weights], 1 - self.settings.decay_at(int(n)))
        else:
            torch._foreach_copy_(averages, weights)  # counters

    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        """Return True after every `every`-th optimizer update, never at the end of an epoch (`step_idx` None)."""
        return step_idx is not None and (step_idx + 1) % self.settings.every == 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        with warnings.catch_warnings():
            # Lightning warns of `configure_model`, which only acts under strategies that `check_strategy` forbids with an EMA
            warnings.filterwarnings("ignore", message=".*WeightAveraging callback with a model that overrides.*")
            super().setup(trainer, pl_module, stage)
        if stage == TrainerFn.FITTING:
            self.exchanged = False

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning copied the weights in `setup`, before they were moved to a GPU, and would leave the copy on the CPU: every
        # update would wait for the GPU and copy all weights.
        self._average_model.module.to(pl_module.device)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning also copied them before the module gave the model a new classifier or fitted its position encoding
        if not self._average_model.n_averaged:
            self._copy_weights(pl_module)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.current_epoch >= self.settings.start_epoch:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        elif trainer.global_step > self._latest_update_step:
            self._copy_weights(pl_module)
            self._latest_update_step = trainer.global_step

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.exchanged:  # after training they stay swapped, see on_train_end
            super().on_validation_epoch_start(trainer, pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            super().on_validation_epoch_end(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Lightning would overwrite the weights by the average here, and later checkpoints would lose them
        self._swap_models(pl_module)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.exchanged:
            self._swap_models(pl_module)  # also swaps the checkpoint's tensors, which are the module's: hence the clones below
            super().on_save_checkpoint(trainer, pl_module, checkpoint)
            for part in ("state_dict", "current_model_state"):
                checkpoint[part] = {name: value.detach().clone() for name, value in checkpoint[part].items()}
            self._swap_models(pl_module)
        else:
            super().on_save_checkpoint(trainer, pl_module, checkpoint)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if self.exchanged:
            self._swap_models(pl_module)

    def _copy_weights(self, pl_module: LightningModule) -> None:
        self._average_model.update_parameters(pl_module)  # copies, since n_averaged is 0
        self._average_model.n_averaged.zero_()

    def _swap_models(self, pl_module: LightningModule) -> None:
        super()._swap_models(pl_module)
        self.exchanged = not self.exchanged
