"""The terms of some of a grid's tokens: position on a part of an image, in the coordinates of the whole.

An encoding computed on the part alone would begin anew at its corner, resize its tables to it and normalise by its size. So
it is computed on the whole, whose rows for the part are gathered here.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vitrel.grid import Grid
from vitrel.position.terms import Table, Terms


class Crop(NamedTuple):
    """h x w tokens of a larger grid, the first at row and column `origin` (y, x). Prefix tokens belong to every crop."""

    whole: Grid
    origin: tuple[int, int]
    h: int
    w: int

    @property
    def grid(self) -> Grid:
        """The crop's own grid, on which its terms are used."""
        return Grid(self.h, self.w, self.whole.prefix)


def crop_terms(terms: Terms, crop: Crop) -> Terms:
    """Terms on `crop.whole` -> terms on `crop.grid`, under which the crop's tokens have the logits they have in the whole.

    Rows of tokens and rotations are those of the crop, tables keep the offsets |dy| < h, |dx| < w, the rest stays as it is.
    Raises ValueError for a crop that does not lie in the whole, and for terms that are not those of the whole.
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
    """[N'] index of each of the crop's tokens among those of the whole."""
    y, x = crop.grid.coordinates(device).unbind(-1)
    inside = (y + crop.origin[0]) * crop.whole.w + x + crop.origin[1] + crop.whole.prefix
    return torch.cat((torch.arange(crop.whole.prefix, device=device), inside))


def _classes(crop: Crop, axis: str, device: torch.device) -> Tensor:
    """[R'] index of each of the crop's offset classes among those of the whole."""
    whole, offsets = crop.whole, crop.grid.offsets(axis, device)
    if axis == "hw":
        inside = (offsets[:, 0] + whole.h - 1) * (2 * whole.w - 1) + offsets[:, 1] + whole.w - 1
    else:
        inside = offsets + (whole.h if axis == "h" else whole.w) - 1
    return torch.cat((inside, torch.arange(whole.offset_classes(axis), whole.classes(axis), device=device)))


def _check(terms: Terms, crop: Crop) -> None:
    whole, (y, x) = crop.whole, crop.origin
    if min(y, x) < 0 or min(crop.h, crop.w) < 1 or y + crop.h > whole.h or x + crop.w > whole.w:
        raise ValueError(
            f"a crop of {crop.h}x{crop.w} tokens at row {y}, column {x} does not lie in the {whole.h}x{whole.w} grid: "
            "origin counts tokens from the upper left of the whole"
        )
    found = [("tokens", terms.tokens, 0, whole.tokens)]
    found += [("rotary", t, 1, whole.tokens) for t in (*(terms.rotary or ()), *(terms.key_rotary or ()))]
    for table in terms.tables:
        tensors = (*table[1:5], None if table.gated is None else table.gated[1])
        found += [(f"table over {table.axis!r}", t, 1, whole.classes(table.axis)) for t in tensors]
    for name, tensor, dim, rows in found:
        if tensor is not None and tensor.shape[dim] != rows:
            raise ValueError(
                f"{name} of {tensor.shape[dim]} rows: the {whole.h}x{whole.w} grid with {whole.prefix} prefix tokens needs "
                f"{rows}; crop the terms of the whole, encoding(crop.whole)"
            )
