"""What is seen while a run trains: its speed, and a bar or lines that tell of it."""

import sys
import time
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ProgressBar, RichProgressBar

SHOWN = {
    "train/loss_step": "loss",
    "train/top1_step": "top1",
    "train/loss_epoch": "loss",
    "train/top1_epoch": "top1",
    "val/loss": "val loss",
    "val/top1": "val top1",
}


class Speed(Callback):
    """Measures the training of an epoch, evaluation excluded, and logs it with the learning rate when the epoch ends.

    Attributes:
        rate: images/s over all devices, loading included.
        data_wait: share of the time in which this process waited for batches, 0 to 1.
        memory_mb: peak of the run so far in MiB: what tensors took on the GPU, or the process in memory where there is none.
        eta: seconds to the end of the run at the speed so far, evaluation included; None where the end is unknown.
    """

    def __init__(self) -> None:
        self.rate = self.data_wait = self.memory_mb = 0.0
        self.eta: float | None = None

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        # epochs shorter than the logging interval would leave no metrics of single steps
        trainer.log_every_n_steps = max(1, min(trainer.log_every_n_steps, module.updates_per_epoch()))

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.updates = module.updates()
        self.run_start, self.first = time.perf_counter(), trainer.global_step
        self.on_train_epoch_start(trainer, module)  # which a run that goes on within an epoch would not call

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.images, self.waited = 0, 0.0
        self.start = self.free = time.perf_counter()

    def on_train_batch_start(self, trainer: Trainer, module: LightningModule, batch: Any, batch_idx: int) -> None:
        self.waited += time.perf_counter() - self.free

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.free = time.perf_counter()
        self.images += len(batch[0]) * trainer.world_size
        self.rate = self.images / (self.free - self.start)
        self.data_wait = self.waited / (self.free - self.start)
        self.memory_mb = peak_memory(module.device)
        if self.updates and trainer.global_step > self.first:
            each = (self.free - self.run_start) / (trainer.global_step - self.first)
            self.eta = each * (self.updates - trainer.global_step)

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.validation = time.perf_counter()

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        if not trainer.sanity_checking:
            taken = time.perf_counter() - self.validation
            self.start, self.free = self.start + taken, self.free + taken

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        names = {"images_per_s": self.rate, "data_wait": self.data_wait, "memory_mb": self.memory_mb}
        names |= {"lr": trainer.optimizers[0].param_groups[0]["lr"]}
        module.log_dict(names, sync_dist=trainer.world_size > 1)  # means of the ranks, whose images_per_s are of all


class Progress(RichProgressBar):
    """Rich's bar with loss, accuracy, images/s, data wait, memory and the time left."""

    def __init__(self, speed: Speed) -> None:
        super().__init__()
        self.speed = speed

    def _get_train_description(self, current_epoch: int) -> str:
        # counted from 1, as everywhere else that is shown
        return f"Epoch {current_epoch + 1}/{self.trainer.max_epochs}".ljust(len(self.validation_description))

    def get_metrics(self, trainer: Trainer, module: LightningModule) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, module)
        return {**_shown(metrics), **_told(self.speed)}


class Lines(ProgressBar):
    """A line of plain text per epoch, for output that is no terminal."""

    def __init__(self, speed: Speed) -> None:
        super().__init__()
        self.speed, self.enabled = speed, True
        self.ended = False

    def disable(self) -> None:
        """No lines; Lightning calls it on all ranks but the first."""
        self.enabled = False

    def enable(self) -> None:
        """Lines again."""
        self.enabled = True

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.ended = True

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.tell(trainer, trainer.current_epoch)

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.tell(trainer, trainer.current_epoch)

    def tell(self, trainer: Trainer, epochs: int) -> None:
        """The line of the epoch that ended, once: when it ends, the module has yet to log the means over it."""
        if not self.enabled or not self.ended:
            return
        self.ended = False
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        values = {name: f"{value:.4f}" for name, value in _shown(metrics).items()} | _told(self.speed)
        end = f"/{trainer.max_epochs}" if trainer.max_epochs and trainer.max_epochs > 0 else ""
        said = "  ".join(f"{name} {value}" for name, value in values.items())
        print(f"epoch {epochs}{end}  {said}", flush=True)


def progress_of(speed: Speed) -> ProgressBar:
    """The bar on a terminal, lines elsewhere."""
    return Progress(speed) if sys.stdout.isatty() else Lines(speed)


def peak_memory(device: torch.device) -> float:
    """MiB at the peak: tensors on a GPU, or else this process in memory; 0 where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    try:
        import resource  # not on Windows
    except ImportError:
        return 0.0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


def _shown(metrics: dict[str, Any]) -> dict[str, Any]:
    return {short: metrics[name] for name, short in SHOWN.items() if name in metrics}


def _told(speed: Speed) -> dict[str, str]:
    told = {"images/s": f"{speed.rate:.0f}", "data wait": f"{speed.data_wait:.0%}", "memory": f"{speed.memory_mb:,.0f} MiB"}
    return told if speed.eta is None else {**told, "eta": str(timedelta(seconds=round(speed.eta)))}
