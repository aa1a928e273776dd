"""Two evaluations compared row by row on the same images: who is ahead, by how much, and could it be chance.

Rows match that have the same label, size, protocol, crop, policy and seed; see `compare_folders`.
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
A - B: difference in top-1, percentage points, with its 95 % interval: Tango's score interval of paired proportions (1998). Of
several seeds ("mean of 3") it is the mean, and the interval adds the chance of the images, the mean of the seeds' own
intervals, to that of the seeds, Student's, as independent chances. p: two-sided, McNemar's exact test, of one pair of rows; it
is not corrected for the number of pairs. "best": the policies differ, so each side has its most accurate one, chosen on these
images.
"""
_Found = Mapping[Key, tuple[Row, Predicted]]


def compare_folders(a: str | Path, b: str | Path) -> list[dict[str, Any]]:
    """Every pair of matching rows of two folders of evaluations, with the columns of HEAD and the crop; several seeds have a
    line each and one of all.

    Labels are matched, or where each folder holds one label, those. Within size, protocol and crop (any crop where each side
    has one) policies are matched, or where the two share none, the most accurate of each side. Seeds are matched, or where each
    side has one, those. ValueError where images, classes or labels differ, there are no predictions, or nothing matches.
    """
    first, second = _read(a), _read(b)
    check_same_images(next(iter(first.values()))[1], next(iter(second.values()))[1])
    labels = [_by(found, "label") for found in (first, second)]
    both = [label for label in labels[0] if label in labels[1]]
    pairs = [(label, label) for label in both]
    if all(len(own) == 1 for own in labels):
        pairs = [(next(iter(labels[0])), next(iter(labels[1])))]
    lines = []
    for one, other in pairs:
        ours, theirs = _by(labels[0][one], *PLACE[:2]), _by(labels[1][other], *PLACE[:2])
        for place in sorted(ours.keys() & theirs.keys(), key=lambda place: (place[1] != "scale", place[1], by_area(place[0]))):
            for crop, x, y in _matched(ours[place], theirs[place], "crop_pct"):
                for policy, left, right in _matched(x, y, "policy", best=True):
                    about = {"a": one, "b": other, **dict(zip(PLACE, (*place, crop), strict=True)), "policy": policy}
                    lines += _lines(about, left, right)
    if not lines:
        names = [", ".join(map(str, own)) for own in labels]
        raise ValueError(
            f"no row of {shown(a)} matches one of {shown(b)}: labels are {names[0]} and {names[1]}; evaluate both at the same "
            "sizes and protocols, under the same labels or one label each"
        )
    return lines


def write_comparison(a: str | Path, b: str | Path, out: str | Path) -> str:
    """Writes `compare_folders` as compare.md and compare.csv into `out`, and returns the text of the first."""
    lines, out = compare_folders(a, b), Path(out)
    out.mkdir(parents=True, exist_ok=True)
    write_frame(pd.DataFrame(lines), out / "compare.csv")
    cells = [[_cell(name, line[name]) for name in HEAD] for line in lines]
    text = f"# A: {shown(a)}, B: {shown(b)}\n\n{markdown([*HEAD.values()], cells)}{NOTE}"
    with atomic_write(out / "compare.md") as part:
        part.write_text(text, "utf-8")
    return text


def _read(folder: str | Path) -> _Found:
    predictions = read_predictions(folder)
    if predictions is None:
        raise ValueError(f"{shown(folder)} holds no {FILE}: give the folder of an evaluation; vitrel evaluate writes it there")
    rows = {line_key(row): row for row in read_csv(Path(folder) / "results.csv")}
    found = {key: (row, predictions.rows[key]) for key, row in rows.items() if key in predictions.rows}
    if not found:
        raise ValueError(f"{shown(folder)} holds no row with predictions: evaluate again")
    return found


def _by(found: _Found, *names: str) -> dict[Any, _Found]:
    """The rows by their value in a column, or their values in several."""
    groups: dict[Any, dict] = defaultdict(dict)
    for key, (row, predicted) in found.items():
        values = tuple(row[name] for name in names)
        groups[values if len(names) > 1 else values[0]][key] = row, predicted
    return dict(groups)


def _matched(a: _Found, b: _Found, name: str, best: bool = False) -> list[tuple[Any, _Found, _Found]]:
    """(value, rows of a, rows of b) of each value of a column that both have; where they share none, those of the one value
    that each has, or of the most accurate one.
    """
    first, second = _by(a, name), _by(b, name)
    if common := [value for value in first if value in second]:
        return [(value, first[value], second[value]) for value in common]
    if not best and (len(first) > 1 or len(second) > 1):
        return []
    x, y = (max(own, key=lambda value: _top1(own[value])) for own in (first, second))
    chosen = "best: " if len(first) > 1 or len(second) > 1 else ""
    return [(f"{chosen}{x} / {y}", first[x], second[y])]


def _top1(found: _Found) -> float:
    return sum(row["top1"] for row, _ in found.values()) / len(found)


def _lines(about: dict[str, Any], a: _Found, b: _Found) -> list[dict[str, Any]]:
    """One line for each pair of seeds, and one of all where there are several."""
    seeds = [{key[1]: predicted for key, (_, predicted) in found.items()} for found in (a, b)]  # seeds as text
    common = [seed for seed in seeds[0] if seed in seeds[1]]
    chosen = [(seed, seed) for seed in common]
    if not common and len(seeds[0]) == len(seeds[1]) == 1:
        chosen = [(next(iter(seeds[0])), next(iter(seeds[1])))]
    pairs = [compare_pairs(seeds[0][one], seeds[1][other]) for one, other in chosen]
    named = [one if one == other else f"{one or 'none'} / {other or 'none'}" for one, other in chosen]
    lines = [about | {"seed": seed} | asdict(pair) for seed, pair in zip(named, pairs, strict=True)]
    if len(pairs) > 1:
        mean, low, high = over_seeds(pairs)
        empty = dict.fromkeys(("both", "only_a", "only_b", "neither", "p"))
        both = {"seed": f"mean of {len(pairs)}", "n": min(pair.n for pair in pairs)} | empty
        lines.append(about | both | {"difference": mean, "low": low, "high": high})
    return lines


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "-"
    if name == "p":
        return f"{value:.3g}"
    return f"{value:+.2f}" if name in ("difference", "low", "high") else str(value)
