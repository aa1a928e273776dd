"""Settings of training augmentation; `vitrel.data.augment` applies them."""

import math
from dataclasses import dataclass, replace
from typing import Literal, get_args

Crop = Literal["random_resized", "random_scale", "simple", "center"]
Interpolation = Literal["bicubic", "bilinear", "random"]
EraseMode = Literal["const", "rand", "pixel"]


@dataclass
class Augmentation:
    """Augmentation of training images, applied in this order: crop, flips, policy, color jitter, erasing.

    In segmentation, the mask is cropped and flipped as its image. Only the crops "random_scale" and "random_resized", no
    erasing, and no policy but "3a", which moves nothing, are then allowed.

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
        erase_mode: fill erased rectangles with the mean color ("const"), one random color ("rand") or random pixels
            ("pixel").

    Raises:
        ValueError: a value out of range. A policy is checked where a data set is made.
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
    erase_mode: EraseMode = "const"

    def __post_init__(self) -> None:
        for name, most in (("scale", 1.0), ("ratio", math.inf), ("factor", math.inf)):
            span = getattr(self, name)
            minimum, maximum = span if len(span) == 2 else (0, 0)
            if not (0 < minimum <= maximum <= most and maximum < math.inf):
                limits = "above 0 and at most 1" if most == 1 else "above 0"
                raise ValueError(f"augment.{name} must be [minimum, maximum], both {limits}, not {list(span)}")
        if not 0 <= self.erase <= 1:
            raise ValueError(f"augment.erase must be a probability, from 0 to 1, not {self.erase}")
        *spans, hue = self.jitter_ranges
        if not (all(0 <= span <= 1 for span in spans) and 0 <= hue <= 0.5):
            raise ValueError(f"augment.jitter must be from 0 to 1, its hue from 0 to 0.5, not {self.jitter}")
        for name, known in (("crop", Crop), ("interpolation", Interpolation), ("erase_mode", EraseMode)):
            if (value := getattr(self, name)) not in get_args(known) and (name, value) != ("crop", None):
                raise ValueError(f"unknown augment.{name} {value!r}; use one of {', '.join(get_args(known))}")

    def for_masks(self) -> "Augmentation":
        """Return a copy for images with masks, whose default crop is "random_scale".

        Raises:
            ValueError: the settings would move or erase an image and not its mask.
        """
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
        """Return (minimum, maximum) of the random-resized crop's width / height for a target size (H, W)."""
        aspect = size[1] / size[0]
        return self.ratio[0] * aspect, self.ratio[1] * aspect


class AugmentationError(ValueError):
    """An operation of the augmentation failed; the text names the operation, and the seed, epoch, image and view."""
