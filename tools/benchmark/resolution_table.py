"""From the rows of models over resolutions to table.md and a plot for each model: throughput and memory against the size."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tools.benchmark.kernel_table import milliseconds, not_timed
from tools.benchmark.model_table import by_case, images_per_second
from tools.benchmark.plots import COLOURS, LineEnd, label_ends
from tools.benchmark.samples import footer, last_run, machine_lines
from vitrel.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]
_MOST_COMPILES = 2
_LEGEND = (
    "Seconds: from a new size to its first result, compilation included. Graphs: compiled by dynamo for it. A call: the memory "
    "that one call takes beyond what is held between calls. Sizes are visited in the order of the table, in one process each."
)


def write_resolutions(rows: list[Row], folder: Path) -> None:
    """table.md, and <model>.png for each model, from the rows of the last machine and code."""
    found, rows = last_run(rows)
    lines = ["# Models over resolutions", "", *machine_lines(found), "", _LEGEND, ""]
    for case, of_case in _by_contender(rows).items():
        lines += [f"## {case}", "", *_goal(of_case), *_table(of_case), ""]
        _plot(case, of_case, footer(found), folder)
    lines += ["## Not timed", "", *not_timed(rows), "", footer(found)]
    with atomic_write(folder / "table.md") as part:
        part.write_text("\n".join(lines) + "\n", "utf-8")


def _by_contender(rows: list[Row]) -> dict[str, dict[str, list[Row]]]:
    """Rows in the order of the sizes' visits, by case and contender."""
    found: dict[str, dict[str, list[Row]]] = {}
    for (case, _), of in by_case(rows).items():
        for name, row in of.items():
            found.setdefault(case, {}).setdefault(name, []).append(row)
    return found


def _goal(of: dict[str, list[Row]]) -> list[str]:
    lines = ["| | sizes | graphs compiled | seconds to all first results | at most 2 |", "|---|---:|---:|---:|---|"]
    compiled = {name: rows for name, rows in of.items() if "compiled" in name}
    for name, rows in compiled.items():
        graphs = sum(row["new_compiles"] for row in rows)
        met = "" if rows[0]["of"] == "peer" else "met" if graphs <= _MOST_COMPILES else "missed"
        lines.append(f"| {name} | {len(rows)} | {graphs} | {sum(row['first_call_s'] for row in rows):.1f} | {met} |")
    return [*lines, ""] if compiled else []


def _table(of: dict[str, list[Row]]) -> list[str]:
    sizes = list(dict.fromkeys(tuple(row["size"]) for rows in of.values() for row in rows))
    lines = [f"| img/s p50 (p90), MB a call, seconds, graphs | {' | '.join(of)} |", f"|---|{'---|' * len(of)}"]
    for size in sizes:
        cells = []
        for rows in of.values():
            row = next((row for row in rows if tuple(row["size"]) == size), None)
            cells.append("" if row is None else _cell(row))
        lines.append(f"| {size[0]}x{size[1]} | {' | '.join(cells)} |")
    return lines


def _cell(row: Row) -> str:
    p50, p90 = images_per_second(row)
    memory = "?" if row["call_bytes"] is None else f"{row['call_bytes'] / 1e6:.0f}"
    return f"{p50:.2f} ({p90:.2f}), {memory} MB, {row['first_call_s']:.1f} s, {row['new_compiles']}"


def _plot(case: str, of: dict[str, list[Row]], line: str, folder: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(14, 5.4), layout="constrained")
    panels = figure.subplots(1, 2)
    _panel(panels[0], of, "images per second", lambda row: row["batch"] / milliseconds(row) * 1e3)
    _panel(panels[1], of, "memory of a call, MB", lambda row: (row["call_bytes"] or 0) / 1e6)
    figure.suptitle(case)
    figure.supxlabel(line, fontsize=7, color="0.4")
    name = "".join(c if c.isalnum() else "_" for c in case.partition(" over")[0].lower())
    with atomic_write(folder / f"{name}.png") as part:
        figure.savefig(part, dpi=130, format="png")


def _panel(axes: "Axes", of: dict[str, list[Row]], title: str, value: Callable[[Row], float]) -> None:
    from matplotlib.ticker import LogLocator, ScalarFormatter

    ends, used = [], dict.fromkeys(COLOURS, 0)
    for name, rows in of.items():
        kind = rows[0]["of"]
        colour = COLOURS[kind][used[kind]]
        used[kind] += 1
        points = sorted((row["size"][0] * row["size"][1], value(row)) for row in rows)
        axes.plot(*zip(*points, strict=True), "-o", markersize=4, color=colour, linewidth=2 if kind == "ours" else 1.3)
        ends.append(LineEnd(name, colour, *points[-1]))
    ticks = {row["size"][0] * row["size"][1]: f"{row['size'][0]}x{row['size'][1]}" for rows in of.values() for row in rows}
    axes.set(xscale="log", yscale="log", ylabel=title, xlabel="image, height x width in pixels")
    axes.set_xticks(list(ticks), list(ticks.values()), rotation=45, fontsize=8)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    label_ends(axes, ends)
