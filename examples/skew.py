"""The skewing trick (Music Transformer, arXiv 1809.04281, sec. 3.4.1): move content scores by offset class to their keys.

It needs a column of padding, a reshape and a slice instead of a gather. It works along one axis at a time; over both axes at
once it would need 4 times N^2 scores.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrel.grid import Grid


def relative_shift(x: Tensor) -> Tensor:
    """Shift scores by offset to scores by key, [..., M, 2N-1] -> [..., M, N]: out[i, j] = x[i, j - i + M-1]; queries are the
    last M of N.

    Column m has the scores of the offset *key minus query* m - (N-1). ValueError for an even number of columns or more queries
    than keys.
    """
    m, n = x.shape[-2], (x.shape[-1] + 1) // 2
    if x.shape[-1] % 2 == 0 or m > n:
        raise ValueError(f"scores of {m} queries need 2N-1 columns, N at least {m}, one for each offset; got {x.shape[-1]}")
    flat = F.pad(x, (0, 1)).flatten(-2)  # row i begins at 2N i, so x[i, j - i + M-1] is at (2N-1) i + j + M-1
    return flat[..., m - 1 : m - 1 + m * (2 * n - 1)].unflatten(-1, (m, 2 * n - 1))[..., :n]


def skew(scores: Tensor, grid: Grid, axis: str) -> Tensor:
    """Return scores of every query with every key, given those with every offset class of one axis: [..., M, R] -> [..., M, N].

    Equal to `scores.gather(-1, index)` with index = grid.index(axis)[-M:]: offsets are query minus key, in patches, and the
    three prefix classes come last. axis: "h" or "w". Queries are all tokens of the grid or its last whole rows. ValueError for
    the axis "hw", and for other numbers of classes or queries.
    """
    if axis not in ("h", "w"):
        raise ValueError(f"skew works along one axis, 'h' or 'w', not {axis!r}: use one table per axis")
    (h, w, p), m, count = grid, scores.shape[-2], grid.offset_classes(axis)
    if scores.shape[-1] != grid.classes(axis):
        raise ValueError(f"{scores.shape[-1]} offset classes, but {grid} has {grid.classes(axis)} along {axis!r}")
    first = p if m == grid.tokens else 0  # prefix tokens among the queries
    if (m - first) % w or m > grid.tokens or (m > h * w and not first):
        raise ValueError(f"{m} queries are neither all {grid.tokens} tokens of the grid nor its last whole rows of {w}")
    patches = scores[..., first:, :count].flip(-1).unflatten(-2, (-1, w))  # [..., rows, w, 2n-1], key minus query
    if axis == "h":
        shifted = relative_shift(patches.transpose(-3, -2)).transpose(-3, -2)[..., None]  # [..., rows, w, h, 1]
    else:
        shifted = relative_shift(patches)[..., None, :]  # [..., rows, w, 1, w]
    out = shifted.expand(*shifted.shape[:-2], h, w).flatten(-2).flatten(-3, -2)  # [..., M, h*w]
    if p:
        out = torch.cat((scores[..., first:, count + 1, None].expand(*out.shape[:-1], p), out), -1)
    if first:
        top = scores[..., :p, count + 2, None], scores[..., :p, count, None]
        top = torch.cat([part.expand(*part.shape[:-1], n) for part, n in zip(top, (p, h * w), strict=True)], -1)
        out = torch.cat((top, out), -2)
    return out
