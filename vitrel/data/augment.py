"""Training augmentation of one image with albumentations, and a reproducible random state; the only file that imports OpenCV.

The random state of every view of an image depends on (seed, epoch, index, repeat) only. Therefore batches are the same for any
number of workers, and a resumed run augments images as an uninterrupted run does.

albumentations has no RandAugment or AugMix: a policy is timm's or torchvision's, as one of its transforms. OpenCV computes
the shears, rotations and translations of timm's, in half the time that Pillow takes; docs/performance.md says how they differ.
"""

import os
import random
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

# set before the import, or albumentations would look up its newest version on the network
os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"

import albumentations as A
import cv2
import numpy as np
import torch
from PIL import Image
from timm.data import auto_augment
from torch import Tensor
from torch.utils.data import get_worker_info
from torchvision.transforms import v2

from vitrel.common.resources import out_of_memory
from vitrel.data.augmentation import Augmentation, AugmentationError, Interpolation
from vitrel.data.prepare import INTERPOLATIONS, Picture, Prepare, as_array
from vitrel.data.readers.decode import IGNORED

cv2.setNumThreads(0)  # the loader's workers are the parallelism

LIBRARIES = ("albumentations.", "timm.data.", "torchvision.transforms.", "vitrel.data.augment.")
FLAGS = {
    "bicubic": (cv2.INTER_CUBIC,),
    "bilinear": (cv2.INTER_LINEAR,),
    "random": (cv2.INTER_LINEAR, cv2.INTER_CUBIC),
}


POLICIES: dict[str, Callable[..., Any]] = {  # by the first part of a config string
    "rand": auto_augment.rand_augment_transform,
    "augmix": auto_augment.augment_and_mix_transform,
    **dict.fromkeys(("original", "originalr", "v0", "v0r", "3a"), auto_augment.auto_augment_transform),
    "trivial": v2.TrivialAugmentWide,
}


class Augmenter:
    """Augments training images, and their masks, by all steps of `Augmentation` but random erasing.

    The random numbers depend on (seed, epoch, index, repeat) alone.

    Args:
        settings: the augmentation; a `crop` of None means "random_resized".
        size: (H, W) of the result, pixels.
        mean: color, 0 to 1 per channel, of pixels of the result that lie outside the image.
        seed: seed of the run.
        crop_pct, crop_mode: of the crop "center", as in `Prepare`; other crops ignore them.
    """

    def __init__(
        self,
        settings: Augmentation,
        size: tuple[int, int],
        mean: tuple[float, ...],
        seed: int = 0,
        crop_pct: float = 1.0,
        crop_mode: str = "center",
    ) -> None:
        self.settings = replace(settings, crop=settings.crop or "random_resized")
        self.mean, self.seed, self.size = mean, seed, (size[0], size[1])
        self.crop_pct, self.crop_mode = (crop_pct, crop_mode) if settings.crop == "center" else (1.0, "center")
        # the generators of the libraries; crop, flips and jitter have their own
        self.seeds = settings.policy is not None or settings.crop in ("simple", "center")
        self.pipelines = {self.size: pipeline(self.settings, self.size, mean)}

    def __call__(self, image: Picture, epoch: int, index: int, repeat: int = 0, size: tuple[int, int] | None = None) -> Tensor:
        """Return the augmented image, uint8 [3, H, W]; it raises the errors of `joint`.

        Args:
            image: a Pillow image of mode RGB, or uint8 [3, h, w].
            epoch, index: epoch of training, and index of the image, which seed the random numbers.
            repeat: number of this view of the image within the epoch, from 0, which seeds them too.
            size: (H, W) of the result; by default the augmenter's size.
        """
        return self.joint(image, None, epoch, index, repeat, size)[0]

    def joint(
        self,
        image: Picture,
        mask: np.ndarray | None,
        epoch: int,
        index: int,
        repeat: int = 0,
        size: tuple[int, int] | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """Return the augmented image, uint8 [3, H, W], and its mask of classes, uint8 [H, W] (None if `mask` is None).

        Args:
            image, epoch, index, repeat, size: as of `__call__`.
            mask: uint8 [h, w], cropped and flipped as the image, with the nearest pixel's value; the result is 255 (`IGNORED`)
                outside the image. It needs settings of `Augmentation.for_masks`.

        Raises:
            AugmentationError: an operation failed.
            MemoryError: memory ran out.
        """
        size = self.size if size is None else (size[0], size[1])
        if size not in self.pipelines:
            self.pipelines[size] = pipeline(self.settings, size, self.mean)
        # SeedSequence pads with zeros, so view 0 has the random numbers of (seed, epoch, index)
        state = np.random.SeedSequence((self.seed, epoch, index, repeat))
        try:
            with seeded(state) if self.seeds else nullcontext():
                if self.settings.crop in ("simple", "center"):
                    image = self._resized_and_cropped(image, size)
                # set_random_seed would give every transform the same random numbers, so that e.g. only mirrored images would be
                # brightened. One pair of generators shared by all transforms keeps them independent.
                steps = self.pipelines[size]
                steps.set_random_state(np.random.default_rng(state), random.Random(int(state.generate_state(1)[0])))
                found = steps(image=as_array(image), **({} if mask is None else {"mask": mask}))
        except Exception as error:
            if out_of_memory(error):
                raise MemoryError(f"memory ran out in the augmentation: {error}") from error
            place = f"seed {self.seed}, epoch {epoch}, image number {index}, view {repeat}"
            raise AugmentationError(f"{_operation(error)} failed with the random numbers of {place}: {error}") from error
        return torch.from_numpy(found["image"]).permute(2, 0, 1), None if mask is None else torch.from_numpy(found["mask"])

    def _resized_and_cropped(self, image: Picture, size: tuple[int, int]) -> Image.Image:
        """Return the image resized and cropped to `size` (H, W) by the crop "simple" or "center".

        The random numbers are those of the global generators of Python and torch.
        """
        interpolation = self.settings.interpolation
        if interpolation == "random":
            interpolation = random.choice(list(INTERPOLATIONS))
        view = Prepare(size, self.mean, None, self.crop_pct, interpolation, crop_mode=self.crop_mode)
        if self.settings.crop == "center":
            return view.cropped(image)
        return v2.RandomCrop(size, padding=4, padding_mode="reflect")(view.resized(image))


def _operation(error: Exception) -> str:
    """Return the innermost operation in the traceback, as "NAME" or "NAME of magnitude M"; "augmentation" if it shows none."""
    operation = "augmentation"
    for frame, _ in traceback.walk_tb(error.__traceback__):
        names = frame.f_locals
        owner = names.get("self")
        if f"{type(owner).__module__}.".startswith(LIBRARIES):
            # `transform_id` and `magnitude` in the frames of torchvision's TrivialAugment and timm's AugmentOp
            operation = str(names.get("transform_id") or getattr(owner, "name", type(owner).__name__))
            operation += f" of magnitude {names['magnitude']:.6g}" if "magnitude" in names else ""
    return operation


@contextmanager
def seeded(state: np.random.SeedSequence) -> Iterator[None]:
    """Seed the global generators of Python, NumPy and torch (CPU) from `state` within the block, and restore them after it.

    In a DataLoader worker, which uses them for nothing else, they are not restored: that takes as long as to decode a small
    image.
    """
    alone = get_worker_info() is not None
    before = None if alone else (random.getstate(), np.random.get_state(), torch.get_rng_state())  # noqa: NPY002
    seeds = state.generate_state(4).tolist()  # the first is used by albumentations
    random.seed(seeds[1])
    torch.default_generator.manual_seed(seeds[2])  # torch.manual_seed would also set the accelerators' generators
    np.random.seed(seeds[3])  # noqa: NPY002  # timm's policies use it
    try:
        yield
    finally:
        if before is not None:
            random.setstate(before[0])
            np.random.set_state(before[1])  # noqa: NPY002
            torch.set_rng_state(before[2])


def pipeline(settings: Augmentation, size: tuple[int, int], mean: tuple[float, ...]) -> A.Compose:
    """Return the transform of albumentations for uint8 images [h, w, 3] and masks [h, w]: crop, flips, policy, color jitter.

    The crops "simple" and "center" are not in it: `Augmenter` applies them before, so images then have `size` (H, W). `mean` is
    the color outside the image, 0 to 1 per channel. A `crop` of None crops nothing here. ValueError for an unknown policy.
    """
    fill = tuple(round(255 * m) for m in mean)
    flags = FLAGS[settings.interpolation]
    steps: list[Any] = []
    if settings.crop == "random_resized":
        steps.append(_one_of([_resized_crop(settings, size, flag) for flag in flags]))
    if settings.crop == "random_scale":
        steps.append(_one_of([_RandomScale(settings.factor, size, flag) for flag in flags]))
        padding: dict[str, Any] = {"pad_if_needed": True, "pad_position": "random", "fill": fill, "fill_mask": IGNORED}
        steps.append(A.RandomCrop(*size, **padding))
    if settings.flip:
        steps.append(A.HorizontalFlip(p=0.5))
    if settings.vflip:
        steps.append(A.VerticalFlip(p=0.5))
    if settings.policy is not None:
        steps.append(_Policy(_warping(policy_transform(settings.policy, settings.interpolation, fill))))
    if any(settings.jitter_ranges):
        *spans, hue = settings.jitter_ranges
        factors = ((1 - span, 1 + span) for span in spans)
        steps.append(A.ColorJitter(*factors, hue=(-hue, hue), p=1.0))
    return A.Compose(steps)


def _resized_crop(settings: Augmentation, size: tuple[int, int], flag: int) -> A.RandomResizedCrop:
    return A.RandomResizedCrop(
        size=size,
        scale=settings.scale,
        ratio=settings.crop_ratio(size),
        interpolation=flag,
        mask_interpolation=cv2.INTER_NEAREST_EXACT,
        area_for_downscale="image",  # OpenCV's cubic interpolation aliases when it shrinks images
        p=1.0,
    )


def _one_of(steps: list[A.BasicTransform]) -> A.BasicTransform | A.OneOf:
    """Return a transform that applies one of `steps`, chosen at random for every image; a single step is returned itself."""
    return steps[0] if len(steps) == 1 else A.OneOf(steps, p=1.0)


class _RandomScale(A.DualTransform):
    """Resizes image and mask by a random multiple, uniform in `factor`, of the scale at which they just cover `size` (H, W).

    `flag` is OpenCV's interpolation of enlarged images; shrunken ones take INTER_AREA, masks the nearest pixel.
    """

    _targets = (A.core.type_definitions.Targets.IMAGE, A.core.type_definitions.Targets.MASK)

    def __init__(self, factor: tuple[float, float], size: tuple[int, int], flag: int) -> None:
        super().__init__(p=1.0)
        self.factor, self.size, self.flag = factor, size, flag

    def get_params_dependent_on_data(self, params: dict[str, Any], data: dict[str, Any]) -> dict[str, Any]:
        h, w = params["shape"][:2]
        scale = max(self.size[0] / h, self.size[1] / w) * self.py_random.uniform(*self.factor)
        return {"size": (max(1, round(h * scale)), max(1, round(w * scale)))}

    def apply(self, img: np.ndarray, size: tuple[int, int], **params: Any) -> np.ndarray:
        # OpenCV's cubic interpolation aliases when it shrinks images
        return cv2.resize(img, size[::-1], interpolation=cv2.INTER_AREA if size[0] < img.shape[0] else self.flag)

    def apply_to_mask(self, mask: np.ndarray, size: tuple[int, int], **params: Any) -> np.ndarray:
        return cv2.resize(mask, size[::-1], interpolation=cv2.INTER_NEAREST_EXACT)  # INTER_NEAREST is half a pixel aside


GEOMETRIC = (
    auto_augment.shear_x, auto_augment.shear_y, auto_augment.rotate,
    auto_augment.translate_x_rel, auto_augment.translate_y_rel,
)  # fmt: skip


class Warp:
    """Wraps a Pillow image for timm's geometric operations: it has the attributes they use, and transforms by OpenCV."""

    rotate = Image.Image.rotate  # computes the matrix for `transform`

    def __init__(self, image: Image.Image) -> None:
        self.image, self.size, self.width, self.height = image, image.size, image.width, image.height
        self.copy, self.transpose = image.copy, image.transpose  # for rotations by quarters

    def transform(
        self, size: tuple[int, int], method: Image.Transform, data: Any, resample: int, fillcolor: tuple[int, ...]
    ) -> Image.Image:
        """Return the affinely transformed image, as `PIL.Image.Image.transform` with the method AFFINE does.

        `method` is ignored; `size` is (width, height); `data` has the six numbers of the matrix that maps pixels of the result
        to pixels of the image. A `resample` other than BICUBIC is bilinear.
        """
        matrix = np.array(data, np.float64).reshape(2, 3)
        matrix[:, 2] += matrix[:, :2] @ (0.5, 0.5) - 0.5  # from Pillow's origin, a corner, to OpenCV's, the center of a pixel
        flags = (cv2.INTER_CUBIC if resample == Image.Resampling.BICUBIC else cv2.INTER_LINEAR) | cv2.WARP_INVERSE_MAP
        image = np.asarray(self.image)
        warped = cv2.warpAffine(image, matrix, size, flags=flags, borderMode=cv2.BORDER_CONSTANT, borderValue=fillcolor)
        return Image.fromarray(warped)


def _warping(policy: Callable[[Image.Image], Image.Image]) -> Callable[[Image.Image], Image.Image]:
    """Make the geometric operations of a timm policy use OpenCV (`Warp`), in place; return it. torchvision's stay unchanged."""
    for operation in [] if isinstance(policy, v2.Transform) else operations_of(policy):
        if operation.aug_fn in GEOMETRIC:
            operation.aug_fn = partial(_warp, operation.aug_fn)
    return policy


def _warp(operation: Callable[..., Image.Image], image: Image.Image, *args: Any, **how: Any) -> Image.Image:
    """Return the image after a geometric operation of timm with these arguments, computed by OpenCV (`Warp`)."""
    return operation(Warp(image), *args, **how)


class _Policy(A.ImageOnlyTransform):
    """Applies a policy, a function of a Pillow image, as a transform of albumentations.

    Unlike albumentations' own transforms, it uses the global random generators, which `Augmenter` seeds.
    """

    def __init__(self, transform: Callable[[Image.Image], Image.Image]) -> None:
        super().__init__(p=1.0)
        self.transform = transform

    def apply(self, img: np.ndarray, **params: Any) -> np.ndarray:
        return np.array(self.transform(Image.fromarray(img)))


def policy_transform(
    text: str, interpolation: Interpolation = "bicubic", fill: tuple[int, ...] = (128, 128, 128)
) -> Callable[[Image.Image], Image.Image]:
    """Return the policy of a config string as a function of a Pillow image, which uses the global random generators.

    Args:
        text: a policy as in `Augmentation.policy`, such as "rand-m9-mstd0.5-inc1".
        interpolation: interpolation of geometric operations; "random" chooses one for each operation, for "trivial" each image.
        fill: color, 0 to 255 per channel, of pixels that geometric operations leave without content.

    Raises:
        ValueError: an unknown policy or part.
    """
    kind = text.split("-")[0]
    if kind not in POLICIES:
        raise ValueError(f"unknown augment.policy {text!r}: it begins with one of {', '.join(POLICIES)}")
    if kind == "trivial":
        modes = INTERPOLATIONS.values() if interpolation == "random" else [INTERPOLATIONS[interpolation]]
        return v2.RandomChoice([v2.TrivialAugmentWide(interpolation=mode, fill=list(fill)) for mode in modes])
    settings: dict[str, Any] = {"img_mean": fill} | ({"translate_pct": 0.3} if kind == "augmix" else {})
    if interpolation != "random":
        settings["interpolation"] = Image.Resampling[interpolation.upper()]
    try:
        policy = POLICIES[kind](text, settings)
    except AssertionError as error:
        raise ValueError(f"augment.policy {text!r}: {error} of timm's, as rand-m9-mstd0.5-inc1 and augmix-m3-w3") from error
    for operation in operations_of(policy):
        if operation.aug_fn is auto_augment.posterize:
            operation.aug_fn = _posterize
    return policy


def operations_of(policy: Any) -> list[auto_augment.AugmentOp]:
    """Return the operations of a policy of timm, those of all its sub-policies in one list."""
    return policy.ops if hasattr(policy, "ops") else [operation for group in policy.policy for operation in group]


def _posterize(image: Image.Image, bits: int, **options: Any) -> Image.Image:
    """Posterize as timm does, but return a black image for 0 bits, for which Pillow raises ValueError since version 13."""
    return auto_augment.posterize(image, bits, **options) if bits > 0 else Image.new(image.mode, image.size)
