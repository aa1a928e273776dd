"""Image folders as a data set, and the preprocessing of images for evaluation.

Layout: `root/train/<class>/*` and `root/val/<class>/*`; the classes are the sorted folder names. `vitrel.data.scan` defines
which files are used.
"""

import os
from collections.abc import Callable, Iterator
from math import floor
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import center_crop, resize

from vitrel.data.base import ImageSet, file_checksums, subset
from vitrel.data.decode import Reading, decode, image_size
from vitrel.data.scan import Scan, class_folders, warn_once
from vitrel.files import shown

Split = Literal["train", "val"]
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
    `native`: the whole image is resized to H×W, which the caller computes with `vitrel.sizes.native_size`.

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


class Folder(ImageSet):
    """One split of an image folder, as a data set of (normalised float32 [3, H, W], class index).

    A warning, once per process, lists files and links that are left out.

    Args:
        root: folder that holds `train/` and `val/`.
        split: "train" or "val".
        prepare: maps uint8 [3, h, w] to the item's image, without augmentation.
        augment: maps (uint8 [3, h, w], epoch, index, repeat, size) to the item's image, instead of `prepare`.
        n: number of randomly chosen images; by default all images.
        seed: seed of this choice.
        reading: decoder, pixel limit, handling of unreadable images, and whether links to folders are followed.

    Raises:
        ValueError: folders are missing, empty or unreadable, or `val/` and `train/` have different classes.
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
        scan = Scan(folder, classes, reading.follow_links)
        if scan.left_out:
            warn_once(scan.left_out)
        self.samples = [scan.samples[i] for i in subset(len(scan.samples), n, seed, str(folder))]
        super().__init__(classes, len(self.samples), prepare, augment, reading)
        self.folder = folder

    def read(self, index: int) -> tuple[Tensor, int]:
        """Return (uint8 [3, h, w], label) of an image; `BadImage` if it cannot be decoded."""
        path, label = self.samples[index]
        return decode(path, self.reading.max_pixels, self.reading.decoder), label

    def image_size(self, index: int) -> tuple[int, int]:
        """Return (height, width) of an image file, pixels, without decoding it; `BadImage` if its header cannot be read."""
        return image_size(self.samples[index][0], self.reading.max_pixels)

    def label(self, index: int) -> int:
        """Return the label of an image, without decoding it."""
        return self.samples[index][1]

    def name(self, index: int) -> str:
        """Return the path of an image as printable text, with bytes that are not UTF-8 escaped."""
        return shown(self.samples[index][0])

    def contents(self) -> list[str]:
        """Return one line per image, in order: its path relative to the split's folder, a tab, its label."""
        return [f"{below(path, self.folder)}\t{label}" for path, label in self.samples]

    def checksums(self) -> Iterator[str]:
        """Yield the SHA-256 of each file, in order, "" for a file that cannot be opened."""
        return file_checksums(path for path, _ in self.samples)


def below(path: str | Path, folder: str | Path) -> str:
    """Return `path` relative to `folder`, or unchanged if it is not inside."""
    return str(path).removeprefix(f"{folder}{os.sep}")  # os.path.relpath would take seconds for a million paths


def folder_classes(root: str | Path, split: Split = "train") -> list[str]:
    """Return the sorted class names of a split of the image folder `root`.

    Raises:
        ValueError: no class folders, different classes in `train/` and `val/`, or unreadable folders (`class_folders`).
    """
    root = Path(root)
    names = {part: class_folders(root / part) for part in ("train", "val") if (root / part).is_dir()}
    if not names.get(split):
        raise ValueError(
            f"no class folders in {root / split}: data must be 'shapes', a folder with the layout "
            f"{root}/train/<class>/*.jpg and {root}/val/<class>/*.jpg, a folder of shards with index.json, or '<set>:<root>'"
        )
    if len(names) == 2 and names["train"] != names["val"]:
        missing, extra = set(names["train"]) - set(names["val"]), set(names["val"]) - set(names["train"])
        unpaired = [*(root / "train" / name for name in missing), *(root / "val" / name for name in extra)]
        empty = sorted(str(path) for path in unpaired if not any(path.iterdir()))
        raise ValueError(
            f"{root}/val has other classes than {root}/train, which would shift the labels: "
            f"missing {sorted(missing) or 'none'}, extra {sorted(extra) or 'none'}"
            + (f"; these folders are empty, remove them: {', '.join(empty)}" if empty else "")
        )
    return names[split]
