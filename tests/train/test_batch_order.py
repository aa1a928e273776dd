"""Batches: each index once per epoch on any number of ranks, sizes in turn, views side by side, and resuming by skipping."""

import itertools

import pytest
import torch

from helpers import each
from vitrel.data import Shapes
from vitrel.train.batch_order import EpochOrder, Filled, evaluation_batches


def order(n=50, batch_size=4, world=1, rank=0, **how):
    return EpochOrder(n, batch_size, (64, 64), rank=rank, world=world, **how)


def sizes_of(sampler, epoch=0):
    """(number of images, their size) of every batch."""
    return [(len(batch), batch[0].size) for batch in sampler.batches(epoch)]


def flat(batches):
    return list(itertools.chain(*batches))


def test_a_function_of_seed_and_epoch():
    assert sorted(draw.index for draw in flat(order(48).batches(0))) == list(range(48))
    assert order().batches(3) == order().batches(3)
    assert len({tuple(flat(order(seed=seed).batches(epoch))) for seed in range(3) for epoch in range(3)}) == 9


@each("world", [1, 2, 3])
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
    sampler = order(1000, 16, 2, sizes=[(64, 64), (32, 64), (128, 96)], seed=1)
    batches = sizes_of(sampler)
    assert set(batches) == {(16, (64, 64)), (32, (32, 64)), (5, (128, 96))}
    counts = [sum(size == of for _, of in batches) for size in [(64, 64), (32, 64), (128, 96)]]
    assert max(counts) - min(counts[:2]) <= 1 and len(sampler) == sum(counts)
    left = 1000 - sum(2 * images for images, _ in batches)
    assert 0 <= left < 2 * 5  # what is left fills no batch
    assert batches != sizes_of(sampler, 1) and sorted(batches) == sorted(sizes_of(sampler, 1))
    pixels = [images * h * w for images, (h, w) in batches]
    assert min(pixels) > 0.9 * max(pixels)


def test_batches_that_are_mixed_stay_even():
    assert {images for images, _ in sizes_of(order(100, 6, sizes=[(64, 64), (80, 80)], even=True))} == {6, 2}
    assert sizes_of(order(100, 6)) == [(6, None)] * 16


def test_what_fills_no_batch_is_refused():
    with pytest.raises(ValueError, match=r"10 training images are fewer than one batch of 12: lower data.batch_size"):
        order(10, 6, 2)
    with pytest.raises(ValueError, match=r"a batch of 2 images at 64x64 has room for less than 1 at 128x128"):
        order(10, 2, sizes=[(128, 128)])


@each("world", [1, 2, 3, 4])
def test_evaluation_is_filled_up_by_what_does_not_count(world):
    data = Shapes(10, (32, 32))
    shares = [evaluation_batches([(32, 32)] * 10, 3, rank, world) for rank in range(world)]
    assert len({str([len(batch) for batch in share]) for share in shares}) == 1
    draws, read = flat(flat(shares)), Filled(data)
    assert sorted(draw.index for draw in draws if draw.index >= 0) == list(range(10))
    for draw, (image, label) in zip(draws, read.__getitems__(draws), strict=True):
        expected = data[draw.index] if draw.index >= 0 else (torch.zeros(3, 32, 32), -1)
        assert torch.equal(image, expected[0]) and label == expected[1]
