"""The ways in which commands end: a one-line error, a sentence about saved work when interrupted, the usual exit codes."""

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
    """Raised when the process receives SIGTERM. As a KeyboardInterrupt it makes work end and clean up as ctrl-c does."""


@contextmanager
def reported(go_on: str = "nothing was saved; the same command starts again") -> Iterator[None]:
    """Context manager that ends the program with one line on stderr, in place of a traceback, for errors that a user can cause.

    These are invalid settings, data or files, a missing package, and a lack of memory or loader processes: `error: ...`, exit
    code 1; other errors are raised as they are. If the program is stopped, the line (only on rank 0) says what was saved and
    how to continue; exit code 130 (ctrl-c) or 143 (SIGTERM, under `terminable`). If the reader of the output has gone, as
    `head` does, nothing is printed; exit code 141.

    Notes of the exception (`add_note`) are part of the line; `go_on` is printed for a stopped program without notes. In printed
    names, bytes that are not UTF-8 are escaped. A UserWarning is printed as one line without the place in the code. These two
    changes, of sys.stdout and `warnings`, stay when the context ends.
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
    """Format a UserWarning as one line, other warnings as Python does; a replacement for warnings.formatwarning."""
    return f"warning: {message}\n" if category is UserWarning else _FORMAT(message, category, filename, lineno, line)


def one_line(error: BaseException) -> str:
    """Return an error's text and notes in one line, joined by "; "; an OSError's text is "FILE: reason" if it has a file."""
    text = without_traceback(str(error))
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    parts = (text, *getattr(error, "__notes__", ()))
    return "; ".join(re.sub(r"\s*\n\s*", " ", part.strip()) for part in parts if part)


@contextmanager
def terminable() -> Iterator[None]:
    """Context manager under which SIGTERM raises `Terminated` in the main thread, so that cleanup code runs and work is saved.

    The former handler is set again at the end. It has no effect if it is entered in another thread.
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
