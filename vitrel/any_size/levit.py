"""LeViT, EfficientFormer V1 and V2, TinyViT (timm.models.levit, efficientformer, efficientformer_v2, tiny_vit).

They learn one bias per |row offset|, |column offset| and head (arXiv 2104.01136, sec. 4.2); a layer that halves the map has
queries at every second row and column. At another grid the table over signed offsets is resampled. Between layers tokens are a
map [B, h, w, C], where timm has a sequence, since a sequence does not say its sides.
"""

from typing import Any

from timm.models import efficientformer, efficientformer_v2, levit, tiny_vit
from torch import Tensor

from vitrel.any_size.exchange import Adapter
from vitrel.any_size.parts import Size, distance_bias, in_windows, masked_attention
from vitrel.grid import Grid


class LinearNorm(levit.LinearNorm):
    """timm's linear layer with batch norm of LeViT, for a map [B, h, w, C] in place of a sequence [B, N, C]."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return self.bn(x.flatten(0, -2)).view_as(x)


class Downsample(levit.Downsample):
    """timm's downsampling of LeViT, for any map [B, h, w, C]: it takes every stride-th row and column, or pools."""

    def forward(self, x: Tensor) -> Tensor:
        if self.pool is not None:
            return self.pool(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        return x[:, :: self.stride, :: self.stride].contiguous()  # a linear layer asks whether strides let it flatten the map


def _bias(module: Any, size: Size, stride: int = 1) -> Tensor:
    """Return the `distance_bias` [H, N', N] of a timm module: keys on a grid `size` (h, w), queries at every stride-th."""
    return distance_bias(module.attention_biases, Grid(*module.resolution), Grid(*size), stride)


class Attention(levit.Attention):
    """timm's attention of LeViT for any map: [B, h, w, C], or [B, C, h, w] with use_conv; its biases are resampled to it."""

    def forward(self, x: Tensor) -> Tensor:
        sizes = [self.key_dim, self.key_dim, self.val_dim]
        if self.use_conv:
            h, w = x.shape[-2:]
            q, k, v = self.qkv(x).flatten(2).unflatten(1, (self.num_heads, -1)).split(sizes, dim=2)
            logits = (q.mT @ k) * self.scale + _bias(self, (h, w))
            return self.proj((v @ logits.softmax(-1).mT).flatten(1, 2).unflatten(2, (h, w)))
        h, w = x.shape[1:3]
        q, k, v = self.qkv(x).flatten(1, 2).unflatten(2, (self.num_heads, -1)).transpose(1, 2).split(sizes, dim=3)
        logits = (q @ k.mT) * self.scale + _bias(self, (h, w))
        return self.proj((logits.softmax(-1) @ v).transpose(1, 2).flatten(2).unflatten(1, (h, w)))


class AttentionDownsample(levit.AttentionDownsample):
    """timm's attention of LeViT that halves any map: [B, h, w, C], or [B, C, h, w] with use_conv; its biases are resampled."""

    def forward(self, x: Tensor) -> Tensor:
        sizes = [self.key_dim, self.val_dim]
        if self.use_conv:
            q = self.q(x)
            size, halved = x.shape[-2:], q.shape[-2:]
            k, v = self.kv(x).flatten(2).unflatten(1, (self.num_heads, -1)).split(sizes, dim=2)
            q = q.flatten(2).unflatten(1, (self.num_heads, -1))
            logits = (q.mT @ k) * self.scale + _bias(self, size, self.stride)
            return self.proj((v @ logits.softmax(-1).mT).flatten(1, 2).unflatten(2, halved))
        q = self.q(x)
        size, halved = x.shape[1:3], q.shape[1:3]
        k, v = self.kv(x).flatten(1, 2).unflatten(2, (self.num_heads, -1)).transpose(1, 2).split(sizes, dim=3)
        q = q.flatten(1, 2).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        logits = (q @ k.mT) * self.scale + _bias(self, size, self.stride)
        return self.proj((logits.softmax(-1) @ v).transpose(1, 2).flatten(2).unflatten(1, halved))


class _Levit:
    """Mixin of LeViT, whose layers pass on maps; forward_features returns [B, N, C], or [B, C, h, w] with use_conv, as timm."""

    def forward_features(self: Any, x: Tensor) -> Tensor:
        x = self.stem(x)
        if self.use_conv:
            return self.stages(x)
        return self.stages(x.permute(0, 2, 3, 1)).flatten(1, 2)


class Levit(_Levit, levit.Levit):
    """timm's LeViT, for images of any size: the attention biases of its layers are resampled to their maps."""


class LevitDistilled(_Levit, levit.LevitDistilled):
    """timm's LeViT with a second head for distillation, for images of any size, as `Levit`."""


class FlatMap(efficientformer.Flat):
    """Replacement of EfficientFormer's Flat that keeps rows and columns, [B, C, h, w] -> [B, h, w, C]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1)


class FormerAttention(efficientformer.Attention):
    """timm's attention of EfficientFormer, for any map [B, h, w, C]: biases learned on 7 x 7 tokens are resampled to it."""

    resolution = (7, 7)  # at construction, in all of timm's models

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[1:3]
        qkv = self.qkv(x).flatten(1, 2).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        q, k, v = qkv.split([self.key_dim, self.key_dim, self.val_dim], dim=3)
        logits = (q @ k.mT) * self.scale + _bias(self, (h, w))
        return self.proj((logits.softmax(-1) @ v).transpose(1, 2).flatten(2).unflatten(1, (h, w)))


class EfficientFormer(efficientformer.EfficientFormer):
    """timm's EfficientFormer, for images of any size: attention takes a map; features are a sequence [B, N, C], as timm's."""

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.norm(self.stages(self.stem(x)))
        return x.flatten(1, 2) if x.dim() == 4 else x


class Attention2d(efficientformer_v2.Attention2d):
    """timm's attention of EfficientFormer V2 with talking heads, any map [B, C, h, w]; biases resampled to the strided map."""

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = x.shape[-2:]
        if self.stride_conv is not None:
            x = self.stride_conv(x)
        h, w = x.shape[-2:]
        v = self.v(x)
        local = self.v_local(v)
        q, k, v = (t.flatten(2).unflatten(1, (self.num_heads, -1)) for t in (self.q(x), self.k(x), v))
        logits = self.talking_head1((q.mT @ k) * self.scale + _bias(self, (h, w)))
        x = v @ self.talking_head2(logits.softmax(-1)).mT
        x = x.flatten(1, 2).unflatten(2, (h, w)) + local
        if self.upsample is not None:
            x = self.upsample(x)[..., :rows, :columns]  # of an odd side it has one row or column more
        return self.proj(self.act(x))


class Attention2dDownsample(efficientformer_v2.Attention2dDownsample):
    """timm's attention of EfficientFormer V2 that halves any map [B, C, h, w], odd sides upwards; its biases are resampled."""

    def forward(self, x: Tensor) -> Tensor:
        q, v = self.q(x), self.v(x)
        size, halved = x.shape[-2:], q.shape[-2:]
        local = self.v_local(v)
        q, k, v = (t.flatten(2).unflatten(1, (self.num_heads, -1)) for t in (q, self.k(x), v))
        logits = (q.mT @ k) * self.scale + _bias(self, size, 2)
        x = (v @ logits.softmax(-1).mT).flatten(1, 2).unflatten(2, halved) + local
        return self.proj(self.act(x))


class TinyAttention(tiny_vit.Attention):
    """timm's attention of TinyViT within L windows of N tokens, [B*L, N, C], with an additive mask [L*N, N] or None."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        qkv = self.qkv(self.norm(x)).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        q, k, v = qkv.split([self.key_dim, self.key_dim, self.val_dim], dim=3)
        bias = _bias(self, self.resolution)
        return self.proj(masked_attention(q, k, v, bias, mask).transpose(1, 2).flatten(2))


class TinyVitBlock(tiny_vit.TinyVitBlock):
    """timm's block of TinyViT, for any map [B, h, w, C]; no token sees the padding of windows."""

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[1:3]
        x = x + self.drop_path1(in_windows(x, (self.window_size, self.window_size), self.attn))
        x = self.local_conv(x.permute(0, 3, 1, 2)).flatten(2).mT
        return (x + self.drop_path2(self.mlp(x))).unflatten(1, (h, w))


ADAPTER = Adapter(
    models=(levit.Levit, levit.LevitDistilled, efficientformer.EfficientFormer, efficientformer_v2.EfficientFormerV2),
    exchanged={
        levit.Levit: Levit,
        levit.LevitDistilled: LevitDistilled,
        levit.LinearNorm: LinearNorm,
        levit.Downsample: Downsample,
        levit.Attention: Attention,
        levit.AttentionDownsample: AttentionDownsample,
        efficientformer.EfficientFormer: EfficientFormer,
        efficientformer.Flat: FlatMap,
        efficientformer.Attention: FormerAttention,
        efficientformer_v2.Attention2d: Attention2d,
        efficientformer_v2.Attention2dDownsample: Attention2dDownsample,
    },
    position="table over distances in rows and in columns",
    elsewhere="table geometric, over signed offsets",
)
TINY_VIT = Adapter(
    models=(tiny_vit.TinyVit,),
    exchanged={tiny_vit.Attention: TinyAttention, tiny_vit.TinyVitBlock: TinyVitBlock},
    position="table over distances in rows and in columns in windows",
    elsewhere="nothing resampled; padding masked (timm: attended to)",
)
