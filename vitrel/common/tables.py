"""Tables as text."""

from collections.abc import Sequence


def aligned(lines: Sequence[Sequence[str]], like: Sequence[Sequence[str]] | None = None) -> list[str]:
    """Each line of cells as text, with columns two spaces apart.

    Args:
        like: the lines that set the widths, by default all.
    """
    widths = [max(map(len, column)) for column in zip(*(lines if like is None else like), strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
