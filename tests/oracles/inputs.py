"""Inputs of the oracles' own tests."""

import numpy as np
from numpy.testing import assert_allclose


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def qkv(h, w, prefix=0, heads=2, width=8):
    """q, k, v [H, N, D] and the grid, ready to be an oracle's first arguments."""
    return *draw(11, 3, heads, prefix + h * w, width), h, w, prefix


def no_content(h, w, prefix=0, heads=2, width=8):
    """As `qkv`, with q = k = v = 0: the logits are the bias alone."""
    return *np.zeros((3, heads, prefix + h * w, width)), h, w, prefix


def from_corner(logits, h, w, prefix=0):
    """Return the logits [H, h, w] of the query at (0, 0), whose offset to the key at (y, x) is (-y, -x)."""
    return logits[:, prefix, prefix:].reshape(-1, h, w)


def assert_same(first, second):
    """Assert that two oracles' logits and outputs agree."""
    for a, b in zip(first, second, strict=True):
        assert_allclose(a, b, rtol=1e-10, atol=1e-12)
