"""The coverage that docs/concepts/statistics.md reports, in a shorter simulation of the same code."""

import functools

import numpy as np
import pytest

from tools.study.coverage import LOSS, SEEDS, World, draw, ours, share

RUNS = 600
share_of = functools.cache(share)


@pytest.mark.slow(seconds=8)
@pytest.mark.parametrize("world", [World(0.0, 0.5), World(5.0, 0.5)])
def test_intervals_contain_what_they_should_with_any_number_of_seeds(world):
    """Where seeds do not vary, or vary much more than images do."""
    found = [share_of(ours, world, seeds, RUNS) for seeds in SEEDS]
    assert all(0.93 <= one <= 0.98 for one in found), found
    alarm = [share_of(ours, world, seeds, RUNS, 0.0, False) for seeds in SEEDS[1:]]  # of equal models
    assert all(0.02 <= one <= 0.07 for one in alarm), alarm


@pytest.mark.slow(seconds=4)
def test_more_seeds_find_more():
    power = [share(ours, World(1.0, 0.5), seeds, 400, LOSS, covers=False) for seeds in SEEDS[1:]]
    assert power == sorted(power) and power[0] < 0.3 < 0.8 < power[-1]


def test_the_simulated_worlds_are_what_they_are_called():
    rng = np.random.default_rng(0)
    scores, expected = draw(rng, World(4.0, 0.5), 100, 10, LOSS)
    accuracy = 100 * scores.mean(-1)  # [models, runs, seeds]
    assert expected[:, 0] == pytest.approx(accuracy.mean((1, 2)), abs=0.7)
    assert expected[0, 0] - expected[1, 0] == pytest.approx(LOSS, abs=0.7)
    assert accuracy[0].std(-1, ddof=1).mean() == pytest.approx(4.0, abs=0.6)
    trained, of_models = draw(rng, World(4.0, 0.5), 300, 1)
    assert np.corrcoef(100 * trained.mean((2, 3))[0], of_models[0])[0, 1] > 0.8
