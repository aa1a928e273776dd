"""What anybody's model does with its position at a new image size: `fit_to` brings a timm model there as timm itself does.

Ours take any size as they are. Of timm's some do, some resample an embedding inside forward (`dynamic_img_size`), some are
changed for the size (`set_input_size`), and some take only the size they were built for.
"""

import copy
from typing import NamedTuple

import torch
from timm.layers import to_2tuple
from torch import Tensor, nn

from vitrel.inspect.attention_layer import model_name
from vitrel.inspect.resolution_report import Pair, resolution_report
from vitrel.inspect.trace import StageWindows, Traced, stage_windows, trace
from vitrel.models.backbone import Backbone
from vitrel.sizes import format_size

_RULES = {"pos_embed": "bicubic", "relative_position_bias_table": "geometric"}  # by which timm resamples them
_COORDINATES = ("relative_coords_table", "rel_coords_log")  # [..., 2h-1, 2w-1, 2], the input of an MLP that gives the bias
REFUSALS = (AssertionError, IndexError, RuntimeError, TypeError, ValueError)  # as timm's models refuse a size


class Fitted(NamedTuple):
    """A model at one image size."""

    model: nn.Module  # takes images of that size: the very model where nothing had to change, else a changed copy
    resized: dict[str, int]  # {what and rule: values of parameters, or of buffers that act as such, which it replaces}
    windows: tuple[StageWindows, ...]  # empty where no attention can be seen


def fit_to(model: nn.Module, size: int | Pair) -> Fitted:
    """`model` ready for images of `size` pixels, an int or (h, w), by what timm itself would do; the given one stays as it is.

    Ours, and models whose forward takes the size, come back unchanged (what forward resamples is counted); models with
    `set_input_size` come back as a copy on which it was called. Raises ValueError for a model that cannot take the size.
    """
    size = to_2tuple(size)
    if isinstance(model, Backbone):
        lines = resolution_report(model, size).stages
        stages = tuple(StageWindows(s.blocks, s.grid, s.window, s.shift, s.padding) for s in lines)
        return Fitted(model, model.resized(size), stages)
    if getattr(model, "dynamic_img_size", False) or not hasattr(model, "set_input_size"):
        seen, changed = _traced(model, size), {}
    else:
        fitted = copy.deepcopy(model)
        try:
            fitted.set_input_size(img_size=size)
        except REFUSALS as error:
            raise ValueError(f"{model_name(model)} cannot be set to {format_size(size)} pixels: {reason(error)}") from error
        seen, changed = _traced(fitted, size), changes(model, fitted)
        model = fitted if _differs(model, fitted) or not _takes(model, size) else model
    return Fitted(model, changed | seen.resampled, stage_windows(seen.blocks))


def changes(before: nn.Module, after: nn.Module, values: bool = True) -> dict[str, int]:
    """What differs between a model and the same one at another size: {what and rule: values of `before` that are replaced}.

    Parameters that are resampled, and coordinates that give another bias at one and the same offset. Index tables, masks and
    rotations (which a grid determines) are not counted, nor what stays in a resampled parameter: the rows of prefix tokens.
    values False: `after` was built for itself, its parameters tell only by their shapes.
    """
    found: dict[str, int] = {}
    theirs, parameters = dict(after.named_buffers()), dict(before.named_parameters())
    resampled = replaced_parameters(before, after, values)
    for name, old in (parameters | dict(before.named_buffers())).items():
        new, (path, _, leaf) = theirs.get(name), name.rpartition(".")
        if old.is_meta and new is not None and old.shape == new.shape:
            continue
        if name in resampled:
            rule, count = f"{leaf} {_RULES.get(leaf, 'resampled')}", old.numel() - _prefix_values(before, path, leaf, old)
        elif name in theirs and leaf in _COORDINATES and not same_at_shared_offsets(old, new):
            rule, count = f"{leaf} re-created", old.numel()
        else:
            continue
        found[rule] = found.get(rule, 0) + count
    return found


def replaced_parameters(before: nn.Module, after: nn.Module, values: bool = True) -> set[str]:
    """Names of the parameters of `before` that have another shape in `after`, or, with `values`, other values."""
    theirs = dict(after.named_parameters())
    return {
        name
        for name, old in before.named_parameters()
        if (new := theirs.get(name)) is not None
        and (old.shape != new.shape or (values and not old.is_meta and not torch.equal(old, new)))
    }


def same_at_shared_offsets(old: Tensor, new: Tensor) -> bool:
    """Whether two tables [..., 2h-1, 2w-1, D] agree at the offsets that both have, around the middle."""
    shared = [min(a, b) for a, b in zip(old.shape[-3:-1], new.shape[-3:-1], strict=True)]
    return torch.allclose(middle(old, shared), middle(new, shared))


def middle(table: Tensor, shape: Pair | list[int]) -> Tensor:
    """The middle `shape` (rows, columns) of a table [..., rows, columns, D]."""
    for axis, n in zip((-3, -2), shape, strict=True):
        table = table.narrow(axis, (table.shape[axis] - n) // 2, n)
    return table


def _prefix_values(model: nn.Module, path: str, leaf: str, old: Tensor) -> int:
    """Values of prefix tokens in a parameter that is otherwise resampled."""
    if leaf == "pos_embed" and old.dim() == 3 and hasattr(getattr(model, "patch_embed", None), "grid_size"):
        h, w = model.patch_embed.grid_size
        return (old.shape[1] - h * w) * old.shape[2]
    if leaf == "relative_position_bias_table" and old.dim() == 2:
        h, w = to_2tuple(model.get_submodule(path).window_size)
        return (old.shape[0] - (2 * h - 1) * (2 * w - 1)) * old.shape[1]
    return 0


def _traced(model: nn.Module, size: Pair) -> Traced:
    try:
        return trace(model, size)
    except REFUSALS as error:
        raise refusal(model, size, error) from error


def refusal(model: nn.Module, size: Pair, error: Exception) -> ValueError:
    """What to raise where forward of `model` has ended in `error` at images of `size` (h, w) pixels."""
    return ValueError(f"{model_name(model)} does not take {format_size(size)} pixels: {reason(error)}{_hint(model, size)}")


def _takes(model: nn.Module, size: Pair) -> bool:
    try:
        trace(model, size)
    except REFUSALS:
        return False
    return True


def _differs(a: nn.Module, b: nn.Module) -> bool:
    """Whether any parameter or buffer does, masks and index tables too."""
    first, second = ({**dict(m.named_parameters()), **dict(m.named_buffers())} for m in (a, b))
    return first.keys() != second.keys() or any(
        value.shape != second[name].shape or not (value.is_meta or torch.equal(value, second[name]))
        for name, value in first.items()
    )


def _hint(model: nn.Module, size: Pair) -> str:
    patch = getattr(getattr(model, "patch_embed", None), "patch_size", None)
    if isinstance(patch, tuple) and (size[0] % patch[0] or size[1] % patch[1]):
        near = [tuple(max(1, n // p + more) * p for n, p in zip(size, patch, strict=True)) for more in (0, 1)]
        return f"; nearest sizes it could take: {' or '.join(map(format_size, near))}"
    return "" if hasattr(model, "set_input_size") else f"; try timm.create_model({model_name(model)!r}, img_size={size})"


def reason(error: Exception) -> str:
    """The first line of what an error says."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
