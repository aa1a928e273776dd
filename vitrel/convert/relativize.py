"""relativize: a ViT with an encoding in attention that it did not have, everything else as it was."""

import inspect
from typing import Any

import torch
from timm.layers import to_2tuple
from torch import nn

from vitrel.convert.recognise import as_vitrel
from vitrel.models.backbone import Backbone
from vitrel.models.config import config_of
from vitrel.models.vit import ViT
from vitrel.position import POSITIONS, PositionEncoding, key_of, split_position
from vitrel.position.terms import check_choice, parts_of


def relativize(
    model: nn.Module,
    position: str = "table",
    position_args: dict | None = None,
    *,
    absolute: str = "keep",
    fade_steps: int | None = None,
    rope: str = "keep",
    img_size: int | tuple[int, int] | None = None,
    zero_init: bool = True,
) -> ViT:
    """A new vitrel ViT with the weights of `model` and a fresh encoding `position` in every block; `model` stays as it is.

    model: a vitrel ViT whose attention has no position or a rotation, or what `from_timm` takes.
    position: a key of POSITIONS that acts in attention, or several joined by '+'; position_args: their options.
    absolute: "keep" the embedding, "drop" it, or "fade" it out over the first `fade_steps` training steps (vitrel.layers.Fade).
    rope: "keep" or "drop" the model's own rotation; a `position` that rotates replaces it in any case.
    img_size: the size in pixels that the new encodings are to be trained at, an int or (h, w), that of the model unless given.
    The embedding is resampled to it once, which is what forward at that size would do.
    zero_init: learned rows (of encodings with the option `init_std`) start at 0, so that the logits do not change, and only
    learn; DeBERTa still scales content by 3**-0.5, and other encodings act from the start.
    Raises ValueError for what it cannot do.
    """
    for name, value, known in (("absolute", absolute, ("keep", "drop", "fade")), ("rope", rope, ("keep", "drop"))):
        check_choice("relativize", name, value, known)
    options = dict(position_args or {})
    _check_position(position, options, zero_init)
    model = as_vitrel(model)
    own = _own_keys(model)
    tokens, rotation = own
    if absolute == "fade" and not tokens:
        raise ValueError("absolute='fade' needs an absolute embedding, and the model has none; use absolute='keep'")
    if absolute != "fade" and fade_steps is not None:
        raise ValueError(f"fade_steps={fade_steps!r} needs absolute='fade', not {absolute!r}")
    if absolute == "fade" and fade_steps is None:
        raise ValueError("absolute='fade' needs fade_steps, training steps from scale 1 to 0: half of those to come is a start")
    replaced = rope == "drop" or any(POSITIONS[key].rotates for key in position.split("+"))
    kept = [key for key in (tokens if absolute != "drop" else "", "" if replaced else rotation) if key]
    added = [key for key in position.split("+") if key != "none"]
    config = config_of(model)
    weight = model.patch_embed.proj.weight
    result: Any = config.build(
        weight.device,
        weight.dtype,
        position="+".join(kept + added) or "none",
        position_args=_options_of(kept, config.arguments["position_args"] or {}) | options or None,
        absolute_fade=fade_steps if absolute == "fade" else None,
        img_size=config.arguments["img_size"] if img_size is None else to_2tuple(img_size),
    )
    _copy(model, result)
    if zero_init:
        _zero(result, added)
    return result.train(model.training)


def absolute_scale(model: ViT) -> float:
    """What the absolute embedding of a ViT is multiplied with now: 1 where it is kept, 0 where there is none."""
    if _checked(model).pos_embed is None:
        return 0.0
    return 1.0 if model.absolute_fade is None else model.absolute_fade.scale().item()


def drop_absolute(model: ViT, force: bool = False) -> ViT:
    """Remove the absolute embedding of a ViT, in place, once it has faded: logits do not change.

    force: remove it whatever its scale. Raises ValueError for one that still acts, and where there is none.
    """
    if _checked(model).pos_embed is None:
        raise ValueError("the model has no absolute embedding (any more): there is nothing to drop")
    if (scale := absolute_scale(model)) and not force:
        raise ValueError(
            f"the absolute embedding still acts, at scale {scale:.3g}: train on, or pass force=True to lose it now"
        )
    model.pos_embed = model.absolute_fade = None
    return model


def _checked(model: nn.Module) -> ViT:
    if not isinstance(model, ViT):
        raise ValueError(f"{type(model).__name__} is no vitrel ViT: pass the model that relativize returned, unwrapped")
    return model


def _check_position(position: str, args: dict, zero_init: bool) -> None:
    tokens, _ = split_position(position)
    if tokens:
        raise ValueError(
            f"{tokens!r} adds to the tokens, relativize works in attention: name attention keys only (the model's own "
            "embedding stays with absolute='keep')"
        )
    if zero_init and "init_std" in args and any(_learns_rows(POSITIONS[key]) for key in position.split("+")):
        raise ValueError(f"init_std={args['init_std']} has no effect, learned rows start at 0; pass zero_init=False with it")


def _own_keys(model: Backbone) -> tuple[str, str]:
    """(keys that add to the tokens, key that rotates or "") of a model that can be relativized."""
    if not isinstance(model, ViT):
        raise ValueError(f"{type(model).__name__} attends in windows: its position is relative already")
    tokens, attention = split_position(model.current_arguments()["position"])
    keys = [key for key in attention.split("+") if key and key != "none"]
    if other := [key for key in keys if not POSITIONS[key].rotates]:
        raise ValueError(
            f"the model has {other[0]!r} in attention already: there is nothing to relativize; for another encoding build the "
            "model with it, e.g. position='absolute+table'"
        )
    if keys and model.shared_position is not None:
        raise ValueError("the blocks share one rotation: build the model without share_position")
    return tokens, keys[0] if keys else ""


def _options_of(keys: list[str], options: dict) -> dict:
    """Those of the model's options that the encodings which stay take."""
    taken = {name for key in keys for name in inspect.signature(POSITIONS[key]).parameters}
    common = {"resize", "logit_scale", "shift", "jitter", "rescale"} if keys else set()
    return {name: value for name, value in options.items() if name in taken | common}


def _encodings(encoding: PositionEncoding | None) -> dict[str, PositionEncoding]:
    """{key: encoding} of one encoding, which may be composed."""
    return {} if encoding is None else {key_of(part): part for part in parts_of(encoding)}


@torch.no_grad()
def _copy(model: ViT, result: ViT) -> None:
    """The weights of `model`, those of its encodings by their keys."""
    apart = (*model.position_parameters(), *result.position_parameters())
    state = {name: value for name, value in model.state_dict().items() if name not in apart}
    state.pop("absolute_fade.steps", None)
    missing, unexpected = result.load_state_dict(state, strict=False)
    assert not unexpected and {*missing} <= {*apart, "absolute_fade.steps"}, (missing, unexpected)
    pairs = [(model.pos_embed, result.pos_embed), *zip(
        [block.position for block in model.blocks], [block.position for block in result.blocks], strict=True
    )]  # fmt: skip
    for old, new in pairs:
        theirs, ours = _encodings(old), _encodings(new)
        for key in theirs.keys() & ours.keys():
            if key == "absolute":
                ours[key].pos_embed.copy_(theirs[key](ours[key].grid).tokens[None])  # resampled where the grid is another
            else:
                ours[key].load_state_dict(theirs[key].state_dict())


@torch.no_grad()
def _zero(result: ViT, added: list[str]) -> None:
    for block in result.blocks:
        for key, part in _encodings(block.position).items():
            if key in added and _learns_rows(type(part)):
                for parameter in part.parameters(recurse=False):
                    nn.init.zeros_(parameter)


def _learns_rows(encoding: type[PositionEncoding]) -> bool:
    return "init_std" in inspect.signature(encoding).parameters
