"""Paired comparison of two evaluation folders on the same images: difference in top-1, its interval, McNemar's test.

Rows are matched by label, size, protocol, crop, policy and seed; see `compare_folders`.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vitrel.evaluate.predictions import FILE, Key, Predicted, check_same_images, compare_pairs, over_seeds, read_predictions
from vitrel.evaluate.report import markdown
from vitrel.evaluate.results import by_area, line_key, read_csv, write_frame
from vitrel.evaluate.settings import Row
from vitrel.extras import optional_import
from vitrel.files import atomic_write, shown

with optional_import():
    import pandas as pd

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
        raise ValueError(f"{shown(folder)} has no {FILE}: give the output folder of vitrel evaluate")
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
