"""Attention over segments and in two streams against the oracles of the papers, outputs and gradients."""

import pytest
import torch

import oracles
from helpers.variants import GENERAL, make, perturbed, serving
from oracles.streams import PAIRS
from vitrel import Grid
from vitrel.inputs.memory import segment_attention, with_past
from vitrel.ops import attention

ROWS, W, HEADS, DIM = (2, 1, 3), 4, 2, 8
WHOLE = Grid(sum(ROWS), W)
ORDER = [4, 0, 5, 2, 1, 3]
double = torch.float64


def draw(*shape):
    return torch.randn(*shape, dtype=double)


def in_segments(encoding, q, k, v, length):
    """q, k, v [1, H, N, D] of the whole strip, run one segment after the other."""
    found, past, above, start = [], None, (), 0
    for rows in ROWS:
        own = slice(start * W, (start + rows) * W)
        keys = Grid(sum(above) + rows, W)
        both = with_past((k[:, :, own], v[:, :, own]), past, 0)
        found.append(segment_attention(q[:, :, own], *both, encoding(keys), keys, backend="reference"))
        above = (*above, rows)[-length:] if length else ()
        past, start = tuple(t[:, :, t.shape[2] - sum(above) * W :] for t in both), start + rows
    return torch.cat(found, 2)


@pytest.mark.parametrize("length", [0, 1, 2])
@pytest.mark.parametrize("key", list(PAIRS))
def test_segments_equal_the_recurrence_of_the_paper(key, length):
    encoding = perturbed(make(key, WHOLE, HEADS, DIM, dtype=double, **({"resize": "clip"} if key == "table" else {})))
    q, k, v = draw(3, 1, HEADS, WHOLE.tokens, DIM)
    learned = {name: value.detach().numpy() for name, value in encoding.named_parameters()}
    wanted = oracles.recurrent(key, *(x[0].numpy() for x in (q, k, v)), ROWS, W, length, **learned)
    if key == "table":  # built for the whole, so smaller key grids read its exact centre
        assert not encoding.resized(Grid(3, W))
    torch.testing.assert_close(in_segments(encoding, q, k, v, length)[0], torch.from_numpy(wanted), rtol=0, atol=1e-6)


@pytest.mark.parametrize("backend", GENERAL)
@pytest.mark.parametrize("key", ["table", "rope_mixed", "shaw", "deberta", "lookhere"])
def test_one_row_of_queries_over_a_full_key_grid(key, backend):
    heads = 4 if key == "lookhere" else HEADS
    encoding = perturbed(make(key, Grid(*WHOLE[:2], 1), heads, DIM, dtype=double))
    grid = Grid(*WHOLE[:2], 1)
    terms = encoding(grid)
    if backend not in serving(terms, grid, heads, queries=W):
        pytest.skip("this backend refuses these terms")
    q, k, v = draw(3, 2, heads, grid.tokens, DIM)
    full = attention(q, k, v, terms, grid, backend="reference")
    torch.testing.assert_close(attention(q[:, :, -W:], k, v, terms, grid, backend=backend), full[:, :, -W:])
