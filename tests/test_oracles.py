"""The oracles against each other and against what is known by hand."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

import oracles
from helpers import each, golden, script

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture
def run_make(monkeypatch):
    """Runs make.py with arguments -> what it complains of, "" for nothing."""
    monkeypatch.syspath_prepend(GOLDEN)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["make.py", *map(str, arguments)])
        try:
            script("tests/golden/make.py").main()
        except SystemExit as stop:
            return str(stop.code)
        return ""

    return run


def test_stored_golden_numbers_are_the_oracles(run_make):
    assert run_make("--check") == ""


def test_golden_logits_keep_infinities():
    for key in ("lookhere", "xpos"):
        for case in golden(key)["cases"]:
            logits = np.array(case["logits"], float)
            assert np.isneginf(logits).any() and not np.isnan(logits).any() and logits.max() < np.inf


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def test_third_term_of_deberta_uses_the_offset_of_j_from_i():
    tables = {name: np.zeros((1, 3, 4)) for name in ("key_h", "key_w", "query_h", "query_w")}
    tables["query_w"][0, 2] = 1  # delta(j, i) = j - i = +1: the key lies to the right
    logits, _ = oracles.deberta(*np.ones((3, 1, 3, 4)) * [[[[0]]], [[[1]]], [[[1]]]], 1, 3, radius=1, **tables)
    assert_allclose(logits[0] * math.sqrt(12), [[0, 4, 4], [0, 0, 4], [0, 0, 0]])


def test_prefix_rows_of_the_tables():
    q, k, v = np.zeros((3, 1, 4, 4))
    table = np.arange(3.0 + 3)[:, None]
    factorized = {"table_h": np.array([[0.0], [3], [4], [5]]), "table_w": np.array([[0.0], [1], [2]])}
    expected = [[5, 5, 3, 3], [5, 5, 3, 3], [4, 4, 1, 0], [4, 4, 2, 1]]
    assert_allclose(oracles.table(q, k, v, 1, 2, 2, relative_position_bias_table=table)[0][0], expected)
    assert_allclose(oracles.factorized(q, k, v, 1, 2, 2, **factorized)[0][0], expected)


def test_sincos_by_hand():
    tokens = oracles.sincos_tokens(2, 3, 1, 8)
    assert_allclose(tokens[0], 0)
    row = [math.sin(1), math.sin(0.01), math.cos(1), math.cos(0.01)]
    column = [math.sin(2), math.sin(0.02), math.cos(2), math.cos(0.02)]
    assert_allclose(tokens[6], row + column)


@each(("key", "parameters"), [("rope_axial", {}), ("rope_mixed", {"freqs": draw(3, 2, 2, 4)})])
def test_rope_depends_on_offsets_only_and_leaves_prefix_tokens(key, parameters):
    q, k, v = (np.repeat(draw(i, 2, 1, 8), 13, axis=1) for i in range(3))
    logits, _ = oracles.ORACLES[key](q, k, v, 3, 4, 1, **parameters)
    at, seen = oracles.positions(3, 4, 1), {}
    for i, j in np.ndindex(13, 13):
        if (delta := oracles.offset(at[i], at[j])) is not None:
            assert_allclose(logits[:, i, j], seen.setdefault(delta, logits[:, i, j]), atol=1e-12)
    assert_allclose(logits[:, 0, 0], 8**-0.5 * np.sum(q[:, 0] * k[:, 0], axis=-1))
    angle = 100**-0.5 if key == "rope_axial" else parameters["freqs"][0, 0, 1]  # offset (1, 0), second pair
    one = np.eye(8)[None, [1] * 13]
    first = {name: value[:, :1] for name, value in parameters.items()}
    assert oracles.ORACLES[key](one, one, one, 3, 4, 1, **first)[0][0, 5, 1] == pytest.approx(8**-0.5 * math.cos(angle))


def seen_on_canvas(h, w, window, shift):
    """[h*w, h*w] bool, from the oracle: uniform attention over one-hot values."""
    n = h * w
    qkv = np.concatenate([np.zeros((h, w, 2 * n)), np.eye(n).reshape(h, w, n)], axis=-1)
    return oracles.window_canvas(qkv, window, shift, 1).reshape(n, n) > 0


def test_window_canvas_borders():
    seen = seen_on_canvas(12, 1, (7, 7), (3, 3))
    rows = [set(np.flatnonzero(line)) for line in seen]
    assert rows[0] == rows[2] == {0, 1, 2}
    assert rows[3] == rows[9] == set(range(3, 10))
    assert rows[10] == rows[11] == {10, 11}
    assert seen_on_canvas(7, 5, (7, 7), (3, 3)).all()


@each(("h", "w", "window", "shift"), [(8, 12, (4, 4), (2, 2)), (6, 8, (3, 4), (1, 2)), (4, 9, (4, 3), (0, 1))])
def test_window_canvas_is_swins_roll_and_mask(h, w, window, shift):
    """Where windows divide the grid Swin's own construction is right: roll by -s, cut, keep apart the regions rolled round."""
    token = np.roll(np.arange(h * w).reshape(h, w), (-shift[0], -shift[1]), (0, 1))
    allowed = np.zeros((h * w, h * w), bool)
    for y, x in np.ndindex(h, w):
        for b, a in np.ndindex(h, w):
            same_window = y // window[0] == b // window[0] and x // window[1] == a // window[1]
            same_side = (y >= h - shift[0]) == (b >= h - shift[0]) and (x >= w - shift[1]) == (a >= w - shift[1])
            allowed[token[y, x], token[b, a]] = same_window and same_side
    assert (seen_on_canvas(h, w, window, shift) == allowed).all()


def test_window_canvas_in_one_window_is_global_attention():
    qkv, table, freqs = draw(0, 3, 4, 24), draw(1, 35, 2), draw(2, 2, 2, 2)
    q, k, v = (oracles.split_heads(part.reshape(12, 8), 2) for part in np.split(qkv, 3, axis=-1))
    biased = oracles.window_canvas(qkv, (5, 4), (2, 2), 2, bias_fn=lambda n, dy, dx: table[(dy + 2) * 7 + dx + 3, n])
    rotated = oracles.window_canvas(qkv, (5, 4), (2, 2), 2, angle_fn=lambda n, y, x: freqs[0, n] * y + freqs[1, n] * x)
    expected = oracles.table(q, k, v, 3, 4, relative_position_bias_table=table)[1]
    assert_allclose(biased, np.concatenate(expected, axis=-1).reshape(3, 4, 8), atol=1e-12)
    expected = oracles.rope_mixed(q, k, v, 3, 4, freqs=freqs)[1]
    assert_allclose(rotated, np.concatenate(expected, axis=-1).reshape(3, 4, 8), atol=1e-12)


def test_log_n_temperature():
    assert oracles.log_n(197, 197) == oracles.log_n(0, 2) == oracles.log_n(1, 1) == 1
    assert oracles.log_n(4**4, 4**2) == pytest.approx(2**0.5)
    assert oracles.log_n(16, 256) == pytest.approx(0.5**0.5)
