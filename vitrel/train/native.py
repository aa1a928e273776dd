"""Batches at native shape: images of similar aspect ratio share a batch, so each keeps nearly its own aspect ratio.

All images of a batch have the same grid of patches, with at most a given number of tokens (the budget); nothing is padded.
"""

from collections import defaultdict
from collections.abc import Sequence
from math import log, sqrt

import torch
from torch import Tensor
from torch.utils.data import Dataset

from vitrel.data.base import Draw
from vitrel.sizes import Size, native_size
from vitrel.train.order import Order, generator, in_turns


class NativeOrder(Order):
    """Batches of one rank at native shape: every image once (or `repeats` times) per epoch, shuffled by (seed, epoch).

    In every epoch the images are sorted by the logarithm of their aspect ratio plus noise (the change by up to half a patch)
    and cut into batches, which are then shuffled. A batch has the `native_size` of its median image. If the images do not
    fill the last batch, the last two batches divide their images evenly. All ranks have the same size at the same step, and
    their shares of a batch differ by at most one image.

    An epoch leaves out two kinds of images, different ones each time: with `even`, one image of every share of odd length;
    and a last batch with less than one image (with `even`: two) per rank.

    Args:
        sizes: (height, width) of every image file, pixels.
        batch_size: images per batch and rank at `tokens`; at other budgets, the number with the same total of tokens.
        tokens: maximum number of tokens of an image.
        patch: (height, width) of a patch, pixels.
        budgets: several values of `tokens` that batches alternate between; by default `tokens` only.
        repeats: views of each image, next to each other: repeated augmentation (arXiv 1901.09335). The number of batches per
            epoch stays, so an epoch shows 1 / repeats of the images.
        even: give every rank an even number of images in every batch, because mixup pairs them.
        rank, world: this rank, and the number of ranks.
        seed: seed of the order.

    Raises:
        ValueError: a batch would have no images on some rank.
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

    def batches(self, epoch: int) -> list[list[int | Draw]]:
        """Return all batches of this rank in an epoch, as draws with their size (height, width)."""
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


def native_shares(
    sizes: Sequence[Size], batch_size: int, budget: int, patch: tuple[int, int], rank: int = 0, world: int = 1
) -> list[list[Draw]]:
    """Return the batches of one rank in an evaluation of all images, grouped by `native_size`; for a `Filled` data set.

    All ranks have the same number of batches of the same lengths and sizes, padded by draws of index -1.

    Args:
        sizes: (height, width) of every image file, pixels.
        batch_size: maximum number of images per batch and rank.
        budget: maximum number of tokens of an image.
        patch: (height, width) of a patch, pixels.
        rank, world: this rank, and the number of ranks.
    """
    groups: dict[Size, list[int]] = defaultdict(list)
    for index, (height, width) in enumerate(sizes):
        groups[native_size(height, width, budget, patch)].append(index)
    batches = []
    for size, indices in groups.items():
        indices += [-1] * (-len(indices) % world)
        share = [Draw(index, size) for index in indices[rank::world]]
        batches += [share[i : i + batch_size] for i in range(0, len(share), batch_size)]
    return batches


class Filled(Dataset):
    """A data set indexed by `Draw`s, in which a draw of index -1 and a size is a zero image of label -1.

    Such draws pad the shares of several ranks (`native_shares`); no metric counts them, nor does `len`.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, draw: Draw) -> tuple[Tensor, int]:
        return (torch.zeros(3, *(draw.size or ())), -1) if draw.index < 0 else self.dataset[draw]
