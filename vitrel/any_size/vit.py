"""Plain ViTs that vitrel.models.ViT does not express (timm.models.vision_transformer, eva).

These are hybrid ViTs and ViTamin (a convolutional stem), AIMv2 (RMSNorm), parallel and differential blocks, normalized patches,
Perception Encoder (a rotation that counts from 1), and SAM's encoder with its neck. The absolute embedding is resampled from
the trained one, a rotation is computed for the grid of the image.
"""

from typing import Any

import torch
from timm.layers import Format, PatchEmbed, build_rotary_pos_embed
from timm.models import eva, vision_transformer
from torch import Tensor

from vitrel.any_size.exchange import Adapter, AnySize
from vitrel.any_size.parts import token_embedding
from vitrel.geometry import is_known


class _Embedding(AnySize):
    """The trunk's way from patches [B, h, w, C] to tokens [B, P + h*w, C], for any grid."""

    def adopted(self, model: Any) -> None:
        embed = model.patch_embed
        embed.flatten, embed.output_fmt, embed.strict_img_size = False, Format.NHWC, False
        embed.dynamic_img_pad = isinstance(embed, PatchEmbed)
        whole = all(n % p == 0 for n, p in zip(embed.img_size, embed.patch_size, strict=True))
        if isinstance(embed, PatchEmbed) and not whole:
            raise ValueError(f"its image size {embed.img_size} is no multiple of its patches of {embed.patch_size} pixels")
        if getattr(getattr(model, "patch_drop", None), "prob", 0):
            raise ValueError("it drops patches in training, which leaves no complete grid: build it with patch_drop_rate=0")

    def _tokens(self: Any, x: Tensor) -> Tensor:
        h, w = x.shape[1:3]
        x = x.flatten(1, 2)
        prefix = [token.expand(x.shape[0], -1, -1) for token in (self.cls_token, self.reg_token) if token is not None]
        if self.pos_embed is None:
            return torch.cat((*prefix, x), 1) if prefix else x
        fixed = 0 if self.no_embed_class else self.num_prefix_tokens
        position = token_embedding(self.pos_embed, self.patch_embed.grid_size, (h, w), fixed)
        if self.no_embed_class:
            x = x + position
        if prefix:
            x = torch.cat((*prefix, x), 1)
        return x if self.no_embed_class else x + position


class VisionTransformer(_Embedding, vision_transformer.VisionTransformer):
    """timm's ViT with an absolute embedding for any grid."""

    def _pos_embed(self, x: Tensor) -> Tensor:
        return self.pos_drop(self._tokens(x))


class Eva(_Embedding, eva.Eva):
    """timm's EVA with an absolute embedding and a rotation for any grid."""

    def _pos_embed(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.pos_drop(self._tokens(x)), _rotation(self.rope, x.shape[1:3])


def _rotation(rope: Any, size: tuple[int, int]) -> Tensor | None:
    """Return the sines and cosines [N, 2D] of timm's rotary encoding on a grid of `size` (h, w) patches."""
    if rope is None:
        return None
    trained = getattr(rope, "feat_shape", None)
    if trained is None:
        return rope.get_embed(shape=size)
    if is_known(*size) and tuple(size) == tuple(trained):
        return rope.get_embed()
    sines_cosines = build_rotary_pos_embed(
        size,
        bands=rope.bands,
        in_pixels=rope.in_pixels,
        ref_feat_shape=rope.ref_feat_shape,
        grid_offset=rope.grid_offset,
        grid_indexing=rope.grid_indexing,
        rotate_half=rope.rotate_half,
        device=rope.bands.device,
        dtype=rope.pos_embed.dtype,
    )
    return torch.cat(sines_cosines, -1)


ADAPTER = Adapter(
    models=(vision_transformer.VisionTransformer, eva.Eva),
    exchanged={vision_transformer.VisionTransformer: VisionTransformer, eva.Eva: Eva},
    position="absolute; PE: a rotation too",
    elsewhere="absolute bicubic, as timm's dynamic_img_size; rotation evaluated",
)
