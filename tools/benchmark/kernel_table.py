"""From the rows of a measurement to a table, and to a line per shape that says what "auto" should take."""

from statistics import median
from typing import Any, NamedTuple

from tools.benchmark.contenders import FLOOR
from tools.benchmark.samples import last_run, machine_lines
from vitrel.ops import BACKENDS

Row = dict[str, Any]


class Ratio(NamedTuple):
    """Median over the rounds of one time over another, and the lowest and highest round."""

    middle: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.middle:.2f}x ({self.low:.2f} to {self.high:.2f})"


def ratio(slow: Row, fast: Row) -> Ratio:
    """How many times `fast` is faster than `slow`, from the medians of the rounds that both were measured in."""
    rounds = [median(a) / median(b) for a, b in zip(slow["rounds"], fast["rounds"], strict=False)]
    return Ratio(median(rounds), min(rounds), max(rounds))


def milliseconds(row: Row) -> float:
    """Median of the medians of the rounds."""
    return median(median(samples) for samples in row["rounds"])


def advice(rows: dict[str, Row]) -> str:
    """What "auto" should take, by the time rows of one case and mode: never what was slower than SDPA in a round."""
    if "sdpa" not in rows:
        return "sdpa was not measured: no advice"
    backends = [row for name, row in rows.items() if name in BACKENDS and name != "sdpa"]
    ratios = {row["contender"]: ratio(rows["sdpa"], row) for row in backends}
    faster = {name: found for name, found in ratios.items() if found.low > 1}
    if faster:
        best = max(faster, key=lambda name: faster[name].middle)
        text = f"{best} {faster[best]} over sdpa"
    else:
        others = [f"{name} {found}" for name, found in sorted(ratios.items(), key=lambda one: -one[1].middle)]
        text = f"sdpa; over it {', '.join(others) or 'nothing else was measured'}"
    tuned = [row for name, row in rows.items() if name.startswith("triton, ")]
    if tuned and "triton" in rows:
        best = min(tuned, key=milliseconds)
        text += f"; {best['contender']}: {ratio(rows['triton'], best)} over the kernels' own choice"
    return text


def write_table(rows: list[Row]) -> str:
    """table.md, from the rows of the last code and machine: advice, times, what failed or was refused, SDPA's kernels."""
    if not any(row["kind"] == "machine" for row in rows):
        return "Nothing was measured.\n"
    found, rows = last_run(rows)
    lines = ["# Kernels", "", *machine_lines(found), ""]
    cases = _by_case(rows)
    lines += ["## What auto should take", ""]
    lines += [f"- {case}, {mode}: {advice(found)}" for (case, mode), found in cases.items()]
    lines += ["", "## Times", ""]
    for (case, mode), found in cases.items():
        lines += [f"### {case}, {mode}", "", *_times(found), ""]
    lines += ["## Not timed", "", *not_timed(rows), "", "## SDPA with a bias", "", *_sdpa(rows)]
    return "\n".join(lines).rstrip() + "\n"


def _by_case(rows: list[Row]) -> dict[tuple[str, str], dict[str, Row]]:
    found: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        if row["kind"] == "time":
            found.setdefault((row["case"], row["mode"]), {})[row["contender"]] = row
    return found


def _times(rows: dict[str, Row]) -> list[str]:
    peers = {name: row for name, row in rows.items() if row["of"] == "peer"}
    best = min(peers.values(), key=milliseconds) if peers else None
    title = f"over {best['contender']}, the best peer" if best else "no peer"
    lines = [
        f"| | ms | rounds | host ms | {title} | peak MB | Mtokens/s | TFLOP/s |",
        "|---|---:|---|---:|---|---:|---:|---:|",
    ]
    for row in sorted(rows.values(), key=milliseconds):
        ms, medians = milliseconds(row), [median(samples) for samples in row["rounds"]]
        name = f"{row['contender']} (the floor, not comparable)" if row["contender"] == FLOOR else row["contender"]
        host = median(median(samples) for samples in row["host"])
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.1f}"
        over = str(ratio(best, row)) if best else ""
        rates = f"{row['tokens'] / ms / 1e3:.2f} | {row['flops'] / ms / 1e9:.2f}"
        lines.append(
            f"| {name} | {ms:.4f} | {min(medians):.4f} to {max(medians):.4f} | {host:.3f} | {over} | {peak} | {rates} |"
        )
    return lines


def not_timed(rows: list[Row]) -> list[str]:
    """Who was refused, wrong or failed, where and why, as lines of Markdown."""
    said: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["kind"] in ("refused", "wrong", "failed") and not row["text"].startswith("at the gate: "):  # said there
            text = " ".join(row["text"].split()).replace("|", "/")[:300]
            said.setdefault((row["contender"], f"{row['kind']}: {text}"), []).append(f"{row['case']}, {row['mode']}")
    if not said:
        return ["Everything was."]
    lines = ["| who | where | why |", "|---|---|---|"]
    for (who, why), where in said.items():
        shown = "; ".join(where) if len(where) < 4 else f"{where[0]} and {len(where) - 1} more"
        lines.append(f"| {who} | {shown} | {why} |")
    return lines


def _sdpa(rows: list[Row]) -> list[str]:
    found = [row for row in rows if row["kind"] == "sdpa"]
    lines = ["| shape | mode | kernel | ms | peak MB | largest error | what ran |", "|---|---|---|---:|---:|---:|---|"]
    for row in found:
        peak = "" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 1e6:.1f}"
        ran = ", ".join(name.removeprefix("aten::")[:80] for name in row["ran"]).replace("|", "/")
        error = max(row["errors"].values())
        lines.append(
            f"| {row['case']} | {row['mode']} | {row['contender']} | {milliseconds(row):.4f} | {peak} | {error:.1e} | {ran} |"
        )
    return lines if found else ["Not measured."]
