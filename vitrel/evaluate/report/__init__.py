"""The results of an evaluation as text: Markdown tables, the judgement of claims, and the comparison of two folders.

The answers for every model are described in `vitrel.evaluate.report.answers`. A claim is a comparison of models that is written
down before the evaluation; the rows then decide whether it holds, does not hold, or is not shown. `compare_folders` compares
the rows of two evaluations on the same images: difference in top-1, its interval, McNemar's test.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from vitrel.common.extras import optional_import
from vitrel.common.sizes import format_size, parse_size
from vitrel.evaluate.metrics import difference_interval
from vitrel.evaluate.report.answers import Answer, Difference, answer_list, answers_of, difference, metric_of
from vitrel.evaluate.results import aggregate, by_area, curve_summary, curves
from vitrel.evaluate.settings import Row

with optional_import():
    import pandas as pd

from collections import defaultdict
from dataclasses import asdict
from pathlib import Path

from vitrel.common.extras import optional_import
from vitrel.common.files import atomic_write, shown
from vitrel.evaluate.metrics import PREDICTIONS, Key, Predicted, check_same_images, compare_pairs, over_seeds, read_predictions
from vitrel.evaluate.results import line_key, read_csv, write_frame

with optional_import():
    import pandas as pd


DETAILS = {
    "label": "model",
    "protocol": "protocol",
    "policy": "policy",
    "img_size": "size",
    "tokens": "tokens",
    "top1": "top-1 %",
    "low": "95 % from",
    "high": "to",
    "top5": "top-5 %",
    "nll": "NLL",
    "ece": "ECE %",
    "retention": "retention",
    "n": "images",
    "seeds": "seeds",
    "window": "windows",
    "pad_fraction": "padding",
    "gflops": "10^9 multiply-adds",
    "attention_span": "attention span",
    "attention_distance": "attention distance",
    "border_leak": "border leak",
    "resized": "resizing rule",
    "resized_params": "values resampled",
    "unseen": "unseen offsets",
    "saturated": "of these saturated",
    "unchanged": "weights unchanged",
    "infer_samples_per_sec": "images/s",
    "peak_memory_mb": "peak MiB",
    "batch_size": "batch",
    "oom": "out of memory",
}


def summary(rows: Sequence[Row], answers: Sequence[Answer] | None = None) -> str:
    """Return the answers and the accuracy tables as Markdown, for table.md and the terminal. answers: default `answers_of`."""
    return f"{answer_list(answers_of(rows) if answers is None else answers)}\n{accuracy_tables(aggregate(rows))}"


def table_page(rows: Sequence[Row], title: str, answers: Sequence[Answer] | None = None) -> str:
    """Return the text of table.md: answers, accuracy tables, the table of curves, and every aggregated row."""
    table = aggregate(rows)
    return f"# {title}\n\n{summary(rows, answers)}\n{curves_table(table)}\n{details_table(table)}"


def accuracy_tables(table: pd.DataFrame) -> str:
    """Return a Markdown table per protocol: top-1 of every model and policy by size, ± half its 95 % interval.

    table: of `aggregate`.
    """
    sizes = sorted(table["img_size"].unique(), key=by_area)
    parts = []
    for protocol in table["protocol"].unique():
        lines = []
        for label, policy, rows in curves(table[table["protocol"] == protocol]):
            by_size = {row.img_size: f"{row.top1:.1f} ±{(row.high - row.low) / 2:.1f}" for row in rows.itertuples()}
            lines.append([label, policy, _resampled(rows), *(by_size.get(size, "-") for size in sizes)])
        head = ["model", "policy", "values resampled at other sizes", *sizes]
        parts.append(f"Top-1 in percent, {protocol} protocol:\n\n" + markdown(head, lines))
    trained = ", ".join(dict.fromkeys(table["train_size"]))
    kinds = ", ".join(dict.fromkeys(table["interval"]))
    return "\n".join(parts) + f"\nTrained at {trained}. ± is half the width of the 95 % interval ({kinds}).\n"


def details_table(table: pd.DataFrame) -> str:
    """Return a Markdown table of every aggregated row with the columns DETAILS, except columns without any value."""
    digits = {
        "nll": 3,
        "retention": 3,
        "unseen": 2,
        "saturated": 2,
        "border_leak": 2,
        "gflops": 2,
        "infer_samples_per_sec": 0,
        "peak_memory_mb": 0,
    }

    def text(name: str, value: object) -> str:
        if value != value:  # NaN: unknown, or the column is missing in an older file
            return "-"
        if isinstance(value, (bool, str)):
            return {True: "yes", False: "NO"}.get(value, str(value))
        if name in ("n", "resized_params", "tokens", "seeds", "batch_size", "oom"):
            return f"{value:,.0f}"
        return f"{value:.{digits.get(name, 1)}f}"

    known = [name for name in DETAILS if table[name].notna().any()]
    return markdown(
        [DETAILS[name] for name in known], [[text(name, row[name]) for name in known] for row in table.to_dict("records")]
    )


def curves_table(table: pd.DataFrame) -> str:
    """Return a Markdown table of every model, protocol and policy: the size of the highest top-1, and mean top-1 over sizes."""
    lines = []
    for protocol in table["protocol"].unique():
        for label, policy, curve in curves(table[table["protocol"] == protocol]):
            values = curve_summary(curve)
            area = "-" if values["top1_area"] != values["top1_area"] else f"{values['top1_area']:.1f}"
            lines.append([label, protocol, policy, values["best_size"], area])
    return markdown(["model", "protocol", "policy", "best size", "mean top-1 over log2 size"], lines)


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Format a Markdown table with padded columns, readable as plain text too; columns of numbers are right-aligned."""
    cells = [[str(cell).replace("|", "\\|") for cell in line] for line in [header, *lines]]
    widths = [max(3, *(len(line[column]) for line in cells)) for column in range(len(header))]
    right = [
        all(line[column][:1].isdigit() or line[column] in ("", "-") for line in cells[1:]) for column in range(len(header))
    ]
    pads = [str.rjust if flag else str.ljust for flag in right]
    rule = ["-" * (width - 1) + ":" if flag else "-" * width for width, flag in zip(widths, right, strict=True)]
    texts = [[pad(cell, width) for pad, cell, width in zip(pads, line, widths, strict=True)] for line in cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in [texts[0], rule, *texts[1:]]) + "\n"


CLAIMED = ("top1", "top1_among")  # the metrics that claims may be about


@dataclass(frozen=True)
class Claim:
    """A claim that each model of `better` has a higher top-1 than each of `than`, at `img_size` and `protocol`.

    text: the claim in words. better, than: "label/policy", or "label" for the first policy in the rows; `than` may be a top-1
    in percent. img_size: such as "128x128", pixels. translation: with the images' content translated by this number of pixels
    (translation.csv); None: without. learned: models with less top-1 than this at the training size, percent, are left out and
    listed. metric: "top1", or "top1_among", top-1 among the data's classes, for models that have more classes.
    """

    text: str
    better: tuple[str, ...]
    than: tuple[str, ...] | float
    img_size: str
    protocol: str = "scale"
    translation: int | None = None
    learned: float = 0.0
    metric: str = "top1"

    def __post_init__(self) -> None:
        if self.metric not in CLAIMED or (self.metric != "top1" and self.translation is not None):
            raise ValueError(
                f"metric is one of {', '.join(CLAIMED)}, and top1 where content is translated, got {self.metric!r}"
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


def judge(
    claims: Sequence[Claim], rows: Sequence[Row], translated: Sequence[Row] = (), difference: Difference = difference
) -> list[str]:
    """Return a Markdown paragraph per claim: the verdict, and the mean difference in points of every pair with its interval.

    Differences are better minus than. A claim holds where every pair is significantly ahead, does not hold where any is
    significantly behind, and otherwise is not shown. translated: lines of translation.csv. difference: gives differences of
    models and their 95 % intervals, as `answers.paired_difference`, or by default `answers.difference`, which translated images
    always get. ValueError for a label without rows.
    """
    return [_judged(claim, rows, translated, difference) for claim in claims]


def _resampled(curve: pd.DataFrame) -> str:
    """The largest number of values resampled, the number of parameters, and the rules: "2,700 of 469,300 (table bicubic)"."""
    rules = ", ".join(rule for rule in curve["resized"].unique() if rule != "nothing")
    most = curve.loc[curve["resized_params"].idxmax()]
    count = f"{most['resized_params']:,} of {most['params']:,}" if most["resized_params"] else "none"
    return f"{count} ({rules})" if rules else count


def _judged(claim: Claim, rows: Sequence[Row], translated: Sequence[Row], difference: Difference) -> str:
    top1 = {label: _top1_trained(rows, label) for label in claim.better}
    kept = [label for label in claim.better if top1[label] >= claim.learned]
    others = claim.than if isinstance(claim.than, tuple) else (claim.than,)
    pairs = [(a, b, *_difference(claim, rows, translated, a, b, difference)) for a in kept for b in others]
    ahead = [pair for pair in pairs if pair[3] > 0]
    behind = [pair for pair in pairs if pair[4] < 0]
    undecided = [pair for pair in pairs if pair not in ahead and pair not in behind]
    verdict = "holds" if pairs and len(ahead) == len(pairs) else "does not hold" if behind else "is not shown"
    lines = [f"- **{claim.text}** This {verdict} ({len(ahead)} of {len(pairs)} pairs; {_place(claim)})."]
    for word, group in (("Ahead", ahead), ("No significant difference", undecided), ("Behind", behind)):
        if group:
            texts = [f"{a} {_interval(*given)}" + (f" ({b})" if len(others) > 1 else "") for a, b, *given in group]
            lines.append(f"  {word}: {', '.join(texts)}.")
    if left_out := [f"{label} ({top1[label]:.1f} %)" for label in claim.better if label not in kept]:
        lines.append(f"  Left out, below {claim.learned:g} % at the training size: {', '.join(left_out)}.")
    return "\n".join(lines)


def _place(claim: Claim) -> str:
    """The size, protocol and comparison of a claim in words."""
    translated = "" if claim.translation is None else f", translated by {claim.translation} px"
    than = f"against {', '.join(claim.than)}" if isinstance(claim.than, tuple) else f"against {claim.than:g} %"
    among = " among the data's classes" if claim.metric == "top1_among" else ""
    return f"{claim.img_size} {claim.protocol}{translated}, points of top-1{among} {than}"


def _top1_trained(rows: Sequence[Row], label: str) -> float:
    """Mean top-1 of a label at its training size, percent, over all its rows there: seeds, protocols, crops and policies.

    A policy in `label` ("label/policy") is ignored. ValueError where there is no row.
    """
    top1 = [row["top1"] for row in rows if row["label"] == label.split("/")[0] and row["img_size"] == row["train_size"]]
    if not top1:
        labels = ", ".join(dict.fromkeys(row["label"] for row in rows))
        raise ValueError(f"a claim names {label!r}, which has no rows at its training size; the labels are {labels}")
    return sum(top1) / len(top1)


def _interval(mean: float, low: float, high: float) -> str:
    """A mean and its interval: "+1.2 ±0.3", or "+1.2 (+0.8 to +1.4)" where that is not symmetric."""
    halves = f"{mean - low:.1f}", f"{high - mean:.1f}"
    return f"{mean:+.1f} ±{halves[0]}" if halves[0] == halves[1] else f"{mean:+.1f} ({low:+.1f} to {high:+.1f})"


def _difference(
    claim: Claim, rows: Sequence[Row], translated: Sequence[Row], label: str, other: str | float, compared: Difference
) -> tuple[float, float, float]:
    """Top-1 of `label` minus that of `other` (a label, or a number in percent): mean and 95 % interval (mean, low, high)."""
    ours = _rows_of(claim, rows, translated, label)
    if isinstance(other, str):
        # predictions are those of images that are not translated
        theirs = _rows_of(claim, rows, translated, other)
        return difference(ours, theirs) if claim.translation is not None else compared(ours, theirs, claim.metric)
    mean, half = difference_interval([metric_of(row, claim.metric) for row in ours], other, min(int(row["n"]) for row in ours))
    return mean, mean - half, mean + half


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
        raise ValueError(f"there are no rows of {label} at {_place(claim)}")
    return [*{row["seed"]: row for row in matching}.values()]


PLACE = ("img_size", "protocol", "crop_pct")
HEAD = {
    "a": "A", "b": "B", "img_size": "size", "protocol": "protocol", "policy": "policy", "seed": "seed", "n": "n",
    "both": "both right", "only_a": "only A", "only_b": "only B", "neither": "both wrong", "difference": "A - B, points",
    "low": "low", "high": "high", "p": "p",
}  # fmt: skip
NOTE = """
A - B: difference in top-1, percentage points; low, high: its 95 % interval (Tango 1998, score interval of paired proportions).
For several seeds ("mean of 3") it is their mean, and the interval adds two half widths in quadrature: the mean of the seeds'
intervals, for the choice of images, and Student's interval over seeds. p: two-sided p-value of McNemar's exact test of one pair
of rows, not corrected for the number of pairs. "best": the two sides have no policy in common, so each has its most accurate
one, chosen on these images.
"""
_Rows = Mapping[Key, tuple[Row, Predicted]]


def compare_folders(a: str | Path, b: str | Path) -> list[dict[str, Any]]:
    """Compare all matching rows of two evaluation folders; return lines with the columns of HEAD and crop_pct.

    There is a line for each pair of rows, and where several seeds match, one for their mean. Matching: equal labels, or the
    only label of each folder; equal size and protocol; equal crop, or the only crop of each side; equal policies, or where the
    sides share none, the most accurate of each; equal seeds, or the only seed of each side. ValueError where images, classes
    or labels differ, predictions are missing, or nothing matches.
    """
    first, second = _read(a), _read(b)
    check_same_images(next(iter(first.values()))[1], next(iter(second.values()))[1])
    first_labels, second_labels = _by(first, "label"), _by(second, "label")
    pairs = [(label, label) for label in first_labels if label in second_labels]
    if len(first_labels) == len(second_labels) == 1:
        pairs = [(next(iter(first_labels)), next(iter(second_labels)))]
    lines = []
    for label_a, label_b in pairs:
        a_rows, b_rows = _by(first_labels[label_a], *PLACE[:2]), _by(second_labels[label_b], *PLACE[:2])
        common = a_rows.keys() & b_rows.keys()
        for place in sorted(common, key=lambda place: (place[1] != "scale", place[1], by_area(place[0]))):
            for crop, a_crop, b_crop in _matched(a_rows[place], b_rows[place], "crop_pct"):
                for policy, a_policy, b_policy in _matched(a_crop, b_crop, "policy", best=True):
                    columns = {"a": label_a, "b": label_b, **dict(zip(PLACE, (*place, crop), strict=True)), "policy": policy}
                    lines += _lines(columns, a_policy, b_policy)
    if not lines:
        names = [", ".join(map(str, labels)) for labels in (first_labels, second_labels)]
        raise ValueError(
            f"no row of {shown(a)} matches one of {shown(b)}: their labels are {names[0]} and {names[1]}; evaluate both at the "
            "same sizes and protocols, under the same labels or with one label each"
        )
    return lines


def write_comparison(a: str | Path, b: str | Path, out: str | Path) -> str:
    """Write the lines of `compare_folders` as compare.md and compare.csv into folder `out`; return the text of compare.md."""
    lines, out = compare_folders(a, b), Path(out)
    out.mkdir(parents=True, exist_ok=True)
    write_frame(pd.DataFrame(lines), out / "compare.csv")
    cells = [[_cell(name, line[name]) for name in HEAD] for line in lines]
    text = f"# A: {shown(a)}, B: {shown(b)}\n\n{markdown([*HEAD.values()], cells)}{NOTE}"
    with atomic_write(out / "compare.md") as part:
        part.write_text(text, "utf-8")
    return text


def _read(folder: str | Path) -> _Rows:
    """The rows of an evaluation folder with their predictions, by `line_key`."""
    predictions = read_predictions(folder)
    if predictions is None:
        raise ValueError(f"{shown(folder)} has no {PREDICTIONS}: give the output folder of vitrel evaluate")
    rows = {line_key(row): row for row in read_csv(Path(folder) / "results.csv")}
    with_predictions = {key: (row, predictions.rows[key]) for key, row in rows.items() if key in predictions.rows}
    if not with_predictions:
        raise ValueError(f"{shown(folder)} has no row with predictions: evaluate again")
    return with_predictions


def _by(rows: _Rows, *names: str) -> dict[Any, _Rows]:
    """Group rows by the value of a column, or the tuple of values of several columns."""
    groups: dict[Any, dict] = defaultdict(dict)
    for key, (row, predicted) in rows.items():
        values = tuple(row[name] for name in names)
        groups[values if len(names) > 1 else values[0]][key] = row, predicted
    return dict(groups)


def _matched(a: _Rows, b: _Rows, name: str, best: bool = False) -> list[tuple[Any, _Rows, _Rows]]:
    """(value, rows of a, rows of b) for each value of a column that both sides have.

    Without a common value: the only value of each side, with `best` the most accurate one of each, else nothing; the value is
    then a text, "x / y" or "best: x / y".
    """
    first, second = _by(a, name), _by(b, name)
    if common := [value for value in first if value in second]:
        return [(value, first[value], second[value]) for value in common]
    several = len(first) > 1 or len(second) > 1
    if several and not best:
        return []
    x, y = (max(groups, key=lambda value: _top1(groups[value])) for groups in (first, second))
    return [(f"{'best: ' if several else ''}{x} / {y}", first[x], second[y])]


def _top1(rows: _Rows) -> float:
    return sum(row["top1"] for row, _ in rows.values()) / len(rows)


def _lines(columns: dict[str, Any], a: _Rows, b: _Rows) -> list[dict[str, Any]]:
    """One line for each pair of seeds, starting with `columns`, and one for their mean where there are several."""
    a_seeds, b_seeds = ({key[1]: predicted for key, (_, predicted) in rows.items()} for rows in (a, b))  # seeds as text
    matched = [(seed, seed) for seed in a_seeds if seed in b_seeds]
    if not matched and len(a_seeds) == len(b_seeds) == 1:
        matched = [(next(iter(a_seeds)), next(iter(b_seeds)))]
    pairs = [compare_pairs(a_seeds[x], b_seeds[y]) for x, y in matched]
    texts = [x if x == y else f"{x or 'none'} / {y or 'none'}" for x, y in matched]
    lines = [columns | {"seed": seed} | asdict(pair) for seed, pair in zip(texts, pairs, strict=True)]
    if len(pairs) > 1:
        mean, low, high = over_seeds(pairs)
        empty = dict.fromkeys(("both", "only_a", "only_b", "neither", "p"))
        over_all = {"seed": f"mean of {len(pairs)}", "n": min(pair.n for pair in pairs)} | empty
        lines.append(columns | over_all | {"difference": mean, "low": low, "high": high})
    return lines


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name == "p":
        return f"{value:.3g}"
    return f"{value:+.2f}" if name in ("difference", "low", "high") else str(value)
