"""Progress of long work: a bar on a terminal, occasional lines in a log."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from tqdm import tqdm

EVERY = 20.0  # seconds between two lines of a log


class Advance(Protocol):
    """A function to call when a part (`share`, 0 to 1) of a unit of work is done; `cost` is that of the whole unit.

    `what` is a text that is shown, such as the name of the current work.
    """

    def __call__(self, share: float, what: str, cost: float = 1.0) -> None: ...


@contextmanager
def progress(total: int, unit: str, work: float | None = None) -> Iterator[Advance]:
    """Context manager that gives the function `Advance`, which adds to the units done of `total`, and shows them on stderr.

    On a terminal it is a tqdm bar. Elsewhere a line is printed whenever 20 seconds have passed since the last one, and one
    at the end if the work took longer than that.

    Args:
        total: number of units.
        unit: what they are called, in the plural.
        work: sum of the costs of all units, in any measure that is proportional to time; by default each costs 1. The time left
            is that of the work left, at the mean speed so far; a unit that was done before costs 0.
    """
    work = float(total) if work is None else work
    done = worked = 0.0
    if sys.stderr.isatty():
        with tqdm(total=work, smoothing=0, bar_format="{desc} {bar}{postfix} {elapsed}<{remaining}") as bar:

            def advance(share: float, what: str, cost: float = 1.0) -> None:
                nonlocal done
                done += share
                bar.set_description_str(what, refresh=False)
                bar.set_postfix_str(f"{unit} {done:.1f}/{total}", refresh=False)
                bar.update(share * cost)

            yield advance
            bar.refresh()
        return
    start = printed = time.monotonic()

    def print_line(what: str) -> None:
        nonlocal printed
        printed = time.monotonic()
        left = f", about {_minutes((printed - start) / worked * (work - worked))} left" if 0 < worked < work else ""
        print(f"{unit}: {done:.1f} of {total} after {_minutes(printed - start)}{left}: {what}", file=sys.stderr, flush=True)

    def advance_log(share: float, what: str, cost: float = 1.0) -> None:
        nonlocal done, worked
        done, worked = done + share, worked + share * cost
        if time.monotonic() - printed >= EVERY:
            print_line(what)

    yield advance_log
    if time.monotonic() - start >= EVERY:
        print_line("done")


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 600 else f"{seconds:.0f} s"
