"""Helpers for files: atomic writes, CSV cells, printable paths, and the commit of a checkout."""

import csv
import re
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]  # the repository, unless vitrel is an installed wheel


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Context manager that gives a temporary path in the folder of `path`, to write to.

    The file there replaces `path` at the end, or is removed after an error. Readers, also after a killed run, find the old file
    or the complete new one; what a killed run left is overwritten. The folder must exist. An OSError without a file name, as of
    a full disk, is raised again with the path. Only one process at a time may write a file (`vitrel.common.lock`).
    """
    path = Path(path)
    part = path.with_name(f".{path.name}.part")
    try:
        yield part
        part.replace(path)
    except OSError as error:
        if error.errno is None or error.filename not in (None, part, str(part)):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        part.unlink(missing_ok=True)


def shown(path: str | Path) -> str:
    """Return a path, or a name in one, as text that can be written anywhere: bytes that are not UTF-8 are escaped."""
    text = re.sub(r"[\udc80-\udcff]", lambda byte: f"\\x{ord(byte[0]) - 0xDC00:x}", str(path))  # as surrogates
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def write_cells(path: str | Path, lines: Iterable[Sequence[Any]]) -> None:
    """Write lines of cells, the header first, as a CSV file, atomically; bytes that are not UTF-8 are escaped (`shown`)."""
    with atomic_write(path) as part, part.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([shown(cell) if isinstance(cell, str) else cell for cell in line] for line in lines)


def commit(checkout: Path = CHECKOUT) -> str:
    """Return the commit (12 digits) of the git checkout with top folder `checkout`, with "-dirty" if a tracked file changed.

    By default it is that of this package. "" if the folder has no .git, or git is missing, fails or takes over 30 seconds.
    """
    if not (checkout / ".git").exists():
        return ""
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""
