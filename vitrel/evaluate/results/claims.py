"""Claims: comparisons of models that are written down before an evaluation, and that its rows judge.

A claim holds where every pair of models is shown to be ahead. This needs no correction for the number of pairs, because all of
them have to be. It does not hold where any pair is shown to be behind, by Holm's procedure over the pairs; otherwise it is not
shown. The intervals of the pairs are those of `vitrel.evaluate.results.statistics`, 95 % for each by itself. With one seed a
pair is about the trained models, and the verdict says so.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from vitrel.common.sizes import format_size, parse_size
from vitrel.evaluate.results.aggregate import NO_SCORES, Scores, contrast, is_training, main_metric, sample_of
from vitrel.evaluate.results.statistics import holm
from vitrel.evaluate.sweep import Row
from vitrel.evaluate.tasks.base import TASKS, task_named, task_of

METRICS = tuple(metric for task in TASKS for metric in task_named(task).metrics)  # those that claims may be about


@dataclass(frozen=True)
class Claim:
    """A claim that each model of `better` is more accurate than each of `than`, at `img_size` and `protocol`.

    Args:
        text: the claim in words.
        better: "label/policy", or "label" for the first policy in the rows.
        than: written as `better`, or an accuracy in percent.
        img_size: such as "128x128", pixels.
        translation: with the images' content translated by this number of pixels (translation.csv); None: without.
        learned: less accurate models than this at the training size, percent, are left out and listed.
        metric: one of the task's (`Task.metrics`), by default the first: "top1_among", top-1 among the data's classes, for
            models that have more classes; "pixel_accuracy".
    """

    text: str
    better: tuple[str, ...]
    than: tuple[str, ...] | float
    img_size: str
    protocol: str = "scale"
    translation: int | None = None
    learned: float = 0.0
    metric: str = ""

    def __post_init__(self) -> None:
        if self.metric and (self.metric not in METRICS or self.translation is not None):
            raise ValueError(
                f"metric is one of {', '.join(METRICS)}, and left out where content is translated, got {self.metric!r}"
            )

    def labels(self) -> set[str]:
        """Return the labels that the claim names, without policies."""
        return {name.split("/")[0] for name in (*self.better, *(self.than if isinstance(self.than, tuple) else ()))}


def read_claim(item: Any) -> Claim:
    """Return the Claim of a configuration's mapping; ValueError for unknown, missing or invalid keys."""
    names = [field.name for field in fields(Claim)]
    if not isinstance(item, Mapping) or not {"text", "better", "than", "img_size"} <= item.keys() <= {*names}:
        raise ValueError(
            "a claim has text, better, than and img_size, and may have protocol, translation, learned and metric, "
            f"got {item!r:.80}"
        )
    values = dict(item) | {"img_size": format_size(parse_size(item["img_size"]))}
    for side in ("better", "than"):
        value = values[side]
        if not (side == "than" and isinstance(value, (int, float)) and not isinstance(value, bool)):
            values[side] = (value,) if isinstance(value, str) else tuple(value)
    return Claim(**values)


def judge_claims(
    claims: Sequence[Claim], rows: Sequence[Row], translated: Sequence[Row] = (), scores: Scores = NO_SCORES
) -> list[str]:
    """Return a Markdown paragraph per claim: the verdict, and the difference in points of every pair with its interval.

    Differences are better minus than. ValueError for a label without rows.

    Args:
        translated: lines of translation.csv, which have no scores.
        scores: of the predictions of the rows.
    """
    return [_judged(claim, rows, translated, scores) for claim in claims]


class Pair(NamedTuple):
    """Two sides of a claim, their difference in points with its 95 % interval, the p-value against being behind, the seeds."""

    ours: str
    theirs: str | float
    mean: float
    low: float
    high: float
    p_behind: float
    seeds: int


def _judged(claim: Claim, rows: Sequence[Row], translated: Sequence[Row], scores: Scores) -> str:
    trained = {label: _accuracy_trained(rows, label) for label in claim.better}
    kept = [label for label in claim.better if trained[label] >= claim.learned]
    others = claim.than if isinstance(claim.than, tuple) else (claim.than,)
    pairs = _pairs(claim, rows, translated, scores, [(ours, theirs) for ours in kept for theirs in others])
    ahead = [pair for pair in pairs if pair.low > 0]
    behind = [pair for pair in pairs if pair.high < 0]
    undecided = [pair for pair in pairs if pair not in ahead and pair not in behind]
    p = np.array([pair.p_behind for pair in pairs])
    shown_behind = bool((p <= holm(p)).any())
    verdict = "holds" if pairs and len(ahead) == len(pairs) else "does not hold" if shown_behind else "is not shown"
    about = " for these trained models" if any(pair.seeds == 1 for pair in pairs) else ""
    lines = [f"- **{claim.text}** This {verdict}{about} ({len(ahead)} of {len(pairs)} pairs; {_place(claim, rows)})."]
    for word, group in (("Ahead", ahead), ("Not shown", undecided), ("Behind", behind)):
        if group:
            texts = [f"{pair.ours} {_interval(pair)}" + (f" ({pair.theirs})" if len(others) > 1 else "") for pair in group]
            lines.append(f"  {word}: {', '.join(texts)}.")
    if left_out := [f"{label} ({trained[label]:.1f} %)" for label in claim.better if label not in kept]:
        lines.append(f"  Left out, below {claim.learned:g} % at the training size: {', '.join(left_out)}.")
    return "\n".join(lines)


def _pairs(
    claim: Claim, rows: Sequence[Row], translated: Sequence[Row], scores: Scores, names: Sequence[tuple[str, str | float]]
) -> list[Pair]:
    """The pairs of a claim, compared."""
    # predictions are those of images that are not translated
    used = scores if claim.translation is None else NO_SCORES
    samples = {
        name: sample_of(_rows_of(claim, rows, translated, name), used, claim.metric)
        for name in dict.fromkeys(name for pair in names for name in pair if isinstance(name, str))
    }
    pairs = []
    for ours, theirs in names:
        if isinstance(theirs, str):
            one = contrast([samples[ours]], [samples[theirs]])
            interval, against = (float(one.low()), float(one.high())), 0.0
        else:
            one, against = contrast([samples[ours]]), float(theirs)
            low, high = one.of_share()
            interval = low - against, high - against
        pairs.append(Pair(ours, theirs, float(one.mean) - against, *interval, float(one.p_below(against)), one.seeds))
    return pairs


def _place(claim: Claim, rows: Sequence[Row]) -> str:
    """The size, protocol and comparison of a claim on these rows in words."""
    task = task_of(rows[0])
    name, _ = task.axes[claim.metric or task.metric]
    translated = "" if claim.translation is None else f", translated by {claim.translation} px"
    than = f"against {', '.join(claim.than)}" if isinstance(claim.than, tuple) else f"against {claim.than:g} %"
    return f"{claim.img_size} {claim.protocol}{translated}, points of {name} {than}"


def _accuracy_trained(rows: Sequence[Row], label: str) -> float:
    """Mean accuracy of a label at its training size, percent, over all its rows there: seeds, protocols, crops and policies.

    A policy in `label` ("label/policy") is ignored. ValueError where there is no row.
    """
    found = [main_metric(row) for row in rows if row["label"] == label.split("/")[0] and is_training(row)]
    if not found:
        labels = ", ".join(dict.fromkeys(row["label"] for row in rows))
        raise ValueError(f"a claim names {label!r}, which has no rows at its training size; the labels are {labels}")
    return sum(found) / len(found)


def _interval(pair: Pair) -> str:
    """A mean and its interval: "+1.2 ±0.3", or "+1.2 (+0.8 to +1.4)" where that is not symmetric."""
    halves = f"{pair.mean - pair.low:.1f}", f"{pair.high - pair.mean:.1f}"
    text = f"{pair.mean:+.1f}"
    return f"{text} ±{halves[0]}" if halves[0] == halves[1] else f"{text} ({pair.low:+.1f} to {pair.high:+.1f})"


def _rows_of(claim: Claim, rows: Sequence[Row], translated: Sequence[Row], label: str) -> list[Row]:
    """The rows of a label at the claim's size, protocol and translation, one per seed.

    A label may name a policy ("table/geometric"). Where no policy changes anything, rows of policy "none" count.
    """
    name, _, policy = label.partition("/")
    columns: Row = {"label": name, "img_size": claim.img_size, "protocol": claim.protocol}
    columns |= {} if claim.translation is None else {"translation": claim.translation}
    candidates = rows if claim.translation is None else translated
    matching = [row for row in candidates if all(row[key] == value for key, value in columns.items())]
    chosen = policy or (matching[0]["policy"] if matching else "")
    policies = {row["policy"] for row in candidates if row["label"] == name}
    if chosen in policies and chosen not in {row["policy"] for row in matching}:
        chosen = "none"
    matching = [row for row in matching if row["policy"] == chosen]
    if not matching:
        raise ValueError(f"there are no rows of {label} at {_place(claim, candidates)}")
    return [*{row["seed"]: row for row in matching}.values()]
