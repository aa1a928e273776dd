"""Torchvision's sets as timm names them, with the folder of their files: "torch/cifar10:/path/to/root"."""

import hashlib
import zlib
from collections.abc import Callable
from typing import Any

import timm.data
from PIL import Image
from torch import Tensor

from vitrel.data.base import RowSet, Split, subset
from vitrel.data.decode import BadImage, Reading
from vitrel.data.prepare import Picture, as_tensor


class TorchvisionSet(RowSet):
    """One split of a torchvision set, as a data set of (normalized float32 [3, H, W], class index).

    Args:
        name: name of the set as `timm.data.create_dataset` takes it after "torch/".
        root: root folder of torchvision's class.
        split: "train" or "val".
        prepare, augment, reading: as in `ImageSet`; torchvision decodes the images.
        n, seed: number of randomly chosen images, by default all, and seed of this choice.
        download: let torchvision download a missing set; the network is not used otherwise.

    Raises:
        ValueError: an unknown set, or a set that is not at `root`.
    """

    def __init__(
        self,
        name: str,
        root: str,
        split: Split,
        prepare: Callable[[Picture], Tensor],
        augment: Callable[..., Tensor] | None = None,
        n: int | None = None,
        seed: int = 0,
        reading: Reading = Reading(),
        download: bool = False,
    ) -> None:
        self.source, self.where = torchvision_set(name, root, split, download), f"torch/{name} {split} in {root}"
        targets = getattr(self.source, "targets", None)
        labels = targets if targets is not None else [label for _, label in self.source]
        self.labels = [int(label) for label in labels]
        self.chosen = subset(len(self.source), n, seed, self.where)
        super().__init__(list(self.source.classes), len(self.chosen), prepare, augment, reading)

    def encoded(self, index: int) -> tuple[bytes, int, str]:
        """Return (pixels, label, name for messages) of an image."""
        return as_tensor(self.read(index)[0]).numpy().tobytes(), self.label(index), self.name(index)

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Return (image of mode RGB, label); `BadImage` if it cannot be decoded."""
        try:
            return self.source[self.chosen[index]][0].convert("RGB"), self.label(index)
        except (OSError, SyntaxError, ValueError) as error:
            raise BadImage(f"cannot decode {self.name(index)}: {error}") from error

    def image_size(self, index: int) -> tuple[int, int]:
        """Return (height, width) of an image, pixels; it is decoded."""
        image = self.read(index)[0]
        return image.height, image.width

    def versions(self) -> list[str]:
        """Return the CRC-32 of each image's pixels, in order."""
        return [f"{zlib.crc32(self.encoded(index)[0]):08x}" for index in range(len(self))]

    def checksums(self) -> list[str]:
        """Return the SHA-256 of each image's pixels, in order."""
        return [hashlib.sha256(self.encoded(index)[0]).hexdigest() for index in range(len(self))]


def torchvision_set(name: str, root: str, split: Split, download: bool = False) -> Any:
    """Return torchvision's data set of a split; ValueError if timm does not know it, or it is not at `root` nor downloaded."""
    try:
        return timm.data.create_dataset(f"torch/{name}", root, split, download=download)
    except AssertionError as error:
        raise ValueError(f"timm has no data set torch/{name} ({error}); hfds/<name> reads those of Hugging Face") from error
    except (RuntimeError, OSError) as error:
        text = str(error).split(" You can use", 1)[0]
        raise ValueError(
            f"torch/{name} is not in {root}: {text} Set download=True to download it, or give another path"
        ) from error
