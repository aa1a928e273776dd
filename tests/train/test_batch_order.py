"""Batches: each index once per epoch on any number of ranks, sizes in turn, views side by side, and resuming by skipping."""

import itertools

import pytest
import torch

from vitrel.data import Shapes
from vitrel.train.batch_order import Batch, EpochOrder, Filled, Plan, evaluation_batches


def order(n=50, batch_size=4, world=1, rank=0, seed=0, repeats=1, **how):
    return EpochOrder(n, Plan(n, batch_size, world, (64, 64), seed=seed, **how), repeats, rank, world, seed)


def flat(batches):
    return list(itertools.chain(*batches))


def test_a_function_of_seed_and_epoch():
    assert sorted(draw.index for draw in flat(order(48).batches(0))) == list(range(48))
    assert order().batches(3) == order().batches(3)
    assert len({tuple(flat(order(seed=seed).batches(epoch))) for seed in range(3) for epoch in range(3)}) == 9


@pytest.mark.parametrize("world", [1, 2, 3])
def test_ranks_share_the_batches_of_one(world):
    """With the same images per batch of all ranks, any number of ranks sees the same ones."""
    whole = order(50, 12).batches(5)
    shares = [order(50, 12 // world, world, rank).batches(5) for rank in range(world)]
    assert [sorted(itertools.chain(*parts)) for parts in zip(*shares, strict=True)] == [sorted(batch) for batch in whole]
    seen = flat(flat(shares))
    assert len(seen) == len(set(seen)) == 48  # two of 50 fill no batch


def test_an_iteration_begins_where_it_is_told_to():
    sampler = order()
    sampler.start(2, 5)
    assert list(sampler) == order().batches(2)[5:] and len(sampler) == 12
    sampler.start(3)
    assert list(sampler) == order().batches(3)


def test_views_of_an_image_meet_in_a_batch():
    """Repeated augmentation: three views next to each other, over the ranks; the epoch keeps its length."""
    ranks = [order(48, 4, world=3, rank=rank, repeats=3).batches(0) for rank in range(3)]
    assert len(ranks[0]) == 4
    for parts in zip(*ranks, strict=True):
        draws = sorted(itertools.chain(*parts))
        assert [draw.repeat for draw in draws] == [0, 1, 2] * 4
        assert len({draw.index for draw in draws}) == 4
    assert len({draw.index for draw in flat(flat(ranks))}) == 16


def test_sizes_take_turns_at_the_same_tokens():
    plan = Plan(1000, 16, 2, (64, 64), [(64, 64), (32, 64), (128, 96)], seed=1)
    assert {(batch.size, batch.images) for batch in plan(0)} == {((64, 64), 16), ((32, 64), 32), ((128, 96), 5)}
    counts = [sum(batch.size == size for batch in plan(0)) for size in [(64, 64), (32, 64), (128, 96)]]
    assert max(counts) - min(counts[:2]) <= 1 and len(plan) == sum(counts)
    left = 1000 - sum(2 * batch.images for batch in plan(0))
    assert 0 <= left < 2 * 5  # what is left fills no batch
    assert plan(0) != plan(1) and sorted(plan(0)) == sorted(plan(1))
    pixels = [batch.images * batch.size[0] * batch.size[1] for batch in plan(0)]
    assert min(pixels) > 0.9 * max(pixels)


def test_draws_carry_the_size_of_their_batch():
    sampler = order(200, 8, sizes=[(64, 64), (32, 32)])
    for batch, draws in zip(sampler.plan(4), sampler.batches(4), strict=True):
        assert len(draws) == batch.images and {draw.size for draw in draws} == {batch.size}
    assert sorted(draw.index for draw in flat(sampler.batches(4))) == list(range(200))


def test_batches_that_are_mixed_stay_even():
    assert {batch.images for batch in Plan(100, 6, 1, (64, 64), [(64, 64), (80, 80)], even=True)(0)} == {6, 2}
    assert Plan(100, 6, 1, (64, 64))(0) == [Batch(6, None)] * 16


def test_what_fills_no_batch_is_refused():
    with pytest.raises(ValueError, match=r"10 training images are fewer than one batch of 12: lower data.batch_size"):
        Plan(10, 6, 2, (64, 64))
    with pytest.raises(ValueError, match=r"a batch of 2 images at 64x64 has room for less than 1 at 128x128"):
        Plan(10, 2, 1, (64, 64), [(128, 128)])


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_evaluation_is_filled_up_by_what_does_not_count(world):
    data = Shapes(10, (32, 32))
    shares = [evaluation_batches([(32, 32)] * 10, 3, rank, world) for rank in range(world)]
    assert len({str([len(batch) for batch in share]) for share in shares}) == 1
    draws, read = flat(flat(shares)), Filled(data)
    assert sorted(draw.index for draw in draws if draw.index >= 0) == list(range(10))
    for draw, (image, label) in zip(draws, read.__getitems__(draws), strict=True):
        expected = data[draw.index] if draw.index >= 0 else (torch.zeros(3, 32, 32), -1)
        assert torch.equal(image, expected[0]) and label == expected[1]
