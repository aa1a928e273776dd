"""Training and evaluation batches read from shards in order, every image exactly once."""

import random
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate, islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from vitrel.data.base import bad_in_a_row
from vitrel.data.decode import BadImage, decode
from vitrel.data.draw import Draw
from vitrel.data.shards import Shards
from vitrel.extras import optional_import


class Batch(NamedTuple):
    """One batch of a plan.

    Args:
        images: number of images on each rank; the batch of the whole run has images · world.
        size: (H, W) in pixels that they are made for; None for the data set's own.
    """

    images: int
    size: tuple[int, int] | None = None


class Encoded(NamedTuple):
    """An image on its way through the shuffle buffer: index in the split, label, name, and bytes unless it is passed over."""

    index: int  # type: ignore[assignment]  # not tuple.index
    label: int
    name: str
    data: bytes | None


class ShardBatches(IterableDataset):
    """Batches (float32 [B, 3, H, W], int64 [B]) of this rank, for `DataLoader(..., batch_size=None, num_workers=K)`.

    The shards are put into the order of (seed, epoch) and their images, one after the other, are cut into one range for each
    rank and loader process, as long as its batches of the plan need: no image is in two ranges, and each is in one where the
    plan takes all. A range is read in order through a shuffle buffer drawn from (seed, epoch, rank, process). Batch j is made
    by process j % K. So the batches depend on K, and on nothing else of the machine; augmentation is drawn for the image's
    index and does not depend on K.

    An unreadable image is replaced (`on_bad="replace"`) by the next readable one of its batch.

    Args:
        shards: one split, whole.
        plan: the batches of an epoch; the same on all ranks. Loader processes that are spawned need one that can be pickled.
        rank, world: of this process, and their number.
        seed: of the order.
        buffer: images in the shuffle buffer of each loader process, encoded: about 110 MB per 1000 of ImageNet's.
        shuffle: False reads in order, and fills the batches of a plan that is longer than the split with zeros labelled -1.

    Raises:
        ValueError: for a subset (`n`) of the shards, a rank out of range, or a buffer below 1; while reading, for a plan of
            more images than there are (if shuffled) or of fewer (if not).
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
            raise ValueError("shards are streamed whole: leave out n, or pack the subset you want")
        if not 0 <= rank < world or buffer < 1:
            raise ValueError(f"rank ({rank}) lies between 0 and world ({world}), and buffer ({buffer}) is at least 1")
        self.shards, self.plan, self.rank, self.world = shards, plan, rank, world
        self.seed, self.buffer, self.shuffle = seed, buffer, shuffle
        # in shared memory: loader processes that outlive an epoch see it
        self._skip = torch.zeros(1, dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch: int) -> None:
        """The epoch that the next iteration reads; another one than before begins with its first batch."""
        if epoch != self.shards.epoch:
            self._skip.zero_()
        self.shards.set_epoch(epoch)

    def skip(self, batches: int) -> None:
        """Begin this epoch with batch number `batches`: those before are passed over, and their images not even read."""
        self._skip.fill_(batches)

    def __len__(self) -> int:
        """Batches of this rank in an epoch, those that are skipped included."""
        return len(self.plan(self.shards.epoch))

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        skip = int(self._skip)
        # the loader takes its first batch from process 0, whichever number that batch has
        return self._batches(self.shards.epoch, (worker + skip) % workers, workers, skip)

    def indices(self, epoch: int, rank: int, workers: int) -> list[list[int]]:
        """Indices of the images of each batch of a rank, without reading: the shuffle is replayed on numbers.

        Zeros that fill a batch are not among them.
        """
        plan, workers = self.plan(epoch), max(workers, 1)
        found: list[list[int]] = [[] for _ in plan]
        for worker in range(workers):
            start, stop = self._range(epoch, rank, worker, workers)
            order = self._shuffled(iter(self._indices(epoch, start, stop)), epoch, rank, worker)
            for j in range(worker, len(plan), workers):
                found[j] = list(islice(order, plan[j].images))
        return found

    def _batches(self, epoch: int, worker: int, workers: int, skip: int) -> Iterator[tuple[Tensor, Tensor]]:
        plan = self.plan(epoch)
        mine = range(worker, len(plan), workers)
        passed = sum(plan[j].images for j in mine if j < skip)
        start, stop = self._range(epoch, self.rank, worker, workers)
        order = self._shuffled(iter(range(start, stop)), epoch, self.rank, worker)
        passed_over = set(islice(order, passed))
        images = self._shuffled(self._read(epoch, start, stop, passed_over), epoch, self.rank, worker)
        for _ in islice(images, passed):
            pass
        for j in mine:
            if j >= skip:
                yield self._batch(list(islice(images, plan[j].images)), plan[j])

    def _range(self, epoch: int, rank: int, worker: int, workers: int) -> tuple[int, int]:
        """(start, stop) of a process within all images in the order of the epoch."""
        plan, total = self.plan(epoch), self.shards.starts[-1]
        needs = [sum(batch.images for batch in plan[w::workers]) for w in range(workers)]
        wanted = sum(needs) * self.world
        if wanted > total and self.shuffle:
            raise ValueError(f"the plan takes {wanted} images and {self.shards.folder} holds {total}: plan fewer batches")
        if wanted < total and not self.shuffle:
            raise ValueError(f"the plan takes {wanted} of the {total} images of {self.shards.folder}, evaluation needs all")
        start = rank * sum(needs) + sum(needs[:worker])
        return min(start, total), min(start + needs[worker], total)

    def _parts(self, epoch: int, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """(shard, first, last + 1) of the shards that a range covers, in its order."""
        sizes = np.diff(self.shards.starts).tolist()
        order = list(range(len(sizes)))
        if self.shuffle:
            order = np.random.default_rng((self.seed, epoch)).permutation(len(sizes)).tolist()
        ends = list(accumulate(sizes[shard] for shard in order))
        place = bisect_right(ends, start)
        while start < stop:
            shard, end = order[place], ends[place]
            begin = end - sizes[shard]
            yield shard, start - begin, min(stop, end) - begin
            start, place = end, place + 1

    def _indices(self, epoch: int, start: int, stop: int) -> list[int]:
        parts = self._parts(epoch, start, stop)
        return [self.shards.starts[shard] + i for shard, first, last in parts for i in range(first, last)]

    def _read(self, epoch: int, start: int, stop: int, passed_over: set[int]) -> Iterator[Encoded]:
        """The images of a range in order; places in `passed_over` are left without their bytes."""
        place = start
        for shard, first, last in self._parts(epoch, start, stop):
            with open(self.shards.path(shard), "rb") as file:
                for i, sample in enumerate(islice(self.shards.samples(shard), first, last), first):
                    data = None
                    if place not in passed_over:
                        file.seek(sample.offset)
                        data = file.read(sample.size)
                    name = self.shards.sample_name(shard, sample)
                    yield Encoded(self.shards.starts[shard] + i, sample.label, name, data)
                    place += 1

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
            found = self._readable(encoded[i:] + encoded[:i])
            if found is not None:
                images[i] = self.shards.finish(found[0], Draw(image.index, batch.size), found[2])
                labels[i] = found[1]
        return images, labels

    def _readable(self, candidates: list[Encoded]) -> tuple[Tensor, int, int] | None:
        """(uint8 [3, h, w], label, index) of the first image, or of what `on_bad` puts in its place: None if it is left out."""
        reading = self.shards.reading
        candidates = candidates[: reading.bad_limit]
        for image in candidates:
            try:
                return decode(image.data, reading.max_pixels, reading.decoder, image.name), image.label, image.index
            except BadImage as error:
                if reading.on_bad == "raise":
                    raise
                self.shards.bad[image.index] = 1
                if reading.on_bad == "leave_out":
                    return None
                last = error
        raise bad_in_a_row(len(candidates), last)
