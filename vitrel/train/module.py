"""The training module, and what its checkpoints hold.

A checkpoint is read with `torch.load(path, weights_only=True)` and holds, beside Lightning's own entries:

    {"state_dict": {"model.<parameter>": tensor, ...},
     "hyper_parameters": {the arguments of Classifier, plain values},
     "vitrel": {"model": timm name, "model_args": {...}, "classes": [...], "img_size": [H, W], "mean": [3], "std": [3],
                "crop_pct": float, "interpolation": str, "position": {...}, "data": str, "seed": int, "epoch": epochs done,
                "step": updates done}}

so that `timm.create_model(v["model"], num_classes=len(v["classes"]), img_size=v["img_size"], **v["model_args"])` rebuilds the
model of the entry v. `model_args` leaves out what would only load other weights first (`pretrained`, `checkpoint_path`).
`position` is what `position_record` tells of the encodings.
"""

import difflib
import math
import random
from dataclasses import asdict
from typing import Any

import numpy as np
import timm
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

import vitrel  # noqa: F401  registers the models with timm
from vitrel.models.weights.record import position_record
from vitrel.train.optim import Mixing, Optimisation, cosine_with_warmup, create_optimizer


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

    Raises:
        ValueError: an unknown model, or `model_args` that set what the data decides.
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
    ) -> None:
        super().__init__()
        self.name, self.num_classes, self.seed, self.label_smoothing = model, num_classes, seed, label_smoothing
        self.img_size = (img_size, img_size) if isinstance(img_size, int) else tuple(img_size)
        self.model_args = dict(model_args or {})
        self.optim, self.mixing = optim, mixing
        self.model = _create(model, num_classes, self.img_size, self.model_args)
        self.mixup = self.mixing.build(num_classes, label_smoothing)
        self.top1 = MulticlassAccuracy(num_classes, average="micro")
        self.val_loss = MeanMetric()

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
        """Checks that need both model and data; ValueError when they do not fit."""
        data = self.trainer.datamodule
        if data.num_classes != self.num_classes:
            raise ValueError(
                f"the model has {self.num_classes} classes, {data.data} has {data.num_classes}: set num_classes to that"
            )
        if self.mixup is not None and data.batch_size % 2:
            raise ValueError(
                f"mixup and cutmix pair the images of a batch: data.batch_size {data.batch_size} is odd, make it even"
            )

    def forward(self, images: Tensor) -> Tensor:
        """[B, 3, H, W] to logits [B, num_classes]."""
        return self.model(images)

    def configure_optimizers(self) -> dict[str, Any]:
        """Optimiser, and a cosine with warm-up that moves at every update."""
        optimizer = create_optimizer(self.model, self.optim)
        per_epoch = self.updates_per_epoch()
        total = self.trainer.max_steps if self.trainer.max_steps > 0 else per_epoch * self.trainer.max_epochs
        if total <= 0:
            raise ValueError("the schedule needs the length of the run: set trainer.max_epochs or trainer.max_steps")
        factor = cosine_with_warmup(total, round(self.optim.warmup_epochs * per_epoch), self.optim.final_lr)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": LambdaLR(optimizer, factor), "interval": "step"}}

    def updates_per_epoch(self) -> int:
        """Optimiser updates in an epoch, from the data alone.

        Lightning's `estimated_stepping_batches` would answer the same, but reading it here builds the loaders early, after
        which a loader's saved state is no longer restored (Lightning issue 20550).
        """
        trainer = self.trainer
        batches = trainer.datamodule.batches // trainer.world_size
        limit = trainer.limit_train_batches
        batches = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
        return math.ceil(batches / trainer.accumulate_grad_batches)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Draw as an uninterrupted run would at this batch, whatever was drawn before."""
        state = np.random.SeedSequence((self.seed, self.current_epoch, batch_idx, self.global_rank)).generate_state(3)
        torch.manual_seed(int(state[0]))
        np.random.seed(int(state[1]))  # noqa: NPY002  timm's Mixup draws from the global generator
        random.seed(int(state[2]))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Loss of a batch; against mixed labels, `top1` counts the label with the larger share."""
        images, labels = batch
        smoothing = self.label_smoothing
        if self.mixup is not None:
            images, labels = self.mixup(images, labels)
            smoothing = 0.0  # Mixup has smoothed them
        logits = self.model(images)
        loss = F.cross_entropy(logits.float(), labels, label_smoothing=smoothing)
        hard = labels if labels.ndim == 1 else labels.argmax(-1)
        top1 = (logits.detach().argmax(-1) == hard).float().mean()
        how = {"on_step": True, "on_epoch": True, "prog_bar": True, "batch_size": len(images)}
        self.log_dict({"train/loss": loss.detach(), "train/top1": top1}, **how)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        """Top-1 and loss over the whole evaluation set."""
        images, labels = batch
        logits = self.model(images).float()
        self.top1.update(logits, labels)
        self.val_loss.update(F.cross_entropy(logits, labels), weight=len(images))
        how = {"on_step": False, "on_epoch": True, "prog_bar": True}
        self.log_dict({"val/top1": self.top1, "val/loss": self.val_loss}, **how)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add what is needed to rebuild and evaluate the model without this class."""
        data = self.trainer.datamodule
        kept = {k: v for k, v in self.model_args.items() if k not in ("pretrained", "checkpoint_path")}
        how = {k: list(v) if isinstance(v, tuple) else v for k, v in self.preprocessing.items()}
        checkpoint["vitrel"] = {
            "model": self.name,
            "model_args": kept,
            "classes": list(data.classes),
            "img_size": list(self.img_size),
            "position": position_record(self.model),
            **how,
            "data": data.data,
            "seed": self.seed,
            "epoch": self.current_epoch + 1,
            "step": self.global_step,
        }
        checkpoint["hyper_parameters"] = {
            "model": self.name,
            "num_classes": self.num_classes,
            "img_size": list(self.img_size),
            "model_args": dict(self.model_args),
            "optim": asdict(self.optim),
            "mixing": asdict(self.mixing),
            "label_smoothing": self.label_smoothing,
            "seed": self.seed,
        }

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """ValueError when the run to resume was of another model or other classes."""
        saved = checkpoint.get("vitrel", {})
        for key, mine in (("model", self.name), ("classes", list(self.trainer.datamodule.classes))):
            if saved.get(key) != mine:
                raise ValueError(f"cannot resume: the checkpoint's {key} is {saved.get(key)}, this run's is {mine}")


def _create(name: str, num_classes: int, img_size: tuple[int, int], model_args: dict[str, Any]) -> torch.nn.Module:
    decided = sorted({"num_classes", "img_size"} & model_args.keys())
    if decided:
        raise ValueError(f"model_args must not set {' and '.join(decided)}: the data decides (data.data, data.size)")
    if not timm.is_model(name):
        near = difflib.get_close_matches(name, timm.list_models(), n=3) or timm.list_models("vitrel_*n*")[:3]
        raise ValueError(f"unknown model {name!r}; nearest: {', '.join(near)}")
    return timm.create_model(name, num_classes=num_classes, img_size=img_size, **model_args)
