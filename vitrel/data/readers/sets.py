"""Torchvision's sets, with the folder of their files: "torch/cifar10:/path/to/root", as timm names them.

With masks torchvision has VOC, "torch/VOCSegmentation:/path/to/root".
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import timm.data
from PIL import Image

from vitrel.data.readers.base import Reader
from vitrel.data.readers.decode import BadImage, Reading
from vitrel.data.readers.files import Files
from vitrel.data.readers.splits import Split

VOC = [  # the classes of VOC, in the order of its masks
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "dining table", "dog",
    "horse", "motorbike", "person", "potted plant", "sheep", "sofa", "train", "tv",
]  # fmt: skip


@dataclass
class TorchvisionSet(Reader):
    """Images of a torchvision set, which decodes them: a source is a number of its image."""

    images: Any

    def encoded(self, source: int) -> Image.Image:
        """Return the image; `BadImage` if torchvision cannot decode it."""
        try:
            return self.images[source][0]
        except (OSError, SyntaxError, ValueError) as error:
            raise BadImage(f"cannot decode {self.title(source)}: {error}") from error

    def name(self, source: int) -> str:
        """Return the number."""
        return str(source)


def torchvision_reader(place: str, split: Split, reading: Reading) -> TorchvisionSet:
    """Return the images of a split of a torchvision set, of `place` "<name>:<root folder of torchvision's class>".

    The name is as `timm.data.create_dataset` takes it after "torch/". ValueError for an unknown set, or one that is not there.
    """
    name, _, root = place.partition(":")
    try:
        images = _at(name, root, lambda: timm.data.create_dataset(f"torch/{name}", root, split))
    except AssertionError as error:
        raise ValueError(f"timm has no data set torch/{name} ({error}); hfds/<name> reads those of Hugging Face") from error
    targets = getattr(images, "targets", None)
    labels = targets if targets is not None else [label for _, label in images]
    samples = [(row, int(label)) for row, label in enumerate(labels)]
    return TorchvisionSet(list(images.classes), samples, f"torch/{name} {split} in {root}", root, images)


def voc_reader(place: str, split: Split, reading: Reading) -> Files:
    """Return the images and masks of a split of VOC 2012 for segmentation, as `torchvision_reader`."""
    from torchvision.datasets import VOCSegmentation

    name, _, root = place.partition(":")
    if name.lower() != "vocsegmentation":
        raise ValueError(f"torch/{name} has no masks: of torchvision's sets, torch/VOCSegmentation:<folder> is read with masks")
    images = _at(name, root, lambda: VOCSegmentation(root, image_set=split))
    return Files(VOC, list(zip(images.images, images.masks, strict=True)), f"{root} {split}", root.rstrip("/"))


def _at(name: str, root: str, build: Callable[[], Any]) -> Any:
    try:
        return build()
    except (RuntimeError, OSError) as error:
        text = str(error).split(" You can use", 1)[0]
        raise ValueError(
            f"torch/{name} is not in {root}: {text} Its class in torchvision.datasets downloads it there with download=True"
        ) from error
