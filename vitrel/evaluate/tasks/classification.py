"""Classification: top-1, calibration, the predicted class of every image."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vitrel.evaluate.checkpoint import TrainedModel
from vitrel.evaluate.results.statistics import wilson
from vitrel.evaluate.sweep import Row
from vitrel.evaluate.tasks.base import Arrays, ImageList, Predicted, Task
from vitrel.evaluate.tasks.classes import NO_CLASS, class_of_output

LEFT_OUT = -1  # label and prediction of an image that could not be read
ECE_BINS = 15


class Classification(Task):
    """An image has one class; the highest logit is the prediction.

    The arrays of an image are: labels and predicted, indices of classes (NO_CLASS where the highest logit is that of an output
    that stands for none of the data's classes); confidence, the highest probability; top5, whether the label is among the 5
    highest logits; among, whether it has the highest logit among the outputs of the data's classes.
    """

    name, metric, title = "classification", "top1", "top-1"
    columns: ClassVar[Mapping[str, Any]] = {
        "top1": "top-1 accuracy, percent",
        "top1_err": "100 - top1",
        "top1_low": "lower end of the 95 % Wilson interval over images",
        "top1_high": "upper end of the 95 % Wilson interval over images",
        "top1_among": "top-1 accuracy among the data's classes only, percent; empty where the model has no others "
        "or is restricted to them",
        "top5": "top-5 accuracy, label among the 5 highest logits, percent (100 with 5 classes or fewer)",
        "top5_err": "100 - top5",
        "nll": "mean negative log-likelihood, nats",
        "ece": "expected calibration error, percent, 15 equal bins of the confidence",
        "top1_area": "area under the curve of top1 over log2 sqrt(height x width), divided by its width: a mean in percent",
    }
    means = ("top1", "top1_among", "top5", "nll", "ece")
    metrics = ("top1", "top1_among")
    axes: ClassVar[Mapping[str, Any]] = {
        "top1": ("top-1", "%"),
        "top1_among": ("top-1 among the data's classes", "%"),
        "top5": ("top-5", "%"),
        "nll": ("NLL", "nats"),
        "ece": ("expected calibration error", "%"),
    }
    unread: ClassVar[Mapping[str, Any]] = {"labels": LEFT_OUT, "predicted": LEFT_OUT}

    def keep(self, logits: Tensor, targets: Sequence[int], outputs: Sequence[int], trained: TrainedModel) -> Mapping[str, Any]:
        """The class, its probability, whether it is right: [B] each, of logits [B, K] and labels [B]."""
        logits, labels, of_class = logits.double(), torch.tensor([*map(int, targets)]), torch.tensor(outputs)
        if not torch.isfinite(logits).all():
            raise FloatingPointError("the logits hold NaN or infinity")
        others = len(outputs) < logits.shape[-1] and not trained.restrict
        if trained.restrict:
            logits, of_class = logits[:, of_class], torch.arange(len(outputs))
        expected = of_class[labels]
        ranked = logits.topk(min(5, logits.shape[-1]), dim=-1).indices  # [B, min(5, K)]
        right = ranked == expected[:, None]
        among = of_class[logits[:, of_class].argmax(-1)] == expected if others else right[:, 0]
        return {
            "labels": labels.int(),
            "predicted": class_of_output(ranked[:, 0], labels, of_class).int(),
            "confidence": logits.softmax(-1).amax(-1),
            "top5": right.any(1),
            "among": among,
            "right": right[:, 0],
            "nll": F.cross_entropy(logits, expected, reduction="none"),
            "others": torch.full_like(labels, others, dtype=torch.bool),
        }

    def score(self, predicted: Predicted) -> Row:
        """The metrics; with fewer than 5 classes top-5 is 100 %, as in timm. ece: arXiv 1706.04599, eq. 3."""
        of = {name: values[predicted.seen] for name, values in predicted.arrays.items()}
        n, right = int(predicted.seen.sum()), of["right"]
        top1, top5 = 100 * int(right.sum()) / n, 100 * int(of["top5"].sum()) / n
        low, high = wilson(int(right.sum()) / n, n)
        bins = np.ceil(of["confidence"] * ECE_BINS).astype(int) - 1  # (0, 1/15], (1/15, 2/15], ...
        gaps = np.bincount(bins, right.astype(float) - of["confidence"], ECE_BINS)
        return {
            "top1": round(top1, 4),
            "top1_err": round(100 - top1, 4),
            "top1_low": round(low, 4),
            "top1_high": round(high, 4),
            "top1_among": round(100 * int(of["among"].sum()) / n, 4) if of["others"].any() else math.nan,
            "top5": round(top5, 4),
            "top5_err": round(100 - top5, 4),
            "nll": round(float(of["nll"].sum()) / n, 6),
            "ece": round(100 * float(np.abs(gaps).sum()) / n, 4),
            "majority": round(100 * int(np.bincount(of["labels"]).max()) / n, 4),
        }

    def scores(self, predicted: Predicted, metric: str) -> np.ndarray:
        """1 where the image is classified correctly, with "top1_among" among the data's classes, else 0."""
        right = predicted.arrays["among"] if metric == "top1_among" else right_of(predicted)
        return np.where(predicted.seen, right, np.nan)

    def by_class(self, predicted: Predicted) -> tuple[np.ndarray, np.ndarray]:
        """Images of each class that were read, and how many are classified correctly."""
        labels, count = predicted.arrays["labels"], len(predicted.images.classes)
        n, hits = (np.bincount(labels[mask], minlength=count) for mask in (predicted.seen, right_of(predicted)))
        return n, hits

    def pack(self, rows: Sequence[Predicted]) -> Arrays:
        """Labels, which are common, and four arrays [rows, n]: indices as uint16 where they fit, confidence as float16."""
        stacked = {name: np.stack([row.arrays[name] for row in rows]) for name in (*self._stored, "labels")}
        predicted = stacked["predicted"] - NO_CLASS
        fits = max(len(rows[0].images.classes) - NO_CLASS, predicted.max()) <= np.iinfo(np.uint16).max
        return {
            "labels": stacked["labels"].max(0).astype(np.int32),  # rows may differ in unreadable images
            "predicted": predicted.astype(np.uint16 if fits else np.uint32),
            "confidence": stacked["confidence"].astype(np.float32).astype(np.float16),
            "top5": np.packbits(stacked["top5"], axis=1),
            "among": np.packbits(stacked["among"], axis=1),
        }

    _stored = ("predicted", "confidence", "top5", "among")

    def unpack(self, stored: Mapping[str, np.ndarray], count: int, images: ImageList) -> list[Predicted]:
        """The rows of `pack`."""
        n, labels = len(images.names), stored["labels"].astype(np.int32)
        whole = {
            "predicted": stored["predicted"].astype(np.int32) + NO_CLASS,
            "confidence": stored["confidence"].astype(np.float32),
            **{name: np.unpackbits(stored[name], axis=1, count=n).astype(bool) for name in ("top5", "among")},
        }
        if labels.shape != (n,) or any(values.shape != (count, n) for values in whole.values()):
            raise ValueError("shapes")
        rows = [{"labels": labels} | {name: whole[name][at] for name in self._stored} for at in range(count)]
        return [Predicted(images, row, row["predicted"] != LEFT_OUT) for row in rows]


def right_of(predicted: Predicted) -> np.ndarray:
    """Return whether each image is classified correctly, bool [n]; False where it could not be read."""
    return (predicted.arrays["predicted"] == predicted.arrays["labels"]) & predicted.seen


TASK = Classification()
