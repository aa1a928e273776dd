"""Progress of long work: lines in a log, a bar on a terminal."""

import re

import pytest

from vitrel.common import progress as reported
from vitrel.common.progress import progress


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(reported.time, "monotonic", lambda: now[0])
    return now


def test_a_log_gets_a_line_now_and_then(clock, capsys):
    with progress(4, "rows") as advance:
        for what in ("a", "b", "c", "d"):
            clock[0] += 15
            advance(1, what)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "rows: 2.0 of 4 after 30 s, about 30 s left: b",
        "rows: 4.0 of 4 after 60 s: d",
        "rows: 4.0 of 4 after 60 s: done",
    ]


def test_the_time_left_counts_what_units_cost(clock, capsys):
    """Sizes of an evaluation, small ones first: at each moment the line says how long the rest takes, within its rounding."""
    costs = [0.0, 24.0, 24.0, 50.0, 98.0, 200.0]  # the first row is done already
    with progress(len(costs), "rows", work=sum(costs)) as advance:
        for cost in costs:
            for _ in range(4):
                clock[0] += cost / 4
                advance(0.25, "a", cost)
    end = sum(costs)
    lines = [line for line in capsys.readouterr().err.splitlines() if "left" in line]
    estimates = [(float(words[0]), float(words[1])) for words in (re.findall(r"(\d+) s", line) for line in lines)]
    assert len(estimates) > 6 and all(abs(after + left - end) <= 1 for after, left in estimates)


def test_short_work_says_nothing(clock, capsys):
    with progress(2, "rows") as advance:
        advance(2, "a")
    assert capsys.readouterr().err == ""
