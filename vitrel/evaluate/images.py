"""The images of an evaluation: what a protocol shows of them at a size, and batches that models share.

No other file of this room knows where images come from. A protocol is one function here, from a model and a size to a `View`.
"""

import gc
import hashlib
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitrel.common.files import shown
from vitrel.common.resources import check_workers, lacking
from vitrel.common.sizes import Budget, Size, format_size, native_size
from vitrel.data import IGNORED, SHAPES, Draw, ImageSet, Prepare, Reader, Reading, create_dataset
from vitrel.data.create import Task
from vitrel.data.readers.base import subset
from vitrel.data.readers.splits import Split
from vitrel.evaluate.checkpoint import TrainedModel
from vitrel.tasks import task_named
from vitrel.tasks.segmentation import Mask

CACHE_BYTES = 2 << 30
MASK_PIXELS = 1 << 21
Batch = tuple[Tensor, list[Any]]  # pixels [B, 3, H, W], and targets; None for images left out as unreadable
Data = str | Dataset


class View(NamedTuple):
    """How images are prepared for a model, under a protocol at a size; models with equal views share the images.

    Args:
        size: (h, w) in pixels.
        mode: "scale", "canvas" or "native", the protocol of `vitrel.data.Prepare`, which explains the next six arguments too.
        crop_pct: share of the sides of the resized image that the crop keeps.
        crop_mode: "center", "squash" or "border".
        base_size: training size (h, w) in pixels.
        mean: per channel, for normalization.
        std: per channel, for normalization.
        interpolation: "bicubic" or "bilinear".
        task: name of the task, on which depends whether images come with labels or masks.
        budget: maximum number of patch tokens of an image, which keeps its aspect ratio; None: all images have `size`.
        patch: (h, w) of a patch in pixels, with a budget.
        window: (h, w) in pixels of the windows in which a model sees an image, None: as a whole.
        translation: pixels by which the content is moved down and right; the upper and left edge are repeated.
    """

    size: Size
    mode: str
    crop_pct: float
    crop_mode: str
    base_size: Size
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    task: Task = "classification"
    budget: int | None = None
    patch: Size | None = None
    window: Size | None = None
    translation: int = 0

    @property
    def masks(self) -> bool:
        """Whether images come with masks instead of labels."""
        return task_named(self.task).dense

    @property
    def of_files(self) -> "View":
        """This view without window and translation, which are applied after loading: views equal in it load the same images."""
        return self._replace(window=None, translation=0)

    def shape_of(self, file: Size) -> Size:
        """Return the input size (h, w) for a file of `file` (h, w): `size`, or with a budget one of its aspect ratio."""
        return self.size if self.budget is None or self.patch is None else native_size(*file, self.budget, self.patch)


def scale(trained: TrainedModel, size: Size | Budget) -> View:
    """Return the view of the protocol scale: the same field of view at every size, so objects grow with the image.

    A token budget stands for the largest square within it. An image with a mask is not cropped, but resized as a whole to the
    size, whatever its aspect ratio.
    """
    how = trained.size_of(size), "scale", trained.crop_pct, trained.crop_mode, trained.img_size
    whole = View(*how, trained.mean, trained.std, trained.interpolation, trained.task)
    return whole._replace(crop_pct=1.0, crop_mode="squash") if whole.masks else whole  # masks are not cropped


def canvas(trained: TrainedModel, size: Size | Budget) -> View:
    """Return the view of the protocol canvas: objects keep their size in pixels.

    A size above the training size shows more content or padding, one below it a center crop. A token budget stands for the
    largest square within it.
    """
    return scale(trained, size)._replace(mode="canvas")


def native(trained: TrainedModel, size: Size | Budget) -> View:
    """Return the view of the protocol native: the whole image at its own aspect ratio, with at most the patch tokens of `size`.

    ValueError for a model without patches.
    """
    whole = scale(trained, size)._replace(mode="native", crop_pct=1.0, crop_mode="center")
    return whole._replace(budget=trained.budget_of(size), patch=trained.patch)


def sliding(trained: TrainedModel, size: Size | Budget) -> View:
    """Return the view of the protocol sliding: images as of `canvas`, which the model sees in windows of its training size.

    The windows overlap by half. ValueError for another task than segmentation.
    """
    if not task_named(trained.task).dense:
        raise ValueError("the sliding protocol joins the outputs of windows pixel by pixel: it is for segmentation")
    return canvas(trained, size)._replace(window=trained.img_size)


PROTOCOLS: dict[str, Callable[[TrainedModel, Size | Budget], View]] = {
    protocol.__name__: protocol for protocol in (scale, canvas, native, sliding)
}


class Images:
    """The images of an evaluation, prepared for any `View`; those of the last view stay in memory for the next model.

    Images that exceed CACHE_BYTES together are decoded again for each model. When memory runs out while a batch is loaded,
    `batch_size` is halved until the view changes, and nothing is cached.

    Attributes:
        classes: names of the classes in the order of labels; None where the data set has none.
        names: of the images, relative to the data folder, in its order; "0", "1", ... where the data set has none.
        total: number of images that the data have, of which `n` may choose some.
        source: name or folder of the data, or the class of a data set that was passed.

    Args:
        data: a name or folder that `create_dataset` takes, a data set of (uint8 [3, h, w] or PIL image, label or mask), or the
            images of a reader.
        view: any view, with which the data are opened.
        split: of a folder's images, "val" or "train".
        n: number of images, sampled with `seed`; None: all.
        seed: of generated or sampled images.
        batch_size: number of images in a batch.
        workers: number of processes that decode images, 0 for none but this one.
        reading: how files are read: what happens at unreadable images, which share is for evaluation.

    Raises:
        ValueError, OSError: the data cannot be read, or worker processes cannot be started.
    """

    def __init__(
        self,
        data: Data | Reader,
        view: View,
        *,
        split: Split = "val",
        n: int | None = None,
        seed: int = 0,
        batch_size: int = 128,
        workers: int = 0,
        reading: Reading = Reading(),
    ) -> None:
        check_workers(workers)
        self.data, self.split, self.n, self.seed, self.reading = data, split, n, seed, reading
        self.asked, self.batch_size, self.workers = batch_size, batch_size, workers
        self._view: View | None = None  # of the next two
        self._dataset: Dataset
        self._decoded: list[Batch] | None = None
        self._file_sizes: list[Size] = []
        dataset = self.dataset(view)
        self.classes: list[str] | None = [*map(shown, getattr(dataset, "classes", None) or ())] or None
        has_names = isinstance(dataset, ImageSet)
        names = dataset.names() if has_names else map(getattr(dataset, "name", str), range(len(dataset)))
        self.names, self.total = [*map(shown, names)], getattr(dataset, "total", len(dataset))
        self.source = data if isinstance(data, str) else type(data).__name__

    def __len__(self) -> int:
        return len(self.names)

    def dataset(self, view: View) -> Dataset:
        """Return the data set of a view, with items (normalized float32 [3, H, W], target).

        An item of a view with a token budget is taken by a `Draw`, index and size. With another view than in the call before,
        the cache is emptied and `batch_size` is again that of the start.
        """
        if self._view != (view := view.of_files):
            self._view, self._dataset, self._decoded = view, self._opened(view), None
            self.batch_size = self.asked
        return self._dataset

    def _opened(self, view: View) -> Dataset:
        data, names = self.data, ("crop_pct", "crop_mode", "base_size", "mean", "std", "interpolation")
        how: dict[str, Any] = {name: getattr(view, name) for name in names} | {"protocol": view.mode}
        options: dict[str, Any] = {"n": self.n, "seed": self.seed, "reading": self.reading}
        if isinstance(data, str):
            return create_dataset(data, self.split, view.size, task=view.task, **options, **how)
        if isinstance(data, Reader):
            return ImageSet(data, Prepare(view.size, **how), **options)
        return PreparedImages(data, Prepare(view.size, **how), self.n, self.seed)

    def check(self, views: Iterable[View]) -> None:
        """Open generated images in each view, ValueError where they cannot be made in one; for other data nothing is done."""
        for view in views if self.source in SHAPES else ():
            try:
                self.dataset(view)
            except ValueError as error:
                raise ValueError(f"evaluation at {format_size(view.size)}, {view.mode} protocol: {error}") from error

    def digest(self) -> str:
        """Return a hash that changes with the names of the images, their labels and the contents of their files.

        For generated images and a data set that the user passed, the hash is only of data, seed, number of images and classes.
        """
        if isinstance(self._dataset, ImageSet):
            return self._dataset.digest()
        return hashlib.sha256(json.dumps((self.source, self.seed, len(self), self.classes)).encode()).hexdigest()

    def batches(self, view: View, rank: int = 0, world: int = 1) -> Iterator[Batch]:
        """Yield batches (pixels [B, 3, H, W], targets) of the images rank, rank + world, ..., in the order of `order`.

        The images of a batch have one size. The target of an image that could not be read is None.
        """
        for pixels, targets in self._read(view.of_files, rank, world):
            yield moved(pixels, view.translation), targets

    def _read(self, view: View, rank: int, world: int) -> Iterator[Batch]:
        """Yield the batches of `batches` without translation, from the cache, or decoded, and cached at the end if they fit."""
        self.dataset(view)  # may empty the cache
        if self._decoded is not None:
            yield from self._decoded
            return
        groups = self._groups(view, rank, world)
        fits = sum(map(len, groups)) * 3 * math.prod(view.size) * 4 <= CACHE_BYTES
        read: list[Batch] = []
        for batch in self._loaded(view, groups, read):
            fits = fits and self.batch_size == self.asked
            if fits:
                read.append(batch)
            else:
                read.clear()
            yield batch
        if fits:
            self._decoded = read

    def batch_of(self, view: View) -> int:
        """Return the number of images in a batch: `batch_size`, with masks at most MASK_PIXELS / (pixels of an image), or 1."""
        return min(self.batch_size, max(1, MASK_PIXELS // math.prod(view.size))) if view.masks else self.batch_size

    def order(self, view: View, rank: int = 0, world: int = 1) -> list[int]:
        """Return the indices of the images rank, rank + world, ..., in the order of `batches`: with a token budget, by size."""
        groups = self._groups(view, rank, world)
        return [item.index if isinstance(item, Draw) else item for group in groups for item in group]

    def shapes(self, view: View) -> Counter[Size]:
        """Return {size (h, w) in pixels that the model gets: number of images}; unreadable files count as square."""
        return Counter({view.size: len(self)} if view.budget is None else map(view.shape_of, self._sizes(view)))

    def _sizes(self, view: View) -> list[Size]:
        """Return the sizes (h, w) of all files in pixels, (1, 1) for generated images; only the first call reads the files."""
        if not self._file_sizes:
            dataset = self.dataset(view)
            generated = not hasattr(dataset, "image_sizes")
            self._file_sizes = [(1, 1)] * len(self) if generated else dataset.image_sizes()
        return self._file_sizes

    def _groups(self, view: View, rank: int, world: int) -> list[Sequence[int | Draw]]:
        """Return images rank, rank + world, ...: one group of indices, or with a budget a group of `Draw`s per input size."""
        share = range(rank, len(self), world)
        if view.budget is None:
            return [share]
        files, groups = self._sizes(view), defaultdict[Size, list[int | Draw]](list)
        for index in share:
            size = view.shape_of(files[index])
            groups[size].append(Draw(index, size))
        return [groups[size] for size in sorted(groups)]

    def _loaded(self, view: View, groups: Sequence[Sequence[int | Draw]], read: list[Batch]) -> Iterator[Batch]:
        """Yield batches of images of one group each, decoded.

        If memory runs out, `read` is emptied, `self.batch_size` is halved, and the images that are left follow.
        """
        dataset, done = self.dataset(view), 0
        collate = partial(_batch, view=view, drawn=_is_drawn(dataset))
        while True:
            batches, most = _batches(groups, done, self.batch_of(view)), self.batch_of(view)
            try:
                for batch in DataLoader(dataset, batch_sampler=batches, num_workers=self.workers, collate_fn=collate):
                    done += len(batch[1])
                    yield batch
                return
            except (RuntimeError, MemoryError, ConnectionResetError) as error:
                if most == 1 or not lacking(error):
                    raise
            self.batch_size = most // 2
            read.clear()
            # The error holds the failed loader in a cycle. A process of the next loader that collected it would wait for ever.
            gc.collect()

    def bad(self, view: View) -> list[str]:
        """Return the names of images that this process found unreadable since it opened `view`; [] for data without files."""
        dataset = self.dataset(view)
        return [shown(dataset.name(at)) for at in dataset.bad_indices()] if isinstance(dataset, ImageSet) else []

    def items(self, view: View, indices: Iterable[int]) -> Iterator[tuple[int, Tensor, Any]]:
        """Yield (index, image [3, H, W], target) of the images `indices`, prepared for `view`, without unreadable ones."""
        dataset, files = self.dataset(view), None if view.budget is None else self._sizes(view)
        for index in indices:
            image, target = dataset[index if files is None else Draw(index, view.shape_of(files[index]))]
            target = _target(image, target, view, _is_drawn(dataset))
            if target is not None:
                yield index, moved(image[None], view.translation)[0], target


def _batch(items: Sequence[tuple[Tensor, Any]], view: View, drawn: bool) -> Batch:
    """Return items (image, target) of a data set as a batch (pixels [B, 3, H, W], targets), for arguments as in `_target`."""
    images = torch.stack([image for image, _ in items])
    return images, [_target(image, target, view, drawn) for image, target in items]


def _target(image: Tensor, target: Any, view: View, drawn: bool) -> Any:
    """Return the target of an image, a mask as `Mask`; None where the image could not be read.

    An image that could not be read has a label below 0, or a mask without any class and only pixels of 0.

    Args:
        image: [3, H, W] as the model gets it.
        target: of the data set: a label, targets [K] of 0 and 1 for several labels, or a mask.
        view: of the data set.
        drawn: that of `_is_drawn`: the mask covers the image pixel by pixel, and no image is unreadable. Otherwise the mask has
            the resolution of its file.
    """
    if not view.masks:
        return None if isinstance(target, (int, np.integer)) and target < 0 else target
    labels = np.asarray(target)
    if not drawn and (labels == IGNORED).all() and not image.any():
        return None
    labels = labels.astype(np.uint8 if labels.max(initial=0) <= IGNORED else np.int32)
    size = image.shape[-2:]
    return Mask(labels, *((0, 0, *size) if drawn else place_of(size, view)))


def _is_drawn(dataset: Dataset) -> bool:
    """Return whether a data set generates images and masks at the size of the model's input, so a mask has its resolution."""
    return not isinstance(dataset, ImageSet | PreparedImages)


def place_of(size: Sequence[int], view: View) -> tuple[float, float, float, float]:
    """Return where in an input of `size` (h, w) the whole image lies: (top, left, height, width) in pixels of the input.

    It fills the input, but not in the canvas protocol, where the image has the training size: it is then in the middle of a
    larger input, and a smaller input shows its middle (top and left are negative).
    """
    if view.mode != "canvas":
        return 0, 0, size[0], size[1]
    starts: list[int] = []
    for side, own in zip(size, view.base_size, strict=True):  # as torchvision's center_crop rounds
        starts.append((side - own) // 2 if side > own else -round((own - side) / 2))
    return starts[0], starts[1], *view.base_size


def moved(pixels: Tensor, by: int) -> Tensor:
    """Return images [B, C, H, W] with the content moved `by` pixels down and right; upper and left edge pixels are repeated."""
    if not by:
        return pixels
    height, width = pixels.shape[-2:]
    down, right = (torch.arange(side, device=pixels.device).sub(by).clamp(min=0) for side in (height, width))
    return pixels[..., down[:, None], right]


def _batches(groups: Sequence[Sequence[int | Draw]], start: int, size: int) -> list[Sequence[int | Draw]]:
    """Return batches of at most `size` images, each of one group, without the first `start` images of the joined groups."""
    batches = []
    for group in groups:
        batches += [group[first : first + size] for first in range(start, len(group), size)]
        start = max(0, start - len(group))
    return batches


class PreparedImages(Dataset):
    """A user's data set of (uint8 [3, h, w] or PIL image, label or mask [h, w]) with the preprocessing of an evaluation.

    Masks keep their own resolution. It has all images, or n of them sampled with `seed`. Items are taken by an int or a `Draw`,
    and are (normalized float32 [3, H, W], label or mask).
    """

    def __init__(self, images: Dataset, prepare: Prepare, n: int | None, seed: int) -> None:
        self.images, self.prepare, self.total = images, prepare, len(images)
        self.chosen = subset(self.total, n, seed, type(images).__name__)
        self.classes = getattr(images, "classes", None)

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int | Draw) -> tuple[Tensor, int]:
        draw = index if isinstance(index, Draw) else Draw(index)
        image, target = self._image(draw.index)
        return (self.prepare if draw.size is None else self.prepare.at(draw.size))(image), target

    def image_sizes(self) -> list[Size]:
        """Return (height, width) of every image in pixels; reads all images."""
        return [(image.shape[-2], image.shape[-1]) for image, _ in map(self._image, range(len(self)))]

    def _image(self, index: int) -> tuple[Tensor, int]:
        """Return (uint8 image [3, h, w], target) of the user's data set; ValueError for images of another type."""
        image, label = self.images[self.chosen[index]]
        if isinstance(image, Image.Image):
            image = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
        if not isinstance(image, Tensor) or image.dtype != torch.uint8:
            kind = image.dtype if isinstance(image, Tensor) else type(image).__name__
            raise ValueError(f"the data set has images of {kind}: give uint8 [3, h, w] or PIL images")
        return image, label
