"""Heights and widths as text, height first: of images in pixels, of grids in tokens."""

from collections.abc import Sequence
from itertools import product
from math import isqrt, log, sqrt

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


def native_size(height: int, width: int, budget: int, patch: tuple[int, int]) -> tuple[int, int]:
    """Height and width in pixels, whole patches, of an image resized to at most `budget` tokens at its own aspect ratio.

    The exact sides of `budget` tokens are rounded down or up to whole patches, each by less than one. Of the grids (h, w)
    within the budget, the one with the least |log(h / exact h)| + |log(w / exact w)| is taken: tokens left unused and a changed
    aspect ratio count alike; of equal ones, that of the least changed aspect ratio. Images too long for one row or column of
    the budget get all of it in one row or column.

    Args:
        height, width: of the image, pixels.
        budget: tokens at most.
        patch: (height, width) of a patch, pixels.

    Raises:
        ValueError: a side, the budget or a patch below 1.
    """
    if min(height, width, budget, *patch) < 1:
        raise ValueError(f"an image ({height}x{width}), its budget ({budget}) and a patch ({patch}) are at least 1")
    tall, wide = height * patch[1], width * patch[0]  # in the ratio of the sides in patches
    exact = sqrt(budget * tall / wide), sqrt(budget * wide / tall)  # their product is the budget

    def changes(grid: tuple[int, int]) -> tuple[float, float]:
        h, w = (log(side / real) for side, real in zip(grid, exact, strict=True))
        return round(abs(h) + abs(w), 9), round(abs(h - w), 9)  # rounded, for ties to be ties

    sides = product(_whole(budget * tall, wide, budget), _whole(budget * wide, tall, budget))
    h, w = min((grid for grid in sides if grid[0] * grid[1] <= budget), key=changes)
    return h * patch[0], w * patch[1]


def _whole(above: int, below: int, budget: int) -> list[int]:
    """sqrt(above / below) rounded down and up, between 1 and `budget`; by integers, since floats miss whole roots."""
    down = isqrt(above // below)
    up = down + (down * down * below < above)
    return sorted({min(max(side, 1), budget) for side in (down, up)})
