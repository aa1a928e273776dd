"""How the steps run: memory, speed, and what to do when memory runs out."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from vitrel.exits import one_line
from vitrel.sizes import format_size


@dataclass(frozen=True)
class Execution:
    """Ways to run the same training with less memory or time.

    Args:
        grad_checkpointing: recompute the blocks' activations in the backward pass instead of storing them.
        compile: run the model through torch.compile.
        dynamic: whether it compiles for any image size (true), anew for each (false), or finds out (null).
        backend: of torch.compile.
        channels_last: memory layout of images and convolutions.
    """

    grad_checkpointing: bool = False
    compile: bool = False
    dynamic: bool | None = None
    backend: str = "inductor"
    channels_last: bool = False

    def apply(self, model: nn.Module) -> None:
        """Set the model up in place; the names of its weights stay. ValueError for what it cannot do."""
        if self.grad_checkpointing:
            try:
                model.set_grad_checkpointing(True)
            except (AssertionError, AttributeError) as error:
                name = type(model).__name__
                raise ValueError(f"model.execution.grad_checkpointing: {name} cannot do that, leave it out") from error
        if self.channels_last:
            model.to(memory_format=torch.channels_last)
        if self.compile:
            model.compile(dynamic=self.dynamic, backend=self.backend)


class MemoryAdvice(Callback):
    """Adds to an out-of-memory error what would need less, with the values of this run."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, torch.cuda.OutOfMemoryError):
            exception.add_note(memory_advice(trainer, pl_module))


def memory_advice(trainer: Trainer, module: LightningModule) -> str:
    """What to change when a device's memory is too small, the cheapest first; `module` is a `vitrel.train.Classifier`."""
    batch, accumulate = trainer.datamodule.batch_size, trainer.accumulate_grad_batches
    ways = []
    if str(trainer.precision) == "32-true":
        ways.append(f"trainer.precision: bf16-mixed (now {trainer.precision})")
    if batch > 1:
        ways.append(
            f"data.batch_size: {max(1, batch // 2)} (now {batch}) with trainer.accumulate_grad_batches: {accumulate * 2} "
            f"(now {accumulate}), which takes as many images per update"
        )
    if not module.execution.grad_checkpointing:
        ways.append("model.execution.grad_checkpointing: true (now false)")
    ways.append(f"a smaller data.size (now {format_size(module.img_size)})")
    return f"The device's memory is full. What needs less: {'; '.join(ways)}."


def check_processes(accelerator: object, devices: object) -> None:
    """ValueError for far more CPU processes than cores: Lightning starts as many as `trainer.devices` says, a thousand too."""
    most = max(8, os.cpu_count() or 1)
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.accelerator.is_available())
    if on_cpu and str(devices).isdecimal() and int(str(devices)) > most:
        raise ValueError(
            f"trainer.devices: {devices} on a CPU is as many processes, and this machine has {os.cpu_count()} cores: ask for "
            f"{most} at most, or leave it out"
        )


def refused_trainer(config: Mapping[str, Any], error: Exception) -> str:
    """What to say where Lightning refuses a setting of its trainer, with what there is where that is about devices."""
    text = one_line(error)
    if not re.search(r"device|accelerator|gpu|torch_xla", text, re.IGNORECASE):
        return text
    asked = ", ".join(f"trainer.{name}: {config[name]}" for name in ("accelerator", "devices"))
    found = f"{torch.cuda.device_count()} CUDA devices and {os.cpu_count()} CPU cores"
    return (
        f"{asked}: {text.rstrip('.')}. This machine has {found}: ask for no more devices than there are, or leave both out to "
        "take what there is"
    )


def check_sharded(averaged: bool, clip_mode: str | None) -> None:
    """ValueError for what needs whole weights on every device, where a strategy gives each a part of them."""
    if averaged:
        raise ValueError("ema averages whole weights, this strategy shares them out: leave model.ema out, or use strategy: ddp")
    if clip_mode == "agc":
        raise ValueError(
            "model.optim.clip_mode agc compares whole rows, this strategy shares them out: take another, or strategy: ddp"
        )
