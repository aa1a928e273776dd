"""In a float64 model, encodings without parameters are computed in float64."""

import math

import numpy as np
import torch

from helpers import each
from helpers.variants import attend, make, oracle_output, qkv
from vitrel.grid import Grid
from vitrel.position import create_position

Y, X = np.divmod(np.arange(15), 5)


def angles(key, bands=4):
    """Angles [15, 2 * bands] of a grid of 3 x 5 patches, rows first, from the papers."""
    band = 100.0 ** (-np.arange(bands) / bands)
    at = (Y, X) if key == "rope_axial" else (2 * math.pi * (2 * (Y + 0.5) / 3 - 1), 2 * math.pi * (2 * (X + 0.5) / 5 - 1))
    return np.concatenate([along[:, None] * band for along in at], 1)


@each("key", ["rope_axial", "rope_normalized"])
def test_rotations(key):
    position = create_position(key, Grid(3, 5), 2, 16)
    single, double = position(Grid(3, 5)).rotary, position.double()(Grid(3, 5)).rotary
    built = create_position(key, Grid(3, 5), 2, 16, dtype=torch.float64)(Grid(3, 5)).rotary
    for turn, one, two, three in zip((np.cos, np.sin), single, double, built, strict=True):
        assert one.dtype == torch.float32 and two.dtype == torch.float64
        assert np.abs(two[0].numpy() - turn(angles(key))).max() < 1e-14
        torch.testing.assert_close(one.double(), two, atol=1e-6, rtol=0)
        assert torch.equal(three, two)
    assert position.float()(Grid(3, 5)).rotary[0].dtype == torch.float32


@each("grid", [Grid(3, 5), Grid(4, 7, 1)])
@each("key", ["sincos", "fourier", "xpos", "rope_axial", "rope_normalized"])
def test_as_exact_as_the_oracle(key, grid):
    encoding, (q, k, v) = make(key, Grid(3, 5, grid.prefix), 4, dtype=torch.float64), qkv(grid, 4)
    expected = oracle_output(key, encoding, q[0], k[0], v[0], grid, Grid(3, 5), {})
    out = attend(encoding, q, k, v, grid).detach()
    np.testing.assert_allclose(out[0].numpy(), expected, atol=1e-12, rtol=0)
