"""Windows grouped by their masks: nearly all of an image have the same, so that one bias serves them all."""

from typing import NamedTuple

import torch
from torch import Tensor

from vitrel.constants import constant
from vitrel.ops.window import windows


class Kinds(NamedTuple):
    """Windows of b images in an order in which those with the same mask, which has K kinds, follow each other."""

    visible: Tensor  # [K, N, N]
    counts: Tensor  # [K] windows of each kind
    source: Tensor  # [b*L*N] token, of b*h*w, that fills a slot
    inverse: Tensor  # [b*h*w] slot that holds a token


@constant
def window_kinds(h: int, w: int, window: tuple[int, int], shift: tuple[int, int], images: int, device: torch.device) -> Kinds:
    """The windows of `windows` over so many images with h*w tokens each. shift: (h, w) in tokens."""
    layout, n = windows(h, w, window, shift, device), window[0] * window[1]
    visible, kind, counts = layout.visible.view(-1, n * n).unique(dim=0, return_inverse=True, return_counts=True)
    order = kind.argsort(stable=True)  # windows, kind by kind
    image = torch.arange(images, device=device)[:, None]
    # For each kind every image's windows: the place of a window of the first image, plus that of the image.
    source = layout.source.view(-1, n)[order].split(counts.tolist())
    source = torch.cat([(part[None] + h * w * image[..., None]).flatten() for part in source])
    before = counts.cumsum(0) - counts
    own, slot = layout.inverse // n, layout.inverse % n  # window and slot of each token
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=device))[own] - before[kind[own]]
    at = images * before[kind[own]] + image * counts[kind[own]] + rank  # [b, h*w]
    return Kinds(visible.view(-1, n, n), images * counts, source, (at * n + slot).flatten())
