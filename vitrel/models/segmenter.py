"""Segmentation: a backbone with a head that gives every pixel of an image logits, at any height and width.

The head "linear" is the linear probe of DINOv2 (arXiv 2304.07193, section 7.4): batch norm and one linear layer on the tokens.
"fpn" and "upernet" are decoders of segmentation_models_pytorch on `vitrel.models.pyramid`.
"""

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEADS = ("linear", "fpn", "upernet")
UNUSED = ("fc_norm", "attn_pool", "head_dist")  # parts of classifiers, which segmentation does not run


class Segmenter(nn.Module):
    """A backbone and a head of segmentation, images [B, 3, height, width] -> logits [B, num_classes, height, width].

    Logits are computed at the finest tokens and interpolated bilinearly, with the centers of pixels aligned (half-pixel
    convention). A vitrel backbone takes any height and width; other models those that they support.

    Args:
        backbone: a vitrel model, or a timm model with `forward_intermediates`; its classifier is removed, in place.
        num_classes: number of classes, of at least 1.
        head: "linear": batch norm and a 1x1 convolution on the last tokens, of a model with stages on those of all stages,
            upsampled to the finest and joined. "fpn" (arXiv 1612.03144) or "upernet" (arXiv 1807.10221): the decoders of
            segmentation_models_pytorch with their defaults, on maps with strides of 4, 8, 16 and 32 pixels.

    Raises:
        ValueError: an unknown head, or a model that gives no feature maps.
        MissingExtra: "fpn" or "upernet" without segmentation_models_pytorch.
    """

    def __init__(self, backbone: nn.Module, num_classes: int, head: str = "linear") -> None:
        super().__init__()
        if head not in HEADS:
            raise ValueError(f"unknown head {head!r} of segmentation: choose from {', '.join(HEADS)}")
        if not hasattr(backbone, "forward_intermediates") or not hasattr(backbone, "feature_info"):
            raise ValueError(f"{type(backbone).__name__} gives no feature maps, which segmentation needs: take a vitrel model")
        if num_classes < 1:
            raise ValueError(f"segmentation needs at least 1 class, not {num_classes}")
        backbone.reset_classifier(0)
        for name in UNUSED:
            if getattr(backbone, name, None) is not None:
                setattr(backbone, name, nn.Identity() if name == "fc_norm" else None)
        self.backbone, self.num_classes, self.head_name = backbone, num_classes, head
        levels = [(level["num_chs"], level["reduction"]) for level in _levels(backbone)]
        stages = len({reduction for _, reduction in levels}) > 1
        self.taken = len(levels) if stages else 1  # the last so many features
        self.reductions = [reduction for _, reduction in levels][-self.taken :]
        if head == "linear":
            width = sum(channels for channels, _ in levels[-self.taken :])
            self.head: nn.Module = nn.Sequential(nn.BatchNorm2d(width), nn.Conv2d(width, num_classes, 1))
            nn.init.normal_(self.head[1].weight, std=0.01)  # type: ignore[index]
            nn.init.zeros_(self.head[1].bias)  # type: ignore[index]
        else:
            from vitrel.models.decoders import Decoder

            self.head = Decoder(backbone, num_classes, head)

    def forward(self, image: Tensor) -> Tensor:
        height, width = image.shape[-2:]
        if self.head_name != "linear":
            return self.head(image)
        logits = self.head(self.tokens(image))
        return _enlarged(logits, self.reductions[0])[..., :height, :width]

    def tokens(self, image: Tensor) -> Tensor:
        """Return the tokens that the linear head reads, [B, 3, height, width] -> [B, C, h, w] at the finest stage."""
        maps = self.backbone.forward_intermediates(
            image, indices=self.taken, norm=True, output_fmt="NCHW", intermediates_only=True
        )
        finest, *others = maps
        h, w = finest.shape[-2:]
        # a stage may reach beyond the image, where its grid was rounded up
        factors = [reduction // self.reductions[0] for reduction in self.reductions[1:]]
        return torch.cat((finest, *(_enlarged(x, factor)[..., :h, :w] for x, factor in zip(others, factors, strict=True))), 1)

    @property
    def img_size(self) -> tuple[int, int]:
        """(h, w) in pixels of the backbone's input size."""
        return self.backbone.img_size

    @property
    def pretrained_cfg(self) -> dict[str, Any]:
        """The backbone's configuration of preprocessing, as timm keeps it."""
        return self.backbone.pretrained_cfg

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Turn activation checkpointing of the backbone's blocks on or off."""
        self.backbone.set_grad_checkpointing(enable)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return the backbone's layers, as timm's layer decay reads them; the head comes last."""

        def below(pattern: Any) -> Any:
            if isinstance(pattern, str):
                return re.sub(r"\^", r"^backbone\\.", pattern)
            return [(below(one), order) for one, order in pattern]

        return {name: below(pattern) for name, pattern in self.backbone.group_matcher(coarse).items()}

    def no_weight_decay(self) -> set[str]:
        """Return the names of the parameters without weight decay."""
        return {f"backbone.{name}" for name in self._of_backbone("no_weight_decay", set())}

    def position_parameters(self) -> set[str]:
        """Return the names of the parameters of position encodings."""
        return {f"backbone.{name}" for name in self._of_backbone("position_parameters", set())}

    def position_lr_scales(self) -> dict[str, float]:
        """Return {name: factor on the learning rate in fine-tuning} of the parameters of encodings in attention."""
        return {f"backbone.{name}": scale for name, scale in self._of_backbone("position_lr_scales", {}).items()}

    def _of_backbone(self, method: str, default: Any) -> Any:
        return getattr(self.backbone, method)() if hasattr(self.backbone, method) else default


def _levels(backbone: nn.Module) -> list[dict[str, Any]]:
    """The entries of timm's `feature_info`, a list or timm's FeatureInfo."""
    info = backbone.feature_info
    return list(info) if isinstance(info, list | tuple) else [dict(level) for level in info.info]


def _enlarged(x: Tensor, factor: int) -> Tensor:
    """Interpolate a map [B, C, h, w] to [B, C, factor h, factor w], bilinearly with the centers of pixels aligned."""
    if factor == 1:
        return x
    size = (x.shape[-2] * factor, x.shape[-1] * factor)
    return F.interpolate(x, size=size, mode="bilinear", align_corners=False)
