"""Progress of long work: a bar on a terminal, occasional lines in a log."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

EVERY = 20.0  # seconds between two lines of a log


@contextmanager
def progress(total: int, unit: str, every: float = EVERY) -> Iterator[Callable[[float, str], None]]:
    """Context manager that gives advance(share, what), which adds `share` (may be a fraction) to the units done of `total`.

    what: text that describes the current work.

    On stderr: a tqdm bar on a terminal. Elsewhere, a line whenever `every` seconds have passed since the last one, and one at
    the end if the work took longer than that.
    """
    if sys.stderr.isatty():
        with tqdm(total=total, unit=unit, bar_format="{desc} {bar} {n:.1f}/{total} {unit} {elapsed}<{remaining}") as bar:

            def advance(share: float, what: str) -> None:
                bar.set_description_str(what, refresh=False)
                bar.update(share)

            yield advance
        return
    start = printed = time.monotonic()
    done = 0.0

    def print_line(what: str) -> None:
        nonlocal printed
        printed = time.monotonic()
        left = f", about {_minutes((printed - start) / done * (total - done))} left" if 0 < done < total else ""
        print(f"{done:.1f} of {total} {unit} after {_minutes(printed - start)}{left}: {what}", file=sys.stderr, flush=True)

    def advance_log(share: float, what: str) -> None:
        nonlocal done
        done += share
        if time.monotonic() - printed >= every:
            print_line(what)

    yield advance_log
    if time.monotonic() - start >= every:
        print_line("done")


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 600 else f"{seconds:.0f} s"
