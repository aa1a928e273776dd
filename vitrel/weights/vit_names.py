"""Rename weights of timm's plain ViTs to vitrel's names: ViT, DeiT, DeiT III, BEiT, EVA, EVA-02, RoPE-ViT, DINOv2, DINOv3, SAM.

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

_EVA = dict(base=10000.0, reference=(16, 16))
_BUFFERS = r".*(relative_position_index|attn\.k_bias|rope\.(?!freqs$).*)"
_NAMES = (
    (r"\.gamma_([12])$", r".ls\1.gamma"),
    (r"\.attn\.([qv])_bias$", r".attn.\1_proj.bias"),
    (r"^(shared_rel_pos|rel_pos_bias)\.", "shared_position."),
    (r"\.attn\.rel_pos\.relative_position_bias_table$", ".attn.relative_position_bias_table"),
    (r"^neck\.(weight|bias)$", r"norm.\1"),  # SAM without its convolutional neck
    (r"^head\.fc\.", "head."),
)


def read_vit(tensors: FileTensors, model: nn.Module, rotation: Rotation | None = None) -> None:
    """Rename and rearrange a file's tensors, in place, as vitrel's; `rename_positions` then renames those of encodings.

    Args:
        tensors: changed in place.
        model: for which the tensors are.
        rotation: the rotary encoding of the file's model; None: inferred from the names.

    Raises:
        ValueError: the model has another rotation.
    """
    eva = tensors.has(r".*(\.gamma_1|\.q_bias|\.[qkv]_proj\.weight)")
    separate = tensors.has(r".*\.attn\.q_(proj\..*|bias)")
    rename_vit(tensors)
    if rotation is None and (eva or "rope.freqs" in tensors):
        rotation = _rotation(tensors, model, separate)
    if rotation is not None:
        unrotate_layout(tensors, model, rotation)
        _split_freqs(tensors)


def rename_vit(tensors: FileTensors) -> None:
    """Rename, join and split the tensors in place as far as that does not depend on a model, and remove buffers."""
    tensors.rename(*_NAMES)
    tensors.leave_out(_BUFFERS)
    _fuse_qkv(tensors)
    _split_swiglu(tensors)
    if "pos_embed" in tensors and tensors["pos_embed"].dim() == 4:  # SAM's keeps the grid
        tensors.change("pos_embed", tensors["pos_embed"].flatten(1, 2), "flattened")


def vit_arguments(tensors: FileTensors) -> dict[str, Any]:
    """Infer arguments of a ViT from renamed tensors: patches, width, depth, tokens, classes, biases, norms, MLP width.

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


def _rotation(tensors: FileTensors, model: nn.Module, separate: bool) -> Rotation | None:
    """Infer the file's rotary encoding from its names, since fixed frequencies are not in a file; None if it has none.

    A RoPE-ViT with an embedding has the names of others without a rotation: it is one if the model rotates.

    Args:
        tensors: of the file.
        model: for which the tensors are.
        separate: the file has separate q, k, v or biases of q and v.
    """
    absolute, swiglu = "pos_embed" in tensors, tensors.has(r".*\.mlp\.fc1_g\.weight")
    if "rope.freqs" in tensors:
        return Rotation("RoPE-ViT (mixed)", "rope_mixed", {}, interleaved=True, x_first=False)  # the x and y order is in freqs
    if tensors.has(r".*relative_position_bias_table|.*rel_pos_h"):
        return None
    if swiglu and absolute and separate:
        return Rotation("EVA-02", "rope_axial", _EVA, interleaved=True, x_first=False)
    if not absolute and "reg_token" in tensors:
        if "cls_token" in tensors:
            return Rotation("DINOv3", "rope_normalized", dict(base=100.0), interleaved=False, x_first=False)
        return Rotation("timm's ViT with RoPE and registers", "rope_axial", _EVA, interleaved=True, x_first=False)
    rotates = any(isinstance(part, PositionEncoding) and part.rotates for part in model.modules())
    if not absolute or (rotates and not separate):
        options = dict(base=100.0, reference=None)
        return Rotation("RoPE-ViT (axial)", "rope_axial", options, interleaved=True, x_first=True)
    return None


def _fuse_qkv(tensors: FileTensors) -> None:
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


def _split_freqs(tensors: FileTensors) -> None:
    """Split frequencies [2, depth, H, D/2], x first, to [2, H, D/2] per block, y first."""
    if "rope.freqs" in tensors:
        per_block = tensors["rope.freqs"].flip(0).unbind(1)
        values = {f"blocks.{i}.attn.freqs": block for i, block in enumerate(per_block)}
        tensors.spread("rope.freqs", values, "one tensor per block, rows before columns")
