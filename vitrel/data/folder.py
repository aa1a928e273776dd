"""Images in class folders, decoded and prepared for evaluation by torchvision.

Layout: `root/train/<class>/*` and `root/val/<class>/*`; the classes are the sorted folder names.
"""

from collections.abc import Callable
from math import floor
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import center_crop, resize

Split = Literal["train", "val"]
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp")
INTERPOLATIONS = {"bicubic": InterpolationMode.BICUBIC, "bilinear": InterpolationMode.BILINEAR}


def normalise(image: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """uint8 [3, h, w] to (x / 255 - mean) / std, float32 [3, h, w]."""
    mean, std = (torch.tensor(v, dtype=torch.float32)[:, None, None] for v in (mean, std))
    return image.float().div_(255).sub_(mean).div_(std)


def decode(path: str | Path) -> Tensor:
    """uint8 RGB [3, h, w] of an image file; ValueError with the path when it cannot be decoded whole."""
    try:
        return decode_image(str(path), mode=ImageReadMode.RGB)
    except RuntimeError as error:
        raise ValueError(f"cannot decode {path}: {str(error).splitlines()[0]}; repair or remove the file") from error


class Prepare:
    """Evaluation preprocessing: antialiased resize, centre crop, normalisation.

    `scale`: the image is resized until it covers size / crop_pct, then its centre of H×W is kept: the same field of view at
    every square size. `canvas`: the image is resized as it would be for `base_size`, so that objects keep the pixels they have
    there; what of it lies within the centred H×W is kept and the rest is padded with the mean colour.

    Args:
        size: (H, W) of the result, pixels.
        mean, std: per channel, in units of the full range (0 to 1).
        crop_pct: share of the resized image that the crop keeps, 0 < crop_pct <= 1.
        interpolation: "bicubic" or "bilinear".
        protocol: "scale" or "canvas".
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
        if protocol not in ("scale", "canvas"):
            raise ValueError(f"unknown protocol {protocol!r}; use 'scale' or 'canvas'")
        if not 0 < crop_pct <= 1:
            raise ValueError(f"crop_pct is the share of the image that is kept, 0 < crop_pct <= 1, not {crop_pct}")
        if protocol == "canvas" and base_size is None:
            raise ValueError("the canvas protocol keeps objects at their training size: give base_size=(H, W) of training")
        self.size, self.mean, self.std = size, mean, std
        self.interpolation = INTERPOLATIONS[interpolation]
        view = size if protocol == "scale" else base_size
        self.cover = tuple(floor(side / crop_pct) for side in view)

    def __call__(self, image: Tensor) -> Tensor:
        """uint8 [3, h, w] to normalised float32 [3, H, W]."""
        image = resize(image, self.resized(*image.shape[-2:]), self.interpolation, antialias=True)
        image = center_crop(image, [min(have, want) for have, want in zip(image.shape[-2:], self.size, strict=True)])
        image = normalise(image, self.mean, self.std)
        if tuple(image.shape[-2:]) == self.size:
            return image
        return center_crop(image, list(self.size))  # pads with 0, which is the mean colour once normalised

    def resized(self, h: int, w: int) -> list[int]:
        """(h', w') of an h×w image just large enough to cover, its aspect kept."""
        tall, wide = self.cover
        if tall * w >= wide * h:
            return [tall, max(wide, tall * w // h)]
        return [max(tall, wide * h // w), wide]


class Folder(Dataset):
    """One split of an image folder: items are (float32 [3, H, W] normalised, class index).

    Args:
        root: folder that holds `train/` and `val/`.
        split: "train" or "val".
        prepare: uint8 [3, h, w] to the item's image, when nothing is augmented.
        augment: (uint8 [3, h, w], epoch, index) to the item's image; takes the place of `prepare`.
        n: take only n images, drawn by `seed`; all by default.
        seed: of that draw.

    Raises:
        ValueError: where the folders are missing, empty, or the classes of `val/` are not those of `train/`.
    """

    def __init__(
        self,
        root: str | Path,
        split: Split,
        prepare: Callable[[Tensor], Tensor],
        augment: Callable[[Tensor, int, int], Tensor] | None = None,
        n: int | None = None,
        seed: int = 0,
    ) -> None:
        self.classes = folder_classes(root, split)
        self.samples = _samples(Path(root) / split)
        if n is not None:
            if not 0 < n <= len(self.samples):
                raise ValueError(f"{Path(root) / split} holds {len(self.samples)} images, {n} were asked for")
            chosen = np.random.default_rng(seed).permutation(len(self.samples))[:n]
            self.samples = [self.samples[i] for i in sorted(chosen)]
        self.prepare, self.augment = prepare, augment
        # in shared memory: loader processes that outlive an epoch see the new one
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """The epoch whose augmentations are drawn from now on, in loader processes too."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        path, label = self.samples[index]
        image = decode(path)
        if self.augment is None:
            return self.prepare(image), label
        return self.augment(image, int(self._epoch), index), label


def folder_classes(root: str | Path, split: Split = "train") -> list[str]:
    """Sorted class names of a split; ValueError when a folder is missing or `val/` and `train/` disagree."""
    root = Path(root)
    names = {part: _class_folders(root / part) for part in ("train", "val") if (root / part).is_dir()}
    if not names.get(split):
        raise ValueError(
            f"no class folders in {root / split}: data is 'shapes' or a folder laid out as "
            f"{root}/train/<class>/*.jpg and {root}/val/<class>/*.jpg"
        )
    if len(names) == 2 and names["train"] != names["val"]:
        missing, extra = set(names["train"]) - set(names["val"]), set(names["val"]) - set(names["train"])
        raise ValueError(
            f"{root}/val has other classes than {root}/train, which would shift the labels: "
            f"missing {sorted(missing) or 'none'}, extra {sorted(extra) or 'none'}"
        )
    return names[split]


def _class_folders(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir() if entry.is_dir())


def _samples(folder: Path) -> list[tuple[str, int]]:
    found = ImageFolder(str(folder), is_valid_file=lambda path: path.lower().endswith(SUFFIXES), allow_empty=True)
    empty = sorted(set(range(len(found.classes))) - set(found.targets))
    if empty:
        names = ", ".join(found.classes[i] for i in empty)
        raise ValueError(f"class folders without images in {folder}: {names}; add {', '.join(SUFFIXES)} files or remove them")
    return found.samples
