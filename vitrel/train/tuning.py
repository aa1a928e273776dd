"""Fine-tuning: the weights that training starts from, the position it adds, and what of the model it changes."""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import timm
from lightning.pytorch.utilities import rank_zero_only
from torch import nn

import vitrel.models  # noqa: F401  registers our names with timm
from vitrel.convert import from_timm, load, relativize
from vitrel.convert.saving import rebuilt
from vitrel.models.backbone import Backbone
from vitrel.models.config import config_of
from vitrel.models.create import WEIGHT_ARGUMENTS, check_model_name
from vitrel.names import nearest
from vitrel.weights.load import apply_plan, plan_weights
from vitrel.weights.read import guarding, read_file


@dataclass(frozen=True)
class Tuning:
    """Fine-tuning: the weights to start from, an encoding to add, and what of the model is trained.

    With `pretrained`, `position`, or a file for a model of timm's, the model becomes a vitrel model (`vitrel.from_timm`), which
    takes any image size; `model_args` are then arguments of vitrel.models.ViT or Swin.

    Args:
        init_from: a checkpoint of vitrel train (its averaged weights, where it has them), or any file that `vitrel.load` takes,
            with `model` as the name that bare weights need; position parameters of another grid are resampled.
        pretrained: start from the weights that timm has for the model's name, from its cache or the network.
        position: an encoding to add in attention, a key of POSITIONS or several joined by '+' (`vitrel.relativize`).
        position_args: its options.
        absolute: what becomes of the absolute embedding beside a new `position`: it is kept, dropped, or it fades out over the
            first half of the run.
        reset_head: start with a new classifier. Null: where the data's classes are others than those of the weights.
        trainable: names of the modules and parameters that are trained, with all below them, e.g. [norm, fc_norm, head];
            everything else is frozen, and without drop path and dropout. Null trains all.
    """

    init_from: str | None = None
    pretrained: bool = False
    position: str | None = None
    position_args: dict[str, Any] | None = None
    absolute: Literal["keep", "drop", "fade"] = "keep"
    reset_head: bool | None = None
    trainable: list[str] | None = None

    def __post_init__(self) -> None:
        if self.reset_head and self.init_from is None and not self.pretrained:
            raise ValueError(
                "model.tuning.reset_head is of model.tuning.init_from: without a file to start from every head is new"
            )
        if self.pretrained and self.init_from is not None:
            raise ValueError("model.tuning.pretrained and model.tuning.init_from exclude each other: take the weights of one")
        if self.position is None and (self.absolute != "keep" or self.position_args):
            raise ValueError("model.tuning.absolute and position_args are of model.tuning.position: name the encoding to add")

    def build(
        self, name: str, num_classes: int, img_size: tuple[int, int], model_args: dict[str, Any]
    ) -> tuple[nn.Module, list[str] | None]:
        """The model with its first weights, and the class names that a file tells of its classifier, or None.

        Raises:
            ValueError: an unknown model, arguments that the data decides, weights that do not fit, another number of classes
                with `reset_head` false.
        """
        if decided := sorted({"num_classes", "img_size"} & model_args.keys()):
            raise ValueError(f"model_args must not set {' and '.join(decided)}: the data decides (data.data, data.size)")
        if Path(name).exists():
            if self.init_from is not None or self.pretrained:
                raise ValueError(f"model {name!r} is a file, and has its own weights: leave out pretrained and init_from")
            base, classes = self._from_file(name, None)
            return self._changed(base, num_classes, img_size, model_args), classes
        check_registered(name)
        if not self._rebuilds(name):
            with guarding(name, model_args):
                model = timm.create_model(name, num_classes=num_classes, img_size=img_size, **model_args)
            return model, self._load(model)
        if self.init_from is not None:
            base, classes = self._from_file(self.init_from, name)
        else:
            base, classes = from_timm(name, pretrained=self.pretrained), None
            if self.pretrained:
                classes = (getattr(base, "pretrained_cfg", None) or {}).get("label_names")
        return self._changed(base, num_classes, img_size, model_args), None if classes is None else list(classes)

    def fade_over(self, model: nn.Module, passes: int) -> dict[str, int]:
        """Let the absolute embedding fade over the first half of a run of that many forward passes in training; the argument
        that says so, {} where nothing fades.
        """
        if self.absolute != "fade":
            return {}
        model.absolute_fade.fade_steps = max(passes // 2, 1)
        return {"absolute_fade": model.absolute_fade.fade_steps}

    def stored(self, model: nn.Module, name: str, model_args: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Name and arguments by which timm.create_model builds the model anew: its own where `build` made another of it."""
        if not self._rebuilds(name):
            return name, {key: value for key, value in model_args.items() if key not in WEIGHT_ARGUMENTS}
        config = config_of(model)
        apart = ("num_classes", "img_size")  # a checkpoint has them beside
        arguments = {key: value for key, value in config.arguments.items() if key not in apart and value is not None}
        return config.architecture, json.loads(json.dumps(arguments | {"pretrained_cfg_overlay": config.preparation}))

    def _rebuilds(self, name: str) -> bool:
        """Whether the model is made of another, and is not just what `name` and its arguments say."""
        foreign = self.init_from is not None and not name.startswith("vitrel_")
        return self.pretrained or self.position is not None or foreign or Path(name).exists()

    def freeze(self, model: nn.Module) -> None:
        """Leave gradients to `trainable` alone. ValueError for names that the model does not have, or none with parameters."""
        if self.trainable is None:
            return
        known = [name for name, _ in model.named_modules() if name] + [name for name, _ in model.named_parameters()]
        for name in self.trainable:
            if name not in known:
                near = nearest(name, known, cutoff=0.3)
                raise ValueError(f"model.tuning.trainable: the model has no {name!r}; nearest: {', '.join(near) or known[0]}")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(within(name, self.trainable))
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(
                f"model.tuning.trainable: nothing under {', '.join(self.trainable) or 'an empty list'} has parameters"
            )

    def set_modes(self, model: nn.Module) -> None:
        """Evaluation mode for what is frozen: no drop path, no dropout, no running statistics."""
        if self.trainable is not None:
            for name, module in model.named_modules():
                module.training = within(name, self.trainable)

    def reset(self, model: nn.Module, num_classes: int, why: str) -> None:
        """A new classifier, said on the terminal; ValueError where `reset_head` is false."""
        if self.reset_head is False:
            raise ValueError(f"{why}: set model.tuning.reset_head to null or true for a new classifier")
        model.reset_classifier(num_classes)
        _say(f"{why}: the classifier is new")

    def _load(self, model: nn.Module) -> list[str] | None:
        """Load `init_from`, if given, into one of our models; the class names the file tells, or None."""
        if self.init_from is None:
            return None
        loaded = read_file(self.init_from)
        try:
            plan = plan_weights(model, loaded)
            head = [name for name in (*plan.differ, *plan.unset, *plan.unused) if name.startswith("head.")]
            new = self.reset_head or (self.reset_head is None and bool(head))
            if new:
                plan = plan._replace(state={n: v for n, v in plan.state.items() if not n.startswith("head.")})
            apply_plan(model, plan, new)
        except (RuntimeError, ValueError) as error:
            text = str(error).replace("pass reset_head=True", "set model.tuning.reset_head to null or true")
            raise ValueError(f"model.tuning.init_from {self.init_from}: {text}") from error
        resized = [f"{row.target} ({row.resized})" for row in plan.rows if row.resized]
        if resized:
            _say(f"{self.init_from}: resampled to the model's grid: {', '.join(resized)}")
        if new:
            _say(f"{self.init_from}: the classifier is new")
        about = loaded.get("vitrel", {}) if isinstance(loaded, dict) else {}
        return None if new else about.get("classes")

    def _from_file(self, path: str, like: str | None) -> tuple[Backbone, list[str] | None]:
        """The model in a file, and the names of its classes where it tells them."""
        try:
            model = load(path, like=like)
            model = model if isinstance(model, Backbone) else from_timm(model)
        except ValueError as error:
            raise ValueError(f"model.tuning.init_from {path}: {error}") from error
        return model, (getattr(model, "pretrained_cfg", None) or {}).get("label_names")

    def _changed(self, base: Backbone, num_classes: int, img_size: tuple[int, int], model_args: dict[str, Any]) -> Backbone:
        """The model for these images and classes, with the encoding that is added."""
        model = rebuilt(base, img_size=img_size, **{k: v for k, v in model_args.items() if k not in ("pretrained",)})
        if base.arguments["img_size"] != img_size and (resized := base.resized(img_size)):
            _say(f"weights: resampled to {img_size[0]}x{img_size[1]} pixels: {', '.join(resized)}")
        if self.position is not None:
            fade = dict(fade_steps=1) if self.absolute == "fade" else {}  # until the length of the run is known
            model = relativize(model, self.position, self.position_args, absolute=self.absolute, **fade)
            _say(f"position: {self.position} is added in attention; the absolute embedding: {self.absolute}")
        if self.reset_head or model.num_classes != num_classes:
            self.reset(model, num_classes, f"weights of {base.num_classes} classes, data of {num_classes}")
        return model.train()


def within(name: str, prefixes: Iterable[str]) -> bool:
    """Whether a dotted name is one of the prefixes or lies below one."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def check_registered(name: str) -> None:
    """ValueError for what is not a name of timm's registry: with the nearest names, or with how weights are given."""
    if ":" in name:  # local-dir:folder, hf-hub:repository
        raise ValueError(
            f"model {name!r}: training takes a name of timm's; weights are given with model.tuning.init_from: FILE"
        )
    check_model_name(name)


@rank_zero_only
def _say(text: str) -> None:
    print(text)
