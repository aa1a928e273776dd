"""Training and evaluation batches of one rank; `vitrel.train.order` says which images they hold."""

import multiprocessing
import os
import signal
import threading
from dataclasses import replace
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from timm.layers import to_2tuple
from torch import nn
from torch.utils.data import DataLoader, Dataset

from vitrel.data import SHAPES, Augmentation, ImageSet, Reading, Shapes, class_names, create_dataset, create_shapes
from vitrel.data.shards import Shards
from vitrel.data.stream import ShardBatches
from vitrel.sizes import token_count
from vitrel.train.native import Filled, NativeOrder, native_shares
from vitrel.train.order import EpochLoader, EpochOrder, EveryImageOnce, Order, Plan
from vitrel.train.same_run import Listing


class ImageData(LightningDataModule):
    """Training and evaluation batches of `shapes`, an image folder, tar shards or a torchvision set.

    Mean, std, crop and interpolation are those of the trained model's cfg. The evaluation set is the same for every seed.

    Args:
        data: what `vitrel.data.create_dataset` takes: "shapes", a folder that holds `train/<class>/` and `val/<class>/`, a
            folder of shards, or "<set>:<folder>".
        size: image side or [H, W], pixels; the model is built for it.
        batch_size: images per batch and device, in training and evaluation; what fills no last training batch is left out,
            or makes smaller ones at native shape.
        workers: loader processes of a device; 0 loads in the training process.
        augment: what is drawn for each training image; null for none, {} for the defaults.
        n_train: number of training images; for `shapes` 10,000 by default, otherwise all.
        n_val: number of evaluation images; for `shapes` 1,000 by default, otherwise all.
        region: where in a training image shapes may lie (evaluation: everywhere), as `vitrel.data.Shapes` takes it.
        train_sizes: sides or [H, W] that training batches take turns at; larger ones hold fewer images, for the same tokens.
            Null: `size` alone. At native shape each stands for its tokens.
        shape: "fixed": all images are made `size`; "native": every image keeps its aspect ratio, in training with others of
            about the same in a batch, in evaluation resized whole at `vitrel.sizes.native_size`; nothing is padded. Of images
            in files that can be read in any order.
        tokens: of an image at native shape, at most; null: as many as `size` has. `batch_size` is meant for them.
        repeats: views of each image in a batch (repeated augmentation); an epoch stays as long and shows fewer images.
        reading: how image files are decoded, and what becomes of training images that cannot be; in evaluation one stops it.
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
        train_sizes: list[int | tuple[int, int]] | None = None,
        shape: Literal["fixed", "native"] = "fixed",
        tokens: int | None = None,
        repeats: int = 1,
        reading: Reading = Reading(on_bad="replace"),
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.data, self.size, self.augment, self.region, self.seed = data, pair(size), augment, region, seed
        self.batch_size, self.workers, self.n_train, self.n_val = batch_size, workers, n_train, n_val
        self.train_sizes = [pair(side) for side in train_sizes] if train_sizes else None
        self.shape, self.tokens, self.repeats, self.reading = shape, tokens, repeats, reading
        self._listing: Listing | None = None
        if batch_size < 1 or workers < 0 or repeats < 1:
            raise ValueError(
                f"data.batch_size ({batch_size}) is at least 1, data.workers ({workers}) at least 0, "
                f"data.repeats ({repeats}) at least 1"
            )
        if shape not in ("fixed", "native"):
            raise ValueError(f"data.shape is fixed or native, not {shape!r}")
        if tokens is not None and (shape != "native" or tokens < 1):
            raise ValueError(f"data.tokens ({tokens}) is at least 1, and of data.shape native alone: leave it out, or set that")
        if shape == "native" and data in SHAPES:
            raise ValueError(f"{data} are drawn at any size and have no shape of their own: data.shape native is for files")
        self.classes = class_names(data)
        self.num_classes = len(self.classes)

    def setup(self, stage: str | None = None) -> None:
        """Build both data sets with the preprocessing of the model's cfg, and the plan of an epoch."""
        module, rank, world = self.trainer.lightning_module, self.trainer.global_rank, self.trainer.world_size
        strict = replace(self.reading, on_bad="raise", cached_side=None)  # evaluation sees the images as they are
        how = module.preprocessing | ({"protocol": "native"} if self.shape == "native" else {})
        self.train_set, self._listing = self._train_set(how), None
        self.val_set = create_dataset(self.data, "val", self.size, **how, n=self.n_val, reading=strict)
        n, even = len(self.train_set), module.mixup is not None
        if self.shape == "native":
            self.order: Order | ShardBatches = self._native_order(module.model, even)
            return
        self.plan = Plan(n, self.batch_size, world, self.size, self.train_sizes, even, self.seed)
        if isinstance(self.train_set, Shards):
            if self.repeats > 1:
                raise ValueError("shards are streamed: data.repeats needs images that can be read in any order, a folder")
            if self.reading.cached_side is not None:
                raise ValueError("shards are streamed, not cached: leave data.reading.cached_side out, or train on a folder")
            self.order = ShardBatches(self.train_set, self.plan, rank, world, self.seed)
        else:
            self.order = EpochOrder(n, self.plan, self.repeats, rank, world, self.seed)

    def _native_order(self, model: nn.Module, even: bool) -> NativeOrder:
        if isinstance(self.train_set, Shards):
            raise ValueError("shards are streamed in their own order: data.shape native needs a folder of images")
        embed = getattr(model, "patch_embed", None)
        if not hasattr(embed, "patch_size") or getattr(embed, "strict_img_size", False):
            raise ValueError(
                f"data.shape native needs a model of patches for images of any size, unlike this {type(model).__name__}: take "
                "one of vitrel list, or give model.model_args {dynamic_img_size: true} to one of timm's that knows it"
            )
        self.patch = to_2tuple(embed.patch_size)
        budget, *budgets = (token_count(size, self.patch) for size in (self.size, *(self.train_sizes or [])))
        self.budget = self.tokens or budget
        sizes = self.train_set.image_sizes()
        self.val_set.image_sizes()  # an image that cannot be read stops the run here, not after an epoch
        place = self.trainer.global_rank, self.trainer.world_size
        return NativeOrder(sizes, self.batch_size, self.budget, self.patch, budgets, self.repeats, even, *place, self.seed)

    def _train_set(self, how: dict[str, Any]) -> Dataset:
        if self.region is None:
            how = how | {"augment": self.augment, "n": self.n_train, "seed": self.seed, "reading": self.reading}
            return create_dataset(self.data, "train", self.size, **how)
        if self.data != "shapes":
            raise ValueError("data.region limits where shapes are drawn; images of a folder have none: leave it out")
        how = {"size": self.size, "mean": how["mean"], "std": how["std"], "region": self.region}
        return create_shapes("train", self.n_train, self.seed, **how)

    def teardown(self, stage: str) -> None:
        """Free the cached images: Lightning's trainers of former runs stay in memory, and all they refer to."""
        if isinstance(getattr(self, "train_set", None), ImageSet):
            self.train_set.forget()

    @property
    def batches(self) -> int:
        """Training batches of every rank in an epoch."""
        return len(self.order)

    @property
    def streamed(self) -> bool:
        """Whether training images come from shards, an epoch's divided between ranks and loader processes."""
        return isinstance(self.order, ShardBatches)

    @property
    def listing(self) -> Listing:
        """The training images by name and label, made once: a second for a million."""
        if self._listing is None:
            drawn = isinstance(self.train_set, Shapes)  # by its settings alone
            self._listing = Listing.of([] if drawn else self.train_set.contents())
        return self._listing

    def names(self, epoch: int, batch: int) -> list[str]:
        """The images of a training batch of this rank: paths, or members of a shard."""
        if self.streamed:
            indices = self.order.indices(epoch, self.trainer.global_rank, self.workers)[batch]
        else:
            indices = [draw if isinstance(draw, int) else draw.index for draw in self.order.batches(epoch)[batch]]
        return [self.train_set.name(index) for index in indices]

    def train_dataloader(self) -> DataLoader:
        """Batches in the order of (seed, epoch), from where the run stands."""
        if self.streamed:
            return self._loader(EpochLoader, self.order, place=self._place, batch_size=None)
        return self._loader(EpochLoader, self.train_set, place=self._place, batch_sampler=self.order)

    def val_dataloader(self) -> DataLoader:
        """All evaluation images, each on one rank, in order or at native shape by size; filled up with images of label -1."""
        if self.shape == "native":
            place = self.trainer.global_rank, self.trainer.world_size
            shares = native_shares(self.val_set.image_sizes(), self.batch_size, self.budget, self.patch, *place)
            return self._loader(DataLoader, Filled(self.val_set), batch_sampler=shares)
        share = EveryImageOnce(self.val_set, self.trainer.global_rank, self.trainer.world_size)
        return self._loader(DataLoader, share, batch_size=self.batch_size)

    def _loader(self, loader: type[DataLoader], dataset: Dataset, **how: Any) -> DataLoader:
        how |= {"num_workers": self.workers, "persistent_workers": self.workers > 0, "worker_init_fn": _outlive_signals}
        return loader(dataset, pin_memory=torch.cuda.is_available(), **how)

    def _place(self) -> tuple[int, int]:
        # Lightning's own progress; `ready` counts the epochs begun, `processed` those trained to their end
        loop = self.trainer.fit_loop
        epochs = loop.epoch_progress.current
        inside = epochs.ready > epochs.processed
        return epochs.processed, loop.epoch_loop.batch_progress.current.ready if inside else 0


def _outlive_signals(worker: int) -> None:
    # SLURM, systemd and `timeout` send SIGTERM to every process of a run, a terminal SIGINT, and one that has lost its loader
    # could not save
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process().pid  # whose SIGTERM ends a loader process
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


def pair(size: int | tuple[int, int]) -> tuple[int, int]:
    """(H, W) of a side or of a pair; ValueError below 1 pixel."""
    h, w = (size, size) if isinstance(size, int) else size
    if min(h, w) < 1:
        raise ValueError(f"an image size is a side or [H, W] in pixels, at least 1, not {size}")
    return h, w
