"""Batches read sequentially from shards, for training and evaluation; no image is read twice in an epoch."""

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import partial
from itertools import accumulate, islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from vitrel.common.extras import optional_import
from vitrel.data.base import Draw, check_shared, shared
from vitrel.data.decode import decode
from vitrel.data.shards import Shards


class Batch(NamedTuple):
    """Number and size of the images in a batch.

    Args:
        images: number of images on each rank; the global batch has images · world.
        size: (H, W) of the images, pixels; None for the data set's size.
    """

    images: int
    size: tuple[int, int] | None = None


class Encoded(NamedTuple):
    """An encoded image in the shuffle buffer: index in the split, label, name, and its bytes (None if it is skipped)."""

    index: int  # type: ignore[assignment]  # not tuple.index
    label: int
    name: str
    data: bytes | None


class ShardBatches(IterableDataset):
    """Iterable data set of one rank's batches (float32 [B, 3, H, W], int64 [B]), read sequentially from shards.

    It is used with `DataLoader(..., batch_size=None, num_workers=K)`. The shards are shuffled by (seed, epoch). The sequence of
    their images is divided into consecutive ranges, one per rank and loader process, as long as the batches of that process
    need, so that no image is in two ranges. A process reads its range in order through a shuffle buffer seeded by (seed, epoch,
    rank, process), and makes every K-th batch. Therefore the batches depend on K, but not otherwise on the machine. The
    augmentation of an image does not depend on K.

    With `on_bad="replace"`, an unreadable image is replaced by the next readable image of its batch.

    Args:
        shards: the whole split (no `n`).
        plan: function that returns the batches of an epoch, the same on all ranks; must be picklable if loader processes are
            spawned.
        rank, world: this rank, and the number of ranks.
        seed: seed of the order.
        buffer: number of encoded images in the shuffle buffer of each loader process; 1000 ImageNet images take about 110 MB.
        shuffle: False reads in order; batches of the plan beyond the end of the split are filled with zeros of label -1.

    Raises:
        ValueError: a subset (`n`) of the shards, a rank out of range, or a buffer below 1; while reading, a plan with more
            images than the split (with shuffle) or fewer (without).
    """

    def __init__(
        self,
        shards: Shards,
        plan: Callable[[int], list[Batch]],
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
        buffer: int = 1000,
        shuffle: bool = True,
    ) -> None:
        if shards.chosen is not None:
            raise ValueError("shards can only be streamed completely: leave out n, or pack a subset of the images")
        if not 0 <= rank < world or buffer < 1:
            raise ValueError(f"rank ({rank}) must be at least 0 and below world ({world}), buffer ({buffer}) at least 1")
        self.shards, self.plan, self.rank, self.world = shards, plan, rank, world
        self.seed, self.buffer, self.shuffle = seed, buffer, shuffle
        self._skip = shared(torch.zeros(1, dtype=torch.int64))  # for persistent loader processes

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration; a change of epoch resets `skip` to 0."""
        if epoch != self.shards.epoch:
            self._skip.zero_()
        self.shards.set_epoch(epoch)

    def skip(self, batches: int) -> None:
        """Start the next iteration of this epoch at batch number `batches`, without reading the images before it.

        Call it after `set_epoch`, which resets it when the epoch changes.
        """
        self._skip.fill_(batches)

    def __len__(self) -> int:
        """Return the number of batches of this rank in an epoch, including skipped ones."""
        return len(self.plan(self.shards.epoch))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        check_shared(self._skip)
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        skip = int(self._skip)
        # the loader takes its first batch from process 0, so process 0 starts with batch number `skip`
        return self._batches(self.shards.epoch, (worker + skip) % workers, workers, skip)

    def indices(self, epoch: int, rank: int, workers: int) -> list[list[int]]:
        """Return the indices of the images in each batch of a rank, by repeating the shuffle on indices, without reading.

        Unreadable images are included, not their replacements; images of zeros that fill a batch are not included.

        workers: loader processes per rank, on which the batches depend; 0 as 1.
        """
        plan, workers = self.plan(epoch), max(workers, 1)
        batches: list[list[int]] = [[] for _ in plan]
        for worker in range(workers):
            start, stop = self._range(epoch, rank, worker, workers)
            order = self._shuffled(iter(self._indices(epoch, start, stop)), epoch, rank, worker)
            for j in range(worker, len(plan), workers):
                batches[j] = list(islice(order, plan[j].images))
        return batches

    def _batches(self, epoch: int, worker: int, workers: int, skip: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the batches number `worker`, `worker` + `workers`, ... of this rank's epoch, without those below `skip`."""
        plan = self.plan(epoch)
        numbers = range(worker, len(plan), workers)
        n_skipped = sum(plan[j].images for j in numbers if j < skip)
        start, stop = self._range(epoch, self.rank, worker, workers)
        order = self._shuffled(iter(range(start, stop)), epoch, self.rank, worker)
        skipped = set(islice(order, n_skipped))
        images = self._shuffled(self._read(epoch, start, stop, skipped), epoch, self.rank, worker)
        for _ in islice(images, n_skipped):
            pass
        for j in numbers:
            if j >= skip:
                yield self._batch(list(islice(images, plan[j].images)), plan[j])

    def _range(self, epoch: int, rank: int, worker: int, workers: int) -> tuple[int, int]:
        """(start, stop) of the positions in the epoch's sequence of images that a loader process reads.

        worker: number of the first batch that the process makes. ValueError for a plan with too many or too few images.
        """
        plan, total = self.plan(epoch), self.shards.starts[-1]
        needs = [sum(batch.images for batch in plan[w::workers]) for w in range(workers)]
        planned = sum(needs) * self.world
        if planned > total and self.shuffle:
            raise ValueError(f"the plan takes {planned} images, but {self.shards.folder} holds {total}: plan fewer batches")
        if planned < total and not self.shuffle:
            raise ValueError(f"the plan takes {planned} of the {total} images of {self.shards.folder}, evaluation needs all")
        start = rank * sum(needs) + sum(needs[:worker])
        return min(start, total), min(start + needs[worker], total)

    def _parts(self, epoch: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield (shard, first, last + 1) for each shard that the range covers; the numbers count images within the shard."""
        sizes = np.diff(self.shards.starts).tolist()
        order = list(range(len(sizes)))
        if self.shuffle:
            order = np.random.default_rng((self.seed, epoch)).permutation(len(sizes)).tolist()
        ends = list(accumulate(sizes[shard] for shard in order))
        position = bisect_right(ends, start)
        while start < stop:
            shard, end = order[position], ends[position]
            begin = end - sizes[shard]
            yield shard, start - begin, min(stop, end) - begin
            start, position = end, position + 1

    def _indices(self, epoch: int, start: int, stop: int) -> list[int]:
        """Indices in the split of the images at positions start to stop - 1 of the epoch, before the shuffle buffer."""
        parts = self._parts(epoch, start, stop)
        return [self.shards.starts[shard] + i for shard, first, last in parts for i in range(first, last)]

    def _read(self, epoch: int, start: int, stop: int, skipped: set[int]) -> Iterator[Encoded]:
        """Yield the images at positions start to stop - 1 of the epoch, in order; at positions in `skipped`, without bytes."""
        position = start
        for shard, first, last in self._parts(epoch, start, stop):
            with open(self.shards.path(shard), "rb") as file:
                for i, sample in enumerate(islice(self.shards.samples(shard), first, last), first):
                    data = None
                    if position not in skipped:
                        data = self.shards.data_of(sample, shard, file)
                    name = self.shards.sample_name(shard, sample)
                    yield Encoded(self.shards.starts[shard] + i, sample.label, name, data)
                    position += 1

    def _shuffled(self, items: Iterator, epoch: int, rank: int, worker: int) -> Iterator:
        if not self.shuffle:
            return items
        with optional_import():
            from webdataset.filters import shuffle

        rng = random.Random(f"{self.seed} {epoch} {rank} {worker}")
        return iter(shuffle(self.buffer, initial=self.buffer, rng=rng)(items))

    def _batch(self, encoded: list[Encoded], batch: Batch) -> tuple[Tensor, Tensor]:
        images = torch.zeros(batch.images, 3, *(batch.size or self.shards.prepare.size))
        labels = torch.full((batch.images,), -1)
        for i, image in enumerate(encoded):
            # an unreadable image is replaced by the next of the batch
            decoded = self.shards.first_readable(
                (other.index, partial(self._decode, other)) for other in encoded[i:] + encoded[:i]
            )
            if decoded is not None:
                pixels, label, source = decoded
                images[i] = self.shards.finish(pixels, Draw(image.index, batch.size), source)
                labels[i] = label
        return images, labels

    def _decode(self, image: Encoded) -> tuple[Tensor, int]:
        reading = self.shards.reading
        return decode(image.data, reading.max_pixels, reading.decoder, image.name), image.label
