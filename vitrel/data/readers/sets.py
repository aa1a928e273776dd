"""Torchvision's sets, with the folder of their files: "torch/cifar10:/path/to/root", as timm names them."""

from dataclasses import dataclass
from typing import Any

import timm.data
from PIL import Image

from vitrel.data.readers.base import Reader
from vitrel.data.readers.decode import BadImage, Reading
from vitrel.data.readers.splits import Split


@dataclass
class TorchvisionSet(Reader):
    """Reader of a torchvision set (`images`), which decodes the images itself: the source of an image is its index."""

    images: Any

    def encoded(self, source: int) -> Image.Image:
        """Return the image; `BadImage` if torchvision cannot decode it."""
        try:
            return self.images[source][0]
        except (OSError, SyntaxError, ValueError) as error:
            raise BadImage(f"cannot decode {self.title(source)}: {error}") from error

    def name(self, source: int) -> str:
        """Return the index of the image as text."""
        return str(source)


def torchvision_reader(place: str, split: Split, reading: Reading) -> TorchvisionSet:
    """Return the images of a split of a torchvision set, of `place` "<name>:<root folder of torchvision's class>".

    The name is as `timm.data.create_dataset` takes it after "torch/". ValueError for an unknown set, or one that is not in the
    folder: nothing is downloaded. A set without `targets` is read in full for its labels. `reading` is not used.
    """
    name, _, root = place.partition(":")
    try:
        images = timm.data.create_dataset(f"torch/{name}", root, split)
    except AssertionError as error:
        raise ValueError(f"timm has no data set torch/{name} ({error}); hfds/<name> reads those of Hugging Face") from error
    except (RuntimeError, OSError) as error:
        raise ValueError(
            f"torch/{name} is not in {root}: its class in torchvision.datasets downloads it there with download=True ({error})"
        ) from error
    targets = getattr(images, "targets", None)
    labels = targets if targets is not None else [label for _, label in images]
    samples = [(row, int(label)) for row, label in enumerate(labels)]
    return TorchvisionSet(list(images.classes), samples, f"torch/{name} {split} in {root}", root, images)
