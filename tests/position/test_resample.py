"""Resampling of learned parameters, against timm's and Microsoft's functions and what each policy promises."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed, resize_rel_pos_bias_table

import oracles
from helpers import each
from vitrel import Grid, create_position
from vitrel.position.resample import POLICIES, resample_embedding, resample_table

CASES = [((14, 14), (24, 24)), ((7, 9), (12, 10)), ((4, 4), (28, 20)), ((2, 3), (5, 7))]


def bias(encoding, grid):
    """[H, N, N], what the tables add to the logits on `grid`."""
    return sum(table.bias[:, grid.index(table.axis)] for table in encoding(grid).tables)


@each(("source", "target"), CASES)
def test_geometric_equals_timm(source, target):
    table = torch.randn(Grid(*source).classes(), 3)
    expected = resize_rel_pos_bias_table(table, target, (Grid(*target).classes(), 3), source)
    torch.testing.assert_close(resample_table(table, Grid(*source), Grid(*target), "geometric"), expected, atol=1e-5, rtol=1e-5)


@each(("source", "target"), CASES)
def test_bicubic_equals_microsoft(source, target):
    table = torch.randn(Grid(*source).classes(), 3)
    image = table.T.reshape(1, 3, 2 * source[0] - 1, 2 * source[1] - 1)
    expected = F.interpolate(image, size=(2 * target[0] - 1, 2 * target[1] - 1), mode="bicubic").flatten(2)[0].T
    torch.testing.assert_close(resample_table(table, Grid(*source), Grid(*target), "bicubic"), expected, atol=1e-5, rtol=1e-5)


@each("policy", POLICIES)
def test_an_axis_that_does_not_grow_is_read_exactly(policy):
    """Where timm resamples both axes as soon as one of them changes."""
    table = torch.randn(5 * 7, 2)
    grown = resample_table(table, Grid(3, 4), Grid(6, 4), policy).view(11, 7, 2)
    torch.testing.assert_close(grown[5], table.view(5, 7, 2)[2], atol=1e-6, rtol=1e-6)  # row offset 0, every column offset


@each("key", ["table", "levit", "factorized"])
@each("policy", POLICIES)
def test_smaller_grid_is_the_exact_center(key, policy):
    encoding = create_position(key, Grid(6, 7, 1), 2, 8, policy=policy)
    large = bias(encoding, Grid(6, 7, 1))
    inside = [0] + [1 + y * 7 + x for y in range(4) for x in range(5)]
    assert torch.equal(bias(encoding, Grid(4, 5, 1)), large[:, inside][:, :, inside])
    assert encoding.resampled(Grid(4, 5, 1)) == {}


@each("key", ["table", "levit", "factorized"])
def test_clip_repeats_the_edge(key):
    trained, grid = Grid(3, 4), Grid(8, 9)
    encoding = create_position(key, trained, 2, 8, policy="clip")
    small, large = encoding(trained).tables, encoding(grid).tables
    for a, b in zip(small, large, strict=True):
        offsets = grid.offsets(a.axis).reshape(len(b.bias[0]), -1)
        reach = torch.tensor({"hw": [2, 3], "h": [2], "w": [3]}[a.axis])
        wanted = offsets.clamp(-reach, reach)
        known = trained.offsets(a.axis).reshape(len(a.bias[0]), -1)
        rows = (wanted[:, None] == known[None]).all(-1).long().argmax(1)
        assert torch.equal(b.bias, a.bias[:, rows])
    assert sum(encoding.resampled(grid).values()) == 0


@each("key", ["table", "levit", "factorized"])
def test_geometric_keeps_the_neighbors(key):
    encoding = create_position(key, Grid(5, 5), 2, 8, policy="geometric", init_std=0.5)
    near = [(y, x) for y in (-1, 0, 1) for x in (-1, 0, 1)]

    def value(grid, offset):
        middle = (grid.h // 2) * grid.w + grid.w // 2
        other = (grid.h // 2 - offset[0]) * grid.w + grid.w // 2 - offset[1]
        return bias(encoding, grid)[:, middle, other]

    for offset in near:
        torch.testing.assert_close(value(Grid(5, 5), offset), value(Grid(11, 13), offset), atol=1e-5, rtol=1e-5)


def test_absolute_equals_timm():
    encoding = create_position("absolute", Grid(6, 8, 1), 2, 8)
    for size in [(6, 8), (9, 5), (12, 12)]:
        expected = resample_abs_pos_embed(encoding.pos_embed, list(size), [6, 8], num_prefix_tokens=1)
        torch.testing.assert_close(encoding(Grid(*size, 1)).tokens, expected[0], atol=1e-6, rtol=1e-6)


@each(("source", "target"), [((4, 3), (7, 1)), ((4, 1), (2, 1)), ((1, 4), (1, 7)), ((4, 3), (7, 5)), ((3, 5), (2, 2))])
def test_absolute_by_the_definition_of_the_filter(source, target):
    """On maps of one column too, which torch resamples wrongly on a CPU; values and gradients."""
    embedding = torch.randn(*source, 6, dtype=torch.float64, requires_grad=True)

    def stretched(array):
        columns = np.stack([oracles.stretch(array[:, x], target[0]) for x in range(source[1])], 1)
        return np.stack([oracles.stretch(row, target[1]) for row in columns]).reshape(-1, 6)

    out = resample_embedding(embedding, Grid(*target))
    np.testing.assert_allclose(out.detach(), stretched(embedding.detach().numpy()), atol=1e-12)
    weight, direction = torch.randn(out.shape).double().numpy(), torch.randn(*source, 6).double().numpy()
    [gradient] = torch.autograd.grad((out * torch.tensor(weight)).sum(), embedding)
    np.testing.assert_allclose((gradient.numpy() * direction).sum(), (stretched(direction) * weight).sum(), atol=1e-12)


def test_factorized_embedding_is_an_absolute_one():
    """At every grid, since resampling is linear and its weights sum to 1."""
    factorized = create_position("absolute_factorized", Grid(5, 4, 1), 2, 4, dtype=torch.float64)
    absolute = create_position("absolute", Grid(5, 4, 1), 2, 4, dtype=torch.float64)
    with torch.no_grad():
        absolute.pos_embed.zero_()
        rows = factorized.pos_embed_h[0][:, None] + factorized.pos_embed_w[0]
        absolute.pos_embed[0, 1:] = rows.flatten(0, 1)
    for grid in (Grid(5, 4, 1), Grid(9, 4, 1), Grid(3, 11, 1), Grid(8, 1, 1)):
        torch.testing.assert_close(factorized(grid).tokens, absolute(grid).tokens)


def test_counts_and_shares():
    table = create_position("table", Grid(14, 14), 3, 8)
    assert table.unseen(Grid(24, 24)) == pytest.approx(1 - 27**2 / 47**2)  # the 67 % of the protocol
    assert create_position("cpb", Grid(14, 14), 3, 8, policy="renormalize").unseen(Grid(24, 24)) == 0
    assert table.resampled(Grid(24, 24)) == {"table geometric": 729 * 3}
    assert table.resampled(Grid(24, 10)) == {"table geometric": 729 * 3}
    assert create_position("factorized", Grid(14, 14), 3, 8).resampled(Grid(24, 10)) == {"factorized geometric": 27 * 3}
    assert create_position("absolute", Grid(14, 14, 1), 3, 8).resampled(Grid(7, 7, 1)) == {"absolute bicubic": 196 * 24}


def test_only_axes_of_another_length_count_as_resampled():
    encoding = create_position("absolute_factorized", Grid(4, 3), 2, 8)
    counts = {Grid(4, 3): 0, Grid(6, 3): 4 * 16, Grid(4, 5): 3 * 16, Grid(2, 5): 7 * 16}
    assert {grid: sum(encoding.resampled(grid).values()) for grid in counts} == counts
