"""Metrics of a run: means over an epoch's steps and an evaluation set, their log `metrics.csv`, and the best evaluation."""

import csv
import math
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torchmetrics import MeanMetric

from vitrel.common.files import atomic_write


class EpochMeans(nn.ModuleDict):
    """One torchmetrics MeanMetric per name, over the steps of the current epoch.

    The sums are not in the state dict: `saved` returns them for a checkpoint and `restore` sets them. Ranks are summed when a
    mean is computed.
    """

    def __init__(self, *names: str) -> None:
        # A search for NaN would synchronize the device at every step. With it disabled, torchmetrics ignores weights, hence
        # `add` takes one value per image.
        super().__init__({name: MeanMetric(nan_strategy="disable") for name in names})
        self.epoch = 0

    def add(self, epoch: int, values: dict[str, Tensor]) -> None:
        """Add a step's values {name: [B], one per image}; the first step of another epoch resets the sums."""
        if epoch != self.epoch:
            self.epoch = epoch
            for metric in self.values():
                metric.reset()
        for name, value in values.items():
            self[name].update(value)

    def saved(self, strategy: Strategy) -> dict[str, Any]:
        """Return {"epoch": int, name: [[sum, weight] of every rank], ...}; every rank has to call it."""
        saved: dict[str, Any] = {"epoch": self.epoch}
        for name, metric in self.items():
            ranks = torch.zeros(strategy.world_size, 2, device=strategy.root_device)
            ranks[strategy.global_rank] = torch.stack((metric.mean_value, metric.weight))
            saved[name] = strategy.reduce(ranks, reduce_op="sum").tolist()  # a sum with zeros gathers without rounding
        return saved

    def restore(self, saved: dict[str, Any], rank: int = 0, world: int = 1) -> None:
        """Set the sums of a rank to those that `saved` returned; on another number of ranks, rank 0 gets the total.

        On the same number all sums are rounded as without the interruption.
        """
        self.epoch = saved["epoch"]
        for name, metric in self.items():
            metric.reset()
            sums = torch.tensor(saved[name], device=metric.weight.device)
            if len(sums) == world:
                metric.mean_value, metric.weight = sums[rank]
            elif rank == 0:
                metric.mean_value, metric.weight = sums.sum(0)


class CSVLog(Logger):
    """`metrics.csv` in the run's folder: one row per logging step, a column per metric.

    Lightning's CSVLogger deletes the file when a run is resumed; this logger appends to it.

    Args:
        folder: the run's folder.
    """

    def __init__(self, folder: str | Path) -> None:
        super().__init__()
        self.path = Path(folder) / "metrics.csv"
        self.rows: list[dict[str, Any]] = []

    def resume(self, rows: int) -> None:
        """Take the first `rows` rows of an existing `metrics.csv`, as strings, to append to them."""
        if self.path.is_file():
            with self.path.open(newline="") as file:
                self.rows = list(csv.DictReader(file))[:rows]

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
        """Do nothing: `config.yaml` holds the hyper-parameters."""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        step = 0 if step is None else step
        if self.rows and int(self.rows[-1]["step"]) == step:
            self.rows[-1] |= metrics
        else:
            self.rows.append({"step": step, **metrics})

    @rank_zero_only
    def save(self) -> None:
        """Write all rows to the file; its folder must exist. Called before every checkpoint and at the end of the run."""
        if not self.rows:
            return
        check_folder(self.path.parent)
        columns = list(dict.fromkeys(["epoch", "step", *sorted({key for row in self.rows for key in row})]))
        with atomic_write(self.path) as part, part.open("w", newline="") as file:
            writer = csv.DictWriter(file, columns)
            writer.writeheader()
            writer.writerows(self.rows)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self.path.parent.is_dir():  # a removed folder is the reason why the run ends
            self.save()


def check_folder(folder: Path) -> None:
    """Raise FileNotFoundError if a run's folder is gone; what is written into a new one would look complete."""
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder}, the folder of this run, was removed or renamed during the run. Move it back and resume with "
            "--ckpt_path auto; if it is lost, the same command starts from the beginning"
        )


def merit(value: float, loss: float) -> tuple[float, float]:
    """Return a sort key for evaluations, higher is better: by the metric, then by lower loss; a NaN loss is the worst."""
    return value, -math.inf if math.isnan(loss) else -loss


def epochs_of(rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Return one row per epoch from the rows of a `metrics.csv`: the last value of each metric, as a number."""
    epochs: dict[int, dict[str, float]] = {}
    for row in rows:
        numbers = _numbers(row)
        if "epoch" in numbers:
            epochs.setdefault(int(numbers["epoch"]), {}).update(numbers)
    return [epochs[epoch] for epoch in sorted(epochs)]


def best_of(rows: list[dict[str, Any]], metric: str = "top1") -> dict[str, float]:
    """Return the metrics of the evaluation saved as `best.ckpt` and the others of its epoch; {} before the first evaluation."""
    name = f"val/{metric}"
    evaluations = [row for row in map(_numbers, rows) if name in row]  # an epoch may have several
    best = max(evaluations, key=lambda row: merit(row[name], row["val/loss"]), default={})
    return next((row for row in epochs_of(rows) if row["epoch"] == best.get("epoch")), {}) | best


def _numbers(row: dict[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if value not in ("", None)}
