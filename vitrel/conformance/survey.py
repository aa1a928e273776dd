"""Position in a model at one image size, from outside: where each token lies in the image, biases, masks and rotations.

Tokens are located by their content, not by an assumed order: patches of the image have one of two colors by the bits of their
row and column, and the operand of attention that changes with a patch belongs to it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitrel.common.sizes import Size
from vitrel.inspect.recorder import HIDDEN, Pass, Replace, constant, run

CONTENTS = 3  # constant passes, each with other contents, so that no single content is degenerate


class Unlocated(ValueError):
    """The tokens of an attention cannot be placed on the image; the message gives the reason."""


@dataclass
class Located:
    """One attention at one image size, with the position of its tokens."""

    where: str  # path of the module
    number: int  # of the attention in the forward pass
    grid: Size  # tokens (h, w) of the image here
    tokens: Tensor  # [W, N] index (row-major) of the token in each slot of a window; -1 for prefix tokens and padding
    heads: int
    prefix: int  # tokens that are no patches; 0 in windows
    logits: Tensor  # [B, W, H, N, N] of the constant pass: biases and masks
    query: Tensor  # [B, W, H, N, D] of the constant pass
    key: Tensor
    before: tuple[list[Tensor], list[Tensor]]  # candidates for query and key before they are rotated, [B, H, D] each

    @property
    def windows(self) -> int:
        """Number of windows; 1 where attention is global."""
        return len(self.tokens)

    @property
    def places(self) -> Tensor:
        """[W, N, 2] (row, column) of the token in each slot; of no meaning where `tokens` is -1."""
        at = self.tokens.clamp(min=0)
        return torch.stack((at // self.grid[1], at % self.grid[1]), -1)

    @property
    def visible(self) -> Tensor:
        """[W, N, N] bool: pairs that no head hides."""
        logits = self.logits[0].amax(1)  # [W, N, N]
        return logits >= logits.amax(-1, keepdim=True) + HIDDEN

    @property
    def bias(self) -> Tensor:
        """[B, W, H, N, N] logits, 0 where a mask hides the pair."""
        return torch.where(self.visible[None, :, None], self.logits, 0.0)


class Embedding(NamedTuple):
    """Position added to tokens before the first attention."""

    where: str
    grid: Size
    patches: Tensor  # [h, w, C]
    prefix: Tensor  # [P, C]; P may be 0


@dataclass
class Survey:
    """All position that a forward pass at one image size shows."""

    size: Size  # of the image, (h, w) in pixels
    attentions: list[Located] = field(default_factory=list)
    embeddings: list[Embedding] = field(default_factory=list)
    unlocated: dict[str, str] = field(default_factory=dict)  # {module: why its tokens could not be placed}
    softmaxes: int = 0  # attention that was seen at all


def survey(call: Callable[[Tensor], Any], model: nn.Module, size: Size, channels: int = 3) -> Survey:
    """Examine position in `model` at images of `size`. Raises what the model raises for the size.

    Args:
        call: runs the model on images [B, channels, height, width].
    """
    parameter = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(0))

    def images(batch: int) -> Tensor:
        made = torch.randn(batch, channels, *size, generator=torch.Generator().manual_seed(0))
        return made.to(parameter.device, parameter.dtype)

    plain = run(call, model, images(1))
    found = Survey(size, softmaxes=len(plain.attentions))
    if not plain.attentions and not plain.added:
        return found
    fixed = [run(call, model, images(1), constant(plain, content)) for content in range(CONTENTS)]
    coarse = _changes(call, model, images(1), size)
    last: dict[int, int] = {}  # {stride: number of the last attention with it}
    layouts: list[_Layout | Unlocated] = []
    groups = _groups(fixed[0])
    for group in groups:
        try:
            layouts.append(_layout(group, fixed[0], coarse, size))
            last[layouts[-1].stride] = group[-1]
        except Unlocated as reason:
            layouts.append(reason)
    codes: dict[int, Code] = {}

    def coded(stride: int) -> Code:
        if stride not in codes:
            grid = size[0] // stride, size[1] // stride
            made, bits = _code(grid, stride, images(1).new_empty(0), channels, size)
            codes[stride] = Code(run(call, model, made, Replace(softmax=True), last.get(stride)), grid, bits)
        return codes[stride]

    mixed = ""
    for group, layout in zip(groups, layouts, strict=True):
        where = plain.attentions[group[0]].where
        try:
            if mixed or isinstance(layout, Unlocated):
                raise layout if isinstance(layout, Unlocated) and not mixed else Unlocated(mixed)
            found.attentions.append(_locate(group, fixed, layout, coded(layout.stride)))
        except Unlocated as reason:
            found.unlocated[where] = str(reason)
            mixed = mixed or (str(reason) if "several patches" in str(reason) else "")  # later tokens are mixed too
    for number, added in enumerate(plain.added):
        embedding = _embedding(number, added, coarse, size, coded)
        if embedding is not None:
            found.embeddings.append(embedding)
    return found


class Code(NamedTuple):
    """A coded pass: images whose patches have colors by the bits of their row and column on a grid."""

    values: Pass
    grid: Size
    bits: int  # of the row; the bits of the column follow


class _Layout(NamedTuple):
    stride: int  # pixels between tokens
    heads: int


def _groups(found: Pass) -> list[list[int]]:
    """Numbers of attentions that are one: consecutive ones of the same queries, of a module that computes windows in parts."""
    groups: list[list[int]] = []
    for number, one in enumerate(found.attentions):
        before = found.attentions[groups[-1][-1]] if groups else None
        same = before is not None and before.where == one.where and before.linears == one.linears
        if same and before.logits.shape[1:] == one.logits.shape[1:]:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


def _whole(group: list[int], found: Pass, name: str, batch: int, heads: int) -> Tensor:
    """The field `name` of a group of attentions, [B, W, H, ...]."""
    return torch.cat([getattr(found.attentions[n], name).unflatten(0, (batch, -1, heads)) for n in group], 1)


def _changes(call: Callable, model: nn.Module, like: Tensor, size: Size) -> Pass:
    """An isolated pass of two images, each of one color."""
    images = torch.stack([_color(which, like.shape[1]).to(like)[:, None, None].expand(-1, *size) for which in (0, 1)])
    return run(call, model, images.contiguous(), Replace(softmax=True))


def _color(which: int, channels: int) -> Tensor:
    """One of two colors [channels], far apart in direction, so that no norm makes them alike."""
    generator = torch.Generator().manual_seed(11 + which)
    return torch.randn(channels, generator=generator) + (1.0, -0.7)[which]


def _code(grid: Size, stride: int, like: Tensor, channels: int, size: Size) -> tuple[Tensor, int]:
    """Images whose patches have a color each: two of one color, then one per bit of the row, then of the column."""
    bits = [max(1, math.ceil(math.log2(n))) for n in grid]
    rows, columns = torch.arange(grid[0]), torch.arange(grid[1])
    maps = [torch.zeros(grid, dtype=torch.bool), torch.ones(grid, dtype=torch.bool)]
    maps += [((rows >> b) & 1).bool()[:, None].expand(grid) for b in range(bits[0])]
    maps += [((columns >> b) & 1).bool()[None].expand(grid) for b in range(bits[1])]
    patches = torch.stack(maps).repeat_interleave(stride, 1).repeat_interleave(stride, 2)  # [B, h, w] pixels
    pixels = torch.zeros(len(maps), *size, dtype=torch.bool)
    pixels[:, : patches.shape[1], : patches.shape[2]] = patches
    colors = torch.stack([_color(which, channels) for which in (0, 1)])
    return colors[pixels.long()].permute(0, 3, 1, 2).contiguous().to(like), bits[0]


def _stride(size: Size, tokens: int) -> int:
    """Pixels between tokens, where `tokens` of them (in all) cover an image of `size`; 0 if they are no grid of it."""
    stride = round(math.sqrt(size[0] * size[1] / max(tokens, 1)))
    fits = tokens and stride and not (size[0] % stride or size[1] % stride)
    return stride if fits and (size[0] // stride) * (size[1] // stride) == tokens else 0


def _read(values: Tensor, bits: int, what: str) -> Tensor:
    """Index codes (row, column) from operands [B, M, N, D] of a coded pass; -1 where nothing changes. Returns [M, N, 2]."""
    zero, one, coded = values[0], values[1], values[2:]
    gap = (one - zero).square().sum(-1)  # [M, N]
    scale = gap.amax().clamp(min=1e-30)
    changes = gap > scale * 1e-8
    to_zero, to_one = ((coded - end).square().sum(-1) for end in (zero, one))
    bit = to_one < to_zero
    rest = torch.minimum(to_zero, to_one)[:, changes] / gap[changes]
    if rest.numel() and rest.max() > 1e-4:
        raise Unlocated(f"{what} depends on several patches before attention, as after convolutions")
    weights = [1 << b for b in range(bits)], [1 << b for b in range(len(coded) - bits)]
    row, column = (
        (part * torch.tensor(w, device=part.device)[:, None, None]).sum(0)
        for part, w in zip((bit[:bits], bit[bits:]), weights, strict=True)
    )
    return torch.where(changes[..., None], torch.stack((row, column), -1), -1)


def _layout(group: list[int], fixed: Pass, coarse: Pass, size: Size) -> _Layout:
    """Heads, and pixels between tokens, of an attention; raises Unlocated where its tokens are no grid of the image."""
    queries, keys = fixed.attentions[group[0]].logits.shape[-2:]
    if queries != keys:
        raise Unlocated(f"{queries} queries attend to {keys} keys, so the tokens are pooled")
    heads = min(_heads(fixed.attentions[n].query) for n in group)
    lead = _whole(group, coarse, "query", 2, heads)[:, :, 0]  # [2, W, N, D]
    changes = (lead[1] - lead[0]).square().sum(-1)
    count = int((changes > changes.amax() * 1e-8).sum())
    strides = [_stride(size, count)]
    if not strides[0]:  # padding may hold copies of tokens
        sides = [s for s in range(2, min(size) + 1) if size[0] % s == size[1] % s == 0]
        strides = [s for s in sides if size[0] * size[1] // s**2 <= count][:1]
    if not strides:
        raise Unlocated(f"{count} tokens are no grid of {size[0]}x{size[1]} pixels")
    return _Layout(strides[0], heads)


def _heads(query: Tensor) -> int:
    """Number of heads of queries [L, N, D] with the same content in every window: L = windows * heads."""
    lead = len(query)
    for heads in (h for h in range(1, lead) if lead % h == 0):
        parts = query.unflatten(0, (-1, heads))
        if torch.allclose(parts, parts[:1].expand_as(parts), rtol=1e-4, atol=1e-5):
            return heads
    return lead


def _locate(group: list[int], fixed: list[Pass], layout: _Layout, code: Code) -> Located:
    grid, heads, where = code.grid, layout.heads, fixed[0].attentions[group[0]].where
    query = _whole(group, code.values, "query", 2 + code.bits + _column_bits(grid), heads)[:, :, 0]  # of the first head
    at = _read(query, code.bits, where)
    tokens = torch.where(at[..., 0] >= 0, at[..., 0] * grid[1] + at[..., 1], -1)  # [W, N]
    logits, query, key = (torch.cat([_whole(group, one, n, 1, heads) for one in fixed]) for n in ("logits", "query", "key"))
    before = tuple(_joined([one.attentions[group[0]].before[side] for one in fixed], heads) for side in (0, 1))  # [2]
    found = Located(where, group[0], grid, tokens, heads, 0, logits, query, key, before)
    if int((tokens >= 0).sum()) > grid[0] * grid[1]:
        found.tokens = tokens = _without_copies(found)
    if not torch.equal(tokens[tokens >= 0].sort()[0].cpu(), torch.arange(grid[0] * grid[1])):
        raise Unlocated(f"the tokens of {where} are not those of a {grid[0]}x{grid[1]} grid, each once")
    leading = int((tokens[0] >= 0).long().argmax())
    if len(tokens) == 1 and not (tokens[0, leading:] < 0).any():
        found.prefix = leading  # otherwise they are padding
    return found


def _joined(passes: list[list[Tensor]], heads: int) -> list[Tensor]:
    """[B, H, D] of the parts [1, H or W * H, D] of each pass, one for each candidate."""
    candidates = zip(*passes, strict=True) if len({len(one) for one in passes}) == 1 else ()
    return [torch.cat([part[:, :heads] for part in parts]) for parts in candidates if parts[0].shape[1] % heads == 0]


def _without_copies(found: Located) -> Tensor:
    """`tokens` [W, N] with -1 for copies of tokens that fill padding: of equal ones the slot that sees most tokens is real."""
    tokens = found.tokens.clone()
    sees = torch.stack([
        torch.tensor([len(row[seen & (row >= 0)].unique()) for seen in visible])
        for row, visible in zip(tokens, found.visible, strict=True)
    ])  # fmt: skip
    flat, sees = tokens.flatten(), sees.flatten()
    for token in flat[flat >= 0].unique(return_counts=False):
        same = (flat == token).nonzero().flatten()
        if len(same) > 1:
            flat[same[same != same[sees[same].argmax()]]] = -1
    return flat.view_as(tokens)


def _column_bits(grid: Size) -> int:
    return max(1, math.ceil(math.log2(grid[1])))


def _embedding(number: int, added: Any, coarse: Pass, size: Size, coded: Callable) -> Embedding | None:
    """The embedding as a map, or None if it is no position: the rows of the tokens must be those of a grid of the image."""
    live = _rows(coarse.added[number].tokens, added.tokens)  # [2, N, C]
    if live is None:
        return None
    changes = (live[1] - live[0]).square().sum(-1)
    changes = changes > changes.amax() * 1e-8
    stride = _stride(size, int(changes.sum()))
    try:
        if not stride:
            return None
        values, grid, bits = coded(stride)
        code = _read(_rows(values.added[number].tokens, added.tokens)[:, None], bits, added.where)[0]  # [N, 2]
    except Unlocated:
        return None
    position = _rows(added.position.expand(1, *added.tokens.shape[1:]) if added.position.dim() < added.tokens.dim()
                     else added.position, added.tokens)  # fmt: skip
    patch = code[:, 0] >= 0
    index = code[patch, 0] * grid[1] + code[patch, 1]
    if position is None or position.shape[1] != len(code) or len(index.unique()) != grid[0] * grid[1]:
        return None
    where = torch.argsort(index)
    rows = position[0][patch][where].unflatten(0, grid)
    return Embedding(added.where, grid, rows, position[0][~patch])


def _rows(tokens: Tensor, like: Tensor) -> Tensor | None:
    """[B, N, C] of tokens as a sequence or a map with the channels last."""
    return tokens.flatten(1, -2) if tokens.dim() >= 3 and tokens.shape[1:] == like.shape[1:] else None
