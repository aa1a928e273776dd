"""What training learns: classes of images, or of pixels. Nothing else in this room knows which.

A task puts its head on a backbone, says how a loss is formed and counted, and measures the evaluation set.
"""

import abc
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex

from vitrel.common.extras import require
from vitrel.data.readers.decode import IGNORED
from vitrel.models.segmenter import Segmenter
from vitrel.train.metrics import ImageMean
from vitrel.train.objective import Objective

NAMES = ("classification", "segmentation")


class Task(nn.Module, abc.ABC):
    """Abstract base class of tasks.

    Attributes:
        name: one of NAMES.
        metric: name of the metric of the evaluation set that chooses the best checkpoint, as "top1" of the log's "val/top1".
        learned: name of the share of training labels that are predicted, in the log after "train/".
        values: {name in the log: metric of the evaluation set}, summed over ranks.
    """

    name: ClassVar[str]
    metric: ClassVar[str]
    learned: ClassVar[str]
    values: dict[str, Metric]

    @abc.abstractmethod
    def head_classes(self, num_classes: int) -> int:
        """Return the number of outputs of the backbone's own classifier."""

    @abc.abstractmethod
    def with_head(self, backbone: nn.Module, num_classes: int, head: str) -> nn.Module:
        """Return the model that is trained: the backbone, with a head on it where the task has one of its own."""

    @abc.abstractmethod
    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the loss of a batch, a scalar."""

    @abc.abstractmethod
    def right(self, logits: Tensor, target: Tensor) -> Tensor:
        """Return the share of each image's labels that the logits predict, [B]."""

    @abc.abstractmethod
    def update(self, logits: Tensor, target: Any) -> None:
        """Add a batch of the evaluation set to `values`; images of label -1, which fill the batches of ranks, do not count."""


class Classification(Task):
    """One class an image: top-1, top-5 with more than 5 classes, and cross-entropy.

    Args:
        num_classes: number of outputs.
        objective, label_smoothing: the loss.
    """

    name, metric, learned = "classification", "top1", "top1"

    def __init__(self, num_classes: int, objective: Objective, label_smoothing: float) -> None:
        super().__init__()
        if objective.dice or objective.class_weights:
            raise ValueError(
                "model.objective.dice and class_weights are of segmentation: leave them out, or set --task segmentation"
            )
        self.criterion = objective.build(label_smoothing)
        self.top_k = [k for k in (1, 5) if k < max(num_classes, 2)]
        self.means = nn.ModuleDict({name: ImageMean() for name in ("val/loss", *map("val/top{}".format, self.top_k))})
        self.values = dict(self.means)  # type: ignore[arg-type]

    def head_classes(self, num_classes: int) -> int:
        return num_classes

    def with_head(self, backbone: nn.Module, num_classes: int, head: str) -> nn.Module:
        return backbone

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        return self.criterion(logits, target)

    def right(self, logits: Tensor, target: Tensor) -> Tensor:
        hard = target if target.ndim == 1 else target.argmax(-1)  # with mixed labels, the one with the larger share counts
        return (logits.argmax(-1) == hard).float()

    def update(self, logits: Tensor, target: Tensor) -> None:
        values = {"val/loss": F.cross_entropy(logits, target, ignore_index=-1, reduction="none")}
        for k in self.top_k:
            values[f"val/top{k}"] = (logits.topk(k).indices == target[:, None]).any(-1).float()
        for name, mean in self.means.items():
            mean.update(values[name], target >= 0)


class Segmentation(Task):
    """One class a pixel: mIoU and pixel accuracy, at each mask's own resolution, and cross-entropy; pixels of 255 do not count.

    mIoU is the mean over the classes that occur in masks or predictions of the evaluation set.

    Args:
        num_classes: number of classes.
        objective, label_smoothing: the loss: cross-entropy, and Dice loss of segmentation_models_pytorch beside it.

    Raises:
        ValueError: settings of classification alone.
        MissingExtra: Dice loss without segmentation_models_pytorch.
    """

    name, metric, learned = "segmentation", "miou", "pixel_accuracy"
    weights: Tensor | None

    def __init__(self, num_classes: int, objective: Objective, label_smoothing: float) -> None:
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

    def head_classes(self, num_classes: int) -> int:
        return 0

    def with_head(self, backbone: nn.Module, num_classes: int, head: str) -> nn.Module:
        return Segmenter(backbone, num_classes, head)

    def loss(self, logits: Tensor, target: Tensor) -> Tensor:
        # a sum and a division, since a batch without any labeled pixel has no mean: its loss and gradients are 0
        how = {"weight": self.weights, "ignore_index": IGNORED, "label_smoothing": self.smoothing, "reduction": "sum"}
        target = target.long()
        total, labeled = F.cross_entropy(logits, target, **how), target != IGNORED
        weights = labeled if self.weights is None else self.weights[torch.where(labeled, target, 0)] * labeled
        loss = total / weights.sum().clamp(min=1e-9)
        return loss if self.dice is None else loss + self.dice_weight * self.dice(logits, target)

    def right(self, logits: Tensor, target: Tensor) -> Tensor:
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


def task_named(name: str, num_classes: int, objective: Objective, label_smoothing: float) -> Task:
    """Return the task of a name; ValueError for an unknown one, and for settings that it does not have."""
    if name not in NAMES:
        raise ValueError(f"model.task must be one of {', '.join(NAMES)}, not {name!r}")
    return (Classification if name == "classification" else Segmentation)(num_classes, objective, label_smoothing)
