"""Where training starts from and what of the model it changes."""

from collections.abc import Iterable
from dataclasses import dataclass

from lightning.pytorch.utilities import rank_zero_only
from torch import nn

import vitrel.models  # noqa: F401  registers our names with timm
from vitrel.models.create import check_model_name
from vitrel.names import nearest
from vitrel.weights.load import apply_plan, plan_weights, read_file


@dataclass(frozen=True)
class Tuning:
    """Fine-tuning: the weights to start from, and which of them are trained.

    Args:
        init_from: a checkpoint of vitrel train (its averaged weights, where it has them), or any file that
            `vitrel.load_pretrained` takes; position parameters of another grid are resampled by the model's policy.
        reset_head: start with a new classifier; needed for other classes than those of `init_from`.
        trainable: names of the modules and parameters that are trained, with all below them, e.g. [norm, fc_norm, head];
            everything else is frozen, and without drop path and dropout. Null trains all.
    """

    init_from: str | None = None
    reset_head: bool = False
    trainable: list[str] | None = None

    def __post_init__(self) -> None:
        if self.reset_head and self.init_from is None:
            raise ValueError(
                "model.tuning.reset_head is of model.tuning.init_from: without a file to start from every head is new"
            )

    def load(self, model: nn.Module) -> list[str] | None:
        """Load `init_from`, if given, and print what was resampled; the class names the file tells, or None.

        Raises:
            ValueError: weights that do not fit; classes of another number unless `reset_head`.
        """
        if self.init_from is None:
            return None
        loaded = read_file(self.init_from)
        try:
            plan = plan_weights(model, loaded)
            if self.reset_head:
                plan = plan._replace(state={n: v for n, v in plan.state.items() if not n.startswith("head.")})
            apply_plan(model, plan, self.reset_head)
        except (RuntimeError, ValueError) as error:
            text = str(error).replace("pass reset_head=True", "set model.tuning.reset_head: true")
            raise ValueError(f"model.tuning.init_from {self.init_from}: {text}") from error
        resized = [f"{row.target} ({row.resized})" for row in plan.rows if row.resized]
        if resized:
            _say(f"{self.init_from}: resampled to the model's grid: {', '.join(resized)}")
        about = loaded.get("vitrel", {}) if isinstance(loaded, dict) else {}
        return None if self.reset_head else about.get("classes")

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
