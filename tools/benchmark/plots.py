"""Plots of measurements against size: a line per contender, labelled at its end instead of in a legend."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vitrel.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]

COLOURS = {  # vitrel warm, peers cold; distinguishable with common colour blindness
    "ours": ("#D55E00", "#E69F00", "#CC79A7", "#8C2D04"),
    "both": ("#000000",),
    "peer": ("#0072B2", "#56B4E9", "#009E73", "#4D4D4D", "#332288", "#117733", "#88CCEE"),
    "floor": ("0.5",),
}
_DASHES = {"ours": "-", "both": "-.", "peer": "--", "floor": ":"}
_MARKERS = "osD^vPX*"
_APART = 0.05  # distance of labels, as a share of the panel's height


class LineEnd(NamedTuple):
    """The last point of a line, in data coordinates."""

    name: str
    colour: str
    x: float
    y: float


def label_ends(axes: "Axes", ends: Iterable[LineEnd]) -> None:
    """Write names right of the panel without overlap, each connected to its line's end; set limits and scales before."""
    transform = axes.transData + axes.transAxes.inverted()
    ordered = sorted(((transform.transform((end.x, end.y))[1], end) for end in ends), key=lambda item: item[0])
    height = -1.0
    for position, end in ordered:
        height = max(position, height + _APART)
        axes.annotate(
            end.name,
            (end.x, end.y),
            (1.03, height),
            textcoords="axes fraction",
            color=end.colour,
            fontsize=8,
            va="center",
            arrowprops=dict(arrowstyle="-", color=end.colour, linewidth=0.5, alpha=0.6),
            annotation_clip=False,
        )


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
    figure.suptitle(title)
    figure.supxlabel(footer, fontsize=7, color="0.4")
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

    ends, used = [], dict.fromkeys(COLOURS, 0)
    for number, (name, rows) in enumerate(rows_of.items()):
        kind = rows[0]["of"]
        colour, marker = COLOURS[kind][used[kind] % len(COLOURS[kind])], _MARKERS[number % len(_MARKERS)]
        used[kind] += 1
        points = sorted((place(row)[0], value(row)) for row in rows)
        linewidth = 2 if kind == "ours" else 1.3
        axes.plot(*zip(*points, strict=True), _DASHES[kind], marker=marker, markersize=4, color=colour, linewidth=linewidth)
        ends.append(LineEnd(name, colour, *points[-1]))
    ticks = dict(sorted(place(row) for rows in rows_of.values() for row in rows))
    axes.set_xticks(list(ticks), list(map(str, ticks.values())), rotation=45, fontsize=8)
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    if slopes:
        _slopes(axes, [(place(row)[0], value(row)) for rows in rows_of.values() for row in rows])
        axes.set_ylim(top=4 * axes.get_ylim()[1])  # space for the names
    else:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(ScalarFormatter())
    label_ends(axes, ends)


def _slopes(axes: "Axes", points: list[tuple[float, float]]) -> None:
    """Draw thin lines that grow as N and as N^2, from below the lowest point of the smallest size."""
    low, high = min(n for n, _ in points), max(n for n, _ in points)
    start = min(y for n, y in points if n == low) / 2
    for power, text in ((1, "N"), (2, "N²")):
        end = start * (high / low) ** power
        axes.plot((low, high), (start, end), color="0.75", linewidth=1, zorder=0)
        axes.annotate(text, (high, end), (-12, 5), textcoords="offset points", color="0.5", fontsize=10)
