"""The Lightning data module: training and evaluation batches of one rank, in the order of `vitrel.train.batch_order`."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, Literal

import torch
from lightning.pytorch import LightningDataModule
from timm.layers import to_2tuple
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from vitrel.common.machine import cores
from vitrel.common.resources import check_workers
from vitrel.common.sizes import Budget, Size, native_size, token_count
from vitrel.data import (
    SHAPES,
    Augmentation,
    Draw,
    Drawn,
    Reading,
    class_names,
    collate,
    create_dataset,
)
from vitrel.data.create import Task
from vitrel.tasks import task_named
from vitrel.train.batch_order import EpochLoader, EpochOrder, Filled, NativeOrder, Order, Readable, evaluation_batches


class ImageData(LightningDataModule):
    """Training and evaluation batches of `shapes`, an image folder, or another data set of `vitrel.data.create_dataset`.

    Mean, std, crop and interpolation are taken from the trained model's cfg. The evaluation set does not depend on the seed.

    Args:
        data: name or folder as `vitrel.data.create_dataset` takes it: "shapes", a folder that holds `train/<class>/` and
            `val/<class>/`, a CSV, tar files, Parquet, "hfds/<name>" or "torch/<set>:<folder>".
        size: image side or [H, W] in pixels; the model is built for this size.
        batch_size: images per batch and device, in training and evaluation. An incomplete last training batch is dropped at
            fixed shape; at native shape its images are kept in smaller batches. Null: 64, or less for few training images, see
            `default_batch_size`.
        global_batch_size: images per update on all devices together, whatever their number: gradients of several batches are
            accumulated, and batches are made smaller where `batch_size` does not fit (`divided_batch`). With
            trainer.accumulate_grad_batches above 1 it has no effect. Null: one batch of every device.
        workers: loader processes per device; 0 loads in the training process. Null: see `default_workers`.
        augment: random augmentation of training images; null for none, {} for the defaults.
        n_train: number of training images; by default 10,000 for `shapes`, otherwise all.
        n_val: number of evaluation images; by default 1,000 for `shapes`, otherwise all.
        train_sizes: sides or [H, W] that training batches alternate between; a batch of larger images holds fewer of them, so
            that every batch has about the same number of tokens. Null: `size` only. At native shape each size stands for its
            number of tokens.
        protocol: "scale": every image is cropped or resized to `size`. "native": every image keeps its aspect ratio; training
            batches group images of similar aspect ratio, evaluation resizes the whole image to
            `vitrel.common.sizes.native_size`, and nothing is padded. Native shape needs image files, not `shapes`.
        tokens: maximum number of tokens of an image at native shape, for which `batch_size` is meant (--size 196t sets it);
            null: those of `size`.
        repeats: views of each image in a batch (repeated augmentation). The number of batches per epoch stays, so an epoch
            shows fewer images.
        reading: reading of image files; unreadable ones are left out and listed, unless `on_bad` is "raise".
        seed: seed of the shapes, of the order of images and of the augmentation.
        task: as of `create_dataset`: "classification", "segmentation" with a mask for every image, or "multilabel".

    Raises:
        ValueError: a size or count below 1, or settings that do not fit the kind of data.
    """

    def __init__(
        self,
        data: str,
        size: int | tuple[int, int],
        batch_size: int | None = None,
        global_batch_size: int | None = None,
        workers: int | None = None,
        augment: Augmentation | None = None,
        n_train: int | None = None,
        n_val: int | None = None,
        train_sizes: list[int | tuple[int, int]] | None = None,
        protocol: Literal["scale", "native"] = "scale",
        tokens: int | None = None,
        repeats: int = 1,
        reading: Reading = Reading(on_bad="leave_out"),
        seed: int = 0,
        task: Task = "classification",
    ) -> None:
        super().__init__()
        self.task = task
        self.data, self.size, self.augment, self.seed = data, pair(size), augment, seed
        self.batch_size, self.workers, self.n_train, self.n_val = batch_size, workers, n_train, n_val
        self.global_batch_size = global_batch_size
        self.train_sizes = [pair(side) for side in train_sizes] if train_sizes else None
        self.protocol, self.tokens, self.repeats, self.reading = protocol, tokens, repeats, reading
        positive = {"batch_size": batch_size, "global_batch_size": global_batch_size, "repeats": repeats}
        for name, value in positive.items():
            if value is not None and value < 1:
                raise ValueError(f"data.{name} must be at least 1, not {value}")
        if (workers or 0) < 0:
            raise ValueError(f"data.workers must be at least 0, not {workers}")
        if protocol not in ("scale", "native"):
            raise ValueError(f"data.protocol must be scale or native, not {protocol!r}")
        if tokens is not None and (protocol != "native" or tokens < 1):
            raise ValueError(f"data.tokens ({tokens}) must be at least 1 and needs data.protocol native: set it or drop tokens")
        if protocol == "native" and data in SHAPES:
            raise ValueError(f"data.protocol native needs image files: {data} are drawn at any size and have no native shape")
        self.classes = class_names(data, task=task)
        self.num_classes = len(self.classes)

    def setup(self, stage: str | None = None) -> None:
        """Build both data sets with the preprocessing of the model's cfg, and the order of the training batches.

        Sets `workers` and `batch_size` where they are None, and for a `global_batch_size` the batch size and the trainer's
        `accumulate_grad_batches`. `stage` is not used. ValueError for data or settings that do not fit.
        """
        if self.workers is None:
            self.workers = default_workers(self.trainer.strategy.root_device, self.trainer.num_devices)
        check_workers(self.workers)
        module, rank, world = self.trainer.lightning_module, self.trainer.global_rank, self.trainer.world_size
        preprocessing = module.preprocessing | ({"protocol": "native"} if self.protocol == "native" else {})
        if self.data not in SHAPES:  # the module normalizes on its device
            preprocessing["std"] = None
        options = preprocessing | {"reading": self.reading, "task": self.task}
        chosen = {"augment": self.augment, "n": self.n_train, "seed": self.seed}
        self.train_set = create_dataset(self.data, "train", self.size, **chosen, **options)
        self.val_set = create_dataset(self.data, "val", self.size, n=self.n_val, **options)
        n, even = len(self.train_set), module.mixup is not None
        self.chose_batch = self.batch_size is None
        if self.batch_size is None:
            self.batch_size = default_batch_size(n, world)
        if self.global_batch_size is not None and self.trainer.accumulate_grad_batches == 1:
            divided = divided_batch(self.global_batch_size, self.batch_size, world, even)
            self.batch_size, self.trainer.accumulate_grad_batches = divided
        if self.protocol == "native":
            self.order: Order = self._native_order(module.model, even)
            return
        sizes = self.size, self.train_sizes
        self.order = EpochOrder(n, self.batch_size, *sizes, self.repeats, even, rank, world, self.seed)

    @property
    def trained_at(self) -> Sequence[Size | Budget]:
        """Sizes (h, w) in pixels of training batches, or budgets of tokens at native shape; known after `setup`."""
        if self.protocol == "native":
            return [Budget(tokens) for tokens in self.budgets]
        return self.train_sizes or [self.size]

    def _native_order(self, model: nn.Module, even: bool) -> NativeOrder:
        """Return the order of the training batches at native shape; ValueError if the model takes one image size only.

        Sets `patch` (h, w), `budget` (`tokens`, or those of `size`) and `budgets` (those of `train_sizes`, or `budget` alone).
        """
        embed = getattr(model, "patch_embed", None)
        if not hasattr(embed, "patch_size") or getattr(embed, "strict_img_size", False):
            raise ValueError(
                f"data.protocol native needs a patch embedding that takes any image size, which this {type(model).__name__} "
                "has not: use a model of `vitrel list`, or model.model_args {dynamic_img_size: true} with a timm model with it"
            )
        self.patch = to_2tuple(embed.patch_size)
        budget, *budgets = (token_count(size, self.patch) for size in (self.size, *(self.train_sizes or [])))
        self.budget = self.tokens or budget
        self.budgets = budgets or [self.budget]
        sizes = self.train_set.image_sizes()
        ranks = self.trainer.global_rank, self.trainer.world_size
        return NativeOrder(sizes, self.batch_size, self.budget, self.patch, self.budgets, self.repeats, even, *ranks, self.seed)

    def unaugmented(self, n: int) -> Tensor:
        """Return n training images, or all if there are fewer, [n, 3, H, W], preprocessed at `size` as for evaluation.

        They are normalized; `seed` chooses which. Unreadable ones are left out; ValueError if none can be read.
        """
        preprocessing = self.trainer.lightning_module.preprocessing
        n = min(n, len(self.train_set))
        options = {"n": n, "seed": self.seed, "reading": self.reading, "task": self.task}
        chosen = create_dataset(self.data, "train", self.size, **preprocessing, **options)
        items = Readable(chosen).__getitems__([Draw(i) for i in range(n)])
        if not items:
            raise ValueError(f"none of the {n} training images to fit the position to can be read, such as {chosen.name(0)}")
        return torch.stack([image for image, _ in items])

    @property
    def batches(self) -> int:
        """Number of training batches per rank in an epoch."""
        return len(self.order)

    @cached_property
    def fingerprints(self) -> tuple[str, str]:
        """Two hashes: of the training images' classes, names, labels and file sizes; and of their times of modification.

        A resumed run compares them with its checkpoint's. Both are "" for synthetic images, which the settings define. To
        compute them takes a few seconds per million images on a local disk.
        """
        return ("", "") if isinstance(self.train_set, Drawn) else self.train_set.fingerprints()

    def names(self, epoch: int, batch: int) -> list[str]:
        """Return the names (paths, members of a tar) of the images in batch `batch` (from 0) of this rank in a training epoch.

        Unreadable images, which are left out, are named too.
        """
        return [self.train_set.name(draw.index) for draw in self.order.batches(epoch)[batch]]

    def train_dataloader(self) -> DataLoader:
        """Return the loader of training batches, shuffled by (seed, epoch), which starts at the trainer's current batch.

        Its batches leave unreadable images out, and have an even number of images with mixup.
        """
        images = Readable(self.train_set, even=self.trainer.lightning_module.mixup is not None)
        return self._loader(EpochLoader, images, progress=self._progress, batch_sampler=self.order, collate_fn=collate)

    def val_dataloader(self) -> DataLoader:
        """Return the loader of this rank's share of the evaluation images, in order (at native shape: grouped by size).

        Every image is on exactly one rank; shares are padded to equal length by images of label -1, which are not counted.
        """
        sizes = [self.size] * len(self.val_set)
        if self.protocol == "native":
            sizes = [native_size(height, width, self.budget, self.patch) for height, width in self.val_set.image_sizes()]
        batches = evaluation_batches(sizes, self.batch_size, self.trainer.global_rank, self.trainer.world_size)
        task = task_named(self.task)
        batch_of = partial(collate, as_list=task.dense or task.several)
        return self._loader(DataLoader, Filled(self.val_set), batch_sampler=batches, collate_fn=batch_of)

    def _loader(self, loader: type[DataLoader], dataset: Dataset, **options: Any) -> DataLoader:
        # PyTorch would raise the error of a dead loader process from a signal handler, inside whatever runs then, such as
        # saving; without that handler it is raised where the next batch is taken, at most 5 s later. No public name does it.
        signal_handling._SIGCHLD_handler_set = True  # noqa: SLF001
        options |= {"num_workers": self.workers, "persistent_workers": self.workers > 0, "worker_init_fn": _outlive_signals}
        return loader(dataset, pin_memory=torch.cuda.is_available(), **options)

    def _progress(self) -> tuple[int, int]:
        """Return (epoch from 0, number of its batches that have begun), from Lightning's progress counters."""
        loop = self.trainer.fit_loop  # of epochs, `ready` counts those started and `processed` those finished
        epochs = loop.epoch_progress.current
        inside = epochs.ready > epochs.processed
        return epochs.processed, loop.epoch_loop.batch_progress.current.ready if inside else 0


def default_workers(device: torch.device, devices: int = 1) -> int:
    """Return the default of `data.workers`: 0 on a CPU, whose cores train; else (cores - 2) // devices, within 1..16.

    Args:
        device: type of the devices that train.
        devices: their number on this machine.
    """
    if device.type == "cpu":
        return 0
    return max(1, min(16, (cores() - 2) // devices))


def default_batch_size(images: int, devices: int = 1) -> int:
    """Return the default of `data.batch_size` for this number of training images: 64, halved as often as needed.

    It is halved down to 8 for an epoch to have 48 updates, so 1,584 images on one device give 32; and further only if the
    images would not fill one batch of all devices.
    """
    size = 64
    while size > 1 and (size * devices > images or (size > 8 and size * devices * 48 > images)):
        size //= 2
    return size


def divided_batch(images: int, batch_size: int, devices: int, even: bool = False) -> tuple[int, int]:
    """Return (images per batch and device, batches accumulated) for updates of about `images` images on all devices.

    The result is the largest update of at most `images` images in equal batches, up to twice as many of them as necessary;
    among equal ones, that with fewest batches.

    Args:
        images: images per update.
        batch_size: the most images that a device takes at once.
        devices: number of devices.
        even: the number of images in a batch has to be even, because mixup pairs them.

    Raises:
        ValueError: a batch would have no image, or with `even` less than two, as with fewer images than devices.
    """
    step, least = 2 if even else 1, -(-images // (batch_size * devices))

    def of_each(accumulated: int) -> int:
        return images // (accumulated * devices) // step * step

    accumulated = max(range(least, 2 * least + 1), key=lambda number: (number * of_each(number), -number))
    batch = of_each(accumulated)
    if batch < 1:
        raise ValueError(
            f"data.global_batch_size {images} cannot be divided between {devices} devices in batches of {batch_size}"
            f"{' or less, even because of mixup' * even}: raise data.global_batch_size or data.batch_size, or use fewer devices"
        )
    return batch, accumulated


def _outlive_signals(worker: int) -> None:
    # SLURM, systemd and `timeout` send SIGTERM to every process of a run, a terminal sends SIGINT; if the loader processes
    # ended, the training process could not finish its update and save
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process().pid  # only a SIGTERM from the training process ends a loader process
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)


def pair(size: int | tuple[int, int]) -> tuple[int, int]:
    """Return (H, W) for a side or a pair [H, W], in pixels; ValueError below 1, or if a side is over 100 times the other."""
    h, w = (size, size) if isinstance(size, int) else size
    if min(h, w) < 1:
        raise ValueError(f"an image size must be a side or [H, W] in pixels, at least 1, not {size}")
    if max(h, w) > 100 * min(h, w):
        raise ValueError(f"--size {h}x{w} (data.size, data.train_sizes): a side is more than 100 times the other")
    return h, w
