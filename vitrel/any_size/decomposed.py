"""MViTv2 and SAM's image encoder with its neck (timm.models.mvitv2, vision_transformer_sam): a table for each axis.

logit[i, j] += q_i . R_h[y_i - y_j] + q_i . R_w[x_i - x_j], with q unscaled (MViTv2, arXiv 2112.01526, eq. 4). Where queries or
keys are pooled, their places are those in the larger of the two grids, and the offset is the floor of the difference. Otherwise
a table is resampled linearly along an axis that grows, and read exactly along one that shrinks.
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm import layers
from timm.layers import Format
from timm.models import mvitv2, vision_transformer_sam
from torch import Tensor

from vitrel.any_size.exchange import Adapter, AnySize
from vitrel.any_size.parts import in_padded_windows, token_embedding
from vitrel.geometry import cached_geometry, is_known
from vitrel.layers.patches import PatchEmbed
from vitrel.position.resample import resample_axis


def axis_rows(table: Tensor, queries: int, keys: int) -> Tensor:
    """Return, for every query and key along one axis, the row of their offset, [queries, keys, D].

    Args:
        table: rows by offset, query minus key, [2n-1, D], n the trained length. If the longer of `queries` and `keys`
            is more than n, it is resampled linearly to that length; otherwise its rows are read unchanged.
        queries: length of the axis in queries.
        keys: length of the axis in keys; it differs from that of queries where one of them is pooled.
    """
    longest = queries if is_known(queries, keys) and queries >= keys else torch.sym_max(queries, keys)
    rows = resample_axis(table, (len(table) + 1) // 2, longest, "linear")
    index = _axis_index(queries, keys, device=table.device)
    return rows.index_select(0, index.flatten()).unflatten(0, index.shape)


@cached_geometry
def _axis_index(queries: int, keys: int, device: torch.device) -> Tensor:
    """Return the row that query i and key j read in a table for the longer of both lengths, [queries, keys] int64.

    The shorter axis is spread over the longer one, and the offset rounded down, as in MViTv2.
    """
    i, j = torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device)
    return (i * keys + (keys - 1 - j) * queries) // torch.sym_min(queries, keys)


def axis_bias(q: Tensor, size: tuple[int, int], keys: tuple[int, int], tables: tuple[Tensor, Tensor]) -> Tensor:
    """Return the position logits q_i . (table row of the row offset + table row of the column offset) of all pairs.

    Args:
        q: queries [B, H, q_h*q_w, D], not scaled.
        size: (q_h, q_w) of the queries.
        keys: (k_h, k_w) of the keys.
        tables: by row offset and by column offset, [2n-1, D] each, read for this grid by `axis_rows`.

    Returns:
        [B, H, q_h*q_w, k_h*k_w].
    """
    q = q.unflatten(2, tuple(size))
    rows = torch.einsum("bnhwc,hkc->bnhwk", q, axis_rows(tables[0], size[0], keys[0]))
    columns = torch.einsum("bnhwc,wkc->bnhwk", q, axis_rows(tables[1], size[1], keys[1]))
    return (rows[..., None] + columns[..., None, :]).flatten(4, 5).flatten(2, 3)


class MultiScaleAttention(mvitv2.MultiScaleAttention):
    """timm's attention of MViTv2 with pooled queries, keys and values, for any grid; `axis_bias` gives its biases.

    The class token has none. Forward takes tokens [B, N, C] and their grid (h, w), and returns new ones and the queries' grid.
    """

    def _pooled(self, x: Tensor, size: Any, pool: Any, norm: Any) -> tuple[Tensor, Any]:
        """Return x (q, k or v) [B, H, N, D] on a grid `size` (h, w) after `pool` and `norm` (None: without) and its grid."""
        if pool is not None:
            x, first = mvitv2.reshape_pre_pool(x, size, self.has_cls_token)
            x, size = mvitv2.reshape_post_pool(pool(x), self.num_heads, first)
        return (x if norm is None else norm(x)), size

    def forward(self, x: Tensor, feat_size: list[int]) -> tuple[Tensor, list[int]]:
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        q, q_size = self._pooled(q, feat_size, self.pool_q, self.norm_q)
        k, k_size = self._pooled(k, feat_size, self.pool_k, self.norm_k)
        v, _ = self._pooled(v, feat_size, self.pool_v, self.norm_v)
        logits = (q * self.scale) @ k.mT
        if self.rel_pos_type == "spatial":
            first = int(self.has_cls_token)
            bias = axis_bias(q[:, :, first:], tuple(q_size), tuple(k_size), (self.rel_pos_h, self.rel_pos_w))
            logits = logits + F.pad(bias, (first, 0, first, 0))
        x = logits.softmax(-1) @ v
        x = (x + q if self.residual_pooling else x).transpose(1, 2).flatten(2)
        return self.proj(x), q_size


class SamAttention(vision_transformer_sam.Attention):
    """timm's attention of SAM's encoder among all tokens of each map or window [B, h, w, C], with biases by `axis_bias`."""

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[1:3]
        qkv = self.qkv(x.flatten(1, 2)).unflatten(2, (3, self.num_heads, -1))
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        bias = axis_bias(q, (h, w), (h, w), (self.rel_pos_h, self.rel_pos_w)) if self.use_rel_pos else None
        p = self.attn_drop.p if self.training else 0.0
        x = F.scaled_dot_product_attention(q, k, v, bias, dropout_p=p)
        return self.proj_drop(self.proj(x.transpose(1, 2).flatten(2))).unflatten(1, (h, w))


class SamBlock(vision_transformer_sam.Block):
    """timm's block of SAM's encoder, for any map [B, h, w, C]; tokens attend to the zeros that pad windows, as in training."""

    def forward(self, x: Tensor) -> Tensor:
        (h, w), n, y = x.shape[1:3], self.window_size, self.norm1(x)
        y = in_padded_windows(y, (n, n), self.attn) if n > 0 else self.attn(y)
        x = (x + self.drop_path1(self.ls1(y))).flatten(1, 2)
        return (x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))).unflatten(1, (h, w))


class VisionTransformerSAM(AnySize, vision_transformer_sam.VisionTransformerSAM):
    """timm's SAM encoder and neck, for any image, padded to whole patches: embedding resampled; ValueError for a rotation."""

    def adopted(self, model: Any) -> None:
        if any(getattr(block.attn, "rope", None) is not None for block in self.blocks):
            raise ValueError("it has a rotation in its windows")
        embed: Any = self.patch_embed
        embed.flatten, embed.output_fmt = False, Format.NHWC
        embed.strict_img_size, embed.dynamic_img_pad = False, True

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        if self.pos_embed is not None:
            position = self.pos_embed.flatten(1, 2)
            size = x.shape[1:3]
            x = x + token_embedding(position, tuple(self.pos_embed.shape[1:3]), size).unflatten(1, size)
        x = self.norm_pre(self.patch_drop(self.pos_drop(x)))
        return self.neck(self.blocks(x).permute(0, 3, 1, 2))


MVITV2 = Adapter(
    (mvitv2.MultiScaleVit,),
    {mvitv2.MultiScaleAttention: MultiScaleAttention},
    "decomposed, with pooled queries and keys",
    "tables linear along each axis that grows",
    multiple=32,
)
SAM = Adapter(
    (vision_transformer_sam.VisionTransformerSAM,),
    {
        vision_transformer_sam.VisionTransformerSAM: VisionTransformerSAM,
        vision_transformer_sam.Block: SamBlock,
        vision_transformer_sam.Attention: SamAttention,
        layers.PatchEmbed: PatchEmbed,
    },
    "absolute; decomposed, in windows and global",
    "absolute bicubic; global tables linear along each axis that grows (timm: each axis that changes)",
)
