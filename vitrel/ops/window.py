"""Window geometry: which token is in which slot of which window, which slots see each other, and the inverse layout.

Grids are padded first and shifted afterwards; timm and the original code roll before they pad, so that opposite borders see
each other (timm issue 2438). The window has the same size on every grid: a grid that it does not divide is padded on the right
and below, and no token sees the padding. The result equals the same attention on an infinite canvas in which everything outside
the image is masked. An axis that fits into one window is not shifted.

Layouts are cached geometry (vitrel.geometry), computed by index arithmetic on tensors without branches on a symbolic grid size:
one exported graph serves every grid, and compiling for many sizes makes two graphs (torch specializes the first size).
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vitrel.geometry import cached_geometry, dtype_name, is_known

_PADDING = 2  # label of padded slots along an axis; 0 and 1 label the two sides of the cyclic border


class Windows(NamedTuple):
    """Layout of L windows over a grid of h*w tokens; each has N slots in row-major order, which hold a token or padding.

    Attributes:
        slot: [L*N] int64, position of each slot in its window, 0..N-1.
        source: [L*N] int64, token (raster order) that fills each slot; padded slots repeat a border token.
        visible: [L*N, N] bool, keys of its window that each slot sees; padding sees padding only.
        inverse: [h*w] int64, slot that holds each token.
    """

    slot: Tensor
    source: Tensor
    visible: Tensor
    inverse: Tensor


def check_window(window: tuple[int, int], shift: tuple[int, int]) -> None:
    """Raise ValueError unless 0 < window and 0 <= shift < window along both axes, (h, w) in tokens."""
    for axis, m, s in zip(("height", "width"), window, shift, strict=True):
        if m < 1:
            raise ValueError(f"window {axis} must be at least 1 token, not {m}")
        if not 0 <= s < m:
            raise ValueError(f"shift along {axis} must lie in 0..{m - 1} for a window of {m}, not {s}")


def windows(
    h: int,
    w: int,
    window: tuple[int, int],
    shift: tuple[int, int],
    device: torch.device | str | None = None,
    strided: bool = False,
) -> Windows:
    """Return the layout of windows over an h x w grid.

    The grid is padded on the right and below to whole windows, and no token sees the padding. An axis that fits into one
    window is not shifted. The tensors are cached and shared: do not change them in place.

    Args:
        h: rows of the grid, in tokens.
        w: columns of the grid, in tokens.
        window: (h, w) in tokens.
        shift: (sy, sx) in tokens: the borders of windows lie sy rows below and sx columns right of those without shift.
        device: of the result.
        strided: a window holds tokens at equal distances over the whole grid (MaxViT's grid attention, arXiv 2204.01697, sec.
            3.2), ceil(h / window) rows and ceil(w / window) columns apart, instead of neighbors; only for the shift (0, 0).
    """
    return _windows(h, w, tuple(window), tuple(shift), strided, device=device)


def window_mask(
    h: int,
    w: int,
    window: tuple[int, int],
    shift: tuple[int, int],
    dtype: torch.dtype,
    device: torch.device,
    strided: bool = False,
) -> Tensor | None:
    """Return the additive mask [L*N, N] of L windows of N slots: 0 where a slot sees a key of its window, else -inf.

    None if every slot is known to see all keys. No row is fully masked, since padding sees padding, so -inf is safe; Swin's
    -100 would not hide keys whose logits are that large. The mask is cached and shared: do not change it in place. h, w,
    window, shift and strided are as in `windows`.
    """
    if is_known(h, w) and not hides_pairs(h, w, window, shift):
        return None
    return _window_mask(h, w, tuple(window), tuple(shift), strided, dtype_name(dtype), device=device)


def hides_pairs(h: int, w: int, window: tuple[int, int], shift: tuple[int, int]) -> bool:
    """Return whether some slots of a window do not see each other, because of padding or the cyclic border of a shift.

    The arguments are those of `windows`.
    """
    return any(n % m or axis_shift(n, m, s) for n, m, s in zip((h, w), window, shift, strict=True))


def axis_shift(n: int, window: int, shift: int, device: torch.device | str | None = None) -> int | Tensor:
    """Return the shift along an axis of n tokens, 0 if one window holds them all; a 0-d tensor where a graph serves any n."""
    if is_known(n):
        return shift if n > window else 0
    return torch.where(torch.ones((), dtype=torch.int64, device=device) * n > window, shift, 0)


@cached_geometry
def _windows(h: int, w: int, window: tuple[int, int], shift: tuple[int, int], strided: bool, device: torch.device) -> Windows:
    rows, columns = _axis(h, window[0], shift[0], device), _axis(w, window[1], shift[1], device)
    count, n = rows.count * columns.count, window[0] * window[1]
    # Flat indices, not an outer sum: for a grid of one window, broadcasting would need another compiled graph.
    number, slot = _divide(torch.arange(count * n, device=device), n)  # window of each row, and slot in it
    (down, across), (y, x) = _divide(number, columns.count), _divide(slot, window[1])
    # row and column of each slot, on the padded grid
    if strided:
        y, x = y * rows.count + down, x * columns.count + across
    else:
        y, x = down * window[0] + y, across * window[1] + x
    source = rows.source[y] * w + columns.source[x]
    padded = (rows.label[y] == _PADDING) | (columns.label[x] == _PADDING)
    # [L*N]; slots of equal labels see each other. Labels of tokens are 0, 1, 3 and 4, that of padding is 9.
    label = torch.where(padded, 9, rows.label[y] * 3 + columns.label[x])
    keys = (number * n)[:, None] + torch.arange(n, device=device)  # [L*N, N]
    visible = label[:, None] == label[keys]
    y, x = _divide(torch.arange(h * w, device=device), w)
    if strided:
        (y, down), (x, across) = _divide(rows.slot[y], rows.count), _divide(columns.slot[x], columns.count)
    else:
        (down, y), (across, x) = _divide(rows.slot[y], window[0]), _divide(columns.slot[x], window[1])
    return Windows(slot, source, visible, (down * columns.count + across) * n + y * window[1] + x)


@cached_geometry
def _window_mask(
    h: int, w: int, window: tuple[int, int], shift: tuple[int, int], strided: bool, dtype: str, device: torch.device
) -> Tensor:
    visible = _windows(h, w, window, shift, strided, device=device).visible
    return torch.zeros((), dtype=getattr(torch, dtype), device=device).masked_fill(~visible, float("-inf"))


class _Axis(NamedTuple):
    """Layout of windows along one axis of n tokens.

    `count` is the number of windows, `source` [count*window] the token that fills each slot, `slot` [n] the slot of each token,
    and `label` [count*window] 1 for tokens that the shift moves from the start to the end, 0 for others, or _PADDING.
    """

    count: int  # type: ignore[assignment]
    source: Tensor
    label: Tensor
    slot: Tensor


def _axis(n: int, window: int, shift: int, device: torch.device | None) -> _Axis:
    """Return the layout along one axis of n tokens, padded to whole windows and then shifted cyclically."""
    count = (n + window - 1) // window
    s = axis_shift(n, window, shift, device)
    at = torch.arange(count * window, device=device) + s
    at = torch.where(at >= count * window, at - count * window, at)
    label = torch.where(at < n, (at < s).long(), _PADDING)
    slot = torch.arange(n, device=device) - s
    slot = torch.where(slot < 0, slot + count * window, slot)
    return _Axis(count, at.clamp(max=n - 1), label, slot)


def _divide(index: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """Return quotient (rounded down) and remainder of `index` and `by`; ONNX does not take `%` of a tensor and a size."""
    quotient = index // by
    return quotient, index - quotient * by
