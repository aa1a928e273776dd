"""timm's own numbers at other image sizes: policy="timm" of `vitrel.from_timm`.

The model stays timm's. A Swin of any version gets what timm's `dynamic_img_size` sets when a model is built: windows keep their
size, masks are computed for each image. A model with `set_input_size` is resized by it for the forward pass of an image of
another size, always from the trained parameters, which are in place again afterwards. Any other model is left as it is: its
trunk takes the size, or refuses it.
"""

from typing import Any

import torch
from timm.layers import to_2tuple
from timm.models import swin_transformer, swin_transformer_v2, swin_transformer_v2_cr
from torch import Tensor, nn

_SWINS = (swin_transformer.SwinTransformer, swin_transformer_v2.SwinTransformerV2, swin_transformer_v2_cr.SwinTransformerV2Cr)


def timm_sizes(model: Any) -> nn.Module:
    """Let a timm model, in place, take images of any size that timm's own code takes, and return it.

    A Swin is set as if built with dynamic_img_size. A model with `set_input_size`, but not dynamic_img_size, gets hooks that
    resize it before forward and restore it afterwards; in training mode they raise ValueError at another size than the model's,
    since the resized parameters are copies. Any other model is not changed.
    """
    if isinstance(model, _SWINS):
        part: Any
        for part in model.modules():
            if hasattr(part, "dynamic_mask"):
                part.dynamic_mask, part.attn_mask = True, None
            if hasattr(part, "strict_img_size"):
                part.strict_img_size = False
        model.dynamic_img_size = True
    elif hasattr(model, "set_input_size") and not getattr(model, "dynamic_img_size", False):
        model.register_forward_pre_hook(_resize)
        model.register_forward_hook(_restore, always_call=True)
    return model


def _resize(model: Any, arguments: tuple[Tensor, ...]) -> None:
    """Resize the model, before forward, if its image has another size, and keep its attributes for `_restore`.

    ValueError in training mode. The first of `arguments` is the image [B, C, H, W].
    """
    size = tuple(arguments[0].shape[-2:])
    if size == to_2tuple(getattr(getattr(model, "patch_embed", None), "img_size", None) or model.img_size):
        return
    if model.training:
        raise ValueError('policy="timm" trains at the size of the model only: timm resizes copies of its parameters')
    tables = ("_parameters", "_buffers", "_modules")
    # an attribute of ours, private so that nobody takes it for timm's
    model._before_resize = [  # noqa: SLF001
        (m, vars(m) | {name: dict(vars(m)[name]) for name in tables}) for m in model.modules()
    ]
    with torch.no_grad():
        model.set_input_size(size)


def _restore(model: Any, arguments: tuple[Tensor, ...], output: Any) -> None:
    """Give the model back, after forward (a hook of torch), the attributes that `_resize` kept, if it has resized it."""
    for part, attributes in vars(model).pop("_before_resize", ()):
        vars(part).clear()
        vars(part).update(attributes)
