"""Files that are written completely or not at all, cells of tables, pages that are one file, and the commit of a checkout."""

import csv
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

_PART = re.compile(r"\..+\.(?P<process>\d{1,9})@(?P<host>.*)\.part")  # as `atomic_write` names them
_OLD = 24 * 3600  # seconds without a write after which a part of another machine's process is taken to be left behind
_FORMULA = re.compile(r"'*[=+\-@\t\r\n]")  # what spreadsheets run, or what is escaped already


@contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """A path beside `path` to write to; it takes the place of `path` when the block ends, and is removed where it raises.

    A reader, and a run that is killed, sees the former file or the new one, never a part. The folder has to exist. What killed
    processes left in the folder is removed first. An OSError that names no file, as that of a full disk, gets the path.
    """
    path = Path(path)
    _remove_left_parts(path.parent)
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
    """A path, or a name in one, as text that can be written anywhere: bytes that are no UTF-8 are shown as \\xe9."""
    text = re.sub(r"[\udc80-\udcff]", lambda byte: f"\\x{ord(byte[0]) - 0xDC00:x}", str(path))  # as Python reads such bytes
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _remove_left_parts(folder: Path) -> None:
    for part in folder.glob(".*.part"):
        name = _PART.fullmatch(part.name)
        with suppress(OSError):  # another process may remove it at the same time, or alone be allowed to
            if name and _is_left(int(name["process"]), name["host"], part.stat().st_mtime):
                part.unlink()


def _is_left(process: int, host: str, written: float) -> bool:
    """Whether the process that wrote a part is gone. Those of another machine cannot be asked for."""
    if host != platform.node() or os.name != "posix":
        return time.time() - written > _OLD
    try:
        os.kill(process, 0)  # sends nothing
    except ProcessLookupError:
        return True
    except PermissionError:
        pass
    return False


def write_cells(path: str | Path, lines: Iterable[Sequence[Any]]) -> None:
    """Writes a CSV file by `atomic_write`, its text by `guarded`; a name that is no UTF-8 is escaped by `shown`."""
    with atomic_write(path) as part, part.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([guarded(cell) for cell in line] for line in lines)


def guarded(cell: Any) -> Any:
    """A cell as it is written into CSV: text by `shown`, with ' before it where a spreadsheet would run it as a formula.

    That is text that begins with =, +, -, @, a tab or a line end and is no number. `unguarded` gives the cell back.
    """
    if not isinstance(cell, str):
        return cell
    cell = shown(cell)
    return f"'{cell}" if _FORMULA.match(cell) and not _is_number(cell) else cell


def unguarded(cell: Any) -> Any:
    """A cell read from CSV as it was before `guarded`."""
    return cell[1:] if isinstance(cell, str) and cell.startswith("'") and _FORMULA.match(cell) else cell


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def one_page(package: str, scripts: Sequence[str], **parts: str) -> str:
    """HTML that needs no other file: `package`/page/page.html with its style, its scripts in this order and `parts` filled in.

    {{name}} in the template is the place of a part. One pass, so that nothing in the parts is taken for a place to fill.
    """
    page = files(package) / "page"
    parts["style"] = (page / "page.css").read_text("utf-8")
    parts["script"] = "\n".join((page / f"{name}.js").read_text("utf-8") for name in scripts)
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], (page / "page.html").read_text("utf-8"))


def commit(checkout: Path) -> str:
    """The commit of a git checkout, "-dirty" after it where a tracked file has changed; "" where it is none."""
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
