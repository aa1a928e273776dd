"""Rename weights of Swin V1 and V2 to vitrel's names: timm, Microsoft, torchvision, transformers, naver's Swin with RoPE.

Other differences: timm and vitrel downsample at the start of a stage, the rest at the end of the stage before; q, k and v may
be separate; torchvision's V2 has one bias for q, k and v and zeroes that of the keys.
"""

import math
import re
from typing import Any

import torch
from torch import nn

from vitrel.weights.rotate import Rotation, unrotate_layout
from vitrel.weights.tensors import FileTensors
from vitrel.weights.vit_names import fuse_qkv

_BUFFERS = r".*(relative_position_index|attn_mask|attn\.k_bias|rope_t_[xy])"


def _next_stage(match: re.Match[str]) -> str:
    return f"layers.{int(match[1]) + 1}.downsample"


_MICROSOFT = (
    (r"^layers\.(\d+)\.downsample", _next_stage),
    (r"^head\.(?!fc)", "head.fc."),
    (r"\.attn\.rope_freqs$", ".attn.freqs"),
)
_TORCHVISION = (
    (r"^features\.0\.0\.", "patch_embed.proj."),
    (r"^features\.0\.2\.", "patch_embed.norm."),
    (r"^features\.(\d*[02468])\.", lambda m: f"layers.{int(m[1]) // 2}.downsample."),
    (r"^features\.(\d+)\.(\d+)\.", lambda m: f"layers.{int(m[1]) // 2}.blocks.{m[2]}."),
    (r"\.mlp\.0\.", ".mlp.fc1."),
    (r"\.mlp\.3\.", ".mlp.fc2."),
    (r"^head\.", "head.fc."),
)
_TRANSFORMERS = (
    (r"^(swin|swinv2)\.", ""),
    (r"^embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"^embeddings\.norm\.", "patch_embed.norm."),
    (r"^embeddings\.position_embeddings$", "pos_embed"),
    (r"^embeddings\.mask_token$", "mask_token"),
    (r"^encoder\.", ""),
    (r"^layers\.(\d+)\.downsample", _next_stage),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.attention\.self\.(query|key|value)\.", lambda m: f".attn.{m[1][0]}_proj."),
    (r"\.attention\.self\.continuous_position_bias_mlp\.", ".attn.cpb_mlp."),
    (r"\.attention\.(output\.dense|o_proj)\.", ".attn.proj."),
    (r"\.attention\.(self\.|relative_position_bias\.)?", ".attn."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"\.output\.dense\.", ".mlp.fc2."),
    (r"^layernorm\.", "norm."),
    (r"^classifier\.", "head.fc."),
)


def read_swin(tensors: FileTensors, model: nn.Module) -> None:
    """Rename and rearrange a file's tensors, in place, as vitrel's; `rename_positions` then renames those of encodings.

    The encodings that the layout shows are added to tensors.implied.

    Raises:
        ValueError: the model has another rotation, or another pretrained window in V2.
    """
    rename_swin(tensors)
    _check_window(tensors, model)
    if tensors.has(r".*\.attn\.logit_scale"):
        _split_bias(tensors)
    fuse_qkv(tensors)
    _read_freqs(tensors, model)
    for pattern, key in (("pos_embed", "absolute"), (r".*\.attn\.relative.*", "table"), (r".*\.attn\.cpb_mlp\..*", "cpb")):
        if tensors.has(pattern):
            tensors.implied.add(key)


def rename_swin(tensors: FileTensors) -> None:
    """Rename the tensors in place, as far as that does not depend on a model, and remove buffers.

    Separate q, k and v remain separate, and position encodings keep timm's names.
    """
    tensors.leave_out(_BUFFERS)
    if "features.0.0.weight" in tensors:
        tensors.rename(*_TORCHVISION)
    elif tensors.has(r".*embeddings\.patch_embeddings\.projection\.weight"):
        tensors.rename(*_TRANSFORMERS)
    elif tensors.has(r"layers\.0\.downsample\.reduction\.weight|.*\.attn\.rope_freqs"):
        tensors.rename((r"^absolute_pos_embed$", "pos_embed"), *_MICROSOFT)


def swin_arguments(tensors: FileTensors) -> dict[str, Any]:
    """Infer the arguments of a Swin from a renamed tensors: version, patch, width, depths, heads, window, classes, final norm.

    Image size, mlp_ratio, qkv_bias and eps are not inferred. Version 1: heads and window (taken as square) are read from
    tables, and are absent without. Version 2 has no tables: its windows are read from a buffer of coordinates, if the file has
    one. `position` is "table" or "cpb" by the version alone.
    """
    patch, v2 = tensors["patch_embed.proj.weight"], tensors.has(r".*\.attn\.logit_scale")
    blocks = [(int(match[1]), int(match[2])) for match in tensors.find(r"layers\.(\d+)\.blocks\.(\d+)\.norm1\.weight")]
    stages = 1 + max(stage for stage, _ in blocks)
    table, coordinates = "layers.{}.blocks.0.attn.relative_position_bias_table", "layers.0.blocks.0.attn.relative_coords_table"
    arguments = dict(
        patch_size=tuple(patch.shape[2:]), in_chans=patch.shape[1], embed_dim=len(patch), version=2 if v2 else 1,
        depths=tuple(sum(stage == other for other, _ in blocks) for stage in range(stages)),
        num_classes=len(tensors["head.fc.weight"]) if "head.fc.weight" in tensors else 0,
        final_norm="norm.weight" in tensors, position="cpb" if v2 else "table",
    )  # fmt: skip
    if v2:
        arguments["num_heads"] = tuple(len(tensors[f"layers.{i}.blocks.0.attn.logit_scale"]) for i in range(stages))
        if coordinates in tensors:
            arguments["window_size"] = tuple((n + 1) // 2 for n in tensors[coordinates].shape[1:3])
            trained = [tensors[coordinates.replace("0", str(i), 1)] for i in range(stages)]
            arguments["position_args"] = {"pretrained_window": [_trained_window(table) for table in trained]}
    elif table.format(0) in tensors:
        arguments["num_heads"] = tuple(tensors[table.format(i)].shape[1] for i in range(stages))
        side = (1 + math.isqrt(len(tensors[table.format(0)]))) // 2
        arguments["window_size"] = (side, side)
    return arguments


def _check_window(tensors: FileTensors, model: nn.Module) -> None:
    """Raise ValueError if V2's continuous bias was trained in other windows than the model's, by the file's coordinates.

    The coordinates are then removed from the tensors. Encodings with policy="renormalize" are not checked.
    """
    trained = {}
    for match in tensors.find(r"(layers\.\d+\.blocks\.\d+)\.attn\.relative_coords_table"):
        trained[match[1]] = _trained_window(tensors[match[0]])
    stages = [window for name, window in trained.items() if name.endswith("blocks.0")]
    fix = "its stages were trained in windows of several sizes: give pretrained_window one number per stage"
    if len({*stages}) == 1:
        fix = f"build it with position_args=dict(pretrained_window={stages[0]})"
    for name, block in model.named_modules():
        for part in block.modules() if name in trained else ():
            if hasattr(part, "cpb_mlp") and part.policy != "renormalize" and part.pretrained_window != trained[name]:
                words = ("x".join(map(str, window)) for window in (trained[name], part.pretrained_window))
                raise ValueError(
                    "{}: a bias trained in windows of {}, the model's in windows of {}; {}".format(name, *words, fix)
                )
    tensors.leave_out(r".*\.relative_coords_table")


def _trained_window(table: torch.Tensor) -> tuple[int, int]:
    """Return (h, w) of the training window from V2's normalized coordinates [1, 2h'-1, 2w'-1, 2] of a window (h', w')."""
    sides = []
    for axis in (0, 1):
        offset, coordinate = table.shape[1 + axis] // 2, table[..., axis].max().item()  # the largest
        sides.append(1 + round(8 * offset / (8**coordinate - 1)) if coordinate > 0 else offset + 1)
    return sides[0], sides[1]


def _split_bias(tensors: FileTensors) -> None:
    """Bring V2's biases of q and v to timm's names, q_bias and v_bias, in place.

    A qkv bias (torchvision) is split; its part for k is dropped, as torchvision zeroes it before use. The biases of separate
    projections (transformers) are renamed.
    """
    for match in tensors.find(r"(.*\.attn\.)qkv\.bias"):
        q, _, v = tensors[match[0]].chunk(3)
        tensors.spread(match[0], {f"{match[1]}q_bias": q, f"{match[1]}v_bias": v}, "biases of q and v separated, none for k")
    tensors.rename((r"\.attn\.([qv])_proj\.bias$", r".attn.\1_bias"))


def _read_freqs(tensors: FileTensors, model: nn.Module) -> None:
    """Rearrange naver's Swin with rotary frequencies [2, H, D/2], x before y, in place; nothing for a tensors without them.

    The q and k rows of every qkv are permuted. Learned frequencies (mixed) become y before x; fixed ones, where each axis has
    half of the bands, are removed, since the model computes them.

    Raises:
        ValueError: the model's rotation differs.
    """
    names = [match[0] for match in tensors.find(r".*\.attn\.freqs")]
    if not names:
        return
    bands = tensors[names[0]].shape[2] // 2
    axial = all(tensors[n][0, :, bands:].abs().max() + tensors[n][1, :, :bands].abs().max() < 1e-5 for n in names)
    if not axial:
        unrotate_layout(tensors, model, Rotation("Swin with RoPE (mixed)", "rope_mixed", {}, interleaved=True, x_first=False))
        for name in names:
            tensors.change(name, tensors[name].flip(0), "rows before columns")
        return
    options = dict(base=_base(tensors[names[0]][0, 0, :bands]), reference=None)
    rotation = Rotation("Swin with RoPE (axial)", "rope_axial", options, interleaved=True, x_first=True)
    unrotate_layout(tensors, model, rotation)
    tensors.leave_out(r".*\.attn\.freqs")


def _base(magnitudes: torch.Tensor) -> float:
    """Return b of the T frequencies b^(-t/T), t = 0..T-1, rounded to an integer; 100 for T = 1, which does not show it."""
    if len(magnitudes) == 1:
        return 100.0
    return float(round(magnitudes[1].double().pow(-len(magnitudes)).item()))
