"""Classification: an image has one class, and the highest logit is the prediction."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrel.tasks import ImageMean, Kept, Learning, Losses, Row, Task, finite

ECE_BINS = 15


class LearningClasses(Learning):
    """Loss of the objective, and metrics of classification: cross-entropy, top-1, and with more than 5 classes top-5.

    ValueError for a Dice loss or class weights, which are of segmentation.
    """

    def __init__(self, num_classes: int, objective: Losses, label_smoothing: float) -> None:
        super().__init__()
        if objective.dice or objective.class_weights:
            raise ValueError(
                "model.objective.dice and class_weights are of segmentation: leave them out, or set --task segmentation"
            )
        self.criterion = objective.build(label_smoothing)
        self.top_k = [k for k in (1, 5) if k < max(num_classes, 2)]
        self.means = nn.ModuleDict({name: ImageMean() for name in ("val/loss", *map("val/top{}".format, self.top_k))})
        self.values = dict(self.means)  # type: ignore[arg-type]

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.criterion(logits, target)

    def right(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return 1 for each image whose label (of mixed ones that of the largest share) has the highest logit, else 0, [B]."""
        hard = target if target.ndim == 1 else target.argmax(-1)  # with mixed labels, the one with the larger share counts
        return (logits.argmax(-1) == hard).float()

    def update(self, logits: Tensor, target: Tensor) -> None:
        values = {"val/loss": F.cross_entropy(logits, target, ignore_index=-1, reduction="none")}
        for k in self.top_k:
            values[f"val/top{k}"] = (logits.topk(k).indices == target[:, None]).any(-1).float()
        for name, mean in self.means.items():
            mean.update(values[name], target >= 0)


class Classification(Task):
    """One class an image: top-1, top-5, calibration.

    `keep` returns of each image: labels, its label; right, whether the highest logit is that of the label; among, the same
    among the outputs of the data's classes; top5, whether the label is among the 5 highest; confidence, the highest
    probability; nll, the negative log-likelihood; others, whether the model has outputs for other classes too.
    """

    name, metric, title, learned = "classification", "top1", "top-1", "top1"
    columns: ClassVar[Mapping[str, str]] = {
        "top1": "top-1 accuracy, percent",
        "top1_among": "top-1 accuracy among the data's classes only, percent; empty where the model has no others",
        "top5": "top-5 accuracy, label among the 5 highest logits, percent (100 with 5 classes or fewer)",
        "nll": "mean negative log-likelihood, nats",
        "ece": "expected calibration error, percent, 15 equal bins of the confidence",
    }
    stored = ("labels", "right", "among")

    def learning(self, num_classes: int, objective: Losses, label_smoothing: float) -> Learning:
        return LearningClasses(num_classes, objective, label_smoothing)

    def keep(self, logits: Tensor, targets: Sequence[int], outputs: Sequence[int]) -> Mapping[str, Any]:
        logits, labels, of_class = finite(logits.double()), torch.tensor([*map(int, targets)]), torch.tensor(outputs)
        others = len(outputs) < logits.shape[-1]
        expected = of_class[labels]
        right = logits.topk(min(5, logits.shape[-1]), dim=-1).indices == expected[:, None]  # [B, min(5, K)]
        among = of_class[logits[:, of_class].argmax(-1)] == expected if others else right[:, 0]
        return {
            "labels": labels.int(),
            "right": right[:, 0],
            "among": among,
            "top5": right.any(1),
            "confidence": logits.softmax(-1).amax(-1),
            "nll": F.cross_entropy(logits, expected, reduction="none"),
            "others": torch.full_like(labels, others, dtype=torch.bool),
        }

    def score(self, kept: Kept) -> Row:
        """Return the values of `columns`, and as majority the share of the most frequent label, percent.

        With 5 classes or fewer top5 is 100, as in timm. ece is that of arXiv 1706.04599, eq. 3.
        """
        of, n = kept.of_seen(), int(kept.seen.sum())
        top1, top5 = 100 * int(of["right"].sum()) / n, 100 * int(of["top5"].sum()) / n
        bins = np.ceil(of["confidence"] * ECE_BINS).astype(int) - 1  # (0, 1/15], (1/15, 2/15], ...
        gaps = np.bincount(bins, of["right"].astype(float) - of["confidence"], ECE_BINS)
        return {
            "top1": round(top1, 4),
            "top1_among": round(100 * int(of["among"].sum()) / n, 4) if of["others"].any() else math.nan,
            "top5": round(top5, 4),
            "nll": round(float(of["nll"].sum()) / n, 6),
            "ece": round(100 * float(np.abs(gaps).sum()) / n, 4),
            "majority": round(100 * int(np.bincount(of["labels"]).max()) / n, 4),
        }

    def scores(self, kept: Kept, metric: str) -> np.ndarray:
        """Return the score of each image, [n]: 1 if it is classified correctly, 0 if not, NaN if it could not be read.

        With the metric "top1_among" only the logits of the data's classes are compared; any other name stands for top-1.
        """
        return np.where(kept.seen, kept.arrays["among" if metric == "top1_among" else "right"], np.nan)

    def by_class(self, kept: Kept, classes: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of images of each class that were read, and of those classified correctly, [classes] each."""
        labels, right = kept.arrays["labels"], kept.arrays["right"].astype(bool)
        n, hits = (np.bincount(labels[mask], minlength=classes) for mask in (kept.seen, right & kept.seen))
        return n, hits


TASK = Classification()
