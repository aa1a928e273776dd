"""The order of images: which images form which batch, in training a function of (seed, epoch) only.

The order does not depend on the number of loader processes. A global batch takes the next `images * world` positions of the
epoch's order, and rank r takes every world-th of them, starting at r. Therefore any number of ranks trains on the same global
batches if the images per update are the same. A resumed run skips the finished batches without reading their images.

At native shape, images of similar aspect ratio share a batch, so that each keeps nearly its own aspect ratio: all have the same
grid of patches, with at most a given number of tokens (the budget), and nothing is padded.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from math import log, sqrt
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from vitrel.common.sizes import Size, native_size
from vitrel.data import Draw


def in_turns(n: int, images: Sequence[int]) -> list[int]:
    """Divide n images into batches of several kinds, such as image sizes, in turn; return the kind (0, 1, ...) of each batch.

    A batch of kind k takes `images[k]` images. A kind that no longer fits is skipped; the rest that fits no kind is left out.
    """
    kinds: list[int] = []
    for kind in cycle(range(len(images))):
        if n < min(images):
            return kinds
        if n >= images[kind]:
            kinds.append(kind)
            n -= images[kind]
    return kinds


class Order(Sampler[list[Draw]], ABC):
    """Abstract batch sampler of one rank: it yields batches, each a list of `Draw` (image index, size or None, repeat)."""

    epoch = first = 0

    def start(self, epoch: int, batch: int = 0) -> None:
        """Let every iteration from now on, until the next call, yield the batches of `epoch` from index `batch` on."""
        self.epoch, self.first = epoch, batch

    def __iter__(self) -> Iterator[list[Draw]]:
        yield from self.batches(self.epoch)[self.first :]

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of batches per rank and epoch, including those that `start` skips."""

    @abstractmethod
    def batches(self, epoch: int) -> list[list[Draw]]:
        """Return all batches of this rank in an epoch, whatever `start` was told."""


class EpochOrder(Order):
    """Batches of one rank: every image at most once (or `repeats` times) per epoch, shuffled by (seed, epoch).

    With `sizes`, the batches of an epoch take turns in size. One at (h, w) holds `batch_size * (H * W) / (h * w)` images,
    rounded down, so that it has about as many tokens as `batch_size` images at (H, W). The order of the batches is shuffled by
    (seed, epoch), and all ranks have the same size at the same step. What remains when the images no longer fill the smallest
    batch of all ranks is left out of the epoch.

    Args:
        n: number of images in the data set.
        batch_size: images per batch and rank at `size`.
        size: (H, W) in pixels for which `batch_size` is meant.
        sizes: sizes (h, w) in pixels to train on; by default that of the data set only, and the `Draw`s then have size None.
        repeats: views of each image, next to each other and thus in the same global batch: repeated augmentation
            (arXiv 1901.09335). The number of batches per epoch stays, so an epoch shows 1 / repeats of the images.
        even: round every batch down to an even number of images, because mixup pairs them.
        rank, world: this rank, and the number of ranks.
        seed: seed of the two orders, of the images and of the batches.

    Raises:
        ValueError: the images do not fill the smallest batch of all ranks, or `batch_size` leaves no image (with `even`, no
            pair) at one of the sizes.
    """

    def __init__(
        self,
        n: int,
        batch_size: int,
        size: Size,
        sizes: Sequence[Size] | None = None,
        repeats: int = 1,
        even: bool = False,
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
    ) -> None:
        self.n, self.repeats, self.rank, self.world, self.seed = n, repeats, rank, world, seed
        step = 2 if even else 1
        kinds: list[tuple[int, Size | None]] = []  # images per rank, and their size
        for h, w in sizes or [size]:
            images = batch_size * size[0] * size[1] // (h * w) if sizes else batch_size
            if images < step:
                raise ValueError(
                    f"a batch of {batch_size} images at {size[0]}x{size[1]} has room for less than {step} at {h}x{w}: "
                    "raise data.batch_size or leave that size out"
                )
            kinds.append((images // step * step, (h, w) if sizes else None))
        self.turns = [kinds[kind] for kind in in_turns(n, [images * world for images, _ in kinds])]
        if not self.turns:
            least = min(images for images, _ in kinds)
            raise ValueError(
                f"{n} training images are fewer than one batch of {least * world}: lower data.batch_size or raise data.n_train"
            )

    def __len__(self) -> int:
        return len(self.turns)

    def batches(self, epoch: int) -> list[list[Draw]]:
        order = torch.randperm(self.n, generator=generator(self.seed, epoch)).tolist()
        # another stream than that of the images, so that the two orders are independent
        turns = torch.randperm(len(self.turns), generator=generator(self.seed, epoch, 1)).tolist()
        batches, start = [], 0
        for images, size in (self.turns[turn] for turn in turns):
            views = range(start + self.rank, start + images * self.world, self.world)
            start += images * self.world
            batches.append([Draw(order[i // self.repeats], size, i % self.repeats) for i in views])
        return batches


class NativeOrder(Order):
    """Batches of one rank at native shape (near each image's aspect ratio): every image once (or `repeats` times) per epoch.

    In every epoch the images are sorted by log(height / width) plus noise (as if a side changed by up to half a patch) and cut
    into batches, which are then shuffled; noise and order depend on (seed, epoch). A batch has the `native_size` of its median
    image. If the images do not fill the last batch, the last two batches divide their images evenly. All ranks have the
    same size at the same step, and their shares of a batch differ by at most one image.

    An epoch leaves out two kinds of images, different ones each time: with `even`, one image of every share of odd length;
    and a last batch with less than one image (with `even`: two) per rank.

    Args:
        sizes: (height, width) of every image file, pixels.
        batch_size: images per batch and rank at `tokens`; at another budget, times `tokens` / budget, rounded down.
        tokens: maximum number of tokens of an image.
        patch: (height, width) of a patch, pixels.
        budgets: several values of `tokens` that batches alternate between; by default `tokens` only.
        repeats: views of each image, next to each other: repeated augmentation (arXiv 1901.09335). The number of batches per
            epoch stays, so an epoch shows 1 / repeats of the images.
        even: give every rank an even number of images in every batch, because mixup pairs them.
        rank, world: this rank, and the number of ranks.
        seed: seed of the order.

    Raises:
        ValueError: every batch of a budget, or the only batch, would have no image (with `even`, no pair) on some rank.
    """

    def __init__(
        self,
        sizes: Sequence[Size],
        batch_size: int,
        tokens: int,
        patch: tuple[int, int],
        budgets: Sequence[int] | None = None,
        repeats: int = 1,
        even: bool = False,
        rank: int = 0,
        world: int = 1,
        seed: int = 0,
    ) -> None:
        self.sizes, self.patch, self.repeats, self.rank, self.world, self.seed = sizes, patch, repeats, rank, world, seed
        self.step = 2 if even else 1
        self.aspects = [log(height / width) for height, width in sizes]
        self.noise = 1 / sqrt(tokens)  # one patch, relative to the side of a square image
        budgets = budgets or [tokens]
        images = [batch_size * tokens // budget // self.step * self.step for budget in budgets]
        if 0 in images:
            raise ValueError(
                f"a batch of {batch_size} images of {tokens} tokens has room for less than {self.step} of {max(budgets)} "
                "tokens: raise data.batch_size or leave that size out"
            )
        # (images of all ranks, budget) of every batch; independent of the number of ranks if images per update stay the same
        self.turns = [(images[kind] * world, budgets[kind]) for kind in in_turns(len(sizes), [i * world for i in images])]
        if left := len(sizes) - sum(images for images, _ in self.turns):
            last, budget = self.turns.pop() if self.turns else (0, budgets[0])
            half = (last + left) // 2 // self.step * self.step if last else 0
            self.turns += [(last + left - half, budget), (half, budget)]
        self.turns = [turn for turn in self.turns if turn[0] // world >= self.step]
        if not self.turns:
            raise ValueError(
                f"{len(sizes)} training images are too few for {world} devices, each of which needs {self.step}: use fewer "
                "devices or more images"
            )

    def __len__(self) -> int:
        return len(self.turns)

    def batches(self, epoch: int) -> list[list[Draw]]:
        """Return all batches of this rank in an epoch, as `Draw`s with the size (height, width) of their batch, pixels."""
        draws, views = generator(self.seed, epoch), sum(images for images, _ in self.turns)
        chosen = torch.randperm(len(self.sizes), generator=draws)[: -(-views // self.repeats)].tolist()
        noise = (self.noise * (torch.rand(len(chosen), generator=draws, dtype=torch.float64) - 0.5)).tolist()
        order = [index for _, index in sorted((self.aspects[index] + n, index) for index, n in zip(chosen, noise, strict=True))]
        batches, start = [], 0
        for turn in torch.randperm(len(self.turns), generator=draws).tolist():
            images, budget = self.turns[turn]
            batch = [(order[view // self.repeats], view % self.repeats) for view in range(start, start + images)]
            median = sorted((index for index, _ in batch), key=self.aspects.__getitem__)[images // 2]
            height, width = self.sizes[median]
            size = native_size(height, width, budget, self.patch)
            share = batch[self.rank :: self.world]
            batches.append([Draw(index, size, repeat) for index, repeat in share[: len(share) // self.step * self.step]])
            start += images
        return [batches[i] for i in torch.randperm(len(batches), generator=draws).tolist()]


class EpochLoader(DataLoader):
    """A DataLoader that starts every iteration at the trainer's current epoch and batch.

    Lightning sets the epoch of a sampler only after it has created the first iterator, whose workers already read ahead.

    Args:
        dataset: `Readable`, whose data set is told the epoch by its `set_epoch`.
        progress: called at the start of an iteration; returns (epoch, number of its batches to skip).
        options: further keywords of DataLoader; `batch_sampler` is an `Order`.
    """

    def __init__(self, dataset: Dataset, progress: Callable[[], tuple[int, int]], **options) -> None:
        super().__init__(dataset, **options)
        self.progress = progress

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:  # type: ignore[override]
        epoch, done = self.progress()
        self.dataset.dataset.set_epoch(epoch)
        self.batch_sampler.start(epoch, done)
        return super().__iter__()


def evaluation_batches(sizes: Sequence[Size], batch_size: int, rank: int = 0, world: int = 1) -> list[list[Draw]]:
    """Return the batches of one rank in an evaluation of all images, for a `Filled` data set; a batch has one size.

    Every image is on exactly one rank; sizes follow in the order in which they first occur, images of a size in their order.
    All ranks have the same number of batches of the same lengths and sizes, padded by draws of index -1: padding by real images
    would count some twice, and without padding the other ranks would wait for those with fewer batches.

    Args:
        sizes: (h, w) at which every image is evaluated, pixels.
        batch_size: maximum number of images per batch and rank.
        rank, world: this rank, and the number of ranks.
    """
    groups: dict[Size, list[int]] = defaultdict(list)
    for index, size in enumerate(sizes):
        groups[size].append(index)
    batches = []
    for size, indices in groups.items():
        indices += [-1] * (-len(indices) % world)
        share = [Draw(index, size) for index in indices[rank::world]]
        batches += [share[i : i + batch_size] for i in range(0, len(share), batch_size)]
    return batches


class Readable(Dataset):
    """A data set for training, indexed by `Draw`s, whose batches leave unreadable images out.

    Args:
        dataset: data set whose `bad`, if it has it, is 1 for the images found unreadable (`ImageSet`); their items are dropped.
        even: leave out one more image where the number of the others is odd, because mixup pairs them.
    """

    def __init__(self, dataset: Dataset, even: bool = False) -> None:
        self.dataset, self.step = dataset, 2 if even else 1

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, draws: Sequence[Draw]) -> list[tuple[Tensor, Any]]:
        """Return the (image, target) pairs of the images of a batch that can be read (with `even`, an even number of them)."""
        items = _read(self.dataset, draws)
        kept = [item for item, draw in zip(items, draws, strict=True) if not _is_bad(self.dataset, draw.index)]
        return kept[: len(kept) // self.step * self.step]


class Filled(Dataset):
    """A data set for evaluation, indexed by `Draw`s: a draw of index -1 is a zero image of label -1, which no metric counts.

    Such draws pad the shares of several ranks (`evaluation_batches`); `len` does not count them. For an unreadable image the
    data set itself returns an image of label -1, or with a mask without classes.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, draws: Sequence[Draw]) -> list[tuple[Tensor, Any]]:
        """Return the (image, target) pairs of a batch; for a draw of index -1, the pair (zeros of the batch's size, -1)."""
        items = _read(self.dataset, [draw for draw in draws if draw.index >= 0])
        empty = torch.zeros_like(items[0][0]) if items else torch.zeros(3, *(draws[0].size or ()))
        left = iter(items)
        return [(empty, -1) if draw.index < 0 else next(left) for draw in draws]


def _read(dataset: Dataset, draws: Sequence[Draw]) -> list[tuple[Tensor, Any]]:
    """Return the items of a batch: by one call of the data set's `__getitems__`, if it has one, which is faster; or singly."""
    at_once = getattr(dataset, "__getitems__", None)
    return at_once(draws) if at_once else [dataset[draw] for draw in draws]


def _is_bad(dataset: Dataset, index: int) -> bool:
    """Return whether an image has been found unreadable; False for a data set without `bad`, as of synthetic images."""
    return hasattr(dataset, "bad") and bool(dataset.bad[index])


def generator(seed: int, epoch: int, stream: int = 0) -> torch.Generator:
    """Return a random generator (CPU) seeded by (seed, epoch, stream); different streams of an epoch are independent."""
    return torch.Generator().manual_seed(seed * 1_000_003 + epoch + stream * 7_919_000_003)
