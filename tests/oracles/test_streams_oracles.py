"""Oracles of segments with memory, two streams and shifted scores: by hand, against torch, against each other."""

from functools import partial

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

import oracles
from oracles.inputs import assert_same, draw, qkv
from oracles.streams import PAIRS

ROWS, W = (2, 1, 2), 3
STRIP = (sum(ROWS), W)
SIZES = [rows * W for rows in ROWS]
PARAMETERS = {
    "table": {"relative_position_bias_table": draw(0, 9 * 5, 2)},
    "log_decay": {"log_a": draw(1, 2), "log_b": draw(2, 2)},
    "rope_mixed": {"freqs": draw(3, 2, 2, 4)},
    "shaw": {name: draw(seed, 5, 8) for seed, name in enumerate(("key_h", "key_w", "value_h", "value_w"))},
    "transformer_xl": {"u": draw(4, 2, 8), "v_bias": draw(5, 2, 8), "w_r": draw(6, 2, 8, 16)},
}
each_encoding = pytest.mark.parametrize("encoding", PAIRS)


def oracle(encoding, q, k, v):
    """Return the logits of the encoding's oracle on the strip."""
    options = {"radius": 2} if encoding == "shaw" else {}
    return getattr(oracles, encoding)(q, k, v, *STRIP, **options, **PARAMETERS[encoding])


def shaw_values():
    """Return Shaw's vectors that are added to values, [H, N, N, D]."""
    at, tables = oracles.positions(*STRIP), PARAMETERS["shaw"]
    dy, dx = np.moveaxis(np.clip([[oracles.offset(i, j) for j in at] for i in at], -2, 2) + 2, -1, 0)
    return np.stack([tables["value_h"][dy] + tables["value_w"][dx]] * 2)


def whole(encoding, length=None, sizes=SIZES):
    """Return the output of the whole strip at once under the segment mask."""
    rv = shaw_values() if encoding == "shaw" else None
    return oracles.causal_by_segment(*qkv(*STRIP)[:3], lambda *x: oracle(encoding, *x)[0], sizes, length, rv)


def recurrent(encoding, **options):
    return oracles.recurrent(encoding, *qkv(*STRIP)[:3], ROWS, W, **options, **PARAMETERS[encoding])


def by_torch(q, k, v, added, mask):
    tensors = [torch.from_numpy(np.ascontiguousarray(x)) for x in (q, k, v, np.where(mask, added, -np.inf))]
    return torch.nn.functional.scaled_dot_product_attention(*tensors[:3], attn_mask=tensors[3]).numpy()


def test_segment_mask_by_hand():
    one = [[1, 0, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 0, 1, 1]]
    assert oracles.segment_mask([1, 2, 1, 1], 1).tolist() == np.array(one, bool).tolist()
    none = [[1, 0, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0], [0, 0, 0, 1]]
    assert oracles.segment_mask([1, 2, 1], 0).tolist() == np.array(none, bool).tolist()
    assert oracles.segment_mask([5]).all()
    assert (oracles.segment_mask([1] * 6) == np.tri(6, dtype=bool)).all()
    assert (oracles.segment_mask([2, 2, 3]) == oracles.segment_mask([2, 2, 3], 2)).all()


def test_masked_attention_is_torchs_and_zero_where_nothing_is_seen():
    q, k, v = draw(0, 3, 2, 5, 8)
    q, added = q[:, :3], draw(1, 2, 3, 5)
    mask = np.array([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [0, 1, 0, 0, 0]], bool)
    logits = 8**-0.5 * q @ k.transpose(0, 2, 1) + added
    output = oracles.masked_attention(logits, v, mask)
    assert_allclose(output[:, [0, 2]], by_torch(q, k, v, added, mask)[:, [0, 2]], atol=1e-12)
    assert (output[:, 1] == 0).all()
    rv = draw(2, 2, 3, 5, 8)
    assert_allclose(oracles.masked_attention(logits, v, mask, rv)[:, 2], v[:, 1] + rv[:, 2, 1])


@each_encoding
def test_one_segment_is_full_attention(encoding):
    expected = oracle(encoding, *qkv(*STRIP)[:3])[1]
    assert_allclose(whole(encoding, sizes=[sum(SIZES)]), expected, atol=1e-12)
    assert np.abs(whole(encoding) - expected).max() > 1e-2


@each_encoding
@pytest.mark.parametrize("length", [None, 0, 1, 2])
def test_recurrence_is_the_whole_under_the_mask(encoding, length):
    assert_allclose(recurrent(encoding, length=length), whole(encoding, length), atol=1e-12)


def test_without_memory_every_segment_is_alone():
    q, k, v = qkv(*STRIP)[:3]
    start, expected = 0, []
    for rows, size in zip(ROWS, SIZES, strict=True):
        part = (x[:, start : start + size] for x in (q, k, v))
        expected.append(oracles.log_decay(*part, rows, W, **PARAMETERS["log_decay"])[1])
        start += size
    assert_allclose(recurrent("log_decay", length=0), np.concatenate(expected, axis=1), atol=1e-12)


@each_encoding
def test_positions_restarted_in_each_segment_are_not_the_whole(encoding):
    """Negative control: restarted coordinates change every segment but the first, if there is memory."""
    restarted, right = recurrent(encoding, restart=True), whole(encoding)
    assert_allclose(restarted[:, : SIZES[0]], right[:, : SIZES[0]], atol=1e-12)
    for start, size in ((SIZES[0], SIZES[1]), (SIZES[0] + SIZES[1], SIZES[2])):
        assert np.abs(restarted - right)[:, start : start + size].max() > 1e-2
    assert_allclose(recurrent(encoding, restart=True, length=0), whole(encoding, 0), atol=1e-12)


def test_two_streams_by_hand():
    """Equal logits: each stream returns the mean of the values that it sees."""
    v = np.array([[[1.0, 0, 0], [0, 1, 0], [0, 0, 1]]])
    zero, no_bias, order = np.zeros_like(v), np.zeros((1, 3, 3)), [2, 0, 1]
    content, query = oracles.two_stream(zero, zero, zero, v, no_bias, order)
    assert_allclose(content[0], [[1 / 2, 0, 1 / 2], [1 / 3] * 3, [0, 0, 1]])
    assert_allclose(query[0], [[0, 0, 1], [1 / 2, 0, 1 / 2], [0, 0, 0]])
    memory = (np.zeros((1, 1, 3)), np.full((1, 1, 3), 6.0))
    content, query = oracles.two_stream(zero, zero, zero, v, np.zeros((1, 3, 4)), order, memory)
    assert_allclose(content[0, 2], [3, 3, 3.5])
    assert_allclose(query[0], [[3, 3, 3.5], [7 / 3, 2, 7 / 3], [6, 6, 6]])


def streams(tokens=6, memory=0):
    """Return q_h, q_g, k, v, position's part of the logits, and keys and values of the memory."""
    bias, kept = draw(1, 2, tokens, memory + tokens), draw(2, 2, 2, memory, 8)
    return *draw(0, 4, 2, tokens, 8), bias, kept


def test_the_identity_gives_causal_masks():
    q_h, q_g, k, v, bias, _ = streams()
    content, query = oracles.two_stream(q_h, q_g, k, v, bias, range(6))
    assert_allclose(content, by_torch(q_h, k, v, bias, np.tri(6, dtype=bool)), atol=1e-12)
    assert_allclose(query[:, 1:], by_torch(q_g, k, v, bias, np.tri(6, k=-1, dtype=bool))[:, 1:], atol=1e-12)
    assert (query[:, 0] == 0).all()


@pytest.mark.parametrize("order", [[5, 4, 3, 2, 1, 0], [3, 0, 5, 1, 4, 2]])
def test_an_order_is_the_identity_on_the_tokens_in_that_order(order):
    q_h, q_g, k, v, bias, _ = streams()
    sorted_inputs = [x[:, order] for x in (q_h, q_g, k, v)]
    expected = oracles.two_stream(*sorted_inputs, bias[:, order][:, :, order], range(6))
    assert_same([x[:, order] for x in oracles.two_stream(q_h, q_g, k, v, bias, order)], expected)


def test_a_query_stream_does_not_see_its_own_token():
    order = [3, 0, 5, 1, 4, 2]
    q_h, q_g, k, v, bias, _ = streams()
    before = oracles.two_stream(q_h, q_g, k, v, bias, order)
    k, v = k.copy(), v.copy()
    k[:, 5], v[:, 5] = draw(3, 2, 2, 8)
    content, query = (
        np.abs(a - b).max(axis=(0, 2)) > 1e-3
        for a, b in zip(oracles.two_stream(q_h, q_g, k, v, bias, order), before, strict=True)
    )
    assert sorted(np.flatnonzero(content)) == [1, 2, 4, 5]
    assert sorted(np.flatnonzero(query)) == [1, 2, 4]


def test_memory_is_tokens_that_come_first_in_every_order():
    order = [3, 0, 5, 1, 4, 2]
    q_h, q_g, k, v, bias, kept = streams(memory=2)
    outputs = oracles.two_stream(q_h, q_g, k, v, bias, order, kept)
    q_h, q_g, k, v = (np.concatenate([old, x], axis=1) for old, x in zip((*kept, *kept), (q_h, q_g, k, v), strict=True))
    bias = np.concatenate([np.zeros((2, 2, 8)), bias], axis=1)
    longer = oracles.two_stream(q_h, q_g, k, v, bias, [0, 1] + [2 + token for token in order])
    assert_same(outputs, [x[:, 2:] for x in longer])
    assert (np.abs(outputs[1]).max(axis=-1) > 0).all()


def test_the_query_stream_may_have_a_position_term_of_its_own():
    q_h, q_g, k, v, bias, _ = streams()
    other = draw(9, *bias.shape)
    content, query = oracles.two_stream(q_h, q_g, k, v, bias, [2, 0, 1, 5, 4, 3], bias_g=other)
    assert_allclose(content, oracles.two_stream(q_h, q_g, k, v, bias, [2, 0, 1, 5, 4, 3])[0])
    assert_allclose(query, oracles.two_stream(q_h, q_g, k, v, other, [2, 0, 1, 5, 4, 3])[1])


def test_relative_shift_by_hand():
    x = [[10 * i + m for m in range(5)] for i in range(3)]
    right = [[2, 3, 4], [11, 12, 13], [20, 21, 22]]
    assert oracles.relative_shift(x).tolist() == right
    assert oracles.relative_shift_2d(x, np.zeros((3, 1)), 3, 1).tolist() == right
    assert oracles.relative_shift_2d(np.zeros((3, 1)), x, 1, 3).tolist() == right
    along_h = [[100, 200, 300]] * 4
    along_w = [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]
    shifted = [[202, 203, 302, 303], [204, 205, 304, 305], [108, 109, 208, 209], [110, 111, 210, 211]]
    assert oracles.relative_shift_2d(along_h, along_w, 2, 2).tolist() == shifted


def test_shifted_scores_are_decomposed_attention():
    """Its rows are by query minus key, so they come reversed."""
    q, k, v, h, w, _ = qkv(3, 4)
    along_h, along_w = draw(0, 5, 8), draw(1, 7, 8)
    expected = oracles.decomposed(q, k, v, h, w, rel_pos_h=along_h, rel_pos_w=along_w)[0]
    shifted = [oracles.relative_shift_2d(q[n] @ along_h[::-1].T, q[n] @ along_w[::-1].T, h, w) for n in range(2)]
    assert_allclose(8**-0.5 * q @ k.transpose(0, 2, 1) + shifted, expected, atol=1e-12)


@pytest.mark.parametrize("count", [0, 1, 4, 12])
def test_partial_queries_are_attention_of_those_queries_alone(count):
    q, k, v, h, w, _ = qkv(3, 4)
    B = draw(0, 5 * 7, 2)
    full = partial(oracles.table, k=k, v=v, h=h, w=w, relative_position_bias_table=B)
    bias = full(np.zeros_like(q))[0]
    expected = oracles.attention(q[:, 12 - count :], k, v, bias=bias)
    assert_same(oracles.partial_queries(full(q), count), expected)
