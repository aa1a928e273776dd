"""The skewing trick against the gather, outputs and gradients, and the golden relative shift."""

import json

import pytest
import torch

from examples.skew import relative_shift, skew
from helpers import GOLDEN, each
from vitrel.grid import Grid

GRIDS = [Grid(3, 4), Grid(4, 3, 2), Grid(1, 5, 1), Grid(5, 1), Grid(1, 1, 1), Grid(7, 2, 3)]


def gathered(scores, grid, axis):
    index = grid.index(axis)[-scores.shape[-2] :]
    return scores.gather(-1, index.expand(*scores.shape[:-2], *index.shape))


def test_golden_shift():
    case = json.loads((GOLDEN / "founding_documents.json").read_text())["cases"]["relative_shift"]
    n = case["inputs"]["n"]
    x = 10 * torch.arange(n)[:, None] + torch.arange(2 * n - 1)  # the rule of the example
    assert relative_shift(x).tolist() == case["expected"]["shifted"]


@each("axis", ["h", "w"])
@each("grid", GRIDS, ids=str)
def test_equal_to_the_gather(grid, axis):
    scores = torch.randn(2, 3, grid.tokens, grid.classes(axis), dtype=torch.float64)
    for rows in range(grid.h + 1):
        m = rows * grid.w or grid.tokens  # the last rows, or all tokens with the prefix ones
        one, two = (scores[..., -m:, :].clone().requires_grad_() for _ in range(2))
        first, second = skew(one, grid, axis), gathered(two, grid, axis)
        assert torch.equal(first, second)
        weights = torch.randn_like(first)
        (first * weights).sum().backward()
        (second * weights).sum().backward()
        torch.testing.assert_close(one.grad, two.grad, rtol=0, atol=1e-14)


def test_compiles_and_exports():
    torch._dynamo.reset()
    scores = torch.randn(2, 12, 5)
    compiled = torch.compile(skew, backend="eager", fullgraph=True)
    assert torch.equal(compiled(scores, Grid(3, 4), "h"), skew(scores, Grid(3, 4), "h"))


def test_refusals():
    with pytest.raises(ValueError, match="along one axis, 'h' or 'w', not 'hw'"):
        skew(torch.zeros(12, 35), Grid(3, 4), "hw")
    with pytest.raises(ValueError, match=r"7 offset classes, but Grid\(h=3, w=4, prefix=0\) has 5 along 'h'"):
        skew(torch.zeros(12, 7), Grid(3, 4), "h")
    for m in (5, 14):
        with pytest.raises(ValueError, match=f"{m} queries are neither all 13 tokens of the grid nor its last whole rows of 4"):
            skew(torch.zeros(m, 8), Grid(3, 4, 1), "h")
    with pytest.raises(ValueError, match="4 queries need 2N-1 columns, N at least 4"):
        relative_shift(torch.zeros(4, 5))
    with pytest.raises(ValueError, match="got 6"):
        relative_shift(torch.zeros(3, 6))
