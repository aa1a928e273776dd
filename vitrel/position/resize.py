"""Learned tables and embeddings from one grid to another: the only place where a position parameter is interpolated.

An axis of offsets is resampled by a few taps per target row, a gather and a weighted sum: elementwise, so neither autocast nor
TF32 rounds the table, and without a branch on the size, so no size costs a compiled graph of its own. An axis that does not
grow is always read exactly, as the centre of the trained one; the policy decides what happens on an axis that grows.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrel.grid import Grid
from vitrel.position.clip import clipped_rows
from vitrel.position.terms import check_choice, wide

POLICIES = ("geometric", "clip", "bicubic")


def resize_axis(rows: Tensor, source: int, target: int, policy: str) -> Tensor:
    """Rows of a table over one axis of offsets, [..., 2*source-1, X] -> [..., 2*target-1, X].

    `source`, `target`: length of the axis in patches. Policies for target > source:
    clip: a far offset reads the edge row. geometric: trained rows are spread at geometrically growing distances, offsets 0 and
    +-1 staying exact, linear in between (BEiT; timm's resize_rel_pos_bias_table). bicubic: the whole function stretched, as
    torch's interpolate without aligned corners (Microsoft Swin). linear: the same, linear (MViTv2, SAM).
    """
    if not torch.compiler.is_compiling() and source == target:
        return rows
    exact = clipped_rows(target, source - 1, rows.device)
    if check_choice("resize_axis", "policy", policy, ("clip", *_TAPS)) == "clip":
        return rows.index_select(-2, exact)
    taps, weights = _TAPS[policy](source, target, rows.device)  # [K, 2*target-1] each
    grows = torch.ones((), dtype=torch.int64, device=rows.device) * target > source
    exact_type = torch.promote_types(rows.dtype, torch.float32)  # half-precision rows are rounded once, at the end
    out = torch.zeros((), dtype=exact_type, device=rows.device)
    for k, (tap, weight) in enumerate(zip(taps, weights, strict=True)):
        tap = torch.where(grows, tap, exact)
        weight = torch.where(grows, weight.to(exact_type), 1.0 if k == 0 else 0.0)
        out = out + rows.index_select(-2, tap) * weight[:, None]
    return out.to(rows.dtype)


def resized_axes(key: str, policy: str, trained: Grid, grid: Grid, width: int) -> dict[str, int]:
    """PositionEncoding.resized of one table per axis, each row of `width` values: what the axes that grow interpolate."""
    grown = [axis for axis in "hw" if getattr(grid, axis) > getattr(trained, axis)]
    count = sum(trained.offset_classes(axis) for axis in grown) * width
    return {f"{key} {policy}": 0 if policy == "clip" else count} if grown else {}


def resize_table(table: Tensor, source: Grid, target: Grid, policy: str) -> Tensor:
    """A table over offsets (dy, dx) without prefix rows, [(2h-1)(2w-1), H] -> [(2h'-1)(2w'-1), H]."""
    lattice = wide(table)  # rounded once, after both axes
    lattice = lattice.view(2 * source.h - 1, 2 * source.w - 1, table.shape[-1])
    lattice = resize_axis(lattice, source.w, target.w, policy)
    lattice = resize_axis(lattice.flatten(1), source.h, target.h, policy)  # [2h'-1, (2w'-1) H]
    return lattice.view(-1, table.shape[-1]).to(table.dtype)


def resize_embedding(embedding: Tensor, target: Grid) -> Tensor:
    """An absolute embedding, [h, w, C] -> [h'*w', C], by antialiased bicubic interpolation (DeiT, timm)."""
    image = wide(embedding.permute(2, 0, 1)[None])  # [1, C, h, w]
    image = F.interpolate(image, size=(target.h, target.w), mode="bicubic", antialias=True, align_corners=False)
    return image[0].flatten(1).mT.to(embedding.dtype)


def sample_embedding(embedding: Tensor, at: Tensor) -> Tensor:
    """An absolute embedding [h, w, C] at (y, x) [n, 2], in patches -> [n, C], bilinear; beyond the border, its edge."""
    (h, w, _), rows, out = embedding.shape, wide(embedding).flatten(0, 1), 0
    for y, down in zip(*_between(at[:, 0], h), strict=True):
        for x, right in zip(*_between(at[:, 1], w), strict=True):
            out = out + rows.index_select(0, y * w + x) * (down * right)[:, None]
    return out.to(embedding.dtype)


def _linear(source: int, target: int, device: torch.device) -> tuple[Tensor, Tensor]:
    at = (torch.arange(2 * target - 1, device=device) + 0.5) * ((2 * source - 1) / (2 * target - 1)) - 0.5
    return _between(at, 2 * source - 1)


def _between(at: Tensor, length: int) -> tuple[Tensor, Tensor]:
    at = at.clamp(0, length - 1)
    below = at.floor()
    taps = torch.stack((below, below + 1)).long().clamp(max=length - 1)
    return taps, torch.stack((1 - (at - below), at - below))


def _bicubic(source: int, target: int, device: torch.device) -> tuple[Tensor, Tensor]:
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
    n, reach = source - 1, target - 1  # trained and wanted offsets on either side of 0
    offset = torch.arange(1 - target, target, device=device)
    if n == 0:  # a single trained row: nothing to spread
        return torch.zeros_like(offset)[None], torch.ones_like(offset, dtype=torch.float32)[None]
    # Ratio q of the distances 1, 1+q, 1+q+q^2, ...: bisected on tensors, for a float would bake the size into a graph.
    dtype = torch.float32 if device.type == "mps" else torch.float64
    step = torch.arange(n, device=device, dtype=dtype)
    low, high = torch.full((), 1.01, dtype=dtype, device=device), torch.full((), 1.5, dtype=dtype, device=device)
    for _ in range(19):  # as the published code: until the bracket is below 1e-6
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
