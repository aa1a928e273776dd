"""The order of training images: which images form which batch, a function of (seed, epoch) only.

The order does not depend on the number of loader processes. A global batch takes the next `images * world` positions of the
epoch's order, and rank r takes every world-th of them, starting at r. Therefore any number of ranks trains on the same global
batches if the images per update are the same. A resumed run skips the finished batches without reading their images.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from vitrel.data.base import Draw
from vitrel.data.stream import Batch, ShardBatches


class Plan:
    """The batches of an epoch: the number of images per rank and the image size of each. plan(epoch) returns them in order.

    Without `sizes`, every batch holds `batch_size` images, and its size is None. With `sizes`, a batch at (h, w) holds
    `batch_size * (H * W) / (h * w)` images, rounded down, so that it has about as many tokens as `batch_size` images at (H, W).
    The sizes take turns, so that all have about the same number of batches; the order of the batches is shuffled by
    (seed, epoch), and all ranks have the same size at the same step. What remains when the images no longer fill the smallest
    batch of all ranks is left out of the epoch.

    Args:
        n: number of images in the data set.
        batch_size: images per batch and rank at `size`.
        world: number of ranks.
        size: (H, W) in pixels for which `batch_size` is meant.
        sizes: sizes (h, w) in pixels to train on; by default `size` only.
        even: round every batch down to an even number of images, because mixup pairs them.
        seed: seed of the order of the sizes.

    Raises:
        ValueError: the images do not fill the smallest batch of all ranks, or `batch_size` leaves no image (with `even`, no
            pair) at one of the sizes.
    """

    def __init__(
        self,
        n: int,
        batch_size: int,
        world: int,
        size: tuple[int, int],
        sizes: Sequence[tuple[int, int]] | None = None,
        even: bool = False,
        seed: int = 0,
    ) -> None:
        self.seed, self.several = seed, sizes is not None
        step = 2 if even else 1
        turns = []
        for h, w in sizes or [size]:
            images = batch_size * size[0] * size[1] // (h * w) if sizes else batch_size
            if images < step:
                raise ValueError(
                    f"a batch of {batch_size} images at {size[0]}x{size[1]} has room for less than {step} at {h}x{w}: "
                    "raise data.batch_size or leave that size out"
                )
            turns.append(Batch(images // step * step, (h, w) if sizes else None))
        self.batches = [turns[k] for k in in_turns(n, [batch.images * world for batch in turns])]
        if not self.batches:
            least = min(batch.images for batch in turns)
            raise ValueError(
                f"{n} training images are fewer than one batch of {least * world}: lower data.batch_size or raise data.n_train"
            )

    def __len__(self) -> int:
        return len(self.batches)

    def __call__(self, epoch: int) -> list[Batch]:
        """Return the batches of an epoch, in order: images per rank and size."""
        if not self.several:
            return self.batches
        # another stream than that of the images, so that the two orders are independent
        order = torch.randperm(len(self.batches), generator=generator(self.seed, epoch, 1))
        return [self.batches[i] for i in order.tolist()]


def in_turns(n: int, images: Sequence[int]) -> list[int]:
    """Divide n images into batches of several kinds in rotation; return the kind of each batch.

    Kind k takes `images[k]` images. A kind that no longer fits is skipped; the rest that fits no kind is left out.
    """
    kinds: list[int] = []
    for kind in cycle(range(len(images))):
        if n < min(images):
            return kinds
        if n >= images[kind]:
            kinds.append(kind)
            n -= images[kind]
    return kinds


class Order(Sampler[list[int | Draw]], ABC):
    """Abstract batch sampler of one rank: the batches of every epoch, as indices or `Draw`s of images."""

    epoch = first = 0

    def start(self, epoch: int, batch: int = 0) -> None:
        """Let every iteration from now on, until the next call, yield the batches of `epoch` from number `batch` on."""
        self.epoch, self.first = epoch, batch

    def __iter__(self) -> Iterator[list[int | Draw]]:
        yield from self.batches(self.epoch)[self.first :]

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of batches per rank and epoch, including those that `start` skips."""

    @abstractmethod
    def batches(self, epoch: int) -> list[list[int | Draw]]:
        """Return all batches of this rank in an epoch."""


class EpochOrder(Order):
    """Batches of one rank: every image at most once (or `repeats` times) per epoch, shuffled by (seed, epoch).

    Args:
        n: number of images in the data set.
        plan: sizes of the batches of an epoch.
        repeats: views of each image, next to each other and thus in the same global batch: repeated augmentation
            (arXiv 1901.09335). The number of batches per epoch stays, so an epoch shows 1 / repeats of the images.
        rank, world: this rank, and the number of ranks.
        seed: seed of the order.
    """

    def __init__(self, n: int, plan: Plan, repeats: int = 1, rank: int = 0, world: int = 1, seed: int = 0) -> None:
        self.n, self.plan, self.repeats, self.rank, self.world, self.seed = n, plan, repeats, rank, world, seed

    def __len__(self) -> int:
        return len(self.plan)

    def batches(self, epoch: int) -> list[list[int | Draw]]:
        """Return all batches of this rank in an epoch: plain indices, or `Draw`s where size or repeat matter."""
        order = torch.randperm(self.n, generator=generator(self.seed, epoch)).tolist()
        batches, start = [], 0
        for batch in self.plan(epoch):
            views = range(start + self.rank, start + batch.images * self.world, self.world)
            start += batch.images * self.world
            draws = [Draw(order[i // self.repeats], batch.size, i % self.repeats) for i in views]
            batches.append([draw.index if draw == Draw(draw.index) else draw for draw in draws])
        return batches


class EpochLoader(DataLoader):
    """A DataLoader that starts every iteration at the trainer's current epoch and batch.

    Lightning sets the epoch of a sampler only after it has created the first iterator, whose workers already read ahead.

    Args:
        dataset: a data set of images with `set_epoch`, or a `ShardBatches`.
        progress: called at the start of an iteration; returns (epoch, number of its batches that are done).
        options: further keywords of DataLoader; `batch_sampler` is an `Order`, except with `ShardBatches`.
    """

    def __init__(self, dataset: Dataset, progress: Callable[[], tuple[int, int]], **options) -> None:
        super().__init__(dataset, **options)
        self.progress = progress

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:  # type: ignore[override]
        epoch, done = self.progress()
        self.dataset.set_epoch(epoch)
        if isinstance(self.dataset, ShardBatches):
            self.dataset.skip(done)
        else:
            self.batch_sampler.start(epoch, done)
        return super().__iter__()


class EveryImageOnce(Dataset):
    """One rank's share of an evaluation set: every image on exactly one rank, padded by zero images of label -1.

    Padding by real images, as DistributedSampler does, would count some images twice. Without padding, shares of unequal length
    would block the ranks under FSDP, which gathers parameters from all ranks in every forward pass.

    Args:
        dataset: the evaluation set, of (image, label).
        rank, world: this rank, and the number of ranks.
    """

    def __init__(self, dataset: Dataset, rank: int = 0, world: int = 1) -> None:
        self.dataset, self.rank, self.world = dataset, rank, world

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.world)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.__getitems__([i])[0]

    def __getitems__(self, items: Sequence[int]) -> list[tuple[Tensor, int]]:
        """Return the (image, label) pairs at positions `items`, read as one batch if the data set has `__getitems__`.

        The positions must increase, because padding is put at the end.
        """
        indices = [i * self.world + self.rank for i in items]
        existing = [index for index in indices if index < len(self.dataset)]
        read_batch = getattr(self.dataset, "__getitems__", None)
        samples = read_batch(existing) if read_batch else [self.dataset[index] for index in existing]
        padding = (torch.zeros_like((samples or [self.dataset[0]])[0][0]), -1)
        return samples + [padding] * (len(indices) - len(existing))


def generator(seed: int, epoch: int, stream: int = 0) -> torch.Generator:
    """Return a random generator seeded by (seed, epoch, stream); different streams of an epoch are independent."""
    return torch.Generator().manual_seed(seed * 1_000_003 + epoch + stream * 7_919_000_003)
