"""Load weights of vitrel and other code: read a file, rearrange it for a model, check that all fits, report every step."""

import re
from collections import Counter
from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from timm.layers import to_2tuple
from torch import Tensor, nn

from vitrel.common.names import nearest
from vitrel.common.tables import aligned
from vitrel.geometry import dtype_name
from vitrel.weights.positions import rename_positions, resample_positions
from vitrel.weights.read import guarding, read_file
from vitrel.weights.record import check_record
from vitrel.weights.rotate import Rotation
from vitrel.weights.swin_names import rename_swin
from vitrel.weights.tensors import FileTensors, Row
from vitrel.weights.unwrap import unwrap
from vitrel.weights.vit_names import read_vit

# Dtypes that are cast to a float parameter. Quantized values (integers, 8-bit floats) are wrong without their scales.
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SHOWN = 10  # names of a kind in an error
_OPTIONS = (  # (pattern of names, option of the model that they mostly depend on); the first that matches counts
    (r"^head\.", "num_classes (for a new classifier: reset_head=True)"),
    (r"logit_scale|cpb_mlp|attn\.[qv]_bias", "version of Swin"),
    (r"position\.|pos_embed|bias_table|rel_pos|freqs|absolute_fade", "position"),
    (r"^patch_embed\.", "patch_size or in_chans"),
    (r"_token$|^head_dist\.", "class_token, dist_token or reg_tokens"),
    (r"^(fc_norm|attn_pool)\.", "global_pool"),
    (r"\.ls\d\.|mlp\.(norm|fc1_.)|attn\.norm|[qk]_norm", "block_args"),
    (r"qkv\.bias$", "qkv_bias"),
)
_SIZE = "depth or embed_dim"  # for all other names


class WeightPlan(NamedTuple):
    """How a file's tensors fit a model; nothing is loaded yet. print() shows the rows as a table.

    `state` also holds unused tensors and those of another shape, which `apply_plan` leaves out.
    """

    rows: tuple[Row, ...]  # what was done to every tensor of the file
    state: dict[str, Tensor]  # the tensors under the model's names
    unused: tuple[str, ...]  # keys of the file that the model does not use
    unset: tuple[str, ...]  # names in the model that the file lacks
    differ: tuple[str, ...]  # names in the model whose tensor has another shape in the file
    choice: str  # which of several copies of the weights in the file was taken; "" if there is one

    def __str__(self) -> str:
        lines = [("source", "target", "rule", "resampled")]
        lines += [(" + ".join(r.source), r.target or "-", r.rule, r.resampled or "-") for r in self.rows]
        return "\n".join(aligned(lines))


def load_pretrained(
    model: nn.Module,
    source: str | Path | dict[str, Tensor],
    reset_head: bool = False,
    source_grid: tuple[int, int] | None = None,
    allow_unused: Iterable[str] = (),
    allow_unset: Iterable[str] = (),
) -> nn.Module:
    """Load a state dict, or a file that holds one, into a vitrel model and return the model.

    Its names are vitrel's, or those of timm's ViT, DeiT, DeiT III, BEiT, EVA-02, RoPE-ViT, DINOv2, DINOv3, SAM, Swin, Swin V2.
    float16, bfloat16 and float64 tensors are cast to the model's dtype. Files of `vitrel.save` and vitrel train also hold the
    training grids and options of their encodings, which are compared with the model's.

    Args:
        model: a vitrel model, changed in place.
        source: a state dict, a .safetensors file, or a file that torch.load reads with weights_only=True. Nested dictionaries
            ("model", "state_dict") and prefixes of training modules are unwrapped; averaged weights ("state_dict_ema",
            "model_ema", "ema", "teacher") are preferred (see `unwrap`).
        reset_head: allow a missing classifier or one for another number of classes: the model's keeps its values. With the same
            number the file's is loaded in any case.
        source_grid: (h, w) in patches that the file's absolute embedding or tables were trained on. None: the first of these
            that has as many rows as the tensor: the grid recorded in the file, the model's, a square one.
        allow_unused: names, or patterns with *, of tensors in the file that the model may ignore.
        allow_unset: those of tensors in the model that may keep their values, also where the file's has another shape.

    Raises:
        RuntimeError: other tensors, listed in the message, are unused, unset or of another shape, or hold NaN or infinity.
        ValueError: another rotation, an unknown grid, quantized weights, or integers. The model is unchanged
            after every error.
    """
    return apply_plan(model, plan_weights(model, source, source_grid), reset_head, allow_unused, allow_unset)


def apply_plan(
    model: nn.Module,
    plan: "WeightPlan",
    reset_head: bool = False,
    allow_unused: Iterable[str] = (),
    allow_unset: Iterable[str] = (),
    copy: bool = True,
) -> nn.Module:
    """Copy the tensors of a plan of `plan_weights` into its model, in place, and return the model.

    Args:
        model: for which the plan was made.
        plan: of `plan_weights`.
        reset_head: as in `load_pretrained`.
        allow_unused: as in `load_pretrained`.
        allow_unset: as in `load_pretrained`.
        copy: False: the model takes the plan's tensors themselves where it can, for a plan whose tensors nothing else uses.

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
    if not copy:
        taken = _whole(new, own)
        model.load_state_dict(taken, strict=False, assign=True)
        new = {name: value for name, value in new.items() if name not in taken}
    if new:
        model.load_state_dict(new, strict=False)  # what keeps its value is missing; misfits were refused above
    return model


def _whole(tensors: dict[str, Tensor], own: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that may become a model's own: of its dtype and device, each with a storage that holds nothing else.

    Two tensors in one storage could not be saved as safetensors, and the rest of a storage would stay in memory.

    Args:
        tensors: of a plan, by their names in the model.
        own: the model's, by name.
    """
    users = Counter(value.untyped_storage().data_ptr() for value in tensors.values())
    return {
        name: value
        for name, value in tensors.items()
        if (value.dtype, value.device) == (own[name].dtype, own[name].device)
        and value.is_contiguous()
        and value.untyped_storage().nbytes() == value.nbytes
        and users[value.untyped_storage().data_ptr()] == 1
    }


def plan_weights(
    model: nn.Module,
    source: str | Path | dict[str, Tensor],
    source_grid: tuple[int, int] | None = None,
    rotation: Rotation | None = None,
) -> WeightPlan:
    """Return how each tensor of a file or state dict would be renamed, rearranged and resampled for a model; nothing is loaded.

    Tensors that are unused, unset or of another shape are listed in the plan.

    Args:
        model: a vitrel model, not changed.
        source: as in `load_pretrained`.
        source_grid: as in `load_pretrained`.
        rotation: rotary encoding and channel order in the file; None: inferred from the names of the tensors.

    Raises:
        ValueError: as in `load_pretrained`.
    """
    if not hasattr(model, "layout"):
        raise ValueError(
            f"weights are loaded into a vitrel model, not into {type(model).__name__}; convert timm's with vitrel.from_timm"
        )
    loaded = source if isinstance(source, dict) else read_file(source)
    record = _record(loaded)
    unwrapped = unwrap(loaded, "the state dict" if isinstance(source, dict) else str(source))
    tensors, own = FileTensors(unwrapped.state), model.state_dict()
    check_record(model, record)
    try:
        rename_swin(tensors) if model.layout == "swin" else read_vit(tensors, model, rotation)
        rename_positions(tensors, model)
        _check_dtypes(tensors, unwrapped.state, own)
        resample_positions(tensors, model, None if source_grid is None else to_2tuple(source_grid), record)
    except (IndexError, RuntimeError) as error:
        raise ValueError(f"a tensor of the file has a shape that no known layout has: {error}") from error
    unset = tuple(n for n in own if n not in tensors)
    unused = [n for n in tensors.items if n not in own]
    differ = tuple(n for n in own if n in tensors and tensors[n].shape != own[n].shape)
    names = [n for name in unused for n in tensors.items[name].source] + [*unwrapped.beside]
    rows = [row if row.target not in unused else row._replace(target="", rule="unused") for row in tensors.rows()]
    rows += [Row((name,), "", "unused") for name in unwrapped.beside] + [*unwrapped.rows]
    fitted = {n: item.value for n, item in tensors.items.items()}
    return WeightPlan(tuple(rows), fitted, tuple(dict.fromkeys(names)), unset, differ, unwrapped.choice)


def model_for(
    name: str,
    model_args: dict[str, Any],
    loaded: object,
    source_grid: tuple[int, int] | None = None,
) -> tuple[nn.Module, WeightPlan]:
    """Return a model, and the plan for a file's weights, which are not loaded into it (`apply_plan` does).

    The model has as many classes as the file's classifier, 0 if the file has none, unless model_args sets num_classes.

    Args:
        name: of the model in timm's registry.
        model_args: constructor arguments.
        loaded: the result of `read_file`.
        source_grid: as in `load_pretrained`.

    Raises:
        ValueError: vitrel has no model of that name, or as in `plan_weights`.
    """
    if not timm.is_model(name) or not name.startswith("vitrel_"):
        near = ", ".join(nearest(name, timm.list_models("vitrel*"), cutoff=0.0))
        raise ValueError(f"unknown model {name!r}; the nearest of timm.list_models('vitrel*') are {near}")
    with guarding(name, model_args):
        model, source = timm.create_model(name, **model_args), loaded if isinstance(loaded, dict) else {}
    plan = plan_weights(model, source, source_grid)
    classifier = plan.state.get(f"{model.default_cfg['classifier']}.weight")
    classes = 0 if classifier is None else len(classifier)
    if "num_classes" not in model_args and classes != model.num_classes:
        model = timm.create_model(name, num_classes=classes, **model_args)
        plan = plan_weights(model, source, source_grid)
    return model, plan


def filter_state_dict(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Return a state dict renamed and, where the grids differ, resampled for `model`; timm's `checkpoint_filter_fn`.

    The classifier and the first convolution are returned in the file's shape, since timm fits them itself.

    Raises:
        RuntimeError: as in `load_pretrained`, but for NaN. The errors are raised here since timm loads with strict=False, and
            so ignores misfits, where the number of classes differs.
        ValueError: as in `load_pretrained`.
    """
    try:
        plan = plan_weights(model, state)
    except TypeError as error:  # timm would retry with one argument and hide this
        raise RuntimeError(f"cannot read these weights: {error}") from error
    adapted = ["head.*", "head_dist.*", model.pretrained_cfg["first_conv"] + ".*"]
    if misfit := _misfit(plan, model.state_dict(), adapted, adapted):
        raise RuntimeError(misfit)
    return plan.state


def _record(loaded: object) -> dict[str, dict[str, Any]]:
    """Return the file's description of its encodings (vitrel.weights.record), {} without one."""
    about = loaded.get("vitrel") if isinstance(loaded, dict) else None
    return about.get("position", {}) if isinstance(about, dict) else {}


def _check_dtypes(tensors: FileTensors, state: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    for target in (name for name in tensors.items if name in own and own[name].is_floating_point()):
        for name in tensors.items[target].source:
            if state[name].dtype not in _FLOATS:
                dtype = dtype_name(state[name].dtype)
                raise ValueError(
                    f"{name} is {dtype}, the model's {target} {dtype_name(own[target].dtype)}: quantized or "
                    "integer weights mean nothing without their scales; save the file dequantized, in a float dtype"
                )


def _but(names: Iterable[str], patterns: list[str]) -> list[str]:
    """Return the names that match no pattern."""
    return [name for name in names if not any(fnmatch(name, pattern) for pattern in patterns)]


def _misfit(plan: WeightPlan, own: dict[str, Tensor], allow_unused: list[str], allow_unset: list[str]) -> str:
    """Return the text of an error that names the tensors that do not fit a model, "" if all fit.

    Args:
        plan: for the model.
        own: the model's state dict.
        allow_unused: names or patterns of tensors that the model may ignore.
        allow_unset: of those that may keep their values, also where the file's has another shape.
    """
    unset, unused, differ = _but(plan.unset, allow_unset), _but(plan.unused, allow_unused), _but(plan.differ, allow_unset)
    if not (names := [*unset, *unused, *differ]):
        return ""
    shapes = [f"{n}: {tuple(plan.state[n].shape)} in the file, {tuple(own[n].shape)} in the model" for n in differ]
    parts = ["the weights do not fit the model; nothing was loaded."]
    for title, listed in (("not in the file", unset), ("not in the model", unused), ("of another shape", shapes)):
        if listed:
            more = f", and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
            parts.append(f"{title}: {', '.join(listed[:_SHOWN])}{more}.")
    if plan.choice:
        parts.append(f"{plan.choice}.")
    options = [next((option for pattern, option in _OPTIONS if re.search(pattern, name)), _SIZE) for name in names]
    parts.append(f"The likely cause is another {Counter(options).most_common(1)[0][0]}.")
    allowed = [o for o, some in (("allow_unset", unset + differ), ("allow_unused", unused)) if some]
    parts.append(f"vitrel.load_pretrained loads the rest if they are named in {' and '.join(f'{o}=[...]' for o in allowed)}.")
    return " ".join(parts)
