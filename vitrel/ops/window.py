"""Window geometry, once: which token sits in which slot of which window, who may see whom, and the way back.

Pad first, then shift (timm and the original roll before they pad, so opposite borders meet; timm issue 2438). The window never
shrinks: a grid that it does not divide is padded on the right and below, and padding is a region of its own that no token sees.
So the result equals the same attention on an infinite canvas with everything outside the image masked. Along an axis that fits
into one window there is no shift. Everything is index arithmetic on tensors, without a branch on the size of the grid where
that is a symbol: one exported graph serves every grid, and a sweep over sizes compiles twice (torch specialises the first size
it meets). The layouts are constants.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vitrel.constants import constant, is_known

_PADDING = 2  # label of the padded slots of one axis; 0 and 1 are the two sides of the cyclic border


class Windows(NamedTuple):
    """Layout of L windows of N slots each over a grid of h*w tokens."""

    slot: Tensor  # [L*N] int64: place of each slot inside its window, 0..N-1
    source: Tensor  # [L*N] int64: token (raster order) that fills each slot; padded slots repeat a border token
    visible: Tensor  # [L*N, N] bool: which keys of its window each slot sees; padding sees only padding
    inverse: Tensor  # [h*w] int64: slot that holds each token


def check_window(window: tuple[int, int], shift: tuple[int, int]) -> None:
    """ValueError unless 0 < window and 0 <= shift < window along both axes."""
    for axis, m, s in zip(("height", "width"), window, shift, strict=True):
        if m < 1:
            raise ValueError(f"window {axis} must be at least 1 token, not {m}")
        if not 0 <= s < m:
            raise ValueError(f"shift along {axis} must lie in 0..{m - 1} for a window of {m}, not {s}")


def windows(
    h: int, w: int, window: tuple[int, int], shift: tuple[int, int], device: torch.device | str | None = None
) -> Windows:
    """Layout of (shifted) windows over an h x w grid; all sizes in tokens.

    With shift (sy, sx) the borders of the windows lie sy rows below and sx columns right of those of the unshifted ones.
    """
    return _windows(h, w, tuple(window), tuple(shift), device=device)


def window_mask(
    h: int, w: int, window: tuple[int, int], shift: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Tensor | None:
    """[L*N, N]: 0 where a slot sees a key of its window, else -inf; None where every slot is known to see all.

    -inf is safe: padding sees padding, so no row is ever fully masked; -100 is not, where logits reach it.
    """
    if is_known(h, w) and not hides_pairs(h, w, window, shift):
        return None
    return _window_mask(h, w, tuple(window), tuple(shift), str(dtype).removeprefix("torch."), device=device)


def hides_pairs(h: int, w: int, window: tuple[int, int], shift: tuple[int, int]) -> bool:
    """Whether some slots of a window do not see each other: because of padding, or of the cyclic border of a shift."""
    return any(n % m or axis_shift(n, m, s) for n, m, s in zip((h, w), window, shift, strict=True))


def axis_shift(n: int, window: int, shift: int, device: torch.device | str | None = None) -> int | Tensor:
    """The shift along an axis of n tokens: none where one window holds it. A 0-d tensor where a graph serves any n."""
    if is_known(n):
        return shift if n > window else 0
    return torch.where(torch.ones((), dtype=torch.int64, device=device) * n > window, shift, 0)


@constant
def _windows(h: int, w: int, window: tuple[int, int], shift: tuple[int, int], device: torch.device) -> Windows:
    rows, columns = _axis(h, window[0], shift[0], device), _axis(w, window[1], shift[1], device)
    count, n = rows.count * columns.count, window[0] * window[1]
    # Flat indices, not an outer sum: broadcasting a single window would cost a compiled graph of its own.
    which, inside = _divide(torch.arange(count * n, device=device), n)
    (down, across), (y, x) = _divide(which, columns.count), _divide(inside, window[1])
    y, x = down * window[0] + y, across * window[1] + x  # row and column of each slot, on the padded grid
    source = rows.source[y] * w + columns.source[x]
    padded = (rows.label[y] == _PADDING) | (columns.label[x] == _PADDING)
    label = torch.where(padded, 3 * 3, rows.label[y] * 3 + columns.label[x])  # [L*N]; equal labels see each other
    keys = (which * n)[:, None] + torch.arange(n, device=device)  # [L*N, N]
    visible = label[:, None] == label[keys]
    y, x = _divide(torch.arange(h * w, device=device), w)
    (down, y), (across, x) = _divide(rows.slot[y], window[0]), _divide(columns.slot[x], window[1])
    return Windows(inside, source, visible, (down * columns.count + across) * n + y * window[1] + x)


@constant
def _window_mask(h: int, w: int, window: tuple[int, int], shift: tuple[int, int], dtype: str, device: torch.device) -> Tensor:
    visible = _windows(h, w, window, shift, device=device).visible
    return torch.zeros((), dtype=getattr(torch, dtype), device=device).masked_fill(~visible, float("-inf"))


class _Axis(NamedTuple):
    count: int  # type: ignore[assignment]  # number of windows
    source: Tensor  # [count*window] coordinate that fills each slot
    label: Tensor  # [count*window] 0, 1 or _PADDING
    slot: Tensor  # [n] slot of each coordinate


def _axis(n: int, window: int, shift: int, device: torch.device | None) -> _Axis:
    count = (n + window - 1) // window
    s = axis_shift(n, window, shift, device)
    at = torch.arange(count * window, device=device) + s
    at = torch.where(at >= count * window, at - count * window, at)
    label = torch.where(at < n, (at < s).long(), _PADDING)
    slot = torch.arange(n, device=device) - s
    slot = torch.where(slot < 0, slot + count * window, slot)
    return _Axis(count, at.clamp(max=n - 1), label, slot)


def _divide(index: Tensor, by: int) -> tuple[Tensor, Tensor]:
    """Quotient and remainder; not `%`, which ONNX does not take between tensor and size."""
    quotient = index // by
    return quotient, index - quotient * by
