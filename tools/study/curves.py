"""Plots of top-1 against image side as small multiples: a panel per model, with the same reference in each."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from vitrel.common.sizes import parse_size
from vitrel.evaluate.verdicts import curves
from vitrel.tasks import Row

Curve = tuple[str, str]  # label and policy, "none" for a model without policies
MODEL, REFERENCE = "#0072B2", "#D55E00"  # Okabe and Ito's blue and vermilion, safe for color blindness


def draw_protocols(
    tables: Mapping[str, Sequence[Row]], shown: Mapping[Curve, str], title: str, folder: Path, name: str
) -> None:
    """Write folder/name_scale.png and folder/name_canvas.png (`small_multiples`), and print their paths."""
    for protocol, what in (("scale", "objects grow with the image"), ("canvas", "objects keep their pixels")):
        picture = folder / f"{name}_{protocol}.png"
        figure = small_multiples(tables, shown, protocol, f"{title}: {protocol}, {what}")
        figure.savefig(picture, dpi=130, bbox_inches="tight")
        print(picture)


def small_multiples(tables: Mapping[str, Sequence[Row]], shown: Mapping[Curve, str], protocol: str, title: str) -> Figure:
    """Return a figure with a row of panels per table of aggregated rows and a panel per curve; the first curve is in all.

    Bands are 95 % intervals; only square sizes are drawn. ValueError for a curve that is not in a table.
    """
    (reference, reference_name), *others = shown.items()
    parts = {}
    for name, table in tables.items():
        in_protocol = [row for row in table if row["protocol"] == protocol]
        parts[name] = {(label, policy): part for label, policy, part in curves(in_protocol)}
        if missing := [curve for curve in shown if curve not in parts[name]]:
            raise ValueError(f"{name} has no rows of {'/'.join(missing[0])} in the {protocol} protocol")
    figure = Figure(figsize=(1.9 * len(others) + 0.6, 2.0 * len(tables) + 1.1), layout="constrained")
    grid = figure.subplots(len(tables), len(others), squeeze=False, sharex=True, sharey=True)
    for number, (row, (name, table)) in enumerate(zip(grid, tables.items(), strict=True)):
        for axes, (curve, curve_name) in zip(row, others, strict=True):
            _band(axes, parts[name][reference], REFERENCE, "--", "s")
            _band(axes, parts[name][curve], MODEL, "-", "o")
            for size in {row["train_size"] for row in table}:
                axes.axvline(parse_size(size)[0], color="0.6", linewidth=0.8, linestyle=":")
            if number == 0:
                axes.set_title(curve_name, fontsize=9)
            if number == len(tables) - 1:
                axes.set_xlabel("image side (px)", fontsize=8)
        row[0].set_ylabel(f"{name}\ntop-1 (%)", fontsize=9)
    figure.suptitle(title, fontsize=11)
    handles = [
        Line2D([], [], color=MODEL, marker="o", markersize=4, label="the encoding named above the panel"),
        Line2D([], [], color=REFERENCE, marker="s", markersize=4, linestyle="--", label=reference_name),
        Line2D([], [], color="0.6", linestyle=":", label="training size"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9)
    return figure


def _band(axes: Axes, rows: Sequence[Row], color: str, dashes: str, marker: str) -> None:
    square = [row for row in rows if len({*parse_size(row["img_size"])}) == 1]
    square.sort(key=lambda row: parse_size(row["img_size"]))
    sides = [parse_size(row["img_size"])[0] for row in square]
    low, high, top1 = ([row[name] for row in square] for name in ("low", "high", "top1"))
    axes.fill_between(sides, low, high, color=color, alpha=0.2, linewidth=0)
    axes.plot(sides, top1, color=color, linestyle=dashes, marker=marker, markersize=3, linewidth=1.4)
    axes.set_xscale("log", base=2)
    labels, last = [], 0
    for side in sides:  # where ticks are close, labels would overlap
        labels.append(str(side) if side >= 1.3 * last else "")
        last = side if labels[-1] else last
    axes.set_xticks(sides, labels, fontsize=7)
    axes.set_xticks([], minor=True)
    axes.tick_params(axis="y", labelsize=7)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
