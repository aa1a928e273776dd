"""Batches at native shape: every image keeps about its own aspect ratio, in a batch with others of about the same.

A batch has one grid of patches of at most a budget of tokens, so that nothing is padded.
"""

from collections import defaultdict
from collections.abc import Sequence
from math import log, sqrt

import torch
from torch import Tensor
from torch.utils.data import Dataset

from vitrel.data.draw import Draw
from vitrel.sizes import Size, native_size
from vitrel.train.order import Order, generator, in_turns


class NativeOrder(Order):
    """Batches of this rank at native shape: every image once per epoch, shuffled by (seed, epoch).

    The images are sorted by the logarithm of their aspect ratio and some noise, as much as half a patch changes it, and cut
    into batches, which come in random order. A batch is made at `native_size` of its median image. Where the images do not
    fill the last batch, it shares them with the one before, both smaller than the others. All ranks see the same size at a
    time, and the shares of a batch differ by one image at most.

    Two kinds of images are left out of an epoch, others each time: of a share of odd length one, where images are mixed, and
    a last batch that has no image for some rank, which takes fewer than two images per batch and rank.

    Args:
        sizes: (height, width) of every image in its file, pixels.
        batch_size: images per batch and rank at `tokens`; at another budget, as many as have the same tokens.
        tokens: of an image at most.
        patch: (height, width) of a patch, pixels.
        budgets: several of these, which take turns; `tokens` alone by default.
        repeats: views of each image, next to each other: repeated augmentation (arXiv 1901.09335). The epoch stays as long,
            so that it shows 1 / repeats of the images.
        even: every rank has an even number of images in every batch, which mixup pairs.
        rank, world: this process, and how many there are.
        seed: of the order.

    Raises:
        ValueError: a batch without images on some rank.
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
        self.noise = 1 / sqrt(tokens)  # one patch of the side of a square
        budgets = budgets or [tokens]
        images = [batch_size * tokens // budget // self.step * self.step for budget in budgets]
        if 0 in images:
            raise ValueError(
                f"a batch of {batch_size} images of {tokens} tokens has the tokens of less than {self.step} of {max(budgets)}: "
                "raise data.batch_size or leave that size out"
            )
        # (images of all ranks, budget) of every batch: with the same images per update, the same for any number of ranks
        self.turns = [(images[kind] * world, budgets[kind]) for kind in in_turns(len(sizes), [i * world for i in images])]
        if left := len(sizes) - sum(images for images, _ in self.turns):
            last, budget = self.turns.pop() if self.turns else (0, budgets[0])
            half = (last + left) // 2 // self.step * self.step if last else 0
            self.turns += [(last + left - half, budget), (half, budget)]
        self.turns = [turn for turn in self.turns if turn[0] // world >= self.step]
        if not self.turns:
            raise ValueError(f"{len(sizes)} training images are fewer than {self.step} for each of {world} devices")

    def __len__(self) -> int:
        return len(self.turns)

    def batches(self, epoch: int) -> list[list[int | Draw]]:
        """All batches of this rank in an epoch."""
        draws, views = generator(self.seed, epoch), sum(images for images, _ in self.turns)
        shown = torch.randperm(len(self.sizes), generator=draws)[: -(-views // self.repeats)].tolist()
        noise = (self.noise * (torch.rand(len(shown), generator=draws, dtype=torch.float64) - 0.5)).tolist()
        line = [index for _, index in sorted((self.aspects[index] + n, index) for index, n in zip(shown, noise, strict=True))]
        found, start = [], 0
        for turn in torch.randperm(len(self.turns), generator=draws).tolist():
            images, budget = self.turns[turn]
            batch = [(line[place // self.repeats], place % self.repeats) for place in range(start, start + images)]
            middle = sorted((index for index, _ in batch), key=self.aspects.__getitem__)[images // 2]
            height, width = self.sizes[middle]
            size = native_size(height, width, budget, self.patch)
            mine = batch[self.rank :: self.world]
            found.append([Draw(index, size, repeat) for index, repeat in mine[: len(mine) // self.step * self.step]])
            start += images
        return [found[i] for i in torch.randperm(len(found), generator=draws).tolist()]


def native_shares(
    sizes: Sequence[Size], batch_size: int, budget: int, patch: tuple[int, int], rank: int = 0, world: int = 1
) -> list[list[Draw]]:
    """The batches of one rank in an evaluation of all images, each at its own `native_size`, for `Filled`.

    Ranks have the same batches and shares of the same length, filled up by draws of index -1.

    Args:
        sizes: (height, width) of every image in its file, pixels.
        batch_size: images per batch and rank at most.
        budget: tokens of an image at most.
        patch: (height, width) of a patch, pixels.
        rank, world: this process, and how many there are.
    """
    alike: dict[Size, list[int]] = defaultdict(list)
    for index, (height, width) in enumerate(sizes):
        alike[native_size(height, width, budget, patch)].append(index)
    shares = []
    for size, indices in alike.items():
        indices += [-1] * (-len(indices) % world)
        mine = [Draw(index, size) for index in indices[rank::world]]
        shares += [mine[i : i + batch_size] for i in range(0, len(mine), batch_size)]
    return shares


class Filled(Dataset):
    """A data set in which draws of index -1 are zero images of label -1, which count nowhere."""

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, draw: Draw) -> tuple[Tensor, int]:
        return (torch.zeros(3, *(draw.size or ())), -1) if draw.index < 0 else self.dataset[draw]
