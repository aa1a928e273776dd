"""Windows sorted by their masks hold the same tokens, in the same slots, under the same masks as unsorted."""

import pytest
import torch

from vitrel import Grid
from vitrel.cpu.window_kinds import window_kinds
from vitrel.ops.window import windows

GRIDS = [(1, 1), (4, 4), (6, 8), (8, 8), (5, 13), (13, 5), (3, 30), (30, 2), (12, 20), (1, 17)]
WINDOWS = [
    ((4, 4), (0, 0)),
    ((4, 4), (2, 2)),
    ((4, 4), (1, 3)),
    ((3, 5), (0, 2)),
    ((3, 5), (1, 0)),
    ((1, 1), (0, 0)),
    ((7, 2), (3, 1)),
]


@pytest.mark.parametrize("images", [1, 3])
@pytest.mark.parametrize(("window", "shift"), WINDOWS, ids=str)
@pytest.mark.parametrize("size", GRIDS, ids=str)
def test_every_window_of_every_image_once(size, window, shift, images):
    grid, n, layout = Grid(*size), window[0] * window[1], windows(*size, window, shift)
    found = window_kinds(*grid[:2], window, shift, images, device="cpu")
    kinds = found.visible.repeat_interleave(found.counts, 0)  # [b*L, N, N]
    plain = layout.source.view(-1, n), layout.visible.view(-1, n, n)
    expected = [
        (tuple((row + image * grid.tokens).tolist()), seen.numpy().tobytes())
        for image in range(images)
        for row, seen in zip(*plain, strict=True)
    ]
    own = [(tuple(row.tolist()), seen.numpy().tobytes()) for row, seen in zip(found.source.view(-1, n), kinds, strict=True)]
    assert sorted(own) == sorted(expected)
    assert len(found.visible) == len(found.visible.unique(dim=0)) <= 9
    assert torch.equal(found.source[found.inverse], torch.arange(images * grid.tokens))


@pytest.mark.parametrize(("window", "shift"), WINDOWS, ids=str)
@pytest.mark.parametrize("size", GRIDS, ids=str)
def test_a_token_comes_back_from_its_own_slot(size, window, shift):
    """Not from padding, which repeats border tokens."""
    grid, n, layout = Grid(*size), window[0] * window[1], windows(*size, window, shift)
    found = window_kinds(*grid[:2], window, shift, 2, device="cpu")
    for image in range(2):
        slots = found.inverse.view(2, -1)[image]
        assert torch.equal(slots % n, layout.inverse % n)
        own, plain = found.source.view(-1, n)[slots // n], layout.source.view(-1, n)[layout.inverse // n]
        assert torch.equal(own, plain + image * grid.tokens)
        kinds = found.visible.repeat_interleave(found.counts, 0)
        assert torch.equal(kinds[slots // n], layout.visible.view(-1, n, n)[layout.inverse // n])
