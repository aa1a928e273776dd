"""Configuration from which a model can be rebuilt: name, constructor arguments, image preparation."""

import inspect
from typing import Any, NamedTuple

import timm
import torch
from timm.data import resolve_model_data_config
from timm.models import build_model_with_cfg
from torch import nn

from vitrel.common.names import did_you_mean
from vitrel.models.backbone import Backbone
from vitrel.models.segmenter import Segmenter
from vitrel.models.swin import Swin
from vitrel.models.vit import ViT

TRUNKS: dict[str, type[Backbone]] = {"vitrel_vit": ViT, "vitrel_swin": Swin}  # models built from their arguments alone
PREPROCESSING = ("mean", "std", "crop_pct", "crop_mode", "interpolation")  # arguments of vitrel.data.Prepare
_PREPARATION = ("input_size", *PREPROCESSING, "label_names", "label_descriptions")
# What timm takes itself and does not pass to the model: which weights to load and from where, and its own options.
_OF_TIMM = {*inspect.signature(timm.create_model).parameters, *inspect.signature(build_model_with_cfg).parameters} - {"kwargs"}
_CFG = (*_PREPARATION, "global_pool", "fixed_input_size")  # entries of a pretrained_cfg that say nothing about a source


class Config(NamedTuple):
    """Plain values that describe a model without its weights.

    Attributes:
        architecture: name in timm's registry.
        arguments: {name: value} of the model's constructor.
        input_size: (h, w) in pixels that `set_input_size` recorded.
        preparation: entries of timm's pretrained_cfg, see `preparation_of`.
        train_sizes: of a run: "224x224", or budgets of patch tokens, "196t".
        task: of a run, its name in `vitrel.tasks`.
        segmenter: (number of classes, head) of a Segmenter with the model as its backbone; None without.
    """

    architecture: str
    arguments: dict[str, Any]
    input_size: tuple[int, int]
    preparation: dict[str, Any]
    train_sizes: tuple[str, ...] = ()
    task: str = ""
    segmenter: tuple[int, str] | None = None

    def build(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None, **changes: Any) -> Any:
        """Build the model, a Backbone or Segmenter, with random weights; torch's random state on the CPU is left as it was.

        Args:
            device: of the parameters.
            dtype: of the parameters.
            changes: constructor arguments that replace those of the configuration (num_classes: that of a Segmenter, if any);
                pretrained_cfg_overlay replaces entries of `preparation`. The names of classes are dropped unless there are
                num_classes of them; train_sizes are dropped if img_size is among the changes.

        Raises:
            TypeError: the model's constructor does not have an argument, or `preparation` has an entry that is none of
                `preparation_of`, such as a source of weights, which a file may not name.
        """
        preparation = self.preparation | changes.pop("pretrained_cfg_overlay", {})
        classes, head = self.segmenter or (changes.get("num_classes", self.arguments.get("num_classes")), "")
        if head:
            classes = changes.pop("num_classes", classes)
        arguments = self.arguments | changes
        trunk = next(trunk for name, trunk in TRUNKS.items() if self.architecture.startswith(name))
        self._check(arguments, [name for name in inspect.signature(trunk).parameters if name not in ("device", "dtype")])
        self._check(preparation, [*_PREPARATION])
        if len(preparation.get("label_names") or ()) != classes:  # names of another classifier
            preparation = {name: value for name, value in preparation.items() if not name.startswith("label_")}
        size = self.input_size if arguments["img_size"] == self.arguments["img_size"] else arguments["img_size"]
        with torch.random.fork_rng(devices=[]):
            model: Any = timm.create_model(
                self.architecture, pretrained_cfg_overlay=preparation, device=device, dtype=dtype, **arguments
            )
            model.set_input_size(size)
            model.train_sizes = () if "img_size" in changes else tuple(self.train_sizes)
            model.task = self.task
            if not head:
                return model
            with torch.device(device or torch.get_default_device()):
                return Segmenter(model, classes, head).to(dtype)

    def _check(self, given: dict[str, Any], known: list[str]) -> None:
        """Raise TypeError for a name in `given` that is not in `known`."""
        for name in given:
            if name not in known:
                raise TypeError(f"{self.architecture} has no argument {name!r}{did_you_mean(name, known)}")


def config_of(model: Backbone | Segmenter) -> Config:
    """Return the configuration of a model in its current state: with a new head, pruned, at another input size.

    Of a Segmenter it is that of its backbone, with `segmenter` set. The architecture is "vitrel_vit" or "vitrel_swin" if timm's
    registry does not have the model's own name.
    """
    if isinstance(model, Segmenter):
        return config_of(model.backbone)._replace(segmenter=(model.num_classes, model.head_name))  # type: ignore[arg-type]
    cfg = getattr(model, "pretrained_cfg", None) or {}
    name = str(cfg.get("architecture", ""))
    generic = next(key for key, trunk in TRUNKS.items() if isinstance(model, trunk))
    architecture = name if name.startswith("vitrel_") and timm.is_model(name) else generic
    return Config(architecture, model.current_arguments(), model.img_size, preparation_of(cfg), model.train_sizes, model.task)


def preparation_of(cfg: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a timm pretrained_cfg about image preparation and class names, without those that are None.

    They are input_size, mean, std, crop_pct, crop_mode, interpolation, label_names and label_descriptions.
    """
    return {name: cfg[name] for name in _PREPARATION if cfg.get(name) is not None}


def stored_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of timm.create_model that describe a model, without those that name a source of weights.

    Those of the model's constructor stay, but device and dtype. pretrained_cfg and pretrained_cfg_overlay stay if a tag; of a
    dictionary stay the entries on image preparation, class names, pooling and whether the input size is fixed.

    Args:
        arguments: {name: value}, of the model of a run, or read from a checkpoint.
    """
    kept = {name: value for name, value in arguments.items() if name not in _OF_TIMM | {"device", "dtype"}}
    for name in ("pretrained_cfg", "pretrained_cfg_overlay"):
        cfg = arguments.get(name)
        if isinstance(cfg, dict):
            kept[name] = {entry: cfg[entry] for entry in _CFG if entry in cfg}
        elif isinstance(cfg, str):  # the tag of one of timm's own
            kept[name] = cfg
    return kept


def preprocessing_of(model: nn.Module) -> dict[str, Any]:
    """Return {name: value} of mean, std, crop_pct, crop_mode, interpolation: the model's pretrained_cfg or timm's default."""
    known = resolve_model_data_config(model)
    numbers = {name: tuple(map(float, known[name])) for name in ("mean", "std")} | {"crop_pct": float(known["crop_pct"])}
    return {name: known[name] for name in PREPROCESSING} | numbers
