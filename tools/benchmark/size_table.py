"""From the rows of cost against size to a section of the table, and to plots of time and memory."""

import math
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from tools.benchmark.kernel_table import Row
from tools.benchmark.plots import COLOURS, LineEnd, label_ends
from tools.benchmark.samples import footer, last_run
from tools.benchmark.sizes import MODES_OF_SIZES
from vitrel.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLES = {"forward": "inference", "training": "forward and backward"}
_GROWS_FROM = 1000  # tokens from which on growth is fitted: below, what does not grow hides it
_DASHES = {"ours": "-", "peer": "--", "floor": ":"}
_MARKERS = "osD^vPX*"


def size_section(rows: list[Row]) -> str:
    """Cost against size: a size per row, a contender per column, and how it grows; "" where nothing was measured."""
    if not any(row["kind"] in ("size", "turn") for row in rows):
        return ""
    _, rows = last_run(rows)
    lines = [
        "## Cost against size",
        "",
        "Global attention, 6 heads of 64, batch 1, a bias table unless another encoding is named.",
    ]
    lines += [
        "`auto` and names of backends are vitrel's own way. MB is what one call takes at its peak beyond its inputs, outputs"
    ]
    lines += ["and gradients included, and with it the index [N, N] of int64 that a peer keeps; 1 MB is 10^6 bytes."]
    lines += [_precision(row) for row in rows if row["kind"] == "precision"]
    for mode in MODES_OF_SIZES:
        found, ended = _by_contender(rows, mode)
        if found:
            lines += ["", f"### {TITLES[mode].capitalize()}: ms, MB", "", *_grid(found, ended, _cell), _growth(found)]
            lines += ["", f"### {TITLES[mode].capitalize()}: seconds of the first call (graphs compiled)", ""]
            lines += _grid(found, ended, lambda row: f"{row['first_call_s']:.2f} ({int(row['compiles'])})")
    return "\n".join([*lines, *_turns(rows)]) + "\n"


def growth(rows: list[Row], value: Callable[[Row], float]) -> float | None:
    """The exponent e of value ~ N^e by least squares of the logarithms; None for fewer than three sizes from 1000 tokens on."""
    points = [
        (math.log(row["tokens"]), math.log(value(row))) for row in rows if row["tokens"] >= _GROWS_FROM and value(row) > 0
    ]
    if len(points) < 3:
        return None
    x, y = (sum(column) / len(points) for column in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def plot_sizes(rows: list[Row], folder: Path) -> list[Path]:
    """Writes sizes_forward.png and sizes_training.png into `folder`, of what was measured, and returns their paths."""
    from matplotlib.figure import Figure

    paths: list[Path] = []
    if not any(row["kind"] == "size" for row in rows):
        return paths
    machine, rows = last_run(rows)
    for mode in MODES_OF_SIZES:
        found, _ = _by_contender(rows, mode)
        if not found:
            continue
        figure = Figure(figsize=(15, 6.4), layout="constrained")
        panels = figure.subplots(1, 2)
        for axes, value, title in zip(panels, (_ms, _megabytes), ("milliseconds", "MB"), strict=True):
            _panel(axes, found, value)
            axes.set_ylabel(title)
        figure.suptitle(f"Global attention, 6 heads of 64, batch 1, {TITLES[mode]}")
        figure.supxlabel(footer(machine), fontsize=7, color="0.4")
        paths.append(folder / f"sizes_{mode}.png")
        with atomic_write(paths[-1]) as part:
            figure.savefig(part, dpi=130, format="png")
    return paths


def _by_contender(rows: list[Row], mode: str) -> tuple[dict[str, list[Row]], dict[tuple[str, str], Row]]:
    """Measured rows of every contender, by size; and those that say why there are none, by contender and case."""
    found: dict[str, list[Row]] = {}
    ended = {}
    for row in rows:
        if row.get("mode") == mode and row["kind"] == "size":
            found.setdefault(row["contender"], []).append(row)
        elif row.get("mode") == mode and row["kind"] in ("refused", "wrong", "failed"):
            ended[row["contender"], row["case"]] = row
    return {who: sorted(of, key=lambda row: row["tokens"]) for who, of in found.items()}, ended


def _grid(found: dict[str, list[Row]], ended: dict[tuple[str, str], Row], cell: Callable[[Row], str]) -> list[str]:
    cases = {row["case"]: row["tokens"] for of in found.values() for row in of}
    lines = [f"| N | {' | '.join(found)} |", "|---|" + "---:|" * len(found)]
    for case, tokens in sorted(cases.items(), key=lambda one: one[1]):
        cells = []
        for who, of in found.items():
            row = next((row for row in of if row["case"] == case), None)
            cells.append(cell(row) if row else _why(ended.get((who, case))))
        lines.append(f"| {tokens} ({case.removeprefix('size ')}) | {' | '.join(cells)} |")
    return lines


def _growth(found: dict[str, list[Row]]) -> str:
    cells = []
    for of in found.values():
        exponents = [growth(of, value) for value in (_ms, _megabytes)]
        cells.append(", ".join("?" if e is None else f"N^{e:.2f}" for e in exponents))
    return f"| grows as | {' | '.join(cells)} |"


def _turns(rows: list[Row]) -> list[str]:
    found = [row for row in rows if row["kind"] == "turn"]
    if not found:
        return []
    sizes = [f"{h}x{w}" for h, w in found[0]["sizes"]]
    lines = ["", "### One process, one size after the other: seconds of the first call of each (graphs compiled)", ""]
    lines += [f"| | {' | '.join(sizes)} | graphs |", "|---|" + "---:|" * (len(sizes) + 1)]
    for row in found:
        cells = [f"{s:.2f} ({n})" for s, n in zip(row["seconds"], row["compiles"], strict=True)]
        lines.append(f"| {row['contender']} | {' | '.join(cells)} | {sum(row['compiles'])} |")
    return lines


def _precision(row: Row) -> str:
    pairs = ", ".join(f"{b / 1e6:.2f} of {a / 1e6:.2f} MB" for a, b in zip(row["asked"], row["found"], strict=True))
    return f"Of a call whose memory is known this measures {pairs}."


def _why(row: Row | None) -> str:
    if row is None:
        return ""
    return "out of memory" if "allocate memory" in row["text"] or "out of memory" in row["text"] else row["kind"]


def _ms(row: Row) -> float:
    return median(row["ms"])


def _megabytes(row: Row) -> float:
    return (row["call_bytes"] + row["kept_bytes"]) / 1e6


def _cell(row: Row) -> str:
    return f"{_three(_ms(row))}, {_three(_megabytes(row))}"


def _three(x: float) -> str:
    """Three digits, without an exponent."""
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def _panel(axes: "Axes", found: dict[str, list[Row]], value: Callable[[Row], float]) -> None:
    axes.set(xscale="log", yscale="log", xlabel="tokens N")
    used = {"ours": 0, "peer": 0, "floor": 0}
    ends = []
    for place, (who, of) in enumerate(found.items()):
        kind = of[0]["of"]
        colour = COLOURS[kind][used[kind] % len(COLOURS[kind])]
        used[kind] += 1
        n, y = [row["tokens"] for row in of], [value(row) for row in of]
        marker = _MARKERS[place % len(_MARKERS)]
        axes.plot(n, y, _DASHES[kind], marker=marker, markersize=4, color=colour, linewidth=2 if kind == "ours" else 1.3)
        ends.append(LineEnd(who, colour, n[-1], y[-1]))
    ticks = sorted({row["tokens"] for of in found.values() for row in of})
    axes.set_xticks(ticks, [str(n) for n in ticks], rotation=45, fontsize=8)
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    _slopes(axes, found, value)
    axes.set_ylim(top=4 * axes.get_ylim()[1])  # room for the names
    label_ends(axes, ends)


def _slopes(axes: "Axes", found: dict[str, list[Row]], value: Callable[[Row], float]) -> None:
    """Thin lines that grow as N and as N^2, from the lowest point of the smallest size."""
    points = [(row["tokens"], value(row)) for of in found.values() for row in of]
    low, high = min(n for n, _ in points), max(n for n, _ in points)
    start = min(y for n, y in points if n == low) / 2
    for power, text in ((1, "N"), (2, "N²")):
        end = start * (high / low) ** power
        axes.plot((low, high), (start, end), color="0.75", linewidth=1, zorder=0)
        axes.annotate(text, (high, end), (-12, 5), textcoords="offset points", color="0.5", fontsize=10)
