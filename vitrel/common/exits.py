"""How commands end: a one-line error message, a sentence about saved work when interrupted, and the usual exit codes."""

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

from vitrel.common.resources import lack_of, without_traceback

INTERRUPTED, TERMINATED, UNREAD = 130, 143, 141  # 128 + SIGINT, SIGTERM, SIGPIPE


class Terminated(KeyboardInterrupt):
    """The process received SIGTERM; it cleans up as on ctrl-c."""


@contextmanager
def reported(go_on: str = "nothing was saved; the same command starts again") -> Iterator[None]:
    """Context manager that ends the program with one line on stderr instead of a traceback.

    For invalid settings, data or files, a missing package and lack of memory or loader processes: `error: ...` and exit code 1.
    If the reader of the output has gone, as `head` does: exit code 141 and no word.
    If the program is stopped: a sentence about what was saved and how to continue, with exit code 130 (ctrl-c) or 143
    (SIGTERM, under `terminable`).

    Notes of the exception (`add_note`) are part of the line; go_on is printed for a stopped program without notes. Names that
    are not UTF-8 are printed with their bytes escaped.
    """
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
    except BrokenPipeError as error:
        if text := lack_of(error):  # a pipe to a loader process
            sys.exit(f"error: {one_line(error, text)}")
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python complains when it flushes at exit
        raise SystemExit(UNREAD) from None
    except (ValueError, OSError, MemoryError, FloatingPointError, ImportError) as error:
        text = "" if isinstance(error, MemoryError) and str(error) else lack_of(error)
        sys.exit(f"error: {one_line(error, text) or type(error).__name__}")
    except (RuntimeError, EOFError) as error:
        if not (text := lack_of(error)):
            raise
        sys.exit(f"error: {one_line(error, text)}")


def one_line(error: BaseException, text: str = "") -> str:
    """Return the text of an error, or `text` instead, and its notes as one line.

    For an error of the operating system: the file and what happened to it.
    """
    if not text and isinstance(error, OSError) and error.strerror and error.filename is not None:
        text = f"{error.filename}: {error.strerror}"
    parts = (text or without_traceback(str(error)), *getattr(error, "__notes__", ()))
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


def end_with_parent() -> None:
    """Wait until the process that started this one by `multiprocessing` ends, then end this one at once, without any cleanup.

    It blocks, so run it in a separate thread. It returns immediately if no `multiprocessing` process started this one.
    """
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)
