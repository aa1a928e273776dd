"""Features of images too large for memory, tile by tile, equal to those of the whole: for models with windows only.

Tiles overlap, and of each only the features that no cut border has reached are kept. How far a cut reaches follows from the
model: a window that misses some of its tokens, or holds one that is not exact, spoils all its tokens, and a token that is not
exact spoils what it is merged into. The windows of a tile must be windows of the whole: tiles begin at multiples of the last
stage's window, and are longer than a window wherever the whole is, for where one window holds an axis there is no shift.
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

_ENDLESS = 1 << 40  # patches of an axis whose end is out of sight


class TileMargins(NamedTuple):
    """What a model asks of tiles, (h, w) in pixels each. Where a tile ends with the image, that side has no margin."""

    alignment: tuple[int, int]  # tiles begin at multiples of it
    before: tuple[int, int]  # what a tile holds above and left of its exact features
    after: tuple[int, int]  # and below and right of them
    smallest: tuple[int, int]  # tile that works for images of any size


def tile_margins(model: Backbone) -> TileMargins:
    """Alignment and overlap of the tiles of a `Swin`, or of a `ViT` with windows in all blocks, for images of any size.

    Raises ValueError for a model of another kind or with a block that attends globally.
    """
    axes = [_Axis.of(model, a) for a in (0, 1)]
    (ph, pw), both = model.patch_embed.patch_size, zip(*((a.alignment, *a.margins(), a.smallest()) for a in axes), strict=True)
    return TileMargins(*((h * ph, w * pw) for h, w in both))


def tiled_features(
    model: Backbone, image: Any, tile: int | tuple[int, int], device: torch.device | str | None = None, pyramid: bool = False
) -> Tensor | tuple[Tensor, list[Tensor]]:
    """model.forward_features(image), up to rounding, computed tile by tile: [B, h, w, C] of a Swin, [B, N, C] of a ViT.

    image: floats [B, in_chans, height, width] on any device; a tensor, an array, a memmap, or whatever has `shape` and slices
    that numpy can read. Each tile is moved to the model's device, its features to `device`, by default that of the image.
    tile: the largest sides (h, w) in pixels, or one for both, overlap included; `tile_margins` tells the smallest. The larger
    the better: of a side, before + after pixels are computed for nothing.
    pyramid: as `forward_intermediates(image)` of a Swin, (features, [map [B, C, h, w] after each stage]); a ViT has one map.
    Memory is saved under torch.no_grad() alone, since gradients need the activations of all tiles. What position adds to
    tokens is computed for the whole grid at once and kept on `device`.
    Raises ValueError for a model in training mode, whose tiles would draw differently, for one that `tile_margins` refuses
    and for a tile that is too small; TypeError for an image of integers.
    """
    last, maps = len(_stages(model)), {}
    if model.training:
        raise ValueError("what training draws (dropout, perturbed positions) would differ between tiles: call model.eval()")
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
    """Where the features to keep lie, in tokens."""

    tile: slice
    whole: slice


class _Span(NamedTuple):
    """A tile along one axis: patches start..stop of the whole, and what to keep after each stage and after the last norm."""

    start: int
    stop: int
    kept: tuple[_Kept, ...]


class _Axis(NamedTuple):
    """What a model does along one axis: of each stage the merging (1 or 2) and (window, shift) of its blocks, in tokens."""

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
        """Patches per token of each stage."""
        return list(accumulate((merge for merge, _ in self.stages), mul))

    @property
    def alignment(self) -> int:
        """Patches of which all tiles begin at a multiple, so that their windows are windows of the whole."""
        stages = zip(self.strides, self.stages, strict=True)
        return math.lcm(*self.strides, *(stride * window for stride, (_, blocks) in stages for window, _ in blocks))

    def exact(self, start: int, stop: int, n: int) -> list[tuple[int, int]]:
        """Tokens lo..hi of the whole, after each stage, that patches start..stop of n give exactly; none where lo >= hi."""
        lo, hi, found = start, stop, []
        for merge, blocks in self.stages:
            hi = -(-hi // merge) if hi == n else hi // merge
            lo, start, stop, n = (-(-i // merge) for i in (lo, start, stop, n))
            for window, shift in blocks:
                shift = axis_shift(n, window, shift)  # type: ignore[assignment]  # of integers one
                if shift and stop - start <= window:  # the tile would not shift, the whole does
                    lo = hi
                if lo > 0:
                    lo = shift - (shift - lo) // window * window
                if hi < n:
                    hi = shift + (hi - shift) // window * window
            found.append((lo, hi))
        return found

    def margins(self) -> tuple[int, int]:
        """Patches of a tile before and after its exact features, where it is cut from an endless axis."""
        step, stride = self.alignment, self.strides[-1]
        before = self.exact(step, _ENDLESS, _ENDLESS)[-1][0] * stride - step
        ends = [(stop, self.exact(0, stop, _ENDLESS)[-1][1] * stride) for stop in range(2 * step, 4 * step + 1)]
        return before, max(stop - hi for (_, shorter), (stop, hi) in pairwise(ends) if hi > shorter)

    def smallest(self) -> int:
        """Patches of the smallest tile whose successor can begin one alignment later."""
        step = self.alignment
        wanted = self.exact(2 * step, _ENDLESS, _ENDLESS)[-1][0]
        return next(n for n in count(step) if self.exact(step, step + n, _ENDLESS)[-1][1] >= wanted)

    def spans(self, n: int, longest: int) -> list[_Span]:
        """Tiles of at most `longest` patches for an axis of n, as few as alignment allows, each as short as it can be."""
        strides, done = self.strides, [0] * len(self.stages)
        found: list[_Span] = []
        while not found or found[-1].stop < n:
            start, stop = self._next(done[-1], n, longest)
            ends = [hi for _, hi in self.exact(start, stop, n)]
            kept = [
                _Kept(slice(lo - start // stride, hi - start // stride), slice(lo, hi))
                for lo, hi, stride in zip(done, ends, strides, strict=True)
            ]
            found.append(_Span(start, stop, (*kept, kept[-1])))
            done = ends
        return found

    def _next(self, done: int, n: int, longest: int) -> tuple[int, int]:
        """Start and stop of the tile that goes on farthest where `done` tokens of the last stage are there."""
        starts = range(done * self.strides[-1] // self.alignment * self.alignment, -1, -self.alignment)
        ends = ((start, min(start + longest, n)) for start in starts)
        tiles = ((start, stop, *self.exact(start, stop, n)[-1]) for start, stop in ends)
        start, stop, hi = next((start, stop, hi) for start, stop, lo, hi in tiles if lo <= done < hi)
        while self.exact(start, stop - 1, n)[-1][1] == hi:  # what lies behind adds nothing
            stop -= 1
        return start, stop


def _stages(model: Backbone) -> list[Stage]:
    """The stages of a Swin, or one with the blocks of a ViT; ValueError for a model that tiles cannot serve."""
    if not isinstance(model, Backbone):
        raise ValueError(f"tiles serve vitrel's Swin and ViT, not {type(model).__name__}")
    stages = [*model.layers] if isinstance(model, Swin) else [Stage(nn.Identity(), [*model.blocks])]  # type: ignore[misc]
    for i, block in enumerate(block for stage in stages for block in stage.blocks):
        if block.window is None:
            raise ValueError(
                f"block {i} attends globally: its tokens see the whole image, so no tile can equal it. Build the ViT with "
                "block_args=dict(window=...) and no global_blocks, or run a strip of tiles by vitrel.inputs.forward_memory"
            )
    if not isinstance(model, Swin):
        stages[0].grad_checkpointing = model.grad_checkpointing
    return stages


def _spans(model: Backbone, size: tuple[int, int], tile: tuple[int, int]) -> list[list[_Span]]:
    """Tiles along each axis of an image of `size` (h, w) pixels; ValueError where `tile` is too small."""
    margins, found = tile_margins(model), []
    for a, (n, patch) in enumerate(zip(model.token_grid(size)[:2], model.patch_embed.patch_size, strict=True)):
        if tile[a] < min(margins.smallest[a], size[a]):
            (h, w), name = margins.smallest, ("height", "width")[a]
            raise ValueError(
                f"tile {name} {tile[a]}: {type(model).__name__} needs tiles of at least {h}x{w} pixels, overlap "
                f"{margins.before[a]} and {margins.after[a]} along {name} with steps of {margins.alignment[a]}, or as large as "
                f"the image of {size[0]}x{size[1]}"
            )
        found.append(_Axis.of(model, a).spans(n, n if size[a] <= tile[a] else tile[a] // patch))
    return found


def _pixels(image: Any, crop: Crop, patch: tuple[int, int]) -> Tensor:
    """The crop's part of the image [B, C, height, width], whatever the image is."""
    y, x = (slice(first * p, (first + n) * p) for first, n, p in zip(crop.origin, (crop.h, crop.w), patch, strict=True))
    pixels = image[:, :, y, x]
    pixels = pixels if isinstance(pixels, Tensor) else torch.from_numpy(np.array(pixels))
    if not pixels.is_floating_point():
        raise TypeError(f"the image holds {pixels.dtype}: pass floats, normalised as the model expects")
    return pixels


def _run(model: Backbone, pixels: Tensor, added: Terms | None, crop: Crop) -> Iterator[Tensor]:
    """Features [B, h, w, C] of a crop after each stage, then after the last norm."""
    weight = model.patch_embed.proj.weight
    x = model.patch_embed(pixels.to(weight))  # the last tile may be less than a patch
    if added is not None:
        x = x + crop_terms(added, crop).tokens.unflatten(0, (crop.h, crop.w)).to(weight)
    for stage in _stages(model):
        x = stage(x)
        yield x
    yield model.norm(x)
