"""Attention without position, and encodings that are added to the tokens after the patch embedding."""

import numpy as np

from oracles.common import biased, long_axes, positions, sincos_1d, split_heads


def none(q, k, v, h, w, prefix=0):
    """Content alone (Vaswani et al. 2017, 1706.03762, eq. 1)."""
    return biased(q, k, v, h, w, prefix, lambda n, dy, dx: 0.0)


def absolute(q, k, v, h, w, prefix=0, *, pos_embed):
    """ViT (2010.11929), x + P at the trained grid, under identity projections: P [1, N, C] is added to q, k and v."""
    P = split_heads(pos_embed[0], len(q))
    return none(q + P, k + P, v + P, h, w, prefix)


def sincos_tokens(h, w, prefix, channels, trained=None):
    """[N, C], 2-D sin-cos of MoCo v3 (2104.02057) and MAE (2111.06377), with h before w: first C/2 channels y, the others x.

    Each half is a block of sines, then one of cosines, at the frequencies 10000^(-t/(C/4)). Prefix rows are zero. Where 4 does
    not divide C, all channels are one such block, of the axis that the grid of training has.
    """
    axes = long_axes(channels, trained or (h, w))
    grid = [np.concatenate([sincos_1d(at[axis], channels // len(axes)) for axis in axes]) for at in positions(h, w)]
    return np.stack([np.zeros(channels)] * prefix + grid)


def sincos(q, k, v, h, w, prefix=0, *, trained=None):
    """`sincos_tokens` added to q, k and v, as `absolute`."""
    return absolute(q, k, v, h, w, prefix, pos_embed=sincos_tokens(h, w, prefix, q.shape[0] * q.shape[2], trained)[None])
