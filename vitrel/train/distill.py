"""Knowledge distillation from a frozen teacher, whose weights are not trained, averaged or saved with the student's.

The images need no labels of the teacher's classes: with `labels: false` the teacher alone says what the student learns. A model
that is given another position encoding is trained in this way to do what it did before (docs/how_to/convert.md).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from timm.data import ImageNetInfo, infer_imagenet_subset
from timm.layers import to_2tuple
from timm.task import DistillationTeacher
from torch import Tensor, nn
from torch.nn import functional as F

from vitrel.models.config import stored_arguments
from vitrel.models.create import create_sized
from vitrel.train.tuning import check_registered
from vitrel.weights import load_pretrained
from vitrel.weights.read import read_file, unwrap
from vitrel.weights.record import state_hash


@dataclass(frozen=True)
class Distillation:
    """Distillation settings: loss = (1 - alpha) * label loss + alpha * distillation loss.

    Args:
        teacher: timm name of the teacher, a vitrel model or any other. Null: the student itself as it is before training, with
            the weights and the position encoding that it starts from (`Tuning`), at their image size.
        checkpoint: file with the teacher's weights; a checkpoint of vitrel train also holds its model arguments, image size
            and class names.
        pretrained: use timm's pretrained weights for `teacher`, downloaded unless they are in timm's cache.
        kind: "soft" (KL divergence at temperature tau, times tau squared, Hinton, arXiv 1503.02531) or "hard"
            (cross-entropy with the teacher's most probable class, DeiT, arXiv 2012.12877).
        alpha: weight of the distillation loss, 0..1.
        tau: temperature of the soft kind.
        img_size: side or [H, W] in pixels that images are resized to for the teacher; null is the size stored in
            `checkpoint`, or else the size of the teacher's cfg.
        teacher_args: further keywords of `timm.create_model`, which override those of the checkpoint.
        labels: false: ignore the labels of the data, so that any images serve. The teacher's most probable class takes the
            place of an image's label in the loss (which has no part with alpha 1) and in the logged top-1, which then says how
            often student and teacher agree. The student has the teacher's classes.
        sizes: sides or [H, W] in pixels at which the student sees training images, one batch after another; the teacher sees
            them as they are loaded. Null: the student sees them as they are loaded, too.
    """

    teacher: str | None = None
    checkpoint: str | None = None
    pretrained: bool = False
    kind: Literal["soft", "hard"] = "soft"
    alpha: float = 0.5
    tau: float = 1.0
    img_size: int | tuple[int, int] | None = None
    teacher_args: dict[str, Any] | None = None
    labels: bool = True
    sizes: list[int | tuple[int, int]] | None = None

    def __post_init__(self) -> None:
        if self.teacher is None and (self.checkpoint is not None or self.pretrained or self.teacher_args):
            raise ValueError("distillation.checkpoint, pretrained and teacher_args belong to a teacher: name one, or omit them")
        if self.teacher is not None and (self.checkpoint is None) == (not self.pretrained):
            raise ValueError(
                f"distillation: a teacher has learned something: give {self.teacher} either a checkpoint, or pretrained: true "
                "to fetch timm's weights"
            )
        if not 0 <= self.alpha <= 1 or not self.tau > 0:
            raise ValueError(f"distillation.alpha ({self.alpha}) is within 0..1, distillation.tau ({self.tau}) positive")
        if self.sizes is not None and (not self.sizes or any(side < 1 for size in self.sizes for side in to_2tuple(size))):
            raise ValueError(f"distillation.sizes takes sides or [H, W] in pixels, e.g. [128, [160, 288]], not {self.sizes}")

    def student_view(self, images: Tensor, batch: int) -> Tensor:
        """Return the images [B, 3, h, w] as the student sees them in training batch number `batch`, at its size of `sizes`."""
        if self.sizes is None:
            return images
        return _resized(images, to_2tuple(self.sizes[batch % len(self.sizes)]))


class Teacher:
    """A frozen teacher that returns logits for the student's batches.

    It is no nn.Module, so that a module that holds it does not train, save or copy its weights.

    Args:
        settings: which teacher, and how it is distilled.
        num_classes: number of classes of the data, which must be the teacher's unless labels are ignored.
        initial: (the student with its initial weights, before an encoding is added; names of its classes or None), which is the
            teacher where `settings` names none.

    Attributes:
        classes: the class names stored in its checkpoint, or None.
        num_classes: number of its classes.
        digest: SHA-256 of its weights.

    Raises:
        ValueError: an unknown name, weights that do not fit, or another number of classes.
    """

    def __init__(
        self, settings: Distillation, num_classes: int, initial: tuple[nn.Module, list[str] | None] | None = None
    ) -> None:
        self.settings = settings
        self.name = settings.teacher or "of the initial weights"
        model: Any
        size: Any
        if settings.teacher is None:
            if initial is None:
                raise ValueError(
                    "distillation.teacher: null takes the student before training, which has random weights here: set "
                    "model.tuning.init_from or pretrained, or name a teacher"
                )
            model, self.classes = initial
            size = settings.img_size or model.img_size
        else:
            loaded = {} if settings.checkpoint is None else read_file(settings.checkpoint)
            stored = loaded.get("vitrel", {}) if isinstance(loaded, dict) else {}
            self.classes = stored.get("classes")
            size = settings.img_size or stored.get("img_size")
            expected = num_classes if settings.labels else (None if self.classes is None else len(self.classes))
            model = _build(settings, expected, size, stored.get("model_args") or {})
            if settings.checkpoint is not None:
                _load(model, settings, loaded)
        self.num_classes: int = model.num_classes
        if settings.labels and self.num_classes != num_classes:
            raise ValueError(
                f"distillation teacher {self.name} has {model.num_classes} classes, the student {num_classes}: use a "
                "teacher of the same classes, or distillation.labels: false, which needs no labels"
            )
        self.digest = state_hash(model)  # identifies the teacher by its weights, since its file may be moved
        self.size = to_2tuple(size or model.pretrained_cfg["input_size"][-2:])
        self.model = DistillationTeacher(model).requires_grad_(False).eval()

    def set_normalization(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        """Set the mean and standard deviation per channel with which the student's images are normalized."""
        self.mean, self.std = (torch.tensor(v).view(1, -1, 1, 1) for v in (mean, std))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # averaged copies of the student share it

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Logits [B, classes] for the student's normalized images [B, 3, h, w]."""
        if self.mean.device != images.device:
            self.model.to(images.device)
            self.mean, self.std = self.mean.to(images.device), self.std.to(images.device)
        return self.model(_resized(self.model.normalize_input(images.float(), self.mean, self.std), self.size))

    def class_names(self) -> list[str]:
        """Return the names of its classes: those of its checkpoint, WordNet IDs for ImageNet, or else their numbers."""
        if self.classes is not None:
            return list(self.classes)
        subset = infer_imagenet_subset({"num_classes": self.num_classes})
        return ImageNetInfo(subset).label_names() if subset else [*map(str, range(self.num_classes))]

    def loss(self, student: Tensor, teacher: Tensor, label_loss: Tensor) -> Tensor:
        """Return the total loss: (1 - alpha) * `label_loss` + alpha * the distillation loss.

        Args:
            student, teacher: logits [B, classes] of both for the same images.
            label_loss: the student's loss against the labels, a scalar.
        """
        teacher, tau, alpha = teacher.float(), self.settings.tau, self.settings.alpha
        if self.settings.kind == "hard":
            distilled = F.cross_entropy(student, teacher.argmax(-1))
        else:
            logs = F.log_softmax(student / tau, -1), F.log_softmax(teacher / tau, -1)
            distilled = F.kl_div(*logs, reduction="batchmean", log_target=True) * tau**2
        return (1 - alpha) * label_loss + alpha * distilled


def _resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    """The images [B, 3, h, w] at `size`, by antialiased bicubic interpolation where they have another size."""
    return images if images.shape[-2:] == size else F.interpolate(images, size, mode="bicubic", antialias=True)


def _build(
    settings: Distillation, num_classes: int | None, size: int | Sequence[int] | None, model_args: dict[str, Any]
) -> nn.Module:
    check_registered(settings.teacher)
    arguments = {**stored_arguments(model_args), **(settings.teacher_args or {}), "pretrained": settings.pretrained}
    # with pretrained weights, timm would silently give another number of classes a new head
    if not settings.pretrained and num_classes is not None:
        arguments["num_classes"] = num_classes
    return create_sized(settings.teacher, None if size is None else to_2tuple(size), **arguments)


def _load(model: nn.Module, settings: Distillation, loaded: object) -> None:
    try:
        if hasattr(model, "position_parameters"):
            load_pretrained(model, loaded)
            return
        model.load_state_dict(unwrap(loaded, str(settings.checkpoint)))
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"distillation teacher {settings.teacher} cannot load {settings.checkpoint}: {reason}") from error
