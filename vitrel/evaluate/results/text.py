"""The results of an evaluation as text: the advice and Markdown tables, and the comparison of two folders.

`vitrel.evaluate.results.advice` judges the rows that these tables show. `compare_folders` compares the rows of two evaluations
on the same images.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vitrel.common.extras import optional_import
from vitrel.common.files import atomic_write, shown
from vitrel.common.sizes import sizes_in_words
from vitrel.evaluate.results.advice import Judged, better_of
from vitrel.evaluate.results.aggregate import (
    by_area,
    curve_summary,
    curves,
    does_nothing,
    is_missing,
    is_training,
    main_metric,
    protocols_of,
    train_sizes_of,
)
from vitrel.evaluate.results.statistics import TAIL, estimate
from vitrel.evaluate.results.table import PREDICTIONS, Key, as_text, line_key, read_csv, read_predictions, write_frame
from vitrel.evaluate.sweep import MARGIN, Row
from vitrel.evaluate.tasks.base import Predicted, Task, capital, task_of

with optional_import():
    import pandas as pd


def summary(judged: Judged) -> str:
    """Return the advice and the accuracy tables as Markdown, for table.md and the terminal."""
    return f"{advice_list(judged)}\n{accuracy_tables(judged.rows)}"


def advice_list(judged: Judged) -> str:
    """Return the advice as a Markdown list, readable in a terminal: which model is better first, what the words mean last."""
    headline = f"{judged.headline}\n\n" if judged.headline else ""
    return headline + "".join(f"- {one.label}: {one.text}\n" for one in judged.advice) + f"\n{judged.basis}\n"


def table_page(judged: Judged, title: str) -> str:
    """Return the text of table.md: advice, accuracy tables, the table of sizes, the table of curves."""
    return f"# {title}\n\n{summary(judged)}\n{sizes_table(judged)}\n{curves_table(judged.rows)}"


def sizes_table(judged: Judged) -> str:
    """Return a Markdown table of every model, protocol and size, under the policy that the size is judged by: accuracy,
    difference to the training size with its interval, verdict, cost, and what is resampled.
    """
    lines = []
    for row in judged.by_size:
        lines.append(
            [
                row["label"],
                row["protocol"],
                row["img_size"],
                "" if row["resampled"] == "nothing" else row["policy"],
                f"{row[judged.metric]:.1f} ({row['low']:.1f} to {row['high']:.1f})",
                difference_text(row),
                verdict_text(row),
                _speed(row),
                resampled_text(row),
            ]
        )
    head = [
        "model",
        "protocol",
        "size",
        "policy",
        f"{judged.title} %",
        "to training size, points",
        "verdict",
        "images/s",
        "resampled",
    ]
    return (
        f"{markdown(head, lines)}\n{capital(judged.title)} with its 95 % interval; the interval of the difference allows for "
        "all sizes of the model at once (Holm).\n"
    )


def _speed(row: Row) -> str:
    """Images per second with half of the interval, where there is one."""
    if is_missing(row["infer_samples_per_sec"]):
        return "-"
    half = row["infer_samples_per_sec_half"]
    return f"{row['infer_samples_per_sec']:,.0f}" + ("" if is_missing(half) else f" ±{half:,.0f}")


def difference_text(row: Row) -> str:
    """Return the difference of a judged row to the training size: "-1.2 (-2.4 to +0.1)"; "" where there is none."""
    if is_missing(row["difference"]):
        return ""
    return f"{row['difference']:+.1f} ({row['difference_low']:+.1f} to {row['difference_high']:+.1f})"


def verdict_text(row: Row) -> str:
    """Return the verdict of a judged row with what would decide; "training size" for the reference."""
    if row["verdict"]:
        return f"{row['verdict']}: {row['more']} would" if row["more"] else row["verdict"]
    return "training size" if is_training(row) else "-"


def resampled_text(row: Row) -> str:
    """Return what is resampled at a row's size: "2,700 of 469,300 values (table bicubic)", "nothing", "nothing (table clip)".

    Weights that changed although nothing is resampled are an error, and it says so.
    """
    if not row["unchanged"] and not row["resampled_values"]:
        return "nothing, but the weights changed: this is an error"
    if does_nothing(row):
        return "nothing that acts (position does nothing)"
    if row["resampled"] == "nothing":
        return "nothing"
    count = f"{row['resampled_values']:,} of {row['params']:,} values" if row["resampled_values"] else "nothing"
    return f"{count} ({row['resampled']})"


def accuracy_tables(table: Sequence[Row]) -> str:
    """Return a Markdown table per protocol: accuracy of every model and policy by size, ± half its 95 % interval.

    Args:
        table: of `aggregate`.
    """
    sizes = sorted({row["img_size"] for row in table}, key=by_area)
    parts = []
    for protocol in dict.fromkeys(row["protocol"] for row in table):
        lines = []
        for label, policy, rows in curves([row for row in table if row["protocol"] == protocol]):
            by_size = {row["img_size"]: f"{main_metric(row):.1f} ±{(row['high'] - row['low']) / 2:.1f}" for row in rows}
            lines.append([label, policy, _resampled(rows), *(by_size.get(size, "-") for size in sizes)])
        head = ["model", "policy", "values resampled at other sizes", *sizes]
        parts.append(f"{capital(task_of(table[0]).title)} in percent, {protocol} protocol:\n\n" + markdown(head, lines))
    trained = "; ".join(dict.fromkeys(sizes_in_words(train_sizes_of(row)) for row in table))
    over = ", ".join(dict.fromkeys(row["interval"] for row in table))
    return "\n".join(parts) + f"\nTrained at {trained}. ± is half the width of the 95 % interval, over {over}.\n"


def curves_table(table: Sequence[Row]) -> str:
    """Return a Markdown table of every model, protocol and policy: the size of the highest accuracy, and its
    mean over sizes.
    """
    title = task_of(table[0]).title
    lines = []
    for protocol in dict.fromkeys(row["protocol"] for row in table):
        for label, policy, curve in curves([row for row in table if row["protocol"] == protocol]):
            values = curve_summary(curve)
            [mean] = [value for name, value in values.items() if name.endswith("_area")]
            area = "-" if is_missing(mean) else f"{mean:.1f}"
            lines.append([label, protocol, policy, values["best_size"], area])
    return markdown(["model", "protocol", "policy", f"highest {title} at", f"mean {title} over log2 size"], lines)


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


def _resampled(curve: Sequence[Row]) -> str:
    """Largest number of values resampled, number of parameters, and policies: "2,700 of 469,300 (table bicubic)"."""
    if all(map(does_nothing, curve)):
        return "none that act"
    policies = ", ".join(name for name in dict.fromkeys(row["resampled"] for row in curve) if name != "nothing")
    most = max(curve, key=lambda row: row["resampled_values"])
    count = f"{most['resampled_values']:,} of {most['params']:,}" if most["resampled_values"] else "none"
    return f"{count} ({policies})" if policies else count


PLACE = ("img_size", "protocol", "crop_pct")
HEAD = {
    "a": "A", "b": "B", "img_size": "size", "protocol": "protocol", "policy": "policy", "seed": "seed", "n": "n",
    "both": "both right", "only_a": "only A", "only_b": "only B", "neither": "both wrong", "difference": "A - B, points",
    "low": "low", "high": "high", "verdict": "verdict",
}  # fmt: skip
NOTE = """
A - B: difference in accuracy, percentage points; low, high: its 95 % interval over images, about the trained models; "all N":
over N seeds and images, about models trained in this way. The intervals of lines with a verdict allow for the number of these
lines (Bonferroni). A, B: it is better, the interval lies on one side of 0; level: within {margin:g} points of 0. "best": the
two sides have no policy in common, so each has its most accurate one, chosen on these images.
"""
_Rows = Mapping[Key, tuple[Row, Predicted]]


def compare_folders(a: str | Path, b: str | Path, margin: float = MARGIN) -> list[dict[str, Any]]:
    """Compare all matching rows of two evaluation folders; return lines with the columns of HEAD and crop_pct.

    There is a line for each pair of rows, and where several seeds match, one over all of them; this, or the line of a single
    seed, has a verdict, "A", "B", "level" (within `margin` points) or "cannot tell". Matching: equal labels, or the only label
    of each folder; equal size and protocol; equal crop, or the only crop of each side; equal policies, or where the
    sides share none, the most accurate of each; equal seeds, or the only seed of each side. ValueError where images, classes
    or labels differ, predictions are missing, or nothing matches.
    """
    first, second = _read(a), _read(b)
    (row, predicted), (other, others) = next(iter(first.values())), next(iter(second.values()))
    if row["task"] != other["task"]:
        raise ValueError(
            f"{shown(a)} is an evaluation of {row['task']}, {shown(b)} of {other['task']}: they cannot be compared"
        )
    task_of(row).check_same_images(predicted, others)
    first_labels, second_labels = _by(first, "label"), _by(second, "label")
    pairs = [(label, label) for label in first_labels if label in second_labels]
    if len(first_labels) == len(second_labels) == 1:
        pairs = [(next(iter(first_labels)), next(iter(second_labels)))]
    groups: list[list[dict[str, Any]]] = []
    for label_a, label_b in pairs:
        a_rows, b_rows = _by(first_labels[label_a], *PLACE[:2]), _by(second_labels[label_b], *PLACE[:2])
        common = a_rows.keys() & b_rows.keys()
        protocols = protocols_of([first for of_place in a_rows.values() for first, _ in of_place.values()])
        for place in sorted(common, key=lambda place: (protocols.index(place[1]), by_area(place[0]))):
            for crop, a_crop, b_crop in _matched(a_rows[place], b_rows[place], "crop_pct"):
                for policy, a_policy, b_policy in _matched(a_crop, b_crop, "policy", best=True):
                    columns = {"a": label_a, "b": label_b, **dict(zip(PLACE, (*place, crop), strict=True)), "policy": policy}
                    groups.append(_lines(columns, a_policy, b_policy))
    groups = [group for group in groups if group]
    if not groups:
        names = [", ".join(map(str, labels)) for labels in (first_labels, second_labels)]
        raise ValueError(
            f"no row of {shown(a)} matches one of {shown(b)}: their labels are {names[0]} and {names[1]}; evaluate both at the "
            "same sizes and protocols, under the same labels or with one label each"
        )
    return _with_verdicts(groups, margin)


def write_comparison(a: str | Path, b: str | Path, out: str | Path, margin: float = MARGIN) -> str:
    """Write the lines of `compare_folders` as compare.md and compare.csv into folder `out`; return the text of compare.md."""
    lines, out = compare_folders(a, b, margin), Path(out)
    out.mkdir(parents=True, exist_ok=True)
    write_frame(pd.DataFrame(lines), out / "compare.csv")
    cells = [[_cell(name, line[name]) for name in HEAD] for line in lines]
    text = f"# A: {shown(a)}, B: {shown(b)}\n\n{markdown([*HEAD.values()], cells)}{NOTE.format(margin=margin)}"
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
    x, y = (max(groups, key=lambda value: _accuracy(groups[value])) for groups in (first, second))
    return [(f"{'best: ' if several else ''}{x} / {y}", first[x], second[y])]


def _accuracy(rows: _Rows) -> float:
    return sum(main_metric(row) for row, _ in rows.values()) / len(rows)


def _lines(columns: dict[str, Any], a: _Rows, b: _Rows) -> list[dict[str, Any]]:
    """One line for each pair of seeds, starting with `columns`, and one over all where there are several; only the last has a
    verdict, still empty, and its estimate.
    """
    by_seed = [{as_text(row["seed"]): predicted for row, predicted in rows.values()} for rows in (a, b)]
    matched = [(seed, seed) for seed in by_seed[0] if seed in by_seed[1]]
    if not matched and len(by_seed[0]) == len(by_seed[1]) == 1:
        matched = [(next(iter(by_seed[0])), next(iter(by_seed[1])))]
    task, pairs = task_of(next(iter(a.values()))[0]), [(by_seed[0][x], by_seed[1][y]) for x, y in matched]
    texts = [x if x == y else f"{x or 'none'} / {y or 'none'}" for x, y in matched]
    lines = [columns | {"seed": text} | _compared(task, [pair]) for text, pair in zip(texts, pairs, strict=True)]
    if len(pairs) > 1:
        lines.append(columns | {"seed": f"all {len(pairs)}"} | _compared(task, pairs))
    return lines


def _compared(task: Task, pairs: Sequence[tuple[Predicted, Predicted]]) -> dict[str, Any]:
    """The columns n, difference, low and high of A - B over pairs of predictions, one per seed, and the estimate.

    With one seed and scores that are 0 or 1: on how many of the images that both could read both, one or neither is right.
    """
    for pair in pairs:
        task.check_same_images(*pair)
    a, b = (np.stack([task.scores(pair[side], task.metric) for pair in pairs]) for side in (0, 1))
    one = estimate([a], [b])
    found: dict[str, Any] = dict.fromkeys(("both", "only_a", "only_b", "neither"))
    read = ~np.isnan(a[0] + b[0])
    if len(pairs) == 1 and np.isin([a[0, read], b[0, read]], (0, 1)).all():
        x, y = a[0, read] > 0, b[0, read] > 0
        masks = {"both": x & y, "only_a": x & ~y, "only_b": y & ~x, "neither": ~x & ~y}
        found = {name: int(mask.sum()) for name, mask in masks.items()}
    ends = {"low": float(one.low()), "high": float(one.high()), "verdict": ""}
    return {"n": one.images, "difference": float(one.mean), **ends, "estimate": one} | found


def _with_verdicts(groups: Sequence[list[dict[str, Any]]], margin: float) -> list[dict[str, Any]]:
    """All lines; the last of each group has the verdict and an interval that allows for the number of groups (Bonferroni)."""
    tail = TAIL / len(groups)
    for group in groups:
        line, one = group[-1], group[-1]["estimate"]
        low, high = float(one.low(tail)), float(one.high(tail))
        line.update(low=low, high=high, verdict=better_of(low, high, margin))
    return [{name: value for name, value in line.items() if name != "estimate"} for group in groups for line in group]


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:+.2f}" if name in ("difference", "low", "high") else str(value)
