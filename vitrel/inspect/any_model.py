"""A trace of any model's forward pass at any image size (`trace`), and a model adapted to an image size (`at_size`).

`trace` runs forward on the meta device, so it computes no values and needs no memory. vitrel's models take every size. Some
of timm's models take every size, some resample an embedding inside forward (`dynamic_img_size`), some are changed for the size
(`set_input_size`), and some take only the size they were built for.
"""

import copy
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

from vitrel.common.modules import evaluating
from vitrel.common.sizes import Size, format_size
from vitrel.grid import Grid
from vitrel.layers import Attention
from vitrel.models.backbone import Backbone
from vitrel.ops.window import axis_shift
from vitrel.position import PositionEncoding, create_position, key_of
from vitrel.position.terms import Composition, Terms, sum_counts

REFUSALS = (AssertionError, IndexError, RuntimeError, TypeError, ValueError)  # errors by which timm's models refuse a size
MOST_PREFIX = 32  # maximum number of prefix tokens assumed when a sequence is matched to a grid
_INTERPOLATIONS = ("bicubic", "bilinear", "nearest", "linear", "grid_sampler")
_POLICIES = {"pos_embed": "bicubic", "relative_position_bias_table": "geometric"}  # how timm resamples each
_COORDINATES = ("relative_coords_table", "rel_coords_log")  # [..., 2h-1, 2w-1, 2], the input of an MLP that gives the bias


class StageWindows(NamedTuple):
    """All blocks with one grid, window size and kind (strided or not), consecutive or not; pairs are (h, w) in tokens."""

    blocks: int
    grid: Size
    window: Size | None  # None: global
    shift: Size  # of the shifted blocks
    padding: Size  # rows below and columns right that fill the last windows
    strided: bool = False  # MaxViT's grid attention: a window holds tokens at equal distances over the whole grid

    @property
    def padded_share(self) -> float:
        """Share of padding in the padded grid, 0 to 1."""
        (h, w), (down, right) = self.grid, self.padding
        return 1 - h * w / ((h + down) * (w + right))

    @property
    def window_count(self) -> Size:
        """Number of windows down and across."""
        (h, w), (down, right), (y, x) = self.grid, self.padding, self.window or self.grid
        return (h + down) // y, (w + right) // x


class TracedBlock(NamedTuple):
    """A block with attention, and the shape of its input in one forward pass."""

    name: str
    module: nn.Module
    grid: Size
    shape: tuple[int, ...]  # of its input: [B, h, w, C], [B, C, h, w] or [B, N, C]
    layout: str  # "NHWC" | "NCHW" | "NLC"
    window: Size | None  # None: global
    shift: Size | None  # None: blocks of this class never shift
    arguments: tuple | None  # positional arguments after the input; None if one is a tensor

    @property
    def strided(self) -> bool:
        """True if each window holds tokens at equal distances over the whole grid (MaxViT's grid attention)."""
        return not getattr(self.module, "partition_block", True)


class Trace(NamedTuple):
    """What one forward pass at one image size contains."""

    blocks: tuple[TracedBlock, ...]
    encodings: tuple[tuple[PositionEncoding, Grid], ...]  # vitrel's encodings in any model, with the grid each was called with
    resampled: dict[str, int]  # {policy: number of parameter values resampled inside forward}
    attends: bool = True  # False: forward has no softmax of what depends on the image, so no attention, recognized or not


class ModelAtSize(NamedTuple):
    """A model adapted to one image size. `resampled` also counts what forward itself resamples at that size."""

    model: nn.Module  # the model itself if nothing had to change, else a changed copy
    resampled: dict[str, int]  # {name and policy: number of values of parameters and coordinate buffers that were replaced}
    windows: tuple[StageWindows, ...]  # empty if no attention is found
    trace: Trace  # of `model` at this size


def model_name(model: nn.Module) -> str:
    """timm's name of a model, or the name of its class."""
    cfg = getattr(model, "pretrained_cfg", None) or {}
    return cfg.get("architecture") or type(model).__name__


def encoding_name(position: PositionEncoding | str, **options: Any) -> str:
    """A key, or the key of an encoding (of a composition those of its parts), and the options it is built with, in titles."""
    if isinstance(position, Composition):
        position = "+".join(position.parts)
    key = position if isinstance(position, str) else key_of(position)
    return " ".join([key, *(f"{name}={value}" for name, value in options.items())])


def built_encoding(position: PositionEncoding | str, grid: Grid, heads: int, width: int, **options: Any) -> PositionEncoding:
    """The encoding of a key, built with `options`; an encoding as it is, then TypeError for options."""
    if isinstance(position, str):
        return create_position(position, grid, heads, width, **options)
    if options:
        raise TypeError(f"options {', '.join(options)} are for a key of POSITIONS; here position is already built")
    return position


def evaluated(encoding: PositionEncoding, grid: Grid) -> Terms:
    """The terms of an encoding in evaluation mode; in training it may shift positions at random."""
    with evaluating(encoding):
        return encoding(grid)


def checked_size(size: int | Size) -> Size:
    """An int or (h, w) in pixels as (h, w); ValueError if they are not positive whole numbers."""
    pair = tuple(to_2tuple(size))
    if len(pair) != 2 or not all(isinstance(side, int) and side > 0 for side in pair):
        raise ValueError(f"size is a positive whole number of pixels or two, (height, width), not {size!r}")
    return pair


def trained_size(model: nn.Module) -> Size:
    """The image size (h, w) in pixels that a model was built for, or that its weights were trained at; else 224 x 224."""
    built_for = getattr(getattr(model, "patch_embed", None), "img_size", None) or getattr(model, "img_size", None)
    cfg = getattr(model, "pretrained_cfg", None) or {}
    return tuple(to_2tuple(built_for or cfg.get("input_size", (3, 224, 224))[-2:]))


def patch_grid(model: nn.Module, size: Size) -> Size | None:
    """Patches (h, w) of an image of `size` (h, w) pixels; None if the model lacks timm's patch embedding."""
    embed = getattr(model, "patch_embed", None)
    return tuple(embed.dynamic_feat_size(size)) if hasattr(embed, "dynamic_feat_size") else None


def own_encodings(model: nn.Module) -> dict[str, PositionEncoding]:
    """{name: encoding} of vitrel's encodings in any model; a composition counts as one, without its parts."""
    found: dict[str, PositionEncoding] = {}
    for name, module in model.named_modules():
        if isinstance(module, PositionEncoding) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return found


def trace(model: nn.Module, size: Size) -> Trace:
    """Run one image of `size` (h, w) pixels through the model on the meta device. Raises what forward raises for the size."""
    named = _values(model)
    blank = {id(v): torch.empty_like(v, dtype=_float32(v), device="meta") for v in named.values()}
    meta = {name: blank[id(v)] for name, v in named.items()}
    channels = getattr(model, "in_chans", None) or getattr(model, "default_cfg", {}).get("input_size", (3,))[0]
    image, blocks, encodings = torch.empty(1, channels, *size, device="meta"), [], []
    patches = patch_grid(model, size)

    def hook(name: str, module: nn.Module) -> RemovableHandle:
        def record(_: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            if isinstance(module, PositionEncoding):
                encodings.append((module, args[0]))
            elif (block := _traced_block(name, module, args, kwargs, size, patches)) is not None:
                blocks.append(block)

        return module.register_forward_pre_hook(record, with_kwargs=True)

    encoding_modules = own_encodings(model)
    parts = {name: module for name, module in model.named_modules() if isinstance(getattr(module, "attn", None), nn.Module)}
    parts.pop("", None)  # the model itself
    hooks = [hook(name, module) for name, module in (encoding_modules | parts).items()]
    others = {name: value for name, value in meta.items() if not any(name.startswith(f"{part}.") for part in encoding_modules)}
    recorder = _InterpolationRecorder(image, others)
    try:
        with torch.no_grad(), evaluating(model), recorder:
            functional_call(model, meta, (image,), tie_weights=False)  # _values has every name of a tied one
    finally:
        for handle in hooks:
            handle.remove()
    resampled = sum_counts([recorder.found, *(encoding.resampled(grid) for encoding, grid in encodings)])
    return Trace(tuple(blocks), tuple(encodings), resampled, recorder.attends or bool(blocks))


def at_size(model: nn.Module, size: int | Size, share_weights: bool = False) -> ModelAtSize:
    """Adapt a model to images of another size as its library does, trace it there, and return both.

    A model with `set_input_size` is copied, and it is called on the copy. The result's model is the argument itself if it is
    vitrel's, has `dynamic_img_size` or no `set_input_size`, or if the call changes nothing and forward takes the size anyway.

    Args:
        model: a vitrel or timm model, which is not changed.
        size: pixels, an int or (h, w).
        share_weights: the copy shares the parameters that do not change, so it must not be trained or moved.

    Raises:
        ValueError: the model cannot take the size.
    """
    size = to_2tuple(size)
    after = model_at_size(model, size, share_weights)
    try:
        found = trace(after, size)
    except REFUSALS as error:
        raise _refusal(after, size, error) from error
    return ModelAtSize(after, _replaced_values(model, after) | found.resampled, stage_windows(found.blocks), found)


def model_at_size(model: nn.Module, size: Size, share_weights: bool = False) -> nn.Module:
    """The model, or its copy for images of `size` (h, w) pixels, that `at_size` returns; arguments as there.

    Forward is not tried on the result, so it may still refuse the size. ValueError if `set_input_size` fails.
    """
    if getattr(model, "dynamic_img_size", False) or not hasattr(model, "set_input_size") or isinstance(model, Backbone):
        return model
    changed = copy.deepcopy(model, {id(p): p for p in model.parameters()} if share_weights else None)
    try:
        changed.set_input_size(img_size=size)
    except REFUSALS as error:
        raise ValueError(f"{model_name(model)} cannot be set to {format_size(size)} pixels: {_reason(error)}") from error
    return changed if _differs(model, changed) or not _takes(model, size) else model


def _replaced_values(before: nn.Module, after: nn.Module) -> dict[str, int]:
    """Number of values of `before` that are replaced in `after`, the same model at another size, summed over its layers.

    Returns {leaf name and policy, for example "pos_embed bicubic": number}. All values of a resampled parameter count, and
    those of coordinates that give another bias at the same offset. Index tables, masks and rotations, which follow from the
    grid, do not count, nor do the rows of prefix tokens in a resampled parameter.
    """
    found: dict[str, int] = {}
    parameters = dict(after.named_parameters())
    theirs = parameters | dict(after.named_buffers())
    for name, old in (*before.named_parameters(), *before.named_buffers()):
        new, (path, _, leaf) = theirs.get(name), name.rpartition(".")
        if new is None or (old.shape == new.shape and (old.is_meta or torch.equal(old, new))):
            continue
        if name in parameters:
            policy, count = f"{leaf} {_POLICIES.get(leaf, 'resampled')}", old.numel() - _prefix_values(before, path, leaf, old)
        elif leaf in _COORDINATES and not torch.allclose(*shared_offsets(old, new)):
            policy, count = f"{leaf} re-created", old.numel()
        else:
            continue
        found[policy] = found.get(policy, 0) + count
    return found


def shared_offsets(old: Tensor, new: Tensor) -> list[Tensor]:
    """The parts of two tables [..., 2h-1, 2w-1, D] of different sizes at the offsets that both have."""
    tables = [old, new]
    for axis in (-3, -2):
        n = min(old.shape[axis], new.shape[axis])
        tables = [table.narrow(axis, (table.shape[axis] - n) // 2, n) for table in tables]
    return tables


def coordinate_bias(module: nn.Module, of: nn.Module) -> Tensor | None:
    """Biases [..., 2h-1, 2w-1, H] that the MLP of timm's `module` makes of the coordinates of `of`; None without an MLP."""
    if hasattr(module, "cpb_mlp") and hasattr(module, "relative_coords_table"):  # Swin V2
        return 16 * module.cpb_mlp(of.relative_coords_table).sigmoid()
    if hasattr(module, "rel_coords_log"):  # timm's RelPosMlp
        return module.bias_act(module.mlp(of.rel_coords_log))
    return None


def _prefix_values(model: nn.Module, path: str, leaf: str, old: Tensor) -> int:
    """Number of values that belong to prefix tokens in a parameter whose other rows are resampled."""
    if leaf == "pos_embed" and old.dim() == 3 and hasattr(getattr(model, "patch_embed", None), "grid_size"):
        h, w = to_2tuple(model.patch_embed.grid_size)
        return (old.shape[1] - h * w) * old.shape[2]
    if leaf == "relative_position_bias_table" and old.dim() == 2:
        h, w = to_2tuple(model.get_submodule(path).window_size)
        return (old.shape[0] - (2 * h - 1) * (2 * w - 1)) * old.shape[1]
    return 0


def stage_windows(blocks: Iterable[TracedBlock]) -> tuple[StageWindows, ...]:
    """One entry for the blocks of each grid, window and kind (strided or not), in the order of their first block.

    `shift` is the largest of the group's shifts.
    """
    lines: dict[tuple, StageWindows] = {}
    for block in blocks:
        padding = (0, 0) if block.window is None else tuple(-n % m for n, m in zip(block.grid, block.window, strict=True))
        kind = block.grid, block.window, block.strided
        line = lines.get(kind) or StageWindows(0, block.grid, block.window, (0, 0), padding, block.strided)
        lines[kind] = line._replace(blocks=line.blocks + 1, shift=max(line.shift, block.shift or (0, 0)))
    return tuple(lines.values())


def _refusal(model: nn.Module, size: Size, error: Exception) -> ValueError:
    """The ValueError for a `model` whose forward raised `error` at images of `size` (h, w) pixels, with what to try instead."""
    patch, hint = getattr(getattr(model, "patch_embed", None), "patch_size", None), ""
    if isinstance(patch, tuple) and (size[0] % patch[0] or size[1] % patch[1]):
        near = [tuple(max(1, n // p + more) * p for n, p in zip(size, patch, strict=True)) for more in (0, 1)]
        hint = f"; nearest sizes it could take: {' or '.join(map(format_size, near))}"
    if not hasattr(model, "set_input_size") and trained_size(model) != size:
        hint += f"; try timm.create_model({model_name(model)!r}, img_size={size})"
    return ValueError(f"{model_name(model)} does not take {format_size(size)} pixels: {_reason(error)}{hint}")


def _float32(value: Tensor) -> torch.dtype:
    """float32 for floating-point values of any precision, to fit a float32 image; for other values their dtype."""
    return torch.float32 if value.is_floating_point() else value.dtype


def _takes(model: nn.Module, size: Size) -> bool:
    try:
        trace(model, size)
    except REFUSALS:
        return False
    return True


def _differs(a: nn.Module, b: nn.Module) -> bool:
    """True if any parameter or buffer differs, masks and index tables included."""
    first, second = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (a, b))
    return first.keys() != second.keys() or any(
        value.shape != second[name].shape or not (value.is_meta or torch.equal(value, second[name]))
        for name, value in first.items()
    )


def _reason(error: Exception) -> str:
    """The first line of an error's message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def _values(model: nn.Module) -> dict[str, Tensor]:
    """{name: parameter or buffer}; tied tensors under each name, but a module that occurs at several paths only once.

    functional_call does not restore a module's tensor that it is given under two paths.
    """
    return {
        f"{name}.{leaf}".removeprefix("."): value
        for name, module in model.named_modules()
        for leaf, value in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    }


def window_and_shift(block: nn.Module, grid: Size) -> tuple[Size | None, Size | None]:
    """The window of a block with attention, None if it is global, and its shift on `grid`, None if its class never shifts."""
    if isinstance(block.attn, Attention):
        window, shift = block.attn.window, block.attn.shift
        if window is None:
            return None, None
        shifts = tuple(axis_shift(n, m, s) for s, n, m in zip(shift, grid, window[:2], strict=True))
        return tuple(window[:2]), shifts  # type: ignore[return-value]  # two of each
    value = getattr(block, "window_size", None) or getattr(block, "partition_size", None) or getattr(block.attn, "ws", None)
    if hasattr(block, "window_resolution"):  # EfficientViT, whose windows shrink to a smaller grid
        value = block.attn.resolution
    sides, steps = to_2tuple(value or 0), getattr(block, "shift_size", None)
    return tuple(sides) if min(sides) > 0 else None, None if steps is None else tuple(to_2tuple(steps))


def _traced_block(
    name: str, module: nn.Module, args: tuple, kwargs: dict[str, Any], size: Size, patches: Size | None
) -> TracedBlock | None:
    """The block of one forward call, or None if its input is no map or sequence of tokens."""
    x = args[0] if args else None
    if not isinstance(x, Tensor) or x.dim() not in (3, 4):
        return None
    shape = tuple(x.shape)
    if x.dim() == 4:
        layout = _layout(module, shape, size)
        grid = shape[1:3] if layout == "NHWC" else shape[2:]
    else:
        layout = "NLC"
        passed = (tuple(a)[:2] for a in args[1:] if isinstance(a, tuple | list) and _is_grid(a[:2], shape[1]))
        grid = next(passed, patches if patches and 0 <= shape[1] - patches[0] * patches[1] <= MOST_PREFIX else None)
    if grid is None:
        return None
    tensors = any(isinstance(value, Tensor) for value in tree_leaves((args[1:], kwargs)))
    return TracedBlock(name, module, grid, shape, layout, *window_and_shift(module, grid), None if tensors else args[1:])


def _layout(block: nn.Module, shape: tuple[int, ...], size: Size) -> str:
    """Layout of a 4-D input, from the channels of the block's first weight, or else from the image's aspect ratio."""
    first = next((module for module in block.modules() if isinstance(getattr(module, "weight", None), Tensor)), None)
    channels = getattr(first, "in_features", None) or getattr(first, "in_channels", None) or len(getattr(first, "weight", ()))
    if channels in (shape[1], shape[-1]) and shape[1] != shape[-1]:
        return "NHWC" if channels == shape[-1] else "NCHW"
    grids = {"NHWC": shape[1:3], "NCHW": shape[2:]}
    return min(grids, key=lambda layout: abs(math.log(grids[layout][0] * size[1] / (grids[layout][1] * size[0]))))


def _is_grid(pair: Any, tokens: int) -> bool:
    return len(pair) == 2 and all(isinstance(n, int) for n in pair) and pair[0] * pair[1] == tokens


class _InterpolationRecorder(TorchDispatchMode):
    """Counts the values of every interpolation of parameters or buffers: {leaf name and policy: number of values}.

    `attends`: whether there was a softmax of values that depend on the image.
    """

    def __init__(self, image: Tensor, named: dict[str, Tensor]):
        super().__init__()
        self.found: dict[str, int] = {}
        self.attends = False
        self._image = {id(image)}
        self._origin = {id(value): name for name, value in named.items()}
        self._alive = [image, *named.values()]  # so that no id is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = [id(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        made = [value for value in tree_leaves(out) if isinstance(value, Tensor)]
        self._alive += made
        if any(key in self._image for key in read):
            self._image.update(map(id, made))
            self.attends = self.attends or "softmax" in func.__name__
            return out
        origin = next((self._origin[key] for key in read if key in self._origin), None)
        if origin is not None:
            self._origin.update((id(value), origin) for value in made)
            resamples = "upsample" in func.__name__ or "grid_sampler" in func.__name__
            kind = next((k for k in _INTERPOLATIONS if resamples and k in func.__name__), None)
            if kind is not None:
                policy = f"{origin.rpartition('.')[2]} {kind.replace('grid_sampler', 'sampled')}"
                self.found[policy] = self.found.get(policy, 0) + args[0].numel()
        return out
