"""Semantic segmentation: mIoU and pixel accuracy, at the images' own resolution."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from vitrel.common.extras import optional_import
from vitrel.data.readers.decode import IGNORED
from vitrel.evaluate.checkpoint import TrainedModel
from vitrel.evaluate.results.statistics import estimate
from vitrel.evaluate.sweep import Row
from vitrel.evaluate.tasks.base import Arrays, ImageList, Predicted, Task
from vitrel.evaluate.tasks.classes import NO_CLASS


class Mask(NamedTuple):
    """The target of an image: its mask, untouched, and where the model's input shows it.

    Args:
        labels: [h, w], class indices, IGNORED where a pixel is not scored.
        top: first row of the whole image in the input, in pixels of the input, which may show only a part of it.
        left: its first column.
        height: height of the whole image, in pixels of the input.
        width: width of the whole image, in pixels of the input.
    """

    labels: np.ndarray
    top: float
    left: float
    height: float
    width: float


class Segmentation(Task):
    """Every pixel has one class; the highest logit, brought to the image's own resolution, is the prediction.

    The arrays of an image, [K] each, count its pixels by class: intersection, of the class and predicted so; truth, of the
    class; guessed, predicted so. outside counts labeled pixels that the model's input does not show; they are not scored.
    """

    name, metric, title = "segmentation", "miou", "mIoU"
    columns: ClassVar[Mapping[str, Any]] = {
        "miou": "intersection over union, over all pixels of the data, mean over the classes that occur, percent",
        "miou_low": "lower end of the 95 % interval over images",
        "miou_high": "upper end of the 95 % interval over images",
        "pixel_accuracy": "share of the pixels that are classified correctly, percent",
        "class_accuracy": "the same by class, mean over the classes that occur, percent",
        "outside": "share of the labeled pixels that the model's input does not show, percent; they are not scored",
        "miou_area": "area under the curve of miou over log2 sqrt(height x width), divided by its width: a mean in percent",
    }
    means = ("miou", "pixel_accuracy", "class_accuracy", "outside")
    metrics = ("miou", "pixel_accuracy")
    axes: ClassVar[Mapping[str, Any]] = {
        "miou": ("mIoU", "%"),
        "pixel_accuracy": ("pixel accuracy", "%"),
        "class_accuracy": ("class accuracy", "%"),
    }

    def keep(self, logits: Tensor, targets: Sequence[Mask], outputs: Sequence[int], trained: TrainedModel) -> Mapping[str, Any]:
        """Counts of pixels by class, int64 [B, K], of logits [B, K', H, W]."""
        with optional_import():
            from torchmetrics.functional.classification import multiclass_confusion_matrix
        if not torch.isfinite(logits).all():
            raise FloatingPointError("the logits hold NaN or infinity")
        of_class, count = torch.tensor(outputs), len(outputs)
        if trained.restrict:
            logits, of_class = logits[:, of_class], torch.arange(count)
        kept: dict[str, list[Tensor]] = {name: [] for name in ("intersection", "truth", "guessed", "outside")}
        for one, target in zip(logits, targets, strict=True):
            labels = torch.from_numpy(target.labels.astype(np.int64))
            labeled = labels != IGNORED
            best, shown = predicted_classes(one, target, of_class)
            scored = labeled & shown
            predicted = torch.where(best == NO_CLASS, count, best)  # a class more, for outputs that stand for none
            # rows: the mask's classes, columns: the predicted ones
            found = multiclass_confusion_matrix(predicted[scored], labels[scored], count + 1, validate_args=False)
            values = found.diagonal(), found.sum(1), found.sum(0)
            for name, value in zip(kept, values, strict=False):
                kept[name].append(value[:count])
            kept["outside"].append((labeled & ~shown).sum())
        return {name: torch.stack(values).numpy() for name, values in kept.items()}

    def score(self, predicted: Predicted) -> Row:
        """The metrics over all pixels of the images that were read."""
        of = {name: values[predicted.seen].sum(0) for name, values in predicted.arrays.items()}
        pixels = int(of["truth"].sum())
        if not pixels:
            raise ValueError("no pixel of any mask has a class: all are ignored, or outside the model's input")
        iou, occurs = iou_of(of), of["truth"] > 0
        interval = estimate([self.scores(predicted, self.metric)[None]]).of_share()
        # all pixels predicted as the most frequent class: its share is its intersection over union, that of others is 0
        majority = 100 * int(of["truth"].max()) / pixels / int(occurs.sum())
        outside = int(of["outside"])
        return {
            "miou": round(100 * float(np.nanmean(iou)), 4),
            "miou_low": round(interval[0], 4),
            "miou_high": round(interval[1], 4),
            "pixel_accuracy": round(100 * int(of["intersection"].sum()) / pixels, 4),
            "class_accuracy": round(100 * float((of["intersection"][occurs] / of["truth"][occurs]).mean()), 4),
            "outside": round(100 * outside / (pixels + outside), 4),
            "majority": round(majority, 4),
        }

    def scores(self, predicted: Predicted, metric: str) -> np.ndarray:
        """The contribution of each image to the metric, by linearization: their mean is the metric itself.

        A metric of all pixels is a function of sums over images, a (mean of) ratio(s) I / U. To first order image i adds
        (I_i - U_i I / U) / U to a ratio; n times that, plus the ratio, is its score. These scores have the metric as their
        mean, and its variance over images as theirs (the linearization, or infinitesimal jackknife, of survey statistics).
        """
        arrays = {name: values[predicted.seen].astype(float) for name, values in predicted.arrays.items()}
        above = arrays["intersection"]  # [n, K]
        below = arrays["truth"] if metric == "pixel_accuracy" else arrays["truth"] + arrays["guessed"] - above
        if metric == "pixel_accuracy":
            above, below = above.sum(1, keepdims=True), below.sum(1, keepdims=True)
        whole = below.sum(0)
        above, below, whole = above[:, whole > 0], below[:, whole > 0], whole[whole > 0]  # classes that occur
        ratio = above.sum(0) / whole
        scores = np.full(len(predicted.seen), math.nan)
        scores[predicted.seen] = (ratio + len(above) * (above - below * ratio) / whole).mean(1)
        return scores

    def by_class(self, predicted: Predicted) -> tuple[np.ndarray, np.ndarray]:
        """Pixels of each class or predicted so, and of both."""
        of = {name: values[predicted.seen].sum(0) for name, values in predicted.arrays.items()}
        return of["truth"] + of["guessed"] - of["intersection"], of["intersection"]

    def pack(self, rows: Sequence[Predicted]) -> Arrays:
        """The counts [rows, n, K]; of the masks too, since inputs may show different parts of an image."""
        counts = {name: np.stack([row.arrays[name] for row in rows]) for name in rows[0].arrays}
        largest = max(int(values.max()) for values in counts.values())
        dtype = np.uint32 if largest <= np.iinfo(np.uint32).max else np.int64
        seen = np.packbits(np.stack([row.seen for row in rows]), axis=1)
        return {name: values.astype(dtype) for name, values in counts.items()} | {"seen": seen}

    def unpack(self, stored: Mapping[str, np.ndarray], count: int, images: ImageList) -> list[Predicted]:
        """The rows of `pack`."""
        n = len(images.names)
        names = ("intersection", "truth", "guessed", "outside")
        whole = {name: stored[name].astype(np.int64) for name in names}
        seen = np.unpackbits(stored["seen"], axis=1, count=n).astype(bool)
        if any(values.shape[:2] != (count, n) for values in (*whole.values(), seen)):
            raise ValueError("shapes")
        return [Predicted(images, {name: values[at] for name, values in whole.items()}, seen[at]) for at in range(count)]


def iou_of(counts: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return intersection over union by class, of counts of pixels [K]; NaN for classes that do not occur."""
    union = counts["truth"] + counts["guessed"] - counts["intersection"]
    return np.divide(counts["intersection"], union, out=np.full(len(union), math.nan), where=union > 0)


def predicted_classes(logits: Tensor, target: Mask, of_class: Tensor) -> tuple[Tensor, Tensor]:
    """Return the class of every pixel of an image at its own resolution, [h, w], NO_CLASS for outputs without one, and whether
    the model's input shows the pixel, bool [h, w].

    Args:
        logits: [K, H, W] of the input, interpolated bilinearly at the pixels' centers (half-pixel convention: pixel i of an
            axis has its center at i + 0.5).
        of_class: the output of each class.
    """
    sides = torch.tensor(logits.shape[-2:], dtype=torch.float64)
    centers = []
    for n, first, length in zip(target.labels.shape, (target.top, target.left), (target.height, target.width), strict=True):
        centers.append(first + (torch.arange(n, dtype=torch.float64) + 0.5) * length / n)  # in pixels of the input
    shown = [(at >= 0) & (at <= side) for at, side in zip(centers, sides, strict=True)]
    y, x = (2 * at / side - 1 for at, side in zip(centers, sides, strict=True))
    places = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)[None].to(logits.dtype)  # [1, h, w, 2]
    own = grid_sample(logits[None], places, mode="bilinear", padding_mode="border", align_corners=False)[0]
    classes = torch.full((len(logits),), NO_CLASS)
    classes[of_class] = torch.arange(len(of_class))
    best = own.max(0).indices  # a quarter of the time of argmax along an axis that is not the last, on a CPU
    return classes[best], shown[0][:, None] & shown[1]


TASK = Segmentation()
