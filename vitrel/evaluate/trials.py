"""The list of trials of an evaluation: one row each, a model at a size in a protocol under a policy."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

import torch

from vitrel.common.files import shown
from vitrel.common.sizes import Budget, Size, format_size
from vitrel.data import BadImage
from vitrel.evaluate.checkpoint import TrainedModel, backbone_of
from vitrel.evaluate.policies import (
    at_size_with,
    has_windows,
    native_columns,
    policies_at,
    policies_of,
    sample_shapes,
    static_columns,
)
from vitrel.evaluate.prepare import Images, Preprocessing, window_places
from vitrel.evaluate.sweep import DEFAULT_PROTOCOLS, NATIVE, Row, Sweep
from vitrel.evaluate.tasks.base import Task, task_named
from vitrel.evaluate.tasks.classes import class_outputs
from vitrel.grid import unseen_share


@dataclass(frozen=True)
class Trial:
    """The settings of one row: a model, a size (h, w) in pixels, a protocol, a policy and a crop.

    Args:
        trained: the model.
        size: (h, w) in pixels; with a budget, the size that it was given as, or the largest square within it.
        protocol: of `Sweep`.
        policy: one of `policies_at(trained.model, size)`.
        crop_pct: share of the resized image that the center crop keeps.
        translations: numbers of pixels by which the content is translated, each evaluated after the row itself.
        budget: in the native protocol, whose images have shapes of their own: the maximum number of patch tokens of an image.
    """

    trained: TrainedModel
    size: Size
    protocol: str
    policy: str
    crop_pct: float
    translations: tuple[int, ...] = ()
    budget: int | None = None

    @property
    def name(self) -> str:
        """Model, size, protocol and policy in words, for progress lines and errors."""
        text = f"{self.trained.label} at {format_size(self.size)} ({self.protocol}"
        if self.budget is not None:
            text += f", at most {self.budget} tokens"
        return f"{text})" if self.policy == "none" else f"{text}, {self.policy})"

    @property
    def task(self) -> Task:
        """What the model predicts, and how it is scored."""
        return task_named(self.trained.task)

    @property
    def model_size(self) -> Size:
        """The size (h, w) in pixels that the model gets: that of the images, in the sliding protocol that of training."""
        return self.trained.img_size if self.protocol == "sliding" else self.size

    @property
    def is_training(self) -> bool:
        """Whether the model was trained at this size: in pixels in any protocol, or at this budget of the native protocol."""
        if self.trained.is_native:
            return self.budget is not None and Budget(self.budget) in self.trained.train_sizes
        return self.size in self.trained.train_sizes

    @property
    def windows(self) -> int:
        """The number of forward passes for an image: 1, in the sliding protocol that of its windows."""
        return len(window_places(self.size, self.trained.img_size)) if self.protocol == "sliding" else 1

    @property
    def crop_mode(self) -> str:
        """The model's crop mode; "" in the native protocol, which does not crop; "squash" for segmentation, of whole images."""
        if self.budget is None and self.task.name == "segmentation":
            return "squash"
        return self.trained.crop_mode if self.budget is None else ""

    @property
    def preprocessing(self) -> Preprocessing:
        """The preprocessing of the trial's images."""
        trained = self.trained
        as_trained = trained.mean, trained.std, trained.interpolation, trained.img_size, trained.crop_mode
        patch = None if self.budget is None else trained.patch
        protocol = "canvas" if self.protocol == "sliding" else self.protocol
        return Preprocessing(self.size, protocol, self.crop_pct, *as_trained, self.budget, patch, trained.task)


def default_protocols(models: Iterable[TrainedModel]) -> tuple[str, ...]:
    """Return the protocols for models where none are named: scale and canvas, native for models trained at native shape."""
    kinds = {trained.is_native for trained in models}
    return (DEFAULT_PROTOCOLS if False in kinds else ()) + (NATIVE if True in kinds else ())


def trials_of(models: Sequence[TrainedModel], sweep: Sweep) -> list[Trial]:
    """Return the trials of a sweep: first every model at its training sizes, to which retention refers, then size by size.

    A model's training sizes are evaluated even if `sweep.sizes` does not list them. There is one trial for every protocol,
    every crop (`sweep.crop_pct`, by default the model's own) and every policy that makes a difference at the size
    (`policies_at`). `sweep.skip` leaves out a size in one protocol, training sizes included. The native protocol does not crop,
    and reads every size as a token budget; budgets with the same size in pixels have a trial each. Translations are evaluated
    only at the training size (`TrainedModel.img_size`) in the first protocol: scale and canvas have the same images there.
    Trials that share images are adjacent.

    Raises ValueError for a policy that no model has, and for a token budget or the native protocol with a model that has no
    patch size.
    """
    if len(tasks := {trained.task for trained in models}) > 1:
        raise ValueError(f"models of {' and '.join(sorted(tasks))} cannot share an evaluation: evaluate them apart")
    for protocol in sweep.protocols:
        if protocol == "sliding" and models and models[0].task != "segmentation":
            raise ValueError("the sliding protocol joins the outputs of windows pixel by pixel: it is for segmentation")
    whole = bool(models) and models[0].task == "segmentation"
    if whole and sweep.translations:
        raise ValueError("translated content is for classification: masks are not translated, leave translations out")
    if whole and sweep.crop_pct is not None:
        raise ValueError("segmentation evaluates whole images: leave crop_pct out; canvas at a size below training gives crops")
    available = {policy for trained in models for policy in policies_of(trained.model)}
    if unknown := [policy for policy in sweep.policies or () if policy not in available]:
        names = ", ".join(sorted(available)) or "none"
        raise ValueError(f"no model has the policy {unknown[0]!r}; the policies of these models are: {names}")
    models_and_sizes = [(trained, _sizes_by_pixels(trained, sweep)) for trained in models]
    train_sizes = dict.fromkeys(size for trained in models for size in trained.train_pixels)
    by_size = [(size, [pair for pair in models_and_sizes if size in pair[0].train_pixels]) for size in train_sizes]
    others = dict.fromkeys(size for at in zip(*(sizes_of(trained, sweep) for trained in models), strict=True) for size in at)
    by_size += [
        (size, [pair for pair in models_and_sizes if size in pair[1] and size not in pair[0].train_pixels]) for size in others
    ]
    trials = []
    for size, pairs in by_size:
        policies = [policies_at(trained.model, size, sweep.policies, sweep.log_n) for trained, _ in pairs]
        crops = dict.fromkeys(crop for trained, _ in pairs for crop in sweep.crop_pct or (trained.crop_pct,))
        for protocol in sweep.protocols:
            native = protocol == "native"
            for crop in (1.0,) if native or whole else crops:
                for (trained, sizes), names_at in zip(pairs, policies, strict=True):
                    if not (native or whole or sweep.crop_pct or crop == trained.crop_pct):
                        continue
                    translations = sweep.translations if size == trained.img_size and protocol == sweep.protocols[0] else ()
                    if protocol == "sliding":
                        names_at = names_at[:1] if size == trained.img_size else ("none",)
                    remaining = [given for given in sizes[size] if f"{format_size(given)} {protocol}" not in sweep.skip]
                    budgets = dict.fromkeys(trained.budget_of(given) if native else None for given in remaining)
                    for budget, policy in product(budgets, names_at):
                        trials.append(Trial(trained, size, protocol, policy, crop, translations, budget))
    return trials


def sizes_of(trained: TrainedModel, sweep: Sweep) -> tuple[Size, ...]:
    """Return every size of a sweep in pixels (h, w), in its order, without adding the training sizes.

    A token budget becomes the largest square of the model's patches within it, so two entries may be equal.
    """
    return tuple(map(trained.size_of, sweep.sizes))


def _sizes_by_pixels(trained: TrainedModel, sweep: Sweep) -> dict[Size, list[Size | Budget]]:
    """{size in pixels: sizes and token budgets of the sweep with these pixels}, the training sizes first."""
    by_pixels: dict[Size, list[Size | Budget]] = {}
    for given in trained.train_sizes:
        by_pixels.setdefault(trained.size_of(given), []).append(given)
    for given, size in zip(sweep.sizes, sizes_of(trained, sweep), strict=True):
        by_pixels.setdefault(size, []).append(given)
    return by_pixels


def check_trials(trials: Iterable[Trial], sweep: Sweep, images: Images) -> None:
    """Raise ValueError, before any is run, where classes of the data do not fit a model or a model does not support a size."""
    checked = set()
    for trial in trials:
        model = id(trial.trained)
        if model not in checked:
            outputs_of(trial, sweep, images)
        if (model, trial.model_size, trial.budget) not in checked:
            at_size_with(trial.trained.model, trial.model_size, trial.policy)
            if trial.budget is not None:
                _check_shapes(trial, images)
        checked |= {model, (model, trial.model_size, trial.budget)}


def _check_shapes(trial: Trial, images: Images) -> None:
    """ValueError where a model does not support the image shapes of the native protocol."""
    try:
        for size in sample_shapes(images.shapes(trial.preprocessing)):
            at_size_with(trial.trained.model, size, trial.policy)
    except BadImage:
        raise
    except ValueError as error:
        raise ValueError(
            f"{error}; the native protocol has images of many shapes: leave it out with --protocol scale canvas"
        ) from error


def static_columns_of(trial: Trial, images: Images, sweep: Sweep, leak: bool = False) -> Row:
    """Return `static_columns` of a trial, in the native protocol updated with `native_columns` of the images' shapes."""
    model, patch = trial.trained.model, trial.trained.patch
    on = sweep.torch_device, getattr(torch, sweep.dtype)
    columns = static_columns(model, trial.model_size, trial.policy, leak, *on)
    columns |= {name: columns[name] * trial.windows for name in ("tokens", "gflops")}
    if trial.budget is not None and patch is not None:
        columns |= native_columns(model, trial.policy, images.shapes(trial.preprocessing), patch)
    largest = _unseen_at_most(trial)
    return columns | {name: min(columns[name], largest) for name in ("unseen", "saturated")}  # NaN stays NaN


def _unseen_at_most(trial: Trial) -> float:
    """The share of offsets at a trial's size that no training size of its model had, 1 where the model's own count holds.

    That count is for the grid that the model was built for, which is all of its training but for global attention at several
    sizes or at native shape.
    """
    trained, backbone = trial.trained, backbone_of(trial.trained.model)
    if backbone is None or trained.train_sizes == (trained.img_size,) or has_windows(backbone):
        return 1.0
    if trial.is_training:
        return 0.0
    grid = backbone.token_grid(trial.size)
    return min(unseen_share(backbone.token_grid(size), grid) for size in trained.train_pixels) if trial.budget is None else 1.0


def line_columns(trial: Trial) -> Row:
    """Return the columns that identify a trial's row, its lines of translation.csv and its predictions (LINE_KEY), and its
    task.
    """
    return {
        "task": trial.trained.task,
        "label": shown(trial.trained.label),
        "seed": trial.trained.seed,
        "img_size": format_size(trial.size),
        "protocol": trial.protocol,
        "budget": trial.budget,
        "policy": trial.policy,
        "crop_pct": trial.crop_pct,
    }


def class_names_of(trial: Trial, images: Images) -> list[str]:
    """Return the class names of the data, by label; the numbers of the model's outputs for data without names."""
    names = getattr(images.dataset(trial.preprocessing), "classes", None)
    return list(names or map(str, range(trial.trained.model.num_classes)))


def outputs_of(trial: Trial, sweep: Sweep, images: Images) -> tuple[int, ...]:
    """Return the model's output for each class of the data; ValueError where they do not match."""
    return class_outputs(trial.trained, class_names_of(trial, images), sweep.data)
