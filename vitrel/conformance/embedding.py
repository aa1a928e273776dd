"""Embeddings that are added to tokens: the parameter behind one, and the rule by which it is resampled from that to a grid."""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrel.common.sizes import Size, format_size
from vitrel.conformance.survey import Embedding, Survey

SAME_ROWS = 0.01  # share of the standard deviation: bicubic kernels of two libraries differ by less
MODES = ("bicubic", "bilinear")


class Resampled(NamedTuple):
    """How an embedding follows from its master, which is its parameter or else the embedding at the native size."""

    kind: str  # "right", "centers" (patch centers move), "error", or "" if no rule is known
    rule: str  # in words, as "bicubic, antialias"; "" if none is known
    nearest: float  # difference from what the rule gives (without a rule: the nearest right one), in standard deviations


class Derived(NamedTuple):
    """An embedding at one image size, and how it follows from its master: its parameter, or else that at the native size."""

    size: Size
    found: Embedding
    how: Resampled | None  # None: the parameter is no map, and the native size was not examined
    master: Embedding | None
    held: bool  # the master is the parameter


def single_axis(found: Embedding) -> bool:
    """Return whether every channel of an embedding varies along rows only or along columns only, as sines and cosines do."""
    rows, columns = (found.patches.std(axis, correction=0).amax(0) for axis in (0, 1))
    scale = found.patches.std().clamp(min=1e-9)
    return bool((torch.minimum(rows, columns) < 1e-3 * scale).all())


def difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two embeddings, divided by the standard deviation of `b`; inf if their shapes differ."""
    if a.shape != b.shape:
        return math.inf
    return float((a.float() - b.float()).abs().max() / b.float().std().clamp(min=1e-9))


def held(found: Embedding, model: nn.Module, grid: Size) -> Embedding | None:
    """Return the parameter or buffer that an embedding is made of, as a map [h, w, C]; None if it is no map, or not known.

    A sequence of rows is read as a map of `grid` (h, w), after rows of prefix tokens; a 4-D parameter has a grid of its own.
    """
    value = {**dict(model.named_parameters()), **dict(model.named_buffers())}.get(found.parameter)
    channels = found.patches.shape[-1]
    if value is None or channels not in value.shape:
        return None
    if value.dim() == 4 and len(value) == 1:
        rows = value[0] if value.shape[-1] == channels else value[0].permute(1, 2, 0)
        return found._replace(grid=tuple(rows.shape[:2]), patches=rows) if rows.shape[-1] == channels else None
    rows = value.squeeze(0) if value.dim() == 3 else value
    if rows.dim() != 2 or rows.shape[1] != channels or len(rows) < grid[0] * grid[1]:
        return None
    prefix = len(rows) - grid[0] * grid[1]
    return Embedding(found.where, grid, rows[prefix:].unflatten(0, grid), rows[:prefix], found.parameter)


def derived(surveys: dict[Size, Survey], native: Size, model: nn.Module) -> list[Derived]:
    """Return every embedding at every size, with its master and the rule by which it follows from that.

    The master is the model's parameter if the embedding at the native size (or the first, if that was not examined) follows
    from it, else the embedding at the native size; without either, master and rule are None. Embedding n at one size belongs to
    n at the others; surplus ones are left out. `native` is the image size that the model was built for, as its parameters are.
    """
    found = []
    for number in range(min(len(one.embeddings) for one in surveys.values())):
        at = {size: one.embeddings[number] for size, one in surveys.items()}
        size, first = next((pair for pair in at.items() if pair[0] == native), next(iter(at.items())))
        stride = size[0] // first.grid[0]
        master = held(first, model, (native[0] // stride, native[1] // stride))
        parameter = master is not None and bool(resampled(master, first).kind)
        if not parameter:
            master = first if size == native else None
        for size, one in at.items():
            found.append(Derived(size, one, resampled(master, one) if master else None, master, parameter))
    return found


def resampled(master: Embedding, found: Embedding) -> Resampled:
    """Return the rule by which `found` follows from `master`: a right one, one that moves patch centers, or a common error.

    The first whose `difference` is below SAME_ROWS is taken, in this order; kind and rule are "" if none is.
    """
    nearest = math.inf
    for kind, rules in (("right", right_rules), ("centers", _off_center), ("error", _errors)):
        for rule, expected in rules(master, found.grid):
            apart = difference(expected.to(found.patches), found.patches)
            if apart < SAME_ROWS:
                return Resampled(kind, rule, apart)
            nearest = min(nearest, apart) if kind == "right" else nearest
    return Resampled("", "", nearest)


def interpolated(native: Tensor, grid: Size, offset: float = 0.0, **how: object) -> Tensor:
    """Return an embedding [h0, w0, C] at another grid, [h, w, C], by F.interpolate with the keywords `how`.

    With an `offset` it is called with scale factors, (h + offset) / h0 and (w + offset) / w0, instead of the size.
    """
    image = native.permute(2, 0, 1)[None].float()
    if offset:
        factors = [(n + offset) / m for n, m in zip(grid, image.shape[-2:], strict=True)]
        out = F.interpolate(image, scale_factor=factors, recompute_scale_factor=False, **how)
    else:
        out = F.interpolate(image, size=grid, **how)
    return out[0].permute(1, 2, 0)


def _of_square(master: Embedding, grid: Size, **how: object) -> Tensor:
    """Return an embedding resampled to a square of the longer side and cropped to `grid` (h, w), as NaFlexViT and RADIO do."""
    return interpolated(master.patches, (max(grid), max(grid)), **how)[: grid[0], : grid[1]]


def right_rules(master: Embedding, grid: Size) -> Iterator[tuple[str, Tensor]]:
    """Yield (rule in words, embedding [h, w, C]) of right rules: "unchanged" on the master's grid, else resampled or cut."""
    if grid == master.grid:
        yield "unchanged", master.patches
        return
    smaller = any(n < m for n, m in zip(grid, master.grid, strict=True))
    for antialias in (smaller, not smaller):
        for mode in MODES:
            how = dict(mode=mode, antialias=antialias)
            name = f"{mode}{', antialias' * antialias}"
            yield name, interpolated(master.patches, grid, **how)
            yield f"{name}, keeping the aspect ratio", _of_square(master, grid, **how)
    if all(n <= m for n, m in zip(grid, master.grid, strict=True)):
        yield "cropped", master.patches[: grid[0], : grid[1]]


def _off_center(master: Embedding, grid: Size) -> Iterator[tuple[str, Tensor]]:
    """Yield (rule in words, embedding [h, w, C]) for rules that move patch centers: align_corners, or inexact scale factors."""
    for mode in MODES:
        corner = interpolated(master.patches, grid, mode=mode, align_corners=True)
        name = f"{mode} with align_corners, which puts the outer patches at the borders"
        yield name, corner
        yield f"{name}, keeping the aspect ratio", _of_square(master, grid, mode=mode, align_corners=True)
        for antialias in (False, True):
            for offset in (0.1, 0.01, 0.001, 0.5):
                moved = interpolated(master.patches, grid, offset, mode=mode, antialias=antialias)
                yield f"{mode}{', antialias,' * antialias} by a scale factor of the size plus {offset}", moved


def _errors(master: Embedding, grid: Size) -> Iterator[tuple[str, Tensor]]:
    """Yield (error, embedding [h, w, C]) for errors: rows cut, zeros added, axes exchanged or reversed, a square assumed."""
    count, other = grid[0] * grid[1], grid[::-1]
    rows = torch.cat((master.prefix.to(master.patches), master.patches.flatten(0, 1)))
    for first in dict.fromkeys((len(master.prefix), *range(len(master.prefix) + 1))):
        if first + count <= len(rows):
            name = f"rows {first} to {first + count - 1} of {len(rows)}, cut and read as {format_size(grid)}"
            yield name, rows[first : first + count].unflatten(0, grid)
    inside = master.patches[: grid[0], : grid[1]]
    yield "cropped, with zeros beyond it", F.pad(inside, (0, 0, 0, grid[1] - inside.shape[1], 0, grid[0] - inside.shape[0]))
    side = math.isqrt(master.grid[0] * master.grid[1])
    square = side * side == master.grid[0] * master.grid[1] and master.grid != (side, side)
    for mode, antialias in itertools.product(MODES, (False, True)):
        how = dict(mode=mode, antialias=antialias)
        exchanged, right = (interpolated(master.patches, g, **how) for g in (other, grid))
        yield f"height and width exchanged: {mode} to {format_size(other)} patches, transposed", exchanged.transpose(0, 1)
        yield f"{mode} to {format_size(other)} patches, read as {format_size(grid)}", exchanged.reshape(*grid, -1)
        yield f"{mode} of the transposed embedding", interpolated(master.patches.transpose(0, 1), grid, **how)
        yield f"rows reversed, {mode}", right.flip(0)
        yield f"columns reversed, {mode}", right.flip(1)
        yield f"rows and columns reversed, {mode}", right.flip(0, 1)
        if square:
            wrong = master.patches.flatten(0, 1).unflatten(0, (side, side))
            yield f"{mode} of the embedding read as {side}x{side}", interpolated(wrong, grid, **how)
