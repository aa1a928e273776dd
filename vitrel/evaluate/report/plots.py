"""Plots of an evaluation as PNG: accuracy and throughput against image size, and accuracy against throughput."""

import math
from collections.abc import Sequence
from pathlib import Path

from vitrel.evaluate.results import aggregate, curves
from vitrel.evaluate.settings import Row
from vitrel.extras import optional_import
from vitrel.files import atomic_write
from vitrel.sizes import parse_size

with optional_import():
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogFormatter, ScalarFormatter

# Okabe and Ito's palette, safe for colour-blind readers; markers and dashes distinguish the curves without colour
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
MARKERS = "osD^vPX"
DASHES = ("-", "--", ":", "-.")
FILLS = {"wide": {"markerfacecolor": "white"}, "tall": {"fillstyle": "left", "markerfacecoloralt": "white"}}


def plot_all(rows: Sequence[Row], folder: Path, title: str = "") -> list[Path]:
    """Write accuracy.png, throughput.png and tradeoff.png into `folder`, which is created, and return their paths.

    accuracy.png has a panel per protocol; the other two show only the first protocol.
    """
    folder.mkdir(parents=True, exist_ok=True)
    table = aggregate(rows)
    accuracy = _figure(table, "top1", "top-1 accuracy (%)", title)
    first = table[table["protocol"] == table["protocol"].iloc[0]]
    throughput = _figure(first, "infer_samples_per_sec", f"throughput (images/s, {first['device'].iloc[0]})", title)
    paths = [folder / f"{name}.png" for name in ("accuracy", "throughput", "tradeoff")]
    for figure, path in zip((accuracy, throughput, _tradeoff(first, title)), paths, strict=True):
        with atomic_write(path) as part:
            figure.savefig(part, dpi=150, bbox_inches="tight", format="png")
    return paths


def _figure(table: pd.DataFrame, column: str, ylabel: str, title: str) -> Figure:
    """A panel per protocol of a column against image side, with a common legend."""
    protocols = list(table["protocol"].unique())
    first = table[table["protocol"] == protocols[0]]
    # not through pyplot, which would open windows or choose a backend for the whole program
    legend_rows = -(-sum(1 for _ in curves(first)) // 4)
    height = 4.4 + 0.2 * max(0, legend_rows - 3)  # a long legend would otherwise shrink the panels
    figure = Figure(figsize=(1.5 + 5.2 * len(protocols), height), layout="constrained")
    panels = figure.subplots(1, len(protocols), sharey=True, squeeze=False)
    for axes, protocol in zip(panels[0], protocols, strict=True):
        panel(axes, table[table["protocol"] == protocol], column)
        if column == "top1":
            axes.set_title(f"{protocol} protocol", fontsize=11)
        else:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(ScalarFormatter())
            axes.yaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    panels[0][0].set_ylabel(ylabel)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=min(4, max(2, len(labels) // 2)), frameon=False, fontsize=9
    )
    figure.suptitle(title, fontsize=12)
    return figure


def _tradeoff(table: pd.DataFrame, title: str) -> Figure:
    """Top-1 against throughput: a point per row of one protocol, annotated with its size."""
    figure = Figure(figsize=(7.2, 4.6), layout="constrained")
    axes = figure.subplots()
    drawn = list(curves(table))
    for index, (label, policy, rows) in enumerate(drawn):
        rows = rows.sort_values("img_size", key=lambda sizes: sizes.map(_side))
        colour, marker = COLOURS[index % len(COLOURS)], MARKERS[index % len(MARKERS)]
        name = label if policy == "none" else f"{label}, {policy}"
        speed, top1 = rows["infer_samples_per_sec"], rows["top1"]
        axes.plot(speed, top1, color=colour, marker=marker, markersize=5, linewidth=0.8, label=name)
        for at, size in zip(zip(speed, top1, strict=True), rows["img_size"], strict=True):
            text = size.split("x")[0] if _shape(size) == "square" else size
            offset = (0, 5) if index % 2 == 0 else (0, -12)
            axes.annotate(text, at, offset, textcoords="offset points", ha="center", fontsize=7, color=colour)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.xaxis.set_minor_formatter(LogFormatter(minor_thresholds=(2, 0.5)))
    axes.set_xlabel(f"throughput (images/s, {table['device'].iloc[0]})")
    axes.set_ylabel("top-1 accuracy (%)")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=min(3, len(drawn)), frameon=False, fontsize=8)
    figure.suptitle(
        f"{title}: accuracy against throughput, {table['protocol'].iloc[0]} protocol".removeprefix(": "), fontsize=11
    )
    return figure


def panel(axes: Axes, table: pd.DataFrame, column: str) -> None:
    """Draw a column of an aggregated table of one protocol against image side: a curve per model and policy."""
    drawn = list(curves(table))
    labels = list(dict.fromkeys(label for label, _, _ in drawn))
    for index, (label, policy, rows) in enumerate(drawn):
        label_index = labels.index(label)
        dash = DASHES[[other for name, other, _ in drawn if name == label].index(policy) % len(DASHES)]
        style = {"color": COLOURS[label_index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)], "markersize": 5}
        line = {"linestyle": dash, "linewidth": 1.5, "capsize": 2}
        name = label if policy == "none" else f"{label}, {policy}"
        # error bars of different curves are drawn side by side, close enough to tell sizes apart
        step = min(0.012, 0.15 / len(drawn))
        dodge = 2 ** (step * (index - (len(drawn) - 1) / 2)) if column == "top1" else 1.0
        _errorbar(axes, rows[rows["img_size"].map(_shape) == "square"], column, dodge, {**style, **line, "label": name})
        for shape, fill in FILLS.items():
            _errorbar(axes, rows[rows["img_size"].map(_shape) == shape], column, dodge, {**style, "linestyle": "none", **fill})
    for size in table["train_size"].unique():
        axes.axvline(_side(size), color="0.6", linewidth=1, linestyle=(0, (4, 3)), zorder=0)
        axes.annotate(
            "trained", (_side(size), 1.0), (3, -2), xycoords=("data", "axes fraction"),
            textcoords="offset points", va="top", fontsize=8, color="0.4",
        )  # fmt: skip
    _sizes_axis(axes, list(table["img_size"].unique()))


def _errorbar(axes: Axes, rows: pd.DataFrame, column: str, dodge: float, style: dict) -> None:
    rows = rows.sort_values("img_size", key=lambda sizes: sizes.map(_side))
    at = rows["img_size"].map(_side) * dodge
    spread = [rows[column] - rows["low"], rows["high"] - rows[column]] if column == "top1" else None
    axes.errorbar(at, rows[column], yerr=spread, elinewidth=0.8, **style)


def _sizes_axis(axes: Axes, sizes: list[str]) -> None:
    shapes = {shape: [size for size in sizes if _shape(size) == shape] for shape in ("square", "wide", "tall")}
    axes.set_xscale("log", base=2)
    axes.set_xticks([_side(size) for size in shapes["square"]], [str(parse_size(size)[0]) for size in shapes["square"]])
    axes.set_xticks([], minor=True)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    notes = [
        f"{words}: {', '.join(shapes[shape])}"
        for shape, words in (("wide", "hollow"), ("tall", "half filled"))
        if shapes[shape]
    ]
    axes.set_xlabel("image side (px)" + (f", √(h·w) of non-square ({'; '.join(notes)})" if notes else ""))


def _side(size: str) -> float:
    """Side in pixels of the square with the area of a size."""
    return math.sqrt(math.prod(parse_size(size)))


def _shape(size: str) -> str:
    height, width = parse_size(size)
    return "square" if height == width else "wide" if width > height else "tall"
