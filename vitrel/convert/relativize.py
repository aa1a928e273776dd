"""relativize: give a timm ViT, DeiT or EVA (or a vitrel ViT) an encoding of its own in attention, and keep everything else.

The model stays the same object, with its parameters, their names and the rest of timm's interface; every h x w works.
"""

import inspect
import warnings
from typing import Any

from timm.layers import Attention, AttentionRope, Format
from timm.models.deit import VisionTransformerDistilled
from timm.models.eva import Eva, EvaAttention
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from vitrel.convert.derived import GridRecord, RelativeBlock, RelativeForward, RelativeTrunk, derive
from vitrel.convert.fade import Fade
from vitrel.grid import Grid
from vitrel.models.vit import ViT
from vitrel.position import POSITIONS, PositionEncoding, create_position, split_position
from vitrel.position.terms import check_choice

_TRUNKS = (VisionTransformer, VisionTransformerDistilled, Eva)
_ATTENTIONS = (Attention, EvaAttention, AttentionRope)
_OWN_BIAS = ("relative_position_bias_table", "rel_pos", "shared_rel_pos", "rel_pos_h", "attention_biases")


def relativize(
    model: nn.Module,
    position: str = "table",
    position_args: dict | None = None,
    *,
    absolute: str = "keep",
    fade_steps: int | None = None,
    rope: str = "keep",
    grid: tuple[int, int] | None = None,
    zero_init: bool = True,
) -> nn.Module:
    """Put a fresh encoding `position` into every block of `model`, in place, and return it, able to run at any h x w.

    model: timm's VisionTransformer, VisionTransformerDistilled or Eva (EVA-02, rope-vit, DINOv3), or a vitrel ViT without
    position in attention. Its encodings are at `blocks[i].attn.position` (vitrel: `blocks[i].position`).
    position: a key of POSITIONS that acts in attention, or several joined by '+'; position_args: their options.
    grid: (h, w) in patches that learned encodings count as trained on; that of the model's own image size unless given.
    zero_init: learned rows (of encodings with the option `init_std`) start at 0, so that the logits do not change, and only
    learn; DeBERTa still scales content by 3**-0.5, and other encodings act from the start.
    absolute: "keep" the embedding (timm interpolates it), "drop" it, or "fade" it out over the first `fade_steps` training
    steps (vitrel.convert.fade). rope: "keep" or "drop" the model's own; a `position` that rotates replaces it in any case.
    Image sides that patches do not divide are padded right and below, as by timm's dynamic_img_pad.
    Raises ValueError, before anything has changed, for what it cannot do.
    """
    args = dict(position_args or {})
    for name, value, known in (("absolute", absolute, ("keep", "drop", "fade")), ("rope", rope, ("keep", "drop"))):
        check_choice("relativize", name, value, known)
    _check_position(position, args, zero_init)
    _check_model(model)
    if absolute == "fade" and model.pos_embed is None:
        raise ValueError("absolute='fade' needs an absolute embedding, and the model has none; use absolute='keep'")
    if absolute != "fade" and fade_steps is not None:
        raise ValueError(f"fade_steps={fade_steps!r} needs absolute='fade', not {absolute!r}")
    fade = Fade(fade_steps, model.blocks[0].attn.proj.weight.device) if absolute == "fade" else None
    trained = Grid(*_trained_grid(model, grid), model.num_prefix_tokens)
    grids = [getattr(block, "window", None) or trained for block in model.blocks]  # SAM's windows, in a vitrel ViT
    encodings = [_encoding(block.attn, position, g, args, zero_init) for block, g in zip(model.blocks, grids, strict=True)]
    if isinstance(model, ViT):
        for block, encoding in zip(model.blocks, encodings, strict=True):
            block.position = encoding
    else:
        replaced = rope == "drop" or any(POSITIONS[key].rotates for key in position.split("+"))
        _convert(model, encodings, replaced)
    _set_absolute(model, absolute, fade)
    return model


def _convert(model: Any, encodings: list[PositionEncoding], drop_rope: bool) -> None:
    embed, record = model.patch_embed, GridRecord()
    embed.strict_img_size, embed.flatten, embed.output_fmt, embed.dynamic_img_pad = False, False, Format.NHWC, True
    model.dynamic_img_size = True
    model._traits = dict(getattr(model, "_traits", {}), fixed_input_size=False)  # what timm's tools ask about the input
    if getattr(model, "rope", None) is not None:
        if drop_rope:
            model.rope, model.rope_mixed = None, False
        elif getattr(model.rope, "_use_cached_embed", False):  # else it would give its cache at every grid
            model.rope._use_cached_embed, model.rope.feat_shape, model.rope.pos_embed = False, None, None
    model.__class__, model.grid_record, model.absolute_fade = derive(RelativeTrunk, type(model)), record, None
    for block, encoding in zip(model.blocks, encodings, strict=True):
        block.grad_checkpointing = model.grad_checkpointing
        block.__class__ = derive(RelativeBlock, type(block))
        block.attn.__class__ = derive(RelativeForward, type(block.attn))
        block.attn.position, block.attn.grid_record = encoding, record
    model.grad_checkpointing = False


def _set_absolute(model: Any, absolute: str, fade: Fade | None) -> None:
    model.absolute_fade = fade
    if absolute == "drop":
        model.pos_embed = None
    elif fade is not None:
        fade.train(model.training)
        if isinstance(model, ViT):
            model.pos_embed.register_forward_hook(fade.fade_terms)


def _encoding(attn: nn.Module, position: str, grid: Grid, args: dict, zero_init: bool) -> PositionEncoding:
    weight = attn.proj.weight
    encoding = create_position(position, grid, *_heads(attn), device=weight.device, dtype=weight.dtype, **args)
    for part in encoding.modules() if zero_init else ():
        if isinstance(part, PositionEncoding) and _learns_rows(type(part)):
            for parameter in part.parameters(recurse=False):
                nn.init.zeros_(parameter)
    return encoding.train(attn.training)


def _learns_rows(encoding: type[PositionEncoding]) -> bool:
    return "init_std" in inspect.signature(encoding).parameters


def _heads(attn: Any) -> tuple[int, int]:
    width = attn.qkv.out_features // 3 if attn.qkv is not None else attn.q_proj.out_features
    return attn.num_heads, width // attn.num_heads


def _trained_grid(model: nn.Module, grid: tuple[int, int] | None) -> tuple[int, int]:
    if grid is not None:
        if len(grid) != 2 or min(grid) < 1:
            raise ValueError(f"grid {grid} must be (h, w) in patches, both at least 1")
        return grid
    embed = model.patch_embed
    if embed.img_size is None:
        raise ValueError("the model names no image size: pass grid=(h, w) in patches, which the encodings count as trained on")
    full = tuple(-(-n // p) for n, p in zip(embed.img_size, embed.feat_ratio(as_scalar=False), strict=True))
    if full != tuple(embed.grid_size) and not embed.dynamic_img_pad:
        warnings.warn(
            f"images of {embed.img_size} pixels are not whole patches: they were cropped to {embed.grid_size} patches and are "
            f"now padded to {full}: the logits change; resize images to whole patches to avoid it",
            stacklevel=3,
        )
    return full


def _check_position(position: str, args: dict, zero_init: bool) -> None:
    tokens, _ = split_position(position)
    if tokens:
        raise ValueError(
            f"{tokens!r} adds to the tokens, relativize works in attention: name attention keys only (the model's own "
            "embedding stays with absolute='keep')"
        )
    if zero_init and "init_std" in args and any(_learns_rows(POSITIONS[key]) for key in position.split("+")):
        raise ValueError(f"init_std={args['init_std']} has no effect, learned rows start at 0; pass zero_init=False with it")


def _check_model(model: nn.Module) -> None:
    name = type(model).__name__
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"relativize takes a model object, not {name}; build it first, e.g. timm.create_model('deit_small_...')"
        )
    if isinstance(model, RelativeTrunk):
        raise ValueError(
            f"{name} is relativized already: build the model anew and name all encodings at once, position='a+b', with "
            "position_args"
        )
    if isinstance(model, ViT):
        shared = model.shared_position is not None
        if shared or any(not isinstance(block.position, POSITIONS["none"]) for block in model.blocks):
            raise ValueError(
                "this vitrel ViT has position in attention already: build it with the position wanted, e.g. "
                "position='absolute+table'"
            )
        return
    if getattr(model, "window_size", None) or any(hasattr(m, "shift_size") for m in model.modules()):
        raise ValueError(f"{name} is already windowed: its position is relative; timm's Swin weights load into vitrel_swin_*")
    if bias := next((n for m in model.modules() for n in _OWN_BIAS if hasattr(m, n)), ""):
        raise ValueError(f"{name} already has a relative bias of its own ({bias}): there is nothing to relativize")
    if not isinstance(model, VisionTransformer | Eva):
        raise ValueError(
            f"relativize takes timm's VisionTransformer, VisionTransformerDistilled and Eva and vitrel's ViT, not {name}: "
            "load the weights into one of them, and unwrap a model that is compiled, parallel or a feature extractor"
        )
    if type(model)._pos_embed not in [trunk._pos_embed for trunk in _TRUNKS]:
        raise ValueError(f"{name} has a _pos_embed of its own, which relativize would replace: use the class it derives from")
    if getattr(model.patch_drop, "prob", 0):
        raise ValueError(
            f"{name} drops patches (patch_drop_rate={model.patch_drop.prob}), and what is left is no grid; build it with "
            "patch_drop_rate=0"
        )
    if missing := [n for n in ("strict_img_size", "flatten", "output_fmt", "grid_size") if not hasattr(model.patch_embed, n)]:
        embed = type(model.patch_embed).__name__
        raise ValueError(f"patch_embed is a {embed} without {missing[0]}: use timm's PatchEmbed, which can give [B, h, w, C]")
    for block in model.blocks:
        _check_block(block)


def _check_block(block: nn.Module) -> None:
    name = type(block).__name__
    if not hasattr(block, "attn"):
        raise ValueError(f"{name} has no attention of its own (`attn`), as parallel blocks: use a model with sequential blocks")
    kind = type(block.attn)
    if kind.forward not in [known.forward for known in _ATTENTIONS]:
        raise ValueError(
            f"{kind.__name__} computes attention in a way of its own, which relativize would replace; it takes timm's "
            f"{', '.join(known.__name__ for known in _ATTENTIONS)} only, so build the model with one of them"
        )
    if getattr(block.attn, "num_kv_groups", 1) > 1:
        raise ValueError(
            f"grouped-query attention ({block.attn.num_heads} heads share {block.attn.num_kv_heads} of keys and values) is not "
            "supported; build the model with num_kv_heads=None"
        )
