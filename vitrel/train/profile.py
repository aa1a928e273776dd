"""Is loading or training the limit: both measured alone."""

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
    """Images/s, over all devices where there are several.

    Args:
        loading: by the loader alone.
        training: on one batch again and again, nothing loaded.
        workers: loader processes of one device.
        devices: number of them.
        one_process: images that one process prepares in a second.
        decoding: of which files are decoded, seconds per image; None where images are no files.
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
        told = f"one process prepares {self.one_process:,.0f}, {1e3 / self.one_process:.2f} ms each"
        if self.decoding is not None:
            told += f", {1e3 * self.decoding:.2f} of them to decode"
        each = f" for each of {self.devices} devices" if self.devices > 1 else ""
        loading = f"loading   {self.loading:,.0f} images/s with {self.workers} workers{each} ({told})"
        training = f"training  {self.training:,.0f} images/s on one batch again and again"
        return "\n".join([loading, training, self.advice()])

    def advice(self) -> str:
        """Which of the two is the limit, and what to do."""
        if self.loading >= 1.1 * self.training and self.workers:
            return f"training is the limit: the loader could feed {self.loading / self.training:.1f} times as much"
        needed = math.ceil(1.2 * self.training / self.one_process / self.devices)
        if not self.workers:
            together = 1 / (1 / self.loading + 1 / self.training)
            said = f"without workers the two take turns, {together:,.0f} images/s: set data.workers to {needed}"
        else:
            said = f"the loader is the limit, {self.loading / self.training:.0%} of what training takes: data.workers {needed}"
        enough = f" (this machine has {self.cores} cores)"
        if needed * self.devices <= self.cores:
            return f"{said} would keep up{enough}" if self.workers else said + enough
        return (
            f"{said} would keep up, more than this machine has cores ({self.cores}): keep smaller images "
            "(vitrel pack with --resize), or draw less in data.augment"
        )


class DataProfile(Callback):
    """Measures the loader alone, then training on one batch, prints both and ends the run; nothing is evaluated or saved.

    Each is the median of `REPEATS` measurements after a warm-up.

    Args:
        seconds: least duration of one measurement.

    Attributes:
        measured: the result.
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
    batches = _endlessly(loader)
    batch = next(batches)
    for _ in range(WARM_UP + 2 * loader.num_workers):  # what the workers have read ahead by now costs nothing
        next(batches)
    return batch, _median_rate((len(images) for images, _ in batches), seconds)


def _measure_images(dataset: Dataset, batch_size: int, seconds: float) -> tuple[float, float | None]:
    """Images/s in this process, and the seconds that decoding one takes where images are files."""
    batches = _endlessly(DataLoader(dataset, batch_size))
    rate = _median_rate((len(images) for images, _ in batches), seconds)
    files = [dataset.name(i) for i in range(min(len(dataset), 256))] if hasattr(dataset, "name") else []
    files = [name for name in files if Path(name).is_file()]  # a name may be no path: a member of a shard, an escaped path
    if not files:
        return rate, None
    return rate, 1 / _median_rate((len([decode(path)]) for path in itertools.cycle(files)), seconds)


def _endlessly(loader: DataLoader) -> Iterator[Any]:
    while True:
        yield from loader


def _median_rate(counts: Iterator[int], seconds: float) -> float:
    """Images/s where every item is a number of images that came, measured `REPEATS` times for at least `seconds`."""
    rates: list[float] = []
    while len(rates) < REPEATS:
        images, start = 0, time.perf_counter()
        while (taken := time.perf_counter() - start) < seconds:
            images += next(counts)
        rates.append(images / taken)
    return median(rates)
