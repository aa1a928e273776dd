"""The oracles against each other and against what is known by hand."""

import json
import math
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

import oracles
from helpers import golden, script

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


@pytest.mark.slow
def test_make_check_sees_a_changed_number_and_a_missing_file(run_make, tmp_path):
    for key in oracles.ORACLES.keys() - {"none"}:
        shutil.copy(GOLDEN / f"{key}.json", tmp_path)
    content = json.loads((tmp_path / "table.json").read_text())
    content["cases"][1]["output"][0][2][3] += 1e-6
    (tmp_path / "table.json").write_text(json.dumps(content))
    complaint = run_make("--check", tmp_path)
    assert "none.json: missing" in complaint
    assert "table.json: /cases/1/output/0/2/3" in complaint
    assert "founding_documents.md: not what founding_documents.json gives" in complaint
    assert run_make(tmp_path) == ""
    assert run_make("--check", tmp_path) == ""


@pytest.mark.parametrize("key", oracles.ORACLES)
def test_golden_cases_reach_beyond_the_training_grid(key):
    """Each file has two training grids of unequal sides and a larger grid; a case that names an option differs by it."""
    cases = golden(key)["cases"]
    assert all({"grid", "trained", "options", "parameters", "q", "k", "v", "logits", "output"} <= case.keys() for case in cases)
    grids = [(case["grid"]["h"], case["grid"]["w"]) for case in cases]
    assert grids[:2] == [tuple(case["trained"]) for case in cases[:2]] == [(2, 3), (3, 2)]
    if len(cases) > 2:
        assert grids[2][0] > cases[2]["trained"][0] and grids[2][1] >= cases[2]["trained"][1]
    built = [json.dumps([case[name] for name in ("grid", "trained", "options")]) for case in cases]
    assert len(set(built)) == len(cases)
    others = [case["output"] for case, grid in zip(cases, grids, strict=True) if grid == (4, 2)]
    assert all(a != b for n, a in enumerate(others) for b in others[:n])


def test_golden_logits_keep_infinities():
    for key in ("lookhere", "xpos"):
        for case in golden(key)["cases"]:
            logits = np.array(case["logits"], float)
            assert np.isneginf(logits).any() and not np.isnan(logits).any() and logits.max() < np.inf


def draw(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape)


def lattice(h, w, prefix, rows):
    """[H, N, N, ...] from rows(dy, dx) -> [H, ...]; zero where a prefix token takes part."""
    at = oracles.positions(h, w, prefix)
    deltas = [[oracles.offset(i, j) for j in at] for i in at]
    filled = [[0 * rows(0, 0) if delta is None else rows(*delta) for delta in line] for line in deltas]
    return np.moveaxis(np.array(filled), 2, 0)


def clipped_row(tables, step):
    return tables[:, min(max(step, -1), 1) + 1]


def both_heads(table):
    return np.stack([table, table])


def as_shaw(h, w, prefix):
    own = {name: draw(i, 3, 8) for i, name in enumerate(("key_h", "key_w", "value_h", "value_w"))}
    key_h, key_w, value_h, value_w = map(both_heads, own.values())
    rq = lattice(h, w, prefix, lambda dy, dx: clipped_row(key_h, dy) + clipped_row(key_w, dx))
    rv = lattice(h, w, prefix, lambda dy, dx: clipped_row(value_h, dy) + clipped_row(value_w, dx))
    return own | {"radius": 1}, {"rq": rq, "rv": rv}


def as_transformer_xl(h, w, prefix):
    u, v_bias, w_r = draw(0, 2, 8), draw(1, 2, 8), draw(2, 2, 8, 12)
    rq = lattice(h, w, prefix, lambda dy, dx: w_r @ np.concatenate([oracles.sincos_1d(dy, 6), oracles.sincos_1d(dx, 6)]))
    bias = 8**-0.5 * np.einsum("nd,nijd->nij", v_bias - u, rq)
    return {"u": u, "v_bias": v_bias, "w_r": w_r}, {"query_bias": u, "rq": rq, "bias": bias}


def as_deberta(h, w, prefix):
    own = {name: draw(i, 2, 3, 8) for i, name in enumerate(("key_h", "key_w", "query_h", "query_w"))}
    key_h, key_w, query_h, query_w = own.values()
    rq = lattice(h, w, prefix, lambda dy, dx: clipped_row(key_h, dy) + clipped_row(key_w, dx))
    rk = lattice(h, w, prefix, lambda dy, dx: clipped_row(query_h, -dy) + clipped_row(query_w, -dx))
    return own | {"radius": 1}, {"rq": rq, "rk": rk, "scale": 3**-0.5}


def as_decomposed(h, w, prefix):
    own = {"rel_pos_h": draw(0, 2 * h - 1, 8), "rel_pos_w": draw(1, 2 * w - 1, 8)}
    along_h, along_w = map(both_heads, own.values())
    rq = lattice(h, w, prefix, lambda dy, dx: along_h[:, dy + h - 1] + along_w[:, dx + w - 1])
    return own, {"rq": rq * 8**0.5}


ALGEBRA = {"shaw": as_shaw, "transformer_xl": as_transformer_xl, "deberta": as_deberta, "decomposed": as_decomposed}


@pytest.mark.parametrize("key", ALGEBRA)
@pytest.mark.parametrize(("h", "w", "prefix"), [(3, 4, 0), (2, 4, 2)])
def test_papers_agree_with_the_general_algebra(key, h, w, prefix):
    q, k, v = draw(7, 3, 2, prefix + h * w, 8)
    own, terms = ALGEBRA[key](h, w, prefix)
    direct, general = oracles.ORACLES[key](q, k, v, h, w, prefix, **own), oracles.attention(q, k, v, **terms)
    assert_allclose(direct[0], general[0], atol=1e-12)
    assert_allclose(direct[1], general[1], atol=1e-12)


def test_third_term_of_deberta_uses_the_offset_of_j_from_i():
    tables = {name: np.zeros((1, 3, 4)) for name in ("key_h", "key_w", "query_h", "query_w")}
    tables["query_w"][0, 2] = 1  # delta(j, i) = j - i = +1: the key lies to the right
    logits, _ = oracles.deberta(*np.ones((3, 1, 3, 4)) * [[[[0]]], [[[1]]], [[[1]]]], 1, 3, radius=1, **tables)
    assert_allclose(logits[0] * math.sqrt(12), [[0, 4, 4], [0, 0, 4], [0, 0, 0]])


def test_prefix_rows_of_the_tables():
    q, k, v = np.zeros((3, 1, 4, 4))
    table = np.arange(3.0 + 3)[:, None]
    factorised = {"table_h": np.array([[0.0], [3], [4], [5]]), "table_w": np.array([[0.0], [1], [2]])}
    expected = [[5, 5, 3, 3], [5, 5, 3, 3], [4, 4, 1, 0], [4, 4, 2, 1]]
    assert_allclose(oracles.table(q, k, v, 1, 2, 2, relative_position_bias_table=table)[0][0], expected)
    assert_allclose(oracles.factorised(q, k, v, 1, 2, 2, **factorised)[0][0], expected)


def test_sincos_by_hand():
    tokens = oracles.sincos_tokens(2, 3, 1, 8)
    assert_allclose(tokens[0], 0)
    row = [math.sin(1), math.sin(0.01), math.cos(1), math.cos(0.01)]
    column = [math.sin(2), math.sin(0.02), math.cos(2), math.cos(0.02)]
    assert_allclose(tokens[6], row + column)


@pytest.mark.parametrize(("key", "parameters"), [("rope_axial", {}), ("rope_mixed", {"freqs": draw(3, 2, 2, 4)})])
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


def test_masks_and_memory():
    q, k, v = draw(0, 3, 2, 6, 4)
    terms = {"bias": draw(1, 2, 6, 6), "rq": draw(2, 2, 6, 6, 4), "rk": draw(3, 2, 6, 6, 4), "rv": draw(4, 2, 6, 6, 4)}
    terms |= {"angles": draw(5, 2, 6, 2), "query_bias": draw(6, 2, 4), "scale": 0.7}
    visible = np.array([[j // 2 <= i // 2 and i != 4 for j in range(6)] for i in range(6)])
    logits, output = oracles.attention(q, k, v, **terms, mask=visible)
    additive = oracles.attention(q, k, v, **terms, mask=np.where(visible, 0.0, -np.inf))
    assert_allclose(output, additive[1])
    assert_allclose(output[:, 4], 0)
    assert np.isneginf(logits[:, ~visible]).all()
    last = oracles.attention(q[:, 4:], k, v, **terms, mask=visible[4:])
    assert_allclose(last[1], output[:, 4:])
    first = {name: value if name in ("scale", "query_bias") else value[:, :2] for name, value in terms.items()}
    first |= {name: terms[name][:, :2, :2] for name in ("bias", "rq", "rk", "rv")}
    assert_allclose(oracles.attention(q[:, :2], k[:, :2], v[:, :2], **first)[1], output[:, :2])


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


@pytest.mark.parametrize(
    ("h", "w", "window", "shift"), [(8, 12, (4, 4), (2, 2)), (6, 8, (3, 4), (1, 2)), (4, 9, (4, 3), (0, 1))]
)
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
