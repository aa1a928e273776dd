"""What the oracles share: token positions, offsets, softmax, rotation, and attention as a double loop."""

import math
from itertools import product

import numpy as np


def positions(h, w, prefix=0):
    """For every token None (class or register token) or its (y, x)."""
    return [None] * prefix + [(y, x) for y in range(h) for x in range(w)]


def offset(i, j):
    """Query minus key of two entries of `positions`, or None where one of them is a prefix token."""
    return None if i is None or j is None else (i[0] - j[0], i[1] - j[1])


def prefix_row(i, j, prefix):
    """Which prefix row the tokens i, j use: 0 cls->token, 1 token->cls, 2 cls->cls (query -> key), as BEiT (2106.08254)."""
    return (2 if j < prefix else 0) if i < prefix else 1


def split_heads(tokens, num_heads):
    """[N, C] -> [H, N, D]; a head owns D neighboring channels."""
    width = tokens.shape[1] // num_heads
    return np.stack([tokens[:, n * width : (n + 1) * width] for n in range(num_heads)])


def softmax(row):
    """Weights of one query; a row of -inf (no visible key) gives zeros."""
    top = max(row)
    if top == -math.inf:
        return np.zeros(len(row))
    exponentials = np.array([math.exp(value - top) for value in row])
    return exponentials / exponentials.sum()


def rotate(x, angles):
    """Half-split rotation: pair p couples the channels p and p + D/2."""
    half = len(x) // 2
    a, b, c, s = x[:half], x[half:], np.cos(angles), np.sin(angles)
    return np.concatenate([a * c - b * s, b * c + a * s])


def sincos_1d(position, channels):
    """[channels]: sines, then cosines, at the frequencies 10000^(-t / (channels/2))."""
    count = channels // 2
    angles = [position * 10000.0 ** (-t / count) for t in range(count)]
    return np.array([math.sin(a) for a in angles] + [math.cos(a) for a in angles])


def long_axes(width, trained):
    """Axes (0 rows, 1 columns) that share the channels: both, but if 4 does not divide the width the one longer than 1."""
    if width % 4 == 0:
        return (0, 1)
    assert width % 2 == 0 and 1 in trained
    return (0,) if trained[1] == 1 else (1,)


def clip(delta, reach):
    """Offset limited to ±reach."""
    return max(-reach, min(reach, delta))


def pair(value):
    """(h, w) of one number for both axes or of two."""
    return (value, value) if isinstance(value, int | float) else tuple(value)


def radii(radius, trained):
    """(Rh, Rw) of the clipped encodings: by default half the training grid, else one number for both axes or two."""
    return (trained[0] // 2, trained[1] // 2) if radius is None else pair(radius)


def attend(v, h, w, prefix, logit, value=None):
    """Attention from `logit(head, i, j, delta)`; `value(head, delta)` is added to the values; delta None: a prefix token."""
    (H, N, _), at = v.shape, positions(h, w, prefix)
    logits, output = np.zeros((H, N, N)), np.zeros(v.shape)
    for n, i in product(range(H), range(N)):
        logits[n, i] = [logit(n, i, j, offset(at[i], at[j])) for j in range(N)]
        weights = softmax(logits[n, i])
        for j in range(N):
            output[n, i] += weights[j] * (v[n, j] + (0.0 if value is None else value(n, offset(at[i], at[j]))))
    return logits, output


def biased(q, k, v, h, w, prefix, bias, prefix_rows=None):
    """d^-1/2 q.k + bias(head, dy, dx); where a prefix token takes part, its row of prefix_rows [3, H] if there are any."""

    def logit(n, i, j, delta):
        content = q.shape[-1] ** -0.5 * np.dot(q[n, i], k[n, j])
        if delta is not None:
            return content + bias(n, *delta)
        return content if prefix_rows is None else content + prefix_rows[prefix_row(i, j, prefix), n]

    return attend(v, h, w, prefix, logit)


def rotated(q, k, v, h, w, prefix, angles, factor=1.0):
    """factor * d^-1/2 rot(q).rot(k) with angles(head, y, x) -> [D/2]; prefix tokens are not rotated."""
    at, scale = positions(h, w, prefix), factor * q.shape[-1] ** -0.5

    def rotate_rows(x):
        return [
            [row if i is None else rotate(row, angles(n, *i)) for i, row in zip(at, x[n], strict=True)] for n in range(len(x))
        ]

    q, k = rotate_rows(q), rotate_rows(k)
    return attend(v, h, w, prefix, lambda n, i, j, delta: scale * np.dot(q[n][i], k[n][j]))
