"""How commands end: a one-line error message, a sentence about saved work when interrupted, and the usual exit codes."""

import os
import re
import signal
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

from vitrel.common.resources import lacking, without_traceback

_FORMAT = warnings.formatwarning
INTERRUPTED, TERMINATED, UNREAD = 130, 143, 141  # 128 + SIGINT, SIGTERM, SIGPIPE


class Terminated(KeyboardInterrupt):
    """The process received SIGTERM; it cleans up as on ctrl-c."""


@contextmanager
def reported(go_on: str = "nothing was saved; the same command starts again") -> Iterator[None]:
    """Context manager that ends the program with one line on stderr instead of a traceback.

    For invalid settings, data or files, a missing package and a lack of memory or loader processes: `error: ...`, exit code 1.
    If the reader of the output has gone, as `head` does: exit code 141 and no word.
    If the program is stopped: a sentence about what was saved and how to continue, with exit code 130 (ctrl-c) or 143
    (SIGTERM, under `terminable`).

    Notes of the exception (`add_note`) are part of the line; go_on is printed for a stopped program without notes. Names that
    are not UTF-8 are printed with their bytes escaped, warnings to users as one line without the place in the code.
    """
    warnings.formatwarning = _plain
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr does by default
    try:
        yield
        sys.stdout.flush()
    except KeyboardInterrupt as stop:
        code, word = (TERMINATED, "SIGTERM") if isinstance(stop, Terminated) else (INTERRUPTED, "interrupted")
        if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":  # only one of several processes prints
            print(f"{word}: {one_line(stop) or go_on}", file=sys.stderr)
        raise SystemExit(code) from None
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it flushes at exit
        raise SystemExit(UNREAD) from None
    except (ValueError, OSError, MemoryError, FloatingPointError, ImportError) as error:
        sys.exit(f"error: {one_line(error) or type(error).__name__}")
    except RuntimeError as error:
        if not lacking(error):
            raise
        sys.exit(f"error: {one_line(error)}")


def _plain(message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None) -> str:
    """A warning to users as one line; other warnings as Python prints them."""
    return f"warning: {message}\n" if category is UserWarning else _FORMAT(message, category, filename, lineno, line)


def one_line(error: BaseException) -> str:
    """Return the text of an error and its notes as one line; of the operating system's, the file and what happened to it."""
    text = without_traceback(str(error))
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    parts = (text, *getattr(error, "__notes__", ()))
    return "; ".join(re.sub(r"\s*\n\s*", " ", part.strip()) for part in parts if part)


@contextmanager
def terminable() -> Iterator[None]:
    """Context manager under which SIGTERM raises `Terminated` in the main thread, so that cleanup code runs and work is saved.

    It has no effect if it is entered in another thread.
    """
    if threading.current_thread() is not threading.main_thread():  # no handler can be set in other threads
        yield
        return
    previous = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def _terminate(number: int, frame: FrameType | None) -> NoReturn:
    raise Terminated
