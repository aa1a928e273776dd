"""Registration of model variants with timm: one row of a table per variant, one entry point per row."""

import inspect
from collections.abc import Callable

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import nn

from vitrel.common.names import nearest
from vitrel.weights.load import filter_state_dict

COMPOSITIONS = ("absolute+rope_mixed", "rope_mixed+table")  # compositions with model names; "_" replaces "+" in them


def base_cfg(**changes) -> dict:
    """The pretrained cfg entries that all model families share, updated by those given."""
    shared = dict(num_classes=1000, input_size=(3, 224, 224), pool_size=None, crop_pct=0.9, interpolation="bicubic")
    return shared | dict(fixed_input_size=False, first_conv="patch_embed.proj") | changes


def register_family(
    trunk: type[nn.Module], rows: dict[str, tuple[dict, dict]], weights: dict[str, str], namespace: dict
) -> dict:
    """Register a timm entry point for each row {name: (constructor arguments, pretrained cfg)}; returns timm's `default_cfgs`.

    weights: {name: hub repository} of public weights. namespace: globals() of the backbone's module, to which the entry points
    and default_cfgs are added, since timm looks for them there.
    """
    cfgs = generate_default_cfgs(
        {name: dict(cfg, **({"hf_hub_id": weights[name]} if name in weights else {})) for name, (_, cfg) in rows.items()}
    )
    namespace["default_cfgs"] = cfgs  # before registration, in which timm looks them up in the module
    for name, (arguments, _) in rows.items():
        namespace[name] = register_model(_entry_point(trunk, name, arguments, namespace["__name__"]))
    return cfgs


def _entry_point(trunk: type[nn.Module], name: str, arguments: dict, module: str) -> Callable[..., nn.Module]:
    def entry_point(pretrained: bool = False, **kwargs) -> nn.Module:
        kwargs = arguments | kwargs
        depth = len(kwargs["depths"]) if "depths" in kwargs else kwargs["depth"]
        taps = tuple(range(0 if depth <= 4 else depth - 3, depth))  # all, or the last three of more than four
        feature_cfg = dict(out_indices=kwargs.pop("out_indices", taps), feature_cls="getter")
        try:
            return build_model_with_cfg(
                trunk, name, pretrained, pretrained_filter_fn=filter_state_dict, feature_cfg=feature_cfg, **kwargs
            )
        except TypeError as error:
            unknown = str(error).partition("unexpected keyword argument ")[2].strip("'")
            near = nearest(unknown, inspect.signature(trunk).parameters, 1)
            raise TypeError(f"{name}: {error}{f'; did you mean {near[0]!r}?' if unknown and near else ''}") from error

    entry_point.__name__ = entry_point.__qualname__ = name
    entry_point.__module__ = module
    entry_point.__doc__ = f"{trunk.__name__} with {', '.join(f'{k}={v}' for k, v in arguments.items())}."
    return entry_point
