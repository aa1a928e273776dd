"""Logs, progress and the guard against a loss that is not a number."""

import csv
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only


class FiniteLoss(Callback):
    """Stops the run at the first loss that is not finite, before a checkpoint can be written.

    The loss is looked at on its device; on a GPU the answer is fetched only now and then (and before every evaluation), so
    that no step waits for it.
    """

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.bad = torch.full((), torch.inf, device=module.device)

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        finite = torch.isfinite(outputs["loss"])
        self.bad = torch.minimum(self.bad, torch.where(finite, torch.inf, float(batch_idx)))
        if module.device.type == "cpu" or (batch_idx + 1) % trainer.log_every_n_steps == 0 or trainer.is_last_batch:
            self.check(trainer)

    def check(self, trainer: Trainer) -> None:
        """FloatingPointError naming epoch and batch when any loss so far was not finite."""
        batch = float(self.bad)
        if batch != torch.inf:
            raise FloatingPointError(
                f"loss is not finite at epoch {trainer.current_epoch}, batch {int(batch)} (update {trainer.global_step}): "
                "stopped; checkpoints are those of earlier epochs. Lower optim.lr, lengthen optim.warmup_epochs or set "
                "trainer.gradient_clip_val"
            )


class Speed(Callback):
    """Measures images/s of training, loading included and evaluation excluded; logs it with the learning rate every epoch.

    `rate` is that of the epoch so far.
    """

    rate = 0.0

    def setup(self, trainer: Trainer, module: LightningModule, stage: str) -> None:
        # epochs shorter than the logging interval would leave no metrics of single steps
        trainer.log_every_n_steps = max(1, min(trainer.log_every_n_steps, module.updates_per_epoch()))

    def on_train_epoch_start(self, trainer: Trainer, module: LightningModule) -> None:
        self.images, self.start = 0, time.perf_counter()

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.images += len(batch[0]) * trainer.world_size
        self.rate = self.images / (time.perf_counter() - self.start)

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        module.log_dict({"images_per_s": self.rate, "lr": trainer.optimizers[0].param_groups[0]["lr"]})


class Progress(RichProgressBar):
    """Rich's bar with loss, accuracy and images/s."""

    def __init__(self, speed: Speed) -> None:
        super().__init__()
        self.speed = speed

    def get_metrics(self, trainer: Trainer, module: LightningModule) -> dict[str, Any]:
        metrics = super().get_metrics(trainer, module)
        names = {"train/loss_step": "loss", "train/top1_step": "top1", "val/loss": "val loss", "val/top1": "val top1"}
        shown = {short: metrics[name] for name, short in names.items() if name in metrics}
        return {**shown, "images/s": f"{self.speed.rate:.0f}"}


class CSVLog(Logger):
    """`metrics.csv` in the run's folder: one row per logging step, a column per metric.

    Lightning's own logger deletes the file when a run is resumed; this one keeps the rows before the resumed step.
    """

    def __init__(self, folder: str | Path, resume: bool = False) -> None:
        super().__init__()
        self.path = Path(folder) / "metrics.csv"
        self.rows: list[dict[str, Any]] = []
        self.resumed: list[dict[str, Any]] = []
        if resume and self.path.is_file():
            with self.path.open(newline="") as file:
                self.resumed = list(csv.DictReader(file))

    @property
    def name(self) -> str:
        return ""

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self.path.parent)

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: `config.yaml` holds them."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        step = 0 if step is None else step
        if self.resumed:
            self.rows = [row for row in self.resumed if int(row["step"]) < step]
            self.resumed = []
        if self.rows and int(self.rows[-1]["step"]) == step and not metrics.keys() & self.rows[-1].keys() - {"epoch"}:
            self.rows[-1] |= metrics
        else:
            self.rows.append({"step": step, **metrics})

    @rank_zero_only
    def save(self) -> None:
        """Write all rows; called at the end of every epoch."""
        if self.resumed or not self.rows:
            return
        columns = list(dict.fromkeys(["epoch", "step", *sorted({key for row in self.rows for key in row})]))
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(self.rows)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.save()
