"""Recognition of timm models: the vitrel architecture, its constructor arguments and the weights for its loader.

Everything is read from the module itself, so changed options, another head or another image size are recognized. A model
without a counterpart in vitrel raises a ValueError that names the part that differs.
"""

import copy
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from timm import layers
from timm.layers import AttentionPoolLatent, Mlp, RelPosMlp, RotaryEmbeddingDinoV3, RotaryEmbeddingMixed, SwiGLU
from timm.models import beit, deit, eva, swin_transformer, swin_transformer_v2, vision_transformer
from timm.models import vision_transformer_relpos as relpos
from timm.models import vision_transformer_sam as sam
from torch import Tensor, nn

from vitrel.models.backbone import Backbone
from vitrel.models.config import Config, preparation_of
from vitrel.models.create import Uninitialized
from vitrel.weights.names import Rotation
from vitrel.weights.plan import apply_plan, fitted

_VITS = (
    vision_transformer.VisionTransformer, deit.VisionTransformerDistilled, eva.Eva, beit.Beit, relpos.VisionTransformerRelPos,
    sam.VisionTransformerSAM,
)  # fmt: skip
_SWINS = (swin_transformer.SwinTransformer, swin_transformer_v2.SwinTransformerV2)
_KNOWN = (
    "timm's VisionTransformer (ViT, DeiT, CLIP, SigLIP, DINOv2), Eva (EVA-02, DINOv3, RoPE-ViT), Beit, relpos ViT, SAM and Swin"
)
_POST_NORM = (vision_transformer.ResPostBlock, eva.EvaBlockPostNorm, relpos.ResPostRelPosBlock)
_ACTIVATIONS = {"GELU": "gelu", "GELUTanh": "gelu_tanh", "QuickGELU": "quick_gelu"}
_PARTS = (  # all modules that such models may consist of, beside norms, containers and those of _VITS or _SWINS
    nn.Conv2d, nn.Linear, nn.Dropout, nn.Identity, nn.Softmax, nn.Flatten, nn.GELU, nn.SiLU, layers.DropPath,
    layers.PatchDropout, layers.PatchEmbed, layers.GELU, layers.GELUTanh, layers.QuickGELU, layers.GluMlp,
    layers.ClassifierHead, layers.SelectAdaptivePool2d, Mlp, SwiGLU,
)  # fmt: skip
_VIT_PARTS = (
    vision_transformer.Block, eva.EvaBlock, beit.Block, relpos.RelPosBlock, sam.Block, *_POST_NORM,
    vision_transformer.Attention, eva.EvaAttention, eva.AttentionRope, beit.Attention, relpos.RelPosAttention, sam.Attention,
    vision_transformer.LayerScale, relpos.LayerScale, sam.LayerScale, beit.RelativePositionBias, layers.RelPosBias, RelPosMlp,
    layers.RotaryEmbeddingCat, RotaryEmbeddingMixed, RotaryEmbeddingDinoV3, AttentionPoolLatent,
)  # fmt: skip
_SWIN_PARTS = (
    swin_transformer.SwinTransformerStage, swin_transformer.SwinTransformerBlock, swin_transformer.WindowAttention,
    swin_transformer.PatchMerging, swin_transformer_v2.SwinTransformerV2Stage, swin_transformer_v2.SwinTransformerV2Block,
    swin_transformer_v2.WindowAttention, swin_transformer_v2.PatchMerging,
)  # fmt: skip
_INSIDE = re.compile(r"(rel_pos|cpb_mlp|global_pool)\.")  # in names of parts of these parts


class Recognized(NamedTuple):
    """The result of `recognize`: the vitrel architecture and constructor arguments that equal a timm model, and its weights.

    The weights have timm's names and layout; `rotation` is the order of their rotary channels.
    """

    architecture: str  # "vitrel_vit" or "vitrel_swin"
    arguments: dict[str, Any]  # of the trunk's constructor
    state: dict[str, Tensor]  # its weights, under timm's names
    rotation: Rotation  # layout of its rotary channels


def recognize(model: nn.Module) -> Recognized:
    """Return the vitrel architecture and arguments that equal a timm model, and its weights, still in timm's names and layout.

    Raises:
        ValueError: vitrel has no such model; the message gives the reason.
    """
    if isinstance(model, _SWINS):
        return _swin(model)
    if not isinstance(model, _VITS) or (type(model).forward_features not in [known.forward_features for known in _VITS]):
        raise refusal(model, f"it is none of {_KNOWN} (pass the model itself if this one wraps it)")
    return _vit(model)


def as_vitrel(model: nn.Module) -> Backbone:
    """Return a timm model converted to a new vitrel model, in its dtype, device and training mode; a vitrel model as it is.

    Raises:
        ValueError: the model has no counterpart, for a reason in the message, or keeps timm's trunk in `from_timm`.
        TypeError: it is no module, but for example a name.
    """
    if isinstance(model, Backbone):
        return model
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"expected a timm or vitrel model, not {type(model).__name__}: build it first, or pass a name to from_timm"
        )
    recognized = recognize(model)
    weight: Any = model.patch_embed.proj.weight
    preparation = preparation_of(getattr(model, "pretrained_cfg", None) or {})
    preparation["input_size"] = (recognized.arguments["in_chans"], *recognized.arguments["img_size"])
    config = Config(recognized.architecture, recognized.arguments, recognized.arguments["img_size"], preparation)
    with Uninitialized():
        converted = config.build(weight.device, weight.dtype)
    try:
        apply_plan(converted, fitted(converted, recognized.state, {}, recognized.rotation))
    except (RuntimeError, ValueError) as error:  # a part was replaced, or is quantized
        raise refusal(model, f"its weights are not those of {type(model).__name__}: {error}") from error
    return converted.train(model.training)


def refusal(model: nn.Module, reason: str) -> ValueError:
    """Return the ValueError for a timm model that has no counterpart in vitrel."""
    cfg = getattr(model, "pretrained_cfg", None) or {}
    name = cfg.get("architecture") or ""
    return ValueError(f"{f'{name} ({type(model).__name__})' if name else type(model).__name__} has no vitrel model: {reason}")


# ------------------------------------------------------------------------------------------------------------ plain ViTs


def _vit(model: Any) -> Recognized:
    for reason in _unlike(model):
        raise refusal(model, reason)
    blocks = [*model.blocks]
    position, options, rotation, state = _position(model)
    mlp, attn, width = blocks[0].mlp, blocks[0].attn, model.embed_dim
    distilled, windows = isinstance(model, deit.VisionTransformerDistilled), [getattr(b, "window_size", 0) for b in blocks]
    block_args: dict[str, Any] = dict(norm_eps=blocks[0].norm1.eps, **_mlp_kind(mlp))
    if _present(blocks[0], "ls1", "gamma_1"):
        block_args["init_values"] = 1e-5
    block_args |= {name: True for name, present in (
        ("mlp_norm", _is_norm(getattr(mlp, "norm", None))),
        ("post_norm", isinstance(blocks[0], _POST_NORM)),
        ("qk_norm", _is_norm(getattr(attn, "q_norm", None))),
        ("attn_norm", _is_norm(getattr(attn, "norm", None))),
    ) if present}  # fmt: skip
    if isinstance(model, sam.VisionTransformerSAM) and any(windows):
        block_args |= dict(window=max(windows), global_blocks=tuple(i for i, window in enumerate(windows) if not window))
    final = _final_norm(model)
    arguments = dict(
        # the largest multiple of the patch size: the grid of its embedding and tables
        img_size=tuple(n * p for n, p in zip(model.patch_embed.grid_size, model.patch_embed.patch_size, strict=True)),
        patch_size=tuple(model.patch_embed.patch_size),
        in_chans=model.patch_embed.proj.in_channels,
        num_classes=model.num_classes,
        global_pool=model.global_pool,
        embed_dim=width,
        depth=len(blocks),
        num_heads=attn.num_heads,
        mlp_ratio=_ratio(mlp.fc2.in_features, width),
        qkv_bias=_has_qkv_bias(attn),
        class_token=getattr(model, "cls_token", None) is not None,
        dist_token=distilled,
        reg_tokens=0 if getattr(model, "reg_token", None) is None else model.reg_token.shape[1],
        position=position,
        position_args=options or None,
        share_position=_shared(model) is not None,
        pre_norm=_is_norm(getattr(model, "norm_pre", None)),
        final_norm=final is not None,
        fc_norm=_is_norm(getattr(model, "fc_norm", None)),
        final_norm_eps=None if final is None or final.eps == blocks[0].norm1.eps else final.eps,
        patch_bias=model.patch_embed.proj.bias is not None,
        pool_args=_pool_args(model),
        block_args=block_args,
        **_drop_rates(model),
    )
    return Recognized("vitrel_vit", arguments, state, rotation)


def _unlike(model: Any) -> Iterator[str]:
    """Yield the reasons why a ViT of timm has no counterpart in vitrel; none if it has.

    Attention pooling is checked by `_pool_args`, and tensors by their names and shapes when they are loaded.
    """
    yield from _strange(model, _VIT_PARTS)
    blocks = [*model.blocks]
    if not blocks:
        yield "it has no blocks"
    if not isinstance(model.patch_embed.norm, nn.Identity):
        yield "it normalizes its patch embeddings"
    if getattr(getattr(model, "patch_drop", None), "prob", 0):
        yield "it drops patches in training, which leaves no complete grid: build it with patch_drop_rate=0"
    if model.global_pool not in ("token", "avg", "max", "avgmax", "map", "") or (
        getattr(model, "pool_include_prefix", False) and model.global_pool != "map"
    ):
        yield f"it pools by {model.global_pool!r} over class and register tokens too"
    if isinstance(model, deit.VisionTransformerDistilled) and model.no_embed_class:
        yield "its distillation token has no embedding"
    if any(not _mlp_kind(block.mlp) for block in blocks):
        yield f"its MLP is {type(blocks[0].mlp).__name__} with {type(getattr(blocks[0].mlp, 'act', None)).__name__}"
    yield from _unlike_the_first(blocks)
    attn = blocks[0].attn
    if getattr(attn, "gate", None) is not None:
        yield "its attention is gated"
    if getattr(attn, "num_kv_groups", 1) > 1:
        yield "its heads share keys and values (grouped-query attention)"
    if attn.proj.bias is None or getattr(blocks[0].mlp.fc2, "bias", None) is None:
        yield "its linear layers have no bias"
    if attn.proj.in_features != model.embed_dim:
        yield "its attention has another width than its tokens"
    if _present(blocks[0], "ls1", "gamma_1") != _present(blocks[0], "ls2", "gamma_2"):
        yield "only one of its residual branches has a layer scale"
    rope = getattr(model, "rope", None)
    if getattr(rope, "grid_offset", 0):
        yield f"its rotary encoding counts positions from {rope.grid_offset:g}, vitrel from 0: class tokens have other logits"
    if getattr(model, "rope_global", None) is not None or getattr(rope, "in_pixels", False):
        yield "its rotary encoding is for windows, or counts in pixels"
    if isinstance(rope, RotaryEmbeddingDinoV3) and (rope.min_period is not None or rope.normalize_coords != "separate"):
        yield f"its rotary encoding normalizes coordinates by {rope.normalize_coords!r}"
    norms = [part.eps for name, part in model.named_modules() if _is_norm(part) and name not in ("norm", "neck")]
    if len({*norms}) > 1:
        yield f"its norms have several eps ({', '.join(f'{eps:g}' for eps in sorted({*norms}))})"


def _position(model: Any) -> tuple[str, dict[str, Any], Rotation, dict[str, Tensor]]:
    """Return what a plain ViT has of position: (keys of encodings joined by '+', or "none"; their options; Rotation; weights).

    The weights are its state dict under timm's names. In place of every bias MLP they have the table that it computes, and
    mixed frequencies are in the order columns, rows.
    """
    keys: list[str] = []
    options: dict[str, Any] = {}
    rotation, state = Rotation(False, False), dict(model.state_dict())
    if getattr(model, "pos_embed", None) is not None:
        keys.append("absolute")
    rope = getattr(model, "rope", None)
    if rope is not None:
        x_first = rope.grid_indexing == "xy"
        if isinstance(rope, RotaryEmbeddingMixed):
            keys.append("rope_mixed")
            if not x_first:  # `to_vitrel` expects frequencies of columns before those of rows
                state["rope.freqs"] = state["rope.freqs"].flip(0)
            x_first = False  # the order is in the frequencies
        elif isinstance(rope, RotaryEmbeddingDinoV3):
            keys.append("rope_normalized")
            options["base"] = rope.temperature
        else:
            keys.append("rope_axial")
            options |= dict(base=rope.temperature, reference=rope.ref_feat_shape and tuple(rope.ref_feat_shape))
        rotation = Rotation(not getattr(model.blocks[0].attn, "rotate_half", False), x_first)
    biases = [("shared_rel_pos", _shared(model))] if _shared(model) is not None else [
        (f"blocks.{i}.attn.rel_pos", getattr(block.attn, "rel_pos", None)) for i, block in enumerate(model.blocks)
    ]  # fmt: skip
    for name, bias in biases:
        if isinstance(bias, RelPosMlp):
            state = {key: value for key, value in state.items() if not key.startswith(f"{name}.")}
            state[f"{name}.relative_position_bias_table"] = _table_of_mlp(bias)
    if any(name.endswith("relative_position_bias_table") for name in state):
        keys.append("table")
    if any(name.endswith("rel_pos_h") for name in state):
        keys.append("decomposed")
    return "+".join(keys) or "none", options, rotation, state


@torch.no_grad()
def _table_of_mlp(bias: RelPosMlp) -> Tensor:
    """Return the table [R, H] that timm's MLP over log offsets computes on its own grid, R = (2h-1)(2w-1).

    If the bias is for prefix tokens too, 3 rows of zeros follow: timm adds no bias to these pairs.
    """
    mlp = copy.deepcopy(bias.mlp).eval()  # it has dropout
    rows = bias.bias_act(mlp(bias.rel_coords_log)).flatten(0, 1) * (bias.bias_gain or 1.0)
    return torch.cat((rows, rows.new_zeros(3, rows.shape[1]))) if bias.prefix_tokens else rows


def _shared(model: Any) -> nn.Module | None:
    """Return the bias module that all blocks share, None if there is none."""
    biases = [getattr(model, name, None) for name in ("shared_rel_pos", "rel_pos_bias")]
    return next((bias for bias in biases if bias is not None), None)


def _mlp_kind(mlp: nn.Module) -> dict[str, Any]:
    """Return {"mlp": kind}, such as "gelu" or "swiglu", for a ViT's `block_args`; {} if vitrel lacks the activation or gate."""
    act = type(getattr(mlp, "act", None)).__name__
    if isinstance(mlp, Mlp):
        tanh = getattr(mlp.act, "approximate", "none") == "tanh"
        return {} if act not in _ACTIVATIONS else dict(mlp="gelu_tanh" if tanh else _ACTIVATIONS[act])
    gated = isinstance(mlp, SwiGLU) or not getattr(mlp, "gate_last", True)
    return dict(mlp="swiglu") if gated and act == "SiLU" else {}


def _pool_args(model: Any) -> dict[str, Any] | None:
    """Return the argument `pool_args` of a ViT for attention pooling as in SigLIP, None for other pooling.

    Raises:
        ValueError: it is attention pooling that differs from SigLIP's.
    """
    pool = getattr(model, "attn_pool", None)
    if pool is None:
        return None
    if not isinstance(pool, AttentionPoolLatent) or pool.latent_len != 1 or pool.pos_embed is not None or pool.mlp is None:
        raise refusal(model, f"its pooling is a {type(pool).__name__} that differs from SigLIP's")
    included = getattr(model, "pool_include_prefix", isinstance(model, eva.Eva))
    ratio = _ratio(pool.mlp.fc1.out_features, model.embed_dim)
    return dict(num_heads=pool.num_heads, mlp_ratio=ratio, include_prefix=included)


def _drop_rates(model: Any) -> dict[str, float]:
    last, first = model.blocks[-1], model.blocks[0]
    drop_path = getattr(last.drop_path1, "drop_prob", 0.0) or 0.0
    return dict(
        drop_rate=_p(getattr(model, "head_drop", None) or getattr(model.head, "drop", None)),
        pos_drop_rate=_p(getattr(model, "pos_drop", None)),
        proj_drop_rate=_p(first.attn.proj_drop),
        attn_drop_rate=_p(first.attn.attn_drop),
        drop_path_rate=drop_path,
    )


def _final_norm(model: Any) -> nn.LayerNorm | None:
    norms = [getattr(model, name, None) for name in ("norm", "neck")]
    return next((norm for norm in norms if _is_norm(norm)), None)


# ------------------------------------------------------------------------------------------------------------------- Swin


def _swin(model: Any) -> Recognized:
    v2, stages = isinstance(model, swin_transformer_v2.SwinTransformerV2), [*model.layers]
    blocks = [[*stage.blocks] for stage in stages]
    flat = [block for stage in blocks for block in stage]
    for reason in _unlike_swin(model, flat):
        raise refusal(model, reason)
    windows = [tuple(stage[0].attn.window_size) for stage in blocks]
    window = windows[0]
    options: dict[str, Any] = {}
    if v2:
        trained = [tuple(stage[0].attn.pretrained_window_size) for stage in blocks]
        trained = [pretrained if all(pretrained) else own for pretrained, own in zip(trained, windows, strict=True)]
        if len(trained) == 2 and trained[0] != trained[1]:
            raise refusal(model, f"its two stages were pretrained in windows of {trained[0]} and {trained[1]}")
        options["pretrained_window"] = tuple(trained) if len(trained) != 2 else trained[0]
    mlp = flat[0].mlp
    arguments = dict(
        img_size=tuple(model.patch_embed.img_size),
        patch_size=tuple(model.patch_embed.patch_size),
        in_chans=model.patch_embed.proj.in_channels,
        num_classes=model.num_classes,
        global_pool=model.head.global_pool.pool_type,
        embed_dim=model.embed_dim if isinstance(model.embed_dim, int) else model.embed_dim[0],
        depths=tuple(map(len, blocks)),
        num_heads=tuple(stage[0].attn.num_heads for stage in blocks),
        window_size=window,
        mlp_ratio=_ratio(mlp.fc2.in_features, mlp.fc2.out_features),
        qkv_bias=flat[0].attn.qkv.bias is not None or getattr(flat[0].attn, "q_bias", None) is not None,
        position="cpb" if v2 else "table",
        position_args=options or None,
        version=2 if v2 else 1,
        norm_eps=flat[0].norm1.eps,
        final_norm=_is_norm(model.norm),
        drop_rate=_p(model.head.drop),
        proj_drop_rate=_p(flat[0].attn.proj_drop),
        attn_drop_rate=_p(flat[0].attn.attn_drop),
        drop_path_rate=getattr(flat[-1].drop_path1, "drop_prob", 0.0) or 0.0,
    )
    return Recognized("vitrel_swin", arguments, dict(model.state_dict()), Rotation(False, False))


def _unlike_swin(model: Any, blocks: list[Any]) -> Iterator[str]:
    """Yield the reasons why a Swin of timm has no counterpart in vitrel; none if it has."""
    yield from _strange(model, _SWIN_PARTS)
    if not _is_norm(model.patch_embed.norm):
        yield "its patches are not normalized"
    if _mlp_kind(blocks[0].mlp).get("mlp") != "gelu":
        yield f"it has {type(blocks[0].mlp.act).__name__}, vitrel GELU"
    yield from _unlike_the_first(blocks)
    if any(block.attn.proj.in_features != block.attn.proj.out_features for block in blocks):
        yield "its attention has another width than its tokens"
    windows = [tuple(block.attn.window_size) for block in blocks]
    grids = [tuple(block.input_resolution) for block in blocks]
    same = [windows[0] == window or (isinstance(model, swin_transformer_v2.SwinTransformerV2) and window == grid)
             for window, grid in zip(windows, grids, strict=True)]  # fmt: skip
    if not all(same):
        other = windows[same.index(False)]
        yield f"its windows are {windows[0]} in one stage and {other} in another; in vitrel all stages have the same"


# ------------------------------------------------------------------------------------------------------------------- parts


def _strange(model: nn.Module, kinds: tuple[type, ...]) -> Iterator[str]:
    """Yield as texts what vitrel does not have: modules of unknown classes (`kinds` are known), hooks, overlapping patches."""
    for name, part in model.named_modules():
        if part._forward_hooks or part._forward_pre_hooks or "forward" in vars(part):
            yield f"{name or 'it'} has a hook, or a forward that is not its class's"
        container = isinstance(part, nn.Sequential | nn.ModuleList) and name.endswith(("blocks", "layers", "cpb_mlp"))
        known = type(part) in (*_PARTS, *kinds) or _is_norm(part) or container or _INSIDE.search(name)
        if name and not known:
            yield f"its {name} is {type(part).__name__}"
    projection: Any = model.patch_embed.proj
    if projection.stride != projection.kernel_size or any(projection.padding):
        yield "its patches overlap"


def _unlike_the_first(blocks: list[Any]) -> Iterator[str]:
    """Yield how blocks differ from block 0, whose arguments are taken for all: in parts, their classes, eps or kind of GELU.

    Shapes, and the rates of dropout and DropPath, are not compared.
    """

    def parts(block: nn.Module) -> dict[str, tuple]:
        return {
            name: (type(part), getattr(part, "eps", 0), getattr(part, "approximate", ""))
            for name, part in block.named_modules()
            if not isinstance(part, nn.Identity | nn.Dropout | layers.DropPath)
        }

    first = parts(blocks[0])
    for i, other in enumerate(map(parts, blocks)):
        for name in dict.fromkeys((*first, *other)):
            if first.get(name) != other.get(name):
                yield f"block {i} differs from block 0 in its {name or 'kind'}"


def _is_norm(module: nn.Module | None) -> bool:
    return isinstance(module, nn.LayerNorm)


def _present(block: nn.Module, *names: str) -> bool:
    """Return whether a block has a part of one of these names that is not an identity."""
    parts = (getattr(block, name, None) for name in names)
    return any(part is not None and not isinstance(part, nn.Identity) for part in parts)


def _has_qkv_bias(attn: Any) -> bool:
    if getattr(attn, "q_bias", None) is not None:
        return True
    return (attn.q_proj if attn.qkv is None else attn.qkv).bias is not None


def _ratio(hidden: int, width: int) -> float:
    """Return an MLP ratio r for which int(width * r) == hidden."""
    return hidden / width if int(width * (hidden / width)) == hidden else (hidden + 0.5) / width


def _p(module: nn.Module | None) -> float:
    """Return the rate of a dropout layer, 0 without one."""
    return float(getattr(module, "p", 0.0))
