"""Several labels an image: each class is present or not, and the sigmoid of its logit is the probability that it is."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from timm.loss import BinaryCrossEntropy
from torch import Tensor
from torchmetrics.classification import MultilabelAveragePrecision
from torchmetrics.functional.classification import multilabel_average_precision
from torchmetrics.utilities import dim_zero_cat

from vitrel.tasks import ImageMean, Kept, Learning, Losses, Row, Task, finite


class MeanPrecision(MultilabelAveragePrecision):
    """Mean average precision of scores [B, K] and targets [B, K] of 0 and 1, over the classes that occur in the targets.

    torchmetrics would count a class that no image has with a precision of 0. Images of target -1 are left out.
    """

    def compute(self) -> Tensor:  # type: ignore[override]
        scores, target = dim_zero_cat(self.preds), dim_zero_cat(self.target)
        return mean_precision(*(values[target[:, 0] >= 0] for values in (scores, target)))


def mean_precision(scores: Tensor, target: Tensor) -> Tensor:
    """Return the mean over classes of the average precision of scores [n, K], 0 to 1, for targets [n, K] of 0 and 1.

    Only classes that occur in the targets count; NaN without any.
    """
    occurs = (target > 0).any(0)
    if not occurs.any():
        return scores.new_tensor(math.nan)
    return multilabel_average_precision(scores[:, occurs], target[:, occurs].long(), int(occurs.sum()), validate_args=False)


class LearningLabels(Learning):
    """Binary cross-entropy as in timm's train.py, mean over classes and images; mAP of the evaluation set.

    Label smoothing moves every target towards 0.5, and mixup and cutmix mix them. ValueError for settings of other tasks.
    """

    def __init__(self, num_classes: int, objective: Losses, label_smoothing: float) -> None:
        super().__init__()
        if objective.dice or objective.class_weights or objective.distillation is not None:
            raise ValueError(
                "several labels an image are learned by binary cross-entropy: leave out model.objective.dice, class_weights "
                "and distillation"
            )
        objective.build(label_smoothing)  # checks the value
        self.criterion = BinaryCrossEntropy(label_smoothing, objective.bce_target_thresh, smooth_dense=True)
        self.mean_loss, self.precision = ImageMean(), MeanPrecision(num_classes, validate_args=False)
        self.values = {"val/loss": self.mean_loss, "val/map": self.precision}

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.criterion(logits, target)

    def right(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return for each image the share of the classes whose presence or absence is predicted correctly, [B]."""
        return ((logits > 0) == (target > 0.5)).float().mean(-1)

    def update(self, logits: Tensor, target: list[Any]) -> None:
        known = [one if isinstance(one, Tensor) and one.ndim else torch.full_like(logits[0], -1) for one in target]
        targets = torch.stack(known)
        losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(-1)
        self.mean_loss.update(losses, targets[:, 0] >= 0)
        self.precision.update(logits.sigmoid(), targets)


class Multilabel(Task):
    """Any number of classes an image: mean average precision (mAP) over the classes that occur in the data.

    `keep` returns of each image: labels, 1 for each of its classes [K]; scores, the probability of each class [K]; bce, the
    mean binary cross-entropy. Targets are [K] of 0 and 1.
    """

    name, metric, title, learned, several = "multilabel", "map", "mAP", "label_accuracy", True
    chance = "equal probabilities for all images"
    columns: ClassVar[Mapping[str, str]] = {
        "map": "average precision of the images ordered by a class's probability, mean over the classes that occur, percent",
        "bce": "binary cross-entropy, mean over classes and images, nats",
    }
    stored = ("labels", "scores")

    def learning(self, num_classes: int, objective: Losses, label_smoothing: float) -> Learning:
        return LearningLabels(num_classes, objective, label_smoothing)

    def probabilities(self, logits: Tensor) -> Tensor:
        return finite(logits.double()).sigmoid()

    def keep(self, logits: Tensor, targets: Sequence[Any], outputs: Sequence[int]) -> Mapping[str, Any]:
        logits = finite(logits.double())[:, torch.tensor(outputs)]
        labels = torch.stack([*map(torch.as_tensor, targets)]).double()
        losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none").mean(-1)
        return {"labels": labels.byte(), "scores": logits.sigmoid().float(), "bce": losses}

    def score(self, kept: Kept) -> Row:
        of = kept.of_seen()
        share = of["labels"].mean(0)
        if not share.any():
            raise ValueError("no image has a label: there is nothing to rank")
        found = mean_precision(torch.from_numpy(of["scores"]), torch.from_numpy(of["labels"]))
        return {
            "map": round(100 * float(found), 4),
            "bce": round(float(of["bce"].mean()), 6),
            "majority": round(100 * float(share[share > 0].mean()), 4),
        }

    def scores(self, kept: Kept, metric: str) -> np.ndarray:
        """Return the contribution of each image to the mAP, [n], NaN for those that could not be read.

        It is the mean of `contributions` over the classes that occur; their mean is the mAP, 0 to 1. `metric` is ignored.
        """
        weights, values = self.by_class(kept, kept.arrays["labels"].shape[-1])
        scores = np.full(len(kept.seen), math.nan)
        scores[kept.seen] = values[:, weights.any(0)].mean(1)[kept.seen]
        return scores

    def by_class(self, kept: Kept, classes: int) -> tuple[np.ndarray, np.ndarray]:
        """Return whether a class counts in an image (some image has it, and this one was read), and the `contributions`, or 0.

        Both are [n, classes].
        """
        found = np.zeros((len(kept.seen), classes))
        for at in range(classes):
            labels, scores = (kept.arrays[name][kept.seen, at] for name in ("labels", "scores"))
            if labels.any():
                found[kept.seen, at] = contributions(scores, labels.astype(float))
        occurs = kept.arrays["labels"][kept.seen].any(0)
        return kept.seen[:, None] & occurs, found


def contributions(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the contribution of each image to the average precision of a class, [n]: their mean is the average precision.

    The average precision is the mean, over the images that have the class, of the precision among all images with a score that
    is not lower. The contribution of an image is the average precision plus n times its derivative by the weight of the image
    (the infinitesimal jackknife, as in `vitrel.tasks.segmentation`).

    Args:
        scores: [n], by which the images are ranked.
        labels: [n], 1 where an image has the class, which one has at least, else 0.
    """
    _, place, images = np.unique(-scores, return_inverse=True, return_counts=True)  # equal scores share a place
    above, having = images.cumsum(), np.bincount(place, labels)
    precision = having.cumsum() / above
    mean = (having * precision).sum() / having.sum()
    own = labels * (precision[place] - mean)
    gain, cost = (values[::-1].cumsum()[::-1][place] for values in (having / above, having * precision / above))
    return mean + len(scores) / having.sum() * (own + labels * gain - cost)


TASK = Multilabel()
