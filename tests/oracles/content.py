"""Encodings with vectors per offset that are multiplied by queries or keys, or added to values."""

import math

import numpy as np

from oracles.common import attend, clip, long_axes, radii, sincos_1d


def shaw(
    q,
    k,
    v,
    h,
    w,
    prefix=0,
    *,
    trained=None,
    radius=None,
    per_head=False,
    values=True,
    key_h,
    key_w,
    value_h=None,
    value_w=None,
):
    """Shaw et al. (1803.02155, eq. 3-4), per axis and summed: d^-1/2 q.(k + a^K), out = sum p (v + a^V).

    Each table [2R+1, D], shared over heads, or [H, 2R+1, D] if per_head, row clip(offset, R) + R; values=False: no a^V.
    Pairs with a prefix token have no vector.
    """
    Rh, Rw = radii(radius, trained or (h, w))
    assert (value_h is not None) == (value_w is not None) == values
    assert all(t.shape[-2] == 2 * R + 1 for t, R in ((key_h, Rh), (key_w, Rw), (value_h, Rh), (value_w, Rw)) if t is not None)

    def row(table, n, delta, reach):
        return (table[n] if per_head else table)[clip(delta, reach) + reach]

    def vector(along_h, along_w, n, delta):
        return 0.0 if delta is None else row(along_h, n, delta[0], Rh) + row(along_w, n, delta[1], Rw)

    def logit(n, i, j, delta):
        return q.shape[-1] ** -0.5 * np.dot(q[n, i], k[n, j] + vector(key_h, key_w, n, delta))

    return attend(v, h, w, prefix, logit, (lambda n, delta: vector(value_h, value_w, n, delta)) if values else None)


def transformer_xl(q, k, v, h, w, prefix=0, *, trained=None, u, v_bias, w_r):
    """Transformer-XL (1901.02860, section 3.3): d^-1/2 [(q+u).k + (q+v).W_R r], r = sincos(dy) + sincos(dx) concatenated.

    u, v_bias [H, D]; w_r [H, D, E], E the width of r; pairs with a prefix token keep the first term only. Where 4 does not
    divide E, r is the sinusoid of the one axis that the grid of training has.
    """
    axes = long_axes(w_r.shape[-1], trained or (h, w))

    def logit(n, i, j, delta):
        total = np.dot(q[n, i] + u[n], k[n, j])
        if delta is not None:
            r = np.concatenate([sincos_1d(delta[axis], w_r.shape[-1] // len(axes)) for axis in axes])
            total += np.dot(q[n, i] + v_bias[n], w_r[n] @ r)
        return q.shape[-1] ** -0.5 * total

    return attend(v, h, w, prefix, logit)


def deberta(q, k, v, h, w, prefix=0, *, trained=None, radius=None, key_h, key_w, query_h, query_w):
    """DeBERTa (2006.03654, eq. 4), per axis: [q_i.k_j + q_i.Kr[delta(i, j)] + k_j.Qr[delta(j, i)]] / sqrt(3d).

    Tables [H, 2R+1, D], row clip(delta, R) + R (the paper's 2R rows leave +R out); a prefix pair keeps the first term only.
    """
    reaches = radii(radius, trained or (h, w))
    along = ((key_h, query_h), (key_w, query_w))
    assert all(t.shape[1] == 2 * R + 1 for R, tables in zip(reaches, along, strict=True) for t in tables)

    def logit(n, i, j, delta):
        total = np.dot(q[n, i], k[n, j])
        if delta is not None:
            for i_minus_j, R, (key_table, query_table) in zip(delta, reaches, along, strict=True):
                total += np.dot(q[n, i], key_table[n, clip(i_minus_j, R) + R])
                total += np.dot(k[n, j], query_table[n, clip(-i_minus_j, R) + R])
        return total / math.sqrt(3 * q.shape[-1])

    return attend(v, h, w, prefix, logit)


def stretch_rows(rows, count):
    """[R, D] -> [count, D], linear between the centers of cells: new row i lies at (i + 1/2) R/count - 1/2, edges repeated."""
    last, made = len(rows) - 1, []
    for i in range(count):
        at = min(max((i + 0.5) * len(rows) / count - 0.5, 0.0), last)
        low = math.floor(at)
        made.append((1 - at + low) * rows[low] + (at - low) * rows[min(low + 1, last)])
    return np.array(made)


def decomposed(q, k, v, h, w, prefix=0, *, trained=None, rel_pos_h, rel_pos_w):
    """MViTv2 (2112.01526) as coded there and in SAM (2304.02643): d^-1/2 q.k + q.R_h[dy] + q.R_w[dx], q itself unscaled.

    rel_pos_h [2h-1, D], rel_pos_w [2w-1, D] of the training grid, shared over heads; pairs with a prefix token keep the first
    term only. The rows of an axis longer than in training are interpolated linearly; other axes read theirs unchanged.
    """
    along, middle = [], []
    for rows, length, old in zip((rel_pos_h, rel_pos_w), (h, w), trained or (h, w), strict=True):
        assert len(rows) == 2 * old - 1
        along.append(stretch_rows(rows, 2 * length - 1) if length > old else rows)
        middle.append(max(length, old) - 1)

    def logit(n, i, j, delta):
        content = q.shape[-1] ** -0.5 * np.dot(q[n, i], k[n, j])
        if delta is None:
            return content
        return content + sum(np.dot(q[n, i], along[axis][delta[axis] + middle[axis]]) for axis in range(2))

    return attend(v, h, w, prefix, logit)


def pape(q, k, v, h, w, prefix=0, *, parabolas=50, position, a, b):
    """PaPE (2602.01418): d^-1/2 [q.k - sum_m softplus(q_i.a_m) (w_m.delta)^2 + sum_m (q_i.b_m) (w_m.delta)].

    position [H, M, 2] holds the w_m, y first; a, b [H, M, D]; M parabolas. Pairs with a prefix token have content only.
    """

    def logit(n, i, j, delta):
        total = np.dot(q[n, i], k[n, j])
        for m in range(position.shape[1] if delta is not None else 0):
            along = np.dot(position[n, m], delta)
            total -= math.log1p(math.exp(np.dot(q[n, i], a[n, m]))) * along**2
            total += np.dot(q[n, i], b[n, m]) * along
        return q.shape[-1] ** -0.5 * total

    return attend(v, h, w, prefix, logit)
