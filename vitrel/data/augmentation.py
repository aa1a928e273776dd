"""Settings of training augmentation."""

from dataclasses import dataclass
from typing import Literal, get_args

from vitrel.data.rand_augment import Policy, parse_policy
from vitrel.names import nearest

Library = Literal["albumentations", "torchvision", "timm"]
Crop = Literal["random_resized", "simple", "center"]
Interpolation = Literal["bicubic", "bilinear", "random"]
EraseMode = Literal["const", "rand", "pixel"]


@dataclass
class Augmentation:
    """Augmentation of training images, applied in this order: crop, flips, policy, colour jitter, grey, blur, erasing.

    Args:
        scale: [minimum, maximum] area of the random-resized crop, as a share of the image's area.
        ratio: [minimum, maximum] of the random-resized crop's aspect ratio (width / height), relative to that of the target
            size.
        flip: mirror left and right with probability one half; switch it off if labels depend on left and right.
        jitter: strength of brightness, contrast and saturation jitter, 0 for none; hue jitter has a quarter of it. Or
            [brightness, contrast, saturation] or [brightness, contrast, saturation, hue], hue at most 0.5. null: 0.3, but 0
            with a policy other than "3a", as in timm.
        erase: probability of random erasing (timm's, after normalisation) of rectangles with 2-33 % of the area in total.
        library: library that computes the augmentation: "albumentations", "torchvision" or "timm". The settings have the same
            meaning in all three; the pixels differ slightly.
        policy: "rand-m9-mstd0.5-inc1" (RandAugment) or "augmix-m3-w3" (AugMix), both in timm's notation, "3a" (3-Augment: grey,
            solarised or blurred), "trivial" (TrivialAugment, torchvision only) or null.
        vflip: mirror top and bottom with probability one half.
        crop: "random_resized"; "simple" (DeiT III: resize the image to just cover the target size, pad by 4 reflected pixels,
            crop at a random position); "center" (the crop of evaluation, for fine-tuning at the test size).
        interpolation: interpolation of resizing, and of the policy's geometric operations if the library supports it:
            "bicubic", "bilinear", or "random" to choose one at random.
        jitter_prob, gray_prob, blur_prob: probabilities of colour jitter, conversion to grey, and Gaussian blur (standard
            deviation 0.1 to 2 pixels).
        erase_mode: fill erased rectangles with the mean colour ("const"), one random colour ("rand") or random pixels
            ("pixel").
        erase_count: maximum number of erased rectangles.

    Raises:
        ValueError: values out of range, an unknown policy, or a policy that the library does not have.
    """

    scale: tuple[float, float] = (0.35, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True
    jitter: float | tuple[float, ...] | None = None
    erase: float = 0.0
    library: Library = "albumentations"
    policy: str | None = None
    vflip: bool = False
    crop: Crop = "random_resized"
    interpolation: Interpolation = "bicubic"
    jitter_prob: float = 1.0
    gray_prob: float = 0.0
    blur_prob: float = 0.0
    erase_mode: EraseMode = "const"
    erase_count: int = 1

    def __post_init__(self) -> None:
        low, high = self.scale
        if not 0 < low <= high <= 1:
            raise ValueError(f"augment.scale must be a range of area shares, 0 < low <= high <= 1, not {self.scale}")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(f"augment.ratio must be a range of width / height, 0 < low <= high, not {self.ratio}")
        choices = (("library", Library), ("crop", Crop), ("interpolation", Interpolation), ("erase_mode", EraseMode))
        for name, values in choices:
            _check_choice(name, getattr(self, name), get_args(values))
        for name in ("erase", "jitter_prob", "gray_prob", "blur_prob"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"augment.{name} must be a probability, 0 to 1, not {getattr(self, name)}")
        if self.erase_count < 1:
            raise ValueError(
                f"augment.erase_count must be at least 1, not {self.erase_count}; to erase nothing, set augment.erase: 0"
            )
        *spans, hue = self.jitter_ranges
        if not all(0 <= span <= 1 for span in spans) or not 0 <= hue <= 0.5:
            raise ValueError(f"augment.jitter must be between 0 and 1, its hue between 0 and 0.5, not {self.jitter}")
        if self.policy is not None:
            _check_policy(self.policy, parse_policy(self.policy), self.library)

    @property
    def jitter_ranges(self) -> tuple[float, float, float, float]:
        """Strengths of brightness, contrast, saturation and hue jitter."""
        jitter = self.jitter
        if jitter is None:
            jitter = 0.3 if self.policy in (None, "3a") else 0.0
        if isinstance(jitter, int | float):
            return jitter, jitter, jitter, jitter / 4
        if len(jitter) not in (3, 4):
            raise ValueError(f"augment.jitter must be a number or [brightness, contrast, saturation(, hue)], not {jitter}")
        brightness, contrast, saturation, hue = (*jitter, 0.0)[:4]
        return brightness, contrast, saturation, hue

    def crop_ratio(self, size: tuple[int, int]) -> tuple[float, float]:
        """Return the range of the crop's width / height for a target size (H, W)."""
        aspect = size[1] / size[0]
        return self.ratio[0] * aspect, self.ratio[1] * aspect


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        near = nearest(str(value), choices, 1, 0.3)
        hint = f"nearest: {near[0]}" if near else f"use one of {', '.join(choices)}"
        raise ValueError(f"unknown augment.{name} {value!r}; {hint}")


def _check_policy(text: str, policy: Policy, library: str) -> None:
    if policy.kind == "trivial" and library != "torchvision":
        raise ValueError(f"{library} has no TrivialAugment: set augment.library to torchvision or use 'rand-m9-mstd0.5-inc1'")
    if library != "torchvision":
        return
    if policy.kind == "rand" and not policy.increasing:
        raise ValueError(
            f"augment.policy {text!r}: torchvision's operations all become stronger with the magnitude: add '-inc1', or set "
            "augment.library to albumentations or timm"
        )
    if policy.maximum > 10 or (policy.kind == "augmix" and policy.std != float("inf")):
        part = "mmax above 10" if policy.maximum > 10 else "mstd in AugMix"
        raise ValueError(f"augment.policy {text!r}: torchvision has no {part}: leave it out, or use albumentations or timm")
    if policy.kind == "augmix" and not 1 <= policy.magnitude <= 10:
        raise ValueError(f"augment.policy {text!r}: torchvision's AugMix takes m1 to m10, or use albumentations or timm")
