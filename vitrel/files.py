"""Files that stand whole or not at all, pages that are one file, and the commit a file was made with."""

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path


@contextmanager
def whole(path: str | Path) -> Iterator[Path]:
    """A path beside `path` to write to; it takes the place of `path` when the block ends, and is removed where it raises.

    A reader, and a run that is killed, sees the former file or the new one, never a part. The folder has to exist.
    """
    path = Path(path)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def shown(path: str | Path) -> str:
    """A path, or a name in one, as text that can be written anywhere: bytes that are no UTF-8 are shown as \\xe9."""
    text = re.sub(r"[\udc80-\udcff]", lambda byte: f"\\x{ord(byte[0]) - 0xDC00:x}", str(path))  # as Python reads such bytes
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


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
