"""Features of large images, computed tile by tile and equal to those of the whole image, for models with windowed attention
only.

Tiles overlap, and only those features of a tile are kept that no cut border influences. How far the influence of a cut reaches
follows from the model: a window that lacks some of its tokens, or contains an inexact token, makes all its tokens inexact, and
an inexact token makes the token inexact into which it is merged. The windows of a tile must be windows of the whole image. So
tiles begin at multiples of the last stage's window, and are longer than a window wherever the whole image is, since an axis
that fits into one window is not shifted.
"""

import math
from collections.abc import Iterator
from itertools import accumulate, count, pairwise, product
from operator import mul
from typing import Any, NamedTuple

import numpy as np
import torch
from timm.layers import to_2tuple
from torch import Tensor, nn

from vitrel.inputs.crop import Crop, crop_terms
from vitrel.models.backbone import Backbone, check_image
from vitrel.models.swin import Stage, Swin
from vitrel.ops.window import axis_shift
from vitrel.position import Terms

_ENDLESS = 1 << 40  # patches of an axis so long that its end has no influence


class TileMargins(NamedTuple):
    """Requirements of a model on tiles, all (h, w) in pixels. A tile needs no margin at the image's border.

    Attributes:
        alignment: tiles begin at multiples of this.
        before: margin above and left in which the features of a tile are not those of the whole image.
        after: the same below and right.
        smallest: smallest tile with which images of any size can be covered.
    """

    alignment: tuple[int, int]
    before: tuple[int, int]
    after: tuple[int, int]
    smallest: tuple[int, int]


def tile_margins(model: Backbone) -> TileMargins:
    """Return alignment, margins and smallest size, in pixels, of tiles for a `Swin`, or a `ViT` with windows in all blocks.

    Raises:
        ValueError: the model is another, or has a block with global attention.
    """
    axes = [_Axis.of(model, a) for a in (0, 1)]
    (ph, pw), both = model.patch_embed.patch_size, zip(*((a.alignment, *a.margins(), a.smallest()) for a in axes), strict=True)
    return TileMargins(*((h * ph, w * pw) for h, w in both))


def tiled_features(
    model: Backbone, image: Any, tile: int | tuple[int, int], device: torch.device | str | None = None, pyramid: bool = False
) -> Tensor | tuple[Tensor, list[Tensor]]:
    """Compute model.forward_features(image), up to rounding, tile by tile: [B, h, w, C] of a Swin, [B, N, C] of a ViT.

    Only features that no cut influences are used. Memory is saved only under torch.no_grad(), since gradients need the
    activations of all tiles. An absolute embedding is computed for the whole grid at once and stored on `device`.

    Args:
        model: a Swin, or a ViT with windows in all blocks, in evaluation mode.
        image: floats [B, in_chans, height, width] on any device: a tensor, an array, a memmap, or an object with `shape` whose
            slices numpy can read. Each tile is moved to the model's device.
        tile: largest sides of a tile (h, w) in pixels, or one number for both, overlap included; `tile_margins` gives the
            smallest. Larger tiles are faster, since neighbors overlap by its margins `before` and `after`.
        device: of the result; None: that of the image, the CPU for an array.
        pyramid: return (features, [map [B, C, h, w] after each stage]), as `forward_intermediates` of a Swin; a ViT has one
            map.

    Raises:
        ValueError: the model is in training mode or refused by `tile_margins`, or the tile is too small.
        TypeError: the image has integers.
    """
    last, maps = len(_stages(model)), {}
    if model.training:
        raise ValueError(
            "in training mode random draws (dropout, perturbed positions) would differ between tiles: call model.eval()"
        )
    check_image(torch.empty(tuple(image.shape), device="meta"), model.in_chans, model.patch_embed.patch_size)
    size, device = (int(image.shape[2]), int(image.shape[3])), torch.device(device or getattr(image, "device", "cpu"))
    rows, columns = _spans(model, size, to_2tuple(tile))
    whole = model.token_grid(size)
    added = None if model.pos_embed is None else Terms(tokens=model.pos_embed(whole).tokens.to(device))
    for y, x in product(rows, columns):
        crop = Crop(whole, (y.start, x.start), y.stop - y.start, x.stop - x.start)
        for i, new in enumerate(_run(model, _pixels(image, crop, model.patch_embed.patch_size), added, crop)):
            if i == last or pyramid:
                h, w = y.kept[i], x.kept[i]
                if i not in maps:
                    ends = rows[-1].kept[i].whole.stop, columns[-1].kept[i].whole.stop
                    maps[i] = torch.empty(len(new), *ends, new.shape[-1], dtype=new.dtype, device=device)
                maps[i][:, h.whole, w.whole] = new[:, h.tile, w.tile]
    features = maps.pop(last) if isinstance(model, Swin) else maps.pop(last).flatten(1, 2)
    return (features, [m.permute(0, 3, 1, 2).contiguous() for m in maps.values()]) if pyramid else features


class _Kept(NamedTuple):
    """Features of a tile that go into the result after a stage, along one axis.

    `tile` is their slice of the tile's tokens, `whole` that of the whole image's.
    """

    tile: slice
    whole: slice


class _Span(NamedTuple):
    """A tile along one axis, patches `start` to `stop` - 1, and which of its features go into the result.

    `kept` has an entry for each stage, then one for the features after the last norm.
    """

    start: int
    stop: int
    kept: tuple[_Kept, ...]


class _Axis(NamedTuple):
    """What tiling needs to know of a model along one axis, rows or columns.

    `stages` has for each stage the factor (1 or 2) by which it first merges tokens, and its blocks' (window, shift) in tokens.
    """

    stages: tuple[tuple[int, tuple[tuple[int, int], ...]], ...]

    @classmethod
    def of(cls, model: Backbone, axis: int) -> "_Axis":
        stages = []
        for stage in _stages(model):
            blocks = tuple((block.attn.window[axis], block.attn.shift[axis]) for block in stage.blocks)
            stages.append((1 if isinstance(stage.downsample, nn.Identity) else 2, blocks))
        return cls(tuple(stages))

    @property
    def strides(self) -> list[int]:
        """List of the number of patches along the axis that a token of each stage covers."""
        return list(accumulate((merge for merge, _ in self.stages), mul))

    @property
    def alignment(self) -> int:
        """Number of patches at whose multiples tiles begin, so that their windows are windows of the whole image."""
        stages = zip(self.strides, self.stages, strict=True)
        return math.lcm(*self.strides, *(stride * window for stride, (_, blocks) in stages for window, _ in blocks))

    def exact(self, start: int, stop: int, n: int) -> list[tuple[int, int]]:
        """Return for each stage the range (lo, hi) of the tokens, lo to hi - 1, that a tile computes as the whole image would.

        Tokens of a stage are numbered on the whole axis. The range is empty if lo >= hi.

        Args:
            start: first patch of the tile.
            stop: patch after its last.
            n: patches of the axis.
        """
        lo, hi, ranges = start, stop, []
        for merge, blocks in self.stages:
            hi = -(-hi // merge) if hi == n else hi // merge
            lo, start, stop, n = (-(-i // merge) for i in (lo, start, stop, n))
            for window, shift in blocks:
                shift = axis_shift(n, window, shift)  # type: ignore[assignment]  # an int for ints
                if shift and stop - start <= window:  # the whole axis is shifted, the tile would not be
                    lo = hi
                if lo > 0:
                    lo = shift - (shift - lo) // window * window
                if hi < n:
                    hi = shift + (hi - shift) // window * window
            ranges.append((lo, hi))
        return ranges

    def margins(self) -> tuple[int, int]:
        """Return how many patches at the start and at the end of a tile give features other than those of the whole image.

        The tile is cut on both sides; the numbers are the largest of all tile lengths.
        """
        step, stride = self.alignment, self.strides[-1]
        before = self.exact(step, _ENDLESS, _ENDLESS)[-1][0] * stride - step
        ends = [(stop, self.exact(0, stop, _ENDLESS)[-1][1] * stride) for stop in range(2 * step, 4 * step + 1)]
        return before, max(stop - hi for (_, shorter), (stop, hi) in pairwise(ends) if hi > shorter)

    def smallest(self) -> int:
        """Return the least length in patches of a tile whose correct features reach those of a tile one alignment later."""
        step = self.alignment
        target = self.exact(2 * step, _ENDLESS, _ENDLESS)[-1][0]
        return next(n for n in count(step) if self.exact(step, step + n, _ENDLESS)[-1][1] >= target)

    def spans(self, n: int, longest: int) -> list[_Span]:
        """Return the fewest tiles of at most `longest` patches whose correct features cover an axis of n patches, in order.

        Each is as short as possible. `longest` must be at least `smallest()`, or n.
        """
        strides, done = self.strides, [0] * len(self.stages)
        spans: list[_Span] = []
        while not spans or spans[-1].stop < n:
            start, stop = self._next(done[-1], n, longest)
            ends = [hi for _, hi in self.exact(start, stop, n)]
            kept = [
                _Kept(slice(lo - start // stride, hi - start // stride), slice(lo, hi))
                for lo, hi, stride in zip(done, ends, strides, strict=True)
            ]
            spans.append(_Span(start, stop, (*kept, kept[-1])))
            done = ends
        return spans

    def _next(self, done: int, n: int, longest: int) -> tuple[int, int]:
        """Return the first patch of the next tile and that after its last, if `done` tokens of the last stage are computed.

        It is the latest tile of at most `longest` patches whose exact tokens continue these, without patches at its end that
        add none; n is the length of the axis in patches.
        """
        starts = range(done * self.strides[-1] // self.alignment * self.alignment, -1, -self.alignment)
        ends = ((start, min(start + longest, n)) for start in starts)
        tiles = ((start, stop, *self.exact(start, stop, n)[-1]) for start, stop in ends)
        start, stop, hi = next((start, stop, hi) for start, stop, lo, hi in tiles if lo <= done < hi)
        while self.exact(start, stop - 1, n)[-1][1] == hi:  # its last patch adds no exact token
            stop -= 1
        return start, stop


def _stages(model: Backbone) -> list[Stage]:
    """Return the stages of a Swin, or the blocks of a ViT as one stage; ValueError for another model or a global block."""
    if not isinstance(model, Backbone):
        raise ValueError(f"tiles need a Swin or ViT of vitrel, not {type(model).__name__}")
    stages = [*model.layers] if isinstance(model, Swin) else [Stage(nn.Identity(), [*model.blocks])]  # type: ignore[misc]
    for i, block in enumerate(block for stage in stages for block in stage.blocks):
        if block.window is None:
            raise ValueError(
                f"block {i} attends globally, so its features depend on the whole image. Build the ViT with "
                "block_args=dict(window=...) and no global_blocks, or run a strip of tiles by vitrel.inputs.forward_memory"
            )
    if not isinstance(model, Swin):
        stages[0].grad_checkpointing = model.grad_checkpointing
    return stages


def _spans(model: Backbone, size: tuple[int, int], tile: tuple[int, int]) -> list[list[_Span]]:
    """Return the tiles along rows and along columns of an image of `size` (h, w) pixels, at most `tile` (h, w) pixels large.

    ValueError if `tile` is too small.
    """
    margins, spans = tile_margins(model), []
    for a, (n, patch) in enumerate(zip(model.token_grid(size)[:2], model.patch_embed.patch_size, strict=True)):
        if tile[a] < min(margins.smallest[a], size[a]):
            (h, w), name = margins.smallest, ("height", "width")[a]
            raise ValueError(
                f"tile {name} {tile[a]} is too small: {type(model).__name__} needs tiles of at least {h}x{w} pixels, overlap "
                f"{margins.before[a]} and {margins.after[a]} along {name} with steps of {margins.alignment[a]}, or as large as "
                f"the image of {size[0]}x{size[1]}"
            )
        spans.append(_Axis.of(model, a).spans(n, n if size[a] <= tile[a] else tile[a] // patch))
    return spans


def _pixels(image: Any, crop: Crop, patch: tuple[int, int]) -> Tensor:
    """Return the pixels of the image in the crop, [B, C, height, width] floats; TypeError for an image of integers.

    Args:
        image: [B, C, height, width], a tensor or an array, of which only the crop is read; pixels beyond its end are absent.
        crop: in patches.
        patch: (h, w) of a patch in pixels.
    """
    y, x = (slice(first * p, (first + n) * p) for first, n, p in zip(crop.origin, (crop.h, crop.w), patch, strict=True))
    pixels = image[:, :, y, x]
    pixels = pixels if isinstance(pixels, Tensor) else torch.from_numpy(np.array(pixels))
    if not pixels.is_floating_point():
        raise TypeError(f"the image has dtype {pixels.dtype}: pass floats, normalized as the model expects")
    return pixels


def _run(model: Backbone, pixels: Tensor, added: Terms | None, crop: Crop) -> Iterator[Tensor]:
    """Yield the features [B, h, w, C] of a crop after each stage, then after the last norm.

    Args:
        model: as in `tiled_features`; a ViT counts as one stage.
        pixels: of the crop, [B, in_chans, height, width], any device and dtype; they are converted to those of the model.
        added: the absolute embedding of the whole grid, or None.
        crop: the tile's patches.
    """
    weight = model.patch_embed.proj.weight
    x = model.patch_embed(pixels.to(weight))  # without the size check, since the last tile may be less than a patch
    if added is not None:
        x = x + crop_terms(added, crop).tokens.unflatten(0, (crop.h, crop.w)).to(weight)
    for stage in _stages(model):
        x = stage(x)
        yield x
    yield model.norm(x)
