"""Heights and widths as text, height first: of images in pixels, of grids in tokens."""

from collections.abc import Sequence

Size = tuple[int, int]


def parse_size(text: str | int) -> Size:
    """ "160x224" -> (160, 224), height first; "96" or 96 -> (96, 96). ValueError for anything else, with a valid example."""
    parts = str(text).lower().split("x")
    if isinstance(text, bool) or len(parts) > 2 or not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise ValueError(f"{text!r} is not an image size: write pixels as 96, or height x width as 160x224")
    return int(parts[0]), int(parts[-1])


def format_size(size: Sequence[int]) -> str:
    """(160, 224) -> "160x224", height first."""
    return f"{size[0]}x{size[1]}"
