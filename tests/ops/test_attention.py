"""The entry `attention`: every backend against the oracle of the whole algebra, gradients, masks, fewer queries, errors."""

import copy
import math

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck

import oracles
from helpers import each
from helpers.variants import GENERAL, refusal
from vitrel import Grid, Table, Terms, create_position
from vitrel.ops import attention, window_attention
from vitrel.ops.reference import lattice_bias

GRIDS = [Grid(2, 3), Grid(3, 2, 2), Grid(1, 4, 1)]
FIELDS = ["bias", "query", "key", "value", "rotary", "query_bias", "scale"]
double = torch.float64


def make_terms(grid, fields, heads=2, dim=4, requires_grad=False):
    """Random terms with the named fields set, and the tensors in them; tables over every axis."""

    def draw(*shape):
        return torch.randn(*shape, dtype=double, requires_grad=requires_grad)

    leaves, tables = [], []
    for axis, h in (("hw", heads), ("h", 1), ("w", heads), ("h+w", 1)):
        rows = {name: draw(heads if name == "bias" else h, grid.classes(axis), *(() if name == "bias" else (dim,)))
                for name in ("bias", "query", "key", "value") if name in fields}  # fmt: skip
        leaves += rows.values()
        tables.append(Table(axis, **rows))
    angle = draw(heads, grid.tokens, dim // 2)
    query_bias = draw(heads, dim)
    terms = Terms(
        rotary=(angle.cos(), angle.sin()) if "rotary" in fields else None,
        query_bias=query_bias if "query_bias" in fields else None,
        scale=3**-0.5 if "scale" in fields else 1.0,
        tables=tuple(tables) if leaves else (),
    )
    leaves += [angle] if "rotary" in fields else []
    leaves += [query_bias] if "query_bias" in fields else []
    return terms, leaves, angle


def oracle(q, k, v, terms, grid, angle, mask=None):
    """Expand the tables pair by pair, by a plain double loop of our own, and hand them to the oracle's algebra."""
    heads, n, dim = k.shape
    place = oracles.positions(*grid)
    pairs = {"bias": np.zeros((heads, n, n)), "query": np.zeros((heads, n, n, dim))}
    pairs |= {"key": pairs["query"].copy(), "value": pairs["query"].copy()}
    for table in terms.tables:
        extent = {"h": 2 * grid.h - 1, "w": 2 * grid.w - 1, "h+w": 2 * (grid.h + grid.w) - 3}
        extent = extent.get(table.axis, extent["h"] * extent["w"])
        for i in range(n):
            for j in range(n):
                delta = oracles.offset(place[i], place[j])
                if delta is None:
                    row = extent + oracles.prefix_row(i, j, grid.prefix)
                else:
                    dy, dx = delta[0] + grid.h - 1, delta[1] + grid.w - 1
                    row = {"hw": dy * (2 * grid.w - 1) + dx, "h": dy, "w": dx, "h+w": dy + dx}[table.axis]
                for name, total in pairs.items():
                    rows = getattr(table, name)
                    if rows is not None:
                        total[:, i, j] += rows[:, row].detach().numpy()
    return oracles.attention(
        *(t.detach().numpy() for t in (q, k, v)),
        scale=terms.scale,
        bias=pairs["bias"],
        rq=pairs["query"],
        rk=pairs["key"],
        rv=pairs["value"],
        angles=angle.detach().numpy() if terms.rotary is not None else None,
        query_bias=None if terms.query_bias is None else terms.query_bias.detach().numpy(),
        mask=mask,
    )[1]


def serves(backend, terms, grid):
    if reason := refusal(backend, terms, grid, 2, 4):
        with pytest.raises(ValueError, match=f"backend '{backend}' refuses"):
            attention(*torch.zeros(3, 1, 2, grid.tokens, 4), terms, grid, backend=backend)
        pytest.skip(f"{backend} refuses these terms, as it says: {reason}")


@each("backend", GENERAL)
@each("grid", GRIDS, ids=str)
@each("fields", [[], *([f] for f in FIELDS), FIELDS], ids=lambda f: "+".join(f) or "plain")
def test_equals_the_oracle(fields, grid, backend):
    terms, _, angle = make_terms(grid, fields)
    serves(backend, terms, grid)
    q, k, v = torch.randn(3, 2, 2, grid.tokens, 4, dtype=double)
    out = attention(q, k, v, terms, grid, backend=backend)
    for b in range(2):
        np.testing.assert_allclose(out[b].numpy(), oracle(q[b], k[b], v[b], terms, grid, angle), atol=1e-12)


@each("backend", GENERAL)
@each("fields", [FIELDS, [f for f in FIELDS if f != "value"]], ids=["all", "no value"])
def test_gradients(fields, backend):
    """Every input and every term against finite differences."""
    grid = Grid(2, 3, 1)
    terms, leaves, _ = make_terms(grid, fields, requires_grad=True)
    serves(backend, terms, grid)
    q, k, v = (torch.randn(1, 2, grid.tokens, 4, dtype=double, requires_grad=True) for _ in range(3))

    def function(q, k, v, *rest):
        named = iter(rest)
        per_table = [n for n in ("bias", "query", "key", "value") if n in fields]
        tables = tuple(Table(axis, **{n: next(named) for n in per_table}) for axis in ("hw", "h", "w", "h+w"))
        turn, u = next(named), next(named)
        return attention(
            q, k, v, terms._replace(tables=tables, rotary=(turn.cos(), turn.sin()), query_bias=u), grid, backend=backend
        )

    assert gradcheck(function, (q, k, v, *leaves), atol=1e-6, fast_mode=True)  # a random projection of the Jacobian


@each("backend", GENERAL)
@each("kind", ["bool", "additive"])
def test_masks(backend, kind):
    """True means attend; a query that sees no key returns 0, with finite gradients everywhere."""
    grid = Grid(2, 3, 1)
    terms, leaves, angle = make_terms(grid, [f for f in FIELDS if f != "value"], requires_grad=True)
    q, k, v = (torch.randn(2, 2, grid.tokens, 4, dtype=double, requires_grad=True) for _ in range(3))
    visible = torch.rand(2, 1, grid.tokens, grid.tokens) > 0.4
    visible[0, 0, 2] = visible[1, 0, 5] = False
    mask = visible if kind == "bool" else torch.randn(visible.shape, dtype=double).masked_fill(~visible, -math.inf)
    out = attention(q, k, v, terms, grid, mask, backend=backend)
    for b in range(2):
        expected = oracle(q[b], k[b], v[b], terms, grid, angle, mask[b].expand(2, -1, -1).numpy())
        np.testing.assert_allclose(out[b].detach().numpy(), expected, atol=1e-12)
    assert (out[0, :, 2] == 0).all() and (out[1, :, 5] == 0).all()
    for gradient in torch.autograd.grad(out.square().sum(), [q, k, v, *leaves]):
        assert gradient.isfinite().all() and gradient.abs().sum() > 0


@each("backend", GENERAL)
@each("queries", [1, 3, 7])
def test_fewer_queries_are_the_last_rows(backend, queries):
    grid = Grid(2, 3, 1)
    terms, _, _ = make_terms(grid, FIELDS if backend == "reference" else [f for f in FIELDS if f != "value"])
    q, k, v = torch.randn(3, 2, 2, grid.tokens, 4, dtype=double)
    whole = attention(q, k, v, terms, grid, backend=backend)
    part = attention(q[:, :, -queries:], k, v, terms, grid, backend=backend)
    torch.testing.assert_close(part, whole[:, :, -queries:], atol=1e-12, rtol=0)


@each("backend", GENERAL)
def test_a_temperature_is_a_scale(backend):
    grid = Grid(2, 3)
    terms, _, _ = make_terms(grid, ["bias", "query", "key", "rotary", "query_bias", "scale"])
    q, k, v = torch.randn(3, 2, 2, 6, 4, dtype=double)
    tensor = terms._replace(scale=1.0, temperature=torch.tensor(terms.scale, dtype=double))
    a, b = (attention(q, k, v, t, grid, backend=backend) for t in (terms, tensor))
    torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


@each("dtype", [torch.bfloat16, torch.float16])
@each("backend", GENERAL)
def test_low_precision_inputs(backend, dtype):
    """float32 terms with half-precision q, k, v: the output has v's type and stays near the float32 result."""
    grid = Grid(4, 5)
    terms, _, _ = make_terms(grid, ["bias", "rotary"], dim=8)
    terms = Terms(
        rotary=tuple(t.float() for t in terms.rotary), tables=tuple(t._replace(bias=t.bias.float()) for t in terms.tables)
    )
    q, k, v = torch.randn(3, 2, 2, 20, 8).to(dtype)
    out = attention(q, k, v, terms, grid, backend=backend)
    exact = attention(q.float(), k.float(), v.float(), terms, grid, backend="reference")
    assert out.dtype == dtype
    torch.testing.assert_close(out.float(), exact, atol=0.05, rtol=0.05)


@each("backend", GENERAL)
def test_dropout_is_unbiased(backend):
    q, k = torch.zeros(2, 1, 2, 6, 4)
    v = torch.ones(1, 2, 6, 4)
    out = torch.stack([attention(q, k, v, Terms(), Grid(2, 3), dropout_p=0.5, backend=backend) for _ in range(400)])
    assert out.std() > 0.1
    assert out.mean() == pytest.approx(1.0, abs=0.05)


@each(
    ("shapes", "grid", "backend", "text"),
    [
        (((1, 2, 6, 4),) * 3, Grid(2, 4), "auto", "6 keys and 6 values do not fit the 2x4 grid with prefix=0"),
        (((1, 2, 7, 4), (1, 2, 6, 4), (1, 2, 6, 4)), Grid(2, 3), "auto", "7 queries, but only 6 keys"),
        (
            ((1, 2, 6, 4),) * 3,
            Grid(2, 3),
            "flash9",
            "unknown backend 'flash9'; choose auto, triton",
        ),
    ],
)
def test_errors(shapes, grid, backend, text):
    with pytest.raises(ValueError, match=text):
        attention(*(torch.zeros(s) for s in shapes), Terms(), grid, backend=backend)


@each(
    ("mask", "text"),
    [
        (torch.ones(6, 6, dtype=torch.int64), r"bool \(True = attend\) or additive floats, not torch.int64; use mask.bool\(\)"),
        (torch.ones(6, 6, dtype=torch.uint8), "not torch.uint8"),
    ],
)
def test_integer_masks_are_refused(mask, text):
    """Ones and zeros added to the logits would mask nothing, silently."""
    with pytest.raises(ValueError, match=text):
        attention(*torch.zeros(3, 1, 2, 6, 4), Terms(), Grid(2, 3), mask)


@each("backend", GENERAL)
@each("shape", [(), (6,), (6, 6), (1, 6), (6, 1), (2, 1, 1, 6), (1, 2, 6, 6)])
@each("dtype", [torch.bool, torch.float32, torch.float64, torch.bfloat16])
def test_any_mask_that_broadcasts(shape, dtype, backend):
    q, k, v = torch.randn(3, 2, 2, 6, 4)
    mask = torch.rand(shape) > 0.3 if dtype == torch.bool else torch.randn(shape).to(dtype)
    full = mask.expand(2, 2, 6, 6)
    logits = q @ k.mT / 2
    logits = logits.masked_fill(~full, -math.inf) if dtype == torch.bool else logits + full.float()
    expected = logits.softmax(-1).nan_to_num(0.0) @ v
    torch.testing.assert_close(attention(q, k, v, Terms(), Grid(2, 3), mask, backend=backend), expected)


@each("backend", GENERAL)
@each("dtype", [torch.float16, torch.bfloat16])
@each("cast", [False, True])
def test_a_large_finite_penalty_is_not_a_mask(cast, dtype, backend):
    """A row at -1e9 or at float32's minimum sees every key alike; rounded to -inf in half precision it would see none."""
    q, k, v = torch.zeros(3, 1, 1, 6, 4).to(torch.float32 if cast else dtype)
    v += torch.arange(4)
    for penalty in (-1e9, torch.finfo(torch.float32).min):
        with torch.autocast("cpu", dtype, enabled=cast):
            out = attention(q, k, v, Terms(), Grid(2, 3), torch.full((6, 6), penalty), backend=backend)
        torch.testing.assert_close(out, v.to(out.dtype), atol=0.01, rtol=0.01)


@each(
    ("terms", "text"),
    [
        (Terms(tables=(Table(bias=torch.zeros(2, 13 * 13)),)), r"bias table over 'hw' has shape \(2, 169\).* needs \(2, 15\)"),
        (Terms(tables=(Table(bias=torch.zeros(1, 15)),)), r"bias table over 'hw' has shape \(1, 15\).* needs \(2, 15\)"),
        (Terms(tables=(Table("h", query=torch.zeros(2, 5, 4)),)), r"query table over 'h' .*the 2x3 grid.* needs \(2, 3, 4\)"),
        (Terms(rotary=(torch.zeros(1, 9, 2),) * 2), r"rotary terms have shape \(1, 9, 2\).* needs \(2, 6, 2\)"),
        (Terms(rotary=(torch.zeros(1, 6, 2),) * 2, key_rotary=(torch.zeros(2, 9, 2),) * 2), r"shape \(2, 9, 2\).* \(2, 6, 2\)"),
        (
            Terms(tables=(Table(gated=(torch.zeros(2, 5, 4), torch.zeros(2, 9, 5))),)),
            r"gated .* \(\(2, 5, 4\), \(2, 15, 5\)\)",
        ),
        (Terms(tables=(Table(gated=(torch.zeros(2, 5, 4), torch.zeros(1, 15, 6))),)), r"gated table over 'hw' has shapes"),
    ],
)
def test_terms_of_another_grid_are_refused(terms, text):
    """A lookup with another grid's rows would be silently wrong."""
    with pytest.raises(ValueError, match=text):
        attention(*torch.zeros(3, 1, 2, 6, 4), terms, Grid(2, 3))
    with pytest.raises(ValueError, match=text):
        window_attention(torch.zeros(1, 5, 5, 24), terms, Grid(5, 5), (2, 3), (0, 0), 2)


@each("dtype", [torch.bfloat16, torch.float16])
@each("cast", [False, True])
def test_parabolas_that_cancel(dtype, cast):
    """All along one diagonal, so rows, columns and diagonals cancel on the other: summed in float32, whatever q's type."""
    grid = Grid(24, 20)
    encoding = create_position("pape", grid, 2, 8)
    with torch.no_grad():
        encoding.position.copy_(torch.tensor([1.0, -0.9])).mul_(0.5 + torch.rand(50, 1))
    q, k, v = torch.randn(3, 1, 2, grid.tokens, 8).to(dtype)
    exact = attention(q.float(), k.float(), v.float(), encoding(grid), grid, backend="reference")
    with torch.autocast("cpu", dtype, enabled=cast):
        for terms in (encoding(grid), (encoding if cast else copy.deepcopy(encoding).to(dtype))(grid)):
            found = attention(q, k, v, terms, grid)
            assert (found.float() - exact).abs().max() < 0.1


@each("grid", GRIDS, ids=str)
def test_biases_of_all_axes_as_one(grid):
    terms, _, _ = make_terms(grid, ["bias"])
    expected = sum(table.bias[:, grid.index(table.axis)] for table in terms.tables)
    torch.testing.assert_close(lattice_bias(terms, grid, double)[:, grid.index()], expected)


def test_grid_rejects_an_unknown_axis():
    with pytest.raises(ValueError, match="axis 'x' is unknown; choose one of hw, h, w, h\\+w"):
        Grid(2, 2).index("x")


@each("backend", ["sdpa", "augmented_qk", "reference"])
def test_denormal_numbers_do_not_count(backend):
    """Weights of far tokens underflow with pape; a processor that is slow with denormals may flush them."""
    grid = Grid(20, 20)
    q, k, v = (torch.randn(1, 2, 400, 16, requires_grad=True) for _ in range(3))
    encoding, found = create_position("pape", grid, 2, 16), []
    assert (encoding(grid).tables[0].gated[1] < -1).any()
    try:
        for flush in (False, True):
            torch.set_flush_denormal(flush)
            out = attention(q, k, v, encoding(grid), grid, backend=backend)
            found.append((out, *torch.autograd.grad(out.square().sum(), (q, k, v, *encoding.parameters()))))
    finally:
        torch.set_flush_denormal(False)
    for plain, flushed in zip(*found, strict=True):
        assert (plain - flushed).norm() <= 1e-7 * plain.norm()
