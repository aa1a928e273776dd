"""The data profile (`--profile_data`): measures loading and training speed separately, to find which one limits a run."""

import itertools
import math
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from vitrel.data import decode

REPEATS = 5
WARM_UP = 3  # batches


@dataclass(frozen=True)
class Measured:
    """Result of a data profile; its text gives both speeds and advice.

    Args:
        loading: images/s of the loader without training, summed over devices.
        training: images/s of training on one batch repeatedly, without loading, summed over devices.
        workers: loader processes per device.
        devices: number of devices.
        one_process: images/s that one loader process prepares.
        decoding: seconds to decode one image file; None if the images are no files.
        cores: CPU cores of this machine.
    """

    loading: float
    training: float
    workers: int
    devices: int
    one_process: float
    decoding: float | None
    cores: int

    def __str__(self) -> str:
        details = f"one process prepares {self.one_process:,.0f} images/s, {1e3 / self.one_process:.2f} ms per image"
        if self.decoding is not None:
            details += f", {1e3 * self.decoding:.2f} ms of it for decoding"
        each = f" for each of {self.devices} devices" if self.devices > 1 else ""
        loading = f"loading   {self.loading:,.0f} images/s with {self.workers} workers{each} ({details})"
        training = f"training  {self.training:,.0f} images/s on one batch, repeated"
        return "\n".join([loading, training, self.advice()])

    def advice(self) -> str:
        """Return a sentence that says whether loading or training is the limit, and which setting to change."""
        if self.loading >= 1.1 * self.training and self.workers:
            return f"training is the limit: the loader is {self.loading / self.training:.1f} times as fast"
        needed = math.ceil(1.2 * self.training / self.one_process / self.devices)
        if not self.workers:
            together = 1 / (1 / self.loading + 1 / self.training)
            diagnosis = f"without workers, loading and training alternate, at {together:,.0f} images/s"
        else:
            diagnosis = f"the loader is the limit, at {self.loading / self.training:.0%} of the training speed"
        if needed * self.devices <= self.cores:
            return f"{diagnosis}: set data.workers to {needed} (this machine has {self.cores} cores)"
        return (
            f"{diagnosis}: data.workers {needed} would be enough, but this machine has only {self.cores} cores: store smaller "
            "images, or use less of data.augment"
        )


class DataProfile(Callback):
    """Measures the loader's speed, then the speed of training on one batch, prints both and ends the run.

    Nothing is evaluated or saved. Each speed is the median of `REPEATS` measurements after a warm-up.

    Args:
        seconds: minimum duration of one measurement.

    Attributes:
        measured: the result; None before the end.
    """

    measured: Measured | None = None

    def __init__(self, seconds: float = 1.0) -> None:
        self.seconds = seconds

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        data = trainer.datamodule
        loader = data.train_dataloader()
        batch, self.loading = _measure_loader(loader, self.seconds)
        self.workers = loader.num_workers
        self.one_process, self.decoding = _measure_images(data.train_set, data.batch_size, self.seconds)
        data.train_dataloader = lambda: itertools.repeat(batch)
        trainer.limit_val_batches = 0
        self.rates: list[float] = []

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.images, self.start = 0, math.inf

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.images += len(batch[0])
        if batch_idx + 1 < WARM_UP:
            return
        if module.device.type == "cuda":
            torch.cuda.synchronize(module.device)
        now = time.perf_counter()
        if now - self.start >= self.seconds:
            self.rates.append(self.images / (now - self.start))
        if batch_idx + 1 == WARM_UP or now - self.start >= self.seconds:
            self.images, self.start = 0, now
        trainer.should_stop = len(self.rates) == REPEATS

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.measured = Measured(
            loading=self.loading * trainer.world_size,
            training=median(self.rates) * trainer.world_size,
            workers=self.workers,
            devices=trainer.world_size,
            one_process=self.one_process,
            decoding=self.decoding,
            cores=os.cpu_count() or 1,
        )
        if trainer.is_global_zero:
            print(self.measured)


def _measure_loader(loader: DataLoader, seconds: float) -> tuple[Any, float]:
    """One batch of the loader, and the loader's speed in images/s."""
    batches = _endless(loader)
    batch = next(batches)
    for _ in range(WARM_UP + 2 * loader.num_workers):  # first use up the batches that the workers have prefetched
        next(batches)
    return batch, _median_rate((len(images) for images, _ in batches), seconds)


def _measure_images(dataset: Dataset, batch_size: int, seconds: float) -> tuple[float, float | None]:
    """Images/s that this process prepares, and the seconds to decode one image file (None if the images are no files)."""
    batches = _endless(DataLoader(dataset, batch_size))
    rate = _median_rate((len(images) for images, _ in batches), seconds)
    files = [dataset.name(i) for i in range(min(len(dataset), 256))] if hasattr(dataset, "name") else []
    files = [name for name in files if Path(name).is_file()]  # some names are no paths: members of tars, escaped paths
    if not files:
        return rate, None
    return rate, 1 / _median_rate((len([decode(path)]) for path in itertools.cycle(files)), seconds)


def _endless(loader: DataLoader) -> Iterator[Any]:
    while True:
        yield from loader


def _median_rate(counts: Iterator[int], seconds: float) -> float:
    """Median images/s of `REPEATS` measurements of at least `seconds` each; `counts` yields the images of each batch."""
    rates: list[float] = []
    while len(rates) < REPEATS:
        images, start = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - start) < seconds:
            images += next(counts)
        rates.append(images / elapsed)
    return median(rates)
