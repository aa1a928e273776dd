"""Render the rows of a suite as table.md (machine, times, contenders that were not timed) and plots.

A page describes the machine measured last; rows of other machines and of other code are left out.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import linear_regression, median
from typing import Any, NamedTuple

from tools.benchmark.methods import FLOOR
from tools.benchmark.plots import plot
from tools.benchmark.samples import ENDS, footer, last_run, machine_lines
from vitrel.common.files import atomic_write

Row = dict[str, Any]
Rows = dict[str, Row]  # of one case and mode, by contender
Page = Callable[[list[Row], str, Path], list[str]]  # rows, the footer of plots, their folder -> lines after the machine

_PLOTTED = ("none", "table", "decomposed", "rope_axial", "pape", "dense bias, as in timm")
_GROWS_FROM = 1000  # tokens from which on growth is fitted: below, constant costs dominate
_MODEL_LEGEND = (
    "Peak, only on a GPU: what PyTorch held since the call was set up, compilation included. A call: the most that the tensors "
    "of a call hold at once, gradients included. Ratios: over the fastest peer, with the lowest and highest round. First: "
    "seconds from a new shape to its first result, compilation included. Operators: launched by an eager call, without views. "
    "Graphs: compiled for it."
)


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
    """Return a Markdown table with a line per contender, the fastest first, without columns that are empty."""
    best = min((row for row in rows.values() if row["of"] == "peer"), key=milliseconds, default=None)
    columns = [column for column in columns if any(column.cell(row, best) for row in rows.values())]
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
    """Return the page of attention: times and failures."""
    return ["## Times", "", *_case_tables(rows, _ATTENTION_COLUMNS), "## Not timed", "", *not_timed(rows)]


def scale_page(rows: list[Row], line: str, folder: Path) -> list[str]:
    """Return the page of cost against size, and write scale_inference.png."""
    rows_of = _by_contender(row for row in rows if row["kind"] == "size")
    body = [
        [name, row["mode"], f"{row['call_ms']:.1f}", _megabytes(row["call_bytes"]), _megabytes(row["kept_bytes"])]
        for name, own in rows_of.items()
        for row in own
    ]
    lines = markdown(("", "", "ms of a call", "MB of a call", "MB of a kept index"), "|---|---|---:|---:|---:|", body)
    shown = {
        name: [row for row in own if row["mode"].startswith("inference")] for name, own in rows_of.items() if name in _PLOTTED
    }
    panels = [("milliseconds", lambda row: row["call_ms"]), ("MB", call_mb)]
    title = "Global attention on one image, 2 heads of 64, inference"
    if shown:
        plot(
            folder / "scale_inference.png",
            title,
            line,
            shown,
            "tokens N",
            lambda row: (row["tokens"],) * 2,
            panels,
            slopes=True,
        )
    return [*lines, "", "## Not measured", "", *not_timed(rows)]


def growth(rows: list[Row], value: Callable[[Row], float]) -> float | None:
    """Return e of value ~ N^e by least squares of the logarithms; None with fewer than three sizes of 1000 tokens or more."""
    points = [
        (math.log(row["tokens"]), math.log(value(row))) for row in rows if row["tokens"] >= _GROWS_FROM and value(row) > 0
    ]
    if len(points) < 3:
        return None
    return linear_regression(*zip(*points, strict=True)).slope


def call_mb(row: Row) -> float:
    """Return the megabytes of a call, with the index that its contender keeps."""
    return (row["call_bytes"] + row["kept_bytes"]) / 1e6


def three(x: float) -> str:
    """Format with three digits, without an exponent."""
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


def model_page(rows: list[Row], line: str, folder: Path) -> list[str]:
    """Return the page of models: a table per case, failures."""
    lines = ["## Times", "", _MODEL_LEGEND, ""]
    return [*lines, *_case_tables(rows, _MODEL_COLUMNS), "## Not timed", "", *not_timed(rows), "", line]


def _share(row: Row, best: Row | None) -> str:
    call, peer = row["call_bytes"], best and best["call_bytes"]
    return f"{call / peer:.2f}" if call and peer else ""


def _peak(row: Row) -> str:
    reserved = f" ({row['reserved_bytes'] / 1e6:.0f} reserved)" if row["reserved_bytes"] else ""
    return f"{_megabytes(row['peak_bytes'], 0)}{reserved}"


_MODEL_COLUMNS = (
    Column("", "---", lambda row, _: row["contender"]),
    Column("ms", "---:", lambda row, _: f"{milliseconds(row):.1f}"),
    Column("over {}", "---", _over),
    Column("peak MB", "---:", lambda row, _: _peak(row)),
    Column("a call MB", "---:", lambda row, _: _megabytes(row["call_bytes"], 0)),
    Column("over it", "---:", _share),
    Column("first s", "---:", lambda row, _: f"{row['first_call_s']:.1f}"),
    Column("operators", "---:", lambda row, _: str(row["launches"] or "")),
    Column("graphs", "---:", lambda row, _: str(row["new_compiles"])),
)
