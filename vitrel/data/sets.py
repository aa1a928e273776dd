"""Classification sets of torchvision by name: "food101:/path/to/root".

The path is the `root` that torchvision's class takes. Train is the split that the set calls so (Aircraft: trainval), val is its
test split. Left out: CIFAR, which torchvision unpickles; Oxford-IIIT Pet, which it decodes without a pixel limit; sets without
a test split. They can be read as folders.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torchvision
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms.functional import pil_to_tensor

from vitrel.data.base import ImageSet, subset
from vitrel.data.decode import Reading, decode, image_size
from vitrel.data.folder import Split, below
from vitrel.files import shown


class Set(NamedTuple):
    """How torchvision calls a set: its class, the arguments for train and val, and whether its images are files or arrays."""

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
    """One split of a set of `SETS`: items are (float32 [3, H, W] normalised, class index).

    Args:
        name: of the set, a key of `SETS`.
        root: folder that torchvision's class takes.
        split: "train" or "val".
        prepare: uint8 [3, h, w] to the item's image, when nothing is augmented.
        augment: (uint8 [3, h, w], epoch, index, repeat, size) to the item's image; takes the place of `prepare`.
        n: take only n images, drawn by `seed`; all by default.
        seed: of that draw.
        reading: decoder, pixel limit, and what happens to unreadable images; arrays need none of it.
        download: let torchvision fetch the set where it is missing; the network is not used otherwise.

    Raises:
        ValueError: for an unknown set, or one that is not at root.
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

    def read(self, index: int) -> tuple[Tensor, int]:
        """(uint8 [3, h, w], label) of an image; `BadImage` where it cannot be decoded."""
        image, label = self.source[self.chosen[index]]
        if self.files:
            return decode(image, self.reading.max_pixels, self.reading.decoder), label
        return pil_to_tensor(image.convert("RGB")), label

    def image_size(self, index: int) -> tuple[int, int]:
        """(height, width) of an image, pixels; of a file without decoding it, `BadImage` where its header cannot be read."""
        if self.files:
            return image_size(self.source[self.chosen[index]][0], self.reading.max_pixels)
        h, w = self.read(index)[0].shape[-2:]
        return h, w

    def label(self, index: int) -> int:
        """The label of an image, without decoding it."""
        return self.source[self.chosen[index]][1]

    def contents(self) -> list[str]:
        """Of each image in order its path below the root, or its number where a set is one array, a tab and its label."""
        if not self.files:
            return [f"{self.chosen[i]}\t{self.label(i)}" for i in range(len(self))]
        return [f"{below(path, self.root)}\t{label}" for path, label in (self.source[i] for i in self.chosen)]

    def name(self, index: int) -> str:
        """The path of an image, or its number where a set is one array."""
        return shown(self.source[self.chosen[index]][0]) if self.files else f"{self.where}: {self.chosen[index]}"


def set_classes(name: str, root: str | Path, download: bool = False) -> list[str]:
    """The classes of a set of `SETS`, by label."""
    return list(_source(name, root, "val", download).classes)


def _source(name: str, root: str | Path, split: Split, download: bool) -> Dataset:
    """torchvision's data set; of one whose images are files, items are (path, label): it is for us to read the header first."""
    if name not in SETS:
        raise ValueError(f"unknown set {name!r}; use one of {', '.join(SETS)}, or a folder of class folders")
    how = SETS[name].train if split == "train" else SETS[name].val
    loader = {"loader": str} if SETS[name].files else {}
    try:
        return getattr(torchvision.datasets, SETS[name].torchvision)(str(root), download=download, **how, **loader)
    except RuntimeError as error:
        text = str(error).split(" You can use", 1)[0]
        raise ValueError(f"{name} is not in {root}: {text} Give download=True to fetch it, or another path") from error
