"""Images in class folders, and their preparation for evaluation by torchvision.

Layout: `root/train/<class>/*` and `root/val/<class>/*`; the classes are the sorted folder names. `vitrel.data.scan` says which
files count.
"""

import os
from collections.abc import Callable
from math import floor
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import center_crop, resize

from vitrel.data.base import ImageSet, subset
from vitrel.data.decode import Reading, decode, image_size
from vitrel.data.scan import Scan, class_folders, tell_once
from vitrel.files import shown

Split = Literal["train", "val"]
INTERPOLATIONS = {"bicubic": InterpolationMode.BICUBIC, "bilinear": InterpolationMode.BILINEAR}


def normalise(image: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """uint8 [3, h, w] to (x / 255 - mean) / std, float32 [3, h, w]."""
    middle, spread = (torch.tensor(v, dtype=torch.float32)[:, None, None] for v in (mean, std))
    return image.float().div_(255).sub_(middle).div_(spread)


class Prepare:
    """Evaluation preprocessing: antialiased resize, centre crop, normalisation.

    `scale`: the image is resized until it covers size / crop_pct, then its centre of H×W is kept: the same field of view at
    every square size. `canvas`: the image is resized as it would be for `base_size`, so that objects keep the pixels they have
    there; what of it lies within the centred H×W is kept and the rest is padded with the mean colour. `native`: the whole image
    is resized to H×W, which `vitrel.sizes.native_size` finds for each image.

    Args:
        size: (H, W) of the result, pixels.
        mean, std: per channel, in units of the full range (0 to 1).
        crop_pct: share of the resized image that the crop keeps, 0 < crop_pct <= 1.
        interpolation: "bicubic" or "bilinear".
        protocol: "scale", "canvas" or "native".
        base_size: (H, W) of training, which `canvas` needs.

    Raises:
        ValueError: for an unknown interpolation or protocol, a crop_pct out of range, or `canvas` without base_size.
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
            raise ValueError(f"crop_pct is the share of the image that is kept, 0 < crop_pct <= 1, not {crop_pct}")
        if protocol == "canvas" and base_size is None:
            raise ValueError("the canvas protocol keeps objects at their training size: give base_size=(H, W) of training")
        self.size, self.mean, self.std = tuple(size), mean, std
        self.crop_pct, self.protocol, self.base_size = crop_pct, protocol, base_size
        self.interpolation = interpolation
        view = base_size if protocol == "canvas" else size
        self.cover = tuple(floor(side / crop_pct) for side in view)

    def at(self, size: tuple[int, int]) -> "Prepare":
        """The same preparation for another (H, W)."""
        return Prepare(size, self.mean, self.std, self.crop_pct, self.interpolation, self.protocol, self.base_size)

    def __call__(self, image: Tensor) -> Tensor:
        """uint8 [3, h, w] to normalised float32 [3, H, W]."""
        image = resize(image, self.resized(*image.shape[-2:]), INTERPOLATIONS[self.interpolation], antialias=True)
        image = center_crop(image, [min(have, want) for have, want in zip(image.shape[-2:], self.size, strict=True)])
        image = normalise(image, self.mean, self.std)
        if tuple(image.shape[-2:]) == self.size:
            return image
        return center_crop(image, list(self.size))  # pads with 0, which is the mean colour once normalised

    def resized(self, h: int, w: int) -> list[int]:
        """(h', w') of an h×w image just large enough to cover, its aspect kept; of `native`, the size."""
        if self.protocol == "native":
            return list(self.size)
        tall, wide = self.cover
        if tall * w >= wide * h:
            return [tall, max(wide, tall * w // h)]
        return [max(tall, wide * h // w), wide]


class Folder(ImageSet):
    """One split of an image folder: items are (float32 [3, H, W] normalised, class index).

    Files and links that are left out are told once, in a warning.

    Args:
        root: folder that holds `train/` and `val/`.
        split: "train" or "val".
        prepare: uint8 [3, h, w] to the item's image, when nothing is augmented.
        augment: (uint8 [3, h, w], epoch, index, repeat, size) to the item's image; takes the place of `prepare`.
        n: take only n images, drawn by `seed`; all by default.
        seed: of that draw.
        reading: decoder, pixel limit, what happens to unreadable images, and whether links to folders are followed.

    Raises:
        ValueError: where the folders are missing, empty or cannot be read, or the classes of `val/` are not those of `train/`.
    """

    def __init__(
        self,
        root: str | Path,
        split: Split,
        prepare: Callable[[Tensor], Tensor],
        augment: Callable[..., Tensor] | None = None,
        n: int | None = None,
        seed: int = 0,
        reading: Reading = Reading(),
    ) -> None:
        classes = folder_classes(root, split)
        folder = Path(root) / split
        found = Scan(folder, classes, reading.follow_links)
        if found.left_out:
            tell_once(found.left_out)
        self.samples = [found.samples[i] for i in subset(len(found.samples), n, seed, str(folder))]
        super().__init__(classes, len(self.samples), prepare, augment, reading)
        self.folder = folder

    def read(self, index: int) -> tuple[Tensor, int]:
        """(uint8 [3, h, w], label) of an image; `BadImage` where it cannot be decoded."""
        path, label = self.samples[index]
        return decode(path, self.reading.max_pixels, self.reading.decoder), label

    def image_size(self, index: int) -> tuple[int, int]:
        """(height, width) of an image in its file, pixels, without decoding it; `BadImage` where its header cannot be read."""
        return image_size(self.samples[index][0], self.reading.max_pixels)

    def label(self, index: int) -> int:
        """The label of an image, without decoding it."""
        return self.samples[index][1]

    def name(self, index: int) -> str:
        """The path of an image, as text: bytes that are no UTF-8 are escaped."""
        return shown(self.samples[index][0])

    def contents(self) -> list[str]:
        """Of each image in order its path below the split's folder, a tab and its label."""
        return [f"{below(path, self.folder)}\t{label}" for path, label in self.samples]


def below(path: str | Path, folder: str | Path) -> str:
    """The path from `folder` on; whole where it does not lie in it."""
    return str(path).removeprefix(f"{folder}{os.sep}")  # os.path.relpath takes seconds for a million


def folder_classes(root: str | Path, split: Split = "train") -> list[str]:
    """Sorted class names of a split; ValueError where `class_folders` raises it, or `val/` and `train/` disagree."""
    root = Path(root)
    names = {part: class_folders(root / part) for part in ("train", "val") if (root / part).is_dir()}
    if not names.get(split):
        raise ValueError(
            f"no class folders in {root / split}: data is 'shapes' or a folder laid out as "
            f"{root}/train/<class>/*.jpg and {root}/val/<class>/*.jpg, a folder of shards with index.json, or '<set>:<root>'"
        )
    if len(names) == 2 and names["train"] != names["val"]:
        missing, extra = set(names["train"]) - set(names["val"]), set(names["val"]) - set(names["train"])
        alone = [*(root / "train" / name for name in missing), *(root / "val" / name for name in extra)]
        empty = sorted(str(path) for path in alone if not any(path.iterdir()))
        raise ValueError(
            f"{root}/val has other classes than {root}/train, which would shift the labels: "
            f"missing {sorted(missing) or 'none'}, extra {sorted(extra) or 'none'}"
            + (f"; these folders are empty, remove them: {', '.join(empty)}" if empty else "")
        )
    return names[split]
