"""Global attention by oneDNN: against the definition in float64, what it refuses, and that only "auto+onednn" considers it."""

import pytest
import torch

from helpers.variants import call
from vitrel import Grid, Table, Terms
from vitrel.ops import attention, reference, use_backend, why
from vitrel.ops.backends import onednn
from vitrel.ops.dispatch import choose
from vitrel.position import create_position

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
GRID = Grid(3, 4)
BIAS = Terms(tables=(Table(bias=torch.zeros(2, GRID.classes())),))


@pytest.mark.parametrize("grid", [Grid(3, 5), Grid(17, 16, 1), Grid(2, 300, 3), Grid(1, 1)], ids=str)
@pytest.mark.parametrize("what", ["table", "nothing", "field of view", "fully masked", "rope and a temperature"])
def test_against_the_definition(grid, what):
    """In several blocks of queries; a query that sees no key returns 0."""
    q, k, v = (torch.randn(2, 3, grid.tokens, 8) for _ in range(3))
    bias = torch.randn(3, grid.classes())
    if what == "field of view":
        bias[:, : grid.offset_classes() // 2] = -torch.inf
    if what == "fully masked":
        bias[1] = -torch.inf
    terms = Terms(tables=() if what == "nothing" else (Table(bias=bias),))
    if what == "rope and a temperature":
        rotary = create_position("rope_axial", grid, 3, 8)(grid).rotary
        terms = terms._replace(rotary=rotary, scale=0.7, temperature=torch.tensor(1.3), query_bias=torch.randn(3, 8))
    exact = Terms(*(t.double() if isinstance(t, torch.Tensor) else t for t in terms))._replace(
        tables=tuple(table._replace(bias=table.bias.double()) for table in terms.tables)
    )
    expected = reference.attention(*(x.double() for x in (q, k, v)), exact, grid)
    found = attention(q, k, v, terms, grid, backend="onednn")
    assert found.dtype == torch.float32 and (found.double() - expected).norm() <= 2e-6 * expected.norm()
    if what == "fully masked":
        assert (expected[:, 1] == 0).all() and (expected[:, 0] != 0).all()


@pytest.mark.parametrize(
    ("terms", "other", "reason"),
    [
        (BIAS, {"entry": "window_attention"}, "small windows"),
        (Terms(tables=(Table("h", query=torch.zeros(1, 5, 8)),)), {}, "no query, key, value or gated tables"),
        (BIAS._replace(key_rotary=(torch.ones(1, 12, 4),) * 2), {}, "overflow half precision"),
        (BIAS, {"device": torch.device("cuda")}, "float32 on a CPU"),
        (BIAS, {"dtype": torch.bfloat16}, "float32 on a CPU"),
        (BIAS, {"grad": True}, "no backward pass"),
        (BIAS, {"mask": torch.ones(12, 12)}, "no mask and no dropout"),
        (BIAS, {"dropout_p": 0.1}, "no mask and no dropout"),
        (BIAS, {"queries": 4}, "not of its last rows"),
    ],
)
def test_refusals(terms, other, reason):
    assert reason in onednn.refuses(call(terms, GRID, **other))
    with pytest.raises(ValueError, match=f"backend 'onednn' refuses: .*{reason}"):
        choose("onednn", call(terms, GRID, **other))
    assert choose("auto+onednn", call(terms, GRID, **other)) is not onednn
    if "float32" in reason:
        with torch.autocast("cpu"):
            assert "autocast" in onednn.refuses(call(BIAS, GRID))


def test_only_where_it_is_opted_in():
    grid = Grid(23, 23)
    small, large = (Terms(tables=(Table(bias=torch.zeros(2, g.classes())),)) for g in (GRID, grid))
    assert choose("auto+onednn", call(large, grid)) is onednn and choose("auto+onednn", call(small, GRID)) is not onednn
    assert choose("auto", call(large, grid)) is not onednn
    q = torch.randn(3, 1, 2, grid.tokens, 8)
    assert ": onednn (first of auto+onednn that serves it)" in why(attention, *q, large, grid, backend="auto+onednn")
    text = why(attention, *q, large, grid)
    assert ": sdpa (first of auto that serves it)" in text and "    onednn: serves it if given by name" in text
    with use_backend("auto+onednn"):
        assert ": onednn (first of auto+onednn" in why(attention, *q, large, grid)
    with use_backend("reference"):
        assert ": reference (given by name)" in why(attention, *q, large, grid, backend="auto+onednn")
    with pytest.raises(ValueError, match="unknown backend 'auto\\+flex'"):
        choose("auto+flex", call(BIAS, GRID))
