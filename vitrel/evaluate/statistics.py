"""Means and differences of per-image scores over seeds and images: intervals and tests.

One method for every comparison, the analysis of seeds × images that studies with several readers use for readers × cases
(Obuchowski and Rockette 1995): seeds and images are both random, every seed scores the same images. For a difference of two
models, or of a model at two sizes, D_s is the mean difference of seed s over n images, and Cov the covariance of the per-image
differences of two seeds, a mean over pairs of seeds, divided by n. Then

    variance of the mean difference = Var(D_s) / S + max(0, Cov)

The first part is known from S seeds only, the second from many images. The critical value is Cochran's (1964): the mean of
Student's quantile with S - 1 degrees of freedom and the normal one, weighted by the two parts. Hillis's (2007) degrees of
freedom, usual with many readers, give intervals that are too short for 2 or 3 seeds. With one seed only Cov remains, and the
statement is about this one trained model.

Four images are added to every seed, on which the two sides score (0, 0), (0, 1), (1, 0) and (1, 1) (Agresti and Coull 1998 for
a proportion, Bonett and Price 2012 for a difference): no interval then has a width of zero. Scores may be any numbers from 0 to
1: whether an image is classified correctly, or its IoU. docs/concepts/statistics.md has the coverage of the intervals.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from vitrel.common.extras import optional_import

with optional_import():
    from scipy.special import ndtr, ndtri, stdtrit

TAIL = 0.025  # probability of error beyond each end of a 95 % interval
Z95 = 1.959963984540054
ROUNDING = 1 / 12  # variance of rounding to whole images: seeds that are equally good by chance may differ by less than one
Number = Any  # a float, or an array of floats: one for each of many estimates


@dataclass(frozen=True)
class Estimate:
    """A mean of scores over seeds and images, or a difference of such means, in points (percent of the scores' range).

    Fields may be arrays, for many estimates at once.

    Args:
        mean: the estimate.
        center: the middle of its intervals: the mean with four more images, on which the sides of a difference score (0, 0),
            (0, 1), (1, 0) and (1, 1).
        seeds: number of seeds.
        images: number of images.
        between: variance of a single seed's mean, squared points; 0 with one seed, where it is not known.
        shared: variance that all seeds have in common, because they score the same images, squared points.
        freedom: degrees of freedom of `between`, None: seeds - 1.
    """

    mean: Number
    center: Number
    seeds: int
    images: int
    between: Number
    shared: Number
    freedom: int | None = None

    @property
    def variance(self) -> Number:
        """Variance of the mean, squared points."""
        return self.between / self.seeds + self.shared

    def half(self, tail: Number = TAIL) -> Number:
        """Return the distance of an interval's end from its center, in points; `tail` is the probability beyond this end."""
        return self._critical(tail) * np.sqrt(self.variance)

    def _critical(self, tail: Number) -> Number:
        return _critical(self.seeds, self.between / self.seeds / self.variance, tail, self.freedom)

    def low(self, tail: Number = TAIL) -> Number:
        """Return the lower end of the interval, in points, at least -100; `tail` as in `half`."""
        return np.maximum(self.center - self.half(tail), -100.0)

    def high(self, tail: Number = TAIL) -> Number:
        """Return the upper end of the interval, in points, at most 100; `tail` as in `half`."""
        return np.minimum(self.center + self.half(tail), 100.0)

    def p_above(self, value: float = 0.0) -> Number:
        """Return the one-sided p-value of the hypothesis that the true value is at most `value`, in points."""
        return self._tail_at(self.center - value)

    def p_below(self, value: float = 0.0) -> Number:
        """Return the one-sided p-value of the hypothesis that the true value is at least `value`, in points."""
        return self._tail_at(value - self.center)

    def of_share(self) -> tuple[float, float]:
        """Return the interval (low, high) of a mean of scores, in percent: Wilson's (1927), of the effective number of images.

        That is the number whose sampling alone would give this variance; with one seed and scores 0 or 1 it is `images`.
        """
        center, critical = self.center / 100, float(self.half() / np.sqrt(self.variance))
        effective = self.images / (self.images + 3) * center * (1 - center) / (self.variance / 1e4)
        return wilson(min(max(self.mean / 100, 0.0), 1.0), float(effective), critical)

    def _tail_at(self, distance: Number) -> Number:
        """Return the `tail` at which `half` is `distance`, in points; it is above 0.5 for a negative distance."""
        target = np.abs(distance) / np.sqrt(self.variance)
        if self.seeds == 1:
            return ndtr(-distance / np.sqrt(self.variance))
        low, high = np.full(np.shape(target), math.log(1e-18)), np.full(np.shape(target), math.log(0.5))
        for _ in range(32):
            middle = (low + high) / 2
            inside = self._critical(np.exp(middle)) > target
            low, high = np.where(inside, middle, low), np.where(inside, high, middle)
        return np.where(np.asarray(distance) < 0, 1 - np.exp(high), np.exp(high))


def estimate(plus: Sequence[np.ndarray], minus: Sequence[np.ndarray] = ()) -> Estimate:
    """Return the estimate, in points, of the sum of `plus` minus that of `minus`: arrays of scores [seeds, images], 0 to 1.

    The arrays have the same seeds and the same images. NaN: no score; an image that lacks one is left out. Arrays may have
    leading dimensions, [..., seeds, images], for many estimates; these must not have NaN. ValueError where no image has scores.
    """
    scores = sum(plus[1:], np.asarray(plus[0], float)) - sum(minus)
    if scores.ndim == 2 and math.isnan(scores.sum()):
        scores = scores[:, ~np.isnan(scores).any(0)]
    seeds, images = scores.shape[-2:]
    if not images:
        raise ValueError("no image has a score in all rows: there is nothing to compare")
    added = np.array([0.0, len(plus), -len(minus), len(plus) - len(minus)])
    of_seeds, single = _mean_and_variance(scores, added)  # [..., S]
    center, shared = _mean_and_variance(scores.mean(-2), added)  # of the mean over seeds; with one seed, all of it
    between = np.zeros(center.shape)
    if seeds > 1:
        between = of_seeds.var(-1, ddof=1) + ROUNDING / images**2
        shared = np.maximum((seeds * shared - single.mean(-1)) / (seeds - 1), 0.0)
    return Estimate(100 * scores.mean((-2, -1)), 100 * center, seeds, images, 1e4 * between, 1e4 * shared)


def _mean_and_variance(scores: np.ndarray, added: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean of scores [..., images] and of further ones, `added` [n], and the variance of this mean: [...] each."""
    n = scores.shape[-1] + len(added)
    mean = (scores.sum(-1) + added.sum()) / n
    squares = np.einsum("...i,...i->...", scores, scores) + (added**2).sum()
    return mean, (squares / n - mean**2) / (n - 1)


def estimate_of_means(plus: Sequence[Sequence[float]], minus: Sequence[Sequence[float]], images: int) -> Estimate:
    """Return the estimate of `estimate` from means over `images` images alone: of each array one per seed, in percent.

    The covariance of the images' scores is then unknown: the variance that seeds have in common is taken as that of independent
    samples of images, one for every mean, which is an upper bound where scores are not negatively correlated.
    """
    sides = [*plus, *minus]
    by_seed = [sum(given[: len(plus)]) - sum(given[len(plus) :]) for given in zip(*sides, strict=True)]
    n, mean = images + 4, sum(by_seed) / len(by_seed)
    center = (images * mean + 200 * (len(plus) - len(minus))) / n
    shares = [(images * sum(side) / len(side) / 100 + 2) / n for side in sides]
    shared = 1e4 * sum(share * (1 - share) for share in shares) / (images + 3)
    between = float(np.var(by_seed, ddof=1)) + 1e4 * ROUNDING / images**2 if len(by_seed) > 1 else 0.0
    return Estimate(mean, center, len(by_seed), images, between, shared)


def wilson(share: float, n: float, critical: float = Z95) -> tuple[float, float]:
    """Return the score interval (low, high) of a share of n, in percent (Wilson 1927); 95 % by default.

    Unlike the normal approximation it has a positive width at 0 and 1. ValueError unless 0 <= share <= 1 and n > 0.
    """
    if not 0 <= share <= 1 or n <= 0:
        raise ValueError(f"wilson interval needs a share from 0 to 1 and n > 0, got {share=}, {n=}")
    z2 = critical * critical
    center = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = critical / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    # exactly 0 and 100 at the ends, where rounding could exclude the share itself from the interval
    return 100 * (center - half) * (share > 0), 100.0 if share == 1 else 100 * (center + half)


def holm(p: Number) -> np.ndarray:
    """Return the level at which Holm's (1979) procedure tests each hypothesis of a family, which it rejects if p <= level.

    The probability of any false rejection in the family is at most TAIL, 0.025.

    Args:
        p: p-values [..., hypotheses].
    """
    p = np.asarray(p, float)
    if not p.size:
        return p
    order, m = np.argsort(p, -1), p.shape[-1]
    steps = TAIL / (m - np.arange(m))
    ordered = np.take_along_axis(p, order, -1)
    kept = ordered > steps
    first = np.where(kept.any(-1), kept.argmax(-1), m - 1)  # the step at which the procedure ends
    levels = np.empty_like(p)
    np.put_along_axis(levels, order, np.minimum(steps, steps[first][..., None]), -1)
    return levels


def p_values(estimates: Sequence[Estimate], value: float = 0.0, above: bool = True) -> np.ndarray:
    """Return the p-value of each estimate, [estimates]: `p_above` of `value` points, or with above=False `p_below`."""
    found = np.empty(len(estimates))
    for seeds, freedom in {(one.seeds, one.freedom) for one in estimates}:
        at = [index for index, one in enumerate(estimates) if (one.seeds, one.freedom) == (seeds, freedom)]
        names = ("mean", "center", "between", "shared")
        arrays = {name: np.array([getattr(estimates[index], name) for index in at]) for name in names}
        together = Estimate(seeds=seeds, images=0, freedom=freedom, **arrays)
        found[at] = together.p_above(value) if above else together.p_below(value)
    return found


def pooled(estimates: Sequence[Estimate], models: int) -> list[Estimate]:
    """Return `estimates`, the differences of all pairs of several models, with a variance over seeds taken from all of them.

    The mean of `between` over the pairs is, but for a constant, the mean square of the interaction of models and seeds, which
    has (models - 1) * (seeds - 1) degrees of freedom. Where the models differ in how much their seeds vary, it would be too
    small for some pairs: a pair of its own larger variance keeps that. Estimates of one seed or two models are not changed.
    """
    if models < 3 or not estimates or estimates[0].seeds < 2:
        return [*estimates]
    together = float(np.mean([one.between for one in estimates]))
    freedom = (models - 1) * (estimates[0].seeds - 1)
    return [replace(one, between=max(float(one.between), together), freedom=freedom) for one in estimates]


def _critical(seeds: int, weight: Number, tail: Number, freedom: int | None = None) -> Number:
    """Return Cochran's critical value: a mean of the quantiles of Student and of the normal distribution.

    With one seed it is the normal quantile.

    Args:
        seeds: number of seeds.
        weight: weight of Student's quantile, the share of the variance that is known from the seeds alone.
        tail: probability beyond the value, at most 0.5.
        freedom: degrees of freedom of Student's quantile, None: seeds - 1.
    """
    normal = -ndtri(tail)
    return normal if seeds == 1 else normal + weight * (-stdtrit(freedom or seeds - 1, tail) - normal)
