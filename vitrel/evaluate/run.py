"""Running a whole evaluation: every trial of a sweep becomes a row, in a folder or a DataFrame.

`run_sweep` writes a folder, `describe_trials` is its dry run, `at_sizes` returns a DataFrame, for notebooks, and
`evaluate_rows` is the loop over trials that they share.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from vitrel.common.extras import optional_import
from vitrel.common.files import atomic_write, shown
from vitrel.common.lock import only_writer
from vitrel.common.modules import evaluating
from vitrel.common.processes import on_all, rank_and_world
from vitrel.common.progress import progress
from vitrel.common.resources import lack_of
from vitrel.common.sizes import Budget, Size, format_size, nearest_size, parse_size_or_budget, sizes_in_words
from vitrel.evaluate.checkpoint import TrainedModel, load_checkpoint, trained_model
from vitrel.evaluate.measure import Evaluated, measure
from vitrel.evaluate.policies import gflops
from vitrel.evaluate.predict import state_hash
from vitrel.evaluate.prepare import Images, Source, check_data, source_of
from vitrel.evaluate.results.advice import Judged, judge
from vitrel.evaluate.results.aggregate import main_metric, read_scores, with_curves
from vitrel.evaluate.results.table import (
    COLUMNS,
    Tables,
    columns_of,
    complete,
    environment,
    not_comparable,
    read_folder,
    read_names,
    row_key,
    set_aside,
    settings_columns,
)
from vitrel.evaluate.results.text import markdown, summary, table_page
from vitrel.evaluate.sweep import Row, Sweep
from vitrel.evaluate.tasks.classes import class_map
from vitrel.evaluate.trials import (
    Trial,
    check_trials,
    class_names_of,
    default_protocols,
    sizes_of,
    static_columns_of,
    trials_of,
)

with optional_import():
    import pandas as pd

HEAD = (
    "model", "size", "protocol", "crop", "policy", "tokens", "GFLOPs", "windows", "padded", "resampled", "values resampled",
    "unseen", "done",
)  # fmt: skip
EXPLAINED = {  # those columns of the dry run that need words, and the column of results.csv whose text they have
    "policy": "policy", "GFLOPs": "gflops", "windows": "window", "padded": "pad_fraction", "resampled": "resampled",
    "values resampled": "resampled_values", "unseen": "unseen",
}  # fmt: skip


def at_sizes(
    model: nn.Module | TrainedModel | str | Path,
    data: str | Dataset | Callable[[Size], Dataset],
    sizes: Sequence[int | str | Size | Budget],
    *,
    label: str = "",
    img_size: Size | None = None,
    preprocessing: Mapping[str, Any] | None = None,
    class_indices: Mapping[str, int] | None = None,
    restrict: bool = False,
    task: str = "",
    **settings: Any,
) -> pd.DataFrame:
    """Evaluate a model at many image sizes: one row per size, protocol, crop and policy, with the columns of results.csv.

    >>> vitrel.evaluate.at_sizes(model, "shapes", [48, 64, "64x96"], n=200)[["img_size", "policy", "top1", "resampled"]]

    Args:
        model: a trained classifier of vitrel or timm, or the path of a checkpoint of vitrel train. It is not changed.
        data: a name or folder that `create_dataset` takes; or a data set of (uint8 [3, h, w] or PIL image, label), which is
            preprocessed as a folder is; or a function from (H, W) to a data set of (normalized float32 [3, H, W], label), for
            which the only protocol is "scale". An attribute `classes` of the data set gives names of classes, by label.
        sizes: in pixels, 96, "160x224" or (160, 224), height first; or budgets of patch tokens, "196t" or Budget(196). The
            training sizes are evaluated too.
        label: the model's name in the table.
        img_size: training size (h, w) in pixels, by default that of the model's `pretrained_cfg`.
        preprocessing: any of mean, std, crop_pct, crop_mode, interpolation, instead of those of the `pretrained_cfg`.
        class_indices: {class of the data: index of the model's output}, where the order of classes and outputs differs.
        restrict: compare only the logits of the data's classes.
        task: "classification" or "segmentation", by default the first for all models but a `Segmenter`. For
            segmentation a data set has masks [h, w] of each image's size instead of labels, with 255 where there is no class.
        settings: fields of `Sweep`: protocols (by default those of `default_protocols`), policies, n, batch_size, device,
            crop_pct, attention_n, ...

    Raises:
        ValueError: for invalid settings, for data or classes that do not fit the model, and for unsupported sizes.
    """
    options = dict(label=label, img_size=img_size, preprocessing=preprocessing, outputs=class_indices, restrict=restrict)
    options["task"] = task
    trained = _as_trained(model, options)
    if not isinstance(data, (str, Path)) and not isinstance(data, Dataset):
        settings = {"protocols": ("scale",)} | settings
        if tuple(settings["protocols"]) != ("scale",):
            raise ValueError("a function from size to data resizes images itself: only protocols=('scale',) is possible")
    settings = {"protocols": default_protocols([trained])} | settings
    for name in ("protocols", "policies"):
        if settings.get(name) is not None:
            settings[name] = tuple(settings[name])
    name = str(data) if isinstance(data, (str, Path)) else type(data).__name__
    sweep = Sweep(
        name, tuple(size if isinstance(size, tuple | Budget) else parse_size_or_budget(size) for size in sizes), **settings
    )
    source = None if isinstance(data, (str, Path)) else source_of(data)
    if source is None:
        check_data(sweep, trained.img_size, trained.train_pixels + sizes_of(trained, sweep), trained.task)
    images = Images(sweep, source)
    trials = _keyed_trials([trained], sweep, images)
    with _restored(trained.model), _progress([trial for trial, _ in trials], len(trials)) as advance:
        results = _measured(lambda: trials, sweep, images, (), advance)
        rows = with_curves([evaluated.row for evaluated in results])
    return pd.DataFrame(rows, columns=columns_of(trained.task))


def run_sweep(
    models: Sequence[TrainedModel],
    sweep: Sweep,
    folder: Path,
    title: str = "",
    replace: bool = False,
) -> list[Row]:
    """Evaluate all trials of `trials_of(models, sweep)`, write the results into `folder`, and return the rows of its
    results.csv.

    Writes results.csv, predictions.npz, translation.csv (with translations), bad_images.csv (with unreadable images), table.md,
    plots/*.png; with `sweep.report`, pictures.json.gz, report.html and report.json. Prints
    progress, then the advice and tables.

    Rows in `folder` of the same weights, data and settings are reused, and rows of other models, sizes, protocols or policies
    are kept beside the new ones. ValueError, before anything is computed, where rows in the folder and new ones may not share a
    table (`not_comparable`). With `replace`, where the folder has rows that are not among these trials, its files are first
    moved into a folder replaced-1 in it (the path is printed), and only rows of these trials are kept. Files are written as
    rows are added; after an exception, a note on it (`add_note`) says how many rows are saved.

    Args:
        title: of the page and plots.
    """
    for train_size, sizes in dict.fromkeys((one.img_size, one.train_pixels + sizes_of(one, sweep)) for one in models):
        check_data(sweep, train_size, sizes, models[0].task)
    folder.mkdir(parents=True, exist_ok=True)
    with only_writer(folder):
        images = Images(sweep)
        trials = _keyed_trials(models, sweep, images)
        tables = _opened([key for _, key in trials], folder, replace)
        print(_header(models, sweep, trials, images, tables), flush=True)
        try:
            previous = [*tables.rows.values()]
            with _progress(_left(trials, previous, sweep), len(trials)) as advance:
                for result in _measured(lambda: trials, sweep, images, previous, advance):
                    tables.add(result)
            rows = with_curves([result.row for result in tables.rows.values()])
            tables.write(rows)
            judged = judge(rows, read_scores(folder), sweep.margin)
            _show(judged, folder, shown(title))
            if sweep.report:
                from vitrel.evaluate.page import write_html
                from vitrel.evaluate.page.pictures import collect_pictures, optional_picture, read_pictures
                from vitrel.evaluate.page.scenes import draw_scenes

                path = collect_pictures(models, sweep, folder, rows=rows)
                with optional_picture("scenes.png"):
                    draw_scenes(read_pictures(path) or {"scenes": []}, folder / "plots")
                write_html(folder, shown(title), sweep.photographs, sweep.margin)
        except BaseException as error:
            saved = tables.write_rest()
            if isinstance(error, RuntimeError) and (text := lack_of(error)):
                raise _noted(MemoryError(text), saved) from error
            _noted(error, saved)
            raise
    return rows


def describe_trials(models: Sequence[TrainedModel], sweep: Sweep, folder: Path, replace: bool = False) -> str:
    """Return the dry run of `run_sweep` as text: a Markdown table with a line per trial (resampling, cost, whether `folder` has
    it), and what would happen to other rows in `folder`.

    Raises ValueError as the evaluation would, for sizes that a model does not support and classes that do not match.
    """
    previous, images, static = read_folder(folder), Images(sweep), {}
    by_key, trials = _gathered(lambda: _keyed_trials(models, sweep, images), previous)
    lines, ready, counts = [], 0, set()
    check_trials([trial for trial, _ in trials], sweep, images)
    for trial, key in trials:
        counts.add(len(images.dataset(trial.preprocessing)))
        configuration = id(trial.trained), *_cost_key(trial)
        if configuration not in static:
            static[configuration] = static_columns_of(trial, images, sweep)
        is_done = complete(by_key.get(row_key(key)), trial, sweep)
        ready += is_done
        lines.append(_line(trial, static[configuration], is_done))
    about = "".join(f"  {name}: {COLUMNS[column].partition('; native')[0]}\n" for name, column in EXPLAINED.items())
    number = " or ".join(f"{count:,}" for count in sorted(counts))
    pixels = ", ".join(map(str, sweep.translations))
    translated = f", translated by {pixels} px at the training size" if pixels else ""
    others, difference = _other_rows(previous, [key for _, key in trials])
    note = ""
    if others and replace:
        note = f"{len(others)} other rows there would be moved into a folder replaced-N.\n"
    elif difference:
        note = f"Rows there may not share a table with these ({difference}): give another --out, or --replace.\n"
    return (
        f"{markdown(HEAD, lines)}\n{len(lines)} rows of {number} images each{translated}; {ready} of them are in {folder} "
        f"already.\n{note}\nColumns:\n{about}"
    )


def evaluate_rows(
    models: Sequence[TrainedModel],
    sweep: Sweep,
    previous: Iterable[Evaluated] = (),
    advance: Callable[[Trial, float], None] = lambda trial, share: None,
    source: Source | None = None,
) -> Iterator[Evaluated]:
    """Yield the result of every trial of `trials_of(models, sweep)`, in its order, as soon as it is measured.

    The columns best_size and top1_area (miou_area) are left empty; `with_curves` fills them.

    Args:
        previous: existing results (of process 0), which are yielded instead where they have the same weights, data and
            settings.
        advance: advance(trial, share) is called after every batch; the shares of a trial add up to 1.
        source: see `Images`.
    """
    images = Images(sweep, source)
    yield from _measured(lambda: _keyed_trials(models, sweep, images), sweep, images, previous, advance)


def _measured(
    keyed: Callable[[], list[tuple[Trial, Row]]],
    sweep: Sweep,
    images: Images,
    previous: Iterable[Evaluated],
    advance: Callable[[Trial, float], None],
) -> Iterator[Evaluated]:
    """Yield the result of every trial that `keyed` returns (as `_keyed_trials`), in order, with its whole row.

    A complete result in `previous` with the same `row_key` is yielded instead of measuring; see `evaluate_rows`.
    """
    by_key, trials = _gathered(keyed, previous)
    # the metric at the training sizes, by model, protocol and crop
    references: dict[tuple[int, str, float], dict[Size, float]] = defaultdict(dict)
    static: dict[tuple, Row] = {}
    check_trials([trial for trial, _ in trials], sweep, images)
    for trial, key in trials:
        former = result = by_key.get(row_key(key))
        if not complete(result, trial, sweep):
            configuration = trial.trained.name, trial.trained.label, *_cost_key(trial)  # seeds share it
            if configuration not in static:
                # only process 0 writes rows; of several processes the last one measures attention meanwhile
                first = rank_and_world()[0] == 0
                static[configuration] = static_columns_of(trial, images, sweep, sweep.border_leak) if first else {}
            result = measure(trial, sweep, images, advance)
            row = key | static[configuration] | result.row
            result = result._replace(row=row, translation=_all_translations(former, result))
        else:
            advance(trial, 1.0)
        row, curve = result.row, (id(trial.trained), trial.protocol, trial.crop_pct)
        if trial.is_training:  # comes first; in the native protocol its first budget is that of the size
            references[curve].setdefault(trial.size, main_metric(row))
        at_training = 0.0  # where no training size is evaluated
        if references[curve]:
            at_training = references[curve][nearest_size(trial.size, references[curve])]
        retention = round(main_metric(row) / at_training, 4) if at_training else float("nan")
        yield result._replace(row=row | {"retention": retention, "best_size": "", f"{trial.task.metric}_area": float("nan")})


def _cost_key(trial: Trial) -> tuple:
    """What `static_columns_of` depends on, besides the model; other protocols than sliding have the same costs at a size."""
    return trial.size, trial.model_size, trial.budget, trial.policy


def _keyed_trials(models: Sequence[TrainedModel], sweep: Sweep, images: Images) -> list[tuple[Trial, Row]]:
    """Every trial of a sweep with the columns that are known before it runs."""
    common, of_model = environment(sweep.data, images.source is not None), {}
    trials = trials_of(models, sweep)
    for trial in trials:
        if id(trial.trained) not in of_model:
            mapping = class_map(trial.trained, class_names_of(trial, images))
            of_model[id(trial.trained)] = {"class_map": mapping, "state_hash_before": state_hash(trial.trained.model)}
    common |= {"images": images.digest(trials[0].preprocessing)} if trials else {}
    return [(trial, settings_columns(trial, sweep) | common | of_model[id(trial.trained)]) for trial in trials]


def _left(keyed: Iterable[tuple[Trial, Row]], results: Iterable[Evaluated], sweep: Sweep) -> list[Trial]:
    """The trials that are not complete in existing results."""
    by_key = {row_key(result.row): result for result in results}
    return [trial for trial, key in keyed if not complete(by_key.get(row_key(key)), trial, sweep)]


@contextmanager
def _progress(left: Sequence[Trial], total: int) -> Iterator[Callable[[Trial, float], None]]:
    """Context manager that gives advance(trial, share), and reports progress by the time that the trials in `left` will take.

    It is taken to be proportional to the multiply-adds of all passes; those of a model grow with the area of the image.
    """
    models = {(trial.trained.name, trial.trained.label): trial.trained for trial in left}
    per_pixel = dict.fromkeys(models, 1.0)
    if len(models) > 1:
        per_pixel = {key: gflops(one.model, one.img_size) / math.prod(one.img_size) for key, one in models.items()}
    costs = {
        id(trial): per_pixel[trial.trained.name, trial.trained.label] * math.prod(trial.size) * (1 + len(trial.translations))
        for trial in left
    }
    with progress(total, "rows", work=sum(costs.values())) as advance:
        yield lambda trial, share: advance(share, trial.name, costs.get(id(trial), 0.0))


def _gathered(
    keyed: Callable[[], list[tuple[Trial, Row]]], previous: Iterable[Evaluated]
) -> tuple[dict[tuple[str, ...], Evaluated], list[tuple[Trial, Row]]]:
    """The existing results of process 0 by `row_key`, and the trials; ValueError where processes differ in
    weights or images.
    """
    trials: list[tuple[Trial, Row]] = []

    def of_this_process() -> tuple[list[Evaluated], list[str], list[str]]:
        trials[:] = keyed()
        return [*previous], [key["state_hash_before"] for _, key in trials], [key["images"] for _, key in trials]

    (results, hashes, digests), *others = on_all(of_this_process)
    if any(other != hashes for _, other, _ in others):
        raise ValueError("the processes hold different weights: give all of them the same checkpoints")
    if any(other != digests for *_, other in others):
        raise ValueError("the processes see different images: give all of them the same data")
    return {row_key(result.row): result for result in results}, trials


def _all_translations(former: Evaluated | None, new: Evaluated) -> list[Row]:
    """The lines of translation.csv of a repeated trial: the new ones, and former ones of other translations."""
    repeated = {line["translation"] for line in new.translation}
    kept = [line for line in former.translation if line["translation"] not in repeated] if former else []
    return sorted([*kept, *new.translation], key=lambda line: line["translation"])


def _header(
    models: Sequence[TrainedModel], sweep: Sweep, keyed: Sequence[tuple[Trial, Row]], images: Images, tables: Tables
) -> str:
    """Three lines printed at the start: the models, the images and sizes, the number of rows and the output folder."""
    trials = [trial for trial, _ in keyed]
    texts = [
        f"{model.label} ({model.model.num_classes} classes, trained at {sizes_in_words(model.train_sizes)})" for model in models
    ]
    sizes = ", ".join(dict.fromkeys(format_size(trial.size) for trial in trials))
    ready = len(trials) - len(_left(keyed, tables.rows.values(), sweep))
    count = f"{len(images.dataset(trials[0].preprocessing)):,} " if trials else ""
    return (
        f"evaluating {', '.join(dict.fromkeys(texts))}\n"
        f"on {count}images of {shown(sweep.data)} at {sizes} px, protocol {' and '.join(sweep.protocols)}\n"
        f"{len(trials)} rows, {ready} of them done already; output folder {tables.folder}"
    )


def _opened(keys: Sequence[Row], folder: Path, replace: bool) -> Tables:
    """Return the tables of the folder with the rows that are kept (see `run_sweep`).

    With `replace`, where the folder has rows of other trials, its files are first moved into replaced-N.

    Args:
        keys: columns of every trial that are known before it runs.

    Raises:
        ValueError: without `replace`, the folder has rows that may not share a table with those of `keys`.
    """
    results, names = read_folder(folder), read_names(folder)
    others, difference = _other_rows(results, keys)
    if difference and not replace:
        raise ValueError(
            f"{folder} holds rows that may not share a table with the new ones ({difference}). Nothing was computed. Give "
            f"another folder (--out), or --replace, which first moves the files in {folder} into a folder replaced-N in it"
        )
    if not replace or not others:
        return Tables(folder, results, names)
    of_trials = {row_key(key) for key in keys}
    moved_to, kept = set_aside(folder), [result for result in results if row_key(result.row) in of_trials]
    tables = Tables(folder, kept, names)
    if kept:
        tables.write()
    print(
        f"{len(others)} of the {len(results)} rows in {folder} do not belong to this evaluation"
        f"{f' ({difference})' if difference else ''}: the former files are in {moved_to}, {len(kept)} rows are kept"
    )
    return tables


def _other_rows(results: Sequence[Evaluated], keys: Sequence[Row]) -> tuple[list[Evaluated], str]:
    """Results of a folder whose key is none of `keys`, and why they may not share a table with those; "" if they may."""
    of_trials = {row_key(key) for key in keys}
    others = [result for result in results if row_key(result.row) not in of_trials]
    return others, not_comparable([result.row for result in others], keys)


def _show(judged: Judged, folder: Path, title: str) -> None:
    """Write table.md and plots/, and print the advice and the tables."""
    with atomic_write(folder / "table.md") as part:
        part.write_text(table_page(judged, title or shown(folder.name)), "utf-8")
    print(f"\n{summary(judged)}", flush=True)
    from vitrel.evaluate.page import plot_all  # only where a folder is written
    from vitrel.evaluate.page.pictures import optional_picture

    with optional_picture("plots"):
        plot_all(judged, folder / "plots", title)


def _noted(error: BaseException, note: str) -> BaseException:
    if note:
        error.add_note(note)
    return error


def _line(trial: Trial, costs: Row, is_done: bool) -> list[Any]:
    """A line of the dry run's table, with the columns HEAD."""

    def number(name: str, form: str) -> str:
        return "-" if costs[name] != costs[name] else format(costs[name], form)

    return [
        trial.trained.label,
        format_size(trial.size),
        trial.protocol if trial.budget is None else f"{trial.protocol}, {trial.budget}t",
        f"{trial.crop_pct:g}" + (f", {trial.crop_mode}" if trial.crop_mode not in ("", "center") else ""),
        trial.policy,
        number("tokens", ",.0f"),
        number("gflops", ".3g"),
        costs["window"],
        costs["pad_fraction"],
        costs["resampled"],
        f"{costs['resampled_values']:,}",
        number("unseen", ".2f"),
        "yes" if is_done else "",
    ]


def _as_trained(model: nn.Module | TrainedModel | str | Path, options: Mapping[str, Any]) -> TrainedModel:
    """`model` as TrainedModel.

    Args:
        options: arguments of `trained_model`, of which checkpoints take only label and restrict.
    """
    if isinstance(model, nn.Module):
        return trained_model(model, **options)
    trained = model if isinstance(model, TrainedModel) else load_checkpoint(model)
    if any(options[name] for name in options if name not in ("label", "restrict")):
        raise ValueError("img_size, preprocessing and class_indices are for plain models: a checkpoint contains its own")
    return replaced(trained, label=options["label"] or trained.label, restrict=options["restrict"] or trained.restrict)


@contextmanager
def _restored(model: nn.Module):
    """Context in eval mode that restores the model's training mode and device."""
    device = next(model.parameters()).device
    try:
        with evaluating(model):
            yield
    finally:
        model.to(device)
