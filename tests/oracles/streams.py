"""Attention over segments with memory, and in two streams."""

import math
from itertools import chain, product

import numpy as np

from oracles.common import clip, offset, rotate, sincos_1d, softmax


def segment_mask(sizes, length=None):
    """[N, N] bool, True = query i sees key j: j is in i's segment (of `sizes` tokens) or one of the `length` before.

    length None: all earlier segments; 0: no other segment.
    """
    segment = [s for s, size in enumerate(sizes) for _ in range(size)]
    reach = len(sizes) if length is None else length
    return np.array([[0 <= own - other <= reach for other in segment] for own in segment])


def masked_attention(logits, v, mask, rv=None):
    """Output [H, M, D] from logits [H, M, N], v [H, N, D], mask [M, N] (True = sees) and rv [H, M, N, D], added to values.

    A query that sees no key returns 0.
    """
    H, M, N = logits.shape
    output = np.zeros((H, M, v.shape[-1]))
    for n, i in np.ndindex(H, M):
        weights = softmax([logits[n, i, j] if mask[i, j] else -math.inf for j in range(N)])
        for j in range(N):
            output[n, i] += weights[j] * (v[n, j] + (0.0 if rv is None else rv[n, i, j]))
    return output


def causal_by_segment(q, k, v, logits_of, sizes, length=None, rv=None):
    """Output [H, N, D] equal to that of segments with memory: all segments at once under `segment_mask`.

    Transformer-XL (1901.02860, section 3.2), of segment t+1 in layer n, with SG a stop of the gradient and o concatenation:
    m = SG(h_t^{n-1}) o h_{t+1}^{n-1};  q = h_{t+1}^{n-1} W_q', k = m W_k', v = m W_v';  h_{t+1}^n = Layer(q, k, v).
    logits_of(q, k, v) -> [H, N, N], such as another oracle's; sizes in tokens, as in `segment_mask`.
    """
    return masked_attention(logits_of(q, k, v), v, segment_mask(sizes, length), rv)


def table_pair(h, w, relative_position_bias_table):
    """Swin's table of the whole grid (2103.14030)."""

    def logit(n, q, k, i, j):
        (dy, dx), B = offset(i, j), relative_position_bias_table
        return len(q) ** -0.5 * np.dot(q, k) + B[(dy + h - 1) * (2 * w - 1) + dx + w - 1, n]

    return logit, None


def log_decay_pair(h, w, log_a, log_b):
    """KERPLE-log (2205.09921) of the Euclidean distance."""

    def logit(n, q, k, i, j):
        distance = math.hypot(*offset(i, j))
        return len(q) ** -0.5 * np.dot(q, k) - math.exp(log_a[n]) * math.log(1 + math.exp(log_b[n]) * distance)

    return logit, None


def rope_mixed_pair(h, w, freqs):
    """RoPE-Mixed (2403.13298): q and k rotated by their coordinates, freqs [2, H, D/2]."""

    def rotated(n, x, at):
        return rotate(x, freqs[0, n] * at[0] + freqs[1, n] * at[1])

    return lambda n, q, k, i, j: len(q) ** -0.5 * np.dot(rotated(n, q, i), rotated(n, k, j)), None


def shaw_pair(h, w, key_h, key_w, value_h, value_w):
    """Shaw et al. (1803.02155, eq. 3-4), tables [2R+1, D] per axis, shared over heads."""

    def vector(along_h, along_w, i, j):
        reaches = [len(table) // 2 for table in (along_h, along_w)]
        dy, dx = (clip(step, reach) + reach for step, reach in zip(offset(i, j), reaches, strict=True))
        return along_h[dy] + along_w[dx]

    def logit(n, q, k, i, j):
        return len(q) ** -0.5 * np.dot(q, k + vector(key_h, key_w, i, j))

    return logit, lambda i, j: vector(value_h, value_w, i, j)


def transformer_xl_pair(h, w, u, v_bias, w_r):
    """Transformer-XL (1901.02860, section 3.3), r the sincos of dy and of dx concatenated."""

    def logit(n, q, k, i, j):
        r = np.concatenate([sincos_1d(step, w_r.shape[-1] // 2) for step in offset(i, j)])
        return len(q) ** -0.5 * (np.dot(q + u[n], k) + np.dot(q + v_bias[n], w_r[n] @ r))

    return logit, None


PAIRS = {
    "table": table_pair,
    "log_decay": log_decay_pair,
    "rope_mixed": rope_mixed_pair,
    "shaw": shaw_pair,
    "transformer_xl": transformer_xl_pair,
}


def recurrent(encoding, q, k, v, rows, w, length=None, **parameters):
    """Output [H, N, D] of a vertical strip of width w, segment after segment of `rows`, as in `causal_by_segment`.

    Each segment attends to the cached keys and values of the `length` segments before it (None: of all) and to its own
    keys. encoding: one of PAIRS, with its parameters for the whole strip; q, k, v [H, N, D].
    Coordinates continue across the borders.
    """
    logit, value = PAIRS[encoding](sum(rows), w, **parameters)
    output, memory, start = np.zeros(v.shape), [], 0
    for height in rows:
        own = [(start * w + t, (start + t // w, t % w)) for t in range(height * w)]  # where it is stored, and its (y, x)
        cached = memory if length is None else memory[len(memory) - min(length, len(memory)) :]
        keys = [*chain(*cached), *own]
        for n, (row, i) in product(range(len(q)), own):
            weights = softmax([logit(n, q[n, row], k[n, column], i, j) for column, j in keys])
            for weight, (column, j) in zip(weights, keys, strict=True):
                output[n, row] += weight * (v[n, column] + (0.0 if value is None else value(i, j)))
        memory.append(own)
        start += height
    return output


def permutation_masks(order, memory=0):
    """Return the masks of the content and the query stream, [N, memory + N] bool; order[t] is the token predicted at step t."""
    assert sorted(order) == list(range(len(order)))
    step = {token: t for t, token in enumerate(order)}
    tokens, seen = range(len(order)), [True] * memory
    content = [seen + [step[j] <= step[i] for j in tokens] for i in tokens]
    query = [seen + [step[j] < step[i] for j in tokens] for i in tokens]
    return np.array(content), np.array(query)


def two_stream(q_h, q_g, k, v, bias_logits, order, memory=None, bias_g=None):
    """XLNet (1906.08237, sections 2.2-2.4) -> outputs of the content stream h and of the query stream g, each [H, N, D].

    At step t of the order z, keys and values always of h, the memory m before them:
    h_{z_t} = Attention(Q = h_{z_t}, KV = [m, h_{z<=t}]);  g_{z_t} = Attention(Q = g_{z_t}, KV = [m, h_{z<t}]).
    q_h, q_g, k, v [H, N, D]; memory: its keys and values, [H, M, D] each. Without memory the first g sees no key and returns 0.
    bias_logits [H, N, M + N]: position's part of the logits; bias_g: that of g, if it depends on the query.
    """
    if memory is not None:
        k, v = (np.concatenate([old, new], axis=1) for old, new in zip(memory, (k, v), strict=True))
    masks = permutation_masks(order, k.shape[1] - len(order))
    outputs = []
    for q, added, mask in zip((q_h, q_g), (bias_logits, bias_logits if bias_g is None else bias_g), masks, strict=True):
        logits = np.array(added, float)
        for n, i, j in np.ndindex(logits.shape):
            logits[n, i, j] += q.shape[-1] ** -0.5 * np.dot(q[n, i], k[n, j])
        outputs.append(masked_attention(logits, v, mask))
    return tuple(outputs)
