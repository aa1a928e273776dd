"""Plain ViTs that vitrel.models.ViT does not express (timm.models.vision_transformer, eva).

These are hybrid ViTs and ViTamin (a convolutional stem), AIMv2 (RMSNorm), parallel and differential blocks, normalized patches,
and Perception Encoder (a rotation that counts from 1). The absolute embedding is resampled from the trained one, a rotation is
computed for the grid of the image.
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm import layers
from timm.layers import Format, build_rotary_pos_embed
from timm.layers.pool2d_same import MaxPool2dSame as TimmMaxPool2dSame
from timm.models import eva, vision_transformer
from torch import Tensor

from vitrel.any_size.exchange import Adapter, AnySize
from vitrel.any_size.parts import Size, token_embedding
from vitrel.geometry import is_known
from vitrel.layers.patches import PatchEmbed


class _Embedding(AnySize):
    """Mixin of timm's ViT and EVA that adds prefix tokens and the absolute embedding, resampled to any grid.

    The patch embedding is set in place to return a map [B, h, w, C] of images of any size. ValueError if the trained image
    size is no multiple of the patches, or the model drops patches in training.
    """

    def adopted(self, model: Any) -> None:
        embed = model.patch_embed
        embed.flatten, embed.output_fmt, embed.strict_img_size = False, Format.NHWC, False
        embed.dynamic_img_pad = isinstance(embed, layers.PatchEmbed)
        whole = all(n % p == 0 for n, p in zip(embed.img_size, embed.patch_size, strict=True))
        if isinstance(embed, layers.PatchEmbed) and not whole:
            raise ValueError(f"its image size {embed.img_size} is no multiple of its patches of {embed.patch_size} pixels")
        if getattr(getattr(model, "patch_drop", None), "prob", 0):
            raise ValueError("it drops patches in training, which leaves no complete grid: build it with patch_drop_rate=0")

    def _tokens(self: Any, x: Tensor) -> Tensor:
        """Return P prefix tokens, then patches, [B, h, w, C] -> [B, P + h*w, C], plus the embedding of those that have one."""
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
    """timm's ViT for images of any size, made by `exchange`: the absolute embedding is resampled to the grid of patches."""

    def _pos_embed(self, x: Tensor) -> Tensor:
        return self.pos_drop(self._tokens(x))


class Eva(_Embedding, eva.Eva):
    """timm's EVA for images of any size, made by `exchange`: its embedding is resampled, its rotation computed for the grid."""

    def _pos_embed(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.pos_drop(self._tokens(x)), _rotation(self.rope, x.shape[1:3])


def _rotation(rope: Any, size: tuple[int, int]) -> Tensor | None:
    """Return timm's sines, then cosines, [h*w, 2D] (mixed [depth, H, h*w, 2D]) of `rope` on a grid (h, w); None for None."""
    if rope is None:
        return None
    trained = getattr(rope, "feat_shape", None)
    if trained is None or not hasattr(rope, "bands"):  # without a grid of its own, or with learned frequencies, for any grid
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


class StdConv2dSame(AnySize, layers.StdConv2dSame):
    """timm's convolution in the stem of hybrid ViTs; its SAME padding is computed in integers, as graphs for any size need."""

    def adopted(self, model: Any) -> None:
        self.pads, self.same_pad = self.same_pad, False

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_pad_same(x, self.kernel_size, self.stride, self.dilation) if self.pads else x)


class MaxPool2dSame(TimmMaxPool2dSame):
    """timm's max pooling in the stem of hybrid ViTs, padded with -inf as in `StdConv2dSame`."""

    def forward(self, x: Tensor) -> Tensor:
        x = _pad_same(x, self.kernel_size, self.stride, self.dilation, -float("inf"))
        return F.max_pool2d(x, self.kernel_size, self.stride, 0, self.dilation, self.ceil_mode)


def _pad_same(x: Tensor, kernel: Size, stride: Size, dilation: Size, value: float = 0.0) -> Tensor:
    """Pad a map [B, C, h, w] with `value` as TensorFlow's SAME, so that a side of n gives ceil(n / stride) results.

    The end of a side gets the larger half of its padding.
    """
    pads: list[Any] = []
    for n, k, s, d in zip(x.shape[-2:], kernel, stride, dilation, strict=True):
        pad = torch.sym_max(((n + s - 1) // s - 1) * s + (k - 1) * d + 1 - n, 0)
        pads = [pad // 2, pad - pad // 2, *pads]
    return F.pad(x, pads, value=value)


ADAPTER = Adapter(
    models=(vision_transformer.VisionTransformer, eva.Eva),
    exchanged={
        vision_transformer.VisionTransformer: VisionTransformer,
        eva.Eva: Eva,
        layers.StdConv2dSame: StdConv2dSame,
        TimmMaxPool2dSame: MaxPool2dSame,
        layers.PatchEmbed: PatchEmbed,
    },
    position="absolute; PE: a rotation too",
    elsewhere="absolute bicubic, as timm's dynamic_img_size; rotation evaluated",
)
