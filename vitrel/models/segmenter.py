"""Segmentation: a backbone with a head that gives every pixel of an image logits, at any height and width.

The head "linear" is one linear layer on the tokens, as in the linear probe of DINOv2 (arXiv 2304.07193, section 7.4), but
without its batch norm, with which a Swin loses 9 to 12 points of mIoU on larger canvases of `shapes-dense`. "fpn" (arXiv
1612.03144) and "upernet" (arXiv 1807.10221) are decoders of segmentation_models_pytorch on `vitrel.pyramid`.
"""

import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrel.common.extras import require
from vitrel.models.pyramid import Pyramid

HEADS = ("linear", "fpn", "upernet")
STRIDES = (4, 8, 16, 32)  # pixels, of the maps that decoders take
BODY = "features.body."  # what the names of the backbone's parameters begin with in a Segmenter
_UNUSED = ("fc_norm", "attn_pool", "head_dist")  # parts of classifiers, which segmentation does not run


class Segmenter(nn.Module):
    """A backbone and a head of segmentation, images [B, 3, height, width] -> logits [B, num_classes, height, width].

    Logits are computed at the finest tokens, or at a stride of 4 pixels by a decoder, and interpolated bilinearly with the
    centers of pixels aligned (half-pixel convention). A vitrel backbone takes any height and width; other models those that
    they support.

    Args:
        backbone: a vitrel model, or a timm model with `forward_intermediates`; it becomes a part of the model and loses its
            classifier, in place.
        num_classes: number of classes, at least 1.
        head: "linear": a 1x1 convolution on the tokens of the last block or, if strides differ, of all stages,
            upsampled to the finest and joined. "fpn" or "upernet": the decoders of segmentation_models_pytorch with their
            defaults, on maps with strides of 4, 8, 16 and 32 pixels.

    Raises:
        ValueError: an unknown head, fewer than 1 class, or a model that gives no feature maps.
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
        for name in _UNUSED:
            if getattr(backbone, name, None) is not None:
                setattr(backbone, name, nn.Identity() if name == "fc_norm" else None)
        self.num_classes, self.head_name = num_classes, head
        if head == "linear":
            self.features: Tokens | Pyramid = Tokens(backbone)
            self.stride, width = self.features.stride, self.features.width
            self.head: nn.Module = nn.Conv2d(width, num_classes, 1)
        else:
            self.features, self.stride = Pyramid(backbone, STRIDES), STRIDES[0]
            self.head = Decoder(self.features.out_channels, num_classes, head)  # type: ignore[arg-type]

    def forward(self, image: Tensor) -> Tensor:
        height, width = image.shape[-2:]
        if self.head_name != "linear":  # decoders double their maps, which must have sides of whole strides
            image = F.pad(image, (0, -width % STRIDES[-1], 0, -height % STRIDES[-1]))
        return _enlarged(self.head(self.features(image)), self.stride)[..., :height, :width]

    @property
    def backbone(self) -> nn.Module:
        """The model whose features the head reads."""
        return self.features.body

    def with_backbone(self, backbone: nn.Module) -> "Segmenter":
        """Return a new segmenter with the weights of this one's head on another backbone, which has the same widths.

        The backbone becomes a part of it and loses its classifier, in place. Device and training mode are those of this one.
        """
        model = Segmenter(backbone, self.num_classes, self.head_name)
        head = {name: value for name, value in self.state_dict().items() if not name.startswith(BODY)}
        model.load_state_dict(head | {BODY + name: value for name, value in backbone.state_dict().items()})
        return model.to(next(self.parameters()).device).train(self.training)

    @property
    def img_size(self) -> tuple[int, int]:
        """(h, w) in pixels of the backbone's input size."""
        backbone: Any = self.backbone
        return getattr(backbone, "img_size", None) or backbone.patch_embed.img_size

    @property
    def set_input_size(self) -> Callable[..., None]:
        """The backbone's method `set_input_size`; AttributeError if it has none, so that hasattr tells."""
        return self.backbone.set_input_size  # type: ignore[return-value]

    @property
    def pretrained_cfg(self) -> dict[str, Any]:
        """timm's pretrained_cfg of the backbone."""
        return self.backbone.pretrained_cfg  # type: ignore[return-value]

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Turn activation checkpointing of the backbone's blocks on or off."""
        self.backbone.set_grad_checkpointing(enable)  # type: ignore[operator]

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Return the backbone's patterns of parameter names by layer, for timm's layer decay, with the names in this model."""

        def renamed(pattern: Any) -> Any:
            if isinstance(pattern, str):
                return re.sub(r"\^", rf"^{re.escape(BODY)}", pattern)
            return [(renamed(one), order) for one, order in pattern]

        return {name: renamed(pattern) for name, pattern in self.backbone.group_matcher(coarse).items()}  # type: ignore[operator]

    def no_weight_decay(self) -> set[str]:
        """Return the names, in this model, of the backbone's parameters without weight decay; empty if it lists none."""
        return {f"{BODY}{name}" for name in self._of_backbone("no_weight_decay", set())}

    def position_parameters(self) -> set[str]:
        """Return the names, in this model, of the parameters of position encodings; empty without a vitrel backbone."""
        return {f"{BODY}{name}" for name in self._of_backbone("position_parameters", set())}

    def position_lr_scales(self) -> dict[str, float]:
        """Return {name, in this model, of a parameter of an encoding in attention: factor on its learning rate in fine-tuning}.

        It is empty without a vitrel backbone.
        """
        return {f"{BODY}{name}": scale for name, scale in self._of_backbone("position_lr_scales", {}).items()}

    def _of_backbone(self, method: str, default: Any) -> Any:
        """Return the result of the backbone's method of the name `method`, or `default` if it has no such method."""
        return getattr(self.backbone, method)() if hasattr(self.backbone, method) else default


class Tokens(nn.Module):
    """Model of the tokens that a linear head reads, images [B, 3, height, width] -> [B, width, h, w].

    They are those of the last block or, if strides differ, of all stages, upsampled to the finest and joined. Those of the last
    block or stage have passed the final norm.

    Args:
        body: a model with `forward_intermediates`.

    Attributes:
        stride: of the finest stage, in pixels.
        width: number of channels of the result.
    """

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        levels = [(level["num_chs"], level["reduction"]) for level in body.feature_info]  # type: ignore[union-attr]
        self.body, self.taken = body, len(levels) if len({stride for _, stride in levels}) > 1 else 1
        self.strides = [stride for _, stride in levels][-self.taken :]
        self.stride, self.width = self.strides[0], sum(channels for channels, _ in levels[-self.taken :])

    def forward(self, image: Tensor) -> Tensor:
        maps = self.body.forward_intermediates(  # type: ignore[operator]
            image, indices=self.taken, norm=True, output_fmt="NCHW", intermediates_only=True
        )
        h, w = maps[0].shape[-2:]
        # a stage may reach beyond the image, where its grid was rounded up
        enlarged = [_enlarged(x, stride // self.stride)[..., :h, :w] for x, stride in zip(maps, self.strides, strict=True)]
        return torch.cat(enlarged, 1)


class Decoder(nn.Module):
    """Decoder of segmentation_models_pytorch with a classifier: {name: map} -> logits [B, num_classes, h_0, w_0].

    The maps [B, C_i, h_i, w_i] have the STRIDES, in this order. MissingExtra without segmentation_models_pytorch.

    Args:
        widths: channels C_i of the maps.
        num_classes: number of classes.
        head: "fpn" or "upernet".
    """

    def __init__(self, widths: list[int], num_classes: int, head: str) -> None:
        super().__init__()
        require("segmentation_models_pytorch")
        from segmentation_models_pytorch.decoders.fpn.decoder import FPNDecoder
        from segmentation_models_pytorch.decoders.upernet.decoder import UPerNetDecoder

        channels = [0, 0, *widths]  # of strides 1 and 2, which these decoders do not read
        self.decoder = FPNDecoder(channels) if head == "fpn" else UPerNetDecoder(channels, decoder_channels=256)
        self.classify = nn.Conv2d(self.decoder.out_channels if head == "fpn" else 256, num_classes, 1)

    def forward(self, maps: dict[str, Tensor]) -> Tensor:
        first, *others = maps.values()
        return self.classify(self.decoder([first, first, first, *others]))


def _enlarged(x: Tensor, factor: int) -> Tensor:
    """Interpolate a map [B, C, h, w] to [B, C, factor h, factor w], bilinearly with the centers of pixels aligned."""
    if factor == 1:
        return x
    size = (x.shape[-2] * factor, x.shape[-1] * factor)
    return F.interpolate(x, size=size, mode="bilinear", align_corners=False)
