"""Charts of an evaluation by matplotlib: accuracy by size and by cost, with 95 % intervals."""

import io
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from vitrel.common.extras import optional_import
from vitrel.common.sizes import parse_size
from vitrel.evaluate.sentences import size_name, unit
from vitrel.evaluate.verdicts import Judged, Row, by_area, is_training, known_number, main_metric, train_sizes_of

with optional_import():
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

# Okabe and Ito's palette, safe for color-blind readers; markers distinguish models without color
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7A7A7A")
MARKERS = "osD^vPX"
APART = 0.04  # of a step between sizes, by which models stand side by side


def against_size(judged: Judged, protocol: str) -> "Figure | None":
    """Return the chart of the task's metric by size in a protocol, under the first policy; None for fewer than two sizes.

    A line joins a model's sizes of the training shape (aspect ratio); points of another shape are hollow. Sizes stand at equal
    distances in the order of their area.
    """
    rows = sorted(
        (row for row in judged.rows if row["protocol"] == protocol and row["used"]), key=lambda row: by_area(row["img_size"])
    )
    sizes = {row["img_size"]: size_name(row) for row in rows}
    if len(sizes) < 2:
        return None
    figure, axes = _axes(f"{protocol} protocol", judged)
    labels, places = [*judged.models], {size: at for at, size in enumerate(sizes)}
    for number, label in enumerate(labels):
        for of_shape in (True, False):
            own = [row for row in rows if row["label"] == label and _has_training_shape(row) == of_shape]
            x = [places[row["img_size"]] + APART * (number - (len(labels) - 1) / 2) for row in own]
            _draw(axes, number, label, x, own, hollow=not of_shape)
    for size in dict.fromkeys(row["img_size"] for row in rows if is_training(row)):
        axes.axvline(places[size], color="0.6", linewidth=0.8, linestyle=":", zorder=0)
        where = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        axes.annotate("trained", (places[size], 1), xytext=(2, -9), fontsize=8, color="0.4", **where)
    axes.set_xticks(range(len(sizes)), [*sizes.values()])
    if sum(len(name) + 1 for name in sizes.values()) > 36:  # side by side they would overlap
        axes.tick_params(axis="x", rotation=60)
    axes.set_xlabel("most tokens of an image" if unit(rows[0]) == "tokens" else "image size (px)")
    _name_models(figure, axes)
    return figure


def against_cost(judged: Judged) -> "Figure | None":
    """Return the chart of the task's metric by multiply-adds of an image; None where these are unknown or all equal.

    Its points are `Model.used`; lines and hollow points are as in `against_size`. The size is written at the smallest and the
    largest cost of every model.
    """
    used = [row for model in judged.models.values() for row in model.used.values() if known_number(row.get("gflops"))]
    if len({row["gflops"] for row in used}) < 2:
        return None
    figure, axes = _axes("accuracy and cost", judged)
    for number, label in enumerate(judged.models):
        own = sorted((row for row in used if row["label"] == label), key=lambda row: row["gflops"])
        for of_shape in (True, False):
            drawn = [row for row in own if _has_training_shape(row) == of_shape]
            _draw(axes, number, label, [row["gflops"] for row in drawn], drawn, hollow=not of_shape)
        for row in own[:: max(1, len(own) - 1)]:
            place = row["gflops"], main_metric(row)
            axes.annotate(size_name(row), place, xytext=(0, 5), textcoords="offset points", ha="center", fontsize=7)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, at: f"{value:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("multiply-adds of an image (10⁹)")
    _name_models(figure, axes)
    return figure


def svg_of(figure: "Figure", name: str) -> str:
    """Return a figure as an SVG element with selectable text, which shrinks with the page; `name` is its ARIA label."""
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = file.getvalue()
    size = re.compile(r'<svg ([^>]*?)width="([\d.]+)pt" height="[\d.]+pt"')
    return size.sub(rf'<svg role="img" aria-label="{name}" \1style="max-width: \2pt"', text[text.index("<svg") :], count=1)


def _has_training_shape(row: Row) -> bool:
    """Return whether a row's size has the aspect ratio of a training size, or is a budget of tokens."""
    (h, w), trained = parse_size(row["img_size"]), [size for size in train_sizes_of(row) if isinstance(size, tuple)]
    return unit(row) == "tokens" or any(h * size[1] == w * size[0] for size in trained or [(1, 1)])


def _axes(title: str, judged: Judged) -> tuple["Figure", Any]:
    figure = Figure(figsize=(4.6, 3.5), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_ylabel(f"{judged.task.title} (%)")
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _draw(axes: Any, number: int, label: str, x: Sequence[float], rows: Sequence[Row], hollow: bool = False) -> None:
    """Draw the points of rows at `x` with intervals, joined unless hollow; `number`, a model's index, sets color and marker."""
    if not rows:
        return
    y = [main_metric(row) for row in rows]
    # a mean over all images may lie a hair outside of an interval over those that every seed has
    errors = np.array([(max(value - row["low"], 0), max(row["high"] - value, 0)) for value, row in zip(y, rows, strict=True)]).T
    color, marker = COLORS[number % len(COLORS)], MARKERS[number % len(MARKERS)]
    filling = {"linewidth": 0, "markerfacecolor": "white"} if hollow else {"linewidth": 1.5}
    axes.errorbar(x, y, errors, color=color, marker=marker, markersize=5, label=label, elinewidth=0.9, **filling)


def _name_models(figure: "Figure", axes: Any) -> None:
    """Add a legend below a chart of several models; to that of one model nothing."""
    handles, names = axes.get_legend_handles_labels()
    firsts = {name: handles[names.index(name)] for name in names}
    if len(firsts) > 1:
        columns = max(1, min(len(firsts), int(figure.get_figwidth() * 72 / (36 + 4.6 * max(map(len, firsts))))))
        figure.legend(firsts.values(), firsts, loc="outside lower center", ncols=columns, frameon=False, fontsize=8)
