"""Load weights into a vitrel model: rename and fit them, check that all are used and set, and copy them."""

from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from timm.models import adapt_input_conv
from torch import Tensor, nn

from vitrel.common.names import nearest
from vitrel.geometry import dtype_name
from vitrel.models.backbone import Backbone
from vitrel.models.config import config_of
from vitrel.models.registry import set_weight_filter
from vitrel.models.segmenter import Segmenter
from vitrel.weights.names import Rotation, to_vitrel
from vitrel.weights.positions import Resampled, fit_positions
from vitrel.weights.read import read_file, unwrap
from vitrel.weights.record import check_record, position_record

# Dtypes that are cast to a float parameter. Quantized values (integers, 8-bit floats) are wrong without their scales.
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SHOWN = 10  # names of a kind in an error
KNOWN = (
    "known are vitrel's names and timm's, and of other projects those that timm's own filter of a model reads: "
    "vitrel.from_timm(NAME, checkpoint_path=FILE)"
)


class WeightPlan(NamedTuple):
    """The result of `plan_weights`: how tensors fit a model. Nothing is loaded yet.

    `state` are the tensors under the model's names. It also holds those that are `unused` (not in the model) or `differ` (in
    shape), which `apply_plan` leaves out. `unset` are names that only the model has; `rows` lists what was resampled.
    """

    state: dict[str, Tensor]  # the tensors under the model's names
    unused: tuple[str, ...]  # names that the model does not have
    unset: tuple[str, ...]  # names in the model that are missing
    differ: tuple[str, ...]  # names in the model whose tensor has another shape
    rows: tuple[Resampled, ...]  # tables and embeddings that were resampled to the model's grid


def load_pretrained(
    model: nn.Module,
    source: nn.Module | str | Path | dict[str, Tensor],
    reset_head: bool = False,
    allow_unused: Iterable[str] = (),
    allow_unset: Iterable[str] = (),
) -> nn.Module:
    """Load the weights of another vitrel model, of a state dict, or of a file that holds one, and return the model.

    Names in a state dict are vitrel's, or those of timm's ViT, DeiT, DeiT III, BEiT, DINOv2, SAM, Swin and Swin V2. For other
    models of timm, and for those that rotate q and k, pass the converted model: `vitrel.from_timm(model)`. float16, bfloat16
    and float64 tensors are cast to the model's dtype. Tables and embeddings of another training grid are resampled to the
    model's, once. A first convolution for another number of channels is adapted as timm does (timm.models.adapt_input_conv).

    Models, and files of `vitrel.save` and vitrel train, also say which encoding they have with which options; another than the
    model's is an error. So is another training grid for an encoding that refers to it (`PositionEncoding.refers_to_grid`).

    Args:
        model: a vitrel model, changed in place.
        source: a vitrel model, a state dict, a .safetensors file, or a file that torch.load reads with weights_only=True.
            Nested dictionaries ("model", "state_dict") and a prefix of all names are unwrapped; averaged weights
            ("state_dict_ema", "model_ema", "ema", "teacher") are preferred (see `unwrap`).
        reset_head: allow that the source has no classifier, or one for another number of classes: the model keeps its own. With
            the same number the source's is loaded in any case.
        allow_unused: names, or patterns with *, of tensors in the source that the model may ignore.
        allow_unset: names, or patterns with *, of tensors in the model that may keep their values if the source has none of
            their name and shape.

    Raises:
        RuntimeError: other tensors, listed in the message, are unused, unset or of another shape, or hold NaN or infinity.
        ValueError: another encoding, an unknown grid, quantized weights, or integers. The model is unchanged after every error.
        FileNotFoundError: there is no such file.
    """
    return apply_plan(model, plan_weights(model, source), reset_head, allow_unused, allow_unset)


def apply_plan(
    model: nn.Module,
    plan: WeightPlan,
    reset_head: bool = False,
    allow_unused: Iterable[str] = (),
    allow_unset: Iterable[str] = (),
) -> nn.Module:
    """Copy the tensors of a plan of `plan_weights` into its model, in place, and return the model.

    The other arguments are as in `load_pretrained`.

    Raises:
        RuntimeError: tensors are unused, unset or of another shape and not allowed to be, or hold NaN or infinity; the model is
            unchanged then.
    """
    own, head = model.state_dict(), ["head.*"] if reset_head else []
    unused, unset = ([names] if isinstance(names, str) else [*names] for names in (allow_unused, allow_unset))
    if misfit := _misfit(plan, own, unused + head, unset + head):
        raise RuntimeError(misfit)
    new = {n: value for n, value in plan.state.items() if n in own and n not in plan.differ}
    floats = {n: value for n, value in new.items() if value.is_floating_point() and not value.is_meta}
    # a sum is read faster; one beyond the largest number says nothing about its terms
    if bad := [n for n, value in floats.items() if not value.sum().isfinite() and not value.isfinite().all()]:
        raise RuntimeError(f"the weights hold NaN or infinity in {', '.join(bad[:5])}; nothing was loaded")
    model.load_state_dict(new, strict=False)  # what keeps its value is missing; misfits were refused above
    return model


def plan_weights(model: nn.Module, source: nn.Module | str | Path | dict[str, Tensor]) -> WeightPlan:
    """Return how the tensors of a model, file or state dict would be renamed, rearranged and resampled for `model`.

    Nothing is loaded. `source` and errors are as in `load_pretrained`, but tensors that are unused, unset or of another shape
    are listed in the plan, and NaN is no error.
    """
    for given in (model, source):
        if isinstance(given, nn.Module) and not isinstance(given, Backbone | Segmenter):
            kind = type(given).__name__
            raise ValueError(
                f"weights are loaded between vitrel models, this is a {kind}: convert timm's with vitrel.from_timm"
            )
    if isinstance(source, nn.Module):
        return fitted(model, source.state_dict(), position_record(source))
    loaded = source if isinstance(source, dict) else read_file(source)
    about = loaded.get("vitrel") if isinstance(loaded, dict) else None
    state = unwrap(loaded, "the state dict" if isinstance(source, dict) else str(source))
    return fitted(model, state, about.get("position", {}) if isinstance(about, dict) else {})


def fitted(
    model: nn.Module, state: dict[str, Tensor], record: dict[str, dict[str, Any]], rotation: Rotation | None = None
) -> WeightPlan:
    """Return the plan for a state dict without wrappers, as `plan_weights` does; the model is not changed.

    `record` is of the encodings that the tensors were trained with (see vitrel.weights.record), {} if unknown; `rotation` is
    the order of their rotary channels, None if unknown.
    """
    own = model.state_dict()
    check_record(model, record)
    state = to_vitrel(state, model, rotation)
    for name, value in state.items():
        if name in own and own[name].is_floating_point() and value.dtype not in _FLOATS:
            raise ValueError(
                f"{name} is {dtype_name(value.dtype)}, the model's is {dtype_name(own[name].dtype)}: quantized or integer "
                "weights mean nothing without their scales; save the file dequantized, in a float dtype"
            )
    try:
        rows = fit_positions(state, model, record)
    except (IndexError, RuntimeError) as error:
        raise ValueError(f"a tensor of the file has a shape that no known layout has: {error}") from error
    for name in [name for name in own if name.endswith("patch_embed.proj.weight") and name in state]:
        if state[name].dim() == 4 and state[name].shape[1] != own[name].shape[1]:
            state[name] = adapt_input_conv(own[name].shape[1], state[name], base_chans=state[name].shape[1])
    unused, unset = tuple(n for n in state if n not in own), tuple(n for n in own if n not in state)
    differ = tuple(n for n in own if n in state and state[n].shape != own[n].shape)
    return WeightPlan(state, unused, unset, differ, tuple(rows))


def rebuilt(model: Backbone, **changes: Any) -> Backbone:
    """Return a new model with the weights of `model` and other constructor arguments `changes`; `model` is not changed.

    With another `img_size` tables and embeddings are resampled to it; with another `num_classes` the head is new.
    """
    weight = model.patch_embed.proj.weight
    result = config_of(model).build(weight.device, weight.dtype, **changes)
    apply_plan(result, plan_weights(result, model), reset_head="num_classes" in changes)
    return result.train(model.training)


def model_for(
    name: str,
    model_args: dict[str, Any],
    loaded: object,
) -> tuple[nn.Module, WeightPlan]:
    """Return a new model of a name, and the plan for a file's weights, which are not loaded into it (`apply_plan` does).

    The model has as many classes as the file's classifier, 0 if the file has none, unless model_args sets num_classes.

    Args:
        name: of the model in timm's registry, "vitrel_...".
        model_args: constructor arguments.
        loaded: the result of `read_file`.

    Raises:
        ValueError: vitrel has no model of that name, or as in `plan_weights`.
    """
    if not timm.is_model(name) or not name.startswith("vitrel_"):
        near = ", ".join(nearest(name, timm.list_models("vitrel*"), cutoff=0.0))
        raise ValueError(f"unknown model {name!r}; the nearest of timm.list_models('vitrel*') are {near}")
    source = loaded if isinstance(loaded, dict) else {}
    heads = [rows for head, rows in unwrap(source, "the file").items() if head in ("head.weight", "head.fc.weight")]
    model = timm.create_model(name, **{"num_classes": len(heads[0]) if heads else 0} | model_args)
    return model, plan_weights(model, source)


def filter_state_dict(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return a state dict renamed and, where grids differ, resampled for `model`; timm calls it for `pretrained=True`.

    The classifier keeps the file's shape, since timm fits it itself. A first convolution for other channels is adapted here,
    and the model's pretrained_cfg gets these channels. Errors are those of `load_pretrained`, except for NaN. They are raised
    here because timm loads with strict=False, and so ignores misfits, if the number of classes differs.
    """
    try:
        plan = plan_weights(model, state)
    except TypeError as error:  # timm would retry with one argument and hide this
        raise RuntimeError(f"cannot read these weights: {error}") from error
    adapted = ["head.*", "head_dist.*", model.pretrained_cfg["first_conv"] + ".*"]
    if misfit := _misfit(plan, model.state_dict(), adapted, adapted):
        raise RuntimeError(misfit)
    cfg: Any = model.pretrained_cfg
    cfg["input_size"] = (model.in_chans, *cfg["input_size"][1:])  # else timm warns of channels that it did not adapt itself
    return plan.state


def _but(names: Iterable[str], patterns: list[str]) -> list[str]:
    """Return the names that match none of the patterns."""
    return [name for name in names if not any(fnmatch(name, pattern) for pattern in patterns)]


def _misfit(plan: WeightPlan, own: dict[str, Tensor], allow_unused: list[str], allow_unset: list[str]) -> str:
    """Return an error's text that names the tensors that do not fit a model, "" if all fit; `own` is the model's state dict.

    Unused names that match a pattern of `allow_unused`, and unset or differing ones of `allow_unset`, are no misfit.
    """
    unset, unused, differ = _but(plan.unset, allow_unset), _but(plan.unused, allow_unused), _but(plan.differ, allow_unset)
    if not (unset or unused or differ):
        return ""
    if 4 * len(plan.unused) >= 3 * len(plan.state):
        first = ", ".join(plan.unused[:5])
        return f"hardly a tensor has a name of the model, nothing was loaded. The first others are {first}; {KNOWN}"
    shapes = [f"{n}: {tuple(plan.state[n].shape)} in the file, {tuple(own[n].shape)} in the model" for n in differ]
    parts = ["the weights do not fit the model; nothing was loaded."]
    for title, listed in (("not in the file", unset), ("not in the model", unused), ("of another shape", shapes)):
        if listed:
            more = f", and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
            parts.append(f"{title}: {', '.join(listed[:_SHOWN])}{more}.")
    if any(name.startswith("head.") for name in (*unset, *unused, *differ)):
        parts.append("For a new classifier: reset_head=True.")
    allowed = [o for o, some in (("allow_unset", unset + differ), ("allow_unused", unused)) if some]
    parts.append(f"vitrel.load_pretrained loads the rest if they are named in {' and '.join(f'{o}=[...]' for o in allowed)}.")
    return " ".join(parts)


set_weight_filter(filter_state_dict)
