"""The blocks of a model one by one: their order, and the intermediate tensors of a block, recorded by hooks."""

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

from vitrel.grid import Grid
from vitrel.layers import Block
from vitrel.models.backbone import Backbone
from vitrel.models.swin import Swin


class Observed(NamedTuple):
    """Tensors of one block in one forward pass, [B, N, C] or [B, h, w, C]."""

    attended: Tensor  # input of the attention's last linear layer
    between: Tensor  # input of norm2: in pre-norm blocks the tokens after attention
    hidden: Tensor  # input of the MLP's last linear layer
    out: Tensor  # output of the block


def observe(block: Block, x: Tensor, grid: Grid) -> Observed:
    """Run a block once and return its intermediate tensors and its output."""
    seen: dict[str, Tensor] = {}
    recorded = {"attended": block.attn.proj, "between": block.norm2, "hidden": block.mlp.fc2}
    hooks = [m.register_forward_pre_hook(lambda _, args, n=n: seen.update({n: args[0]})) for n, m in recorded.items()]
    try:
        out = block(x, grid)
    finally:
        for hook in hooks:
            hook.remove()
    return Observed(**seen, out=out)


def layers(model: Backbone) -> Iterator[tuple[nn.Module, Block]]:
    """Yield (what is applied to the tokens before the block, the block) for all blocks in their order."""
    if isinstance(model, Swin):
        for stage in model.layers:
            yield from zip([stage.downsample, *(nn.Identity() for _ in stage.blocks[1:])], stage.blocks, strict=True)
    else:
        for block in model.blocks:
            yield nn.Identity(), block
