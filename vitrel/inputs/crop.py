"""Position terms of a part of a grid, in the coordinates of the whole grid.

An encoding called on the part alone would count from the part's corner, resample its tables to the part, and normalize by the
part's size. So it is called on the whole grid, and the rows of the part are gathered here.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vitrel.grid import Grid
from vitrel.position.terms import Table, Terms


class Crop(NamedTuple):
    """A crop of h x w patches from a larger grid. It also has all prefix (class and register) tokens of that grid.

    Args:
        whole: the larger grid.
        origin: row and column (y, x) in it of the crop's first patch, from 0.
        h: rows of patches of the crop.
        w: columns of patches of the crop.
    """

    whole: Grid
    origin: tuple[int, int]
    h: int
    w: int

    @property
    def grid(self) -> Grid:
        """Grid of the crop, h x w with the prefix tokens of the whole grid, for which `crop_terms` returns the terms."""
        return Grid(self.h, self.w, self.whole.prefix)


def crop_terms(terms: Terms, crop: Crop) -> Terms:
    """Return the terms of a crop from those of the whole grid; the crop's tokens have the same logits as in the whole grid.

    Taken are the rows of the crop's tokens, and of tables the rows of offsets |dy| < h, |dx| < w and of prefix tokens. The
    rest is unchanged.

    Args:
        terms: what an encoding returns for `crop.whole`.
        crop: the part of the grid.

    Raises:
        ValueError: the crop is not inside the whole grid, or the terms are not those of the whole grid (not checked inside
            torch.compile).
    """
    if not torch.compiler.is_compiling():
        _check(terms, crop)

    def rows(x: Tensor | None, dim: int = 1) -> Tensor | None:
        return None if x is None else x.index_select(dim, _tokens(crop, x.device))

    def table(whole: Table) -> Table:
        def classes(x: Tensor | None) -> Tensor | None:
            return None if x is None else x.index_select(1, _classes(crop, whole.axis, x.device))

        bias, query, key, value = (classes(x) for x in (whole.bias, whole.query, whole.key, whole.value))
        gated = None if whole.gated is None else (whole.gated[0], classes(whole.gated[1]))
        return Table(whole.axis, bias, query, key, value, gated)

    return terms._replace(
        tokens=rows(terms.tokens, 0),
        rotary=None if terms.rotary is None else tuple(map(rows, terms.rotary)),
        key_rotary=None if terms.key_rotary is None else tuple(map(rows, terms.key_rotary)),
        tables=tuple(map(table, terms.tables)),
    )


def _tokens(crop: Crop, device: torch.device) -> Tensor:
    """Return the index of each of the crop's N' tokens, prefix tokens first, among the tokens of the whole grid, [N'] int64."""
    y, x = crop.grid.coordinates(device).unbind(-1)
    inside = (y + crop.origin[0]) * crop.whole.w + x + crop.origin[1] + crop.whole.prefix
    return torch.cat((torch.arange(crop.whole.prefix, device=device), inside))


def _classes(crop: Crop, axis: str, device: torch.device) -> Tensor:
    """Return the index of each of the crop's R' offset classes along `axis` (see Grid) among those of the whole grid, [R']."""
    whole, offsets = crop.whole, crop.grid.offsets(axis, device)
    if axis == "hw":
        inside = (offsets[:, 0] + whole.h - 1) * (2 * whole.w - 1) + offsets[:, 1] + whole.w - 1
    else:
        inside = offsets + whole.places(axis) - 1
    return torch.cat((inside, torch.arange(whole.offset_classes(axis), whole.classes(axis), device=device)))


def _check(terms: Terms, crop: Crop) -> None:
    whole, (y, x) = crop.whole, crop.origin
    if min(y, x) < 0 or min(crop.h, crop.w) < 1 or y + crop.h > whole.h or x + crop.w > whole.w:
        raise ValueError(
            f"a crop of {crop.h}x{crop.w} tokens at row {y}, column {x} is not inside the {whole.h}x{whole.w} grid: "
            "origin counts tokens from the upper left of the whole grid"
        )
    tensors = [("tokens", terms.tokens, 0, whole.tokens)]
    tensors += [("rotary", t, 1, whole.tokens) for t in (*(terms.rotary or ()), *(terms.key_rotary or ()))]
    for table in terms.tables:
        parts = (*table[1:5], None if table.gated is None else table.gated[1])
        tensors += [(f"table over {table.axis!r}", t, 1, whole.classes(table.axis)) for t in parts]
    for name, tensor, dim, rows in tensors:
        if tensor is not None and tensor.shape[dim] != rows:
            raise ValueError(
                f"{name} has {tensor.shape[dim]} rows, but the {whole.h}x{whole.w} grid with prefix={whole.prefix} "
                f"needs {rows}; pass the terms of the whole grid, encoding(crop.whole)"
            )
