"""Independent truth: every encoding as a plain double loop over queries i and keys j, in float64, written from its paper.

Imports nothing from the package. H heads, N = prefix + h*w tokens (row-major after the prefix), D head width, C = H*D.
Offsets are query minus key, in patches; h comes before w everywhere.
An encoding's oracle is `f(q, k, v, h, w, prefix=0, *, parameters...) -> (logits [H, N, N], output [H, N, D])`, with q, k, v
[H, N, D] and the logits complete: scaled, biased, ready for softmax.
"""

import math
from collections import defaultdict
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
    """[N, C] -> [H, N, D]; a head owns D neighbouring channels."""
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


def attend(v, h, w, prefix, logit, value=None):
    """Attention from `logit(head, i, j, delta)`, `value(delta)` added to the value vectors; delta None: a prefix token."""
    (H, N, _), at = v.shape, positions(h, w, prefix)
    logits, output = np.zeros((H, N, N)), np.zeros(v.shape)
    for n, i in product(range(H), range(N)):
        logits[n, i] = [logit(n, i, j, offset(at[i], at[j])) for j in range(N)]
        weights = softmax(logits[n, i])
        for j in range(N):
            output[n, i] += weights[j] * (v[n, j] + (0.0 if value is None else value(offset(at[i], at[j]))))
    return logits, output


def biased(q, k, v, h, w, prefix, bias, prefix_rows=None):
    """d^-1/2 q.k + bias(head, dy, dx); where a prefix token takes part, its row of prefix_rows [3, H] if there are any."""

    def logit(n, i, j, delta):
        content = q.shape[-1] ** -0.5 * np.dot(q[n, i], k[n, j])
        if delta is not None:
            return content + bias(n, *delta)
        return content if prefix_rows is None else content + prefix_rows[prefix_row(i, j, prefix), n]

    return attend(v, h, w, prefix, logit)


def rotated(q, k, v, h, w, prefix, angles):
    """d^-1/2 rot(q).rot(k) with angles(head, y, x) -> [D/2]; prefix tokens are not rotated."""
    at = positions(h, w, prefix)

    def turn(x, n, i):
        return x[n, i] if at[i] is None else rotate(x[n, i], angles(n, *at[i]))

    return attend(v, h, w, prefix, lambda n, i, j, delta: q.shape[-1] ** -0.5 * np.dot(turn(q, n, i), turn(k, n, j)))


def none(q, k, v, h, w, prefix=0):
    """Content alone (Vaswani et al. 2017, 1706.03762, eq. 1)."""
    return biased(q, k, v, h, w, prefix, lambda n, dy, dx: 0.0)


def absolute(q, k, v, h, w, prefix=0, *, pos_embed):
    """ViT (2010.11929), x + P at the trained grid, under identity projections: P [1, N, C] is added to q, k and v."""
    P = split_heads(pos_embed[0], len(q))
    return none(q + P, k + P, v + P, h, w, prefix)


def sincos_tokens(h, w, prefix, channels):
    """[N, C], 2-D sin-cos of MoCo v3 (2104.02057) and MAE (2111.06377), with h before w: first C/2 channels y, the others x.

    Each half is a block of sines, then one of cosines, at the frequencies 10000^(-t/(C/4)). Prefix rows are zero.
    """
    half = channels // 2
    grid = [np.concatenate([sincos_1d(y, half), sincos_1d(x, half)]) for y, x in positions(h, w)]
    return np.stack([np.zeros(channels)] * prefix + grid)


def sincos(q, k, v, h, w, prefix=0):
    """`sincos_tokens` added to q, k and v, as `absolute`."""
    return absolute(q, k, v, h, w, prefix, pos_embed=sincos_tokens(h, w, prefix, q.shape[0] * q.shape[2])[None])


def table(q, k, v, h, w, prefix=0, *, relative_position_bias_table):
    """Swin (2103.14030, eq. 4): + B[dy, dx], B [(2h-1)(2w-1) (+3), H], dy-major from the most negative; prefix rows last."""
    B, rows = relative_position_bias_table, (2 * h - 1) * (2 * w - 1)
    return biased(q, k, v, h, w, prefix, lambda n, dy, dx: B[(dy + h - 1) * (2 * w - 1) + dx + w - 1, n], B[rows:])


def factorised(q, k, v, h, w, prefix=0, *, table_h, table_w):
    """+ B_h[dy] + B_w[dx]; table_h [2h-1 (+3), H] alone has the prefix rows, table_w is [2w-1, H]."""
    rows = 2 * h - 1
    return biased(q, k, v, h, w, prefix, lambda n, dy, dx: table_h[dy + h - 1, n] + table_w[dx + w - 1, n], table_h[rows:])


def rope_axial(q, k, v, h, w, prefix=0, *, base=100.0):
    """RoPE-Axial (2403.13298): theta_t = base^(-4t/d), t < d/4; the first d/4 pairs turn by y*theta, the others by x*theta."""
    D = q.shape[-1]
    theta = [base ** (-4 * t / D) for t in range(D // 4)]
    return rotated(q, k, v, h, w, prefix, lambda n, y, x: [y * t for t in theta] + [x * t for t in theta])


def rope_mixed(q, k, v, h, w, prefix=0, *, freqs):
    """RoPE-Mixed (2403.13298): angle = fy*y + fx*x; freqs [2, H, D/2], y first."""
    return rotated(q, k, v, h, w, prefix, lambda n, y, x: freqs[0, n] * y + freqs[1, n] * x)


def alibi(q, k, v, h, w, prefix=0, *, slopes):
    """Symmetric ALiBi (2108.12409) in 2-D: - m_H * Euclidean distance; slopes [H]; no bias with a prefix token."""
    return biased(q, k, v, h, w, prefix, lambda n, dy, dx: -slopes[n] * math.hypot(dy, dx))


def log_decay(q, k, v, h, w, prefix=0, *, a, b):
    """KERPLE-log (2205.09921): - a_H * log(1 + b_H * Euclidean distance); a, b [H]; fixed lambda is a = lambda, b = 1."""
    return biased(q, k, v, h, w, prefix, lambda n, dy, dx: -a[n] * math.log(1 + b[n] * math.hypot(dy, dx)))


def shaw(q, k, v, h, w, prefix=0, *, key_h, key_w, value_h, value_w):
    """Shaw et al. (1803.02155, eq. 3-4), per axis and summed: d^-1/2 q.(k + a^K), out = sum p (v + a^V).

    Each table [2R+1, D], shared over heads, row clip(offset, R) + R; pairs with a prefix token have no vector.
    """
    reach = len(key_h) // 2

    def vector(along_h, along_w, delta):
        return 0.0 if delta is None else along_h[clip(delta[0], reach) + reach] + along_w[clip(delta[1], reach) + reach]

    def logit(n, i, j, delta):
        return q.shape[-1] ** -0.5 * np.dot(q[n, i], k[n, j] + vector(key_h, key_w, delta))

    return attend(v, h, w, prefix, logit, lambda delta: vector(value_h, value_w, delta))


def transformer_xl(q, k, v, h, w, prefix=0, *, u, v_bias, w_r):
    """Transformer-XL (1901.02860, section 3.3): d^-1/2 [(q+u).k + (q+v).W_R r], r = sincos(dy) + sincos(dx) concatenated.

    u, v_bias [H, D]; w_r [H, D, E], E the width of r; pairs with a prefix token keep the first term only.
    """

    def logit(n, i, j, delta):
        total = np.dot(q[n, i] + u[n], k[n, j])
        if delta is not None:
            r = np.concatenate([sincos_1d(step, w_r.shape[-1] // 2) for step in delta])
            total += np.dot(q[n, i] + v_bias[n], w_r[n] @ r)
        return q.shape[-1] ** -0.5 * total

    return attend(v, h, w, prefix, logit)


def deberta(q, k, v, h, w, prefix=0, *, key_h, key_w, query_h, query_w):
    """DeBERTa (2006.03654, eq. 4), per axis: [q_i.k_j + q_i.Kr[delta(i, j)] + k_j.Qr[delta(j, i)]] / sqrt(3d).

    Tables [H, 2R+1, D], row clip(delta, R) + R (the paper's 2R rows leave +R out); a prefix pair keeps the first term only.
    """
    reach = key_h.shape[1] // 2

    def logit(n, i, j, delta):
        total = np.dot(q[n, i], k[n, j])
        if delta is not None:
            for i_minus_j, key_table, query_table in zip(delta, (key_h, key_w), (query_h, query_w), strict=True):
                total += np.dot(q[n, i], key_table[n, clip(i_minus_j, reach) + reach])
                total += np.dot(k[n, j], query_table[n, clip(-i_minus_j, reach) + reach])
        return total / math.sqrt(3 * q.shape[-1])

    return attend(v, h, w, prefix, logit)


def decomposed(q, k, v, h, w, prefix=0, *, rel_pos_h, rel_pos_w):
    """MViTv2 (2112.01526) as coded there and in SAM (2304.02643): d^-1/2 q.k + q.R_h[dy] + q.R_w[dx], q itself unscaled.

    rel_pos_h [2h-1, D], rel_pos_w [2w-1, D], shared over heads; pairs with a prefix token keep the first term only.
    """

    def logit(n, i, j, delta):
        position = 0.0 if delta is None else np.dot(q[n, i], rel_pos_h[delta[0] + h - 1] + rel_pos_w[delta[1] + w - 1])
        return q.shape[-1] ** -0.5 * np.dot(q[n, i], k[n, j]) + position

    return attend(v, h, w, prefix, logit)


def attention(q, k, v, scale=1.0, bias=None, rq=None, rk=None, rv=None, angles=None, query_bias=None, mask=None):
    """The general algebra, one pair at a time -> (logits [H, M, N], output [H, M, D]); absent arrays are zero.

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


def clip(delta, reach):
    """Offset limited to ±reach."""
    return max(-reach, min(reach, delta))


def t5_bucket(delta, num_buckets=32, max_distance=128, bidirectional=True):
    """T5 (1910.10683) bucket of a query-minus-key offset, exact in integers; a later key (delta < 0) adds num_buckets/2.

    Per sign, distances below half its buckets are exact; bucket e + t starts at e*(max_distance/e)^(t/(count - e)).
    """
    count = num_buckets // 2 if bidirectional else num_buckets
    start = count if bidirectional and delta < 0 else 0
    distance = abs(delta) if bidirectional else max(delta, 0)
    exact = count // 2
    if distance < exact:
        return start + distance
    logs = count - exact
    reached = [t for t in range(logs) if distance**logs * exact**t >= max_distance**t * exact**logs]
    return start + exact + reached[-1]


def relative_shift(x):
    """Scores by key-minus-query offset [n, 2n-1] -> by key [n, n]: y[i, j] = x[i, j - i + n - 1] (1809.04281)."""
    n = len(x)
    return np.array([[x[i][j - i + n - 1] for j in range(n)] for i in range(n)])


RELATIVE = (table, factorised, rope_axial, rope_mixed, alibi, log_decay, shaw, transformer_xl, deberta, decomposed)
ORACLES = {rule.__name__: rule for rule in (none, absolute, sincos, *RELATIVE)}
