"""Training runs of a second on random tensors, with Lightning's own trainer."""

from collections.abc import Iterator

import torch
from lightning.pytorch import LightningDataModule, Trainer

from vitrel.train import Classifier, Optimization

SMALL = {"depth": 2, "embed_dim": 32, "num_heads": 2}


class Batches:
    """A loader of fixed batches in order."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, batch_size: int) -> None:
        self.images, self.labels = images.split(batch_size), labels.split(batch_size)

    def __len__(self) -> int:
        return len(self.images)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for images, labels in zip(self.images, self.labels, strict=True):
            yield images.clone(), labels  # timm mixes in place


class Tensors(LightningDataModule):
    """A data module for `Classifier` with random images of 32x32 pixels."""

    data = "random tensors"

    def __init__(self, num_classes: int = 4, batch_size: int = 4, batches: int = 6) -> None:
        super().__init__()
        self.num_classes, self.batch_size, self.batches = num_classes, batch_size, batches
        self.classes = [f"c{i}" for i in range(num_classes)]
        generator = torch.Generator().manual_seed(1)
        n = batch_size * batches
        self.images = torch.randn(n, 3, 32, 32, generator=generator)
        self.labels = torch.arange(n) % num_classes

    def unaugmented(self, n: int) -> torch.Tensor:
        return self.images[:n].clone()

    def train_dataloader(self) -> Batches:
        return Batches(self.images, self.labels, self.batch_size)

    def val_dataloader(self) -> Batches:
        return Batches(self.images[:6], self.labels[:6], self.batch_size)


def small(name: str = "vitrel_vit_n8_none", num_classes: int = 4, **how) -> Classifier:
    """Return a Classifier with a two-block ViT for 32x32 pixels and half an epoch of warm-up."""
    return Classifier(name, num_classes, 32, SMALL, **{"optim": Optimization(lr=3e-3, warmup_epochs=0.5)} | how)


def fit(classifier, data=None, ckpt_path=None, **how) -> Trainer:
    """Train on the CPU without logs; further keywords are the trainer's."""
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    quiet |= {"num_sanity_val_steps": 0, "accelerator": "cpu", "devices": 1, "max_epochs": 2}
    trainer = Trainer(**quiet | how)
    trainer.fit(classifier, datamodule=data or Tensors(classifier.num_classes), ckpt_path=ckpt_path)
    return trainer
