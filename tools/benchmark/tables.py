"""Markdown tables of rows: times, what was not timed, ratios, growth."""

import math
import re
from collections.abc import Callable, Iterable
from statistics import linear_regression, median
from typing import Any, NamedTuple

from tools.benchmark.samples import ENDS

Row = dict[str, Any]
Rows = dict[str, Row]  # of one case and mode, by contender

_GROWS_FROM = 1000  # tokens from which on growth is fitted: below, constant costs dominate


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


def times(rows: list[Row]) -> list[str]:
    """Return a table of models: images/s, the speed over timm's and over the same without position, MB of a call.

    A contender is named "model: library", with further words after a comma; so are those that it is compared with.
    """
    body = []
    for (case, mode), of in by_case(rows).items():
        for name, row in of.items():
            model, library, how = re.fullmatch(r"(.+): (\w+)(.*)", name).groups()  # type: ignore[union-attr]
            peers = [of.get(f"{model}: {other}{how}") if other != library else None for other in ("timm", "none")]
            over = [str(ratio(peer, row)) if peer else "" for peer in peers]
            rate, mb = 1e3 * row["batch"] / milliseconds(row), row["call_bytes"] / 1e6
            body.append((case, mode, name, three(rate), *over, f"{mb:.0f}", f"{row['first_call_s']:.1f}"))
    head = ("", "", "", "images/s", "over timm's", "over no position", "MB of a call", "first call, s")
    return markdown(head, "|---|---|---|---:|---|---|---:|---:|", body)


def not_timed(rows: list[Row]) -> list[str]:
    """Return a table of the contenders that were refused, wrong or failed, with cases and reasons."""
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
    """Return a number as text with three digits, without an exponent."""
    return f"{x:.0f}" if x >= 100 else f"{x:.1f}" if x >= 10 else f"{x:.2f}"
