"""Data sets of images: readers that know and open them, preparation, augmentation, unreadable images."""

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from vitrel.common.files import shown
from vitrel.data.augmentation import AugmentationError
from vitrel.data.prepare import Picture, Prepare
from vitrel.data.readers.decode import BadImage, Reading, decode, image_size

READERS = 16  # threads; more than cores, because on a network disk they mostly wait


class Draw(NamedTuple):
    """A request for one image of a data set, with size and repeat, as a training sampler makes it.

    Args:
        index: index of the image in the data set.
        size: (H, W) of the result in pixels; None for the data set's size.
        repeat: number of this view of the image with repeated augmentation; each view has its own random augmentation.
    """

    index: int  # type: ignore[assignment]  # the name hides tuple.index, which nothing here uses
    size: tuple[int, int] | None = None
    repeat: int = 0


def collate(items: Sequence[tuple[Tensor, Any]], as_list: bool = False) -> tuple[Tensor, Any]:
    """Return (images [B, 3, H, W], targets) of items of a data set: labels [B], float32 [B, classes] or masks [B, H, W].

    A batch of uint8 images has the memory format channels_last, as the images themselves: to copy them into planes takes ten
    times as long here, and a GPU does it in the first operation on them. Without items, both are empty tensors.

    Args:
        as_list: return the targets as a list, since masks may differ in size, and an image that only pads the batch has -1.
    """
    if not items:
        return torch.empty(0, 3, 0, 0), torch.empty(0)
    images, targets = zip(*items, strict=True)
    if images[0].dtype == torch.uint8:
        batch = default_collate([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2)
    else:
        batch = default_collate(images)
    return batch, list(targets) if as_list else default_collate(targets)


@dataclass
class Reader(ABC):
    """Abstract list of the images of one split. A subclass defines what the source of an image is, and opens it.

    The source is a path, a member of a tar, or the index of a row.

    Args:
        classes: class names, by label.
        samples: (source, label) of each image; with masks (source of the image, source of the mask).
        where: name of the data and split, for messages.
        root: file or folder in which the images lie; "" where Hugging Face `datasets` has a copy of them.
    """

    classes: list[str]
    samples: Sequence[tuple[Any, Any]]
    where: str
    root: str

    @abstractmethod
    def encoded(self, source: Any) -> str | bytes | Image.Image:
        """Return the path of an image file, its bytes, or the image itself where a library decodes it."""

    @abstractmethod
    def name(self, source: Any) -> str:
        """Return the name of an image within the data, which stays the same when the data are moved."""

    def title(self, source: Any) -> str:
        """Return the location of an image for messages, as printable text; here "WHERE: NAME"."""
        return f"{self.where}: {self.name(source)}"

    def states(self, sources: Sequence[Any]) -> list[str]:
        """Return "SIZE TIME" of each source: bytes, its file's time of modification in ns, each only if known; here ""."""
        return [""] * len(sources)


class ImageSet(Dataset):
    """Data set of images; its items, by index or `Draw`, are (image [3, H, W], class index).

    Images are normalized float32, or uint8 with `augment`, and where `prepare` does not normalize.

    `bad`, uint8 [n], is 1 for images found unreadable; its memory is shared with loader processes, as that of the epoch.
    `total` is the number of images in the split, before the choice of `n`.

    Args:
        reader: the images of a split.
        prepare: maps a Pillow image of mode RGB to the item's image, without augmentation.
        augment: maps (image, epoch, index, repeat, size) to the item's image, instead of `prepare`; None for none.
        n, seed: number of randomly chosen images, by default all, and seed of this choice; ValueError if there are fewer.
        reading: limits, and whether an unreadable image raises `BadImage` or gives `left_out`.
    """

    upright = False  # whether images are turned by their EXIF orientation

    def __init__(
        self,
        reader: Reader,
        prepare: Prepare,
        augment: Callable[..., Tensor] | None = None,
        n: int | None = None,
        seed: int = 0,
        reading: Reading = Reading(),
    ) -> None:
        self.reader, self.classes, self.total = reader, reader.classes, len(reader.samples)
        self.chosen = subset(self.total, n, seed, reader.where)
        self.samples = [reader.samples[i] for i in self.chosen]
        self.prepare, self.augment, self.reading = prepare, augment, reading
        self.bad = torch.zeros(len(self.samples), dtype=torch.uint8)
        self._epoch = torch.zeros(1, dtype=torch.int64)
        with suppress(RuntimeError):  # of a machine without shared memory, which can have no loader processes
            self.bad.share_memory_(), self._epoch.share_memory_()
        self._sizes: list[tuple[int, int]] | None = None

    def name(self, index: int) -> str:
        """Return the location of an image (a path, a tar and a member, or a data set and a row), for messages."""
        return self.reader.title(self.samples[index][0])

    def names(self) -> list[str]:
        """Return the name of each image within the data, in order."""
        return [self.reader.name(source) for source, _ in self.samples]

    def read(self, index: int) -> tuple[Image.Image, Any]:
        """Return (image of mode RGB, label); `BadImage`, whatever `on_bad` is, if it cannot be decoded."""
        return self._of_source(decode, index), self.samples[index][1]

    def _of_source(self, function: Callable[..., Any], index: int) -> Any:
        """Return `function`(encoded image, name, whether to turn it by EXIF), `decode` or `image_size`, of image `index`."""
        source = self.samples[index][0]
        return function(self.reader.encoded(source), self.name(index), self.upright)

    @property
    def epoch(self) -> int:
        """The epoch that seeds the augmentation."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that seeds the augmentation, in running loader processes too."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int | Draw) -> tuple[Tensor, Any]:
        draw = index if isinstance(index, Draw) else Draw(int(index))
        if not 0 <= draw.index < len(self):
            raise IndexError(f"index {draw.index} of {len(self)} images")
        try:
            picture, target = self.read(draw.index)
        except BadImage:
            self._check_root()
            if self.reading.on_bad == "raise":
                raise
            self.bad[draw.index] = 1
            return self.left_out(draw.size or self.prepare.size)
        try:
            return self.finish(picture, target, draw)
        except AugmentationError as error:
            place = f"{self.name(draw.index)} ({picture.height}x{picture.width} pixels)"
            raise AugmentationError(f"{place}: {error}") from error.__cause__

    def _check_root(self) -> None:
        """Raise FileNotFoundError if the file or folder that holds all images (`Reader.root`) no longer exists."""
        if (root := self.reader.root) and not os.path.exists(root):
            text = "is gone, with the images in it: was it moved, or is its disk no longer mounted?"
            raise FileNotFoundError(f"{shown(root)} {text}")

    def finish(self, picture: Picture, target: Any, draw: Draw) -> tuple[Tensor, Any]:
        """Return the item (image [3, H, W], target) of a decoded image, by `augment`, or else by `prepare`.

        H and W are the size of `draw`, or else that of the set. The epoch, and index and repeat of `draw`, seed the
        augmentation.
        """
        if self.augment is not None:
            return self.augment(picture, self.epoch, draw.index, draw.repeat, draw.size), target
        return (self.prepare if draw.size is None else self.prepare.at(draw.size))(picture), target

    def left_out(self, size: tuple[int, int]) -> tuple[Tensor, Any]:
        """Return the item of an unreadable image, which metrics leave out: (zeros [3, *size] of the items' dtype, -1)."""
        return torch.zeros(3, *size, dtype=torch.float32 if self.prepare.std else torch.uint8), -1

    def labels(self) -> list[int]:
        """Return the label of each image, in order, without decoding it: one index, or a tuple of them for several labels.

        Images with masks (`MaskSet`) have none: [].
        """
        return [label for _, label in self.samples]

    def sources(self) -> list[Any]:
        """Return the sources (see `Reader`) of all files that are read: of each image, and of its mask, if any, after it."""
        return [source for source, _ in self.samples]

    def digest(self) -> str:
        """Return a SHA-256 of the classes, and of the names, labels and bytes of all images (and masks), which it reads.

        An unreadable file counts as an empty text.
        """

        def content(source: Any) -> str:
            try:
                found = self.reader.encoded(source)
                data = Path(found).read_bytes() if isinstance(found, str) else found
            except (OSError, BadImage):
                return ""
            return hashlib.sha256(data if isinstance(data, bytes) else data.tobytes()).hexdigest()

        with ThreadPoolExecutor(READERS) as readers:
            return self._digest(list(readers.map(content, self.sources())))

    def fingerprints(self) -> tuple[str, str]:
        """Return (SHA-256 of classes, names, labels and sizes in bytes, SHA-256 of the files' times of modification).

        The images are not read.
        """
        states = [state.partition(" ") for state in self.reader.states(self.sources())]
        times = " ".join(time for _, _, time in states)
        return self._digest([size for size, _, _ in states]), hashlib.sha256(times.encode()).hexdigest()

    def _digest(self, values: list[str]) -> str:
        """Return the SHA-256 of the classes, names and labels, and of a value for each of `sources`."""
        names = [self.reader.name(source) for source in self.sources()]
        return hashlib.sha256(json.dumps([self.classes, names, self.labels(), values]).encode()).hexdigest()

    def image_sizes(self) -> list[tuple[int, int]]:
        """Return (height, width) of each image in pixels, in order, read from the headers at the first call and then kept.

        An unreadable header gives (1, 1), or raises `BadImage` if `reading.on_bad` is "raise".
        """

        def size(index: int) -> tuple[int, int]:
            try:
                return self._of_source(image_size, index)
            except BadImage:
                if self.reading.on_bad == "raise":
                    raise
                return 1, 1

        if self._sizes is None:
            with ThreadPoolExecutor(READERS) as readers:
                self._sizes = list(readers.map(size, range(len(self))))
        return self._sizes

    def bad_indices(self) -> list[int]:
        """Return the indices of the images found unreadable so far, in order, by this rank: its process and its loaders."""
        return self.bad.nonzero().flatten().tolist()


def subset(total: int, n: int | None, seed: int, where: str) -> list[int]:
    """Return n random indices below `total`, in increasing order, all if n is None; ValueError if n is not within 1..total.

    `where` is the name of the data in the error.
    """
    if n is None:
        return list(range(total))
    if not 0 < n <= total:
        raise ValueError(f"{where} holds {total} images: the number of images must be within 1..{total}, not {n}")
    return sorted(np.random.default_rng(seed).permutation(total)[:n].tolist())
