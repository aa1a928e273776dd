"""File helpers: atomic writes, CSV cells, and the commit of a checkout."""

import csv
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]  # the repository, unless vitrel is an installed wheel
_PART = re.compile(r"\..+\.(?P<process>\d{1,9})@(?P<host>.*)\.part")  # names of `atomic_write`
_OLD = 24 * 3600  # seconds without a write after which another machine's part counts as abandoned


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Context manager with a temporary path beside `path`, which replaces `path` at the end, or is removed if the block raises.

    Readers, also after a killed run, find the old file or the complete new one. The folder must exist; temporary files of
    killed processes in it are removed first. An OSError without a file name, as of a full disk, is raised again with the path.
    """
    path = Path(path)
    _remove_abandoned_parts(path.parent)
    part = path.with_name(f".{path.name}.{os.getpid()}@{platform.node()}.part")
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
    """Return a path, or a name in one, as text that can be written anywhere: bytes that are not UTF-8 are shown as \\xe9."""
    text = re.sub(r"[\udc80-\udcff]", lambda byte: f"\\x{ord(byte[0]) - 0xDC00:x}", str(path))  # as surrogates
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _remove_abandoned_parts(folder: Path) -> None:
    for part in folder.glob(".*.part"):
        name = _PART.fullmatch(part.name)
        with suppress(OSError):  # another process may remove it first, or this one lack permission
            if name and _is_abandoned(int(name["process"]), name["host"], part.stat().st_mtime):
                part.unlink()


def _is_abandoned(process: int, host: str, written: float) -> bool:
    """True if the process that wrote a temporary file is gone; for another machine's, judged by its age."""
    if host != platform.node() or os.name != "posix":
        return time.time() - written > _OLD
    try:
        os.kill(process, 0)  # signal 0 only checks that the process exists
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def write_cells(path: str | Path, lines: Iterable[Sequence[Any]]) -> None:
    """Write lines of cells as a CSV file by `atomic_write`, with text as of `shown`."""
    with atomic_write(path) as part, part.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([shown(cell) if isinstance(cell, str) else cell for cell in line] for line in lines)


def commit(checkout: Path = Path(__file__).parents[2]) -> str:
    """Return the commit (12 digits) of the git checkout with top folder `checkout`, plus "-dirty" if a tracked file changed.

    By default it is that of this package.

    "" if the folder has no .git, or git is missing or fails.
    """
    if not (checkout / ".git").exists():
        return ""
    try:
        head = _git(checkout, "rev-parse", "--short=12", "HEAD")
        return f"{head}-dirty" if _git(checkout, "status", "--porcelain", "--untracked-files=no") else head
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(checkout: Path, *arguments: str) -> str:
    command = ["git", "-C", str(checkout), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()
