"""Leaks against windows written out as loops: timm's that roll before they pad, and ours that pad before they shift."""

import itertools

import torch
from timm.models.swin_transformer import SwinTransformerBlock
from timm.models.swin_transformer_v2 import SwinTransformerV2Block
from torch import nn

import vitrel
from helpers import each
from vitrel.inspect.any_model import trace
from vitrel.inspect.leaks import find_leaks
from vitrel.layers import Attention, Block

LEAKING = [8, 9, 11, 12, 13]  # rows of a grid on which window 7, shift 3 lets opposite borders meet
SOUND = [7, 10, 14]


class Alone(nn.Module):
    """A block in a model whose tokens are pixels of 8 channels."""

    in_chans = 8

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, image):
        x = image.permute(0, 2, 3, 1)
        return self.block(x, vitrel.Grid(*x.shape[1:3])) if isinstance(self.block, Block) else self.block(x)


def call_of(block, grid):
    (call,) = trace(Alone(block), grid).calls
    return call


def timm_block(grid, window=(7, 7), shift=(3, 3), kind=SwinTransformerBlock):
    return kind(8, grid, num_heads=2, window_size=window, shift_size=shift, always_partition=True)


def our_block(window=(7, 7), shift=(3, 3), position="table", cosine=False):
    attention = Attention(8, 2, window, shift, cosine=cosine)
    return Block(8, attention, vitrel.create_position(position, vitrel.Grid(*window), 2, 4), post_norm=cosine)


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


@each(
    ("grid", "window", "shift", "kind"),
    [
        *(((n, 10), (7, 7), (3, 3), SwinTransformerBlock) for n in (*LEAKING, *SOUND)),
        ((26, 9), (7, 4), (3, 2), SwinTransformerV2Block),
        ((11, 13), (5, 7), (2, 3), SwinTransformerV2Block),
        ((12, 20), (7, 7), (0, 0), SwinTransformerBlock),
    ],
)
def test_what_timm_sees(grid, window, shift, kind):
    """Rows, columns and padding are those of the loops over all tokens."""
    sees, padding = timm_truth(grid, window, shift)
    leaks = find_leaks(call_of(timm_block(grid, window, shift, kind), grid))
    for axis, rows in enumerate((leaks.rows, leaks.columns)):
        assert rows == tuple(sorted({a for a, _ in wrapped(sees, shift, axis)}))
    leaking = {q for q, keys in sees.items() if any((q[i] < shift[i]) != (k[i] < shift[i]) for k in keys for i in (0, 1))}
    assert {tuple(at) for at in leaks.across.nonzero().tolist()} == leaking
    assert {tuple(at) for at in leaks.padding.nonzero().tolist()} == padding


def our_truth(grid, window, shift):
    """{(y, x): set of tokens}: pad, then cut at shift, shift + window, ...; nothing meets across a border."""
    parts = [[0 if n <= m else (i - s) // m for i in range(n)] for n, m, s in zip(grid, window, shift, strict=True)]
    tokens = list(itertools.product(*(range(n) for n in grid)))
    place = {token: tuple(part[i] for part, i in zip(parts, token, strict=True)) for token in tokens}
    return {q: {k for k in tokens if place[k] == place[q]} for q in tokens}


def seen_by(call):
    """{(y, x): set of tokens that the token there sees}."""
    w, found = call.grid.w, {}
    visible = torch.ones(call.tokens.shape + call.tokens.shape[1:]).bool() if call.visible is None else call.visible.any(1)
    for tokens, pairs in zip(call.tokens.tolist(), visible, strict=True):
        for slot, token in enumerate(tokens):
            if token >= 0:
                keys = {tokens[key] for key in pairs[slot].nonzero().flatten().tolist() if tokens[key] >= 0}
                found[divmod(token, w)] = {divmod(key, w) for key in keys}
    return found


@each("grid", [(12, 20), (9, 26), (14, 7)])
def test_all_that_a_token_sees(grid):
    assert seen_by(call_of(timm_block(grid), grid)) == timm_truth(grid, (7, 7), (3, 3))[0]


@each(
    ("grid", "position", "cosine"),
    [((8, 11), "table", False), ((12, 20), "shaw", False), ((5, 9), "rope_mixed", False), ((24, 7), "cpb", True)],
)
def test_what_ours_sees(grid, position, cosine):
    call = call_of(our_block(position=position, cosine=cosine), grid)
    leaks = find_leaks(call)
    assert not leaks.across.any() and not leaks.padding.any()
    assert seen_by(call) == our_truth(grid, (7, 7), (3, 3))


def test_a_mask_that_is_missing_is_seen():
    """The same block on a grid that windows divide leaks as soon as its mask is gone."""
    block = timm_block((14, 21))
    assert not find_leaks(call_of(block, (14, 21))).across.any()
    block.attn_mask.zero_()
    leaks = find_leaks(call_of(block, (14, 21)))
    assert leaks.rows == (0, 1, 2, 10, 11, 12, 13)
    assert not leaks.padding.any()


def test_a_mask_of_ours_that_is_missing_is_seen(monkeypatch):
    """In what the operators do, not in the layout that they should follow."""
    monkeypatch.setattr("vitrel.ops.sdpa.window_mask", lambda *args: None)
    assert find_leaks(call_of(our_block(), (14, 21))).rows == (0, 1, 2, 10, 11, 12, 13)


def test_the_token_that_sees_most_across():
    leaks = find_leaks(call_of(timm_block((12, 14)), (12, 14)))
    assert leaks.token[0] in leaks.rows and (leaks.sees == 2).any() and leaks.sees[leaks.token] == 1


def test_attention_without_windows_of_neighbors():
    call = call_of(timm_block((14, 14)), (14, 14))
    assert find_leaks(call._replace(window=None)) is None and find_leaks(call._replace(strided=True)) is None
    assert find_leaks(call._replace(grid=None)) is None
