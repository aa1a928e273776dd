"""Tables and embeddings fitted to a model's grid: rows of prefix tokens are added or left out, the others are resampled.

Tables are resampled by their `policy`, an absolute embedding bicubic and antialiased (DeiT).
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitrel.common.sizes import format_size
from vitrel.grid import Grid
from vitrel.position import PositionEncoding
from vitrel.position.absolute import Absolute
from vitrel.position.decomposed import Decomposed
from vitrel.position.resample import resample_axis, resample_embedding, resample_table
from vitrel.position.table import OffsetTable


class Resampled(NamedTuple):
    """The name in the model of a tensor of another grid, and how it was resampled to its grid: "14x14 -> 24x24, bicubic"."""

    target: str  # its name in the model
    resampled: str  # from which grid to which, and how: "14x14 -> 24x24, bicubic"


def fit_positions(state: dict[str, Tensor], model: nn.Module, record: dict[str, dict[str, Any]]) -> list[Resampled]:
    """Resample the tables and embeddings in a state dict to the model's grid, in place, and return those that were resampled.

    Rows of prefix tokens are added as zeros or left out as the model needs. The training grid of each is the first of these
    that has as many rows as the tensor, with or without rows for prefix tokens: that in `record`, the model's, a square one.

    Args:
        state: tensors with the model's names.
        model: whose encodings read the tensors.
        record: of the file's encodings (vitrel.weights.record).

    Raises:
        ValueError: no such grid has the number of rows, or a table has rows for prefix tokens and the model has no such tokens.
    """
    done = []
    for part, owner in model.named_modules():
        if isinstance(owner, OffsetTable | Absolute | Decomposed):
            for name in [f"{part}.{n}" for n, _ in owner.named_parameters() if f"{part}.{n}" in state]:
                source = _source(name, state[name], owner, record.get(part, {}).get("grid"))
                state[name], how = _fitted(name, state[name], owner, source)
                done += [Resampled(name, how)] if how else []
    return done


def _source(name: str, value: Tensor, owner: Any, recorded: list[int] | None) -> Grid:
    """Return the grid that a file's tensor was trained on, found as in `fit_positions`, for the encoding `owner` that reads it.

    `recorded` is the grid [h, w, prefix] in the file's record, None if there is none.
    """
    # numbers of rows for prefix tokens; of an embedding for all, for none (DeiT III), for the class token (DINOv2)
    extra = (owner.grid.prefix, 0, 1) if isinstance(owner, Absolute) else (0,) if isinstance(owner, Decomposed) else (3, 0)
    rows = value.shape[1] if isinstance(owner, Absolute) else len(value)

    def fits(grid: Grid) -> bool:
        axis = name[-1] if isinstance(owner, Decomposed) else "hw"
        return rows - (grid.h * grid.w if isinstance(owner, Absolute) else grid.offset_classes(axis)) in extra

    sides = [rows if isinstance(owner, Decomposed) else math.isqrt(max(rows - more, 0)) for more in extra]
    sides = sides if isinstance(owner, Absolute) else [(side + 1) // 2 for side in sides]
    candidates = [
        *([] if recorded is None else [Grid(*recorded)]),
        owner.grid,
        *(Grid(side, side) for side in sides if side > 0),
    ]
    source = next(filter(fits, candidates), None)
    if source is None:
        raise ValueError(
            f"{name} has {rows} rows, which no square grid gives: build the model with the img_size=(h, w) that the weights "
            "were trained at, and with their class_token, dist_token and reg_tokens"
        )
    return source


def _fitted(name: str, value: Tensor, owner: PositionEncoding, source: Grid) -> tuple[Tensor, str]:
    """Return a tensor resampled from grid `source` to that of its encoding `owner`, with its rows for prefix tokens, and how.

    The second is a text such as "14x14 -> 24x24, bicubic", "" if the grids are equal.
    """
    own: Any = owner.grid
    same = source[:2] == own[:2]
    if isinstance(owner, Decomposed):
        axis = name[-1]
        before, after = getattr(source, axis), getattr(own, axis)
        how = "" if before == after else f"{before} -> {after} along {axis}, {owner.policy}"
        return resample_axis(value, before, after, owner.policy), how
    how = "" if same else f"{format_size(source)} -> {format_size(own)}, {owner.policy}"
    if isinstance(owner, Absolute):
        rows = value.shape[1] - source.h * source.w  # of prefix tokens
        head, patches = value[:, : min(rows, own.prefix)], value[:, rows:]
        if not same:
            patches = resample_embedding(patches[0].unflatten(0, source[:2]), own)[None]
        return torch.cat((head, value.new_zeros(1, own.prefix - head.shape[1], value.shape[2]), patches), 1), how
    wanted, rows = own.classes() - own.offset_classes(), source.offset_classes()
    if len(value) > rows and not wanted:
        raise ValueError(f"{name} has three rows for prefix tokens, the model has none: build it with class_token=True")
    tail = value[rows:] if len(value) > rows else value.new_zeros(wanted, value.shape[1])
    return torch.cat((resample_table(value[:rows], source, own, owner.policy), tail)), how
