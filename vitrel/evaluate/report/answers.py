"""The answer for every model of an evaluation: up to which size to use it, where it is best, what it costs there, what to do.

An answer is derived from the rows of one model by these rules. All comparisons are of top-1, by the 95 % interval of a
difference: of paired predictions where the folder has them (`paired_difference`), else `difference`, which is wider. There is
no correction for making several of them.

protocol    The answer is about the first protocol of the table ("scale" where there is one); the others follow in short.
policy      At every size the default policy counts, the first of the rows, unless another is shown better there: the interval
            of their difference lies above 0. Then the best of those counts, and is named: "evaluate with policy P".
kept        A size is lost where its accuracy is shown lower than at the training size: the whole interval of the difference is
            below 0. The model keeps its accuracy over the largest range of sizes around the training size without a lost one.
            The range is one of sizes with the height-to-width ratio of training; every other shape is judged alone, named as
            an exception where it is lost though its area is in the range, and as an addition where it is kept outside.
within      The greatest loss that the intervals of what is kept do not rule out, in points. At most NEAR points: "use it up to
            N px". More: no loss is shown, but so few images (or seeds) do not rule one out, which is said, and the advice is
            to evaluate more of them.
best        The smallest size as good as the one of the highest top-1: not shown lower, and at most NEAR points lower by the
            interval. Where there is none but the highest itself, that is the best: shown so, or the highest measured.
            Its cost is that of its row, under the policies that count.
fine-tune   At sizes that are lost under every policy tried.
RoPE        Where sizes larger than that of training are lost, the encoding rotates, takes a `scaling`, and none acts at these
            sizes: --rescue and scaling="yarn" are named as something to try. The rows do not show that they help.
learned     A model whose interval at the training size (else at the best) does not lie above the top-1 of always answering
            the most frequent class (column majority) has not been shown to learn anything, and gets no other advice.
training size missing: nothing is said of what is kept. One size alone: its accuracy and cost.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from vitrel.evaluate.metrics import difference_interval
from vitrel.evaluate.predictions import Predictions, compare_pairs, over_seeds, read_predictions
from vitrel.evaluate.rescue import rescue_lines
from vitrel.evaluate.results import aggregate, by_area, line_key
from vitrel.evaluate.settings import Row
from vitrel.position import POSITIONS, select_options
from vitrel.sizes import parse_size

NEAR = 5.0  # points of top-1
PROTOCOLS = {
    "scale": "scale protocol",
    "canvas": "canvas protocol (objects keep their size in pixels)",
    "native": "native protocol (whole images at their own aspect ratios)",
}
SCALING = (
    'try RoPE scaling without training (vitrel evaluate --rescue, or scaling="yarn"); these rows do not show whether it helps'
)
Difference = Callable[[Sequence[Row], Sequence[Row]], tuple[float, float, float]]


@dataclass(frozen=True)
class Answer:
    """The answer for one model in one protocol; sizes are texts such as "64x96".

    line: the answer in one line, without the label. details: sentences on where and how much. text: all of it.
    keeps_from, keeps_to: the range over which accuracy is not shown lower than at train_size; None where that is missing.
    within: points of top-1 that the intervals of what is kept do not rule out as lost. lost: sizes shown lower.
    best_size, best_policy, best_top1, low, high: the best size, and the 95 % interval of its top-1, percent.
    cost: at the best size: images_per_second, memory_mb, memory_kind, gflops (10^9 multiply-adds an image); known ones only.
    policies: {size: policy} where another policy than the default is shown better.
    resampled: what is resampled at which sizes. advice: what to do, each an imperative.
    elsewhere: {protocol: a sentence} of the further protocols.
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
    """A model at one size under one policy: its aggregated row, and its rows, one a seed."""

    row: Row
    rows: list[Row]


def difference(ours: Sequence[Row], theirs: Sequence[Row]) -> tuple[float, float, float]:
    """(mean, low, high): top-1 of `ours` minus that of `theirs`, points, with its 95 % interval; each has one row a seed.

    Over the seeds that both have, as `difference_interval` takes them: two models, or sizes, that see the same images count as
    independent samples, which is conservative. ValueError where they share no seed.
    """
    by_seed = [{_seed(row): row for row in side} for side in (ours, theirs)]
    seeds = [seed for seed in by_seed[0] if seed in by_seed[1]]
    if not seeds:
        raise ValueError(f"no seed in common between {_named(ours[0])} and {_named(theirs[0])}")
    values = [[side[seed]["top1"] for seed in seeds] for side in by_seed]
    mean, half = difference_interval(values[0], values[1], int(min(side[seed]["n"] for side in by_seed for seed in seeds)))
    return mean, mean - half, mean + half


def paired_difference(predictions: Predictions) -> Difference:
    """`difference` by what both rows predict for every image (`over_seeds`), where the folder holds that of all of them."""

    def paired(ours: Sequence[Row], theirs: Sequence[Row]) -> tuple[float, float, float]:
        kept = [{_seed(row): predictions.rows.get(line_key(row)) for row in side} for side in (ours, theirs)]
        pairs = [(kept[0][seed], kept[1][seed]) for seed in kept[0] if seed in kept[1]]
        if not pairs or any(one is None or other is None for one, other in pairs):
            return difference(ours, theirs)
        return over_seeds([compare_pairs(one, other) for one, other in pairs if one is not None and other is not None])

    return paired


def answers(rows: Sequence[Row], difference: Difference = difference) -> list[Answer]:
    """One answer per label, in the order of the rows.

    difference(ours, theirs) gives (mean, low, high) of the difference in top-1 between two sequences of rows, one a seed, of
    two sizes or policies of one model: the place for intervals of paired predictions.
    """
    found = _places(rows)
    return [_answer(label, protocols, difference) for label, protocols in found.items()]


def answers_of(rows: Sequence[Row], folder: Path | None = None) -> list[Answer]:
    """`answers` of the rows of an evaluation: by paired predictions and with what rescue found, where its folder holds them."""
    predictions = None if folder is None else read_predictions(folder)
    rescued = {} if folder is None else rescue_lines(folder)
    found = answers(rows, difference if predictions is None else paired_difference(predictions))
    told = {label: (f"Without training, {line}.",) for label, line in rescued.items()}
    return [replace(one, details=(*one.details, *told.get(one.label, ()))) for one in found]


def answer_list(rows: Sequence[Row], folder: Path | None = None) -> str:
    """`answers_of` as a Markdown list that reads well in a terminal: a line for each label, and below it the details."""
    lines = [[f"- {one.label}: {one.line}", *(f"  - {text}" for text in one.details)] for one in answers_of(rows, folder)]
    return "".join(f"{line}\n" for own in lines for line in own)


class _Curve:
    """One model in one protocol, judged."""

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
        """Sizes of another shape that are lost though the range passes them."""
        return [size for size in self.lost if self._inside(size)]

    @property
    def additions(self) -> list[str]:
        """Sizes of another shape that are kept beyond the range, as surely as those in it, or to within NEAR points."""
        most = max(NEAR, self._may_lose(self.kept))
        others = [size for size in self.differences if size not in self.shaped and not self._inside(size)]
        return [size for size in others if size not in self.lost and self._may_lose([size]) <= most]

    @property
    def covered(self) -> list[str]:
        """All sizes that the model may be used at: the range, what of other shapes is inside of it, and the additions."""
        inside = [size for size in self.differences if self._inside(size) and size not in self.lost]
        return [size for size in self.sizes if size in (*self.kept, *inside, *self.additions)]

    @property
    def within(self) -> float:
        return self._may_lose(self.covered)

    @property
    def lost_anyhow(self) -> list[str]:
        """Sizes that are lost under every policy tried."""
        if self.trained is None:
            return []
        start = self.trained.rows
        return [s for s in self.lost if all(self.difference(p.rows, start)[2] < 0 for p in self.sizes[s].values())]

    @property
    def learned(self) -> bool:
        row = (self.trained or self.used[self.best]).row
        return not row["low"] <= _majority(row)  # NaN: not known

    def larger(self, sizes: Iterable[str]) -> list[str]:
        return [size for size in sizes if by_area(size) > by_area(self.train_size)]

    def _used(self, size: str) -> Place:
        default = self.default[size]
        rest = [place for place in self.sizes[size].values() if place is not default]
        better = [place for place in rest if self.difference(place.rows, default.rows)[1] > 0]
        return max(better, key=lambda place: place.row["top1"], default=default)

    def _against(self, size: str, other: str) -> tuple[float, float, float]:
        return (0.0, 0.0, 0.0) if size == other else self.difference(self.used[size].rows, self.used[other].rows)

    def _inside(self, size: str) -> bool:
        """Whether the range passes this size of another shape."""
        return size not in self.shaped and by_area(self.kept[0]) < by_area(size) < by_area(self.kept[-1])

    def _may_lose(self, sizes: Iterable[str]) -> float:
        """The greatest loss that the intervals do not rule out at these sizes, points."""
        return max((0.0, *(-self.differences[size][1] for size in sizes if size != self.train_size)))

    def _kept(self) -> list[str]:
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
            f"train it first: its {row['top1']:.1f} % at {pixels(row['img_size'])} are not shown above the "
            f"{_majority(row):.1f} % of always answering the most frequent class"
        )
    if curve.trained is None:
        return f"evaluate it at its training size, {trained}, too: without that, no size can be called kept or lost"
    top1 = f"{curve.trained.row['top1']:.1f} %"
    if len(curve.sizes) == 1:
        return f"use it at {trained}, its training size and the only one evaluated ({top1})"
    where = _range(curve)
    if len(curve.covered) == 1:
        return f"use it {where} ({top1})"
    if curve.within <= NEAR:
        return f"use it {where}: it keeps the {top1} of its training size, {trained}, to within {curve.within:.1f} points"
    return (
        f"use it {where} with care: no loss is shown there against the {top1} of its training size, {trained}, but one of up "
        f"to {curve.within:.1f} points is not ruled out ({_basis(curve)})"
    )


def _range(curve: _Curve, *notes: str) -> str:
    """What is kept, as "from 48 to 96 px, not at 64x96 px (policy clip at 96 px)", with further notes in the parentheses."""
    first, last = curve.kept[0], curve.kept[-1]
    smaller = by_area(curve.shaped[0]) < by_area(curve.train_size)
    text = f"from {_bare(first)} to {pixels(last)}" if smaller else f"up to {pixels(last)}"
    text = f"at its training size, {pixels(first)}" if len(curve.kept) == 1 else text
    text += f", not at {pixels(*curve.exceptions)}" if curve.exceptions else ""
    text += f", and at {pixels(*curve.additions)}" if curve.additions else ""
    by_policy = _by_policy(curve, curve.covered)
    told = [*(f"policy {policy} at {pixels(*sizes)}" for policy, sizes in by_policy.items()), *notes]
    return text + (f" ({'; '.join(told)})" if told else "")


def _by_policy(curve: _Curve, sizes: Iterable[str]) -> dict[str, list[str]]:
    """{policy: the sizes of these at which it is shown better than the default}."""
    found: dict[str, list[str]] = defaultdict(list)
    for size in sizes:
        if size in curve.policies:
            found[curve.policies[size]].append(size)
    return found


def _in(protocol: str) -> str:
    name, _, crop = protocol.partition(", ")
    return f"In the {PROTOCOLS.get(name, f'{name} protocol')}{crop and f', {crop}'}"


def _short(curve: _Curve) -> str:
    """A further protocol in one sentence, which goes on from "In the ... protocol"."""
    if not curve.learned or curve.trained is None or len(curve.sizes) == 1:
        return f": {_use(curve)}.{_losses(curve)}"
    points = f"{curve.within:.1f} points"
    sure = f"within {points}" if curve.within <= NEAR else f"no loss is shown, one of up to {points} is not ruled out"
    return f" use it {_range(curve, sure) if len(curve.covered) > 1 else _range(curve)}.{_losses(curve)}"


def _losses(curve: _Curve) -> str:
    """ " Accuracy is lower at ..."; "" where nothing is lost."""
    if not curve.lost or not curve.learned:
        return ""
    each = [f"{pixels(size)} ({curve.used[size].row['top1']:.1f} %)" for size in curve.lost]
    return f" Accuracy is lower at {_list(each)}{_untrained(curve)}."


def _untrained(curve: _Curve) -> str:
    rows = [curve.used[size].row for size in curve.larger(curve.lost)]
    shares = [row["unseen"] for row in rows if row["unseen"] > 0 and (row["saturated"] > 0 or not stretches(row["resized"]))]
    if not shares:
        return ""
    most = "up to " if len({*shares}) > 1 else ""
    return f"; beyond {pixels(curve.train_size)}, {most}{100 * max(shares):.0f} % of the offsets are ones it was not trained on"


def _advice(curve: _Curve) -> list[str]:
    """What to do; the first is the range to use."""
    advice = [_use(curve).split(":")[0]]
    if not curve.learned:
        return advice
    by_policy = _by_policy(curve, curve.sizes)
    advice += [f"evaluate with policy {policy} at {pixels(*sizes)}" for policy, sizes in by_policy.items()]
    if lost := curve.lost_anyhow:
        advice.append(f"to use it at {pixels(*lost, word='or')}, fine-tune it there")
    if any(_takes_scaling(curve.used[size].row) for size in curve.larger(lost)):
        advice.append(SCALING)
    if curve.kept and curve.within > NEAR:
        more = "more images" if curve.trained is None or curve.trained.row["seeds"] < 2 else "more images and seeds"
        advice.append(f"evaluate {more} to know whether it keeps its accuracy")
    return advice


def _best(curve: _Curve, cost: Mapping[str, Any]) -> str:
    row = curve.used[curve.best].row
    forms = {"images_per_second": "{:,.0f} images/s", "memory_mb": "{:,.0f} MiB"}
    costs = [form.format(cost[name]) for name, form in forms.items() if name in cost]
    costs += [f"{multiply_adds(cost['gflops'])} an image"] if "gflops" in cost else []
    there = f", at {', '.join(costs)}" if costs else ""
    interval, at = f"{row['low']:.1f} to {row['high']:.1f}", pixels(curve.best)
    if len(curve.sizes) == 1:
        return f"Top-1 is {row['top1']:.1f} % ({interval}){there}."
    at += f" with policy {row['policy']}" if curve.best in curve.policies else ""
    top1 = f"{row['top1']:.1f} % ({interval}){there}"
    others = [size for size in curve.equals if size != curve.best]
    if not others:
        return f"It is best at {at}: {top1}."
    if curve.best != curve.highest:
        return f"No size is shown better than {at}, the smallest within {curve.behind:.1f} points of the highest: {top1}."
    return f"Its highest top-1 is at {at}, not shown above that at {pixels(*others)}: {top1}."


def _cost(row: Row) -> dict[str, Any]:
    names = {"images_per_second": "infer_samples_per_sec", "memory_mb": "peak_memory_mb", "gflops": "gflops"}
    cost = {name: float(row[key]) for name, key in names.items() if _is_number(row.get(key))}
    return cost | ({"memory_kind": row["memory_kind"]} if "memory_mb" in cost and row.get("memory_kind") else {})


def _rules(curve: _Curve) -> str:
    """What is resampled, by name."""
    rows = [place.row for place in curve.used.values()]
    rules = dict.fromkeys(row["resized"] for row in rows if row["resized_params"])
    return _sentence(f"resampled at other sizes: {', '.join(rules)}" if rules else "nothing is resampled")


def _resampled(curve: _Curve) -> str:
    """What is resampled at which sizes, and how much of it; "" where nothing is, or is read by a rule."""
    rows = {size: place.row for size, place in curve.used.items()}
    parts = []
    for rule in dict.fromkeys(row["resized"] for row in rows.values() if row["resized"] != "nothing"):
        own = {size: row for size, row in rows.items() if row["resized"] == rule}
        where, counts = _among([*own], [*rows]), sorted({int(row["resized_params"]) for row in own.values()})
        params = next(iter(own.values()))["params"]
        number = f"{counts[0]:,} to {counts[-1]:,}" if len(counts) > 1 else f"{counts[0]:,}"
        how = f"{number} of {params:,} parameter values are resampled" if counts[-1] else "nothing is resampled"
        parts.append(f"{how} {'by' if counts[-1] else 'under'} {rule} at {where}")
    text = _sentence("; ".join(parts)) if parts else ""
    if changed := [size for size, row in rows.items() if not row["unchanged"] and not row["resized_params"]]:
        text += f" The weights changed at {pixels(*changed)} although nothing is resampled there: this is an error."
    return text.strip()


def _among(sizes: Sequence[str], known: Sequence[str]) -> str:
    """The sizes in words, as "every size but 64 px" where that is shorter."""
    others = [size for size in known if size not in sizes]
    if not others:
        return "every size"
    return f"every size but {pixels(*others)}" if len(others) < len(sizes) else pixels(*sizes)


def _takes_scaling(row: Row) -> bool:
    """Whether its encoding rotates, takes a RoPE scaling and has none in force here, at offsets that were not trained."""
    keys = [key for key in str(row["encoding"]).split("+") if key in POSITIONS and POSITIONS[key].rotates]
    taking = [key for key in keys if select_options(key, {"scaling": "none"})]
    return row["unseen"] > 0 and any(key not in row["resized"] for key in taking)


def stretches(resized: str) -> bool:
    """Whether the rules of a row serve all offsets from trained ones, as `table bicubic` does; not `absolute bicubic`."""
    encodings = [POSITIONS[key] for key in (rule.split(" ")[0] for rule in resized.split(" + ")) if key in POSITIONS]
    return any((encoding.site, encoding.behaviour) == ("attention", "resized") for encoding in encodings)


def _basis(curve: _Curve) -> str:
    row = (curve.trained or curve.used[curve.best]).row
    return f"{row['n']:,.0f} images" + (f" and {row['seeds']} seeds" if row["seeds"] > 1 else "")


def _places(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, dict[str, Place]]]]:
    """{label: {protocol: {size: {policy: place}}}}: labels, and the policies of a size, in the order of the rows."""

    def key(row: Row) -> tuple:
        budget = row.get("budget")  # NaN where the table has it for other rows
        own = (row[name] for name in ("label", "crop_pct", "img_size", "policy"))
        return row["protocol"].partition(", ")[0], None if budget != budget else budget, *own

    groups: dict[tuple, list[Row]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    merged = aggregate(rows).to_dict("records")
    protocols = [*dict.fromkeys(row["protocol"] for row in merged)]  # scale first
    own = {key(row): row for row in merged}
    found: dict[str, dict[str, dict[str, dict[str, Place]]]] = {row["label"]: {} for row in rows}
    for name in protocols:
        for group, members in groups.items():
            row = own[group]
            if row["protocol"] == name:
                places = found[row["label"]].setdefault(name, {})
                places.setdefault(row["img_size"], {})[row["policy"]] = Place(row, members)
    return found


def pixels(*sizes: str, word: str = "and") -> str:
    """("48x48", "64x96") -> "48 and 64x96 px": sizes in words, a square by its side."""
    return f"{_list([*map(_bare, sizes)], word)} px"


def multiply_adds(gflops: float) -> str:
    """0.0332 -> "33.2 million multiply-adds"."""
    return f"{gflops:.3g} billion multiply-adds" if gflops >= 1 else f"{1000 * gflops:.3g} million multiply-adds"


def _bare(size: str) -> str:
    height, width = parse_size(size)
    return f"{height}" if height == width else size


def _ratio(size: str) -> float:
    height, width = parse_size(size)
    return height / width


def _majority(row: Row) -> float:
    value = row.get("majority", math.nan)
    return float(value) if _is_number(value) else math.nan


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and value == value


def _seed(row: Row) -> str:
    """The seed as text; of a model without one NaN, which equals nothing."""
    return "" if row["seed"] != row["seed"] else str(row["seed"])


def _named(row: Row) -> str:
    return f"{row['label']} at {row['img_size']} ({row['policy']})"


def _list(names: Sequence[str], word: str = "and") -> str:
    return f" {word} ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."
