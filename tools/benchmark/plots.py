"""Plots of measurements against size: a line per contender."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vitrel.common.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]

COLORS = {  # vitrel warm, peers cold; distinguishable with common color blindness
    "ours": ("#D55E00", "#E69F00", "#CC79A7", "#8C2D04", "#999933"),
    "peer": ("#0072B2", "#56B4E9", "#009E73", "#4D4D4D", "#332288", "#117733", "#88CCEE"),
    "floor": ("0.5",),
}
_DASHES = {"ours": "-", "peer": "--", "floor": ":"}
_MARKERS = "osD^vPX*"


def plot(
    path: Path,
    title: str,
    footer: str,
    rows_of: dict[str, list[Row]],
    xlabel: str,
    place: Callable[[Row], tuple[int, Any]],
    panels: Iterable[tuple[str, Callable[[Row], float]]],
    slopes: bool = False,
) -> None:
    """Write a PNG with a panel for each (title, function of a row), both axes logarithmic.

    rows_of: rows by contender. place: x of a row, and its tick label. slopes: draw lines that grow as N and N^2.
    """
    from matplotlib.figure import Figure

    panels = list(panels)
    figure = Figure(figsize=(7.5 * len(panels), 6.4), layout="constrained")
    for axes, (ylabel, value) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel)
        _panel(axes, rows_of, place, value, slopes)
    lines = {line.get_label(): line for axes in figure.axes for line in axes.get_lines() if line.get_label() in rows_of}
    figure.legend(lines.values(), lines, loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.suptitle(f"{title}\n", fontsize=13)
    figure.text(0.5, 0.945, footer, fontsize=8, color="0.4", ha="center")
    with atomic_write(path) as part:
        figure.savefig(part, dpi=130, format="png")


def _panel(
    axes: "Axes",
    rows_of: dict[str, list[Row]],
    place: Callable[[Row], tuple[int, Any]],
    value: Callable[[Row], float],
    slopes: bool,
) -> None:
    from matplotlib.ticker import LogLocator, ScalarFormatter

    used = dict.fromkeys(COLORS, 0)
    for number, (name, rows) in enumerate(rows_of.items()):
        kind = rows[0]["of"]
        color, marker = COLORS[kind][used[kind] % len(COLORS[kind])], _MARKERS[number % len(_MARKERS)]
        used[kind] += 1
        points = sorted((place(row)[0], value(row)) for row in rows)
        style = dict(marker=marker, markersize=4, color=color, linewidth=2 if kind == "ours" else 1.3, label=name)
        axes.plot(*zip(*points, strict=True), _DASHES[kind], **style)
    ticks = dict(sorted(place(row) for rows in rows_of.values() for row in rows))
    axes.set_xticks(list(ticks), list(map(str, ticks.values())), rotation=45, fontsize=8)
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    if slopes:
        _slopes(axes, [(place(row)[0], value(row)) for rows in rows_of.values() for row in rows])
    else:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(ScalarFormatter())


def _slopes(axes: "Axes", points: list[tuple[float, float]]) -> None:
    """Draw thin lines that grow as N and as N^2, from below the lowest point of the smallest size."""
    low, high = min(n for n, _ in points), max(n for n, _ in points)
    start = min(y for n, y in points if n == low) / 2
    for power, text in ((1, "N"), (2, "N²")):
        end = start * (high / low) ** power
        axes.plot((low, high), (start, end), color="0.75", linewidth=1, zorder=0)
        axes.annotate(text, (high, end), (-12, 5), textcoords="offset points", color="0.5", fontsize=10)
