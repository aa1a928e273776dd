"""Conversion of timm's tensors of ViTs and Swins to vitrel's names and layouts.

Beside the names these differ: separate q, k and v, or biases of q and v alone; SwiGLU's two halves in one tensor; one table
shared by all blocks; learned frequencies of all blocks in one tensor; the order of rotary channels.
"""

import re
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitrel.models.backbone import backbone_of
from vitrel.position import PositionEncoding

_BUFFERS = re.compile(r"(.*\.)?(relative_position_index|relative_coords_table|attn_mask|attn\.k_bias|rope\.(?!freqs$).*)")
_NAMES = (
    (re.compile(r"\.gamma_([12])$"), r".ls\1.gamma"),
    (re.compile(r"\.attn\.([qv])_bias$"), r".attn.\1_proj.bias"),
    (re.compile(r"^(shared_rel_pos|rel_pos_bias)\."), "shared_position."),
    (re.compile(r"\.attn\.rel_pos\.relative_position_bias_table$"), ".attn.relative_position_bias_table"),
    (re.compile(r"^neck\.(weight|bias)$"), r"norm.\1"),  # SAM without its convolutional neck
    (re.compile(r"^head\.fc\."), "head."),
)
_OF_EVA = re.compile(r"rope\.freqs|blocks\.\d+\.(gamma_1|attn\.(q_bias|[qkv]_proj\.weight))")
_QKV = re.compile(r"(.*\.attn)\.qkv\.(weight|bias)")
_IN_ATTENTION = re.compile(r"(?:(.*)attn|(shared_position))\.(relative_position_bias_table|cpb_mlp\..*|rel_pos_[hw]|freqs)")


class Rotation(NamedTuple):
    """Order of the channels of q and k in timm's weights. vitrel rotates pairs (p, p + D/2), with angles of rows first.

    `interleaved`: channels (2p, 2p + 1) form a pair; `x_first`: angles of columns come before those of rows.
    """

    interleaved: bool  # channels (2p, 2p+1) form a pair
    x_first: bool  # angles of columns come before those of rows


def to_vitrel(state: dict[str, Tensor], model: nn.Module, rotation: Rotation | None = None) -> dict[str, Tensor]:
    """Return tensors that have timm's names, or vitrel's, under vitrel's names and in vitrel's layout, without buffers.

    Tensors whose names neither has are returned as they are.

    Args:
        state: the tensors by name.
        model: the model to load them into; for a timm model they are returned unchanged.
        rotation: layout of the rotary channels. None: unknown, which is vitrel's unless the names are of timm's rotary models.

    Raises:
        ValueError: `rotation` is None, and the names are those of timm's rotary models; two tensors get one name; q, k or v is
            missing.
    """
    if backbone_of(model) is None:
        return dict(state)  # a timm model, whose own names these are
    own = model.state_dict()
    rotates = any(isinstance(part, PositionEncoding) and part.rotates for part in model.modules())
    of_eva = [name for name in state if name not in own and _OF_EVA.fullmatch(name)]
    if rotation is None and of_eva and (rotates or not any(name.endswith("relative_position_bias_table") for name in state)):
        raise ValueError(
            f"{of_eva[0]} is a name of timm's EVA and BEiT models, which does not show whether and how channels are rotated: "
            "build the timm model that these weights are of, and load vitrel.from_timm(it) instead"
        )
    new: dict[str, Tensor] = {}
    for name, value in state.items():
        target = name
        if name not in own:
            if _BUFFERS.fullmatch(name):
                continue
            for pattern, replacement in _NAMES:
                target = pattern.sub(replacement, target)
        if target in new:
            raise ValueError(f"two tensors are both read as {target}, {name} is one of them")
        new[target] = value
    _join_qkv(new)
    _split_swiglu(new)
    _permute(new, model, rotation)
    if "rope.freqs" in new:  # [2, depth, H, D/2], columns first
        for i, block in enumerate(new.pop("rope.freqs").flip(0).unbind(1)):
            new[f"blocks.{i}.attn.freqs"] = block
    if "pos_embed" in new and new["pos_embed"].dim() == 4:  # SAM's keeps the grid
        new["pos_embed"] = new["pos_embed"].flatten(1, 2)
    return _positions(new, [*own])


def _join_qkv(state: dict[str, Tensor]) -> None:
    """Join projections q, k and v into qkv, in place; with q's bias, k's is 0 if missing; ValueError for q without k or v."""
    for name in [name for name in state if name.endswith((".attn.q_proj.weight", ".attn.q_proj.bias"))]:
        stem, kind = name.split("q_proj.")
        q, k, v = (state.pop(f"{stem}{part}_proj.{kind}", None) for part in "qkv")
        if k is None and kind == "bias":
            k = torch.zeros_like(q)
        if k is None or v is None:
            raise ValueError(f"there is {name}, but not the same of k and v: weights are missing")
        state[f"{stem}qkv.{kind}"] = torch.cat((q, k, v))


def _split_swiglu(state: dict[str, Tensor]) -> None:
    """Split the first layer mlp.fc1 of every SwiGLU, which holds gate and value, into fc1_g and fc1_x, in place."""
    for name in [name for name in state if ".mlp.fc1." in name]:
        stem, kind = name.split("fc1.")
        out = state.get(f"{stem}fc2.weight")
        if out is not None and len(state[name]) == 2 * out.shape[1]:
            state[f"{stem}fc1_g.{kind}"], state[f"{stem}fc1_x.{kind}"] = state.pop(name).chunk(2)


def _permute(state: dict[str, Tensor], model: nn.Module, rotation: Rotation | None) -> None:
    """Bring q and k, and the norms of them, from timm's order of channels to vitrel's, in place, if `rotation` is known."""
    if rotation is None or not any(rotation):
        return
    for name, value in state.items():
        if match := _QKV.fullmatch(name):
            rows = value.unflatten(0, (3, model.get_submodule(match[1]).num_heads, -1))  # [3, H, D, ...]
            order = _order(rows.shape[2], rotation).to(value.device)
            state[name] = torch.cat((rows[:2].index_select(2, order), rows[2:])).flatten(0, 2)
        elif ".attn.q_norm." in name or ".attn.k_norm." in name:
            state[name] = value[_order(len(value), rotation).to(value.device)]


def _order(channels: int, rotation: Rotation) -> Tensor:
    """Return [D]: for each channel of a head in vitrel's order, its index in timm's order."""
    order = torch.arange(channels, device="cpu")
    if rotation.interleaved:
        order = order.view(-1, 2).T.flatten()
    if rotation.x_first:
        order = order.view(2, 2, -1).flip(1).flatten()
    return order


def _positions(state: dict[str, Tensor], own: list[str]) -> dict[str, Tensor]:
    """Return the tensors, encodings under the model's names `own`; a table shared only in the file is copied to all blocks."""
    shared = "shared_position.relative_position_bias_table"
    if shared in state and not any(name.startswith("shared_position.") for name in own):
        blocks = [name for name in own if re.fullmatch(r"blocks\.\d+\.position\..*relative_position_bias_table", name)]
        if blocks:
            state |= {name: state[shared].clone() for name in blocks}
            del state[shared]
    return {_own_name(name, own): value for name, value in state.items()}


def _own_name(name: str, own: list[str]) -> str:
    """Return the name in the model of a tensor that timm names `name`; `name` itself if the model has none."""
    if name in own:
        return name
    if name == "pos_embed":
        return next((n for n in own if n.startswith("pos_embed.") and n.endswith(".pos_embed")), name)
    if part := _IN_ATTENTION.fullmatch(name):
        prefix = part[2] or f"{part[1]}position"
        return next((n for n in own if n.startswith(f"{prefix}.") and n.endswith(f".{part[3]}")), name)
    return name
