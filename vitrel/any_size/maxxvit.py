"""MaxViT and CoAtNet (timm.models.maxxvit): tables or an MLP of offsets in windows, in strided windows, and global.

Windows keep their size at every image size and are padded with masking, so nothing is resampled there. CoAtNet's global
attention reads a table of the whole grid, which is resampled, or an MLP over log offsets, which is evaluated.
"""

import torch
import torch.nn.functional as F
from timm import layers
from timm.layers import RelPosBias, RelPosBiasTf, RelPosMlp
from timm.layers.padding import pad_same_arg
from timm.layers.pool2d_same import AvgPool2dSame as TimmAvgPool2dSame
from timm.models import maxxvit
from torch import Tensor

from vitrel.any_size.exchange import Adapter
from vitrel.any_size.parts import Size, in_windows, log_offsets, masked_attention, pair_bias, table_bias
from vitrel.geometry import dtype_name
from vitrel.grid import Grid
from vitrel.position.resample import resample_table


def bias_on(module: RelPosBias | RelPosBiasTf | RelPosMlp, size: Size) -> Tensor:
    """Return the biases [H, N, N] that a position module of timm gives to all pairs of tokens on a grid of `size` (h, w).

    Where the grid is not the module's own, a table is resampled ("geometric"), and an MLP of offsets is evaluated.
    """
    source, target = Grid(*module.window_size), Grid(*size)
    if isinstance(module, RelPosMlp):
        trained = (0, 0)
        if module.mode == "swin":
            (a, b), (h, w) = module.pretrained_window_size, source[:2]
            trained = (a if a > 0 else h, b if b > 0 else w)
        constants = module.rel_coords_log
        coordinates = log_offsets(*target[:2], trained, dtype_name(constants.dtype), device=constants.device)
        rows = module.bias_act(module.mlp(coordinates))
        return pair_bias(rows if module.bias_gain is None else module.bias_gain * rows, target)
    if isinstance(module, RelPosBiasTf):  # it counts key minus query
        rows = module.relative_position_bias_table.flatten(1).flip(1).mT
        return pair_bias(resample_table(rows, source, target, "geometric"), target)
    return table_bias(module.relative_position_bias_table, source, target)


class Attention2d(maxxvit.Attention2d):
    """timm's attention of MaxViT and CoAtNet, for any map or L windows [B*L, C, h, w] with a mask [L*N, N] or None."""

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        h, w = x.shape[-2:]
        if self.head_first:
            q, k, v = self.qkv(x).flatten(2).unflatten(1, (self.num_heads, -1)).chunk(3, dim=2)
        else:
            q, k, v = self.qkv(x).flatten(2).unflatten(1, (3, self.num_heads, -1)).unbind(1)
        q, k, v = (t.mT.contiguous() for t in (q, k, v))
        bias = None if self.rel_pos is None else bias_on(self.rel_pos, (h, w))
        x = masked_attention(q, k, v, bias, mask, self.attn_drop).mT.flatten(1, 2).unflatten(2, (h, w))
        return self.proj_drop(self.proj(x))


class AttentionCl(maxxvit.AttentionCl):
    """timm's attention of MaxViT within L windows of N tokens, [B*L, N, C], with an additive mask [L*N, N] or None."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        if self.head_first:
            q, k, v = self.qkv(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2).chunk(3, dim=3)
        else:
            q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).transpose(1, 3).unbind(2)
        bias = None if self.rel_pos is None else bias_on(self.rel_pos, self.rel_pos.window_size)
        x = masked_attention(q, k, v, bias, mask, self.attn_drop).transpose(1, 2).flatten(2)
        return self.proj_drop(self.proj(x))


class PartitionAttentionCl(maxxvit.PartitionAttentionCl):
    """timm's block of MaxViT with attention in windows or strided windows (see `in_windows`), for any map [B, h, w, C]."""

    def _partition_attn(self, x: Tensor) -> Tensor:
        return in_windows(x, self.partition_size, self.attn, strided=not self.partition_block)


class ParallelPartitionAttention(maxxvit.ParallelPartitionAttention):
    """timm's block with attention in windows and strided windows (see `in_windows`) side by side, for any map [B, h, w, C]."""

    def _partition_attn(self, x: Tensor) -> Tensor:
        parts = [
            in_windows(x, self.partition_size, attn, strided=i == 1) for i, attn in enumerate((self.attn_block, self.attn_grid))
        ]
        return torch.cat(parts, -1)


class PartitionAttention2d(maxxvit.PartitionAttention2d):
    """timm's block of MaxViT with attention in windows or strided windows (see `in_windows`), for any map [B, C, h, w]."""

    def _partition_attn(self, x: Tensor) -> Tensor:
        def attend(tokens: Tensor, mask: Tensor | None) -> Tensor:
            maps = tokens.mT.unflatten(2, self.partition_size)  # [B*L, C, window]
            return self.attn(maps, mask=mask).flatten(2).mT

        x = in_windows(x.permute(0, 2, 3, 1), self.partition_size, attend, strided=not self.partition_block)
        return x.permute(0, 3, 1, 2)


class Conv2dSame(layers.Conv2dSame):
    """timm's convolution with TensorFlow's SAME padding, for a map [B, C, h, w] whose sides are multiples of the stride.

    The padding is then a constant, so a graph for any size compiles in seconds; timm computes it from the size of the map. All
    maps here have such sides, so they are not checked.
    """

    def forward(self, x: Tensor) -> Tensor:
        x = _pad_same(x, self.kernel_size, self.stride, self.dilation)
        return F.conv2d(x, self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


class AvgPool2dSame(TimmAvgPool2dSame):
    """timm's average pooling with TensorFlow's SAME padding, for maps whose sides are multiples of the stride."""

    def forward(self, x: Tensor) -> Tensor:
        return super(TimmAvgPool2dSame, self).forward(_pad_same(x, self.kernel_size, self.stride))


def _pad_same(x: Tensor, kernel: Size, stride: Size, dilation: Size = (1, 1)) -> Tensor:
    """Pad a map [B, C, h, w] with zeros, as TensorFlow's SAME; its sides must be multiples of the stride."""
    pads = pad_same_arg(stride, kernel, stride, dilation)  # the padding of a map of one stride is that of every multiple
    return F.pad(x, pads) if any(pads) else x


ADAPTER = Adapter(
    models=(maxxvit.MaxxVit,),
    exchanged={
        maxxvit.Attention2d: Attention2d,
        maxxvit.AttentionCl: AttentionCl,
        maxxvit.PartitionAttentionCl: PartitionAttentionCl,
        maxxvit.PartitionAttention2d: PartitionAttention2d,
        maxxvit.ParallelPartitionAttention: ParallelPartitionAttention,
        layers.Conv2dSame: Conv2dSame,
        TimmAvgPool2dSame: AvgPool2dSame,
    },
    position="table, or MLP of log offsets, in windows and strided windows; CoAtNet's over the whole grid",
    elsewhere="windows: nothing; CoAtNet: table geometric, MLP evaluated",
    multiple=32,
)
