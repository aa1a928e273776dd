"""What is decayed, how fast it learns, and the schedule."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from timm.data import Mixup
from timm.optim import create_optimizer_v2
from torch import nn
from torch.optim import Optimizer


@dataclass(frozen=True)
class Optimisation:
    """Optimiser and schedule.

    Args:
        name: an optimiser timm knows (`timm.optim.list_optimizers()`).
        lr: learning rate after warm-up.
        weight_decay: of matrices; never of biases, norms, position parameters or what the model's `no_weight_decay()` names.
        betas: of Adam-like optimisers; null leaves the optimiser's own.
        position_lr_scale: learning rate of position parameters over that of all others, through the whole schedule.
        warmup_epochs: linear rise from zero, in epochs, fractions too; counted per update.
        final_lr: share of `lr` that the cosine ends at.
    """

    name: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.05
    betas: tuple[float, float] | None = (0.9, 0.999)
    position_lr_scale: float = 1.0
    warmup_epochs: float = 5.0
    final_lr: float = 0.0

    def __post_init__(self) -> None:
        if not self.lr > 0 or not self.position_lr_scale > 0:
            raise ValueError(f"optim.lr ({self.lr}) and optim.position_lr_scale ({self.position_lr_scale}) must be positive")
        if self.warmup_epochs < 0 or not 0 <= self.final_lr <= 1:
            raise ValueError(
                f"optim.warmup_epochs ({self.warmup_epochs}) is >= 0, optim.final_lr ({self.final_lr}) within 0..1"
            )


@dataclass(frozen=True)
class Mixing:
    """Mixup and cutmix as in timm: both alphas 0 is off.

    Args:
        mixup, cutmix: alpha of the Beta distribution that the share is drawn from; 0 for none.
        prob: probability of mixing a batch (or pair, or element).
        switch_prob: probability of cutmix where both are on.
        mode: one draw per "batch", "pair" or "elem".
    """

    mixup: float = 0.0
    cutmix: float = 0.0
    prob: float = 1.0
    switch_prob: float = 0.5
    mode: Literal["batch", "pair", "elem"] = "batch"

    def build(self, num_classes: int, label_smoothing: float) -> Mixup | None:
        """timm's Mixup, which also smooths the labels; None when off."""
        if not self.mixup and not self.cutmix:
            return None
        return Mixup(
            mixup_alpha=self.mixup,
            cutmix_alpha=self.cutmix,
            prob=self.prob,
            switch_prob=self.switch_prob,
            mode=self.mode,
            label_smoothing=label_smoothing,
            num_classes=num_classes,
        )


def parameter_groups(model: nn.Module, lr: float, weight_decay: float, position_lr_scale: float = 1.0) -> list[dict[str, Any]]:
    """Three groups, empty ones left out: decayed, undecayed (no_weight_decay(), biases, norms), position (undecayed, own rate).

    Raises:
        ValueError: `position_lr_scale` is not 1 and the model names no position parameters.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    position = set(model.position_parameters()) if hasattr(model, "position_parameters") else set()
    if position_lr_scale != 1 and not position & named.keys():
        raise ValueError(
            f"optim.position_lr_scale is {position_lr_scale}, but the model has no position parameters to apply it to: "
            "set it to 1"
        )
    spared = set(model.no_weight_decay()) if hasattr(model, "no_weight_decay") else set()
    members: dict[str, list[str]] = {"decayed": [], "undecayed": [], "position": []}
    for name, parameter in named.items():
        group = "position" if name in position else "undecayed" if name in spared or parameter.ndim <= 1 else "decayed"
        members[group].append(name)
    decay = {"decayed": weight_decay, "undecayed": 0.0, "position": 0.0}
    rate = {"decayed": lr, "undecayed": lr, "position": lr * position_lr_scale}
    return [
        {"name": group, "params": [named[n] for n in names], "names": names, "lr": rate[group], "weight_decay": decay[group]}
        for group, names in members.items()
        if names
    ]


def create_optimizer(model: nn.Module, settings: Optimisation) -> Optimizer:
    """timm's optimiser of that name over `parameter_groups`."""
    groups = parameter_groups(model, settings.lr, settings.weight_decay, settings.position_lr_scale)
    groups = [{k: v for k, v in group.items() if k != "names"} for group in groups]
    extra: dict[str, Any] = {} if settings.betas is None else {"betas": tuple(settings.betas)}
    if settings.name == "adamw":
        extra["fused"] = True  # one kernel instead of several per parameter, on CPUs too
    return create_optimizer_v2(groups, opt=settings.name, lr=settings.lr, weight_decay=settings.weight_decay, **extra)


def cosine_with_warmup(updates: int, warmup: int, final: float = 0.0) -> Callable[[int], float]:
    """Factor on every group's own rate at update 0, 1, ...: linear rise over `warmup` updates, then a cosine to `final`.

    Raises:
        ValueError: the warm-up takes the whole run.
    """
    if warmup >= updates:
        raise ValueError(f"warm-up of {warmup} updates in a run of {updates}: lower optim.warmup_epochs or train longer")

    def factor(update: int) -> float:
        if update < warmup:
            return (update + 1) / warmup
        progress = min(1.0, (update - warmup) / (updates - warmup))
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor
