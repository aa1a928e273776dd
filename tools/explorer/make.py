"""Puts explorer.html together: one file that needs no network, no server and no other file."""

import re
from pathlib import Path

from vitrel.common.files import atomic_write

PAGE = Path(__file__).parent / "page"

PARTS = (  # scripts, in the order in which they run
    *("base", "math", "cells", "fields"),
    *("square", "story", "reading", "clip", "bias", "weights", "trace", "buckets", "start"),
)
MARK = '<meta name="generator" content="vitrel explorer">'


def explorer_html() -> str:
    """Return the explorer page as HTML: page.html, where {{style}}, {{script}} and {{mark}} are filled in, in one pass."""
    scripts = ((PAGE / f"{name}.js").read_text("utf-8") for name in PARTS)
    parts = {"style": (PAGE / "page.css").read_text("utf-8"), "script": "\n".join(scripts), "mark": MARK}
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], (PAGE / "page.html").read_text("utf-8"))


def write_explorer(path: str | Path) -> Path:
    """Writes the explorer page to `path`, over an earlier one if there is one, and returns the path.

    FileNotFoundError where the folder is missing, IsADirectoryError where `path` is a folder, FileExistsError where it is a
    file of another kind.
    """
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder: name a file, such as {path / 'explorer.html'}")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"no folder {path.parent} to write {path.name} into: create it first")
    if path.exists() and MARK.encode() not in path.read_bytes():
        raise FileExistsError(f"{path} is there and is no explorer page: give another name, or remove it first")
    with atomic_write(path) as part:
        part.write_text(explorer_html(), "utf-8")
    return path
