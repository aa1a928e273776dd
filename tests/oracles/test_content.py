"""Oracles of content encodings against formulas by hand and against each other."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

import oracles
from oracles.content import stretch_rows
from oracles.inputs import draw, qkv


def shaw_tables(R_h, R_w, *heads):
    rows = {"h": 2 * R_h + 1, "w": 2 * R_w + 1}
    names = [f"{part}_{axis}" for part in ("key", "value") for axis in "hw"]
    return {name: draw(seed, *heads, rows[name[-1]], 8) for seed, name in enumerate(names)}


def test_shaw_value_of_one_visible_key():
    """Weights of almost one on the key: the output is its value and the two value rows of its offset."""
    q = np.zeros((1, 6, 8))
    k = q.copy()
    q[..., 0], k[0, 5, 0] = 1, 1e4
    tables = shaw_tables(1, 1)
    out = oracles.shaw(q, k, draw(9, 1, 6, 8), 2, 3, **(tables | {"key_h": 0 * tables["key_h"], "key_w": 0 * tables["key_w"]}))[
        1
    ]
    assert_allclose(out[0, 0], draw(9, 1, 6, 8)[0, 5] + tables["value_h"][0] + tables["value_w"][0], atol=1e-12)
    assert_allclose(out[0, 5], draw(9, 1, 6, 8)[0, 5] + tables["value_h"][1] + tables["value_w"][1], atol=1e-12)


def test_stretched_rows_are_torchs():
    for rows, count in ((3, 9), (5, 7), (1, 5), (7, 7)):
        table = draw(rows, rows, 4)
        expected = torch.nn.functional.interpolate(torch.from_numpy(table.T[None]), count, mode="linear", align_corners=False)
        assert_allclose(stretch_rows(table, count), expected[0].T, atol=1e-12)
    assert_allclose(stretch_rows(np.array([[0.0], [4]]), 4)[:, 0], [0, 1, 3, 4])


def test_transformer_xl_by_hand():
    u, v_bias, w_r = draw(0, 2, 8), draw(1, 2, 8), np.zeros((2, 8, 16))
    w_r[:, 0, 0] = 1  # the sine of dy at frequency 1
    w_r[:, 1, 12] = 1  # the cosine of dx at frequency 1
    q, k, v, *grid = qkv(2, 3, 1)
    logits, _ = oracles.transformer_xl(q, k, v, *grid, u=u, v_bias=v_bias, w_r=w_r)
    for n, (i, j, dy, dx) in product(range(2), ((4, 3, 1, -2), (1, 6, -1, -2))):
        expected = (q[n, i] + u[n]) @ k[n, j] + (q[n, i, 0] + v_bias[n, 0]) * math.sin(dy)
        expected += (q[n, i, 1] + v_bias[n, 1]) * math.cos(dx)
        assert logits[n, i, j] == pytest.approx(8**-0.5 * expected)
    assert_allclose(logits[:, 0, 2], 8**-0.5 * np.sum((q[:, 0] + u) * k[:, 2], axis=-1))


def test_pape_along_the_axes():
    """w = (1, 0), (0, 1) and 0: a parabola in dy and one in dx, each with its tilt, and one without effect."""
    q, k, v, *grid = qkv(3, 4, 1)
    position, a, b = np.stack([np.eye(3)[:, :2]] * 2), draw(0, 2, 3, 8), draw(1, 2, 3, 8)
    logits, _ = oracles.pape(q, k, v, *grid, parabolas=3, position=position, a=a, b=b)
    at = oracles.positions(3, 4, 1)
    for n, i, j in np.ndindex(logits.shape):
        expected = q[n, i] @ k[n, j]
        if (delta := oracles.offset(at[i], at[j])) is not None:
            curve, tilt = np.log(1 + np.exp(a[n] @ q[n, i])), b[n] @ q[n, i]
            expected += -curve[0] * delta[0] ** 2 - curve[1] * delta[1] ** 2 + tilt[0] * delta[0] + tilt[1] * delta[1]
        assert logits[n, i, j] == pytest.approx(8**-0.5 * expected)
