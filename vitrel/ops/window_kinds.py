"""Windows grouped by their masks: nearly all of an image have the same, so that one bias serves them all."""

from typing import NamedTuple

import torch
from torch import Tensor

from vitrel.grid import Grid
from vitrel.ops.window import windows


class Kinds(NamedTuple):
    """Windows of b images in an order in which those with the same mask, which has K kinds, follow each other."""

    visible: Tensor  # [K, N, N]
    counts: list[int]  # windows of each kind
    source: Tensor  # [b*L*N] token, of b*h*w, that fills a slot
    inverse: Tensor  # [b*h*w] slot that holds a token


def window_kinds(grid: Grid, window: Grid, shift: tuple[int, int], images: int) -> Kinds:
    """The windows of `windows` over so many images with h*w tokens each. shift: (h, w) in tokens."""
    layout, n = windows(grid.h, grid.w, window[:2], shift), window.tokens
    visible, kind, counts = layout.visible.view(-1, n * n).unique(dim=0, return_inverse=True, return_counts=True)
    order = kind.argsort(stable=True)  # windows, kind by kind
    image = torch.arange(images)[:, None]
    # For each kind every image's windows: the place of a window of the first image, plus that of the image.
    source = layout.source.view(-1, n)[order].split(counts.tolist())
    source = torch.cat([(part[None] + grid.tokens * image[..., None]).flatten() for part in source])
    before = counts.cumsum(0) - counts
    own, slot = layout.inverse // n, layout.inverse % n  # window and slot of each token
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))[own] - before[kind[own]]
    at = images * before[kind[own]] + image * counts[kind[own]] + rank  # [b, h*w]
    return Kinds(visible.view(-1, n, n), (images * counts).tolist(), source, (at * n + slot).flatten())
