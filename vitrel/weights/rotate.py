"""Rotary layouts of other code: which channels form a rotated pair, and which axis comes first."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitrel.position import POSITIONS, PositionEncoding, key_of
from vitrel.position.terms import Composition
from vitrel.weights.tensors import FileTensors


class Rotation(NamedTuple):
    """The rotary encoding of a file's model, and the order of the q and k channels in the file."""

    layout: str  # its name in errors
    key: str  # the same encoding in POSITIONS
    options: dict[str, object]  # those that must equal the model's; options that are left out are not compared
    interleaved: bool  # channels (2p, 2p+1) form a pair, not (p, p + D/2)
    x_first: bool  # angles of columns come before those of rows


def unrotate_layout(tensors: FileTensors, model: nn.Module, rotation: Rotation) -> None:
    """Permute the q and k rows of every qkv, and q and k norms, to vitrel's order: pairs (p, p + D/2), angles of rows first.

    Args:
        tensors: changed in place.
        model: whose rotary encoding is compared.
        rotation: that of the file.

    Raises:
        ValueError: the model's rotary encoding or its options differ from the file's.
    """
    _check_encoding(model, rotation)
    if not rotation.interleaved and not rotation.x_first:
        return
    order = " and ".join(
        words for words, done in (("pairs split", rotation.interleaved), ("columns after rows", rotation.x_first)) if done
    )
    own = model.state_dict()
    for match in tensors.find(r"(.*\.attn)\.qkv\.(weight|bias)"):
        if match[0] in own and own[match[0]].shape == tensors[match[0]].shape:  # another shape raises an error when loaded
            heads = model.get_submodule(match[1]).num_heads
            tensors.change(match[0], permute_rows(tensors[match[0]], heads, rotation), f"q and k rows permuted: {order}")
    for match in tensors.find(r".*\.attn\.[qk]_norm\.(weight|bias)"):
        tensors.change(match[0], tensors[match[0]][_order(tensors[match[0]], rotation)], f"permuted: {order}")


def permute_rows(qkv: Tensor, heads: int, rotation: Rotation) -> Tensor:
    """Return qkv, [3C] or [3C, C] in the channel order of `rotation`, in vitrel's order."""
    rows = qkv.unflatten(0, (3, heads, -1))  # [3, H, D, ...]
    return torch.cat((rows[:2].index_select(2, _order(rows[0, 0], rotation)), rows[2:])).flatten(0, 2)


def _order(head: Tensor, rotation: Rotation) -> Tensor:
    """Return the index in the order of `rotation` of each of the D channels of a head [D, ...] in vitrel's order."""
    order = torch.arange(len(head), device=head.device)
    if rotation.interleaved:
        order = order.view(-1, 2).T.flatten()
    if rotation.x_first:
        order = order.view(2, 2, -1).flip(1).flatten()
    return order


def _check_encoding(model: nn.Module, rotation: Rotation) -> None:
    own = [part for part in model.modules() if isinstance(part, PositionEncoding) and part.rotates]
    own = [part for part in own if not isinstance(part, Composition)]
    wrong = next((part for part in own if type(part) is not POSITIONS[rotation.key] or _differs(part, rotation)), None)
    if own and wrong is None:
        return
    has = key_of(wrong) if own else "none that rotates"
    if own and rotation.options and has == rotation.key:
        has += f" with {', '.join(f'{name}={getattr(wrong, name)!r}' for name in rotation.options)}"
    options = ", ".join(f"{name}={value!r}" for name, value in rotation.options.items())
    raise ValueError(
        f"the weights are of {rotation.layout}, which rotates q and k by {rotation.key} ({options or 'learned'}); the model's "
        f"encoding is {has}: build it with position={rotation.key!r}, joined by '+' to others"
        + (f", and position_args=dict({options})" if options else "")
    )


def _differs(part: PositionEncoding, rotation: Rotation) -> bool:
    """Return whether an encoding's options differ from those of `rotation`; a list, as in a config file, equals a tuple."""
    own = {name: getattr(part, name) for name in rotation.options}
    return rotation.options != {name: tuple(value) if isinstance(value, list) else value for name, value in own.items()}
