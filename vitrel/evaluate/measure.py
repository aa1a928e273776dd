"""Measurement: the list of tasks of an evaluation, and the code that runs one task over all images and returns its row.

A row has accuracy, throughput, peak memory, attention statistics, and hashes that show whether the model's state dict changed.
Forward passes that run out of memory are repeated with smaller batches. With several processes, each evaluates a share of the
images, and the row is of all images.
"""

import contextlib
import ctypes
import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vitrel.common.extras import optional_import
from vitrel.common.files import shown
from vitrel.common.resources import out_of_memory
from vitrel.common.sizes import Budget, Size, format_size
from vitrel.cpu.optimize import optimize, restore
from vitrel.data import BadImage
from vitrel.evaluate.images import Images, Preprocessing, halved, share_of
from vitrel.evaluate.metrics import Answers, Predicted, Tally, class_of_output, predicted_by, state_hash
from vitrel.evaluate.models import (
    Trained,
    at_size_with,
    class_outputs,
    native_columns,
    policies_at,
    policies_of,
    sample_shapes,
    static_columns,
    with_policy,
)
from vitrel.evaluate.settings import Row, Sweep, on_all, rank_and_world
from vitrel.evaluate.statistics import TAIL
from vitrel.inspect.attention import attention_statistics_of, position_shares
from vitrel.models.backbone import Backbone

with optional_import():
    from scipy.special import stdtrit

STATISTICS = ("attention_entropy", "attention_span", "attention_distance", "attention_distance_share")
_COMBINED: dict[str, Callable[[Iterable[Any]], Any]] = {  # how a column is combined over processes
    "left_out": sum,
    "infer_samples_per_sec": sum,
    "infer_samples_per_sec_half": lambda halves: sum(half**2 for half in halves) ** 0.5,
    "unchanged": all,
    "peak_memory_mb": max,
    "batch_size": min,
    "oom": max,
}
MIB = 2**20


@dataclass(frozen=True)
class Task:
    """The settings of one row: a model, a size (h, w) in pixels, a protocol, a policy and a crop.

    policy: one of `policies_at(trained.model, size)`. crop_pct: share of the resized image that the centre crop keeps.
    translations: numbers of pixels by which the content is translated, each evaluated after the row itself. budget: in the
    native protocol, the maximum number of patch tokens of an image, else None; `size` then is the size that the budget was
    given as, or the largest square within it, and images have shapes of their own.
    """

    trained: Trained
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


def tasks_of(models: Sequence[Trained], sweep: Sweep) -> list[Task]:
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


def sizes_of(trained: Trained, sweep: Sweep) -> tuple[Size, ...]:
    """Return every size of a sweep in pixels (h, w), in its order, without adding the training size.

    A token budget becomes the largest square of the model's patches within it, so two entries may be equal.
    """
    return tuple(map(trained.size_of, sweep.sizes))


def _sizes_by_pixels(trained: Trained, sweep: Sweep) -> dict[Size, list[Size | Budget]]:
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
            f"{error}; the native protocol has images of many shapes: leave it out with --protocols scale canvas"
        ) from error


def static_columns_of(task: Task, images: Images, leak: bool = False, batch: int = 1) -> Row:
    """Return `static_columns` of a task, in the native protocol updated with `native_columns` of the images' shapes."""
    model, patch = task.trained.model, task.trained.patch
    columns = static_columns(model, task.size, task.policy, leak, batch)
    if task.budget is None or patch is None:
        return columns
    return columns | native_columns(model, task.policy, images.shapes(task.preprocessing), patch)


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


def translate(pixels: Tensor, by: int) -> Tensor:
    """Translate images [B, C, H, W] by `by` pixels down and right; the upper and left edge pixels are repeated."""
    height, width = pixels.shape[-2:]
    down, right = (torch.arange(side, device=pixels.device).sub(by).clamp(min=0) for side in (height, width))
    return pixels[..., down[:, None], right]


class AtSizes:
    """Context in which a model is prepared for one image size after another, under one policy. at(size) returns the model.

    On exit the model is on the CPU and is not optimised, even if it was before. optimized: run it through vitrel.optimize.
    `states` has the state-dict hash of every copy that was made for a size of a model of another library.
    """

    def __init__(self, model: nn.Module, policy: str, device: torch.device, optimized: bool = False) -> None:
        self.model, self.policy, self.device, self.optimized = model, policy, device, optimized
        self.states: list[str] = []
        self._size: Size | None = None

    def __enter__(self) -> "AtSizes":
        self.model.to(self.device)
        if self.optimized:
            optimize(self.model)
        return self

    def __exit__(self, *raised: object) -> None:
        self._leave()
        restore(self.model).cpu()

    def __call__(self, size: Size) -> nn.Module:
        """Return the model prepared for `size` (h, w) pixels; valid until the next call with another size."""
        if size != self._size:
            self._leave()
            self._current, self._size = with_policy(self.model, size, self.policy).to(self.device), size
        return self._current

    def _leave(self) -> None:
        if self._size is not None and self._current is not self.model and not isinstance(self.model, Backbone):
            self.states.append(state_hash(self._current))  # a Backbone's copy shares all tensors
        self._size = None


class Runner:
    """Forward passes on batches of any length, in chunks of at most `batch_size`, which is halved when memory runs out.

    model: a model for one size, or `AtSizes`, which prepares it for the size of each batch. compile: run through torch.compile;
    short batches are then padded, because another batch size would be compiled again. prepare: a function applied to the pixels
    of each chunk. Attributes: `oom` counts the halvings; `passes` has (images, seconds) of every successful forward pass,
    without a first warm-up pass.
    """

    def __init__(
        self,
        model: nn.Module | AtSizes,
        device: torch.device,
        batch_size: int,
        dtype: str = "float32",
        compile: bool = False,
        prepare: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        if compile:
            torch.compiler.reset()  # otherwise a model runs uncompiled, without notice, after 8 sizes
        self.model: Any = torch.compile(model) if compile else model
        self.device, self.batch_size, self.dtype, self.compile = device, batch_size, dtype, compile
        self.prepare = prepare
        self._compiled_batch = 0
        self.oom = 0
        self.passes: list[tuple[int, float]] = []
        self._warm = False

    @property
    def seen(self) -> int:
        """Number of images in `passes`."""
        return sum(n for n, _ in self.passes)

    @property
    def seconds(self) -> float:
        """Time of `passes`."""
        return sum(seconds for _, seconds in self.passes)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Pixels [B, 3, H, W] -> logits [B, K], float32 on the CPU. MemoryError when a single image does not fit in memory."""
        if not self._warm:
            self._warm = True
            self(pixels[: self.batch_size if self.device.type == "cuda" or self.compile else 1])
            self.passes.clear()
        outputs: list[Tensor] = []
        start = 0
        while start < len(pixels):
            chunk = pixels[start : start + self.batch_size]
            try:
                logits = self._forward(chunk)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                logits = None
            if logits is None:
                # outside the handler: the traceback would keep the failed pass's tensors alive
                self._halve(len(chunk))
                continue
            outputs.append(logits)
            start += len(chunk)
        return torch.cat(outputs)

    @torch.inference_mode()
    def _forward(self, chunk: Tensor) -> Tensor:
        n = len(chunk)
        if self.prepare is not None:
            chunk = self.prepare(chunk)
        if self.compile:
            self._compiled_batch = min(max(self._compiled_batch, n), self.batch_size)
            chunk = torch.cat((chunk, chunk[:1].expand(self._compiled_batch - n, -1, -1, -1)))
        model = self.model((chunk.shape[-2], chunk.shape[-1])) if isinstance(self.model, AtSizes) else self.model
        start = time.perf_counter()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == "bfloat16"):
            logits = model(chunk.to(self.device, non_blocking=True))
        logits = logits[:n].float().cpu()  # synchronises with the GPU
        self.passes.append((n, time.perf_counter() - start))
        return logits

    def _halve(self, failed: int) -> None:
        self.batch_size = halved(min(failed, self.batch_size), "use a smaller size, or another device")
        self.oom += 1
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def half_of_rate(passes: Sequence[tuple[int, float]]) -> float:
    """Return half of the 95 % interval of images per second, over passes of (images, seconds); NaN with fewer than two.

    The rate is a ratio of sums, so its variance is that of the ratio estimator (Cochran 1977, section 6.4).
    """
    if len(passes) < 2:
        return float("nan")
    images, seconds = np.array(passes).T
    rate, k = images.sum() / seconds.sum(), len(passes)
    error = (k / (k - 1) * ((images - rate * seconds) ** 2).sum()) ** 0.5 / seconds.sum()
    return float(stdtrit(k - 1, 1 - TAIL) * error)


def reset_peak(device: torch.device) -> None:
    """Reset the peak that `peak_mb` reads. On Linux it is the resident peak; other systems cannot reset it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError, AttributeError):
        # glibc keeps freed memory (of a training before, for example); new allocations there would not raise the peak
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def peak_mb(device: torch.device) -> tuple[float, str]:
    """Return the peak memory since `reset_peak` in MiB, and its kind: tensors on the GPU, or the process's resident memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB, "cuda allocated"
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = next(line for line in lines if line.startswith("VmHWM"))
        return int(peak.split()[1]) / 1024, "process resident"
    except (OSError, StopIteration):
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / MIB, "process resident since start"


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
        tally, answers, left_out = _count(task, images, outputs, runner, advance)
        peak, kind = peak_mb(device)
        columns = {
            "left_out": left_out,
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
            translated[by], *_ = _count(task, images, outputs, translating, advance)
        columns |= _attention(task, sweep, images, at)
        same_objects = [*map(id, parameters)] == [*map(id, trained.model.parameters())]
    states = [*at.states, state_hash(trained.model)]
    after = next((state for state in states if state != before), before)
    columns |= {"state_hash_before": before, "state_hash_after": after, "unchanged": after == before and same_objects}
    arrays = answers.arrays(images.order(task.preprocessing, *rank_and_world()))
    return Share(columns, tally, arrays, translated, images.bad(task.preprocessing))


def _count(
    task: Task, images: Images, outputs: Sequence[int], runner: Runner, advance: Callable[[Task, float], None]
) -> tuple[Tally, Answers, int]:
    """Run this process's share of the images; return its metrics, its predictions, and the number of unreadable images.

    outputs: the model's output for each class of the data.
    """
    tally, answers, left_out, output_of = Tally(), Answers(), 0, torch.tensor(outputs)
    among = output_of if len(outputs) < task.trained.model.num_classes else None
    share = len(share_of(len(images.dataset(task.preprocessing)), *rank_and_world())) * (1 + len(task.translations))
    try:
        for pixels, labels in images.batches(task.preprocessing, *rank_and_world()):
            all_labels, read = labels, labels >= 0  # -1: could not be read
            if not read.all():  # indexing would copy
                left_out += int((~read).sum())
                pixels, labels = pixels[read], labels[read]
            if len(labels):
                logits = runner(pixels)
                if task.trained.restrict:
                    answers.add(all_labels, *tally.update(logits[:, output_of], labels))
                else:
                    best, *rest = tally.update(logits, output_of[labels], among)
                    answers.add(all_labels, class_of_output(best, labels, output_of), *rest)
            else:
                answers.add(all_labels)
            advance(task, len(all_labels) / share)
    except (FloatingPointError, MemoryError) as error:
        raise type(error)(f"{task.name}: {error}") from error
    return tally, answers, left_out


def _attention(task: Task, sweep: Sweep, images: Images, at: AtSizes) -> Row:
    """Attention statistics, means over the first images, and the share of position, of the first image alone.

    They are computed in the last process only, and are NaN where unavailable.
    """
    row, (rank, world) = dict.fromkeys((*STATISTICS, "position_share"), float("nan")), rank_and_world()
    if rank < world - 1 or not sweep.attention_n:
        return row
    by_image: list[dict[str, float]] = []
    try:
        for image in images.first(task.preprocessing, sweep.attention_n):  # one at a time: attention matrices take memory
            model = at((image.shape[-2], image.shape[-1]))
            pixels = image[None].to(sweep.torch_device)
            if not by_image:
                row["position_share"] = _position_share(model, pixels)
            by_image.append(attention_statistics_of(model, pixels))
    except BadImage:
        raise
    except ValueError:
        return row
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        return row
    if by_image:
        mean = {name: sum(values[name] for values in by_image) / len(by_image) for name in STATISTICS}
        mean["attention_span"] = torch.tensor(mean["attention_entropy"]).exp().item()
        row |= {name: round(value, 4) for name, value in mean.items()}
    return row


def _position_share(model: nn.Module, pixels: torch.Tensor) -> float:
    """The column position_share of an image [1, 3, h, w]; NaN where it is not known or memory does not suffice."""
    try:
        return round(max(position_shares(model, pixels).values(), default=float("nan")), 5)
    except ValueError:
        return float("nan")
    except (RuntimeError, MemoryError) as error:
        if not out_of_memory(error):
            raise
        return float("nan")


def _added(tallies: Sequence[Tally]) -> Tally:
    total = Tally()
    for tally in tallies:
        total.add(tally)
    return total
