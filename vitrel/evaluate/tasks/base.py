"""What an evaluation measures: a task scores predictions of images, and names the columns that its scores have.

`Task` is all that the rest of the room knows of classification or segmentation. A new task is a subclass in a file of its own
and a line in `TASKS`; where its targets move with the image, `vitrel.evaluate.prepare` prepares them.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from vitrel.evaluate.checkpoint import TrainedModel
from vitrel.evaluate.sweep import Row

Arrays = dict[str, np.ndarray]
TASKS = ("classification", "segmentation")


class ImageList(NamedTuple):
    """Names of an evaluation's images (paths relative to the data folder, in its order), and class names by label."""

    names: list[str]
    classes: list[str]


@dataclass(frozen=True, eq=False)
class Predicted:
    """The predictions of one row of an evaluation, for n images in the order of the data.

    Args:
        arrays: what `Task.keep` keeps of every image, [n, ...] each.
        seen: bool [n], whether the image could be read; where it could not, the arrays have the values `Task.unread`.
    """

    images: ImageList
    arrays: Arrays
    seen: np.ndarray


class Task(ABC):
    """A kind of prediction and its scores, of images [n] each with a target.

    Args:
        name: of the task in checkpoints and results.csv.
        metric: the column, in percent, by which models are compared.
        title: that metric in words.
        columns: {column of results.csv: what it is}, of the task alone.
        metrics: columns that have a score of every image, `metric` first.
        axes: {column: (name of its axis, unit)} of charts.
        unread: values in the arrays for images that could not be read, where not 0.
    """

    name: ClassVar[str]
    metric: ClassVar[str]
    title: ClassVar[str]
    columns: ClassVar[Mapping[str, str]]
    means: ClassVar[tuple[str, ...]]
    metrics: ClassVar[tuple[str, ...]]
    axes: ClassVar[Mapping[str, tuple[str, str]]]
    unread: ClassVar[Mapping[str, int]] = {}

    @abstractmethod
    def keep(self, logits: Tensor, targets: Sequence[Any], outputs: Sequence[int], trained: TrainedModel) -> Mapping[str, Any]:
        """Return what is kept of every image of a batch, [B, ...] each, from the model's output and the targets.

        FloatingPointError where the output is not finite.
        """

    @abstractmethod
    def score(self, predicted: Predicted) -> Row:
        """Return `columns`, without the area over sizes, from the predictions of a row."""

    @abstractmethod
    def scores(self, predicted: Predicted, metric: str) -> np.ndarray:
        """Return a score of each image, [n], whose mean times 100 is the metric; NaN for images that could not be read."""

    @abstractmethod
    def by_class(self, predicted: Predicted) -> tuple[np.ndarray, np.ndarray]:
        """Return two arrays [classes], whose ratio is the score of a class: its images and those classified correctly, ..."""

    @abstractmethod
    def pack(self, rows: Sequence[Predicted]) -> Arrays:
        """Return the arrays to store for these rows, of the same images."""

    @abstractmethod
    def unpack(self, stored: Mapping[str, np.ndarray], count: int, images: ImageList) -> list[Predicted]:
        """Return the `count` rows that were stored; KeyError or ValueError where arrays are missing or do not fit."""

    def columns_of(self, predicted: Predicted) -> Row:
        """Return `score`, with the number of images."""
        return self.score(predicted) | {"n": int(predicted.seen.sum())}


def capital(text: str) -> str:
    """Return a text with a capital, as it begins a sentence; mIoU stays as it is."""
    return text if text[1:2].isupper() else f"{text[:1].upper()}{text[1:]}"


@cache
def task_named(name: str) -> Task:
    """Return the task of this name; ValueError for an unknown one."""
    if name not in TASKS:
        raise ValueError(f"unknown task {name!r}: choose from {', '.join(TASKS)}")
    return import_module(f"vitrel.evaluate.tasks.{name}").TASK


def task_of(row: Row) -> Task:
    """Return the task of a row of results.csv."""
    return task_named(row["task"])
