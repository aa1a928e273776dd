"""The coverage that docs/concepts/statistics.md reports, in a shorter simulation of the same code."""

import functools

import numpy as np
import pytest

from tools.study.coverage import SEEDS, Labels, World, of_map, ours, precision, share
from vitrel.tasks.multilabel import contributions

RUNS = 600
share_of = functools.cache(share)


@pytest.mark.slow
@pytest.mark.parametrize("world", [World(0.0, 0.5), World(5.0, 0.5)])
def test_intervals_contain_what_they_should_with_any_number_of_seeds(world):
    """Where seeds do not vary, or vary much more than images do."""
    found = [share_of(ours, world, seeds, RUNS) for seeds in SEEDS]
    assert all(0.93 <= one <= 0.98 for one in found), found
    alarm = [share_of(ours, world, seeds, RUNS, 0.0, False) for seeds in SEEDS[1:]]  # of equal models
    assert all(0.02 <= one <= 0.07 for one in alarm), alarm


def test_precision_of_the_population_is_that_of_a_large_sample():
    rng, n = np.random.default_rng(0), 400_000
    labels = np.arange(n) % 20 == 0
    found = contributions(rng.standard_normal(n) + 1.5 * labels, labels.astype(float)).mean()
    assert precision(0.05, 1.5) == pytest.approx(100 * found, abs=0.7)  # three standard deviations


@pytest.mark.slow
def test_intervals_of_mean_average_precision_hold_where_classes_have_many_images():
    mean, error, own, difference = of_map(Labels(500, 0.15, 2.5), 60)
    assert mean == pytest.approx(85.8, abs=0.1) and abs(error) < 0.7 and own > 0.8 and difference > 0.87
