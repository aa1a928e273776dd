"""The optimizer, its parameter groups (weight decay, layer-wise learning-rate decay) and the learning-rate schedule."""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from fnmatch import fnmatch
from typing import Any, Literal

from timm.models import group_parameters
from timm.optim import create_optimizer_v2, list_optimizers
from torch import nn
from torch.optim import Optimizer

from vitrel.common.names import nearest

KINDS = ("decayed", "undecayed", "position")
WARMUP_EPOCHS, WARMUP_SHARE = 5.0, 0.1  # default of `warmup_epochs`, and its largest share of a run


@dataclass(frozen=True)
class Optimization:
    """Settings of the optimizer and of the learning rate.

    Args:
        name: name of an optimizer in timm (`timm.optim.list_optimizers()`), e.g. "adamw", "lamb", "sgd".
        lr: peak learning rate, reached at the end of the warm-up.
        weight_decay: weight decay of matrices; biases, norms, position parameters and the parameters named by the model's
            `no_weight_decay()` are not decayed.
        betas: the optimizer's betas, if it has them; null is the optimizer's default.
        momentum: the optimizer's momentum, if it has one.
        position_lr_scale: factor on the learning rate of position parameters. Null: with `layer_decay`, which is for
            fine-tuning, encodings in attention have their own factor (their `lr_scale`) on `lr`, without layer decay, since
            most of their parameters are logits, which have to move further than weights; without `layer_decay` it is 1.
        warmup_epochs: length of the linear warm-up in epochs, fractions allowed; the rate rises at every update. Null: 5, or a
            tenth of a run of less than 50.
        initial_lr: learning rate from which the warm-up rises, as a share of `lr`.
        final_lr: learning rate at the end of the run, as a share of `lr`, to which it falls by a cosine; 1: it stays `lr`.
        opt_args: further keywords of the optimizer, e.g. {eps: 1e-6}.
        layer_decay: layer-wise learning-rate decay: each layer's rate is that of the next layer times this factor, and the
            head has the full rate. Null: no decay.
        lr_base_size: number of images per update for which `lr` is meant: `lr` is multiplied by the actual number, batch_size *
            devices * accumulate_grad_batches, divided by lr_base_size. Null uses `lr` unscaled.
        lr_base_scale: "linear", multiplied by that ratio; or "sqrt", by its square root.

    Raises:
        ValueError: an unknown optimizer, or a value out of range.
    """

    name: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.05
    betas: tuple[float, ...] | None = None
    position_lr_scale: float | None = None
    warmup_epochs: float | None = None
    initial_lr: float = 0.0
    final_lr: float = 0.0
    momentum: float = 0.9
    opt_args: dict[str, Any] = field(default_factory=dict)
    layer_decay: float | None = None
    lr_base_size: int | None = None
    lr_base_scale: Literal["linear", "sqrt"] = "linear"

    def __post_init__(self) -> None:
        if not self.lr > 0 or not (self.position_lr_scale is None or self.position_lr_scale > 0):
            raise ValueError(
                f"model.optim.lr ({self.lr}) and model.optim.position_lr_scale ({self.position_lr_scale}) must be positive"
            )
        if (self.warmup_epochs or 0) < 0 or not 0 <= self.initial_lr <= 1 or not 0 <= self.final_lr <= 1:
            raise ValueError(
                f"model.optim.warmup_epochs ({self.warmup_epochs}) must be at least 0, model.optim.initial_lr "
                f"({self.initial_lr}) and model.optim.final_lr ({self.final_lr}) within 0..1"
            )
        if self.layer_decay is not None and not 0 < self.layer_decay <= 1:
            raise ValueError(f"model.optim.layer_decay must be a factor, 0 < factor <= 1, not {self.layer_decay}")
        if self.lr_base_size is not None and self.lr_base_size < 1:
            raise ValueError(f"model.optim.lr_base_size must be a number of images, at least 1, not {self.lr_base_size}")
        base = self.name.lower().removeprefix("lookahead_")
        if base not in list_optimizers():
            near = nearest(base, list_optimizers()) or ["adamw", "lamb", "sgd"]
            raise ValueError(f"model.optim.name: timm has no optimizer {self.name!r}; nearest: {', '.join(near)}")

    def scaled_lr(self, images: int) -> float:
        """Return the peak learning rate for `images` images per update, over all devices and accumulated batches.

        It is `lr` times images / lr_base_size, or times the square root of that ratio with lr_base_scale "sqrt"; without
        lr_base_size it is `lr`.
        """
        if self.lr_base_size is None:
            return self.lr
        ratio = images / self.lr_base_size
        return self.lr * (math.sqrt(ratio) if self.lr_base_scale == "sqrt" else ratio)

    def factor(self, updates: int, per_epoch: int) -> Callable[[int], float]:
        """Return the function that maps an update (0, 1, ...) to the factor on the peak learning rate.

        It rises linearly from `initial_lr` (exclusive) to 1 in the warm-up, and then falls by a cosine to `final_lr`.

        Args:
            updates: number of updates of the run.
            per_epoch: number of updates per epoch.

        Raises:
            ValueError: the warm-up is as long as the run, or longer.
        """
        epochs = self.warmup_epochs
        if epochs is None:
            epochs = min(WARMUP_EPOCHS, WARMUP_SHARE * updates / per_epoch)
        warmup = round(epochs * per_epoch)
        if warmup >= updates:
            raise ValueError(
                f"warm-up of {warmup} updates in a run of {updates}: lower model.optim.warmup_epochs or train longer"
            )

        def at(update: int) -> float:
            if update < warmup:
                return self.initial_lr + (1 - self.initial_lr) * (update + 1) / warmup
            progress = min(1.0, (update - warmup) / (updates - warmup))
            return self.final_lr + (1 - self.final_lr) * 0.5 * (1 + math.cos(math.pi * progress))

        return at


def parameter_groups(model: nn.Module, settings: Optimization, lr: float) -> list[dict[str, Any]]:
    """Return the optimizer's parameter groups, as dictionaries of name, params, lr and weight_decay.

    The groups are, in this order, "decayed", "undecayed" (biases, parameters of at most one dimension, and those that a name or
    pattern of `no_weight_decay()` matches) and "position" (`position_parameters()`: undecayed, rate times `position_lr_scale`).
    A `position_lr_scale` of None is 1, except with `layer_decay`: encodings in attention are then in groups of their own
    ("position.x10"), whose learning rate is `lr` times the factor in the model's `position_lr_scales()`, without layer decay.
    With `layer_decay`, every other group is split by layer, last first (..., "decayed.0" at the input); its `lr` includes the
    factor layer_decay ** (last layer - layer), because only timm's schedulers read timm's `lr_scale`. Frozen
    parameters are in no group.

    Args:
        lr: peak learning rate, for the number of images in an update.

    Raises:
        ValueError: `position_lr_scale` is neither None nor 1, and the model has no trainable parameters in
            `position_parameters()`; or `layer_decay` is set and the model has no `group_matcher()`.
    """
    position_lr_scale, layer_decay = settings.position_lr_scale, settings.layer_decay
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    position = set(model.position_parameters()) if hasattr(model, "position_parameters") else set()
    if position_lr_scale not in (None, 1) and not position & named.keys():
        raise ValueError(
            f"model.optim.position_lr_scale is {position_lr_scale}, but the model has no position parameters to apply it to: "
            "set it to 1"
        )
    excluded = set(model.no_weight_decay()) if hasattr(model, "no_weight_decay") else set()
    layers = None if layer_decay is None else layer_of(model)
    own = model.position_lr_scales() if position_lr_scale is None and layers and hasattr(model, "position_lr_scales") else {}
    members: dict[tuple[str, int, float | None], list[str]] = defaultdict(list)
    for name, parameter in named.items():
        undecayed = parameter.ndim <= 1 or name.endswith(".bias") or any(fnmatch(name, pattern) for pattern in excluded)
        kind = "position" if name in position else "undecayed" if undecayed else "decayed"
        members[kind, 0 if layers is None or name in own else layers[name], own.get(name)].append(name)
    top = 0 if layers is None else max(layers.values())
    groups = []
    # the head's group comes first: the logs show the learning rate of the first group
    for (kind, layer, scale), names in sorted(members.items(), key=lambda item: (KINDS.index(item[0][0]), -item[0][1])):
        factor = scale or ((position_lr_scale or 1) if kind == "position" else 1) * (layer_decay or 1) ** (top - layer)
        groups.append(
            {
                "name": f"{kind}.x{scale:g}" if scale else kind if layers is None else f"{kind}.{layer}",
                "params": [named[n] for n in names],
                "lr": lr * factor,
                "weight_decay": settings.weight_decay if kind == "decayed" else 0.0,
            }
        )
    return groups


def layer_of(model: nn.Module) -> dict[str, int]:
    """Return {parameter name: layer index} from timm's `group_matcher`: the stem is 0, each block is one, the head is last.

    ValueError for a model that has none.
    """
    if not hasattr(model, "group_matcher"):
        raise ValueError(
            f"model.optim.layer_decay: {type(model).__name__} has no group_matcher() that defines its layers: leave it out"
        )
    return group_parameters(model, model.group_matcher(coarse=False), reverse=True)


def create_optimizer(model: nn.Module, settings: Optimization, images: int = 1) -> Optimizer:
    """Return timm's optimizer `settings.name` over `parameter_groups`, with `lr` scaled to `images` images per update.

    Raises:
        ValueError: see `parameter_groups`; `opt_args` that the optimizer does not have; or it needs second derivatives.
    """
    lr = settings.scaled_lr(images)
    keywords: dict[str, Any] = {"momentum": settings.momentum}
    if settings.betas is not None:
        keywords["betas"] = settings.betas
    if settings.name == "adamw":
        keywords["fused"] = True  # one kernel instead of several per parameter, on CPUs too
    keywords |= settings.opt_args
    groups = parameter_groups(model, settings, lr)
    try:
        optimizer = create_optimizer_v2(groups, opt=settings.name, lr=lr, weight_decay=settings.weight_decay, **keywords)
    except TypeError as error:
        raise ValueError(f"model.optim.opt_args: {error}") from error
    if getattr(optimizer, "is_second_order", False):
        raise ValueError(f"model.optim.name: {settings.name} needs second derivatives, which are not computed: use another")
    # Fused optimizers can unscale gradients themselves. Lightning then refuses to clip gradients, even where nothing is scaled
    # (bf16-mixed).
    optimizer._step_supports_amp_scaling = False  # noqa: SLF001  the flag that Lightning reads
    return optimizer
