"""Footprints against windows written out as loops: timm's that roll before they pad, and ours that pad before they shift."""

import itertools

import pytest
import torch
from timm.models.swin_transformer import SwinTransformerBlock
from timm.models.swin_transformer_v2 import SwinTransformerV2Block

import vitrel
from vitrel.inspect.any_model import TracedBlock
from vitrel.inspect.footprint import can_run_alone, find_leaks, footprints
from vitrel.layers import Attention, Block
from vitrel.ops.window import windows

LEAKING = [8, 9, 11, 12, 13]  # rows of a grid on which window 7, shift 3 lets opposite borders meet
SOUND = [7, 10, 14]


def traced(module, grid, window, shift, dim=8):
    return TracedBlock("block", module, grid, (1, *grid, dim), "NHWC", window, shift, ())


def timm_block(grid, window=(7, 7), shift=(3, 3), kind=SwinTransformerBlock):
    block = kind(8, grid, num_heads=2, window_size=window, shift_size=shift, always_partition=True)
    return traced(block, grid, window, shift)


def our_block(grid, window=(7, 7), shift=(3, 3), position="table", cosine=False):
    attention = Attention(8, 2, window, shift, cosine=cosine)
    encoding = vitrel.create_position(position, vitrel.Grid(*window), 2, 4)
    return traced(Block(8, attention, encoding, post_norm=cosine), grid, window, shift)


def timm_axis(n, window, shift):
    """[(row or None, window, label)] of every slot of one axis, as its code does it: roll, pad, cut, label what was padded."""
    rolled = [(i + shift) % n for i in range(n)] + [None] * (-n % window)
    length = len(rolled)
    ends = [length - window, length - shift, length] if shift else [length]
    return [(row, at // window, next(j for j, end in enumerate(ends) if at < end)) for at, row in enumerate(rolled)]


def timm_truth(grid, window, shift):
    """Sees: {(y, x): set of tokens}; padding: the tokens in whose window, under the same labels, there is a padded slot."""
    sees, padding = {}, set()
    slots = list(itertools.product(*(timm_axis(n, m, s) for n, m, s in zip(grid, window, shift, strict=True))))
    groups = {}
    for (y, a, i), (x, b, j) in slots:
        groups.setdefault((a, b, i, j), []).append((y, x))
    for tokens in groups.values():
        real = {token for token in tokens if None not in token}
        for token in real:
            sees[token] = real
            if len(real) < len(tokens):
                padding.add(token)
    return sees, padding


def wrapped(truth, shift, axis):
    """{(row, row)} along an axis that see each other although the roll has brought one of them over the border."""
    pairs = {(q[axis], k[axis]) for q, keys in truth.items() for k in keys}
    return {(a, b) for a, b in pairs if (a < shift[axis]) != (b < shift[axis])}


@pytest.mark.parametrize("kind", [SwinTransformerBlock, SwinTransformerV2Block])
@pytest.mark.parametrize(
    ("grid", "window", "shift"),
    [
        *(((n, 10), (7, 7), (3, 3)) for n in (*LEAKING, *SOUND)),
        ((12, 20), (7, 7), (3, 3)),
        ((26, 9), (7, 4), (3, 2)),
        ((11, 13), (5, 7), (2, 3)),
        ((12, 20), (7, 7), (0, 0)),
    ],
    ids=str,
)
def test_what_timm_sees(grid, window, shift, kind):
    """Rows, columns and padding, found from the diagonals alone, are those of the loops over all tokens."""
    sees, padding = timm_truth(grid, window, shift)
    leaks = find_leaks(timm_block(grid, window, shift, kind))
    for axis, rows in enumerate((leaks.rows, leaks.columns)):
        assert rows == tuple(sorted({a for a, _ in wrapped(sees, shift, axis)}))
    leaking = {q for q, keys in sees.items() if any((q[i] < shift[i]) != (k[i] < shift[i]) for k in keys for i in (0, 1))}
    assert {tuple(at) for at in leaks.across.nonzero().tolist()} == leaking
    assert {tuple(at) for at in leaks.padding.nonzero().tolist()} == padding


def test_the_grids_on_which_opposite_borders_meet():
    found = {n: find_leaks(timm_block((n, 14))).rows for n in range(7, 15)}
    assert [n for n, rows in found.items() if rows] == LEAKING
    assert found[12] == (0, 1, 10, 11)


@pytest.mark.parametrize("query", [(0, 0), (11, 4), (5, 19)])
def test_a_footprint_is_all_that_a_token_sees(query):
    grid, window, shift = (12, 20), (7, 7), (3, 3)
    expected = timm_truth(grid, window, shift)[0][query]
    assert {tuple(at) for at in footprints(timm_block(grid), [query])[0].nonzero().tolist()} == expected


def our_truth(grid, window, shift):
    """{(y, x): set of tokens}: pad, then cut at shift, shift + window, ...; nothing meets across a border."""
    parts = [[0 if n <= m else (i - s) // m for i in range(n)] for n, m, s in zip(grid, window, shift, strict=True)]
    tokens = list(itertools.product(*(range(n) for n in grid)))
    place = {token: tuple(part[i] for part, i in zip(parts, token, strict=True)) for token in tokens}
    return {q: {k for k in tokens if place[k] == place[q]} for q in tokens}


@pytest.mark.parametrize("position", ["table", "shaw", "rope_mixed"])
@pytest.mark.parametrize("grid", [(8, 11), (12, 20), (5, 9), (24, 7)], ids=str)
def test_what_ours_sees(grid, position):
    block = our_block(grid, position=position)
    leaks = find_leaks(block)
    assert not leaks.across.any() and not leaks.padding.any()
    queries = list(our_truth(grid, (7, 7), (3, 3)).items())[:: 7 if grid[0] < 20 else 29]
    for (_, keys), seen in zip(queries, footprints(block, [query for query, _ in queries]), strict=True):
        assert {tuple(at) for at in seen.nonzero().tolist()} == keys


def test_cosine_attention_of_ours():
    leaks = find_leaks(our_block((12, 20), position="cpb", cosine=True))
    assert not leaks.across.any() and not leaks.padding.any()


def test_a_mask_that_is_missing_is_seen():
    """The same block on a grid that windows divide leaks as soon as its mask is gone."""
    block = timm_block((14, 21))
    assert not find_leaks(block).across.any()
    block.module.attn_mask.zero_()
    leaks = find_leaks(block)
    assert leaks.rows == (0, 1, 2, 10, 11, 12, 13)
    assert not leaks.padding.any()


def test_a_mask_of_ours_that_is_missing_is_seen(monkeypatch):
    """Everything visible in every window: opposite borders meet, and padding is attended to."""

    def all_visible(*args):
        layout = windows(*args)
        return layout._replace(visible=torch.ones_like(layout.visible))

    monkeypatch.setattr("vitrel.ops.sdpa.window_mask", lambda *args: None)
    monkeypatch.setattr("vitrel.inspect.footprint.windows", all_visible)
    leaks = find_leaks(our_block((14, 20)))
    assert leaks.rows == (0, 1, 2, 10, 11, 12, 13) and leaks.padding.any()


def test_layouts():
    """The same block behind channels first, and on tokens in a row."""

    class First(torch.nn.Module):
        def __init__(self, block):
            super().__init__()
            self.block = block

        def forward(self, x, size=None):
            if x.dim() == 3:
                return self.block(x.unflatten(1, size)).flatten(1, 2)
            return self.block(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)

    block = timm_block((12, 9))
    plain = find_leaks(block)
    first = find_leaks(block._replace(module=First(block.module), shape=(1, 8, 12, 9), layout="NCHW"))
    flat = find_leaks(block._replace(module=First(block.module), shape=(1, 108, 8), layout="NLC", arguments=((12, 9),)))
    for other in (first, flat):
        assert (other.rows, other.columns) == (plain.rows, plain.columns) and torch.equal(other.padding, plain.padding)
        assert torch.equal(other.sees, plain.sees)


def test_the_token_that_sees_most_across():
    leaks = find_leaks(timm_block((12, 14)))
    assert leaks.token[0] in leaks.rows and (leaks.sees == 2).any() and leaks.sees[leaks.token] == 1


def test_blocks_that_cannot_run_alone():
    block = timm_block((12, 14))
    assert can_run_alone(block) and can_run_alone(our_block((8, 8))._replace(arguments=None))
    assert not can_run_alone(block._replace(arguments=None)) and not can_run_alone(block._replace(window=None))
    block.module.partition_block = False
    assert block.strided and not can_run_alone(block)


def test_the_block_stays_as_it_was():
    block = timm_block((8, 9))
    before = {name: value.clone() for name, value in block.module.state_dict().items()}
    torch.manual_seed(3)
    state = torch.get_rng_state()
    find_leaks(block)
    assert all(torch.equal(value, before[name]) for name, value in block.module.state_dict().items())
    assert all(parameter.requires_grad for parameter in block.module.parameters()) and block.module.training
    assert torch.equal(torch.get_rng_state(), state)
