"""Windowed attention on a CPU with windows grouped by their mask, so that one bias [H, N, N] serves a whole group.

It is for Swin models in evaluation, which were measured 1.01 to 1.12 times as fast as by `sdpa`.

An image has at most nine kinds of windows, and nearly all windows are of the kind without a mask. A bias with a mask for every
window would need [L, H, N, N] numbers.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vitrel.geometry import cached_geometry
from vitrel.grid import Grid
from vitrel.ops.sdpa import four_dimensional, fused, prepare
from vitrel.ops.window import windows
from vitrel.position.terms import Terms


def window_attention(
    qkv: Tensor,
    terms: Terms,
    grid: Grid,
    window: tuple[int, int],
    shift: tuple[int, int],
    num_heads: int,
    dropout_p: float = 0.0,
) -> Tensor:
    """Compute attention in windows; arguments and result as in vitrel.ops.window_attention."""
    kinds, n = window_kinds(grid.h, grid.w, window, shift, qkv.shape[0], device=qkv.device), window[0] * window[1]
    x = qkv.flatten(0, 2).index_select(0, kinds.source).unflatten(0, (-1, n)).unflatten(-1, (3, num_heads, -1))
    q, k, v = x.permute(2, 0, 3, 1, 4).unbind(0)  # [b*L, H, N, D], of all images
    q, k, bias, scale = prepare(q, k, terms, Grid(*window))
    bias = None if bias is None else four_dimensional(bias.to(q.dtype))  # [1 or b*L, H, N, N]
    parts, at = [], 0
    for visible, sees_all, count in zip(kinds.visible, kinds.sees_all.tolist(), kinds.counts.tolist(), strict=True):
        group = slice(at, at + count)
        mask = bias if bias is None or len(bias) == 1 else bias[group]
        if not sees_all:
            mask = q.new_zeros(1, 1, 1, 1) if mask is None else mask
            mask = mask.masked_fill(~visible, float("-inf"))
        out = fused(q[group], k[group], v[group], mask, dropout_p, scale)
        parts.append(out.transpose(1, 2))  # [count, N, H, D]
        at += count
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.reshape(-1, qkv.shape[-1] // 3).index_select(0, kinds.inverse).unflatten(0, qkv.shape[:3])


class Kinds(NamedTuple):
    """Windows of b images ordered by kind. Windows of a kind have the same mask and follow each other; there are K kinds."""

    visible: Tensor  # [K, N, N] bool: keys that each slot sees
    sees_all: Tensor  # [K] bool: no mask needed
    counts: Tensor  # [K] windows of each kind
    source: Tensor  # [b*L*N] token, of b*h*w, in each slot
    inverse: Tensor  # [b*h*w] slot of each token


@cached_geometry
def window_kinds(h: int, w: int, window: tuple[int, int], shift: tuple[int, int], images: int, device: torch.device) -> Kinds:
    """Return the windows of a batch of images grouped by their mask.

    The tensors are cached and shared: do not change them in place.

    Args:
        h: rows of an image, in tokens.
        w: columns of an image, in tokens.
        window: (h, w) in tokens, see vitrel.ops.window.
        shift: (sy, sx) in tokens, see vitrel.ops.window.
        images: number of images b.
        device: of the result.
    """
    layout, n = windows(h, w, window, shift, device), window[0] * window[1]
    visible, kind, counts = layout.visible.view(-1, n * n).unique(dim=0, return_inverse=True, return_counts=True)
    order = kind.argsort(stable=True)  # windows, kind by kind
    image = torch.arange(images, device=device)[:, None]
    # For each kind the windows of all images: tokens of the first image's window, plus the first token of the image.
    source = layout.source.view(-1, n)[order].split(counts.tolist())
    source = torch.cat([(part[None] + h * w * image[..., None]).flatten() for part in source])
    before = counts.cumsum(0) - counts
    number, slot = layout.inverse // n, layout.inverse % n  # window and slot of each token
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=device))[number] - before[kind[number]]
    at = images * before[kind[number]] + image * counts[kind[number]] + rank  # [b, h*w]
    return Kinds(visible.view(-1, n, n), visible.all(1), images * counts, source, (at * n + slot).flatten())
