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
from tools.benchmark.shares import KINDS
from tools.benchmark.shares import MODES as SHARE_MODES
from vitrel.common.files import atomic_write
from vitrel.ops import BACKENDS

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
_SHARE_LEGEND = (
    "Self time of the operators in torch.profiler, by the module they run in (ranges that forward hooks put around the "
    "submodules) and, inside attention and in the blocks of optimized models, by their name and shapes; a gradient counts "
    "with its forward operator. Training is forward, cross entropy and backward, with the model's default drop path. The "
    "share of a kind is the median of its time over the profiled steps, divided by the sum of these medians. The profiler's "
    "clock is wall time, which includes other work on the machine. Not profiled: the same steps without profiler and hooks, "
    "in CPU time (on a GPU, GPU time)."
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


def fastest(rows: Rows, of: str, begins: str = "", word: str = "") -> Row:
    """Return the row of the fastest contender of a kind with `begins` and `word` in its name; ValueError if none."""
    matching = [row for name, row in rows.items() if row["of"] == of and name.startswith(begins) and word in name]
    return min(matching, key=milliseconds)


class Column(NamedTuple):
    """A column of a table of times. title: {} is the best peer's name. cell: text from a row and the best peer's row."""

    title: str
    rule: str
    cell: Callable[[Row, Row | None], str]


def times(rows: Rows, columns: Sequence[Column]) -> list[str]:
    """Return a Markdown table with a line per contender, the fastest first."""
    best = fastest(rows, "peer") if any(row["of"] == "peer" for row in rows.values()) else None
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
        if row["kind"] in ENDS and not row["text"].startswith("at the gate: "):  # listed at the gate's case
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


def advice(rows: Rows) -> str:
    """Say what "auto" should choose by the times of one case and mode; nothing that was slower than SDPA in a round."""
    if "sdpa" not in rows:
        return "sdpa was not measured: no advice"
    backends = [row for name, row in rows.items() if name in BACKENDS and name != "sdpa"]
    ratios = {row["contender"]: ratio(rows["sdpa"], row) for row in backends}
    faster = {name: value for name, value in ratios.items() if value.low > 1}
    if faster:
        best = max(faster, key=lambda name: faster[name].middle)
        text = f"{best} {faster[best]} over sdpa"
    else:
        others = [f"{name} {value}" for name, value in sorted(ratios.items(), key=lambda item: -item[1].middle)]
        text = f"sdpa; over it {', '.join(others) or 'nothing else was measured'}"
    tuned = [row for name, row in rows.items() if name.startswith("triton, ")]
    if tuned and "triton" in rows:
        best = min(tuned, key=milliseconds)
        text += f"; {best['contender']}: {ratio(rows['triton'], best)} over the kernels' own choice"
    return text


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
    """Return the page of attention: advice, times, failures, SDPA's kernels, and cost against size if measured."""
    lines = ["## What auto should take", ""]
    lines += [f"- {case}, {mode}: {advice(found)}" for (case, mode), found in by_case(rows).items()]
    lines += ["", "## Times", "", *_case_tables(rows, _ATTENTION_COLUMNS)]
    lines += ["## Not timed", "", *not_timed(rows), "", "## SDPA with a bias", "", *_sdpa(rows)]
    return [*lines, "", *_size_section(rows, line, folder)]


def _sdpa(rows: list[Row]) -> list[str]:
    body = []
    for row in rows:
        if row["kind"] == "sdpa":
            ran = ", ".join(name.removeprefix("aten::")[:80] for name in row["ran"]).replace("|", "/")
            figures = (f"{milliseconds(row):.4f}", _megabytes(row["call_bytes"]), f"{max(row['errors'].values()):.1e}")
            body.append((row["case"], row["mode"], row["contender"], *figures, ran))
    head = ("shape", "mode", "kernel", "ms", "peak MB", "largest error", "what ran")
    return markdown(head, "|---|---|---|---:|---:|---:|---|", body) if body else ["Not measured."]


def _size_section(rows: list[Row], line: str, folder: Path) -> list[str]:
    """Return tables of cost with a size per row and a contender per column, and the growth; [] if not measured."""
    if not any(row["kind"] in ("size", "turn") for row in rows):
        return []
    lines = ["## Cost against size", "", *_SIZE_LEGEND]
    measured = [f"{r['call_bytes'] / 1e6:.2f} of {r['asked'] / 1e6:.2f} MB" for r in rows if r["kind"] == "precision"]
    lines += [f"Of a call whose memory is known this measures {', '.join(measured)}."] if measured else []
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
    return [*lines, *_turns(rows)]


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


def _turns(rows: list[Row]) -> list[str]:
    rows_of = _by_contender(row for row in rows if row["kind"] == "turn")
    if not rows_of:
        return []
    sizes = ["x".join(map(str, row["size"])) for row in max(rows_of.values(), key=len)]
    body = []
    for name, of_name in rows_of.items():
        cells = [f"{row['first_call_s']:.2f} ({row['new_compiles']})" for row in of_name] + [""] * (len(sizes) - len(of_name))
        body.append([name, *cells, str(sum(row["new_compiles"] for row in of_name))])
    lines = ["", "### One process, one size after the other: seconds of the first call of each (graphs compiled)", ""]
    return lines + markdown(("", *sizes, "graphs"), "|---|" + "---:|" * (len(sizes) + 1), body)


def _why(row: Row | None) -> str:
    if row is None:
        return ""
    return "out of memory" if "allocate memory" in row["text"] or "out of memory" in row["text"] else row["kind"]


def _call(row: Row) -> float:
    return (row["call_bytes"] + row["kept_bytes"]) / 1e6


def _three(x: float) -> str:
    """Format with three digits, without an exponent."""
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"


class Goal(NamedTuple):
    """A goal for the case whose name starts with `case`: a lower limit of a figure, or with `most` an upper one."""

    what: str
    case: str
    mode: str
    figure: Callable[[Rows], Ratio | float]
    limit: float
    most: bool = False


def _speed(word: str = "") -> Callable[[Rows], Ratio]:
    return lambda rows: ratio(fastest(rows, "peer", word=word), fastest(rows, "ours"))


def _eager(rows: Rows) -> Ratio:
    peers = {name: row for name, row in rows.items() if row["how"] == "eager"}
    return ratio(fastest(peers, "peer"), fastest(rows, "ours"))


def _memory(rows: Rows) -> float:
    """Return memory of a call of vitrel's fastest contender / that of the fastest peer."""
    return fastest(rows, "ours")["call_bytes"] / fastest(rows, "peer")["call_bytes"]


def _against(numerator: str, denominator: str) -> Callable[[Rows], Ratio]:
    """Return a function for images/s of model `numerator` / images/s of model `denominator`, vitrel's fastest each."""
    return lambda rows: ratio(fastest(rows, "ours", f"{denominator}: "), fastest(rows, "ours", f"{numerator}: "))


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


def model_page(rows: list[Row], line: str, folder: Path) -> list[str]:
    """Return the page of models: goals, a table per case, failures."""
    goals = GPU_GOALS if any(row["kind"] == "machine" and row.get("cuda") for row in rows) else CPU_GOALS
    lines = ["## Goals", "", *goal_lines(goals, by_case(rows)), "", "## Times", "", _MODEL_LEGEND, ""]
    return [*lines, *_case_tables(rows, _MODEL_COLUMNS), "## Not timed", "", *not_timed(rows), "", line]


def goal_lines(goals: tuple[Goal, ...], cases: dict[tuple[str, str], Rows]) -> list[str]:
    """Return a Markdown table of goals: figure, limit, and whether it is met."""
    body = []
    for goal in goals:
        rows = next(
            (own_rows for (case, mode), own_rows in cases.items() if case.startswith(goal.case) and mode == goal.mode), {}
        )
        sign = "≤" if goal.most else "≥"
        try:
            figure = goal.figure(rows)
        except ValueError:  # one of the two was not timed
            body.append((goal.what, "", f"{sign} {goal.limit:g}", "not measured"))
            continue
        middle = figure.middle if isinstance(figure, Ratio) else figure
        achieved = middle <= goal.limit if goal.most else middle >= goal.limit
        shown = str(figure) if isinstance(figure, Ratio) else f"{figure:.2f}"
        body.append((goal.what, shown, f"{sign} {goal.limit:g}", "met" if achieved else "missed"))
    return markdown(("goal", "figure", "should be", ""), "|---|---|---:|---|", body)


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


def share_page(rows: list[Row], line: str, folder: Path) -> list[str]:
    """Return the page of shares: a table per mode with a column per model."""
    lines = [_SHARE_LEGEND, ""]
    for mode in SHARE_MODES:
        lines += [f"## {mode.capitalize()}", "", *_shares([row for row in rows if row.get("mode") == mode]), ""]
    lines += ["## The kinds", "", *(f"- {kind}: {what}" for kind, what in KINDS.items()), ""]
    failed = [f"- {row['case']}, {row['mode']}, {row['contender']}: {row['text']}" for row in rows if row["kind"] == "failed"]
    return [*lines, "## Failed", "", *(failed or ["Nothing."])]


def shares(ms: dict[str, list[float]]) -> dict[str, float]:
    """Return percent of a step by kind, from {kind: milliseconds in each step}; they sum to 100."""
    middle = {kind: median(times) for kind, times in ms.items()}
    total = sum(middle.values())
    return {kind: 100 * value / total for kind, value in middle.items()}


def _shares(rows: list[Row]) -> list[str]:
    rows = [row for row in rows if row["kind"] == "shares"]
    if not rows:
        return ["Not measured."]
    columns = [shares(row["ms"]) for row in rows]
    body = [[kind, *(f"{column[kind]:.1f}" for column in columns)] for kind in KINDS]
    body.append(["ms, profiled", *(f"{sum(median(times) for times in row['ms'].values()):.1f}" for row in rows)])
    body.append(["ms, not profiled", *(f"{median(row['not_profiled_ms']):.1f}" for row in rows)])
    head = ["% of a step", *(f"{row['case']}: {row['contender']}" for row in rows)]
    return markdown(head, "| --- |" + " ---: |" * len(rows), body)
