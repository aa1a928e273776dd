"""One task through the pipe: prepared images, predictions, score, row.

With several processes, each has a share of the images, and the row is of all images.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from vitrel.common.processes import on_all, rank_and_world
from vitrel.evaluate.predict import (
    AtSizes,
    Runner,
    attention_columns,
    half_of_rate,
    peak_mb,
    predictions,
    reset_peak,
    state_hash,
    translate,
)
from vitrel.evaluate.prepare import Images, share_of
from vitrel.evaluate.score import Classification, Predicted, Tally, predicted_by
from vitrel.evaluate.sweep import Row, Sweep
from vitrel.evaluate.tasks import Task, classes_of, line_columns

_COMBINED: dict[str, Callable[[Iterable[Any]], Any]] = {  # how a column is combined over processes
    "left_out": sum,
    "infer_samples_per_sec": sum,
    "infer_samples_per_sec_half": lambda halves: sum(half**2 for half in halves) ** 0.5,
    "unchanged": all,
    "peak_memory_mb": max,
    "batch_size": min,
    "oom": max,
}


class Evaluated(NamedTuple):
    """The result of a task: its row of results.csv, its lines of translation.csv, its predictions (None for a row read from a
    folder without them), and the names of images that could not be read.
    """

    row: Row
    translation: list[Row]
    predicted: Predicted | None
    bad_images: tuple[str, ...] = ()


class Share(NamedTuple):
    """The result of a task in one process, over its share of the images.

    columns: columns of results.csv on speed, memory, attention and the state dict. tally: metrics. answers: `Answers.arrays`.
    translated: {pixels of the translation: metrics}. bad_images: names of images that could not be read.
    """

    columns: Row
    tally: Tally
    answers: list[np.ndarray]
    translated: dict[int, Tally]
    bad_images: tuple[str, ...] = ()


def measure(task: Task, sweep: Sweep, images: Images, advance: Callable[[Task, float], None]) -> Evaluated:
    """Run the task's model over all images, and return its measured columns (`row`), lines and predictions.

    `row` has no columns of the settings (`settings_columns`, `environment`) or of `static_columns_of`. Every process of the
    evaluation must call this; each runs its share of the images, and all get the same result.

    `advance(task, share)` is called after every batch with its share of this process's images; the shares add up to 1. Raises
    ValueError where no image can be read, FloatingPointError where logits are not finite, MemoryError where a single image does
    not fit in memory.
    """
    parts = on_all(lambda: _measure_share(task, sweep, images, advance))
    row = parts[-1].columns | {name: combined(part.columns[name] for part in parts) for name, combined in _COMBINED.items()}
    tally = _added([part.tally for part in parts])
    if not tally.n:
        raise ValueError(f"none of the {row['left_out']} images of {sweep.data} can be read")
    count = sum(parameter.numel() for parameter in task.trained.model.parameters())
    row |= {name: round(row[name], 2) for name in ("infer_samples_per_sec", "infer_samples_per_sec_half")}
    row |= tally.columns() | {"param_count": round(count / 1e6, 2), "params": count}
    keys = line_columns(task)
    translated = {by: _added([part.translated[by] for part in parts]).columns() for by in task.translations}
    names = ("n", "top1", "top1_low", "top1_high")
    translation = [keys | {"translation": by} | {name: metrics[name] for name in names} for by, metrics in translated.items()]
    bad_images = dict.fromkeys(name for part in parts for name in part.bad_images)
    predicted = predicted_by([part.answers for part in parts], images.listed(task.preprocessing))
    return Evaluated(row, translation, predicted, tuple(bad_images))


def _measure_share(task: Task, sweep: Sweep, images: Images, advance: Callable[[Task, float], None]) -> Share:
    """Run a task on this process's share of the images."""
    trained, device = task.trained, sweep.torch_device
    _, outputs = classes_of(task, sweep, images)
    before = state_hash(trained.model)
    parameters = list(trained.model.parameters())
    with AtSizes(trained.model, task.policy, device, sweep.optimize) as at:
        model = at(task.size) if sweep.compile else at
        options = device, sweep.batch_size, sweep.dtype, sweep.compile
        runner, halvings = Runner(model, *options), images.halvings
        reset_peak(device)
        score = _scored(task, images, outputs, runner, advance)
        peak, kind = peak_mb(device)
        columns = {
            "left_out": score.left_out,
            "infer_samples_per_sec": runner.seen / runner.seconds if runner.seen else 0.0,
            "infer_samples_per_sec_half": half_of_rate(runner.passes),
            "peak_memory_mb": round(peak, 1),
            "memory_kind": kind,
            "batch_size": min(runner.batch_size, images.batch_size),
            "oom": runner.oom + images.halvings - halvings,
        }
        translated = {}
        for by in task.translations:
            translating = Runner(model, *options, prepare=partial(translate, by=by))
            translated[by] = _scored(task, images, outputs, translating, advance).tally
        # only the last of several processes has a share of attention: the first writes rows meanwhile
        rank, world = rank_and_world()
        first = images.first(task.preprocessing, sweep.attention_n if rank == world - 1 else 0)
        columns |= attention_columns(at, first, device)
        same_objects = [*map(id, parameters)] == [*map(id, trained.model.parameters())]
    states = [*at.states, state_hash(trained.model)]
    after = next((state for state in states if state != before), before)
    columns |= {"state_hash_before": before, "state_hash_after": after, "unchanged": after == before and same_objects}
    arrays = score.answers.arrays(images.order(task.preprocessing, rank, world))
    return Share(columns, score.tally, arrays, translated, images.bad(task.preprocessing))


def _scored(
    task: Task, images: Images, outputs: Sequence[int], runner: Runner, advance: Callable[[Task, float], None]
) -> Classification:
    """Run this process's share of the images, and return its score; outputs: the model's output for each class."""
    score = Classification(outputs, task.trained.model.num_classes, task.trained.restrict)
    share = len(share_of(len(images.dataset(task.preprocessing)), *rank_and_world())) * (1 + len(task.translations))
    try:
        for labels, logits in predictions(runner, images.batches(task.preprocessing, *rank_and_world())):
            score.add(labels, logits)
            advance(task, len(labels) / share)
    except (FloatingPointError, MemoryError) as error:
        raise type(error)(f"{task.name}: {error}") from error
    return score


def _added(tallies: Sequence[Tally]) -> Tally:
    total = Tally()
    for tally in tallies:
        total.add(tally)
    return total
