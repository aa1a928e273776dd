"""The images of an evaluation: decoded and prepared for one size and protocol, once for all models that take the same."""

import hashlib
import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from vitrel.data import ImageSet, Prepare, Reading, create_dataset
from vitrel.data.base import subset
from vitrel.evaluate.settings import Sweep
from vitrel.files import shown
from vitrel.sizes import Size, format_size

CACHE_BYTES = 2 << 30
Source = Callable[..., Dataset]
_DIED = "exited unexpectedly"  # of a loader process: as a rule killed by the system, which lacked memory
_OUT_OF_MEMORY = (
    "out of memory",
    "not enough memory",
    "can't allocate memory",
    "cannot allocate memory",
    "failed to allocate",
    # of loader processes: what they share is full, or the system has ended one
    "out of shared memory",
    "insufficient shared memory",
    "unable to allocate shared memory",
    "unable to resize file",
    "killed by signal: killed",
)


class Preprocessing(NamedTuple):
    """How an image becomes the input of a model: its size and protocol, and the preprocessing the model was trained with.

    size: (h, w) in pixels. crop_pct: share of the resized image that the centre crop keeps. base_size: (h, w) in pixels, the
    size of training.
    """

    size: Size
    protocol: str
    crop_pct: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    base_size: Size


class ImageList(NamedTuple):
    """The images of an evaluation by name: below the folder of the data, in its order; and the classes, by label."""

    names: list[str]
    classes: list[str]


class Images:
    """The images of the current size, protocol and crop, decoded once for all models that ask with the same preprocessing.

    What exceeds CACHE_BYTES is decoded anew for each model. A batch that does not fit in memory while it is loaded halves
    `batch_size` until the images change, and no more are cached; `halvings` counts that. source: (size, **how) -> data set, in
    the place of `create_dataset(sweep.data, "val", size, **how)`.
    """

    def __init__(self, sweep: Sweep, source: Source | None = None) -> None:
        self.sweep, self.source = sweep, source
        self.batch_size, self.halvings = sweep.batch_size, 0
        self._at: tuple | None = None
        self._listed: ImageList | None = None
        self._datasets: dict[Preprocessing, Dataset] = {}
        self._decoded: dict[Preprocessing, list[tuple[Tensor, Tensor]]] = {}
        self._growing: list[tuple[Tensor, Tensor]] | None = None  # of `_decoded`, while they are read
        self._caches = True

    def dataset(self, asked: Preprocessing) -> Dataset:
        """All images; items are (float32 [3, H, W] normalised, class index)."""
        if self._at != (asked.size, asked.protocol, asked.crop_pct):
            self._at = (asked.size, asked.protocol, asked.crop_pct)
            self._datasets.clear()
            self._decoded.clear()
            self.batch_size, self._caches = self.sweep.batch_size, True
        if asked not in self._datasets:
            how = asked._asdict() | {"n": self.sweep.n, "seed": self.sweep.data_seed, "reading": reading_of(self.sweep)}
            size = how.pop("size")
            made = create_dataset(self.sweep.data, "val", size, **how) if self.source is None else self.source(size, **how)
            self._datasets[asked] = made
        return self._datasets[asked]

    def listed(self, asked: Preprocessing) -> ImageList:
        """The names of all images, made once; numbers where the data set has none."""
        dataset = self.dataset(asked)
        if self._listed is None or len(self._listed.names) != len(dataset):
            own = dataset.names() if isinstance(dataset, ImageSet) else map(getattr(dataset, "name", str), range(len(dataset)))
            self._listed = ImageList([*map(shown, own)], [*map(shown, getattr(dataset, "classes", None) or ())])
        return self._listed

    def digest(self, asked: Preprocessing) -> str:
        """Tells other images, labels and contents of files apart: the data set's own digest; of images that are drawn, and of
        the user's own data set, the settings, number and classes alone.
        """
        dataset = self.dataset(asked)
        if isinstance(dataset, ImageSet):
            return dataset.digest()
        known = self.sweep.data, self.sweep.data_seed, len(dataset), getattr(dataset, "classes", None)
        return hashlib.sha256(json.dumps(known).encode()).hexdigest()

    def batches(self, asked: Preprocessing, rank: int = 0, world: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of `share_of(dataset, rank, world)`: pixels [B, 3, H, W] and labels [B], -1 for images left out.

        MemoryError where one image does not fit in memory.
        """
        dataset = share_of(self.dataset(asked), rank, world)
        if asked in self._decoded:
            yield from self._decoded[asked]
            return
        height, width = asked.size
        fits = len(dataset) * 3 * height * width * 4 <= CACHE_BYTES
        self._growing = [] if fits and self._caches else None
        for batch in self._loaded(dataset):
            if self._growing is not None:
                self._growing.append(batch)
            yield batch
        if self._growing is not None:
            self._decoded[asked], self._growing = self._growing, None

    def _loaded(self, dataset: Dataset) -> Iterator[tuple[Tensor, Tensor]]:
        start = 0
        while start < len(dataset):
            rest = Subset(dataset, range(start, len(dataset))) if start else dataset
            try:
                for batch in DataLoader(rest, batch_size=self.batch_size, num_workers=self.sweep.workers):
                    start += len(batch[1])
                    yield batch
                return
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error) and _DIED not in str(error):
                    raise
            # outside the handler, whose traceback would keep the batch alive; what is cached may be what it lacked
            self._growing, self._caches = None, False
            self._decoded.clear()
            where = f"it is image {start + 1} of {len(dataset)}, and is loaded"
            self.batch_size = halved(min(self.batch_size, len(dataset) - start), f"{where}; use fewer --workers")
            self.halvings += 1

    def bad(self, asked: Preprocessing) -> tuple[str, ...]:
        """The names of the images that this process could not read so far; none where the data cannot tell."""
        dataset = self.dataset(asked)
        return tuple(map(dataset.name, dataset.bad_indices())) if isinstance(dataset, ImageSet) else ()

    def first(self, asked: Preprocessing, n: int) -> Tensor:
        """The first n images of all, however many processes share them, but for those left out: [n or fewer, 3, H, W]."""
        dataset = self.dataset(asked)
        items = [dataset[i] for i in range(min(n, len(dataset)))]
        pixels = [image for image, label in items if label >= 0]
        return torch.stack(pixels) if pixels else torch.zeros(0, 3, *asked.size)


def share_of(dataset: Dataset, rank: int, world: int) -> Dataset:
    """Images rank, rank + world, rank + 2 world, ... of a data set: over all processes each once, whatever their number."""
    return dataset if world == 1 else Subset(dataset, range(rank, len(dataset), world))


class PreparedImages(Dataset):
    """`images` of (uint8 [3, h, w] or PIL image, label) prepared for evaluation, n of them drawn by seed or all."""

    def __init__(self, images: Dataset, prepare: Callable[[Tensor], Tensor], n: int | None, seed: int) -> None:
        self.images, self.prepare = images, prepare
        self.chosen = subset(len(images), n, seed, type(images).__name__)
        self.classes = getattr(images, "classes", None)

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image, label = self.images[self.chosen[index]]
        if isinstance(image, Image.Image):
            image = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
        if not isinstance(image, Tensor) or image.dtype != torch.uint8:
            kind = image.dtype if isinstance(image, Tensor) else type(image).__name__
            raise ValueError(
                f"the data set gives images of {kind}: give uint8 [3, h, w] or PIL images, or, of images that are prepared "
                "already, a function from (H, W) to the data set of that size"
            )
        return self.prepare(image), int(label)


def source_of(data: Dataset | Callable[[Size], Dataset]) -> Source:
    """The source of `Images` for a data set, which is prepared here, or for a function from (H, W) to one of that size."""

    def prepared(size: Size, *, n: int | None, seed: int, reading: Any = None, **how: Any) -> Dataset:
        return PreparedImages(data, Prepare(size, **how), n, seed)

    def given(size: Size, **how: Any) -> Dataset:
        return data(size)

    return prepared if isinstance(data, Dataset) else given


def reading_of(sweep: Sweep) -> Reading:
    """How the images of an evaluation are read."""
    return Reading(on_bad="leave_out" if sweep.on_bad_image == "count" else "raise", follow_links=sweep.follow_links)


def check_data(sweep: Sweep, train_size: Size) -> None:
    """ValueError or OSError now, not after hours of training, when the data cannot be shown at some size and protocol."""
    for size in dict.fromkeys((train_size, *sweep.sizes)):
        for protocol in sweep.protocols:
            how = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "protocol": protocol, "base_size": train_size, "n": 1}
            how["reading"] = reading_of(sweep)
            try:
                create_dataset(sweep.data, "val", size, **how)
            except ValueError as error:
                raise ValueError(f"evaluation at {format_size(size)}, {protocol} protocol: {error}") from error


def out_of_memory(error: BaseException) -> bool:
    """True for torch's and Python's out-of-memory errors; PyTorch reports a failed CPU allocation as a plain RuntimeError."""
    if isinstance(error, (torch.cuda.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _OUT_OF_MEMORY)


def halved(batch_size: int, way_out: str) -> int:
    """The batch size to go on with where one ran out of memory. MemoryError with the way out where it was one image."""
    if batch_size == 1:
        raise MemoryError(f"one image does not fit in memory: {way_out}")
    return batch_size // 2
