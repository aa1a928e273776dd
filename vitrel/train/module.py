"""The Lightning module for training, and the layout of its checkpoints.

A checkpoint is read with `torch.load(path, weights_only=True)` and holds, besides Lightning's entries:

    {"state_dict": {"model.<parameter>": tensor, ...}, in segmentation "model.features.body.<parameter>", ...
     "hyper_parameters": {the arguments of Classifier, plain values},
     "vitrel": {"model": timm name, "model_args": {...}, "classes": [...], "img_size": [H, W],
                "train_sizes": ["HxW", ...], at native shape budgets of patch tokens as "196t", "mean": [3], "std": [3],
                "crop_pct": float, "crop_mode": str, "interpolation": str, "position": {...}, "data": str, "seed": int,
                "epoch": epochs done, "step": updates done, "ema": bool,
                "task": str of another task than classification, and "head": str of segmentation}}

With the entry v = checkpoint["vitrel"], the model is rebuilt by
`timm.create_model(v["model"], num_classes=len(v["classes"]), img_size=v["img_size"], **v["model_args"])`. `model_args` leaves
out arguments that would load other weights first (`pretrained`, `checkpoint_path`). `position` is the description of the
encodings by `position_record`.

With `ema`, the averaged weights are evaluated, and `state_dict` holds them. The weights with which training continues are then
in "current_model_state", under the same names, and "averaging_state" counts the updates of the average.
"""

import math
import random
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import Any, Literal, Self

import numpy as np
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from timm.layers import to_2tuple
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from vitrel.common.sizes import Budget, Size, format_size
from vitrel.common.warn import warn_once
from vitrel.data import normalize
from vitrel.data.readers.classes import order_note
from vitrel.models.config import preprocessing_of
from vitrel.models.segmenter import Segmenter
from vitrel.tasks import task_named
from vitrel.train.distill import Teacher, outputs
from vitrel.train.ema import AveragedWeights, Ema
from vitrel.train.objective import Erasing, Mixing, Objective
from vitrel.train.optim import Optimization, create_optimizer
from vitrel.train.running.execution import Execution
from vitrel.train.running.resume_check import check_same_run
from vitrel.train.tuning import Tuning
from vitrel.weights.record import position_record


class Classifier(LightningModule):
    """Lightning module that trains any timm model for a task of `vitrel.tasks`.

    Args:
        model: timm name, e.g. "vitrel_vit_n8_table", or a file that `vitrel.load` takes.
        num_classes: number of classes of the data, and of outputs of the head unless a teacher has others (`Distillation`).
        img_size: side or (H, W) in pixels for which the model is built.
        model_args: further keywords of `timm.create_model`, e.g. `drop_path_rate`, `position`, `pretrained`.
        optim: optimizer and learning-rate schedule.
        mixing: mixup and cutmix; null for none, {} for the defaults.
        label_smoothing: share of a label that is spread evenly over all classes, 0 <= share < 1.
        seed: seed of drop path, dropout, erasing and mixing; the generators are seeded with (seed, epoch, batch, rank) at
            every batch.
        objective: the loss, and a teacher for distillation.
        tuning: fine-tuning: the weights to start from, and the parameters that are trained.
        ema: exponential moving average of the weights; null for none.
        execution: settings of memory and speed.
        task: "classification" of images; "segmentation", of pixels; or "multilabel", several labels an image.
        head: of segmentation: "linear", "fpn" or "upernet" (`vitrel.models.segmenter`).

    Raises:
        ValueError: an unknown model, `num_classes` or `img_size` in `model_args`, or weights that do not fit.
    """

    def __init__(
        self,
        model: str,
        num_classes: int,
        img_size: int | tuple[int, int],
        model_args: dict[str, Any] | None = None,
        optim: Optimization = Optimization(),
        mixing: Mixing | None = None,
        label_smoothing: float = 0.0,
        seed: int = 0,
        objective: Objective = Objective(),
        tuning: Tuning = Tuning(),
        ema: Ema | None = None,
        execution: Execution = Execution(),
        task: str = "classification",
        head: Literal["linear", "fpn", "upernet"] = "linear",
    ) -> None:
        super().__init__()
        self.name, self.seed, self.label_smoothing = model, seed, label_smoothing
        self.img_size = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size)
        self.model_args = dict(model_args or {})
        self.optim, self.mixing, self.objective = optim, mixing, objective
        self.tuning, self.ema, self.execution = tuning, ema, execution
        self.teacher = self._teacher(num_classes)
        self.num_classes = num_classes if self.teacher is None else self.teacher.num_classes
        self.task, self.head = task_named(task), head
        self.learning = self.task.learning(self.num_classes, objective, label_smoothing)
        outputs = self.task.head_classes(self.num_classes)
        backbone, self.start_classes = tuning.build(model, outputs, self.img_size, self.model_args)
        self.position, self.stored = position_record(backbone), tuning.stored(backbone, model, self.model_args)
        self.model = self.task.with_head(backbone, self.num_classes, head)
        tuning.freeze(self.model)
        execution.apply(self.model)
        if mixing is not None and self.task.dense:
            raise ValueError(f"mixup and cutmix mix the labels of images: leave out model.mixing for {task}")
        self.mixup = None if mixing is None else mixing.build(self.num_classes, label_smoothing, self.task.several)
        if self.teacher is not None:
            self.teacher.set_normalization(self.preprocessing["mean"], self.preprocessing["std"])
            self.teacher.check(self.model, self.img_size)
        self.mean, self.std = (torch.tensor(self.preprocessing[name]) for name in ("mean", "std"))
        self.erasing: Erasing | None = None  # `setup` knows the augmentation
        self.resumed = self.compiled = False
        self.train()

    @property
    def backbone(self) -> nn.Module:
        """The model without the head of segmentation; for other tasks the model itself."""
        return self.model.backbone if isinstance(self.model, Segmenter) else self.model

    def _teacher(self, num_classes: int) -> Teacher | None:
        settings = self.objective.distillation
        if settings is None:
            return None
        of_itself = settings.teacher is None and self.tuning.has_weights(self.name)
        return Teacher(settings, num_classes, self.tuning.initial(self.name) if of_itself else None, self.img_size)

    def train(self, mode: bool = True) -> Self:
        """Set training mode as `nn.Module.train` does, but keep frozen parts in evaluation mode."""
        super().train(mode)
        if mode:
            self.tuning.set_modes(self.model)
        return self

    @property
    def preprocessing(self) -> dict[str, Any]:
        """Dictionary of mean, std, crop_pct, crop_mode and interpolation from the model's cfg."""
        return preprocessing_of(self.model)

    @property
    def train_sizes(self) -> Sequence[Size | Budget]:
        """Sizes (h, w) in pixels of the images that the model sees in training, or budgets of tokens at native shape."""
        distillation = self.objective.distillation
        if distillation is not None and distillation.sizes is not None:
            return [to_2tuple(size) for size in distillation.sizes]
        return getattr(self.trainer.datamodule, "trained_at", [self.img_size])

    @property
    def ignores_labels(self) -> bool:
        """Whether the most probable class of a teacher with logits replaces an image's label (`Distillation.labels` false)."""
        return self.teacher is not None and self.teacher.answers and not self.teacher.settings.labels

    def setup(self, stage: str) -> None:
        """Set `classes` (names: the data's, with `ignores_labels` the teacher's) and `erasing`; ValueError if parts do not fit.

        The head becomes new where the initial weights have other `classes` or another order (ValueError if `reset_head` is
        false). Warns of a teacher without class names if torchvision and timm would sort those of the data differently.
        """
        data = self.trainer.datamodule
        self.classes: list[str] = self.teacher.class_names() if self.ignores_labels else list(data.classes)  # type: ignore[union-attr]
        if len(self.classes) != self.num_classes:
            raise ValueError(
                f"the model has {self.num_classes} classes, {data.data} has {data.num_classes}: set num_classes to "
                f"{data.num_classes}"
            )
        augment = getattr(data, "augment", None)
        self.erasing = Erasing(augment) if augment is not None and augment.erase else None
        if self.mixup is not None and data.batch_size % 2:
            raise ValueError(f"mixup pairs the images of a batch: data.batch_size must be even, not {data.batch_size}")
        if self.task.dense:
            self.start_classes = None  # its head is always new
        if self.start_classes is not None and list(self.start_classes) != self.classes:
            owner = f"of the teacher {self.teacher.name}" if self.ignores_labels else f"of {data.data}"  # type: ignore[union-attr]
            why = f"the weights were trained on classes other than those {owner}, or in another order"
            self.tuning.reset(self.model, self.num_classes, why)
            self.tuning.freeze(self.model)
            self.start_classes = None
        if self.teacher is not None and self.teacher.settings.features and [*self.train_sizes] != [self.img_size]:
            raise ValueError(
                f"distillation.features compares tokens of images of {format_size(self.img_size)} pixels: leave out "
                "data.train_sizes and data.protocol: native"
            )
        teacher = None if self.teacher is None else self.teacher.classes
        if teacher is not None and list(teacher) != self.classes:
            raise ValueError(
                f"distillation.checkpoint was trained on classes other than those of {data.data}, or in another order: "
                "use a teacher of the same classes, or distillation.labels: false, which needs no labels"
            )
        learns_outputs = self.teacher is not None and self.teacher.answers and not self.ignores_labels
        if learns_outputs and teacher is None and (note := order_note(self.classes)):
            warn_once(
                f"the teacher {self.teacher.name} has no class names, so its outputs are taken in the order of the classes of "
                f"{data.data}, {note}; if it was trained in that order, use distillation.labels: false, which needs no labels"
            )
        if self.tuning.trainable is not None:  # frozen modules are in evaluation mode on purpose
            warnings.filterwarnings("ignore", message=r"Found \d+ module\(s\) in eval mode")

    def configure_callbacks(self) -> list[Callback]:
        """Return [the callback that averages the weights], [] without `ema`; ValueError for FSDP and model parallelism."""
        if isinstance(self.trainer.strategy, FSDPStrategy | ModelParallelStrategy):
            # a shard has one dimension, so matrices could not be told from biases, and weight decay would silently be off
            raise ValueError("strategies that shard the weights are not supported: use trainer.strategy ddp")
        return [] if self.ema is None else [AveragedWeights(self.ema)]

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [B, num_classes], in segmentation [B, num_classes, H, W], of normalized images [B, 3, H, W]."""
        return self.model(images)

    def eager(self) -> AbstractContextManager:
        """Return a context in which compiled blocks run uncompiled, for evaluation: its batch sizes would compile them anew."""
        return torch.compiler.set_stance("force_eager") if self.compiled else nullcontext()

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """Return the optimizer and the learning-rate schedule, which advances at every update.

        Also sets the length of the absolute embedding's fade (`Tuning.fade_over`). ValueError if the run has no length.
        """
        images = self.trainer.datamodule.batch_size * self.trainer.world_size * self.trainer.accumulate_grad_batches
        optimizer = create_optimizer(self.model, self.optim, images)
        per_epoch, total = self.updates_per_epoch(), self.updates()
        self.stored[1].update(self.tuning.fade_over(self.backbone, total * self.trainer.accumulate_grad_batches))
        if total <= 0:
            raise ValueError("the run has no length: set trainer.max_epochs (--epochs) or trainer.max_steps to 1 or more")
        schedule = LambdaLR(optimizer, self.optim.factor(total, per_epoch))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_fit_start(self) -> None:
        """Fit the added position encoding (`Tuning.fit`) unless the run is resumed; compile the blocks if `Execution` says so.

        Either, if done, prints a line.
        """
        if self.tuning.position is not None and self.tuning.fit != 0 and not self.resumed:
            self.tuning.fit_position(self.backbone, self.name, self.trainer.datamodule.unaugmented)
        one_size = len(self.train_sizes) == 1 and not isinstance(self.train_sizes[0], Budget)
        self.compiled = self.execution.compiles(self.device, one_size)
        if self.compiled:
            self.execution.compile_blocks(self.model)
            rank_zero_only(print)("the first update compiles the model, which can take minutes (model.execution.compile)")

    def updates_per_epoch(self) -> int:
        """Return the number of optimizer updates in an epoch, an incomplete last accumulation included; build no loaders.

        Lightning's `estimated_stepping_batches` gives the same number, but builds the loaders early, after which a loader's
        saved state is no longer restored (Lightning issue 20550).
        """
        batches, limit = self.trainer.datamodule.batches, self.trainer.limit_train_batches
        batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
        return math.ceil(batches / self.trainer.accumulate_grad_batches)

    def updates(self) -> int:
        """Return the number of optimizer updates in the run, the lower limit of max_steps and max_epochs; 0 without either."""
        limits = self.trainer.max_steps, self.updates_per_epoch() * (self.trainer.max_epochs or 0)
        return min((limit for limit in limits if limit > 0), default=0)

    def epochs_done(self) -> int:
        """Return the number of epochs whose training batches are all done, evaluated or not."""
        loop, batches = self.trainer.fit_loop, self.trainer.fit_loop.epoch_loop.batch_progress.current
        epochs = loop.epoch_progress.current
        trained = epochs.ready > epochs.processed and batches.processed >= self.trainer.num_training_batches
        return epochs.processed + trained

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Seed all random generators from (seed, epoch, batch, rank), so that a resumed run draws the same numbers.

        They are the global ones of Python, NumPy and torch. Erasing and mixing use those of the CPU on a GPU too.
        """
        state = np.random.SeedSequence((self.seed, self.current_epoch, batch_idx, self.global_rank)).generate_state(3)
        torch.manual_seed(int(state[0]))
        np.random.seed(int(state[1]))  # noqa: NPY002  timm's Mixup draws from the global generator
        random.seed(int(state[2]))

    def normalized(self, images: Tensor) -> Tensor:
        """Return images [B, 3, H, W] as the model takes them: uint8 images normalized, float ones (synthetic) unchanged."""
        if images.dtype != torch.uint8:
            return images
        self.mean, self.std = self.mean.to(images.device), self.std.to(images.device)  # copied at the first batch
        return normalize(images, self.mean, self.std)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss of a batch, 0-d; log it as train/loss_step, and the mean share of right labels or pixels.

        Of mixed labels the largest share counts. A batch of which no image could be read has loss 0 and no weight in the mean.
        """
        if not len(batch[0]):  # other ranks wait for the gradients of all parameters, and for the means of the epoch
            loss = torch.stack([0 * parameter.sum() for parameter in self.model.parameters() if parameter.requires_grad]).sum()
            self._log_of_epoch(loss.detach(), loss.detach(), 0)
            return loss
        images, labels = self.normalized(batch[0]), batch[1]
        if self.erasing is not None:
            self.erasing(images)
        if self.mixup is not None:
            images, labels = self.mixup(images, torch.zeros_like(labels) if self.ignores_labels else labels)
        if self.teacher is None:
            logits: Tensor = self(images).float()
            loss = self.learning.loss(logits, labels)
        else:
            settings, targets = self.teacher.settings, self.teacher.targets(images)
            labels = targets.logits.argmax(-1) if self.ignores_labels else labels  # type: ignore[union-attr]
            seen = outputs(self.model, settings.student_view(images, batch_idx), settings.blocks)
            logits = seen.logits  # type: ignore[assignment]
            loss = self.teacher.loss(seen, targets, self.learning.loss(logits, labels))
        right = self.learning.right(logits.detach(), labels).mean()
        self.log_dict({"train/loss_step": loss.detach(), f"train/{self.task.learned}_step": right}, prog_bar=True)
        self._log_of_epoch(loss.detach(), right, len(images))
        return loss

    def _log_of_epoch(self, loss: Tensor, right: Tensor, images: int) -> None:
        """Log a batch's loss and share of right labels under train/, for means over epoch and ranks weighted by `images`."""
        values = {"train/loss_epoch": loss, f"train/{self.task.learned}_epoch": right}
        self.log_dict(values, on_step=False, on_epoch=True, sync_dist=True, batch_size=images)

    def validation_step(self, batch: tuple[Tensor, Any], batch_idx: int) -> None:
        """Update the task's metrics of the evaluation set with a batch and log them, and the loss, under val/.

        Images of label -1 are not counted: unreadable ones, and those that pad the last batches of several ranks. With
        `ignores_labels` the label is the teacher's most probable class.
        """
        images, labels = self.normalized(batch[0]), batch[1]
        if self.ignores_labels:
            labels = torch.where(labels < 0, labels, self.teacher(images).argmax(-1))  # type: ignore[misc]
        with self.eager():
            logits = self(images).float()
        self.learning.update(logits, labels)
        self.log_dict(dict(self.learning.values), on_step=False, on_epoch=True, prog_bar=True)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the entries "vitrel" and "hyper_parameters" in place (layout in the docstring of `vitrel.train.module`)."""
        data = self.trainer.datamodule
        preprocessing = {k: list(v) if isinstance(v, tuple) else v for k, v in self.preprocessing.items()}
        name, arguments = self.stored
        checkpoint["vitrel"] = {
            "model": name,
            "model_args": arguments,
            "classes": self.classes,
            "img_size": list(self.img_size),
            "train_sizes": [format_size(size) for size in self.train_sizes],
            "position": self.position,
            **preprocessing,
            "data": data.data,
            "seed": self.seed,
            "epoch": self.epochs_done(),
            "step": self.global_step,
            "ema": self.ema is not None,
        }
        if self.task.name != "classification":
            checkpoint["vitrel"] |= {"task": self.task.name, "head": self.head}
        checkpoint["hyper_parameters"] = self.settings()

    def settings(self) -> dict[str, Any]:
        """Return the constructor's arguments as plain values (dictionaries for the dataclasses)."""
        plain = {"model": self.name, "img_size": list(self.img_size), "model_args": dict(self.model_args)}
        plain |= {name: getattr(self, name) for name in ("num_classes", "label_smoothing", "seed", "head")}
        plain["task"] = self.task.name
        groups = {name: getattr(self, name) for name in ("optim", "mixing", "objective", "tuning", "ema", "execution")}
        return plain | {name: None if group is None else asdict(group) for name, group in groups.items()}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Mark the run as resumed; ValueError if the checkpoint's run had another model, classes, task, data or settings."""
        saved = checkpoint.get("vitrel", {})
        current = {"model": self.stored[0], "classes": self.classes, "ema": self.ema is not None}
        if self.task.name != "classification" or "task" in saved:
            current |= {"task": self.task.name, "head": self.head}
        for key, value in current.items():
            if (old := saved.get(key)) != value:
                raise ValueError(f"cannot resume: the checkpoint's {key} is {old!s:.200}, this run's is {value!s:.200}")
        check_same_run(self.trainer, checkpoint)
        self.resumed = True
