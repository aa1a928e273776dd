"""The training loss: cross-entropy or binary cross-entropy, distillation; and erasing, mixup and cutmix of batches.

What is random here is drawn on the CPU, so that a batch has the same numbers on every device.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from timm.data import Mixup
from timm.data.random_erasing import RandomErasing
from timm.loss import BinaryCrossEntropy
from torch import Tensor
from torch.nn import functional as F

from vitrel.data import Augmentation
from vitrel.train.distill import Distillation


@dataclass(frozen=True)
class Objective:
    """The training loss. Evaluation ignores it, and reports cross-entropy (with several labels an image, a binary one).

    Args:
        loss: "ce", cross-entropy, or "bce", timm's BinaryCrossEntropy (one binary problem per class); several labels an image
            are always learned by the latter.
        bce_target_thresh: threshold of "bce": targets above it become 1, all others 0; null leaves mixed and smoothed targets
            unchanged.
        distillation: a teacher to learn from besides the labels; null for none.
        dice: weight of the Dice loss (segmentation_models_pytorch) added to the cross-entropy of segmentation; 0 for none.
        class_weights: factor on the loss of the pixels of each class in segmentation, in the order of the classes; null for 1.

    Raises:
        ValueError: a negative weight, a threshold out of 0 <= value < 1, or one with the loss "ce".
    """

    loss: Literal["ce", "bce"] = "ce"
    bce_target_thresh: float | None = None
    distillation: Distillation | None = None
    dice: float = 0.0
    class_weights: list[float] | None = None

    def __post_init__(self) -> None:
        if self.dice < 0 or any(weight < 0 for weight in self.class_weights or ()):
            raise ValueError(
                f"model.objective.dice ({self.dice}) and class_weights ({self.class_weights}) must not be negative"
            )
        if self.loss == "ce" and self.bce_target_thresh is not None:
            raise ValueError("model.objective.bce_target_thresh needs model.objective.loss: bce; set it or leave it out")
        if self.bce_target_thresh is not None and not 0 <= self.bce_target_thresh < 1:
            raise ValueError(f"model.objective.bce_target_thresh must satisfy 0 <= value < 1, not {self.bce_target_thresh}")

    def build(self, label_smoothing: float) -> Callable[[Tensor, Tensor], Tensor]:
        """Return the loss of images: the function (logits, targets) -> mean over the batch (of "bce" over classes too), 0-d.

        Logits are [B, classes], targets labels [B] or mixed targets [B, classes]. The losses of segmentation and of a teacher
        are made elsewhere (`vitrel.tasks`, `Distillation`).

        Args:
            label_smoothing: share of a label that is spread over all classes, 0 <= share < 1. Mixed targets are not smoothed,
                since `Mixing` has done it.

        Raises:
            ValueError: `label_smoothing` is out of range.
        """
        if not 0 <= label_smoothing < 1:
            raise ValueError(f"model.label_smoothing must satisfy 0 <= value < 1, not {label_smoothing}")
        if self.loss == "bce":
            return BinaryCrossEntropy(label_smoothing, self.bce_target_thresh)
        return partial(_cross_entropy, smoothing=label_smoothing)


def _cross_entropy(logits: Tensor, target: Tensor, smoothing: float) -> Tensor:
    return F.cross_entropy(logits, target, label_smoothing=smoothing if target.ndim == 1 else 0.0)


@dataclass(frozen=True)
class Mixing:
    """Mixup and cutmix of images, as in timm; where both are on, each batch is mixed by one of them with equal chance.

    If mixup and cutmix are both null, their strengths are DeiT's (arXiv 2012.12877): mixup 0.8 and cutmix 1. If one of them is
    given, also as 0, the other is off.

    Args:
        mixup: alpha of the Beta distribution of mixup's mixing ratio; 0 for no mixup.
        cutmix: alpha of the Beta distribution of cutmix's box area; 0 for no cutmix.

    Raises:
        ValueError: a negative value.
    """

    mixup: float | None = None
    cutmix: float | None = None

    def __post_init__(self) -> None:
        unset = self.mixup is None and self.cutmix is None
        for name, default in (("mixup", 0.8), ("cutmix", 1.0)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, default if unset else 0.0)
        if self.mixup < 0 or self.cutmix < 0:
            raise ValueError(f"model.mixing.mixup ({self.mixup}) and model.mixing.cutmix ({self.cutmix}) must be at least 0")

    def build(self, num_classes: int, label_smoothing: float, several: bool = False) -> Mixup | None:
        """Return timm's Mixup; None if mixup and cutmix are 0.

        It also smooths the labels, unless there are `several` labels an image (targets [B, classes]), which the loss smooths.
        """
        if not self.mixup and not self.cutmix:
            return None
        return Mixup(
            mixup_alpha=self.mixup,
            cutmix_alpha=self.cutmix,
            label_smoothing=0.0 if several else label_smoothing,
            num_classes=num_classes,
            multi_label=several,
        )


class Erasing:
    """Random erasing of normalized images on their device, by timm's RandomErasing.

    Args:
        settings: gives the probability `erase` and the filling `erase_mode`.
    """

    def __init__(self, settings: Augmentation) -> None:
        self.erase = RandomErasing(settings.erase, mode=settings.erase_mode, device="cpu")

    def __call__(self, images: Tensor) -> None:
        """Erase a box in each image of [B, 3, H, W] in place with probability `erase`, by Python's and torch's CPU RNG."""
        for image in images:
            self.erase(_Erased(image))


class _Erased:
    """Wraps an image [3, H, W] for RandomErasing; it copies pixels drawn on the CPU to the image without a wait for the GPU."""

    def __init__(self, image: Tensor) -> None:
        self.image, self.size, self.dtype = image, image.size, image.dtype

    def __setitem__(self, place: tuple[slice, ...], pixels: Tensor) -> None:
        pixels = pixels.pin_memory() if self.image.is_cuda else pixels
        self.image[place] = pixels.to(self.image.device, non_blocking=True)
