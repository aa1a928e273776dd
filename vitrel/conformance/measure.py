"""Rotations and biases of a survey, measured: angles per step, biases per offset, and how far each is from following a rule.

Nothing here uses vitrel's encodings: angles are read from rotated queries, biases from logits without content.
"""

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrel.common.sizes import Size
from vitrel.inspect.any_model import line_length
from vitrel.inspect.recorder import HIDDEN

SAME = 1e-3  # radians, or share of the largest bias: float32 leaves 1e-5 of angles up to 100, and of biases
PAIRS = {"half": "channels p and p + D/2", "interleaved": "channels 2p and 2p + 1", "quarter": "channels p and p + D/4"}


@dataclass
class Located:
    """One attention at one image size, with the position of its tokens in the image.

    B constant passes give all tokens the same content; W windows, H heads, N slots of a window, D channels of a head.
    """

    where: str  # path of the module
    grid: Size  # tokens (h, w) of the image here
    tokens: Tensor  # [W, N] index (row-major) of the token in each slot of a window; -1 for prefix tokens and padding
    window: Size | None  # shape of a window's slots, which follow each other row by row; the grid where attention is global
    heads: int
    prefix: int  # tokens that are no patches; 0 in windows
    logits: Tensor  # [B, W, H, N, N] of the constant pass: biases and masks
    query: Tensor  # [B, W, H, N, D] of the constant pass
    key: Tensor
    unrotated: tuple[Tensor | None, Tensor | None]  # query and key before they are rotated; None: they are not

    @property
    def windows(self) -> int:
        """Number of windows; 1 where attention is global."""
        return len(self.tokens)

    @property
    def places(self) -> Tensor:
        """[W, N, 2]: row and column in the image of the token in each slot, without meaning where `tokens` is -1."""
        at = self.tokens.clamp(min=0)
        return torch.stack((at // self.grid[1], at % self.grid[1]), -1)

    @functools.cached_property
    def visible(self) -> Tensor:
        """[W, N, N] bool: pairs (query, key) that at least one head does not mask."""
        logits = self.logits[0].amax(1)  # [W, N, N]
        return logits >= logits.amax(-1, keepdim=True) + HIDDEN

    @functools.cached_property
    def rotation(self) -> "Rotation | None":
        """The rotation of queries and keys; None if neither differ between patches, or slots of windows have no known order."""
        return rotation(self)

    @functools.cached_property
    def bias(self) -> "Bias | None":
        """The bias by offset (query minus key); None if all visible logits are equal, or no pair of patches is visible."""
        return bias(self)


class Rotation(NamedTuple):
    """The rotation of queries and keys in one attention, read from its tokens; H heads, P pairs of channels."""

    pairs: str  # key of PAIRS; "" if the norm of no pairing is the same for all tokens, so it is no rotation
    norms: float  # largest change of the norm of a pair over tokens, as a share of it, for the best pairing
    grid: Size  # of the image, or of one window
    steps: Tensor  # [2 (query, key), H, 2 (down, right), P] mean angle between neighbors, radians in (-pi, pi]
    spread: Tensor  # [2, H, 2, P] largest deviation from that mean over the grid
    origin: Tensor  # [H, P] angle of the first patch against unrotated content; NaN where that is not known
    prefix: float  # largest deviation of a prefix token from unrotated content, as a share of its norm; NaN if not known


class Bias(NamedTuple):
    """The bias of one attention by offset (query minus key), without masks."""

    by_offset: Tensor  # [H, 2h-1, 2w-1] middle of the biases of pairs with the offset; NaN where no visible pair has it
    spread: float  # largest difference between pairs with one offset, as a share of the range of biases
    content: float  # largest difference between contents, as a share of the range
    prefix: float  # largest difference of a prefix token's bias over patches, as a share of the range
    window: Size  # the h x w of by_offset
    range: float  # of all biases


def rotation(found: Located, order: Tensor | None = None) -> Rotation | None:
    """Return the rotation of an attention; None if queries and keys are alike for all patches, or windows have no known order.

    `order` [h, w] is the index of the token at each place, None for row by row; several windows ignore it.
    """
    if found.window is None:
        return None
    query, key = (maps(found, part, order) for part in (found.query, found.key))  # [B, H, h, w, D]
    if max(_varies(query), _varies(key)) < 1e-4:
        return None
    width, scores = query.shape[-1], _scores(query, key)
    pairs = min(scores, key=lambda name: scores[name])
    turns = [as_pairs(part, pairs) for part in (query, key)]  # complex [B, H, h, w, P]
    found_steps = [[phase_step(turn, axis) for axis in (2, 3)] for turn in turns]
    steps, spread = (torch.stack([torch.stack([s[which] for s in side], 1) for side in found_steps]) for which in (0, 1))
    origin = torch.full((query.shape[1], width // 2), math.nan)
    plain = plain_content(found, 0)
    if plain is not None:
        content = as_pairs(plain, pairs)
        origin = (turns[0][:, :, 0, 0] * content.conj()).sum(0).angle()
    pure = scores[pairs] < SAME
    return Rotation(pairs if pure else "", scores[pairs], tuple(query.shape[2:4]), steps, spread, origin, _prefix(found))


def pairing(found: Located) -> str:
    """Return "half", "interleaved" or "quarter" (see PAIRS): the pairing of channels whose norms vary least over tokens."""
    scores = _scores(maps(found, found.query), maps(found, found.key))
    return min(scores, key=lambda name: scores[name])


def _scores(query: Tensor, key: Tensor) -> dict[str, float]:
    """Return {way to pair channels, a key of PAIRS: largest change of a pair's norm over tokens, as a share of the mean norm}.

    `query` and `key` are maps [B, H, h, w, D]; the larger of their changes counts.
    """
    return {name: max(_norm_change(as_pairs(part, name)) for part in (query, key)) for name in _patterns(query.shape[-1])}


def in_pairs(found: Located, pairs: str) -> Tensor:
    """Return the mean angles [H, 2 (down, right), P] between neighbors in queries, radians; `pairs` is a key of PAIRS."""
    turned = as_pairs(maps(found, found.query), pairs)
    return torch.stack([phase_step(turned, axis)[0] for axis in (2, 3)], 1)


def apart(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two tensors of angles modulo 2 pi, 0 to pi, NaN left out; inf if their shapes differ."""
    if a.shape != b.shape:
        return math.inf
    return float(torch.atan2((a - b).sin(), (a - b).cos()).abs().nan_to_num(0).max())


def transposed_order(found: Located) -> dict[str, Tensor]:
    """Return {error in words: [h, w] index of the token at each place} for two errors: axes exchanged, columns first.

    For exchanged height and width the index is [w, h]. The result is {} for windows and with padding.
    """
    h, w = found.grid
    if found.windows > 1 or found.tokens.shape[1] != h * w + found.prefix:
        return {}
    index = torch.arange(h * w)
    return {
        "height and width exchanged": _places(index // h, index % h, (w, h)),
        "columns counted first": _places(index % h, index // h, (h, w)),
    }


def _places(y: Tensor, x: Tensor, grid: Size) -> Tensor:
    """Return the index [h, w] of the token at each place of `grid` (h, w), from row `y` and column `x` of each token."""
    order = torch.empty(grid, dtype=torch.long)
    order[y, x] = torch.arange(len(y))
    return order


def maps(found: Located, values: Tensor, order: Tensor | None = None) -> Tensor:
    """Return values [B, W, H, N, D] of the patches as maps [B, H, h, w, D]; of windows, those of the first full one.

    If no window is full, it is the first. `order` [h, w] is the index of the token at each place, None for row by row; several
    windows ignore it.
    """
    window = window_slots(found) if found.windows > 1 else None
    if window is not None:
        full = (found.tokens >= 0).all(1).nonzero().flatten()
        first = int(full[0]) if len(full) else 0
        (h, w), places = window
        return values[:, first][:, :, (places[:, 0] * w + places[:, 1]).argsort().view(h, w)]
    slots = found.tokens[0].argsort()[(found.tokens[0] < 0).sum() :]  # of the tokens in their order
    return values[:, 0][:, :, slots[(torch.arange(len(slots)).view(found.grid) if order is None else order)]]


def aligned(found: Located, slots: Tensor) -> Tensor:
    """Return [W, N, N] bool: pairs of tokens whose offset in the image equals that of their slots [N, 2] in the window."""
    real = found.tokens >= 0
    offset = found.places[:, :, None] - found.places[:, None]
    return (offset == slots[:, None] - slots[None]).all(-1) & real[:, :, None] & real[:, None]


def window_slots(found: Located) -> tuple[Size, Tensor] | None:
    """Return the (h, w) of the window and the (row, column) of each slot [N, 2]; None if unknown, or with prefix tokens."""
    if found.window is None or found.prefix:
        return None
    (h, w), slot = found.window, torch.arange(found.tokens.shape[1])
    height = _columns(found) if w == 1 else 0
    if height:
        return (height, len(slot) // height), torch.stack((slot % height, slot // height), -1)
    return (h, w), torch.stack((slot // w, slot % w), -1)


def _columns(found: Located) -> int:
    """Return how many slots make a column of a window whose slots follow each other column by column; 0 if they do not."""
    height = line_length(found.tokens, lambda token: token % found.grid[1])
    return height if height > 1 and found.tokens.shape[1] % height == 0 else 0


def by_columns(found: Located) -> bool:
    """Return whether tokens, or those of windows, come column by column where they should come row by row."""
    (h, w), tokens = found.grid, found.tokens[0][found.tokens[0] >= 0]
    if found.windows == 1 and len(tokens) + found.prefix == found.tokens.shape[1]:
        return min(h, w) > 1 and torch.equal(tokens.cpu(), torch.arange(h * w).view(h, w).T.flatten())
    return found.window is not None and found.window[1] == 1 and _columns(found) > 0


def _varies(values: Tensor) -> float:
    """Return the largest difference of a token from the first one in [B, H, h, w, D], as a share of the largest value."""
    return float((values - values[:, :, :1, :1]).abs().max() / values.abs().max().clamp(min=1e-20))


def _patterns(width: int) -> list[str]:
    """Return the pairings of channels, keys of PAIRS such as "half", that are possible for heads of `width` channels."""
    return [name for name, n in (("half", 2), ("interleaved", 2), ("quarter", 4)) if width % n == 0]


def as_pairs(values: Tensor, pattern: str) -> Tensor:
    """Return pairs of channels of [..., D] as complex128 [..., D/2]; `pattern`, a key of PAIRS ("half", ...), says which."""
    values = values.double()
    if pattern == "interleaved":
        return torch.view_as_complex(values.unflatten(-1, (-1, 2)).contiguous())
    if pattern == "quarter":
        parts = values.chunk(4, -1)
        values = torch.cat(parts[::2] + parts[1::2], -1)
    a, b = values.chunk(2, -1)
    return torch.complex(a.contiguous(), b.contiguous())


def _norm_change(turn: Tensor) -> float:
    """Return the largest change of a pair's norm over the tokens of complex [B, H, h, w, P], as a share of the mean norm."""
    norm = turn.abs()
    change = norm.amax((2, 3)) - norm.amin((2, 3))
    return float(change.max() / norm.mean())


def phase_step(turn: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Return the mean angle [H, P] between neighbors along an axis of complex [B, H, h, w, P], and the largest deviation.

    `axis` is dimension 2 (h) or 3 (w). The deviation [H, P] is that at any position, after products are summed over the batch.
    Both are in radians, NaN and 0 along an axis of length 1.
    """
    n = turn.shape[axis]
    if n < 2:
        shape = turn.shape[1:2] + turn.shape[-1:]
        return torch.full(shape, math.nan), torch.zeros(shape)
    both = (turn.narrow(axis, 1, n - 1) * turn.narrow(axis, 0, n - 1).conj()).sum(0)  # [H, ., ., P]
    both = both / both.abs().clamp(min=1e-30)
    mean = both.mean((1, 2))
    deviation = (both * (mean / mean.abs().clamp(min=1e-9)).conj()[:, None, None]).angle().abs().amax((1, 2))
    return mean.angle(), deviation


def plain_content(found: Located, side: int) -> Tensor | None:
    """Return the queries (side 0) or keys (side 1) [B, H, D], alike for all tokens, before rotation; None if not known."""
    unrotated = found.unrotated[side]
    return None if unrotated is None else unrotated[:, 0, :, -1]


def _prefix(found: Located) -> float:
    """Return the largest change of a prefix token by a rotation, as a share of its norm; NaN if unknown or there is none."""
    plains = [plain_content(found, side) for side in (0, 1)]
    if not found.prefix or any(plain is None for plain in plains):
        return math.nan
    worst = 0.0
    for part, plain in zip((found.query, found.key), plains, strict=True):
        rows = part[:, 0][:, :, found.tokens[0] < 0]  # [B, H, P, D]
        rows, plain = F.normalize(rows.double(), dim=-1), F.normalize(plain.double(), dim=-1)[:, :, None]
        worst = max(worst, float((rows - plain).norm(dim=-1).max()))
    return worst


def bias(found: Located, order: Tensor | None = None) -> Bias | None:
    """Measure the bias of an attention by offset: the middle between the largest and the smallest logit of each offset.

    In windows, pairs whose offset in the image is not that in the window are left out. The result is None if all visible logits
    are equal, or no pair of patches is visible.

    Args:
        found: the attention, with logits without content.
        order: [h, w] index of the token at each place, for global attention; None: row by row.
    """
    h, w = found.grid
    visible, places = found.visible, found.places
    if order is not None:
        side = order.shape[1]
        where = order.flatten().argsort()[found.tokens.clamp(min=0)]
        places, (h, w) = torch.stack((where // side, where % side), -1), tuple(order.shape)
    real = found.tokens >= 0
    pairs = visible & real[:, :, None] & real[:, None]  # [W, N, N]
    slots = window_slots(found) if found.windows > 1 else None
    if slots is not None:
        pairs = pairs & aligned(found, slots[1])  # pairs across a border are found by another check
    values = found.logits.double()
    inside = values.permute(0, 2, 1, 3, 4)[:, :, pairs]  # [B, H, M]
    if not inside.numel():
        return None
    spread_all = float(inside.amax() - inside.amin())
    everything = values.permute(0, 2, 1, 3, 4)[:, :, visible]
    if float(everything.amax() - everything.amin()) < 1e-6:
        return None
    spread_all = max(spread_all, 1e-6)
    offset = (places[:, :, None] - places[:, None])[pairs]  # [M, 2]
    index = (offset[:, 0] + h - 1) * (2 * w - 1) + offset[:, 1] + w - 1
    size = (*inside.shape[:2], (2 * h - 1) * (2 * w - 1))
    at = index.expand(*inside.shape)
    top = torch.full(size, -math.inf, dtype=torch.float64).scatter_reduce(2, at, inside, "amax")
    low = torch.full(size, math.inf, dtype=torch.float64).scatter_reduce(2, at, inside, "amin")
    seen = top > -math.inf
    difference = torch.where(seen, top - low, 0.0)
    by_offset = torch.where(seen, (top + low) / 2, math.nan)
    content = float((inside.amax(0) - inside.amin(0)).max()) / spread_all
    table = by_offset[0].unflatten(1, (2 * h - 1, 2 * w - 1))
    return Bias(table, float(difference.max()) / spread_all, content, _prefix_bias(found, spread_all), (h, w), spread_all)


def _prefix_bias(found: Located, scale: float) -> float:
    """Return the largest difference between patches of a prefix token's bias, as a share of `scale`; 0 without such tokens."""
    if not found.prefix:
        return 0.0
    first, rest = found.tokens[0] < 0, found.tokens[0] >= 0
    logits = found.logits[:, 0].double()
    parts = logits[:, :, first][..., rest], logits[:, :, rest][..., first].mT
    return max(float((part.amax(-1) - part.amin(-1)).max()) for part in parts) / scale
