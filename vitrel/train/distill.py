"""Knowledge distillation from a frozen teacher, whose weights are not trained, averaged or saved with the student's.

The images need no labels of the teacher's classes: with `labels: false` the teacher alone says what the student learns. A model
that is given another position encoding is trained in this way to do what it did before (docs/how_to/convert.md).

Logits, tokens of blocks (`Features`) and the head of a distillation token are learned by one loss, `Teacher.loss`.

A teacher's tokens hold what an image shows and where (arXiv 2603.16840), and a student that follows them learns both. With
`Features.views` the teacher therefore sees every image moved by random whole patches, cyclically: what leaves on one side comes
in on the other. Its tokens are moved back, so that each lies on the patch that it saw, and averaged. Every patch is then seen
at every place of the grid equally often, those of the border too, so that a pattern of place alone is expected to be one
constant vector in all targets, and what remains of its variance is that of a mean of `views` draws. With crops of a larger
picture this would not be so: what is near the border of the picture is near a border in many of them. The price is a seam in
every view.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Self

import torch
from timm.data import ImageNetInfo, infer_imagenet_subset
from timm.layers import to_2tuple
from timm.task import DistillationTeacher
from torch import Tensor, nn
from torch.nn import functional as F

from vitrel.common.modules import evaluating
from vitrel.common.sizes import Size, format_size
from vitrel.models.config import stored_arguments
from vitrel.models.create import create_sized
from vitrel.train.tuning import check_registered
from vitrel.weights import load_pretrained
from vitrel.weights.read import read_file, unwrap
from vitrel.weights.record import state_hash


@dataclass(frozen=True)
class Features:
    """Tokens of the teacher that the student's tokens follow, beside the logits where the teacher has any.

    The student's patch tokens after a block follow those of the teacher after the same block, and its class token that of the
    teacher, if both have one. The tokens of both are normalized by a layer norm without parameters (as the targets of data2vec,
    arXiv 2202.03555) first.

    Args:
        blocks: indices of blocks, negative ones from the end.
        loss: "smooth_l1", the mean over channels, or "cosine", 1 - cosine.
        weight: factor of this loss, a mean over blocks, patches and class token, beside the loss of the logits.
        views: number of views of an image, moved by random whole patches, whose patch tokens are averaged to the target (see
            the head of vitrel/train/distill.py); 0: the tokens of the image as it is.

    Raises:
        ValueError: no block, a weight not above 0, or a negative number of views.
    """

    blocks: tuple[int, ...] = (-1,)
    loss: Literal["smooth_l1", "cosine"] = "smooth_l1"
    weight: float = 10.0
    views: int = 2

    def __post_init__(self) -> None:
        if not self.blocks or not self.weight > 0 or self.views < 0:
            raise ValueError(
                f"distillation.features takes one block or more, a positive weight and 0 views or more, not blocks "
                f"{[*self.blocks]}, weight {self.weight}, views {self.views}"
            )

    def distance(self, student: Tensor, target: Tensor) -> Tensor:
        """Return the loss between normalized tokens [..., C] of the student and of the teacher, a mean over all tokens, 0-d."""
        if self.loss == "cosine":
            return 1 - F.cosine_similarity(student, target, dim=-1).mean()
        return F.smooth_l1_loss(student, target)


@dataclass(frozen=True)
class Distillation:
    """Distillation settings: loss = (1 - alpha) * label loss + alpha * distillation loss.

    Args:
        teacher: timm name of the teacher, a vitrel model or any other. Null: the student itself as it is before training, with
            the weights and encoding that it starts from (`Tuning`), at their image size (with `features`, at the student's).
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
        features: tokens of the teacher that the student's tokens follow besides; null for none. A teacher without a classifier
            (DINO) has no logits and is followed in features alone, and labels are then those of the data.
        tokens: the student has a distillation token, whose head learns from the teacher, and the other head from the labels
            (DeiT).

    Raises:
        ValueError: a value out of range, or settings that exclude or need each other.
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
    features: Features | None = None
    tokens: bool = False

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
        if self.sizes is not None and self.features is not None:
            raise ValueError("distillation.sizes gives the student other patches than the teacher: leave out sizes or features")

    @property
    def blocks(self) -> tuple[int, ...]:
        """The indices of the blocks whose tokens are compared; () without `features`."""
        return () if self.features is None else self.features.blocks

    def student_view(self, images: Tensor, batch: int) -> Tensor:
        """Return the images [B, 3, h, w] resized for the student, in the training batch of index `batch`.

        The size is sizes[batch % len(sizes)], by antialiased bicubic interpolation; without `sizes` nothing is resized.
        """
        if self.sizes is None:
            return images
        return _resized(images, to_2tuple(self.sizes[batch % len(self.sizes)]))


class Outputs(NamedTuple):
    """The outputs of the student or the teacher for a batch, which the loss compares.

    Attributes:
        logits: [B, classes]; None for a teacher without a classifier.
        distilled: [B, classes], logits that learn from the teacher: of the head of the distillation token, or `logits`.
        patches: normalized patch tokens [B, h, w, C] after each block of `Features.blocks`.
        class_tokens: normalized class token [B, C] after each of these blocks; () without one.
    """

    logits: Tensor | None
    distilled: Tensor | None
    patches: tuple[Tensor, ...] = ()
    class_tokens: tuple[Tensor, ...] = ()


def outputs(model: nn.Module, images: Tensor, blocks: Sequence[int] = ()) -> Outputs:
    """Return the `Outputs` of a model for images [B, 3, H, W], with logits in float32, and tokens after `blocks` only.

    ValueError if the model does not have a block, or with `blocks` no `forward_intermediates`.
    """
    patches, class_tokens = [], []
    if not blocks:
        logits: Any = model(images)
    else:
        if not hasattr(model, "forward_intermediates"):
            raise ValueError(f"distillation.features: {type(model).__name__} has no forward_intermediates")
        prefix = {"return_prefix_tokens": True} if getattr(model, "num_prefix_tokens", 0) else {}
        last, found = model.forward_intermediates(images, **prefix)
        if wrong := [block for block in blocks if not -len(found) <= block < len(found)]:
            raise ValueError(
                f"distillation.features.blocks: there is no block {wrong[0]}: {type(model).__name__} has blocks 0 to "
                f"{len(found) - 1}"
            )
        for of_block in (found[block] for block in blocks):
            maps, before = of_block if prefix else (of_block, None)
            patches.append(_normalized(maps.movedim(1, -1)))
            if getattr(model, "cls_token", None) is not None:
                class_tokens.append(_normalized(before[:, 0]))
        logits = model.forward_head(last)
    logits, distilled = logits if isinstance(logits, tuple) else (logits, logits)
    return Outputs(logits.float(), distilled.float(), tuple(patches), tuple(class_tokens))


def _normalized(tokens: Tensor) -> Tensor:
    return F.layer_norm(tokens.float(), tokens.shape[-1:])


class Teacher:
    """A frozen teacher that returns logits and tokens for the student's batches.

    It is no nn.Module, so that a module that holds it does not train, save or copy its weights.

    Args:
        settings: which teacher, and how it is distilled.
        num_classes: number of classes of the data, which must be the teacher's, if it has any, unless labels are ignored.
        initial: (the student with its initial weights, before an encoding is added; names of its classes or None), which is
            the teacher where `settings` names none.
        img_size: (H, W) of the student's images in pixels; with `features`, the size at which `initial` sees them as teacher.

    Attributes:
        classes: the class names stored in its checkpoint, or those of `initial`; None if unknown.
        answers: whether it has a classifier.
        num_classes: number of its classes, or else of the data's.
        digest: SHA-256 of its weights.

    Raises:
        ValueError: an unknown name, weights that do not fit, another number of classes, or a teacher that gives nothing to
            learn: without a classifier and `features`, or without `initial` where none is named.
    """

    def __init__(
        self,
        settings: Distillation,
        num_classes: int,
        initial: tuple[nn.Module, list[str] | None] | None = None,
        img_size: Size | None = None,
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
            size = settings.img_size or (img_size if settings.features else None) or model.img_size
        else:
            loaded = {} if settings.checkpoint is None else read_file(settings.checkpoint)
            stored = loaded.get("vitrel", {}) if isinstance(loaded, dict) else {}
            self.classes = stored.get("classes")
            size = settings.img_size or stored.get("img_size")
            expected = num_classes if settings.labels else (None if self.classes is None else len(self.classes))
            model = _build(settings, expected, size, stored.get("model_args") or {})
            if settings.checkpoint is not None:
                _load(model, settings, loaded)
        self.answers = model.num_classes > 0
        if not self.answers and settings.features is None:
            raise ValueError(f"distillation teacher {self.name} has no classifier, so no logits: set distillation.features")
        self.num_classes: int = model.num_classes or num_classes
        if settings.labels and self.num_classes != num_classes:
            raise ValueError(
                f"distillation teacher {self.name} has {model.num_classes} classes, the student {num_classes}: use a "
                "teacher of the same classes, or distillation.labels: false, which needs no labels"
            )
        self.digest = state_hash(model)  # identifies the teacher by its weights, since its file may be moved
        self.size = to_2tuple(size or model.pretrained_cfg["input_size"][-2:])
        self.model = DistillationTeacher(model).requires_grad_(False).eval()

    def set_normalization(self, mean: tuple[float, ...], std: tuple[float, ...]) -> None:
        """Set the mean and std per channel with which the student's images are normalized; has to precede `check` and calls."""
        self.mean, self.std = (torch.tensor(v).view(1, -1, 1, 1) for v in (mean, std))

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # averaged copies of the student share it

    def check(self, student: nn.Module, size: Size) -> None:
        """Raise ValueError if a student of images of `size` (h, w) pixels cannot learn what the settings name.

        Reasons are a missing distillation token or block, tokens of another grid or width than the teacher's, or teacher images
        of no whole number of patches. With `Distillation.tokens`, the student is set to return (logits, logits of its
        distillation token) in training.
        """
        if self.settings.tokens:
            if getattr(student, "head_dist", None) is None:  # as timm's DeiT and our ViT name it
                raise ValueError(
                    "distillation.tokens needs a student with a distillation token (deit_tiny_distilled_patch16_224, or "
                    f"dist_token: true in model.model_args), which {type(student).__name__} has not"
                )
            student.set_distilled_training(True)  # type: ignore[operator]
        if not (blocks := self.settings.blocks):
            return
        images = torch.zeros(1, self.mean.shape[1], *size)
        with torch.no_grad(), evaluating(student):
            ours, theirs = outputs(student, images, blocks).patches, self._outputs(self._seen(images), blocks).patches
        if any(n % m for tokens in theirs for n, m in zip(self.size, tokens.shape[1:3], strict=True)):
            raise ValueError(
                f"distillation.features moves the teacher's images by whole patches, but {format_size(self.size)} pixels are "
                f"no whole number of its {format_size(theirs[0].shape[1:3])} patches"
            )
        for block, a, b in zip(blocks, ours, theirs, strict=True):
            if a.shape != b.shape:
                of_student, of_teacher = (f"{format_size(x.shape[1:3])} patches of {x.shape[3]} channels" for x in (a, b))
                raise ValueError(
                    f"distillation.features: the student has {of_student} after block {block}, the teacher {self.name} "
                    f"{of_teacher}: take a teacher of the same width, and by distillation.img_size of the same grid"
                )

    def __call__(self, images: Tensor) -> Tensor:
        """Return logits [B, classes] for the student's normalized images [B, 3, h, w]; None without a classifier."""
        return self._outputs(self._seen(images), ()).logits  # type: ignore[return-value]

    def targets(self, images: Tensor) -> Outputs:
        """Return the outputs that the student learns for its normalized images [B, 3, h, w].

        With `Features.views`, `patches` are means over views of each image that are moved by whole patches, drawn from torch's
        generator of the CPU; everything else is of the images as they are.
        """
        images, blocks = self._seen(images), self.settings.blocks
        found = self._outputs(images, blocks)
        views = 0 if self.settings.features is None else self.settings.features.views
        if not views:
            return found
        h, w = (min(tokens.shape[dim] for tokens in found.patches) for dim in (1, 2))
        sums = [torch.zeros_like(tokens) for tokens in found.patches]
        for _ in range(views):
            steps = torch.stack([torch.randint(n, (len(images),)) for n in (h, w)], 1)  # patches (down, right) of each image
            moved = self._outputs(_moved(images.movedim(1, -1), steps, (h, w)).movedim(-1, 1), blocks)
            for total, tokens in zip(sums, moved.patches, strict=True):
                total += _moved(tokens, -steps, (h, w))
        return found._replace(patches=tuple(total / views for total in sums))

    def _seen(self, images: Tensor) -> Tensor:
        """Return the student's images [B, 3, h, w] in normalization and size of the teacher, which is moved to their device."""
        if self.mean.device != images.device:
            self.model.to(images.device)
            self.mean, self.std = self.mean.to(images.device), self.std.to(images.device)
        return _resized(self.model.normalize_input(images.float(), self.mean, self.std), self.size)

    @torch.no_grad()
    def _outputs(self, images: Tensor, blocks: Sequence[int]) -> Outputs:
        """Return the teacher's outputs, without gradients, for images [B, 3, h, w] of its own size and normalization."""
        found = outputs(self.model.model, images, blocks)
        return found if self.answers else found._replace(logits=None, distilled=None)

    def class_names(self) -> list[str]:
        """Return `classes`; if None, the WordNet IDs of the ImageNet set of as many classes; if there is none, "0", "1", ..."""
        if self.classes is not None:
            return list(self.classes)
        subset = infer_imagenet_subset({"num_classes": self.num_classes})
        return ImageNetInfo(subset).label_names() if subset else [*map(str, range(self.num_classes))]

    def loss(self, student: Outputs, teacher: Outputs, label_loss: Tensor) -> Tensor:
        """Return the total loss, 0-d: (1 - alpha) * `label_loss` + alpha * the distillation loss.

        The distillation loss is the one of the logits (`kind`), if the teacher has any, plus, with `features`, `weight` times
        the mean over the blocks of the `distance` of patch tokens and of class tokens, each counting once per block.
        """
        tau, alpha, features = self.settings.tau, self.settings.alpha, self.settings.features
        distilled = torch.zeros_like(label_loss)
        if teacher.distilled is not None and self.settings.kind == "hard":
            distilled = F.cross_entropy(student.distilled, teacher.distilled.argmax(-1))
        elif teacher.distilled is not None:
            logs = F.log_softmax(student.distilled / tau, -1), F.log_softmax(teacher.distilled / tau, -1)
            distilled = F.kl_div(*logs, reduction="batchmean", log_target=True) * tau**2
        if features is not None:
            both = [(student.patches, teacher.patches), (student.class_tokens, teacher.class_tokens)]
            pairs = [pair for ours, theirs in both if ours and theirs for pair in zip(ours, theirs, strict=True)]
            distilled = distilled + features.weight * torch.stack([features.distance(*pair) for pair in pairs]).mean()
        return (1 - alpha) * label_loss + alpha * distilled


def _moved(maps: Tensor, steps: Tensor, grid: Size) -> Tensor:
    """Return maps [B, H, W, C], each rolled by its `steps` [B, 2] (down, right), counted in cells of a `grid` (h, w).

    A cell is H / h by W / w positions, and both are whole numbers.
    """
    units = [n // m for n, m in zip(maps.shape[1:3], grid, strict=True)]
    moves = [[step * unit for step, unit in zip(pair, units, strict=True)] for pair in steps.tolist()]
    return torch.stack([image.roll(move, (0, 1)) for image, move in zip(maps, moves, strict=True)])


def _resized(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Return images [B, 3, h, w] at `size`, by antialiased bicubic interpolation where they have another size."""
    return images if images.shape[-2:] == size else F.interpolate(images, size, mode="bicubic", antialias=True)


def _build(
    settings: Distillation, num_classes: int | None, size: int | Sequence[int] | None, model_args: dict[str, Any]
) -> nn.Module:
    """Return the teacher of the settings, with timm's weights if `settings.pretrained`, otherwise with random ones.

    `num_classes` None is the model's default, and is ignored for pretrained weights; `size` (a side or [H, W] in pixels) None
    is the size of its cfg. `model_args` are those of the checkpoint, which `teacher_args` override.
    """
    check_registered(settings.teacher)
    arguments = {**stored_arguments(model_args), **(settings.teacher_args or {}), "pretrained": settings.pretrained}
    # with pretrained weights, timm would silently give another number of classes a new head
    if not settings.pretrained and num_classes is not None:
        arguments["num_classes"] = num_classes
    return create_sized(settings.teacher, None if size is None else to_2tuple(size), **arguments)


def _load(model: nn.Module, settings: Distillation, loaded: object) -> None:
    """Load `loaded`, the contents of the teacher's checkpoint, into `model` in place; ValueError if they do not fit."""
    try:
        if hasattr(model, "position_parameters"):
            load_pretrained(model, loaded)
            return
        model.load_state_dict(unwrap(loaded, str(settings.checkpoint)))
    except (RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ValueError(f"distillation teacher {settings.teacher} cannot load {settings.checkpoint}: {reason}") from error
