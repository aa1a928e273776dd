"""The plot of cost against size: a line per contender."""

from collections.abc import Callable
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tools.benchmark.scale import DENSE
from tools.benchmark.tables import Row, call_mb
from vitrel.common.files import atomic_write

COLORS = {  # vitrel warm, the peer cold; distinguishable with common color blindness
    "none": "#D55E00", "table": "#E69F00", "decomposed": "#CC79A7", "rope_axial": "#8C2D04", "pape": "#999933",
    DENSE: "#0072B2",
}  # fmt: skip
_MARKERS = "osD^vP"


def plot_scale(rows: list[Row], footer: str, path: Path) -> None:
    """Write a PNG of milliseconds and MB of a call in inference against the number of tokens, all axes logarithmic."""
    rows = [row for row in rows if row["kind"] == "size" and row["mode"].startswith("inference")]
    rows_of = {name: [row for row in rows if row["contender"] == name] for name in COLORS}
    figure = Figure(figsize=(15, 6.4), layout="constrained")
    panels: tuple[tuple[str, Callable[[Row], float]], ...] = (("milliseconds", lambda row: row["call_ms"]), ("MB", call_mb))
    for axes, (ylabel, value) in zip(figure.subplots(1, 2), panels, strict=True):
        axes.set(xscale="log", yscale="log", xlabel="tokens N", ylabel=ylabel)
        for (name, own), marker in zip(rows_of.items(), _MARKERS, strict=True):
            points = sorted((row["tokens"], value(row)) for row in own)
            style = dict(marker=marker, markersize=4, color=COLORS[name], label=name)
            line = dict(linestyle="--", linewidth=1.3) if name == DENSE else dict(linewidth=2)
            axes.plot([n for n, _ in points], [y for _, y in points], **style, **line)
        ticks = sorted({row["tokens"] for row in rows})
        axes.set_xticks(ticks, list(map(str, ticks)), rotation=45, fontsize=8)
        axes.minorticks_off()
        axes.grid(alpha=0.25)
        _slopes(axes, [(row["tokens"], value(row)) for own in rows_of.values() for row in own])
    lines = figure.axes[0].get_lines()[: len(COLORS)]
    figure.legend(lines, list(COLORS), loc="outside lower center", ncols=4, frameon=False, fontsize=9)
    figure.suptitle("Global attention on one image, 2 heads of 64, inference\n", fontsize=13)
    figure.text(0.5, 0.945, footer, fontsize=8, color="0.4", ha="center")
    with atomic_write(path) as part:
        figure.savefig(part, dpi=130, format="png")


def _slopes(axes: Axes, points: list[tuple[float, float]]) -> None:
    """Draw thin lines that grow as N and as N^2, from below the lowest point of the smallest size."""
    low, high = min(n for n, _ in points), max(n for n, _ in points)
    start = min(y for n, y in points if n == low) / 2
    for power, text in ((1, "N"), (2, "N²")):
        end = start * (high / low) ** power
        axes.plot((low, high), (start, end), color="0.75", linewidth=1, zorder=0)
        axes.annotate(text, (high, end), (-12, 5), textcoords="offset points", color="0.5", fontsize=10)
