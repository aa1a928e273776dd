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
policy       A size is judged under the first policy in the rows, unless another is shown better (Holm), or is safe there
             where the first is not; then under the most accurate of these.
one seed     The verdicts are about the trained model; with several seeds about models that are trained in this way.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, pairwise
from typing import Any, NamedTuple

import numpy as np

from vitrel.common.sizes import Budget, Size, nearest_size, parse_size, parse_size_or_budget
from vitrel.evaluate.policies import WINDOW_POLICIES, policy_parts
from vitrel.evaluate.statistics import Estimate, estimate, estimate_of_means, holm, needed, p_values, pooled
from vitrel.tasks import Row, Task, task_named

SAFE, LOSES, UNKNOWN = "safe", "loses", "cannot tell"
MARGIN = 2.0  # points
Scores = Mapping[str, np.ndarray]  # {row["key"]: score of each image [n], NaN where it could not be read}


class Sample(NamedTuple):
    """The accuracy of a model at one size under one policy, for `contrast`.

    Args:
        name: model, size and policy, for errors.
        seeds: as text.
        means: of each seed, percent.
        images: their number.
        scores: [seeds, images], None where they are not known.
    """

    name: str
    seeds: tuple[str, ...]
    means: tuple[float, ...]
    images: int
    scores: np.ndarray | None

    def of_seeds(self, seeds: Sequence[str]) -> "Sample":
        """Return the part of these seeds, in this order."""
        if self.seeds == tuple(seeds):
            return self
        at = [self.seeds.index(seed) for seed in seeds]
        scores = None if self.scores is None else self.scores[at]
        return self._replace(seeds=tuple(seeds), means=tuple(self.means[index] for index in at), scores=scores)


def task_of(row: Row) -> Task:
    """Return the task of a row, whose `metric` is the column by which models are compared."""
    return task_named(row["task"])


def main_metric(row: Row) -> float:
    """Return the metric by which the models of a row's task are compared, in percent."""
    return row[task_of(row).metric]


def sample_of(rows: Sequence[Row], scores: Scores | None = None, metric: str = "") -> Sample:
    """Return the sample of rows of one model, size and policy, one row per seed.

    Args:
        scores: of the metric.
        metric: a column, in percent; "": the task's. Where a row has no value in it, the task's metric is taken.
    """
    by_seed = {str(row["seed"]): row for row in rows}
    first, kept = rows[0], [*by_seed.values()]
    name = f"{first['label']} at {first['img_size']} ({first['policy']})"
    means = tuple(row[metric] if known_number(row.get(metric)) else main_metric(row) for row in kept)
    keys = [row.get("key") for row in kept]
    found = np.stack([scores[key] for key in keys]) if scores and all(key in scores for key in keys) else None
    return Sample(name, tuple(by_seed), means, int(min(row["n"] for row in kept)), found)


def contrast(plus: Sequence[Sample], minus: Sequence[Sample] = ()) -> Estimate:
    """Return the estimate of the sum of the means of `plus` minus that of `minus`.

    Samples are paired by seed, over the seeds that all have, or where every one has a single seed. Images are paired where all
    have scores; else `estimate_of_means` is wider. ValueError where no seed is common to all.
    """
    sides = [*plus, *minus]
    seeds = [seed for seed in sides[0].seeds if all(seed in side.seeds for side in sides)]
    if seeds:
        sides = [side.of_seeds(seeds) for side in sides]
    elif any(len(side.seeds) > 1 for side in sides):
        raise ValueError(f"no seed in common between {' and '.join(side.name for side in sides)}")
    arrays = [side.scores for side in sides if side.scores is not None]
    if len(arrays) == len(sides):
        return estimate(arrays[: len(plus)], arrays[len(plus) :])
    means = [side.means for side in sides]
    return estimate_of_means(means[: len(plus)], means[len(plus) :], min(side.images for side in sides))


def known_number(value: Any) -> bool:
    """Whether a value is a number other than NaN."""
    return isinstance(value, (int, float, np.number)) and value == value


def by_area(size: str) -> tuple[int, int]:
    """Sort key (area, height) of a size such as "64x96"."""
    height, width = parse_size(size)
    return height * width, height


def train_sizes_of(row: Row) -> list[Size | Budget]:
    """Return the sizes, or for a model trained at native shape the budgets, that the column train_size of a row lists."""
    return [parse_size_or_budget(text) for text in row["train_size"].split()]


def is_training(row: Row) -> bool:
    """Whether a row is at a size of training: in pixels in any protocol, or at this budget of the native protocol."""
    trained = train_sizes_of(row)
    if isinstance(trained[0], Budget):
        return known_number(row.get("budget")) and Budget(int(row["budget"])) in trained
    return parse_size(row["img_size"]) in trained


# Rows over seeds, and as curves over sizes


def protocol_names(rows: Sequence[Row]) -> Callable[[Row], str]:
    """Return the function that names the protocol of a row in a table.

    The names have the crop if any model has several crops in one protocol ("scale, crop 0.875"), and the token budget if any
    has several at one size ("native, 200 tokens").
    """

    def several(column: str, *same: str) -> bool:
        values = defaultdict(set)
        for row in rows:
            if known_number(row.get(column)):
                values[tuple(row[name] for name in same)].add(row[column])
        return any(len(found) > 1 for found in values.values())

    crops, budgets = several("crop_pct", "label", "protocol"), several("budget", "label", "img_size")

    def name(row: Row) -> str:
        crop = f", crop {row['crop_pct']:g}" if crops else ""
        budget = f", {row['budget']:g} tokens" if budgets and known_number(row.get("budget")) else ""
        return f"{row['protocol']}{crop}{budget}"

    return name


def groups_of(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Group rows over seeds: (protocol as of `protocol_names`, rows) per label, protocol, policy and size, in their order."""
    name, groups = protocol_names(rows), defaultdict[tuple, list[Row]](list)
    for row in rows:
        groups[row["label"], name(row), row["policy"], row["img_size"], row.get("translation")].append(row)
    return [(key[1], group) for key, group in groups.items()]


def merged(protocol: str, group: Sequence[Row], scores: Scores | None = None) -> Row:
    """Return the row of one group of `groups_of`: means over seeds of numbers that differ, of memory the largest.

    Its new columns are seeds (their number), keys (of their rows), low and high: the 95 % interval of the task's metric over
    seeds and images, of one seed Wilson's. Other columns are those of the first seed.
    """
    row = group[0] | {"protocol": protocol, "seeds": len(group), "keys": [one.get("key") for one in group]}
    for name in row:
        values = [one[name] for one in group if known_number(one.get(name))]
        if name == "unchanged":
            row[name] = all(values)
        elif len({*values}) > 1 and name not in ("seed", "seeds"):
            row[name] = max(values) if name == "peak_memory_mb" else sum(values) / len(values)
    row["low"], row["high"] = contrast([sample_of(group, scores)]).of_share()
    return row


def aggregate(rows: Sequence[Row], scores: Scores | None = None) -> list[Row]:
    """Aggregate rows over seeds: one row per group of `groups_of`, by model and protocol as given, policy, image area."""
    return _in_order([merged(protocol, group, scores) for protocol, group in groups_of(rows)])


def _in_order(rows: Sequence[Row]) -> list[Row]:
    labels, protocols = ([*dict.fromkeys(row[name] for row in rows)] for name in ("label", "protocol"))

    def place(row: Row) -> tuple:
        return labels.index(row["label"]), protocols.index(row["protocol"]), row["policy"], by_area(row["img_size"])

    return sorted(rows, key=place)


def curves(table: Sequence[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """Yield (label, policy, rows) of aggregated rows or of those of all seeds, a curve over sizes a model and policy.

    The rows are those of the table, in its order, of all protocols: for one curve per protocol, pass the rows of one. A policy
    that is part of a longer one, such as "none" or "keep", has no curve of its own where the label has that at other sizes
    only. A size at which policies do not differ has one row, which belongs to all curves: "none" to every policy, "keep" to
    "geometric+keep" and "clip+keep". The curve of "divisor" uses rows of "fixed" at sizes without a row of its own.
    """
    by_label: dict[str, list[Row]] = defaultdict(list)
    for row in table:
        by_label[row["label"]].append(row)
    for label, group in by_label.items():
        at: dict[str, set[tuple[str, str]]] = defaultdict(set)
        for row in group:
            at[row["policy"]].add(_at(row))
        parts = {policy: policy_parts(policy) for policy in at}
        for policy, names in parts.items():
            if any(names < larger and not at[policy] & at[other] for other, larger in parts.items()):
                continue
            fixed = {"fixed" if name in WINDOW_POLICIES else name for name in names}
            chosen: dict[tuple[str, str], str] = {}
            for covering in (names, fixed):  # of the rows at a place, that of the longest policy within this one
                fitting = sorted((one for one in parts if parts[one] <= covering), key=lambda one: -len(parts[one]))
                for one in fitting:
                    chosen = dict.fromkeys(at[one], one) | chosen
            yield label, policy, [row for row in group if chosen.get(_at(row)) == row["policy"]]


def _at(row: Row) -> tuple[str, str]:
    return row["protocol"], row["img_size"]


def with_curves(rows: Sequence[Row]) -> list[Row]:
    """Return copies of the rows of all seeds with the columns retention, best_size and <metric>_area (`curve_summary`).

    retention is the metric divided by that at the nearest training size of the same model, seed, protocol and crop, NaN without
    one. A row has the other two of the curve of its own policy, else of the only curve that includes it; empty where several
    do.
    """
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        place = tuple(str(row.get(name)) for name in ("seed", "protocol", "crop_pct", "translation"))
        groups[row["label"], place].append(row)
    columns: dict[int, Row] = {}
    for group in groups.values():
        references: dict[Size, float] = {}
        for row in group:
            if is_training(row):
                references.setdefault(parse_size(row["img_size"]), main_metric(row))
        of_curves = [(policy, curve_summary(curve), {*map(id, curve)}) for _, policy, curve in curves(group)]
        for row in group:
            trained = references[nearest_size(parse_size(row["img_size"]), references)] if references else 0.0
            retention = round(main_metric(row) / trained, 4) if trained else math.nan
            of_row = [(policy, summary) for policy, summary, members in of_curves if id(row) in members]
            own = [summary for policy, summary in of_row if policy == row["policy"]] or [summary for _, summary in of_row]
            empty = {"best_size": "", f"{task_of(row).metric}_area": math.nan}
            columns[id(row)] = {"retention": retention, **(own[0] if len(own) == 1 else empty)}
    return [row | columns[id(row)] for row in rows]


def curve_summary(curve: Sequence[Row]) -> Row:
    """Return {best_size, <metric>_area} of a curve: the smallest size with the highest metric, its mean over log2 sqrt(h w).

    The mean is the area by trapezoids divided by the width. Sizes of equal area count once, with their mean; NaN where all
    sizes have the same area.
    """
    at: dict[int, list[float]] = defaultdict(list)
    for row in curve:
        at[math.prod(parse_size(row["img_size"]))].append(main_metric(row))
    points = [(math.log2(area) / 2, sum(values) / len(values)) for area, values in sorted(at.items())]
    under = sum((right - left) * (a + b) / 2 for (left, a), (right, b) in pairwise(points))
    mean = under / (points[-1][0] - points[0][0]) if len(points) > 1 else math.nan
    best = min(curve, key=lambda row: (-main_metric(row), math.prod(parse_size(row["img_size"]))))
    return {"best_size": best["img_size"], f"{task_of(best).metric}_area": round(mean, 4)}


# Verdicts


@dataclass
class Model:
    """What is shown of a model in its first protocol, of those with a row at a training size if there are any.

    Args:
        used: {size: the row that the size is judged by}, by area.
        policies: {size: policy}, of sizes that are judged by another policy than their first.
        ahead: {size: points to the next}, where it is shown to be better than all others.
        behind: {size: (the best of those shown to be better, points)}.
        level: {size: the others that are not shown to be worse}, where none is shown to be better.
        others: the models that it is compared with.
        gains: sizes at which it is shown to be better than at the training size.
        elsewhere: {other protocol: {size: points}}, where that is shown to be better at the same cost.
    """

    label: str
    protocol: str
    used: dict[str, Row]
    policies: dict[str, str]
    ahead: dict[str, float] = field(default_factory=dict)
    behind: dict[str, tuple[str, float]] = field(default_factory=dict)
    level: dict[str, list[str]] = field(default_factory=dict)
    others: list[str] = field(default_factory=list)
    gains: list[str] = field(default_factory=list)
    elsewhere: dict[str, dict[str, float]] = field(default_factory=dict)

    def with_verdict(self, verdict: str) -> list[str]:
        """The sizes with a verdict."""
        return [size for size, row in self.used.items() if row["verdict"] == verdict]


@dataclass(frozen=True)
class Judged:
    """The verdicts on an evaluation.

    Args:
        rows: aggregated rows, with the columns difference, difference_low, difference_high (to the training size, points),
            verdict, more (how many more images would decide, if the difference stays the same; None: not known), and used
            (whether the size is judged under this policy).
        models: by label.
        margin: in points.
        task: of the rows.
        unused: number of images of the data that were left out by the limit on their number.
        moved: aggregated rows of translated content.
    """

    rows: list[Row]
    models: dict[str, Model]
    margin: float
    task: Task
    unused: int = 0
    moved: list[Row] = field(default_factory=list)


class Place(NamedTuple):
    """A model at one size under one policy: the aggregated row, the sample of its seeds, whether the policy is the first."""

    row: Row
    sample: Sample
    is_default: bool


Sizes = dict[str, dict[str, Place]]  # {size: {policy: place}}, by area; of the policies, the first in the rows is the first
Used = dict[str, Place]  # {size: place under the policy that it is judged by}


def judge(rows: Sequence[Row], scores: Scores | None = None, margin: float = MARGIN, unused: int = 0) -> Judged:
    """Return every aggregated row with its verdict, and what is shown of every model.

    Args:
        rows: of an evaluation.
        scores: of single images, whose mean is the metric / 100, by the rows' keys.
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
    places = _places(rows, scores)
    gains = _add_verdicts(places, margin)
    used: dict[str, dict[str, Used]] = defaultdict(dict)  # by label and protocol
    for ((label, protocol), sizes), chosen in zip(places.items(), _used([*places.values()]), strict=True):
        used[label][protocol] = chosen
        for size, policies in sizes.items():
            for place in policies.values():
                place.row["used"] = place is chosen[size]
    models = {}
    for label, of_label in used.items():
        trained = [name for name, sizes in of_label.items() if any(is_training(place.row) for place in sizes.values())]
        protocol = [*trained, *of_label][0]
        own = of_label[protocol]
        policies = {size: place.row["policy"] for size, place in own.items() if not place.is_default}
        models[label] = Model(label, protocol, {size: place.row for size, place in own.items()}, policies)
        models[label].gains += [size for size, place in own.items() if id(place.row) in gains]
        models[label].elsewhere |= _elsewhere(own, {name: at for name, at in of_label.items() if name != protocol})
    _compare(models, {label: used[label][model.protocol] for label, model in models.items()})
    judged = [place.row for sizes in places.values() for policies in sizes.values() for place in policies.values()]
    return Judged(_in_order(judged), models, margin, task_of(rows[0]), unused, aggregate(moved, scores))


def _places(rows: Sequence[Row], scores: Scores | None) -> dict[tuple[str, str], Sizes]:
    """{(label, protocol): sizes}, labels in the order of the rows."""
    found: dict[tuple[str, str], Sizes] = {}
    for protocol, group in groups_of(rows):
        row = merged(protocol, group, scores)
        policies = found.setdefault((row["label"], row["protocol"]), {}).setdefault(row["img_size"], {})
        policies[row["policy"]] = Place(row, sample_of(group, scores), not policies)
    return {key: {size: sizes[size] for size in sorted(sizes, key=by_area)} for key, sizes in found.items()}


def _used(models: Sequence[Sizes]) -> list[Used]:
    """For each model in a protocol the place that each size is judged by, after `_add_verdicts`; a family per model."""
    defaults = [{size: next(iter(policies.values())) for size, policies in sizes.items()} for sizes in models]
    others = [[(size, place) for size in sizes for place in [*sizes[size].values()][1:]] for sizes in models]
    gains = [
        [contrast([place.sample], [default[size].sample]) for size, place in of_model]
        for default, of_model in zip(defaults, others, strict=True)
    ]
    chosen = []
    for default, of_model, p in zip(defaults, others, _by_family(gains), strict=True):
        better: dict[str, list[Place]] = defaultdict(list)
        for (size, place), shown in zip(of_model, p <= holm(p), strict=True):
            better[size] += [place] if shown else []
        for size, place in of_model:
            if place.row["verdict"] == SAFE and default[size].row["verdict"] in (UNKNOWN, LOSES) and place not in better[size]:
                better[size].append(place)
        chosen.append({size: max(better[size], key=_preferred, default=default[size]) for size in default})
    return chosen


def _preferred(place: Place) -> tuple[bool, float]:
    """Sort key of policies: safe ones, then the most accurate."""
    return place.row["verdict"] == SAFE, main_metric(place.row)


def _add_verdicts(models: Mapping[tuple[str, str], Sizes], margin: float) -> set[int]:
    """Add the columns difference to more to the rows of every model in a protocol; a family each.

    Return the ids of the rows that are shown to be better than their reference.
    """
    families: list[list[Place]] = []
    found: list[list[Estimate]] = []
    for sizes in models.values():
        every = [place for policies in sizes.values() for place in policies.values()]
        for place in every:
            place.row.update(
                dict.fromkeys(("difference", "difference_low", "difference_high"), math.nan), verdict="", more=None
            )
        firsts = {parse_size(size): next(iter(policies.values())) for size, policies in sizes.items()}
        references = {size: place for size, place in firsts.items() if is_training(place.row)}
        if references:
            families.append([place for place in every if place not in references.values()])
            nearest = [references[nearest_size(parse_size(place.row["img_size"]), references)] for place in families[-1]]
            pairs = zip(families[-1], nearest, strict=True)
            found.append([contrast([place.sample], [reference.sample]) for place, reference in pairs])
    tests = [_by_family(found, -margin), _by_family(found, 0.0, above=False), _by_family(found)]
    better: set[int] = set()
    for places, estimates, safe, loses, gains in zip(families, found, *tests, strict=True):
        better |= {id(place.row) for place, shown in zip(places, gains <= holm(gains), strict=True) if shown}
        for place, one, *levels in zip(places, estimates, holm(safe), holm(loses), strict=True):
            low, high = float(one.low(levels[0])), float(one.high(levels[1]))
            verdict = SAFE if low > -margin else LOSES if high < 0 else UNKNOWN
            more = _more(one, margin, *levels) if verdict == UNKNOWN else None
            place.row.update(difference=float(one.mean), difference_low=low, difference_high=high, verdict=verdict, more=more)
    return better


def _by_family(families: Sequence[Sequence[Estimate]], value: float = 0.0, above: bool = True) -> list[np.ndarray]:
    """The p-values of every family, computed together."""
    p = p_values([one for family in families for one in family], value, above)
    return np.split(p, np.cumsum([len(family) for family in families])[:-1]) if families else []


def _more(one: Estimate, margin: float, safe_level: float, loses_level: float) -> int | None:
    """The number of images that would tell in addition, with the same difference."""
    loss = -float(one.center)
    # the interval has to exclude the margin, or 0: whichever is farther from the loss
    images = needed(one, *max((margin - loss, safe_level), (loss, loses_level)))
    return None if images is None else max(1, images - one.images)


def _elsewhere(own: Used, others: Mapping[str, Used]) -> dict[str, dict[str, float]]:
    """{protocol: {size: points}}, where another protocol than a model's own is shown to be better, and costs the same."""
    pairs = [
        (protocol, size, place, own[size])
        for protocol, used in others.items()
        for size, place in used.items()
        if size in own and _costs_the_same(place.row, own[size].row)
    ]
    p = p_values([contrast([there.sample], [here.sample]) for _, _, there, here in pairs])
    found: dict[str, dict[str, float]] = defaultdict(dict)
    for (protocol, size, there, here), shown in zip(pairs, p <= holm(p), strict=True):
        if shown:
            found[protocol][size] = main_metric(there.row) - main_metric(here.row)
    return found


def _costs_the_same(row: Row, other: Row) -> bool:
    """Whether two rows have the same multiply-adds; where these are not known, the same tokens."""
    name = "gflops" if known_number(row.get("gflops")) and known_number(other.get("gflops")) else "tokens"
    return math.isclose(row.get(name) or math.nan, other.get(name) or math.nan, rel_tol=0.01)


def _compare(models: Mapping[str, Model], used: Mapping[str, Used]) -> None:
    """Compare every model with every other at the sizes and in the protocol that both have, one family (Holm); fill in ahead,
    behind and level.
    """
    pairs = [
        (size, a, b)
        for a, b in combinations(used, 2)
        if models[a].protocol == models[b].protocol
        for size in used[a]
        if size in used[b] and _comparable(used[a][size], used[b][size])
    ]
    found = _pooled(pairs, [contrast([used[a][size].sample], [used[b][size].sample]) for size, a, b in pairs])
    p = [p_values(found, above=above) for above in (True, False)]
    levels = holm(np.minimum(*p))
    shown: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)  # (label, size): {other: 1 worse, -1 better, 0 not shown}
    for (size, a, b), above, below, level in zip(pairs, *p, levels, strict=True):
        order = int(above <= level) - int(below <= level)
        shown[a, size][b], shown[b, size][a] = order, -order
    for (label, size), by_other in shown.items():
        model, accuracy = models[label], {other: main_metric(used[other][size].row) for other in by_other}
        own = main_metric(used[label][size].row)
        model.others = [other for other in models if other in model.others or other in by_other]
        better = [other for other in models if by_other.get(other) == -1]
        if better:
            best = max(better, key=accuracy.__getitem__)  # of equal ones the first
            model.behind[size] = best, accuracy[best] - own
        elif all(order == 1 for order in by_other.values()):
            model.ahead[size] = own - max(accuracy.values())
        else:
            model.level[size] = [other for other in models if by_other.get(other) == 0]


def _comparable(ours: Place, theirs: Place) -> bool:
    """Whether two models have one seed each, or two or more in common: one common seed of several tells nothing about seeds."""
    seeds = [{*place.sample.seeds} for place in (ours, theirs)]
    return len(seeds[0]) == len(seeds[1]) == 1 or len(seeds[0] & seeds[1]) > 1


def _pooled(pairs: Sequence[tuple[str, str, str]], found: Sequence[Estimate]) -> list[Estimate]:
    """Estimates of pairs (size, a, b) of models, at each size with the variance over seeds that its models have together."""
    groups: dict[tuple[str, int], list[int]] = defaultdict(list)
    for at, ((size, *_), one) in enumerate(zip(pairs, found, strict=True)):
        groups[size, one.seeds].append(at)
    by_pair = [*found]
    for chosen in groups.values():
        models = len({label for index in chosen for label in pairs[index][1:]})
        for index, one in zip(chosen, pooled([found[index] for index in chosen], models), strict=True):
            by_pair[index] = one
    return by_pair
