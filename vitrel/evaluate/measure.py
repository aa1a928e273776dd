"""What an evaluation measures: the tasks of a sweep, and how one of them becomes a row.

A row holds the accuracy over all images, with time and memory, and what proves that the model was left as it was. Forward
passes that do not fit in memory are made again in smaller batches. Over several processes each sees its share of the images,
and a row counts all.
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

import torch
from torch import Tensor, nn

from vitrel.cpu.optimize import optimize, restore
from vitrel.data import BadImage
from vitrel.evaluate.images import Images, Preprocessing, halved, out_of_memory, share_of
from vitrel.evaluate.metrics import Tally, state_hash
from vitrel.evaluate.models import Trained, class_outputs
from vitrel.evaluate.policies import (
    at_size_with,
    brought_to,
    native_columns,
    policies_at,
    policies_of,
    static_columns,
    telling_shapes,
)
from vitrel.evaluate.processes import on_all, rank_and_world
from vitrel.evaluate.settings import Row, Sweep
from vitrel.files import shown
from vitrel.inspect.attention import attention_statistics_of
from vitrel.sizes import Budget, Size, format_size

STATISTICS = ("attention_entropy", "attention_span", "attention_distance", "attention_distance_share")
_COMBINED: dict[str, Callable[[Iterable[Any]], Any]] = {  # over processes
    "left_out": sum,
    "infer_samples_per_sec": sum,
    "unchanged": all,
    "peak_memory_mb": max,
    "batch_size": min,
    "oom": max,
}
MIB = 2**20


@dataclass(frozen=True)
class Task:
    """What one row measures: a model at a size and protocol, with a policy in force.

    policy: one of `policies_at(trained.model, size)`. crop_pct: share of the resized image that the centre crop keeps.
    translations: pixels by which the content is translated, each after the row itself. budget: of the protocol "native", patch
    tokens of an image at most; `size` is then the square or rectangle of that budget that was asked for.
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
        """Model, size, protocol and policy in words, for progress and errors."""
        what = f"{self.trained.label} at {format_size(self.size)} ({self.protocol}"
        if self.budget is not None:
            what += f", at most {self.budget} tokens"
        return f"{what})" if self.policy == "none" else f"{what}, {self.policy})"

    @property
    def preprocessing(self) -> Preprocessing:
        """How its images are prepared."""
        trained = self.trained
        learned = trained.mean, trained.std, trained.interpolation, trained.img_size
        shape = (None, None) if self.budget is None else (self.budget, trained.patch)
        return Preprocessing(self.size, self.protocol, self.crop_pct, *learned, *shape)


class Evaluated(NamedTuple):
    """A task that was measured: its row of results.csv, its lines of per_class.csv and translation.csv, and the names of the
    images that cannot be read.
    """

    row: Row
    per_class: list[Row]
    translation: list[Row]
    bad_images: tuple[str, ...] = ()


class Share(NamedTuple):
    """What one process measured: columns, what it counted, the same by translation, and the images it could not read."""

    columns: Row
    tally: Tally
    translated: dict[int, Tally]
    bad_images: tuple[str, ...] = ()


def tasks_of(models: Sequence[Trained], sweep: Sweep) -> list[Task]:
    """The tasks of a sweep: models at their training sizes first (retention refers to them), then size by size, so that models
    share images.

    The size a model was trained at is always evaluated, unless `skip` names it. Where a model can choose how to serve a size,
    there is one task per policy (`policies_at`). Content is translated at the training size, in the first protocol: scale and
    canvas show the same images there. At native shape nothing is cropped, and every budget of tokens of a size has its task.
    ValueError for a policy that no model has, and for a budget of a model without patches.
    """
    offered = {policy for trained in models for policy in policies_of(trained.model)}
    if unknown := [policy for policy in sweep.policies or () if policy not in offered]:
        had = ", ".join(sorted(offered)) or "none: they resize nothing"
        raise ValueError(f"no model has the policy {unknown[0]!r}; the policies of these models are {had}")
    asked = [(trained, _asked_of(trained, sweep)) for trained in models]
    first = dict.fromkeys(trained.img_size for trained in models)
    places = [(size, [one for one in asked if one[0].img_size == size]) for size in first]
    others = dict.fromkeys(size for at in zip(*(sizes_of(trained, sweep) for trained in models), strict=True) for size in at)
    places += [(size, [one for one in asked if size in one[1] and one[0].img_size != size]) for size in others]
    tasks = []
    for size, here in places:
        policies = [policies_at(trained.model, size, sweep.policies) for trained, _ in here]
        own_crops = dict.fromkeys(crop for trained, _ in here for crop in sweep.crop_pct or (trained.crop_pct,))
        for protocol in sweep.protocols:
            native = protocol == "native"
            for crop in (1.0,) if native else own_crops:
                for (trained, sizes), names in zip(here, policies, strict=True):
                    if not (native or sweep.crop_pct or crop == trained.crop_pct):
                        continue
                    translations = sweep.translations if size == trained.img_size and protocol == sweep.protocols[0] else ()
                    wanted = [one for one in sizes[size] if f"{format_size(one)} {protocol}" not in sweep.skip]
                    budgets = dict.fromkeys(trained.budget_of(one) if native else None for one in wanted)
                    for budget, policy in product(budgets, names):
                        tasks.append(Task(trained, size, protocol, policy, crop, translations, budget))
    return tasks


def sizes_of(trained: Trained, sweep: Sweep) -> tuple[Size, ...]:
    """The sizes of a sweep in pixels, which for budgets of tokens depend on the model."""
    return tuple(map(trained.size_of, sweep.sizes))


def _asked_of(trained: Trained, sweep: Sweep) -> dict[Size, list[Size | Budget]]:
    """By size in pixels, the training size first, what is asked for there: the size itself, and budgets that stand for it."""
    found: dict[Size, list[Size | Budget]] = {trained.img_size: [trained.img_size]}
    for asked, size in zip(sweep.sizes, sizes_of(trained, sweep), strict=True):
        found.setdefault(size, []).append(asked)
    return found


def check_tasks(tasks: Iterable[Task], sweep: Sweep, images: Images) -> None:
    """ValueError now, not after hours, where the classes of the data do not fit a model, or a model does not take a size."""
    seen = set()
    for task in tasks:
        model = id(task.trained)
        if model not in seen:
            classes_of(task, sweep, images)
        if (model, task.size, task.budget) not in seen:
            with at_size_with(task.trained.model, task.size, task.policy):
                pass
            if task.budget is not None:
                _check_shapes(task, images)
        seen |= {model, (model, task.size, task.budget)}


def _check_shapes(task: Task, images: Images) -> None:
    try:
        for size in telling_shapes(images.shapes(task.preprocessing)):
            with at_size_with(task.trained.model, size, task.policy):
                pass
    except BadImage:
        raise
    except ValueError as error:
        raise ValueError(
            f"{error}; native shows every image in a shape of its own, others do not: --protocols scale canvas"
        ) from error


def static_columns_of(task: Task, images: Images, leak: bool = False, batch: int = 1) -> Row:
    """`static_columns` of a task; at native shape those of the images, and of the size asked for what no image changes."""
    model, patch = task.trained.model, task.trained.patch
    found = static_columns(model, task.size, task.policy, leak, batch)
    if task.budget is None or patch is None:
        return found
    return found | native_columns(model, task.policy, images.shapes(task.preprocessing), patch)


def measure(task: Task, sweep: Sweep, images: Images, advance: Callable[[Task, float], None]) -> Evaluated:
    """Runs the model over all images, in all processes. `advance(task, share)` is called as images are seen, and the shares of
    a task add up to 1.

    Raises ValueError where no image can be read, FloatingPointError where logits are not finite, MemoryError where one image
    does not fit in memory.
    """
    parts = on_all(lambda: _measure_share(task, sweep, images, advance))
    row = parts[-1].columns | {name: combined(part.columns[name] for part in parts) for name, combined in _COMBINED.items()}
    tally = _added([part.tally for part in parts])
    if not tally.n:
        raise ValueError(f"none of the {row['left_out']} images of {sweep.data} can be read")
    count = sum(parameter.numel() for parameter in task.trained.model.parameters())
    row["infer_samples_per_sec"] = round(row["infer_samples_per_sec"], 2)
    row |= tally.columns() | {"param_count": round(count / 1e6, 2), "params": count}
    about = line_columns(task, sweep)
    translated = {by: _added([part.translated[by] for part in parts]).columns() for by in task.translations}
    counted = ("n", "top1", "top1_low", "top1_high")
    translation = [about | {"translation": by} | {name: found[name] for name in counted} for by, found in translated.items()]
    names = dict.fromkeys(name for part in parts for name in part.bad_images)
    return Evaluated(row, _per_class(about, tally, task, sweep, images), translation, tuple(names))


def line_columns(task: Task, sweep: Sweep) -> Row:
    """The columns by which lines of per_class.csv and translation.csv belong to a row."""
    return {
        "label": shown(task.trained.label),
        "seed": task.trained.seed,
        "img_size": format_size(task.size),
        "protocol": task.protocol,
        "budget": task.budget,
        "policy": task.policy,
        "crop_pct": task.crop_pct,
        "data": shown(sweep.data),
    }


def class_names_of(task: Task, images: Images) -> list[str]:
    """The classes of the data, in the order of their labels; numbers where it names none."""
    named = getattr(images.dataset(task.preprocessing), "classes", None)
    return list(named or map(str, range(task.trained.model.num_classes)))


def classes_of(task: Task, sweep: Sweep, images: Images) -> tuple[list[str], tuple[int, ...]]:
    """`class_names_of`, and the output of each; ValueError where they do not fit."""
    names = class_names_of(task, images)
    return names, class_outputs(task.trained, names, sweep.data)


def translate(pixels: Tensor, by: int) -> Tensor:
    """Images [B, C, H, W] whose content lies `by` pixels further down and right; the upper and left edges are repeated."""
    height, width = pixels.shape[-2:]
    down, right = (torch.arange(side, device=pixels.device).sub(by).clamp(min=0) for side in (height, width))
    return pixels[..., down[:, None], right]


class AtSizes:
    """A model brought to one size after another, with a policy in force; after the context it is as before.

    optimized: by vitrel.optimize. `states` has the hash of the state dict of every changed copy that a size took.
    """

    def __init__(self, model: nn.Module, policy: str, device: torch.device, optimized: bool = False) -> None:
        self.model, self.policy, self.device, self.optimized = model, policy, device, optimized
        self.states: list[str] = []
        self._size: Size | None = None
        self._here = contextlib.ExitStack()

    def __enter__(self) -> "AtSizes":
        self.model.to(self.device)
        if self.optimized:
            optimize(self.model)
        return self

    def __exit__(self, *raised: object) -> None:
        self._leave()
        restore(self.model).cpu()

    def __call__(self, size: Size) -> nn.Module:
        """The model at `size` (h, w) pixels, until it is asked for another."""
        if size != self._size:
            self._leave()
            self._current = self._here.enter_context(brought_to(self.model, size, self.policy)).to(self.device)
            self._size = size
        return self._current

    def _leave(self) -> None:
        if self._size is not None and self._current is not self.model:
            self.states.append(state_hash(self._current))
        self._size = None
        self._here.close()


class Runner:
    """Runs a model on batches of any length, in pieces of `batch_size`; one that does not fit in memory halves it, for good.

    model: of one size, or `AtSizes`, which brings it to the size of every batch. `oom` counts the halvings; `seen` and
    `seconds` the images and the time of the forward passes that succeeded, after a first one that is not counted. compile: by
    torch.compile; short batches are then filled up, which would compile anew.
    prepare: what is done to the pixels of a piece first.
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
            torch.compiler.reset()  # after 8 sizes of one model it would silently run uncompiled
        self.model: Any = torch.compile(model) if compile else model
        self.device, self.batch_size, self.dtype, self.compile = device, batch_size, dtype, compile
        self.prepare = prepare
        self._width = 0
        self.oom = self.seen = 0
        self.seconds = 0.0
        self._warm = False

    def __call__(self, pixels: Tensor) -> Tensor:
        """pixels [B, 3, H, W] -> logits [B, K] in float32 on the CPU. MemoryError when even one image does not fit."""
        if not self._warm:
            self._warm = True
            self(pixels[: self.batch_size if self.device.type == "cuda" or self.compile else 1])
            self.seen, self.seconds = 0, 0.0
        pieces: list[Tensor] = []
        start = 0
        while start < len(pixels):
            piece = pixels[start : start + self.batch_size]
            try:
                logits = self._forward(piece)
            except (RuntimeError, MemoryError) as error:
                if not out_of_memory(error):
                    raise
                logits = None
            if logits is None:
                # outside the handler: the traceback would keep the failed pass's tensors alive
                self._halve(len(piece))
                continue
            pieces.append(logits)
            start += len(piece)
        return torch.cat(pieces)

    @torch.inference_mode()
    def _forward(self, piece: Tensor) -> Tensor:
        n = len(piece)
        if self.prepare is not None:
            piece = self.prepare(piece)
        if self.compile:
            self._width = min(max(self._width, n), self.batch_size)
            piece = torch.cat((piece, piece[:1].expand(self._width - n, -1, -1, -1)))
        model = self.model((piece.shape[-2], piece.shape[-1])) if isinstance(self.model, AtSizes) else self.model
        start = time.perf_counter()
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == "bfloat16"):
            logits = model(piece.to(self.device, non_blocking=True))
        logits = logits[:n].float().cpu()  # waits for the GPU
        self.seconds += time.perf_counter() - start
        self.seen += n
        return logits

    def _halve(self, failed: int) -> None:
        self.batch_size = halved(min(failed, self.batch_size), "use a smaller size, or another device")
        self.oom += 1
        if self.device.type == "cuda":
            torch.cuda.empty_cache()


def reset_peak(device: torch.device) -> None:
    """Starts a new peak measurement. On Linux the kernel forgets the process's resident peak; elsewhere it cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError, AttributeError):
        # glibc keeps what was freed, training before evaluation above all, and new work would fit in unseen
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")


def peak_mb(device: torch.device) -> tuple[float, str]:
    """Peak since `reset_peak` in MiB, and what it counts: tensors on the GPU, or the whole process in RAM (images included)."""
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
    """What this process counted and measured on its share of the images."""
    trained, device = task.trained, sweep.torch_device
    _, outputs = classes_of(task, sweep, images)
    before = state_hash(trained.model)
    parameters = list(trained.model.parameters())
    with AtSizes(trained.model, task.policy, device, sweep.optimize) as at:
        model = at(task.size) if sweep.compile else at
        how = device, sweep.batch_size, sweep.dtype, sweep.compile
        runner, halvings = Runner(model, *how), images.halvings
        reset_peak(device)
        tally, left_out = _count(task, images, outputs, runner, advance)
        peak, kind = peak_mb(device)
        columns = {
            "left_out": left_out,
            "infer_samples_per_sec": runner.seen / runner.seconds if runner.seen else 0.0,
            "peak_memory_mb": round(peak, 1),
            "memory_kind": kind,
            "batch_size": min(runner.batch_size, images.batch_size),
            "oom": runner.oom + images.halvings - halvings,
        }
        translated = {}
        for by in task.translations:
            again = Runner(model, *how, prepare=partial(translate, by=by))
            translated[by], _ = _count(task, images, outputs, again, advance)
        columns |= _attention(task, sweep, images, at)
        same = [*map(id, parameters)] == [*map(id, trained.model.parameters())]
    states = [*at.states, state_hash(trained.model)]
    after = next((state for state in states if state != before), before)
    columns |= {"state_hash_before": before, "state_hash_after": after, "unchanged": after == before and same}
    return Share(columns, tally, translated, images.bad(task.preprocessing))


def _count(
    task: Task, images: Images, outputs: Sequence[int], runner: Runner, advance: Callable[[Task, float], None]
) -> tuple[Tally, int]:
    """Hits of this process's share of the images, and how many of them are left out, which are labelled -1."""
    tally, left_out, output_of = Tally(), 0, torch.tensor(outputs)
    share = len(share_of(len(images.dataset(task.preprocessing)), *rank_and_world())) * (1 + len(task.translations))
    try:
        for pixels, labels in images.batches(task.preprocessing, *rank_and_world()):
            seen, read = len(labels), labels >= 0
            if not read.all():  # else no copy
                left_out += int((~read).sum())
                pixels, labels = pixels[read], labels[read]
            if len(labels):
                logits = runner(pixels)
                if task.trained.restrict:
                    tally.update(logits[:, output_of], labels)
                else:
                    tally.update(logits, output_of[labels])
            advance(task, seen / share)
    except (FloatingPointError, MemoryError) as error:
        raise type(error)(f"{task.name}: {error}") from error
    return tally, left_out


def _attention(task: Task, sweep: Sweep, images: Images, at: AtSizes) -> Row:
    """The attention of the first images; of several processes the last alone, NaN where attention cannot be seen."""
    row, (rank, world) = dict.fromkeys(STATISTICS, float("nan")), rank_and_world()
    if rank < world - 1 or not sweep.attention_n:
        return row
    found: list[dict[str, float]] = []
    try:
        for image in images.first(task.preprocessing, sweep.attention_n):  # one at a time: all weights of a layer are held
            model = at((image.shape[-2], image.shape[-1]))
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
    counted = range(len(names)) if task.trained.restrict else outputs
    return [
        about | {"class": shown(name), "n": tally.class_n[output], "hits": tally.class_hits[output]}
        for name, output in zip(names, counted, strict=True)
    ]


def _added(tallies: Sequence[Tally]) -> Tally:
    total = Tally()
    for tally in tallies:
        total.add(tally)
    return total
