"""from_timm: a timm model as a vitrel model, the same function at its own size and able to run at any."""

from typing import Any

import timm
from torch import nn

from vitrel.convert.recognise import as_vitrel
from vitrel.convert.relativize import relativize
from vitrel.models.backbone import Backbone
from vitrel.models.create import check_model_name


def from_timm(
    model: nn.Module | str,
    pretrained: bool = False,
    position: str | None = None,
    position_args: dict | None = None,
    *,
    absolute: str | None = None,
    fade_steps: int | None = None,
    rope: str | None = None,
    **arguments: Any,
) -> Backbone:
    """A vitrel model with the function of a timm model: logits and gradients at its size are equal, any h x w works.

    model: a timm model, or the name of one with `arguments` of timm.create_model (num_classes, img_size, checkpoint_path, ...)
    and `pretrained` weights. Taken are ViT, DeiT (distilled too), DeiT III, BEiT, EVA-02, RoPE-ViT, DINOv2, DINOv3, CLIP's and
    SigLIP's image towers, SAM's encoder, the relpos ViTs (their bias MLP becomes the table it is at the model's size), Swin V1
    and V2. The model is recognised from its modules, whatever its name, and stays as it is; a vitrel model is returned itself.
    The result has the name vitrel_vit or vitrel_swin; what images it wants (mean, std, crop) is that of the timm model.
    position: an encoding to add in attention, with position_args, absolute ("keep", "drop" or "fade" over fade_steps) and rope
    as `vitrel.relativize` takes them.
    Of a size that is no multiple of its patch (384 with patches of 14) timm leaves the last pixels out, here they are a patch
    more: the result's size is the largest multiple, 378, and there both are the same function.
    Where timm computes windows wrongly (Swin's shift before padding, unmasked padding) the result does not follow it.
    Raises ValueError for a model that has no counterpart, with the reason; for a name, as `vitrel.create_model`.
    """
    if isinstance(model, str):
        check_model_name(model, allow_sources=True)
        model = timm.create_model(model, pretrained=pretrained, **arguments)
    elif pretrained or arguments:
        given = ["pretrained"] * pretrained + [*arguments]
        raise ValueError(f"{given[0]} is of a model to be built; this one is built already: pass its name, or leave it out")
    how = dict(position_args=position_args, absolute=absolute, fade_steps=fade_steps, rope=rope)
    how = {name: value for name, value in how.items() if value is not None}
    if position is None and how:
        raise ValueError(f"{next(iter(how))} is of a position to add in attention: name it, as position='table'")
    ours = as_vitrel(model)
    return ours if position is None else relativize(ours, position, **how)
