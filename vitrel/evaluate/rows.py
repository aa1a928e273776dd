"""Accuracy of trained models at any resolution: one row per (model, size, protocol, crop, policy).

Each row proves what was done to the model: the rules that resampled something and on how many values, the shares of
offsets never trained and served by a trained edge, and a hash of the state dict before and after. Images of one size and
protocol are decoded once and shown to every model. Over several processes (vitrel.evaluate.split) each sees its share of them,
and a row counts all.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from vitrel.evaluate.checkpoint import Trained, class_map
from vitrel.evaluate.environment import environment
from vitrel.evaluate.fitting import fitted, static_columns
from vitrel.evaluate.images import Images, Source
from vitrel.evaluate.measure import Evaluated, class_names_of, classes_of, line_columns, measure
from vitrel.evaluate.metrics import state_hash
from vitrel.evaluate.plan import Task, plan
from vitrel.evaluate.settings import Row, Sweep
from vitrel.evaluate.split import device_name, on_all, rank_and_world
from vitrel.models.backbone import Backbone
from vitrel.sizes import format_size

KEY = (
    "model", "model_args", "label", "seed", "img_size", "train_size", "protocol", "policy", "crop_pct", "interpolation", "mean",
    "std", "class_map", "data", "data_seed", "n_asked", "batch_asked", "attention_n", "compile", "dtype", "device", "torch",
    "torchvision", "timm", "vitrel", "state_hash_before",
)  # fmt: skip
LINE_KEY = ("label", "seed", "img_size", "protocol", "policy", "crop_pct", "data")
OF_MODEL = (
    "model", "model_args", "seed", "train_size", "interpolation", "mean", "std", "class_map", "state_hash_before",
)  # fmt: skip
# rows of one table agree in them, whatever the model and the place
OF_ALL = ("data", *(name for name in KEY if name not in LINE_KEY + OF_MODEL))


def evaluate_rows(
    models: Sequence[Trained],
    sweep: Sweep,
    done: Iterable[Evaluated] = (),
    advance: Callable[[Task, float], None] = lambda task, share: None,
    source: Source | None = None,
) -> Iterator[Evaluated]:
    """Yields the rows of `plan(models, sweep)` in its order, each once its model has seen all images.

    Rows in `done` (of process 0) that were made from the same weights, data and settings are passed on instead of being made
    again. `advance(task, share)` is called as images are seen; the shares of a task add up to 1. source: see `Images`.
    """
    images = Images(sweep, source)
    kept, keys = known_rows(models, sweep, images, done)
    reference: dict[tuple[int, str, float], float] = {}
    static: dict[tuple, Row] = {}
    check_tasks([task for task, _ in keys], sweep, images)
    for task, key in keys:
        former = found = kept.get(row_key(key))
        if found is None or not complete(found, task, sweep):
            place = task.trained.name, task.trained.label, task.size, task.policy  # which seeds share
            if place not in static:
                how = sweep.border_leak, sweep.batch_size
                # where several processes share the work the last one measures attention meanwhile, and the first alone writes
                own = rank_and_world()[0] == 0
                static[place] = static_columns(task.trained.model, task.size, task.policy, *how) if own else {}
            found = measure(task, sweep, images, advance)
            found = found._replace(row=key | static[place] | found.row, translation=_all_shifts(former, found))
        else:
            advance(task, 1.0)
        row, curve = found.row, (id(task.trained), task.protocol, task.crop_pct)
        if task.size == task.trained.img_size:
            reference.setdefault(curve, row["top1"])
        retention = round(row["top1"] / reference[curve], 4) if reference[curve] else float("nan")
        yield found._replace(row=row | {"retention": retention, "best_size": "", "top1_area": float("nan")})


def check_tasks(tasks: Iterable[Task], sweep: Sweep, images: Images) -> None:
    """ValueError now, not after hours, where the classes of the data do not fit a model, or a model does not take a size."""
    seen = set()
    for task in tasks:
        model = id(task.trained)
        if model not in seen:
            classes_of(task, sweep, images)
        if (model, task.size) not in seen and not isinstance(task.trained.model, Backbone):  # ours take any
            with fitted(task.trained.model, task.size, task.policy):
                pass
        seen |= {model, (model, task.size)}


def known_rows(
    models: Sequence[Trained], sweep: Sweep, images: Images, done: Iterable[Evaluated]
) -> tuple[dict[tuple[str, ...], Evaluated], list[tuple[Task, Row]]]:
    """What process 0 has done already, by `row_key`, and `planned`. ValueError where the processes hold different weights."""
    keys: list[tuple[Task, Row]] = []

    def own() -> tuple[list[Evaluated], list[str]]:
        keys[:] = planned(models, sweep, images)
        return [*done], [key["state_hash_before"] for _, key in keys]

    (found, hashes), *others = on_all(own)
    if any(other != hashes for _, other in others):
        raise ValueError("the processes hold different weights: give all of them the same checkpoints")
    return {row_key(one.row): one for one in found}, keys


def planned(models: Sequence[Trained], sweep: Sweep, images: Images) -> list[tuple[Task, Row]]:
    """Every task of the plan with the columns that are known before it runs."""
    same, of_model = environment(sweep.data, images.source is not None), {}
    tasks = plan(models, sweep)
    for task in tasks:
        if id(task.trained) not in of_model:
            how = class_map(task.trained, class_names_of(task, images))
            of_model[id(task.trained)] = {"class_map": how, "state_hash_before": state_hash(task.trained.model)}
    return [(task, _settings(task, sweep) | same | of_model[id(task.trained)]) for task in tasks]


def _differences(row: Row, keys: Sequence[Row]) -> list[str]:
    """Why a row may not stand in one table with those planned, whose `keys` these are: "dtype: float32 there, bfloat16 now".

    Data, settings, devices and versions have to agree, and of a model that is planned too all that is its own: other weights
    under the same label would count as another seed of it.
    """
    own = [key for key in keys if key["label"] == row["label"]]
    names = OF_ALL + OF_MODEL if own else OF_ALL
    found = [[name for name in names if _text(row[name]) != _text(key[name])] for key in own or keys]
    least = min(found, key=len, default=[])
    if not least:
        return []
    near = (own or keys)[found.index(least)]
    return [_difference(name, row, near) for name in least]


def not_comparable(rows: Iterable[Row], keys: Sequence[Row], most: int = 4) -> str:
    """What differs in any rows as one text, at most so many of them; "" where the rows may stand with those planned."""
    found = [*dict.fromkeys(text for row in rows for text in _differences(row, keys))]
    return "; ".join(found[:most]) + (f"; and {len(found) - most} more" if len(found) > most else "")


def _difference(name: str, row: Row, key: Row) -> str:
    then, now = (_text(value) or "none" for value in (row[name], key[name]))
    if name == "state_hash_before":
        return f"other weights of {row['label']} (SHA-256 {then:.8} there, {now:.8} now)"
    whose = f" of {row['label']}" if name in OF_MODEL else ""
    return f"{name}{whose}: {then} there, {now} now"


def _all_shifts(former: Evaluated | None, found: Evaluated) -> list[Row]:
    """The lines of translation.csv of a row that was made again for further shifts: of shifts not made now the former ones."""
    made = {line["shift"] for line in found.translation}
    kept = [line for line in former.translation if line["shift"] not in made] if former else []
    return sorted([*kept, *found.translation], key=lambda line: line["shift"])


def complete(found: Evaluated, task: Task, sweep: Sweep) -> bool:
    """Whether a row holds all that is asked for now: images left out may be an error now, shifts and columns may be new."""
    if found.row["left_out"] and sweep.on_bad_image == "raise":
        return False
    shifts = {int(line["shift"]) for line in found.translation}
    return bool(found.per_class) and found.row["ece"] == found.row["ece"] and set(task.shifts) <= shifts


def row_key(row: Row) -> tuple[str, ...]:
    """What must agree for a row to stand for another: read back from CSV, a missing number is NaN, an absent one None."""
    return tuple(_text(row[name]) for name in KEY)


def line_key(row: Row) -> tuple[str, ...]:
    """By which lines of per_class.csv and translation.csv belong to a row of results.csv."""
    return tuple(_text(row[name]) for name in LINE_KEY)


def _text(value: Any) -> str:
    if value is None or value != value:
        return ""
    if isinstance(value, float):  # of a column with empty cells pandas makes whole numbers floats
        return str(int(value)) if value.is_integer() else f"{value:g}"
    return str(value)


def _settings(task: Task, sweep: Sweep) -> Row:
    trained = task.trained
    return line_columns(task, sweep) | {
        "model": trained.name,
        "model_args": trained.model_args,
        "encoding": trained.encoding,
        "train_size": format_size(trained.img_size),
        "data_seed": sweep.data_seed,
        "n_asked": sweep.n,
        "batch_asked": sweep.batch_size,
        "attention_n": sweep.attention_n,
        "interpolation": trained.interpolation,
        "mean": " ".join(f"{value:g}" for value in trained.mean),
        "std": " ".join(f"{value:g}" for value in trained.std),
        "compile": sweep.compile,
        "optimize": sweep.optimize,
        "dtype": sweep.dtype,
        "device": device_name(sweep.torch_device),
    }
