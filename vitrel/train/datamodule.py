"""Batches whose order is a function of (seed, epoch) alone."""

from collections.abc import Iterator
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader, Dataset, Sampler

from vitrel.data import Augmentation, class_names, create_dataset, create_shapes


class EpochSampler(Sampler[int]):
    """Every index once per epoch, shuffled by (seed, epoch); hands the epoch on to a data set that has `set_epoch`."""

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self.dataset, self.seed = dataset, seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next iteration orders; Lightning calls it before every epoch."""
        self.epoch = epoch
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.epoch)
        yield from torch.randperm(len(self), generator=generator).tolist()


class ImageData(LightningDataModule):
    """Training and evaluation batches of `shapes` or of an image folder.

    Mean, std, crop and interpolation are those of the trained model's cfg. The evaluation set is the same for every seed.

    Args:
        data: "shapes", or a folder that holds `train/<class>/` and `val/<class>/`.
        size: image side or [H, W], pixels; the model is built for it.
        batch_size: images per batch, in training and evaluation; an incomplete last training batch is left out.
        workers: loader processes; 0 loads in the training process.
        augment: what is drawn for each training image of a folder; null for none, {} for the defaults.
        n_train: number of training images; for `shapes` 10,000 by default, for a folder all.
        n_val: number of evaluation images; for `shapes` 1,000 by default, for a folder all.
        region: where in a training image shapes may lie (evaluation: everywhere), as `vitrel.data.Shapes` takes it.
        seed: of the shapes, the order and the augmentation.

    Raises:
        ValueError: a size or count below 1, or data of another layout.
    """

    def __init__(
        self,
        data: str,
        size: int | tuple[int, int],
        batch_size: int = 64,
        workers: int = 0,
        augment: Augmentation | None = None,
        n_train: int | None = None,
        n_val: int | None = None,
        region: tuple[float, float, float, float] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.data, self.size, self.augment, self.region, self.seed = data, pair(size), augment, region, seed
        self.batch_size, self.workers, self.n_train, self.n_val = batch_size, workers, n_train, n_val
        if batch_size < 1 or workers < 0:
            raise ValueError(f"data.batch_size ({batch_size}) is at least 1 and data.workers ({workers}) at least 0")
        self.classes = class_names(data)
        self.num_classes = len(self.classes)

    def setup(self, stage: str | None = None) -> None:
        """Build both data sets with the preprocessing of the model's cfg."""
        how = self.trainer.lightning_module.preprocessing
        self.train_set = self._train_set(how)
        self.val_set = create_dataset(self.data, "val", self.size, **how, n=self.n_val)
        if len(self.train_set) < self.batch_size:
            raise ValueError(
                f"{len(self.train_set)} training images are fewer than one batch of {self.batch_size}: "
                "lower data.batch_size or raise data.n_train"
            )

    def _train_set(self, how: dict[str, Any]) -> Dataset:
        if self.region is None:
            return create_dataset(self.data, "train", self.size, **how, augment=self.augment, n=self.n_train, seed=self.seed)
        if self.data != "shapes":
            raise ValueError("data.region limits where shapes are drawn; images of a folder have none: leave it out")
        how = {"size": self.size, "mean": how["mean"], "std": how["std"], "region": self.region}
        return create_shapes("train", self.n_train, self.seed, **how)

    @property
    def batches(self) -> int:
        """Training batches in an epoch, all devices together."""
        return len(self.train_set) // self.batch_size

    def train_dataloader(self) -> DataLoader:
        """Complete batches in the order of (seed, epoch)."""
        sampler = EpochSampler(self.train_set, self.seed)
        # Lightning sets the epoch only after it has made the first iterator, whose workers read ahead: a resumed run would
        # begin with the order of epoch 0
        sampler.set_epoch(self.trainer.fit_loop.epoch_progress.current.processed)
        return self._loader(self.train_set, sampler=sampler, drop_last=True)

    def val_dataloader(self) -> DataLoader:
        """All evaluation images, in order."""
        return self._loader(self.val_set)

    def _loader(self, dataset: Dataset, **how) -> DataLoader:
        return DataLoader(
            dataset,
            batch_size=self.batch_size,
            num_workers=self.workers,
            persistent_workers=self.workers > 0,
            pin_memory=torch.cuda.is_available(),
            **how,
        )


def pair(size: int | tuple[int, int]) -> tuple[int, int]:
    """(H, W) of a side or of a pair; ValueError below 1 pixel."""
    h, w = (size, size) if isinstance(size, int) else size
    if min(h, w) < 1:
        raise ValueError(f"an image size is a side or [H, W] in pixels, at least 1, not {size}")
    return h, w
