"""Models whose position is a convolution of the tokens (timm.models.coat, twins, davit and others), and models of timm that
evaluate or resample their position for any grid themselves.

CPE and PEG (arXiv 2102.10882) are depthwise convolutions, which see the zeros beyond the border. Nothing is resampled; CoaT's
fixed image size is lifted, and windows and pooling are written so that one graph serves any size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm.models import coat, davit, edgenext, efficientvit_msra, naflexvit, pvt_v2, twins
from timm.models.csatv2 import CSATv2
from timm.models.csatv2 import SpatialAttention as TimmSpatialAttention
from torch import Tensor

from vitrel.any_size.exchange import Adapter
from vitrel.any_size.parts import Size, in_padded_windows, masked_attention
from vitrel.geometry import cached_geometry, dtype_name, is_known
from vitrel.layers.block import pad_to_even
from vitrel.position.fourier import fourier_waves
from vitrel.position.terms import upcast


class CoaT(coat.CoaT):
    """timm's CoaT without timm's check of the image size: sides may be any multiples of the last stage's patches, 32 pixels."""

    def forward_features(self, x0: Tensor) -> Any:
        x, outputs, sizes = x0, [], []
        for i in (1, 2, 3, 4):
            embed = getattr(self, f"patch_embed{i}")
            x = embed.proj(x)
            sizes.append(tuple(x.shape[-2:]))
            x = coat.insert_cls(embed.norm(x.flatten(2).mT), getattr(self, f"cls_token{i}"))
            for block in getattr(self, f"serial_blocks{i}"):
                x = block(x, size=sizes[-1])
            outputs.append(x)
            x = coat.remove_cls(x).mT.unflatten(2, sizes[-1]).contiguous()
        if self.parallel_blocks is None:
            return self.norm4(outputs[-1])
        x1, x2, x3, x4 = outputs
        for block in self.parallel_blocks:
            x2, x3, x4 = self.cpe2(x2, sizes[1]), self.cpe3(x3, sizes[2]), self.cpe4(x4, sizes[3])
            x1, x2, x3, x4 = block(x1, x2, x3, x4, sizes=sizes)
        return [self.norm2(x2), self.norm3(x3), self.norm4(x4)]


class LocallyGroupedAttention(twins.LocallyGroupedAttn):
    """timm's windowed attention of Twins, for any grid; tokens [B, h*w, C] attend to the zeros that pad windows, as in timm."""

    def forward(self, x: Tensor, size: Size) -> Tensor:
        window = (self.ws, self.ws)

        def attend(tokens: Tensor) -> Tensor:
            qkv = self.qkv(tokens.flatten(1, 2)).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
            q, k, v = qkv.unbind(0)
            out = masked_attention(q, k, v, None, None, self.attn_drop)
            return out.transpose(1, 2).flatten(2).unflatten(1, window)

        return self.proj_drop(self.proj(in_padded_windows(x.unflatten(1, size), window, attend).flatten(1, 2)))


class FourierTokens(edgenext.PositionalEncodingFourier):
    """timm's Fourier encoding of EdgeNeXt, (B, h, w) -> [B, C, h, w], with sines and cosines cached by vitrel.geometry."""

    def forward(self, shape: tuple[int, int, int]) -> Tensor:
        weight = self.token_projection.weight
        bands, base = self.hidden_dim, float(self.temperature)
        waves = fourier_waves(*shape[1:], bands, base, "float32", device=weight.device)  # [h*w, 2 * bands]
        waves = waves.mT.unflatten(1, shape[1:])[None]
        return self.token_projection(waves.to(weight.dtype)).expand(shape[0], -1, -1, -1)


class Stem(davit.Stem):
    """timm's patch embedding of DaViT without its padding to whole strides: the convolution's own gives the same result."""

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class Downsample(davit.Downsample):
    """timm's downsampling of DaViT, [B, C, h, w] -> [B, C', ceil(h/2), ceil(w/2)], whose graph serves any size."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.conv(pad_to_even(pad_to_even(x, 2), 3) if self.even_k else x)


class SpatialBlock(davit.SpatialBlock):
    """timm's block of DaViT with windows, for any map [B, C, h, w]; tokens attend to the zeros that pad windows, as in timm."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.cpe1(x).permute(0, 2, 3, 1)
        attended = in_padded_windows(
            self.norm1(x), self.window_size, lambda tokens: self.attn(tokens.flatten(1, 2)).unflatten(1, self.window_size)
        )
        x = self.cpe2((x + self.drop_path1(attended)).permute(0, 3, 1, 2))
        if self.mlp is None:
            return x
        x = x.permute(0, 2, 3, 1)
        return (x + self.drop_path2(self.mlp(self.norm2(x)))).permute(0, 3, 1, 2)


class LocalWindowAttention(efficientvit_msra.LocalWindowAttention):
    """timm's windowed attention of EfficientViT, for any map [B, C, h, w]; tokens attend to padding, as in timm."""

    def forward(self, x: Tensor) -> Tensor:
        window = (self.attn.resolution, self.attn.resolution)
        x = in_padded_windows(
            x.permute(0, 2, 3, 1), window, lambda tokens: self.attn(tokens.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        )
        return x.permute(0, 3, 1, 2)


class CascadedGroupAttention(efficientvit_msra.CascadedGroupAttention):
    """timm's attention of EfficientViT, which reads its biases from the table in every pass; timm caches them in evaluation."""

    def get_attention_biases(self, device: torch.device) -> Tensor:
        return self.attention_biases[:, self.attention_bias_idxs]


class SpatialAttention(TimmSpatialAttention):
    """timm's spatial attention of CSATv2; in a graph for any size, matrices of `adaptive_means` replace timm's pooling."""

    def forward(self, x: Tensor) -> Tensor:
        if is_known(*x.shape[-2:]):
            return super().forward(x)
        x = torch.cat((x.mean(1, keepdim=True), x.amax(1, keepdim=True)), 1)
        rows, columns = (
            adaptive_means(n, to, dtype_name(x.dtype), device=x.device)
            for n, to in zip(x.shape[-2:], self.avgpool.output_size, strict=True)
        )
        return self.attn(self.conv(rows @ x @ columns.mT))


@cached_geometry
def adaptive_means(n: int, bins: int, dtype: str, device: torch.device) -> Tensor:
    """Return the matrix of adaptive average pooling from n values to `bins` means, [bins, n], of the type named `dtype`.

    Mean i is that of the values floor(i n / bins) to ceil((i + 1) n / bins) - 1, as in torch.
    """
    bin, place = torch.arange(bins, device=device)[:, None], torch.arange(n, device=device)
    first, last = bin * n // bins, ((bin + 1) * n + bins - 1) // bins
    inside = ((place >= first) & (place < last)).to(getattr(torch, dtype))
    return inside / (last - first)


class NaFlexEmbeds(naflexvit.NaFlexEmbeds):
    """timm's embedding of NaFlexViT; its factorized position (rows + columns) needs no branch on which side is longer."""

    def _apply_factorized_pos_embed(self, x: Tensor, grid_size: list[int]) -> None:
        h, w = grid_size
        lengths = (torch.sym_max(h, w),) * 2 if self.pos_embed_ar_preserving else (h, w)
        rows = _interpolated(self.pos_embed_y, lengths[0], h).to(x.dtype)
        columns = _interpolated(self.pos_embed_x, lengths[1], w).to(x.dtype)
        x.add_((rows[:, :, None] + columns[:, None]).flatten(1, 2))


def _interpolated(table: Tensor, length: int, count: int) -> Tensor:
    """Return the first `count` rows, [1, count, C], of a table [1, n, C] that is interpolated linearly to `length` rows."""
    if not is_known(length) or length != table.shape[1]:
        table = F.interpolate(upcast(table).mT, size=length, mode="linear").mT
    return table[:, :count] if is_known(length) else table.index_select(1, torch.arange(count, device=table.device))


_NOTHING = "nothing"
COAT = Adapter((coat.CoaT,), {coat.CoaT: CoaT}, "convolutions of the tokens (CPE) and of the values", _NOTHING, multiple=32)
TWINS = Adapter(
    (twins.Twins,),
    {twins.LocallyGroupedAttn: LocallyGroupedAttention},
    "convolutions of the tokens (PEG)",
    _NOTHING,
    multiple=32,
)
PVT_V2 = Adapter((pvt_v2.PyramidVisionTransformerV2,), {}, "none: its convolutions see the border", _NOTHING)
DAVIT = Adapter(
    (davit.DaVit,),
    {davit.Stem: Stem, davit.Downsample: Downsample, davit.SpatialBlock: SpatialBlock},
    "convolutions of the tokens (CPE)",
    _NOTHING,
)
CSATV2 = Adapter(
    (CSATv2,),
    {TimmSpatialAttention: SpatialAttention},
    "convolutions of the tokens",
    _NOTHING,
    multiple=32,
)
EDGENEXT = Adapter(
    (edgenext.EdgeNeXt,),
    {edgenext.PositionalEncodingFourier: FourierTokens},
    "Fourier encoding added to tokens",
    "evaluated, as in timm",
    multiple=32,
)
EFFICIENTVIT = Adapter(
    (efficientvit_msra.EfficientVitMsra,),
    {
        efficientvit_msra.LocalWindowAttention: LocalWindowAttention,
        efficientvit_msra.CascadedGroupAttention: CascadedGroupAttention,
    },
    "table over distances in rows and in columns in windows",
    "nothing resampled; padding attended to, as in timm",
)
NAFLEXVIT = Adapter(
    (naflexvit.NaFlexVit,),
    {naflexvit.NaFlexEmbeds: NaFlexEmbeds},
    "absolute, or factorized: rows plus columns, added to tokens",
    "absolute bicubic, factorized linear, as in timm",
    multiple=16,
)
