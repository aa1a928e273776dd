"""Windows against an infinite masked canvas: the brute-force oracle, and a dense form of it that also gives gradients."""

import numpy as np
import pytest
import torch

import oracles
from helpers import each
from helpers.variants import GENERAL
from vitrel import Grid, Table, Terms
from vitrel.ops import window_attention

double = torch.float64


def canvas(qkv, window, shift, heads, table):
    """The same definition as the oracle, dense and differentiable: all tokens at once, those of other windows masked.

    table: [H, 2*wh-1, 2*ww-1] by (dy, dx). A window of the infinite partition is floor((y - s) / m); nothing wraps.
    """
    b, h, w, c = qkv.shape
    y, x = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    y, x = y.flatten(), x.flatten()
    q, k, v = qkv.view(b, h * w, 3, heads, -1).permute(2, 0, 3, 1, 4)
    sy = 0 if h <= window[0] else shift[0]
    sx = 0 if w <= window[1] else shift[1]
    row, column = (y - sy).div(window[0], rounding_mode="floor"), (x - sx).div(window[1], rounding_mode="floor")
    same = (row[:, None] == row) & (column[:, None] == column)
    dy, dx = (y[:, None] - y) * same + window[0] - 1, (x[:, None] - x) * same + window[1] - 1
    logits = q @ k.mT * q.shape[-1] ** -0.5 + table[:, dy, dx]
    out = logits.masked_fill(~same, -torch.inf).softmax(-1) @ v
    return out.transpose(1, 2).reshape(b, h, w, c // 3)


def check(h, w, window, shift, backend, heads=2, dim=4):
    """Outputs and all gradients of one grid, float64."""
    qkv = torch.randn(2, h, w, 3 * heads * dim, dtype=double, requires_grad=True)
    table = torch.randn(heads, 2 * window[0] - 1, 2 * window[1] - 1, dtype=double, requires_grad=True)
    weight = torch.randn(2, h, w, heads * dim, dtype=double)
    terms = Terms(tables=(Table(bias=table.flatten(1)),))
    ours = window_attention(qkv, terms, Grid(h, w), window, shift, heads, backend=backend)
    truth = canvas(qkv, window, shift, heads, table)
    torch.testing.assert_close(ours, truth, atol=1e-10, rtol=0)
    for a, b in zip(*(torch.autograd.grad((o * weight).sum(), (qkv, table)) for o in (ours, truth)), strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=0)


GRIDS = [(1, 1), (5, 5), (7, 7), (12, 9), (3, 16), (15, 6), (1, 30)]


@each("shift", [(0, 0), (3, 3), (2, 0)])
@each("size", GRIDS, ids=lambda s: f"{s[0]}x{s[1]}")
def test_equals_the_brute_force_oracle(size, shift):
    h, w = size
    qkv, table = torch.randn(1, h, w, 3 * 2 * 4, dtype=double), torch.randn(2, 13, 13, dtype=double)
    expected = oracles.window_canvas(qkv[0].numpy(), (7, 7), shift, 2, lambda n, dy, dx: table[n, dy + 6, dx + 6].item())
    terms = Terms(tables=(Table(bias=table.flatten(1)),))
    for backend in GENERAL:
        out = window_attention(qkv, terms, Grid(h, w), (7, 7), shift, 2, backend=backend)
        np.testing.assert_allclose(out[0].numpy(), expected, atol=1e-10)
    torch.testing.assert_close(canvas(qkv, (7, 7), shift, 2, table)[0], torch.from_numpy(expected), atol=1e-10, rtol=0)


@each("backend", GENERAL)
@each(("window", "shift"), [((7, 7), (3, 3)), ((4, 6), (2, 3)), ((5, 3), (0, 2)), ((8, 8), (7, 1)), ((1, 1), (0, 0))])
def test_outputs_and_gradients(window, shift, backend):
    for h, w in [(1, 1), (2, 11), (6, 7), (9, 9), (13, 8), (10, 17), (30, 5)]:
        check(h, w, window, shift, backend)


def test_every_remainder():
    """Of both sides, below the window, above it and above two of it."""
    for h in range(1, 8):
        for w in range(1, 10):
            check(h, w, (3, 4), (1, 2), "sdpa", dim=2)
            check(h, w, (3, 4), (0, 0), "sdpa", heads=1, dim=2)


@each("dtype", [torch.float32, torch.bfloat16, torch.float16])
@each("size", [(5, 5), (8, 8), (8, 6), (3, 9)])
@each("backend", GENERAL)
def test_masks_hold_against_large_logits(size, dtype, backend):
    """The first region, cut off by the shift, sees itself at logits of -200 and v = 1; padding and the far side of the cyclic
    border have logits of +200 and v = 1000, which a mask of -100 would let through."""
    (h, w), heads, dim = size, 2, 4
    q = torch.full((1, h, w, heads * dim), 10.0)
    k, v = torch.full_like(q, 10.0), torch.full_like(q, 1000.0)  # logits 10 * 10 * 4 / sqrt(4)
    rows, columns = (2 if h > 4 else h), (2 if w > 4 else w)
    k[:, :rows, :columns], v[:, :rows, :columns] = -10.0, 1.0
    out = window_attention(torch.cat((q, k, v), -1).to(dtype), Terms(), Grid(h, w), (4, 4), (2, 2), heads, backend=backend)
    torch.testing.assert_close(out, v.to(dtype), atol=0, rtol=1e-2)


@each(
    ("arguments", "text"),
    [
        (dict(window=(0, 7)), "window height must be at least 1 token, not 0"),
        (dict(window=(7, -1)), "window width must be at least 1 token, not -1"),
        (dict(shift=(0, 7)), r"shift along width must lie in 0..6 for a window of 7, not 7"),
        (dict(grid=Grid(5, 6, 1)), "the grid has prefix=1"),
        (dict(grid=Grid(6, 5)), r"expected \[B, 6, 5, 3 \* C\]"),
        (dict(num_heads=5), "C divisible by 5 heads"),
        (dict(backend="no"), "unknown backend 'no'"),
    ],
)
def test_errors(arguments, text):
    usual = dict(terms=Terms(), grid=Grid(5, 6), window=(7, 7), shift=(3, 3), num_heads=2)
    with pytest.raises(ValueError, match=text):
        window_attention(torch.zeros(1, 5, 6, 24), **(usual | arguments))


def test_second_derivatives():
    """Of training on a CPU, whose gathers have backward passes of their own; with padding and a shift."""
    qkv = torch.randn(1, 3, 2, 3 * 2, dtype=double, requires_grad=True)
    table = torch.randn(1, 9, dtype=double, requires_grad=True)

    def run(qkv, table):
        return window_attention(qkv, Terms(tables=(Table(bias=table),)), Grid(3, 2), (2, 2), (1, 1), 1, backend="sdpa")

    assert torch.autograd.gradgradcheck(run, (qkv, table))


def test_training_stores_queries_keys_values_and_weights_once():
    qkv, heads, n = torch.randn(2, 14, 14, 3 * 2 * 16, requires_grad=True), 2, 49
    table, stored, kept = torch.randn(heads, 169, requires_grad=True), {}, []

    def pack(x):
        kept.append(x)  # so that no address is used twice
        stored[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        window_attention(qkv, Terms(tables=(Table(bias=table),)), Grid(14, 14), (7, 7), (3, 3), heads)
    of_windows = 4 * heads * n * n * 4  # one number for every pair; the masks of fully masked rows are bytes
    assert sum(stored.values()) < 4 * qkv.numel() + 2 * of_windows * 1.15
