"""Curves of a model and policy over sizes, and plots of them as small multiples: a panel per model, a reference in each."""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from vitrel.common.sizes import parse_size
from vitrel.evaluate.policies import WINDOW_POLICIES
from vitrel.tasks import Row

IMAGES = Path(__file__).parents[2] / "docs" / "images"
Curve = tuple[str, str]  # label and policy, "none" for a model without policies
MODEL, REFERENCE = "#0072B2", "#D55E00"  # Okabe and Ito's blue and vermilion, safe for color blindness


def curves(table: Sequence[Row]) -> Iterator[tuple[str, str, list[Row]]]:
    """Yield (label, policy, rows) of aggregated rows or of those of all seeds, a curve over sizes a model and policy.

    The rows are those of the table, in its order, of all protocols: for one curve per protocol, pass the rows of one. A policy
    that is part of a longer one, such as "none" or "keep", has no curve of its own where the label has that at other sizes
    only. A size at which policies do not differ has one row, which belongs to all curves: "none" to every policy, "keep" to
    "geometric+keep" and "clip+keep". The curve of "divisor" uses rows of "fixed" at sizes without a row of its own.
    """
    by_label: dict[str, list[Row]] = defaultdict(list)
    for row in table:
        by_label[row["label"]].append(row)
    for label, group in by_label.items():
        at: dict[str, set[tuple[str, str]]] = defaultdict(set)
        for row in group:
            at[row["policy"]].add(_at(row))
        parts = {policy: frozenset(policy.split("+")) - {"none"} for policy in at}
        for policy, names in parts.items():
            if any(names < larger and not at[policy] & at[other] for other, larger in parts.items()):
                continue
            fixed = {"fixed" if name in WINDOW_POLICIES else name for name in names}
            chosen: dict[tuple[str, str], str] = {}
            for covering in (names, fixed):  # of the rows at a place, that of the longest policy within this one
                fitting = sorted((one for one in parts if parts[one] <= covering), key=lambda one: -len(parts[one]))
                for one in fitting:
                    chosen = dict.fromkeys(at[one], one) | chosen
            yield label, policy, [row for row in group if chosen.get(_at(row)) == row["policy"]]


def _at(row: Row) -> tuple[str, str]:
    return row["protocol"], row["img_size"]


def draw_protocols(tables: Mapping[str, Sequence[Row]], shown: Mapping[Curve, str], title: str, name: str) -> None:
    """Write docs/images/name_scale.png and name_canvas.png (`small_multiples`), and print their paths."""
    for protocol, what in (("scale", "objects grow with the image"), ("canvas", "objects keep their pixels")):
        picture = IMAGES / f"{name}_{protocol}.png"
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
