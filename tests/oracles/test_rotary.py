"""Oracles of rotary encodings against each other, and the effect of each policy on a frequency."""

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose

import oracles
from helpers import each
from oracles.inputs import assert_same, draw, qkv
from oracles.rotary import content_factor, rescaled


def axial_frequencies(width, base=100.0, s_h=1.0, s_w=1.0):
    """freqs [2, 2, D/2] with which rope_mixed is rope_axial."""
    bands = width // 4
    freqs, theta = np.zeros((2, 2, 2 * bands)), base ** (-np.arange(bands) / bands)
    freqs[0, :, :bands], freqs[1, :, bands:] = theta / s_h, theta / s_w
    return freqs


def test_axial_is_a_mixed_rope():
    for base in (100.0, 7.0):
        expected = oracles.rope_mixed(*qkv(3, 4, 1, width=16), freqs=axial_frequencies(16, base))
        assert_same(oracles.rope_axial(*qkv(3, 4, 1, width=16), base=base), expected)


@each("base", [100.0, 10.0])
def test_normalized_is_a_mixed_rope_of_the_grids_size(base):
    """A step along an axis of n is 2/n of the coordinate, 4 pi / n / period of angle; only differences count."""
    h, w = 3, 5
    freqs = axial_frequencies(16, base, h / (4 * math.pi), w / (4 * math.pi))
    expected = oracles.rope_mixed(*qkv(h, w, width=16), freqs=freqs)
    assert_same(oracles.rope_normalized(*qkv(h, w, width=16), base=base), expected)


def test_normalized_coordinates_lie_about_the_middle():
    """A middle token is not rotated: with a prefix token it keeps plain content; the first of two is at -1/2."""
    q, k, v, *grid = qkv(1, 3, 1)
    plain = oracles.none(q, k, v, *grid)[0]
    logits, _ = oracles.rope_normalized(q, k, v, *grid)
    assert_allclose(logits[:, 0, 2], plain[:, 0, 2])
    one = np.eye(8)[None, [2] * 3]  # first pair of x, period 1
    assert oracles.rope_normalized(one, one, one, 1, 2, 1)[0][0, 0, 1] == pytest.approx(8**-0.5 * math.cos(-math.pi))


def test_linear_scaling_divides_frequencies():
    expected = oracles.rope_mixed(*qkv(4, 6, 1), freqs=axial_frequencies(8, 100.0, 2, 1.5))
    assert_same(oracles.rope_axial(*qkv(4, 6, 1), trained=(2, 4), policy="linear"), expected)
    freqs = draw(0, 2, 2, 4)
    divided = freqs / np.array([2, 1.5])[:, None, None]
    scaled = oracles.rope_mixed(*qkv(4, 6, 1), trained=(2, 4), policy="linear", freqs=freqs)
    assert_same(scaled, oracles.rope_mixed(*qkv(4, 6, 1), freqs=divided))


def test_ntk_keeps_the_first_band_and_divides_the_last():
    assert rescaled(3.0, 0, 4, 2.5, 7, "ntk") == 3
    assert rescaled(3.0, 3, 4, 2.5, 7, "ntk") == pytest.approx(3 / 2.5)
    assert rescaled(3.0, 1, 3, 4.0, 7, "ntk") == pytest.approx(3 / 2)
    assert rescaled(3.0, 1, 2, 2.5, 7, "ntk") == pytest.approx(3 / 2.5)
    assert rescaled(3.0, 0, 1, 2.5, 7, "ntk") == 3
    freqs = axial_frequencies(16)
    freqs[0, :, :4] *= 2.0 ** (-np.arange(4) / 3)
    freqs[1, :, 4:] *= 1.5 ** (-np.arange(4) / 3)
    expected = oracles.rope_mixed(*qkv(4, 6, 1, width=16), freqs=freqs)
    assert_same(oracles.rope_axial(*qkv(4, 6, 1, width=16), trained=(2, 4), policy="ntk"), expected)


def test_yarn_keeps_fast_frequencies_and_interpolates_slow_ones():
    turn = 2 * math.pi
    assert rescaled(-40 * turn / 8, 0, 2, 2.0, 8, "yarn") == -40 * turn / 8
    assert rescaled(0.9 * turn / 8, 0, 2, 2.0, 8, "yarn") == 0.9 * turn / 8 / 2
    assert rescaled(16.5 * turn / 8, 0, 2, 2.0, 8, "yarn") == pytest.approx(16.5 * turn / 8 * 0.75)
    assert rescaled(0.0, 0, 2, 2.0, 8, "yarn") == 0


def test_yarn_temperature_multiplies_every_content_logit():
    linear, yarn = (oracles.rope_axial(*qkv(4, 6, 1), trained=(2, 4), policy=kind)[0] for kind in ("linear", "yarn"))
    assert_allclose(yarn, linear * (0.1 * math.log(3**0.5) + 1) ** 2, atol=1e-12)  # less than one rotation in training
    assert content_factor(4, 6, (2, 4), "linear") == content_factor(2, 3, (2, 4), "yarn") == 1
    assert content_factor(4, 1, (2, 4), "yarn") == pytest.approx((0.1 * math.log(2**0.5) + 1) ** 2)
