"""Puts explorer.html together: one file that needs no network, no server and no other file."""

import re
from pathlib import Path

from vitrel.common.files import atomic_write

PAGE = Path(__file__).parent / "page"

PARTS = (  # scripts, in the order in which they run
    *("base", "math", "cells", "fields"),
    *("square", "story", "reading", "clip", "bias", "weights", "trace", "buckets", "start"),
)


def explorer_html() -> str:
    """Return the explorer page as HTML: page.html, where {{style}} and {{script}} are filled in, in one pass."""
    scripts = ((PAGE / f"{name}.js").read_text("utf-8") for name in PARTS)
    parts = {"style": (PAGE / "page.css").read_text("utf-8"), "script": "\n".join(scripts)}
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], (PAGE / "page.html").read_text("utf-8"))


def write_explorer(path: Path) -> Path:
    """Write the explorer page to `path`, over a file that is there, and return the path; OSError where that is not possible."""
    with atomic_write(path) as part:
        part.write_text(explorer_html(), "utf-8")
    return path
