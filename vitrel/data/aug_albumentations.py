"""Augmentation with albumentations; the only file that imports albumentations and OpenCV.

albumentations has no RandAugment, so its operations are implemented here, on uint8 [h, w, 3]. Color operations give the
results of PIL, and so of timm, up to one gray level. Geometric operations differ in rounding, and at the border, which OpenCV
blends with the fill color.
"""

import os
import random
from collections.abc import Callable
from typing import Any

# set before the import, or albumentations would look up its newest version on the network
os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"

import albumentations as A
import cv2
import numpy as np
import torch
from torch import Tensor

from vitrel.data.augmentation import Augmentation, Policy, parse_policy

cv2.setNumThreads(0)  # the loader's workers are the parallelism

FLAGS = {
    "bicubic": (cv2.INTER_CUBIC,),
    "bilinear": (cv2.INTER_LINEAR,),
    "random": (cv2.INTER_LINEAR, cv2.INTER_CUBIC),
}
Level = Callable[[float, int], float]  # (magnitude / 10, sign -1 or 1) to the argument of an operation
SMOOTH = np.array([[1, 1, 1], [1, 5, 1], [1, 1, 1]], np.float32) / 13  # PIL's SMOOTH filter, used by Sharpness


class AlbumentationsPipeline:
    """Augments uint8 [h, w, 3] to uint8 [3, H, W].

    The steps are random-resized crop, flips, policy, color jitter, gray and blur. The other crops and erasing are left to
    `Augmenter`: with `crop` "simple" or "center", images must have the size (H, W).

    Args:
        settings: the augmentation.
        size: (H, W) of the result, pixels.
        mean: color of pixels that the policy's geometric operations leave without content, 0 to 1 per channel.
    """

    def __init__(self, settings: Augmentation, size: tuple[int, int], mean: tuple[float, ...]) -> None:
        fill = tuple(round(255 * m) for m in mean)
        flags = FLAGS[settings.interpolation]
        steps = []
        if settings.crop == "random_resized":
            steps.append(_one_of([_resized_crop(settings, size, flag) for flag in flags]))
        if settings.flip:
            steps.append(A.HorizontalFlip(p=0.5))
        if settings.vflip:
            steps.append(A.VerticalFlip(p=0.5))
        if settings.policy is not None:
            steps.append(_policy_step(parse_policy(settings.policy), fill, flags))
        if any(settings.jitter_ranges):
            *spans, hue = settings.jitter_ranges
            factors = ((1 - span, 1 + span) for span in spans)
            steps.append(A.ColorJitter(*factors, hue=(-hue, hue), p=settings.jitter_prob))
        if settings.gray_prob:
            steps.append(A.ToGray(p=settings.gray_prob))
        if settings.blur_prob:
            steps.append(A.GaussianBlur(sigma_limit=(0.1, 2.0), p=settings.blur_prob))
        self.steps = A.Compose(steps)

    def __call__(self, image: np.ndarray, state: np.random.SeedSequence) -> Tensor:
        """Return the augmented image, with random numbers from `state` only."""
        # set_random_seed would give every transform the same random numbers, so that e.g. only mirrored images would be
        # blurred. One pair of generators shared by all transforms keeps them independent.
        self.steps.set_random_state(np.random.default_rng(state), random.Random(int(state.generate_state(1)[0])))
        array = self.steps(image=image)["image"]  # [H, W, 3]
        return torch.from_numpy(array).permute(2, 0, 1)


def _resized_crop(settings: Augmentation, size: tuple[int, int], flag: int) -> A.RandomResizedCrop:
    return A.RandomResizedCrop(
        size=size,
        scale=settings.scale,
        ratio=settings.crop_ratio(size),
        interpolation=flag,
        area_for_downscale="image",  # OpenCV's cubic interpolation aliases when it shrinks images
        p=1.0,
    )


def _one_of(steps: list[A.BasicTransform]) -> A.BasicTransform | A.OneOf:
    return steps[0] if len(steps) == 1 else A.OneOf(steps, p=1.0)


def _policy_step(policy: Policy, fill: tuple[int, ...], flags: tuple[int, ...]) -> A.BasicTransform | A.OneOf:
    if policy.kind == "3a":
        solarize = A.Solarize(threshold_range=(128 / 255, 128 / 255), p=1.0)
        return _one_of([A.ToGray(p=1.0), solarize, A.GaussianBlur(sigma_limit=(0.1, 2.0), p=1.0)])
    return (_AugMix if policy.kind == "augmix" else _RandAugment)(policy, fill, flags)


class _RandomOperations(A.ImageOnlyTransform):
    """Abstract transform of random RandAugment operations, with the random state of the Compose that contains it."""

    def __init__(self, policy: Policy, color: tuple[int, ...], flags: tuple[int, ...]) -> None:
        super().__init__(p=1.0)
        self.policy, self.color, self.flags = policy, color, flags

    def operation(self, image: np.ndarray) -> np.ndarray:
        rng, levels = self.py_random, levels_of(self.policy)
        name = rng.choice(list(levels))
        argument = levels[name](self.policy.draw(rng) / 10, rng.choice((-1, 1)))
        return operate(name, image, argument, self.color, rng.choice(self.flags))


class _RandAugment(_RandomOperations):
    def apply(self, img: np.ndarray, **params) -> np.ndarray:
        for _ in range(self.policy.layers):
            if self.py_random.random() < self.policy.prob:
                img = self.operation(img)
        return img


class _AugMix(_RandomOperations):
    def apply(self, img: np.ndarray, **params) -> np.ndarray:
        weights = self.random_generator.dirichlet([self.policy.alpha] * self.policy.width)
        share = self.random_generator.beta(self.policy.alpha, self.policy.alpha)  # of the augmented image
        mixed = np.float32(1 - share) * img
        for weight in weights:
            chain = img
            for _ in range(self.policy.depth if self.policy.depth > 0 else self.py_random.randint(1, 3)):
                chain = self.operation(chain)
            mixed += np.float32(share * weight) * chain
        return mixed.clip(0, 255).astype(np.uint8)


def levels_of(policy: Policy) -> dict[str, Level]:
    """Return the operations of a "rand", "augmix" or "trivial" policy: {name: function to the operation's argument}.

    The function takes (magnitude / 10, sign), with a sign of -1 or 1.
    """
    if policy.kind == "rand":
        return RAND_INCREASING if policy.increasing else RAND
    return {"augmix": AUGMIX, "trivial": TRIVIAL}[policy.kind]


def operate(
    name: str, image: np.ndarray, argument: float, fill: tuple[int, ...] = (128, 128, 128), flag: int = cv2.INTER_LINEAR
) -> np.ndarray:
    """Apply one operation of RandAugment.

    Args:
        name: name of the operation, a key of `RAND`.
        image: uint8 [h, w, 3].
        argument: strength: degrees of "Rotate" (counter-clockwise), tangent of a shear (lower rows to the left, right columns
            to the top), share of the side of a translation (to the left, to the top), bits kept by "Posterize", threshold from
            which "Solarize" inverts gray levels, gray levels that "SolarizeAdd" adds to those below 128, factor of
            "Color", "Contrast", "Brightness", "Sharpness" (1 changes nothing); the other operations ignore it.
        fill: color of pixels that a geometric operation leaves without content.
        flag: OpenCV's interpolation flag for geometric operations.

    Returns:
        uint8 [h, w, 3].
    """
    if name in MATRICES:
        matrix = np.array(MATRICES[name](argument, *image.shape[:2]), np.float64)
        border: dict[str, Any] = {"borderMode": cv2.BORDER_CONSTANT, "borderValue": fill}
        return cv2.warpAffine(image, matrix, image.shape[1::-1], flags=flag | cv2.WARP_INVERSE_MAP, **border)
    if name in TABLES:
        return cv2.LUT(image, _gray_levels(TABLES[name](argument)))
    return IMAGES[name](image, argument)


def _rotation(degrees: float, h: int, w: int) -> tuple[tuple[float, ...], ...]:
    cos, sin = np.cos(np.radians(degrees)), np.sin(np.radians(degrees))
    y, x = (h - 1) / 2, (w - 1) / 2
    return (cos, -sin, x - cos * x + sin * y), (sin, cos, y - sin * x - cos * y)


def _gray_levels(table: np.ndarray) -> np.ndarray:
    return table.clip(0, 255).astype(np.uint8)  # truncated as in PIL, not rounded


def _per_channel(image: np.ndarray, tables: list[np.ndarray]) -> np.ndarray:
    return cv2.LUT(image, _gray_levels(np.stack(tables, 1))[None])  # [1, 256, 3]


def _autocontrast(image: np.ndarray, _: float) -> np.ndarray:
    tables = []
    for low, high in zip(image.min((0, 1)).tolist(), image.max((0, 1)).tolist(), strict=True):
        scale, low = (255 / (high - low), low) if high > low else (1.0, 0)
        tables.append(RAMP * scale - low * scale)
    return _per_channel(image, tables)


def _equalize(image: np.ndarray, _: float) -> np.ndarray:
    tables = []
    for channel in range(3):
        counts = np.bincount(image[..., channel].ravel(), minlength=256)
        step = (counts.sum() - counts[counts > 0][-1]) // 255
        tables.append((step // 2 + counts.cumsum() - counts) // step if step else RAMP)
    return _per_channel(image, tables)


def _blend(start: np.ndarray, image: np.ndarray, factor: float) -> np.ndarray:
    return cv2.addWeighted(image, factor, start, 1 - factor, -0.499)  # the offset turns OpenCV's rounding into PIL's truncation


def _blend_table(gray: int, factor: float) -> np.ndarray:
    return gray + np.float32(factor) * (RAMP.astype(np.float32) - gray)  # float32, as in PIL


def _color(image: np.ndarray, factor: float) -> np.ndarray:
    gray = cv2.cvtColor(image, cv2.COLOR_RGB2GRAY)
    return _blend(cv2.cvtColor(gray, cv2.COLOR_GRAY2RGB), image, factor)


def _contrast(image: np.ndarray, factor: float) -> np.ndarray:
    gray = int(cv2.cvtColor(image, cv2.COLOR_RGB2GRAY).mean() + 0.5)
    return cv2.LUT(image, _gray_levels(_blend_table(gray, factor)))


def _sharpness(image: np.ndarray, factor: float) -> np.ndarray:
    smooth = image.copy()  # the border is not filtered, as in PIL
    smooth[1:-1, 1:-1] = cv2.filter2D(image, -1, SMOOTH)[1:-1, 1:-1]
    return _blend(smooth, image, factor)


RAMP = np.arange(256.0)
# (argument, h, w) to the two rows of the affine map from result to image coordinates (x, y); pixel centers are integers
MATRICES = {
    "Rotate": _rotation,
    "ShearX": lambda v, h, w: ((1, v, v / 2), (0, 1, 0)),
    "ShearY": lambda v, h, w: ((1, 0, 0), (v, 1, v / 2)),
    "TranslateX": lambda v, h, w: ((1, 0, v * w), (0, 1, 0)),
    "TranslateY": lambda v, h, w: ((1, 0, 0), (0, 1, v * h)),
}
# argument to a lookup table [256], from gray level to gray level
TABLES = {
    "Invert": lambda v: 255 - RAMP,
    "Posterize": lambda v: RAMP.astype(int) & (256 - (1 << (8 - min(8, max(0, int(v)))))),
    "Solarize": lambda v: np.where(v > RAMP, RAMP, 255 - RAMP),
    "SolarizeAdd": lambda v: np.where(RAMP < 128, RAMP + v, RAMP),
    "Brightness": lambda v: _blend_table(0, v),
}
# operations that depend on the whole image
IMAGES = {
    "AutoContrast": _autocontrast,
    "Equalize": _equalize,
    "Color": _color,
    "Contrast": _contrast,
    "Sharpness": _sharpness,
    "Identity": lambda image, _: image,
}


def _no_argument(x: float, sign: int) -> float:
    return 0.0


def _around_one(x: float, sign: int) -> float:
    return max(0.1, 1 + sign * 0.9 * x)


def _from_a_tenth(x: float, sign: int) -> float:
    return 0.1 + 1.8 * x


# timm's level functions; the arguments are: Rotate, degrees; Posterize, bits kept; Solarize, threshold; SolarizeAdd, gray
# levels added; Color to Sharpness, factor (1 changes nothing); Shear, tangent; Translate, share of the side
RAND_INCREASING: dict[str, Level] = {
    "AutoContrast": _no_argument,
    "Equalize": _no_argument,
    "Invert": _no_argument,
    "Rotate": lambda x, sign: sign * 30 * x,
    "Posterize": lambda x, sign: 4 - int(4 * x),
    "Solarize": lambda x, sign: 256 - min(256, int(256 * x)),
    "SolarizeAdd": lambda x, sign: min(128, int(110 * x)),
    "Color": _around_one,
    "Contrast": _around_one,
    "Brightness": _around_one,
    "Sharpness": _around_one,
    "ShearX": lambda x, sign: sign * 0.3 * x,
    "ShearY": lambda x, sign: sign * 0.3 * x,
    "TranslateX": lambda x, sign: sign * 0.45 * x,
    "TranslateY": lambda x, sign: sign * 0.45 * x,
}
RAND: dict[str, Level] = RAND_INCREASING | {
    "Posterize": lambda x, sign: int(4 * x),
    "Solarize": lambda x, sign: min(256, int(256 * x)),
    **dict.fromkeys(("Color", "Contrast", "Brightness", "Sharpness"), _from_a_tenth),
}
AUGMIX: dict[str, Level] = {
    **{name: level for name, level in RAND_INCREASING.items() if name not in ("Invert", "SolarizeAdd")},
    "TranslateX": lambda x, sign: sign * 0.3 * x,
    "TranslateY": lambda x, sign: sign * 0.3 * x,
}
# the wide ranges of TrivialAugment, as in torchvision; its translations by up to 32 pixels are those of an image of 224
TRIVIAL: dict[str, Level] = {
    "Identity": _no_argument,
    "AutoContrast": _no_argument,
    "Equalize": _no_argument,
    "Rotate": lambda x, sign: sign * 135 * x,
    "Posterize": lambda x, sign: 8 - round(6 * x),
    "Solarize": lambda x, sign: 255 * (1 - x),
    **dict.fromkeys(("Color", "Contrast", "Brightness", "Sharpness"), lambda x, sign: 1 + sign * 0.99 * x),
    **dict.fromkeys(("ShearX", "ShearY"), lambda x, sign: sign * 0.99 * x),
    **dict.fromkeys(("TranslateX", "TranslateY"), lambda x, sign: sign * 32 / 224 * x),
}
