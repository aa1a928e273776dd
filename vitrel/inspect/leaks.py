"""Leaks of windowed attention: tokens that see the opposite border of the image, and tokens that attend to padding.

A window is a run of neighboring rows and columns, so the rows (columns) that a token sees must be one run that includes its
own. Where there is a gap, the token sees the opposite border of the image. Which tokens see which follows from the slots of
windows and from masks (`vitrel.inspect.any_model.trace`), not from weights.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitrel.common.sizes import Size
from vitrel.inspect.any_model import LocatedCall, trace


class Leaks(NamedTuple):
    """Which tokens of a layer's grid [h, w] attend, in its windows, to the opposite border of the image or to padding.

    The tokens of `rows` and `columns` see the opposite border; `padding` [h, w] bool are those that attend to padding. `token`
    is (row, column) of the one on the diagonal that sees most across a border; `sees` [h, w] is 1 where it sees a token, 2
    where across a border, 0 elsewhere.
    """

    rows: tuple[int, ...]  # rows whose tokens see the opposite border
    columns: tuple[int, ...]
    padding: Tensor  # [h, w] bool: tokens that attend to padding
    token: tuple[int, int]  # (row, column) of the token on the diagonal that sees most across a border, or the first
    sees: Tensor  # [h, w]: 0 not seen by that token, 1 seen, 2 seen across a border

    @property
    def across(self) -> Tensor:
        """[h, w] bool: tokens that see across the border of the image to its opposite side, those of `rows` and `columns`."""
        h, w = self.padding.shape
        rows, columns = torch.zeros(h, 1, dtype=torch.bool), torch.zeros(1, w, dtype=torch.bool)
        rows[list(self.rows)], columns[:, list(self.columns)] = True, True
        return rows | columns


def border_leak(model: nn.Module, size: Size) -> float | None:
    """Return the share of tokens that attend across the image's border to its opposite side, in the layer where it is largest.

    It is 0 to 1, and None if no layer has windows of neighbors. It depends on the image's `size` (h, w) in pixels and the
    layers' geometry alone, not on the weights. Raises what forward raises if the model does not take the size.
    """
    leaks = [leak for call in trace(model, size).calls if (leak := find_leaks(call)) is not None]
    return max((float(leak.across.float().mean()) for leak in leaks), default=None)


def find_leaks(call: LocatedCall) -> Leaks | None:
    """Return the `Leaks` of a layer, across borders and to padding; None if it is global or strided, or its grid unknown."""
    if call.grid is None or call.window is None or call.strided:
        return None
    (h, w), tokens = call.grid[:2], call.tokens.cpu()  # [W, N]
    visible = torch.ones(1, 1, 1, dtype=torch.bool) if call.visible is None else call.visible.any(1).cpu()
    visible = visible.expand(len(tokens), tokens.shape[1], tokens.shape[1])
    # Windows that are whole rectangles whose tokens all see each other are left out, but the first token's, which may be shown.
    extents = [at.amax(1) - at.amin(1) + 1 for at in (tokens // w, tokens % w)]
    whole = (extents[0] * extents[1] == tokens.shape[1]) & visible.flatten(1).all(1)
    examined = ~whole | (tokens < 0).any(1) | (tokens == 0).any(1)
    tokens, visible = tokens[examined], visible[examined]
    real, y, x = tokens >= 0, tokens // w, tokens % w
    sees = visible & real[:, :, None]  # [W, N, N] what the token in each slot sees
    keys = sees & real[:, None]
    down, right = (_beyond_gap(keys.float() @ (at[..., None] == torch.arange(n)).float() > 0, at) for at, n in ((y, h), (x, w)))
    wide, high = (lines.gather(2, at.clamp(min=0)[:, None].expand_as(keys)) for lines, at in ((down, y), (right, x)))
    across = keys & (wide | high)
    padding, count = torch.zeros(h * w, dtype=torch.bool), torch.zeros(h * w, dtype=torch.long)
    padding[tokens[real]] = (sees & ~real[:, None]).any(2)[real]
    count[tokens[real]] = across.sum(2)[real]
    diagonal = torch.arange(max(h, w)) % h * w + torch.arange(max(h, w)) % w
    token = int(diagonal[count[diagonal].argmax()])
    window, number = ((tokens == token).nonzero()[0]).tolist()
    shown, held = torch.zeros(h * w, dtype=torch.int32), real[window]
    shown[tokens[window][held]] = (keys[window, number].int() + across[window, number].int())[held]
    rows, columns = (tuple(at[lines.any(2)].unique().tolist()) for at, lines in ((y, down), (x, right)))
    return Leaks(rows, columns, padding.view(h, w), (token // w, token % w), shown.view(h, w))


def _beyond_gap(sees: Tensor, at: Tensor) -> Tensor:
    """Return which of the n rows that a token sees are separated from its own by one that it does not see, [W, N, n] bool.

    `sees` [W, N, n] bool tells which rows (or columns) each token sees, `at` [W, N] its own.
    """
    index = torch.arange(sees.shape[-1], dtype=torch.int16)
    unseen, own = ~sees, at[..., None].to(torch.int16)
    first = torch.where(unseen & (index < own), index + 1, 0).amax(-1, keepdim=True)
    last = torch.where(unseen & (index > own), index, sees.shape[-1]).amin(-1, keepdim=True)
    return sees & ((index < first) | (index >= last))
