"""Accuracy of trained models at any resolution: one row per (model, size, protocol, resize policy).

Each row proves what was done to the model: the rules that resampled something and on how many values, the shares of
offsets never trained and served by a trained edge, and a hash of the state dict before and after. Images of one size and
protocol are decoded once and shown to every model. Over several processes (vitrel.transfer.split) each sees its share of them,
and a row counts all.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import timm
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from vitrel.data import Reading, create_dataset
from vitrel.transfer.checkpoint import Trained, check_classes
from vitrel.transfer.metrics import Tally, state_hash
from vitrel.transfer.policies import policies_at, resize_policy
from vitrel.transfer.runner import Runner, peak_mb, reset_peak
from vitrel.transfer.split import device_name, on_all, own_device, own_share

PROTOCOLS = ("scale", "canvas")
CACHE_BYTES = 2 << 30
_COMBINED = dict.fromkeys(("n", "hits1", "hits5", "nll_sum", "left_out", "infer_samples_per_sec"), sum)  # over processes
_COMBINED |= {"unchanged": all, "peak_memory_mb": max, "batch_size": min, "oom": max}
Size = tuple[int, int]
Row = dict[str, Any]


@dataclass(frozen=True)
class Sweep:
    """What to evaluate on: `sizes` are (height, width) in pixels, `policies` keeps only those resize policies (None: all; a
    model with none of them keeps its own), `n` and `data_seed` go to the dataset, `dtype` is "float32" or, on a GPU, "bfloat16"
    (autocast). on_bad_image: an image that cannot be read ends the evaluation ("raise"), or is left out and counted."""

    data: str
    sizes: tuple[Size, ...]
    protocols: tuple[str, ...] = PROTOCOLS
    policies: tuple[str, ...] | None = None
    n: int | None = None
    data_seed: int = 0
    batch_size: int = 128
    workers: int = 0
    device: str = "auto"
    dtype: str = "float32"
    on_bad_image: str = "raise"

    def __post_init__(self) -> None:
        if unknown := [name for name in self.protocols if name not in PROTOCOLS]:
            raise ValueError(f"unknown protocol {unknown[0]!r}: choose from {', '.join(PROTOCOLS)}")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype is float32 or bfloat16, got {self.dtype!r}")
        if self.dtype == "bfloat16" and self.torch_device.type != "cuda":
            raise ValueError("bfloat16 evaluation needs a GPU; use float32 on the CPU")
        if self.on_bad_image not in ("raise", "count"):
            raise ValueError(f"on_bad_image is raise or count, got {self.on_bad_image!r}")
        if self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {self.batch_size}")

    @property
    def torch_device(self) -> torch.device:
        return own_device(self.device)


@dataclass(frozen=True)
class Task:
    """One row to come. `policy` is one of `policies_at(trained.model, size)`."""

    trained: Trained
    size: Size
    protocol: str
    policy: str


def parse_size(text: str | int) -> Size:
    """ "160x224" -> (160, 224), height first; "96" or 96 -> (96, 96). ValueError for anything else, with a valid example."""
    parts = str(text).lower().split("x")
    if isinstance(text, bool) or len(parts) > 2 or not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        raise ValueError(f"{text!r} is not an image size: write pixels as 96, or height x width as 160x224")
    return int(parts[0]), int(parts[-1])


def format_size(size: Size) -> str:
    """(160, 224) -> "160x224", height first."""
    return f"{size[0]}x{size[1]}"


def plan(models: Sequence[Trained], sweep: Sweep) -> list[Task]:
    """Every row to make: training sizes first (retention refers to them), then size by size so that images are shared.

    The size a model was trained at is always evaluated. Where a model can choose how to serve a size, there is one task per
    policy (`policies_at`). ValueError for a policy that no model has.
    """
    offered = {policy for trained in models for policy in trained.model.resize_policies}
    if unknown := [policy for policy in sweep.policies or () if policy not in offered]:
        had = ", ".join(sorted(offered)) or "none: they resize nothing"
        raise ValueError(f"no model has the resize policy {unknown[0]!r}; the policies of these models are {had}")
    first = dict.fromkeys(trained.img_size for trained in models)
    return [
        Task(trained, size, protocol, policy)
        for size in [*first, *(size for size in sweep.sizes if size not in first)]
        for protocol in sweep.protocols
        for trained in models
        if size == trained.img_size or size in sweep.sizes
        for policy in policies_at(trained.model, size, sweep.policies)
    ]


def check_data(sweep: Sweep, train_size: Size) -> None:
    """ValueError or OSError now, not after hours of training, when the data cannot be shown at some size and protocol."""
    for size in dict.fromkeys((train_size, *sweep.sizes)):
        for protocol in sweep.protocols:
            how = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "protocol": protocol, "base_size": train_size, "n": 1}
            try:
                create_dataset(sweep.data, "val", size, **how)
            except ValueError as error:
                raise ValueError(f"evaluation at {format_size(size)}, {protocol} protocol: {error}") from error


def evaluate(
    models: Sequence[Trained],
    sweep: Sweep,
    done: Iterable[Row] = (),
    advance: Callable[[Task, float], None] = lambda task, share: None,
) -> Iterator[Row]:
    """Yields the rows of `plan(models, sweep)` in its order, each once its model has seen all images.

    Rows in `done` (of process 0) that were made from the same weights, data and settings are passed on instead of being made
    again. `advance(task, share)` is called as images are seen; the shares of a task add up to 1.
    """
    (rows, hashes), *others = on_all(lambda: ([*done], [state_hash(trained.model) for trained in models]))
    if any(other != hashes for _, other in others):
        raise ValueError("the processes hold different weights: give all of them the same checkpoints")
    kept, hashes = {row_key(row): row for row in rows}, dict(zip(map(id, models), hashes, strict=True))
    reference: dict[tuple[int, str], float] = {}
    images = _Images(sweep)
    for task in plan(models, sweep):
        key = _settings(task, sweep) | {"state_hash_before": hashes[id(task.trained)]}
        row = kept.get(row_key(key))
        if row is None or (row["left_out"] and sweep.on_bad_image == "raise"):
            row = key | _measure(task, sweep, images, advance)
        else:
            row = row | _geometry(task)  # which an earlier version may lack or have counted otherwise
            advance(task, 1.0)
        if task.size == task.trained.img_size:
            reference.setdefault((id(task.trained), task.protocol), row["top1"])
        at_training = reference[id(task.trained), task.protocol]
        yield row | {"retention": round(row["top1"] / at_training, 4) if at_training else float("nan")}


def _settings(task: Task, sweep: Sweep) -> Row:
    trained = task.trained
    return {
        "model": trained.name,
        "label": trained.label,
        "encoding": trained.encoding,
        "seed": trained.seed,
        "img_size": format_size(task.size),
        "train_size": format_size(trained.img_size),
        "protocol": task.protocol,
        "policy": task.policy,
        "data": sweep.data,
        "data_seed": sweep.data_seed,
        "n_asked": sweep.n,
        "batch_asked": sweep.batch_size,
        "crop_pct": trained.crop_pct,
        "interpolation": trained.interpolation,
        "dtype": sweep.dtype,
        "device": device_name(sweep.torch_device),
        "torch": torch.__version__,
        "timm": timm.__version__,
        "vitrel": version("vitrel"),
    }


def row_key(row: Row) -> tuple[str, ...]:
    """What must agree for a row to stand for another: read back from CSV, a missing number is NaN, an absent one None."""
    names = ("model", "label", "seed", "img_size", "protocol", "policy", "data", "data_seed", "n_asked", "batch_asked")
    values = (row[name] for name in (*names, "dtype", "device", "torch", "timm", "vitrel", "state_hash_before"))
    return tuple(
        "" if value is None or value != value else f"{value:g}" if isinstance(value, float) else str(value) for value in values
    )


def _measure(task: Task, sweep: Sweep, images: "_Images", advance: Callable[[Task, float], None]) -> Row:
    parts = on_all(lambda: _measure_share(task, sweep, images, advance))
    row = parts[0] | {name: combined(part[name] for part in parts) for name, combined in _COMBINED.items()}
    tally = Tally()
    for name in vars(tally):
        setattr(tally, name, row.pop(name))
    if not tally.n:
        raise ValueError(f"none of the {row['left_out']} images of {sweep.data} can be read")
    count = sum(parameter.numel() for parameter in task.trained.model.parameters())
    row["infer_samples_per_sec"] = round(row["infer_samples_per_sec"], 2)
    return row | tally.columns() | _geometry(task) | {"param_count": round(count / 1e6, 2), "params": count}


def _measure_share(task: Task, sweep: Sweep, images: "_Images", advance: Callable[[Task, float], None]) -> Row:
    """What this process counted and measured on its share of the images."""
    trained, device = task.trained, sweep.torch_device
    model = trained.model.to(device)
    own = own_share(images.dataset(trained, task))
    before, parameters = state_hash(model), list(model.parameters())
    tally, runner, left_out = Tally(), Runner(model, device, sweep.batch_size, sweep.dtype), 0
    reset_peak(device)
    with resize_policy(model, task.policy):
        for pixels, labels in images.batches(trained, task):
            read = labels >= 0
            if not read.all():  # else no copy
                left_out += int((~read).sum())
                pixels, labels = pixels[read], labels[read]
            try:
                if len(labels):
                    tally.update(runner(pixels), labels)
            except (FloatingPointError, MemoryError) as error:
                raise type(error)(
                    f"{trained.label} at {format_size(task.size)} ({task.protocol}, {task.policy}): {error}"
                ) from error
            advance(task, len(read) / len(own))
    peak, kind = peak_mb(device)
    after = state_hash(model)
    trained.model.cpu()
    return vars(tally) | {
        "left_out": left_out,
        "state_hash_before": before,
        "state_hash_after": after,
        "unchanged": after == before and [*map(id, parameters)] == [*map(id, model.parameters())],
        "infer_samples_per_sec": runner.seen / runner.seconds if runner.seen else 0.0,
        "peak_memory_mb": round(peak, 1),
        "memory_kind": kind,
        "batch_size": runner.batch_size,
        "oom": runner.oom,
    }


def _geometry(task: Task) -> Row:
    """The columns that follow from model, size and policy alone."""
    model, size = task.trained.model, task.size
    with resize_policy(model, task.policy):
        rules, unseen, saturated = model.resized(size), model.unseen(size), model.saturated(size)
    grid = model.token_grid(size)
    return {
        "tokens": grid.h * grid.w,
        "resized": " + ".join(rules) or "nothing",
        "resized_params": sum(rules.values()),
        "unseen": round(unseen, 4),
        "saturated": round(saturated, 4),
    }


class _Images:
    """The images of the current size and protocol, decoded once for all models that ask with the same preprocessing.

    What exceeds CACHE_BYTES is decoded anew for each model.
    """

    def __init__(self, sweep: Sweep) -> None:
        self.sweep = sweep
        self._at: tuple[Size, str] | None = None
        self._datasets: dict[tuple, Dataset] = {}
        self._decoded: dict[tuple, list[tuple[Tensor, Tensor]]] = {}

    def dataset(self, trained: Trained, task: Task) -> Dataset:
        if self._at != (task.size, task.protocol):
            self._at = (task.size, task.protocol)
            self._datasets.clear()
            self._decoded.clear()
        key = self._key(trained)
        if key not in self._datasets:
            mean, std, crop_pct, interpolation, base_size = key
            reading = {"reading": Reading(on_bad="leave_out")} if self.sweep.on_bad_image == "count" else {}
            self._datasets[key] = create_dataset(
                self.sweep.data, "val", task.size, mean=mean, std=std, crop_pct=crop_pct, interpolation=interpolation,
                protocol=task.protocol, base_size=base_size, n=self.sweep.n, seed=self.sweep.data_seed, **reading,
            )  # fmt: skip
        check_classes(trained, self._datasets[key].classes, self.sweep.data)
        return self._datasets[key]

    def batches(self, trained: Trained, task: Task) -> Iterator[tuple[Tensor, Tensor]]:
        dataset, key = own_share(self.dataset(trained, task)), self._key(trained)
        if key in self._decoded:
            yield from self._decoded[key]
            return
        height, width = task.size
        fits = len(dataset) * 3 * height * width * 4 <= CACHE_BYTES
        decoded = []
        for batch in DataLoader(dataset, batch_size=self.sweep.batch_size, num_workers=self.sweep.workers):
            if fits:
                decoded.append(batch)
            yield batch
        if fits:
            self._decoded[key] = decoded

    @staticmethod
    def _key(trained: Trained) -> tuple:
        return trained.mean, trained.std, trained.crop_pct, trained.interpolation, trained.img_size
