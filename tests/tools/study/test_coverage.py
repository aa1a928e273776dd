"""The coverage that docs/concepts/statistics.md reports, in a shorter simulation of the same code."""

import functools

import pytest

from tools.study.coverage import SEEDS, World, ours, share

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
