"""Resampling of learned tables and embeddings to another grid: the only place where a position parameter is interpolated.

Every row of the target is a weighted sum of a few source rows, called its taps. They depend on the two grids and the policy
only, so they are cached geometry (vitrel.geometry). The sum is not rounded by autocast or TF32, and a new size needs no new
compiled graph. An axis that does not grow is read exactly, as the center of the trained axis; the policy applies to one that
grows.

Offsets clipped to a radius are read here too: all farther offsets share the edge row (Shaw et al., arXiv 1803.02155).
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrel.geometry import cached_geometry, is_known, is_traced
from vitrel.grid import Grid, same_size
from vitrel.position.terms import check_choice, pad_prefix, upcast

POLICIES = ("geometric", "clip", "bicubic")


class Taps(NamedTuple):
    """Indices and weights of the K source rows whose weighted sum is a target row, for T target rows: [T, K] each."""

    index: Tensor  # type: ignore[assignment]  # [T, K] int64
    weight: Tensor  # [T, K] float32


def resample_axis(rows: Tensor, source: int, target: int, policy: str) -> Tensor:
    """Resample a table over one axis of offsets, [2*source-1, X] -> [2*target-1, X], X numbers per row.

    With target <= source each remaining offset keeps its row, whatever the policy; with equal lengths `rows` is returned.

    Args:
        rows: the table, [2*source-1, X].
        source: length of the table's axis in patches.
        target: length of the new axis in patches.
        policy: how rows are found where target > source. "clip": an offset outside the table reads the edge row. "geometric":
            trained rows are placed at geometrically growing distances, 0 and +-1 staying exact, and interpolated linearly
            (BEiT; timm's resize_rel_pos_bias_table). "bicubic": the table is stretched to the new length, as torch's
            interpolate without aligned corners (Microsoft Swin). "linear": the same with linear interpolation (MViTv2, SAM).
    """
    if is_known(source, target) and source == target:
        return rows
    if check_choice("resample_axis", "policy", policy, ("clip", *_TAPS)) == "clip":
        return rows.index_select(0, clipped_rows(target, source - 1, device=rows.device))
    return _weighted_sum(rows, axis_taps(source, target, policy, device=rows.device))


def resample_table(table: Tensor, source: Grid, target: Grid, policy: str) -> Tensor:
    """Resample a table over offsets (dy, dx), [(2h-1)(2w-1), H] -> [(2h'-1)(2w'-1), H], by `resample_axis` along both axes.

    Further rows, of prefix tokens, follow unchanged in the result. On an equal grid `table` itself is returned.

    Args:
        table: [(2h-1)(2w-1) (+3), H].
        source: grid h x w of the table.
        target: grid h' x w' of the result.
        policy: of `resample_axis`.
    """
    if same_size(source, target):
        return table
    prefix = len(table) - source.offset_classes()
    if check_choice("resample_table", "policy", policy, ("clip", *_TAPS)) == "clip":
        return table.index_select(0, _clipped_lattice(source[:2], target[:2], prefix, device=table.device))
    return _weighted_sum(table, table_taps(source[:2], target[:2], prefix, policy, device=table.device))


@cached_geometry
def axis_taps(source: int, target: int, policy: str, device: torch.device) -> Taps:
    """Return the taps, source rows and weights, by which `resample_axis` computes its rows, for its policies but "clip"."""
    return _padded(_line_taps(source, target, policy, device))


def _line_taps(source: int, target: int, policy: str, device: torch.device) -> Taps:
    """Return the taps of `axis_taps` before they are padded; on an axis that does not grow each row has weight 1 alone."""
    exact = clipped_rows(target, source - 1, device=device)
    taps, weights = (t.mT for t in _TAPS[policy](source, target, device))  # [2*target-1, K] each
    grows = torch.ones((), dtype=torch.int64, device=device) * target > source  # a tensor, to avoid a branch on the size
    first = (torch.arange(taps.shape[1], device=device) == 0).float()
    return Taps(torch.where(grows, taps, exact[:, None]), torch.where(grows, weights.float(), first))


@cached_geometry
def table_taps(source: tuple[int, int], target: tuple[int, int], prefix: int, policy: str, device: torch.device) -> Taps:
    """Return the taps by which `resample_table` computes its rows: rows and weights of all products of taps along y and x.

    Args:
        source: (h, w) of the table in patches.
        target: (h, w) of the result in patches.
        prefix: number of rows that follow and are copied.
        policy: of `resample_axis`, but not "clip".
        device: of the result.
    """
    y, x = (_line_taps(n, m, policy, device) for n, m in zip(source, target, strict=True))
    index = y.index[:, None, :, None] * (2 * source[1] - 1) + x.index[:, None]  # [2h'-1, 2w'-1, K, K]
    weight = y.weight[:, None, :, None] * x.weight[:, None]
    index, weight = (t.flatten(2).flatten(0, 1) for t in (index, weight))  # [(2h'-1)(2w'-1), K*K]
    if not prefix:
        return _padded(Taps(index, weight))
    copied = torch.arange(prefix, device=device)[:, None] + (2 * source[0] - 1) * (2 * source[1] - 1)
    copy_weight = F.pad(torch.ones(prefix, 1, device=device), (0, weight.shape[1] - 1))
    return _padded(Taps(torch.cat((index, copied.expand(-1, index.shape[1]))), torch.cat((weight, copy_weight))))


def _padded(taps: Taps) -> Taps:
    """Return the taps with others of weight 0 added, until each target row has at least 9.

    torch.compile unrolls sums of up to 8 terms and repeats them for every pair of tokens that reads a row; the result of a
    longer sum is stored. In eager mode the added taps cost nothing measurable.
    """
    missing = max(0, 9 - taps.index.shape[1])
    return Taps(torch.cat((taps.index, taps.index[:, :1].expand(-1, missing)), 1), F.pad(taps.weight, (0, missing)))


def clip_table(table: Tensor, radius: int, axis: str, grid: Grid, mirrored: bool = False) -> Tensor:
    """Return the rows of a table for all R offset classes of `grid` along one axis, [H, R, D]; zero for prefix classes.

    Args:
        table: [2*radius+1, D] for all heads (the result then has H = 1), or [H, 2*radius+1, D].
        radius: in patches, to which offsets are clipped.
        axis: "h" or "w".
        grid: the grid whose offset classes are read.
        mirrored: an offset, query minus key, reads the row of the opposite offset.
    """
    index = clipped_rows(getattr(grid, axis), radius, device=table.device)
    rows = pad_prefix(table.index_select(-2, index.flip(0) if mirrored else index), grid, -2)
    return rows if rows.dim() == 3 else rows[None]


@cached_geometry
def clipped_rows(length: int, radius: int, device: torch.device) -> Tensor:
    """Return the row, clip(offset) + radius, that every offset along `length` patches reads in a table, [2*length-1] int64."""
    return torch.arange(1 - length, length, device=device).clamp(-radius, radius) + radius


@cached_geometry
def _clipped_lattice(source: tuple[int, int], target: tuple[int, int], prefix: int, device: torch.device) -> Tensor:
    """Return for every offset of `target` the index of the row that it reads, if clipped, in a table over those of `source`.

    Both are (h, w) in patches. The indices of the `prefix` rows that follow in the table come last; the type is int64.
    """
    y, x = (clipped_rows(m, n - 1, device=device) for n, m in zip(source, target, strict=True))
    index = (y[:, None] * (2 * source[1] - 1) + x).flatten()
    return torch.cat((index, torch.arange(prefix, device=device) + (2 * source[0] - 1) * (2 * source[1] - 1)))


def _weighted_sum(rows: Tensor, taps: Taps) -> Tensor:
    """Return the sums of rows by the taps of T target rows, [S, X] -> [T, X], in at least float32, then in the type of rows."""
    exact = upcast(rows)
    weight = taps.weight.to(exact.dtype)
    if torch.compiler.is_compiling() or is_traced(rows.device):
        out = (exact.index_select(0, taps.index.flatten()).unflatten(0, taps.index.shape) * weight[..., None]).sum(1)
    else:
        out = F.embedding_bag(taps.index, exact, per_sample_weights=weight, mode="sum")
    return out.to(rows.dtype)


def resampled_axes(key: str, policy: str, trained: Grid, grid: Grid, width: int) -> dict[str, int]:
    """Return {"key policy": number of parameter values resampled} on `grid`, for an encoding with one table per axis.

    Only the tables of axes that grow are resampled. The result is empty if no axis grows; the number is 0 for "clip".

    Args:
        key: name of the encoding.
        policy: of `resample_axis`.
        trained: the training grid.
        grid: the current grid.
        width: number of values in a row of the tables.
    """
    grown = [axis for axis in "hw" if getattr(grid, axis) > getattr(trained, axis)]
    count = sum(trained.offset_classes(axis) for axis in grown) * width
    return {f"{key} {policy}": 0 if policy == "clip" else count} if grown else {}


def resample_embedding(embedding: Tensor, target: Grid) -> Tensor:
    """Resample an absolute embedding, [h, w, C] -> [h'*w', C] of its type, by antialiased bicubic interpolation, as DeiT."""
    image, size = upcast(embedding.permute(2, 0, 1)[None]), (target.h, target.w)  # [1, C, h, w]
    if is_known(target.w) and target.w == 1:  # torch 2.14 resamples the rows of a map of one column wrongly on a CPU
        image = F.interpolate(image.mT, size=size[::-1], mode="bicubic", antialias=True, align_corners=False).mT
    else:
        image = F.interpolate(image, size=size, mode="bicubic", antialias=True, align_corners=False)
    return image[0].flatten(1).mT.to(embedding.dtype)


def sample_embedding(embedding: Tensor, at: Tensor) -> Tensor:
    """Read an absolute embedding at any positions, [h, w, C] -> [n, C] of its type, bilinearly.

    Args:
        embedding: [h, w, C].
        at: positions (y, x) in patches, [n, 2], (0, 0) the first patch; those outside read the border.
    """
    (h, w, _), rows, out = embedding.shape, upcast(embedding).flatten(0, 1), 0
    for y, down in zip(*_between(at[:, 0], h), strict=True):
        for x, right in zip(*_between(at[:, 1], w), strict=True):
            out = out + rows.index_select(0, y * w + x) * (down * right)[:, None]
    return out.to(embedding.dtype)


def _linear(source: int, target: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the two source rows of each of 2*target-1 rows and their weights, [2, 2*target-1] each.

    They stretch a table of 2*source-1 rows linearly, without aligned corners.
    """
    at = (torch.arange(2 * target - 1, device=device) + 0.5) * ((2 * source - 1) / (2 * target - 1)) - 0.5
    return _between(at, 2 * source - 1)


def _between(at: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return the two rows next to each position `at` [T] on an axis of `length` rows, and their linear weights, [2, T] each.

    Positions are in rows, from 0; those outside read the nearest row.
    """
    at = at.clamp(0, length - 1)
    below = at.floor()
    taps = torch.stack((below, below + 1)).long().clamp(max=length - 1)
    return taps, torch.stack((1 - (at - below), at - below))


def _bicubic(source: int, target: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the four source rows of each of 2*target-1 rows and their weights, [4, 2*target-1] each.

    They stretch a table of 2*source-1 rows as torch's bicubic interpolation does without aligned corners.
    """
    last = 2 * source - 2
    at = (torch.arange(2 * target - 1, device=device) + 0.5) * ((2 * source - 1) / (2 * target - 1)) - 0.5
    below = at.floor()
    near = torch.stack([(at - below - k).abs() for k in range(-1, 3)])  # distance to the four taps, [4, 2*target-1]
    a = -0.75  # torch's and OpenCV's cubic convolution
    inner = ((a + 2) * near - (a + 3)) * near * near + 1
    outer = ((near - 5) * near + 8) * near * a - 4 * a
    taps = torch.stack([below.long() + k for k in range(-1, 3)]).clamp(0, last)
    return taps, torch.where(near <= 1, inner, outer)


def _geometric(source: int, target: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the two source rows of each of 2*target-1 rows and their weights, [2, 2*target-1] each; [1, ..] if source is 1.

    They are those of BEiT's linear interpolation between trained rows placed at geometrically growing distances.
    """
    n, reach = source - 1, target - 1  # largest trained and target distance
    offset = torch.arange(1 - target, target, device=device)
    if n == 0:  # a single trained row: nothing to spread
        return torch.zeros_like(offset)[None], torch.ones_like(offset, dtype=torch.float32)[None]
    # Ratio q of the distances 1, 1+q, 1+q+q^2, ...: bisected on tensors, since a float would fix the size in a graph.
    dtype = torch.float32 if device.type == "mps" else torch.float64
    step = torch.arange(n, device=device, dtype=dtype)
    low, high = torch.full((), 1.01, dtype=dtype, device=device), torch.full((), 1.5, dtype=dtype, device=device)
    for _ in range(19):  # as many as the published code, which stops at a bracket below 1e-6
        middle = (low + high) / 2
        far = (middle**step).sum() > reach
        low, high = torch.where(far, low, middle), torch.where(far, middle, high)
    distance = torch.cat((step.new_zeros(1), (middle**step).cumsum(0)))  # [n + 1], of the trained offsets 0..n
    magnitude = offset.abs().to(dtype)
    below = ((magnitude[:, None] >= distance).sum(1) - 1).clamp(0, n - 1)
    weight = ((magnitude - distance[below]) / (distance[below + 1] - distance[below])).clamp(0, 1).float()
    sign = torch.where(offset < 0, -1, 1)
    taps = torch.stack((sign * below, sign * (below + 1))) + n
    return taps, torch.stack((1 - weight, weight))


_TAPS = {"geometric": _geometric, "bicubic": _bicubic, "linear": _linear}
