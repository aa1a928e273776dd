"""Any model at any image size: `at_size` adapts a model to a size, and `trace` finds the attention of its forward pass there.

`trace` runs forward on an image that has a shape and no values (vitrel.inspect.recorder). vitrel's models and some of timm's
take every size. Others of timm's resample an embedding inside forward (`dynamic_img_size`), are changed for a size by
`set_input_size`, or take only the size that they were built for.
"""

import contextlib
import copy
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from timm.layers import to_2tuple
from torch import Tensor, nn

from vitrel.common.modules import evaluating
from vitrel.common.sizes import Size, format_size
from vitrel.common.user_modules import search_working_folder
from vitrel.grid import Grid
from vitrel.inspect.recorder import Attention as Seen
from vitrel.inspect.recorder import blank, hidden_pairs, run
from vitrel.layers import Attention
from vitrel.models.backbone import backbone_of
from vitrel.models.create import create_model
from vitrel.ops.window import axis_shift, windows
from vitrel.position import PositionEncoding, key_of
from vitrel.position.terms import Composition, Terms, sum_counts

# errors by which models refuse a size
REFUSALS = (AssertionError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError)
_POLICIES = {"pos_embed": "bicubic", "relative_position_bias_table": "geometric"}  # how timm resamples each
_COORDINATES = ("relative_coords_table", "rel_coords_log")  # [..., 2h-1, 2w-1, 2], the input of an MLP that gives the bias


class StageWindows(NamedTuple):
    """The windows of all blocks with the same grid, window size and kind (strided or not); pairs are (h, w) in tokens.

    `blocks` counts them; `window` is None for global attention; `shift` is that of the shifted blocks; `padding` are the rows
    below and columns right that fill the last windows. Tokens of a strided window lie at equal distances over the whole grid
    (MaxViT's grid attention).
    """

    blocks: int
    grid: Size
    window: Size | None  # None: global
    shift: Size
    padding: Size
    strided: bool = False

    @property
    def padded_share(self) -> float:
        """Share of the padded grid that is padding, 0 to 1."""
        (h, w), (down, right) = self.grid, self.padding
        return 1 - h * w / ((h + down) * (w + right))


class LocatedCall(NamedTuple):
    """One attention layer in a forward pass at one image size: where its tokens lie, and what position adds to its logits.

    It attends in W windows of N slots; a slot holds a token or padding: `tokens` [W, N] is the token's index, -1 for padding.
    Global attention is one window, and `window` is None. `grid` is None if the tokens are no grid of the image. `visible` [W, H
    or 1, N, N] are the pairs that no mask hides, None: all; `bias` [2h-1, 2w-1, H] is added to logits by offset, query minus
    key; `rotation` are the cosines and sines of queries and keys. `square` is False if keys are pooled.
    """

    name: str  # path of the module
    grid: Grid | None  # tokens of the image that query here, prefix tokens included; None: they are no grid of the image
    heads: int
    window: Size | None = None  # None: global
    shift: Size = (0, 0)
    strided: bool = False  # a window holds tokens at equal distances over the whole grid (MaxViT's grid attention)
    tokens: Tensor = torch.empty(0)  # [W, N] token (row-major, prefix first) in each slot of each window, -1 for padding
    visible: Tensor | None = None  # [W, H or 1, N, N] bool: pairs that nothing hides, padding included; None: all
    bias: Tensor | None = None  # [2h-1, 2w-1, H] added to logits by offset in the window or grid, NaN where masked; None: none
    rotation: tuple[Tensor, ...] = ()  # cosines and sines by which queries and keys are multiplied
    heads_first: bool = False  # in the leading dimensions of its product, heads are slower than windows
    square: bool = True  # keys are the tokens of the queries, not pooled ones

    def unflattened(self, value: Tensor, batch: int) -> Tensor:
        """Return `value` [B * W * H, ...] (B = `batch`, W windows, H heads; or heads before windows) as [B, W, H, ...]."""
        if self.heads_first:
            return value.unflatten(0, (batch, self.heads, -1)).transpose(1, 2)
        return value.unflatten(0, (batch, -1, self.heads))

    @property
    def windows(self) -> StageWindows:
        """The windows of this layer, as a `StageWindows` of one block; `grid` must not be None."""
        return one_block(self.grid[:2], self.window, self.shift, self.strided)


class Trace(NamedTuple):
    """The result of `trace`: the attention layers and vitrel's encodings in one forward pass at one image size, in their order.

    `resampled` is {parameter or encoding, and policy: number of values that forward resamples}: {"pos_embed bicubic": 9}.
    `attends` is whether there is a softmax of values that depend on the image.
    """

    calls: tuple[LocatedCall, ...]
    encodings: tuple[tuple[PositionEncoding, Grid], ...]  # vitrel's encodings in any model, with the grid each was called with
    resampled: dict[str, int]  # {policy: number of parameter values resampled inside forward}
    attends: bool  # whether there is a softmax of what depends on the image, recognized as attention or not


class ModelAtSize(NamedTuple):
    """The result of `at_size`: a model adapted to one image size (itself or a copy), and its windows and `Trace` there.

    `resampled` is {"pos_embed bicubic": number of values}: those that the adaptation replaced, or that forward resamples.
    """

    model: nn.Module  # the model itself if nothing had to change, else a changed copy
    resampled: dict[str, int]  # {name and policy: number of values of parameters and coordinate buffers that were replaced}
    windows: tuple[StageWindows, ...]  # empty if no attention is found
    trace: Trace  # of `model` at this size


def model_name(model: nn.Module) -> str:
    """Return timm's name of a model's architecture, without the tag of its weights, or else the name of its class."""
    cfg = getattr(model, "pretrained_cfg", None) or {}
    return cfg.get("architecture") or type(model).__name__


def encoding_name(position: PositionEncoding | str, **options: Any) -> str:
    """Return the name of an encoding, or of a key with options, for titles: "absolute+table", "log_decay decay=0.3"."""
    if isinstance(position, Composition):
        position = "+".join(position.parts)
    key = position if isinstance(position, str) else key_of(position)
    return " ".join([key, *(f"{name}={value}" for name, value in options.items())])


def evaluated(encoding: PositionEncoding, grid: Grid) -> Terms:
    """Return the `Terms` of an encoding on a grid in evaluation mode; in training mode it may shift positions at random."""
    with evaluating(encoding):
        return encoding(grid)


def checked_size(size: int | Size) -> Size:
    """Return a size in pixels, an int or (h, w), as (h, w); ValueError if it is not of positive whole numbers."""
    pair = tuple(to_2tuple(size))
    if len(pair) != 2 or not all(isinstance(side, int) and side > 0 for side in pair):
        raise ValueError(f"size is a positive whole number of pixels or two, (height, width), not {size!r}")
    return pair


def trained_size(model: nn.Module) -> Size:
    """Return the image size (h, w) in pixels that a model was built for, else its weights were trained at, else 224 x 224."""
    # of timm, transformers, torchvision
    named = (("patch_embed", "img_size"), ("", "img_size"), ("config", "image_size"), ("", "image_size"))
    built_for = next((size for part, name in named if (size := getattr(getattr(model, part, model), name, None))), None)
    cfg = getattr(model, "pretrained_cfg", None) or {}
    return tuple(to_2tuple(built_for or cfg.get("input_size", (3, 224, 224))[-2:]))


def patch_grid(model: nn.Module, size: Size) -> Size | None:
    """Return how many patches (h, w) an image of `size` (h, w) pixels has; None without timm's patch embedding."""
    embed = getattr(model, "patch_embed", None)
    return tuple(embed.dynamic_feat_size(size)) if hasattr(embed, "dynamic_feat_size") else None


def own_encodings(model: nn.Module) -> dict[str, PositionEncoding]:
    """Return {module name: encoding} of vitrel's encodings in any model; of a composition the whole, not its parts."""
    found: dict[str, PositionEncoding] = {}
    for name, module in model.named_modules():
        if isinstance(module, PositionEncoding) and not any(name.startswith(f"{outer}.") for outer in found):
            found[name] = module
    return found


def channels_of(model: nn.Module) -> int:
    """Return the number of channels of the images that a model takes, by its attributes or its first convolution; else 3."""
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d)), None)
    config = getattr(getattr(model, "config", None), "num_channels", None)
    return config or getattr(backbone_of(model) or model, "in_chans", None) or (3 if first is None else first.in_channels)


def on_images(model: nn.Module) -> Callable[[Tensor], Any]:
    """Return a function that calls the model on images, with interpolate_pos_encoding=True where forward has that argument."""
    names = inspect.signature(model.forward).parameters
    extra = {"interpolate_pos_encoding": True} if "interpolate_pos_encoding" in names else {}
    return lambda images: model(images, **extra)


def examinable(model: str | nn.Module, **options: Any) -> nn.Module:
    """Return the model whose position is examined, from a module or a name.

    A compiled model is unwrapped. Where parameters of several dimensions hold only zeros, as tables of BEiT and SAM are
    initialized, the result is a copy with noise in them (of a fixed seed), since position cannot be seen in zeros.

    Args:
        model: a module; a name for timm.create_model; or an import path "package.module:thing" of a module, or of a function or
            class that returns one, for which the working folder is added to sys.path. A model that is built here has random
            weights with a fixed seed.
        options: arguments of timm.create_model, or of the function; ignored if the import path leads to a module.

    Raises:
        ValueError: the name is unknown, or the model is on the meta device.
        TypeError: options are given with a module, or are not those of the named one, or it is no module.
    """
    if isinstance(model, str):
        name = model
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            of_timm = ":" not in name or name.startswith(("hf-hub:", "hf_hub:", "local-dir:"))
            model = create_model(name, **options) if of_timm else _imported(name, **options)
    elif options:
        raise TypeError(f"options {', '.join(options)} are for a name; here the model is already built")
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a torch.nn.Module or the name of one, not {type(model).__name__}")
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    if any(value.is_meta for value in (*model.parameters(), *model.buffers())):
        raise ValueError(
            f"{model_name(model)} is on the meta device and has no values to examine: pass its name, or load weights"
        )
    zeros = [name for name, value in model.named_parameters() if value.dim() > 1 and not bool(value.any())]
    if not zeros:
        return model
    model, generator = copy.deepcopy(model), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name in zeros:
            value = model.get_parameter(name)
            value.copy_(0.02 * torch.randn(value.shape, generator=generator))
    return model


def _imported(name: str, **options: Any) -> Any:
    search_working_folder()
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{name!r} is neither a name of timm.list_models() nor an import path, as package.module:function: {error}"
        ) from error
    return found if isinstance(found, nn.Module) else found(**options)


def trace(model: nn.Module, size: Size) -> Trace:
    """Run an image of `size` (h, w) pixels, a tensor with a shape and no values, through the model, and return the `Trace`.

    The model runs in evaluation mode. Raises what forward raises for the size.
    """
    calls: list[LocatedCall] = []
    encodings: list[tuple[PositionEncoding, Grid]] = []
    grids: dict[str, Grid] = {}  # of vitrel's attention
    hooks = [
        module.register_forward_pre_hook(lambda m, args: encodings.append((m, Grid(*args[0]))))
        for module in own_encodings(model).values()
    ]
    own = {name: module for name, module in model.named_modules() if isinstance(module, Attention)}
    for name, module in own.items():
        hooks.append(module.register_forward_pre_hook(lambda _, args, name=name: grids.update({name: args[2]})))
    try:
        found = run(
            on_images(model),
            model,
            blank(model, size, channels_of(model)),
            use=lambda attention: calls.append(located(attention, size, model)),
            follow=True,
        )
    finally:
        for hook in hooks:
            hook.remove()
    for number, call in enumerate(calls):
        if call.name in own:  # its encoding says what position adds, and its layout how a backend of several products attends
            told = own_call(call.name, own[call.name], grids[call.name], call.tokens.device)
            same = call.grid == told.grid and call.tokens.shape == told.tokens.shape
            calls[number] = told._replace(tokens=call.tokens, visible=call.visible) if same else told
    resampled = sum_counts([found.resampled, *(encoding.resampled(grid) for encoding, grid in encodings)])
    return Trace(tuple(calls), tuple(encodings), resampled, found.softmaxes > 0)


def own_call(name: str, module: Attention, grid: Grid, device: torch.device) -> LocatedCall:
    """Return the `LocatedCall` of a layer of vitrel on a grid, with the tokens in the slots of its windows and its masks.

    It follows from the layer's settings, not from a pass, and has no bias and no rotation.

    Args:
        name: path of the module in the model.
        module: the layer.
        grid: of the tokens of the image.
        device: of the tensors in the result.
    """
    line = own_windows(module, grid[:2])
    if line.window is None:
        return LocatedCall(name, grid, module.num_heads, tokens=torch.arange(grid.tokens, device=device)[None])
    n = line.window[0] * line.window[1]
    layout = windows(grid.h, grid.w, line.window, module.shift, device)
    tokens = torch.full_like(layout.source, -1)
    tokens[layout.inverse] = torch.arange(grid.tokens, device=device)
    visible = layout.visible.unflatten(0, (-1, n))[:, None]  # [W, 1, N, N]
    return LocatedCall(name, grid, module.num_heads, line.window, line.shift, False, tokens.unflatten(0, (-1, n)), visible)


def located(found: Seen, size: Size, model: nn.Module) -> LocatedCall:
    """Return the `LocatedCall` of an attention that the recorder saw: its grid, windows, token in each slot, bias and masks.

    The first three follow from the pixels at which the patches of its queries begin. If these are no complete grid of the
    image, `grid` is None in the result. `size` is that of the image, (h, w) in pixels; `model` tells the window size.
    """
    unknown = LocatedCall(found.where, None, len(found.logits), rotation=found.rotation)
    if found.places is None or found.places[0].shape[-1] < 2:
        return unknown
    place = found.places[0]  # [L, N]
    heads = int((place == place[:1]).all(1).sum())  # all heads have the same tokens, windows have others
    if len(place) % heads:
        return unknown
    fast, slow = place.view(-1, heads, place.shape[1]), place.view(heads, -1, place.shape[1]).transpose(0, 1)
    heads_first = not bool((fast == fast[:, :1]).all())
    if heads_first and not bool((slow == slow[:, :1]).all()):
        return unknown
    place = (slow if heads_first else fast)[:, 0].long()  # [W, N]
    real = place[place >= 0].unique()
    rows, columns = (real // size[1]).unique(), (real % size[1]).unique()
    if not len(real) or len(real) != len(rows) * len(columns):  # no complete grid
        return unknown
    tokens = torch.where(place >= 0, torch.searchsorted(real, place.clamp(min=0)), -1)
    bias = found.bias
    if bias is not None:
        bias = bias.unflatten(0, (heads, -1)).transpose(0, 1) if heads_first else bias.unflatten(0, (-1, heads))  # [W, H, Q, K]
    hidden = None if bias is None else hidden_pairs(bias)
    visible = None if hidden is None else ~hidden
    if visible is not None and torch.equal(visible, visible[:, :1].expand_as(visible)):
        visible = visible[:, :1].clone()  # one mask for all heads
    tokens = tokens if visible is None else _without_copies(tokens)  # a mask hides the copies
    if int((tokens >= 0).sum()) != len(real):
        return unknown
    leading = int((tokens[0] >= 0).long().argmax())  # slots without a place: prefix tokens if attention is global
    prefix = leading if len(tokens) == 1 and not bool((tokens[0, leading:] < 0).any()) else 0
    if prefix:
        tokens = torch.cat((torch.arange(prefix)[None], tokens[:, prefix:] + prefix), 1)
    grid = Grid(len(rows), len(columns), prefix)
    same = found.places[1].shape == found.places[0].shape  # keys are not pooled
    if len(tokens) == 1 and bool((tokens >= 0).all()):
        window = grid[:2] if not prefix and _named_window(found.where, model) == grid[:2] else None
    else:
        window = _window(tokens, grid) if same else None
    shift, strided = (0, 0), False
    if window is not None:
        shift, strided = _shift_and_stride(tokens, grid, window)
    table, shape = None, window or grid[:2]
    if bias is not None and not strided and bias.shape[-1] == shape[0] * shape[1] + prefix:
        number = 0 if visible is None else int(visible.sum((1, 2, 3)).argmax())  # of the window that hides least
        pairs = bias[number] if visible is None else torch.where(visible[number], bias[number], torch.nan)
        table = by_offset(pairs, shape, prefix)
    call = LocatedCall(found.where, grid, heads, window, shift, strided, tokens.to(found.logits.device), visible, table)
    return call._replace(rotation=found.rotation, heads_first=heads_first, square=same)


def by_offset(pairs: Tensor, shape: Size, prefix: int) -> Tensor:
    """Return values by offset (query minus key), [2h-1, 2w-1, H]: offset (dy, dx) at [dy + h-1, dx + w-1].

    `pairs` [H, N, N] are the values of all pairs of tokens; h x w = `shape` tokens follow the `prefix` class and register
    tokens. Only the queries in the four corners are read, which have every offset; NaN where their pair is NaN.
    """
    h, w = shape
    table = torch.full((len(pairs), 2 * h - 1, 2 * w - 1), torch.nan, device=pairs.device)
    for y, x in ((0, 0), (0, w - 1), (h - 1, 0), (h - 1, w - 1)):  # the queries in the corners have every offset
        row = pairs[:, prefix + y * w + x, prefix:].float().view(-1, h, w).flip(1, 2)
        part = table[:, y : y + h, x : x + w]
        part.copy_(torch.where(row.isnan(), part, row))
    return table.movedim(0, -1)


def _named_window(name: str, model: nn.Module) -> Size | None:
    """Return the attribute `window_size` (h, w) of the module at path `name` or of its parent, None if neither has one.

    This attribute alone tells a window that holds the whole grid from global attention.
    """
    path = name.split(".")
    found = [getattr(model.get_submodule(".".join(path[:n])), "window_size", None) for n in (len(path), len(path) - 1) if n]
    pairs = [tuple(to_2tuple(value)) for value in found if isinstance(value, int | tuple | list)]
    return pairs[0] if pairs else None


def _without_copies(tokens: Tensor) -> Tensor:
    """Return `tokens` [W, N] with -1 where a token occurs again: a model may fill padding with copies of tokens."""
    flat = tokens.flatten()
    slots = torch.arange(len(flat))
    numbers = torch.where(flat >= 0, slots, len(flat))
    first = torch.full((int(flat.max()) + 1,), len(flat)).scatter_reduce(0, flat.clamp(min=0), numbers, "amin")
    return flat.masked_fill(first[flat.clamp(min=0)] != slots, -1).view_as(tokens)


def line_length(tokens: Tensor, line: Callable[[Tensor], Tensor]) -> int:
    """Return after how many slots of a window the tokens change to another row (or column); 0 if they never do.

    Of `tokens` [W, N] (-1 for padding) the fullest window is used. `line` gives the row (or column) of tokens.
    """
    row = tokens[int((tokens >= 0).sum(1).argmax())]
    real = (row >= 0).nonzero().flatten()
    at = line(row[real])
    other = (at != at[0]).nonzero().flatten()
    return int(real[other[0]] - real[0]) if len(other) else 0


def _window(tokens: Tensor, grid: Grid) -> Size | None:
    """Return the (h, w) of windows whose slots `tokens` [W, N] hold the grid row by row, None if w does not divide N."""
    n = tokens.shape[1]
    width = line_length(tokens, lambda token: token // grid.w) or n
    return (n // width, width) if n % width == 0 else None


def _shift_and_stride(tokens: Tensor, grid: Grid, window: Size) -> tuple[Size, bool]:
    """Return the shift (rows, columns) of windows, and whether they are strided: most neighbors in them are apart in the image.

    Strided windows have the shift (0, 0). The first window of `tokens` [W, N] tells.
    """
    slots = tokens[0].view(window)
    shift, strided = [], False
    for axis in (0, 1):
        along = slots.amax(1 - axis)
        real = (along >= 0).nonzero().flatten()
        at = along[real] // grid.w if axis == 0 else along[real] % grid.w
        shift.append(int(at[0] - real[0]) % window[axis])
        steps = at.diff()
        strided = strided or bool(len(steps) and (steps > 1).float().mean() > 0.5)
    return ((0, 0) if strided else (shift[0], shift[1])), strided


def at_size(model: nn.Module, size: int | Size) -> ModelAtSize:
    """Adapt a model to images of another size as its library does, and trace it there.

    A model with `set_input_size` is copied, and that is called on the copy. The copy shares the weights of linear layers and
    convolutions with the model, so it must not be trained or moved. No copy is made of a vitrel model, of one that resamples
    inside forward (`dynamic_img_size`) or has no `set_input_size`, or where the call would change nothing.

    Args:
        model: a vitrel or timm model, which is not changed.
        size: in pixels, an int or (h, w).

    Raises:
        ValueError: the model cannot take the size.
    """
    size = to_2tuple(size)
    after, found = _brought(model, size)
    try:
        found = trace(after, size) if found is None else found
    except REFUSALS as error:
        raise _refusal(after, size, error) from error
    lines = stage_windows(call.windows for call in found.calls if call.grid is not None)
    return ModelAtSize(after, _replaced_values(model, after) | found.resampled, lines, found)


def model_at_size(model: nn.Module, size: Size) -> nn.Module:
    """Return the model, or a copy set to images of `size` (h, w) pixels, as `at_size` does, without its trace there.

    So its forward may still refuse the size. ValueError if `set_input_size` fails.
    """
    return _brought(model, size)[0]


def _brought(model: nn.Module, size: Size) -> tuple[nn.Module, Trace | None]:
    """Return the model or a copy set to images of `size` (h, w) pixels, as `at_size` does, and its trace there.

    The trace is None unless it was needed to see that the model itself takes the size. ValueError if `set_input_size` fails.
    """
    if getattr(model, "dynamic_img_size", False) or not hasattr(model, "set_input_size") or backbone_of(model):
        return model, None
    if size == trained_size(model):
        with contextlib.suppress(*REFUSALS):  # as it was built
            return model, trace(model, size)
    # The rest is copied: some models write the resampled values into the parameter that they have.
    layers = (module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d))
    changed = copy.deepcopy(model, {id(value): value for layer in layers for value in layer.parameters(recurse=False)})
    try:
        changed.set_input_size(img_size=size)
    except REFUSALS as error:
        raise ValueError(f"{model_name(model)} cannot be set to {format_size(size)} pixels: {reason(error)}") from error
    if _differs(model, changed):
        return changed, None
    try:
        return model, trace(model, size)
    except REFUSALS:
        return changed, None


def _replaced_values(before: nn.Module, after: nn.Module) -> dict[str, int]:
    """Return how many values of `before` were replaced in `after`, the same model set to another size, summed over its layers.

    The result is {name of the parameter or buffer in its module, and policy: number}, for example {"pos_embed bicubic": 37632}.
    Of a resampled parameter all values count but those of prefix tokens. Of buffers only coordinates count from which an MLP
    computes the bias, if they differ at the same offset; index tables, masks and rotations follow from the grid.
    """
    found: dict[str, int] = {}
    parameters = dict(after.named_parameters())
    theirs = parameters | dict(after.named_buffers())
    for name, old in (*before.named_parameters(), *before.named_buffers()):
        new, (path, _, leaf) = theirs.get(name), name.rpartition(".")
        if new is None or _equal(old, new):
            continue
        if name in parameters:
            prefix = _prefix_values(before.get_submodule(path), leaf, old)
            policy, count = f"{leaf} {_POLICIES.get(leaf, 'resampled')}", old.numel() - prefix
        elif leaf in _COORDINATES and not torch.allclose(*shared_offsets(old, new)):
            policy, count = f"{leaf} re-created", old.numel()
        else:
            continue
        found[policy] = found.get(policy, 0) + count
    return found


def shared_offsets(old: Tensor, new: Tensor) -> list[Tensor]:
    """Return the parts of two tables [..., 2h-1, 2w-1, D] of different grids at the offsets that both have."""
    tables = [old, new]
    for axis in (-3, -2):
        n = min(old.shape[axis], new.shape[axis])
        tables = [table.narrow(axis, (table.shape[axis] - n) // 2, n) for table in tables]
    return tables


def _prefix_values(owner: Any, leaf: str, old: Tensor) -> int:
    """Return how many values of `old`, the parameter `leaf` of a module, are of prefix tokens (not resampled); 0 if unknown."""
    if leaf == "pos_embed" and old.dim() == 3 and hasattr(getattr(owner, "patch_embed", None), "grid_size"):
        h, w = to_2tuple(owner.patch_embed.grid_size)
        return (old.shape[1] - h * w) * old.shape[2]
    if leaf == "relative_position_bias_table" and old.dim() == 2:
        h, w = to_2tuple(owner.window_size)
        return (old.shape[0] - (2 * h - 1) * (2 * w - 1)) * old.shape[1]
    return 0


def one_block(grid: Size, window: Size | None, shift: Size = (0, 0), strided: bool = False) -> StageWindows:
    """Return the windows of one block on a grid, with the padding below and right that fills the last; global: none."""
    padding = (0, 0) if window is None else (-grid[0] % window[0], -grid[1] % window[1])
    return StageWindows(1, (grid[0], grid[1]), window, shift, padding, strided)


def stage_windows(blocks: Iterable[StageWindows]) -> tuple[StageWindows, ...]:
    """Merge and count blocks that have the same grid, window and kind (strided or not), in the order of their first block.

    The `shift` (rows, columns) of the result is the largest of the blocks, by rows, then by columns.
    """
    lines: dict[tuple, StageWindows] = {}
    for block in blocks:
        kind = block.grid, block.window, block.strided
        line = lines.get(kind)
        lines[kind] = block if line is None else line._replace(blocks=line.blocks + 1, shift=max(line.shift, block.shift))
    return tuple(lines.values())


def _refusal(model: nn.Module, size: Size, error: Exception) -> ValueError:
    """Return the ValueError for a model that does not take `size` (h, w) pixels because of `error`, with what to try."""
    patch, hint = getattr(getattr(model, "patch_embed", None), "patch_size", None), ""
    if isinstance(patch, tuple) and (size[0] % patch[0] or size[1] % patch[1]):
        near = [tuple(max(1, n // p + more) * p for n, p in zip(size, patch, strict=True)) for more in (0, 1)]
        hint = f"; nearest sizes it could take: {' or '.join(map(format_size, near))}"
    if not hasattr(model, "set_input_size") and trained_size(model) != size:
        hint += f"; try timm.create_model({model_name(model)!r}, img_size={size})"
    return ValueError(f"{model_name(model)} does not take {format_size(size)} pixels: {reason(error)}{hint}")


def _differs(a: nn.Module, b: nn.Module) -> bool:
    """Return whether a parameter or buffer differs between two modules, masks and index tables included."""
    first, second = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (a, b))
    return first.keys() != second.keys() or any(not _equal(value, second[name]) for name, value in first.items())


def _equal(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and (a.is_meta or torch.equal(a, b)))


def reason(error: Exception) -> str:
    """Return the first line of an error's message without the final period, or the name of its class if there is no message."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")


def own_windows(attn: Attention, grid: Size) -> StageWindows:
    """Return the windows of an attention layer of vitrel on a grid (h, w); an axis that one window covers has the shift 0."""
    if attn.window is None:
        return one_block(grid, None)
    shift = tuple(axis_shift(n, m, s) for s, n, m in zip(attn.shift, grid, attn.window, strict=True))
    return one_block(grid, tuple(attn.window[:2]), shift)  # type: ignore[arg-type]  # two of each
