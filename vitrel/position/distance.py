"""Lengths of all offsets of a grid, for the encodings that decay with distance (alibi, log_decay, fire, lookhere)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrel.geometry import cached_geometry
from vitrel.grid import Grid
from vitrel.position.terms import upcast

DISTANCES = ("euclidean", "l1", "squared")
POLICIES = ("keep", "renormalize")  # distances in patches, or in units of side / trained side


def scaled_distances(
    trained: Grid,
    grid: Grid,
    policy: str,
    kind: str,
    device: torch.device,
    axis: str = "hw",
    direction: Tensor | None = None,
) -> Tensor:
    """Return the lengths of the R offsets between patches (no prefix classes), [R] float32, or [H, R] with `direction`.

    The order is that of `Grid.offsets`. Without direction the result is shared: do not change it in place.

    Args:
        trained: the training grid.
        grid: the grid whose offsets are measured.
        policy: "keep", offsets in patches, or "renormalize", offsets multiplied by trained side / current side.
        kind: "euclidean", "l1" or "squared" (the square of "euclidean").
        device: of the result.
        axis: "hw" for all pairs of a row and a column offset, "h" or "w" for the offsets along that axis alone.
        direction: as in `distances`.
    """
    key = (*grid[:2], trained[:2], policy, axis)
    if direction is None:
        return _scaled_distances(*key, kind, device=device)
    return distances(_scaled_offsets(*key, device=device), kind, direction)


@cached_geometry
def _scaled_offsets(h: int, w: int, trained: tuple[int, int], policy: str, axis: str, device: torch.device) -> Tensor:
    """Return all offsets (dy, dx) between patches, [R, 2] float32; for axis "h" those of dx = 0, for "w" those of dy = 0.

    They are in the order of `Grid.offsets`, in patches with the policy "keep", else multiplied by trained side / side;
    `trained` is (h, w) of the training grid.
    """
    offsets = Grid(h, w).offsets(axis, device).float()
    if axis != "hw":
        offsets = F.pad(offsets[:, None], (0, 1) if axis == "h" else (1, 0))
    if policy == "keep":
        return offsets
    return torch.stack((offsets[:, 0] * (trained[0] / h), offsets[:, 1] * (trained[1] / w)), -1)


@cached_geometry
def _scaled_distances(
    h: int, w: int, trained: tuple[int, int], policy: str, axis: str, kind: str, device: torch.device
) -> Tensor:
    return distances(_scaled_offsets(h, w, trained, policy, axis, device=device), kind)


def distances(offsets: Tensor, kind: str, direction: Tensor | None = None) -> Tensor:
    """Return the lengths of offsets, [R, 2] -> [R], or [H, R] with `direction`.

    Args:
        offsets: (dy, dx), query minus key, [R, 2].
        kind: "euclidean", "l1" or "squared" (the square of "euclidean").
        direction: [4, H], logarithms of factors by which each head multiplies a component of the offset before its length is
            taken: dy > 0 (key above), dy < 0 (below), dx > 0 (left), dx < 0 (right).
    """
    if direction is not None:
        up, down, left, right = upcast(direction).exp()[..., None]  # [H, 1] each
        y, x = offsets.unbind(-1)
        offsets = torch.stack((y * torch.where(y > 0, up, down), x * torch.where(x > 0, left, right)), -1)  # [H, R, 2]
    if kind == "euclidean":
        return torch.linalg.vector_norm(offsets, dim=-1)  # its gradient at 0 is 0, not NaN
    return (offsets.abs() if kind == "l1" else offsets.square()).sum(-1)


@cached_geometry
def alibi_slopes(num_heads: int, device: torch.device) -> Tensor:
    """Return ALiBi's slopes 2^(-8 n / H) for heads n = 1..H, [H], also where H is not a power of two."""
    return 2.0 ** (-8.0 * (torch.arange(num_heads, device=device) + 1).float() / num_heads)
