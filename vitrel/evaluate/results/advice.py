"""Which model is better at which size, and which sizes are safe for it: a verdict for every row, three sentences a model.

All comparisons are of the task's metric (top-1, mIoU), by `vitrel.evaluate.results.statistics`, image by image where
predictions are stored. A statement is made only where it is shown; the rest is said to be unknown, with the number of images or
seeds that would tell.

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np

from vitrel.common.sizes import Budget, format_size, nearest_size, parse_size, sizes_in_words
from vitrel.evaluate.results.aggregate import (
    NO_SCORES,
    Sample,
    Scores,
    by_area,
    contrast,
    does_nothing,
    groups_of,
    is_training,
    known_number,
    main_metric,
    merged,
    protocols_of,
    sample_of,
    table_order,
    train_sizes_of,
)
from vitrel.evaluate.results.statistics import Estimate, holm, needed, p_values, pooled
from vitrel.evaluate.sweep import MARGIN, Row
from vitrel.evaluate.tasks.base import capital, task_of

SAFE, LOSES, UNKNOWN = "safe", "loses", "cannot tell"
COLUMNS = {  # of judged rows, besides those of `aggregate`
    "difference": "accuracy minus that at the training size, of several the nearest, points",
    "difference_low": "lower end of its interval, at the level of Holm's procedure for safe",
    "difference_high": "upper end of its interval, at the level of Holm's procedure for loses",
    "verdict": "safe: shown to be less than the margin below the training size; loses: shown to be below it; else cannot tell",
    "more": "how many more images or seeds would decide, if the difference stays the same",
    "used": "whether the size is judged under this policy",
}


@dataclass(frozen=True)
class Advice:
    """The advice on one model, about its first protocol, of those with a row at a training size if there are any: at most
    three sentences. The first says how it compares with the other models.
    """

    label: str
    protocol: str
    sentences: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(self.sentences)


@dataclass(frozen=True)
class Judged:
    """The aggregated rows of an evaluation with the columns COLUMNS, and the advice on every model.

    Args:
        margin: in points.
        headline: one sentence, which model is the best at which size; "" with one model.
        metric: the column by which models are compared.
        title: the metric in words.
    """

    rows: list[Row]
    advice: list[Advice]
    margin: float
    headline: str
    metric: str
    title: str

    @property
    def by_size(self) -> list[Row]:
        """The rows by which sizes are judged, one per model, protocol and size, by area."""
        labels = [one.label for one in self.advice]
        used, protocols = [row for row in self.rows if row["used"]], protocols_of(self.rows)
        return sorted(
            used, key=lambda row: (labels.index(row["label"]), protocols.index(row["protocol"]), by_area(row["img_size"]))
        )

    @property
    def basis(self) -> str:
        """A few words that explain those of the advice, and name its protocol."""
        protocols = " and ".join(dict.fromkeys(one.protocol for one in self.advice))
        seeds = {row["seeds"] for row in self.rows}
        about = "the trained models" if seeds == {1} else "models trained in this way, with one seed the trained model"
        return (
            f"Safe: shown to be less than {self.margin:g} points of {self.title} below the training size. Loses: shown to be "
            f"below it. Cannot tell: neither. Sizes are compared in the {protocols} protocol. Verdicts are about {about}."
        )


class Place(NamedTuple):
    """A model at one size under one policy: the aggregated row, the sample of its seeds, whether the policy is the first."""

    row: Row
    sample: Sample
    is_default: bool


Sizes = dict[str, dict[str, Place]]  # {size: {policy: place}}, by area; of the policies, the first in the rows is the first
Used = dict[str, Place]  # {size: place under the policy that it is judged by}


def judge(rows: Sequence[Row], scores: Scores = NO_SCORES, margin: float = MARGIN) -> Judged:
    """Return every aggregated row with its verdict, and the advice on every model.

    ValueError for a margin that is not above 0.

    Args:
        scores: of the predictions of these rows, where stored.
        margin: the loss that does not matter, in points.
    """
    if not margin > 0:
        raise ValueError(f"the margin is a loss in points and must be above 0, got {margin:g}")
    models = _places(rows, scores)
    _add_verdicts(models.values(), margin)
    used: dict[str, dict[str, Used]] = defaultdict(dict)  # by label and protocol
    for ((label, protocol), sizes), chosen in zip(models.items(), _used([*models.values()]), strict=True):
        used[label][protocol] = chosen
        for size, policies in sizes.items():
            for place in policies.values():
                place.row["used"] = place is chosen[size]
    first = {label: _protocol_of_training(of_label) or next(iter(of_label)) for label, of_label in used.items()}
    of_first = {label: used[label][first[label]] for label in used}
    compared = _compared(of_first, first)
    advice = [Advice(label, first[label], _sentences(of_first[label], compared[label], margin)) for label in first]
    places = [place for sizes in models.values() for policies in sizes.values() for place in policies.values()]
    judged = table_order([place.row for place in places])
    task = task_of(rows[0])
    return Judged(judged, advice, margin, _headline(compared, of_first), task.metric, task.title)


def _protocol_of_training(of_label: Mapping[str, Used]) -> str:
    """The first protocol with a row at a training size; "" for none."""
    return next((name for name, used in of_label.items() if any(is_training(place.row) for place in used.values())), "")


def _places(rows: Sequence[Row], scores: Scores) -> dict[tuple[str, str], Sizes]:
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


def _add_verdicts(models: Iterable[Sizes], margin: float) -> None:
    """Add the columns difference to more to the rows of every model in a protocol; a family each."""
    families: list[list[Place]] = []
    found: list[list[Estimate]] = []
    for sizes in models:
        every = [place for policies in sizes.values() for place in policies.values()]
        for place in every:
            place.row.update(dict.fromkeys(("difference", "difference_low", "difference_high"), math.nan), verdict="", more="")
        references = {
            parse_size(size): next(iter(policies.values()))
            for size, policies in sizes.items()
            if is_training(next(iter(policies.values())).row)
        }
        if references:
            families.append([place for place in every if place not in references.values()])
            nearest = [references[nearest_size(parse_size(place.row["img_size"]), references)] for place in families[-1]]
            pairs = zip(families[-1], nearest, strict=True)
            found.append([contrast([place.sample], [reference.sample]) for place, reference in pairs])
    tests = zip(families, found, _by_family(found, -margin), _by_family(found, 0.0, above=False), strict=True)
    for places, estimates, safe, loses in tests:
        for place, one, *levels in zip(places, estimates, holm(safe), holm(loses), strict=True):
            low, high = float(one.low(levels[0])), float(one.high(levels[1]))
            verdict = SAFE if low > -margin else LOSES if high < 0 else UNKNOWN
            more = _more(one, margin, *levels) if verdict == UNKNOWN else ""
            place.row.update(difference=float(one.mean), difference_low=low, difference_high=high, verdict=verdict, more=more)


def _by_family(families: Sequence[Sequence[Estimate]], value: float = 0.0, above: bool = True) -> list[np.ndarray]:
    """The p-values of every family, computed together."""
    p = p_values([one for family in families for one in family], value, above)
    return np.split(p, np.cumsum([len(family) for family in families])[:-1]) if families else []


def _more(one: Estimate, margin: float, safe_level: float, loses_level: float) -> str:
    """The number of images or of seeds that would tell, with the same difference: "about 300 more images or 2 more seeds"."""
    loss = -float(one.center)
    # the interval has to exclude the margin, or 0: whichever is farther from the loss
    distance, level = max((margin - loss, safe_level), (loss, loses_level))
    images, seeds = needed(one, distance, level)
    parts = [] if images is None else [f"{_rounded(images - one.images):,} more images"]
    if seeds is not None:
        more = seeds - one.seeds
        parts.append(f"{more} more seed{'s' if more > 1 else ''}")
    return f"about {' or '.join(parts)}" if parts else "more images and more seeds"


def _rounded(number: int) -> int:
    """A number rounded up to two digits, at least 1: 1234 -> 1300."""
    step = 10 ** max(0, len(str(number)) - 2)
    return max(1, -(-number // step) * step)


class Standing(NamedTuple):
    """A model among the others, by size: better than all others; worse than some: {the best of these: {size: points}}; neither
    shown.
    """

    ahead: list[str]
    behind: dict[str, dict[str, float]]
    undecided: list[str]
    others: int


def _compared(used: Mapping[str, Used], protocol: Mapping[str, str]) -> dict[str, Standing]:
    """Every model compared with every other at the sizes and in the protocol that both have: one family (Holm)."""
    pairs = [
        (size, a, b)
        for a, b in combinations(used, 2)
        if protocol[a] == protocol[b]
        for size in used[a]
        if size in used[b] and _comparable(used[a][size], used[b][size])
    ]
    found = _pooled(pairs, [contrast([used[a][size].sample], [used[b][size].sample]) for size, a, b in pairs])
    p = [p_values(found, above=above) for above in (True, False)]
    levels = holm(np.minimum(*p))
    worse: dict[tuple[str, str], set[str]] = defaultdict(set)  # (label, size): labels shown worse
    better: dict[tuple[str, str], set[str]] = defaultdict(set)
    met: dict[tuple[str, str], set[str]] = defaultdict(set)
    for (size, a, b), above, below, level in zip(pairs, *p, levels, strict=True):
        for label, other, is_better, is_worse in ((a, b, above, below), (b, a, below, above)):
            met[label, size].add(other)
            worse[label, size] |= {other} if is_better <= level else set()
            better[label, size] |= {other} if is_worse <= level else set()
    standings, order = {}, {label: index for index, label in enumerate(used)}
    for label, sizes in used.items():
        standing = Standing([], defaultdict(dict), [], len({other for size in sizes for other in met[label, size]}))
        for size in sizes:
            if shown := better[label, size]:
                best = max((_accuracy(used[other][size]), -order[other], other) for other in shown)[
                    2
                ]  # of equal ones the first
                standing.behind[best][size] = _accuracy(used[best][size]) - _accuracy(sizes[size])
            elif met[label, size]:
                (standing.ahead if worse[label, size] == met[label, size] else standing.undecided).append(size)
        standings[label] = standing
    return standings


def _pooled(pairs: Sequence[tuple[str, str, str]], found: Sequence[Estimate]) -> list[Estimate]:
    """Estimates of pairs (size, a, b) of models, those of one size with the variance over seeds that its
    models have together.
    """
    groups: dict[tuple[str, int], list[int]] = defaultdict(list)
    for at, ((size, *_), one) in enumerate(zip(pairs, found, strict=True)):
        groups[size, one.seeds].append(at)
    by_pair = [*found]
    for chosen in groups.values():
        models = len({label for index in chosen for label in pairs[index][1:]})
        for index, one in zip(chosen, pooled([found[index] for index in chosen], models), strict=True):
            by_pair[index] = one
    return by_pair


def _accuracy(place: Place) -> float:
    return main_metric(place.row)


def _headline(standings: Mapping[str, Standing], used: Mapping[str, Used]) -> str:
    """Which model is shown to be better than all others at which sizes, the most sizes first."""
    if not any(standing.others for standing in standings.values()):
        return ""
    every = [*dict.fromkeys(size for sizes in used.values() for size in sorted(sizes, key=by_area))]
    best = {label: standing.ahead for label, standing in standings.items() if standing.ahead}
    parts = []
    for label in sorted(best, key=lambda label: -len(best[label])):
        where = "every size" if len(best[label]) == len(every) else pixels(*best[label])
        parts.append(f"{label} is the best at {where}")
    open_sizes = [size for size in sorted(every, key=by_area) if not any(size in sizes for sizes in best.values())]
    if open_sizes:
        where = "any size" if len(open_sizes) == len(every) else pixels(*open_sizes)
        beaten = {label: {size for by in standing.behind.values() for size in by} for label, standing in standings.items()}
        leading = [label for label in standings if not beaten[label] & {*open_sizes}]
        than = f"than {_list(leading)}" if len(leading) in (1, 2) else "than all others"
        parts.append(f"no model is shown to be better {than} at {where}")
    text = "; ".join(parts)
    return f"{text[:1].upper() if text.startswith('no ') else text[:1]}{text[1:]}."


def _comparable(ours: Place, theirs: Place) -> bool:
    """Whether two models have one seed each, or two or more in common: one common seed of several tells nothing about seeds."""
    seeds = [{*place.sample.seeds} for place in (ours, theirs)]
    return len(seeds[0]) == len(seeds[1]) == 1 or len(seeds[0] & seeds[1]) > 1


def _sentences(used: Used, standing: Standing, margin: float) -> tuple[str, ...]:
    """The advice on a model: how it compares, which sizes are safe, its best size."""
    anchor = _anchor(used)
    title = task_of(anchor).title
    if not anchor["low"] > _majority(anchor):
        return (
            f"Train it first: its {title} of {main_metric(anchor):.1f} % at {pixels(anchor['img_size'])} is not shown to be "
            f"above the {_majority(anchor):.1f} % of always predicting the most frequent class.",
        )
    nothing = []
    if does_nothing(anchor):
        share = f"{100 * anchor['position_share']:.2g} % of the logits' spread"
        nothing = [f"its position encoding does nothing: it changes attention by {share}"]
    sentences = [*_comparison(standing, used), *nothing, _sizes_sentence(used), _best_size(used, margin)][:3]
    is_name = any(sentences[0].startswith(f"{other} is") for other in standing.behind)  # the name of a model stays as it is
    first, *rest = [f"{text}." for text in sentences]
    return (first if is_name else capital(first), *map(capital, rest))


def _comparison(standing: Standing, used: Used) -> list[str]:
    """How the model compares with the others; [] where there are none."""
    if not standing.others:
        return []
    several, behind = standing.others > 1, standing.behind
    if len(behind) > 2:  # named together
        behind = {"another": {size: points for others in behind.values() for size, points in others.items()}}
    parts = []
    if standing.ahead:
        parts.append(f"better than {'every' if several else 'the'} other at {_where(standing.ahead, used)}")
    parts += [f"{other} is better at {_where([*by], used)}, by {_points([*by.values()])}" for other, by in behind.items()]
    if standing.undecided and not standing.behind:
        which = "no other is" if several else "the other is not"
        parts.append(f"{which} shown to be better at {_where(standing.undecided, used, 'any size')}")
    return ["; ".join(parts)]


def _points(differences: Sequence[float]) -> str:
    """Differences in words: "9.9 points", "19.8 to 25.1 points"."""
    ends = dict.fromkeys(f"{end:.1f}" for end in (min(differences), max(differences)))
    return f"{' to '.join(ends)} points"


def _sizes_sentence(used: Used) -> str:
    """At which sizes the model is safe, at which it loses, and what would decide about the others."""
    anchor, by_verdict = _anchor(used), defaultdict[str, list[str]](list)
    at = train_sizes_of(anchor)
    native = isinstance(at[0], Budget)
    trained = sizes_in_words(at) if native else pixels(*map(format_size, at))
    name = f"training size{'s' if len(at) > 1 else ''}, {trained}"
    if not is_training(anchor):
        how = " (--protocol native)" if native else ""
        return f"evaluate it at its {name}{how}, too: without it no size can be called safe"
    if all(is_training(place.row) for place in used.values()):
        return f"only its {name}, {'were' if len(used) > 1 else 'was'} evaluated"
    for size, place in used.items():
        by_verdict[place.row["verdict"]].append(size)
    parts = []
    if sizes := by_verdict[SAFE]:
        parts.append(f"safe at {_with_policies(sizes, used)}")
    if sizes := by_verdict[LOSES]:
        parts.append(f"loses at {_with_policies(sizes, used)}: fine-tune it there")
    if sizes := by_verdict[UNKNOWN]:
        more = {used[size].row["more"] for size in sizes}
        hint = f" ({more.pop()} would tell)" if len(more) == 1 else ""
        parts.append(f"the data cannot tell at {_where(sizes, used)}{hint}")
    return "; ".join(parts)


def _where(sizes: Sequence[str], used: Used, all_sizes: str = "every size") -> str:
    """Sizes in words; `all_sizes` where they are all that were evaluated, "every other size" for all but the training size."""
    if len(sizes) == len(used) > 1:
        return all_sizes
    if len(sizes) > 1 and {*sizes} == {size for size, place in used.items() if not is_training(place.row)}:
        return "every other size"
    return pixels(*(size for size in used if size in sizes))


def _with_policies(sizes: Sequence[str], used: Used) -> str:
    """Sizes in words, with the policies that they are judged by instead of the first: "64 and 96 px (policy clip at 96 px)"."""
    by_policy: dict[str, list[str]] = defaultdict(list)
    for size in sizes:
        if not used[size].is_default:
            by_policy[used[size].row["policy"]].append(size)
    notes = [f"policy {policy}" + ("" if len(at) == len(sizes) else f" at {pixels(*at)}") for policy, at in by_policy.items()]
    return _where(sizes, used) + (f" ({', '.join(notes)})" if notes else "")


def _best_size(used: Used, margin: float) -> str:
    """The size with the highest accuracy, and the smallest that is shown to be less than the margin below it."""
    best = max(used, key=lambda size: _accuracy(used[size]))  # of equal ones the smallest
    smaller = [size for size in used if by_area(size) < by_area(best)]
    title, value = task_of(used[best].row).title, f"{_accuracy(used[best]):.1f} %"
    text = f"{title} is highest at {pixels(best)}, {value}" if len(used) > 1 else f"{title} is {value}"
    p = p_values([contrast([used[size].sample], [used[best].sample]) for size in smaller], -margin)
    near = [size for size, shown in zip(smaller, p <= holm(p), strict=True) if shown]
    return text + (f"; {pixels(near[0])} is within {margin:g} points of that" if near else "")


def _anchor(used: Used) -> Row:
    """The row with the highest accuracy, of those at training sizes if there are any."""
    rows = [place.row for place in used.values()]
    return max([row for row in rows if is_training(row)] or rows, key=main_metric)


def _majority(row: Row) -> float:
    """Accuracy of always predicting the most frequent class, percent; -1 where unknown."""
    value: Any = row.get("majority")
    return float(value) if known_number(value) else -1.0


def pixels(*sizes: str) -> str:
    """Join sizes for a sentence, a square by its side: ("48x48", "64x96") -> "48 and 64x96 px"."""
    return f"{_list([*map(_bare, sizes)])} px"


def _bare(size: str) -> str:
    """ "48x48" -> "48", "64x96" -> "64x96"."""
    height, width = parse_size(size)
    return f"{height}" if height == width else size


def _list(names: Iterable[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
