"""Encodings with directional heads: keys outside a head's field of view have the logit -inf."""

import math

import numpy as np

from oracles.common import attend, biased, long_axes, positions, rotate


def xpos(q, k, v, h, w, prefix=0, *, trained=None, base=100.0, gamma=0.4, scale_base=None):
    """xPos (2212.10554), one-sided: `rope_axial`, pair p times zeta_t^(|d| / scale_base), t = p mod T, T bands per axis.

    zeta_t = (t/T + gamma) / (1 + gamma); d is the offset along the axis of the head, which sees, by n mod 4, only keys that
    are not below it (dy >= 0), not above (dy <= 0), not to the right (dx >= 0), not to the left (dx <= 0). scale_base is half
    the longer side of the training grid. Prefix tokens are seen by all and not rotated. In a pair with a prefix token a
    patch is rotated and scaled by zeta^±(its place along the axis of the head, from the middle of the grid), and the prefix
    token has the factor zeta^(half the excess of the axis over its training length), so the scale never exceeds training's.
    """
    at, D = positions(h, w, prefix), q.shape[-1]
    axes = long_axes(D, trained or (h, w))
    T = D // 2 // len(axes)
    theta = [base ** (-t / T) for t in range(T)]
    zeta = [(t / T + gamma) / (1 + gamma) for t in range(T)]
    scale_base = max(trained or (h, w)) / 2 if scale_base is None else scale_base

    def rotate_at(channels, place):
        return rotate(channels, [place[axis] * t for axis in axes for t in theta])

    def scaled(channels, place, n, sign):
        """Return q or k of a pair with a prefix token, rotated and scaled by its place from the middle of the grid."""
        if place is None:
            length, trained_length = ((h, w)[n % 4 // 2], (trained or (h, w))[n % 4 // 2])
            excess = max(length - trained_length, 0) / 2
            return channels * np.array([zeta[p % T] ** (excess / scale_base) for p in range(D // 2)] * 2)
        y, x = place[0] - (h - 1) / 2, place[1] - (w - 1) / 2
        factors = [zeta[p % T] ** (sign * (y, -y, x, -x)[n % 4] / scale_base) for p in range(D // 2)]
        return rotate_at(channels, place) * np.array(factors * 2)

    def logit(n, i, j, delta):
        if delta is None:
            products = scaled(q[n, i], at[i], n, 1) * scaled(k[n, j], at[j], n, -1)
            return D**-0.5 * products.sum()
        ahead = (delta[0], -delta[0], delta[1], -delta[1])[n % 4]
        if ahead < 0:
            return -math.inf
        products = rotate_at(q[n, i], at[i]) * rotate_at(k[n, j], at[j])
        decay = [zeta[p % T] ** (ahead / scale_base) for p in range(D // 2)]
        return D**-0.5 * sum(decay[p] * (products[p] + products[p + D // 2]) for p in range(D // 2))

    return attend(v, h, w, prefix, logit)


def views(fov):
    """The fields of view of LookHere's directed heads, in the order of heads: dy, dx -> whether the key is seen."""
    up, down = (lambda dy, dx: dy >= abs(dx)), (lambda dy, dx: -dy >= abs(dx))
    left, right = (lambda dy, dx: dx >= abs(dy)), (lambda dy, dx: -dx >= abs(dy))
    above, below = (lambda dy, dx: dy >= 0), (lambda dy, dx: dy <= 0)
    before, after = (lambda dy, dx: dx >= 0), (lambda dy, dx: dx <= 0)
    both = {
        180: [(above,), (below,), (before,), (after,)],
        90: [(above, before), (above, after), (below, before), (below, after), (up,), (down,), (left,), (right,)],
        45: [
            (up, before),
            (down, before),
            (left, above),
            (right, above),
            (up, after),
            (down, after),
            (left, below),
            (right, below),
        ],
    }[fov]
    return [lambda dy, dx, rules=rules: all(rule(dy, dx) for rule in rules) for rules in both]


def lookhere(q, k, v, h, w, prefix=0, *, fov=90, slope=1.0):
    """LookHere (2405.13985): - slope * m_n * Euclidean distance inside the view of head n, -inf outside.

    The last U = max(1, min(4, H // 3)) heads see everything, m = 4^-(1+u); head n before them has view n mod P of the P of
    `views` and m = 2^-(1 + n // P). Pairs with a prefix token have content only and are never hidden.
    """
    H, fields = len(q), views(fov)
    directed = H - max(1, min(4, H // 3))

    def bias(n, dy, dx):
        if n >= directed:
            return -slope * 4.0 ** -(1 + n - directed) * math.hypot(dy, dx)
        if not fields[n % len(fields)](dy, dx):
            return -math.inf
        return -slope * 2.0 ** -(1 + n // len(fields)) * math.hypot(dy, dx)

    return biased(q, k, v, h, w, prefix, bias)
