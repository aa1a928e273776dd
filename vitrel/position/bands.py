"""Channels of encodings by sines and cosines: which axis they belong to, and the frequencies of their bands."""

import torch
from torch import Tensor

from vitrel.grid import Grid


def split_axes(key: str, width_name: str, width: int, grid: Grid) -> tuple[str, int]:
    """Return the axes among which an encoding by sines and cosines divides its channels, and the number of bands of each axis.

    They are ("hw", width / 4). If only 2 divides the width, the training grid must have one row or column, and its other axis
    has all channels: ("w" or "h", width / 2).

    Args:
        key: name of the encoding, for errors.
        width_name: what the width is called in errors.
        width: number of channels.
        grid: the training grid.

    Raises:
        ValueError: 4 does not divide the width, and the case for 2 does not apply.
    """
    if width % 4 == 0:
        return "hw", width // 4
    if width % 2 == 0 and min(grid[:2]) == 1:
        return "h" if grid.w == 1 else "w", width // 2
    raise ValueError(
        f"{key} needs a {width_name} divisible by 4 (pairs of channels over two axes; by 2 on one row or column), not {width}; "
        f"choose embed_dim and num_heads so that it is"
    )


def band_frequencies(bands: int, base: float, dtype: str, device: torch.device) -> Tensor:
    """Return the frequencies base^(-t / bands) of the bands t = 0..bands-1 of one axis, [bands], of the type named `dtype`."""
    return base ** (-torch.arange(bands, device=device).to(getattr(torch, dtype)) / bands)


def of_axes(axes: str, values: Tensor, dim: int) -> Tensor:
    """Return a view of the values of the axes that `split_axes` chose: `dim` keeps length 2 for "hw", and has length 1 else.

    Args:
        axes: "hw", "h" or "w".
        values: a tensor.
        dim: the dimension of `values`, of length 2, that has the values of y and of x.
    """
    return values.narrow(dim, "hw".index(axes[0]), len(axes))
