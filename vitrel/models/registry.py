"""Registration of model variants with timm: one row of a table per variant, one entry point per row."""

import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from timm.layers import register_notrace_module
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

from vitrel.common.names import nearest
from vitrel.position import POSITIONS, PositionEncoding

Rows = dict[str, tuple[dict, dict]]  # {name: (constructor arguments, entries of timm's pretrained cfg)}
Encoding = TypeVar("Encoding", bound=PositionEncoding)
COMPOSITIONS = ("absolute+rope_mixed", "rope_mixed+table")  # compositions with model names; "_" replaces "+" in them
ARGUMENTS: dict[str, dict[str, Any]] = {}  # {name of a registered model: its trunk's arguments, defaults included}
_FAMILIES: dict[type[nn.Module], Callable[[str], None]] = {}  # {trunk: registers its models for a key}
_weight_filter: Callable[[dict[str, Tensor], Any], dict[str, Tensor]] | None = None


def set_weight_filter(function: Callable[[dict[str, Tensor], Any], dict[str, Tensor]]) -> None:
    """Set the function (state dict of a file, model) -> state dict of the model by which timm loads pretrained weights.

    It is set by vitrel.weights, which imports the models and so cannot be imported here.
    """
    global _weight_filter
    _weight_filter = function


def base_cfg(**changes) -> dict:
    """Return entries of timm's pretrained_cfg that ViT and Swin share, updated by `changes`."""
    shared = dict(num_classes=1000, input_size=(3, 224, 224), pool_size=None, crop_pct=0.9, interpolation="bicubic")
    return shared | dict(fixed_input_size=False, first_conv="patch_embed.proj") | changes


def register_family(
    trunk: type[nn.Module], rows: Rows, weights: dict[str, str], namespace: dict, rows_of: Callable[[Sequence[str]], Rows]
) -> None:
    """Register models with timm, one entry point for each row; put their arguments, defaults included, in ARGUMENTS.

    Args:
        trunk: class of the backbone.
        rows: {name: (constructor arguments, entries of timm's pretrained cfg)} of the models.
        weights: {name: hub repository} of public weights.
        namespace: globals() of the backbone's module, to which the entry points and default_cfgs are added, since timm looks
            for them there.
        rows_of: function [keys of POSITIONS] -> rows, called for each key that `register_position` adds later.
    """
    cfgs = generate_default_cfgs(
        {name: dict(cfg, **({"hf_hub_id": weights[name]} if name in weights else {})) for name, (_, cfg) in rows.items()}
    )
    defaults = {name: parameter.default for name, parameter in inspect.signature(trunk).parameters.items()}
    ARGUMENTS.update({name: defaults | arguments for name, (arguments, _) in rows.items()})
    # before registration, in which timm looks them up in the module
    namespace["default_cfgs"] = namespace.get("default_cfgs", {}) | cfgs
    for name, (arguments, _) in rows.items():
        namespace[name] = register_model(_entry_point(trunk, name, arguments, namespace["__name__"]))
    _FAMILIES[trunk] = lambda key: register_family(trunk, rows_of([key]), {}, namespace, rows_of)


def register_position(key: str) -> Callable[[type[Encoding]], type[Encoding]]:
    """Return a class decorator that registers an encoding of your own, a subclass of `PositionEncoding`.

    The key is then a `position` of every model and layer, and timm has the models vitrel_vit_<size>_<key> and, if it acts in
    attention, vitrel_swin_<size>_<key>. Commands take --import MODULE, the module with the class.

    Args:
        key: a small letter, then small letters, digits and underscores.

    Raises:
        TypeError: the class is no PositionEncoding.
        ValueError: the key has another form, or another class has it. A class of the same module and name replaces it, so that
            a notebook's cell can be run again.
    """
    if not re.fullmatch("[a-z][a-z0-9_]*", key):
        raise ValueError(f"a position is named by small letters, digits and underscores, not {key!r}")

    def register(encoding: type[Encoding]) -> type[Encoding]:
        if not (isinstance(encoding, type) and issubclass(encoding, PositionEncoding)):
            raise TypeError(f"position {key!r} is to be a subclass of vitrel.PositionEncoding, not {encoding!r}")
        known = POSITIONS.get(key)
        if known is not None and _path(known) != _path(encoding):
            raise ValueError(f"position {key!r} is that of {_path(known)}: choose another key")
        POSITIONS[key] = encoding
        register_notrace_module(encoding)
        if known is None:
            for add in _FAMILIES.values():
                add(key)
        return encoding

    return register


def _path(encoding: type) -> str:
    return f"{encoding.__module__}.{encoding.__qualname__}"


def _entry_point(trunk: type[nn.Module], name: str, arguments: dict, module: str) -> Callable[..., nn.Module]:
    """Return the function that timm.create_model calls for the model `name`, with `module` as its __module__.

    It builds `trunk` from `arguments`, which its keyword arguments override, and raises TypeError for an unknown one.
    """

    def entry_point(pretrained: bool = False, **kwargs) -> nn.Module:
        kwargs = arguments | kwargs
        depth = len(kwargs["depths"]) if "depths" in kwargs else kwargs["depth"]
        taps = tuple(range(0 if depth <= 4 else depth - 3, depth))  # all, or the last three of more than four
        feature_cfg = dict(out_indices=kwargs.pop("out_indices", taps), feature_cls="getter")
        try:
            return build_model_with_cfg(
                trunk, name, pretrained, pretrained_filter_fn=_weight_filter, feature_cfg=feature_cfg, **kwargs
            )
        except TypeError as error:
            unknown = str(error).partition("unexpected keyword argument ")[2].strip("'")
            near = nearest(unknown, inspect.signature(trunk).parameters, 1)
            raise TypeError(f"{name}: {error}{f'; did you mean {near[0]!r}?' if unknown and near else ''}") from error

    entry_point.__name__ = entry_point.__qualname__ = name
    entry_point.__module__ = module
    entry_point.__doc__ = f"{trunk.__name__} with {', '.join(f'{k}={v}' for k, v in arguments.items())}."
    return entry_point
