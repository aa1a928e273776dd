"""Rename weights of Swin V1 and V2 to vitrel's names: of timm, and of Microsoft as timm reads them.

Microsoft downsamples at the end of a stage, timm and vitrel at the start of the next.
"""

import math
from typing import Any

from vitrel.weights.tensors import FileTensors

_BUFFERS = r".*(relative_position_index|relative_coords_table|attn_mask|attn\.k_bias)"


def rename_swin(tensors: FileTensors) -> None:
    """Rename the tensors in place and remove buffers; position encodings keep timm's names until `rename_positions`."""
    tensors.leave_out(_BUFFERS)
    if "layers.0.downsample.reduction.weight" in tensors:  # Microsoft's: timm's first stage has none
        tensors.rename(
            (r"^layers\.(\d+)\.downsample", lambda match: f"layers.{int(match[1]) + 1}.downsample"),
            (r"^head\.(?!fc)", "head.fc."),
        )


def swin_arguments(tensors: FileTensors) -> dict[str, Any]:
    """Infer the arguments of a Swin from renamed tensors: version, patch, width, depths, heads, window, classes, final norm.

    Image size, mlp_ratio, qkv_bias and eps are not inferred. Version 1: heads and window (taken as square) are read from
    tables, and are absent without. Version 2 has no tables that show its window. `position` is "table" or "cpb" by the version
    alone.
    """
    patch, v2 = tensors["patch_embed.proj.weight"], tensors.has(r".*\.attn\.logit_scale")
    blocks = [(int(match[1]), int(match[2])) for match in tensors.find(r"layers\.(\d+)\.blocks\.(\d+)\.norm1\.weight")]
    stages = 1 + max(stage for stage, _ in blocks)
    table = "layers.{}.blocks.0.attn.relative_position_bias_table"
    arguments = dict(
        patch_size=tuple(patch.shape[2:]), in_chans=patch.shape[1], embed_dim=len(patch), version=2 if v2 else 1,
        depths=tuple(sum(stage == other for other, _ in blocks) for stage in range(stages)),
        num_classes=len(tensors["head.fc.weight"]) if "head.fc.weight" in tensors else 0,
        final_norm="norm.weight" in tensors, position="cpb" if v2 else "table",
    )  # fmt: skip
    if v2:
        arguments["num_heads"] = tuple(len(tensors[f"layers.{i}.blocks.0.attn.logit_scale"]) for i in range(stages))
    elif table.format(0) in tensors:
        arguments["num_heads"] = tuple(tensors[table.format(i)].shape[1] for i in range(stages))
        side = (1 + math.isqrt(len(tensors[table.format(0)]))) // 2
        arguments["window_size"] = (side, side)
    return arguments
