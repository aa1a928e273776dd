"""Models whose trunk adds an absolute embedding (timm.models.cait, convit, crossvit, nest, pit, tnt, visformer, volo, xcit).

The embedding is resampled from the trained one to the grid of the image. ConViT's gated attention also evaluates a linear
function of the offset, XCiT's embedding is a Fourier encoding, which its trunk evaluates for any grid.
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm import layers
from timm.models import cait, convit, crossvit, nest, pit, tnt, visformer, volo, xcit
from torch import Tensor

from vitrel.any_size.exchange import Adapter, AnySize
from vitrel.any_size.parts import in_windows, map_embedding, masked_attention, pair_bias, token_embedding
from vitrel.geometry import cached_geometry, dtype_name
from vitrel.grid import Grid
from vitrel.layers.patches import PatchEmbed


class _Patches(AnySize):
    """Mixin of models that start with timm's PatchEmbed and add an absolute embedding to its patches.

    The PatchEmbed is set in place to return a map and to pad images of any size to whole patches; the embedding is resampled.
    ValueError if the trained image size is no multiple of the patches.
    """

    def adopted(self: Any, model: Any) -> None:
        embed = self.patch_embed
        if any(n % p for n, p in zip(embed.img_size, embed.patch_size, strict=True)):
            raise ValueError(f"its image size {embed.img_size} is no multiple of its patches of {embed.patch_size} pixels")
        embed.flatten, embed.strict_img_size, embed.dynamic_img_pad = False, False, True

    def _embedded(self: Any, image: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Return an image's patches plus the resampled absolute embedding (if any), [B, h*w, C], and their grid (h, w)."""
        x = self.patch_embed(image)  # [B, C, h, w]
        size = x.shape[-2:]
        x = x.flatten(2).mT
        if getattr(self, "pos_embed", None) is not None:
            x = x + token_embedding(self.pos_embed, self.patch_embed.grid_size, size)
        return self.pos_drop(x), size


class Cait(_Patches, cait.Cait):
    """timm's CaiT, for images of any size, padded to whole patches: the absolute embedding is resampled to their grid."""

    def forward_features(self, x: Tensor) -> Tensor:
        x, _ = self._embedded(x)
        x = self.blocks(x)
        return self.norm(x if self.blocks_token_only is None else self.forward_cls(x))


class GPSA(convit.GPSA):
    """timm's gated attention of ConViT (arXiv 2103.10697, eq. 7), which depends on offsets, over any map [B, h, w, C]."""

    def forward(self, x: Tensor) -> Tensor:
        h, w = x.shape[1:3]
        x = x.flatten(1, 2)
        q, k = self.qk(x).unflatten(2, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        v = self.v(x).unflatten(2, (self.num_heads, -1)).transpose(1, 2)
        rows = self.pos_proj(_polynomial(h, w, dtype_name(x.dtype), device=x.device))
        content = ((q @ k.mT) * self.scale).softmax(-1)
        gate = self.gating_param[:, None, None].sigmoid()
        weights = (1 - gate) * content + gate * pair_bias(rows, Grid(h, w)).softmax(-1)
        weights = self.attn_drop(weights / weights.sum(-1, keepdim=True))
        return self.proj_drop(self.proj((weights @ v).transpose(1, 2).flatten(2))).unflatten(1, (h, w))


@cached_geometry
def _polynomial(h: int, w: int, dtype: str, device: torch.device) -> Tensor:
    """Return (dx, dy, dx^2 + dy^2), key minus query in patches, of each offset class (see Grid), [R, 3] of the type `dtype`."""
    y, x = Grid(h, w).offsets(device=device).to(getattr(torch, dtype)).unbind(-1)
    return torch.stack((-x, -y, y * y + x * x), -1)


class ConVit(_Patches, convit.ConVit):
    """timm's ConViT, for images of any size: its embedding is resampled; the class token joins after the gated layers."""

    def forward_features(self, x: Tensor) -> Tensor:
        x, size = self._embedded(x)
        x = x.unflatten(1, size)
        for i, block in enumerate(self.blocks):
            if i == self.local_up_to_layer:
                x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x.flatten(1, 2)), 1)
            x = block(x)
        return self.norm(x)


class CrossVit(AnySize, crossvit.CrossVit):
    """timm's CrossViT, for images of any size.

    Each branch multiplies the image's sides by its own trained size / the model's, rounded to whole patches, and resamples its
    absolute embedding. If this factor is 1, the first branch takes the image as it is, without pixels beyond the last patch.
    """

    def adopted(self, model: Any) -> None:
        self.trained_sizes = [embed.img_size for embed in self.patch_embed]

    def _embed(self, x: Tensor) -> list[Tensor]:
        branches = []
        for i, (embed, trained) in enumerate(zip(self.patch_embed, self.trained_sizes, strict=True)):
            if i == 0 and tuple(trained) == tuple(self.img_size):
                image, grid = x, [n // p for n, p in zip(x.shape[-2:], embed.patch_size, strict=True)]
            else:
                grid = [
                    torch.sym_max(1, (2 * n * m + p * full) // (2 * p * full))  # n * m / full pixels, to the nearest patch
                    for n, m, full, p in zip(x.shape[-2:], trained, self.img_size, embed.patch_size, strict=True)
                ]
                size = [n * p for n, p in zip(grid, embed.patch_size, strict=True)]
                image = crossvit.scale_image(x, size, self.crop_scale)
            tokens = embed.proj(image).flatten(2).mT
            tokens = torch.cat((getattr(self, f"cls_token_{i}").expand(x.shape[0], -1, -1), tokens), 1)
            source = tuple(n // p for n, p in zip(trained, embed.patch_size, strict=True))
            position = token_embedding(getattr(self, f"pos_embed_{i}"), source, tuple(grid), prefix=1)
            branches.append(self.pos_drop(tokens + position))
        return branches


class NestAttention(nest.Attention):
    """timm's attention of a nested transformer, within L blocks of N tokens [B*L, N, C], with a mask [L*N, N] or None."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        # timm permutes (heads, T, N, width) to (T, N, width, heads), so channels of heads alternate
        x = masked_attention(q, k, v, None, mask, self.attn_drop).permute(0, 2, 3, 1).flatten(2)
        return self.proj_drop(self.proj(x))


class NestLevel(nest.NestLevel):
    """timm's level of a nested transformer (arXiv 2105.12723), for any map [B, C, h, w]; its blocks keep their size in tokens.

    The absolute embedding [1, T, N, C] of T blocks of N tokens is resampled as one map. No token sees the padding of blocks.
    """

    def forward(self, x: Tensor) -> Tensor:
        def encode(x: Tensor, mask: Tensor | None) -> Tensor:
            for layer in self.transformer_encoder:
                x = x + layer.drop_path1(layer.attn(layer.norm1(x), mask))
                x = x + layer.drop_path2(layer.mlp(layer.norm2(x)))
            return x

        x = self.pool(x).permute(0, 2, 3, 1)
        n, across = self.block_size, round(self.pos_embed.shape[1] ** 0.5)
        whole = self.pos_embed.unflatten(2, (n, n)).unflatten(1, (across, across)).transpose(2, 3)
        whole = whole.flatten(1, 2).flatten(2, 3).permute(0, 3, 1, 2)  # [1, C, h, w]
        x = x + map_embedding(whole, x.shape[1:3]).permute(0, 2, 3, 1)
        return in_windows(x, (n, n), encode).permute(0, 3, 1, 2)


class Nest(_Patches, nest.Nest):
    """timm's nested transformer, for images whose sides are multiples of 16 pixels; its levels are those of `NestLevel`."""


class PoolingVisionTransformer(pit.PoolingVisionTransformer):
    """timm's PiT, for images of any size: the absolute embedding is resampled to the map of patches."""

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        x = self.pos_drop(x + map_embedding(self.pos_embed, x.shape[-2:]))
        _, classes = self.transformers((x, self.cls_token.expand(x.shape[0], -1, -1)))
        return self.norm(classes)


class PixelEmbed(tnt.PixelEmbed):
    """timm's embedding of the n "pixels" of each of N patches plus `pixel_pos` (one for all), [B, 3, H, W] -> [B*N, n, C]."""

    def forward(self, x: Tensor, pixel_pos: Tensor) -> Tensor:
        size: Any = self.new_patch_size if self.legacy else self.patch_size
        channels = self.in_dim if self.legacy else x.shape[1]
        x = self.unfold(self.proj(x) if self.legacy else x).mT.flatten(0, 1).unflatten(1, (channels, *size))
        x = (x if self.legacy else self.proj(x)) + pixel_pos
        return x.flatten(2).mT


class TransformerInTransformer(tnt.TNT):
    """timm's Transformer in Transformer, for any image of whole patches: the absolute embedding of patches is resampled."""

    def forward_features(self, x: Tensor) -> Tensor:
        size = self.pixel_embed.dynamic_feat_size(x.shape[-2:])
        pixels = self.pixel_embed(x, self.pixel_pos)
        patches = self.norm2_proj(self.proj(self.norm1_proj(pixels.flatten(1).unflatten(0, (x.shape[0], -1)))))
        patches = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), patches), 1)
        patches = self.pos_drop(patches + token_embedding(self.patch_pos, self.pixel_embed.grid_size, size, prefix=1))
        for block in self.blocks:
            pixels, patches = block(pixels, patches)
        return self.norm(patches)


class Visformer(visformer.Visformer):
    """timm's Visformer, for images of any size: the absolute embedding of each stage is resampled to its map."""

    def forward_features(self, x: Tensor) -> Tensor:
        x = x if self.stem is None else self.stem(x)
        for i in (1, 2, 3):
            embed, position = getattr(self, f"patch_embed{i}"), getattr(self, f"pos_embed{i}")
            x = x if embed is None else embed(x)
            x = x if position is None else self.pos_drop(x + map_embedding(position, x.shape[-2:]))
            x = getattr(self, f"stage{i}")(x)
        return self.norm(x)


class VisionOutlooker(volo.VOLO):
    """timm's VOLO, for images of any size: the absolute embedding, added after the outlook layers, is resampled."""

    def forward_tokens(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.network):
            if i == 2 and self.pos_embed is not None:
                position = map_embedding(self.pos_embed.permute(0, 3, 1, 2), x.shape[1:3])
                x = self.pos_drop(x + position.permute(0, 2, 3, 1))
            x = block(x)
        return x.flatten(1, 2)


class OutlookAttention(volo.OutlookAttention):
    """timm's outlook attention of VOLO, for any map [B, h, w, C], without timm's math.ceil, which fixes sizes in a graph."""

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[1:3]
        k, s = self.kernel_size, self.stride
        weights = self.pool(x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1).flatten(1, 2)  # [B, N, C]
        v = self.unfold(self.v(x).permute(0, 3, 1, 2)).unflatten(1, (self.num_heads, -1, k * k)).permute(0, 1, 4, 3, 2)
        weights = self.attn(weights).unflatten(2, (self.num_heads, k * k, k * k)).transpose(1, 2)
        weights = self.attn_drop((weights * self.scale).softmax(-1))
        x = (weights @ v).permute(0, 1, 4, 3, 2).flatten(1, 3)  # [B, C*k*k, N]
        x = F.fold(x, (height, width), k, padding=self.padding, stride=s)
        return self.proj_drop(self.proj(x.permute(0, 2, 3, 1)))


_BICUBIC = "absolute bicubic"
_PATCHES = {layers.PatchEmbed: PatchEmbed}
CAIT = Adapter((cait.Cait,), {cait.Cait: Cait} | _PATCHES, "absolute", _BICUBIC)
CONVIT = Adapter(
    (convit.ConVit,),
    {convit.ConVit: ConVit, convit.GPSA: GPSA} | _PATCHES,
    "absolute; in gated layers a linear function of offset and squared distance",
    f"{_BICUBIC}; function evaluated",
)
CROSSVIT = Adapter(
    (crossvit.CrossVit,),
    {crossvit.CrossVit: CrossVit},
    "absolute, in each branch",
    f"{_BICUBIC} (timm: resizes the image to its own size)",
)
NEST = Adapter(
    (nest.Nest,),
    {nest.Nest: Nest, nest.NestLevel: NestLevel, nest.Attention: NestAttention} | _PATCHES,
    "absolute, at each level",
    _BICUBIC,
    multiple=16,
)
PIT = Adapter((pit.PoolingVisionTransformer,), {pit.PoolingVisionTransformer: PoolingVisionTransformer}, "absolute", _BICUBIC)
TNT = Adapter(
    (tnt.TNT,),
    {tnt.TNT: TransformerInTransformer, tnt.PixelEmbed: PixelEmbed},
    "absolute, of patches and of pixels in a patch",
    _BICUBIC,
)
VISFORMER = Adapter((visformer.Visformer,), {visformer.Visformer: Visformer} | _PATCHES, "absolute, at each stage", _BICUBIC)
VOLO = Adapter(
    (volo.VOLO,),
    {volo.VOLO: VisionOutlooker, volo.OutlookAttention: OutlookAttention},
    "absolute, after the outlook layers",
    _BICUBIC,
)
XCIT = Adapter((xcit.Xcit,), {}, "Fourier encoding of the relative place on the grid, added to tokens", "evaluated, as in timm")
