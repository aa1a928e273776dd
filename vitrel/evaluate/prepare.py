"""Loading of evaluation images: decoded and preprocessed once per size and protocol, and shared by the models."""

import gc
import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitrel.common.files import shown
from vitrel.common.resources import check_workers, loading_failed, out_of_memory
from vitrel.common.sizes import Budget, Size, format_size, native_size
from vitrel.data import BadImage, Draw, ImageSet, Prepare, Reading, create_dataset
from vitrel.data.readers.base import subset
from vitrel.evaluate.sweep import Sweep
from vitrel.evaluate.tasks.base import ImageList
from vitrel.evaluate.tasks.segmentation import IGNORED, Mask

CACHE_BYTES = 2 << 30
MASK_PIXELS = 1 << 21
Batch = tuple[Tensor, list[Any]]  # pixels [B, 3, H, W], and targets; None for images left out as unreadable
Source = Callable[..., Dataset]


class Preprocessing(NamedTuple):
    """The preprocessing of a trial's images: size, protocol, crop, and the normalization and interpolation of training.

    All but the last three are arguments of `vitrel.data.Prepare`, which says what a protocol does with an image.
    """

    size: Size  # (h, w) in pixels
    protocol: str  # "scale" | "canvas" | "native"
    crop_pct: float  # share of the resized image that the crop keeps
    mean: tuple[float, ...]  # per channel
    std: tuple[float, ...]  # per channel
    interpolation: str  # "bicubic" | "bilinear"
    base_size: Size  # training size (h, w) in pixels
    crop_mode: str = "center"  # "center" | "squash" | "border"
    budget: int | None = None  # native protocol: maximum number of patch tokens of an image
    patch: Size | None = None  # native protocol: (h, w) of a patch in pixels
    task: str = "classification"  # what is predicted


class Images:
    """Loader of the evaluation images, with a cache of the current size, protocol and crop that models share.

    Images that exceed CACHE_BYTES together are decoded again for each model. When loading a batch runs out of memory,
    `batch_size` is halved and nothing more is cached until size, protocol or crop change; `halvings` counts this.

    Args:
        source: a function (size, **preprocessing) -> data set that replaces `create_dataset(sweep.data, "val", size,
            **preprocessing)`.
    """

    def __init__(self, sweep: Sweep, source: Source | None = None) -> None:
        check_workers(sweep.workers)
        self.sweep, self.source = sweep, source
        self.batch_size, self.halvings = sweep.batch_size, 0
        self._current: tuple | None = None  # size, protocol, crop and budget of the cached images
        self._listed: ImageList | None = None
        self._datasets: dict[Preprocessing, Dataset] = {}
        self._file_sizes: list[Size] = []
        self._decoded: dict[Preprocessing, list[Batch]] = {}
        self._growing: list[Batch] | None = None  # an entry of `_decoded` while its batches are read
        self._caches = True

    def dataset(self, preprocessing: Preprocessing) -> Dataset:
        """Return the data set with this preprocessing; items are (normalized float32 [3, H, W], class index).

        In the native protocol items are indexed by a `Draw` with a size. With another size, protocol, crop or budget than in
        the call before, the cache is emptied and `batch_size` is set back; other methods call this one.
        """
        current = preprocessing.size, preprocessing.protocol, preprocessing.crop_pct, preprocessing.budget
        if self._current != current:
            self._current = current
            self._datasets.clear()
            self._decoded.clear()
            self.batch_size, self._caches = self.sweep.batch_size, True
        if preprocessing not in self._datasets:
            options = preprocessing._asdict()
            options |= {"n": self.sweep.n, "seed": self.sweep.data_seed, "reading": reading_of(self.sweep)}
            size, _, _ = options.pop("size"), options.pop("budget"), options.pop("patch")
            if options["task"] == "classification":
                del options["task"]
            source = self.source or partial(create_dataset, self.sweep.data, "val")
            self._datasets[preprocessing] = source(size, **options)
        return self._datasets[preprocessing]

    def listed(self, preprocessing: Preprocessing) -> ImageList:
        """Return the names of all images (their indices where the data set has no names) and classes; computed once."""
        dataset = self.dataset(preprocessing)
        if self._listed is None or len(self._listed.names) != len(dataset):
            has_names = isinstance(dataset, ImageSet)
            names = dataset.names() if has_names else map(getattr(dataset, "name", str), range(len(dataset)))
            self._listed = ImageList([*map(shown, names)], [*map(shown, getattr(dataset, "classes", None) or ())])
        return self._listed

    def digest(self, preprocessing: Preprocessing) -> str:
        """Return a hash that changes with the images, their labels and the contents of their files.

        For generated images and a data set that the user passed, the hash is only of data, seed, number of images and classes.
        """
        dataset = self.dataset(preprocessing)
        if isinstance(dataset, ImageSet):
            return dataset.digest()
        description = self.sweep.data, self.sweep.data_seed, len(dataset), getattr(dataset, "classes", None)
        return hashlib.sha256(json.dumps(description).encode()).hexdigest()

    def batches(self, preprocessing: Preprocessing, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """Yield batches of this process's images.

        They come in the order of `order(preprocessing, rank, world)`; all images of a batch have one size. MemoryError where a
        single image does not fit in memory.
        """
        self.dataset(preprocessing)  # may empty the cache
        if preprocessing in self._decoded:
            yield from self._decoded[preprocessing]
            return
        height, width = preprocessing.size
        groups = self._groups(preprocessing, rank, world)
        fits = sum(map(len, groups)) * 3 * height * width * 4 <= CACHE_BYTES
        self._growing = [] if fits and self._caches else None
        for batch in self._loaded(preprocessing, groups):
            if self._growing is not None:
                self._growing.append(batch)
            yield batch
        if self._growing is not None:
            self._decoded[preprocessing], self._growing = self._growing, None

    def batch_of(self, preprocessing: Preprocessing) -> int:
        """Return the number of images in a batch; for segmentation, whose outputs are as large as images, at
        most MASK_PIXELS.
        """
        if preprocessing.task == "classification":
            return self.batch_size
        return min(self.batch_size, max(1, MASK_PIXELS // math.prod(preprocessing.size)))

    def order(self, preprocessing: Preprocessing, rank: int = 0, world: int = 1) -> list[int]:
        """Return the indices of the images in the order of `batches`: those of `share_of`, in the native protocol by size."""
        groups = self._groups(preprocessing, rank, world)
        return [item.index if isinstance(item, Draw) else item for group in groups for item in group]

    def shapes(self, preprocessing: Preprocessing) -> Counter[Size]:
        """Count all images by the size (h, w) in pixels that the model gets; files with unreadable headers count as square."""
        sizes = self._native_sizes(preprocessing)
        return Counter({preprocessing.size: len(self.dataset(preprocessing))} if sizes is None else sizes)

    def _native_sizes(self, preprocessing: Preprocessing) -> list[Size] | None:
        """The size (h, w) in pixels of every image in the native protocol; None in other protocols."""
        if preprocessing.budget is None or preprocessing.patch is None:
            return None
        if not self._file_sizes:  # read once, because all sizes and protocols have the same images
            dataset = self.dataset(preprocessing)
            generated = not hasattr(dataset, "image_sizes")
            with _how_to_go_on():
                self._file_sizes = [(1, 1)] * len(dataset) if generated else dataset.image_sizes()
        budget, patch = preprocessing.budget, preprocessing.patch
        return [native_size(h, w, budget, patch) for h, w in self._file_sizes]

    def _groups(self, preprocessing: Preprocessing, rank: int, world: int) -> list[Sequence[int | Draw]]:
        """The images of this process, grouped by the size that the model gets."""
        share, sizes = share_of(len(self.dataset(preprocessing)), rank, world), self._native_sizes(preprocessing)
        if sizes is None:
            return [share]
        groups: dict[Size, list[int | Draw]] = defaultdict(list)
        for index in share:
            groups[sizes[index]].append(Draw(index, sizes[index]))
        return [groups[size] for size in sorted(groups)]

    def _loaded(self, preprocessing: Preprocessing, groups: Sequence[Sequence[int | Draw]]) -> Iterator[Batch]:
        """Batches of the groups' images; the batch size is halved when loading runs out of memory."""
        dataset = self.dataset(preprocessing)
        start, total = 0, sum(map(len, groups))
        collate = partial(_batch, preprocessing=preprocessing, drawn=_is_drawn(dataset))
        while start < total:
            try:
                batches = _batches(groups, start, self.batch_of(preprocessing))
                with _how_to_go_on():
                    for batch in DataLoader(dataset, batch_sampler=batches, num_workers=self.sweep.workers, collate_fn=collate):
                        start += len(batch[1])
                        yield batch
                return
            except (RuntimeError, MemoryError) as error:
                if not (out_of_memory(error) or loading_failed(error)):
                    raise
            # outside the handler, whose traceback would keep the batch alive; dropping the cache frees memory too
            self._growing, self._caches = None, False
            self._decoded.clear()
            # The error holds the failed loader in a cycle. A process of the next loader that collected it would wait for ever.
            gc.collect()
            failed = f"loading image {start + 1} of {total} failed; use fewer --workers"
            self.batch_size = halved(min(self.batch_size, max(map(len, batches))), failed)
            self.halvings += 1

    def bad(self, preprocessing: Preprocessing) -> tuple[str, ...]:
        """Return the names of the images that this process could not read so far; () for data without names of files."""
        dataset = self.dataset(preprocessing)
        return tuple(map(dataset.name, dataset.bad_indices())) if isinstance(dataset, ImageSet) else ()

    def first(self, preprocessing: Preprocessing, n: int) -> Iterator[Tensor]:
        """Yield the first n images of the data as [3, H, W], unreadable ones left out; the same in every process."""
        for _, image, _ in self.items(preprocessing, range(min(n, len(self.dataset(preprocessing))))):
            yield image

    def items(self, preprocessing: Preprocessing, indices: Iterable[int]) -> Iterator[tuple[int, Tensor, Any]]:
        """Yield (index, image [3, H, W], target) of these images of the data, unreadable ones left out."""
        dataset, sizes = self.dataset(preprocessing), self._native_sizes(preprocessing)
        for index in indices:
            image, target = dataset[index if sizes is None else Draw(index, sizes[index])]
            target = _target(image, target, preprocessing, _is_drawn(dataset))
            if target is not None:
                yield index, image, target


def _batch(items: Sequence[tuple[Tensor, Any]], preprocessing: Preprocessing, drawn: bool) -> Batch:
    """Items of a data set as a batch.

    Args:
        drawn: the masks are of the input itself, not of an image that is resized for it.
    """
    images = torch.stack([image for image, _ in items])
    return images, [_target(image, target, preprocessing, drawn) for image, target in items]


def _target(image: Tensor, target: Any, preprocessing: Preprocessing, drawn: bool) -> Any:
    """The target of an image, None where it could not be read: its label is then below 0, or its mask and pixels are empty."""
    if preprocessing.task == "classification":
        return None if int(target) < 0 else target
    labels = np.asarray(target)
    if not drawn and (labels == IGNORED).all() and not image.any():
        return None
    labels = labels.astype(np.uint8 if labels.max(initial=0) <= IGNORED else np.int32)
    size = image.shape[-2:]
    return Mask(labels, *((0, 0, *size) if drawn else place_of(size, preprocessing)))


def _is_drawn(dataset: Dataset) -> bool:
    """Whether a data set makes images and masks for the size, instead of resizing images."""
    return not isinstance(dataset, ImageSet | PreparedImages)


def place_of(size: Sequence[int], preprocessing: Preprocessing) -> tuple[float, float, float, float]:
    """Return where an input of `size` (h, w) shows the whole image: (top, left, height, width) in pixels of the input.

    All of the input but in the canvas protocol, where the image has the training size; it is then in the middle of a larger
    input, and a smaller one shows its middle.
    """
    if preprocessing.protocol != "canvas":
        return 0, 0, size[0], size[1]
    starts: list[int] = []
    for side, own in zip(size, preprocessing.base_size, strict=True):  # as torchvision's center_crop rounds
        starts.append((side - own) // 2 if side > own else -round((own - side) / 2))
    return starts[0], starts[1], *preprocessing.base_size


def window_places(size: Size, window: Size) -> list[tuple[int, int]]:
    """Return the upper left corners of windows of `window` (h, w) over an image of `size`, half overlapping, row by row.

    Along an axis on which the image is not larger than the window there is one, at 0.
    """
    starts = [
        [*range(0, side - own, max(1, own // 2)), max(0, side - own)] for side, own in zip(size, window, strict=True)
    ]  # the last one ends with the image
    return [(top, left) for top in starts[0] for left in starts[1]]


@contextmanager
def _how_to_go_on() -> Iterator[None]:
    """Context that adds to the error of an unreadable image how to evaluate without it."""
    try:
        yield
    except BadImage as error:
        error.add_note("with --on-bad-image count, unreadable images are left out and all of them listed")
        raise


def share_of(n: int, rank: int, world: int) -> range:
    """Indices of the images that process `rank` of `world` evaluates: rank, rank + world, rank + 2 world, ... below n."""
    return range(rank, n, world)


def _batches(groups: Sequence[Sequence[int | Draw]], start: int, size: int) -> list[list[int | Draw]]:
    """The images from number `start` on in batches of at most `size`, each of images of one group."""
    batches = []
    for group in groups:
        batches += [list(group[first : first + size]) for first in range(start, len(group), size)]
        start = max(0, start - len(group))
    return batches


class PreparedImages(Dataset):
    """A user's data set of (uint8 [3, h, w] or PIL image, label or mask [h, w]) with the preprocessing of an evaluation.

    Masks keep their own resolution. It has all images, or n of them drawn by seed. Items are indexed by an int or a `Draw`, and
    are (normalized float32 [3, H, W], label).
    """

    def __init__(self, images: Dataset, prepare: Prepare, n: int | None, seed: int) -> None:
        self.images, self.prepare = images, prepare
        self.chosen = subset(len(images), n, seed, type(images).__name__)
        self.classes = getattr(images, "classes", None)

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int | Draw) -> tuple[Tensor, int]:
        draw = index if isinstance(index, Draw) else Draw(index)
        image, target = self._read(draw.index)
        return (self.prepare if draw.size is None else self.prepare.at(draw.size))(image), target

    def image_sizes(self) -> list[Size]:
        """Return (height, width) of every image in pixels; reads all images."""
        return [(image.shape[-2], image.shape[-1]) for image, _ in map(self._read, range(len(self)))]

    def _read(self, index: int) -> tuple[Tensor, int]:
        image, label = self.images[self.chosen[index]]
        if isinstance(image, Image.Image):
            image = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
        if not isinstance(image, Tensor) or image.dtype != torch.uint8:
            kind = image.dtype if isinstance(image, Tensor) else type(image).__name__
            raise ValueError(
                f"the data set has images of {kind}: give uint8 [3, h, w] or PIL images; for images that are preprocessed "
                "already, give a function from (H, W) to the data set of that size"
            )
        return image, label


def source_of(data: Dataset | Callable[[Size], Dataset]) -> Source:
    """Return the `source` of `Images` for a user's data set, or for a function from (H, W) to a preprocessed data set."""

    def prepared(
        size: Size, *, n: int | None, seed: int, reading: Any = None, task: str = "classification", **preprocessing: Any
    ) -> Dataset:
        if task == "segmentation":  # whole images, as in `create_dataset`
            preprocessing |= {"crop_mode": "squash", "crop_pct": 1.0}
        return PreparedImages(data, Prepare(size, **preprocessing), n, seed)

    def as_returned(size: Size, **preprocessing: Any) -> Dataset:
        return data(size)

    return prepared if isinstance(data, Dataset) else as_returned


def reading_of(sweep: Sweep) -> Reading:
    """The file-reading options of an evaluation: on_bad_image, follow_links and val_fraction as a `Reading`."""
    on_bad = "leave_out" if sweep.on_bad_image == "count" else "raise"
    return Reading(on_bad=on_bad, follow_links=sweep.follow_links, val_fraction=sweep.val_fraction)


def check_data(sweep: Sweep, train_size: Size, sizes: Iterable[Size] | None = None, task: str = "classification") -> None:
    """Raise ValueError or OSError early when the data cannot be loaded, or not at some size and protocol.

    Args:
        sizes: (h, w) in pixels; by default the sweep's sizes in pixels, without token budgets, whose pixels depend on the
            model.
    """
    if sizes is None:
        sizes = [size for size in sweep.sizes if not isinstance(size, Budget)]
    for size in dict.fromkeys((train_size, *sizes)):
        for protocol in sweep.protocols:
            options = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "protocol": protocol, "base_size": train_size, "n": 1}
            options["reading"] = reading_of(sweep)
            options |= {} if task == "classification" else {"task": task}
            options["protocol"] = "canvas" if protocol == "sliding" else protocol
            try:
                create_dataset(sweep.data, "val", size, **options)
            except ValueError as error:
                raise ValueError(f"evaluation at {format_size(size)}, {protocol} protocol: {error}") from error


def halved(batch_size: int, hint: str) -> int:
    """Return half the batch size that ran out of memory; MemoryError with the hint where that was a single image."""
    if batch_size == 1:
        raise MemoryError(f"one image does not fit in memory: {hint}")
    return batch_size // 2
