"""Render the rows of a suite as table.md (machine, times, contenders that were not timed) and plots.

A page describes the machine measured last; rows of other machines and of other code are left out.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import linear_regression, median, quantiles
from typing import Any, NamedTuple

from tools.benchmark.attention import MODES
from tools.benchmark.methods import FLOOR
from tools.benchmark.plots import plot
from tools.benchmark.samples import ENDS, footer, last_run, machine_lines
from vitrel.common.files import atomic_write

Row = dict[str, Any]
Rows = dict[str, Row]  # of one case and mode, by contender
Page = Callable[[list[Row], str, Path], list[str]]  # rows, the footer of plots, their folder -> lines after the machine

TITLES = {"forward": "inference", "training": "forward and backward"}
_GROWS_FROM = 1000  # tokens from which on growth is fitted: below, constant costs dominate
_MOST_COMPILES = 2
_MODEL_LEGEND = (
    "p90: the slow tenth. Peak: of the process since its first call, compilation included. A call: memory of one call in "
    "addition to what is held between calls. Ratios: over the fastest peer, with the lowest and highest round. Graphs: "
    "compiled by dynamo."
)
_RESOLUTION_LEGEND = (
    "Seconds: from a new size to its first result, compilation included. Graphs: compiled by dynamo for it. A call: the memory "
    "of one call in addition to what is held between calls. Sizes are visited in the order of the table, in one process each."
)
_SIZE_LEGEND = [
    "Global attention, 6 heads of 64, batch 1, a bias table unless another encoding is named.",
    "`auto` and names of backends are vitrel. MB is the peak memory of one call without its inputs, with outputs and",
    "gradients, plus the int64 index [N, N] that a peer caches; 1 MB is 10^6 bytes.",
]


def write(page: Page, title: str, rows: list[Row], folder: Path) -> None:
    """Write table.md, and the plots of the page, from the rows of the last machine and code. ValueError without a machine."""
    machine, rows = last_run(rows)
    lines = [f"# {title}", "", *machine_lines(machine), "", *page(rows, footer(machine), folder)]
    with atomic_write(folder / "table.md") as part:
        part.write_text("\n".join(lines).rstrip() + "\n", "utf-8")


def markdown(head: Iterable[str], rules: str, body: Iterable[Iterable[str]]) -> list[str]:
    """Return the lines of a Markdown table. rules: its second line."""
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *body)]
    return [lines[0].replace("|  |", "| |"), rules, *lines[1:]]


class Ratio(NamedTuple):
    """A ratio of times: its median over the rounds, lowest and highest."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.2f}x ({self.low:.2f} to {self.high:.2f})"


def ratio(slow: Row, fast: Row) -> Ratio:
    """Return time of `slow` / time of `fast`, from the medians of the rounds that both have."""
    rounds = [median(a) / median(b) for a, b in zip(slow["rounds"], fast["rounds"], strict=False)]
    return Ratio(median(rounds), min(rounds), max(rounds))


def milliseconds(row: Row) -> float:
    """Return the time of a row: the median of the medians of its rounds."""
    return median(median(samples) for samples in row["rounds"])


def by_case(rows: list[Row], kind: str = "time") -> dict[tuple[str, str], Rows]:
    """Return the rows of a kind as {(case, mode): {contender: row}}."""
    cases: dict[tuple[str, str], Rows] = {}
    for row in rows:
        if row["kind"] == kind:
            cases.setdefault((row["case"], row["mode"]), {})[row["contender"]] = row
    return cases


def _by_contender(rows: Iterable[Row]) -> dict[str, list[Row]]:
    rows_of: dict[str, list[Row]] = {}
    for row in rows:
        rows_of.setdefault(row["contender"], []).append(row)
    return rows_of


class Column(NamedTuple):
    """A column of a table of times. title: {} is the best peer's name. cell: text from a row and the best peer's row."""

    title: str
    rule: str
    cell: Callable[[Row, Row | None], str]


def times(rows: Rows, columns: Sequence[Column]) -> list[str]:
    """Return a Markdown table with a line per contender, the fastest first."""
    best = min((row for row in rows.values() if row["of"] == "peer"), key=milliseconds, default=None)
    titles = [
        column.title.format(best["contender"]) if best else "no peer" if "{}" in column.title else column.title
        for column in columns
    ]
    body = [[column.cell(row, best) for column in columns] for row in sorted(rows.values(), key=milliseconds)]
    return markdown(titles, f"|{'|'.join(column.rule for column in columns)}|", body)


def _case_tables(rows: list[Row], columns: Sequence[Column]) -> list[str]:
    lines = []
    for (case, mode), of_case in by_case(rows).items():
        lines += [f"### {case}, {mode}", "", *times(of_case, columns), ""]
    return lines


def not_timed(rows: list[Row]) -> list[str]:
    """Return a Markdown table of the contenders that were refused, wrong or failed, with cases and reasons."""
    places: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["kind"] in ENDS:
            text = " ".join(row["text"].split()).replace("|", "/")[:300]
            places.setdefault((row["contender"], f"{row['kind']}: {text}"), []).append(f"{row['case']}, {row['mode']}")
    shown = {
        key: "; ".join(where) if len(where) < 4 else f"{where[0]} and {len(where) - 1} more" for key, where in places.items()
    }
    body = [(name, shown[name, reason], reason) for name, reason in places]
    return markdown(("who", "where", "why"), "|---|---|---|", body) if places else ["Everything was."]


def _over(row: Row, best: Row | None) -> str:
    return str(ratio(best, row)) if best else ""


def _megabytes(count: float | None, digits: int = 1) -> str:
    return "" if count is None else f"{count / 1e6:.{digits}f}"


def _span(row: Row) -> str:
    medians = [median(samples) for samples in row["rounds"]]
    return f"{min(medians):.4f} to {max(medians):.4f}"


_ATTENTION_COLUMNS = (
    Column("", "---", lambda row, _: row["contender"] + " (the floor, not comparable)" * (row["contender"] == FLOOR)),
    Column("ms", "---:", lambda row, _: f"{milliseconds(row):.4f}"),
    Column("rounds", "---", lambda row, _: _span(row)),
    Column("host ms", "---:", lambda row, _: f"{milliseconds({'rounds': row['host']}):.3f}"),
    Column("over {}, the best peer", "---", _over),
    Column("peak MB", "---:", lambda row, _: _megabytes(row.get("call_bytes"))),
    Column("Mtokens/s", "---:", lambda row, _: f"{row['tokens'] / milliseconds(row) / 1e3:.2f}"),
    Column("TFLOP/s", "---:", lambda row, _: f"{row['flops'] / milliseconds(row) / 1e9:.2f}"),
)


def attention_page(rows: list[Row], line: str, folder: Path) -> list[str]:
    """Return the page of attention: times, failures, and cost against size if measured."""
    lines = ["## Times", "", *_case_tables(rows, _ATTENTION_COLUMNS), "## Not timed", "", *not_timed(rows), ""]
    return [*lines, *_size_section(rows, line, folder)]


def _size_section(rows: list[Row], line: str, folder: Path) -> list[str]:
    """Return tables of cost with a size per row and a contender per column, and the growth; [] if not measured."""
    if not any(row["kind"] == "size" for row in rows):
        return []
    lines = ["## Cost against size", "", *_SIZE_LEGEND]
    for mode in MODES:
        rows_of = _by_contender(row for row in rows if row["kind"] == "size" and row["mode"] == mode)
        if not rows_of:
            continue
        for own_rows in rows_of.values():
            own_rows.sort(key=lambda row: row["tokens"])
        ended = {(row["contender"], row["case"]): row for row in rows if row["kind"] in ENDS and row["mode"] == mode}
        lines += ["", f"### {TITLES[mode].capitalize()}: ms, MB", ""]
        lines += _grid(rows_of, ended, lambda row: f"{_three(milliseconds(row))}, {_three(_call(row))}")
        exponents = [[growth(own_rows, value) for value in (milliseconds, _call)] for own_rows in rows_of.values()]
        cells = [", ".join("?" if e is None else f"N^{e:.2f}" for e in pair) for pair in exponents]
        lines += [f"| grows as | {' | '.join(cells)} |"]
        lines += ["", f"### {TITLES[mode].capitalize()}: seconds of the first call (graphs compiled)", ""]
        lines += _grid(rows_of, ended, lambda row: f"{row['first_call_s']:.2f} ({int(row['compiles'])})")
        path, title = folder / f"sizes_{mode}.png", f"Global attention, 6 heads of 64, batch 1, {TITLES[mode]}"
        panels = [("milliseconds", milliseconds), ("MB", _call)]
        plot(path, title, line, rows_of, "tokens N", lambda row: (row["tokens"], row["tokens"]), panels, slopes=True)
    return lines


def growth(rows: list[Row], value: Callable[[Row], float]) -> float | None:
    """Return e of value ~ N^e by least squares of the logarithms; None with fewer than three sizes of 1000 tokens or more."""
    points = [
        (math.log(row["tokens"]), math.log(value(row))) for row in rows if row["tokens"] >= _GROWS_FROM and value(row) > 0
    ]
    if len(points) < 3:
        return None
    return linear_regression(*zip(*points, strict=True)).slope


def _grid(rows_of: dict[str, list[Row]], ended: dict[tuple[str, str], Row], cell: Callable[[Row], str]) -> list[str]:
    cases = {row["case"]: row["tokens"] for of_name in rows_of.values() for row in of_name}
    body = []
    for case, tokens in sorted(cases.items(), key=lambda item: item[1]):
        rows = {name: next((row for row in of_name if row["case"] == case), None) for name, of_name in rows_of.items()}
        cells = [cell(row) if row else _why(ended.get((name, case))) for name, row in rows.items()]
        body.append([f"{tokens} ({case.removeprefix('size ')})", *cells])
    return markdown(("N", *rows_of), "|---|" + "---:|" * len(rows_of), body)


def _why(row: Row | None) -> str:
    if row is None:
        return ""
    return "out of memory" if "allocate memory" in row["text"] or "out of memory" in row["text"] else row["kind"]


def _call(row: Row) -> float:
    return (row["call_bytes"] + row["kept_bytes"]) / 1e6


def _three(x: float) -> str:
    """Format with three digits, without an exponent."""
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def model_page(rows: list[Row], line: str, folder: Path) -> list[str]:
    """Return the page of models: a table per case, failures."""
    lines = ["## Times", "", _MODEL_LEGEND, ""]
    return [*lines, *_case_tables(rows, _MODEL_COLUMNS), "## Not timed", "", *not_timed(rows), "", line]


def images_per_second(row: Row) -> tuple[float, float]:
    """Return images/s from the median and from the 90th percentile of the times of all calls."""
    times = [ms for calls in row["rounds"] for ms in calls]
    slow = quantiles(times, n=10, method="inclusive")[-1] if len(times) > 1 else times[0]
    return row["batch"] / median(times) * 1e3, row["batch"] / slow * 1e3


def _share(row: Row, best: Row | None) -> str:
    call, peer = row["call_bytes"], best and best["call_bytes"]
    return f"{call / peer:.2f}" if call and peer else ""


def _peak(row: Row) -> str:
    reserved = f" ({row['reserved_bytes'] / 1e6:.0f} reserved)" if row["reserved_bytes"] else ""
    return f"{_megabytes(row['peak_bytes'], 0)}{reserved}"


_MODEL_COLUMNS = (
    Column("", "---", lambda row, _: row["contender"]),
    Column("img/s p50", "---:", lambda row, _: f"{images_per_second(row)[0]:.2f}"),
    Column("p90", "---:", lambda row, _: f"{images_per_second(row)[1]:.2f}"),
    Column("over {}", "---", _over),
    Column("peak MB", "---:", lambda row, _: _peak(row)),
    Column("a call MB", "---:", lambda row, _: _megabytes(row["call_bytes"], 0)),
    Column("over it", "---:", _share),
    Column("first call s", "---:", lambda row, _: f"{row['first_call_s']:.1f}"),
    Column("graphs", "---:", lambda row, _: str(row["compiles"])),
)


def resolution_page(rows: list[Row], line: str, folder: Path) -> list[str]:
    """Return the page of resolutions, a table per model, and write <model>.png: throughput and memory against size."""
    found = by_case(rows)
    lines = [_RESOLUTION_LEGEND, ""]
    for case in dict.fromkeys(case for case, _ in found):
        of_case = _by_contender(row for (own, _), of in found.items() for row in of.values() if own == case)
        lines += [f"## {case}", "", *_compilations(of_case), *_resolutions(of_case), ""]
        name = "".join(c if c.isalnum() else "_" for c in case.partition(" over")[0].lower())
        panels = [
            ("images per second", lambda row: row["batch"] / milliseconds(row) * 1e3),
            ("memory of a call, MB", lambda row: (row["call_bytes"] or 0) / 1e6),
        ]
        plot(folder / f"{name}.png", case, line, of_case, "image, height x width in pixels", _pixels, panels)
    return [*lines, "## Not timed", "", *not_timed(rows), "", line]


def _pixels(row: Row) -> tuple[int, str]:
    h, w = row["size"]
    return h * w, f"{h}x{w}"


def _compilations(rows_of: dict[str, list[Row]]) -> list[str]:
    body = []
    for name, rows in rows_of.items():
        if "compiled" in name:
            graphs = sum(row["new_compiles"] for row in rows)
            verdict = "" if rows[0]["of"] == "peer" else "met" if graphs <= _MOST_COMPILES else "missed"
            seconds = sum(row["first_call_s"] for row in rows)
            body.append((name, str(len(rows)), str(graphs), f"{seconds:.1f}", verdict))
    head = ("", "sizes", "graphs compiled", "seconds to all first results", f"at most {_MOST_COMPILES}")
    return [*markdown(head, "|---|---:|---:|---:|---|", body), ""] if body else []


def _resolutions(of: dict[str, list[Row]]) -> list[str]:
    body = []
    for size in dict.fromkeys(tuple(row["size"]) for rows in of.values() for row in rows):
        found = [next((row for row in rows if tuple(row["size"]) == size), None) for rows in of.values()]
        body.append([f"{size[0]}x{size[1]}", *("" if row is None else _resolution(row) for row in found)])
    return markdown(("img/s p50 (p90), MB a call, seconds, graphs", *of), f"|---|{'---|' * len(of)}", body)


def _resolution(row: Row) -> str:
    p50, p90 = images_per_second(row)
    memory = _megabytes(row["call_bytes"], 0) or "?"
    return f"{p50:.2f} ({p90:.2f}), {memory} MB, {row['first_call_s']:.1f} s, {row['new_compiles']}"
