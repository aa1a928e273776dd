"""Image sizes and grids as text, height first; budgets of tokens; and the image size for a budget."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import isqrt, log, sqrt

Size = tuple[int, int]


@dataclass(frozen=True)
class Budget:
    """Maximum number of patch tokens of an image, in place of a size in pixels; as text "196t"."""

    tokens: int

    def __str__(self) -> str:
        return f"{self.tokens}t"


def parse_size(text: str | int) -> Size:
    """Parse "160x224" -> (160, 224), height first, and "96" or 96 -> (96, 96). ValueError with a valid example."""
    parts = str(text).lower().split("x")
    if isinstance(text, bool) or len(parts) > 2 or not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise ValueError(f"{text!r} is not an image size: write pixels as 96, or height x width as 160x224")
    return int(parts[0]), int(parts[-1])


def parse_size_or_budget(text: str | int) -> Size | Budget:
    """Parse a size as `parse_size`, or "196t" -> Budget(196). ValueError with a valid example."""
    number = str(text).lower().removesuffix("t")
    if str(text).lower().endswith("t") and number.isascii() and number.isdigit() and int(number):
        return Budget(int(number))
    try:
        return parse_size(text)
    except ValueError as error:
        raise ValueError(f"{error}, or a budget of patch tokens as 196t") from None


def format_size(size: Sequence[int] | Budget) -> str:
    """Format (160, 224) -> "160x224", height first, and Budget(196) -> "196t"."""
    return str(size) if isinstance(size, Budget) else f"{size[0]}x{size[1]}"


def short_size(size: Size) -> str:
    """Format a size with a square by its side: (64, 64) -> "64", (64, 96) -> "64x96"."""
    return str(size[0]) if size[0] == size[1] else format_size(size)


def nearest_size(size: Size, others: Iterable[Size]) -> Size:
    """Return the one of `others`, (h, w) in pixels, with the area nearest to that of `size` by ratio; of equals the first."""
    return min(others, key=lambda other: abs(log(other[0] * other[1] / (size[0] * size[1]))))


def listed(names: Sequence[str]) -> str:
    """Join one or more names in words: "a", "a and b", "a, b and c"."""
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last


def sizes_in_words(sizes: Sequence[Size | Budget]) -> str:
    """Return sizes in words: "64 px", "48, 80 and 64x96 px".

    If there are budgets, only these are named: "native shape, 196 tokens at most".
    """
    if budgets := [str(size.tokens) for size in sizes if isinstance(size, Budget)]:
        return f"native shape, {listed(budgets)} tokens at most"
    return f"{listed([*map(short_size, sizes)])} px"


def token_count(size: Size, patch: Size) -> int:
    """Return the number of patch tokens of an image of `size` (h, w) pixels; a partial patch at a border counts as one."""
    return -(-size[0] // patch[0]) * -(-size[1] // patch[1])


def native_size(height: int, width: int, budget: int, patch: tuple[int, int]) -> tuple[int, int]:
    """Return (h, w) in pixels, whole patches, of an image resized to at most `budget` tokens with about its aspect ratio.

    The sides that give exactly `budget` tokens are rounded down or up to whole patches. Of the resulting grids (h, w) within
    the budget, the one with the smallest |log(h / exact h)| + |log(w / exact w)| is chosen, so that unused tokens and a changed
    aspect ratio count alike; among equal ones, the one with the smallest change of aspect ratio. Images too elongated for this
    fill the budget with one row or column.

    Args:
        height, width: of the image, in pixels.
        budget: maximum number of tokens.
        patch: (height, width) of a patch, in pixels.

    Raises:
        ValueError: a side, the budget or a patch is below 1.
    """
    if min(height, width, budget, *patch) < 1:
        raise ValueError(f"an image ({height}x{width}), its budget ({budget}) and its patch ({patch}) must be at least 1")
    h_part, w_part = height * patch[1], width * patch[0]  # proportional to the sides in patches
    exact = sqrt(budget * h_part / w_part), sqrt(budget * w_part / h_part)  # their product is the budget

    def changes(grid: tuple[int, int]) -> tuple[float, float]:
        h, w = (log(side / real) for side, real in zip(grid, exact, strict=True))
        return round(abs(h) + abs(w), 9), round(abs(h - w), 9)  # rounded, so that ties are equal

    sides = product(_whole(budget * h_part, w_part, budget), _whole(budget * w_part, h_part, budget))
    h, w = min((grid for grid in sides if grid[0] * grid[1] <= budget), key=changes)
    return h * patch[0], w * patch[1]


def _whole(above: int, below: int, budget: int) -> list[int]:
    """Return sqrt(above / below) rounded down and up, each within 1..budget and once, ascending; exact, since by integers."""
    down = isqrt(above // below)
    up = down + (down * down * below < above)
    return sorted({min(max(side, 1), budget) for side in (down, up)})
