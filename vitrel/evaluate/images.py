"""The images of an evaluation, decoded once for all models that take the same."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset

from vitrel.data import ImageSet, Reading, create_dataset
from vitrel.evaluate.plan import Task
from vitrel.evaluate.runner import halved, out_of_memory
from vitrel.evaluate.settings import Sweep
from vitrel.evaluate.split import own_share

CACHE_BYTES = 2 << 30
DIED = "exited unexpectedly"  # of a loader process: as a rule killed by the system, which lacked memory
Source = Callable[..., Dataset]


class Images:
    """The images of the current size, protocol and crop, decoded once for all models that ask with the same preprocessing.

    What exceeds CACHE_BYTES is decoded anew for each model. A batch that does not fit in memory while it is loaded halves
    `batch_size` until the images change, and no more are kept; `halved` counts that. source: (size, **how) -> data set, in the
    place of `create_dataset(sweep.data, "val", size, **how)`.
    """

    def __init__(self, sweep: Sweep, source: Source | None = None) -> None:
        self.sweep, self.source = sweep, source
        self.batch_size, self.halved = sweep.batch_size, 0
        self._at: tuple | None = None
        self._datasets: dict[tuple, Dataset] = {}
        self._decoded: dict[tuple, list[tuple[Tensor, Tensor]]] = {}
        self._growing: list[tuple[Tensor, Tensor]] | None = None  # of `_decoded`, while they are read
        self._keeps = True

    def dataset(self, task: Task) -> Dataset:
        """All images of a task; items are (float32 [3, H, W] normalised, class index)."""
        if self._at != (task.size, task.protocol, task.crop_pct):
            self._at = (task.size, task.protocol, task.crop_pct)
            self._datasets.clear()
            self._decoded.clear()
            self.batch_size, self._keeps = self.sweep.batch_size, True
        key = _key(task)
        if key not in self._datasets:
            mean, std, crop_pct, interpolation, base_size = key
            reading = {"reading": Reading(on_bad="leave_out")} if self.sweep.on_bad_image == "count" else {}
            how = dict(
                mean=mean, std=std, crop_pct=crop_pct, interpolation=interpolation, protocol=task.protocol,
                base_size=base_size, n=self.sweep.n, seed=self.sweep.data_seed, **reading,
            )  # fmt: skip
            if self.source is None:
                self._datasets[key] = create_dataset(self.sweep.data, "val", task.size, **how)
            else:
                self._datasets[key] = self.source(task.size, **how)
        return self._datasets[key]

    def batches(self, task: Task) -> Iterator[tuple[Tensor, Tensor]]:
        """This process's share of the images in batches: pixels [B, 3, H, W] and labels [B], -1 for images left out."""
        dataset, key = own_share(self.dataset(task)), _key(task)
        if key in self._decoded:
            yield from self._decoded[key]
            return
        height, width = task.size
        fits = len(dataset) * 3 * height * width * 4 <= CACHE_BYTES
        self._growing = [] if fits and self._keeps else None
        for batch in self._loaded(dataset, task):
            if self._growing is not None:
                self._growing.append(batch)
            yield batch
        if self._growing is not None:
            self._decoded[key], self._growing = self._growing, None

    def _loaded(self, dataset: Dataset, task: Task) -> Iterator[tuple[Tensor, Tensor]]:
        start = 0
        while start < len(dataset):
            rest = Subset(dataset, range(start, len(dataset))) if start else dataset
            try:
                for batch in DataLoader(rest, batch_size=self.batch_size, num_workers=self.sweep.workers):
                    start += len(batch[1])
                    yield batch
                return
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error) and DIED not in str(error):
                    raise
            # outside the handler, whose traceback would keep the batch alive; what is kept may be what it lacked
            self._growing, self._keeps = None, False
            self._decoded.clear()
            where = f"it is image {start + 1} of {len(dataset)} of {task.name}, and is loaded"
            self.batch_size = halved(min(self.batch_size, len(dataset) - start), f"{where}; use fewer --workers")
            self.halved += 1

    def bad(self, task: Task) -> tuple[str, ...]:
        """The names of the images of a task that this process could not read so far; none where the data cannot tell."""
        dataset = self.dataset(task)
        return tuple(map(dataset.name, dataset.bad_indices())) if isinstance(dataset, ImageSet) else ()

    def first(self, task: Task, n: int) -> Tensor:
        """The first n images of all, however many processes share them, but for those left out: [n or fewer, 3, H, W]."""
        dataset = self.dataset(task)
        items = [dataset[i] for i in range(min(n, len(dataset)))]
        pixels = [image for image, label in items if label >= 0]
        return torch.stack(pixels) if pixels else torch.zeros(0, 3, *task.size)


def _key(task: Task) -> tuple:
    trained = task.trained
    return trained.mean, trained.std, task.crop_pct, trained.interpolation, trained.img_size
