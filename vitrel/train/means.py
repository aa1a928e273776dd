"""Means of metrics: over an evaluation set, and over an epoch's training steps, saved so that a run can resume within it."""

from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric


class ImageMean(Metric):
    """Mean of a value per image. Images are left out by a weight of 0, since an index by a mask waits for the device."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("images", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, values: Tensor, counted: Tensor) -> None:
        """Add values [B] of the images for which counted [B] is True."""
        self.total += torch.where(counted, values, 0).sum()
        self.images += counted.sum()

    def compute(self) -> Tensor:
        return self.total / self.images


class EpochMeans(nn.ModuleDict):
    """One torchmetrics MeanMetric per name, over the steps of the current epoch.

    The sums are not in the state dict: `saved` returns them for a checkpoint and `restore` sets them. Ranks are summed when a
    mean is computed and when the sums are saved.
    """

    def __init__(self, *names: str) -> None:
        # A search for NaN would synchronise the device at every step. With it disabled, torchmetrics ignores weights, hence
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
        """Return {"epoch": int, name: [sum, weight], ...}, summed over all ranks; every rank has to call it."""
        sums = {name: torch.stack((m.mean_value, m.weight)).to(strategy.root_device) for name, m in self.items()}
        return {"epoch": self.epoch, **{name: strategy.reduce(s, reduce_op="sum").tolist() for name, s in sums.items()}}

    def restore(self, saved: dict[str, Any], rank: int) -> None:
        """Set the sums to those that `saved` returned, on rank 0 only, so that the sum over any number of ranks is right."""
        self.epoch = saved["epoch"]
        for name, metric in self.items():
            metric.reset()
            if rank == 0:
                metric.mean_value, metric.weight = (torch.tensor(v, device=metric.weight.device) for v in saved[name])
