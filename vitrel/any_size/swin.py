"""Swin models with several window sizes (swin_s3), and Swin V2-CR (timm.models.swin_transformer, swin_transformer_v2_cr).

Windows keep their size at every image size. The grid is padded before it is shifted, and no token sees the padding, as in
vitrel.models.Swin; timm shifts first and attends to padding, so results differ where windows do not divide the grid.
"""

import math
from typing import Any

import torch.nn.functional as F
from timm import layers
from timm.models import swin_transformer, swin_transformer_v2_cr
from torch import Tensor

from vitrel.any_size.exchange import Adapter, AnySize
from vitrel.any_size.parts import in_windows, log_offsets, masked_attention, pair_bias, table_bias
from vitrel.geometry import dtype_name
from vitrel.grid import Grid
from vitrel.layers.block import join_neighbors
from vitrel.layers.patches import PatchEmbed, pad_to_whole


class WindowAttention(swin_transformer.WindowAttention):
    """timm's attention of Swin with a table, within L windows [B*L, N, C], with an additive mask [L*N, N] or None."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        grid = Grid(*self.window_size)
        bias = table_bias(self.relative_position_bias_table, grid, grid)
        x = masked_attention(q, k, v, bias, mask, self.attn_drop).transpose(1, 2).flatten(2)
        return self.proj_drop(self.proj(x))


class SwinTransformerBlock(swin_transformer.SwinTransformerBlock):
    """timm's block of Swin, for any map [B, h, w, C]; windows are padded, then shifted, and no token sees the padding."""

    def _attn(self, x: Tensor) -> Tensor:
        return in_windows(x, self.window_size, self.attn, self.target_shift_size)


class _Merging:
    """Mixin of patch merging, [B, h, w, C] -> [B, ceil(h/2), ceil(w/2), 2C]; odd sides are padded with zeros."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.reduction(self.norm(join_neighbors(x)))


class PatchMerging(_Merging, swin_transformer.PatchMerging):
    """timm's patch merging of Swin, for any map [B, h, w, C]; odd sides are padded with zeros."""


class PatchMergingCr(_Merging, swin_transformer_v2_cr.PatchMerging):
    """timm's patch merging of Swin V2-CR, for any map [B, h, w, C]; odd sides are padded with zeros."""


class _AnyImage(AnySize):
    """Mixin of models whose patch embedding is set, in place, to take images of any size and to pad them to whole patches."""

    def adopted(self, model: Any) -> None:
        model.patch_embed.strict_img_size, model.patch_embed.dynamic_img_pad = False, True


class SwinTransformer(_AnyImage, swin_transformer.SwinTransformer):
    """timm's Swin, for images of any size, padded to whole patches; windows keep their size in tokens."""


class WindowMultiHeadAttention(swin_transformer_v2_cr.WindowMultiHeadAttention):
    """timm's cosine attention of Swin V2-CR, biases by an MLP, within L windows [B*L, N, C], with a mask [L*N, N] or None."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        scale = self.logit_scale.clamp(max=math.log(100.0)).exp()[:, None, None] * math.sqrt(q.shape[-1])
        rows = self.meta_mlp(log_offsets(*self.window_size, (0, 0), dtype_name(self.logit_scale.dtype), device=x.device))
        bias = pair_bias(rows, Grid(*self.window_size))
        q, k = F.normalize(q, dim=-1) * scale, F.normalize(k, dim=-1)
        x = masked_attention(q, k, v, bias, mask, self.attn_drop).transpose(1, 2).flatten(2)
        return self.proj_drop(self.proj(x))


class SwinTransformerV2CrBlock(swin_transformer_v2_cr.SwinTransformerV2CrBlock):
    """timm's block of Swin V2-CR, for any map [B, h, w, C]; windows are padded, then shifted, and no token sees the padding."""

    def _shifted_window_attn(self, x: Tensor) -> Tensor:
        shift = tuple(n // 2 for n in self.window_size) if any(self.target_shift_size) else (0, 0)
        return in_windows(x, self.window_size, self.attn, shift)


class PatchEmbedCr(swin_transformer_v2_cr.PatchEmbed):
    """timm's patch embedding of Swin V2-CR, [B, 3, H, W] -> [B, C, h, w]; it pads with zeros where timm leaves out pixels."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(pad_to_whole(x, self.patch_size))


class SwinTransformerV2Cr(_AnyImage, swin_transformer_v2_cr.SwinTransformerV2Cr):
    """timm's Swin V2-CR, for images of any size, padded to whole patches; windows keep their size in tokens."""


ADAPTER = Adapter(
    models=(swin_transformer.SwinTransformer, swin_transformer_v2_cr.SwinTransformerV2Cr),
    exchanged={
        swin_transformer.SwinTransformer: SwinTransformer,
        swin_transformer.SwinTransformerBlock: SwinTransformerBlock,
        swin_transformer.WindowAttention: WindowAttention,
        swin_transformer.PatchMerging: PatchMerging,
        swin_transformer_v2_cr.SwinTransformerV2Cr: SwinTransformerV2Cr,
        swin_transformer_v2_cr.SwinTransformerV2CrBlock: SwinTransformerV2CrBlock,
        swin_transformer_v2_cr.WindowMultiHeadAttention: WindowMultiHeadAttention,
        swin_transformer_v2_cr.PatchMerging: PatchMergingCr,
        swin_transformer_v2_cr.PatchEmbed: PatchEmbedCr,
        layers.PatchEmbed: PatchEmbed,
    },
    position="table, or MLP of log offsets, in windows",
    elsewhere="nothing resampled; windows padded, then shifted, padding masked (timm: shifted first, padding attended to)",
)
