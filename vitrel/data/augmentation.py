"""Settings of training augmentation, and the policies of timm and torchvision by timm's config strings."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from PIL import Image
from timm.data.auto_augment import (
    AugmentOp,
    augment_and_mix_transform,
    auto_augment_transform,
    posterize,
    rand_augment_transform,
)
from torchvision.transforms import v2

from vitrel.common.names import nearest
from vitrel.data.prepare import INTERPOLATIONS

Crop = Literal["random_resized", "random_scale", "simple", "center"]
Interpolation = Literal["bicubic", "bilinear", "random"]
EraseMode = Literal["const", "rand", "pixel"]

_STD = r"mstd\d+(\.\d+)?"
POLICIES: dict[str, tuple[Callable[..., Any], str, str]] = {  # transform, an example, and a pattern of the parts of its string
    "rand": (
        rand_augment_transform,
        "rand-m9-mstd0.5-inc1",
        rf"m\d+|n[1-9]\d*|p(0(\.\d+)?|1(\.0+)?)|{_STD}|mmax\d+|inc[01]|t(weights|3aw?)",
    ),
    "augmix": (  # with an alpha below 0.5, Dirichlet weights of exactly 0 and 1 end in a division by zero
        augment_and_mix_transform,
        "augmix-m3-w3",
        rf"m\d+|[wd][1-9]\d*|a(0?\.[5-9]\d*|[1-9]\d?(\.\d+)?|100)|b[01]|{_STD}",
    ),
    **{name: (auto_augment_transform, name, _STD) for name in ("original", "originalr", "v0", "v0r", "3a")},
    "trivial": (v2.TrivialAugmentWide, "trivial", "$."),  # no parts
}


@dataclass
class Augmentation:
    """Augmentation of training images, applied in this order: crop, flips, policy, color jitter, gray, blur, erasing.

    In segmentation, crop and flips move image and mask alike. It takes the crops "random_scale" and "random_resized", no
    erasing, and of the policies "3a", which moves nothing.

    Args:
        scale: [minimum, maximum] area of the random-resized crop, as a share of the image's area.
        ratio: [minimum, maximum] of the random-resized crop's aspect ratio (width / height), relative to that of the target
            size.
        flip: mirror left and right with probability one half; switch it off if labels depend on left and right.
        jitter: strength of brightness, contrast and saturation jitter, 0 for none; hue jitter has a quarter of it. Or
            [brightness, contrast, saturation] or [brightness, contrast, saturation, hue], hue at most 0.5. null: 0.3, but 0
            with a policy other than "3a", as in timm.
        erase: probability of random erasing (timm's) of rectangles with 2-33 % of the area in total. The training module
            erases in normalized batches, on the device.
        policy: one of timm's config strings, "rand-m9-mstd0.5-inc1" (RandAugment), "augmix-m3-w3" (AugMix), "original" or "v0"
            (AutoAugment), "3a" (3-Augment: gray, solarized or blurred); or "trivial" (TrivialAugment); or null.
        vflip: mirror top and bottom with probability one half.
        crop: "random_resized"; "random_scale" (usual in segmentation: resize the image to a random multiple of the size at
            which it just covers the target, and crop at a random position; what stays empty has the mean color and no class);
            "simple" (DeiT III: resize the image to just cover the target size, pad by 4 reflected pixels, crop at a random
            position); "center" (resize and crop as in evaluation, with the model's crop_pct and crop_mode, for fine-tuning at
            the test size). null: "random_resized", in segmentation "random_scale".
        factor: [minimum, maximum] of the multiple of "random_scale".
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
    crop: Crop | None = None
    factor: tuple[float, float] = (0.5, 2.0)
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
        if not 0 < self.factor[0] <= self.factor[1]:
            raise ValueError(f"augment.factor must be a range of factors, 0 < low <= high, not {self.factor}")
        for name, choices in (("crop", Crop), ("interpolation", Interpolation), ("erase_mode", EraseMode)):
            if (value := getattr(self, name)) not in (*get_args(choices), None):
                raise ValueError(f"unknown augment.{name} {value!r}; use one of {', '.join(get_args(choices))}")
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
            policy_transform(self.policy, self.interpolation)

    def for_masks(self) -> "Augmentation":
        """Return the settings for images with masks; ValueError where they would move or erase an image and not its mask."""
        if self.policy not in (None, "3a") or self.erase or self.crop not in (None, "random_scale", "random_resized"):
            raise ValueError(
                "segmentation moves image and mask alike, unlike a policy other than 3a, erasing, and the crops simple and "
                f"center: leave out augment.policy ({self.policy}), augment.erase ({self.erase}) or augment.crop ({self.crop})"
            )
        return replace(self, crop=self.crop or "random_scale")

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


def policy_transform(
    text: str, interpolation: Interpolation = "bicubic", fill: tuple[int, ...] = (128, 128, 128)
) -> Callable[[Image.Image], Image.Image]:
    """Return the policy of a config string as a function of a Pillow image; it uses the global generators.

    Args:
        text: as `Augmentation.policy`.
        interpolation: interpolation of geometric operations.
        fill: color, 0 to 255 per channel, of pixels that geometric operations leave without content.

    Raises:
        ValueError: an unknown policy or part, or a value out of range.
    """
    kind, *parts = str(text).split("-")
    if kind not in POLICIES:
        near = nearest(kind, POLICIES, 2, 0.3) or POLICIES
        raise ValueError(f"unknown augment.policy {text!r}; nearest: {', '.join(POLICIES[name][1] for name in near)}")
    build, example, pattern = POLICIES[kind]
    for part in parts:
        if not re.fullmatch(pattern, part):
            raise ValueError(
                f"augment.policy {text!r}: {part!r} is no part of {kind}, or out of range; the parts are those of timm, as in "
                f"{example!r}"
            )
    numbers = {name: int(value) for name, value in re.findall(r"-(m|mmax)(\d+)", text)}
    if numbers.get("m", 0) > (maximum := numbers.get("mmax", 10)):
        raise ValueError(f"augment.policy {text!r} is out of range: m must be within 0..{maximum} (mmax)")
    if kind == "trivial":
        modes = INTERPOLATIONS.values() if interpolation == "random" else [INTERPOLATIONS[interpolation]]
        return v2.RandomChoice([build(interpolation=mode, fill=list(fill)) for mode in modes])
    settings: dict[str, Any] = {"img_mean": fill} | ({"translate_pct": 0.3} if kind == "augmix" else {})
    if interpolation != "random":
        settings["interpolation"] = Image.Resampling[interpolation.upper()]
    policy = build(text, settings)
    operations = operations_of(policy)
    if getattr(policy, "choice_weights", None) is not None and policy.num_layers > len(operations):
        raise ValueError(
            f"augment.policy {text!r} is out of range: n must be at most {len(operations)}, because weighted operations are "
            "drawn without repetition"
        )
    for operation in operations:
        if operation.aug_fn is posterize:
            operation.aug_fn = _posterize
    return policy


def operations_of(policy: Any) -> list[AugmentOp]:
    """Return the operations of one of timm's policies."""
    return policy.ops if hasattr(policy, "ops") else [operation for group in policy.policy for operation in group]


def _posterize(image: Image.Image, bits: int, **options: Any) -> Image.Image:
    """timm's posterize, black where it keeps no bit: Pillow returns that before version 13 and raises ValueError since."""
    return posterize(image, bits, **options) if bits > 0 else Image.new(image.mode, image.size)
