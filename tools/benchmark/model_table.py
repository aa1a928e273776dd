"""From the rows of a measurement of models to table.md: the goals, a table per case, what failed."""

from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from tools.benchmark.kernel_table import Ratio, milliseconds, not_timed, ratio
from tools.benchmark.samples import footer, last_run, machine_lines
from vitrel.files import atomic_write

Row = dict[str, Any]
Rows = dict[str, Row]  # of one case and mode, by contender


class Goal(NamedTuple):
    """A figure of the cases whose name begins with `case`, and what it should at least be, or with `most` at most."""

    what: str
    case: str
    mode: str
    figure: Callable[[Rows], Ratio | float]
    limit: float
    most: bool = False


def fastest(rows: Rows, of: str, begins: str = "", word: str = "") -> Row:
    """The fastest contender of a kind whose name begins so and has the word in it. ValueError where there is none."""
    return min(
        (row for name, row in rows.items() if row["of"] == of and name.startswith(begins) and word in name), key=milliseconds
    )


def _speed(word: str = "") -> Callable[[Rows], Ratio]:
    return lambda rows: ratio(fastest(rows, "peer", word=word), fastest(rows, "ours"))


def _eager(rows: Rows) -> Ratio:
    peers = {name: row for name, row in rows.items() if row["how"] == "eager"}
    return ratio(fastest(peers, "peer"), fastest(rows, "ours"))


def _memory(rows: Rows) -> float:
    """What a call of our fastest takes over what one of the fastest peer does."""
    return fastest(rows, "ours")["call_bytes"] / fastest(rows, "peer")["call_bytes"]


def _against(one: str, other: str) -> Callable[[Rows], Ratio]:
    """Images per second of our fastest `one` over those of our fastest `other`."""
    return lambda rows: ratio(fastest(rows, "ours", f"{other}: "), fastest(rows, "ours", f"{one}: "))


_LEGEND = (
    "p90: the slow tenth. Peak: of the process since its first call, compilation included. A call: what one call takes beyond "
    "what is held between calls. Ratios: over the fastest peer, with the lowest and highest round. Graphs: compiled by dynamo."
)
_TABLE = ("ViT-B with a table over ViT-B without position", "ViT-B with and without position")
_ROPE = ("ViT-B with RoPE over ViT-B without position", "ViT-B with and without position")
_COMMON = (
    Goal("Swin-T over ViT-S, images/s", "Swin-T against ViT-S", "inference", _against("Swin-T", "ViT-S absolute"), 0.9),
    Goal(*_TABLE, "inference", _against("ViT-B table", "ViT-B none"), 0.97),
    Goal(*_ROPE, "inference", _against("ViT-B rope", "ViT-B none scaled"), 0.97),
)
CPU_GOALS = (
    Goal("Swin-T inference, batch 8, over the best peer", "Swin-T, 224, batch 8, fp32", "inference", _speed(), 2.2),
    Goal("Swin-T inference, batch 1, over the best peer", "Swin-T, 224, batch 1, fp32", "inference", _speed(), 2.2),
    Goal("Swin-T training over the best peer", "Swin-T, 224, batch 8, fp32", "training", _speed(), 1.6),
    Goal("Swin-T inference in bf16 over the best peer", "Swin-T, 224, batch 1, bf16", "inference", _speed(), 1.3),
    Goal("Memory of a call, Swin-T, batch 8", "Swin-T, 224, batch 8, fp32", "inference", _memory, 0.5, True),
    *_COMMON,
)
GPU_GOALS = (
    Goal("Swin-T inference over compiled peers", "Swin-T, 224, batch 256", "inference", _speed("compiled"), 1.5),
    Goal("Swin-T inference over eager peers", "Swin-T, 224, batch 256", "inference", _eager, 2.2),
    Goal("Swin-T training over compiled peers", "Swin-T, 224, batch 256", "training", _speed("compiled"), 1.5),
    Goal("Swin-T training over eager peers", "Swin-T, 224, batch 256", "training", _eager, 1.8),
    Goal("Memory of a training step, Swin-T", "Swin-T, 224, batch 256", "training", _memory, 0.65, True),
    Goal("ViT-B table training, 448, over SDPA + bias compiled", "ViT-B table, 448", "training", _speed("compiled"), 1.3),
    Goal("ViT-B table training, 1024, over SDPA + bias compiled", "ViT-B table, 1024", "training", _speed("compiled"), 2.0),
    Goal("Memory of a training step, ViT-B table, 1024", "ViT-B table, 1024", "training", _memory, 0.6, True),
    *_COMMON,
)


def write_models(rows: list[Row], folder: Path) -> None:
    """table.md from the rows of the last machine and code."""
    found, rows = last_run(rows)
    cases = by_case(rows)
    goals = GPU_GOALS if found.get("cuda") else CPU_GOALS
    lines = ["# Models", "", *machine_lines(found), "", "## Goals", "", *goal_lines(goals, cases), "", "## Times", ""]
    lines += [_LEGEND, ""]
    for (case, mode), of_case in cases.items():
        lines += [f"### {case}, {mode}", "", *_times(of_case), ""]
    lines += ["## Not timed", "", *not_timed(rows), "", footer(found)]
    with atomic_write(folder / "table.md") as part:
        part.write_text("\n".join(lines) + "\n", "utf-8")


def by_case(rows: list[Row]) -> dict[tuple[str, str], Rows]:
    """The rows with times, by case and mode, then by contender."""
    found: dict[tuple[str, str], Rows] = {}
    for row in rows:
        if row["kind"] == "time":
            found.setdefault((row["case"], row["mode"]), {})[row["contender"]] = row
    return found


def goal_lines(goals: tuple[Goal, ...], cases: dict[tuple[str, str], Rows]) -> list[str]:
    """A table of goals: the figure, what it should be, and whether it is."""
    lines = ["| goal | figure | should be | |", "|---|---|---:|---|"]
    for goal in goals:
        rows = next((of for (case, mode), of in cases.items() if case.startswith(goal.case) and mode == goal.mode), {})
        sign = "≤" if goal.most else "≥"
        try:
            figure = goal.figure(rows)
        except ValueError:  # one of the two was not timed
            lines.append(f"| {goal.what} | | {sign} {goal.limit:g} | not measured |")
            continue
        middle = figure.middle if isinstance(figure, Ratio) else figure
        met = middle <= goal.limit if goal.most else middle >= goal.limit
        shown = str(figure) if isinstance(figure, Ratio) else f"{figure:.2f}"
        lines.append(f"| {goal.what} | {shown} | {sign} {goal.limit:g} | {'met' if met else 'missed'} |")
    return lines


def images_per_second(row: Row) -> tuple[float, float]:
    """Median and slow tenth of all its calls."""
    times = [ms for one in row["rounds"] for ms in one]
    slow = quantiles(times, n=10, method="inclusive")[-1] if len(times) > 1 else times[0]
    return row["batch"] / median(times) * 1e3, row["batch"] / slow * 1e3


def _times(rows: Rows) -> list[str]:
    peers = [row for row in rows.values() if row["of"] == "peer"]
    best = min(peers, key=milliseconds) if peers else None
    title = f"over {best['contender']}" if best else "no peer"
    lines = [f"| | img/s p50 | p90 | {title} | peak MB | a call MB | over it | first call s | graphs |"]
    lines.append("|---|---:|---:|---|---:|---:|---:|---:|---:|")
    for row in sorted(rows.values(), key=milliseconds):
        p50, p90 = images_per_second(row)
        over = str(ratio(best, row)) if best else ""
        call, peer = row["call_bytes"], best and best["call_bytes"]
        share = f"{call / peer:.2f}" if call and peer else ""
        reserved = f" ({row['reserved_bytes'] / 1e6:.0f} reserved)" if row["reserved_bytes"] else ""
        memory = f"{row['peak_bytes'] / 1e6:.0f}{reserved} | {'' if call is None else f'{call / 1e6:.0f}'} | {share}"
        end = f"{row['first_call_s']:.1f} | {row['compiles']}"
        lines.append(f"| {row['contender']} | {p50:.2f} | {p90:.2f} | {over} | {memory} | {end} |")
    return lines
