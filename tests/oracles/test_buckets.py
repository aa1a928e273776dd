"""T5's buckets against the published boundaries, and the defaults that tie them to the training grid."""

import math

import numpy as np
from numpy.testing import assert_allclose

import oracles
from helpers import each
from oracles.inputs import no_content


def test_published_boundaries():
    """32 buckets, 128 positions, both signs: the first distance of each bucket."""
    first = [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 23, 32, 46, 64, 91]
    for distance in range(400):
        bucket = sum(distance >= start for start in first) - 1
        assert oracles.t5_bucket(distance) == bucket
        assert oracles.t5_bucket(-distance) == (bucket + 16 if distance else 0)


@each(("num_buckets", "max_distance", "bidirectional"), [(32, 128, False), (8, 4, True), (12, 20, True)])
def test_the_formula_as_published(num_buckets, max_distance, bidirectional):
    """T5's own floating-point formula, a hair above its exact powers; it measures key minus query."""
    count = num_buckets // 2 if bidirectional else num_buckets
    exact = count // 2
    for delta in range(-300, 301):
        later = count if bidirectional and delta < 0 else 0
        distance = abs(delta) if bidirectional else max(delta, 0)
        if distance >= exact:
            log = math.log(distance / exact) / math.log(max_distance / exact) * (count - exact)
            distance = min(exact + math.floor(log + 1e-9), count - 1)
        assert oracles.t5_bucket(delta, num_buckets, max_distance, bidirectional) == later + distance


def test_defaults_follow_the_training_length():
    assert oracles.t5_axis(1) == oracles.t5_axis(1, bidirectional=False) == (1, 0)
    assert oracles.t5_axis(2) == (4, 1) and oracles.t5_axis(2, bidirectional=False) == (2, 1)
    assert oracles.t5_axis(5) == (6, 4) and oracles.t5_axis(14) == (16, 13) and oracles.t5_axis(200) == (32, 199)
    assert oracles.t5_axis(7, 32, 128) == (32, 128) and oracles.t5_axis(7, num_buckets=8) == (8, 6)
    assert oracles.t5_axis(14, max_distance=128)[0] < oracles.t5_axis(14)[0]


@each("length", [2, 3, 7, 14, 16, 24, 200])
@each("bidirectional", [True, False])
def test_every_default_bucket_is_reached_in_training_and_no_other_at_a_larger_grid(length, bidirectional):
    count, farthest = oracles.t5_axis(length, bidirectional=bidirectional)

    def reached(size):
        return {oracles.t5_bucket(delta, count, farthest, bidirectional) for delta in range(1 - size, size)}

    unused = {count // 2} if bidirectional else set()  # a later key is never at distance 0
    assert reached(length) == set(range(count)) - unused == reached(4 * length)
    per_sign = count // (2 if bidirectional else 1)
    allowed = min(16, length // 2 + 1)
    assert per_sign <= allowed and per_sign // 2 <= (length + 2) // 4
    for more in range(per_sign + 1, allowed + 1):
        assert len({oracles.t5_bucket(distance, more, farthest, False) for distance in range(length)}) < more


def test_rows_by_hand():
    """A row of 5, built for 1 x 4: three buckets per sign, those farther than 3 in the last; one bucket across."""
    logits, _ = oracles.t5(*no_content(2, 5, heads=1), trained=(1, 4), relative_attention_bias=np.arange(6.0)[:, None])
    row = [[0, 4, 5, 5, 5], [1, 0, 4, 5, 5], [2, 1, 0, 4, 5], [2, 2, 1, 0, 4], [2, 2, 2, 1, 0]]
    assert_allclose(logits[0], np.tile(row, (2, 2)))
    causal = {"bidirectional": False, "relative_attention_bias": np.arange(3.0)[:, None]}
    logits, _ = oracles.t5(*no_content(1, 4, heads=1), **causal)
    assert_allclose(logits[0], [[0, 0, 0, 0], [1, 0, 0, 0], [2, 1, 0, 0], [2, 2, 1, 0]])


def test_prefix_rows_come_last():
    logits, _ = oracles.t5(*no_content(1, 2, 1, heads=1), relative_attention_bias=np.arange(7.0)[:, None])
    assert_allclose(logits[0], [[6, 4, 4], [5, 0, 3], [5, 1, 0]])
