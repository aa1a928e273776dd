"""Optimizer parameter groups: weight decay and layer-wise learning-rate decay."""

import inspect
import math
from collections import defaultdict
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatch
from typing import Any, Literal

from timm.models import group_parameters
from timm.optim import create_optimizer_v2, get_optimizer_class, get_optimizer_info, list_optimizers
from torch import nn
from torch.optim import Optimizer

from vitrel.names import nearest
from vitrel.train.schedule import Schedule

KINDS = ("decayed", "undecayed", "position")


@dataclass(frozen=True)
class Optimisation:
    """Optimiser and schedule.

    Args:
        name: an optimiser timm knows (`timm.optim.list_optimizers()`), e.g. "adamw", "lamb", "sgd".
        lr: learning rate after warm-up.
        weight_decay: of matrices; never of biases, norms, position parameters or what the model's `no_weight_decay()` names.
        betas: of the optimisers that have them; null leaves the optimiser's own.
        eps: of the optimisers that have it; null leaves the optimiser's own.
        momentum: of the optimisers that have it; null is 0.9.
        position_lr_scale: learning rate of position parameters over that of all others, through the whole schedule.
        warmup_epochs: linear rise, in epochs, fractions too; counted per update.
        final_lr: share of `lr` that a falling schedule ends at.
        opt_args: further keywords of the optimiser.
        layer_decay: factor on the learning rate from each layer to the one before it; the head learns with the whole rate.
        lr_base_size: number of images per update that `lr` is given for; `lr` is scaled to the real number, which is
            batch_size * devices * accumulate_grad_batches. Null takes `lr` as it is.
        lr_base_scale: how that scales: "linear", or "sqrt".
        clip_mode: what `trainer.gradient_clip_val` bounds: the "norm" of all gradients, every "value", or each row's norm
            by its weights' ("agc", arXiv 2102.06171, the classifier left out). Null is the trainer's own, norm by default.
        schedule: what follows the warm-up.
    """

    name: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.05
    betas: tuple[float, ...] | None = None
    position_lr_scale: float = 1.0
    warmup_epochs: float = 5.0
    final_lr: float = 0.0
    eps: float | None = None
    momentum: float | None = None
    opt_args: dict[str, Any] | None = None
    layer_decay: float | None = None
    lr_base_size: int | None = None
    lr_base_scale: Literal["linear", "sqrt"] = "linear"
    clip_mode: Literal["norm", "value", "agc"] | None = None
    schedule: Schedule = field(default_factory=Schedule)

    def __post_init__(self) -> None:
        if not self.lr > 0 or not self.position_lr_scale > 0:
            raise ValueError(
                f"model.optim.lr ({self.lr}) and model.optim.position_lr_scale ({self.position_lr_scale}) must be positive"
            )
        if self.warmup_epochs < 0 or not 0 <= self.final_lr <= 1:
            raise ValueError(
                f"model.optim.warmup_epochs ({self.warmup_epochs}) is >= 0, model.optim.final_lr ({self.final_lr}) within 0..1"
            )
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:
            raise ValueError(f"model.optim.layer_decay is a factor, 0 < factor <= 1, not {self.layer_decay}")
        if self.lr_base_size is not None and self.lr_base_size < 1:
            raise ValueError(f"model.optim.lr_base_size is a number of images per update, not {self.lr_base_size}")
        check_optimizer(self)

    def scaled_lr(self, images: int) -> float:
        """The learning rate for that many images per update."""
        if self.lr_base_size is None:
            return self.lr
        ratio = images / self.lr_base_size
        return self.lr * (math.sqrt(ratio) if self.lr_base_scale == "sqrt" else ratio)


def check_optimizer(settings: Optimisation) -> None:
    """ValueError for an unknown optimiser, or one that has not what the settings give it."""
    name = settings.name.lower()
    base = name.removeprefix("lookahead_")
    if base not in list_optimizers():
        near = nearest(base, list_optimizers()) or ["adamw", "lamb", "sgd"]
        raise ValueError(f"model.optim.name: timm has no optimiser {settings.name!r}; nearest: {', '.join(near)}")
    info = get_optimizer_info(base)
    for key, has in (("betas", info.has_betas), ("eps", info.has_eps), ("momentum", info.has_momentum)):
        if getattr(settings, key) is not None and not has:
            raise ValueError(f"model.optim.{key}: the optimiser {name} has no {key}; leave it out")
    if settings.betas is not None and len(settings.betas) != info.num_betas:
        raise ValueError(f"model.optim.betas: {name} takes {info.num_betas}, not {len(settings.betas)}")
    own = inspect.signature(get_optimizer_class(base, bind_defaults=False)).parameters
    decided = {"params", "lr", "weight_decay", "betas", "eps", "momentum"}
    wrong = sorted(key for key in settings.opt_args or {} if key in decided or key not in own)
    if wrong:
        known = ", ".join(key for key in own if key not in decided)
        raise ValueError(f"model.optim.opt_args: {name} has no {', '.join(wrong)} to be set here; it has {known}")


def check_clipping(settings: Optimisation, value: float | None, algorithm: Enum | None) -> None:
    """ValueError when `clip_mode` and trainer.gradient_clip_val and .gradient_clip_algorithm do not fit each other."""
    mode = settings.clip_mode
    if mode is not None and not value:
        raise ValueError(f"model.optim.clip_mode {mode} clips nothing without trainer.gradient_clip_val: give both or none")
    if mode is not None and algorithm is not None and mode != algorithm.value:
        raise ValueError(
            f"model.optim.clip_mode is {mode}, trainer.gradient_clip_algorithm {algorithm.value}: leave the latter out"
        )


def parameter_groups(
    model: nn.Module, lr: float, weight_decay: float, position_lr_scale: float = 1.0, layer_decay: float | None = None
) -> list[dict[str, Any]]:
    """Decayed, undecayed (no_weight_decay(), biases, norms) and position parameters (undecayed, own rate), each its group.

    With `layer_decay` each of the three is split by layer ("decayed.0", ... from the input on), and a group's own `lr` holds
    its layer's factor: timm's `lr_scale` is read by timm's schedules alone.

    Raises:
        ValueError: `position_lr_scale` is not 1 and the model names no position parameters, or the model names no layers.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    position = set(model.position_parameters()) if hasattr(model, "position_parameters") else set()
    if position_lr_scale != 1 and not position & named.keys():
        raise ValueError(
            f"model.optim.position_lr_scale is {position_lr_scale}, but the model has no position parameters to apply it to: "
            "set it to 1"
        )
    spared = set(model.no_weight_decay()) if hasattr(model, "no_weight_decay") else set()
    layers = None if layer_decay is None else layer_of(model)
    members: dict[tuple[str, int], list[str]] = defaultdict(list)
    for name, parameter in named.items():
        plain = parameter.ndim <= 1 or name.endswith(".bias") or any(fnmatch(name, pattern) for pattern in spared)
        kind = "position" if name in position else "undecayed" if plain else "decayed"
        members[kind, 0 if layers is None else layers[name]].append(name)
    top = 0 if layers is None else max(layers.values())
    return [
        {
            "name": kind if layers is None else f"{kind}.{layer}",
            "params": [named[n] for n in names],
            "names": names,
            "lr": lr * (position_lr_scale if kind == "position" else 1) * (layer_decay or 1) ** (top - layer),
            "weight_decay": weight_decay if kind == "decayed" else 0.0,
        }
        # the head's group first: it learns with the rate that logs show
        for (kind, layer), names in sorted(members.items(), key=lambda item: (KINDS.index(item[0][0]), -item[0][1]))
    ]


def layer_of(model: nn.Module) -> dict[str, int]:
    """The layer of every parameter, by name: 0 for the stem, then block by block, the head last; timm's `group_matcher`."""
    if not hasattr(model, "group_matcher"):
        raise ValueError(
            f"model.optim.layer_decay: {type(model).__name__} has no group_matcher() to tell its layers: leave it out"
        )
    return group_parameters(model, model.group_matcher(coarse=False), reverse=True)


def create_optimizer(model: nn.Module, settings: Optimisation, images: int = 1) -> Optimizer:
    """timm's optimiser of that name over `parameter_groups`, at the rate for `images` images per update.

    Raises:
        ValueError: as `parameter_groups`, or an optimiser that needs second derivatives.
    """
    lr, decay = settings.scaled_lr(images), settings.weight_decay
    groups = parameter_groups(model, lr, decay, settings.position_lr_scale, settings.layer_decay)
    groups = [{k: v for k, v in group.items() if k != "names"} for group in groups]
    given = {"betas": settings.betas, "eps": settings.eps, "momentum": settings.momentum}
    extra = {key: value for key, value in given.items() if value is not None}
    if settings.name == "adamw":
        extra["fused"] = True  # one kernel instead of several per parameter, on CPUs too
    extra |= settings.opt_args or {}
    optimizer = create_optimizer_v2(groups, opt=settings.name, lr=lr, weight_decay=decay, **extra)
    # a fused one could unscale gradients itself; Lightning then refuses to clip them, without any scaling too (bf16-mixed)
    optimizer._step_supports_amp_scaling = False
    if getattr(optimizer, "is_second_order", False):
        raise ValueError(
            f"model.optim.name: {settings.name} needs second derivatives, which training does not make: take another"
        )
    return optimizer
