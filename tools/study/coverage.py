"""Coverage, power and false alarms of `vitrel.evaluate.statistics`, simulated for docs/concepts/statistics.md.

    python -m tools.study.coverage          # prints the tables: eight minutes on one core
    python -m tools.study.coverage --map    # those of mean average precision: a minute and a half

Two models are trained with several seeds each and evaluated on the same images. An image is classified correctly where the sum
of the model's ability, its seed's, the image's difficulty and noise of seed and image is positive; all are normal. Accuracy is
about 76 %. For mean average precision two trained models give every image a logit of each class, with a standard deviation of 1
and a mean that is higher where the image has the class; half of the deviation is that of the image, which they share.
"""

import argparse
import math
from collections.abc import Callable
from itertools import combinations
from typing import NamedTuple

import numpy as np
from scipy.special import ndtr, ndtri, stdtrit

from vitrel.common.tables import markdown
from vitrel.evaluate.statistics import TAIL, estimate, holm, p_values, pooled
from vitrel.tasks import Kept
from vitrel.tasks.multilabel import TASK

IMAGES, SEEDS = 500, (1, 2, 3, 5, 10)
DIFFICULTY, NOISE = 1.0, 0.7  # standard deviations
SCALE = math.hypot(DIFFICULTY, NOISE)
ABILITY = 0.7 * SCALE  # 76 % of the images
SLOPE = 100 * math.exp(-(0.7**2) / 2) / math.sqrt(2 * math.pi) / SCALE  # points of accuracy per unit of ability, about
LOSS = 5.0  # points, of which the power is reported


class World(NamedTuple):
    """spread: standard deviation of a model's accuracy over seeds, in points. alike: correlation of the difficulties that the
    images have for the two models.
    """

    spread: float
    alike: float


class Labels(NamedTuple):
    """images: number of them. share: of the images, that have a class. apart: mean logit of those, where others have 0."""

    images: int
    share: float
    apart: float


LABELS = tuple(Labels(images, share, apart) for images in (500, 150) for share in (0.15, 0.05) for apart in (2.5, 1.5))
CLASSES = 20
WORLDS = tuple(World(spread, alike) for alike in (0.5, 0.95) for spread in (0.0, 0.5, 1.0, 2.0, 5.0))
Interval = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]  # of scores as of `draw`: ends (low, high), [runs] each


def draw(
    rng: np.random.Generator, world: World, runs: int, seeds: int, loss: float = 0.0, models: int = 2, uneven: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores of models, float32 [models, runs, seeds, images], and their expected accuracy, percent [models, runs].

    loss: points by which all but the first model are worse, about. uneven: factor of the spread of the first model's seeds.
    With one seed the accuracy is that of the trained models.
    """
    tau, alike = world.spread / SLOPE * np.where(np.arange(models) > 0, 1.0, uneven)[:, None, None, None], world.alike
    common, own = rng.standard_normal((1, runs, 1, IMAGES)), rng.standard_normal((models, runs, 1, IMAGES))
    level = ABILITY - loss / SLOPE * (np.arange(models) > 0)
    ability = level[:, None, None, None] + tau * rng.standard_normal((models, runs, seeds, 1))
    difficulty = DIFFICULTY * (math.sqrt(alike) * common + math.sqrt(1 - alike) * own)
    right = ability + difficulty + NOISE * rng.standard_normal((models, runs, seeds, IMAGES)) > 0
    expected = ndtr(ability[..., 0, 0] / SCALE) if seeds == 1 else ndtr(level[:, None] / np.hypot(SCALE, tau[..., 0, 0]))
    return right.astype(np.float32), 100 * np.broadcast_to(expected, (models, runs))


def ours(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of the 95 % intervals of the difference of two models, which the package computes."""
    found = estimate([scores[0]], [scores[1]])
    return found.low(), found.high()


def together(
    world: World, seeds: int, runs: int, uneven: float = 1.0, loss: float = 0.0, models: int = 6
) -> tuple[float, float]:
    """Return two shares of runs with several models that pool their variance over seeds: that any two of the equally good
    models are told apart (Holm over the pairs), and that the last one, worse by `loss` points, is shown to be behind the second
    at the level of a family of 126 comparisons.
    """
    rng, chunk, alarms, shown = np.random.default_rng(seeds), min(runs, 100), 0, 0
    pairs, last = [*combinations(range(models), 2)], models - 1
    for _ in range(runs // chunk):
        scores, _ = draw(rng, world, chunk, seeds, 0.0, models, uneven)
        worse, _ = draw(rng, world, chunk, seeds, loss)  # its second model
        for at in range(chunk):
            own = [*scores[:-1, at], worse[1, at]]
            found = pooled([estimate([own[a]], [own[b]]) for a, b in pairs], models)
            p = np.minimum(p_values(found), p_values(found, above=False))
            equal = [last not in pair for pair in pairs]
            alarms += bool((p[equal] <= holm(p)[equal]).any())
            shown += bool(p[pairs.index((1, last))] <= TAIL / 126)
    return alarms / (runs // chunk * chunk), shown / (runs // chunk * chunk)


def hillis(scores: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the same with Hillis's (2007) degrees of freedom instead of Cochran's critical value."""
    found = estimate([scores[0]], [scores[1]])
    critical = ndtri(1 - TAIL)
    if found.seeds > 1:
        own = np.maximum(found.between / found.seeds, 1e-9)
        critical = stdtrit(np.minimum((found.seeds - 1) * (found.variance / own) ** 2, 1e9), 1 - TAIL)
    half = critical * np.sqrt(found.variance)
    return found.center - half, found.center + half


def bootstrap(scores: np.ndarray, draws: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Return the same by percentiles of a bootstrap that draws seeds and images with replacement."""
    rng, (seeds, images) = np.random.default_rng(0), scores.shape[2:]
    ends = []
    for one in scores[0] - scores[1]:  # [S, n]
        of_seeds = rng.multinomial(seeds, np.full(seeds, 1 / seeds), draws) / seeds
        of_images = rng.multinomial(images, np.full(images, 1 / images), draws) / images
        ends.append(np.percentile(100 * ((of_seeds @ one) * of_images).sum(1), [100 * TAIL, 100 * (1 - TAIL)]))
    low, high = np.array(ends).T
    return low, high


def share(interval: Interval, world: World, seeds: int, runs: int, loss: float = 0.0, covers: bool = True) -> float:
    """Return the share of runs whose interval contains the expected difference, or with `covers` False excludes 0."""
    rng, count, chunk = np.random.default_rng(seeds), 0, min(runs, 250)
    for _ in range(runs // chunk):
        scores, expected = draw(rng, world, chunk, seeds, loss)
        low, high = interval(scores)
        truth = expected[0] - expected[1]
        count += int(((low <= truth) & (truth <= high)).sum() if covers else ((low > 0) | (high < 0)).sum())
    return count / (runs // chunk * chunk)


def alarms(world: World, seeds: int, runs: int, sizes: int = 15) -> float:
    """Return the share of runs in which a model that is equally good at all sizes is said to lose at any of `sizes` others."""
    rng, count, chunk = np.random.default_rng(seeds), 0, min(runs, 50)
    for _ in range(runs // chunk):
        scores, _ = draw(rng, world._replace(spread=0.0) if seeds == 1 else world, chunk, seeds, models=sizes + 1)
        p = np.stack([estimate([one], [scores[0]]).p_below() for one in scores[1:]], -1)  # [runs, sizes]
        count += int((p <= holm(p)).any(-1).sum())
    return count / (runs // chunk * chunk)


def precision(share: float, apart: float) -> float:
    """Return the average precision of a class in a population of images, in percent (`Labels`)."""
    logits = np.linspace(-8, apart + 8, 20_001)
    found, others = share * ndtr(apart - logits), (1 - share) * ndtr(-logits)
    return float(100 * np.average(found / (found + others), weights=np.exp(-((logits - apart) ** 2) / 2)))


def of_map(world: Labels, runs: int) -> tuple[float, float, float, float]:
    """Return the mAP of the population, and of `runs` samples of images: mean error of the mAP; share whose interval holds that
    of the population; share whose interval of a difference does, to a model whose classes are further apart by 0.25.
    """
    rng, aparts, errors, inside = np.random.default_rng(0), (world.apart, world.apart + 0.25), [], []
    truth = [precision(world.share, apart) for apart in aparts]
    for _ in range(runs):
        labels = rng.random((world.images, CLASSES)) < world.share
        noise, scores = math.sqrt(0.5) * rng.standard_normal((3, *labels.shape)), []
        for apart, own in zip(aparts, noise[1:], strict=True):
            logits = labels * apart + noise[0] + own
            scores.append(TASK.scores(Kept({"labels": labels, "scores": logits}, np.ones(world.images, bool)), "map")[None])
        (low, high), difference = estimate(scores[:1]).of_share(), estimate(scores[:1], scores[1:])
        errors.append(100 * scores[0].mean() - truth[0])
        inside.append((low <= truth[0] <= high, difference.low() <= truth[0] - truth[1] <= difference.high()))
    return truth[0], float(np.mean(errors)), *map(float, np.mean(inside, 0))


def print_map(runs: int) -> None:
    """Print the table of mean average precision."""
    lines = []
    for world in LABELS:
        mean, error, own, difference = of_map(world, runs)
        cells = f"{mean:.1f}", f"{error:+.1f}", f"{100 * own:.1f}", f"{100 * difference:.1f}"
        lines.append([str(world.images), f"{world.images * world.share:g}", *cells])
    head = ["images", "images of a class, mean", "mAP, %", "mean error, points", "covered, %", "difference covered, %"]
    print(f"Coverage of 95 % intervals of mAP, {CLASSES} classes, {runs} samples of images:\n\n{markdown(head, lines)}")


def main(argv: list[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=4000, help="simulations for each number; default %(default)s")
    parser.add_argument("--map", action="store_true", help="mean average precision alone, with a tenth of the simulations")
    args = parser.parse_args(argv)
    runs = args.runs
    if args.map:
        print_map(runs // 10)
        return
    head = ["seeds differ by, points", "images alike", *(f"{seeds} seed{'s' if seeds > 1 else ''}" for seeds in SEEDS)]
    lines = [[*map(str, world), *(f"{100 * share(ours, world, seeds, runs):.1f}" for seeds in SEEDS)] for world in WORLDS]
    print(f"Coverage of the 95 % interval of a difference, in percent:\n\n{markdown(head, lines)}")
    others: list[tuple[str, Interval, int]] = [
        ("this", ours, runs),
        ("Hillis", hillis, runs),
        ("bootstrap", bootstrap, runs // 8),
    ]
    lines = []
    for name, interval, number in others:
        found = [[100 * share(interval, world, seeds, number) for world in WORLDS] for seeds in SEEDS[1:4]]
        lines.append([name, *(f"{min(one):.1f} to {max(one):.1f}" for one in found)])
    print(f"The same by method, lowest and highest of these rows:\n\n{markdown(['', *head[3:6]], lines)}")
    lines = []
    for world in WORLDS[1:4]:
        powers = [100 * share(ours, world, seeds, runs, LOSS, covers=False) for seeds in SEEDS[1:]]
        lines.append([*map(str, world), *(f"{power:.0f}" for power in powers)])
    print(f"A loss of {LOSS:g} points is shown, in percent of the runs:\n\n{markdown([*head[:2], *head[3:]], lines)}")
    world = World(1.0, 0.5)
    cells = [f"{100 * alarms(world, seeds, runs // 4):.1f}" for seeds in SEEDS]
    print(f'"loses" at any of 15 sizes though equally good at all, in percent of the runs:\n\n{markdown(head[2:], [cells])}')
    lines = []
    for spread in (1.0, 5.0):
        for uneven in (1.0, 3.0):
            found, _ = together(World(spread, 0.5), 3, runs // 4, uneven)
            _, power = together(World(spread, 0.5), 3, runs // 4, uneven, loss=25.0)
            lines.append([f"{spread:g}", f"{uneven:g}", f"{100 * found:.1f}", f"{100 * power:.0f}"])
    head = [
        "seeds differ by, points",
        "the first model's by a factor",
        "equal models told apart",
        "a loss of 25 points is shown",
    ]
    print(f"Six models of three seeds that pool their variance, in percent:\n\n{markdown(head, lines)}")


if __name__ == "__main__":
    main()
