"""An evaluation as a whole: for every trial predict, score, and add a row; then tables and the report.

`at_sizes` is the function; `vitrel evaluate` is a shell around it. `Settings` are read here and where trials are listed alone:
every other stage gets the values that it needs.
"""

import hashlib
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

import PIL
import timm
import torch
import torchvision
from torch import nn

from vitrel.common.files import commit, shown
from vitrel.common.lock import only_writer
from vitrel.common.modules import evaluating
from vitrel.common.processes import local_device, on_all, rank_and_world
from vitrel.common.progress import Advance, progress
from vitrel.common.sizes import Budget, Size, format_size, sizes_in_words
from vitrel.common.tables import markdown
from vitrel.data import BadImage, Reading
from vitrel.evaluate.checkpoint import TrainedModel, load_checkpoint, trained_model
from vitrel.evaluate.classes import class_outputs
from vitrel.evaluate.folder import Folder, read_rows
from vitrel.evaluate.images import PROTOCOLS, Data, Images
from vitrel.evaluate.pictures import collect
from vitrel.evaluate.policies import costs_at, leak_at, unseen_after
from vitrel.evaluate.predict import (
    AtSizes,
    Runner,
    attention_columns,
    joined,
    peak_mb,
    predict,
    reset_peak,
    speeds,
)
from vitrel.evaluate.report import first_screen, write
from vitrel.evaluate.statistics import estimate
from vitrel.evaluate.sweep import Settings, Trial, check_tasks, trials
from vitrel.evaluate.verdicts import judge, with_retention
from vitrel.tasks import Kept, Row, Task
from vitrel.weights.record import state_hash

if TYPE_CHECKING:
    import pandas as pd

NEEDS_NO_IMAGES = ("tokens", "gflops", "window", "resampled", "resampled_values", "unseen")  # columns of a dry run
CPU_BATCH = 4  # images of the batch by which the speed is measured on a CPU, where a larger one is no faster


@contextmanager
def _how_to_go_on() -> Iterator[None]:
    """Add to the error at an unreadable image what leaves such images out."""
    try:
        yield
    except BadImage as error:
        option = "--on-bad-image count (in Python and YAML on_bad_image)"
        error.add_note(f"with {option}, unreadable images are left out and all of them listed")
        raise


def at_sizes(
    models: nn.Module | TrainedModel | str | Path | Sequence[nn.Module | TrainedModel | str | Path],
    data: Data,
    sizes: Sequence[int | str | Size | Budget] = (),
    *,
    out: str | Path | None = None,
    overwrite: bool = False,
    title: str = "",
    command: str = "",
    **settings: Any,
) -> "pd.DataFrame":
    """Evaluate models at many image sizes: one row per model, size, protocol and policy, with the columns of results.csv.

    >>> vitrel.evaluate.at_sizes(model, "shapes", [48, 64, "64x96"], n=200)[["img_size", "policy", "top1", "resampled"]]

    With `out`, the rows are written into a folder, with tables, plots and a report, and progress and verdicts are printed.
    The same call goes on where it was stopped; more sizes, models, protocols or policies add rows. With several processes
    (torchrun) each has a share of the images, and the first one writes.

    Args:
        models: trained models of vitrel or timm, paths of checkpoints of vitrel train, or what `vitrel.evaluate.trained_model`
            makes of a model with other preprocessing or classes than its `pretrained_cfg` has. They are not changed.
        data: a name or folder that `create_dataset` takes, or a data set of (uint8 [3, h, w] or PIL image, label), which is
            preprocessed as a folder is. An attribute `classes` of the data set gives names of classes, by label. For
            segmentation a data set has masks [h, w] of each image's size instead, with 255 where there is no class; for several
            labels an image targets [K] of 0 and 1.
        sizes: in pixels, 96, "160x224" or (160, 224), height first; or budgets of patch tokens, "196t" or Budget(196). (): 0.5,
            1, 1.5 and 2 times the training size of the first model. Every model is also evaluated at its own training sizes.
        out: folder of the evaluation.
        overwrite: start anew where `out` has another evaluation.
        title: of the report.
        command: the command that this is, for the report.
        settings: fields of `Settings`: protocols, policies, n, batch_size, device, attention_n, ...

    Raises:
        ValueError: invalid settings, data or classes that do not fit the model, unsupported sizes, another evaluation in `out`.
    """
    path = None if out is None else Path(out)
    return _evaluated(_loaded(models), data, Settings(sizes=tuple(sizes), **settings), path, overwrite, title, command)


@_how_to_go_on()
def _evaluated(
    models: Sequence[TrainedModel],
    data: Data,
    settings: Settings,
    path: Path | None,
    overwrite: bool,
    title: str,
    command: str,
) -> "pd.DataFrame":
    """Do what `at_sizes` does, with loaded models and checked settings; `path` is its `out`."""
    images, plan = opened(models, data, settings)
    first, device = rank_and_world()[0] == 0, local_device(settings.device)
    about = _about(models, images, settings, device) | {
        "title": shown(title or Path(images.source).name),
        "command": [command] if command else [],
    }
    if any(other != about for other in on_all(lambda: about)):
        raise ValueError("the processes hold different weights or images: give all of them the same models and data")
    told = path is not None and first
    with only_writer(path) if told else nullcontext():
        folder = Folder(path if first else None, about, overwrite)
        [done, *_] = on_all(lambda: {row["key"] for row in folder.rows})
        left = [trial for trial in plan if trial.key not in done]
        [costs, *_] = on_all(lambda: _costs(left if first else [], images))
        if told:
            print(_header(plan, left, images, path), flush=True)
        try:
            work = sum(costs[_about_cost(trial)]["gflops"] for trial in left) if told else 0
            with _evaluating(models), progress(len(left), "rows", work=work) if told else nullcontext() as advance:
                for row, kept, bad in _measured(left, images, settings, device, costs, advance):
                    folder.add(row, kept, bad)
        except (KeyboardInterrupt, MemoryError, OSError, RuntimeError) as error:
            if told and folder.rows:
                error.add_note(f"rows in {path}: {len(folder.rows)}; the same command measures the others")
            raise
        rows = with_retention(folder.rows)
        folder.write_table(rows)
        if told:
            with _evaluating(models):
                _tell(folder, rows, plan, images, settings, device)
    keys = {trial.key for trial in plan}
    return folder.frame([row for row in rows if row["key"] in keys])


@_how_to_go_on()
def dry_run(models: Sequence[TrainedModel], data: Data, settings: Settings, out: Path) -> str:
    """Return as text what `at_sizes` would do: the rows that `out` lacks, their number, and about how long they would take.

    For the time every model runs a few times; nothing is written.
    """
    device = local_device(settings.device)
    images, plan = opened(models, data, settings)
    done = {row["key"] for row in read_rows(out)[0]}
    left = [trial for trial in plan if trial.key not in done]
    if not left:
        return f"All rows are in {out} already: nothing is left to measure.\n"
    costs = _costs(left, images)
    columns = ("label", "img_size", "protocol", "budget", "policy", *NEEDS_NO_IMAGES)
    rows = [trial.columns | costs[_about_cost(trial)] for trial in left]
    lines = [
        ["" if row[name] is None else "-" if row[name] != row[name] else str(row[name]) for name in columns] for row in rows
    ]
    with _evaluating(models):
        seconds = _seconds(left, images, costs, settings, device)
    takes = f"about {math.ceil(seconds / 60)} min" if math.isfinite(seconds) else "an unknown time"
    return (
        f"{markdown(columns, lines)}\nrows: {len(plan)}, of {len(images):,} images each; in {out} already: "
        f"{len(plan) - len(left)}; the others take {takes} on this machine.\n"
    )


def opened(models: Sequence[TrainedModel], data: Data, settings: Settings) -> tuple[Images, list[Trial]]:
    """Open the data; return the images, and one `Trial` for each row of the evaluation, also for those already measured.

    ValueError for models of several tasks, classes that do not fit a model, settings that do not fit models or data, or data
    that cannot be read, then also OSError.
    """
    check_tasks(models)
    reading = Reading(
        on_bad="leave_out" if settings.on_bad_image == "count" else "raise",
        follow_links=settings.follow_links,
        val_fraction=settings.val_fraction,
    )
    how = {name: getattr(settings, name) for name in ("n", "batch_size", "workers")}
    view = PROTOCOLS["scale"](models[0], models[0].img_size)
    images = Images(data, view, seed=settings.data_seed, reading=reading, **how)
    classes = _classes(models, images)
    plan = trials(models, [class_outputs(trained, classes, images.source) for trained in models], settings)
    images.check(trial.view for trial in plan)
    return images, plan


def _classes(models: Sequence[TrainedModel], images: Images) -> list[str]:
    """Return the names of the data's classes; where the data have none, "0", "1", ... for the outputs of the first model."""
    return images.classes or [*map(str, range(models[0].model.num_classes))]


def _loaded(models: Any) -> list[TrainedModel]:
    """Return what `at_sizes` takes as models, one or several, as a list of `TrainedModel`; paths are loaded."""
    several = models if isinstance(models, list | tuple) else [models]
    return [
        trained_model(one) if isinstance(one, nn.Module) else one if isinstance(one, TrainedModel) else load_checkpoint(one)
        for one in several
    ]


def _about(models: Sequence[TrainedModel], images: Images, settings: Settings, device: torch.device) -> dict[str, Any]:
    """Return what settings.json records, the argument `settings` of `Folder`, but for title and command.

    It hashes the weights of all models and reads all images for a hash.
    """
    classes = _classes(models, images)
    outputs = {id(one): class_outputs(one, classes, images.source) for one in models}
    of_models = {
        f"{shown(one.label)}|{one.seed}": {
            "weights": state_hash(one.model),
            "model": one.name,
            "model_args": one.model_args,
            "train_size": " ".join(map(format_size, one.train_sizes)),
            "mean": one.mean,
            "std": one.std,
            "interpolation": one.interpolation,
            "crop_pct": one.crop_pct,
            "crop_mode": one.crop_mode,
            "outputs": hashlib.sha256(repr(outputs[id(one)]).encode()).hexdigest()[:12],
        }
        for one in models
    }
    same = {
        "task": models[0].task,
        "number of images": len(images),
        "images": images.digest(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else f"{device.type} {platform.machine()}",
        **{name: getattr(settings, name) for name in ("dtype", "attention_n", "border_leak", "on_bad_image")},
        "versions": {package.__name__: package.__version__ for package in (torch, torchvision, timm, PIL)},
        "vitrel": version("vitrel"),
    }
    return {
        "data": shown(images.source),
        "classes": classes,
        "margin": settings.margin,
        "unused": images.total - len(images),
        "n": settings.n,
        "data_seed": settings.data_seed,
        "same": same,
        "models": of_models,
        "bad_images": [],
        "commit": commit(),
        "python": platform.python_version(),
    }


def _about_cost(trial: Trial) -> tuple:
    """Return a key that trials of equal cost and speed share: (label, architecture, size, window, token budget, policy)."""
    return trial.trained.label, trial.trained.name, trial.size, trial.view.window, trial.view.budget, trial.policy


def _costs(left: Sequence[Trial], images: Images) -> dict[tuple, Row]:
    """Return {`_about_cost`: the columns that need no images}; ValueError where a model does not take a size."""
    return {about: _cost(trial, images) for about, trial in {_about_cost(one): one for one in left}.items()}


def _cost(trial: Trial, images: Images) -> Row:
    """Return the columns of `costs_at` for a trial; tokens and gflops are times the windows of the protocol sliding.

    Of several training sizes, unseen and saturated are at most `unseen_after`, the share unseen at the best of them; of a token
    budget only if it is one of training.
    """
    trained, view = trial.trained, trial.view
    shapes = None if view.budget is None else images.shapes(view)
    size = view.window or trial.size
    columns = costs_at(trained.model, size, trial.policy, shapes, view.patch)
    if trained.train_sizes != (trained.img_size,) and (view.budget is None or trained.is_training(trial.size, view.budget)):
        most = unseen_after(trained.model, trained.train_pixels, trial.size)
        columns |= {name: min(columns[name], most) for name in ("unseen", "saturated")}  # NaN stays NaN
    return columns | {name: columns[name] * trial.passes for name in ("tokens", "gflops")}


def _measured(
    left: Sequence[Trial],
    images: Images,
    settings: Settings,
    device: torch.device,
    costs: Mapping[tuple, Row],
    advance: Advance | None,
) -> Iterator[tuple[Row, Kept, list[str]]]:
    """Yield the row, the results of all images and the names of unreadable ones, of one trial after another, size by size.

    Every process runs this on its share of the images, and yields the results of all. Before the trials of a size, the first
    process measures the speed of their models side by side.

    Args:
        left: the trials to measure, in the order of `trials`.
        images: all images, whose cache the trials of one view share.
        costs: result of `_costs`.
        advance: function that shows progress; None: nothing is shown.

    Raises:
        ValueError: none of the images can be read.
    """
    first = rank_and_world()[0] == 0
    leaks: dict[tuple, float | None] = {}
    for _, group in groupby(left, key=lambda trial: trial.size):
        at_size = [*group]
        fast = _speeds(at_size, settings, device) if first else {}
        for trial in at_size:
            about = _about_cost(trial)
            ahead = partial(advance, what=trial.name, cost=costs[about]["gflops"]) if advance else lambda share: None
            parts = on_all(partial(_share, trial, images, settings, device, ahead))
            row = parts[-1][0]  # attention is that of the last process
            row["peak_memory_mb"] = max(part["peak_memory_mb"] for part, *_ in parts)
            row["batch_size"] = min(part["batch_size"] for part, *_ in parts)
            kept = joined([part for _, part, _ in parts])
            if not kept.seen.any():
                raise ValueError(f"none of the {len(images)} images of {images.source} can be read")
            if first and settings.border_leak and about not in leaks:
                leaks[about] = leak_at(trial.trained.model, trial.view.window or trial.size, trial.policy)
            row |= trial.task.score(kept) | _interval(trial.task, kept)
            row |= {"n": int(kept.seen.sum()), "left_out": int((~kept.seen).sum())}
            row |= costs[about] | {"border_leak": leaks.get(about), "infer_samples_per_sec": fast.get(about)}
            yield trial.columns | row, kept, [*dict.fromkeys(name for *_, bad in parts for name in bad)]


def _share(
    trial: Trial,
    images: Images,
    settings: Settings,
    device: torch.device,
    ahead: Callable[[float], None],
) -> tuple[Row, Kept, list[str]]:
    """Run a trial on this process's part of the images, those number rank, rank + world, ...

    Return columns on memory, batch size and attention (NaN but in the last process, and in the protocol sliding), the results
    of these images, and the names of those not readable. `ahead` is called with the part of them, 0 to 1, that each batch is.
    """
    model, view, (rank, world) = trial.trained.model, trial.view, rank_and_world()
    keep = partial(trial.task.keep, outputs=trial.outputs)
    order = images.order(view, rank, world)
    with AtSizes(model, trial.policy, device, view.window) as at:
        runner = Runner(at, device, settings.batch_size, settings.dtype)
        reset_peak(device)
        try:
            kept = predict(runner, images.batches(view, rank, world), order, keep, ahead)
        except (FloatingPointError, MemoryError, RuntimeError) as error:
            error.add_note(f"this was {trial.name}")
            raise
        peak = peak_mb(device)
        # only the last of several processes has a share of attention: the first writes rows meanwhile
        n = settings.attention_n if rank == world - 1 and view.window is None else 0
        attention = attention_columns(at, (image for _, image, _ in images.items(view, range(min(n, len(images))))), device)
    columns = {"peak_memory_mb": round(peak, 1), "batch_size": min(runner.batch_size, images.batch_of(view))}
    return columns | attention, kept, images.bad(view)


def _interval(task: Task, kept: Kept) -> Row:
    """Return {"METRIC_low": value, "METRIC_high": value}: the 95 % interval of the task's metric over images, in percent."""
    low, high = estimate([task.scores(kept, task.metric)[None]]).of_share()
    return {f"{task.metric}_low": round(low, 4), f"{task.metric}_high": round(high, 4)}


def _speeds(group: Sequence[Trial], settings: Settings, device: torch.device) -> dict[tuple, float]:
    """Return {`_about_cost`: images per second} for trials at one size, NaN where memory does not suffice."""
    ready: dict[tuple, Callable[[torch.Tensor], torch.Tensor]] = {}
    size, most = group[0].size, settings.batch_size if device.type == "cuda" else CPU_BATCH
    with ExitStack() as stack:
        for trial in group:
            if (about := _about_cost(trial)) not in ready:
                at = stack.enter_context(AtSizes(trial.trained.model, trial.policy, device, trial.view.window))
                ready[about] = at(size)
        return speeds(ready, size, min(most, settings.batch_size), device, settings.dtype)


@contextmanager
def _evaluating(models: Sequence[TrainedModel]) -> Iterator[None]:
    """Context manager with models in eval mode; at its end they are in their former mode, on their former device."""
    devices = [next(one.model.parameters()).device for one in models]
    with ExitStack() as stack:
        for one in models:
            stack.enter_context(evaluating(one.model))
        try:
            yield
        finally:
            for one, device in zip(models, devices, strict=True):
                one.model.to(device)


def _header(plan: Sequence[Trial], left: Sequence[Trial], images: Images, out: Path) -> str:
    """Return the lines printed at the start: models, images, sizes, and the number of rows."""
    models = {id(trial.trained): trial.trained for trial in plan}.values()
    texts = [f"{one.label} ({one.model.num_classes} classes, trained at {sizes_in_words(one.train_sizes)})" for one in models]
    sizes, protocols = (dict.fromkeys(map(of, plan)) for of in (lambda one: format_size(one.size), lambda one: one.protocol))
    return (
        f"evaluating {', '.join(dict.fromkeys(texts))}\n"
        f"on {len(images):,} images of {shown(images.source)} at {', '.join(sizes)} px, protocol {' and '.join(protocols)}\n"
        f"rows: {len(plan)}, done already: {len(plan) - len(left)}; output folder: {out}"
    )


def _tell(
    folder: Folder, rows: Sequence[Row], plan: Sequence[Trial], images: Images, settings: Settings, device: torch.device
) -> None:
    """Write table.md, plots and report.html into `folder`; print the main table, verdicts and names of unreadable images."""
    about, path = folder.settings, folder.path or Path()
    pictures = collect(plan, images, device, settings.photographs) if settings.report else ()
    judged = judge(rows, folder.scores, settings.margin, about["unused"])
    written = write(path, judged, folder.by_class, about, pictures)
    print(f"\n{first_screen(judged).strip()}\n")
    if bad := about["bad_images"]:
        more = f" and {len(bad) - 8} more" if len(bad) > 8 else ""
        print(f"left out, because they could not be read: {', '.join(bad[:8])}{more}; {path / 'settings.json'} lists them")
    print(f"open {written} in a browser; {path / 'results.csv'} has every number")


def _seconds(
    left: Sequence[Trial], images: Images, costs: Mapping[tuple, Row], settings: Settings, device: torch.device
) -> float:
    """Return about how many seconds trials take, by passes of each model and reading of a few images; NaN without memory."""
    total, rates = 0.0, dict[str, float]()
    for trial in left:
        if trial.trained.label not in rates:
            [rate] = _speeds([trial], settings, device).values()
            rates[trial.trained.label] = 1 / (rate * costs[_about_cost(trial)]["gflops"])
        total += rates[trial.trained.label] * costs[_about_cost(trial)]["gflops"] * len(images)
    for view in dict.fromkeys(trial.view.of_files for trial in left):
        some, start = min(CPU_BATCH, len(images)), time.perf_counter()
        _ = [*images.items(view, range(some))]
        total += (time.perf_counter() - start) * len(images) / some
    return total
