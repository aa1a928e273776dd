"""From the rows of an evaluation to verdicts: which model is better at which size, and at which sizes each is safe.

All comparisons are of the task's metric (top-1, mIoU), by `vitrel.evaluate.statistics`, image by image where the scores of
images are known. A statement is made only where it is shown.

reference    The row at the training size, of several the nearest, of the same model and protocol, under its first policy.
             Without it: no verdicts. A model trained at native shape has its training sizes in the native protocol only.
margin       The loss, in points, that does not matter.
safe         The whole interval of the difference to the reference lies above -margin.
loses        It lies below 0, and the size is not safe.
cannot tell  Neither.
Holm         The rows of a model in a protocol (sizes and policies) are one family: the lower ends of their intervals are at the
             levels of Holm's procedure for "safe", the upper ends at those for "loses". The probability that any row of the
             family is wrongly called safe is at most 2.5 %, and the same for loses. All comparisons of two models at a size are
             another family, whose ends err in at most 2.5 % each; their variance over seeds is that of the models together.
policy       A size is judged under the first policy in the rows. Where another policy, or another protocol at the same cost, is
             shown to be better (Holm over all of them), the model has its row in `better`.
one seed     The verdicts are about the trained model; with several seeds about models that are trained in this way.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from vitrel.common.sizes import Budget, Size, nearest_size, parse_size, parse_size_or_budget
from vitrel.evaluate.statistics import Estimate, estimate, estimate_of_means, holm, p_values, pooled
from vitrel.tasks import Row, Task, task_named

SAFE, LOSES, UNKNOWN = "safe", "loses", "cannot tell"
MARGIN = 2.0  # points
Scores = Mapping[str, np.ndarray]  # {row["key"]: score of each image [n], NaN where it could not be read}


class Sample(NamedTuple):
    """The metric of a model at one size under one policy, of all seeds, for `contrast`.

    Args:
        name: model, size and policy, for errors.
        images: number of images.
        means: {seed as text: metric in percent}.
        scores: {seed as text: scores of the images [n], 0 to 1}, None where they are not known.
    """

    name: str
    images: int
    means: dict[str, float]
    scores: dict[str, np.ndarray] | None


def task_of(row: Row) -> Task:
    """Return the task of a row, whose `metric` is the column by which models are compared."""
    return task_named(row["task"])


def main_metric(row: Row) -> float:
    """Return the metric by which the models of a row's task are compared, in percent."""
    return row[task_of(row).metric]


def sample_of(rows: Sequence[Row], scores: Scores | None = None, metric: str = "") -> Sample:
    """Return the `Sample` of rows of one model, size and policy, one row per seed.

    Args:
        scores: {key of a row: scores of its images for the metric}.
        metric: a column, in percent; "": the task's. Where a row has no value in it, the task's metric is taken.
    """
    by_seed = {str(row["seed"]): row for row in rows}
    name = f"{rows[0]['label']} at {rows[0]['img_size']} ({rows[0]['policy']})"
    means = {seed: row[metric] if known_number(row.get(metric)) else main_metric(row) for seed, row in by_seed.items()}
    known = scores is not None and all(row.get("key") in scores for row in by_seed.values())
    found = {seed: scores[row["key"]] for seed, row in by_seed.items()} if known else None
    return Sample(name, int(min(row["n"] for row in by_seed.values())), means, found)


def contrast(plus: Sequence[Sample], minus: Sequence[Sample] = ()) -> Estimate:
    """Return the estimate, in points, of the sum of the means of `plus` minus that of `minus`.

    Samples are paired by seed, over the seeds that all have, or where every one has a single seed. Images are paired where all
    have scores; else `estimate_of_means` gives a wider interval. ValueError where no seed is common to all.
    """
    sides = [*plus, *minus]
    common = [seed for seed in sides[0].means if all(seed in side.means for side in sides)]
    if not common and any(len(side.means) > 1 for side in sides):
        raise ValueError(f"no seed in common between {' and '.join(side.name for side in sides)}")
    scores = [[side.scores[seed] for seed in common or side.scores] for side in sides if side.scores is not None]
    if len(scores) == len(sides):
        arrays = [*map(np.stack, scores)]
        return estimate(arrays[: len(plus)], arrays[len(plus) :])
    means = [[side.means[seed] for seed in common or side.means] for side in sides]
    return estimate_of_means(means[: len(plus)], means[len(plus) :], min(side.images for side in sides))


def known_number(value: Any) -> bool:
    """Return whether a value is a number other than NaN."""
    return isinstance(value, (int, float, np.number)) and value == value


def by_area(size: str) -> tuple[int, int]:
    """Return the sort key (area, height) of a size such as "64x96"."""
    height, width = parse_size(size)
    return height * width, height


def train_sizes_of(row: Row) -> list[Size | Budget]:
    """Return the sizes, or for a model trained at native shape the budgets, that the column train_size of a row lists."""
    return [parse_size_or_budget(text) for text in row["train_size"].split()]


def is_training(row: Row) -> bool:
    """Return whether a row is at a training size: in pixels in any protocol, or at a training budget of the native protocol."""
    trained = train_sizes_of(row)
    if isinstance(trained[0], Budget):
        return known_number(row.get("budget")) and Budget(int(row["budget"])) in trained
    return parse_size(row["img_size"]) in trained


# Rows over seeds


def protocol_names(rows: Sequence[Row]) -> Callable[[Row], str]:
    """Return a function from a row to the name of its protocol in tables.

    The names have the token budget ("native, 200 tokens") if `rows` have several budgets of a model at one size.
    """

    places = {(row["label"], row["img_size"], row["budget"]) for row in rows if known_number(row.get("budget"))}
    several = len(places) > len({place[:2] for place in places})

    def name(row: Row) -> str:
        budget = f", {row['budget']:g} tokens" if several and known_number(row.get("budget")) else ""
        return f"{row['protocol']}{budget}"

    return name


def groups_of(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Return (protocol as of `protocol_names`, rows of all seeds) per label, protocol, policy, size and translation."""
    name, groups = protocol_names(rows), defaultdict[tuple, list[Row]](list)
    for row in rows:
        groups[row["label"], name(row), row["policy"], row["img_size"], row.get("translation")].append(row)
    return [(key[1], group) for key, group in groups.items()]


def merged(protocol: str, group: Sequence[Row], scores: Scores | None = None) -> Row:
    """Return one row for a pair (`protocol`, `group`) of `groups_of`: means over seeds of numbers that differ, the largest
    peak memory, and else the first seed's columns.

    The column protocol is `protocol`. New are seeds (their number), keys (of their rows), low and high: the 95 % interval of
    the task's metric over seeds and images, of one seed Wilson's. `scores` as of `judge`.
    """
    row = group[0] | {"protocol": protocol, "seeds": len(group), "keys": [one.get("key") for one in group]}
    for name in row:
        values = [one[name] for one in group if known_number(one.get(name))]
        if len({*values}) > 1 and name not in ("seed", "seeds"):
            row[name] = max(values) if name == "peak_memory_mb" else sum(values) / len(values)
    row["low"], row["high"] = contrast([sample_of(group, scores)]).of_share()
    return row


def aggregate(rows: Sequence[Row], scores: Scores | None = None) -> list[Row]:
    """Return one row over seeds (`merged`) per group of `groups_of`, in the order of `_in_order`."""
    return _in_order([merged(protocol, group, scores) for protocol, group in groups_of(rows)])


def _in_order(rows: Sequence[Row]) -> list[Row]:
    """Return rows sorted by model and protocol in the order of their first row, then by policy and area of the image."""
    labels, protocols = ([*dict.fromkeys(row[name] for row in rows)] for name in ("label", "protocol"))

    def place(row: Row) -> tuple:
        return labels.index(row["label"]), protocols.index(row["protocol"]), row["policy"], by_area(row["img_size"])

    return sorted(rows, key=place)


def with_retention(rows: Sequence[Row]) -> list[Row]:
    """Return copies of the rows of all seeds with the column retention.

    It is the metric divided by that at the nearest training size of the same model, seed, protocol and translation; NaN without
    such a row, or where its metric is 0.
    """
    same = ("label", "seed", "protocol", "translation")
    references: dict[tuple, dict[Size, float]] = defaultdict(dict)
    for row in rows:
        if is_training(row):
            references[tuple(row.get(name) for name in same)].setdefault(parse_size(row["img_size"]), main_metric(row))
    found = []
    for row in rows:
        at = references.get(tuple(row.get(name) for name in same))
        trained = at[nearest_size(parse_size(row["img_size"]), at)] if at else 0.0
        found.append(row | {"retention": round(main_metric(row) / trained, 4) if trained else math.nan})
    return found


# Verdicts


@dataclass
class Model:
    """The verdicts on a model, in one protocol: the first that has a row at a training size, or else the first.

    Args:
        label: name of the model in tables.
        protocol: name of the protocol.
        used: {size: the row that the size is judged by, that of the first policy}, in the order of area.
        better: {size: the most accurate row of another policy or protocol that is shown to be better there}.
        others: labels of the models that it is compared with.
        ahead: {size: points to the next best model}, where it is shown to be better than all others.
        behind: {size: (label of the best of the models shown to be better, points)}.
        level: other sizes at which it is compared.
    """

    label: str
    protocol: str
    used: dict[str, Row]
    better: dict[str, Row]
    others: list[str] = field(default_factory=list)
    ahead: dict[str, float] = field(default_factory=dict)
    behind: dict[str, tuple[str, float]] = field(default_factory=dict)
    level: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Judged:
    """The verdicts on an evaluation.

    Args:
        rows: rows over seeds (`merged`), with the columns difference, difference_low, difference_high (to the training size,
            points), verdict ("safe", "loses", "cannot tell", or "" where there is nothing to compare), gains (whether it is
            shown to be better than the training size), used (whether the size is judged by it), and best (whether it is shown
            to be better than every other model).
        models: by label.
        margin: loss in points that does not matter.
        task: of the rows.
        unused: number of images of the data that were left out by the limit on their number.
        moved: rows over seeds of images with translated content, without verdicts.
    """

    rows: list[Row]
    models: dict[str, Model]
    margin: float
    task: Task
    unused: int = 0
    moved: list[Row] = field(default_factory=list)


class Place(NamedTuple):
    """A model at one size in a protocol under a policy: its row over seeds (`merged`), and the `Sample` of its seeds."""

    row: Row
    sample: Sample


Used = dict[str, Place]  # {size: place that it is judged by}, by area


def judge(rows: Sequence[Row], scores: Scores | None = None, margin: float = MARGIN, unused: int = 0) -> Judged:
    """Return every row over seeds with its verdict, and the verdicts on every model.

    Args:
        rows: of an evaluation, one per seed; they are not changed.
        scores: {key of a row: scores of its images, whose mean is the metric / 100}; None: intervals are from the means alone.
        margin: the loss that does not matter, in points.
        unused: see `Judged`.

    Raises:
        ValueError: there are no rows, or the margin is not above 0.
    """
    moved, rows = ([row for row in rows if bool(row.get("translation")) == is_moved] for is_moved in (True, False))
    if not rows:
        raise ValueError("there are no rows to judge: evaluate first")
    if not margin > 0:
        raise ValueError(f"the margin is a loss in points and must be above 0, got {margin:g}")
    families: dict[str, dict[str, list[Place]]] = defaultdict(lambda: defaultdict(list))  # by label and protocol
    for protocol, group in groups_of(rows):
        place = Place(merged(protocol, group, scores), sample_of(group, scores))
        families[place.row["label"]][protocol].append(place)
    models, compared = dict[str, Model](), dict[str, Used]()
    for label, of_label in families.items():
        for family in of_label.values():
            _add_verdicts(family, margin)
        trained = (name for name, family in of_label.items() if any(is_training(place.row) for place in family))
        protocol = next(trained, next(iter(of_label)))
        own = sorted((place for place in of_label[protocol] if place.row["used"]), key=lambda one: by_area(one.row["img_size"]))
        used = compared[label] = {place.row["img_size"]: place for place in own}
        better = _better(used, [place for family in of_label.values() for place in family])
        models[label] = Model(label, protocol, {size: place.row for size, place in used.items()}, better)
    _compare(models, compared)
    judged = [place.row for of_label in families.values() for family in of_label.values() for place in family]
    return Judged(_in_order(judged), models, margin, task_of(rows[0]), unused, aggregate(moved, scores))


def _add_verdicts(family: Sequence[Place], margin: float) -> None:
    """Set the columns of `Judged.rows` in the rows of one model and protocol, in place, against the nearest training size.

    Each of safe, loses and gains is one family of tests over the rows (Holm), which also sets the ends of the intervals. The
    column best is False until `_compare`. Without a row at a training size there are no differences and verdicts.
    """
    firsts: dict[Size, Place] = {}
    for place in family:
        first = firsts.setdefault(parse_size(place.row["img_size"]), place)
        nothing = dict.fromkeys(("difference", "difference_low", "difference_high"), math.nan)
        place.row.update(nothing, verdict="", gains=False, used=first is place, best=False)
    references = {size: place for size, place in firsts.items() if is_training(place.row)}
    others = [place for place in family if place not in references.values()]
    if not references or not others:
        return
    nearest = [references[nearest_size(parse_size(place.row["img_size"]), references)] for place in others]
    found = [contrast([place.sample], [reference.sample]) for place, reference in zip(others, nearest, strict=True)]
    safe, loses, gains = p_values(found, -margin), p_values(found, above=False), p_values(found)
    for place, one, *levels, gain in zip(others, found, holm(safe), holm(loses), gains <= holm(gains), strict=True):
        low, high = float(one.low(levels[0])), float(one.high(levels[1]))
        verdict = SAFE if low > -margin else LOSES if high < 0 else UNKNOWN
        ends = {"difference_low": low, "difference_high": high}
        place.row.update(ends, difference=float(one.mean), verdict=verdict, gains=bool(gain))


def _better(used: Used, places: Sequence[Place]) -> dict[str, Row]:
    """Return {size: the most accurate row shown to be better than that of `used`}, {size: place}; other sizes are absent.

    The rows, of `places`, are of another policy in the same protocol, or of the first policy of one that costs the same.
    """
    pairs = [
        (place, own)
        for place in places
        if (own := used.get(place.row["img_size"])) is not None
        and place is not own
        and (place.row["protocol"] == own.row["protocol"] or (place.row["used"] and _costs_the_same(place.row, own.row)))
    ]
    p = p_values([contrast([place.sample], [own.sample]) for place, own in pairs])
    shown = [place.row for (place, _), is_shown in zip(pairs, p <= holm(p), strict=True) if is_shown]
    best = {row["img_size"]: row for row in sorted(shown, key=main_metric)}  # of a size the last
    return {size: best[size] for size in used if size in best}


def _costs_the_same(row: Row, other: Row) -> bool:
    """Return whether two rows have the same multiply-adds within 1 %, or where one lacks them, the same tokens within 1 %."""
    name = "gflops" if known_number(row.get("gflops")) and known_number(other.get("gflops")) else "tokens"
    return math.isclose(row.get(name) or math.nan, other.get(name) or math.nan, rel_tol=0.01)


def _compare(models: Mapping[str, Model], used: Mapping[str, Used]) -> None:
    """Compare all pairs of models at the sizes and in the protocol that both have, as one family of tests (Holm).

    Sets others, ahead, behind and level of `models`, {label: model}, and the column best of their rows, in place. `used` is
    {label: {size: place by which it is judged}}.
    """
    pairs = [
        (size, a, b)
        for a, b in combinations(used, 2)
        if models[a].protocol == models[b].protocol
        for size in used[a]
        if size in used[b] and _comparable(used[a][size].sample, used[b][size].sample)
    ]
    found = _pooled(pairs, [contrast([used[a][size].sample], [used[b][size].sample]) for size, a, b in pairs])
    p = [p_values(found, above=above) for above in (True, False)]
    shown: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)  # (label, size): {other: 1 worse, -1 better, 0 not shown}
    for (size, a, b), above, below, level in zip(pairs, *p, holm(np.minimum(*p)), strict=True):
        order = int(above <= level) - int(below <= level)
        shown[a, size][b], shown[b, size][a] = order, -order
    for (label, size), by_other in shown.items():
        model, own = models[label], main_metric(used[label][size].row)
        accuracy = {other: main_metric(used[other][size].row) for other in models if other in by_other}
        model.others = [other for other in models if other in model.others or other in by_other]
        better = [other for other in accuracy if by_other[other] == -1]
        if better:
            best = max(better, key=accuracy.__getitem__)  # of equal ones the first
            model.behind[size] = best, accuracy[best] - own
        elif all(order == 1 for order in by_other.values()):
            model.ahead[size] = own - max(accuracy.values())
            model.used[size]["best"] = True
        else:
            model.level.append(size)


def _comparable(ours: Sample, theirs: Sample) -> bool:
    """Return whether two samples have one seed each, or two or more seeds in common, which the variance over seeds needs."""
    return len(ours.means) == len(theirs.means) == 1 or len(ours.means.keys() & theirs.means.keys()) > 1


def _pooled(pairs: Sequence[tuple[str, str, str]], found: Sequence[Estimate]) -> list[Estimate]:
    """Return the estimates `found` of pairs (size, a, b) of models, in order, each `pooled` with all of its size and seeds."""
    groups: dict[tuple[str, int], dict[tuple[str, str, str], Estimate]] = defaultdict(dict)
    for pair, one in zip(pairs, found, strict=True):
        groups[pair[0], one.seeds][pair] = one
    together: dict[tuple[str, str, str], Estimate] = {}
    for of_size in groups.values():
        labels = {label for _, *both in of_size for label in both}
        together |= zip(of_size, pooled([*of_size.values()], len(labels)), strict=True)
    return [together[pair] for pair in pairs]
