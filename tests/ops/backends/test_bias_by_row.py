"""Bias tables row by row: outputs and gradients against loops in NumPy and the reference, and the memory."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from helpers import each
from helpers.sizes import Sizes
from helpers.variants import perturbed
from tools.benchmark.worker import most_bytes
from vitrel import Grid, Table, Terms, create_position
from vitrel.ops import attention, reference, sdpa
from vitrel.ops.backends import bias_by_row

double = torch.float64
GRIDS = [Grid(3, 4), Grid(5, 2, 1), Grid(2, 5, 3), Grid(1, 6), Grid(6, 1, 1), Grid(1, 1), Grid(1, 1, 1), Grid(24, 14, 3)]


def oracle(q, k, v, tables, grid, scale, grad):
    """Output and the gradients of q, k, v and every table under (out * grad).sum(), [B, H, N, D] in NumPy, pair by pair.

    tables: {axis: [H, R]}, rows by query minus key from the most negative, dy-major, then patch->token... as BEiT has them.
    """
    h, w, p = grid
    at = [None] * p + [(y, x) for y in range(h) for x in range(w)]
    n, count = len(at), {"hw": (2 * h - 1) * (2 * w - 1), "h": 2 * h - 1, "w": 2 * w - 1}

    def row(axis, i, j):
        if at[i] is None or at[j] is None:
            return count[axis] + (1 if at[i] is not None else 2 if at[j] is None else 0)
        dy, dx = at[i][0] - at[j][0] + h - 1, at[i][1] - at[j][1] + w - 1
        return {"hw": dy * (2 * w - 1) + dx, "h": dy, "w": dx}[axis]

    rows_of = {axis: np.array([[row(axis, i, j) for j in range(n)] for i in range(n)]) for axis in tables}
    logits = scale * np.einsum("bhmd,bhnd->bhmn", q, k) + sum(table[:, rows_of[axis]] for axis, table in tables.items())
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = np.einsum("bhmn,bhnd->bhmd", weights, v)
    slope = np.einsum("bhmd,bhnd->bhmn", grad, v)
    slope = weights * (slope - (weights * slope).sum(-1, keepdims=True))  # of the logits
    found = [scale * np.einsum("bhmn,bhnd->bhmd", slope, k), scale * np.einsum("bhmn,bhmd->bhnd", slope, q)]
    found.append(np.einsum("bhmn,bhmd->bhnd", weights, grad))
    for axis, table in tables.items():
        own = np.zeros_like(table)
        np.add.at(own, (slice(None), rows_of[axis]), slope.sum(0))
        found.append(own)
    return out, found


def inputs(grid, batch=(2,), dtype=double, dim=8):
    return [torch.randn(*batch, 2, grid.tokens, dim, dtype=dtype, requires_grad=True) for _ in range(3)]


def table(grid, axis="hw", dtype=double, std=0.5):
    return (std * torch.randn(2, grid.classes(axis), dtype=dtype)).requires_grad_()


def results(backend, tensors, terms, grid, learned, weight=None):
    out = backend.attention(*tensors, terms, grid)
    weight = torch.cos(torch.arange(out.numel())).view(out.shape) if weight is None else weight
    return [out, *torch.autograd.grad((out * weight.to(out.dtype)).sum(), learned)]


def assert_equal(found, expected, limit=1e-12):
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        torch.testing.assert_close(a, b, atol=limit, rtol=limit)


@each("axes", [("hw",), ("h",), ("w",), ("h", "w"), ("hw", "w")], ids="+".join)
@each("grid", GRIDS, ids=str)
def test_equals_the_loops(grid, axes):
    """24x14 takes several blocks of queries, the last one shorter."""
    tables, (q, k, v) = {axis: table(grid, axis) for axis in axes}, inputs(grid)
    terms, weight = Terms(tables=tuple(Table(axis, bias=t) for axis, t in tables.items())), torch.randn(q.shape, dtype=double)
    out, *gradients = results(bias_by_row, (q, k, v), terms, grid, [q, k, v, *tables.values()], weight)
    arrays = [x.detach().numpy() for x in (q, k, v)]
    expected = oracle(*arrays, {axis: t.detach().numpy() for axis, t in tables.items()}, grid, 8**-0.5, weight.numpy())
    np.testing.assert_allclose(out.detach().numpy(), expected[0], atol=1e-12)
    for a, b in zip(gradients, expected[1], strict=True):
        np.testing.assert_allclose(a.numpy(), b, atol=1e-11)


@each("temperature", [None, torch.tensor(0.3, dtype=double, requires_grad=True)], ids=["none", "tensor"])
@each("grid", [Grid(3, 5), Grid(4, 3, 3)], ids=str)
def test_other_terms_beside_tables(grid, temperature):
    """Rotation, a bias of queries, a scale and a temperature: none of them changes what the table adds."""
    rope = perturbed(create_position("rope_mixed", grid, 2, 8, dtype=double))
    bias, added, (q, k, v) = table(grid), torch.randn(2, 8, dtype=double, requires_grad=True), inputs(grid)
    others = {"query_bias": added, "scale": 0.3, "temperature": temperature, "tables": (Table(bias=bias),) * 2}
    learned = [q, k, v, bias, added, *rope.parameters(), *([] if temperature is None else [temperature])]
    found, expected = (results(b, (q, k, v), rope(grid)._replace(**others), grid, learned) for b in (bias_by_row, reference))
    assert_equal(found, expected)


@each("grid", [Grid(3, 4), Grid(18, 15, 1)], ids=str)
@each(
    "shapes",
    [
        ((), (), ()),
        ((2, 3), (2, 3), (2, 3)),
        ((3,), (1,), (1,)),
        ((1,), (3,), (3,)),
        ((2, 3), (3,), (2, 1)),
        ((0,), (0,), (0,)),
    ],
    ids=str,
)
def test_leading_dimensions_broadcast(grid, shapes):
    bias = table(grid)
    tensors = [torch.randn(*shape, 2, grid.tokens, 8, dtype=double, requires_grad=True) for shape in shapes]
    found, expected = (
        results(b, tensors, Terms(tables=(Table(bias=bias),)), grid, [*tensors, bias]) for b in (bias_by_row, reference)
    )
    assert_equal(found, expected)


def test_heads_share_keys_and_inputs_need_not_be_contiguous():
    grid, bias = Grid(4, 5, 1), table(Grid(4, 5, 1))
    q = torch.randn(2, grid.tokens, 8, 2, dtype=double, requires_grad=True)
    k, v = torch.randn(2, 2, 1, 8, grid.tokens, dtype=double).requires_grad_().unbind(0)
    views = q.permute(0, 3, 1, 2), k.mT, v.mT
    found, expected = (
        results(b, views, Terms(tables=(Table(bias=bias),)), grid, [q, k, v, bias]) for b in (bias_by_row, reference)
    )
    assert_equal(found, expected)


def test_what_is_not_learned_gets_no_gradient():
    grid = Grid(5, 4, 1)
    bias, (q, k, v) = table(grid), inputs(grid)
    fixed = Terms(tables=(Table(bias=bias.detach()),))
    assert_equal(*(results(b, (q, k, v), fixed, grid, [q, k, v]) for b in (bias_by_row, reference)))
    frozen, terms = [x.detach() for x in (q, k, v)], Terms(tables=(Table(bias=bias),))
    assert_equal(*(results(b, frozen, terms, grid, [bias]) for b in (bias_by_row, reference)))
    assert_equal(*(results(b, (frozen[0], k, frozen[2]), terms, grid, [k, bias]) for b in (bias_by_row, reference)))
    assert not bias_by_row.attention(*frozen, fixed, grid).requires_grad


def errors(backend, tensors, terms, grid, learned, exact, cast):
    with torch.autocast("cpu", torch.bfloat16, enabled=cast):  # the backward pass too
        found = results(backend, tensors, terms, grid, learned)
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, exact, strict=True)], found


@each(
    ("dtype", "of_bias", "cast"),
    [
        *((dtype, dtype, False) for dtype in (torch.float32, torch.bfloat16, torch.float16)),
        *((dtype, torch.float32, True) for dtype in (torch.float32, torch.bfloat16, torch.float64)),
    ],
    ids=str,
)
def test_lower_precision(dtype, of_bias, cast):
    """Types as of the sdpa backend, and errors against float64 no worse than twice its own."""
    grid = Grid(12, 22, 1)
    bias, tensors = table(grid, dtype=of_bias), inputs(grid, dtype=dtype)
    learned, terms = [*tensors, bias], Terms(tables=(Table(bias=bias),))
    exact = [x.detach().double().requires_grad_() for x in learned]
    exact = results(reference, exact[:3], Terms(tables=(Table(bias=exact[3]),)), grid, exact)
    (own, found), (peer, expected) = (errors(b, tensors, terms, grid, learned, exact, cast) for b in (bias_by_row, sdpa))
    assert [x.dtype for x in found] == [x.dtype for x in expected]
    assert all(a <= 2 * b + 1e-13 for a, b in zip(own, peer, strict=True)), (own, peer)


@each("dtype", [double, torch.float32, torch.bfloat16])
def test_hidden_keys(dtype):
    """-inf in a table: of a field of view, of a prefix token, and of queries that see no key, which return 0, not NaN."""
    grid = Grid(4, 5, 2)
    half, alone, fully_masked = (table(grid, dtype=dtype).detach() for _ in range(3))
    half[:, : grid.offset_classes() // 2] = -torch.inf  # keys below, and to the right
    alone[:, -3] = -torch.inf  # the patches are hidden from the prefix
    fully_masked[0, :-3], fully_masked[0, -2] = -torch.inf, -torch.inf  # in one head patches see nothing, the prefix does
    for bias in (half, alone, fully_masked):
        bias.requires_grad_()
        tensors, terms = inputs(grid, dtype=dtype), Terms(tables=(Table(bias=bias),))
        own, peer = (results(b, tensors, terms, grid, [*tensors, bias]) for b in (bias_by_row, reference))
        assert all(x.isfinite().all() for x in own)
        for a, b in zip(own, peer, strict=True):
            near = 3e-2 if dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(a, b, atol=near, rtol=near)
    assert (own[0][:, 0, 2:] == 0).all() and (own[0][:, 1] != 0).all()


@each("reentrant", [False, True])
def test_checkpointing(reentrant):
    grid = Grid(17, 16)
    bias, tensors = table(grid), inputs(grid)

    def attend(q, k, v, bias):
        return bias_by_row.attention(q, k, v, Terms(tables=(Table(bias=bias),)), grid)

    checkpoint(attend, *tensors, bias, use_reentrant=reentrant).square().sum().backward()
    found = [x.grad for x in (*tensors, bias)]
    expected = torch.autograd.grad(attend(*tensors, bias).square().sum(), (*tensors, bias))
    assert_equal(found, expected)


def test_second_derivatives_are_refused():
    """With an error: autograd would leave out what a part without them adds to the second derivative."""
    grid = Grid(3, 4)
    bias, (q, k, v) = table(grid), inputs(grid)
    out = bias_by_row.attention(q, k, v, Terms(tables=(Table(bias=bias),)), grid)
    with pytest.raises(RuntimeError, match=r"'bias_by_row' has no second derivatives; use .*use_backend\('reference'\)"):
        torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(ValueError, match=r"backend 'bias_by_row' refuses: its backward pass supports backward\(\) only"):
        torch.func.grad(lambda x: attention(x, k, v, Terms(tables=(Table(bias=bias),)), grid, backend="bias_by_row").sum())(q)


@pytest.mark.parametrize("grid", [Grid(24, 15), Grid(24, 15, 2), Grid(2, 300, 1)], ids=str)
def test_nothing_of_all_pairs_and_flash_kernels_alone(grid, monkeypatch):
    """Forward and backward; a row wider than a block goes alone."""
    plain, seen = F.scaled_dot_product_attention, []

    def recorded(q, *others, **options):
        seen.append(q.shape[-2])
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return plain(q, *others, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", recorded)
    tensors, bias = inputs(grid, batch=(1,), dtype=torch.float32), table(grid, dtype=torch.float32)
    with Sizes() as sizes:
        bias_by_row.attention(*tensors, Terms(tables=(Table(bias=bias),)), grid).square().sum().backward()
    assert bias.grad is not None and sum(seen) == grid.tokens
    assert max(seen) <= max(256, grid.w) and max(sizes.seen) < 2 * grid.tokens**2


def test_memory():
    """One [H, N, N] in float32 is 157 MB, the biases of a block of queries 13 MB, the lines 5 MB: what all tensors hold."""
    grid, whole = Grid(56, 56), 4 * 3136**2 * 4
    tensors = [torch.randn(1, 4, grid.tokens, 32, requires_grad=True) for _ in range(3)]
    terms = Terms(tables=(Table(bias=torch.randn(4, grid.classes(), requires_grad=True)),))
    call = partial(bias_by_row.attention, *tensors, terms, grid)
    with torch.no_grad():
        assert 0 < most_bytes(call, torch.device("cpu")) < whole / 3
    assert 0 < most_bytes(lambda: call().sum().backward(), torch.device("cpu")) < whole / 2
