"""from_timm: convert a timm model to a model that computes the same and runs at any image size."""

import copy
from typing import Any

from torch import nn

from vitrel.any_size import adapter_of, any_size, side_multiple
from vitrel.any_size.timm_policy import timm_sizes
from vitrel.convert.recognize import as_vitrel, refusal
from vitrel.convert.relativize import relativize
from vitrel.models.create import create_model


def from_timm(
    model: nn.Module | str,
    pretrained: bool = False,
    position: str | None = None,
    position_args: dict | None = None,
    *,
    policy: str | None = None,
    absolute: str | None = None,
    fade_steps: int | None = None,
    rope: str | None = None,
    **arguments: Any,
) -> nn.Module:
    """Return a model equal to a timm model: the same logits and gradients at its image size, and any h x w works.

    Converted to a vitrel model are ViT, DeiT (distilled too), DeiT III, BEiT, EVA-02, RoPE-ViT, DINOv2, DINOv3, CLIP's and
    SigLIP's image towers, SAM's encoder, the relpos ViTs (their bias MLP becomes the table it computes at the model's size),
    Swin V1 and V2. A model is recognized from its modules, not its name. Other families keep timm's trunk: hybrid ViTs, MaxViT,
    Hiera, CaiT, LeViT and the others that docs/how_to/any_size.md lists; in a copy of the model, the modules that hold position
    are exchanged (vitrel.any_size). A model without position, such as a ResNet, is returned itself.

    A vitrel model's architecture is vitrel_vit or vitrel_swin; its preprocessing (mean, std, crop) is that of the timm model.
    At a size that is no multiple of the patch (384 with patches of 14) timm ignores the last pixels, and vitrel pads them to
    another patch. The result's size is therefore the largest multiple, 378, where both models are equal. timm's errors in
    windows (Swin's shift before padding, unmasked padding) are not reproduced.

    Args:
        model: a timm model, not changed, or its name; a vitrel model, or a result of this function, is returned itself if
            `position` is None.
        pretrained: for a name: load pretrained weights.
        position: an encoding to add in attention, as in `vitrel.relativize`; None: none.
        position_args: as in `vitrel.relativize`.
        policy: "timm": at other sizes, timm's own numbers bit for bit, where timm defines them; the result is a timm model,
            resized by timm's code (vitrel.any_size.timm_policy). None: vitrel's, as above.
        absolute: as in `vitrel.relativize`: "keep", "drop" or "fade" over fade_steps.
        fade_steps: as in `vitrel.relativize`.
        rope: "keep" or "drop" the model's own rotation, as in `vitrel.relativize`.
        arguments: for a name: of timm.create_model (num_classes, img_size, checkpoint_path, ...).

    Raises:
        ValueError: the model has no counterpart, for a reason in the message; `position` is for a model that keeps timm's
            trunk; options of `position` are given without it, or `pretrained` for a model that is built. For a name also the
            errors of `vitrel.create_model`.
    """
    built_here = isinstance(model, str)
    if isinstance(model, str):
        model = create_model(model, pretrained=pretrained, **arguments)
    elif pretrained or arguments:
        argument = "pretrained" if pretrained else next(iter(arguments))
        raise ValueError(
            f"{argument} is for building a model, and this one is built already: pass its name, or omit {argument}"
        )
    options = dict(position_args=position_args, absolute=absolute, fade_steps=fade_steps, rope=rope)
    options = {name: value for name, value in options.items() if value is not None}
    if position is None and options:
        raise ValueError(f"{next(iter(options))} needs an encoding to add in attention, for example position='table'")
    if policy is not None:
        if policy != "timm" or position is not None:
            raise ValueError(
                f"policy is 'timm', without an encoding to add, or None, not {policy!r} with position={position!r}"
            )
        return timm_sizes(model if built_here else copy.deepcopy(model))
    if position is None and side_multiple(model):  # it has no position, or was taken before
        return model
    try:
        converted = as_vitrel(model, copy=not built_here)
    except ValueError:
        if position is not None or adapter_of(model) is None:
            raise
    else:
        return converted if position is None else relativize(converted, position, **options)
    try:
        return any_size(model if built_here else copy.deepcopy(model))
    except ValueError as error:
        raise refusal(model, str(error)) from error
