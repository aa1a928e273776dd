"""Oracles of additive encodings against values computed by hand and against each other."""

import math

import numpy as np
import pytest
from numpy.testing import assert_allclose

import oracles
from helpers import each
from oracles.bias import log_spaced
from oracles.inputs import assert_same, draw, from_corner, no_content, qkv


def test_clipped_far_offsets_have_the_edge():
    B = np.arange(15.0)[:, None].repeat(2, axis=1)  # R = (1, 2): dy -1 has 0..4, dy 0 has 5..9
    logits, _ = oracles.clipped(*no_content(4, 5), trained=(2, 4), relative_position_bias_table=B)
    assert_allclose(from_corner(logits, 4, 5)[0], [[7, 6, 5, 5, 5]] + [[2, 1, 0, 0, 0]] * 3)
    one = oracles.clipped(*no_content(4, 5), radius=0, relative_position_bias_table=B[7:8])[0]
    assert (one == 7).all()


def test_log_spaced_coordinates():
    assert round(log_spaced(1, 8), 4) == 0.3665
    assert round(log_spaced(1, 16), 4) == 0.2056
    assert log_spaced(-1, 8) == -log_spaced(1, 8) and log_spaced(0, 8) == 0
    assert log_spaced(7, 8) == pytest.approx(math.log2(9) / 3)
    assert log_spaced(1, 1) == log_spaced(1, 2) == pytest.approx(math.log2(9) / 3)


def test_cpb_by_hand():
    """One hidden unit that reads g(dx): 16 sigmoid(2 max(g, 0)), and 8 where it is silent."""
    mlp = {"cpb_mlp.0.weight": np.array([[0.0, 1]]), "cpb_mlp.0.bias": np.zeros(1), "cpb_mlp.2.weight": np.full((1, 1), 2.0)}
    prefix_bias = np.eye(3)[:, :1]
    logits, _ = oracles.cpb(*no_content(2, 3, 1, heads=1), hidden=1, trained=(8, 8), prefix_bias=prefix_bias, **mlp)
    one, two = (16 / (1 + math.exp(-2 * log_spaced(step, 8))) for step in (1, 2))
    assert_allclose(logits[0, 6], [0, two, one, 8, two, one, 8])
    assert_allclose(logits[0, 1], [0, 8, 8, 8, 8, 8, 8])
    assert_allclose(logits[0, 0], [0, 1, 1, 1, 1, 1, 1])
    mlp["cpb_mlp.0.bias"] += 0.5
    logits, _ = oracles.cpb(*no_content(1, 1, heads=1), hidden=1, **mlp)
    assert_allclose(logits, 16 / (1 + math.exp(-1)))


def test_alibi_slopes_and_distances():
    euclidean, l1, squared = (
        from_corner(oracles.alibi(*no_content(4, 5, 1, heads=8), distance=kind)[0], 4, 5, 1)
        for kind in ("euclidean", "l1", "squared")
    )
    assert_allclose(euclidean[:, 3, 4], [-5 * 2.0**-i for i in range(1, 9)])
    assert_allclose(l1[:, 3, 4] / euclidean[:, 3, 4], 7 / 5)
    assert_allclose(squared[:, 3, 4] / euclidean[:, 3, 4], 5)
    assert_allclose(l1, l1[:, :, :1] + l1[:, :1])
    odd = from_corner(oracles.alibi(*no_content(2, 2, heads=3))[0], 2, 2)
    assert_allclose(odd[:, 0, 1], [-(2 ** (-8 / 3)), -(2 ** (-16 / 3)), -(2.0**-8)])


DIRECTION = np.log([[1.0], [2], [3], [4]])  # weights of dy > 0, dy < 0, dx > 0, dx < 0


def test_directions():
    logits, _ = oracles.alibi(*no_content(3, 3, heads=1), distance="l1", directional=True, direction=DIRECTION)
    below_right = oracles.positions(3, 3).index((1, 1))
    assert_allclose(logits[0, below_right] * 2**8, [-4, -1, -5, -3, 0, -4, -5, -2, -6])
    logits, _ = oracles.log_decay(*no_content(3, 3, heads=1), decay=1.0, directional=True, direction=DIRECTION)
    assert_allclose(logits[0, below_right, 0], -math.log(1 + 10**0.5))
    assert_allclose(logits[0, below_right, 8], -math.log(1 + 20**0.5))


@each(("key", "options"), [("alibi", {}), ("log_decay", {"decay": 0.7})])
def test_renormalized_distances_are_in_patches_of_the_training_grid(key, options):
    rule = oracles.ORACLES[key]
    kept = from_corner(rule(*no_content(2, 3), **options)[0], 2, 3)
    stretched = rule(*no_content(4, 3), trained=(2, 3), policy="renormalize", **options)[0]
    assert_allclose(from_corner(stretched, 4, 3)[:, ::2], kept)
    shrunk = rule(*no_content(1, 2), trained=(1, 8), policy="renormalize", **options)[0]
    assert_allclose(shrunk[:, 0, 1], from_corner(rule(*no_content(1, 5), **options)[0], 1, 5)[:, 0, 4])
    assert_same(rule(*qkv(4, 3), trained=(2, 3), **options), rule(*qkv(4, 3), **options))


def fire_parameters(hidden=32, c=-0.5, L=-0.5, **replaced):
    layers = {"mlp.0.weight": draw(0, hidden, 1), "mlp.0.bias": draw(1, hidden), "mlp.2.weight": draw(2, 2, hidden)}
    return {"c": np.array([c]), "L": np.array([L]), **layers, "mlp.2.bias": np.array([0.25, -2])} | replaced


def test_fire_with_a_network_that_copies():
    """MLP(x) = x: 0 at the token itself, 1 at the distance max(|L| n, h, w); the signs of c and L do not count."""
    one, none = np.ones((1, 1)), np.zeros(1)
    copying = {"mlp.0.weight": one, "mlp.0.bias": none, "mlp.2.weight": one, "mlp.2.bias": none}

    def place(h, w, **parameters):
        return from_corner(oracles.fire(*no_content(h, w, heads=1), **(fire_parameters(**parameters) | copying))[0], h, w)[0]

    assert place(4, 5)[3, 4] == place(5, 4)[4, 3] == 1 and place(4, 5)[0, 0] == 0
    assert place(4, 5, L=1.8)[3, 4] == pytest.approx(math.log(3.5) / math.log(5.5))
    smaller = from_corner(oracles.fire(*no_content(4, 5, heads=1), trained=(2, 3), **(fire_parameters(L=3) | copying))[0], 4, 5)
    assert_allclose(smaller[0], place(4, 5, L=1.8))  # three times a side of 3
    copying |= {"mlp.0.bias": np.array([0.25]), "mlp.2.bias": np.array([2.0])}
    assert place(4, 5)[3, 4] == 3.25 and place(4, 5)[0, 0] == 2.25
    copying |= {"mlp.0.bias": none, "mlp.2.bias": none}
    assert_allclose(place(4, 5, c=0.5, L=9.0), place(4, 5, c=-0.5, L=-9.0))
    assert_allclose(place(4, 5, c=1e-9)[0], [0, 0.2, 0.4, 0.6, 0.8], atol=1e-6)
