"""Rows of several seeds become one, with an interval; rows of several sizes become curves.

`aggregate` merges the rows of the seeds of a model, `contrast` gives the estimates of `vitrel.evaluate.results.statistics` for
rows, `curves` and `with_curves` follow a model and policy over sizes.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrel.common.sizes import Budget, Size, parse_size, parse_size_or_budget
from vitrel.evaluate.policies import WINDOW_POLICIES, policy_parts
from vitrel.evaluate.results.statistics import Estimate, estimate, estimate_of_means
from vitrel.evaluate.results.table import Key, as_text, line_key, read_predictions
from vitrel.evaluate.sweep import Row
from vitrel.evaluate.tasks.base import TASKS, Predicted, task_named, task_of
from vitrel.inspect.attention import NEGLIGIBLE

MEANS = [
    *dict.fromkeys(name for task in TASKS for name in task_named(task).means),
    "retention", "infer_samples_per_sec", "attention_entropy", "attention_span", "attention_distance",
    "attention_distance_share", "position_share",
]  # fmt: skip


class Scores:
    """Scores of single images, 0 or 1 for top-1, of the rows of an evaluation whose predictions are stored.

    Args:
        predictions: by `line_key`, all of the same images; {} where none are stored.
    """

    def __init__(self, predictions: Mapping[Key, Predicted]) -> None:
        self._predictions = predictions
        self._arrays: dict[tuple[Key, str], np.ndarray] = {}

    def of(self, rows: Sequence[Row], metric: str) -> np.ndarray | None:
        """Return the scores [rows, images], NaN for unreadable images; None where a row has no predictions.

        Args:
            metric: one of `Task.metrics`.
        """
        if not self._predictions:
            return None
        keys = [line_key(row) for row in rows]
        if not all(key in self._predictions for key in keys):
            return None
        for key in keys:
            if (key, metric) not in self._arrays:
                self._arrays[key, metric] = task_of(rows[0]).scores(self._predictions[key], metric)
        return np.stack([self._arrays[key, metric] for key in keys])


NO_SCORES = Scores({})


def read_scores(folder: Path | None) -> Scores:
    """Return the scores of the predictions in an evaluation's folder; none without a folder or predictions.npz."""
    predictions = None if folder is None else read_predictions(folder)
    return NO_SCORES if predictions is None else Scores(predictions.rows)


def metric_of(row: Row, metric: str) -> float:
    """Return a metric of a row, in percent; where a model has only the data's classes, top1_among is top1."""
    value = row.get(metric, math.nan)
    return row[task_of(row).metric] if math.isnan(value) else value


def main_metric(row: Row) -> float:
    """Return the metric by which the models of a row's task are compared, in percent."""
    return row[task_of(row).metric]


class Sample(NamedTuple):
    """The accuracy of a model at one size under one policy, for `contrast`.

    Args:
        name: model, size and policy, for errors.
        seeds: as text.
        means: of each seed, percent.
        images: their number.
        scores: [seeds, images], None without predictions.
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


def sample_of(rows: Sequence[Row], scores: Scores = NO_SCORES, metric: str = "") -> Sample:
    """Return the sample of rows of one model, size and policy, one row per seed.

    Args:
        metric: of `Task.metrics`, "" the first.
    """
    metric = metric or task_of(rows[0]).metric
    by_seed = {as_text(row["seed"]): row for row in rows}
    first, kept = rows[0], [*by_seed.values()]
    name = f"{first['label']} at {first['img_size']} ({first['policy']})"
    means = tuple(metric_of(row, metric) for row in kept)
    return Sample(name, tuple(by_seed), means, int(min(row["n"] for row in kept)), scores.of(kept, metric))


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


def groups_of(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    """Group rows over seeds: (protocol as of `protocol_names`, rows) per label, protocol, policy and size, in their order."""
    name = protocol_names(rows)
    groups: dict[tuple, list[Row]] = defaultdict(list)
    protocols = {}
    for row in rows:
        protocol = name(row)
        key = (row["label"], protocol, row["policy"], row["img_size"], None if is_missing(row["crop_pct"]) else row["crop_pct"])
        groups[key].append(row)
        protocols[key] = protocol
    return [(protocols[key], group) for key, group in groups.items()]


def aggregate(rows: Sequence[Row], scores: Scores = NO_SCORES) -> list[Row]:
    """Aggregate rows over seeds: one row per group of `groups_of`, in the order of `table_order`, with means of MEANS.

    New columns: seeds (their number), low and high (95 % interval of top1 over seeds and images), and interval (what it is
    over). Of the seeds, peak_memory_mb and oom are the largest, batch_size is the smallest, unchanged is True if it is for all.
    All columns not named so far are those of the first seed, also top1_low, top1_high, best_size and top1_area.
    Where a model was evaluated with several crops, each becomes a protocol, "scale, crop 0.875"; so does each token budget of
    the native protocol where a size has several, "native, 200 tokens".
    """
    return table_order([merged(protocol, group, scores) for protocol, group in groups_of(rows)])


def table_order(rows: Sequence[Row]) -> list[Row]:
    """Sort aggregated rows: models and protocols as given, policy, image area."""
    labels, protocols = [*dict.fromkeys(row["label"] for row in rows)], protocols_of(rows)

    def place(row: Row) -> tuple:
        return labels.index(row["label"]), protocols.index(row["protocol"]), row["policy"], by_area(row["img_size"])

    return sorted(rows, key=place)


def protocols_of(rows: Sequence[Row]) -> list[str]:
    """Return the protocols of rows, each once, in the order of the rows: an evaluation has them as they were given to it."""
    return [*dict.fromkeys(row["protocol"] for row in rows)]


def merged(protocol: str, group: Sequence[Row], scores: Scores = NO_SCORES) -> Row:
    """Return the aggregated row of one group of `groups_of`."""
    known = {name: [row[name] for row in group if known_number(row.get(name))] for name in (*MEANS, "peak_memory_mb")}
    means = {name: sum(known[name]) / len(known[name]) if known[name] else math.nan for name in MEANS if name in group[0]}
    low, high, over = mean_interval(group, scores)
    return (
        group[0]
        | {"protocol": protocol, **means, "seeds": len(group), "low": low, "high": high, "interval": over}
        | {"unchanged": all(row["unchanged"] for row in group), "oom": int(max(row["oom"] for row in group))}
        | {"peak_memory_mb": max(known["peak_memory_mb"], default=math.nan)}
        | {"batch_size": int(min(row["batch_size"] for row in group))}
    )


def known_number(value: Any) -> bool:
    """Whether a value is a number other than NaN."""
    return isinstance(value, (int, float, np.number)) and value == value


def does_nothing(row: Row) -> bool:
    """Whether the position encoding of a row's model is known to change attention by less than NEGLIGIBLE."""
    share: Any = row.get("position_share")
    return known_number(share) and share < NEGLIGIBLE


def train_sizes_of(row: Row) -> list[Size | Budget]:
    """Return the sizes, or for a model trained at native shape the budgets, that the column train_size of a row lists."""
    return [parse_size_or_budget(text) for text in row["train_size"].split()]


def is_training(row: Row) -> bool:
    """Whether a row is at a size of training (`Trial.is_training`)."""
    trained = train_sizes_of(row)
    if isinstance(trained[0], Budget):
        return not is_missing(row["budget"]) and Budget(int(row["budget"])) in trained
    return parse_size(row["img_size"]) in trained


def is_missing(value: Any) -> bool:
    """Whether a cell has no value: None or NaN."""
    return value is None or value != value


def protocol_names(rows: Sequence[Row]) -> Callable[[Row], str]:
    """Return the function that names the protocol of a row, or of a line of translation.csv, as `aggregate` does.

    The names have the crop if any model has several crops in one protocol, and the token budget if any has several at one size.
    """

    def several(column: str, *same: str) -> bool:
        values = defaultdict(set)
        for row in rows:
            if not is_missing(row.get(column)):
                values[tuple(row[name] for name in same)].add(row[column])
        return any(len(found) > 1 for found in values.values())

    crops, budgets = several("crop_pct", "label", "protocol"), several("budget", "label", "img_size")

    def name(row: Row) -> str:
        crop = f", crop {row['crop_pct']:g}" if crops else ""
        budget = f", {row['budget']:g} tokens" if budgets and not is_missing(row.get("budget")) else ""
        return f"{row['protocol']}{crop}{budget}"

    return name


def by_area(size: str) -> tuple[int, int]:
    """Sort key (area, height) of a size such as "64x96"."""
    height, width = parse_size(size)
    return height * width, height


def mean_interval(rows: Sequence[Row], scores: Scores = NO_SCORES, metric: str = "") -> tuple[float, float, str]:
    """95 % interval of a model's mean metric over seeds and images: (low, high, what it is over), in percent.

    With one seed it is Wilson's interval over images.

    Args:
        rows: one per seed, all on the same images.
    """
    found = contrast([sample_of(rows, scores, metric)])
    over = f"{found.images:,} images"
    return *found.of_share(), over if len(rows) == 1 else f"{len(rows)} seeds and {over}"


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


def with_curves(rows: Sequence[Row]) -> list[Row]:
    """Return copies of the rows with best_size and the mean over sizes (top1_area) of their curve, by label, seed, protocol and
    crop.

    A row has those of the curve of its own policy, else of the only curve that includes it; empty where several do.
    """
    by_policy: dict[int, Row] = {}
    summaries: dict[int, list[Row]] = defaultdict(list)
    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        groups[
            tuple(None if is_missing(row[name]) else row[name] for name in ("label", "seed", "protocol", "crop_pct"))
        ].append(row)
    for group in groups.values():
        for _, policy, curve in curves(group):
            summary = curve_summary(curve)
            for row in curve:
                summaries[id(row)].append(summary)
                if row["policy"] == policy:
                    by_policy[id(row)] = summary
    empty = {"best_size": "", f"{task_of(rows[0]).metric}_area": math.nan} if rows else {}
    unique = {index: several[0] for index, several in summaries.items() if len(several) == 1}
    return [row | by_policy.get(id(row), unique.get(id(row), empty)) for row in rows]


def curve_summary(curve: Sequence[Row]) -> Row:
    """Return {best_size, top1_area} of a curve: the smallest size with the highest top1, and mean top1 over log2 sqrt(h w).

    For another task than classification it is the task's metric. The mean is the area by trapezoids divided by the width. Sizes
    of equal area count once, with their mean; NaN where all sizes have the same area.
    """
    at: dict[int, list[float]] = defaultdict(list)
    for row in curve:
        at[math.prod(parse_size(row["img_size"]))].append(main_metric(row))
    points = [(math.log2(area) / 2, sum(values) / len(values)) for area, values in sorted(at.items())]
    under = sum((right - left) * (a + b) / 2 for (left, a), (right, b) in pairwise(points))
    mean = under / (points[-1][0] - points[0][0]) if len(points) > 1 else math.nan
    best = min(curve, key=lambda row: (-main_metric(row), math.prod(parse_size(row["img_size"]))))
    return {"best_size": best["img_size"], f"{task_of(best).metric}_area": round(mean, 4)}


def _at(row: Row) -> tuple[str, str]:
    return row["protocol"], row["img_size"]
