"""Preprocessing of decoded images for evaluation: resize, crop, normalisation."""

from math import floor

import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import center_crop, resize

INTERPOLATIONS = {"bicubic": InterpolationMode.BICUBIC, "bilinear": InterpolationMode.BILINEAR}


def normalise(image: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Return (image / 255 - mean) / std, float32 [3, h, w], of a uint8 image [3, h, w]."""
    shift, scale = (torch.tensor(v, dtype=torch.float32)[:, None, None] for v in (mean, std))
    return image.float().div_(255).sub_(shift).div_(scale)


class Prepare:
    """Evaluation preprocessing: antialiased resize, centre crop, normalisation.

    The protocols differ in resizing and cropping. `scale`: the image is resized to just cover size / crop_pct, and its central
    H×W are cropped, which gives the same field of view at every square size. `canvas`: the image is resized as for `base_size`,
    so that objects keep their size in pixels; its central H×W are cropped, and a smaller image is padded with the mean colour.
    `native`: the whole image is resized to H×W, which the caller computes with `vitrel.common.sizes.native_size`.

    Args:
        size: (H, W) of the result, pixels.
        mean, std: per-channel normalisation of values from 0 to 1.
        crop_pct: share of the resized image that the crop keeps, 0 < crop_pct <= 1.
        interpolation: "bicubic" or "bilinear".
        protocol: "scale", "canvas" or "native".
        base_size: (H, W) of training, pixels; required by `canvas`.

    Raises:
        ValueError: an unknown interpolation or protocol, a crop_pct out of range, or `canvas` without base_size.
    """

    def __init__(
        self,
        size: tuple[int, int],
        mean: tuple[float, ...],
        std: tuple[float, ...],
        crop_pct: float = 1.0,
        interpolation: str = "bicubic",
        protocol: str = "scale",
        base_size: tuple[int, int] | None = None,
    ) -> None:
        if interpolation not in INTERPOLATIONS:
            raise ValueError(f"unknown interpolation {interpolation!r}; use one of {', '.join(INTERPOLATIONS)}")
        if protocol not in ("scale", "canvas", "native"):
            raise ValueError(f"unknown protocol {protocol!r}; use 'scale', 'canvas' or 'native'")
        if not 0 < crop_pct <= 1:
            raise ValueError(f"crop_pct must satisfy 0 < crop_pct <= 1 (share of the image that is kept), not {crop_pct}")
        if protocol == "canvas" and base_size is None:
            raise ValueError("the canvas protocol needs the training size: give base_size=(H, W) of training")
        self.size, self.mean, self.std = tuple(size), mean, std
        self.crop_pct, self.protocol, self.base_size = crop_pct, protocol, base_size
        self.interpolation = interpolation
        view = base_size if protocol == "canvas" else size
        self.cover = tuple(floor(side / crop_pct) for side in view)

    def at(self, size: tuple[int, int]) -> "Prepare":
        """Return the same preprocessing for another (H, W)."""
        return Prepare(size, self.mean, self.std, self.crop_pct, self.interpolation, self.protocol, self.base_size)

    def __call__(self, image: Tensor) -> Tensor:
        """Return the normalised float32 [3, H, W] of an image uint8 [3, h, w]."""
        image = resize(image, self.resized(*image.shape[-2:]), INTERPOLATIONS[self.interpolation], antialias=True)
        image = center_crop(image, [min(sides) for sides in zip(image.shape[-2:], self.size, strict=True)])
        image = normalise(image, self.mean, self.std)
        if tuple(image.shape[-2:]) == self.size:
            return image
        return center_crop(image, list(self.size))  # pads with 0, the mean colour after normalisation

    def resized(self, h: int, w: int) -> list[int]:
        """Return the size [h', w'] to which an h×w image is resized before the crop.

        It keeps the aspect ratio and just covers `self.cover`; with the protocol `native` it is `self.size`.
        """
        if self.protocol == "native":
            return list(self.size)
        cover_h, cover_w = self.cover
        if cover_h * w >= cover_w * h:
            return [cover_h, max(cover_w, cover_h * w // h)]
        return [max(cover_h, cover_w * h // w), cover_w]
