"""Speed measurement and progress output of a run: a line of text per epoch."""

import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer

SHOWN = {
    "train/loss_step": "loss",
    "train/top1_step": "top1",
    "train/loss_epoch": "loss",
    "train/top1_epoch": "top1",
    "val/loss": "val loss",
    "train/pixel_accuracy_step": "pixel accuracy",
    "train/pixel_accuracy_epoch": "pixel accuracy",
    "val/top1": "val top1",
    "val/miou": "val mIoU",
}


class Speed(Callback):
    """Measures the training speed of an epoch, without evaluation, and logs it with the learning rate at the end of the epoch.

    Lowers `trainer.log_every_n_steps` to the number of updates in an epoch if it is larger.

    Attributes:
        rate: images/s over all devices in the current epoch, including loading.
        data_wait: share of the epoch's time in which this process waited for batches, 0 to 1.
        memory_mb: peak memory of the run so far in MiB: tensors on the GPU, or the resident memory of the process on a CPU.
        eta: estimated seconds to the end of the run, including evaluation; None if the end is unknown.
    """

    def __init__(self) -> None:
        self.rate = self.data_wait = self.memory_mb = 0.0
        self.eta: float | None = None

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        # in an epoch shorter than the logging interval, no metrics of single steps would be logged
        trainer.log_every_n_steps = max(1, min(trainer.log_every_n_steps, module.updates_per_epoch()))

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.updates = module.updates()
        self.run_start, self.first_step = time.perf_counter(), trainer.global_step
        self.on_train_epoch_start(trainer, module)  # Lightning does not call it in a run that resumes within an epoch

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.images, self.waited = 0, 0.0
        self.start = self.batch_end = time.perf_counter()

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.waited += time.perf_counter() - self.batch_end

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.batch_end = time.perf_counter()
        self.images += len(batch[0]) * trainer.world_size
        self.rate = self.images / (self.batch_end - self.start)
        self.data_wait = self.waited / (self.batch_end - self.start)
        self.memory_mb = peak_memory(module.device)
        if self.updates and trainer.global_step > self.first_step:
            seconds_per_update = (self.batch_end - self.run_start) / (trainer.global_step - self.first_step)
            self.eta = seconds_per_update * (self.updates - trainer.global_step)

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.validation = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        if not trainer.sanity_checking:
            elapsed = time.perf_counter() - self.validation
            self.start, self.batch_end = self.start + elapsed, self.batch_end + elapsed

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        names = {"images_per_s": self.rate, "data_wait": self.data_wait, "memory_mb": self.memory_mb}
        names |= {"lr": trainer.optimizers[0].param_groups[0]["lr"]}
        module.log_dict(names, sync_dist=True)  # averaged over ranks; each images_per_s counts all devices


class EpochLines(Callback):
    """Prints a line of plain text per epoch, on rank 0: the epoch's metrics and the speed; and one a minute within epochs.

    The line of an epoch is printed when the next one begins, since the module has not logged the epoch's means in
    `on_train_epoch_end` yet.

    Args:
        speed: the speed measurements.
        every: seconds after which a line within an epoch follows the last line; infinite beside a bar.
    """

    def __init__(self, speed: Speed, every: float = 60.0) -> None:
        self.speed, self.every, self.ended, self.printed = speed, every, False, time.monotonic()

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.printed = time.monotonic()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        metrics = ("train/loss_step", f"train/{module.task.learned}_step")
        self._print_within(trainer, f"batch {batch_idx + 1}/{trainer.num_training_batches}", metrics)

    def on_validation_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._print_within(trainer, f"evaluation {batch_idx + 1}/{sum(trainer.num_val_batches)}")

    def _print_within(self, trainer: Trainer, where: str, metrics: Sequence[str] = ()) -> None:
        if trainer.is_global_zero and time.monotonic() - self.printed >= self.every:
            known = {name: trainer.callback_metrics[name] for name in metrics if name in trainer.callback_metrics}
            self._print(f"epoch {trainer.current_epoch + 1}{_end(trainer)}  {where}", known)

    def _print(self, where: str, metrics: dict[str, Any]) -> None:
        values = {name: f"{float(value):.4f}" for name, value in _shown(metrics).items()} | _speed_values(self.speed)
        print("  ".join([where, *(f"{name} {value}" for name, value in values.items())]), flush=True)
        self.printed = time.monotonic()

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.ended = True

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        self._print_line(trainer)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self._print_line(trainer)

    def _print_line(self, trainer: Trainer) -> None:
        if not trainer.is_global_zero or not self.ended:
            return
        self.ended = False
        of_epochs = {name: value for name, value in trainer.callback_metrics.items() if not name.endswith("_step")}
        self._print(f"epoch {trainer.current_epoch}{_end(trainer)}", of_epochs)


def peak_memory(device: torch.device) -> float:
    """Return the peak memory in MiB: tensors on a GPU, or this process's resident memory on a CPU; 0 on Windows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        import resource  # not on Windows
    except ImportError:
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def _end(trainer: Trainer) -> str:
    """The number of epochs after the one that is named, if it is known."""
    return f"/{trainer.max_epochs}" if trainer.max_epochs and trainer.max_epochs > 0 else ""


def _shown(metrics: dict[str, Any]) -> dict[str, Any]:
    return {short: metrics[name] for name, short in SHOWN.items() if name in metrics}


def _speed_values(speed: Speed) -> dict[str, str]:
    values = {"images/s": f"{speed.rate:.0f}", "data wait": f"{speed.data_wait:.0%}", "memory": f"{speed.memory_mb:,.0f} MiB"}
    return values if speed.eta is None else {**values, "eta": str(timedelta(seconds=round(speed.eta)))}
