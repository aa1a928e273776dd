"""One loader for anyone's weights: read a file, rearrange it for a model, refuse what does not fit, report every step."""

from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import torch
from timm.layers import to_2tuple
from torch import Tensor, nn

from vitrel.position import PositionEncoding, key_of
from vitrel.position.terms import Composition
from vitrel.weights.differences import differences, other_family
from vitrel.weights.draft import Draft, Row
from vitrel.weights.place import fit, place
from vitrel.weights.read import read_file
from vitrel.weights.record import check_record
from vitrel.weights.rotate import Rotation
from vitrel.weights.swin_names import read_swin
from vitrel.weights.unwrap import Unwrapped, unwrap
from vitrel.weights.vit_names import read_vit

# What may become a float parameter. Integers and the 8-bit floats of quantisation mean other numbers without their scales.
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class WeightPlan(NamedTuple):
    """What a file gives a model. `state` holds the tensors under the model's names, `rows` how each came there."""

    rows: tuple[Row, ...]
    state: dict[str, Tensor]
    unused: tuple[str, ...]  # keys of the file that the model does not use
    unset: tuple[str, ...]  # names in the model, of what the file does not give; "<encoding>" ones have no parameters
    differ: tuple[str, ...]  # names in the model, of what has another shape in the file
    hints: tuple[str, ...]  # what the two models differ in, and the way out

    def __str__(self) -> str:
        lines = [("source", "target", "rule", "resized")]
        lines += [(" + ".join(r.source), r.target or "-", r.rule, r.resized or "-") for r in self.rows]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join("  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines)


def load_pretrained(
    model: nn.Module,
    source: str | Path | dict[str, Tensor],
    reset_head: bool = False,
    source_grid: tuple[int, int] | None = None,
    key_minus_query: bool = False,
    allow_unused: Iterable[str] = (),
    allow_unset: Iterable[str] = (),
) -> nn.Module:
    """Load a state dict, or a file that holds one, into a vitrel model and return the model.

    source: .safetensors, or anything torch.load reads with weights_only=True; a dictionary with the weights under "model" or
    "state_dict" is unwrapped, averaged ones ("state_dict_ema", "model_ema", "ema", "teacher") before others, and so are names
    with the prefixes of a training module (see `unwrap`). What `vitrel.save` and vitrel train write tells the training
    grids of its encodings too, so that no other function is read from the same numbers. Tensors of float16, bfloat16 and
    float64 are cast to the model's type, quantised ones and other integers refused.
    Layouts: vitrel; Swin V1 and V2 of timm, Microsoft, torchvision, transformers and naver (RoPE);
    ViT, DeiT, DeiT III, BEiT, EVA-02, RoPE-ViT, DINOv2, DINOv3, SAM and ViTDet, as timm or their authors save them.
    reset_head: leave the classifier as initialised, for another number of classes. source_grid: (h, w) in tokens that the
    file's absolute embedding or tables were trained on. Without it, one with as many rows as the model's is taken to be of the
    model's grid, any other of a square one. key_minus_query: the file's tables count offsets as key minus query (MaxViT),
    ours as query minus key. allow_unused, allow_unset: names, or patterns with *, of tensors in the file that may stay unused
    and of the model's that may stay as they are, those of another shape in the file too.
    Everything else that would stay unused or unset raises RuntimeError, is listed, and the model is left as it was; ValueError
    for another trunk, patch size or rotation, or for a grid that has to be named.
    """
    return apply_plan(model, plan_weights(model, source, source_grid, key_minus_query), reset_head, allow_unused, allow_unset)


def apply_plan(
    model: nn.Module,
    plan: "WeightPlan",
    reset_head: bool = False,
    allow_unused: Iterable[str] = (),
    allow_unset: Iterable[str] = (),
) -> nn.Module:
    """Load what `plan_weights` has planned for this model; the rest of `load_pretrained`."""
    own, head = model.state_dict(), ["head.*"] if reset_head else []
    unused, unset = ([names] if isinstance(names, str) else [*names] for names in (allow_unused, allow_unset))
    unused, unset = unused + head, unset + head
    left = _Refusals(_but(plan.unset, unset), _but(plan.unused, unused), _but(plan.differ, unset))
    if any(left):
        raise RuntimeError(_mismatch(plan, own, left))
    new = {n: value for n, value in plan.state.items() if n in own and n not in plan.differ}
    floats = {n: value for n, value in new.items() if value.is_floating_point() and not value.is_meta}
    if bad := [n for n, value in floats.items() if not value.isfinite().all()]:
        raise RuntimeError(f"the weights hold NaN or infinity in {', '.join(bad[:5])}; nothing was loaded")
    model.load_state_dict(own | new)
    return model


class _Refusals(NamedTuple):
    unset: tuple[str, ...]
    unused: tuple[str, ...]
    differ: tuple[str, ...]


def plan_weights(
    model: nn.Module,
    source: str | Path | dict[str, Tensor],
    source_grid: tuple[int, int] | None = None,
    key_minus_query: bool = False,
    rotation: Rotation | None = None,
) -> WeightPlan:
    """What `load_pretrained` would do, tensor by tensor, without doing it; arguments as there. print() gives a table.

    rotation: how the rotary encoding of the file's model lies in memory, where it is known; else the names have to tell.
    """
    if not hasattr(model, "patch_embed") or not hasattr(model, "position_parameters"):
        raise ValueError(
            f"weights are loaded into a vitrel backbone, not into {type(model).__name__}; vitrel.from_timm makes one of timm's"
        )
    loaded = source if isinstance(source, dict) else read_file(source)
    record = _record(loaded)
    found = unwrap(loaded, "the state dict" if isinstance(source, dict) else str(source))
    draft, own = Draft(found.state), model.state_dict()
    check_record(model, record)
    try:
        read_swin(draft, model) if hasattr(model, "layers") else read_vit(draft, model, rotation)
        place(draft, model)
        _check_dtypes(draft, found.state, own)
        fit(draft, model, None if source_grid is None else to_2tuple(source_grid), key_minus_query, record)
    except (IndexError, RuntimeError) as error:
        raise ValueError(f"a tensor of the file has a shape that no known layout has: {error}") from error
    unset = [n for n in own if n not in draft] + _not_trained_with(draft, model)
    unused = [n for n in draft.items if n not in own]
    differ = [n for n in own if n in draft and draft[n].shape != own[n].shape]
    if family := other_family(unused, model):
        hints = [family]
    else:
        _check_patch(draft, model)
        hints = differences(unset, [*unused, *found.beside], {n: (draft[n].shape, own[n].shape) for n in differ})
    hints += _of_the_file(found, unset) if unset or unused or differ or found.beside else []
    names = [n for name in unused for n in draft.items[name].source] + [*found.beside]
    rows = [row if row.target not in unused else row._replace(target="", rule="unused") for row in draft.rows()]
    rows += [Row((name,), "", "unused") for name in found.beside] + [*found.rows]
    tensors = {n: item.value for n, item in draft.items.items()}
    return WeightPlan(tuple(rows), tensors, tuple(dict.fromkeys(names)), tuple(unset), tuple(differ), tuple(hints))


def filter_state_dict(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """A foreign state dict renamed and, where the grids differ, resampled for `model`; timm's `checkpoint_filter_fn`.

    ValueError and RuntimeError as `load_pretrained`, but for the classifier and the number of channels, which timm adapts: with
    another number of classes it would not refuse anything.
    """
    try:
        plan = plan_weights(model, state)
    except TypeError as error:  # timm would retry with one argument and hide this
        raise RuntimeError(f"cannot read these weights: {error}") from error
    adapted = ["head.*", "head_dist.*", model.pretrained_cfg["first_conv"] + ".*"]
    left = _Refusals(_but(plan.unset, adapted), _but(plan.unused, adapted), _but(plan.differ, adapted))
    if any(left):
        raise RuntimeError(_mismatch(plan, model.state_dict(), left))
    return plan.state


def _record(loaded: object) -> dict[str, dict[str, Any]]:
    about = loaded.get("vitrel") if isinstance(loaded, dict) else None
    return about.get("position", {}) if isinstance(about, dict) else {}


def _check_dtypes(draft: Draft, state: dict[str, Tensor], own: dict[str, Tensor]) -> None:
    for target in (name for name in draft.items if name in own and own[name].is_floating_point()):
        for name in draft.items[target].source:
            if state[name].dtype not in _FLOATS:
                dtype = str(state[name].dtype).removeprefix("torch.")
                raise ValueError(
                    f"{name} is {dtype}, the model's {target} {str(own[target].dtype).removeprefix('torch.')}: quantised or "
                    "integer weights are no numbers without their scales; save the file dequantised, in a float type"
                )


def _of_the_file(found: Unwrapped, unset: list[str]) -> list[str]:
    """What in the way a file was unwrapped may be why it does not fit."""
    hints = [found.choice] if found.choice else []
    if both := [name for name in found.beside if name in unset]:
        hints.append(f"{both[0]} lies beside the names of the model in the file (rename it to begin as they do)")
    return hints


def _not_trained_with(draft: Draft, model: nn.Module) -> list[str]:
    """Encodings without parameters that the file's model did not have: nothing in a state dict would miss them."""
    found = []
    for name, part in model.named_modules():
        bare = isinstance(part, PositionEncoding) and not isinstance(part, Composition) and not [*part.parameters()]
        if draft.implied and bare and key_of(part) not in {"none", *draft.implied}:
            found.append(f"{name} <{key_of(part)}>")
    return found


def _check_patch(draft: Draft, model: nn.Module) -> None:
    own = model.patch_embed.proj.weight
    if "patch_embed.proj.weight" in draft and draft["patch_embed.proj.weight"].shape[2:] != own.shape[2:]:
        shape = draft["patch_embed.proj.weight"].shape
        raise ValueError(
            f"the weights have patches of {shape[2]}x{shape[3]} pixels, the model of {own.shape[2]}x{own.shape[3]}; "
            "build it with that patch_size"
        )


def _but(names: Iterable[str], patterns: list[str]) -> tuple[str, ...]:
    """The names that no pattern names."""
    return tuple(n for n in names if not any(fnmatch(n.partition(" <")[0], pattern) for pattern in patterns))


def _mismatch(plan: WeightPlan, own: dict[str, Tensor], left: _Refusals) -> str:
    parts = ["the weights do not fit the model; nothing was loaded."]
    shapes = [f"{n}: {tuple(plan.state[n].shape)} in the file, {tuple(own[n].shape)} in the model" for n in left.differ]
    lists = (("not in the file", left.unset), ("not in the model", left.unused), ("of another shape", shapes))
    for title, names in lists:
        if names:
            more = f", and {len(names) - 8} more" if len(names) > 8 else ""
            parts.append(f"{title}: {', '.join(names[:8])}{more}.")
    if plan.hints:
        parts.append(f"What differs: {'; '.join(plan.hints)}.")
    if any(name.startswith("head.") for name in left.unset):
        parts.append("The file has no classifier: build the model with num_classes=0, or pass reset_head=True.")
    if any(name.startswith("head.") for name in left.differ):
        parts.append("For another number of classes pass reset_head=True.")
    options = [o for o, names in (("allow_unset", left.unset), ("allow_unused", left.unused)) if names]
    if options:
        parts.append(f"What may be left so is named: {' and '.join(f'{option}=[...]' for option in options)}.")
    return " ".join(parts)
