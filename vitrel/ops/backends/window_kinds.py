"""Windows on a CPU, grouped by their masks: nearly all windows of an image have the same, so that one bias serves them all.

A bias [H, N, N] is broadcast over the windows of a kind, of which there are at most nine, where a mask of every window by
itself would have [L, H, N, N] numbers.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrel.constants import constant, is_traced
from vitrel.grid import Grid
from vitrel.ops import sdpa
from vitrel.ops.reference import Call
from vitrel.ops.sdpa import four_dimensional, prepare
from vitrel.ops.window import windows
from vitrel.position.terms import Terms

_GLOBAL = "it groups windows, and global attention has none"


def refuses(call: Call) -> str:
    if call.entry == "attention":
        return _GLOBAL
    if reason := sdpa.refuses(call):
        return reason
    if call.device.type != "cpu":
        return f"it is slow on {call.device.type}, which would start kernels for every kind of window"
    if torch.compiler.is_compiling() or is_traced(call.device):
        return "how many windows are of a kind is read from a tensor, which a graph cannot do"
    return ""


def pays(call: Call) -> bool:
    """In evaluation: Swin models of every kind were 1.01 to 1.12 times as fast as by sdpa; in training no faster (1.01)."""
    return not call.grad


def window_attention(
    qkv: Tensor,
    terms: Terms,
    grid: Grid,
    window: tuple[int, int],
    shift: tuple[int, int],
    num_heads: int,
    dropout_p: float = 0.0,
) -> Tensor:
    """See vitrel.ops.window_attention."""
    kinds, n = window_kinds(grid.h, grid.w, window, shift, qkv.shape[0], device=qkv.device), window[0] * window[1]
    x = qkv.flatten(0, 2).index_select(0, kinds.source).unflatten(0, (-1, n)).unflatten(-1, (3, num_heads, -1))
    q, k, v = x.permute(2, 0, 3, 1, 4).unbind(0)  # [b*L, H, N, D], of all images
    q, k, bias, scale = prepare(q, k, terms, Grid(*window))
    bias = None if bias is None else four_dimensional(bias.to(q.dtype))  # [1 or b*L, H, N, N]
    parts, at = [], 0
    for visible, sees_all, count in zip(kinds.visible, kinds.sees_all.tolist(), kinds.counts.tolist(), strict=True):
        own = slice(at, at + count)
        mask = bias if bias is None or len(bias) == 1 else bias[own]
        if not sees_all:
            mask = q.new_zeros(1, 1, 1, 1) if mask is None else mask
            mask = mask.masked_fill(~visible, float("-inf"))
        out = F.scaled_dot_product_attention(q[own], k[own], v[own], attn_mask=mask, dropout_p=dropout_p, scale=scale)
        parts.append(out.transpose(1, 2))  # [count, N, H, D]
        at += count
    out = parts[0] if len(parts) == 1 else torch.cat(parts)
    return out.reshape(-1, qkv.shape[-1] // 3).index_select(0, kinds.inverse).unflatten(0, qkv.shape[:3])


class Kinds(NamedTuple):
    """Windows of b images in an order in which those with the same mask, which has K kinds, follow each other."""

    visible: Tensor  # [K, N, N]
    sees_all: Tensor  # [K] whether all is visible
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
    return Kinds(visible.view(-1, n, n), visible.all(1), images * counts, source, (at * n + slot).flatten())
