"""Masks together with fewer queries than keys, as a decoder or a layer with memory calls attention."""

import math

import pytest
import torch

from helpers import each
from helpers.variants import GENERAL
from vitrel import Grid, Table, Terms, create_position
from vitrel.ops import attention

double = torch.float64


def problem(grid=Grid(2, 3, 1), heads=2, dim=4):
    """q, k, v and terms of every kind that all backends serve, in float64; q, k, v require gradients."""
    n = grid.tokens
    leaves = [torch.randn(2, heads, n, dim, dtype=double, requires_grad=True) for _ in range(3)]
    angle = torch.randn(heads, n, dim // 2, dtype=double)
    bias, rows = torch.randn(heads, grid.classes(), dtype=double), torch.randn(2, heads, grid.classes("h"), dim, dtype=double)
    tables = (Table(bias=bias), Table("h", query=rows[0], key=rows[1]))
    query_bias = torch.randn(heads, dim, dtype=double)
    return leaves, Terms(rotary=(angle.cos(), angle.sin()), query_bias=query_bias, tables=tables), grid


def random_mask(kind, *shape):
    visible = torch.rand(shape) > 0.4
    return visible if kind == "bool" else torch.randn(shape, dtype=double).masked_fill(~visible, -math.inf)


@each("backend", GENERAL)
@each("kind", ["bool", "additive"])
@each("leading", [(), (1, 1), (2, 1), (1, 2), (2, 2), (2,)], ids=str)
@each("queries", [1, 3, 7])
def test_fewer_queries_with_a_mask(queries, leading, kind, backend):
    """A mask of the last M queries gives the last M rows of the whole; a row that sees nothing is 0. Gradients too."""
    (q, k, v), terms, grid = problem()
    mask = random_mask(kind, *leading, grid.tokens, grid.tokens)
    mask[..., -1, :] = False if kind == "bool" else -math.inf
    whole = attention(q, k, v, terms, grid, mask, backend="reference")[:, :, -queries:]
    part = attention(q[:, :, -queries:], k, v, terms, grid, mask[..., -queries:, :], backend=backend)
    torch.testing.assert_close(part, whole, atol=1e-12, rtol=0)
    assert (part[:, :, -1] == 0).all()
    weight = torch.randn_like(whole)
    for a, b in zip(*(torch.autograd.grad((o * weight).sum(), (q, k, v)) for o in (part, whole)), strict=True):
        assert a.isfinite().all()
        torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


@each("kind", ["bool", "additive"])
@each("key", ["lookhere", "xpos", "lookhere+table"])
def test_a_mask_and_a_field_of_view(key, kind):
    """A head whose visible keys are all masked sees none and returns 0, whichever of the two hid them."""
    grid = Grid(3, 3)
    q, k, v = (torch.randn(2, 12, 9, 4, requires_grad=True) for _ in range(3))
    visible = torch.ones(9, 9, dtype=torch.bool)
    visible[:, :3] = False
    mask = visible if kind == "bool" else torch.randn(9, 9).masked_fill(~visible, -torch.inf)
    terms = create_position(key, grid, 12, 4)(grid)
    expected = attention(q, k, v, terms, grid, mask, backend="reference")
    out = attention(q, k, v, terms, grid, mask)
    assert (expected == 0).all(-1).any() and torch.equal((out == 0).all(-1), (expected == 0).all(-1))
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    for gradient in torch.autograd.grad(out.square().sum(), (q, k, v)):
        assert gradient.isfinite().all()


def test_keys_scaled_apart_from_queries_stay_finite_in_half_precision():
    """SDPA refuses them; the reference computes in float32, autocast or not. In float32 all agree."""
    encoding, grid = create_position("xpos", Grid(8, 8), 4, 8), Grid(1, 128)
    q, k, v = (torch.randn(1, 4, 128, 8, dtype=torch.float16, requires_grad=True) for _ in range(3))
    out = attention(q, k, v, encoding(grid), grid)
    assert out.dtype == torch.float16 and out.isfinite().all()
    with pytest.raises(ValueError, match=r"backend 'sdpa' refuses: keys scaled by the inverse of the queries"):
        attention(q, k, v, encoding(grid), grid, backend="sdpa")
    q, k, v = (x.detach().float().requires_grad_() for x in (q, k, v))
    expected = attention(q, k, v, encoding(grid), grid, backend="reference")
    gradients = torch.autograd.grad(expected.square().sum(), (q, k, v))
    out = attention(q, k, v, encoding(grid), grid, backend="sdpa")
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
    for found, gradient in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), gradients, strict=True):
        torch.testing.assert_close(found, gradient, atol=1e-4, rtol=1e-4)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match="overflow half precision"):
        attention(q, k, v, encoding(grid), grid, backend="sdpa")
