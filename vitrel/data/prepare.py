"""Preprocessing of decoded images for evaluation: resize and crop by timm's transforms, and normalization."""

from collections.abc import Callable
from functools import lru_cache
from typing import cast

import numpy as np
import torch
from PIL import Image
from timm.data import create_transform
from timm.data.transforms import center_crop_or_pad
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import center_crop

INTERPOLATIONS = {"bicubic": InterpolationMode.BICUBIC, "bilinear": InterpolationMode.BILINEAR}
Picture = Image.Image | Tensor  # an image of mode RGB, or uint8 [3, h, w]
CROP_MODES = ("center", "squash", "border")


def as_tensor(image: Picture) -> Tensor:
    """Return a Pillow image of mode RGB as a uint8 tensor [3, h, w]; a tensor is returned itself."""
    return image if isinstance(image, Tensor) else torch.from_numpy(np.array(image)).permute(2, 0, 1)


def as_array(image: Picture) -> np.ndarray:
    """Return a Pillow image of mode RGB, or a uint8 tensor [3, h, w], as a uint8 array [h, w, 3]."""
    return image.permute(1, 2, 0).contiguous().numpy() if isinstance(image, Tensor) else np.array(image)


def normalize(images: Tensor, mean: Tensor | tuple[float, ...], std: Tensor | tuple[float, ...]) -> Tensor:
    """Return (images / 255 - mean) / std, float32 [..., 3, h, w], of uint8 images [..., 3, h, w] on any device.

    Args:
        images: uint8 images.
        mean, std: per channel, of values from 0 to 1; tensors are on the device of the images.
    """
    shift, scale = (torch.as_tensor(v, dtype=torch.float32, device=images.device)[:, None, None] for v in (mean, std))
    # Pillow's images have the channels of a pixel side by side, in which order these operations take twice as long
    planes = images.to(torch.float32, memory_format=torch.contiguous_format)
    return planes.div_(255).sub_(shift).div_(scale)


class Prepare:
    """Evaluation preprocessing of an image: antialiased resize, center crop or padding to H×W pixels, normalization.

    An image, Pillow's of mode RGB or uint8 [3, h, w], is resized by timm's transforms, on Pillow images. The view is the center
    of the resized image, h×w pixels. `crop_mode`, as in timm's `pretrained_cfg`, says how the image is resized for the sides
    h / crop_pct and w / crop_pct:

    - "center": it keeps its aspect ratio and just covers them;
    - "squash": it gets exactly these sides, whatever its aspect ratio;
    - "border": it keeps its aspect ratio and just fits into them; the rest of the view has the mean color.

    With a crop_pct of 1, "squash" and "border" show the whole image. `protocol` says what the view is:

    - "scale": the view is H×W, so every square size shows the same content;
    - "canvas": the view has the training size, `base_size`, so objects have as many pixels as at that size. A smaller H×W shows
      the middle of the view. A larger one shows the resized image beyond the view (with "center" what the crop would remove,
      with the other modes little or nothing), and the mean color where that ends;
    - "native": the whole image is resized to H×W, which the caller computes with `vitrel.common.sizes.native_size`; crop_mode
      and crop_pct are not used.

    Args:
        size: (H, W) of the result in pixels.
        mean: per channel, of values from 0 to 1.
        std: per channel, as `mean`; None leaves the images uint8, for `normalize` where the model runs.
        crop_pct: share of the resized image's sides that the view keeps. Above 1, as in a few models of timm, the view is
            larger than the image, and black around it ("border": the mean color).
        interpolation: "bicubic" or "bilinear".
        protocol: "scale", "canvas" or "native".
        base_size: (H, W) of training in pixels; "canvas" needs it.
        crop_mode: "center", "squash" or "border".

    Raises:
        ValueError: an unknown interpolation, protocol or crop_mode, a crop_pct not above 0, or `canvas` without base_size or
            std.
    """

    def __init__(
        self,
        size: tuple[int, int],
        mean: tuple[float, ...],
        std: tuple[float, ...] | None,
        crop_pct: float = 1.0,
        interpolation: str = "bicubic",
        protocol: str = "scale",
        base_size: tuple[int, int] | None = None,
        crop_mode: str = "center",
    ) -> None:
        known = {"interpolation": INTERPOLATIONS, "protocol": ("scale", "canvas", "native"), "crop_mode": CROP_MODES}
        for (name, values), value in zip(known.items(), (interpolation, protocol, crop_mode), strict=True):
            if value not in values:
                raise ValueError(f"unknown {name} {value!r}; use one of {', '.join(values)}")
        if not crop_pct > 0:
            raise ValueError(f"crop_pct must be above 0 (share of the resized image's sides that is kept), not {crop_pct}")
        if protocol == "canvas" and base_size is None:
            raise ValueError("the canvas protocol needs the training size: give base_size=(H, W) of training")
        if protocol == "canvas" and std is None:
            raise ValueError("the canvas protocol fills images with the mean color after they are normalized: give std")
        self.size, self.mean, self.std = (size[0], size[1]), mean, std
        self.crop_pct, self.interpolation, self.crop_mode = crop_pct, interpolation, crop_mode
        self.protocol, self.base_size = protocol, base_size
        view = base_size if protocol == "canvas" and base_size is not None else size
        self.view = view[0], view[1]

    def at(self, size: tuple[int, int]) -> "Prepare":
        """Return a `Prepare` of the same settings for another size (H, W) of the result."""
        resizing = self.crop_pct, self.interpolation, self.protocol, self.base_size, self.crop_mode
        return Prepare(size, self.mean, self.std, *resizing)

    def __call__(self, image: Picture) -> Tensor:
        """Return the normalized float32 [3, H, W] of an image, or uint8 where std is None."""
        image = as_tensor(self.cropped(image))
        if self.std is None:
            return image
        image = normalize(image, self.mean, self.std)
        # pads with 0, the mean color after normalization
        return image if image.shape[1:] == self.size else center_crop(image, list(self.size))

    def resized(self, image: Picture) -> Image.Image:
        """Return the image after the resize alone, before any padding or crop; with protocol "native" it has H×W pixels."""
        how = ("squash", 1.0) if self.protocol == "native" else (self.crop_mode, self.crop_pct)
        picture = Image.fromarray(as_array(image)) if isinstance(image, Tensor) else image
        return _resize(self.view, *how, self.interpolation)(picture)

    def cropped(self, image: Picture) -> Image.Image:
        """Return an image resized, padded to at least the view and center-cropped to H×W, as a Pillow image.

        The view is `base_size` with the protocol "canvas", otherwise H×W. The padding is black, or the mean color with
        crop_mode "border". With "canvas" the result is smaller than H×W where the padded image is smaller.
        """
        resized = self.resized(image)
        if resized.width < self.view[1] or resized.height < self.view[0]:
            fill = [round(255 * value) if self.crop_mode == "border" else 0 for value in self.mean]
            resized = cast(Image.Image, center_crop_or_pad(resized, _sides(max, resized.size[::-1], self.view), fill))
        return cast(Image.Image, center_crop_or_pad(resized, _sides(min, resized.size[::-1], self.size)))


@lru_cache(1024)  # at native shape every image has a view of its own
def _resize(view: tuple[int, int], crop_mode: str, crop_pct: float, interpolation: str) -> Callable[[Image.Image], Image.Image]:
    """Return the resize step alone of timm's evaluation transform for images of `view` (h, w) pixels; cached."""
    return create_transform(view, crop_pct=crop_pct, crop_mode=crop_mode, interpolation=interpolation).transforms[0]


def _sides(choose: Callable[..., int], one: tuple[int, ...], other: tuple[int, ...]) -> list[int]:
    """Return [height, width], each the smaller or larger one (`choose`: min or max) of two sizes (h, w)."""
    return [choose(pair) for pair in zip(one, other, strict=True)]
