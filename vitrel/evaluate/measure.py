"""One trial through the pipe: prepared images, predictions, score, row.

With several processes, each has a share of the images, and the row is of all images.
"""

from collections import defaultdict
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
from vitrel.evaluate.sweep import Row, Sweep
from vitrel.evaluate.tasks.base import Arrays, ImageList, Predicted, Task
from vitrel.evaluate.trials import Trial, line_columns, outputs_of

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
    """The result of a trial: its row of results.csv, its lines of translation.csv, its predictions (None for a row read from a
    folder without them), and the names of images that could not be read.
    """

    row: Row
    translation: list[Row]
    predicted: Predicted | None
    bad_images: tuple[str, ...] = ()


class Kept(NamedTuple):
    """What is kept of the images of one process, in the order of the data: `Predicted` without names."""

    arrays: Arrays
    seen: np.ndarray


class Share(NamedTuple):
    """The result of a trial in one process, over its share of the images.

    Args:
        columns: columns of results.csv on speed, memory, attention and the state dict.
        kept: what the task keeps of the images' predictions.
        translated: {pixels of the translation: the same of translated images}.
        bad_images: names of images that could not be read.
    """

    columns: Row
    kept: Kept
    translated: dict[int, Kept]
    bad_images: tuple[str, ...] = ()


def measure(trial: Trial, sweep: Sweep, images: Images, advance: Callable[[Trial, float], None]) -> Evaluated:
    """Run the trial's model over all images, and return its measured columns (`row`), lines and predictions.

    `row` has no columns of the settings (`settings_columns`, `environment`) or of `static_columns_of`. Every process of the
    evaluation must call this; each runs its share of the images, and all get the same result.

    `advance(trial, share)` is called after every batch with its share of this process's images; the shares add up to 1. Raises
    ValueError where no image can be read, FloatingPointError where logits are not finite, MemoryError where a single image does
    not fit in memory.
    """
    parts, task = on_all(lambda: _measure_share(trial, sweep, images, advance)), trial.task
    row = parts[-1].columns | {name: combined(part.columns[name] for part in parts) for name, combined in _COMBINED.items()}
    names = images.listed(trial.preprocessing)
    predicted = _joined([part.kept for part in parts], task, names)
    if not predicted.seen.any():
        raise ValueError(f"none of the {row['left_out']} images of {sweep.data} can be read")
    count = sum(parameter.numel() for parameter in trial.trained.model.parameters())
    row |= {name: round(row[name], 2) for name in ("infer_samples_per_sec", "infer_samples_per_sec_half")}
    row |= task.columns_of(predicted) | {"param_count": round(count / 1e6, 2), "params": count}
    lines = []
    for by in trial.translations:
        found = task.columns_of(_joined([part.translated[by] for part in parts], task, names))
        metric = (task.metric, f"{task.metric}_low", f"{task.metric}_high")
        lines.append(line_columns(trial) | {"translation": by} | {name: found[name] for name in ("n", *metric)})
    return Evaluated(row, lines, predicted, tuple(dict.fromkeys(name for part in parts for name in part.bad_images)))


def _measure_share(trial: Trial, sweep: Sweep, images: Images, advance: Callable[[Trial, float], None]) -> Share:
    """Run a trial on this process's share of the images."""
    trained, device, (rank, world) = trial.trained, sweep.torch_device, rank_and_world()
    before, parameters = state_hash(trained.model), list(trained.model.parameters())
    window = trained.img_size if trial.protocol == "sliding" else None
    with AtSizes(trained.model, trial.policy, device, window) as at:
        model, options = at(trial.size) if sweep.compile else at, (device, sweep.batch_size, sweep.dtype, sweep.compile)
        runner, halvings = Runner(model, *options), images.halvings
        reset_peak(device)
        kept = _kept(trial, sweep, images, runner, advance)
        peak, kind = peak_mb(device)
        columns = {
            "left_out": int((~kept.seen).sum()),
            "infer_samples_per_sec": runner.seen / runner.seconds if runner.seen else 0.0,
            "infer_samples_per_sec_half": half_of_rate(runner.passes),
            "peak_memory_mb": round(peak, 1),
            "memory_kind": kind,
            "batch_size": min(runner.batch_size, images.batch_of(trial.preprocessing)),
            "oom": runner.oom + images.halvings - halvings,
        }
        translated = {
            by: _kept(trial, sweep, images, Runner(model, *options, prepare=partial(translate, by=by)), advance)
            for by in trial.translations
        }
        # only the last of several processes has a share of attention: the first writes rows meanwhile
        first = images.first(trial.preprocessing, sweep.attention_n if rank == world - 1 and window is None else 0)
        columns |= attention_columns(at, first, device)
        same_objects = [*map(id, parameters)] == [*map(id, trained.model.parameters())]
    after = next((state for state in (*at.states, state_hash(trained.model)) if state != before), before)
    columns |= {"state_hash_before": before, "state_hash_after": after, "unchanged": after == before and same_objects}
    return Share(columns, kept, translated, images.bad(trial.preprocessing))


def _kept(trial: Trial, sweep: Sweep, images: Images, runner: Runner, advance: Callable[[Trial, float], None]) -> Kept:
    """Run this process's share of the images, and return what is kept of them."""
    task, outputs, place = trial.task, outputs_of(trial, sweep, images), rank_and_world()
    share = len(share_of(len(images.dataset(trial.preprocessing)), *place)) * (1 + len(trial.translations))
    read: list[bool] = []
    batches: dict[str, list[np.ndarray]] = defaultdict(list)
    try:
        for targets, flags, logits in predictions(runner, images.batches(trial.preprocessing, *place)):
            read += flags
            if any(flags):
                for name, values in task.keep(logits, targets, outputs, trial.trained).items():
                    batches[name].append(np.asarray(values))
            advance(trial, len(flags) / share)
    except (FloatingPointError, MemoryError) as error:
        raise type(error)(f"{trial.name}: {error}") from error
    order, seen = np.asarray(images.order(trial.preprocessing, *place)).argsort(), np.asarray(read, bool)
    arrays = {name: _spread(np.concatenate(values), seen, task.unread.get(name, 0))[order] for name, values in batches.items()}
    return Kept(arrays, seen[order])


def _spread(values: np.ndarray, seen: np.ndarray, unread: int) -> np.ndarray:
    """Values of the images that were read, among those that were not."""
    if seen.all():
        return values
    whole = np.full((len(seen), *values.shape[1:]), unread, values.dtype)
    whole[seen] = values
    return whole


def _joined(parts: Sequence[Kept], task: Task, images: ImageList) -> Predicted:
    """The predictions of several processes, by rank: rank r of w has the images r, r + w, r + 2 w, ..."""
    world, seen = len(parts), np.zeros(sum(len(part.seen) for part in parts), bool)
    known = next((part.arrays for part in parts if part.arrays), {})  # a process may have read none of its images
    empty = {
        name: np.full((len(seen), *values.shape[1:]), task.unread.get(name, 0), values.dtype) for name, values in known.items()
    }
    for rank, part in enumerate(parts):
        seen[rank::world] = part.seen
        for name, values in part.arrays.items():
            empty[name][rank::world] = values
    return Predicted(images, empty, seen)
