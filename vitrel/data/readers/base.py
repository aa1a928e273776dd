"""The base class of data sets that read images: preparation, augmentation, unreadable images."""

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, default_collate, get_worker_info

from vitrel.data.augment import AugmentationError
from vitrel.data.prepare import Picture
from vitrel.data.readers.decode import BadImage, Reading, decode, image_size, names_image
from vitrel.data.readers.splits import Split as Split

READERS, HEADER_READERS = 8, 16  # threads; more for headers, because on a network disk they mostly wait
FILES_AT_ONCE = 1000  # for one thread: a local file takes less time than a task for a thread
SHOWN = 3  # messages in one


def shared(tensor: Tensor) -> Tensor:
    """Return the tensor in memory that loader processes share; unchanged on a machine without shared memory."""
    try:
        return tensor.share_memory_()
    except RuntimeError:
        return tensor


def check_shared(tensor: Tensor) -> None:
    """Raise RuntimeError in a loader process if the tensor is not in shared memory, so that changes would not reach it."""
    if get_worker_info() is not None and not tensor.is_shared():
        raise RuntimeError("unable to allocate shared memory when the data set was made")


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


def collate(items: Sequence[tuple[Tensor, Any]], masks_differ: bool = False) -> tuple[Tensor, Any]:
    """Return (images [B, 3, H, W], labels [B] or masks [B, H, W]) of items of a data set, for a DataLoader.

    uint8 images have the channels of a pixel side by side, as Pillow and OpenCV have them, and so has their batch: to copy them
    into planes takes ten times as long here, and a GPU does it in the first operation on them.

    Args:
        masks_differ: the masks have resolutions of their own, and are returned as a list.
    """
    images, targets = zip(*items, strict=True)
    if images[0].dtype == torch.uint8:
        batch = default_collate([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2)
    else:
        batch = default_collate(images)
    return batch, list(targets) if masks_differ else default_collate(targets)


class ImageSet(Dataset, ABC):
    """Abstract data set of images; its items, by index or `Draw`, are (image [3, H, W], class index).

    Images are normalized float32, or uint8 with `augment`, and where `prepare` does not normalize.

    `bad`, uint8 [n], is 1 for images found unreadable; it is shared with loader processes, as the epoch is.

    Args:
        classes: class names, by label.
        samples: (source, label) of each image; what a source is, a subclass says.
        where: name of the data and split, for messages.
        prepare: maps a Pillow image of mode RGB to the item's image, without augmentation. Must be a `Prepare` for draws with
            a size and for `on_bad="leave_out"`.
        augment: maps (image, epoch, index, repeat, size) to the item's image, instead of `prepare`; None for none.
        n, seed: number of randomly chosen images, by default all, and seed of this choice.
        reading: limits, and handling of unreadable images.
    """

    upright = False  # whether images are turned by their EXIF orientation

    def __init__(
        self,
        classes: list[str],
        samples: Sequence[tuple[Any, Any]],
        where: str,
        prepare: Callable[[Picture], Tensor],
        augment: Callable[..., Tensor] | None = None,
        n: int | None = None,
        seed: int = 0,
        reading: Reading = Reading(),
    ) -> None:
        self.samples, self.where = [samples[i] for i in subset(len(samples), n, seed, where)], where
        self.classes, self.prepare, self.augment, self.reading = classes, prepare, augment, reading
        self.bad = shared(torch.zeros(len(self.samples), dtype=torch.uint8))
        self._epoch = shared(torch.zeros(1, dtype=torch.int64))
        self._sizes: list[tuple[int, int]] | None = None

    @abstractmethod
    def encoded(self, index: int) -> str | bytes:
        """Return the path of an image file or its bytes."""

    def label(self, index: int) -> Any:
        """Return the label of an image, without decoding it."""
        return self.samples[index][1]

    def name(self, index: int) -> str:
        """Return the location of an image (a path, a tar and a member, or a data set and a row), for messages."""
        return f"{self.where}: {self.samples[index][0]}"

    def read(self, index: int) -> tuple[Image.Image, Any]:
        """Return (image of mode RGB, label); `BadImage` if it cannot be decoded."""
        return decode(self.encoded(index), self.reading.max_pixels, self.name(index), self.upright), self.label(index)

    def image_size(self, index: int) -> tuple[int, int]:
        """Return (height, width) of an image file, pixels, without decoding it; `BadImage` if its header cannot be read."""
        return image_size(self.encoded(index), self.reading.max_pixels, self.name(index), self.upright)

    @property
    def epoch(self) -> int:
        """The epoch that seeds the augmentation."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch that seeds the augmentation, in running loader processes too."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.bad)

    def __getitem__(self, index: int | Draw) -> tuple[Tensor, Any]:
        check_shared(self._epoch)
        draw = index if isinstance(index, Draw) else Draw(int(index))
        if not 0 <= draw.index < len(self):
            raise IndexError(f"index {draw.index} of {len(self)} images")
        found = self._readable(draw.index)
        if found is None:
            return self.left_out(draw.size or self.prepare.size)
        picture, target, source = found

        def name() -> str:
            return f"{self.name(source)} ({picture.height}x{picture.width} pixels)"

        try:
            with names_image(lambda: f"{name()} was prepared{' at {}x{}'.format(*draw.size) if draw.size else ''}"):
                return self.finish(picture, target, draw)
        except AugmentationError as error:
            raise AugmentationError(f"{name()}: {error}") from error.__cause__

    def _readable(self, index: int) -> tuple[Image.Image, Any, int] | None:
        """(image, target, index) of an image or of its replacement, by `on_bad`; None if it is left out."""
        for step in range(self.reading.bad_limit):
            source = (index + step) % len(self)
            try:
                return *self.read(source), source
            except BadImage as error:
                if self.reading.on_bad == "raise":
                    raise
                self.bad[source] = 1
                if self.reading.on_bad == "leave_out":
                    return None
                last = error
        raise BadImage(f"{step + 1} images in a row cannot be read, so all of the data may be damaged; the last: {last}")

    def finish(self, picture: Picture, target: Any, draw: Draw) -> tuple[Tensor, Any]:
        """Return the item of a decoded image and its target: augmented or prepared for the draw, whose index seeds it."""
        if self.augment is not None:
            return self.augment(picture, self.epoch, draw.index, draw.repeat, draw.size), target
        return (self.prepare if draw.size is None else self.prepare.at(draw.size))(picture), target

    def left_out(self, size: tuple[int, int]) -> tuple[Tensor, Any]:
        """Return the item (H, W) that stands for an unreadable image, which metrics must ignore: zeros and label -1."""
        return torch.zeros(3, *size), -1

    def class_counts(self) -> list[int]:
        """Return the number of images of each class."""
        labels = [self.label(i) for i in range(len(self))]
        return np.bincount(labels, minlength=len(self.classes)).tolist()

    def contents(self) -> list[str]:
        """Return one line per image, in order: its source relative to the set's folder, a tab, its label."""
        return [f"{source}\t{label}" for source, label in self.samples]

    def versions(self) -> list[str]:
        """Return one text per line of `contents`, in order, that changes with what the line names, without reading all of it.

        For an image file, its size in bytes, a space, and its time of modification in ns; "" where the line says it already.
        """
        return [""] * len(self.contents())

    def names(self) -> list[str]:
        """Return the name of each image relative to the set's folder, in order."""
        return [line.rpartition("\t")[0] for line in self.contents()]

    def checksums(self) -> Iterable[str]:
        """Return SHA-256 sums of the image files, in order; empty if `contents` includes them."""
        return ()

    def digest(self) -> str:
        """Return a SHA-256 of the classes, `contents` and `checksums`, independent of the set's folder.

        It reads every image.
        """
        digest = hashlib.sha256(json.dumps([self.classes, len(self), self.contents()]).encode())
        for checksum in self.checksums():
            digest.update(checksum.encode())
        return digest.hexdigest()

    def image_sizes(self) -> list[tuple[int, int]]:
        """Return (height, width) of every image file, pixels; (1, 1) for unreadable headers.

        Raises:
            BadImage: unreadable headers, with `on_bad="raise"`; the text names the first ones.
        """

        def size(index: int) -> tuple[int, int] | BadImage:
            try:
                return self.image_size(index)
            except BadImage as error:
                return error

        if self._sizes is None:
            with ThreadPoolExecutor(HEADER_READERS) as readers:
                found = list(readers.map(size, range(len(self))))
            bad = [size for size in found if isinstance(size, BadImage)]
            if bad and self.reading.on_bad == "raise":
                others = f"; {len(bad) - SHOWN} other images cannot be read either" if len(bad) > SHOWN else ""
                raise BadImage("; ".join(map(str, bad[:SHOWN])) + others)
            self._sizes = [(1, 1) if isinstance(size, BadImage) else size for size in found]
        return self._sizes

    def check(self, indices: Iterable[int]) -> None:
        """Read these images, several at a time, and mark those that cannot be read in `bad`."""

        def check(index: int) -> None:
            try:
                self.read(index)
            except BadImage:
                self.bad[index] = 1

        with ThreadPoolExecutor(READERS) as readers:
            for _ in readers.map(check, indices):
                pass

    def bad_indices(self) -> list[int]:
        """Return the indices of the images found unreadable so far by this process and its loader processes (one rank)."""
        return self.bad.nonzero().flatten().tolist()


def sha256(path: str | Path | bytes) -> str:
    """Return the SHA-256 of a file or of bytes, in hexadecimal."""
    if isinstance(path, bytes):
        return hashlib.sha256(path).hexdigest()
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def file_checksums(paths: Iterable[str | Path]) -> Iterator[str]:
    """Yield the `sha256` of each file, in order, "" for a file that cannot be opened; several files are read in parallel."""

    def checksum(path: str | Path) -> str:
        try:
            return sha256(path)
        except OSError:
            return ""

    with ThreadPoolExecutor(READERS) as pool:
        yield from pool.map(checksum, paths)


def file_versions(paths: Sequence[str | Path]) -> list[str]:
    """Return "SIZE TIME" of each file: bytes, and time of modification in ns since 1970; "" for an unreachable file."""

    def of_some(start: int) -> list[str]:
        return [_file_version(path) for path in paths[start : start + FILES_AT_ONCE]]

    with ThreadPoolExecutor(HEADER_READERS) as pool:
        return [version for part in pool.map(of_some, range(0, len(paths), FILES_AT_ONCE)) for version in part]


def _file_version(path: str | Path) -> str:
    try:
        state = os.stat(path)
    except OSError:
        return ""
    return f"{state.st_size} {state.st_mtime_ns}"


def subset(total: int, n: int | None, seed: int, where: str) -> list[int]:
    """Return n random indices of `total` in increasing order, all if n is None; ValueError if n is not within 1..total.

    `where` names the data in the error.
    """
    if n is None:
        return list(range(total))
    if not 0 < n <= total:
        raise ValueError(f"{where} holds {total} images: the number of images must be within 1..{total}, not {n}")
    return sorted(np.random.default_rng(seed).permutation(total)[:n].tolist())
