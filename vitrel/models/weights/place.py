"""Where a file's tables, embeddings and frequencies go in a model, and how they come to the model's grid.

What makes the bias lives in `attn` elsewhere, in `position` here. A table or an embedding trained on another grid is resampled
once, into the model's own: tables by their `resize` policy, an absolute embedding bicubic and antialiased (DeiT).
"""

import math
import re
from typing import Any

import torch
from torch import Tensor, nn

from vitrel.grid import Grid
from vitrel.models.weights.draft import Draft
from vitrel.models.weights.record import recorded_grid
from vitrel.position import PositionEncoding
from vitrel.position.absolute import Absolute
from vitrel.position.decomposed import Decomposed
from vitrel.position.resize import resize_axis, resize_embedding, resize_table
from vitrel.position.table import OffsetTable

_ZEROS = "rows of zeros for the prefix tokens"
_IN_ATTENTION = re.compile(r"(.*)attn\.(relative_position_bias_table|cpb_mlp\..*|rel_pos_[hw]|freqs)")


def place(
    draft: Draft,
    model: nn.Module,
    source_grid: tuple[int, int] | None,
    key_minus_query: bool,
    record: dict[str, dict[str, Any]],
) -> None:
    """Move what belongs to position to the model's own names, then resample what was trained on another grid."""
    own = [*model.state_dict()]
    shared = "shared_position.relative_position_bias_table"
    if shared in draft and getattr(model, "shared_position", None) is None:
        targets = [name for name in own if re.fullmatch(r"blocks\.\d+\.position\..*relative_position_bias_table", name)]
        if targets:
            draft.spread(shared, {name: draft[shared].clone() for name in targets}, "one table for all blocks, copied to each")
    for name in [*draft.items]:
        target = _own_name(name, own)
        if target != name:
            draft.move(name, target)
    for module_name, module in model.named_modules():
        named = source_grid is not None and not _in_plain_window(model, module_name)
        grid = Grid(*source_grid) if named else recorded_grid(record, module_name)
        if isinstance(module, OffsetTable | Absolute | Decomposed):
            for parameter in (f"{module_name}.{n}" for n, _ in module.named_parameters()):
                if parameter in draft:
                    _fit(draft, parameter, module, grid, key_minus_query)


def _own_name(name: str, own: list[str]) -> str:
    """The model's name for `name`, inside a composition too; `name` itself where there is none."""
    if name in own:
        return name
    if name == "pos_embed":
        return next((n for n in own if n.startswith("pos_embed.") and n.endswith(".pos_embed")), name)
    part = _IN_ATTENTION.fullmatch(name) or re.fullmatch(r"()shared_position\.(.*)", name)
    if part is None:
        return name
    place = f"{part[1]}position." if "attn." in name else "shared_position."
    return next((n for n in own if n.startswith(place) and n.endswith(f".{part[2]}")), name)


def _in_plain_window(model: nn.Module, name: str) -> bool:
    """Whether the encoding is of a windowed block of a plain trunk, whose window is no part of the image's grid."""
    block = re.match(r"blocks\.\d+", name)
    return block is not None and model.get_submodule(block[0]).window is not None


def _fit(draft: Draft, name: str, owner: PositionEncoding, grid: Grid | None, key_minus_query: bool) -> None:
    value, shape = draft[name], owner.state_dict()[name.rpartition(".")[2]].shape
    reverse = key_minus_query and not isinstance(owner, Absolute)
    if grid is None and value.shape == shape and not reverse:
        return
    rules = ["offsets were key minus query: reversed"] if reverse else []
    if isinstance(owner, Absolute):
        value, source, rule = _fit_embedding(name, value, owner, grid)
    elif isinstance(owner, Decomposed):
        value, source, rule = _fit_axis(name, value, owner, grid, reverse)
    else:
        value, source, rule = _fit_table(name, value, owner, grid, reverse)
    rules += [rule] if rule else []
    resized = "" if source[:2] == owner.grid[:2] else f"{_by(source)} -> {_by(owner.grid)}, {owner.resize}"
    if rules or resized:
        draft.change(name, value, "; ".join(rules) or "resampled", resized)


def _fit_table(name: str, value: Tensor, owner: OffsetTable, grid: Grid | None, reverse: bool) -> tuple[Tensor, Grid, str]:
    wants, rows = 3 if owner.grid.prefix else 0, len(value)
    candidates = [grid] if grid is not None else [owner.grid, *(Grid(n, n) for p in (3, 0) if (n := _odd_side(rows - p)))]
    source = next((g for g in candidates if rows - g.offset_classes() in (0, 3)), None)
    if source is None:
        raise ValueError(_unknown_grid(name, rows, grid, "offsets", 0 if grid is None else grid.offset_classes()))
    prefix = rows - source.offset_classes()
    if prefix and not wants:
        raise ValueError(f"{name} has three rows for prefix tokens, the model has none: class_token=True gives one")
    lattice = value[: rows - prefix].flip(0) if reverse else value[: rows - prefix]
    fitted = resize_table(lattice, source, owner.grid, owner.resize)
    tail = value[rows - prefix :] if prefix else value.new_zeros(wants, value.shape[1])
    return torch.cat((fitted, tail)), source, "" if prefix == wants else _ZEROS


def _fit_embedding(name: str, value: Tensor, owner: Absolute, grid: Grid | None) -> tuple[Tensor, Grid, str]:
    wants, rows = owner.grid.prefix, value.shape[1]
    counts = dict.fromkeys((wants, 0, 1))  # rows for all prefix tokens, for none (DeiT III), for the class token (DINOv2)
    candidates = [grid] if grid is not None else [owner.grid, *(Grid(n, n) for p in counts if (n := _side(rows - p)))]
    source = next((g for g in candidates if rows - g.h * g.w in counts), None)
    if source is None:
        raise ValueError(_unknown_grid(name, rows, grid, "tokens", 0 if grid is None else grid.h * grid.w))
    prefix = rows - source.h * source.w
    patches = value[:, prefix:]
    if source[:2] != owner.grid[:2]:
        patches = resize_embedding(patches[0].unflatten(0, source[:2]), owner.grid)[None]
    head = value[:, : min(prefix, wants)]
    zeros = value.new_zeros(1, wants - head.shape[1], value.shape[2])
    rule = "" if prefix == wants else _ZEROS if prefix < wants else "row of the class token left out"
    return torch.cat((head, zeros, patches), 1), source, rule


def _fit_axis(name: str, value: Tensor, owner: Decomposed, grid: Grid | None, reverse: bool) -> tuple[Tensor, Grid, str]:
    axis, rows = name[-1], len(value)
    if rows % 2 == 0:
        raise ValueError(f"{name} has {rows} rows, an axis of n patches has 2n-1 offsets: the table is of another kind")
    source = (rows + 1) // 2
    if grid is not None and getattr(grid, axis) != source:
        raise ValueError(_unknown_grid(name, rows, grid, f"offsets along {axis}", 2 * getattr(grid, axis) - 1))
    fitted = resize_axis(value.flip(0) if reverse else value, source, getattr(owner.grid, axis), owner.resize)
    return fitted, owner.grid._replace(**{axis: source}), ""


def _unknown_grid(name: str, rows: int, grid: Grid | None, what: str, has: int) -> str:
    if grid is None:
        return f"{name} has {rows} rows, which no square grid gives: pass source_grid=(h, w), the grid it was trained on"
    return f"{name} has {rows} rows, but a {_by(grid)} grid has {has} {what}: pass the source_grid it was trained on"


def _by(grid: Grid) -> str:
    return f"{grid.h}x{grid.w}"


def _odd_side(rows: int) -> int | None:
    """n where `rows` is (2n-1)(2n-1)."""
    side = _side(rows)
    return (side + 1) // 2 if side and side % 2 else None


def _side(rows: int) -> int | None:
    side = math.isqrt(max(rows, 0))
    return side if side and side * side == rows else None
