"""Estimates over seeds and images: against plain loops, and at their limits."""

import math
from itertools import combinations

import numpy as np
import pytest
from scipy import stats

from helpers import each
from vitrel.evaluate.statistics import (
    ROUNDING,
    TAIL,
    Estimate,
    estimate,
    estimate_of_means,
    holm,
    p_values,
    pooled,
    wilson,
)


def scores(seeds, images, share=0.7, seed=0, models=1):
    """Scores of models that find the same images hard."""
    rng = np.random.default_rng(seed)
    hard = rng.normal(size=images) + 0.5 * rng.normal(size=(models, images))
    return [(one + rng.normal(size=(seeds, images)) < stats.norm.ppf(share) * 1.5).astype(float) for one in hard]


def added(plus, minus):
    """The four images that are added to every seed, with the scores of both sides."""
    sides = [(0, 0), (0, 1), (1, 0), (1, 1)]
    return [sum(a for _ in plus) - sum(b for _ in minus) for a, b in sides]


@each("sides", [(1, 0), (1, 1), (2, 2)])
@each("seeds", [2, 3, 5])
def test_the_variance_is_that_of_two_way_random_effects(sides, seeds):
    """By double loops: mean squares of seeds, images and the rest; Obuchowski and Rockette's covariance of pairs of seeds."""
    given = scores(seeds, 60, models=sum(sides))
    plus, minus = given[: sides[0]], given[sides[0] :]
    found = estimate(plus, minus)
    d = [[sum(one[s][i] for one in plus) - sum(one[s][i] for one in minus) for i in range(60)] for s in range(seeds)]
    plain = [100 * value for row in d for value in row]
    assert found.mean == pytest.approx(sum(plain) / len(plain))
    d = [row + added(plus, minus) for row in d]
    n, of_seeds = 64, [sum(row) / 64 for row in d]
    of_images = [sum(row[i] for row in d) / seeds for i in range(n)]
    mean = sum(of_seeds) / seeds
    ms_seeds = n * sum((value - mean) ** 2 for value in of_seeds) / (seeds - 1)
    ms_images = seeds * sum((value - mean) ** 2 for value in of_images) / (n - 1)
    rest = sum((d[s][i] - of_seeds[s] - of_images[i] + mean) ** 2 for s in range(seeds) for i in range(n))
    ms_rest = rest / (seeds - 1) / (n - 1)
    expected = (ms_seeds + ms_images - ms_rest) / (seeds * n)
    pairs = [sum((d[a][i] - of_seeds[a]) * (d[b][i] - of_seeds[b]) for i in range(n)) / (n - 1) / n
             for a, b in combinations(range(seeds), 2)]  # fmt: skip
    assert found.shared == pytest.approx(1e4 * sum(pairs) / len(pairs)) and found.shared > 0
    assert found.variance == pytest.approx(1e4 * (expected + ROUNDING / 60**2 / seeds))
    assert found.center == pytest.approx(100 * mean)


def test_the_critical_value_is_students_or_the_normal_one_where_one_part_is_all():
    from_seeds = Estimate(0.0, 0.0, 4, 100, 8.0, 0.0)
    assert from_seeds.half() == pytest.approx(stats.t.ppf(0.975, 3) * math.sqrt(2))
    from_images = Estimate(0.0, 0.0, 4, 100, 0.0, 2.0)
    assert from_images.half() == pytest.approx(stats.norm.ppf(0.975) * math.sqrt(2))
    both = Estimate(0.0, 0.0, 4, 100, 4.0, 1.0)  # Cochran: half the weight each
    assert both.half() == pytest.approx((stats.t.ppf(0.975, 3) + stats.norm.ppf(0.975)) / 2 * math.sqrt(2))
    assert Estimate(0.0, 0.0, 1, 100, 0.0, 2.0).half() == from_images.half()


def test_one_seed_is_bonett_and_price_s_interval_of_a_paired_difference():
    a, b = np.zeros((1, 100)), np.zeros((1, 100))
    a[0, :12], b[0, 12:15] = 1, 1  # only a is right on 12, only b on 3
    found = estimate([a], [b])
    center = 9 / 104
    assert found.mean == pytest.approx(9.0) and found.center == pytest.approx(100 * center)
    half = 1.959964 * math.sqrt((17 / 104 - center**2) / 103)
    assert (found.low(), found.high()) == pytest.approx((100 * (center - half), 100 * (center + half)), rel=1e-6)


def test_no_interval_has_a_width_of_zero():
    same = np.ones((3, 40))
    assert estimate([same], [same]).high() > 3 and estimate([same]).of_share()[0] < 95 < estimate([same]).of_share()[1] == 100
    apart = np.zeros((2, 400))
    apart[0, :5], apart[1, 5:10] = 1, 1  # equally good by chance, on other images
    assert estimate([apart], [np.zeros((2, 400))]).half() > 0.5
    assert estimate([np.zeros((1, 8))], [np.ones((1, 8))]).low() == -100


def test_a_share_of_one_seed_has_wilsons_interval():
    for hits, n in ((0, 20), (7, 20), (398, 400), (400, 400)):
        right = (np.arange(n) < hits)[None]
        assert estimate([right]).of_share() == pytest.approx(wilson(hits / n, n), abs=1e-9)
        assert estimate_of_means([[100 * hits / n]], [], n).of_share() == pytest.approx(wilson(hits / n, n), abs=1e-9)
    several = np.stack([np.arange(400) < hits for hits in (350, 360, 340)])
    low, high = estimate([several]).of_share()
    assert low < wilson(350 / 400, 400)[0] and high > wilson(350 / 400, 400)[1]


@each(
    ("hits", "n", "low", "high"),
    # Newcombe 1998, table I, method 3 (score without continuity correction)
    [(81, 263, 25.53, 36.62), (15, 148, 6.24, 16.05), (0, 20, 0.0, 16.11), (1, 29, 0.61, 17.18)],
)
def test_wilson_agrees_with_published_intervals(hits, n, low, high):
    assert wilson(hits / n, n) == pytest.approx((low, high), abs=0.005)


def test_wilson_stays_within_0_and_100_and_refuses_impossible_shares():
    for n in range(1, 300):
        assert wilson(1.0, n)[1] == 100.0 and wilson(0.0, n)[0] == 0.0
        for hits in range(0, n + 1, max(1, n // 7)):
            low, high = wilson(hits / n, n)
            assert 0 <= low <= 100 * hits / n <= high <= 100
    for share, n in ((1.2, 5), (0.5, 0)):
        with pytest.raises(ValueError, match="a share from 0 to 1 and n > 0"):
            wilson(share, n)


def test_p_values_are_the_tails_at_which_the_ends_reach_a_value():
    found = [estimate([a], [b]) for seeds in (1, 2, 3, 10) for a, b in [scores(seeds, 300, models=2, seed=seeds)]]
    for one, above, below in zip(found, p_values(found, -1.5), p_values(found, 2.5, above=False), strict=True):
        assert one.low(above) == pytest.approx(-1.5, abs=1e-4) and one.high(below) == pytest.approx(2.5, abs=1e-4)
        assert one.p_above(-1.5) == pytest.approx(above) and one.p_above(-1.5) + one.p_below(-1.5) == pytest.approx(1)
    far = Estimate(50.0, 50.0, 2, 400, 1e-3, 1e-3)
    assert 0 < far.p_above(0.0) < 1e-3 < far.p_above(49.9)


def test_holm_is_its_plain_loop():
    rng = np.random.default_rng(0)
    for p in (rng.uniform(size=7) ** 3, np.array([0.001, 0.01, 0.2, 0.012]), np.array([0.0, 0.0]), np.array([0.5])):
        left, expected = [*np.argsort(p)], {}
        while left and p[left[0]] <= TAIL / len(left):
            expected[left[0]] = TAIL / len(left)
            left.pop(0)
        expected |= {index: TAIL / len(left) for index in left}
        assert holm(p) == pytest.approx([expected[index] for index in range(len(p))])
    both = np.array([[0.001, 0.02], [0.02, 0.5]])  # families along the first axis
    assert (both <= holm(both)).tolist() == [[True, True], [False, False]] and holm([]).size == 0


def test_means_alone_are_wider_than_scores_and_take_seeds_as_they_are():
    a, b = scores(3, 400, models=2)
    paired = estimate([a], [b])
    unpaired = estimate_of_means(*([[100 * one.mean() for one in side]] for side in (a, b)), 400)
    assert unpaired.mean == pytest.approx(paired.mean) and unpaired.half() > paired.half()
    assert unpaired.between == pytest.approx(1e4 * np.var(a.mean(1) - b.mean(1), ddof=1), rel=0.02)
    double = estimate_of_means([[80.0, 82.0], [50.0, 51.0]], [[70.0, 75.0], [40.0, 44.0]], 1000)
    assert double.mean == pytest.approx((20 + 14) / 2)
    shares = [81, 50.5, 72.5, 42]
    assert double.shared == pytest.approx(sum(share * (100 - share) for share in shares) / 1000, rel=0.02)


def test_scores_may_be_any_number_from_0_to_1_and_images_may_lack_one():
    """Such as the IoU of an image; what only one side has a score for is left out."""
    rng = np.random.default_rng(0)
    a, b = rng.beta(8, 3, (2, 500)), rng.beta(8, 3, (2, 500))
    found = estimate([a], [b])
    assert found.mean == pytest.approx(100 * (a - b).mean()) and found.half() < estimate([a > 0.7], [b > 0.7]).half()
    low, high = estimate([a[:1]]).of_share()
    assert (high - low) / 2 == pytest.approx(196 * a[0].std() / math.sqrt(500), rel=0.1)
    gaps = a.copy()
    gaps[0, :100], gaps[1, 100:200] = np.nan, np.nan
    assert estimate([gaps], [b]).images == 300
    assert estimate([gaps], [b]).mean == pytest.approx(100 * (a - b)[:, 200:].mean())
    with pytest.raises(ValueError, match="no image has a score in all rows"):
        estimate([np.full((1, 3), np.nan)])


def test_many_estimates_at_once_are_those_of_one_by_one():
    a, b = (np.stack([scores(3, 50, seed=seed)[0] for seed in seeds]) for seeds in ((0, 1), (2, 3)))
    together, single = estimate([a], [b]), [estimate([x], [y]) for x, y in zip(a, b, strict=True)]
    assert together.low().tolist() == pytest.approx([one.low() for one in single])
    assert together.p_above(1.0).tolist() == pytest.approx([float(one.p_above(1.0)) for one in single])


def test_pooled_seeds_have_the_mean_square_of_models_and_seeds():
    """Of a two-way analysis of variance, with its degrees of freedom; a pair whose own variance is larger keeps it."""
    means = np.random.default_rng(0).normal(size=(5, 3))  # [models, seeds]
    pairs = [*combinations(range(5), 2)]
    own = [float(np.var(means[a] - means[b], ddof=1)) for a, b in pairs]
    found = pooled([Estimate(1.0, 1.0, 3, 100, between, 0.1) for between in own], 5)
    rest = means - means.mean(1, keepdims=True) - means.mean(0) + means.mean()
    square = (rest**2).sum() / (4 * 2)
    assert np.mean(own) == pytest.approx(2 * square) and {one.freedom for one in found} == {8}
    assert [one.between for one in found] == pytest.approx([max(one, 2 * square) for one in own])
    alone = [Estimate(1.0, 1.0, 3, 100, 2.0, 0.1)]
    assert pooled(alone, 2) == alone  # two models have nothing to share
    smallest = min(range(len(own)), key=lambda at: own[at])
    assert found[smallest].p_above() < Estimate(1.0, 1.0, 3, 100, 2 * square, 0.1).p_above()
