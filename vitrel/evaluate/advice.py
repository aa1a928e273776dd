"""Which model is better at which size, and which sizes are safe for it: a verdict for every row, three sentences a model.

All comparisons are of top-1, by `vitrel.evaluate.statistics`, image by image where predictions are stored. A statement is made
only where it is shown; the rest is said to be unknown, with the number of images or seeds that would tell.

reference    The row at the training size, of the same model and protocol, under its first policy. Without it: no verdicts.
margin       The loss, in points of top-1, that does not matter.
safe         The whole interval of the difference to the reference lies above -margin.
loses        It lies below 0, and the size is not safe.
cannot tell  Neither.
Holm         The rows of a model in a protocol (sizes and policies) are one family: the lower ends of their intervals are at the
             levels of Holm's procedure for "safe", the upper ends at those for "loses". The probability that any row of the
             family is wrongly called safe is at most 2.5 %, and the same for loses. All comparisons of two models at a size are
             another family, whose ends err in at most 2.5 % each.
policy       A size is judged under the first policy in the rows, unless another is shown better (Holm), or is safe there
             where the first is not; then under the most accurate of these.
one seed     The verdicts are about the trained model; with several seeds about models that are trained in this way.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from vitrel.common.sizes import parse_size
from vitrel.evaluate.statistics import Estimate, holm, needed, p_values
from vitrel.evaluate.sweep import Row
from vitrel.evaluate.table import (
    NO_SCORES,
    Sample,
    Scores,
    by_area,
    contrast,
    does_nothing,
    groups_of,
    known_number,
    merged,
    protocol_order,
    read_rescue,
    sample_of,
    table_order,
)
from vitrel.position import POSITIONS

MARGIN = 2.0  # points of top-1
SAFE, LOSES, UNKNOWN = "safe", "loses", "cannot tell"
COLUMNS = {  # of judged rows, besides those of `aggregate`
    "difference": "top-1 minus that at the training size, points",
    "difference_low": "lower end of its interval, at the level of Holm's procedure for safe",
    "difference_high": "upper end of its interval, at the level of Holm's procedure for loses",
    "verdict": "safe: shown to be less than the margin below the training size; loses: shown to be below it; else cannot tell",
    "more": "how many more images or seeds would decide, if the difference stays the same",
    "used": "whether the size is judged under this policy",
}


@dataclass(frozen=True)
class Advice:
    """The advice on one model, about its first protocol ("scale" where there is one): at most three sentences. The first says
    how it compares with the other models.
    """

    label: str
    protocol: str
    sentences: tuple[str, ...]

    @property
    def text(self) -> str:
        return " ".join(self.sentences)


@dataclass(frozen=True)
class Judged:
    """The aggregated rows of an evaluation with the columns COLUMNS, and the advice on every model; margin: in points.

    headline: one sentence, which model is the best at which size; "" with one model.
    """

    rows: list[Row]
    advice: list[Advice]
    margin: float = MARGIN
    headline: str = ""

    @property
    def by_size(self) -> list[Row]:
        """The rows by which sizes are judged, one per model, protocol and size, by area."""
        labels = [one.label for one in self.advice]
        used = [row for row in self.rows if row["used"]]
        return sorted(
            used, key=lambda row: (labels.index(row["label"]), protocol_order(row["protocol"]), by_area(row["img_size"]))
        )

    @property
    def basis(self) -> str:
        """A few words that explain those of the advice, and name its protocol."""
        protocols = " and ".join(dict.fromkeys(one.protocol for one in self.advice))
        return (
            f"Safe: shown to be less than {self.margin:g} points of top-1 below the training size. Loses: shown to be below "
            f"it. Cannot tell: neither. Sizes are compared in the {protocols} protocol."
        )


class Place(NamedTuple):
    """A model at one size under one policy: the aggregated row, the sample of its seeds, whether the policy is the first."""

    row: Row
    sample: Sample
    is_default: bool


Sizes = dict[str, dict[str, Place]]  # {size: {policy: place}}, by area; of the policies, the first in the rows is the first
Used = dict[str, Place]  # {size: place under the policy that it is judged by}


def judge(rows: Sequence[Row], scores: Scores = NO_SCORES, margin: float = MARGIN, folder: Path | None = None) -> Judged:
    """Return every aggregated row with its verdict, and the advice on every model.

    scores: of the predictions of these rows, where stored. margin: the loss that does not matter, in points of top-1. folder:
    of the evaluation, for settings that --rescue found. ValueError for a margin that is not above 0.
    """
    if not margin > 0:
        raise ValueError(f"the margin is a loss in points of top-1 and must be above 0, got {margin:g}")
    models = _places(rows, scores)
    _add_verdicts(models.values(), margin)
    used: dict[str, dict[str, Used]] = defaultdict(dict)  # by label and protocol
    for ((label, protocol), sizes), chosen in zip(models.items(), _used([*models.values()]), strict=True):
        used[label][protocol] = chosen
        for size, policies in sizes.items():
            for place in policies.values():
                place.row["used"] = place is chosen[size]
    first = {label: min(of_label, key=protocol_order) for label, of_label in used.items()}
    compared = _compared({label: used[label][first[label]] for label in used}, first)
    rescued = _rescued(folder)
    advice = [
        Advice(label, protocol, _sentences(used[label][protocol], compared[label], rescued, margin))
        for label, protocol in first.items()
    ]
    places = [place for sizes in models.values() for policies in sizes.values() for place in policies.values()]
    headline = _headline(compared, {label: used[label][first[label]] for label in used})
    return Judged(table_order([place.row for place in places]), advice, margin, headline)


def better_of(low: float, high: float, margin: float = MARGIN) -> str:
    """Return the verdict on A - B with this interval, in points: "A", "B", "level" (within the margin) or "cannot tell"."""
    if low > 0 or high < 0:
        return "A" if low > 0 else "B"
    return "level" if low > -margin and high < margin else UNKNOWN


def _places(rows: Sequence[Row], scores: Scores) -> dict[tuple[str, str], Sizes]:
    """{(label, protocol): sizes}, labels in the order of the rows."""
    found: dict[tuple[str, str], Sizes] = {}
    for protocol, policy, group in _without_equal_policies(groups_of(rows), scores):
        row = merged(protocol, group, scores) | {"policy": policy}
        policies = found.setdefault((row["label"], row["protocol"]), {}).setdefault(row["img_size"], {})
        policies[policy] = Place(row, sample_of(group, scores), not policies)
    return {key: {size: sizes[size] for size in sorted(sizes, key=by_area)} for key, sizes in found.items()}


def _without_equal_policies(groups: Sequence[tuple[str, list[Row]]], scores: Scores) -> list[tuple[str, str, list[Row]]]:
    """(protocol, name of the policy, rows) of the groups; policies of a model that were evaluated at the same sizes of a
    protocol, with equal predictions at all of them, are one, "clip = geometric", with the rows of the first.
    """
    by_policy: dict[tuple[str, str], dict[str, dict[str, list[Row]]]] = defaultdict(lambda: defaultdict(dict))
    for protocol, group in groups:
        row = group[0]
        by_policy[row["label"], protocol][row["policy"]][row["img_size"]] = group
    names: dict[tuple[str, str, str], str] = {}  # {(label, protocol, policy): name of its rows, "" for those left out}
    for (label, protocol), policies in by_policy.items():
        firsts: dict[str, list[str]] = {}
        for policy, sizes in policies.items():
            same = (
                first
                for first in firsts
                if policies[first].keys() == sizes.keys()
                and all(scores.same(policies[first][size], sizes[size]) for size in sizes)
            )
            firsts.setdefault(next(same, policy), []).append(policy)
        for equal in firsts.values():
            names |= {(label, protocol, policy): "" for policy in equal} | {(label, protocol, equal[0]): " = ".join(equal)}
    kept = []
    for protocol, group in groups:
        if name := names[group[0]["label"], protocol, group[0]["policy"]]:
            kept.append((protocol, name, group))
    return kept


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
    return place.row["verdict"] == SAFE, place.row["top1"]


def _add_verdicts(models: Iterable[Sizes], margin: float) -> None:
    """Add the columns difference to more to the rows of every model in a protocol; a family each."""
    families: list[list[Place]] = []
    found: list[list[Estimate]] = []
    for sizes in models:
        every = [place for policies in sizes.values() for place in policies.values()]
        for place in every:
            place.row.update(dict.fromkeys(("difference", "difference_low", "difference_high"), math.nan), verdict="", more="")
        at_training = sizes.get(every[0].row["train_size"])
        if at_training:
            reference = next(iter(at_training.values()))
            families.append([place for place in every if place is not reference])
            found.append([contrast([place.sample], [reference.sample]) for place in families[-1]])
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


def _top1(place: Place) -> float:
    return place.row["top1"]


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
    found = [contrast([used[a][size].sample], [used[b][size].sample]) for size, a, b in pairs]
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
                best = max((_top1(used[other][size]), -order[other], other) for other in shown)[2]  # of equal ones the first
                standing.behind[best][size] = _top1(used[best][size]) - _top1(sizes[size])
            elif met[label, size]:
                (standing.ahead if worse[label, size] == met[label, size] else standing.undecided).append(size)
        standings[label] = standing
    return standings


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


def _rescued(folder: Path | None) -> dict[tuple[str, str, str], str]:
    """{(label, size, protocol): the setting that --rescue found and that is shown to help there}."""
    rows = [] if folder is None else read_rescue(folder)
    return {
        (row["label"], row["img_size"], row["protocol"]): row["setting"] for row in rows if float(row["difference_low"]) > 0
    }


def _sentences(used: Used, standing: Standing, rescued: Mapping[tuple[str, str, str], str], margin: float) -> tuple[str, ...]:
    """The advice on a model: how it compares, which sizes are safe, its best size."""
    anchor = _anchor(used)
    if not anchor["low"] > _majority(anchor):
        return (
            f"Train it first: its top-1 of {anchor['top1']:.1f} % at {pixels(anchor['img_size'])} is not shown to be above the "
            f"{_majority(anchor):.1f} % of always predicting the most frequent class.",
        )
    comparison, subject = _comparison(standing, used), _words(used)[0]
    named = any(text.startswith(subject) for text in comparison)  # "it" in the next sentence
    sizes, nothing = _sizes_sentence(used, rescued, named), _no_position(anchor)
    sentences = [*comparison, *nothing, sizes] if nothing else [*comparison, sizes, _best_size(used, margin)]
    first, *rest = [f"{text}." for text in sentences]
    is_name = any(first.startswith(other) for other in standing.behind)  # the name of a model stays as it is
    return (first if is_name else _capital(first), *map(_capital, rest))


def _capital(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def _no_position(anchor: Row) -> list[str]:
    """A sentence if the model's position encoding does nothing, else []."""
    if not does_nothing(anchor):
        return []
    share = f"{100 * anchor['position_share']:.2g} % of the logits' spread"
    return [f"its position encoding does nothing: it changes attention by {share}"]


def _comparison(standing: Standing, used: Used) -> list[str]:
    """How the model compares with the others; [] where there are none."""
    if not standing.others:
        return []
    several, (subject, be, *_) = standing.others > 1, _words(used)
    behind = standing.behind
    if len(behind) > 2:  # named together
        behind = {"another": {size: points for others in behind.values() for size, points in others.items()}}
    parts = []
    if standing.ahead:
        parts.append(f"{subject} {be} better than {'every' if several else 'the'} other at {_where(standing.ahead, used)}")
    parts += [f"{other} is better at {_where([*by], used)}, by {_points([*by.values()])}" for other, by in behind.items()]
    if standing.undecided and not standing.behind:
        which = "no other is" if several else "the other is not"
        parts.append(f"{which} shown to be better at {_where(standing.undecided, used, 'any size')}")
    return ["; ".join(parts)]


def _points(differences: Sequence[float]) -> str:
    """Differences in words: "9.9 points", "19.8 to 25.1 points"."""
    ends = dict.fromkeys(f"{end:.1f}" for end in (min(differences), max(differences)))
    return f"{' to '.join(ends)} points"


def _sizes_sentence(used: Used, rescued: Mapping[tuple[str, str, str], str], named: bool) -> str:
    """At which sizes the model is safe, at which it loses, and what would decide about the others."""
    anchor = _anchor(used)
    trained = pixels(anchor["train_size"])
    if anchor["img_size"] != anchor["train_size"]:
        return f"evaluate it at its training size, {trained}, too: without it no size can be called safe"
    if len(used) == 1:
        return f"only its training size, {trained}, was evaluated"
    by_verdict: dict[str, list[str]] = defaultdict(list)
    for size, place in used.items():
        by_verdict[place.row["verdict"]].append(size)
    parts, (subject, be, it, loses) = [], _words(used)
    if sizes := by_verdict[SAFE]:
        parts.append(f"{it if named else subject} {be} safe at {_with_policies(sizes, used)}")
    if sizes := by_verdict[LOSES]:
        who = it if parts or named else subject
        parts.append(f"{who} {loses} at {_with_policies(sizes, used)}: {_remedy(sizes, used, rescued)}")
    if sizes := by_verdict[UNKNOWN]:
        more = {used[size].row["more"] for size in sizes}
        hint = f" ({more.pop()} would tell)" if len(more) == 1 else ""
        parts.append(f"the data cannot tell at {_where(sizes, used)}{hint}")
    return "; ".join(parts)


def _words(used: Used) -> tuple[str, str, str, str]:
    """The subject of a sentence, "is", "it" and "loses": the trained model, or with several seeds, models trained like it."""
    seeds = _anchor(used)["seeds"]
    if seeds == 1:
        return "this trained model", "is", "it", "loses"
    return f"models trained this way ({seeds} seeds)", "are", "they", "lose"


def _where(sizes: Sequence[str], used: Used, all_sizes: str = "every size") -> str:
    """Sizes in words; `all_sizes` where they are all that were evaluated, "every other size" for all but the training size."""
    if len(sizes) == len(used) > 1:
        return all_sizes
    if len(sizes) == len(used) - 1 > 1 and _anchor(used)["train_size"] not in sizes:
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


def _remedy(sizes: Sequence[str], used: Used, rescued: Mapping[tuple[str, str, str], str]) -> str:
    """What helps at sizes that lose: fine-tuning, a setting that --rescue found, or --rescue where RoPE may be scaled."""
    rows = [used[size].row for size in sizes]
    keys = [(row["label"], row["img_size"], row["protocol"]) for row in rows]
    if settings := dict.fromkeys(rescued[key] for key in keys if key in rescued):
        return f"fine-tune it there, or take {' or '.join(settings)}, which helps without training (rescue.md)"
    larger = [row for row in rows if by_area(row["img_size"]) > by_area(row["train_size"])]
    return "fine-tune it there" + (", or try --rescue" if any(map(_keeps_frequencies, larger)) else "")


def _best_size(used: Used, margin: float) -> str:
    """The size with the highest top-1, and the smallest that is shown to be less than the margin below it."""
    best = max(used, key=lambda size: used[size].row["top1"])  # of equal ones the smallest
    smaller = [size for size in used if by_area(size) < by_area(best)]
    row = used[best].row
    text = f"top-1 is highest at {pixels(best)}, {row['top1']:.1f} %" if len(used) > 1 else f"top-1 is {row['top1']:.1f} %"
    p = p_values([contrast([used[size].sample], [used[best].sample]) for size in smaller], -margin)
    near = [size for size, shown in zip(smaller, p <= holm(p), strict=True) if shown]
    return text + (f"; {pixels(near[0])} is within {margin:g} points of that" if near else "")


def _anchor(used: Used) -> Row:
    """The row at the training size, else that with the highest top-1."""
    rows = {size: place.row for size, place in used.items()}
    return rows.get(next(iter(rows.values()))["train_size"]) or max(rows.values(), key=lambda row: row["top1"])


def _keeps_frequencies(row: Row) -> bool:
    """Whether a row has unseen offsets, and a rotary encoding whose policies could lower its frequencies but do not."""
    keys = [key for key in str(row["encoding"]).split("+") if key in POSITIONS and POSITIONS[key].rotates]
    return row["unseen"] > 0 and any(key not in row["resampled"] for key in keys if POSITIONS[key].policies)


def _majority(row: Row) -> float:
    """Top-1 of always predicting the most frequent class, percent; -1 where unknown."""
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
