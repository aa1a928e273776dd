"""Grid: the rows and columns of tokens on which every position encoding is computed.

Letters for shapes, throughout the package: B batch, H heads, N tokens (prefix + h*w), D head width, C model width, R offset
classes, L windows. Offsets are signed, query minus key, in patches; h comes before w.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vitrel.geometry import cached_geometry, is_known

AXES = ("hw", "h", "w", "h+w")


class Grid(NamedTuple):
    """A grid of h x w tokens in row-major order, after `prefix` class or register tokens. A window is a Grid too.

    An offset class is the index of an offset, query minus key in patches, along an axis:

    - "hw": offset (dy, dx) is class (dy + h-1)(2w-1) + dx + w-1 of (2h-1)(2w-1);
    - "h": offset dy is class dy + h-1 of 2h-1;
    - "w": offset dx is class dx + w-1 of 2w-1;
    - "h+w", the diagonals: offset dy + dx is class dy + dx + h+w-2 of 2(h+w)-3.

    With prefix tokens three more classes follow, in the order of BEiT and timm: prefix query to token key, token query to
    prefix key, prefix to prefix.

    Args:
        h: rows of patches.
        w: columns of patches.
        prefix: number of class and register tokens, which come before the patches.
    """

    h: int
    w: int
    prefix: int = 0

    @property
    def tokens(self) -> int:
        """Number of tokens N, prefix tokens included."""
        return self.prefix + self.h * self.w

    def places(self, axis: str) -> int:
        """Return how many rows ("h"), columns ("w") or diagonals of equal y + x ("h+w") the patches have."""
        return self.h if axis == "h" else self.w if axis == "w" else self.h + self.w - 1

    def offset_classes(self, axis: str = "hw") -> int:
        """Return how many different offsets patches have along an axis, "hw", "h", "w" or "h+w"; prefix tokens do not count."""
        if _checked(axis) == "hw":
            return (2 * self.h - 1) * (2 * self.w - 1)
        return 2 * self.places(axis) - 1

    def classes(self, axis: str = "hw") -> int:
        """Return the number R of offset classes along `axis`: `offset_classes`, plus 3 if there are prefix tokens."""
        return self.offset_classes(axis) + (3 if self.prefix else 0)

    def offsets(self, axis: str = "hw", device: torch.device | str | None = None) -> Tensor:
        """Return every offset, query minus key in patches, in the order of its class: (dy, dx) [R, 2] for "hw", else [R].

        The tensor is int64 with R = offset_classes(axis), since the prefix classes have no offset. It is shared, so do not
        change it in place.
        """
        return _offsets(self.h, self.w, _checked(axis), device=device)

    def coordinates(self, device: torch.device | str | None = None) -> Tensor:
        """Return row and column (y, x) of every token but the prefix tokens, [h*w, 2] int64.

        The tensor is shared, so do not change it in place.
        """
        return _coordinates(self.h, self.w, device=device)

    def index(self, axis: str = "hw", device: torch.device | str | None = None) -> Tensor:  # type: ignore[override]
        """Return the offset class of every pair (query i, key j) of tokens, [N, N] int64; shared: do not change it in place."""
        return _index(self.h, self.w, self.prefix, _checked(axis), device=device)


@cached_geometry
def _offsets(h: int, w: int, axis: str, device: torch.device) -> Tensor:
    if axis != "hw":
        n = Grid(h, w).places(axis)
        return torch.arange(1 - n, n, device=device)
    dy, dx = torch.arange(1 - h, h, device=device), torch.arange(1 - w, w, device=device)
    shape = (2 * h - 1, 2 * w - 1)
    return torch.stack((dy[:, None].expand(shape), dx[None].expand(shape)), -1).flatten(0, 1)  # [R, 2]


@cached_geometry
def _coordinates(h: int, w: int, device: torch.device) -> Tensor:
    index = torch.arange(h * w, device=device)
    y = index // w
    return torch.stack((y, index - y * w), -1)


@cached_geometry
def _index(h: int, w: int, prefix: int, axis: str, device: torch.device) -> Tensor:
    y, x = _coordinates(h, w, device=device).unbind(-1)
    row = y[:, None] - y[None] + h - 1
    column = x[:, None] - x[None] + w - 1
    if axis == "hw":
        row = row * (2 * w - 1)
    index = row if axis == "h" else column if axis == "w" else row + column
    if not prefix:
        return index
    first, n = Grid(h, w).offset_classes(axis), h * w
    left = index.new_full((n, prefix), 1) + first  # token query, prefix key
    top = torch.cat((index.new_full((prefix, prefix), 2), index.new_zeros((prefix, n))), 1) + first
    return torch.cat((top, torch.cat((left, index), 1)))


def same_size(a: Grid, b: Grid) -> bool:
    """Return whether both grids have the same h and w.

    In a graph compiled for any size, which may not branch on sizes, the result is always False.
    """
    return is_known(*a[:2], *b[:2]) and a[:2] == b[:2]


def unseen_share(source: Grid, target: Grid) -> float:
    """Return the share of the (2h-1)(2w-1) offsets of `target`, 0 to 1, that no pair of patches of `source` has."""
    common = (2 * min(source.h, target.h) - 1) * (2 * min(source.w, target.w) - 1)
    return 1 - common / target.offset_classes()


def clip_saturated(trained: Grid, grid: Grid, radius: tuple[int, int]) -> float:
    """Return the share of the offsets of `grid`, 0 to 1, that `trained` does not have, but whose clipped offset it has.

    An encoding that clips offsets reads a trained row for them.

    Args:
        trained: the training grid.
        grid: the grid whose offsets are counted.
        radius: (rows, columns) in patches to which offsets are clipped.
    """
    trained_rows = 1
    for n, source, r in zip(grid[:2], trained[:2], radius, strict=True):
        trained_rows *= 2 * (n if r < source else min(n, source)) - 1
    return trained_rows / grid.offset_classes() - (1 - unseen_share(trained, grid))


def _checked(axis: str) -> str:
    if axis not in AXES:
        raise ValueError(f"axis {axis!r} is unknown; choose one of {', '.join(AXES)}")
    return axis
