"""Rows of an evaluation as CSV, as Markdown tables, and aggregated over seeds."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pandas as pd

from vitrel.evaluate.columns import ADDED, COLUMNS, TEXT
from vitrel.evaluate.metrics import t_interval, wilson
from vitrel.evaluate.policies import policy_parts
from vitrel.evaluate.settings import Row
from vitrel.files import atomic_write, guarded, unguarded
from vitrel.sizes import parse_size

CURVE = ["label", "protocol", "policy", "img_size", "crop_pct"]
MEANS = [
    "top1", "top5", "nll", "ece", "retention", "infer_samples_per_sec", "attention_entropy", "attention_span",
    "attention_distance", "attention_distance_share",
]  # fmt: skip
DETAILS = {
    "label": "model",
    "protocol": "protocol",
    "policy": "policy",
    "img_size": "size",
    "tokens": "tokens",
    "top1": "top-1 %",
    "low": "low",
    "high": "high",
    "top5": "top-5 %",
    "nll": "NLL",
    "ece": "ECE %",
    "retention": "retention",
    "n": "n",
    "seeds": "seeds",
    "window": "windows",
    "pad_fraction": "padded",
    "gflops": "GFLOPs",
    "attention_span": "attended tokens",
    "attention_distance": "attended patches away",
    "border_leak": "border leak",
    "resized": "resized",
    "resized_params": "values resampled",
    "unseen": "unseen",
    "saturated": "saturated",
    "unchanged": "unchanged",
    "infer_samples_per_sec": "img/s",
    "peak_memory_mb": "peak MiB",
    "batch_size": "batch",
    "oom": "oom",
}


def write_frame(frame: pd.DataFrame, path: Path) -> None:
    """Writes a table as CSV, its text as `guarded` gives it; the file is replaced whole, an interruption leaves the old one."""
    text = [name for name in frame if not pd.api.types.is_numeric_dtype(frame[name])]
    safe = frame.assign(**{name: frame[name].map(guarded) for name in text})
    with atomic_write(path) as part:
        safe.to_csv(part, index=False, encoding="utf-8")


def read_frame(path: Path, text: Iterable[str]) -> pd.DataFrame:
    """A table that `write_frame` wrote, whose columns `text` are read as text though they may hold numbers alone."""
    frame = pd.read_csv(path, keep_default_na=False, na_values=[""], dtype=dict.fromkeys(text, str), encoding="utf-8")
    found = [name for name in frame if not pd.api.types.is_numeric_dtype(frame[name])]
    return frame.assign(**{name: frame[name].map(unguarded) for name in found})


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Writes all rows with the columns of COLUMNS by `write_frame`."""
    write_frame(pd.DataFrame(rows, columns=list(COLUMNS)), path)


def read_csv(path: Path) -> list[Row]:
    """The rows of a CSV written by `write_csv`, of this version or before the columns ADDED, which are then empty; none
    if there is no such file. ValueError when other columns are missing.
    """
    if not path.exists():
        return []
    try:
        frame = read_frame(path, TEXT)
    except pd.errors.EmptyDataError:
        frame = pd.DataFrame()
    if "saturated" not in frame and {"unseen", "resized"} <= set(frame):
        # in files without the column only clipped tables read a trained edge, and at every unseen offset
        frame["saturated"] = frame["unseen"].where(frame["resized"].str.contains("clip"), 0.0)
    if "n" in frame and "left_out" not in frame:
        frame["left_out"] = 0  # such an image ended the evaluation
    if lacking := [name for name in COLUMNS if name not in frame and name not in ADDED]:
        raise ValueError(f"{path} is not a results file of this version (no column {lacking[0]!r}): move it away and run again")
    return frame.reindex(columns=list(COLUMNS)).to_dict("records")


def aggregate(rows: Sequence[Row]) -> pd.DataFrame:
    """One row per (label, protocol, policy, img_size): means over seeds, `seeds`, and the 95 % interval `low`, `high` of top1.

    `interval` says how it is made, see `top1_interval`. Where models were evaluated with several crops, each is a protocol of
    its own, "scale, crop 0.875". Ordered as the models came, then by image area.
    """
    frame = pd.DataFrame(rows)
    for name in (name for name in ADDED if name not in frame):
        frame[name] = math.nan
    frame[MEANS] = frame[MEANS].apply(pd.to_numeric)
    if frame.groupby("label")["crop_pct"].nunique().max() > 1:
        frame["protocol"] = [f"{name}, crop {crop:g}" for name, crop in zip(frame["protocol"], frame["crop_pct"], strict=True)]
    order = {label: place for place, label in enumerate(dict.fromkeys(frame["label"]))}
    merged = []
    for _, group in frame.groupby(CURVE, sort=False, dropna=False):
        first = group.iloc[0].to_dict() | group[MEANS].mean().to_dict()
        low, high, kind = top1_interval(group["top1"].tolist(), first["n"])
        first |= {"seeds": len(group), "low": low, "high": high, "interval": kind}
        first |= {"unchanged": bool(group["unchanged"].all()), "oom": int(group["oom"].max())}
        first |= {"peak_memory_mb": group["peak_memory_mb"].max(), "batch_size": int(group["batch_size"].min())}
        merged.append(first)
    area = {size: (height * width, height) for size in frame["img_size"] for height, width in [parse_size(size)]}
    merged.sort(
        key=lambda row: (
            order[row["label"]],
            not row["protocol"].startswith("scale"),
            row["protocol"],
            row["policy"],
            area[row["img_size"]],
        )
    )
    return pd.DataFrame(merged)


def top1_interval(top1: Sequence[float], n: int) -> tuple[float, float, str]:
    """95 % interval of the mean of one model's top-1 in percent, one for each seed, on the same n images; and how it is made.

    Student's over seeds where there are two or more, never narrower than Wilson's over images: the same images judge every
    seed, so more seeds do not lessen their chance. Else it is Wilson's.
    """
    low, high = wilson(round(n * sum(top1) / len(top1) / 100), n)
    kind = f"Wilson over {n:,} images"
    if len(top1) > 1:
        around = t_interval(top1)
        low, high, kind = min(low, around[0]), max(high, around[1]), f"t over {len(top1)} seeds, at least {kind}"
    return max(0.0, low), min(100.0, high), kind


def curves(table: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """(label, policy, rows) of an aggregated table: one curve per policy a model was evaluated with.

    Sizes at which a policy makes no difference belong to every curve of their model: "none" to all, "keep" to
    "geometric+keep" and "clip+keep"; and to "divisor" the sizes at which the kept window divides the grid.
    """
    for label, group in table.groupby("label", sort=False):
        parts = policy_parts(group["policy"].unique())
        for policy, own in parts.items():
            if any(own < other for other in parts.values()):
                continue
            kept = {"window keep" if name.startswith("window ") else name for name in own}
            at = list(zip(group["protocol"], group["img_size"], strict=True))
            direct = [parts[name] <= own for name in group["policy"]]
            there = {place for place, is_there in zip(at, direct, strict=True) if is_there}
            chosen = [d or (a not in there and parts[n] <= kept) for d, a, n in zip(direct, at, group["policy"], strict=True)]
            yield label, policy, group[chosen]


def with_curves(rows: Sequence[Row]) -> list[Row]:
    """The rows with best_size and top1_area of their curve, empty in rows that several policies' curves share."""
    frame = pd.DataFrame(rows)
    found: dict[int, Row] = {}
    shared: dict[int, list[Row]] = defaultdict(list)
    for _, group in frame.groupby(["label", "seed", "protocol", "crop_pct"], sort=False, dropna=False):
        for _, policy, curve in curves(group):
            summary = curve_summary(curve)
            for place, own in zip(curve.index, curve["policy"] == policy, strict=True):
                shared[place].append(summary)
                if own:
                    found[place] = summary
    empty = {"best_size": "", "top1_area": math.nan}
    alone = {place: several[0] for place, several in shared.items() if len(several) == 1}
    return [row | found.get(place, alone.get(place, empty)) for place, row in enumerate(rows)]


def curve_summary(curve: pd.DataFrame) -> Row:
    """best_size, that of the highest top1, and top1_area: the mean of top1 over log2 of the side sqrt(h w), by trapezoids.

    Sizes of one area count once, with their mean; NaN where all sizes are of one area.
    """
    area = curve["img_size"].map(lambda size: math.prod(parse_size(size)))
    top1 = curve.groupby(area)["top1"].mean().sort_index()
    octaves = [math.log2(pixels) / 2 for pixels in top1.index]
    pairs = zip(octaves, octaves[1:], top1, top1.iloc[1:], strict=False)
    under = sum((right - left) * (a + b) / 2 for left, right, a, b in pairs)
    mean = under / (octaves[-1] - octaves[0]) if len(octaves) > 1 else math.nan
    return {"best_size": curve.loc[curve["top1"].idxmax(), "img_size"], "top1_area": round(mean, 4)}


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table with padded columns, readable as plain text too; numbers are aligned right."""
    cells = [[str(cell).replace("|", "\\|") for cell in line] for line in [header, *lines]]
    widths = [max(3, *(len(line[column]) for line in cells)) for column in range(len(header))]
    right = [
        all(line[column][:1].isdigit() or line[column] in ("", "-") for line in cells[1:]) for column in range(len(header))
    ]
    pads = [str.rjust if flag else str.ljust for flag in right]
    rule = ["-" * (width - 1) + ":" if flag else "-" * width for width, flag in zip(widths, right, strict=True)]
    texts = [[pad(cell, width) for pad, cell, width in zip(pads, line, widths, strict=True)] for line in cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in [texts[0], rule, *texts[1:]]) + "\n"


def accuracy_tables(table: pd.DataFrame) -> str:
    """Per protocol, top-1 of every model and policy against size, with half the width of the 95 % interval."""
    sizes = sorted(table["img_size"].unique(), key=lambda text: (parse_size(text)[0] * parse_size(text)[1], parse_size(text)))
    parts = []
    for protocol in table["protocol"].unique():
        lines = []
        for label, policy, rows in curves(table[table["protocol"] == protocol]):
            by_size = {row.img_size: f"{row.top1:.1f} ±{(row.high - row.low) / 2:.1f}" for row in rows.itertuples()}
            lines.append([label, _resampled(rows, policy), *(by_size.get(size, "-") for size in sizes)])
        head = ["model", "resampled at a new size", *sizes]
        parts.append(f"Top-1 in percent, {protocol} protocol:\n\n" + markdown(head, lines))
    trained = ", ".join(dict.fromkeys(table["train_size"]))
    kinds = ", ".join(dict.fromkeys(table["interval"]))
    return "\n".join(parts) + f"\nTrained at {trained}. ± is half the width of the 95 % interval ({kinds}).\n"


def _resampled(curve: pd.DataFrame, policy: str) -> str:
    most = curve.loc[curve["resized_params"].idxmax()]
    rules = [rule for rule in curve["resized"].unique() if rule != "nothing"]
    if rules:
        grown = "window rescaled, " if policy.split("+")[0] == "rescale" else ""
        return f"{grown}{', '.join(rules)}: {most['resized_params']:,} of {most['params']:,}"
    return "nothing" if policy == "none" else f"nothing ({policy})"


def details_table(table: pd.DataFrame) -> str:
    """Every aggregated row with its main columns."""
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
        if value != value:  # not known, or of an earlier version
            return "-"
        if isinstance(value, (bool, str)):
            return {True: "yes", False: "NO"}.get(value, str(value))
        if name in ("n", "resized_params", "tokens", "seeds", "batch_size", "oom"):
            return f"{value:,.0f}"
        return f"{value:.{digits.get(name, 1)}f}"

    records = table.to_dict("records")
    return markdown(list(DETAILS.values()), [[text(name, row[name]) for name in DETAILS] for row in records])


def curves_table(table: pd.DataFrame) -> str:
    """Per model, protocol and policy of an aggregated table: the best size and the area under top-1."""
    lines = []
    for protocol in table["protocol"].unique():
        for label, policy, curve in curves(table[table["protocol"] == protocol]):
            found = curve_summary(curve)
            area = "-" if found["top1_area"] != found["top1_area"] else f"{found['top1_area']:.1f}"
            lines.append([label, protocol, policy, found["best_size"], area])
    return markdown(["model", "protocol", "policy", "best size", "mean top-1 over log2 size"], lines)
