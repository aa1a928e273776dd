"""The answer for every model of an evaluation: up to which size to use it, its best size and cost there, and advice.

An answer follows from the rows of one model by these rules. All comparisons are of top-1, by the 95 % interval of a
difference: of paired predictions where the folder has them (`paired_difference`), else `difference`, which is wider. "Lower",
"better" and "significantly" mean that the whole interval lies on one side of 0, without correction for multiple comparisons.

protocol    The answer is about the first protocol of the table ("scale" where there is one); others follow in a sentence each.
policy      Each size is judged under its default policy (the first in the rows), or under the best of the policies that are
            significantly better, which the advice then names: "use policy P".
kept        A size is lost where top-1 is significantly lower than at the training size. The range of use is the largest range
            of sizes around the training size without a lost size, over sizes with the height-to-width ratio of training. A size
            of another shape is judged alone: it is an exception where it is lost although its area is within the range, and an
            addition where it is kept outside.
within      The largest loss, in points, that the intervals of the kept sizes do not rule out. Up to NEAR points the answer is
            "use it up to N px". Above, it is "with care", with the number of images and seeds, and advises to evaluate more.
best        The smallest size that is not significantly lower than the size with the highest top-1, and at most NEAR points
            lower by the interval; otherwise the size with the highest top-1. The cost is that of its row.
fine-tune   Advice at sizes that are lost under every policy tried.
RoPE        Advice to try --rescue or scaling="yarn", where sizes above the training size are lost and the encoding takes a RoPE
            `scaling` that is not in force. Whether they help is not known from the rows.
learned     A model whose interval at the training size (else at the best size) does not lie above the top-1 of
            always predicting the most frequent class (column majority) gets only the advice to train it first.
Without the training size no size is called kept or lost. With a single size the answer is its accuracy and cost.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from vitrel.common.sizes import parse_size
from vitrel.evaluate.metrics import Predictions, compare_pairs, difference_interval, over_seeds, read_predictions
from vitrel.evaluate.rescue import rescue_lines
from vitrel.evaluate.results import aggregate, as_text, by_area, line_key
from vitrel.evaluate.settings import Row
from vitrel.position import POSITIONS, select_options

NEAR = 5.0  # points of top-1
PROTOCOLS = {
    "scale": "scale protocol",
    "canvas": "canvas protocol (objects keep their size in pixels)",
    "native": "native protocol (whole images at their own aspect ratios)",
}
SCALING = 'try RoPE scaling, which needs no training (vitrel evaluate --rescue, or scaling="yarn") and was not evaluated here'
Difference = Callable[..., tuple[float, float, float]]  # of `difference` and `paired_difference`


@dataclass(frozen=True)
class Answer:
    """The answer for one model; sizes are texts such as "64x96".

    line: the answer in one line, without the label. details: further sentences (losses, resampling, other protocols). text:
    line and details. protocol: the protocol of the line and of all fields below.
    keeps_from, keeps_to: range of sizes without a significant loss against train_size; None where train_size was not evaluated.
    within: largest loss, in points of top-1, that the intervals of the kept sizes do not rule out. lost: sizes with
    significantly lower top-1. best_size, best_policy, best_top1, low, high: the best size, its policy, its top-1 in percent and
    the 95 % interval of that. cost: at the best size, where known: images_per_second, memory_mb, memory_kind, gflops (10^9
    multiply-adds per image). policies: {size: policy} where a policy is significantly better than the default. resampled: a
    sentence on values resampled, by size. advice: what to do, each an imperative, the range of use first.
    elsewhere: {protocol: a sentence} for the other protocols.
    """

    label: str
    line: str
    details: tuple[str, ...]
    protocol: str
    train_size: str
    keeps_from: str | None
    keeps_to: str | None
    within: float | None
    lost: tuple[str, ...]
    best_size: str
    best_policy: str
    best_top1: float
    low: float
    high: float
    cost: dict[str, Any]
    policies: dict[str, str]
    resampled: str
    advice: list[str]
    elsewhere: dict[str, str]

    @property
    def text(self) -> str:
        return " ".join((self.line, *self.details))


class Place(NamedTuple):
    """A model at one size under one policy: the aggregated row, and the rows of the seeds."""

    row: Row
    rows: list[Row]


def difference(ours: Sequence[Row], theirs: Sequence[Row], metric: str = "top1") -> tuple[float, float, float]:
    """Difference in top-1 and its 95 % interval, (mean, low, high) in points: `ours` minus `theirs`, each one row per seed.

    metric: "top1", or "top1_among", among the data's classes (`metric_of`).
    Computed by `difference_interval` over the seeds that both have. The two count as independent samples although their images
    are the same, which is conservative. ValueError where they share no seed.
    """
    by_seed = [{as_text(row["seed"]): row for row in side} for side in (ours, theirs)]
    seeds = [seed for seed in by_seed[0] if seed in by_seed[1]]
    if not seeds:
        raise ValueError(f"no seed in common between {_named(ours[0])} and {_named(theirs[0])}")
    values = [[metric_of(side[seed], metric) for seed in seeds] for side in by_seed]
    mean, half = difference_interval(values[0], values[1], int(min(side[seed]["n"] for side in by_seed for seed in seeds)))
    return mean, mean - half, mean + half


def metric_of(row: Row, metric: str) -> float:
    """Return top1 or top1_among of a row, in percent; where a model has only the data's classes, the second is the first."""
    value = row.get(metric, math.nan)
    return row["top1"] if math.isnan(value) else value


def paired_difference(predictions: Predictions) -> Difference:
    """Return a function like `difference` that compares predictions image by image (`over_seeds`).

    It falls back to `difference` for rows without predictions.
    """

    def paired(ours: Sequence[Row], theirs: Sequence[Row], metric: str = "top1") -> tuple[float, float, float]:
        first, second = ({as_text(row["seed"]): predictions.rows.get(line_key(row)) for row in side} for side in (ours, theirs))
        pairs = [(first[seed], second[seed]) for seed in first if seed in second]
        if not pairs or any(a is None or b is None for a, b in pairs):
            return difference(ours, theirs, metric)
        among = metric == "top1_among"
        return over_seeds([compare_pairs(a, b, among) for a, b in pairs if a is not None and b is not None])

    return paired


def answers(rows: Sequence[Row], difference: Difference = difference) -> list[Answer]:
    """Return one answer per label, in the order of the rows.

    difference: function of two sequences of rows (one per seed, of two sizes or policies of a model) that returns their
    difference in top-1 and its interval, as `difference` or `paired_difference`.
    """
    return [_answer(label, protocols, difference) for label, protocols in _places(rows).items()]


def difference_in(folder: Path | None) -> Difference:
    """Return `paired_difference` of the predictions in an evaluation's folder, or `difference` where it has none."""
    predictions = None if folder is None else read_predictions(folder)
    return difference if predictions is None else paired_difference(predictions)


def answers_of(rows: Sequence[Row], folder: Path | None = None) -> list[Answer]:
    """Return `answers` for the rows of an evaluation, with the paired predictions and rescue results of its folder."""
    rescued = {} if folder is None else rescue_lines(folder)
    without_rescue = answers(rows, difference_in(folder))
    added = {label: (f"Without training, {line}.",) for label, line in rescued.items()}
    return [replace(answer, details=(*answer.details, *added.get(answer.label, ()))) for answer in without_rescue]


def answer_list(answers: Iterable[Answer]) -> str:
    """Return answers as a Markdown list, readable in a terminal: a line for each label, its details below."""
    texts = [[f"- {answer.label}: {answer.line}", *(f"  - {detail}" for detail in answer.details)] for answer in answers]
    return "".join(f"{line}\n" for lines in texts for line in lines)


class _Curve:
    """One model in one protocol, judged by the rules of this module; sizes are texts such as "64x96", sorted by area.

    sizes: {size: {policy: place}}, the default policy first. used: {size: place under the policy it is judged by}. policies:
    {size: policy} where that is not the default. trained: default place at the training size, None without it. differences:
    {size: (mean, low, high)}, top-1 minus that at the training size, points. lost: sizes significantly lower. shaped: sizes
    with the height-to-width ratio of training. kept: the range of use. highest: size with the highest top-1. equals: sizes not
    significantly below it. best: the best size; behind: the largest possible loss of best against highest, points.
    """

    def __init__(self, sizes: Mapping[str, Mapping[str, Place]], difference: Difference) -> None:
        self.sizes = {size: dict(sizes[size]) for size in sorted(sizes, key=by_area)}
        self.difference = difference
        self.default = {size: next(iter(places.values())) for size, places in self.sizes.items()}
        self.train_size: str = next(iter(self.default.values())).row["train_size"]
        self.used = {size: self._used(size) for size in self.sizes}
        self.policies = {size: place.row["policy"] for size, place in self.used.items() if place is not self.default[size]}
        self.trained = self.default.get(self.train_size)
        self.highest = max(self.sizes, key=lambda size: self.used[size].row["top1"])
        against = {size: self._against(size, self.highest) for size in self.sizes}
        self.equals = [size for size, (_, _, high) in against.items() if high >= 0]
        self.best = next(size for size in self.equals if size == self.highest or -against[size][1] <= NEAR)
        self.behind = -against[self.best][1]
        self.differences: dict[str, tuple[float, float, float]] = {}
        if self.trained is not None:
            others = {size: place for size, place in self.used.items() if size != self.train_size}
            self.differences = {size: difference(place.rows, self.trained.rows) for size, place in others.items()}
        self.lost = [size for size, (_, _, high) in self.differences.items() if high < 0]
        self.shaped = [size for size in self.sizes if _ratio(size) == _ratio(self.train_size)]
        self.kept = self._kept()

    @property
    def exceptions(self) -> list[str]:
        """Sizes of another shape that are lost although their area is within the range."""
        return [size for size in self.lost if self._inside(size)]

    @property
    def additions(self) -> list[str]:
        """Sizes of another shape outside the range whose possible loss is at most that of the range, or NEAR points."""
        most = max(NEAR, self._possible_loss(self.kept))
        others = [size for size in self.differences if size not in self.shaped and not self._inside(size)]
        return [size for size in others if size not in self.lost and self._possible_loss([size]) <= most]

    @property
    def covered(self) -> list[str]:
        """All sizes that the model may be used at: the range, kept sizes of other shapes within it, and additions."""
        inside = [size for size in self.differences if self._inside(size) and size not in self.lost]
        return [size for size in self.sizes if size in (*self.kept, *inside, *self.additions)]

    @property
    def within(self) -> float:
        """The largest loss that the intervals do not rule out at the covered sizes, points."""
        return self._possible_loss(self.covered)

    @property
    def lost_anyhow(self) -> list[str]:
        """Sizes that are lost under every policy tried."""
        if self.trained is None:
            return []
        reference = self.trained.rows
        return [s for s in self.lost if all(self.difference(p.rows, reference)[2] < 0 for p in self.sizes[s].values())]

    @property
    def learned(self) -> bool:
        """Whether top-1 is significantly above that of predicting the most frequent class; True where that is unknown."""
        row = (self.trained or self.used[self.best]).row
        return not row["low"] <= _majority(row)  # also where it is NaN

    def larger(self, sizes: Iterable[str]) -> list[str]:
        """The sizes with a larger area than the training size."""
        return [size for size in sizes if by_area(size) > by_area(self.train_size)]

    def _used(self, size: str) -> Place:
        """The place by which a size is judged: under its default policy, or the most accurate that is significantly better."""
        default = self.default[size]
        rest = [place for place in self.sizes[size].values() if place is not default]
        better = [place for place in rest if self.difference(place.rows, default.rows)[1] > 0]
        return max(better, key=lambda place: place.row["top1"], default=default)

    def _against(self, size: str, other: str) -> tuple[float, float, float]:
        return (0.0, 0.0, 0.0) if size == other else self.difference(self.used[size].rows, self.used[other].rows)

    def _inside(self, size: str) -> bool:
        """Whether a size is of another shape, with an area within the range."""
        return size not in self.shaped and by_area(self.kept[0]) < by_area(size) < by_area(self.kept[-1])

    def _possible_loss(self, sizes: Iterable[str]) -> float:
        """Largest loss against the training size, in points, that the intervals at these sizes do not rule out; at least 0."""
        return max((0.0, *(-self.differences[size][1] for size in sizes if size != self.train_size)))

    def _kept(self) -> list[str]:
        """The range of use, by area; [] without the training size."""
        if self.trained is None:
            return []
        start = self.shaped.index(self.train_size)
        first = last = start
        while first > 0 and self.shaped[first - 1] not in self.lost:
            first -= 1
        while last + 1 < len(self.shaped) and self.shaped[last + 1] not in self.lost:
            last += 1
        return self.shaped[first : last + 1]


def _answer(label: str, protocols: Mapping[str, Mapping[str, Mapping[str, Place]]], difference: Difference) -> Answer:
    curves = {protocol: _Curve(sizes, difference) for protocol, sizes in protocols.items()}
    protocol, curve = next(iter(curves.items()))
    best = curve.used[curve.best].row
    cost, advice, resampled = _cost(best), _advice(curve), _resampled(curve)
    elsewhere = {name: f"{_in(name)}{_short(other)}" for name, other in curves.items() if name != protocol}
    line = [
        *([] if protocol.startswith("scale") else [f"{_in(protocol)}:"]),
        _sentence(_use(curve)),
        *map(_sentence, advice[1:]),
        *([_best(curve, cost)] if curve.learned else []),
        _rules(curve),
    ]
    details = [_losses(curve).strip(), resampled, *(elsewhere.values() if curve.learned else ())]
    return Answer(
        label=label,
        line=" ".join(filter(None, line)),
        details=tuple(filter(None, details)),
        protocol=protocol,
        train_size=curve.train_size,
        keeps_from=curve.kept[0] if curve.kept else None,
        keeps_to=curve.kept[-1] if curve.kept else None,
        within=round(curve.within, 2) if curve.kept else None,
        lost=tuple(curve.lost),
        best_size=curve.best,
        best_policy=best["policy"],
        best_top1=best["top1"],
        low=best["low"],
        high=best["high"],
        cost=cost,
        policies=curve.policies,
        resampled=resampled,
        advice=advice,
        elsewhere=elsewhere,
    )


def _use(curve: _Curve) -> str:
    """The first sentence: the range to use, and how sure that is."""
    trained = pixels(curve.train_size)
    if not curve.learned:
        row = (curve.trained or curve.used[curve.best]).row
        return (
            f"train it first: its top-1 of {row['top1']:.1f} % at {pixels(row['img_size'])} is not significantly above the "
            f"{_majority(row):.1f} % of always predicting the most frequent class"
        )
    if curve.trained is None:
        return f"evaluate it at its training size, {trained}, too: losses at other sizes are measured against that size"
    top1 = f"{curve.trained.row['top1']:.1f} %"
    if len(curve.sizes) == 1:
        return f"use it at {trained}, its training size and the only size evaluated ({top1})"
    where = _range(curve)
    if len(curve.covered) == 1:
        return f"use it {where} ({top1})"
    if curve.within <= NEAR:
        return f"use it {where}: top-1 is at most {curve.within:.1f} points below the {top1} at its training size, {trained}"
    return (
        f"use it {where} with care: top-1 is not significantly below the {top1} at its training size, {trained}, but "
        f"{_basis(curve)} do not rule out a loss of up to {curve.within:.1f} points"
    )


def _range(curve: _Curve, *notes: str) -> str:
    """The range of use, as "from 48 to 96 px, not at 64x96 px (policy clip at 96 px)"; notes are added in the parentheses."""
    first, last = curve.kept[0], curve.kept[-1]
    smaller = by_area(curve.shaped[0]) < by_area(curve.train_size)
    text = f"from {_bare(first)} to {pixels(last)}" if smaller else f"up to {pixels(last)}"
    text = f"at its training size, {pixels(first)}" if len(curve.kept) == 1 else text
    text += f", not at {pixels(*curve.exceptions)}" if curve.exceptions else ""
    text += f", and at {pixels(*curve.additions)}" if curve.additions else ""
    by_policy = _by_policy(curve, curve.covered)
    remarks = [*(f"policy {policy} at {pixels(*sizes)}" for policy, sizes in by_policy.items()), *notes]
    return text + (f" ({'; '.join(remarks)})" if remarks else "")


def _by_policy(curve: _Curve, sizes: Iterable[str]) -> dict[str, list[str]]:
    """{policy: those of the sizes at which it is significantly better than the default}."""
    by_policy: dict[str, list[str]] = defaultdict(list)
    for size in sizes:
        if size in curve.policies:
            by_policy[curve.policies[size]].append(size)
    return by_policy


def _in(protocol: str) -> str:
    """The beginning of a sentence: "In the scale protocol, crop 0.9"."""
    name, _, crop = protocol.partition(", ")
    return f"In the {PROTOCOLS.get(name, f'{name} protocol')}{crop and f', {crop}'}"


def _short(curve: _Curve) -> str:
    """The answer for another protocol, as the rest of a sentence that begins with "In the ... protocol"."""
    if not curve.learned or curve.trained is None or len(curve.sizes) == 1:
        return f": {_use(curve)}.{_losses(curve)}"
    note = f"at most {curve.within:.1f} points lower"
    if curve.within > NEAR:
        note = f"not significantly lower, but a loss of up to {curve.within:.1f} points is not ruled out"
    return f" use it {_range(curve, note) if len(curve.covered) > 1 else _range(curve)}.{_losses(curve)}"


def _losses(curve: _Curve) -> str:
    """ " Accuracy is significantly lower at ..."; "" where no size is lost."""
    if not curve.lost or not curve.learned:
        return ""
    each = [f"{pixels(size)} ({curve.used[size].row['top1']:.1f} %)" for size in curve.lost]
    return f" Accuracy is significantly lower at {_list(each)}{_unseen(curve)}."


def _unseen(curve: _Curve) -> str:
    """The share of unseen offsets at the lost sizes above the training size, as the end of a sentence; "" for none."""
    rows = [curve.used[size].row for size in curve.larger(curve.lost)]
    shares = [row["unseen"] for row in rows if row["unseen"] > 0 and (row["saturated"] > 0 or not stretches(row["resized"]))]
    if not shares:
        return ""
    most = "up to " if len({*shares}) > 1 else ""
    return f"; above {pixels(curve.train_size)}, {most}{100 * max(shares):.0f} % of the offsets did not occur in training"


def _advice(curve: _Curve) -> list[str]:
    """Imperatives: first the range of use, then policies, fine-tuning, RoPE scaling, more images."""
    advice = [_use(curve).split(":")[0]]
    if not curve.learned:
        return advice
    by_policy = _by_policy(curve, curve.sizes)
    advice += [f"use policy {policy} at {pixels(*sizes)}" for policy, sizes in by_policy.items()]
    if lost := curve.lost_anyhow:
        advice.append(f"to use it at {pixels(*lost, word='or')}, fine-tune it there")
    if any(_takes_scaling(curve.used[size].row) for size in curve.larger(lost)):
        advice.append(SCALING)
    if curve.kept and curve.within > NEAR:
        more = "more images" if curve.trained is None or curve.trained.row["seeds"] < 2 else "more images and seeds"
        advice.append(f"evaluate {more} to know whether it keeps its accuracy")
    return advice


def _best(curve: _Curve, cost: Mapping[str, Any]) -> str:
    """A sentence on the best size, its top-1 and its cost."""
    row = curve.used[curve.best].row
    forms = {"images_per_second": "{:,.0f} images/s", "memory_mb": "{:,.0f} MiB"}
    costs = [form.format(cost[name]) for name, form in forms.items() if name in cost]
    costs += [f"{multiply_adds(cost['gflops'])} per image"] if "gflops" in cost else []
    cost_text = f"; {', '.join(costs)}" if costs else ""
    interval, at = f"{row['low']:.1f} to {row['high']:.1f}", pixels(curve.best)
    if len(curve.sizes) == 1:
        return f"Top-1 is {row['top1']:.1f} % ({interval}){cost_text}."
    at += f" with policy {row['policy']}" if curve.best in curve.policies else ""
    top1 = f"{row['top1']:.1f} % ({interval}){cost_text}"
    others = [size for size in curve.equals if size != curve.best]
    if not others:
        return f"Top-1 is highest at {at}: {top1}."
    if curve.best != curve.highest:
        return f"The best size is {at}, the smallest with top-1 at most {curve.behind:.1f} points below the highest: {top1}."
    if all(curve.used[size].row["top1"] == row["top1"] for size in others):
        return f"Top-1 is equal at {pixels(curve.best, *others)}; {at} is the smallest: {top1}."
    return f"Top-1 is highest at {at}, not significantly above that at {pixels(*others)}: {top1}."


def _cost(row: Row) -> dict[str, Any]:
    """The field `cost` of an Answer, from the row of the best size."""
    names = {"images_per_second": "infer_samples_per_sec", "memory_mb": "peak_memory_mb", "gflops": "gflops"}
    cost = {name: float(row[key]) for name, key in names.items() if _is_number(row.get(key))}
    return cost | ({"memory_kind": row["memory_kind"]} if "memory_mb" in cost and row.get("memory_kind") else {})


def _rules(curve: _Curve) -> str:
    """A sentence with the rules by which values are resampled."""
    rows = [place.row for place in curve.used.values()]
    rules = dict.fromkeys(row["resized"] for row in rows if row["resized_params"])
    return _sentence(f"resampled at other sizes: {', '.join(rules)}" if rules else "nothing is resampled")


def _resampled(curve: _Curve) -> str:
    """A sentence on each rule: the number of values resampled and the sizes; "" where no rule applies at any size."""
    rows = {size: place.row for size, place in curve.used.items()}
    parts = []
    for rule in dict.fromkeys(row["resized"] for row in rows.values() if row["resized"] != "nothing"):
        with_rule = {size: row for size, row in rows.items() if row["resized"] == rule}
        where, counts = _among([*with_rule], [*rows]), sorted({int(row["resized_params"]) for row in with_rule.values()})
        params = next(iter(with_rule.values()))["params"]
        number = f"{counts[0]:,} to {counts[-1]:,}" if len(counts) > 1 else f"{counts[0]:,}"
        resamples = f"{number} of {params:,} parameter values are resampled by {rule} at {where}"
        parts.append(resamples if counts[-1] else f"rule {rule} applies at {where} and resamples nothing")
    text = _sentence("; ".join(parts)) if parts else ""
    if changed := [size for size, row in rows.items() if not row["unchanged"] and not row["resized_params"]]:
        text += f" The weights changed at {pixels(*changed)} although nothing is resampled there: this is an error."
    return text.strip()


def _among(sizes: Sequence[str], all_sizes: Sequence[str]) -> str:
    """The sizes in words, as "every size but 64 px" where that is shorter."""
    others = [size for size in all_sizes if size not in sizes]
    if not others:
        return "every size"
    return f"every size but {pixels(*others)}" if len(others) < len(sizes) else pixels(*sizes)


def _takes_scaling(row: Row) -> bool:
    """Whether a row has unseen offsets, and an encoding that takes a RoPE scaling but has none in force."""
    keys = [key for key in str(row["encoding"]).split("+") if key in POSITIONS and POSITIONS[key].rotates]
    scalable = [key for key in keys if select_options(key, {"scaling": "none"})]
    return row["unseen"] > 0 and any(key not in row["resized"] for key in scalable)


def stretches(resized: str) -> bool:
    """Whether any rule in a value of the column `resized` is of a bias with resampled parameters, such as "table bicubic".

    Unseen offsets then get values from trained ones. False for "absolute bicubic", which is not a bias.
    """
    encodings = [POSITIONS[key] for key in (rule.split(" ")[0] for rule in resized.split(" + ")) if key in POSITIONS]
    return any((encoding.site, encoding.behaviour) == ("attention", "resized") for encoding in encodings)


def _basis(curve: _Curve) -> str:
    """The number of images and seeds: "540 images and 3 seeds"."""
    row = (curve.trained or curve.used[curve.best]).row
    return f"{row['n']:,.0f} images" + (f" and {row['seeds']} seeds" if row["seeds"] > 1 else "")


def _places(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, dict[str, Place]]]]:
    """{label: {protocol: {size: {policy: place}}}}: labels, and the policies of a size, in the order of the rows."""

    def key(row: Row) -> tuple:
        budget = row.get("budget")  # NaN in rows of other protocols
        columns = (row[name] for name in ("label", "crop_pct", "img_size", "policy"))
        return row["protocol"].partition(", ")[0], None if budget != budget else budget, *columns

    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    merged = aggregate(rows).to_dict("records")
    protocols = [*dict.fromkeys(row["protocol"] for row in merged)]  # scale first
    by_key = {key(row): row for row in merged}
    by_label: dict[str, dict[str, dict[str, dict[str, Place]]]] = {row["label"]: {} for row in rows}
    for name in protocols:
        for group, members in groups.items():
            row = by_key[group]
            if row["protocol"] == name:
                by_size = by_label[row["label"]].setdefault(name, {})
                by_size.setdefault(row["img_size"], {})[row["policy"]] = Place(row, members)
    return by_label


def pixels(*sizes: str, word: str = "and") -> str:
    """Join sizes for a sentence, a square by its side: ("48x48", "64x96") -> "48 and 64x96 px"."""
    return f"{_list([*map(_bare, sizes)], word)} px"


def multiply_adds(gflops: float) -> str:
    """Format a number of 10^9 multiply-adds: 0.0332 -> "33.2 million multiply-adds"."""
    return f"{gflops:.3g} billion multiply-adds" if gflops >= 1 else f"{1000 * gflops:.3g} million multiply-adds"


def _bare(size: str) -> str:
    """ "48x48" -> "48", "64x96" -> "64x96"."""
    height, width = parse_size(size)
    return f"{height}" if height == width else size


def _ratio(size: str) -> float:
    height, width = parse_size(size)
    return height / width


def _majority(row: Row) -> float:
    """Top-1 of always predicting the most frequent class, percent; NaN where unknown."""
    value = row.get("majority", math.nan)
    return float(value) if _is_number(value) else math.nan


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == value


def _named(row: Row) -> str:
    return f"{row['label']} at {row['img_size']} ({row['policy']})"


def _list(names: Sequence[str], word: str = "and") -> str:
    return f" {word} ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
