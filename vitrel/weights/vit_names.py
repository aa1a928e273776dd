"""Rename weights of plain ViTs to vitrel's names: ViT, DeiT, DeiT III, BEiT, EVA and EVA-02, RoPE-ViT (timm and naver), DINOv2,
DINOv3, and the image encoders of SAM and ViTDet, as timm or their authors save them; ViT, DeiT and DINOv2 of transformers.

Other differences: separate q, k and v, or biases of q and v alone; SwiGLU's two halves in one tensor; one table shared by all
blocks; learned frequencies of all blocks in one tensor; embeddings with rows for the class token, for all prefix tokens or for
none; the order of rotary pairs in memory.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from vitrel.position import PositionEncoding
from vitrel.weights.rotate import Rotation, unrotate_layout
from vitrel.weights.tensors import FileTensors

_DINOV3 = "DINOv3"
_EVA = dict(base=10000.0, reference=(16, 16))
_BUFFERS = r".*(relative_position_index|attn\.k_bias|(height|width)_lookup|rope(_embed)?\.(?!freqs$).*|freqs_t_[xy])"
_TRANSFORMERS = (  # names of modules, and of files, which the library renames as it saves
    (r"^(vit|deit|dinov2)\.(?=embeddings|encoder|layers|layernorm)", ""),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.distillation_token$", "dist_token"),
    (r"^embeddings\.(cls_token|mask_token)$", r"\1"),
    (r"^encoder\.layer\.(?=\d)", "blocks."),
    (r"^layers\.(?=\d+\.(attention|layernorm|mlp))", "blocks."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.attention\.(attention\.)?([qkv])(uery|ey|alue|_proj)\.", r".attn.\2_proj."),
    (r"\.attention\.(output\.dense|o_proj)\.", ".attn.proj."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"\.output\.dense\.", ".mlp.fc2."),
    (r"\.layer_scale([12])\.lambda1$", r".ls\1.gamma"),
    (r"^layernorm\.", "norm."),
    (r"^(cls_)?classifier\.", "head."),
    (r"^distillation_classifier\.", "head_dist."),
)
_NAMES = (
    *_TRANSFORMERS,
    (r"^((backbone\.)?net|image_encoder|visual\.trunk)\.", ""),
    (r"\.gamma_([12])$", r".ls\1.gamma"),
    (r"^(storage_tokens|register_tokens)$", "reg_token"),
    (r"\.attn\.([qv])_bias$", r".attn.\1_proj.bias"),
    (r"\.attn\.inner_attn_ln\.", ".attn.norm."),
    (r"\.mlp\.(w12|lin1)\.", ".mlp.fc1."),
    (r"\.mlp\.(w3|lin2)\.", ".mlp.fc2."),
    (r"\.mlp\.w1\.", ".mlp.fc1_g."),
    (r"\.mlp\.w2\.", ".mlp.fc1_x."),
    (r"\.mlp\.ffn_ln\.", ".mlp.norm."),
    (r"^(shared_rel_pos|rel_pos_bias)\.", "shared_position."),
    (r"\.attn\.rel_pos\.relative_position_bias_table$", ".attn.relative_position_bias_table"),
    (r"^neck\.(weight|bias)$", r"norm.\1"),  # timm's SAM without its convolutional neck
    (r"^head\.fc\.", "head."),
)


def read_vit(tensors: FileTensors, model: nn.Module, rotation: Rotation | None = None) -> None:
    """Rename and rearrange a file's tensors, in place, as vitrel's; `rename_positions` then renames those of encodings.

    Args:
        tensors: changed in place; the encodings that the layout of other code shows are added to tensors.implied.
        model: for which the tensors are.
        rotation: the rotary encoding of the file's model; None: inferred from the names.

    Raises:
        ValueError: the model has another rotation or lacks the file's prefix tokens.
    """
    own_names = tensors.has(r".*position\..*|pos_embed\.pos_embed")
    other_names = tensors.has(r".*(\.gamma_1|\.q_bias|\.[qkv]_proj\.weight|storage_tokens|image_encoder\..*)")
    storage, separate = tensors.has("storage_tokens"), tensors.has(r".*\.attn\.q_(proj\..*|bias)")
    rename_vit(tensors)
    _check_prefix_tokens(tensors, model)
    if rotation is None and (other_names or tensors.has(r"freqs|rope\.freqs")):
        rotation = _rotation(tensors, model, separate, storage)
    if rotation is not None:
        unrotate_layout(tensors, model, rotation)
        _check_eps(model, rotation)
        _split_freqs(tensors, model)
    if own_names:
        return
    for pattern, key in (
        ("pos_embed", "absolute"),
        (r".*relative_position_bias_table", "table"),
        (r".*rel_pos_h", "decomposed"),
    ):
        if tensors.has(pattern):
            tensors.implied.add(key)


def rename_vit(tensors: FileTensors) -> None:
    """Rename, join and split the tensors in place as far as that does not depend on a model, and remove buffers."""
    tensors.rename(*_NAMES)
    tensors.leave_out(_BUFFERS)
    _mask_key_bias(tensors)
    fuse_qkv(tensors)
    _split_swiglu(tensors)
    for match in tensors.find(r".*relative_position_bias_table"):
        if tensors[match[0]].dim() == 3:  # [H, 2h-1, 2w-1] in MaxViT
            tensors.change(match[0], tensors[match[0]].flatten(1).mT, "heads last")
    if "pos_embed" in tensors and tensors["pos_embed"].dim() == 4:  # SAM's keeps the grid
        tensors.change("pos_embed", tensors["pos_embed"].flatten(1, 2), "flattened")


def vit_arguments(tensors: FileTensors) -> dict[str, Any]:
    """Infer arguments of a ViT from a renamed tensors: patches, width, depth, tokens, classes, biases, norms, MLP width.

    Not inferred: position and its options, activation, eps, pooling, post-norm, windows. The number of heads is included only
    if there is a bias table. The image size is that of a square grid: by the embedding if its rows form a square, without an
    embedding by the bias table if its rows are those of a square; else it is absent.
    """
    patch, table = tensors["patch_embed.proj.weight"], next(tensors.find(r".*relative_position_bias_table"), None)
    width, heads, first = len(patch), None if table is None else tensors[table[0]].shape[1], "blocks.0"
    prefix = (
        int("cls_token" in tensors),
        int("dist_token" in tensors),
        tensors["reg_token"].shape[1] if "reg_token" in tensors else 0,
    )
    swiglu = f"{first}.mlp.fc1_g.weight" in tensors
    hidden = tensors[f"{first}.mlp.fc2.weight"].shape[1]
    arguments = dict(
        patch_size=tuple(patch.shape[2:]), in_chans=patch.shape[1], embed_dim=width,
        depth=1 + max(int(match[1]) for match in tensors.find(r"blocks\.(\d+)\.norm1\.weight")),
        class_token=bool(prefix[0]), dist_token=bool(prefix[1]), reg_tokens=prefix[2],
        num_classes=len(tensors["head.weight"]) if "head.weight" in tensors else 0,
        qkv_bias=f"{first}.attn.qkv.bias" in tensors, mlp_ratio=(hidden + 0.5) / width if hidden % width else hidden / width,
        pre_norm="norm_pre.weight" in tensors, final_norm="norm.weight" in tensors, fc_norm="fc_norm.weight" in tensors,
        patch_bias="patch_embed.proj.bias" in tensors,
    )  # fmt: skip
    options = {"init_values": "ls1.gamma", "mlp_norm": "mlp.norm.weight", "attn_norm": "attn.norm.weight",
               "qk_norm": "attn.q_norm.weight"}  # fmt: skip
    block_args = {name: 1e-5 if name == "init_values" else True for name, key in options.items() if f"{first}.{key}" in tensors}
    arguments["block_args"] = block_args | ({"mlp": "swiglu"} if swiglu else {})
    side = 0
    if "pos_embed" in tensors:
        rows = tensors["pos_embed"].shape[1]
        side = next((math.isqrt(n) for n in (rows - sum(prefix), rows, rows - 1) if math.isqrt(n) ** 2 == n), 0)
    elif table is not None:
        rows = len(tensors[table[0]])
        side = (1 + math.isqrt(rows)) // 2
        side = side if (2 * side - 1) ** 2 in (rows, rows - 3) else 0  # 3 of prefix tokens
    if side:
        arguments["img_size"] = (side * patch.shape[2], side * patch.shape[3])
    return arguments | ({"num_heads": heads} if heads else {})


def _check_prefix_tokens(tensors: FileTensors, model: nn.Module) -> None:
    """Raise ValueError if the file has a distillation token and the model none, or register tokens in another number.

    Registers are checked only if the file has an embedding, whose rows for them would be taken for those of patches.
    """
    if "dist_token" in tensors and model.dist_token is None:
        raise ValueError(
            "the weights are of a distilled DeiT, and the model has no distillation token: build it with dist_token=True"
        )
    count = tensors["reg_token"].shape[1] if "reg_token" in tensors else 0
    has = 0 if model.reg_token is None else model.reg_token.shape[1]
    if "pos_embed" in tensors and count not in (0, has):
        raise ValueError(f"the weights have {count} register tokens, the model has {has}: build it with reg_tokens={count}")


def _check_eps(model: nn.Module, rotation: Rotation) -> None:
    """Raise ValueError if DINOv3's weights are loaded into a model with another eps than theirs."""
    eps = model.blocks[0].norm1.eps
    if rotation.layout == _DINOV3 and eps != 1e-5:
        raise ValueError(
            f"the weights are of {_DINOV3}, whose norms have eps 1e-5, the model's have {eps:g}: build it with "
            "block_args=dict(norm_eps=1e-5)"
        )


def _rotation(tensors: FileTensors, model: nn.Module, separate: bool, storage: bool) -> Rotation | None:
    """Infer the file's rotary encoding from the layout, since fixed frequencies are not in a file; None if it has none.

    Where RoPE-ViT and DeiT III have the same names, it is RoPE-ViT if the model rotates.

    Args:
        tensors: of the file.
        model: for which the tensors are.
        separate: the file has separate q, k, v or biases of q and v.
        storage: its registers are named storage_tokens.
    """
    absolute, swiglu = "pos_embed" in tensors, tensors.has(r".*\.mlp\.fc1_g\.weight")
    registers, token = "reg_token" in tensors, "cls_token" in tensors
    if tensors.has(r"freqs|rope\.freqs"):
        return Rotation("RoPE-ViT (mixed)", "rope_mixed", {}, interleaved=True, x_first=False)  # the x and y order is in freqs
    if tensors.has(r".*relative_position_bias_table|.*rel_pos_h"):
        return None
    if swiglu and absolute and separate:
        return Rotation("EVA-02", "rope_axial", _EVA, interleaved=True, x_first=False)
    if not absolute and registers and (token or storage):
        return Rotation(_DINOV3, "rope_normalized", dict(base=100.0), interleaved=False, x_first=False)
    if not absolute and registers:
        return Rotation("timm's ViT with RoPE and registers", "rope_axial", _EVA, interleaved=True, x_first=False)
    # RoPE-ViT with an embedding has the names of DeiT III: the model decides.
    rotates = any(isinstance(part, PositionEncoding) and part.rotates for part in model.modules())
    if not absolute or (rotates and not separate):
        options = dict(base=100.0, reference=None)
        return Rotation("RoPE-ViT (axial)", "rope_axial", options, interleaved=True, x_first=True)
    return None


def _mask_key_bias(tensors: FileTensors) -> None:
    """Apply DINOv3's mask of the qkv bias, which is zero for the keys."""
    for match in tensors.find(r"(.*\.attn\.qkv\.)bias_mask"):
        name = f"{match[1]}bias"
        q, k, v = tensors[name].chunk(3)
        tensors.change(name, torch.cat((q, torch.zeros_like(k), v)), "bias of the keys masked")
        tensors.leave_out(match[0].replace(".", r"\."))


def fuse_qkv(tensors: FileTensors) -> None:
    """Join separate projections of q, k and v into one qkv, in place; zeros for the bias of k if only q and v have one.

    Raises:
        ValueError: another one is missing.
    """
    for kind in ("weight", "bias"):
        for match in tensors.find(rf"(.*\.attn\.)q_proj\.{kind}"):
            names = [f"{match[1]}{part}_proj.{kind}" for part in "qkv"]
            join: Callable[[list[Tensor]], Tensor]
            if kind == "bias" and names[1] not in tensors:
                join, rule = _without_key_bias, "bias of q, zeros for k, bias of v"
                names = [names[0], names[2]]
            else:
                join, rule = torch.cat, "q, k and v joined"
            if missing := [name for name in names if name not in tensors]:
                raise ValueError(f"the file has {match[0]}, but no {missing[0]}: it is incomplete or has an unknown layout")
            tensors.fuse(names, f"{match[1]}qkv.{kind}", join, rule)


def _without_key_bias(parts: list[Tensor]) -> Tensor:
    q, v = parts
    return torch.cat((q, torch.zeros_like(q), v))


def _split_swiglu(tensors: FileTensors) -> None:
    """Split a SwiGLU's packed first layer into gate and value."""
    for match in tensors.find(r"(.*\.mlp\.)fc1\.(weight|bias)"):
        packed, out = tensors[match[0]], f"{match[1]}fc2.weight"
        if out in tensors and packed.shape[0] == 2 * tensors[out].shape[1]:
            gate, value = packed.chunk(2)
            names = (f"{match[1]}fc1_g.{match[2]}", f"{match[1]}fc1_x.{match[2]}")
            tensors.spread(match[0], dict(zip(names, (gate, value), strict=True)), "SwiGLU's halves separated")


def _split_freqs(tensors: FileTensors, model: nn.Module) -> None:
    """Split frequencies [2, depth, H, D/2] (timm) or [2, depth, H*D/2] (naver), x first, to [2, H, D/2] per block, y first."""
    heads = model.blocks[0].attn.num_heads
    shape = (heads, model.embed_dim // heads // 2)
    for name in ("rope.freqs", "freqs"):
        if name in tensors:
            freqs = tensors[name]
            if tuple(freqs.shape[2:]) not in (shape, (math.prod(shape),)):
                raise ValueError(
                    f"{name} is {tuple(freqs.shape)}, not [2, depth, heads, pairs] with the last two perhaps joined; the "
                    f"model has {shape[0]} heads of {shape[1]} pairs: build it with the file's embed_dim and num_heads"
                )
            per_block = freqs.flatten(2).unflatten(2, shape).flip(0).unbind(1)
            values = {f"blocks.{i}.attn.freqs": block for i, block in enumerate(per_block)}
            tensors.spread(name, values, "one tensor per block, rows before columns")
