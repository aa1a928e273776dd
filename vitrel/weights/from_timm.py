"""from_timm: convert a timm model, or a file of its weights, to a model that computes the same and runs at any image size."""

import copy
import math
from pathlib import Path
from typing import Any

import timm
from timm.layers import to_2tuple
from torch import Tensor, nn

from vitrel.any_size import adapter_of, any_size, side_multiple
from vitrel.any_size.timm_policy import timm_sizes
from vitrel.models.create import check_model_name, create_model, create_sized, on_meta
from vitrel.models.segmenter import Segmenter
from vitrel.weights.plan import KNOWN, rebuilt
from vitrel.weights.read import ARRAYS, read_file, unwrap
from vitrel.weights.recognize import as_vitrel, recognize, refusal
from vitrel.weights.relativize import relativize


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
            `position` is None. The backbone of a `vitrel.models.segmenter.Segmenter` is converted.
        pretrained: for a name: load pretrained weights.
        position: an encoding to add in attention, as in `vitrel.relativize`; None: none.
        position_args: as in `vitrel.relativize`.
        policy: "timm": at other sizes, timm's own numbers bit for bit, where timm defines them; the result is a timm model,
            resized by timm's code (vitrel.any_size.timm_policy). None: vitrel's, as above.
        absolute: as in `vitrel.relativize`: "keep", "drop" or "fade" over fade_steps.
        fade_steps: as in `vitrel.relativize`.
        rope: "keep" or "drop" the model's own rotation, as in `vitrel.relativize`.
        arguments: for a name: of timm.create_model (num_classes, img_size, ...). With checkpoint_path, a file of the model's
            weights as for `timm_model`, a model that becomes a vitrel model is resampled to img_size by vitrel.

    Raises:
        ValueError: the model has no counterpart, for a reason in the message; `position` is for a model that keeps timm's
            trunk; options of `position` are given without it, or `pretrained` for a model that is built. For a name also the
            errors of `vitrel.create_model` and `timm_model`.
    """
    options = dict(position_args=position_args, absolute=absolute, fade_steps=fade_steps, rope=rope)
    options = {name: value for name, value in options.items() if value is not None}
    if position is None and options:
        raise ValueError(f"{next(iter(options))} needs an encoding to add in attention, for example position='table'")
    if policy is not None and (policy != "timm" or position is not None):
        raise ValueError(f"policy is 'timm', without an encoding to add, or None, not {policy!r} with position={position!r}")
    built_here, img_size = isinstance(model, str), arguments.get("img_size")
    if isinstance(model, str):
        if arguments.get("features_only"):
            raise ValueError(
                "features_only=True takes a model apart, so there is none to convert: leave it out, and read features with "
                "forward_intermediates or vitrel.pyramid"
            )
        if not pretrained and arguments.get("checkpoint_path"):
            model = timm_model(model, native=policy is None, **arguments)
        else:
            model = create_model(model, pretrained=pretrained, **arguments)
    elif pretrained or arguments:
        argument = "pretrained" if pretrained else next(iter(arguments))
        raise ValueError(
            f"{argument} is for building a model, and this one is built already: pass its name, or omit {argument}"
        )
    if policy is not None:
        return timm_sizes(model if built_here else copy.deepcopy(model))
    if isinstance(model, Segmenter):
        body = from_timm(model.backbone, position=position, **options)
        return model if body is model.backbone else model.with_backbone(body)
    if position is None and side_multiple(model):  # it has no position, or was taken before
        return model
    try:
        converted = as_vitrel(model)
    except ValueError:
        if position is not None or adapter_of(model) is None:
            raise
    else:
        if img_size is not None and to_2tuple(img_size) != converted.arguments["img_size"]:
            converted = rebuilt(converted, img_size=to_2tuple(img_size))
        return converted if position is None else relativize(converted, position, **options)
    try:
        return any_size(model if built_here else copy.deepcopy(model))
    except ValueError as error:
        raise refusal(model, str(error)) from error


def timm_model(name: str, checkpoint_path: str | Path, native: bool = False, **arguments: Any) -> nn.Module:
    """Return timm's model `name` with the weights of a file, which timm's own filter for the model reads.

    The file decides the numbers of classes and channels, and of a ViT the image size, unless `arguments` set them: then the
    classifier is new, the first convolution is adapted (timm.models.adapt_input_conv), and timm resamples the embedding and
    tables.

    Args:
        name: of the model in timm's registry.
        checkpoint_path: .safetensors or a torch checkpoint (`unwrap` says of which trainers); .npz or .npy, which timm reads.
        native: a model that vitrel converts is built at the size that the file was trained at, whatever `arguments` say;
            img_size in them is used where the number of rows in the file leaves that size open.
        arguments: of timm.create_model.

    Raises:
        FileNotFoundError: there is no file.
        ValueError: the file is damaged or is not of this model; the message gives its first names.
    """
    check_model_name(name)
    if Path(checkpoint_path).suffix in ARRAYS:
        return create_model(name, checkpoint_path=str(checkpoint_path), **arguments)
    state = unwrap(read_file(checkpoint_path), str(checkpoint_path))
    wanted, size = arguments.pop("num_classes", None), arguments.pop("img_size", None)
    with on_meta():
        probe: Any = create_sized(name, size, **arguments)
        if (native or size is None) and "window_size" not in arguments and _converts(probe):
            size = _trained_size(state, probe if size is None else timm.create_model(name, **arguments), size)
    cfg, conv = probe.pretrained_cfg, probe.pretrained_cfg["first_conv"]
    channels = cfg["input_size"][0]
    if isinstance(conv, str) and f"{conv}.weight" in state:
        in_chans = getattr(probe.get_submodule(conv), "in_channels", None)  # not of a stem that moves pixels to channels
        channels = state[f"{conv}.weight"].shape[1] if in_chans == arguments.get("in_chans", channels) else channels
    heads = cfg["classifier"] if isinstance(cfg["classifier"], str) else (cfg["classifier"] or ("",))[0]
    rows = [len(state[head]) for head in (f"{heads}.weight", "head.weight") if head in state]
    overlay = {"state_dict": state, "label_offset": 0, "input_size": (channels, *cfg["input_size"][1:])}
    errors = []
    for classes in dict.fromkeys(rows[:1] or (cfg["num_classes"], 0)):  # without a classifier, or with another name of it
        built = {"in_chans": channels} | arguments | {"num_classes": classes, "pretrained": True}
        built["pretrained_cfg_overlay"] = arguments.get("pretrained_cfg_overlay", {}) | overlay | {"num_classes": classes}
        try:
            model: Any = create_sized(name, size, **built)
        except (AttributeError, LookupError, RuntimeError, ValueError) as error:
            errors.append(error)
            continue
        del model.pretrained_cfg["state_dict"]
        if wanted not in (None, classes):
            model.reset_classifier(wanted)
        return model
    said, first = " ".join(str(errors[0]).split())[:400], ", ".join([*state][:5])
    raise ValueError(
        f"{checkpoint_path} does not fit {name}. The first names in the file are {first}; {KNOWN}. timm says: {said}"
    ) from errors[0]


def _converts(model: nn.Module) -> bool:
    """Return whether a timm model becomes a vitrel model, by its modules alone, so that it may be on the meta device."""
    try:
        recognize(model)
    except ValueError:
        return False
    return True


def _trained_size(state: dict[str, Tensor], model: Any, wanted: int | tuple[int, int] | None) -> tuple[int, int] | None:
    """Return the image size (h, w) in pixels at which weights in a file were trained; None if it is that of `model` or unknown.

    It follows from the number of rows of the absolute embedding, or else of a relative table. A `wanted` size in pixels is
    preferred where that number allows it. `model` is the timm model at its own size; of a Swin the size stays unknown.

    Raises:
        ValueError: the number of rows fits neither size nor a square, or a Swin's tables are of another window.
    """
    own = model.state_dict()
    names = [n for n in own if n == "pos_embed" or n.endswith("relative_position_bias_table")]
    name = next((n for n in names if n in state), None)
    if name is None:
        return None
    if name.startswith("layers."):
        if state[name].shape != own[name].shape:
            found = f"{len(state[name])} rows, the model's {len(own[name])}"
            raise ValueError(f"{name} in the file has {found}: pass the window_size that it was trained with")
        return None
    (h, w), (ph, pw) = model.patch_embed.grid_size, model.patch_embed.patch_size
    if name == "pos_embed" and state[name].dim() == 4:  # SAM's
        grid = tuple(state[name].shape[1:3])
        return None if grid == (h, w) else (grid[0] * ph, grid[1] * pw)

    def count(h: int, w: int) -> int:
        return h * w if name == "pos_embed" else (2 * h - 1) * (2 * w - 1)

    axis = 1 if name == "pos_embed" else 0
    rows, prefix = state[name].shape[axis], own[name].shape[axis] - count(h, w)
    given = [(side // p) for side, p in zip(to_2tuple(wanted), (ph, pw), strict=True)] if wanted is not None else (h, w)
    for extra in dict.fromkeys((prefix, 0, 1)):
        side = math.isqrt(max(rows - extra, 0))
        side = side if name == "pos_embed" else (side + 1) // 2
        for grid in (tuple(given), (h, w), (side, side)):
            if count(*grid) + extra == rows:
                return None if grid == (h, w) else (grid[0] * ph, grid[1] * pw)
    raise ValueError(
        f"{name} in the file has {rows} rows, which no square grid gives: pass img_size=(h, w), the size in pixels that it was "
        "trained at"
    )
