"""The summary of a run, `summary.json`, and what is printed at its start and end."""

import json
import os
import platform
import time
import warnings
from pathlib import Path
from typing import Any

import lightning
import timm
import torch
import torchvision
from lightning.pytorch import Callback, LightningModule, Trainer

from vitrel.common.commands import evaluate_line
from vitrel.common.files import atomic_write, commit
from vitrel.common.machine import hardware_name
from vitrel.common.sizes import format_size, parse_size_or_budget, sizes_in_words
from vitrel.inspect.attention import NEGLIGIBLE, position_shares
from vitrel.train.metrics import CSVLog, best_of, epochs_of
from vitrel.train.running.execution import ShardedStrategy
from vitrel.train.running.progress import Speed

SHARE_IMAGES = 2  # training images by which the share of position in attention is measured
TITLES = {"top1": "top-1", "miou": "mIoU"}


class Summary(Callback):
    """Writes `summary.json` at the start, after every epoch and at the end of a run.

    `status` is "running", "finished", "interrupted" (SIGTERM, ctrl-c) or "failed" (with `error`). It remains "running" if the
    process was killed (SIGKILL).

    Args:
        log: the log of metrics; the summary is written to its folder.
        speed: the speed measurements.
        about: further entries, e.g. command and seed.
        resumed: the run resumes from a checkpoint: add to the time and the number of resumptions in the existing file.
        prints: print a header at the start, and the best result and the next command at the end.
    """

    def __init__(self, log: CSVLog, speed: Speed, about: dict[str, Any], resumed: bool = False, prints: bool = False) -> None:
        self.csv, self.speed, self.about, self.resumed, self.prints = log, speed, about, resumed, prints
        self.path = log.path.with_name("summary.json")

    def on_fit_start(self, trainer: Trainer, module: LightningModule) -> None:
        earlier = _read_summary(self.path) if self.resumed else {}
        self.start, self.seconds_before = time.perf_counter(), earlier.get("seconds", 0.0)
        self.fixed = {
            **self.about,
            "resumed": earlier.get("resumed", 0) + 1 if self.resumed else 0,
            **_describe(trainer, module),
            "hardware": _hardware(trainer),
            "versions": versions(),
            "commit": commit() or None,
        }
        self.write(trainer, "running")
        if self.prints and trainer.is_global_zero:
            print(_header(self.fixed, self.path.parent), flush=True)
            if trainer.datamodule.global_batch_size is not None:
                print(_update(trainer), flush=True)

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        if self.prints and trainer.is_global_zero and self.resumed:
            done = f"{trainer.current_epoch} of {trainer.max_epochs} epochs done"
            print(f"resumed after update {trainer.global_step}, {done}: {trainer.ckpt_path}", flush=True)

    def on_train_epoch_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.write(trainer, "running")

    def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
        """Measure by how much an added encoding changes attention (`position_share` in the summary), and warn if it does not.

        Sharded models are not measured: a forward pass would need all processes.
        """
        tuning = module.tuning
        if tuning.position is None or not trainer.is_global_zero or isinstance(trainer.strategy, ShardedStrategy):
            return
        try:
            with torch.random.fork_rng(), module.eager():
                images = trainer.datamodule.unaugmented(SHARE_IMAGES).to(module.device)
                shares = position_shares(module.model, images)
        except (ValueError, OSError, RuntimeError) as error:  # the run itself has succeeded
            warnings.warn(f"how far {tuning.position} changes attention could not be measured: {error}", stacklevel=2)
            return
        in_attention = [share for name, share in shares.items() if name != "tokens"]
        if not in_attention:
            return
        self.about["position_share"] = self.fixed["position_share"] = round(max(in_attention), 5)
        if max(in_attention) < NEGLIGIBLE:
            fit = "fit it before training (leave out --fit 0), or " if tuning.fit == 0 else ""
            share = f"{100 * max(in_attention):.2g} %"
            warnings.warn(
                f"the encoding {tuning.position} does nothing: it changes attention logits by {share} of their spread at most; "
                f"{fit}train it longer or faster (--model.optim.position_lr_scale)",
                stacklevel=2,
            )

    def on_fit_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.finish(trainer, "finished")
        if self.prints and trainer.is_global_zero and (best := best_of(self.csv.rows, module.task.metric)):
            folder, metric = self.path.parent, module.task.metric
            value, epoch = best[f"val/{metric}"], int(best["epoch"]) + 1
            print(f"best {TITLES[metric]} {value:.4f} after epoch {epoch}: {folder}/checkpoints/best.ckpt")
            command = evaluate_line(folder, self.fixed["data"], module.train_sizes, folder / "evaluation")
            print(f"at other sizes (a run's folder stands for its last.ckpt):\n  {command}", flush=True)

    def on_exception(self, trainer: Trainer, module: LightningModule, exception: BaseException) -> None:
        stopped = not isinstance(exception, Exception)  # KeyboardInterrupt, SystemExit: the user or a signal stopped the run
        self.finish(trainer, "interrupted" if stopped else "failed", f"{type(exception).__name__}: {exception}")

    def finish(self, trainer: Trainer, status: str, error: str | None = None) -> None:
        """Write the summary with its final status.

        Does nothing before `on_fit_start`, or if the run's folder was removed.
        """
        if not hasattr(self, "fixed") or not self.path.parent.is_dir():
            return  # the run stopped before `on_fit_start`, or because its folder was removed
        self.write(trainer, status, error)

    def write(self, trainer: Trainer, status: str, error: str | None = None) -> None:
        """Write `summary.json`, on rank 0 only."""
        if not trainer.is_global_zero:
            return
        epochs = epochs_of(self.csv.rows)
        metric = trainer.lightning_module.task.metric
        evaluated = [row for row in epochs if f"val/{metric}" in row]
        best = best_of(self.csv.rows, metric)
        entry = {
            "status": status,
            **({} if error is None else {"error": error}),
            **self.fixed,
            "epochs": trainer.fit_loop.epoch_progress.current.processed,
            "updates": trainer.global_step,
            "best": {"epoch": int(best["epoch"]) + 1, **_metrics(best)} if best else None,
            "final": _metrics(evaluated[-1]) if evaluated else None,
            "seconds": round(self.seconds_before + time.perf_counter() - self.start, 3),
            "images_per_s": round(self.speed.rate, 1),
            "data_wait": round(self.speed.data_wait, 3),
            "memory_mb": round(self.speed.memory_mb, 1),
        }
        with atomic_write(self.path) as part:
            part.write_text(json.dumps(entry, indent=2, ensure_ascii=False) + "\n")


def versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries that affect results, {name: version}."""
    modules = {"torch": torch, "torchvision": torchvision, "timm": timm, "lightning": lightning}
    return {"python": platform.python_version(), **{name: module.__version__ for name, module in modules.items()}}


def _describe(trainer: Trainer, module: LightningModule) -> dict[str, Any]:
    data = trainer.datamodule
    return {
        "model": module.name,
        "model_args": module.model_args,
        "positions": sorted({part["key"] for part in module.position.values()}),
        "parameters": sum(p.numel() for p in module.model.parameters()),  # type: ignore[misc]
        "img_size": list(module.img_size),
        "train_sizes": [format_size(size) for size in module.train_sizes],
        "data": data.data,
        "classes": module.num_classes,
        "train_images": len(data.train_set),
        "val_images": len(data.val_set),
        "max_epochs": trainer.max_epochs,
    }


def _header(about: dict[str, Any], folder: Path) -> str:
    """Two lines to print at the start: model, classes and size; data, epochs and folder."""
    size = sizes_in_words([parse_size_or_budget(text) for text in about["train_sizes"]])
    return (
        f"{about['model']}, {about['parameters'] / 1e6:.2f} M parameters, {about['classes']} classes, at {size}\n"
        f"{about['train_images']:,} training and {about['val_images']:,} evaluation images of {about['data']}; "
        f"{about['max_epochs']} epochs, written to {folder}"
    )


def _update(trainer: Trainer) -> str:
    """One line to print at the start: the images of an update, and how they are divided."""
    meant, images = trainer.datamodule.global_batch_size, trainer.datamodule.batch_size
    devices, accumulated = trainer.world_size, trainer.accumulate_grad_batches
    update = images * devices * accumulated
    return (
        f"updates of {update:,} images{f' instead of {meant:,}' if update != meant else ''} (data.global_batch_size): "
        f"{devices} device{'s' * (devices > 1)}, batches of {images}, {accumulated} accumulated"
    )


def _hardware(trainer: Trainer) -> str:
    device = trainer.strategy.root_device
    return f"{trainer.world_size} × {hardware_name(device)} ({device.type}), {os.cpu_count()} CPU cores, {platform.system()}"


def _metrics(row: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in row.items() if "/" in name and not name.endswith("_step")}


def _read_summary(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}  # only time and resumptions are read from it
