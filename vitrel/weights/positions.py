"""Rename a file's tables, embeddings and frequencies to the model's names, and resample them to the model's grid.

Other code holds bias tables in `attn`, vitrel in `position`. Tables are resampled by their `policy`, an absolute
embedding bicubic and antialiased (DeiT).
"""

import math
import re
from typing import Any

import torch
from torch import Tensor, nn

from vitrel.common.sizes import format_size
from vitrel.grid import Grid
from vitrel.position import PositionEncoding
from vitrel.position.absolute import Absolute
from vitrel.position.decomposed import Decomposed
from vitrel.position.resample import resample_axis, resample_embedding, resample_table
from vitrel.position.table import OffsetTable
from vitrel.weights.record import recorded_grid
from vitrel.weights.tensors import FileTensors

_ZEROS = "rows of zeros for the prefix tokens"
_IN_ATTENTION = re.compile(r"(.*)attn\.(relative_position_bias_table|cpb_mlp\..*|rel_pos_[hw]|freqs)")


def rename_positions(tensors: FileTensors, model: nn.Module) -> None:
    """Rename tensors of position encodings to the model's names; a table shared by all blocks is copied to unshared ones."""
    own = [*model.state_dict()]
    shared = "shared_position.relative_position_bias_table"
    if shared in tensors and getattr(model, "shared_position", None) is None:
        targets = [name for name in own if re.fullmatch(r"blocks\.\d+\.position\..*relative_position_bias_table", name)]
        if targets:
            tensors.spread(
                shared, {name: tensors[shared].clone() for name in targets}, "one table for all blocks, copied to each"
            )
    for name in [*tensors.items]:
        target = _own_name(name, own)
        if target != name:
            tensors.move(name, target)


def resample_positions(
    tensors: FileTensors,
    model: nn.Module,
    source_grid: tuple[int, int] | None,
    record: dict[str, dict[str, Any]],
) -> None:
    """Resample a file's tables and embeddings, in place, to the model's grid.

    The training grid of each is, in this order, the first with as many rows as the tensor (with or without rows for prefix
    tokens): source_grid, that in `record`, the model's, a square one.

    Args:
        tensors: with the model's names.
        model: whose encodings read the tensors.
        source_grid: as in `load_pretrained`.
        record: of the file's encodings (vitrel.weights.record).

    Raises:
        ValueError: there is no such grid, or source_grid is that of no tensor.
    """
    learned = [(f"{part}.{n}", m, recorded_grid(record, part)) for part, m in model.named_modules() for n in _learned(m)]
    learned = [(name, owner, recorded) for name, owner, recorded in learned if name in tensors]
    named = None if source_grid is None else Grid(*source_grid)
    if named is not None and not any(_fits(named, name, tensors[name], owner) for name, owner, _ in learned):
        name, owner, _ = (*learned, ("the file", None, None))[0]
        rows = f"has {_rows(tensors[name], owner)} rows for positions" if learned else "has no table or embedding"
        raise ValueError(f"{name} {rows}, which is no {format_size(named)} grid: pass the source_grid it was trained on")
    for name, owner, recorded in learned:
        candidates = [g for g in (named, recorded, owner.grid) if g is not None] + _squares(name, tensors[name], owner)
        source = next((g for g in candidates if _fits(g, name, tensors[name], owner)), None)
        if source is None:
            raise ValueError(
                f"{name} has {_rows(tensors[name], owner)} rows, which no square grid gives: pass source_grid=(h, w), its "
                "training grid in patches, or to vitrel.load img_size=(h, w), the training size in pixels; or build the model "
                "with the file's class_token, dist_token and reg_tokens"
            )
        _resample(tensors, name, owner, source)


def _own_name(name: str, own: list[str]) -> str:
    """Return the model's name of a tensor, also inside a composition; `name` itself if it has none."""
    if name in own:
        return name
    if name == "pos_embed":
        return next((n for n in own if n.startswith("pos_embed.") and n.endswith(".pos_embed")), name)
    part = _IN_ATTENTION.fullmatch(name) or re.fullmatch(r"()shared_position\.(.*)", name)
    if part is None:
        return name
    prefix = f"{part[1]}position." if "attn." in name else "shared_position."
    return next((n for n in own if n.startswith(prefix) and n.endswith(f".{part[2]}")), name)


def _learned(owner: nn.Module) -> list[str]:
    """Return the parameter names of a `table`, `decomposed` or absolute encoding, which are resampled; [] for others."""
    return [n for n, _ in owner.named_parameters()] if isinstance(owner, OffsetTable | Absolute | Decomposed) else []


def _rows(value: Tensor, owner: PositionEncoding) -> int:
    return value.shape[1] if isinstance(owner, Absolute) else len(value)


def _extra(owner: PositionEncoding) -> tuple[int, ...]:
    """Return the numbers of rows for prefix tokens that a file's tensor may have."""
    if isinstance(owner, Absolute):  # for all prefix tokens, for none (DeiT III), for the class token (DINOv2)
        return owner.grid.prefix, 0, 1
    return (3, 0) if isinstance(owner, OffsetTable) else (0,)


def _fits(grid: Grid, name: str, value: Tensor, owner: PositionEncoding) -> bool:
    """Return whether a file's tensor has as many rows as `grid` needs, with or without rows for prefix tokens."""
    axis = name[-1] if isinstance(owner, Decomposed) else "hw"
    own = grid.h * grid.w if isinstance(owner, Absolute) else grid.offset_classes(axis)
    return _rows(value, owner) - own in _extra(owner)


def _squares(name: str, value: Tensor, owner: PositionEncoding) -> list[Grid]:
    """Return the square grids with as many rows as a file's tensor."""
    sides = []
    for rows in (_rows(value, owner) - extra for extra in _extra(owner)):
        side = rows if isinstance(owner, Decomposed) else math.isqrt(max(rows, 0))
        sides.append(side if isinstance(owner, Absolute) else (side + 1) // 2)
    return [grid for grid in (Grid(n, n) for n in sides if n > 0) if _fits(grid, name, value, owner)]


def _resample(tensors: FileTensors, name: str, owner: PositionEncoding, source: Grid) -> None:
    """Resample one of the tensors in place from `source` to its encoding's grid."""
    value, own, rule = tensors[name], owner.grid, ""
    if isinstance(owner, Decomposed):
        axis = name[-1]
        sides = getattr(source, axis), getattr(own, axis)
        value = resample_axis(value, *sides, owner.policy)
        resampled = "" if sides[0] == sides[1] else f"{sides[0]} -> {sides[1]} along {axis}, {owner.policy}"
    else:
        value, rule = (_resampled_embedding if isinstance(owner, Absolute) else _resampled_table)(name, value, owner, source)
        resampled = "" if source[:2] == own[:2] else f"{format_size(source)} -> {format_size(own)}, {owner.policy}"
    if rule or resampled:
        tensors.change(name, value, rule or "resampled", resampled)


def _resampled_table(name: str, value: Tensor, owner: OffsetTable, source: Grid) -> tuple[Tensor, str]:
    if value.dim() != 2:
        raise IndexError(f"{name} has shape {tuple(value.shape)}, not [offsets, heads]")
    wants, rows = owner.grid.classes() - owner.grid.offset_classes(), source.offset_classes()
    prefix = len(value) - rows
    if prefix and not wants:
        raise ValueError(f"{name} has three rows for prefix tokens, the model has none: build it with class_token=True")
    fitted = resample_table(value[:rows], source, owner.grid, owner.policy)
    tail = value[rows:] if prefix else value.new_zeros(wants, value.shape[1])
    return torch.cat((fitted, tail)), "" if prefix == wants else _ZEROS


def _resampled_embedding(name: str, value: Tensor, owner: Absolute, source: Grid) -> tuple[Tensor, str]:
    wants, prefix = owner.grid.prefix, value.shape[1] - source.h * source.w
    patches = value[:, prefix:]
    if source[:2] != owner.grid[:2]:
        patches = resample_embedding(patches[0].unflatten(0, source[:2]), owner.grid)[None]
    head = value[:, : min(prefix, wants)]
    zeros = value.new_zeros(1, wants - head.shape[1], value.shape[2])
    rule = "" if prefix == wants else _ZEROS if prefix < wants else "row of the class token left out"
    return torch.cat((head, zeros, patches), 1), rule
