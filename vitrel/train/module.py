"""The training module, and what its checkpoints hold.

A checkpoint is read with `torch.load(path, weights_only=True)` and holds, beside Lightning's own entries:

    {"state_dict": {"model.<parameter>": tensor, ...},
     "hyper_parameters": {the arguments of Classifier, plain values},
     "epoch_means": {"epoch": int, "train/loss": [sum, weight], "train/top1": [sum, weight]} of the epoch so far, all ranks,
     "vitrel": {"model": timm name, "model_args": {...}, "classes": [...], "img_size": [H, W], "mean": [3], "std": [3],
                "crop_pct": float, "interpolation": str, "position": {...}, "data": str, "seed": int, "epoch": epochs done,
                "step": updates done, "ema": bool, "class_counts": [...] where the data tells them,
                "checksums": {"state_dict.model.<parameter>": CRC-32, ...} of all tensors, from vitrel train}}

so that `timm.create_model(v["model"], num_classes=len(v["classes"]), img_size=v["img_size"], **v["model_args"])` rebuilds the
model of the entry v. `model_args` leaves out what would only load other weights first (`pretrained`, `checkpoint_path`).
`position` is what `position_record` tells of the encodings.

With `ema` the averaged weights are what is evaluated, and what `state_dict` holds; those that training goes on with are in
"current_model_state", under the same names, and "averaging_state" counts the updates of the average.
"""

import math
import random
import warnings
from dataclasses import asdict
from typing import Any, Self

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from timm.utils import dispatch_clip_grad
from torch import Tensor
from torch.nn import functional as F
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from vitrel.train.distill import Teacher
from vitrel.train.ema import AveragedWeights, Ema
from vitrel.train.execution import Execution, MemoryAdvice, check_sharded
from vitrel.train.means import EpochMeans
from vitrel.train.objective import Mixing, Objective
from vitrel.train.optim import Optimisation, check_clipping, create_optimizer
from vitrel.train.same_run import check_same_run
from vitrel.train.sharding import check_strategy, shard
from vitrel.train.tuning import Tuning
from vitrel.weights.record import position_record


class Classifier(LightningModule):
    """Any timm model as a classifier.

    Args:
        model: timm name, e.g. "vitrel_vit_n8_table".
        num_classes: size of the head.
        img_size: (H, W) the model is built for, pixels.
        model_args: further keywords of `timm.create_model`, e.g. `drop_path_rate`, `position`, `pretrained`.
        optim: optimiser and schedule.
        mixing: mixup and cutmix.
        label_smoothing: share of the label spread over all classes.
        seed: of drop path, dropout and mixing, drawn anew from (seed, epoch, batch, rank) at every batch.
        objective: the loss, and a teacher.
        tuning: the weights to start from, and which are trained.
        ema: averaged weights; null for none.
        execution: memory and speed.

    Raises:
        ValueError: an unknown model, `model_args` that set what the data decides, weights that do not fit.
    """

    def __init__(
        self,
        model: str,
        num_classes: int,
        img_size: int | tuple[int, int],
        model_args: dict[str, Any] | None = None,
        optim: Optimisation = Optimisation(),
        mixing: Mixing = Mixing(),
        label_smoothing: float = 0.0,
        seed: int = 0,
        objective: Objective = Objective(),
        tuning: Tuning = Tuning(),
        ema: Ema | None = None,
        execution: Execution = Execution(),
    ) -> None:
        super().__init__()
        self.name, self.num_classes, self.seed, self.label_smoothing = model, num_classes, seed, label_smoothing
        self.img_size = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size)
        self.model_args = dict(model_args or {})
        self.optim, self.mixing, self.objective = optim, mixing, objective
        self.tuning, self.ema, self.execution = tuning, ema, execution
        self.model, self.start_classes = tuning.build(model, num_classes, self.img_size, self.model_args)
        tuning.freeze(self.model)
        # of the modules' own classes, before a strategy wraps them
        self.position, self.stored = position_record(self.model), tuning.stored(self.model, model, self.model_args)
        execution.apply(self.model)
        self.mixup = mixing.build(num_classes, label_smoothing)
        self.loss = objective.build(label_smoothing)
        how, distillation = self.preprocessing, objective.distillation
        self.teacher = None if distillation is None else Teacher(distillation, num_classes, how["mean"], how["std"])
        self.means = EpochMeans("train/loss", "train/top1")
        how = {"average": "micro", "ignore_index": -1, "validate_args": False}
        shares = {f"val/top{k}": MulticlassAccuracy(num_classes, top_k=k, **how) for k in (1, 5) if k < max(num_classes, 2)}
        self.accuracies = torch.nn.ModuleDict(shares)
        self.val_loss = MeanMetric(nan_strategy="disable")
        self.train()

    def train(self, mode: bool = True) -> Self:
        """As every module's; what is frozen stays in evaluation mode."""
        super().train(mode)
        if mode:
            self.tuning.set_modes(self.model)
        return self

    @property
    def preprocessing(self) -> dict[str, Any]:
        """Mean, std, crop_pct and interpolation of the model's cfg."""
        cfg = self.model.pretrained_cfg
        return {
            "mean": tuple(map(float, cfg["mean"])),
            "std": tuple(map(float, cfg["std"])),
            "crop_pct": float(cfg["crop_pct"]),
            "interpolation": str(cfg["interpolation"]),
        }

    def setup(self, stage: str) -> None:
        """Checks that need model, data and trainer; ValueError when they do not fit."""
        data = self.trainer.datamodule
        if data.num_classes != self.num_classes:
            raise ValueError(
                f"the model has {self.num_classes} classes, {data.data} has {data.num_classes}: set num_classes to that"
            )
        self.class_counts = data.train_set.class_counts() if hasattr(data, "train_set") else None
        if self.mixup is not None:
            self.mixing.check_batch(data.batch_size, self.img_size)
        if self.start_classes is not None and list(self.start_classes) != list(data.classes):
            why = f"the weights are of classes other than those of {data.data}, or in another order"
            self.tuning.reset(self.model, self.num_classes, why)
            self.tuning.freeze(self.model)
            self.start_classes = None
        teacher = None if self.teacher is None else self.teacher.classes
        if teacher is not None and list(teacher) != list(data.classes):
            raise ValueError(
                f"distillation.checkpoint was trained on classes other than those of {data.data}, or in another order: "
                "take a teacher of the same classes"
            )
        check_strategy(self.trainer.strategy)
        if self.tuning.trainable is not None:  # on purpose
            warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode")
        check_clipping(self.optim, self.trainer.gradient_clip_val, self.trainer.gradient_clip_algorithm)

    def configure_callbacks(self) -> list[Callback]:
        """What the settings need of Lightning's callbacks; ValueError for what does not go with the strategy."""
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            check_sharded(self.ema is not None, self.optim.clip_mode)
        return [MemoryAdvice(), *([] if self.ema is None else [AveragedWeights(self.ema)])]

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] to logits [B, num_classes]."""
        if self.execution.channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        return self.model(images)

    def configure_model(self) -> None:
        """Share the weights out over the devices where the strategy is Lightning's ModelParallelStrategy (FSDP2)."""
        if isinstance(self.trainer.strategy, ModelParallelStrategy):
            shard(self.model, self.device_mesh)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Optimiser, and a schedule that moves at every update."""
        images = self.trainer.datamodule.batch_size * self.trainer.world_size * self.trainer.accumulate_grad_batches
        optimizer = create_optimizer(self.model, self.optim, images)
        per_epoch, total = self.updates_per_epoch(), self.updates()
        self.stored[1].update(self.tuning.fade_over(self.model, total * self.trainer.accumulate_grad_batches))
        if total <= 0:
            raise ValueError("the schedule needs the length of the run: set trainer.max_epochs or trainer.max_steps")
        factor = self.optim.schedule.factor(total, per_epoch, self.optim.warmup_epochs, self.optim.final_lr)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}}

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip as `optim.clip_mode` says, by trainer.gradient_clip_val."""
        if gradient_clip_val and self.optim.clip_mode == "agc":
            heads = self.model.get_classifier()  # arXiv 2102.06171 leaves it out
            heads = torch.nn.ModuleList(heads if isinstance(heads, tuple) else (heads,))
            head = set(heads.parameters())
            dispatch_clip_grad([p for p in self.model.parameters() if p not in head], gradient_clip_val, mode="agc")
        else:
            self.clip_gradients(optimizer, gradient_clip_val, self.optim.clip_mode or gradient_clip_algorithm)

    def updates_per_epoch(self) -> int:
        """Optimiser updates in an epoch, from the data alone.

        Lightning's `estimated_stepping_batches` would answer the same, but reading it here builds the loaders early, after
        which a loader's saved state is no longer restored (Lightning issue 20550).
        """
        batches, limit = self.trainer.datamodule.batches, self.trainer.limit_train_batches
        batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
        return math.ceil(batches / self.trainer.accumulate_grad_batches)

    def updates(self) -> int:
        """Optimiser updates in the run, which ends at the first of max_steps and max_epochs; 0 where it has no end."""
        limits = self.trainer.max_steps, self.updates_per_epoch() * (self.trainer.max_epochs or 0)
        return min((limit for limit in limits if limit > 0), default=0)

    def epochs_done(self) -> int:
        """Epochs trained to their end, evaluated or not."""
        loop, batches = self.trainer.fit_loop, self.trainer.fit_loop.epoch_loop.batch_progress.current
        epochs = loop.epoch_progress.current
        trained = epochs.ready > epochs.processed and batches.processed >= self.trainer.num_training_batches
        return epochs.processed + trained

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Draw as an uninterrupted run would at this batch, whatever was drawn before."""
        state = np.random.SeedSequence((self.seed, self.current_epoch, batch_idx, self.global_rank)).generate_state(3)
        torch.manual_seed(int(state[0]))
        np.random.seed(int(state[1]))  # noqa: NPY002  timm's Mixup draws from the global generator
        random.seed(int(state[2]))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Loss of a batch; against mixed labels, `top1` counts the label with the larger share."""
        images, labels = batch
        if self.mixup is not None and self.mixing.active(self.current_epoch):
            images, labels = self.mixup(images, labels)
        logits = self(images).float()
        loss = self.loss(logits, labels)
        if self.teacher is not None:
            loss = self.teacher.loss(logits, images, loss)
        hard = labels if labels.ndim == 1 else labels.argmax(-1)
        values = {"train/loss": loss.detach().expand(len(images)), "train/top1": (logits.detach().argmax(-1) == hard).float()}
        self.means.add(self.current_epoch, values)
        self.log_dict({f"{name}_step": value.mean() for name, value in values.items()}, on_step=True, prog_bar=True)
        return loss

    def on_train_epoch_end(self) -> None:
        """Log the means of the epoch, over all ranks."""
        self.log_dict({f"{name}_epoch": mean for name, mean in self.means.items()})  # type: ignore[misc]

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Top-1, top-5 (of more than 5 classes) and cross-entropy over the whole evaluation set.

        Labels of -1 count nowhere: images that cannot be read, or that fill up the last batches of several ranks.
        """
        images, labels = batch
        logits = self(images).float()
        self.val_loss.update(F.cross_entropy(logits, labels, ignore_index=-1, reduction="none")[labels >= 0])
        for accuracy in self.accuracies.values():
            accuracy.update(logits, labels)
        metrics = {"val/loss": self.val_loss, **self.accuracies}
        self.log_dict(metrics, on_step=False, on_epoch=True, prog_bar=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what is needed to rebuild and evaluate the model without this class."""
        data = self.trainer.datamodule
        how = {k: list(v) if isinstance(v, tuple) else v for k, v in self.preprocessing.items()}
        name, arguments = self.stored
        checkpoint["vitrel"] = {
            "model": name,
            "model_args": arguments,
            "classes": list(data.classes),
            "img_size": list(self.img_size),
            "position": self.position,
            **how,
            "data": data.data,
            "seed": self.seed,
            "epoch": self.epochs_done(),
            "step": self.global_step,
            "ema": self.ema is not None,
        }
        if self.class_counts is not None:
            checkpoint["vitrel"]["class_counts"] = self.class_counts
        checkpoint["epoch_means"] = self.means.saved(self.trainer.strategy)
        checkpoint["hyper_parameters"] = self.settings()

    def settings(self) -> dict[str, Any]:
        """The constructor's arguments as plain values."""
        plain = {"model": self.name, "img_size": list(self.img_size), "model_args": dict(self.model_args)}
        plain |= {name: getattr(self, name) for name in ("num_classes", "label_smoothing", "seed")}
        groups = {name: getattr(self, name) for name in ("optim", "mixing", "objective", "tuning", "ema", "execution")}
        return plain | {name: None if group is None else asdict(group) for name, group in groups.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """ValueError when the run to resume was of another model, other classes or other data, or trained otherwise."""
        saved = {"ema": False} | checkpoint.get("vitrel", {})
        mine = {"model": self.stored[0], "classes": list(self.trainer.datamodule.classes), "ema": self.ema is not None}
        for key, value in mine.items():
            if (was := saved.get(key)) != value:
                raise ValueError(f"cannot resume: the checkpoint's {key} is {was!s:.200}, this run's is {value!s:.200}")
        check_same_run(self.trainer, checkpoint)
        if "epoch_means" in checkpoint:
            self.means.restore(checkpoint["epoch_means"], self.global_rank)
