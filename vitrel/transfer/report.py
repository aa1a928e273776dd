"""Rows of an evaluation as CSV, as Markdown tables, and aggregated over seeds."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import pandas as pd

from vitrel.files import whole
from vitrel.transfer.evaluate import Row, parse_size
from vitrel.transfer.metrics import t_interval, wilson

# Names and units as in timm's result CSVs where timm has them.
COLUMNS = {
    "model": "timm name",
    "label": "name in tables and plots",
    "encoding": "position encoding",
    "seed": "seed of training",
    "img_size": "evaluated at, height x width in pixels",
    "train_size": "trained at, height x width in pixels",
    "protocol": "scale: same field of view, objects grow; canvas: object size in pixels kept, more content or padding",
    "policy": "resize policy in force, one of each kind joined by +; none where each reads the model as trained",
    "top1": "accuracy, percent",
    "top1_err": "100 - top1",
    "top1_low": "lower end of the 95 % Wilson interval over images",
    "top1_high": "upper end of the 95 % Wilson interval over images",
    "top5": "label among the 5 highest logits, percent (100 with 5 classes or fewer)",
    "top5_err": "100 - top5",
    "nll": "mean negative log-likelihood, nats",
    "n": "images",
    "left_out": "images left out, since they cannot be read",
    "retention": "top1 / top1 at the training size under the same protocol",
    "tokens": "patch tokens, class tokens not counted",
    "resized": "what forward resamples or reads other than as trained at this size, and how",
    "resized_params": "number of parameter values resampled",
    "unseen": "share of (query, key) offset cells that no training pair had",
    "saturated": "the part of unseen that reads an edge value or far bucket which training did address",
    "state_hash_before": "sha256 of the state dict before",
    "state_hash_after": "sha256 of the state dict after",
    "unchanged": "hashes equal and every parameter still the same object",
    "infer_samples_per_sec": "images per second, forward passes alone",
    "peak_memory_mb": "peak memory, MiB",
    "memory_kind": "what the peak counts",
    "batch_size": "batch size in use at the end",
    "oom": "number of times memory ran out and the batch was halved",
    "param_count": "parameters, millions",
    "params": "parameters",
    "crop_pct": "share of the resized image that the centre crop keeps",
    "interpolation": "resize of images",
    "dtype": "of the computation",
    "device": "of the computation",
    "data": "data evaluated on",
    "data_seed": "seed of generated or sampled images",
    "n_asked": "limit on the number of images, empty for all",
    "batch_asked": "batch size asked for",
    "torch": "version",
    "timm": "version",
    "vitrel": "version",
}
CURVE = ["label", "protocol", "policy", "img_size"]
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
    "retention": "retention",
    "n": "n",
    "seeds": "seeds",
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


def write_csv(rows: Sequence[Row], path: Path) -> None:
    """Writes all rows with the columns of COLUMNS; the file is replaced whole, so an interruption leaves the old one."""
    with whole(path) as part:
        pd.DataFrame(rows, columns=list(COLUMNS)).to_csv(part, index=False)


def read_csv(path: Path) -> list[Row]:
    """The rows of a CSV written by `write_csv`, of this version or before the columns `saturated` and `left_out`; none if
    there is no such file. ValueError when other columns are missing.
    """
    if not path.exists():
        return []
    try:
        frame = pd.read_csv(path, keep_default_na=False, na_values=[""])
    except pd.errors.EmptyDataError:
        frame = pd.DataFrame()
    if "saturated" not in frame and {"unseen", "resized"} <= set(frame):
        # in files without the column only clipped tables read a trained edge, and at every unseen offset
        frame["saturated"] = frame["unseen"].where(frame["resized"].str.contains("clip"), 0.0)
    if "n" in frame and "left_out" not in frame:
        frame["left_out"] = 0  # such an image ended the evaluation
    if lacking := [name for name in COLUMNS if name not in frame]:
        raise ValueError(f"{path} is not a results file of this version (no column {lacking[0]!r}): move it away and run again")
    return frame.to_dict("records")


def aggregate(rows: Sequence[Row]) -> pd.DataFrame:
    """One row per (label, protocol, policy, img_size): means over seeds, `seeds`, and the 95 % interval `low`, `high` of top1.

    The interval is Student's over seeds where there are two or more, never narrower than Wilson's over images: the same images
    judge every seed, so more seeds do not lessen their chance. Else it is Wilson's. `interval` says which.
    Ordered as the models came, then by image area.
    """
    frame = pd.DataFrame(rows)
    order = {label: place for place, label in enumerate(dict.fromkeys(frame["label"]))}
    means = ["top1", "top5", "nll", "retention", "infer_samples_per_sec"]
    merged = []
    for _, group in frame.groupby(CURVE, sort=False, dropna=False):
        first = group.iloc[0].to_dict() | group[means].mean().to_dict()
        seeds = len(group)
        low, high = wilson(round(first["n"] * first["top1"] / 100), first["n"])
        kind = f"Wilson over {first['n']:,} images"
        if seeds > 1:
            around = t_interval(group["top1"].tolist())
            low, high, kind = min(low, around[0]), max(high, around[1]), f"t over {seeds} seeds, at least {kind}"
        first |= {"seeds": seeds, "low": max(0.0, low), "high": min(100.0, high), "interval": kind}
        first |= {"unchanged": bool(group["unchanged"].all()), "oom": int(group["oom"].max())}
        first |= {"peak_memory_mb": group["peak_memory_mb"].max(), "batch_size": int(group["batch_size"].min())}
        merged.append(first)
    area = {size: (height * width, height) for size in frame["img_size"] for height, width in [parse_size(size)]}
    merged.sort(key=lambda row: (order[row["label"]], row["protocol"] != "scale", row["policy"], area[row["img_size"]]))
    return pd.DataFrame(merged)


def curves(table: pd.DataFrame) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """(label, policy, rows) of an aggregated table: one curve per policy a model was evaluated with.

    Sizes at which a policy makes no difference belong to every curve of their model: "none" to all, "keep" to
    "geometric+keep" and "clip+keep".
    """
    for label, group in table.groupby("label", sort=False):
        names = {policy: set(policy.split("+")) - {"none"} for policy in group["policy"].unique()}
        for policy, own in names.items():
            if not any(own < other for other in names.values()):
                yield label, policy, group[[names[at] <= own for at in group["policy"]]]


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
        return f"{', '.join(rules)}: {most['resized_params']:,} of {most['params']:,}"
    return "nothing" if policy == "none" else f"nothing ({policy})"


def details_table(table: pd.DataFrame) -> str:
    """Every aggregated row with its main columns."""
    digits = {"nll": 3, "retention": 3, "unseen": 2, "saturated": 2, "infer_samples_per_sec": 0, "peak_memory_mb": 0}

    def text(name: str, value: object) -> str:
        if isinstance(value, (bool, str)):
            return {True: "yes", False: "NO"}.get(value, str(value))
        if name in ("n", "resized_params", "tokens", "seeds", "batch_size", "oom"):
            return f"{value:,.0f}"
        return f"{value:.{digits.get(name, 1)}f}"

    records = table.to_dict("records")
    return markdown(list(DETAILS.values()), [[text(name, row[name]) for name in DETAILS] for row in records])
