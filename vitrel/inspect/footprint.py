"""Gradient footprints: the input tokens that the output of a block at one token depends on, and leaks found by them.

A window is a run of neighboring rows and columns, so the rows (columns) that a token sees must be one run that includes its
own. Where there is a gap, the token sees the opposite border of the image. This needs no knowledge of how a block forms its
windows.

Which tokens see which does not depend on the weights, so a copy of the block with random weights of moderate size is run. With
these, the weakest gradients of Swin, Swin V2 and DaViT were 5e-4 of a token's largest, and masks of -100 left less than 1e-42.
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

from vitrel.common.sizes import Size
from vitrel.grid import Grid
from vitrel.inspect.any_model import REFUSALS, TracedBlock, trace
from vitrel.layers import Attention, Block
from vitrel.ops.window import windows

_WEAKEST = 1e-15  # smallest gradient that counts as seen, as a share of the largest of a query


class Leaks(NamedTuple):
    """Tokens and padding outside its window that a token of a windowed block sees, on the block's grid [h, w]."""

    rows: tuple[int, ...]  # rows whose tokens see the opposite border
    columns: tuple[int, ...]
    padding: Tensor  # [h, w] bool: tokens that attend to padding
    token: tuple[int, int]  # (row, column) of the examined token that sees most across a border, or the first if none does
    sees: Tensor  # [h, w]: 0 not seen by that token, 1 seen, 2 seen across a border

    @property
    def across(self) -> Tensor:
        """[h, w] bool: tokens that see across a border."""
        h, w = self.padding.shape
        rows, columns = torch.zeros(h, 1, dtype=torch.bool), torch.zeros(1, w, dtype=torch.bool)
        rows[list(self.rows)], columns[:, list(self.columns)] = True, True
        return rows | columns


def border_leak(model: nn.Module, size: Size) -> float | None:
    """Share of tokens that see across a border at images of `size` (h, w) pixels, in the stage where it is largest.

    None if no block with windows can run alone. The share depends on the geometry alone, not on the weights. Raises what
    forward raises if the model does not take the size.
    """
    blocks = leaks_by_block(trace(model, size).blocks)
    return max((float(leaks.across.float().mean()) for leaks in blocks.values()), default=None)


def leaks_by_block(blocks: Iterable[TracedBlock]) -> dict[str, Leaks]:
    """{name: leaks} of the first block of each kind (class, grid, window and shift), without blocks that cannot run alone."""
    leaks, kinds = {}, set()
    for block in filter(can_run_alone, blocks):
        kind = type(block.module), block.grid, block.window, block.shift
        if kind not in kinds:
            kinds.add(kind)
            with contextlib.suppress(*REFUSALS):  # the block needs more arguments than tokens
                leaks[block.name] = find_leaks(block)
    return leaks


def can_run_alone(block: TracedBlock) -> bool:
    """True if `find_leaks` can run the block: it has windows, they are not strided, and forward needs no other tensors."""
    return block.window is not None and not block.strided and (block.arguments is not None or isinstance(block.module, Block))


def find_leaks(block: TracedBlock) -> Leaks:
    """Find the tokens that see across a border or attend to padding, in a block for which `can_run_alone` is true.

    Borders: gradient footprints of tokens on the diagonals of the first and last window and of some in the middle, or of every
    row and column of a small grid; a window is a product of rows and columns, so these determine all rows and columns.
    Padding: the zeros that the block appends are replaced by noise, and a token whose output changes attends to padding.
    vitrel's layers append nothing; for them the layout of their attention is read (vitrel.ops.window).
    """
    lines = [_examined(n, m) for n, m in zip(block.grid, block.window, strict=True)]
    count = max(map(len, lines))
    queries = [tuple(line[i % len(line)] for line in lines) for i in range(count)]
    ours = isinstance(getattr(block.module, "attn", None), Attention)
    padding = _own_padding(block) if ours else _appended_padding(block)
    rows, columns, tokens = set(), set(), []
    for (y, x), sees in zip(queries, footprints(block, queries), strict=True):
        down, right = _beyond_gap(sees.any(1), y), _beyond_gap(sees.any(0), x)
        rows |= {y} if down.any() else set()
        columns |= {x} if right.any() else set()
        across = sees & (down[:, None] | right)
        tokens.append((int(across.sum()), (y, x), sees.int() + across))
    _, token, seen = max(tokens, key=lambda entry: entry[0])
    return Leaks(tuple(sorted(rows)), tuple(sorted(columns)), padding, token, seen)


def footprints(block: TracedBlock, queries: Sequence[tuple[int, int]]) -> list[Tensor]:
    """[h, w] bool for each of `queries` (row, column): the tokens that the token there sees in this block."""
    found = []
    with torch.inference_mode(False), torch.enable_grad():  # also where the caller has switched gradients off
        x = _tokens(block).requires_grad_()
        out = _as_map(_run(block, _random(block.module), x), block)
        for y, column in queries:
            (gradient,) = torch.autograd.grad(out[0, y, column].sum(), x, retain_graph=True)
            strength = _as_map(gradient, block)[0].abs().amax(-1)
            found.append(strength > strength.max() * _WEAKEST)
    return found


def _examined(n: int, window: int) -> list[int]:
    """Indices of the rows (columns) to examine, of n in windows of `window`.

    All up to three windows; above that those of the first and of the last window, which may see across a border, and the two
    in the middle.
    """
    if n <= 3 * window:
        return list(range(n))
    return [*range(window), n // 2 - 1, n // 2, *range(n - window, n)]


def _beyond_gap(sees: Tensor, at: int) -> Tensor:
    """[n] bool: the rows (columns) that are seen, but not joined to row (column) `at` by an unbroken run of seen ones."""
    unseen = (~sees).nonzero().flatten().tolist()
    first = max((i + 1 for i in unseen if i < at), default=0)
    last = min((i for i in unseen if i > at), default=len(sees))
    beyond = sees.clone()
    beyond[first:last] = False
    return beyond


def _appended_padding(block: TracedBlock) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        x, module = _tokens(block), _random(block.module)
        plain = _as_map(_run(block, module, x), block)
        with _OtherPadding():
            changed = _as_map(_run(block, module, x), block)
    return (plain != changed).any(-1)[0]


def _own_padding(block: TracedBlock) -> Tensor:
    (h, w), n = block.grid, block.window[0] * block.window[1]
    layout = windows(h, w, block.window, block.module.attn.shift)
    real = torch.zeros(len(layout.slot), dtype=torch.bool).index_fill(0, layout.inverse, True)
    padded = ~real.unflatten(0, (-1, n)).repeat_interleave(n, 0)  # [L*N, N]: whether each key of a slot's window is padding
    return (layout.visible & padded).any(1)[layout.inverse].unflatten(0, (h, w))


class _OtherPadding(TorchFunctionMode):
    """Replaces the zeros that F.pad appends by noise."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is not F.pad:
            return out
        inside = func(torch.ones_like(args[0]), *args[1:], **(kwargs or {}))
        noise = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
        return torch.where(inside.bool(), out, noise)


def _random(module: nn.Module) -> nn.Module:
    """A copy in float32 on the CPU with random weights, and with its MLP replaced by the identity: only for footprints.

    Matrices preserve the scale of their input; vectors are near those of the module. It is in eval mode, without gradients.
    """
    module, generator = copy.deepcopy(module).cpu().float().eval().requires_grad_(False), torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.dim() > 1:
            parameter.copy_(noise * max(1, parameter[0].numel()) ** -0.5)
        else:
            parameter.add_(noise * 0.1)
    if isinstance(getattr(module, "mlp", None), Mlp):
        module.mlp = nn.Identity()  # an MLP acts on each token alone, and takes most of the time
    return module


def _tokens(block: TracedBlock) -> Tensor:
    return torch.randn(block.shape, generator=torch.Generator().manual_seed(0))


def _run(block: TracedBlock, module: nn.Module, x: Tensor) -> Tensor:
    if isinstance(module, Block):
        return module(x, Grid(*block.grid))
    return module(x, *(block.arguments or ()))


def _as_map(x: Tensor, block: TracedBlock) -> Tensor:
    """A block's input or output as [B, h, w, C]."""
    if block.layout == "NCHW":
        return x.permute(0, 2, 3, 1)
    return x.unflatten(1, block.grid) if block.layout == "NLC" else x
