"""`vitrel.explain`: terms that sum to attention, for every encoding, and a text one can check by hand."""

import doctest
import math
import re
from types import SimpleNamespace

import pytest
import torch

from helpers import each, golden
from helpers.variants import WAYS, make, perturbed, tensors
from vitrel import Grid, Table, Terms, create_position
from vitrel.inspect.explain import explain
from vitrel.ops import attention
from vitrel.ops.reference import masked_logits

CASES = golden("founding_documents")["cases"]
FIVE = CASES["five_tokens_log_decay"]
NAMES = ["The", "cat", "sat", "on", "mat"]
HEADS, WIDTH = 4, 16
COMPOSED = ("absolute+rope_mixed", "t5+log_decay", "transformer_xl+shaw+pape+rope_axial")


def five_tokens(**options):
    q, k, v = (FIVE["inputs"][name] for name in "qkv")
    return explain(q, k, v, **({"position": "log_decay", "decay": FIVE["inputs"]["lambda"], "tokens": NAMES} | options))


def inputs(grid):
    return torch.randn(3, HEADS, grid.tokens, WIDTH, dtype=torch.float64)


def masks(n):
    seen = torch.rand(n, n) > 0.4
    seen[1] = False  # a query that sees no key
    return {"none": None, "bool": seen, "additive": torch.randn(HEADS, n, n, dtype=torch.float64)}


def close(actual, expected):
    torch.testing.assert_close(actual, expected, atol=1e-12, rtol=0, check_dtype=False)


def with_tokens(q, k, v, terms):
    if terms.tokens is None:
        return q, k, v
    rows = terms.tokens.detach().double().unflatten(-1, (HEADS, WIDTH)).transpose(0, 1)
    return q + rows, k + rows, v + rows


@pytest.mark.slow
@each(("prefix", "temperature"), [(0, "log_n"), (2, "none")])
@each("key", [*WAYS, *COMPOSED])
def test_the_terms_are_attention(key, prefix, temperature):
    """On a grid other than the trained one, with every term far from zero."""
    trained, grid = Grid(2, 4, prefix), Grid(3, 4, prefix)
    encoding = perturbed(create_position(key, trained, HEADS, WIDTH, temperature=temperature, dtype=torch.float64).eval())
    terms, (q, k, v) = encoding(grid), inputs(grid)
    for name, mask in masks(grid.tokens).items():
        seen = explain(q, k, v, encoding, grid, mask=mask)
        assert not any(t.requires_grad for t in tensors((*vars(seen).values(), *seen.added.values())))
        with_position = with_tokens(q, k, v, terms)
        close(seen.output, attention(*with_position, terms, grid, mask, backend="reference").detach())
        eye = torch.eye(grid.tokens, dtype=torch.float64).expand(HEADS, -1, -1)
        bare = terms._replace(tables=tuple(table._replace(value=None) for table in terms.tables))
        close(seen.weights, attention(*with_position[:2], eye, bare, grid, mask, backend="reference").detach())
        close(seen.raw, q @ k.mT)
        close(seen.biased, sum(seen.added.values(), seen.scaled))
        close(seen.masked, masked_logits(*with_position[:2], terms, grid, mask).detach())
        assert (name == "none") == torch.equal(seen.biased, seen.masked)
        close(seen.scaled, seen.raw * WIDTH**-0.5 * terms.scale)
        plain = Terms(scale=terms.scale)
        close(seen.output_without, attention(q, k, v, plain, grid, mask, backend="reference"))
        close(seen.weights_without, attention(q, k, eye, plain, grid, mask, backend="reference"))
        assert ("temperature" in seen.added) == (temperature == "log_n")
        if name == "bool":
            assert not seen.weights[:, 1].any() and not seen.output[:, 1].any()
            assert "hidden" in str(explain(q, k, v, encoding, grid, 1, mask, 0))


@each(
    ("key", "names"),
    [
        ("none", []),
        ("sincos", ["content-position", "position-content", "position-position"]),
        ("table", ["bias[dy, dx]"]),
        ("factorized", ["bias[dy]", "bias[dx]"]),
        ("t5+log_decay", ["bias[dy, dx]", "bias[dy, dx] 2"]),
        ("transformer_xl", ["content-position", "global content bias", "global position bias"]),
        ("deberta", ["content-position", "position-content"]),
        ("shaw", ["content-position"]),
        ("absolute+shaw", ["content-position", "position-content", "position-position", "content-position 2"]),
        ("pape", ["content-position", "gated row[dy, dx]"]),
        ("rope_mixed+table", ["rotation", "bias[dy, dx]"]),
    ],
)
def test_every_term_has_its_name(key, names):
    grid = Grid(2, 3)
    q, k, v = inputs(grid)
    seen = explain(q, k, v, key, grid, query=(1, 2), head=1)
    assert list(seen.added) == names
    text = str(seen)
    assert all(f"\n  {name} " in text and text.count(name) >= 2 for name in seen.added)


@each("prefix", [0, 1])
def test_the_four_terms_of_transformer_xl(prefix):
    """Each from u, v and W_R as the paper defines it; a prefix pair has the content terms alone."""
    grid = Grid(2, 3, prefix)
    q, k, v = inputs(grid)
    xl = perturbed(create_position("transformer_xl", grid, HEADS, WIDTH, dtype=torch.float64))
    added = explain(q, k, v, xl, grid).added
    place = [None] * prefix + [(y, x) for y in range(2) for x in range(3)]
    half = WIDTH * HEADS // 4

    def sinusoid(offset):
        angle = offset * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        return torch.cat((angle.sin(), angle.cos()))

    for i, j in ((0, 1), (1, 5), (4, 2), (grid.tokens - 1, 0)):
        r = torch.zeros(HEADS, WIDTH, dtype=torch.float64)
        if place[i] and place[j]:
            r = xl.w_r @ torch.cat([sinusoid(a - b) for a, b in zip(place[i], place[j], strict=True)])
        expected = {"content-position": q[:, i] * r, "global content bias": xl.u * k[:, j]}
        expected["global position bias"] = xl.v_bias * r
        assert added.keys() == expected.keys()
        for name, products in expected.items():
            torch.testing.assert_close(added[name][:, i, j], products.sum(-1).detach() * WIDTH**-0.5, atol=1e-5, rtol=0)


def test_the_text_has_the_golden_numbers():
    """Read back from the text: every weight and output to four digits, and each row follows from the one before."""
    blocks = str(five_tokens()).split("\n\n")[1:]
    assert [block.split("\n")[0] for block in blocks] == [f"query {name}" for name in NAMES]
    for i, block in enumerate(blocks):
        lines = block.split("\n")
        assert lines[1].split() == ["key", "(dy,", "dx)", "q.k", "scaled", "bias[dy,", "dx]", "biased", "weight", "without"]
        rows = [re.findall(r"-?\d+\.\d{4}", line) for line in lines[2:7]]
        assert [f"{w:.4f}" for w in FIVE["expected"]["weights"][i]] == [row[4] for row in rows]
        for j, row in enumerate(rows):
            raw, scaled, bias, biased, _, _ = map(float, row)
            assert scaled == raw / 2 and biased == pytest.approx(scaled + bias, abs=1.1e-4)
            assert bias == pytest.approx(-0.3 * math.log(1.0 + abs(i - j)), abs=6e-5)
        outputs = {line[:18].strip(): line[18:].split() for line in lines[7:]}
        assert outputs["output"] == [f"{x:.4f}" for x in FIVE["expected"]["output"][i]]
        for row, values in CASES["five_tokens_no_decay"]["expected"]["output_rows"].items():
            if i == int(row):
                assert outputs["without position"] == [f"{x:.4f}" for x in values]


def test_the_docstring_is_true():
    names = {"vitrel": SimpleNamespace(explain=explain)}
    test = doctest.DocTestParser().get_doctest(explain.__doc__, names, "explain", None, 0)
    assert len(test.examples) == 5
    assert doctest.DocTestRunner(verbose=False).run(test).failed == 0


def test_offsets_are_query_minus_key():
    """A table whose value is its own offset, read back from the text beside the offset."""
    grid = Grid(3, 4, 1)
    q = torch.zeros(grid.tokens, 4)
    dy, dx = grid.offsets().unbind(-1)
    bias = torch.cat((10 * dy + dx, torch.tensor([7, 8, 9])))[None].float()
    seen = explain(q, q, q, Terms(tables=(Table("hw", bias=bias),)), grid, query=(2, 1))
    rows = [line.split("  ") for line in str(seen).split("\n") if re.match(r"  \(\d, \d\) ", line)]
    assert len(rows) == 12
    for row in rows:
        (name, offset, _, _, added, *_) = (cell.strip() for cell in row if cell.strip())
        (y, x), (down, right) = (tuple(map(int, re.findall(r"-?\d+", cell))) for cell in (name, offset))
        assert (down, right) == (2 - y, 1 - x) and float(added) == 10 * down + right
    assert re.search(r"\n  prefix 0 +-  .* 8\.0000", str(seen))  # token query, prefix key
    assert "query (2, 1)\n" in str(seen) and "grid with prefix=1" in str(seen)


def test_choosing_a_query_and_a_head():
    grid = Grid(2, 3, 1)
    q, k, v = inputs(grid)
    whole, part = explain(q, k, v, "alibi", grid), explain(q, k, v, "alibi", grid, query=(1, 2), head=2)
    for name in ("raw", "biased", "weights", "output", "output_without"):
        torch.testing.assert_close(getattr(part, name), getattr(whole, name)[2:3, 6:7])
    torch.testing.assert_close(part.added["bias[dy, dx]"], whole.added["bias[dy, dx]"][2:3, 6:7])
    assert part.queries == (6,) and part.heads == (2,)
    assert str(part) == repr(explain(q, k, v, "alibi", grid, query=6, head=2))
    assert "\nquery (1, 2), head 2\n" in str(part) and str(whole).count("\nquery ") == 7 * HEADS
    assert explain(q[0], k[0], v[0], "alibi", grid).raw.shape == (1, 7, 7)


def test_queries_are_the_last_tokens():
    """Keys of an earlier segment first: one row of queries on a full grid of keys."""
    grid = Grid(3, 4)
    q, k, v = inputs(grid)
    encoding = perturbed(make("table", grid, HEADS, WIDTH))
    rows = explain(q[:, -4:], k, v, encoding, grid)
    whole = explain(q, k, v, encoding, grid)
    close(rows.weights, whole.weights[:, -4:])
    assert rows.queries == (8, 9, 10, 11) and "query (2, 0)," in str(rows)
    close(explain(q[:, -4:], k, v, encoding, grid, query=(2, 3)).output, whole.output[:, 11:])
    sincos = explain(q[:, -4:], k, v, "sincos", grid)
    close(sincos.weights, explain(q, k, v, "sincos", grid).weights[:, -4:])
    with pytest.raises(ValueError, match=r"there is no query \(1, 3\): .* has queries 8 to 11"):
        explain(q[:, -4:], k, v, encoding, grid, query=(1, 3))


def test_many_keys():
    grid = Grid(9, 10)
    q, k, v = inputs(grid)
    seen = explain(q, k, v, "alibi", grid, query=(4, 5), head=1)
    text = str(seen)
    shown = [float(line.split()[-2]) for line in text.split("\n") if re.match(r"  \(\d, \d\) ", line)]
    assert len(shown) == 64 and min(shown) >= seen.weights.flatten().sort(descending=True)[0][64].item() - 1e-4
    assert "keys of less weight: 26" in text


def test_a_wide_head_is_cut_in_the_text_only():
    q = torch.randn(3, 40)
    seen = explain(q, q, q)
    assert seen.output.shape == (1, 3, 40)
    line = str(seen).split("\n")[-1]
    assert line.endswith(" ...") and len(line.split()) == 18
    assert "without" not in str(seen)  # where there is no position there is nothing to compare


@each(
    ("options", "error"),
    [
        ({"query": 5}, "there is no query 5: the 1x5 grid with prefix=0 has queries 0 to 4"),
        ({"query": (1, 0)}, r"there is no query \(1, 0\)"),
        ({"head": 1}, "there is no head 1: q has 1, counted from 0"),
        ({"grid": (2, 3)}, "5 keys and 5 values do not fit the 2x3 grid"),
        ({"mask": [[1, 0, 0, 0, 0]]}, "a mask is bool"),
        ({"mask": torch.ones(2, 1, 5, 5, dtype=torch.bool)}, r"mask \[2, 1, 5, 5\] is not broadcastable to .* \[1, 5, 5\]"),
        ({"mask": torch.ones(5, 4, dtype=torch.bool)}, r"mask \[5, 4\] is not broadcastable to \[H, M, N\] = \[1, 5, 5\]"),
        ({"tokens": NAMES[:3]}, "tokens has 3 names for 5 tokens"),
        ({"tokens": [*NAMES, "."]}, "tokens has 6 names for 5 tokens"),
        ({"position": "tabel", "decay": 1.0}, "unknown"),
        ({"q": torch.zeros(2, 5, 4)}, r"the same number of heads and the same width, not q \[2, 5, 4\], k \[1, 5, 4\]"),
    ],
)
def test_errors(options, error):
    given = {name: FIVE["inputs"][name] for name in "qkv"} | options
    with pytest.raises(ValueError, match=error):
        explain(**given)


def test_an_encoding_in_training_is_explained_as_it_evaluates():
    encoding = create_position("rope_axial", (1, 5), 1, 4, rescale_coords=4.0)  # which training draws
    given = {name: FIVE["inputs"][name] for name in "qkv"} | {"position": encoding}
    torch.testing.assert_close(explain(**given).weights, explain(**given).weights, rtol=0, atol=0)
    assert encoding.training


def test_options_need_a_key():
    encoding = create_position("log_decay", Grid(1, 5), 1, 4)
    with pytest.raises(TypeError, match="options decay are for a key of POSITIONS"):
        five_tokens(position=encoding)
    with pytest.raises(TypeError, match="has no option 'slope'"):
        five_tokens(slope=1)
