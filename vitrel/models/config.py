"""A model's configuration: its name in timm's registry, the arguments of its constructor, and how its images are prepared."""

from typing import Any, NamedTuple

import timm
import torch

from vitrel.models.backbone import Backbone
from vitrel.models.swin import Swin
from vitrel.models.vit import ViT

TRUNKS: dict[str, type[Backbone]] = {"vitrel_vit": ViT, "vitrel_swin": Swin}  # names that serve any arguments
_PREPARATION = ("input_size", "mean", "std", "crop_pct", "crop_mode", "interpolation", "label_names", "label_descriptions")


class Config(NamedTuple):
    """Plain values that build a model anew, without its weights."""

    architecture: str  # a name of timm's registry
    arguments: dict[str, Any]
    input_size: tuple[int, int]  # (h, w) in pixels that `set_input_size` recorded
    preparation: dict[str, Any]  # entries of timm's pretrained_cfg: size, crop, mean, std, names of the classes

    def build(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None, **changes: Any) -> Backbone:
        """The model with random weights. changes: arguments in place of its own, and entries of `preparation` as timm's
        pretrained_cfg_overlay."""
        preparation = self.preparation | changes.pop("pretrained_cfg_overlay", {})
        arguments = self.arguments | changes
        if len(preparation.get("label_names") or ()) != arguments.get("num_classes"):  # of another classifier
            preparation = {name: value for name, value in preparation.items() if not name.startswith("label_")}
        size = self.input_size if arguments["img_size"] == self.arguments["img_size"] else arguments["img_size"]
        with torch.random.fork_rng(devices=[]):
            model = timm.create_model(
                self.architecture, pretrained_cfg_overlay=preparation, device=device, dtype=dtype, **arguments
            )
        model.set_input_size(size)  # type: ignore[operator]
        return model  # type: ignore[return-value]


def config_of(model: Backbone) -> Config:
    """The configuration of a model as it is now: with another head, pruned, at another input size."""
    cfg = getattr(model, "pretrained_cfg", None) or {}
    own = str(cfg.get("architecture", ""))
    generic = next(name for name, trunk in TRUNKS.items() if isinstance(model, trunk))
    architecture = own if own.startswith("vitrel_") and timm.is_model(own) else generic
    return Config(architecture, model.current_arguments(), model.img_size, preparation_of(cfg))


def preparation_of(cfg: dict[str, Any]) -> dict[str, Any]:
    """The entries of a timm model's pretrained_cfg that say how its images are prepared and what its classes are called."""
    return {name: cfg[name] for name in _PREPARATION if cfg.get(name) is not None}
