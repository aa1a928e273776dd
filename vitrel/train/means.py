"""Means over an epoch's training steps, which a run resumed inside the epoch goes on with."""

from typing import Any

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn
from torchmetrics import MeanMetric


class EpochMeans(nn.ModuleDict):
    """A torchmetrics mean of every name. Not in a state dict: `saved` and `restore` carry the sums through checkpoints.

    Ranks are added up when an epoch's means are computed, and when they are saved.
    """

    def __init__(self, *names: str) -> None:
        # no search for NaN, for which every step would wait; torchmetrics then ignores weights, hence one value per image
        super().__init__({name: MeanMetric(nan_strategy="disable") for name in names})
        self.epoch = 0

    def add(self, epoch: int, values: dict[str, Tensor]) -> None:
        """Add a step's values [B], one per image; the first step of another epoch begins anew."""
        if epoch != self.epoch:
            self.epoch = epoch
            for metric in self.values():
                metric.reset()
        for name, value in values.items():
            self[name].update(value)

    def saved(self, strategy: Strategy) -> dict[str, Any]:
        """Plain values for a checkpoint, all ranks together; every rank has to call it."""
        sums = {name: torch.stack((m.mean_value, m.weight)).to(strategy.root_device) for name, m in self.items()}
        return {"epoch": self.epoch, **{name: strategy.reduce(s, reduce_op="sum").tolist() for name, s in sums.items()}}

    def restore(self, saved: dict[str, Any], rank: int) -> None:
        """Take up what `saved` gave; the first rank holds it, so that any number of ranks adds up to the same."""
        self.epoch = saved["epoch"]
        for name, metric in self.items():
            metric.reset()
            if rank == 0:
                metric.mean_value, metric.weight = (torch.tensor(v, device=metric.weight.device) for v in saved[name])
