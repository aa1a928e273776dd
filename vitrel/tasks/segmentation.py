"""Semantic segmentation: every pixel has one class, and mIoU and pixel accuracy are taken at the images' own resolution."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex
from torchmetrics.functional.classification import multiclass_confusion_matrix

from vitrel.common.extras import require
from vitrel.data.readers.decode import IGNORED
from vitrel.models.segmenter import Segmenter
from vitrel.tasks import ImageMean, Kept, Learning, Losses, Row, Task, finite

NO_CLASS = -2  # the predicted output stands for none of the data's classes


class LearningPixels(Learning):
    """Loss and metrics of segmentation: cross-entropy and Dice loss; mIoU and pixel accuracy at the resolution of each mask.

    Pixels of IGNORED (255) do not count. mIoU is the mean over the classes that occur in masks or predictions.

    Raises:
        ValueError: settings of classification alone.
        MissingExtra: Dice loss without segmentation_models_pytorch.
    """

    weights: Tensor | None

    def __init__(self, num_classes: int, objective: Losses, label_smoothing: float) -> None:
        super().__init__()
        if objective.loss != "ce" or objective.distillation is not None:
            raise ValueError("segmentation learns by cross-entropy: leave out model.objective.loss and distillation")
        objective.build(label_smoothing)  # checks the value
        self.smoothing, self.dice_weight, self.dice = label_smoothing, objective.dice, None
        weights = objective.class_weights
        if weights is not None and len(weights) != num_classes:
            raise ValueError(f"model.objective.class_weights holds {len(weights)} numbers for {num_classes} classes")
        self.register_buffer("weights", None if weights is None else torch.tensor(weights), persistent=False)
        if objective.dice:
            require("segmentation_models_pytorch")
            from segmentation_models_pytorch.losses import DiceLoss

            self.dice = DiceLoss("multiclass", ignore_index=IGNORED)
        options: dict[str, Any] = {"num_classes": num_classes, "ignore_index": IGNORED, "validate_args": False}
        self.mean_loss = ImageMean()
        self.miou = MulticlassJaccardIndex(**options)
        self.accuracy = MulticlassAccuracy(**options, average="micro")
        self.values = {"val/loss": self.mean_loss, "val/miou": self.miou, "val/pixel_accuracy": self.accuracy}

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        # a sum and a division, since a batch without any labeled pixel has no mean: its loss and gradients are 0
        how = {"weight": self.weights, "ignore_index": IGNORED, "label_smoothing": self.smoothing, "reduction": "sum"}
        target = target.long()
        total, labeled = F.cross_entropy(logits, target, **how), target != IGNORED
        weights = labeled if self.weights is None else self.weights[torch.where(labeled, target, 0)] * labeled
        loss = total / weights.sum().clamp(min=1e-9)
        return loss if self.dice is None else loss + self.dice_weight * self.dice(logits, target)

    def right(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the share of the labeled pixels of each image that are classified correctly, [B]; 0 without labeled pixels."""
        labeled = target != IGNORED
        right = ((logits.max(1).indices == target) & labeled).sum((1, 2))  # on a CPU faster than argmax
        return right / labeled.sum((1, 2)).clamp(min=1)

    def update(self, logits: Tensor, target: list[Any]) -> None:
        for one, mask in zip(logits, target, strict=True):
            if not isinstance(mask, Tensor) or mask.ndim < 2:  # a filled place
                continue
            mask = mask.long()
            own = F.interpolate(one[None], size=mask.shape, mode="bilinear", align_corners=False)
            loss = F.cross_entropy(own, mask[None], ignore_index=IGNORED, reduction="sum") / (mask != IGNORED).sum().clamp(
                min=1
            )
            self.mean_loss.update(loss[None], torch.ones(1, dtype=torch.bool, device=loss.device))
            predicted = own.max(1).indices
            self.miou.update(predicted, mask[None])
            self.accuracy.update(predicted, mask[None])


class Mask(NamedTuple):
    """The target of an image: its mask at its own resolution, and where in the model's input the image lies.

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
    """Every pixel has one class; the class of the highest logit, interpolated to the image's own resolution, is predicted.

    `keep` returns numbers of pixels of each image, int64: intersection [B, K], of each class and predicted so; truth [B, K], of
    each class; guessed [B, K], predicted so; outside [B], with a class but not in the model's input, which are not scored.
    """

    name, metric, title, learned, dense = "segmentation", "miou", "mIoU", "pixel_accuracy", True
    columns: ClassVar[Mapping[str, str]] = {
        "miou": "intersection over union, over all pixels of the data, mean over the classes that occur, percent",
        "pixel_accuracy": "share of the pixels that are classified correctly, percent",
        "class_accuracy": "the same by class, mean over the classes that occur, percent",
        "outside": "share of the labeled pixels that the model's input does not show, percent; they are not scored",
    }
    stored = ("intersection", "truth", "guessed")

    def head_classes(self, num_classes: int) -> int:
        return 0

    def with_head(self, backbone: nn.Module, num_classes: int, head: str) -> nn.Module:
        return Segmenter(backbone, num_classes, head)

    def learning(self, num_classes: int, objective: Losses, label_smoothing: float) -> Learning:
        return LearningPixels(num_classes, objective, label_smoothing)

    def keep(self, logits: Tensor, targets: Sequence[Mask], outputs: Sequence[int]) -> Mapping[str, Any]:
        logits, of_class, count = finite(logits), torch.tensor(outputs), len(outputs)
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

    def score(self, kept: Kept) -> Row:
        """Return the values of `columns` over all pixels of the images that were read, and as majority the mIoU of always
        predicting the most frequent class, percent; ValueError if no pixel is labeled and in the model's input.
        """
        of = {name: values.sum(0) for name, values in kept.of_seen().items()}
        pixels, outside = int(of["truth"].sum()), int(of["outside"])
        if not pixels:
            raise ValueError("no pixel of any mask has a class: all are ignored, or outside the model's input")
        union = of["truth"] + of["guessed"] - of["intersection"]
        iou, occurs = of["intersection"][union > 0] / union[union > 0], of["truth"] > 0
        return {
            "miou": round(100 * float(iou.mean()), 4),
            "pixel_accuracy": round(100 * int(of["intersection"].sum()) / pixels, 4),
            "class_accuracy": round(100 * float((of["intersection"][occurs] / of["truth"][occurs]).mean()), 4),
            "outside": round(100 * outside / (pixels + outside), 4),
            # all pixels predicted as the most frequent class: its share is its intersection over union, that of others is 0
            "majority": round(100 * int(of["truth"].max()) / pixels / int(occurs.sum()), 4),
        }

    def scores(self, kept: Kept, metric: str) -> np.ndarray:
        """Return the contribution of each image to the metric, [n]: their mean is the metric itself, 0 to 1.

        The metric is "pixel_accuracy", or for any other name mIoU; images that could not be read have NaN. It is a function of
        sums over images, a (mean of) ratio(s) I / U. To first order image i adds (I_i - U_i I / U) / U to a ratio; n times
        that, plus the ratio, is its score. These scores have the metric as their mean, and its variance over images as theirs
        (the linearization, or infinitesimal jackknife, of survey statistics).
        """
        arrays = {name: values.astype(float) for name, values in kept.of_seen().items()}
        above = arrays["intersection"]  # [n, K]
        below = arrays["truth"] if metric == "pixel_accuracy" else arrays["truth"] + arrays["guessed"] - above
        if metric == "pixel_accuracy":
            above, below = above.sum(1, keepdims=True), below.sum(1, keepdims=True)
        whole = below.sum(0)
        above, below, whole = above[:, whole > 0], below[:, whole > 0], whole[whole > 0]  # classes that occur
        ratio = above.sum(0) / whole
        scores = np.full(len(kept.seen), math.nan)
        scores[kept.seen] = (ratio + len(above) * (above - below * ratio) / whole).mean(1)
        return scores

    def by_class(self, kept: Kept, classes: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the numbers of pixels in union and intersection of mask and prediction of each class, [n, classes] each."""
        union = kept.arrays["truth"] + kept.arrays["guessed"] - kept.arrays["intersection"]
        return union, kept.arrays["intersection"]


def predicted_classes(logits: Tensor, target: Mask, of_class: Tensor) -> tuple[Tensor, Tensor]:
    """Return the predicted class of every pixel of an image, and whether the model's input shows the pixel, [h, w] each.

    The class is NO_CLASS where the highest output stands for no class of the data.

    Args:
        logits: [K, H, W] of the input, interpolated bilinearly at the pixels' centers (half-pixel convention: pixel i of an
            axis has its center at i + 0.5).
        target: mask of the image, of which only shape and place in the input are used.
        of_class: index of the model's output for each class of the data.
    """
    sides = torch.tensor(logits.shape[-2:], dtype=torch.float64)
    centers = []
    for n, first, length in zip(target.labels.shape, (target.top, target.left), (target.height, target.width), strict=True):
        centers.append(first + (torch.arange(n, dtype=torch.float64) + 0.5) * length / n)  # in pixels of the input
    shown = [(at >= 0) & (at <= side) for at, side in zip(centers, sides, strict=True)]
    y, x = (2 * at / side - 1 for at, side in zip(centers, sides, strict=True))
    places = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1)[None].to(logits.dtype)  # [1, h, w, 2]
    own = F.grid_sample(logits[None], places, mode="bilinear", padding_mode="border", align_corners=False)[0]
    classes = torch.full((len(logits),), NO_CLASS)
    classes[of_class] = torch.arange(len(of_class))
    best = own.max(0).indices  # a quarter of the time of argmax along an axis that is not the last, on a CPU
    return classes[best], shown[0][:, None] & shown[1]


TASK = Segmentation()
