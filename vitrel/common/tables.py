"""Tables as text."""

import re
from collections.abc import Iterable, Sequence


def aligned(lines: Sequence[Sequence[str]], like: Sequence[Sequence[str]] | None = None) -> list[str]:
    """Return each line of cells as text, in columns two spaces apart; the lines `like`, by default all, set their widths.

    All lines have as many cells. Longer cells than in `like` are not cut.
    """
    widths = [max(map(len, column)) for column in zip(*(lines if like is None else like), strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with padded columns, readable as plain text too; columns of numbers are right-aligned."""
    cells = [[str(cell).replace("|", "\\|") for cell in line] for line in [header, *lines]]
    widths = [max(3, *(len(line[column]) for line in cells)) for column in range(len(header))]
    right = [all(re.fullmatch(r"\d[\d,.±%:x ]*|-?", line[column]) for line in cells[1:]) for column in range(len(header))]
    pads = [str.rjust if flag else str.ljust for flag in right]
    rule = ["-" * (width - 1) + ":" if flag else "-" * width for width, flag in zip(widths, right, strict=True)]
    texts = [[pad(cell, width) for pad, cell, width in zip(pads, line, widths, strict=True)] for line in cells]
    return "\n".join("| " + " | ".join(line) + " |" for line in [texts[0], rule, *texts[1:]]) + "\n"
