"""The settings of training augmentation: what is drawn for each image."""

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
    """What is drawn for each training image, in this order: crop, flips, policy, colour jitter, grey, blur, erasing.

    Args:
        scale: range of the crop's share of the image area; of the random-resized crop.
        ratio: range of that crop's width / height, times that of the target size.
        flip: mirror left and right with probability one half; off where labels tell left from right.
        jitter: strength of brightness, contrast and saturation jitter, 0 for none; hue gets a quarter of it. Or
            [brightness, contrast, saturation] or [brightness, contrast, saturation, hue], hue at most 0.5. null: 0.3, and none
            beside a policy other than "3a", as in timm.
        erase: probability of erasing rectangles (2-33 % of the area together), by timm, after normalisation.
        library: what draws; the same settings mean the same in each, its own pixels.
        policy: "rand-m9-mstd0.5-inc1" (RandAugment), "augmix-m3-w3" (AugMix), both in timm's spelling, "3a" (3-Augment: grey,
            solarised or blurred), "trivial" (TrivialAugment, torchvision only) or null.
        vflip: mirror top and bottom with probability one half.
        crop: "random_resized"; "simple" (DeiT III: the image just covers the size, is padded by 4 pixels reflected, and cropped
            anywhere); "center" (the view of evaluation, for tuning at the test size).
        interpolation: of resizing, and of the policy's geometric operations where the library can; "random" draws one.
        jitter_prob, gray_prob, blur_prob: probability of colour jitter, grey and Gaussian blur (deviation 0.1 to 2 pixels).
        erase_mode: fill with the mean colour ("const"), one random colour ("rand") or random pixels ("pixel").
        erase_count: most rectangles at once.

    Raises:
        ValueError: values out of range, an unknown policy, or one that the library does not have.
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
            raise ValueError(f"augment.scale is a range of area shares, 0 < low <= high <= 1, not {self.scale}")
        if not 0 < self.ratio[0] <= self.ratio[1]:
            raise ValueError(f"augment.ratio is a range of width / height, 0 < low <= high, not {self.ratio}")
        for name, known in (("library", Library), ("crop", Crop), ("interpolation", Interpolation), ("erase_mode", EraseMode)):
            _check_choice(name, getattr(self, name), get_args(known))
        for name in ("erase", "jitter_prob", "gray_prob", "blur_prob"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"augment.{name} is a probability, 0 to 1, not {getattr(self, name)}")
        if self.erase_count < 1:
            raise ValueError(f"augment.erase_count is at least 1, not {self.erase_count}; augment.erase: 0 erases nothing")
        *spans, hue = self.jitter_ranges
        if not all(0 <= span <= 1 for span in spans) or not 0 <= hue <= 0.5:
            raise ValueError(f"augment.jitter lies between 0 and 1, its hue between 0 and 0.5, not {self.jitter}")
        if self.policy is not None:
            _check_policy(self.policy, parse_policy(self.policy), self.library)

    @property
    def jitter_ranges(self) -> tuple[float, float, float, float]:
        """Strength of brightness, contrast, saturation and hue jitter."""
        jitter = self.jitter
        if jitter is None:
            jitter = 0.3 if self.policy in (None, "3a") else 0.0
        if isinstance(jitter, int | float):
            return jitter, jitter, jitter, jitter / 4
        if len(jitter) not in (3, 4):
            raise ValueError(f"augment.jitter is one number or [brightness, contrast, saturation(, hue)], not {jitter}")
        brightness, contrast, saturation, hue = (*jitter, 0.0)[:4]
        return brightness, contrast, saturation, hue

    def crop_ratio(self, size: tuple[int, int]) -> tuple[float, float]:
        """Range of the crop's width / height for a target (H, W)."""
        aspect = size[1] / size[0]
        return self.ratio[0] * aspect, self.ratio[1] * aspect


def _check_choice(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        near = nearest(str(value), known, 1, 0.3)
        hint = f"nearest: {near[0]}" if near else f"use one of {', '.join(known)}"
        raise ValueError(f"unknown augment.{name} {value!r}; {hint}")


def _check_policy(text: str, policy: Policy, library: str) -> None:
    if policy.kind == "trivial" and library != "torchvision":
        raise ValueError(f"{library} has no TrivialAugment: set augment.library to torchvision or use 'rand-m9-mstd0.5-inc1'")
    if library != "torchvision":
        return
    if policy.kind == "rand" and not policy.increasing:
        raise ValueError(
            f"augment.policy {text!r}: torchvision's operations all do more as the magnitude rises: add '-inc1', "
            "or set augment.library to albumentations or timm"
        )
    if policy.maximum > 10 or (policy.kind == "augmix" and policy.std != float("inf")):
        part = "mmax above 10" if policy.maximum > 10 else "mstd in AugMix"
        raise ValueError(f"augment.policy {text!r}: torchvision has no {part}: leave it out, or use albumentations or timm")
    if policy.kind == "augmix" and not 1 <= policy.magnitude <= 10:
        raise ValueError(f"augment.policy {text!r}: torchvision's AugMix takes m1 to m10, or use albumentations or timm")
