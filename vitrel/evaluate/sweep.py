"""Settings of an evaluation, and its trials: the rows of every model, size, protocol and policy."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

from vitrel.common.files import shown
from vitrel.common.processes import checked_device
from vitrel.common.sizes import Budget, Size, format_size, parse_size_or_budget
from vitrel.evaluate.checkpoint import TrainedModel
from vitrel.evaluate.images import PROTOCOLS, View
from vitrel.evaluate.policies import policies_at, policies_of
from vitrel.evaluate.predict import window_places
from vitrel.evaluate.verdicts import MARGIN
from vitrel.tasks import Row, Task, task_named

TIMES = (0.5, 1.0, 1.5, 2.0)  # the sizes of an evaluation that names none, in training sizes


def as_size(size: int | str | Size | Budget) -> Size | Budget:
    """Return a size as (height, width) or a budget of tokens: 96, "160x224", "196t", (160, 224)."""
    return parse_size_or_budget(size) if isinstance(size, int | str) else size


@dataclass(frozen=True)
class Settings:
    """Settings of an evaluation.

    Which rows there are:

    Args:
        sizes: (height, width) in pixels, or budgets of patch tokens, each evaluated at the largest square of whole patches
            within it. The training sizes are evaluated too. (): 0.5, 1, 1.5 and 2 times that of the first model.
        protocols: names of `vitrel.evaluate.images.PROTOCOLS`; (): scale, native for models trained at native shape.
        policies: of windows and encodings, each evaluated where it makes a difference; (): the model's own; ("all",): all.
        log_n: evaluate every policy with an attention temperature of log N too (`vitrel.position.log_n`).
        translations: pixels by which the content is moved at the training size in the first protocol, each evaluated.
        skip: combinations of size and protocol to leave out, such as "192x192 canvas".

    On what their numbers depend:

    Args:
        n: number of images, sampled with the seed `data_seed`; None: all.
        data_seed: seed of generated or sampled images.
        val_fraction: share of the images to evaluate where the data has no evaluation split, as in `vitrel.data.Reading`.
        follow_links: also search folders that are linked inside class folders.
        on_bad_image: "raise" ends the evaluation at an unreadable image, "count" leaves it out and counts it.
        attention_n: number of images for the attention statistics, 0 for none.
        border_leak: test whether tokens see the opposite border of the image (models with windows; takes seconds per size).
        dtype: "float32" or, on a GPU, "bfloat16" (autocast).
        device: "auto", "cpu", "cuda", "cuda:1".

    How it runs, and what is reported:

    Args:
        batch_size: number of images in a batch, halved when memory runs out.
        workers: processes that decode images.
        margin: loss of the metric, in percentage points, that does not matter: a size is safe where it is shown to lose less.
        report: whether report.html has pictures.
        photographs: whether the report may contain images of the data.

    Raises:
        ValueError: a value or a combination is impossible.
    """

    sizes: tuple[Size | Budget, ...] = ()
    protocols: tuple[str, ...] = ()
    policies: tuple[str, ...] = ()
    log_n: bool = False
    translations: tuple[int, ...] = ()
    skip: tuple[str, ...] = ()
    n: int | None = None
    data_seed: int = 0
    val_fraction: float | None = None
    follow_links: bool = False
    on_bad_image: str = "raise"
    attention_n: int = 16
    border_leak: bool = True
    dtype: str = "float32"
    device: str = "auto"
    batch_size: int = 128
    workers: int = 0
    margin: float = MARGIN
    report: bool = True
    photographs: bool = True

    def __post_init__(self) -> None:
        for name in ("sizes", "protocols", "policies", "translations", "skip"):
            given = getattr(self, name)
            several = (given,) if isinstance(given, str | int | float) else tuple(given or ())
            several = tuple(map(as_size, several)) if name == "sizes" else several
            object.__setattr__(self, name, tuple(dict.fromkeys(several)))  # a duplicate would count as a second seed
        if unknown := [name for name in self.protocols if name not in PROTOCOLS]:
            raise ValueError(f"unknown protocol {unknown[0]!r}: choose from {', '.join(PROTOCOLS)}")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype is float32 or bfloat16, got {self.dtype!r}")
        if checked_device(self.device).type != "cuda" and self.dtype == "bfloat16":
            raise ValueError("bfloat16 evaluation needs a GPU; use float32 on the CPU")
        if self.on_bad_image not in ("raise", "count"):
            raise ValueError(f"on_bad_image is raise or count, got {self.on_bad_image!r}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")
        if wrong := [pixels for pixels in self.translations if type(pixels) is not int or pixels < 0]:
            raise ValueError(f"translations takes whole numbers of pixels, 0 or more, got {wrong[0]!r}")


@dataclass(frozen=True, eq=False)
class Trial:
    """One row of an evaluation: a model at a size, in a protocol, under a policy.

    Args:
        trained: the model.
        size: (h, w) in pixels; with a budget, the size that it was given as, or the largest square within it.
        protocol: name of what happens to the images at this size, one of `vitrel.evaluate.images.PROTOCOLS`.
        policy: one of `policies_at(trained.model, size)`.
        view: how the images are prepared.
        outputs: index of the model's output for each class of the data.
    """

    trained: TrainedModel
    size: Size
    protocol: str
    policy: str
    view: View
    outputs: tuple[int, ...]

    @property
    def key(self) -> str:
        """Text that identifies the row in an evaluation: label, seed, size, protocol, budget, translation, policy, crop_pct."""
        budget = "" if self.view.budget is None else f",{self.view.budget}t"
        moved = f", moved {self.view.translation} px" if self.view.translation else ""
        of_model = f"{shown(self.trained.label)}|{self.trained.seed}|{format_size(self.size)}"
        return f"{of_model}|{self.protocol}{budget}{moved}|{self.policy}|{self.view.crop_pct:g}"

    @property
    def name(self) -> str:
        """Model, size, protocol, budget and policy in words, for progress lines and errors."""
        text = f"{self.trained.label} at {format_size(self.size)} ({self.protocol}"
        text += "" if self.view.budget is None else f", at most {self.view.budget} tokens"
        return f"{text})" if self.policy == "none" else f"{text}, {self.policy})"

    @property
    def task(self) -> Task:
        """The model's `Task`, which computes its scores."""
        return task_named(self.trained.task)

    @property
    def passes(self) -> int:
        """The number of forward passes for an image: 1, or in the protocol sliding the number of windows."""
        return 1 if self.view.window is None else len(window_places(self.size, self.view.window))

    @property
    def columns(self) -> Row:
        """{column of results.csv: value} of what is known before it runs, and "key"; the number of parameters in millions."""
        trained, view = self.trained, self.view
        return {
            "key": self.key,
            "task": trained.task,
            "model": trained.name,
            "label": shown(trained.label),
            "encoding": trained.encoding,
            "seed": trained.seed,
            "img_size": format_size(self.size),
            "train_size": " ".join(map(format_size, trained.train_sizes)),
            "protocol": self.protocol,
            "budget": view.budget,
            "translation": view.translation,
            "policy": self.policy,
            "crop_pct": view.crop_pct,
            "crop_mode": "" if view.mode == "native" else view.crop_mode,
            "interpolation": view.interpolation,
            "param_count": round(sum(parameter.numel() for parameter in trained.model.parameters()) / 1e6, 2),
        }


def trials(models: Sequence[TrainedModel], outputs: Sequence[tuple[int, ...]], settings: Settings) -> list[Trial]:
    """Return the trials (rows): first of each model at its own training sizes, listed or not, then at the others in order.

    A policy has a trial at the sizes where it makes a difference, in the protocol sliding only the first policy; a translation
    has one at the training size in the first protocol. Trials that share images are adjacent.

    Args:
        models: all of one task.
        outputs: of each model, the index of its output for each class of the data.
        settings: which sizes, protocols, policies and translations there are.

    Raises:
        ValueError: a model given twice, a policy that no model has, a protocol or translations that the task does not have, or
            a token budget for a model without a patch size.
    """
    asked, protocols = settings.sizes or default_sizes(models[0]), settings.protocols or default_protocols(models)
    _check(models, settings)
    wanted = None if settings.policies == ("all",) else settings.policies
    found, views = list[tuple[tuple, Trial]](), dict[View, int]()
    for trained, of_classes in zip(models, outputs, strict=True):
        at = (*trained.train_sizes, *asked)
        places = [*dict.fromkeys(map(trained.size_of, at))]
        for protocol, given in ((protocol, given) for protocol in protocols for given in at):
            size = trained.size_of(given)
            if f"{format_size(given)} {protocol}" in settings.skip:
                continue
            view = PROTOCOLS[protocol](trained, given)
            number = views.setdefault(view.of_files, len(views))
            names = policies_at(trained.model, view.window or size, wanted, settings.log_n)
            own = protocol == protocols[0] and size == trained.img_size
            moved = [0, *(pixels for pixels in settings.translations if pixels)] if own else [0]
            place = size not in trained.train_pixels, places.index(size), protocols.index(protocol), number
            for policy, by in product(names[:1] if view.window else names, moved):
                found.append((place, Trial(trained, size, protocol, policy, view._replace(translation=by), of_classes)))
    found.sort(key=lambda pair: pair[0])
    return [*{trial.key: trial for _, trial in reversed(found)}.values()][::-1]  # a size may be given in two ways


def check_tasks(models: Sequence[TrainedModel]) -> None:
    """Raise ValueError for models of several tasks, whose data would be read for the first model's task."""
    if len(tasks := {trained.task for trained in models}) > 1:
        raise ValueError(f"models of {' and '.join(sorted(tasks))} cannot share an evaluation: evaluate them apart")


def _check(models: Sequence[TrainedModel], settings: Settings) -> None:
    """Raise ValueError for two models of one label and seed, translated masks, or a policy that no model has."""
    labels = [(trained.label, trained.seed) for trained in models]
    if twice := [label for label, seed in labels if labels.count((label, seed)) > 1]:
        raise ValueError(f"{twice[0]} is given twice: its rows would be taken for two seeds")
    if task_named(models[0].task).dense and settings.translations:
        raise ValueError("translated content is for classification: masks are not translated, leave translations out")
    available = {policy for trained in models for policy in policies_of(trained.model)} | {"all"}
    if unknown := [policy for policy in settings.policies if policy not in available]:
        names = ", ".join(sorted(available))
        raise ValueError(f"no model has the policy {unknown[0]!r}; the policies of these models are: {names}")


def default_protocols(models: Sequence[TrainedModel]) -> tuple[str, ...]:
    """Return the protocols if none is named: native if a model was trained at native shape, scale if one was not, or both."""
    return tuple(name for name in ("scale", "native") if (name == "native") in {trained.is_native for trained in models})


def default_sizes(trained: TrainedModel) -> tuple[Size | Budget, ...]:
    """Return 0.5, 1, 1.5 and 2 times the training size (h, w) in pixels, rounded to whole patches.

    For a model trained at native shape they are token budgets, of the first one in training times 0.25, 1, 2.25 and 4.
    """
    if trained.is_native:
        return tuple(Budget(max(1, round(trained.train_sizes[0].tokens * times**2))) for times in TIMES)  # type: ignore[union-attr]
    patch = trained.patch or (1, 1)
    (h, w), (down, right) = trained.img_size, patch
    return tuple((max(1, round(h * times / down)) * down, max(1, round(w * times / right)) * right) for times in TIMES)
