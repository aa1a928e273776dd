"""The rows to come: which model at which size, protocol, crop and policy, in an order that shares the images."""

from collections.abc import Sequence
from dataclasses import dataclass

from vitrel.data import create_dataset
from vitrel.evaluate.checkpoint import Trained
from vitrel.evaluate.policies import policies_at, policies_of
from vitrel.evaluate.settings import Sweep
from vitrel.sizes import Size, format_size


@dataclass(frozen=True)
class Task:
    """One row to come. `policy` is one of `policies_at(trained.model, size)`, `crop_pct` the share that the centre crop keeps,
    `shifts` the pixels that the content is moved by after the row itself.
    """

    trained: Trained
    size: Size
    protocol: str
    policy: str
    crop_pct: float
    shifts: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        """Model, size, protocol and policy in words, for progress and errors."""
        what = f"{self.trained.label} at {format_size(self.size)} ({self.protocol}"
        return f"{what})" if self.policy == "none" else f"{what}, {self.policy})"


def plan(models: Sequence[Trained], sweep: Sweep) -> list[Task]:
    """Every row to make: models at their training sizes first (retention refers to them), then size by size so that images are
    shared.

    The size a model was trained at is always evaluated, unless `skip` names it. Where a model can choose how to serve a size,
    there is one task per policy (`policies_at`). Content is shifted at the training size, in the first protocol: both show the
    same images there. ValueError for a policy that no model has.
    """
    offered = {policy for trained in models for policy in policies_of(trained.model)}
    if unknown := [policy for policy in sweep.policies or () if policy not in offered]:
        had = ", ".join(sorted(offered)) or "none: they resize nothing"
        raise ValueError(f"no model has the policy {unknown[0]!r}; the policies of these models are {had}")
    first = dict.fromkeys(trained.img_size for trained in models)
    places = [(size, [trained for trained in models if trained.img_size == size]) for size in first]
    places += [(size, [trained for trained in models if trained.img_size != size]) for size in dict.fromkeys(sweep.sizes)]
    tasks = []
    for size, here in places:
        policies = [policies_at(trained.model, size, sweep.policies) for trained in here]
        crops = dict.fromkeys(crop for trained in here for crop in sweep.crop_pct or (trained.crop_pct,))
        for protocol in (one for one in sweep.protocols if f"{format_size(size)} {one}" not in sweep.skip):
            for crop in crops:
                for trained, names in zip(here, policies, strict=True):
                    shifts = sweep.shifts if size == trained.img_size and protocol == sweep.protocols[0] else ()
                    if sweep.crop_pct or crop == trained.crop_pct:
                        tasks += [Task(trained, size, protocol, policy, crop, shifts) for policy in names]
    return tasks


def check_data(sweep: Sweep, train_size: Size) -> None:
    """ValueError or OSError now, not after hours of training, when the data cannot be shown at some size and protocol."""
    for size in dict.fromkeys((train_size, *sweep.sizes)):
        for protocol in sweep.protocols:
            how = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "protocol": protocol, "base_size": train_size, "n": 1}
            try:
                create_dataset(sweep.data, "val", size, **how)
            except ValueError as error:
                raise ValueError(f"evaluation at {format_size(size)}, {protocol} protocol: {error}") from error
