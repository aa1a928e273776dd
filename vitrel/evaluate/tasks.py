"""The list of tasks of an evaluation: one row each, a model at a size in a protocol under a policy."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product

from vitrel.common.files import shown
from vitrel.common.sizes import Budget, Size, format_size
from vitrel.data import BadImage
from vitrel.evaluate.checkpoint import TrainedModel
from vitrel.evaluate.policies import at_size_with, native_columns, policies_at, policies_of, sample_shapes, static_columns
from vitrel.evaluate.prepare import Images, Preprocessing
from vitrel.evaluate.score import class_outputs
from vitrel.evaluate.sweep import Row, Sweep


@dataclass(frozen=True)
class Task:
    """The settings of one row: a model, a size (h, w) in pixels, a protocol, a policy and a crop.

    policy: one of `policies_at(trained.model, size)`. crop_pct: share of the resized image that the center crop keeps.
    translations: numbers of pixels by which the content is translated, each evaluated after the row itself. budget: in the
    native protocol, the maximum number of patch tokens of an image, else None; `size` then is the size that the budget was
    given as, or the largest square within it, and images have shapes of their own.
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
    def crop_mode(self) -> str:
        """The model's crop mode; "" in the native protocol, which does not crop."""
        return self.trained.crop_mode if self.budget is None else ""

    @property
    def preprocessing(self) -> Preprocessing:
        """The preprocessing of the task's images."""
        trained = self.trained
        as_trained = trained.mean, trained.std, trained.interpolation, trained.img_size, trained.crop_mode
        native = (None, None) if self.budget is None else (self.budget, trained.patch)
        return Preprocessing(self.size, self.protocol, self.crop_pct, *as_trained, *native)


def tasks_of(models: Sequence[TrainedModel], sweep: Sweep) -> list[Task]:
    """Return the tasks of a sweep: first every model at its training size, to which retention refers, then size by size.

    A model's training size is evaluated even if `sweep.sizes` does not list it. There is one task for every protocol, every
    crop (`sweep.crop_pct`, by default the model's own) and every policy that makes a difference at the size (`policies_at`).
    `sweep.skip` leaves out a size in one protocol, training sizes included. The native protocol does not crop, and reads every
    size as a token budget; budgets with the same size in pixels have a task each. Translations are evaluated only at the
    training size in the first protocol: scale and canvas have the same images there. Tasks that share images are adjacent.

    Raises ValueError for a policy that no model has, and for a token budget or the native protocol with a model that has no
    patch size.
    """
    available = {policy for trained in models for policy in policies_of(trained.model)}
    if unknown := [policy for policy in sweep.policies or () if policy not in available]:
        names = ", ".join(sorted(available)) or "none"
        raise ValueError(f"no model has the policy {unknown[0]!r}; the policies of these models are: {names}")
    models_and_sizes = [(trained, _sizes_by_pixels(trained, sweep)) for trained in models]
    train_sizes = dict.fromkeys(trained.img_size for trained in models)
    by_size = [(size, [pair for pair in models_and_sizes if pair[0].img_size == size]) for size in train_sizes]
    others = dict.fromkeys(size for at in zip(*(sizes_of(trained, sweep) for trained in models), strict=True) for size in at)
    by_size += [(size, [pair for pair in models_and_sizes if size in pair[1] and pair[0].img_size != size]) for size in others]
    tasks = []
    for size, pairs in by_size:
        policies = [policies_at(trained.model, size, sweep.policies) for trained, _ in pairs]
        crops = dict.fromkeys(crop for trained, _ in pairs for crop in sweep.crop_pct or (trained.crop_pct,))
        for protocol in sweep.protocols:
            native = protocol == "native"
            for crop in (1.0,) if native else crops:
                for (trained, sizes), names_at in zip(pairs, policies, strict=True):
                    if not (native or sweep.crop_pct or crop == trained.crop_pct):
                        continue
                    translations = sweep.translations if size == trained.img_size and protocol == sweep.protocols[0] else ()
                    remaining = [given for given in sizes[size] if f"{format_size(given)} {protocol}" not in sweep.skip]
                    budgets = dict.fromkeys(trained.budget_of(given) if native else None for given in remaining)
                    for budget, policy in product(budgets, names_at):
                        tasks.append(Task(trained, size, protocol, policy, crop, translations, budget))
    return tasks


def sizes_of(trained: TrainedModel, sweep: Sweep) -> tuple[Size, ...]:
    """Return every size of a sweep in pixels (h, w), in its order, without adding the training size.

    A token budget becomes the largest square of the model's patches within it, so two entries may be equal.
    """
    return tuple(map(trained.size_of, sweep.sizes))


def _sizes_by_pixels(trained: TrainedModel, sweep: Sweep) -> dict[Size, list[Size | Budget]]:
    """{size in pixels: sizes and token budgets of the sweep with these pixels}, the training size first."""
    by_pixels: dict[Size, list[Size | Budget]] = {trained.img_size: [trained.img_size]}
    for given, size in zip(sweep.sizes, sizes_of(trained, sweep), strict=True):
        by_pixels.setdefault(size, []).append(given)
    return by_pixels


def check_tasks(tasks: Iterable[Task], sweep: Sweep, images: Images) -> None:
    """Raise ValueError, before any is run, where classes of the data do not fit a model or a model does not support a size."""
    checked = set()
    for task in tasks:
        model = id(task.trained)
        if model not in checked:
            classes_of(task, sweep, images)
        if (model, task.size, task.budget) not in checked:
            at_size_with(task.trained.model, task.size, task.policy)
            if task.budget is not None:
                _check_shapes(task, images)
        checked |= {model, (model, task.size, task.budget)}


def _check_shapes(task: Task, images: Images) -> None:
    """ValueError where a model does not support the image shapes of the native protocol."""
    try:
        for size in sample_shapes(images.shapes(task.preprocessing)):
            at_size_with(task.trained.model, size, task.policy)
    except BadImage:
        raise
    except ValueError as error:
        raise ValueError(
            f"{error}; the native protocol has images of many shapes: leave it out with --protocol scale canvas"
        ) from error


def static_columns_of(task: Task, images: Images, leak: bool = False, batch: int = 1) -> Row:
    """Return `static_columns` of a task, in the native protocol updated with `native_columns` of the images' shapes."""
    model, patch = task.trained.model, task.trained.patch
    columns = static_columns(model, task.size, task.policy, leak, batch)
    if task.budget is None or patch is None:
        return columns
    return columns | native_columns(model, task.policy, images.shapes(task.preprocessing), patch)


def line_columns(task: Task) -> Row:
    """Return the columns that identify a task's row, its lines of translation.csv and its predictions (LINE_KEY)."""
    return {
        "label": shown(task.trained.label),
        "seed": task.trained.seed,
        "img_size": format_size(task.size),
        "protocol": task.protocol,
        "budget": task.budget,
        "policy": task.policy,
        "crop_pct": task.crop_pct,
    }


def class_names_of(task: Task, images: Images) -> list[str]:
    """Return the class names of the data, by label; the numbers of the model's outputs for data without names."""
    names = getattr(images.dataset(task.preprocessing), "classes", None)
    return list(names or map(str, range(task.trained.model.num_classes)))


def classes_of(task: Task, sweep: Sweep, images: Images) -> tuple[list[str], tuple[int, ...]]:
    """Return the class names of the data and the model's output for each; ValueError where they do not match."""
    names = class_names_of(task, images)
    return names, class_outputs(task.trained, names, sweep.data)
