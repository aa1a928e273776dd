"""Explain by the names of unmatched tensors how a file's model differs from the target model, with a fix each."""

import re
from collections.abc import Iterable

from torch import nn

_REGISTERS = "register tokens"
_BESIDE = "parts beside the image encoder (SAM, ViTDet)"
# ("unused" in the file or "unset" in the model, pattern of names, the difference, the fix)
_DIFFERENCES = (
    ("unused", r"blocks\.\d+\.ls[12]\.gamma", "layer scale", "build with block_args=dict(init_values=1e-5)"),
    ("unset", r"blocks\.\d+\.ls[12]\.gamma", "the file has no layer scale", "build without init_values"),
    ("unused", r".*mlp\.fc1_[gx]\.weight", "SwiGLU", "build with block_args=dict(mlp='swiglu')"),
    ("unset", r".*mlp\.fc1_[gx]\.weight", "the file has no SwiGLU", "build without mlp in block_args"),
    ("unused", r".*mlp\.norm\.weight", "a norm inside the MLP", "build with mlp_norm=True in block_args"),
    ("unset", r".*mlp\.norm\.weight", "the file has no norm inside the MLP", "build without mlp_norm in block_args"),
    ("unset", r".*attn\.qkv\.bias", "the file has no bias in qkv", "build with qkv_bias=False"),
    ("unused", r".*attn\.qkv\.bias", "a bias in qkv", "build with qkv_bias=True"),
    ("unset", r"cls_token", "the file has no class token", "build with class_token=False and another global_pool"),
    ("unused", r"cls_token", "a class token", "build with class_token=True"),
    ("unused", r"reg_token", _REGISTERS, "build with as many reg_tokens"),
    ("unset", r"reg_token", f"the file has no {_REGISTERS}", "build with reg_tokens=0"),
    ("unset", r"fc_norm\..*", "the file normalizes before it pools", "build with global_pool='token' or ''"),
    ("unused", r"fc_norm\..*", "a norm after pooling", "build with global_pool='avg'"),
    ("unused", r"pos_embed", "an absolute embedding", "build with 'absolute' in position"),
    ("unset", r"pos_embed\..*", "the file has no absolute embedding", "build without 'absolute' in position"),
    ("unused", r"blocks\..*bias_table", "bias tables", "build with 'table' in position, without share_position"),
    ("unused", r"layers\..*bias_table", "bias tables", "build with 'table' in position"),
    (
        "unset",
        r"(blocks|layers)\..*position\..*[^>]",
        "the file lacks an encoding",
        "pass allow_unset=['*position*'] to train a new one",
    ),
    ("unused", r"shared_position\..*", "one bias table for all blocks", "build with position='table'"),
    ("unset", r"shared_position\..*", "the file has no encoding shared by all blocks", "build without share_position"),
    ("unused", r".*rel_pos_[hw]", "decomposed tables", "build with 'decomposed' in position"),
    ("unused", r".*cpb_mlp.*", "Swin V2's continuous bias", "build with version=2 and 'cpb' in position"),
    ("unused", r".*attn\.logit_scale", "Swin V2's cosine attention", "build with version=2"),
    ("unset", r".*attn\.logit_scale", "the file has no cosine attention", "build with version=1"),
    ("unused", r".*(q|k)_norm\..*", "norms of queries and keys", "build with qk_norm=True in block_args"),
    ("unused", r".*attn\.norm\..*", "a norm inside attention", "build with attn_norm=True in block_args"),
    ("unused", r".*attn\.gate\..*", "gated attention", "no vitrel model has it"),
    ("unused", r"norm_pre\..*", "a norm before the blocks (CLIP)", "build with pre_norm=True, patch_bias=False"),
    ("unused", r"attn_pool\..*", "attention pooling", "build with global_pool='map'"),
    ("unused", r"absolute_fade\..*", "an embedding scaled to 0 in training", "build with absolute_fade"),
    ("unused", r"neck\..*", "a neck in place of the last norm (SAM)", "allow_unused=['*neck.*'], allow_unset=['norm.*']"),
    (
        "unused",
        r"(prompt_encoder|mask_decoder|backbone|proposal_generator|roi_heads)\..*",
        _BESIDE,
        "name them in allow_unused",
    ),
    ("unused", r"mask_token|(lm_head|local_cls_norm)\..*", "parts used in pretraining only", "name them in allow_unused"),
    ("unused", r".*attn\.(pool|norm)_[qkv]\..*", "pooling attention (MViT)", "no vitrel model has it"),
    (
        "unused",
        r".*rel_pos\.mlp\..*",
        "a bias MLP over log offsets (timm's vit_relpos)",
        "convert the timm model with vitrel.from_timm",
    ),
)


def differences(unset: Iterable[str], unused: Iterable[str], differ: dict) -> list[str]:
    """Return a phrase with a fix per difference, e.g. "layer scale (build with ...)".

    Args:
        unset: names in the model that the file lacks.
        unused: names in the file that the model lacks.
        differ: {name: (shape in the file, shape in the model)}.
    """
    names = {"unset": [*unset], "unused": [*unused]}
    phrases = _depth(names)
    for where, pattern, difference, fix in _DIFFERENCES:
        if any(re.fullmatch(pattern, name) for name in names[where]):
            phrases.append(f"{difference} ({fix})")
    if bare := [name for name in names["unset"] if name.endswith(">")]:
        key = bare[0].partition("<")[2].rstrip(">")
        phrases.append(f"the file was trained without {key} (choose the file's position, or allow_unset=['*position*'])")
    return phrases + [f"{name}: {' '.join(_shapes(*shapes))}" for name, shapes in differ.items() if name in _SIZES]


_SIZES = ("patch_embed.proj.weight", "reg_token", "cls_token")


def _shapes(theirs: tuple[int, ...], ours: tuple[int, ...]) -> tuple[str, ...]:
    return ("the file's", str(tuple(theirs)), "against the model's", str(tuple(ours)))


def _depth(names: dict[str, list[str]]) -> list[str]:
    """Report blocks that only the file or only the model has, and remove their names from `names`."""
    phrases = []
    for where, words in (("unused", "more blocks in the file"), ("unset", "fewer blocks in the file")):
        blocks = {m[1] for name in names[where] if (m := re.fullmatch(r"((?:layers\.\d+\.)?blocks\.\d+)\.norm1\.weight", name))}
        names[where] = [name for name in names[where] if not any(name.startswith(f"{block}.") for block in blocks)]
        if blocks:
            phrases.append(f"{words} ({', '.join(sorted(blocks)[:3])}...; build the model with the file's depth)")
    return phrases


def other_family(unused: list[str], model: nn.Module) -> str:
    """Say what architecture the file is of if it differs from the model's (plain, hierarchical), else ""."""
    hierarchical = any(name.startswith(("layers.", "stages.", "features.", "encoder.")) for name in unused)
    if hierarchical and model.layout != "swin":
        pooling = any(re.fullmatch(r".*attn\.(pool|norm)_[qkv]\..*", name) for name in unused)
        kind = "MViT, whose attention pools queries and keys (no vitrel model does)" if pooling else "a hierarchical model"
        return f"the file is of {kind}, the model is a plain ViT"
    if model.layout == "swin" and any(name.startswith("blocks.") for name in unused):
        return "the file is of a plain ViT, the model is a Swin"
    return ""
