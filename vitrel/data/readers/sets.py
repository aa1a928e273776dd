"""Torchvision's sets as timm names them, with the folder of their files: "torch/cifar10:/path/to/root"."""

import zlib
from typing import Any

import timm.data
from PIL import Image

from vitrel.data.prepare import as_tensor
from vitrel.data.readers.base import ImageSet, sha256
from vitrel.data.readers.decode import BadImage
from vitrel.data.readers.splits import Split


class TorchvisionSet(ImageSet):
    """One split of a torchvision set, as a data set of (normalized float32 [3, H, W], class index).

    Args:
        name: name of the set as `timm.data.create_dataset` takes it after "torch/".
        root: root folder of torchvision's class.
        split: "train" or "val".
        view, options: the other arguments of `ImageSet`; torchvision decodes the images.
        download: let torchvision download a missing set; the network is not used otherwise.

    Raises:
        ValueError: an unknown set, or a set that is not at `root`.
    """

    def __init__(self, name: str, root: str, split: Split, *view: Any, download: bool = False, **options: Any) -> None:
        self.source = torchvision_set(name, root, split, download)
        targets = getattr(self.source, "targets", None)
        labels = targets if targets is not None else [label for _, label in self.source]
        samples = [(row, int(label)) for row, label in enumerate(labels)]
        super().__init__(list(self.source.classes), samples, f"torch/{name} {split} in {root}", *view, **options)

    def encoded(self, index: int) -> bytes:
        """Return the pixels of an image."""
        return as_tensor(self.read(index)[0]).numpy().tobytes()

    def read(self, index: int) -> tuple[Image.Image, int]:
        """Return (image of mode RGB, label); `BadImage` if it cannot be decoded."""
        row, label = self.samples[index]
        try:
            return self.source[row][0].convert("RGB"), label
        except (OSError, SyntaxError, ValueError) as error:
            raise BadImage(f"cannot decode {self.name(index)}: {error}") from error

    def image_size(self, index: int) -> tuple[int, int]:
        """Return (height, width) of an image, pixels; it is decoded."""
        image = self.read(index)[0]
        return image.height, image.width

    def versions(self) -> list[str]:
        """Return the CRC-32 of each image's pixels, in order."""
        return [f"{zlib.crc32(self.encoded(index)):08x}" for index in range(len(self))]

    def checksums(self) -> list[str]:
        """Return the SHA-256 of each image's pixels, in order."""
        return [sha256(self.encoded(index)) for index in range(len(self))]


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
