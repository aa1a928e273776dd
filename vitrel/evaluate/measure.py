"""One row of an evaluation: accuracy, time and memory over all images, and what was done to the model for it."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitrel.cpu.optimize import optimize, restore
from vitrel.data import BadImage
from vitrel.evaluate.checkpoint import class_outputs
from vitrel.evaluate.fitting import fitted
from vitrel.evaluate.images import Images
from vitrel.evaluate.metrics import Tally, state_hash
from vitrel.evaluate.plan import Task
from vitrel.evaluate.runner import Runner, out_of_memory, peak_mb, reset_peak
from vitrel.evaluate.settings import Row, Sweep
from vitrel.evaluate.split import on_all, own_share, rank_and_world
from vitrel.files import shown
from vitrel.inspect.attention import attention_statistics_of
from vitrel.sizes import format_size

STATISTICS = ("attention_entropy", "attention_span", "attention_distance", "attention_distance_share")
_COMBINED = dict.fromkeys(("left_out", "infer_samples_per_sec"), sum)  # over processes
_COMBINED |= {"unchanged": all, "peak_memory_mb": max, "batch_size": min, "oom": max}


class Evaluated(NamedTuple):
    """A row of results.csv, its lines of per_class.csv and translation.csv, and the names of images that cannot be read."""

    row: Row
    per_class: list[Row]
    translation: list[Row]
    bad_images: tuple[str, ...] = ()


class Share(NamedTuple):
    """What one process measured: columns, what it counted, the same by shift, and the images it could not read."""

    columns: Row
    tally: Tally
    shifted: dict[int, Tally]
    bad_images: tuple[str, ...] = ()


def measure(task: Task, sweep: Sweep, images: Images, advance: Callable[[Task, float], None]) -> Evaluated:
    """Runs the task over all images, in all processes. `advance(task, share)` is called as images are seen."""
    parts = on_all(lambda: _measure_share(task, sweep, images, advance))
    row = parts[-1].columns | {name: combined(part.columns[name] for part in parts) for name, combined in _COMBINED.items()}
    tally = _added([part.tally for part in parts])
    if not tally.n:
        raise ValueError(f"none of the {row['left_out']} images of {sweep.data} can be read")
    count = sum(parameter.numel() for parameter in task.trained.model.parameters())
    row["infer_samples_per_sec"] = round(row["infer_samples_per_sec"], 2)
    row |= tally.columns() | {"param_count": round(count / 1e6, 2), "params": count}
    about = line_columns(task, sweep)
    shifted = {shift: _added([part.shifted[shift] for part in parts]).columns() for shift in task.shifts}
    counted = ("n", "top1", "top1_low", "top1_high")
    translation = [about | {"shift": shift} | {name: found[name] for name in counted} for shift, found in shifted.items()]
    names = dict.fromkeys(name for part in parts for name in part.bad_images)
    return Evaluated(row, _per_class(about, tally, task, sweep, images), translation, tuple(names))


def line_columns(task: Task, sweep: Sweep) -> Row:
    """The columns by which lines of per_class.csv and translation.csv belong to a row."""
    return {
        "label": shown(task.trained.label),
        "seed": task.trained.seed,
        "img_size": format_size(task.size),
        "protocol": task.protocol,
        "policy": task.policy,
        "crop_pct": task.crop_pct,
        "data": shown(sweep.data),
    }


def class_names_of(task: Task, images: Images) -> list[str]:
    """The classes of the data, in the order of their labels; numbers where it names none."""
    named = getattr(images.dataset(task), "classes", None)
    return list(named or map(str, range(task.trained.model.num_classes)))


def classes_of(task: Task, sweep: Sweep, images: Images) -> tuple[list[str], tuple[int, ...]]:
    """`class_names_of`, and the output of each; ValueError where they do not fit."""
    names = class_names_of(task, images)
    return names, class_outputs(task.trained, names, sweep.data)


def shift_content(pixels: Tensor, shift: int) -> Tensor:
    """Images [B, C, H, W] whose content lies `shift` pixels further down and right; the upper and left edges are repeated."""
    height, width = pixels.shape[-2:]
    down, right = (torch.arange(side, device=pixels.device).sub(shift).clamp(min=0) for side in (height, width))
    return pixels[..., down[:, None], right]


def _measure_share(task: Task, sweep: Sweep, images: Images, advance: Callable[[Task, float], None]) -> Share:
    """What this process counted and measured on its share of the images."""
    trained, device = task.trained, sweep.torch_device
    own = own_share(images.dataset(task))
    _, outputs = classes_of(task, sweep, images)
    before = state_hash(trained.model)
    try:
        with fitted(trained.model.to(device), task.size, task.policy) as fit:
            model, parameters = fit.model.to(device), list(fit.model.parameters())
            model = optimize(model) if sweep.optimize else model
            runner = Runner(model, device, sweep.batch_size, sweep.dtype, sweep.compile)
            count, halved = _Counting(task, runner, outputs), images.halved
            reset_peak(device)
            for pixels, labels in images.batches(task):
                count(pixels, labels)
                advance(task, len(labels) / len(own) / (1 + len(task.shifts)))
            columns = _run_columns(count, device)
            columns["batch_size"] = min(columns["batch_size"], images.batch_size)
            columns["oom"] += images.halved - halved
            shifted = {shift: _shifted(task, sweep, images, outputs, model, shift, advance) for shift in task.shifts}
            columns |= _attention(task, sweep, images, model)
            after = state_hash(model)
            same = [*map(id, parameters)] == [*map(id, model.parameters())]
    finally:
        restore(trained.model).cpu()
    columns |= {"state_hash_before": before, "state_hash_after": after, "unchanged": after == before and same}
    return Share(columns, count.tally, shifted, images.bad(task))


class _Counting:
    """Runs batches and counts hits; images labelled -1 are left out."""

    def __init__(self, task: Task, runner: Runner, outputs: Sequence[int]) -> None:
        self.task, self.runner, self.tally, self.left_out = task, runner, Tally(), 0
        self.outputs = torch.tensor(outputs)

    def __call__(self, pixels: Tensor, labels: Tensor) -> None:
        read = labels >= 0
        if not read.all():  # else no copy
            self.left_out += int((~read).sum())
            pixels, labels = pixels[read], labels[read]
        if not len(labels):
            return
        try:
            logits = self.runner(pixels)
            if self.task.trained.restrict:
                self.tally.update(logits[:, self.outputs], labels)
            else:
                self.tally.update(logits, self.outputs[labels])
        except (FloatingPointError, MemoryError) as error:
            raise type(error)(f"{self.task.name}: {error}") from error


def _run_columns(count: _Counting, device: torch.device) -> Row:
    runner, (peak, kind) = count.runner, peak_mb(device)
    return {
        "left_out": count.left_out,
        "infer_samples_per_sec": runner.seen / runner.seconds if runner.seen else 0.0,
        "peak_memory_mb": round(peak, 1),
        "memory_kind": kind,
        "batch_size": runner.batch_size,
        "oom": runner.oom,
    }


def _shifted(
    task: Task,
    sweep: Sweep,
    images: Images,
    outputs: Sequence[int],
    model: nn.Module,
    shift: int,
    advance: Callable[[Task, float], None],
) -> Tally:
    how = sweep.torch_device, sweep.batch_size, sweep.dtype, sweep.compile
    runner = Runner(model, *how, prepare=lambda pixels: shift_content(pixels, shift))
    count, own = _Counting(task, runner, outputs), own_share(images.dataset(task))
    for pixels, labels in images.batches(task):
        count(pixels, labels)
        advance(task, len(labels) / len(own) / (1 + len(task.shifts)))
    return count.tally


def _attention(task: Task, sweep: Sweep, images: Images, model: nn.Module) -> Row:
    """The attention of the first images; of several processes the last alone, NaN where attention cannot be seen."""
    row, (rank, world) = dict.fromkeys(STATISTICS, float("nan")), rank_and_world()
    if rank < world - 1 or not sweep.attention_n:
        return row
    found: list[dict[str, float]] = []
    try:
        for image in images.first(task, sweep.attention_n):  # one at a time: all weights of a layer are held
            found.append(attention_statistics_of(model, image[None].to(sweep.torch_device)))
    except BadImage:
        raise
    except ValueError:
        return row
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        return row
    if found:
        mean = {name: sum(one[name] for one in found) / len(found) for name in STATISTICS}
        mean["attention_span"] = torch.tensor(mean["attention_entropy"]).exp().item()
        row |= {name: round(value, 4) for name, value in mean.items()}
    return row


def _per_class(about: Row, tally: Tally, task: Task, sweep: Sweep, images: Images) -> list[Row]:
    names, outputs = classes_of(task, sweep, images)
    outputs = range(len(names)) if task.trained.restrict else outputs
    return [
        about | {"class": shown(name), "n": tally.class_n[output], "hits": tally.class_hits[output]}
        for name, output in zip(names, outputs, strict=True)
    ]


def _added(tallies: Sequence[Tally]) -> Tally:
    total = Tally()
    for tally in tallies:
        total.add(tally)
    return total
