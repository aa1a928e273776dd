"""Attention without position, and encodings that are added to the tokens after the patch embedding."""

import math

import numpy as np

from oracles.common import biased, long_axes, pair, positions, sincos_1d, split_heads


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


def stretch(rows, length):
    """[n, C] -> [length, C] by Pillow's bicubic filter with a = -1/2: as wide as a target step where that is more than one row,
    and normalized over the rows that exist."""
    n = len(rows)
    step = n / length

    def cubic(t):
        t = abs(t)
        inner, outer = (1.5 * t - 2.5) * t * t + 1, ((-0.5 * t + 2.5) * t - 4) * t + 2
        return inner if t < 1 else outer if t < 2 else 0.0

    stretched = []
    for i in range(length):
        weights = np.array([cubic((j + 0.5 - (i + 0.5) * step) / max(step, 1)) for j in range(n)])
        stretched.append(weights @ rows / weights.sum())
    return np.stack(stretched)


def absolute_factorized(q, k, v, h, w, prefix=0, *, pos_embed_h, pos_embed_w):
    """NaViT (2307.06304), factorized absolute: P_h[y] + P_w[x], [1, h, C] and [1, w, C]; prefix tokens get none.

    On another grid each part is stretched along its axis.
    """
    rows, columns = stretch(pos_embed_h[0], h), stretch(pos_embed_w[0], w)
    tokens = [rows[y] + columns[x] for y, x in positions(h, w)]
    return absolute(q, k, v, h, w, prefix, pos_embed=np.stack([np.zeros_like(rows[0])] * prefix + tokens)[None])


def absolute_windowed(q, k, v, h, w, prefix=0, *, trained=None, period=8, pos_embed, pos_embed_win):
    """Hiera's absolute win (2311.05613, eq. 3): stretch(P) + tile(W), W [1, m m', C].

    P [1, prefix + windows, C] has a row for every window, whole or cut, of the trained grid.
    """
    m, n = pair(period)
    down, across = (math.ceil(side / p) for side, p in zip(trained or (h, w), (m, n), strict=True))
    whole = pos_embed[0, prefix:].reshape(down, across, -1)
    whole = np.stack([stretch(whole[:, x], h) for x in range(across)], 1)
    whole = np.stack([stretch(row, w) for row in whole])
    tokens = [whole[y, x] + pos_embed_win[0, y % m * n + x % n] for y, x in positions(h, w)]
    return absolute(q, k, v, h, w, prefix, pos_embed=np.stack([*pos_embed[0, :prefix], *tokens])[None])


def fourier(q, k, v, h, w, prefix=0, *, bands=32, base=10000.0, **projection):
    """XCiT (2106.09681) and its code: W waves + b, token_projection.weight [C, 2 bands], token_projection.bias [C].

    waves: sine and cosine in turn of 2 pi (y + 1) / (h + 1e-6) divided by base^(2t / bands), t = 0, 1, ..., then of x.
    """
    W, b = (projection.pop(f"token_projection.{name}") for name in ("weight", "bias"))
    assert not projection

    def waves(place, length):
        angles = [2 * math.pi * (place + 1) / (length + 1e-6) / base ** (2 * t / bands) for t in range(bands // 2)]
        return [value for angle in angles for value in (math.sin(angle), math.cos(angle))]

    rows = [W @ np.array(waves(y, h) + waves(x, w)) + b for y, x in positions(h, w)]
    return absolute(q, k, v, h, w, prefix, pos_embed=np.stack([np.zeros(len(b))] * prefix + rows)[None])
