"""What all data sets that read images have in common: epoch, preparation, unreadable images."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import resize

from vitrel.data.decode import BadImage, Reading
from vitrel.data.draw import Draw
from vitrel.data.memory import names_image

HEADER_READERS = 16  # threads: on a network disk they wait


class ImageSet(Dataset, ABC):
    """Items are (float32 [3, H, W] normalised, class index), asked for by index or `Draw`.

    `bad` uint8 [n] marks the images that could not be read, and is shared with loader processes, as the epoch is.

    Args:
        classes: names, by label.
        n: number of images.
        prepare: uint8 [3, h, w] to the item's image, when nothing is augmented; `Prepare` for other sizes and "leave_out".
        augment: (uint8 [3, h, w], epoch, index, repeat, size) to the item's image; takes the place of `prepare`.
        reading: decoder, limits, and what happens to unreadable images.
    """

    def __init__(
        self,
        classes: list[str],
        n: int,
        prepare: Callable[[Tensor], Tensor],
        augment: Callable[..., Tensor] | None,
        reading: Reading,
    ) -> None:
        self.classes, self.prepare, self.augment, self.reading = classes, prepare, augment, reading
        self.bad = torch.zeros(n, dtype=torch.uint8).share_memory_()
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()
        self._cached: dict[int, tuple[Tensor, int]] = {}  # with reading.cached_side
        self._sizes: list[tuple[int, int]] | None = None

    @abstractmethod
    def read(self, index: int) -> tuple[Tensor, int]:
        """(uint8 [3, h, w], label) of an image; `BadImage` where it cannot be decoded."""

    @abstractmethod
    def image_size(self, index: int) -> tuple[int, int]:
        """(height, width) of an image in its file, pixels, without decoding it; `BadImage` where its header cannot be read."""

    @abstractmethod
    def label(self, index: int) -> int:
        """The label of an image, without decoding it."""

    @abstractmethod
    def name(self, index: int) -> str:
        """Where the image lies, for messages."""

    @property
    def epoch(self) -> int:
        """The epoch whose augmentations are drawn."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """The epoch whose augmentations are drawn from now on, in loader processes too."""
        self._epoch.fill_(epoch)

    def forget(self) -> None:
        """Free the cached images; they are decoded again when they are asked for."""
        self._cached.clear()

    def __len__(self) -> int:
        return len(self.bad)

    def __getitem__(self, index: int | Draw) -> tuple[Tensor, int]:
        draw = index if isinstance(index, Draw) else Draw(int(index))
        if not 0 <= draw.index < len(self):
            raise IndexError(f"index {draw.index} of {len(self)} images")
        image, label, at = self._readable(draw.index)
        if image is None:
            return torch.zeros(3, *(draw.size or self.prepare.size)), -1
        return self.finish(image, draw, at), label

    def finish(self, image: Tensor, draw: Draw, at: int) -> Tensor:
        """uint8 [3, h, w] of index `at` prepared or augmented to normalised float32 [3, H, W], as `draw` asks for.

        MemoryError with the image's name and size where memory runs out.
        """
        with names_image(lambda: f"{self._sized(image, at)} was prepared{' at {}x{}'.format(*draw.size) if draw.size else ''}"):
            if self.augment is not None:
                return self.augment(image, self.epoch, draw.index, draw.repeat, draw.size)
            prepare = self.prepare if draw.size is None else self.prepare.at(draw.size)
            return prepare(image)

    def class_counts(self) -> list[int]:
        """Number of images of each class."""
        labels = [self.label(i) for i in range(len(self))]
        return np.bincount(labels, minlength=len(self.classes)).tolist()

    def contents(self) -> list[str]:
        """What the set holds, wherever it lies: of each image in order the name below the set's folder, a tab and the label."""
        return [f"{self.name(i)}\t{self.label(i)}" for i in range(len(self))]

    def image_sizes(self) -> list[tuple[int, int]]:
        """(height, width) of every image in its file, pixels; (1, 1) of unreadable headers unless `on_bad` is "raise"."""

        def size(index: int) -> tuple[int, int]:
            try:
                return self.image_size(index)
            except BadImage:
                if self.reading.on_bad == "raise":
                    raise
                return 1, 1

        if self._sizes is None:
            with ThreadPoolExecutor(HEADER_READERS) as readers:
                self._sizes = list(readers.map(size, range(len(self))))
        return self._sizes

    def bad_indices(self) -> list[int]:
        """Images that were asked for and could not be read so far, by any process."""
        return self.bad.nonzero().flatten().tolist()

    def _readable(self, index: int) -> tuple[Tensor | None, int, int]:
        """(image, label, index) of the image, or of what `on_bad` puts in its place: (None, -1, index) if it is left out."""
        for step in range(self.reading.bad_limit):
            at = (index + step) % len(self)
            try:
                return *(self.read(at) if self.reading.cached_side is None else self._from_cache(at)), at
            except BadImage as error:
                if self.reading.on_bad == "raise":
                    raise
                self.bad[at] = 1
                if self.reading.on_bad == "leave_out":
                    return None, -1, at
                last = error
        raise bad_in_a_row(self.reading.bad_limit, last)

    def _from_cache(self, index: int) -> tuple[Tensor, int]:
        """As `read`, reduced, and from the cache once it was asked for."""
        if index not in self._cached:
            image, label = self.read(index)
            if min(image.shape[-2:]) > self.reading.cached_side:
                with names_image(lambda: f"{self._sized(image, index)} was reduced to be cached"):
                    image = resize(image, [self.reading.cached_side], InterpolationMode.BICUBIC, antialias=True)
            self._cached[index] = image, label
        return self._cached[index]

    def _sized(self, image: Tensor, index: int) -> str:
        return f"{self.name(index)} ({image.shape[-2]}x{image.shape[-1]} pixels)"


def bad_in_a_row(count: int, last: BadImage) -> BadImage:
    """The error where too many images in a row are unreadable."""
    return BadImage(f"{count} images in a row cannot be read, so the data as a whole seems damaged; the last: {last}")


def subset(total: int, n: int | None, seed: int, where: str) -> list[int]:
    """n of `total` indices drawn by seed, in order; all where n is None. ValueError where there are fewer."""
    if n is None:
        return list(range(total))
    if not 0 < n <= total:
        raise ValueError(f"{where} holds {total} images, {n} were asked for")
    return sorted(np.random.default_rng(seed).permutation(total)[:n].tolist())
