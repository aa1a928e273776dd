"""How a command ends: one line for what its user can mend, one sentence where it is stopped, and the usual exit codes."""

import multiprocessing
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from vitrel.extras import MissingExtra

INTERRUPTED, TERMINATED = (128 + number for number in (signal.SIGINT, signal.SIGTERM))


class Terminated(KeyboardInterrupt):
    """The process was asked to end by SIGTERM; it is cleaned up after as on ctrl-c."""


@contextmanager
def reported(go_on: str = "nothing was saved; the same command starts anew") -> Iterator[None]:
    """Ends the program with one line on stderr: `error: ...` and exit code 1 for bad settings, data or files and a lack of
    memory; where it is stopped, what was saved and how to go on, with exit code 130 (ctrl-c) or 143 (SIGTERM, by `terminable`).

    Notes of the exception (`add_note`) follow it in that line; go_on takes their place where a stopped program has none.
    Names that are no UTF-8 are printed with their bytes escaped.
    """
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr always does
    try:
        yield
    except KeyboardInterrupt as stop:
        code, word = (TERMINATED, "SIGTERM") if isinstance(stop, Terminated) else (INTERRUPTED, "interrupted")
        if os.environ.get("RANK", "0") == "0":  # of several processes one tells
            print(f"{word}: {one_line(stop) or go_on}", file=sys.stderr)
        raise SystemExit(code) from None
    except (ValueError, OSError, MemoryError, FloatingPointError, MissingExtra) as error:
        sys.exit(f"error: {one_line(error) or type(error).__name__}")


def one_line(error: BaseException) -> str:
    """The text of an error and its notes as one line."""
    parts = (str(error), *getattr(error, "__notes__", ()))
    return "; ".join(re.sub(r"\s*\n\s*", " ", part.strip()) for part in parts if part)


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM raises `Terminated` in the main thread, so that it leaves no half-written file and what is done is saved."""
    if threading.current_thread() is not threading.main_thread():  # where no handler can be set
        yield
        return
    former = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated


def end_with_parent() -> None:
    """Waits for the end of the process that started this one by `multiprocessing`, then ends this one; for its own thread."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)
