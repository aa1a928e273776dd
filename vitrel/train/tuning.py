"""Fine-tuning: initial weights, an added position encoding, and the choice of trainable parameters."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any, Literal

from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn

import vitrel.models  # noqa: F401  registers our names with timm
from vitrel.common.names import nearest
from vitrel.models.backbone import Backbone
from vitrel.models.config import config_of, stored_arguments
from vitrel.models.create import check_model_name, create_model, create_sized
from vitrel.models.vit import ViT
from vitrel.position import POSITIONS, select_options, split_position
from vitrel.weights import absolute_to_relative, load, relativize
from vitrel.weights.absolute_to_relative import IMAGES, cannot_fit
from vitrel.weights.from_timm import timm_model
from vitrel.weights.plan import apply_plan, plan_weights, rebuilt
from vitrel.weights.read import read_file
from vitrel.weights.recognize import as_vitrel


@dataclass(frozen=True)
class Tuning:
    """Settings of fine-tuning: initial weights, an encoding to add, and the parameters that are trained.

    With `pretrained`, `position`, or `init_from` for a timm model, the model is converted to a vitrel model
    (`vitrel.from_timm`), which takes any image size; `model_args` are then arguments of vitrel.models.ViT or Swin.

    Args:
        init_from: file with the initial weights: a checkpoint of vitrel train (its averaged weights, if it has them), or any
            file that `vitrel.load` takes; for bare weights, `model` names the architecture. Position parameters of another
            grid are resampled.
        pretrained: start from timm's pretrained weights for the model's name, from timm's cache or the network.
        position: encoding to add in attention, a key of POSITIONS or several joined by '+' (`vitrel.relativize`). Without
            initial weights it may also replace one, in a Swin too.
        position_args: options of `position`.
        absolute: what happens to the absolute embedding when `position` is added: "keep" it, "drop" it, or "fade" it out over
            the first half of the run. Null: "drop" where `position` is fitted, otherwise "keep".
        fit: number of training images, without augmentation, to which `position` is fitted before the first update, and the
            other weights are adapted (`vitrel.weights.absolute_to_relative`); fewer where there are fewer. Null: 256, if
            training starts from weights whose position can be fitted and `absolute` is not "keep". 0: not fitted, the
            encoding's learned parameters start as `vitrel.relativize` leaves them.
        reset_head: true: start with a new classifier; false: never; null: only if the classes of the data differ from those
            of the weights.
        trainable: names of modules and parameters to train, including everything below them, e.g. [norm, fc_norm, head]; all
            else is frozen, without drop path and dropout. Null trains all.

    Raises:
        ValueError: settings that exclude or need each other.
    """

    init_from: str | None = None
    pretrained: bool = False
    position: str | None = None
    position_args: dict[str, Any] | None = None
    absolute: Literal["keep", "drop", "fade"] | None = None
    fit: int | None = None
    reset_head: bool | None = None
    trainable: list[str] | None = None

    def __post_init__(self) -> None:
        if self.reset_head and self.init_from is None and not self.pretrained:
            raise ValueError(
                "model.tuning.reset_head needs model.tuning.init_from or pretrained: without initial weights every head is new"
            )
        if self.pretrained and self.init_from is not None:
            raise ValueError("model.tuning.pretrained and model.tuning.init_from exclude each other: set only one of them")
        if self.position is None and (self.absolute not in (None, "keep") or self.position_args):
            raise ValueError("model.tuning.absolute and position_args need model.tuning.position: name the encoding to add")
        if self.fit is not None and (self.fit < 0 or (self.fit and (self.position is None or self.absolute == "keep"))):
            raise ValueError(
                f"model.tuning.fit ({self.fit}) is a number of images, and needs a position with absolute: drop or fade"
            )

    def build(
        self, name: str, num_classes: int, img_size: tuple[int, int], model_args: dict[str, Any]
    ) -> tuple[nn.Module, list[str] | None]:
        """Return the model with its initial weights, and the class names stored with the weights, or None.

        The class names are None too if the classifier is new. Prints what is resampled or new.

        Args:
            name: timm name, or a file that `vitrel.load` takes.
            num_classes: number of classes of the data.
            img_size: (H, W) in pixels.
            model_args: further arguments of the model.

        Raises:
            ValueError: an unknown model, `num_classes` or `img_size` in `model_args`, or `pretrained` there for a model that
                becomes a vitrel model; weights that do not fit, or another number of classes with `reset_head` false.
        """
        if reserved := sorted({"num_classes", "img_size"} & model_args.keys()):
            raise ValueError(f"model_args must not set {' and '.join(reserved)}, which data.data and data.size determine")
        weights, rebuilds = model_args.get("checkpoint_path"), self._rebuilds(name)
        if weights and (rebuilds or name.startswith("vitrel_")):
            raise ValueError(f"model_args.checkpoint_path is for timm's own models: use model.tuning.init_from: {weights}")
        if "pretrained" in model_args and rebuilds:
            raise ValueError(
                f"leave out model_args.pretrained: {name} becomes a vitrel model here, and its weights come from "
                "model.tuning.pretrained or init_from"
            )
        if rebuilds:
            base, classes = self.initial(name)
            try:
                changed = self._changed(base, name, num_classes, img_size, model_args)
            except (RuntimeError, TypeError) as error:
                raise ValueError(f"{name} cannot have model.model_args {model_args}: {error}") from error
            return changed, None if self.reset_head or base.num_classes != num_classes else classes
        check_registered(name)
        arguments = {"img_size": img_size, "num_classes": num_classes, **model_args}
        try:
            model = timm_model(name, **arguments) if weights else create_sized(name, **arguments)
        except TypeError as error:
            raise ValueError(f"wrong argument of the model {name}: {error}; model.model_args is {model_args}") from error
        return model, self._load(model)

    def initial(self, name: str) -> tuple[Backbone, list[str] | None]:
        """Return the model with its initial weights as a vitrel model, without the encoding `position`, and its class names.

        `name` is as for `build`. The class names are those stored with the weights, or None. Without pretrained, init_from or a
        file as `name` the weights are random.

        Raises:
            ValueError: an unknown model, one that `vitrel.from_timm` does not take, weights that do not fit, or of two sources.
        """
        if Path(name).exists():
            if self.init_from is not None or self.pretrained:
                raise ValueError(f"model {name!r} is a file that holds the weights: leave out pretrained and init_from")
            return self._from_file(name, None)
        check_registered(name)
        if self.init_from is not None:
            return self._from_file(self.init_from, name)
        base = as_vitrel(create_model(name, pretrained=self.pretrained))
        return base, _label_names(base) if self.pretrained else None

    def has_weights(self, name: str) -> bool:
        """Return whether these settings or a file `name`, the `model` of the run, give weights to start from.

        Weights that timm gives its own model, by `pretrained` or `checkpoint_path` in model_args, do not count.
        """
        return self.pretrained or self.init_from is not None or Path(name).exists()

    def fade_over(self, model: nn.Module, passes: int) -> dict[str, int]:
        """Make the absolute embedding fade out over the first half of a run, if `absolute` is "fade".

        Args:
            model: the model that `build` returned, changed in place.
            passes: number of forward passes in training.

        Returns:
            The model argument that stores the length of the fade, {"absolute_fade": passes // 2, at least 1}; {} if nothing
            fades.
        """
        if self.absolute != "fade":
            return {}
        model.absolute_fade.fade_steps = max(passes // 2, 1)
        return {"absolute_fade": model.absolute_fade.fade_steps}

    def images_to_fit(self, name: str, base: Backbone) -> int:
        """Return the number of images to fit `position` to: `fit`; if null, 256, or 0 where `fit_position` does nothing.

        Args:
            name: as for `build`.
            base: the model before `position` is added, as `initial` returns it.
        """
        if self.fit is not None or self.position is None:
            return self.fit or 0
        return IMAGES if self.has_weights(name) and self.absolute != "keep" and not cannot_fit(base) else 0

    def fit_position(self, model: nn.Module, name: str, images_of: Callable[[int], Tensor]) -> None:
        """Fit the added encoding, in place, to the attention of the initial model; `absolute_to_relative` says how.

        The first process prints how much of attention the encoding explains. Nothing is done where `images_to_fit` is 0:
        without `position`, with `fit` 0, or by default where the weights are random, their position cannot be fitted, or
        `absolute` is "keep".

        Args:
            model: the model that `build` returned for `name`; its classifier is left as it is.
            name: as for `build`.
            images_of: function of a number of images that returns that many or fewer, normalized [n, 3, H, W] of the model's
                size, without labels.

        Raises:
            ValueError: a model whose position cannot be fitted, if `fit` is set.
        """
        if self.position is None or self.fit == 0 or not (self.fit or self.has_weights(name)):
            return
        base = self.initial(name)[0]
        if not (n := self.images_to_fit(name, base)):
            return
        images = images_of(n)
        original = rebuilt(base, img_size=tuple(images.shape[2:])).to(next(model.parameters()).device)
        fade = {"fade_steps": 1} if self.absolute == "fade" else {}
        absolute = self.absolute or "drop"
        fitted = absolute_to_relative(original, images, self.position, self.position_args, absolute=absolute, **fade)
        # the head is the model's own, and one for segmentation has dropped what only classifiers read
        state = model.state_dict()
        head = {name: value for name, value in state.items() if name.startswith("head.")}
        model.load_state_dict({name: value for name, value in (fitted.state_dict() | head).items() if name in state})
        report = fitted.conversion
        before, after = ([step.explained for step in steps] for steps in (report.before, report.after))
        least = min(range(len(after)), key=after.__getitem__)
        rank_zero_only(print)(
            f"position: {report.head()}; it explains {mean(after):.0%} of attention (before: {mean(before):.0%}), in block "
            f"{least} least, {after[least]:.0%}"
        )

    def stored(self, model: nn.Module, name: str, model_args: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the name and the arguments with which timm.create_model rebuilds the model, for checkpoints.

        `name` and `model_args` are as for `build`. The number of classes and the image size are not among the arguments.
        """
        if not self._rebuilds(name):
            return name, stored_arguments(model_args)
        config = config_of(model)
        separate = ("num_classes", "img_size")  # a checkpoint stores them separately
        arguments = {key: value for key, value in config.arguments.items() if key not in separate and value is not None}
        return config.architecture, json.loads(json.dumps(arguments | {"pretrained_cfg_overlay": config.preparation}))

    def _rebuilds(self, name: str) -> bool:
        """Return whether `build` converts a timm model or a file to a vitrel model, instead of calling timm.create_model."""
        from_timm_weights = self.init_from is not None and not name.startswith("vitrel_")
        return self.pretrained or self.position is not None or from_timm_weights or Path(name).exists()

    def freeze(self, model: nn.Module) -> None:
        """Freeze all parameters outside `trainable` and unfreeze those inside; null changes nothing.

        ValueError if a name is unknown or no parameter would be trained.
        """
        if self.trainable is None:
            return
        names = [name for name, _ in model.named_modules() if name] + [name for name, _ in model.named_parameters()]
        for name in self.trainable:
            if name not in names:
                near = nearest(name, names, cutoff=0.3)
                raise ValueError(f"model.tuning.trainable: the model has no {name!r}; nearest: {', '.join(near) or names[0]}")
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(within(name, self.trainable))
        if not any(parameter.requires_grad for parameter in model.parameters()):
            raise ValueError(
                f"model.tuning.trainable: {', '.join(self.trainable) or 'an empty list'} has no parameters to train"
            )

    def set_modes(self, model: nn.Module) -> None:
        """Set the modules of `trainable` to training mode and all others, the model itself too, to evaluation mode.

        Frozen modules thus have no drop path, no dropout and no update of running statistics. No change if `trainable` is null.
        """
        if self.trainable is not None:
            for name, module in model.named_modules():
                module.training = within(name, self.trainable)

    def reset(self, model: nn.Module, num_classes: int, why: str) -> None:
        """Give the model a new classifier in place, and print the reason `why`; ValueError if `reset_head` is false.

        With `num_classes` 0, for a model whose head of segmentation follows, nothing is printed.
        """
        if self.reset_head is False:
            raise ValueError(f"{why}: set model.tuning.reset_head to null or true for a new classifier")
        model.reset_classifier(num_classes)
        if num_classes:  # else a head of segmentation follows
            rank_zero_only(print)(f"{why}: the classifier is new")

    def _load(self, model: nn.Module) -> list[str] | None:
        """Load `init_from`, if set, into a vitrel model in place; return the class names in the file.

        None if there are none, or if the classifier is not loaded but new. Prints what is resampled or new; ValueError if the
        weights do not fit.
        """
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
            text = str(error).replace("reset_head=True", "set model.tuning.reset_head to null or true")
            raise ValueError(f"model.tuning.init_from {self.init_from}: {text}") from error
        resampled = [f"{row.target} ({row.resampled})" for row in plan.rows if row.resampled]
        if resampled:
            rank_zero_only(print)(f"{self.init_from}: resampled to the model's grid: {', '.join(resampled)}")
        if new:
            rank_zero_only(print)(f"{self.init_from}: the classifier is new")
        stored = loaded.get("vitrel", {}) if isinstance(loaded, dict) else {}
        return None if new else stored.get("classes")

    def _from_file(self, path: str, like: str | None) -> tuple[Backbone, list[str] | None]:
        """Return the model in a file, as a vitrel model, and its class names or None.

        `like` names the architecture, for a file of bare weights. ValueError if the file cannot be loaded.
        """
        try:
            model = load(path, like=like)
            model = as_vitrel(model)
        except ValueError as error:
            raise ValueError(f"model.tuning.init_from {path}: {error}") from error
        return model, _label_names(model)

    def _changed(
        self, base: Backbone, name: str, num_classes: int, img_size: tuple[int, int], model_args: dict[str, Any]
    ) -> Backbone:
        """Return the model `base` rebuilt for this image size and these classes, with the encoding `position` added.

        It is in training mode. Without given weights it is that of `_new`. Else it has those of `base` and, for another number
        of classes or if `reset_head`, a new head by `reset`, which may raise ValueError. Prints what is resampled or new.

        Args:
            base: as `initial` returns it.
            name: as for `build`.
            num_classes: number of classes of the data.
            img_size: (H, W) in pixels.
            model_args: further arguments of the model.
        """
        has_weights = self.has_weights(name)
        changes = {"img_size": img_size, **model_args}
        if not has_weights:
            return self._new(base, **changes, num_classes=num_classes)
        model = rebuilt(base, **changes)
        if base.arguments["img_size"] != img_size and (resampled := base.resampled(img_size)):
            rank_zero_only(print)(f"weights: resampled to {img_size[0]}x{img_size[1]} pixels: {', '.join(resampled)}")
        if self.position is not None:
            fade = dict(fade_steps=1) if self.absolute == "fade" else {}  # `fade_over` sets the length when it is known
            n = self.images_to_fit(name, base)
            absolute = self.absolute or ("drop" if n else "keep")
            model = relativize(model, self.position, self.position_args, absolute=absolute, **fade)
            rank_zero_only(print)(f"position: {self.position} is added in attention; the absolute embedding: {absolute}")
            if not n:
                why = "" if self.fit == 0 or self.absolute == "keep" else f", since {cannot_fit(base).partition(': use')[0]}"
                rank_zero_only(print)(
                    f"position: {self.position} is not fitted to the weights{why}: it is learned in training alone, which "
                    "takes many epochs"
                )
        if self.reset_head or model.num_classes != num_classes:
            self.reset(model, num_classes, f"weights of {base.num_classes} classes, data of {num_classes}")
        return model.train()

    def _new(self, base: Backbone, **changes: Any) -> Backbone:
        """Return a model like `base` with new weights and the encoding `position` in attention; print all its encodings.

        `position` is added to the absolute embedding (unless that is dropped) and to a rotation (unless `position` rotates
        too), and replaces any other. Without `position` the encodings are those of `base`, and nothing is printed.

        Args:
            base: a model whose weights are not used.
            changes: arguments of the model that differ from those of `base`.

        Raises:
            ValueError: `position` adds to tokens, or an absolute embedding is to fade and the model has none or is no ViT.
        """
        config = config_of(base)
        if self.position is None:
            return config.build(**changes).train()
        added, _ = split_position(self.position)
        if added:
            raise ValueError(f"model.tuning.position {self.position!r}: {added!r} adds to tokens; name encodings of attention")
        tokens, attention = split_position(config.arguments["position"])
        fades = {"absolute_fade": 1} if self.absolute == "fade" else {}  # `fade_over` sets the length when it is known
        if fades and not (tokens and isinstance(base, ViT)):
            raise ValueError("model.tuning.absolute: fade needs a ViT with an absolute embedding: set it to keep or drop")
        new = self.position.split("+")
        rotates = any(POSITIONS[key].rotates for key in new)
        kept = tokens.split("+") if tokens and self.absolute != "drop" else []
        kept += [key for key in attention.split("+") if key and POSITIONS[key].rotates and not rotates and key not in new]
        position = "+".join(key for key in dict.fromkeys(kept + new) if key != "none") or "none"
        options = select_options("+".join(kept), config.arguments["position_args"] or {}) | (self.position_args or {})
        model = config.build(position=position, position_args=options or None, **fades, **changes)
        rank_zero_only(print)(f"position: {position}, with new weights")
        return model.train()


def _label_names(model: Backbone) -> list[str] | None:
    """Return the class names in the model's pretrained_cfg ("label_names"), None if it has none."""
    names = (getattr(model, "pretrained_cfg", None) or {}).get("label_names")
    return None if names is None else list(names)


def within(name: str, prefixes: Iterable[str]) -> bool:
    """Return whether a dotted name is one of the prefixes or lies below one of them."""
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def check_registered(name: str) -> None:
    """Raise ValueError for a name that is not in timm's registry, with the nearest names, or has a source, as "hf-hub:..."."""
    if ":" in name:  # local-dir:folder, hf-hub:repository
        raise ValueError(
            f"model {name!r}: training takes a timm name without a source; set weights with model.tuning.init_from: FILE"
        )
    check_model_name(name)
