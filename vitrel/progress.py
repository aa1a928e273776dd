"""How far a long piece of work is: a bar on a terminal, a line now and then in a log."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

EVERY = 20.0  # seconds between two lines of a log


@contextmanager
def progress(total: int, unit: str, every: float = EVERY) -> Iterator[Callable[[float, str], None]]:
    """advance(share, what): so much more is done, in units of which there are `total`, and `what` is being done now.

    On standard error: a tqdm bar where it is a terminal; elsewhere a line after `every` seconds at most, and one at the end
    where it took longer than that.
    """
    if sys.stderr.isatty():
        with tqdm(total=total, unit=unit, bar_format="{desc} {bar} {n:.1f}/{total} {unit} {elapsed}<{remaining}") as bar:

            def advance(share: float, what: str) -> None:
                bar.set_description_str(what, refresh=False)
                bar.update(share)

            yield advance
        return
    start = said = time.monotonic()
    done = 0.0

    def tell(what: str) -> None:
        nonlocal said
        said = time.monotonic()
        left = f", about {_minutes((said - start) / done * (total - done))} left" if 0 < done < total else ""
        print(f"{done:.1f} of {total} {unit} after {_minutes(said - start)}{left}: {what}", file=sys.stderr, flush=True)

    def advance_log(share: float, what: str) -> None:
        nonlocal done
        done += share
        if time.monotonic() - said >= every:
            tell(what)

    yield advance_log
    if time.monotonic() - start >= every:
        tell("done")


def _minutes(seconds: float) -> str:
    return f"{seconds / 60:.0f} min" if seconds >= 600 else f"{seconds:.0f} s"
