"""Runs an evaluation: every task of a sweep becomes a row, in a folder or as a DataFrame.

`run_sweep` writes a folder, `describe_tasks` says what that would do, `at_sizes` is for notebooks, and `evaluate_rows` is the
loop below them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.data import Dataset

from vitrel.evaluate.images import Images, Source, check_data, out_of_memory, source_of
from vitrel.evaluate.measure import Evaluated, Task, check_tasks, class_names_of, measure, sizes_of, static_columns_of, tasks_of
from vitrel.evaluate.metrics import state_hash
from vitrel.evaluate.models import Trained, class_map, load_checkpoint, trained_model
from vitrel.evaluate.processes import on_all, rank_and_world
from vitrel.evaluate.report import Claim, judge, markdown, table_page
from vitrel.evaluate.rescue import write_rescue
from vitrel.evaluate.results import (
    COLUMNS,
    Tables,
    complete,
    environment,
    not_comparable,
    only_writer,
    read_folder,
    read_lines,
    read_names,
    row_key,
    set_aside,
    settings_columns,
    with_curves,
)
from vitrel.evaluate.settings import Row, Sweep
from vitrel.extras import optional_import
from vitrel.files import atomic_write, shown
from vitrel.inspect.any_model import evaluating
from vitrel.progress import progress
from vitrel.sizes import Budget, Size, format_size, parse_size_or_budget

with optional_import():
    import pandas as pd

HEAD = (
    "model", "size", "protocol", "crop", "policy", "tokens", "GFLOPs", "windows", "padded", "resized", "values resampled",
    "unseen", "done",
)  # fmt: skip


def at_sizes(
    model: nn.Module | Trained | str | Path,
    data: str | Dataset | Callable[[Size], Dataset],
    sizes: Sequence[int | str | Size | Budget],
    *,
    label: str = "",
    img_size: Size | None = None,
    preprocessing: Mapping[str, Any] | None = None,
    class_indices: Mapping[str, int] | None = None,
    restrict: bool = False,
    **settings: Any,
) -> pd.DataFrame:
    """Evaluates a model at many sizes: one row per size, protocol, crop and policy, with the columns of results.csv.

    >>> vitrel.evaluate.at_sizes(model, "shapes", [48, 64, "64x96"], n=200)[["img_size", "policy", "top1", "resized"]]

    Args:
        model: ours or timm's, trained; or the path of a checkpoint of vitrel train. It is left as it was.
        data: what `create_dataset` takes; or a data set of (uint8 [3, h, w] or PIL image, label), prepared here as folders are;
            or a function from (H, W) to a data set of (normalised float32 [3, H, W], label), for which there is one protocol,
            "scale". With `.classes`, a list of names, where the labels stand for names.
        sizes: in pixels, 96, "160x224" or (160, 224), height first; or budgets of patch tokens, "196t" or Budget(196). The size
            of training is evaluated too.
        label: the model's name in the table.
        img_size: (h, w) in pixels the model was trained at, by default that of its `pretrained_cfg`.
        preprocessing: any of mean, std, crop_pct, interpolation, in the place of those of the `pretrained_cfg`.
        class_indices: {class of the data: index of the model's output}, where they are not in order.
        restrict: only the outputs of the data's classes compete.
        settings: those of `Sweep`: protocols, policies, n, batch_size, device, crop_pct, attention_n, ...

    Raises:
        ValueError: for settings, classes, data or sizes that do not fit.
    """
    about = dict(label=label, img_size=img_size, preprocessing=preprocessing, outputs=class_indices, restrict=restrict)
    trained = _as_trained(model, about)
    if not isinstance(data, (str, Path)) and not isinstance(data, Dataset):
        settings = {"protocols": ("scale",)} | settings
        if tuple(settings["protocols"]) != ("scale",):
            raise ValueError("a function from size to data decides itself how images fill a size: protocols=('scale',)")
    for name in ("protocols", "policies"):
        if settings.get(name) is not None:
            settings[name] = tuple(settings[name])
    name = str(data) if isinstance(data, (str, Path)) else type(data).__name__
    sweep = Sweep(
        name, tuple(size if isinstance(size, tuple | Budget) else parse_size_or_budget(size) for size in sizes), **settings
    )
    source = None if isinstance(data, (str, Path)) else source_of(data)
    if source is None:
        check_data(sweep, trained.img_size, sizes_of(trained, sweep))
    images = Images(sweep, source)
    tasks = _keyed_tasks([trained], sweep, images)
    with _left_as_it_was(trained.model), progress(len(tasks), "rows") as tell:
        found = _measured(lambda: tasks, sweep, images, (), lambda task, share: tell(share, task.name))
        rows = with_curves([one.row for one in found])
    return pd.DataFrame(rows, columns=list(COLUMNS))


def run_sweep(
    models: Sequence[Trained],
    sweep: Sweep,
    folder: Path,
    title: str = "",
    report: bool = False,
    claims: Sequence[Claim] = (),
    replace: bool = False,
    photographs: bool = True,
    rescue: bool = False,
) -> list[Row]:
    """Evaluates all of `tasks_of(models, sweep)` and writes results.csv, predictions.npz, translation.csv (where content is
    translated), bad_images.csv (where some cannot be read), table.md, claims.md (where there are claims) and plots/*.png into
    `folder`; with `report`, pictures.json.gz, report.html and report.json too; with `rescue`, rescue.csv and rescue.md (see
    vitrel.evaluate.rescue). photographs: whether images of the data may be in the report.

    No row is ever lost. Rows in `folder` that stem from the same weights, data and settings are not made again, and those at
    other sizes, protocols, policies or of other models stay beside the new ones. Where rows there may not stand in one table
    with the new ones (`not_comparable`), a ValueError says what differs before anything is computed. With `replace`, all files
    of an evaluation with any row that is not asked for now are moved into a folder replaced-1 there, which is printed; rows
    that are asked for stay. Tables are written as they grow. An exception gets a note (`add_note`) of how many rows are saved.
    """
    for train_size, sizes in dict.fromkeys((trained.img_size, sizes_of(trained, sweep)) for trained in models):
        check_data(sweep, train_size, sizes)
    folder.mkdir(parents=True, exist_ok=True)
    with only_writer(folder):
        images = Images(sweep)
        tasks = _keyed_tasks(models, sweep, images)
        tables = _opened([key for _, key in tasks], folder, replace)
        print(_header(models, sweep, tasks, images, tables), flush=True)
        try:
            with progress(len(tasks), "rows") as tell:
                done = [*tables.rows.values()]
                for one in _measured(lambda: tasks, sweep, images, done, lambda task, share: tell(share, task.name)):
                    tables.add(one)
            rows = with_curves([one.row for one in tables.rows.values()])
            tables.write(rows)
            if rescue:
                write_rescue(models, sweep, images, folder)
            _show(rows, folder, shown(title), claims)
            if replace and not claims:
                (folder / "claims.md").unlink(missing_ok=True)
            if report:
                # pictures run the models, and the page brings in plotly: only where they are wanted
                from vitrel.evaluate.report.html import write_html
                from vitrel.evaluate.report.pictures import collect_pictures

                collect_pictures(models, sweep, folder, rows=rows, images=photographs)
                write_html(folder, shown(title), photographs)
        except BaseException as error:
            saved = tables.write_rest()
            if isinstance(error, RuntimeError) and out_of_memory(error):
                raise _noted(MemoryError(f"memory ran out: {str(error).splitlines()[0]}"), saved) from error
            _noted(error, saved)
            raise
    return rows


def describe_tasks(models: Sequence[Trained], sweep: Sweep, folder: Path, replace: bool = False) -> str:
    """The rows of `tasks_of(models, sweep)` as a Markdown table: what would be resized, what it costs, whether `folder` has it.

    Other rows there that would be refused or moved aside (`run_sweep`) are told. Raises as the evaluation would: ValueError
    for a size that a model cannot take, or for classes that do not fit.
    """
    done, images, known = read_folder(folder), Images(sweep), {}
    found, tasks = _known_rows(lambda: _keyed_tasks(models, sweep, images), done)
    lines, ready, counts = [], 0, set()
    check_tasks([task for task, _ in tasks], sweep, images)
    for task, key in tasks:
        counts.add(len(images.dataset(task.preprocessing)))
        place = id(task.trained), task.size, task.budget, task.policy
        if place not in known:
            known[place] = static_columns_of(task, images)
        is_done = complete(found.get(row_key(key)), task, sweep)
        ready += is_done
        lines.append(_line(task, known[place], is_done))
    number = " or ".join(f"{count:,}" for count in sorted(counts))
    pixels = ", ".join(map(str, sweep.translations))
    translated = f", translated by {pixels} px at the training size" if pixels else ""
    others, differ = _not_asked(done, [key for _, key in tasks])
    note = ""
    if others and replace:
        note = f"{len(others)} other rows there would be moved aside.\n"
    elif differ:
        note = f"Rows there may not stand in one table with these ({differ}): give another --out, or --replace.\n"
    return (
        f"{markdown(HEAD, lines)}\n{len(lines)} rows of {number} images each{translated}; {ready} of them are in {folder} "
        f"already. GFLOPs: 10^9 multiply-adds per image.\n{note}"
    )


def evaluate_rows(
    models: Sequence[Trained],
    sweep: Sweep,
    done: Iterable[Evaluated] = (),
    advance: Callable[[Task, float], None] = lambda task, share: None,
    source: Source | None = None,
) -> Iterator[Evaluated]:
    """Yields the rows of `tasks_of(models, sweep)` in its order, each once its model has seen all images.

    Rows in `done` (of process 0) that were made from the same weights, data and settings are passed on instead of being made
    again. `advance(task, share)` is called as images are seen; the shares of a task add up to 1. source: see `Images`.
    """
    images = Images(sweep, source)
    yield from _measured(lambda: _keyed_tasks(models, sweep, images), sweep, images, done, advance)


def _measured(
    keyed: Callable[[], list[tuple[Task, Row]]],
    sweep: Sweep,
    images: Images,
    done: Iterable[Evaluated],
    advance: Callable[[Task, float], None],
) -> Iterator[Evaluated]:
    """`evaluate_rows` of the tasks that `keyed` returns, see `_keyed_tasks`."""
    kept, tasks = _known_rows(keyed, done)
    reference: dict[tuple[int, str, float], float] = {}
    static: dict[tuple, Row] = {}
    check_tasks([task for task, _ in tasks], sweep, images)
    for task, key in tasks:
        former = found = kept.get(row_key(key))
        if not complete(found, task, sweep):
            place = task.trained.name, task.trained.label, task.size, task.budget, task.policy  # which seeds share
            if place not in static:
                how = sweep.border_leak, sweep.batch_size
                # where several processes share the work the last one measures attention meanwhile, and the first alone writes
                own = rank_and_world()[0] == 0
                static[place] = static_columns_of(task, images, *how) if own else {}
            found = measure(task, sweep, images, advance)
            found = found._replace(row=key | static[place] | found.row, translation=_all_translations(former, found))
        else:
            advance(task, 1.0)
        row, curve = found.row, (id(task.trained), task.protocol, task.crop_pct)
        if task.size == task.trained.img_size:  # comes first, at native shape with the tokens of that size
            reference.setdefault(curve, row["top1"])
        at_training = reference.get(curve, 0.0)  # it may be skipped
        retention = round(row["top1"] / at_training, 4) if at_training else float("nan")
        yield found._replace(row=row | {"retention": retention, "best_size": "", "top1_area": float("nan")})


def _keyed_tasks(models: Sequence[Trained], sweep: Sweep, images: Images) -> list[tuple[Task, Row]]:
    """Every task of a sweep with the columns that are known before it runs."""
    same, of_model = environment(sweep.data, images.source is not None), {}
    tasks = tasks_of(models, sweep)
    for task in tasks:
        if id(task.trained) not in of_model:
            how = class_map(task.trained, class_names_of(task, images))
            of_model[id(task.trained)] = {"class_map": how, "state_hash_before": state_hash(task.trained.model)}
    same |= {"images": images.digest(tasks[0].preprocessing)} if tasks else {}
    return [(task, settings_columns(task, sweep) | same | of_model[id(task.trained)]) for task in tasks]


def _known_rows(
    keyed: Callable[[], list[tuple[Task, Row]]], done: Iterable[Evaluated]
) -> tuple[dict[tuple[str, ...], Evaluated], list[tuple[Task, Row]]]:
    """What process 0 has done already, by `row_key`, and the tasks. ValueError where the processes hold different weights."""
    tasks: list[tuple[Task, Row]] = []

    def own() -> tuple[list[Evaluated], list[str], list[str]]:
        tasks[:] = keyed()
        return [*done], [key["state_hash_before"] for _, key in tasks], [key["images"] for _, key in tasks]

    (found, hashes, digests), *others = on_all(own)
    if any(other != hashes for _, other, _ in others):
        raise ValueError("the processes hold different weights: give all of them the same checkpoints")
    if any(other != digests for *_, other in others):
        raise ValueError("the processes see different images: give all of them the same data")
    return {row_key(one.row): one for one in found}, tasks


def _all_translations(former: Evaluated | None, found: Evaluated) -> list[Row]:
    """The lines of translation.csv of a row that was made again for further ones: of those not made now the former lines."""
    made = {line["translation"] for line in found.translation}
    kept = [line for line in former.translation if line["translation"] not in made] if former else []
    return sorted([*kept, *found.translation], key=lambda line: line["translation"])


def _header(models: Sequence[Trained], sweep: Sweep, keyed: Sequence[tuple[Task, Row]], images: Images, tables: Tables) -> str:
    """What is evaluated, on what, and where the results go, in three lines."""
    tasks = [task for task, _ in keyed]
    named = [f"{one.label} ({one.model.num_classes} classes, trained at {format_size(one.img_size)} px)" for one in models]
    sizes = ", ".join(dict.fromkeys(format_size(task.size) for task in tasks))
    found = {row_key(one.row): one for one in tables.rows.values()}
    ready = sum(complete(found.get(row_key(key)), task, sweep) for task, key in keyed)
    count = f"{len(images.dataset(tasks[0].preprocessing)):,} " if tasks else ""
    return (
        f"evaluating {', '.join(dict.fromkeys(named))}\n"
        f"on {count}images of {shown(sweep.data)} at {sizes} px, protocol {' and '.join(sweep.protocols)}\n"
        f"{len(tasks)} rows, {ready} of them made already; output folder {tables.folder}"
    )


def _opened(keys: Sequence[Row], folder: Path, replace: bool) -> Tables:
    """The folder with the rows that stay there; see `run_sweep`."""
    found, names = read_folder(folder), read_names(folder)
    others, why = _not_asked(found, keys)
    if why and not replace:
        raise ValueError(
            f"{folder} holds rows that may not stand in one table with those asked for now ({why}). Nothing was computed. Give "
            f"another folder (--out), or --replace, which first moves what is in {folder} into a folder of its own there"
        )
    if not replace or not others:
        return Tables(folder, found, names)
    asked = {row_key(key) for key in keys}
    place, rest = set_aside(folder), [one for one in found if row_key(one.row) in asked]
    tables = Tables(folder, rest, names)
    if rest:
        tables.write()
    print(
        f"{len(others)} of the {len(found)} rows in {folder} are not asked for now{f' ({why})' if why else ''}: the evaluation "
        f"that was there is in {place}, {len(rest)} rows of it stay"
    )
    return tables


def _not_asked(found: Sequence[Evaluated], keys: Sequence[Row]) -> tuple[list[Evaluated], str]:
    """The rows of a folder not asked for now, and why they may not stand in one table with the others; "" where they may."""
    asked = {row_key(key) for key in keys}
    others = [one for one in found if row_key(one.row) not in asked]
    return others, not_comparable([one.row for one in others], keys)


def _show(rows: Sequence[Row], folder: Path, title: str, claims: Sequence[Claim]) -> None:
    """Writes table.md, plots/ and claims.md."""
    with atomic_write(folder / "table.md") as part:
        part.write_text(table_page(rows, title or shown(folder.name), folder), "utf-8")
    from vitrel.evaluate.report.plots import plot_all  # brings matplotlib: only where a folder is written

    plot_all(rows, folder / "plots", title)
    if claims:
        verdict = "\n".join(judge(claims, rows, read_lines(folder, "translation")))
        with atomic_write(folder / "claims.md") as part:
            part.write_text(verdict + "\n", "utf-8")


def _noted(error: BaseException, saved: str) -> BaseException:
    if saved:
        error.add_note(saved)
    return error


def _line(task: Task, costs: Row, is_done: bool) -> list[Any]:
    def number(name: str, form: str) -> str:
        return "-" if costs[name] != costs[name] else format(costs[name], form)

    return [
        task.trained.label,
        format_size(task.size),
        task.protocol if task.budget is None else f"{task.protocol}, {task.budget}t",
        f"{task.crop_pct:g}",
        task.policy,
        number("tokens", ",.0f"),
        number("gflops", ".3g"),
        costs["window"],
        costs["pad_fraction"],
        costs["resized"],
        f"{costs['resized_params']:,}",
        number("unseen", ".2f"),
        "yes" if is_done else "",
    ]


def _as_trained(model: nn.Module | Trained | str | Path, about: Mapping[str, Any]) -> Trained:
    if isinstance(model, nn.Module):
        return trained_model(model, **about)
    trained = model if isinstance(model, Trained) else load_checkpoint(model)
    if any(about[name] for name in about if name != "label"):
        raise ValueError(
            "a checkpoint says itself how it was trained: img_size, preprocessing and classes are for plain models"
        )
    return replaced(trained, label=about["label"] or trained.label)


@contextmanager
def _left_as_it_was(model: nn.Module):
    device = next(model.parameters()).device
    try:
        with evaluating(model):
            yield
    finally:
        model.to(device)
