"""Which tokens see which in one block, by gradients: what its output at one token depends on in its input.

A window is a run of neighbouring rows and columns. So whatever a token sees along an axis must be one run that holds the token
itself; where there is a gap, the border has been crossed: the token sees the opposite border of the image. Nothing here knows
how a block cuts its windows.

Links do not depend on the weights, so that a copy of the block with random weights of moderate size is asked: there the weakest
links of Swin, Swin V2 and DaViT were 5e-4 of a token's strongest, and masks of -100 left less than 1e-42 of it.
"""

import contextlib
import copy
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import Mlp
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitrel.grid import Grid
from vitrel.inspect.resolution_report import Pair
from vitrel.inspect.trace import SeenBlock, trace
from vitrel.layers import Attention, Block
from vitrel.ops.window import windows

_WEAKEST = 1e-15  # of the strongest link of a token


class Sight(NamedTuple):
    """What the tokens of a block in windows see on its grid [h, w], beyond what they should."""

    rows: tuple[int, ...]  # whose tokens see rows of the opposite border
    columns: tuple[int, ...]
    row_pairs: int  # pairs of rows, query and key, that see each other only across the border
    column_pairs: int
    padding: Tensor  # [h, w] bool: tokens that attend to padding
    token: Pair  # (row, column) of the asked token that sees most across a border, the first where none does
    sees: Tensor  # [h, w]: 0 what that token does not see, 1 what it sees, 2 across a border

    @property
    def leaking(self) -> Tensor:
        """[h, w] bool: tokens that see across a border."""
        h, w = self.padding.shape
        rows, columns = torch.zeros(h, 1, dtype=torch.bool), torch.zeros(1, w, dtype=torch.bool)
        rows[list(self.rows)], columns[:, list(self.columns)] = True, True
        return rows | columns


def can_look(seen: SeenBlock) -> bool:
    """Whether `look` can run the block by itself: it has windows, is no strided attention, and needs no other tensors."""
    return seen.window is not None and not seen.strided and (seen.others is not None or isinstance(seen.block, Block))


def sights_of(blocks: Iterable[SeenBlock]) -> dict[str, Sight]:
    """{name: sight} of the first block of every kind: class, grid, window and shift. Those that cannot be run are left out."""
    found, kinds = {}, set()
    for seen in filter(can_look, blocks):
        kind = type(seen.block), seen.grid, seen.window, seen.shift
        if kind not in kinds:
            kinds.add(kind)
            with contextlib.suppress(
                AssertionError, IndexError, RuntimeError, TypeError
            ):  # of blocks that need more than tokens
                found[seen.name] = look(seen)
    return found


def border_leak(model: nn.Module, size: Pair) -> float | None:
    """Largest share, over the stages, of tokens that see across a border at images of `size` (h, w) pixels, which it must take.

    None where no windows can be looked at. It depends on the geometry alone, not on the weights.
    """
    sights = sights_of(trace(model, size).blocks)
    return max((float(sight.leaking.float().mean()) for sight in sights.values()), default=None)


def look(seen: SeenBlock) -> Sight:
    """The tokens that see across a border or attend to padding, in a block for which `can_look` holds.

    Borders: gradient footprints of the tokens on the diagonal of the first and the last window and of some in the middle, or of
    every row and column of a small grid. A window is a product of rows and columns, so these tell of all rows and columns.
    Padding: its values are changed where the block appends zeros; a token whose output changes attends to it. Our layers
    append nothing, for them the layout that their attention uses is read (vitrel.ops.window).
    """
    lines = [_probed(n, m) for n, m in zip(seen.grid, seen.window, strict=True)]
    count = max(map(len, lines))
    queries = [tuple(line[i % len(line)] for line in lines) for i in range(count)]
    with torch.inference_mode(False), torch.enable_grad():  # also where the caller has switched gradients off
        block = _random(seen.block)
        seeing = _footprints(seen, block, queries)
        ours = isinstance(getattr(block, "attn", None), Attention)
        padding = _own_padding(seen) if ours else _appended_padding(seen, block)
    rows, columns, found = {}, {}, []
    for (y, x), sees in zip(queries, seeing, strict=True):
        across = _beyond_gap(sees.any(1), y)[:, None] | _beyond_gap(sees.any(0), x)
        rows[y], columns[x] = (int(_beyond_gap(sees.any(axis), at).sum()) for axis, at in ((1, y), (0, x)))
        found.append(((sees & across).sum(), (y, x), sees.int() + (sees & across)))
    _, token, sees = max(found, key=lambda one: one[0])
    crossing = [{at: n for at, n in sorted(line.items()) if n} for line in (rows, columns)]
    return Sight(*(tuple(line) for line in crossing), *(sum(line.values()) for line in crossing), padding, token, sees)


def footprint(seen: SeenBlock, query: Pair) -> Tensor:
    """[h, w] bool: the tokens that the one at `query` (row, column) sees in this block."""
    with torch.inference_mode(False), torch.enable_grad():
        return _footprints(seen, _random(seen.block), [query])[0]


def _footprints(seen: SeenBlock, block: nn.Module, queries: Sequence[Pair]) -> list[Tensor]:
    x, found = _tokens(seen).requires_grad_(), []
    out = _as_map(_run(seen, block, x), seen)
    for y, column in queries:
        (gradient,) = torch.autograd.grad(out[0, y, column].sum(), x, retain_graph=True)
        strength = _as_map(gradient, seen)[0].abs().amax(-1)
        found.append(strength > strength.max() * _WEAKEST)
    return found


def _probed(n: int, window: int) -> list[int]:
    """Rows (columns) to ask: all those a border can matter to, and the middle."""
    if n <= 3 * window:
        return list(range(n))
    return [*range(window), n // 2 - 1, n // 2, *range(n - window, n)]


def _beyond_gap(sees: Tensor, at: int) -> Tensor:
    """[n] bool: the rows (columns) seen that are no neighbours of `at`, nor of neighbours seen."""
    unseen = (~sees).nonzero().flatten().tolist()
    first = max((i + 1 for i in unseen if i < at), default=0)
    last = min((i for i in unseen if i > at), default=len(sees))
    beyond = sees.clone()
    beyond[first:last] = False
    return beyond


def _appended_padding(seen: SeenBlock, block: nn.Module) -> Tensor:
    x = _tokens(seen)
    with torch.no_grad():
        plain = _as_map(_run(seen, block, x), seen)
        with _OtherPadding():
            changed = _as_map(_run(seen, block, x), seen)
    return (plain != changed).any(-1)[0]


def _own_padding(seen: SeenBlock) -> Tensor:
    (h, w), n = seen.grid, seen.window[0] * seen.window[1]
    layout = windows(h, w, seen.window, seen.block.attn.shift)
    real = torch.zeros(len(layout.slot), dtype=torch.bool).index_fill(0, layout.inverse, True)
    padded = ~real.unflatten(0, (-1, n)).repeat_interleave(n, 0)  # [L*N, N]: whether each key of a slot's window is padding
    return (layout.visible & padded).any(1)[layout.inverse].unflatten(0, (h, w))


class _OtherPadding(TorchFunctionMode):
    """Noise in place of the zeros that F.pad appends."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not F.pad:
            return out
        inside = func(torch.ones_like(args[0]), *args[1:], **(kwargs or {}))
        noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        return torch.where(inside.bool(), out, noise)


def _random(block: nn.Module) -> nn.Module:
    """A copy with random weights: matrices keep the size of what they are given, vectors come near those of the block."""
    block, generator = copy.deepcopy(block).cpu().float().eval().requires_grad_(False), torch.Generator().manual_seed(0)
    for parameter in block.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            parameter.copy_(noise * max(1, parameter[0].numel()) ** -0.5)
        else:
            parameter.add_(noise * 0.1)
    if isinstance(getattr(block, "mlp", None), Mlp):
        block.mlp = nn.Identity()  # it acts on every token alone, and would take most of the time
    return block


def _tokens(seen: SeenBlock) -> Tensor:
    return torch.randn(seen.shape, generator=torch.Generator().manual_seed(0))


def _run(seen: SeenBlock, block: nn.Module, x: Tensor) -> Tensor:
    if isinstance(block, Block):
        return block(x, Grid(*seen.grid))
    return block(x, *seen.others)


def _as_map(x: Tensor, seen: SeenBlock) -> Tensor:
    """A block's input or output as [B, h, w, C]."""
    if seen.layout == "NCHW":
        return x.permute(0, 2, 3, 1)
    return x.unflatten(1, seen.grid) if seen.layout == "NLC" else x
