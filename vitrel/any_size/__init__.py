"""timm models of other architectures at any image size: their trunk stays timm's, their position modules become vitrel's.

`any_size` takes a model that vitrel.models does not express; `vitrel.from_timm` calls it for these.
"""

import functools

import torch
import torch.nn.functional as F
from timm.layers.attention_pool2d import AttentionPool2d, RotAttentionPool2d
from timm.layers.bottleneck_attn import BottleneckAttn
from timm.layers.halo_attn import HaloAttn
from timm.layers.lambda_layer import LambdaLayer
from torch import Tensor, nn

from vitrel.any_size import absolute, convolved, decomposed, levit, maxxvit, swin, vit, windowed
from vitrel.any_size.exchange import Adapter, exchange
from vitrel.common.sizes import format_size
from vitrel.geometry import is_exporting, is_known

__all__ = ["ADAPTERS", "WITHOUT_POSITION", "Adapter", "adapter_of", "any_size", "side_multiple", "takes"]

ADAPTERS: tuple[Adapter, ...] = (
    vit.ADAPTER,
    decomposed.SAM,
    swin.ADAPTER,
    maxxvit.ADAPTER,
    windowed.HIERA,
    windowed.SAM2,
    windowed.GCVIT,
    decomposed.MVITV2,
    levit.ADAPTER,
    levit.TINY_VIT,
    absolute.CAIT,
    absolute.CONVIT,
    absolute.CROSSVIT,
    absolute.NEST,
    absolute.PIT,
    absolute.TNT,
    absolute.VISFORMER,
    absolute.VOLO,
    absolute.XCIT,
    convolved.COAT,
    convolved.TWINS,
    convolved.PVT_V2,
    convolved.DAVIT,
    convolved.CSATV2,
    convolved.EDGENEXT,
    convolved.EFFICIENTVIT,
    convolved.NAFLEXVIT,
)

# Files of timm whose models have no position but what convolutions see of the border; they take any image of whole strides.
_FILES = (
    "byobnet convmixer convnext cpubone cspnet cspnext densenet dla dpn efficientnet efficientvim efficientvit_mit "
    "fasternet fastvit focalnet ghostnet hardcorenas hgnet hrnet iformer inception_next inception_resnet_v2 "
    "inception_v3 inception_v4 lcnetv2 lowformer mambaout metaformer mobilenetv3 mobilenetv5 mobilevit nasnet "
    "nextvit nfnet pnasnet rdnet regnet repghost repvit res2net resnest resnet resnetv2 rexnet selecsls senet "
    "sequencer shvit sknet starnet swiftformer tresnet vgg vovnet xception xception_aligned"
)
WITHOUT_POSITION = frozenset(_FILES.split())
_WITH_POSITION = (AttentionPool2d, RotAttentionPool2d, BottleneckAttn, HaloAttn, LambdaLayer)  # layers for one size of a map


def adapter_of(model: nn.Module) -> Adapter | None:
    """Return the adapter by which `any_size` exchanges modules of a timm model; None if no adapter names its exact class."""
    return next((adapter for adapter in ADAPTERS if type(model) in adapter.models), None)


def takes(model: nn.Module) -> bool:
    """Return whether `any_size` has an adapter for a timm model's class, or knows that the model has no position."""
    if adapter_of(model) is not None:
        return True
    return _file(model) in WITHOUT_POSITION and not any(isinstance(part, _WITH_POSITION) for part in model.modules())


def any_size(model: nn.Module) -> nn.Module:
    """Return a timm model that takes images of any size, with the parameters and state dict of `model`.

    Its trunk is timm's; modules that hold position or assume an image size are exchanged for vitrel's (see `Adapter`). Forward
    raises ValueError, not under torch.compile, for an image whose sides are not multiples of `side_multiple`. The argument must
    not be used any more: both share parameters and changed submodules. A model without position is returned itself, unchanged.

    Raises:
        ValueError: no adapter is known, or a part of the model rules out other sizes (the message names it).
    """
    adapter = adapter_of(model)
    if adapter is None:
        if takes(model):
            return model
        raise ValueError(f"no adapter is known for {type(model).__module__}")
    model = exchange(model, adapter)
    model.side_multiple = adapter.multiple  # type: ignore[assignment]
    embed = getattr(model, "patch_embed", None)
    padded = tuple(embed.patch_size) if getattr(embed, "dynamic_img_pad", False) else (1, 1)
    if adapter.multiple > 1 or padded != (1, 1):
        model.register_forward_pre_hook(functools.partial(_sized, multiple=adapter.multiple, padded=padded))
    return model


def side_multiple(model: nn.Module) -> int:
    """Return the pixels that must divide an image's sides: 1 also without position, 0 for others not from `any_size`."""
    if hasattr(model, "side_multiple"):
        return model.side_multiple  # type: ignore[return-value]
    return 1 if adapter_of(model) is None and takes(model) else 0  # without position: any_size returns it unchanged


def _file(model: nn.Module) -> str:
    """Return the name, without ".py", of the file in timm.models that defines the model's class; "" if none of them does."""
    package, _, file = type(model).__module__.rpartition(".")
    return file if package == "timm.models" else ""


def _sized(
    model: nn.Module, arguments: tuple[Tensor, ...], multiple: int, padded: tuple[int, int]
) -> tuple[Tensor, ...] | None:
    """Check the image's sides before a model's forward (a hook of torch); return new arguments for an export of any size.

    In such an export the sides are written as `multiple` * n or, if `multiple` is 1, padded with zeros to whole patches, so
    that sizes of later maps are short expressions: a graph is traced in seconds, not minutes, with few other conditions on the
    image. Otherwise the result is None, and under torch.compile nothing is checked.

    Args:
        model: of timm, whose forward follows.
        arguments: of its forward; the first is the image [B, C, H, W].
        multiple: number of pixels that must divide both sides.
        padded: (h, w) of a patch in pixels if the model pads images to whole patches, otherwise (1, 1).

    Raises:
        ValueError: `multiple` does not divide a side.
    """
    if torch.compiler.is_dynamo_compiling():  # of this function alone: its result would be a graph of its own
        return None
    image = arguments[0]
    size = tuple(image.shape[-2:])
    if is_exporting() and not is_known(*size):
        if multiple > 1:
            image = image.unflatten(3, (-1, multiple)).unflatten(2, (-1, multiple)).flatten(4, 5).flatten(2, 3)
        else:
            down, right = ((n + p - 1) // p * p - n for n, p in zip(size, padded, strict=True))
            image = F.pad(image, (0, right, 0, down))
        return (image, *arguments[1:])
    if is_known(*size) and any(n % multiple for n in size):
        whole = format_size(tuple(-(-n // multiple) * multiple for n in size))
        raise ValueError(
            f"{type(model).__name__} takes images whose sides are multiples of {multiple} pixels, not {format_size(size)}: "
            f"resize or pad them, for example to {whole}"
        )
    return None
