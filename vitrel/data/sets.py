"""Torchvision's classification sets by name, e.g. "food101:/path/to/root".

The path is the `root` of torchvision's class. "train" is the set's training split (Aircraft: trainval), "val" is its test
split. Not supported are CIFAR, which torchvision unpickles; Oxford-IIIT Pet, which it decodes without a pixel limit; and sets
without a test split. These can be used as image folders.
"""

import hashlib
import os
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torchvision
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.functional import pil_to_tensor

from vitrel.common.files import shown
from vitrel.data.base import ImageSet, Split, file_checksums, file_versions, subset
from vitrel.data.decode import Reading
from vitrel.data.folder import below


class Set(NamedTuple):
    """A torchvision set: name of its class, arguments for train and for val, and whether images are files (or one array)."""

    torchvision: str
    train: dict[str, Any]
    val: dict[str, Any]
    files: bool


TRAIN_TEST = ({"split": "train"}, {"split": "test"})
IS_TRAIN = ({"train": True}, {"train": False})
SETS = {
    "mnist": Set("MNIST", *IS_TRAIN, files=False),
    "fashion_mnist": Set("FashionMNIST", *IS_TRAIN, files=False),
    "kmnist": Set("KMNIST", *IS_TRAIN, files=False),
    "stl10": Set("STL10", *TRAIN_TEST, files=False),
    "food101": Set("Food101", *TRAIN_TEST, files=True),
    "dtd": Set("DTD", *TRAIN_TEST, files=True),
    "flowers102": Set("Flowers102", *TRAIN_TEST, files=True),
    "fgvc_aircraft": Set("FGVCAircraft", {"split": "trainval"}, {"split": "test"}, files=True),
}


class TorchvisionSet(ImageSet):
    """One split of a torchvision set (`SETS`), as a data set of (normalised float32 [3, H, W], class index).

    Args:
        name: name of the set, a key of `SETS`.
        root: root folder of torchvision's class.
        split: "train" or "val".
        prepare, augment: as in `ImageSet`.
        n, seed: number of randomly chosen images, by default all, and seed of this choice.
        reading: decoder, pixel limit, and handling of unreadable images; without effect for sets stored as one array.
        download: let torchvision download a missing set; the network is not used otherwise.

    Raises:
        ValueError: an unknown set, or a set that is not at `root`.
    """

    def __init__(
        self,
        name: str,
        root: str | Path,
        split: Split,
        prepare: Callable[[Tensor], Tensor],
        augment: Callable[..., Tensor] | None = None,
        n: int | None = None,
        seed: int = 0,
        reading: Reading = Reading(),
        download: bool = False,
    ) -> None:
        self.source, self.files = _source(name, root, split, download), SETS[name].files
        self.where = f"{name} {split} in {root}"
        self.chosen = subset(len(self.source), n, seed, self.where)
        super().__init__(list(self.source.classes), len(self.chosen), prepare, augment, reading)
        self.root = os.path.expanduser(root)

    def encoded(self, index: int) -> tuple[str, int, str]:
        """Return (path, label, path for messages) of an image of a set stored as files."""
        return *self.source[self.chosen[index]], self.name(index)

    def read(self, index: int) -> tuple[Tensor, int]:
        """Return (uint8 [3, h, w], label) of an image; `BadImage` if it cannot be decoded."""
        if self.files:
            return super().read(index)
        image, label = self.source[self.chosen[index]]
        return pil_to_tensor(image.convert("RGB")), label

    def image_size(self, index: int) -> tuple[int, int]:
        """Return (height, width) of an image, pixels; files are not decoded (`BadImage` if the header cannot be read)."""
        if self.files:
            return super().image_size(index)
        h, w = self.read(index)[0].shape[-2:]
        return h, w

    def label(self, index: int) -> int:
        """Return the label of an image, without decoding it."""
        return self.source[self.chosen[index]][1]

    def contents(self) -> list[str]:
        """Return one line per image, in order: its path relative to the root (or its number in the array), a tab, its label."""
        if not self.files:
            return [f"{self.chosen[i]}\t{self.label(i)}" for i in range(len(self))]
        return [f"{below(path, self.root)}\t{label}" for path, label in (self.source[i] for i in self.chosen)]

    def versions(self) -> list[str]:
        """Return size and time of modification of each file, in order; for a set stored as one array, CRC-32 of its images."""
        if self.files:
            return file_versions([self.source[i][0] for i in self.chosen])
        return [f"{zlib.crc32(np.ascontiguousarray(self.source.data[i])):08x}" for i in self.chosen]

    def checksums(self) -> Iterable[str]:
        """Return the SHA-256 of each file, in order; for a set stored as one array, that of the whole array."""
        if self.files:
            return file_checksums(self.source[i][0] for i in self.chosen)
        return [hashlib.sha256(np.ascontiguousarray(self.source.data)).hexdigest()]

    def name(self, index: int) -> str:
        """Return the path of an image, or its number in the array."""
        return shown(self.source[self.chosen[index]][0]) if self.files else f"{self.where}: {self.chosen[index]}"


def set_classes(name: str, root: str | Path, download: bool = False) -> list[str]:
    """Return the class names of a set of `SETS`, by label; ValueError if its test split is not at `root`, nor downloaded."""
    return list(_source(name, root, "val", download).classes)


def _source(name: str, root: str | Path, split: Split, download: bool) -> Dataset:
    """torchvision's data set; if its images are files, items are (path, label), since `decode` checks the header first."""
    if name not in SETS:
        raise ValueError(f"unknown set {name!r}; use one of {', '.join(SETS)}, or a folder of class folders")
    arguments = SETS[name].train if split == "train" else SETS[name].val
    loader = {"loader": str} if SETS[name].files else {}
    try:
        return getattr(torchvision.datasets, SETS[name].torchvision)(str(root), download=download, **arguments, **loader)
    except RuntimeError as error:
        text = str(error).split(" You can use", 1)[0]
        raise ValueError(f"{name} is not in {root}: {text} Set download=True to download it, or give another path") from error
