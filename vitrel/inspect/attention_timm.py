"""Attention of timm's layers, seen at the softmax of their own code with fused kernels off.

Covered, by exact class: timm.layers.Attention (ViT, DeiT, FlexiViT, hybrids), AttentionRope and EvaAttention (EVA, RoPE-ViT,
DINOv3, PE), BEiT's Attention, RelPosAttention, ParallelScalingBlock, and WindowAttention of Swin V1 and V2. Content and
position are told apart in all of them: biases are asked of the module, a rotated layer runs once more without its rotation.
"""

from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Attention as TimmAttention
from timm.layers import AttentionRope
from timm.models.beit import Attention as BeitAttention
from timm.models.eva import EvaAttention
from timm.models.swin_transformer import SwinTransformerBlock
from timm.models.swin_transformer_v2 import SwinTransformerV2Block
from timm.models.vision_transformer import ParallelScalingBlock
from timm.models.vision_transformer_relpos import RelPosAttention
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitrel.grid import Grid
from vitrel.inspect.attention_layer import Layer, from_logits, model_name, replaced

_GLOBAL = (TimmAttention, AttentionRope, EvaAttention, BeitAttention, RelPosAttention, ParallelScalingBlock)
_WINDOWED = (SwinTransformerBlock, SwinTransformerV2Block)


def watch_timm(model: nn.Module, size: tuple[int, int], see: Callable[[Layer], None], position: bool, stack: ExitStack) -> int:
    """Until `stack` closes, every covered layer inside `model` shows itself to `see` when it runs; returns their number.

    size: of the images, (h, w) in pixels. position: with `content` and `position`. ValueError where a model has layers whose
    tokens cannot be placed on the image.
    """
    found = [(name, module) for name, module in model.named_modules() if type(module) in (*_GLOBAL, *_WINDOWED)]
    for name, module in found:
        if type(module) in _WINDOWED:
            attn, read = module.attn, partial(_window, f"{name}.attn", module)
        else:
            attn, read = module, partial(_global, name, module, _grid(model, size))
        stack.enter_context(replaced(attn, fused_attn=False))
        stack.enter_context(replaced(module, forward=partial(_watched, module.forward, read, see, position)))
    return len(found)


def _watched(
    forward: Callable, read: Callable, see: Callable[[Layer], None], position: bool, *args: Any, **kwargs: Any
) -> Tensor:
    with _Softmax() as seen:
        out = forward(*args, **kwargs)
    extra = next((given for given in (*args[1:], *kwargs.values()) if isinstance(given, Tensor)), None)
    see(read(forward, seen.logits, position, args[0], extra))
    return out


def _global(
    name: str, module: nn.Module, grid: Grid, forward: Callable, logits: Tensor, position: bool, x: Tensor, extra: Tensor | None
) -> Layer:
    """extra: what blocks pass beside x, a rotation or a bias that all share."""
    if logits.shape[-1] != grid.tokens:
        own = f"{grid.h}x{grid.w} patches and {grid.prefix} prefix tokens"
        raise ValueError(f"the {logits.shape[-1]} tokens of {name} cannot be placed on the image, which has {own}")
    tokens = torch.arange(grid.tokens, device=logits.device)[None]
    content = _without_position(module, forward, logits, x, extra)[:, None] if position else None
    return from_logits((name, grid, None, (0, 0), tokens), logits[:, None], content)


def _without_position(module: nn.Module, forward: Callable, logits: Tensor, x: Tensor, extra: Tensor | None) -> Tensor:
    """Logits [B, H, N, N] of a global layer without its rotation or bias."""
    if isinstance(module, AttentionRope | EvaAttention) and extra is not None:
        with suppress(_EnoughError), _Softmax(stop=True) as seen:
            forward(x)
        return seen.logits
    if isinstance(module, BeitAttention) and module.relative_position_bias_table is not None:
        logits = logits - module._get_rel_pos_bias()
    if isinstance(module, RelPosAttention) and module.rel_pos is not None:
        logits = logits - module.rel_pos.get_bias()
    return logits - extra if isinstance(module, BeitAttention | RelPosAttention) and extra is not None else logits


def _window(
    name: str, block: nn.Module, forward: Callable, logits: Tensor, position: bool, x: Tensor, extra: Tensor | None
) -> Layer:
    """timm rolls the image and pads it then: rows and columns that wrap round end before the padding."""
    (batch, h, w), window, shift = x.shape[:3], tuple(block.window_size), tuple(block.shift_size)
    at = torch.arange(h * w, device=x.device).view(h, w).roll([-s for s in shift], (0, 1))
    at = F.pad(at, (0, -w % window[1], 0, -h % window[0]), value=-1)
    tokens = at.unfold(0, window[0], window[0]).unfold(1, window[1], window[1]).flatten(2).flatten(0, 1)  # [W, N]
    mask = block.get_attn_mask(x.new_zeros(1, *at.shape, 1))  # [W, N, N], 0 or -100
    logits = logits.unflatten(0, (batch, -1))  # [B, W, H, N, N]
    content = logits - _window_bias(block.attn) if position else None
    visible = None if mask is None else (mask == 0)[None, :, None]
    return from_logits((name, Grid(h, w), window, shift, tokens), logits, content, visible)


def _window_bias(attn: nn.Module) -> Tensor:
    """[H, N, N]; V2's from its MLP (arXiv 2111.09883, eq. 3 and its code)."""
    if hasattr(attn, "relative_position_bias_table"):
        return attn._get_rel_pos_bias()[0]
    rows = attn.cpb_mlp(attn.relative_coords_table).flatten(0, -2)  # [R, H]
    return 16 * rows[attn.relative_position_index].permute(2, 0, 1).sigmoid()


def _grid(model: nn.Module, size: tuple[int, int]) -> Grid:
    embed = getattr(model, "patch_embed", None)
    if not hasattr(embed, "dynamic_feat_size") or not hasattr(model, "num_prefix_tokens"):
        raise ValueError(f"the tokens of {model_name(model)} cannot be placed on the image: it has no patch_embed of timm's")
    return Grid(*embed.dynamic_feat_size(size), model.num_prefix_tokens)


class _EnoughError(Exception):
    """Ends a forward pass that has shown its logits."""


class _Softmax(TorchFunctionMode):
    """Notes what the last softmax is taken of; with `stop`, nothing is computed beyond it."""

    logits: Tensor | None = None

    def __init__(self, stop: bool = False):
        super().__init__()
        self.stop = stop

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in (torch.softmax, F.softmax, Tensor.softmax):
            self.logits = args[0]
            if self.stop:
                raise _EnoughError
        return func(*args, **(kwargs or {}))
