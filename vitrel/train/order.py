"""Which images make which batch: a function of (seed, epoch) alone, the same for any number of loader processes.

A batch of the whole run takes the next `images * world` places of the epoch's order, and rank r takes every world-th of them
from r on: with the same images per update, any number of ranks trains on the same batches. A resumed run passes over the
batches that are done, without reading them.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from vitrel.data.draw import Draw
from vitrel.data.stream import Batch, ShardBatches


class Plan:
    """How many images each batch of an epoch holds per rank, and at which size.

    With several sizes they take turns, and a batch at (h, w) holds `batch_size * (H * W) / (h * w)` images, so that every
    batch has about the tokens of `batch_size` images at (H, W); their order is drawn by (seed, epoch). All ranks share one
    size at a time. What is left and fills no batch at any size is left out of that epoch.

    Args:
        n: images of the data set.
        batch_size: images per batch and rank at `size`.
        world: number of ranks.
        size: (H, W) in pixels that `batch_size` is meant for.
        sizes: (h, w) to train on; `size` alone by default.
        even: batches hold an even number of images, which mixup pairs.
        seed: of the order of the sizes.

    Raises:
        ValueError: not one batch can be filled.
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
                    f"a batch of {batch_size} images at {size[0]}x{size[1]} has the tokens of less than {step} at {h}x{w}: "
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
        """The batches of an epoch, in order."""
        if not self.several:
            return self.batches
        # one more than the images' seed, so that sizes and images are drawn apart
        order = torch.randperm(len(self.batches), generator=generator(self.seed, epoch, 1))
        return [self.batches[i] for i in order.tolist()]


def in_turns(n: int, images: Sequence[int]) -> list[int]:
    """Which kind of batch comes next, in turns, for as long as any of them can be filled from n images."""
    found: list[int] = []
    for kind in cycle(range(len(images))):
        if n < min(images):
            return found
        if n >= images[kind]:
            found.append(kind)
            n -= images[kind]
    return found


class Order(Sampler[list[int | Draw]], ABC):
    """Abstract. The batches of one rank, epoch after epoch."""

    epoch = first = 0

    def start(self, epoch: int, batch: int = 0) -> None:
        """What the next iteration yields: the batches of `epoch` from `batch` on."""
        self.epoch, self.first = epoch, batch

    def __iter__(self) -> Iterator[list[int | Draw]]:
        yield from self.batches(self.epoch)[self.first :]

    @abstractmethod
    def __len__(self) -> int:
        """Batches of every rank in every epoch, those that are passed over included."""

    @abstractmethod
    def batches(self, epoch: int) -> list[list[int | Draw]]:
        """All batches of this rank in an epoch."""


class EpochOrder(Order):
    """Batches of this rank: every index at most once per epoch, shuffled by (seed, epoch).

    Args:
        n: images of the data set.
        plan: the batches of an epoch.
        repeats: views of each image, next to each other and thus in one batch of the run: repeated augmentation
            (arXiv 1901.09335). The epoch stays as long, so that it shows 1 / repeats of the images.
        rank, world: this process, and how many there are.
        seed: of the order.
    """

    def __init__(self, n: int, plan: Plan, repeats: int = 1, rank: int = 0, world: int = 1, seed: int = 0) -> None:
        self.n, self.plan, self.repeats, self.rank, self.world, self.seed = n, plan, repeats, rank, world, seed

    def __len__(self) -> int:
        return len(self.plan)

    def batches(self, epoch: int) -> list[list[int | Draw]]:
        """All batches of this rank in an epoch."""
        order = torch.randperm(self.n, generator=generator(self.seed, epoch)).tolist()
        found, start = [], 0
        for batch in self.plan(epoch):
            places = range(start + self.rank, start + batch.images * self.world, self.world)
            start += batch.images * self.world
            draws = [Draw(order[i // self.repeats], batch.size, i % self.repeats) for i in places]
            found.append([draw.index if draw == Draw(draw.index) else draw for draw in draws])
        return found


class EpochLoader(DataLoader):
    """A DataLoader whose every iteration begins where `place` says: (epoch, batches of it that are done).

    Lightning tells samplers the epoch only after the first iterator was made, whose workers read ahead.
    """

    def __init__(self, dataset: Dataset, place: Callable[[], tuple[int, int]], **how) -> None:
        super().__init__(dataset, **how)
        self.place = place

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:  # type: ignore[override]
        epoch, done = self.place()
        self.dataset.set_epoch(epoch)
        if isinstance(self.dataset, ShardBatches):
            self.dataset.skip(done)
        else:
            self.batch_sampler.start(epoch, done)
        return super().__iter__()


class EveryImageOnce(Dataset):
    """The share of one rank in an evaluation set, filled up to equal length by zero images of label -1, which count nowhere.

    Filling by real images, as a DistributedSampler does, would count some twice; unequal lengths would leave a rank waiting
    where ranks gather parameters in every forward pass (FSDP).
    """

    def __init__(self, dataset: Dataset, rank: int = 0, world: int = 1) -> None:
        self.dataset, self.rank, self.world = dataset, rank, world

    def __len__(self) -> int:
        return -(-len(self.dataset) // self.world)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.__getitems__([i])[0]

    def __getitems__(self, items: Sequence[int]) -> list[tuple[Tensor, int]]:
        """As one by one; data sets that make a whole batch faster are asked for it."""
        places = [i * self.world + self.rank for i in items]
        real = [place for place in places if place < len(self.dataset)]
        many = getattr(self.dataset, "__getitems__", None)
        found = many(real) if many else [self.dataset[place] for place in real]
        fill = (torch.zeros_like((found or [self.dataset[0]])[0][0]), -1)
        return found + [fill] * (len(places) - len(real))


def generator(seed: int, epoch: int, stream: int = 0) -> torch.Generator:
    """The random numbers of an epoch; those of another stream are drawn apart."""
    return torch.Generator().manual_seed(seed * 1_000_003 + epoch + stream * 7_919_000_003)
