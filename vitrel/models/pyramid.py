"""Feature pyramid of a ViT or Swin, at any image size: maps of several strides, as detectors and decoders take them.

A Swin has a stage for each stride. A ViT has one stride, from whose last block all maps are made by transposed convolutions and
pooling: the simple feature pyramid of ViTDet (arXiv 2203.16527).
"""

import math
from collections.abc import Sequence

from timm.layers import LayerNorm2d
from timm.models._features import FeatureInfo
from torch import Tensor, nn


def pyramid(model: nn.Module, strides: Sequence[int] = (4, 8, 16, 32), channels: int | None = None) -> "Pyramid":
    """Return the feature pyramid of a model.

    Args:
        model: a ViT or Swin of vitrel, or a model of timm that has `forward_intermediates`. It becomes a part of the pyramid
            and loses its head, its final norm and the blocks after the last one that is used.
        strides: of the maps in pixels, fine to coarse. A map is made from features of the nearest stride, of two the finer.
        channels: the width of all maps, made by a 1x1 and a 3x3 convolution with norms, as ViTDet feeds them to its heads.
            None: every map has its own width, for an FPN or a decoder that projects them.

    Raises:
        ValueError: the model has no features, the strides are not in ascending order, or one is not its source's times 2**i.
    """
    return Pyramid(model, strides, channels)


class Pyramid(nn.Module):
    """Model of maps by stride: [B, in_chans, height, width] -> {"0": [B, C_0, ceil(height / s_0), ceil(width / s_0)], ...}.

    The map of a stride s_i has the name str(i). One that is finer than the stage it is made from is cropped to the cells that
    the image reaches. The arguments are those of `pyramid`.

    Attributes:
        feature_info: timm's FeatureInfo; its channels() and reduction() are those of the maps.
        out_channels: the width of all maps, where `channels` sets it; else a list with that of each.
    """

    def __init__(self, model: nn.Module, strides: Sequence[int], channels: int | None = None):
        super().__init__()
        if not hasattr(model, "forward_intermediates") or not hasattr(model, "feature_info"):
            raise ValueError(f"{type(model).__name__} has no forward_intermediates: a pyramid takes a ViT or a Swin")
        if min(strides, default=0) < 1 or [*strides] != sorted({*strides}):
            raise ValueError(f"strides must be given from fine to coarse, each once, not {tuple(strides)}")
        last = {info["reduction"]: i for i, info in enumerate(model.feature_info)}  # {stride: last block or stage with it}
        sources, steps = [], []
        for stride in strides:
            source = min(last, key=lambda own: abs(math.log2(own / stride)))
            step = math.log2(source / stride)
            if not step.is_integer():
                raise ValueError(f"stride {stride} is no power of 2 times one of the model's, {', '.join(map(str, last))}")
            sources.append(last[source])
            steps.append(int(step))
        widths = [model.feature_info[i]["num_chs"] for i in sources]
        self.indices, self.sources, self.strides = sorted({*sources}), sources, tuple(strides)
        model.prune_intermediate_layers(self.indices, prune_norm=True, prune_head=True)
        self.body = model
        self.rescale = nn.ModuleList(_rescale(width, step) for width, step in zip(widths, steps, strict=True))
        widths = [max(width >> max(step, 0), 1) for width, step in zip(widths, steps, strict=True)]
        self.project = nn.ModuleList(nn.Identity() if channels is None else _project(width, channels) for width in widths)
        widths = widths if channels is None else [channels] * len(widths)
        self.out_channels = widths if channels is None else channels
        maps = zip(widths, strides, strict=True)
        info = [dict(num_chs=c, reduction=s, module=f"project.{i}") for i, (c, s) in enumerate(maps)]
        self.feature_info = FeatureInfo(info, out_indices=tuple(range(len(info))))

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        h, w = image.shape[-2:]
        features = self.body.forward_intermediates(image, indices=self.indices, intermediates_only=True)
        by_index = dict(zip(self.indices, features, strict=True))
        maps = {}
        for i, (source, stride) in enumerate(zip(self.sources, self.strides, strict=True)):
            x = self.rescale[i](by_index[source])
            maps[str(i)] = self.project[i](x[..., : -(-h // stride), : -(-w // stride)])
        return maps


def _rescale(width: int, step: int) -> nn.Module:
    """Return layers that double the sides of a map and halve its `width` channels, `step` times; an identity for 0.

    If step is negative they divide the sides by 2**-step, rounded up, by max pooling, and keep the channels.
    """
    if step <= 0:
        return nn.MaxPool2d(2**-step, ceil_mode=True) if step else nn.Identity()
    layers: list[nn.Module] = []
    for i in range(step):
        layers += [LayerNorm2d(width >> i), nn.GELU()] if i else []
        layers.append(nn.ConvTranspose2d(width >> i, width >> (i + 1), kernel_size=2, stride=2))
    return nn.Sequential(*layers)


def _project(width: int, channels: int) -> nn.Module:
    """Return a 1x1 and a 3x3 convolution with norms, from `width` to `channels` channels, which keep the sides of a map."""
    return nn.Sequential(
        nn.Conv2d(width, channels, kernel_size=1, bias=False),
        LayerNorm2d(channels),
        nn.Conv2d(channels, channels, kernel_size=3, padding=1, bias=False),
        LayerNorm2d(channels),
    )
