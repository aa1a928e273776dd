"""The images of an evaluation: decoded and prepared for one size and protocol, once for all models that take the same."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitrel.data import Draw, ImageSet, Prepare, Reading, create_dataset
from vitrel.data.base import subset
from vitrel.evaluate.settings import Sweep
from vitrel.sizes import Budget, Size, format_size, native_size

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
    size of training. budget, patch: at native shape, patch tokens of an image at most, and (h, w) of a patch in pixels.
    """

    size: Size
    protocol: str
    crop_pct: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    base_size: Size
    budget: int | None = None
    patch: Size | None = None


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
        self._datasets: dict[Preprocessing, Dataset] = {}
        self._file_sizes: list[Size] = []
        self._decoded: dict[Preprocessing, list[tuple[Tensor, Tensor]]] = {}
        self._growing: list[tuple[Tensor, Tensor]] | None = None  # of `_decoded`, while they are read
        self._caches = True

    def dataset(self, asked: Preprocessing) -> Dataset:
        """All images; items are (float32 [3, H, W] normalised, class index), at native shape those of a `Draw` with a size."""
        at = asked.size, asked.protocol, asked.crop_pct, asked.budget
        if self._at != at:
            self._at = at
            self._datasets.clear()
            self._decoded.clear()
            self.batch_size, self._caches = self.sweep.batch_size, True
        if asked not in self._datasets:
            how = asked._asdict() | {"n": self.sweep.n, "seed": self.sweep.data_seed, "reading": reading_of(self.sweep)}
            size, _, _ = how.pop("size"), how.pop("budget"), how.pop("patch")
            made = create_dataset(self.sweep.data, "val", size, **how) if self.source is None else self.source(size, **how)
            self._datasets[asked] = made
        return self._datasets[asked]

    def batches(self, asked: Preprocessing, rank: int = 0, world: int = 1) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches of the images of `order(asked, rank, world)`: pixels [B, 3, H, W] and labels [B], -1 for images left out.

        The images of a batch have one size, and those of one size come one after the other. MemoryError where one image does
        not fit in memory.
        """
        dataset = self.dataset(asked)
        if asked in self._decoded:
            yield from self._decoded[asked]
            return
        height, width = asked.size
        groups = self._groups(asked, rank, world)
        fits = sum(map(len, groups)) * 3 * height * width * 4 <= CACHE_BYTES
        self._growing = [] if fits and self._caches else None
        for batch in self._loaded(dataset, groups):
            if self._growing is not None:
                self._growing.append(batch)
            yield batch
        if self._growing is not None:
            self._decoded[asked], self._growing = self._growing, None

    def order(self, asked: Preprocessing, rank: int = 0, world: int = 1) -> list[int]:
        """The indices of the images of `batches`, in their order: those of `share_of`, at native shape by size."""
        return [draw.index if isinstance(draw, Draw) else draw for group in self._groups(asked, rank, world) for draw in group]

    def shapes(self, asked: Preprocessing) -> Counter[Size]:
        """How many of all images there are of every size (h, w) in pixels; unreadable headers count as square."""
        sizes = self._native_sizes(asked)
        return Counter({asked.size: len(self.dataset(asked))} if sizes is None else sizes)

    def _native_sizes(self, asked: Preprocessing) -> list[Size] | None:
        """The size at which every image is shown; None where that is `asked.size`."""
        if asked.budget is None or asked.patch is None:
            return None
        if not self._file_sizes:  # once: of all sizes and protocols the images are the same
            dataset = self.dataset(asked)
            drawn = not hasattr(dataset, "image_sizes")
            self._file_sizes = [(1, 1)] * len(dataset) if drawn else dataset.image_sizes()
        budget, patch = asked.budget, asked.patch
        return [native_size(h, w, budget, patch) for h, w in self._file_sizes]

    def _groups(self, asked: Preprocessing, rank: int, world: int) -> list[Sequence[int | Draw]]:
        """The images of a share, apart by the size at which they are shown."""
        share, sizes = share_of(len(self.dataset(asked)), rank, world), self._native_sizes(asked)
        if sizes is None:
            return [share]
        groups: dict[Size, list[int | Draw]] = defaultdict(list)
        for index in share:
            groups[sizes[index]].append(Draw(index, sizes[index]))
        return [groups[size] for size in sorted(groups)]

    def _loaded(self, dataset: Dataset, groups: Sequence[Sequence[int | Draw]]) -> Iterator[tuple[Tensor, Tensor]]:
        start, total = 0, sum(map(len, groups))
        while start < total:
            try:
                todo = _batches(groups, start, self.batch_size)
                for batch in DataLoader(dataset, batch_sampler=todo, num_workers=self.sweep.workers):
                    start += len(batch[1])
                    yield batch
                return
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error) and _DIED not in str(error):
                    raise
            # outside the handler, whose traceback would keep the batch alive; what is cached may be what it lacked
            self._growing, self._caches = None, False
            self._decoded.clear()
            where = f"it is image {start + 1} of {total}, and is loaded"
            self.batch_size = halved(min(self.batch_size, max(map(len, todo))), f"{where}; use fewer --workers")
            self.halvings += 1

    def bad(self, asked: Preprocessing) -> tuple[str, ...]:
        """The names of the images that this process could not read so far; none where the data cannot tell."""
        dataset = self.dataset(asked)
        return tuple(map(dataset.name, dataset.bad_indices())) if isinstance(dataset, ImageSet) else ()

    def first(self, asked: Preprocessing, n: int) -> list[Tensor]:
        """The first n images of all, however many processes share them, but for those left out: [3, H, W] each."""
        dataset, sizes = self.dataset(asked), self._native_sizes(asked)
        items = [dataset[i if sizes is None else Draw(i, sizes[i])] for i in range(min(n, len(dataset)))]
        return [image for image, label in items if label >= 0]


def share_of(n: int, rank: int, world: int) -> range:
    """Images rank, rank + world, rank + 2 world, ... of n: over all processes each once, whatever their number."""
    return range(rank, n, world)


def _batches(groups: Sequence[Sequence[int | Draw]], start: int, size: int) -> list[list[int | Draw]]:
    """The images from `start` on in batches of at most `size`, none of which holds images of two groups."""
    found = []
    for group in groups:
        found += [list(group[first : first + size]) for first in range(start, len(group), size)]
        start = max(0, start - len(group))
    return found


class PreparedImages(Dataset):
    """`images` of (uint8 [3, h, w] or PIL image, label) prepared for evaluation, n of them drawn by seed or all.

    Items are asked for by index or `Draw`.
    """

    def __init__(self, images: Dataset, prepare: Prepare, n: int | None, seed: int) -> None:
        self.images, self.prepare = images, prepare
        self.chosen = subset(len(images), n, seed, type(images).__name__)
        self.classes = getattr(images, "classes", None)

    def __len__(self) -> int:
        return len(self.chosen)

    def __getitem__(self, index: int | Draw) -> tuple[Tensor, int]:
        draw = index if isinstance(index, Draw) else Draw(index)
        image, label = self._read(draw.index)
        return (self.prepare if draw.size is None else self.prepare.at(draw.size))(image), int(label)

    def image_sizes(self) -> list[Size]:
        """(height, width) of every image, pixels; all are read."""
        return [(image.shape[-2], image.shape[-1]) for image, _ in map(self._read, range(len(self)))]

    def _read(self, index: int) -> tuple[Tensor, int]:
        image, label = self.images[self.chosen[index]]
        if isinstance(image, Image.Image):
            image = torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)
        if not isinstance(image, Tensor) or image.dtype != torch.uint8:
            kind = image.dtype if isinstance(image, Tensor) else type(image).__name__
            raise ValueError(
                f"the data set gives images of {kind}: give uint8 [3, h, w] or PIL images, or, of images that are prepared "
                "already, a function from (H, W) to the data set of that size"
            )
        return image, label


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


def check_data(sweep: Sweep, train_size: Size, sizes: Iterable[Size] | None = None) -> None:
    """ValueError or OSError now, not after hours of training, when the data cannot be shown at some size and protocol.

    sizes: those of the sweep for a model; by default its sizes in pixels alone, since a budget of tokens is one for a model.
    """
    if sizes is None:
        sizes = [size for size in sweep.sizes if not isinstance(size, Budget)]
    for size in dict.fromkeys((train_size, *sizes)):
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
