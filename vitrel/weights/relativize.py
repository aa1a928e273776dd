"""relativize: give a ViT or Swin another encoding in attention and keep all its other weights."""

import inspect
from typing import Any

import torch
from timm.layers import to_2tuple
from torch import nn

from vitrel.layers import Block
from vitrel.models.backbone import Backbone
from vitrel.models.config import config_of
from vitrel.models.segmenter import Segmenter
from vitrel.models.vit import ViT
from vitrel.position import POSITIONS, PositionEncoding, key_of, select_options, split_position
from vitrel.position.terms import check_choice, parts_of
from vitrel.weights.recognize import as_vitrel


def relativize(
    model: nn.Module,
    position: str = "table",
    position_args: dict | None = None,
    *,
    absolute: str = "keep",
    fade_steps: int | None = None,
    rope: str = "keep",
    img_size: int | tuple[int, int] | None = None,
) -> Any:
    """Return a new vitrel model with the weights of `model` and a new encoding `position` in every block.

    Args:
        model: a vitrel ViT without position in attention, or with a rotation; a vitrel Swin, whose encoding in the windows is
            replaced (a rotation stays beside the new one if `rope` is "keep"); a timm model that `from_timm` converts to one;
            or a Segmenter of one. It is not changed.
        position: a key of POSITIONS that acts in attention, or several joined by '+'.
        position_args: options of the encodings.
        absolute: "keep" the embedding, "drop" it, or "fade" it out (of a ViT alone).
        fade_steps: for "fade": the number of training steps until the embedding is 0 (vitrel.layers.Fade).
        rope: "keep" or "drop" the model's own rotation; a `position` that rotates replaces it in any case.
        img_size: training size of the new encodings in pixels, an int or (h, w); None: the model's. The embedding is resampled
            to it, as forward at that size would do.

    Learned rows (of encodings with the option `init_std`) start at 0, so they do not change the logits before training; DeBERTa
    still scales content by 3**-0.5, and encodings without learned rows act from the start.

    Raises:
        ValueError: arguments are unknown or conflict; a ViT has a bias in attention already or shares one rotation among its
            blocks; a Swin has `position` already.
        TypeError: `model` is no module, but for example a name.
    """
    for name, value, known in (("absolute", absolute, ("keep", "drop", "fade")), ("rope", rope, ("keep", "drop"))):
        check_choice("relativize", name, value, known)
    if isinstance(model, Segmenter):
        given = dict(absolute=absolute, fade_steps=fade_steps, rope=rope, img_size=img_size)
        return model.with_backbone(relativize(model.backbone, position, position_args, **given))
    options = dict(position_args or {})
    _check_position(position, options)
    model = as_vitrel(model)
    tokens, rotation = _own_keys(model, position)
    if absolute == "fade" and not tokens:
        raise ValueError("absolute='fade' needs an absolute embedding, and the model has none; use absolute='keep'")
    if absolute != "fade" and fade_steps is not None:
        raise ValueError(f"fade_steps={fade_steps!r} needs absolute='fade', not {absolute!r}")
    if absolute == "fade" and fade_steps is None:
        raise ValueError("absolute='fade' needs fade_steps, the steps from scale 1 to 0; try half of the training")
    replaced = rope == "drop" or any(POSITIONS[key].rotates for key in position.split("+"))
    kept = [key for key in (tokens if absolute != "drop" else "", "" if replaced else rotation) if key]
    added = [key for key in position.split("+") if key != "none"]
    if absolute == "fade" and not isinstance(model, ViT):
        raise ValueError("absolute='fade' is for a ViT: use absolute='keep' or 'drop'")
    config = config_of(model)
    weight = model.patch_embed.proj.weight
    fading = {"absolute_fade": fade_steps if absolute == "fade" else None} if isinstance(model, ViT) else {}
    result: Any = config.build(
        weight.device,
        weight.dtype,
        position="+".join(kept + added) or "none",
        position_args=select_options("+".join(kept), config.arguments["position_args"] or {}) | options or None,
        **fading,
        img_size=config.arguments["img_size"] if img_size is None else to_2tuple(img_size),
    )
    _copy(model, result)
    _zero(result, added)
    return result.train(model.training)


def absolute_scale(model: ViT) -> float:
    """Return the current factor of a ViT's absolute embedding: 1 without a fade, 0 without embedding; ValueError for no ViT."""
    if _checked(model).pos_embed is None:
        return 0.0
    return 1.0 if model.absolute_fade is None else model.absolute_fade.scale().item()


def drop_absolute(model: ViT) -> ViT:
    """Remove the absolute embedding of a ViT in place after it has faded to 0, without a change of logits; return the ViT.

    Raises:
        ValueError: its scale is not 0 yet, or the model has none, or is no vitrel ViT.
    """
    if _checked(model).pos_embed is None:
        raise ValueError("the model has no absolute embedding (any more): there is nothing to drop")
    if scale := absolute_scale(model):
        raise ValueError(
            f"the absolute embedding still has scale {scale:.3g}: train until it is 0, or start again from the model without "
            "the new encoding, by relativize(..., absolute='drop')"
        )
    model.pos_embed = model.absolute_fade = None
    return model


def _checked(model: nn.Module) -> ViT:
    """Return the model; ValueError if it is no vitrel ViT."""
    if not isinstance(model, ViT):
        raise ValueError(f"{type(model).__name__} is no vitrel ViT: pass the model that relativize returned, unwrapped")
    return model


def _check_position(position: str, args: dict) -> None:
    """Raise ValueError if `position` has encodings that add to tokens, or `args` has init_std for rows that start at 0."""
    tokens, _ = split_position(position)
    if tokens:
        raise ValueError(
            f"{tokens!r} adds to the tokens, and relativize adds to attention: name attention keys only (the model's "
            "embedding stays with absolute='keep')"
        )
    if "init_std" in args and any(_learns_rows(POSITIONS[key]) for key in position.split("+")):
        raise ValueError(f"init_std={args['init_std']} has no effect because learned rows start at 0: leave it out")


def _own_keys(model: Backbone, position: str) -> tuple[str, str]:
    """Return the model's own keys: (those that add to tokens, joined by '+'; the one that rotates), "" if there is none.

    Raises:
        ValueError: a Swin has `position` already; a ViT has a bias in attention, or its blocks share one rotation.
    """
    tokens, attention = split_position(model.current_arguments()["position"])
    keys = [key for key in attention.split("+") if key and key != "none"]
    if not isinstance(model, ViT):
        if attention == position:
            raise ValueError(f"the model has {position!r} in its windows already: there is nothing to relativize")
        return tokens, next((key for key in keys if POSITIONS[key].rotates), "")
    if other := [key for key in keys if not POSITIONS[key].rotates]:
        raise ValueError(
            f"the model has {other[0]!r} in attention already: there is nothing to relativize; for another encoding build the "
            "model with it, e.g. position='absolute+table'"
        )
    if keys and model.shared_position is not None:
        raise ValueError("the blocks share one rotation: build the model without share_position")
    return tokens, keys[0] if keys else ""


def _encodings(encoding: PositionEncoding | None) -> dict[str, PositionEncoding]:
    """Return {key: encoding} of the parts of an encoding, which may be a composition; {} for None."""
    return {} if encoding is None else {key_of(part): part for part in parts_of(encoding)}


@torch.no_grad()
def _copy(model: Backbone, result: Backbone) -> None:
    """Copy the weights of `model` to `result`, in place; encodings are matched by key, and new ones keep their values.

    An absolute embedding is resampled to the grid of `result`. The step count of a fade is not copied: it starts again.
    """
    positions = (*model.position_parameters(), *result.position_parameters())
    state = {name: value for name, value in model.state_dict().items() if name not in positions}
    state.pop("absolute_fade.steps", None)
    missing, unexpected = result.load_state_dict(state, strict=False)
    assert not unexpected and {*missing} <= {*positions, "absolute_fade.steps"}, (missing, unexpected)
    positions_of = [[block.position for block in of.modules() if isinstance(block, Block)] for of in (model, result)]
    pairs = [(model.pos_embed, result.pos_embed), *zip(*positions_of, strict=True)]
    for old, new in pairs:
        old_parts, new_parts = _encodings(old), _encodings(new)
        for key in old_parts.keys() & new_parts.keys():
            if key == "absolute":
                # the encoding is called, which resamples it if the grids differ
                new_parts[key].pos_embed.copy_(old_parts[key](new_parts[key].grid).tokens[None])
            else:
                new_parts[key].load_state_dict(old_parts[key].state_dict())


@torch.no_grad()
def _zero(result: Backbone, added: list[str]) -> None:
    """Set to 0, in place, the learned rows of encodings whose key is in `added`, in all blocks; other encodings are skipped."""
    for block in (module for module in result.modules() if isinstance(module, Block)):
        for key, part in _encodings(block.position).items():
            if key in added and _learns_rows(type(part)):
                for parameter in part.parameters(recurse=False):
                    nn.init.zeros_(parameter)


def _learns_rows(encoding: type[PositionEncoding]) -> bool:
    return "init_std" in inspect.signature(encoding).parameters
