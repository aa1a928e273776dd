"""Oracles of segments with memory, two streams and shifted scores: by hand, against torch, against each other."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

import oracles
from helpers import each
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
@pytest.mark.parametrize("length", [None, 0, 1, 2])
def test_recurrence_is_the_whole_under_the_mask(encoding, length):
    assert_allclose(recurrent(encoding, length=length), whole(encoding, length), atol=1e-12)


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


@each("order", [[5, 4, 3, 2, 1, 0], [3, 0, 5, 1, 4, 2]])
def test_an_order_is_the_identity_on_the_tokens_in_that_order(order):
    q_h, q_g, k, v, bias, _ = streams()
    sorted_inputs = [x[:, order] for x in (q_h, q_g, k, v)]
    expected = oracles.two_stream(*sorted_inputs, bias[:, order][:, :, order], range(6))
    assert_same([x[:, order] for x in oracles.two_stream(q_h, q_g, k, v, bias, order)], expected)


def test_memory_is_tokens_that_come_first_in_every_order():
    order = [3, 0, 5, 1, 4, 2]
    q_h, q_g, k, v, bias, kept = streams(memory=2)
    outputs = oracles.two_stream(q_h, q_g, k, v, bias, order, kept)
    q_h, q_g, k, v = (np.concatenate([old, x], axis=1) for old, x in zip((*kept, *kept), (q_h, q_g, k, v), strict=True))
    bias = np.concatenate([np.zeros((2, 2, 8)), bias], axis=1)
    longer = oracles.two_stream(q_h, q_g, k, v, bias, [0, 1] + [2 + token for token in order])
    assert_same(outputs, [x[:, 2:] for x in longer])
    assert (np.abs(outputs[1]).max(axis=-1) > 0).all()
