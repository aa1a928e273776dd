"""One forward pass without numbers: which blocks with attention meet which grid, and what forward resamples on its way.

The pass runs on the meta device, so it costs next to nothing at any size and needs no memory.
"""

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from timm.layers import to_2tuple
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from vitrel.grid import Grid
from vitrel.inspect.attention_layer import evaluating
from vitrel.inspect.resolution_report import Pair
from vitrel.layers import Attention
from vitrel.ops.window import axis_shift
from vitrel.position import PositionEncoding
from vitrel.position.terms import sum_counts

_KINDS = ("bicubic", "bilinear", "nearest", "linear", "grid_sampler")
MOST_PREFIX = 32  # tokens before the patches: more than any model has


class StageWindows(NamedTuple):
    """The blocks on one grid with one window; all pairs (h, w) in tokens."""

    blocks: int
    grid: Pair
    window: Pair | None  # None: global
    shift: Pair  # of the shifted blocks
    padding: Pair  # rows below and columns right that fill the last windows
    strided: bool = False  # MaxViT's grid attention: a window holds tokens at equal distances over the whole grid

    @property
    def padded_share(self) -> float:
        """Share of padding in the padded grid, 0 to 1."""
        (h, w), (down, right) = self.grid, self.padding
        return 1 - h * w / ((h + down) * (w + right))


class SeenBlock(NamedTuple):
    """A block with attention as one forward pass meets it."""

    name: str
    block: nn.Module
    grid: Pair
    shape: tuple[int, ...]  # of its input: [B, h, w, C], [B, C, h, w] or [B, N, C]
    layout: str  # "NHWC" | "NCHW" | "NLC"
    window: Pair | None  # None: global
    shift: Pair | None  # None: this kind of block has none at any size
    others: tuple | None  # its further arguments; None where there are tensors among them

    @property
    def strided(self) -> bool:
        """Whether its windows hold tokens at equal distances over the whole grid (MaxViT's grid attention)."""
        return not getattr(self.block, "partition_block", True)


class Traced(NamedTuple):
    """What one forward pass at one size showed."""

    blocks: tuple[SeenBlock, ...]
    encodings: tuple[tuple[PositionEncoding, Grid], ...]  # ours, also inside another's trunk, with the grid they are asked on
    resampled: dict[str, int]  # {rule: parameter values}, by our encodings or by interpolation inside forward


def trace(model: nn.Module, size: Pair) -> Traced:
    """Forward of one image of `size` (h, w) pixels on the meta device. Raises what forward raises for a size it refuses."""
    named = _values(model)
    blank = {id(v): torch.empty_like(v, dtype=float32(v), device="meta") for v in named.values()}
    meta = {name: blank[id(v)] for name, v in named.items()}
    image, blocks, encodings = blank_image(model, size), [], []
    patches = patch_grid(model, size)

    def see(name: str, module: nn.Module) -> RemovableHandle:
        def hook(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if isinstance(module, PositionEncoding):
                encodings.append((module, args[0]))
            else:
                seen = _seen(name, module, args, kwargs, size, patches)
                blocks.extend([] if seen is None else [seen])

        return module.register_forward_pre_hook(hook, with_kwargs=True)

    own = _encodings(model)
    parts = {name: module for name, module in model.named_modules() if isinstance(getattr(module, "attn", None), nn.Module)}
    parts.pop("", None)  # the model itself
    hooks = [see(name, module) for name, module in (own | parts).items()]
    foreign = {name: value for name, value in meta.items() if not any(name.startswith(f"{part}.") for part in own)}
    watch = _Resampling(image, foreign)
    try:
        with torch.no_grad(), evaluating(model), watch:
            functional_call(model, meta, (image,), tie_weights=False)  # _values has every name of a tied one
    finally:
        for hook in hooks:
            hook.remove()
    resampled = sum_counts([watch.found, *(encoding.resized(grid) for encoding, grid in encodings)])
    return Traced(tuple(blocks), tuple(encodings), resampled)


def blank_image(model: nn.Module, size: Pair) -> Tensor:
    """An image [1, C, h, w] for `model` without values, on the meta device."""
    channels = getattr(model, "in_chans", None) or getattr(model, "default_cfg", {}).get("input_size", (3,))[0]
    return torch.empty(1, channels, *size, device="meta")


def stage_windows(blocks: Iterable[SeenBlock]) -> tuple[StageWindows, ...]:
    """One line for the blocks that have the same grid and window, in the order of the first of each."""
    lines: dict[tuple, StageWindows] = {}
    for seen in blocks:
        padding = (0, 0) if seen.window is None else tuple(-n % m for n, m in zip(seen.grid, seen.window, strict=True))
        kind = seen.grid, seen.window, seen.strided
        known = lines.get(kind) or StageWindows(0, seen.grid, seen.window, (0, 0), padding, seen.strided)
        lines[kind] = known._replace(blocks=known.blocks + 1, shift=max(known.shift, seen.shift or (0, 0)))
    return tuple(lines.values())


def _values(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of every module, a tied one under several names, but none twice for a module at several paths.

    functional_call would put back the second time what it has put in the first.
    """
    return {
        f"{name}.{leaf}".removeprefix("."): value
        for name, module in model.named_modules()
        for leaf, value in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    }


def _encodings(model: nn.Module) -> dict[str, PositionEncoding]:
    """Our encodings by name, without the parts of compositions."""
    found: dict[str, PositionEncoding] = {}
    for name, module in model.named_modules():
        if isinstance(module, PositionEncoding) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return found


def _window_and_shift(block: nn.Module, grid: Pair) -> tuple[Pair | None, Pair | None]:
    if isinstance(block.attn, Attention):
        window, shift = block.attn.window, block.attn.shift
        if window is None:
            return None, None
        return tuple(window[:2]), tuple(axis_shift(n, m, s) for s, n, m in zip(shift, grid, window[:2], strict=True))
    value = getattr(block, "window_size", None) or getattr(block, "partition_size", None) or getattr(block.attn, "ws", None)
    if hasattr(block, "window_resolution"):  # EfficientViT, whose windows shrink to a smaller grid
        value = block.attn.resolution
    window, shift = to_2tuple(value or 0), getattr(block, "shift_size", None)
    return tuple(window) if min(window) > 0 else None, None if shift is None else tuple(to_2tuple(shift))


def patch_grid(model: nn.Module, size: Pair) -> Pair | None:
    """Patches (h, w) of an image of `size` (h, w) pixels, where the model has timm's patch embedding."""
    embed = getattr(model, "patch_embed", None)
    return tuple(embed.dynamic_feat_size(size)) if hasattr(embed, "dynamic_feat_size") else None


def float32(value: Tensor) -> torch.dtype:
    """float32 for what is half precision, so that the image need not be."""
    return torch.float32 if value.is_floating_point() else value.dtype


def _seen(
    name: str, block: nn.Module, args: tuple, kwargs: dict[str, Any], size: Pair, patches: Pair | None
) -> SeenBlock | None:
    """None for what is no map of tokens."""
    x = args[0] if args else None
    if not isinstance(x, Tensor) or x.dim() not in (3, 4):
        return None
    shape = tuple(x.shape)
    if x.dim() == 4:
        layout = _layout(block, shape, size)
        grid = shape[1:3] if layout == "NHWC" else shape[2:]
    else:
        layout = "NLC"
        told = (tuple(a)[:2] for a in args[1:] if isinstance(a, tuple | list) and _is_grid(a[:2], shape[1]))
        grid = next(told, patches if patches and 0 <= shape[1] - patches[0] * patches[1] <= MOST_PREFIX else None)
    if grid is None:
        return None
    tensors = any(isinstance(value, Tensor) for value in tree_leaves((args[1:], kwargs)))
    return SeenBlock(name, block, grid, shape, layout, *_window_and_shift(block, grid), None if tensors else args[1:])


def _layout(block: nn.Module, shape: tuple[int, ...], size: Pair) -> str:
    """Where the channels are: those of its first weights, or, where that does not tell, the grid has the image's shape."""
    first = next((module for module in block.modules() if isinstance(getattr(module, "weight", None), Tensor)), None)
    channels = getattr(first, "in_features", None) or getattr(first, "in_channels", None) or len(getattr(first, "weight", ()))
    if channels in (shape[1], shape[-1]) and shape[1] != shape[-1]:
        return "NHWC" if channels == shape[-1] else "NCHW"
    grids = {"NHWC": shape[1:3], "NCHW": shape[2:]}
    return min(grids, key=lambda layout: abs(math.log(grids[layout][0] * size[1] / (grids[layout][1] * size[0]))))


def _is_grid(pair: Any, tokens: int) -> bool:
    return len(pair) == 2 and all(isinstance(n, int) for n in pair) and pair[0] * pair[1] == tokens


class _Resampling(TorchDispatchMode):
    """Notes every interpolation whose input does not depend on the image, with the parameter or buffer it comes from."""

    def __init__(self, image: Tensor, named: dict[str, Tensor]):
        super().__init__()
        self.found: dict[str, int] = {}
        self._image = {id(image)}
        self._origin = {id(value): name for name, value in named.items()}
        self._kept = [image, *named.values()]  # alive, so that no id is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = [id(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        made = [value for value in tree_leaves(out) if isinstance(value, Tensor)]
        self._kept += made
        if any(key in self._image for key in read):
            self._image.update(map(id, made))
            return out
        origin = next((self._origin[key] for key in read if key in self._origin), None)
        if origin is not None:
            self._origin.update((id(value), origin) for value in made)
            kind = next((k for k in _KINDS if k in func.__name__), None) if interpolates(func.__name__) else None
            if kind is not None:
                rule = f"{origin.rpartition('.')[2]} {kind.replace('grid_sampler', 'sampled')}"
                self.found[rule] = self.found.get(rule, 0) + args[0].numel()
        return out


def interpolates(name: str) -> bool:
    """Whether the operation of this name resamples a map of values."""
    return "upsample" in name or "grid_sampler" in name
