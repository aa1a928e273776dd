"""Attention with all terms, shifted windows, and the log-n temperature, pair by pair."""

import math
from collections import defaultdict
from itertools import product

import numpy as np

from oracles.common import offset, rotate, softmax


def attention(q, k, v, scale=1.0, bias=None, rq=None, rk=None, rv=None, angles=None, query_bias=None, mask=None):
    """Attention with all kinds of terms, pair by pair -> (logits [H, M, N], output [H, M, D]); absent arrays are zero.

    q [H, M, D], k, v [H, N, D]: the queries are the LAST M rows of the key grid, on which bias [H, N, N], rq, rk, rv
    [H, N, N, D] and angles [H, N, D/2] lie. query_bias [H, D]. mask broadcasts to [H, M, N]: bool True = attend, or additive.
    """
    (H, M, D), N = q.shape, k.shape[1]
    angles = np.zeros((H, N, D // 2)) if angles is None else angles
    mask = np.asarray(True if mask is None else mask)
    mask = np.broadcast_to(np.where(mask, 0.0, -math.inf) if mask.dtype == bool else mask, (H, M, N))
    logits, output = np.zeros((H, M, N)), np.zeros((H, M, D))

    def part(array, *index):
        return 0.0 if array is None else array[index]

    for n, i in product(range(H), range(M)):
        row = N - M + i
        query = q[n, i] + part(query_bias, n)
        for j in range(N):
            total = np.sum(rotate(query, angles[n, row]) * rotate(k[n, j], angles[n, j]))
            total += np.sum(query * part(rq, n, row, j)) + np.sum(k[n, j] * part(rk, n, row, j))
            logits[n, i, j] = scale * D**-0.5 * total + part(bias, n, row, j) + mask[n, i, j]
        weights = softmax(logits[n, i])
        for j in range(N):
            output[n, i] += weights[j] * (v[n, j] + part(rv, n, row, j))
    return logits, output


def window_canvas(qkv, window, shift, num_heads, bias_fn=None, angle_fn=None):
    """Shifted window attention on an infinite masked canvas: qkv [h, w, 3C] (q, k, v; heads inside each) -> [h, w, C].

    Window borders lie at shift + n*window: with shift s the first, partial, window holds the rows 0..s-1 (Swin rolls by -s, and
    masks those rows off from the others of its last window). A shift is zero along an axis whose grid fits the window. Tokens
    attend to each other iff in one window; there is no padding and nothing wraps.
    bias_fn(head, dy, dx) -> float; angle_fn(head, y, x) -> [D/2].
    """
    h, w, channels = qkv.shape
    C = channels // 3
    D = C // num_heads
    s_h, s_w = (0 if n <= size else s for n, size, s in zip((h, w), window, shift, strict=True))
    members = defaultdict(list)
    for y, x in product(range(h), range(w)):
        members[(y - s_h) // window[0], (x - s_w) // window[1]].append((y, x))
    output = np.zeros((h, w, C))
    for n, pixels in product(range(num_heads), members.values()):
        q, k, v = ({p: qkv[p][part * C + n * D : part * C + (n + 1) * D] for p in pixels} for part in range(3))
        if angle_fn is not None:
            q, k = ({p: rotate(x[p], angle_fn(n, *p)) for p in pixels} for x in (q, k))
        for i in pixels:
            logits = [D**-0.5 * np.dot(q[i], k[j]) + (bias_fn(n, *offset(i, j)) if bias_fn else 0.0) for j in pixels]
            for weight, j in zip(softmax(logits), pixels, strict=True):
                output[i][n * D : (n + 1) * D] += weight * v[j]
    return output


def log_n(tokens, trained_tokens):
    """Temperature for another number of tokens, prefix included: sqrt(ln N / ln N_T), N at least 2."""
    return math.sqrt(math.log(max(tokens, 2)) / math.log(max(trained_tokens, 2)))
