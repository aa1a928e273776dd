"""Rotations of queries and keys by their position."""

import math

import numpy as np

from oracles.common import long_axes, rotated


def rescaled(frequency, band, bands, stretch, trained_length, policy):
    """A frequency at an axis `stretch` >= 1 times its training length; band of bands counts from the highest frequency."""
    if policy == "linear":
        return frequency / stretch
    if policy == "ntk":
        return frequency * stretch ** (-band / max(bands - 1, 1))
    if policy == "yarn":
        turns = trained_length * abs(frequency) / (2 * math.pi)
        unscaled = min(max((turns - 1) / (32 - 1), 0), 1)
        return frequency * (unscaled + (1 - unscaled) / stretch)
    assert policy == "keep"
    return frequency


def stretches(h, w, trained):
    """Return the length of each axis over its training length, at least 1."""
    return tuple(max(1, now / then) for now, then in zip((h, w), trained, strict=True))


def content_factor(h, w, trained, policy):
    """YaRN's temperature (2309.00071, section 3.4), on q and on k, hence squared; the stretch is the axes' geometric mean."""
    s_h, s_w = stretches(h, w, trained)
    return (0.1 * math.log(math.sqrt(s_h * s_w)) + 1) ** 2 if policy == "yarn" else 1.0


def rope_axial(q, k, v, h, w, prefix=0, *, trained=None, base=100.0, policy="keep", reference=None):
    """RoPE-Axial (2403.13298): theta_t = base^(-4t/d), t < d/4; angle y*theta for the first d/4 pairs, x*theta for the rest.

    At a larger grid: "none", "linear" (position interpolation, 2306.15595), "ntk", "yarn" (2309.00071), per axis.
    reference (EVA-02): position y counts as y / h * reference rows, x likewise.
    A d that 4 does not divide needs training on one row or column: all d/2 pairs turn along it, theta_t = base^(-2t/d).
    """
    trained, D = trained or (h, w), q.shape[-1]
    axes = long_axes(D, trained)
    bands = D // 2 // len(axes)
    per_row, per_column = (1, 1) if reference is None else (reference[0] / h, reference[1] / w)
    along = [
        [rescaled(base ** (-t / bands), t, bands, stretch, length, policy) for t in range(bands)]
        for stretch, length in zip(stretches(h, w, trained), trained, strict=True)
    ]

    def angles(n, y, x):
        places = y * per_row, x * per_column
        return [places[axis] * theta for axis in axes for theta in along[axis]]

    return rotated(q, k, v, h, w, prefix, angles, content_factor(h, w, trained, policy))


def rope_mixed(q, k, v, h, w, prefix=0, *, trained=None, base=10.0, policy="keep", freqs):
    """RoPE-Mixed (2403.13298): angle = fy*y + fx*x; freqs [2, H, D/2], y first; `base` only initializes them.

    Scaling as `rope_axial`, fy by the stretch of y and fx by that of x; pair p has band p mod D/4.
    """
    trained, bands = trained or (h, w), math.ceil(q.shape[-1] / 4)
    at_grid = np.array(freqs, float)
    for axis, n, p in np.ndindex(*at_grid.shape):
        stretch = stretches(h, w, trained)[axis]
        at_grid[axis, n, p] = rescaled(freqs[axis, n, p], p % bands, bands, stretch, trained[axis], policy)

    def angles(n, y, x):
        return at_grid[0, n] * y + at_grid[1, n] * x

    return rotated(q, k, v, h, w, prefix, angles, content_factor(h, w, trained, policy))


def rope_normalized(q, k, v, h, w, prefix=0, *, trained=None, base=100.0):
    """DINOv3 (2508.10104): the middle of patch i of n has the coordinate c = 2(i + 1/2)/n - 1, rotated by 2 pi c / base^(4t/d).

    The first d/4 pairs are rotated by y, the rest by x. Where 4 does not divide d, all d/2 pairs are rotated by the axis that
    the grid of training has, with periods base^(2t/d).
    """
    D, axes = q.shape[-1], long_axes(q.shape[-1], trained or (h, w))
    bands = D // 2 // len(axes)

    def angles(n, *at):
        places = [2 * (i + 0.5) / length - 1 for i, length in zip(at, (h, w), strict=True)]
        return [2 * math.pi * places[axis] / base ** (t / bands) for axis in axes for t in range(bands)]

    return rotated(q, k, v, h, w, prefix, angles)
