"""Oracles of directional heads: which keys are visible, and the penalty of distance."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

import oracles
from helpers import each
from oracles.inputs import assert_same, no_content, qkv

ABOVE, BELOW, LEFT, RIGHT = range(4)


def test_xpos_without_decay_is_a_masked_axial_rope():
    rotated = oracles.rope_axial(*qkv(3, 4, heads=5))[0]
    logits, output = oracles.xpos(*qkv(3, 4, heads=5), gamma=1e12)
    at = oracles.positions(3, 4)
    for n, i, j in np.ndindex(logits.shape):
        dy, dx = oracles.offset(at[i], at[j])
        seen = (dy >= 0, dy <= 0, dx >= 0, dx <= 0)[n % 4]
        assert logits[n, i, j] == (pytest.approx(rotated[n, i, j]) if seen else -np.inf)
    assert np.isfinite(output).all()


def test_xpos_decay_by_hand():
    """Channel 1 is the slow pair of y, zeta (1/2 + 0.4) / 1.4; channel 2 the fast pair of x, zeta 0.4 / 1.4."""
    slow, fast = (np.eye(8)[None, [c] * 12].repeat(4, axis=0) for c in (1, 2))
    logits = oracles.xpos(slow, slow, slow, 3, 4)[0] * 8**0.5
    corner, opposite = 0, 11
    assert logits[BELOW, corner, opposite] == pytest.approx((0.9 / 1.4) ** (2 / 2) * np.cos(0.2))
    assert logits[RIGHT, corner, opposite] == pytest.approx((0.9 / 1.4) ** (3 / 2) * np.cos(0.2))
    assert logits[ABOVE, opposite, corner] == logits[BELOW, corner, opposite]
    assert logits[LEFT, opposite, corner] == logits[RIGHT, corner, opposite]
    assert np.isneginf(logits[[ABOVE, LEFT], corner, opposite]).all()
    logits = oracles.xpos(fast, fast, fast, 3, 4, scale_base=6.0)[0] * 8**0.5
    assert logits[BELOW, corner, opposite] == pytest.approx((0.4 / 1.4) ** (2 / 6) * np.cos(3))
    assert_same(oracles.xpos(*qkv(3, 4), trained=(5, 12)), oracles.xpos(*qkv(3, 4), scale_base=6.0))


def test_xpos_with_prefix_tokens():
    """A prefix token is neither rotated nor scaled; its partner is, counted from the middle of the grid."""
    plain, logits = (rule(*qkv(2, 3, 2, heads=4))[0] for rule in (oracles.none, oracles.xpos))
    assert_allclose(logits[:, :2, :2], plain[:, :2, :2])
    assert np.isfinite(logits[:, :2]).all() and np.isfinite(logits[:, :, :2]).all()
    slow = np.eye(8)[None, [1] * 13].repeat(5, axis=0)  # rotates by y / 10, zeta 0.9 / 1.4
    logits = oracles.xpos(slow, slow, slow, 3, 4, 1)[0] * 8**0.5
    last, zeta, cosine = 12, 0.9 / 1.4, np.cos(0.2)
    of_heads = [zeta**0.5, zeta**-0.5, zeta**0.75, zeta**-0.75, zeta**0.5]  # y is 1 from the middle, x 1.5, scale_base 2
    assert_allclose(logits[:, last, 0], np.array(of_heads) * cosine)
    assert_allclose(logits[:, 0, last], cosine / np.array(of_heads))


def seen(fov, *delta):
    return [view(*delta) for view in oracles.views(fov)]


INSIDE = {  # an offset well within the view of each head
    180: [],
    90: [(1, 1), (1, -1), (-1, 1), (-1, -1)],
    45: [(2, 1), (-2, 1), (1, 2), (1, -2), (2, -1), (-2, -1), (-1, 2), (-1, -2)],
}


def test_order_of_the_views():
    assert seen(180, 1, 3) == [True, False, True, False] and seen(180, -1, -3) == [False, True, False, True]
    for fov, inside in INSIDE.items():
        for n, delta in enumerate(inside):
            assert [head for head, sees in enumerate(seen(fov, *delta)[: len(inside)]) if sees] == [n]
    wedges = [seen(90, *delta)[4:] for delta in ((2, 1), (-2, 1), (1, 2), (1, -2))]
    assert wedges == np.eye(4, dtype=bool).tolist()


def test_sizes_of_the_views():
    """Of the 25 offsets of at most 2: half planes, quadrants, wedges, half wedges, borders included."""
    offsets = [(dy, dx) for dy in range(-2, 3) for dx in range(-2, 3)]
    assert np.sum([seen(180, *delta) for delta in offsets], axis=0).tolist() == [15] * 4
    assert np.sum([seen(90, *delta) for delta in offsets], axis=0).tolist() == [9] * 8
    assert np.sum([seen(45, *delta) for delta in offsets], axis=0).tolist() == [6] * 8
    for fov in (180, 90, 45):
        assert all(seen(fov, 0, 0)) and all(any(seen(fov, *delta)) for delta in offsets)


@each(
    ("heads", "fov", "expected"),
    [
        (1, 90, [1 / 4]),
        (2, 90, [1 / 2, 1 / 4]),
        (6, 180, [1 / 2] * 4 + [1 / 4, 1 / 16]),
        (12, 90, [1 / 2] * 8 + [1 / 4, 1 / 16, 1 / 64, 1 / 256]),
        (16, 180, [1 / 2] * 4 + [1 / 4] * 4 + [1 / 8] * 4 + [1 / 4, 1 / 16, 1 / 64, 1 / 256]),
    ],
)
def test_slopes_of_lookhere(heads, fov, expected):
    logits, _ = oracles.lookhere(*no_content(5, 5, heads=heads), fov=fov, slope=3.0)
    middle = logits[:, 12].reshape(heads, 5, 5)
    assert_allclose([-line[np.isfinite(line)].min() / (3 * 8**0.5) for line in middle], expected)
    assert (middle[:, 2, 2] == 0).all()
    hidden = np.isneginf(middle).any(axis=(1, 2))
    assert hidden.tolist() == [True] * (heads - max(1, min(4, heads // 3))) + [False] * max(1, min(4, heads // 3))


def test_lookhere_never_hides_prefix_tokens():
    plain, logits = (rule(*qkv(2, 3, 2, heads=12))[0] for rule in (oracles.none, oracles.lookhere))
    assert_allclose(logits[:, :2], plain[:, :2])
    assert_allclose(logits[:, :, :2], plain[:, :, :2])
    up_left = logits[0, 2:, 2:]
    assert np.isfinite(up_left[5]).all() and np.isneginf(up_left[0, 1:]).all() and np.isfinite(up_left[0, 0])
