"""Hiera, SAM 2's encoder, GCViT (timm.models.hiera, hieradet_sam2, gcvit): windows, with embeddings that repeat in each.

The windowed absolute embedding (arXiv 2311.05613, eq. 3) is a small embedding that is stretched over the grid plus one window
that is repeated.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from timm.models import gcvit, hiera, hieradet_sam2
from torch import Tensor

from vitrel.any_size.exchange import Adapter, AnySize
from vitrel.any_size.parts import in_padded_windows, in_windows, map_embedding, masked_attention, table_bias, token_embedding
from vitrel.geometry import cached_geometry, is_known
from vitrel.grid import Grid


class Unroll(hiera.Unroll):
    """timm's order of Hiera's tokens, for any grid of whole mask units (blocks of tokens), [B, h, w, C] -> [B, h*w, C].

    Tokens are sorted by their position in a mask unit, as all stages pool it, then by mask unit in raster order. So pooling is
    a maximum over a dimension.
    """

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = zip(*self.schedule, strict=True)
        order = unrolled(x.shape[1], x.shape[2], rows, columns, device=x.device)
        return x.flatten(1, 2).index_select(1, order)


@cached_geometry
def unrolled(h: int, w: int, rows: tuple[int, ...], columns: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the indices of the tokens of an h x w grid in the order of `Unroll`, [h*w] int64.

    Args:
        h: rows of the grid.
        w: columns of the grid.
        rows: number of rows that each stage pools, the first one outermost in the order; their product is a mask unit's height.
        columns: number of columns that each stage pools; their product is a mask unit's width.
        device: of the result.
    """
    height, width = math.prod(rows), math.prod(columns)  # of a cell
    place = torch.arange(height * width, device=device)
    row, column = torch.zeros(2, height * width, dtype=torch.int64, device=device).unbind()
    for m, n in zip(reversed(rows), reversed(columns), strict=True):
        column, place = column * n + place % n, place // n
        row, place = row * m + place % m, place // m
    cell = torch.arange(h // height, device=device)[:, None] * (height * w) + torch.arange(w // width, device=device) * width
    return ((row * w + column)[:, None] + cell.flatten()).flatten()


class HieraPatchEmbed(hiera.PatchEmbed):
    """timm's patch embedding of Hiera, which returns a map, [B, 3, H, W] -> [B, h, w, C]; ValueError if a mask is given."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            raise ValueError("masks of patches need timm's own model: they are for images of its own size")
        return self.proj(x).permute(0, 2, 3, 1)


class MaskUnitAttention(hiera.MaskUnitAttention):
    """timm's attention of Hiera, within mask units or global, for any number of tokens [B, N, C] in the order of `Unroll`.

    The result has N / q_stride tokens. Mask units are heads of one attention, since ONNX's attention takes 4 dimensions only.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.use_mask_unit_attn:
            return super().forward(x)
        units = x.shape[1] // (self.q_stride * self.window_size)
        qkv = self.qkv(x).unflatten(2, (3, self.heads, -1)).unflatten(1, (-1, units))  # [B, N/units, units, 3, H, D]
        q, k, v = qkv.permute(3, 0, 4, 2, 1, 5).flatten(2, 3).unbind(0)  # [B, H*units, N/units, D]
        if self.q_stride > 1:
            q = q.unflatten(2, (self.q_stride, -1)).amax(2)
        x = F.scaled_dot_product_attention(q, k, v).unflatten(1, (self.heads, units))
        return self.proj(x.transpose(1, 3).flatten(3).flatten(1, 2))


class Hiera(AnySize, hiera.Hiera):
    """timm's Hiera, for any image of whole mask units (32 pixels): the absolute embedding is resampled.

    The window of a windowed embedding is repeated in every mask unit. ValueError for the position of videos.
    """

    def adopted(self, model: Any) -> None:
        if self.pos_embed is None:
            raise ValueError("its position is that of videos")

    def _pos_embed(self, x: Tensor) -> Tensor:
        h, w = x.shape[1:3]
        if self.pos_embed_win is None:
            return x + token_embedding(self.pos_embed, tuple(self.tokens_spatial_shape), (h, w)).unflatten(1, (h, w))
        whole = map_embedding(self.pos_embed, (h, w)).permute(0, 2, 3, 1)
        window = self.pos_embed_win.permute(0, 2, 3, 1)
        m, n = self.mask_unit_size
        x = (x + whole).unflatten(2, (-1, n)).unflatten(1, (-1, m))  # [B, h/m, m, w/n, n, C]
        return (x + window[:, None, :, None]).flatten(3, 4).flatten(1, 2)


class MultiScaleAttention(hieradet_sam2.MultiScaleAttention):
    """timm's attention of SAM 2's encoder over any map or windows, [B, h, w, C] -> [B, h', w', C'], of the pooled queries."""

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[1:3]
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if self.q_pool is not None:
            q = self.q_pool(q.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
            h, w = q.shape[1:3]
        q, k, v = (t.flatten(1, 2).unflatten(2, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).flatten(2).unflatten(1, (h, w)))


class MultiScaleBlock(hieradet_sam2.MultiScaleBlock):
    """timm's block of SAM 2's encoder, any [B, h, w, C] -> [B, h', w', C']; tokens attend to zero padding, as in training."""

    def forward(self, x: Tensor) -> Tensor:
        shortcut, x = x, self.norm1(x)
        if self.dim != self.dim_out:
            shortcut = self.proj(x)
            if self.pool is not None:
                shortcut = self.pool(shortcut.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        if self.is_windowed:
            x = in_padded_windows(x, self.window_size, self.attn, self.q_stride[0] if self.q_stride else 1)
        else:
            x = self.attn(x)
        x = shortcut + self.drop_path1(self.ls1(x))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class HieraDet(hieradet_sam2.HieraDet):
    """timm's image encoder of SAM 2, for multiples of 32 pixels; the embedding is resampled, that of a window repeated."""

    def _pos_embed(self, x: Tensor) -> Tensor:
        h, w = x.shape[1:3]
        n = self.pos_embed_window.shape[-1]
        whole = F.interpolate(self.pos_embed, (h, w), mode="bicubic").permute(0, 2, 3, 1)
        window = self.pos_embed_window.permute(0, 2, 3, 1)
        x = (x + whole).unflatten(2, (-1, n)).unflatten(1, (-1, n))
        return (x + window[:, None, :, None]).flatten(3, 4).flatten(1, 2)


class WindowAttentionGlobal(gcvit.WindowAttentionGlobal):
    """timm's attention of GCViT within L windows of N tokens, [B*L, N, C], with an additive mask [L*N, N] or None.

    `q_global` [B, h, w, C], of the size of a window, are the queries of all windows of an image, read in a global block only.
    """

    def forward(self, x: Tensor, q_global: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        parts = self.qkv(x).unflatten(2, (-1, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4)
        if self.use_global and q_global is not None:
            q = q_global.flatten(1, 2).unflatten(2, (self.num_heads, -1)).transpose(1, 2)  # [B, H, N, D]
            k, v = parts.unbind(0)
            q = q[:, None].expand(-1, x.shape[0] // q.shape[0], -1, -1, -1).flatten(0, 1)
        else:
            q, k, v = parts.unbind(0)
        grid = Grid(*self.window_size)
        bias = table_bias(self.rel_pos.relative_position_bias_table, grid, grid)
        x = masked_attention(q, k, v, bias, mask, self.attn_drop).transpose(1, 2).flatten(2)
        return self.proj_drop(self.proj(x))


class GlobalContextVitBlock(gcvit.GlobalContextVitBlock):
    """timm's block of GCViT, for any map [B, h, w, C]; no token sees the padding of windows."""

    def _window_attn(self, x: Tensor, q_global: Tensor | None = None) -> Tensor:
        return in_windows(x, self.window_size, lambda tokens, mask: self.attn(tokens, q_global, mask))


class GlobalContextVitStage(gcvit.GlobalContextVitStage):
    """timm's stage of GCViT, for any map [B, C, h, w]; the queries of the image are interpolated bilinearly to one window."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.downsample(x)
        query = self.global_block(x)
        window = self.blocks[0].window_size
        if not is_known(*query.shape[-2:]) or tuple(query.shape[-2:]) != tuple(window):
            query = F.interpolate(query, window, mode="bilinear", align_corners=False)
        query = self.global_norm(query.permute(0, 2, 3, 1))
        x = x.permute(0, 2, 3, 1)
        for block in self.blocks:
            x = block(x, query)
        return self.norm(x).permute(0, 3, 1, 2).contiguous()


HIERA = Adapter(
    (hiera.Hiera,),
    {
        hiera.Hiera: Hiera,
        hiera.Unroll: Unroll,
        hiera.PatchEmbed: HieraPatchEmbed,
        hiera.MaskUnitAttention: MaskUnitAttention,
    },
    "absolute, or windowed absolute",
    "absolute bicubic; the window's part repeats",
    multiple=32,
)
SAM2 = Adapter(
    (hieradet_sam2.HieraDet,),
    {
        hieradet_sam2.HieraDet: HieraDet,
        hieradet_sam2.MultiScaleBlock: MultiScaleBlock,
        hieradet_sam2.MultiScaleAttention: MultiScaleAttention,
    },
    "windowed absolute",
    "absolute bicubic; the window's part repeats; as in timm",
    multiple=32,
)
GCVIT = Adapter(
    (gcvit.GlobalContextVit,),
    {
        gcvit.WindowAttentionGlobal: WindowAttentionGlobal,
        gcvit.GlobalContextVitBlock: GlobalContextVitBlock,
        gcvit.GlobalContextVitStage: GlobalContextVitStage,
    },
    "table in windows; queries of the whole image",
    "nothing resampled in windows; the image's query bilinear, to one window",
    multiple=32,
)
