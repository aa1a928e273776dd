"""Settings of training augmentation, and its policies, parsed from timm's config strings.

RandAugment (arXiv 1909.13719), AugMix (arXiv 1912.02781), 3-Augment of DeiT III (arXiv 2204.07118), TrivialAugment
(arXiv 2103.10158). Magnitudes range from 0 to 10, with the meaning of timm's (`timm.data.auto_augment`).
"""

import math
import random
import re
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Literal, get_args

from vitrel.common.names import nearest

Crop = Literal["random_resized", "simple", "center"]
Interpolation = Literal["bicubic", "bilinear", "random"]
EraseMode = Literal["const", "rand", "pixel"]

EXAMPLES = {"rand": "rand-m9-mstd0.5-inc1", "augmix": "augmix-m3-w3", "3a": "3a", "trivial": "trivial"}
FIELDS = {
    "rand": {"m": "magnitude", "n": "layers", "p": "prob", "mstd": "std", "mmax": "maximum", "inc": "increasing"},
    "augmix": {"m": "magnitude", "w": "width", "d": "depth", "a": "alpha", "mstd": "std"},
    "3a": {},
    "trivial": {},
}
DEFAULTS = {"augmix": {"magnitude": 3, "std": math.inf}, "trivial": {"std": math.inf, "layers": 1, "prob": 1.0}}
WHOLE = ("magnitude", "layers", "maximum", "width", "depth", "increasing")


@dataclass
class Augmentation:
    """Augmentation of training images, applied in this order: crop, flips, policy, color jitter, gray, blur, erasing.

    Args:
        scale: [minimum, maximum] area of the random-resized crop, as a share of the image's area.
        ratio: [minimum, maximum] of the random-resized crop's aspect ratio (width / height), relative to that of the target
            size.
        flip: mirror left and right with probability one half; switch it off if labels depend on left and right.
        jitter: strength of brightness, contrast and saturation jitter, 0 for none; hue jitter has a quarter of it. Or
            [brightness, contrast, saturation] or [brightness, contrast, saturation, hue], hue at most 0.5. null: 0.3, but 0
            with a policy other than "3a", as in timm.
        erase: probability of random erasing (timm's, after normalization) of rectangles with 2-33 % of the area in total.
        policy: "rand-m9-mstd0.5-inc1" (RandAugment) or "augmix-m3-w3" (AugMix), both in timm's notation, "3a" (3-Augment: gray,
            solarized or blurred), "trivial" (TrivialAugment) or null.
        vflip: mirror top and bottom with probability one half.
        crop: "random_resized"; "simple" (DeiT III: resize the image to just cover the target size, pad by 4 reflected pixels,
            crop at a random position); "center" (resize and crop as in evaluation, with the model's crop_pct and crop_mode, for
            fine-tuning at the test size).
        interpolation: interpolation of resizing and of the policy's geometric operations: "bicubic", "bilinear", or "random"
            to choose one at random.
        jitter_prob, gray_prob, blur_prob: probabilities of color jitter, conversion to gray, and Gaussian blur (standard
            deviation 0.1 to 2 pixels).
        erase_mode: fill erased rectangles with the mean color ("const"), one random color ("rand") or random pixels
            ("pixel").
        erase_count: maximum number of erased rectangles.

    Raises:
        ValueError: values out of range, or an unknown policy.
    """

    scale: tuple[float, float] = (0.35, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)
    flip: bool = True
    jitter: float | tuple[float, ...] | None = None
    erase: float = 0.0
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
        choices = (("crop", Crop), ("interpolation", Interpolation), ("erase_mode", EraseMode))
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
            parse_policy(self.policy)

    @property
    def jitter_ranges(self) -> tuple[float, float, float, float]:
        """Strengths (brightness, contrast, saturation, hue) of color jitter, as torchvision's ColorJitter takes them; 0: none.

        A number for `jitter` is the strength of the first three, and hue has a quarter of it; of three numbers, hue is 0; None
        is 0.3, or 0 with a policy other than "3a". ValueError for a sequence that does not have three or four numbers.
        """
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


@dataclass(frozen=True)
class Policy:
    """A parsed augmentation policy.

    Args:
        kind: "rand", "augmix", "3a" or "trivial".
        magnitude: mean magnitude of the operations, 0 to `maximum`.
        std: standard deviation of a normally distributed magnitude; infinity means uniform from 0 to `magnitude`.
        maximum: maximum magnitude.
        layers: number of operations in sequence (rand, trivial).
        prob: probability of each operation (rand, trivial).
        increasing: use operations that all become stronger with the magnitude (rand).
        width, depth: number of chains, and operations per chain, -1 for a random number from 1 to 3 (augmix).
        alpha: parameter of the Dirichlet and Beta distributions of the mixing weights (augmix).
    """

    kind: Literal["rand", "augmix", "3a", "trivial"]
    magnitude: int = 10
    std: float = 0.0
    maximum: int = 10
    layers: int = 2
    prob: float = 0.5
    increasing: bool = False
    width: int = 3
    depth: int = -1
    alpha: float = 1.0

    def draw(self, rng: random.Random | ModuleType) -> float:
        """Return a random magnitude for one operation, 0 to `maximum`; `rng` is a `random.Random` or the module `random`."""
        magnitude: float = self.magnitude
        if math.isinf(self.std):
            magnitude = rng.uniform(0, magnitude)
        elif self.std:
            magnitude = rng.gauss(magnitude, self.std)
        return max(0.0, min(magnitude, self.maximum))


def parse_policy(text: str) -> Policy:
    """Parse a policy string, e.g. "rand-m9-n2-mstd0.5-inc1", "augmix-m3-w3", "3a" or "trivial".

    Raises:
        ValueError: an unknown policy or part, or a value out of range.
    """
    kind, *parts = str(text).split("-")
    if kind not in EXAMPLES:
        near = nearest(kind, EXAMPLES, 2, 0.3) or EXAMPLES
        raise ValueError(f"unknown augment.policy {text!r}; nearest: {', '.join(EXAMPLES[name] for name in near)}")
    policy = Policy(kind, **DEFAULTS.get(kind, {}))
    values = dict(_value(text, kind, part) for part in parts)
    if kind == "rand" and values.get("std", 0) > 100:
        values["std"] = math.inf
    policy = replace(policy, **values)
    if not (0 <= policy.magnitude <= policy.maximum and policy.layers > 0 and 0 <= policy.prob <= 1 and policy.width > 0):
        raise ValueError(
            f"augment.policy {text!r} is out of range: m must be within 0..{policy.maximum} (mmax), n and w at least 1, "
            "p within 0..1"
        )
    if policy.alpha <= 0 or policy.depth == 0:
        raise ValueError(f"augment.policy {text!r} is out of range: a must be positive, d at least 1")
    return policy


def _value(text: str, kind: str, part: str) -> tuple[str, float]:
    """(field of `Policy`, value) of one part of the policy string `text`, e.g. ("magnitude", 9) of "m9"."""
    match = re.fullmatch(r"([a-z]+)(\d+(?:\.\d+)?)", part)
    field = FIELDS[kind].get(match[1]) if match else None
    if field is None:
        parts = ", ".join(FIELDS[kind]) or "none"
        raise ValueError(
            f"augment.policy {text!r}: {kind} has no part {part!r}; its parts: {parts}, each with a number, "
            f"as in {EXAMPLES[kind]!r}"
        )
    if field not in WHOLE:
        return field, float(match[2])
    if "." in match[2]:
        raise ValueError(f"augment.policy {text!r}: {match[1]} must be a whole number, not {match[2]}")
    return field, bool(int(match[2])) if field == "increasing" else int(match[2])
