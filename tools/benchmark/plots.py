"""Plots of measurements: a line for each contender against the size, names at the ends of lines instead of a legend."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vitrel.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]

COLOURS = {  # ours warm, peers cold, all told apart with the common colour blindnesses
    "ours": ("#D55E00", "#E69F00", "#CC79A7", "#8C2D04"),
    "both": ("#000000",),
    "peer": ("#0072B2", "#56B4E9", "#009E73", "#4D4D4D", "#332288", "#117733", "#88CCEE"),
    "floor": ("0.5",),
}
_DASHES = {"ours": "-", "both": "-.", "peer": "--", "floor": ":"}
_MARKERS = "osD^vPX*"
_APART = 0.05  # of the height of a panel


class LineEnd(NamedTuple):
    """The last point of a line, in data coordinates."""

    name: str
    colour: str
    x: float
    y: float


def label_ends(axes: "Axes", ends: Iterable[LineEnd]) -> None:
    """Names right of the panel, in the order of the ends and apart, each tied to its line; limits and scales have to be set."""
    places = axes.transData + axes.transAxes.inverted()
    found = sorted(((places.transform((end.x, end.y))[1], end) for end in ends), key=lambda one: one[0])
    at = -1.0
    for place, end in found:
        at = max(place, at + _APART)
        axes.annotate(
            end.name,
            (end.x, end.y),
            (1.03, at),
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
    found: dict[str, list[Row]],
    xlabel: str,
    place: Callable[[Row], tuple[int, Any]],
    panels: Iterable[tuple[str, Callable[[Row], float]]],
    slopes: bool = False,
) -> None:
    """Writes a PNG with a panel for each (title, value of a row), both axes logarithmic.

    found: rows by contender. place: a row on the x axis, and the text there. slopes: with lines that grow as N and N^2.
    """
    from matplotlib.figure import Figure

    panels = list(panels)
    figure = Figure(figsize=(7.5 * len(panels), 6.4), layout="constrained")
    for axes, (ylabel, value) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        axes.set(xscale="log", yscale="log", xlabel=xlabel, ylabel=ylabel)
        _panel(axes, found, place, value, slopes)
    figure.suptitle(title)
    figure.supxlabel(footer, fontsize=7, color="0.4")
    with atomic_write(path) as part:
        figure.savefig(part, dpi=130, format="png")


def _panel(
    axes: "Axes",
    found: dict[str, list[Row]],
    place: Callable[[Row], tuple[int, Any]],
    value: Callable[[Row], float],
    slopes: bool,
) -> None:
    from matplotlib.ticker import LogLocator, ScalarFormatter

    ends, used = [], dict.fromkeys(COLOURS, 0)
    for number, (who, rows) in enumerate(found.items()):
        kind = rows[0]["of"]
        colour, marker = COLOURS[kind][used[kind] % len(COLOURS[kind])], _MARKERS[number % len(_MARKERS)]
        used[kind] += 1
        points = sorted((place(row)[0], value(row)) for row in rows)
        wide = 2 if kind == "ours" else 1.3
        axes.plot(*zip(*points, strict=True), _DASHES[kind], marker=marker, markersize=4, color=colour, linewidth=wide)
        ends.append(LineEnd(who, colour, *points[-1]))
    ticks = dict(sorted(place(row) for rows in found.values() for row in rows))
    axes.set_xticks(list(ticks), list(map(str, ticks.values())), rotation=45, fontsize=8)
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    if slopes:
        _slopes(axes, [(place(row)[0], value(row)) for rows in found.values() for row in rows])
        axes.set_ylim(top=4 * axes.get_ylim()[1])  # room for the names
    else:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter(ScalarFormatter())
    label_ends(axes, ends)


def _slopes(axes: "Axes", points: list[tuple[float, float]]) -> None:
    """Thin lines that grow as N and as N^2, from the lowest point of the smallest size."""
    low, high = min(n for n, _ in points), max(n for n, _ in points)
    start = min(y for n, y in points if n == low) / 2
    for power, text in ((1, "N"), (2, "N²")):
        end = start * (high / low) ** power
        axes.plot((low, high), (start, end), color="0.75", linewidth=1, zorder=0)
        axes.annotate(text, (high, end), (-12, 5), textcoords="offset points", color="0.5", fontsize=10)
