"""Tasks: the head and loss of a model, the metrics of training, and the scores of an evaluation.

`vitrel.train` and `vitrel.evaluate` both take a `Task` from here and know nothing else of classes and pixels. A new task is a
file in this folder with a subclass of `Task` and an instance of it, TASK; `task_named` finds it by the file's name.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import Metric

TASKS = tuple(sorted(module.name for module in iter_modules(__path__)))
Row = dict[str, Any]
Arrays = dict[str, np.ndarray]


class Kept(NamedTuple):
    """The results of all images of one row of an evaluation, in the order of the data.

    Args:
        arrays: the arrays of `Task.keep`, [n, ...] each, with zeros for an image that could not be read.
        seen: bool [n], whether the image could be read.
    """

    arrays: Arrays
    seen: np.ndarray

    def of_seen(self) -> Arrays:
        """Return the arrays without the images that could not be read."""
        return {name: values[self.seen] for name, values in self.arrays.items()}


class Losses(Protocol):
    """The settings of the training loss that a task reads, a protocol for `vitrel.train.Objective`, which explains them."""

    loss: str
    bce_target_thresh: float | None
    dice: float
    class_weights: list[float] | None
    distillation: Any

    def build(self, label_smoothing: float) -> Any: ...


class ImageMean(Metric):
    """Mean over images of a value of each, NaN without any; images that do not count get weight 0, so no GPU is waited for."""

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


class Learning(nn.Module, ABC):
    """Abstract loss and metrics of a task in training.

    Attributes:
        values: {name in the log: metric of the evaluation set}, summed over ranks.
    """

    values: dict[str, Metric]

    @abstractmethod
    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the training loss of a batch, a scalar, for the logits [B, K, ...] of the model and the batch's targets."""

    @abstractmethod
    def right(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return for each image the share that is predicted correctly, [B], 0 to 1: of its one label, its labels or pixels."""

    @abstractmethod
    def update(self, logits: Tensor, target: Any) -> None:
        """Add a batch of the evaluation set to `values`, without images of label -1, which pad the batches of ranks.

        Targets are a tensor [B] of labels, or a list where they are masks or several labels an image.
        """


class Task(ABC):
    """Abstract kind of prediction, such as classification.

    Attributes:
        name: name in checkpoints, settings and tables, that of its file.
        metric: the column by which models are compared, in percent; as "val/<metric>" it chooses the best checkpoint.
        title: that metric in words.
        chance: in words, the prediction whose metric is the column majority, which a trained model has to exceed.
        learned: name of `Learning.right` in the log, after "train/".
        dense: whether targets are masks; images are then not cropped.
        several: whether an image has any number of labels, as a target [K] of 0 and 1.
        columns: {column of results.csv: what it is}, of this task alone.
        stored: names of the arrays of `keep` that are stored with a row, since `scores` and `by_class` need them.
    """

    name: ClassVar[str]
    metric: ClassVar[str]
    title: ClassVar[str]
    chance: ClassVar[str] = "always predicting the most frequent class"
    learned: ClassVar[str]
    dense: ClassVar[bool] = False
    several: ClassVar[bool] = False
    columns: ClassVar[Mapping[str, str]]
    stored: ClassVar[tuple[str, ...]]

    def head_classes(self, num_classes: int) -> int:
        """Return the number of outputs of the backbone's classifier: `num_classes`, or 0 where the task has another head."""
        return num_classes

    def with_head(self, backbone: nn.Module, num_classes: int, head: str) -> nn.Module:
        """Return the model that is trained: the backbone, with the head named `head` if the task has its own heads."""
        return backbone

    @abstractmethod
    def learning(self, num_classes: int, objective: Losses, label_smoothing: float) -> Learning:
        """Return loss and metrics for training; ValueError for settings of `objective` that are of other tasks alone."""

    def probabilities(self, logits: Tensor) -> Tensor:
        """Return the probability of each class, float64 [B, K, ...], of logits; FloatingPointError if one is not finite."""
        return finite(logits.double()).softmax(1)

    @abstractmethod
    def keep(self, logits: Tensor, targets: Sequence[Any], outputs: Sequence[int]) -> Mapping[str, Any]:
        """Return the results of every image of a batch, {name: [B, ...]}; FloatingPointError if the logits are not finite.

        Args:
            logits: [B, K, ...] of the model.
            targets: of the images.
            outputs: index of the model's output for each class of the data.
        """

    @abstractmethod
    def score(self, kept: Kept) -> Row:
        """Return {column: value} of `columns` over the images that were read, and of "majority", the metric of `chance` (%)."""

    @abstractmethod
    def scores(self, kept: Kept, metric: str) -> np.ndarray:
        """Return a score of each image, [n], NaN where it could not be read: 100 times the others' mean is column `metric`."""

    @abstractmethod
    def by_class(self, kept: Kept, classes: int) -> tuple[np.ndarray, np.ndarray]:
        """Return (whole, right), [n, classes] each, or [classes], their sums over images.

        The score of a class is the sum of right over images, divided by that of whole.
        """


def finite(logits: Tensor) -> Tensor:
    """Return the logits; FloatingPointError where one is NaN or infinite."""
    if not torch.isfinite(logits).all():
        raise FloatingPointError("the logits hold NaN or infinity")
    return logits


@cache
def task_named(name: str) -> Task:
    """Return the `Task` of this name, always the same object; ValueError for a name that is not in TASKS."""
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}: choose from {', '.join(TASKS)}")
    return import_module(f"vitrel.tasks.{name}").TASK
