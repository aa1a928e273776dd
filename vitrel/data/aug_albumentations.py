"""Augmentation with albumentations; the only file that imports albumentations and OpenCV.

albumentations has no RandAugment or AugMix: a policy is timm's or torchvision's, as one of its transforms. OpenCV computes
the shears, rotations and translations of timm's, in half the time that Pillow takes; docs/performance.md says how they differ.
"""

import os
import random
from collections.abc import Callable
from functools import partial
from typing import Any

# set before the import, or albumentations would look up its newest version on the network
os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"

import albumentations as A
import cv2
import numpy as np
from PIL import Image
from timm.data import auto_augment
from torchvision.transforms import v2

from vitrel.data.augmentation import Augmentation, operations_of, policy_transform
from vitrel.data.readers.decode import IGNORED

cv2.setNumThreads(0)  # the loader's workers are the parallelism

FLAGS = {
    "bicubic": (cv2.INTER_CUBIC,),
    "bilinear": (cv2.INTER_LINEAR,),
    "random": (cv2.INTER_LINEAR, cv2.INTER_CUBIC),
}


class AlbumentationsPipeline:
    """Augments uint8 [h, w, 3], with a mask uint8 [h, w] or None, to [H, W, 3] and [H, W].

    The steps are crop, flips, policy, color jitter, gray and blur. The crops "simple" and "center" are left to `Augmenter`;
    images must then have the size (H, W).

    Args:
        settings: the augmentation.
        size: (H, W) of the result, pixels.
        mean: color of pixels that crops and the policy leave without content, 0 to 1 per channel.
    """

    def __init__(self, settings: Augmentation, size: tuple[int, int], mean: tuple[float, ...]) -> None:
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
            steps.append(A.ColorJitter(*factors, hue=(-hue, hue), p=settings.jitter_prob))
        if settings.gray_prob:
            steps.append(A.ToGray(p=settings.gray_prob))
        if settings.blur_prob:
            steps.append(A.GaussianBlur(sigma_limit=(0.1, 2.0), p=settings.blur_prob))
        self.steps = A.Compose(steps)

    def __call__(
        self, image: np.ndarray, state: np.random.SeedSequence, mask: np.ndarray | None = None
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the augmented image and mask, with random numbers from `state` only."""
        # set_random_seed would give every transform the same random numbers, so that e.g. only mirrored images would be
        # blurred. One pair of generators shared by all transforms keeps them independent.
        self.steps.set_random_state(np.random.default_rng(state), random.Random(int(state.generate_state(1)[0])))
        result = self.steps(image=image) if mask is None else self.steps(image=image, mask=mask)
        return result["image"], result.get("mask")


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
    return steps[0] if len(steps) == 1 else A.OneOf(steps, p=1.0)


class _RandomScale(A.DualTransform):
    """Resizes to a random multiple of the size at which the image just covers (H, W), for which albumentations has none."""

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
    """An image for timm's geometric operations, with the methods of Pillow's that they call; OpenCV transforms it."""

    rotate = Image.Image.rotate  # computes the matrix for `transform`

    def __init__(self, image: Image.Image) -> None:
        self.image, self.size, self.width, self.height = image, image.size, image.width, image.height
        self.copy, self.transpose = image.copy, image.transpose  # for rotations by quarters

    def transform(
        self, size: tuple[int, int], method: Image.Transform, data: Any, resample: int, fillcolor: tuple[int, ...]
    ) -> Image.Image:
        """Return the image sampled at the places to which a matrix takes the pixels of the result, as Pillow's method does."""
        matrix = np.array(data, np.float64).reshape(2, 3)
        matrix[:, 2] += matrix[:, :2] @ (0.5, 0.5) - 0.5  # from Pillow's origin, a corner, to OpenCV's, the center of a pixel
        flags = (cv2.INTER_CUBIC if resample == Image.Resampling.BICUBIC else cv2.INTER_LINEAR) | cv2.WARP_INVERSE_MAP
        image = np.asarray(self.image)
        warped = cv2.warpAffine(image, matrix, size, flags=flags, borderMode=cv2.BORDER_CONSTANT, borderValue=fillcolor)
        return Image.fromarray(warped)


def _warping(policy: Callable[[Image.Image], Image.Image]) -> Callable[[Image.Image], Image.Image]:
    """Let the geometric operations of timm's policies transform images by OpenCV, in place; torchvision's policy stays."""
    for operation in [] if isinstance(policy, v2.Transform) else operations_of(policy):
        if operation.aug_fn in GEOMETRIC:
            operation.aug_fn = partial(_warp, operation.aug_fn)
    return policy


def _warp(operation: Callable[..., Image.Image], image: Image.Image, *args: Any, **how: Any) -> Image.Image:
    return operation(Warp(image), *args, **how)


class _Policy(A.ImageOnlyTransform):
    """A policy as a transform; unlike albumentations' own, it uses the global generators, which `Augmenter` seeds."""

    def __init__(self, transform: Callable[[Image.Image], Image.Image]) -> None:
        super().__init__(p=1.0)
        self.transform = transform

    def apply(self, img: np.ndarray, **params: Any) -> np.ndarray:
        return np.array(self.transform(Image.fromarray(img)))
