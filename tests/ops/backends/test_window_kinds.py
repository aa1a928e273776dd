"""Windows sorted by their masks hold the same tokens, in the same slots, under the same masks as unsorted."""

import pytest
import torch

import vitrel
from helpers import each
from vitrel import Grid, Table, Terms
from vitrel.ops import attention, why, window_attention
from vitrel.ops.backends.window_kinds import window_kinds
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


@each(("window", "shift"), WINDOWS, ids=str)
@each("size", GRIDS, ids=str)
def test_every_window_of_every_image_once(size, window, shift):
    """And a token comes back from its own slot, not from padding, which repeats border tokens."""
    grid, n, layout, images = Grid(*size), window[0] * window[1], windows(*size, window, shift), 2
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
    for image, slots in enumerate(found.inverse.view(images, -1)):
        assert torch.equal(slots % n, layout.inverse % n)
        assert torch.equal(kinds[slots // n], layout.visible.view(-1, n, n)[layout.inverse // n])
        own, plain = found.source.view(-1, n)[slots // n], layout.source.view(-1, n)[layout.inverse // n]
        assert torch.equal(own, plain + image * grid.tokens)


def test_which_calls_it_takes():
    """In evaluation on a CPU; where operators are recorded another serves."""
    model = vitrel.create_model("vitrel_swin_n", num_classes=2).eval()
    image = torch.zeros(1, 3, 64, 64)
    with torch.no_grad():
        assert ": window_kinds (first of auto" in why(model, image)
    assert ": sdpa (first of auto" in why(model, image)
    with pytest.raises(ValueError, match="global attention has none"):
        attention(*torch.zeros(3, 1, 1, 6, 4), Terms(), Grid(2, 3), backend="window_kinds")
    table = Terms(tables=(Table("h", value=torch.zeros(1, 3, 8)),))
    with pytest.raises(ValueError, match=r"Table\.value"):
        window_attention(torch.zeros(1, 4, 4, 24), table, Grid(4, 4), (2, 2), (0, 0), 1, backend="window_kinds")
    with pytest.raises(ValueError, match="from a tensor"):
        torch.func.vmap(lambda x: window_attention(x[None], Terms(), Grid(4, 4), (2, 2), (0, 0), 1, backend="window_kinds"))(
            torch.zeros(2, 4, 4, 24)
        )
