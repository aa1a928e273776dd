"""Execution settings (gradient checkpointing, torch.compile, channels_last), and advice when memory runs out."""

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
    """Settings that change the memory or time that training takes, but not the training itself.

    Args:
        grad_checkpointing: recompute the blocks' activations in the backward pass instead of storing them.
        compile: run the model through torch.compile.
        dynamic: `dynamic` of torch.compile: one graph for all image sizes (true), one graph per size (false), or PyTorch
            decides (null).
        backend: `backend` of torch.compile.
        channels_last: store images and convolution weights in the channels_last memory format.
    """

    grad_checkpointing: bool = False
    compile: bool = False
    dynamic: bool | None = None
    backend: str = "inductor"
    channels_last: bool = False

    def apply(self, model: nn.Module) -> None:
        """Apply the settings to `model` in place, keeping parameter names; ValueError if it has no gradient checkpointing."""
        if self.grad_checkpointing:
            try:
                model.set_grad_checkpointing(True)
            except (AssertionError, AttributeError) as error:
                name = type(model).__name__
                raise ValueError(f"model.execution.grad_checkpointing: {name} does not support it, leave it out") from error
        if self.channels_last:
            model.to(memory_format=torch.channels_last)
        if self.compile:
            model.compile(dynamic=self.dynamic, backend=self.backend)


class MemoryAdvice(Callback):
    """Adds to a CUDA out-of-memory error the settings that would need less memory (`memory_advice`)."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        if isinstance(exception, torch.cuda.OutOfMemoryError):
            exception.add_note(memory_advice(trainer, pl_module))


def memory_advice(trainer: Trainer, module: LightningModule) -> str:
    """Return one sentence with the settings that reduce memory, the cheapest first; `module` is a `vitrel.train.Classifier`."""
    batch, accumulate = trainer.datamodule.batch_size, trainer.accumulate_grad_batches
    changes = []
    if str(trainer.precision) == "32-true":
        changes.append(f"trainer.precision: bf16-mixed (now {trainer.precision})")
    if batch > 1:
        changes.append(
            f"data.batch_size: {max(1, batch // 2)} (now {batch}) with trainer.accumulate_grad_batches: {accumulate * 2} "
            f"(now {accumulate}), which keeps the images per update"
        )
    if not module.execution.grad_checkpointing:
        changes.append("model.execution.grad_checkpointing: true (now false)")
    changes.append(f"a smaller data.size (now {format_size(module.img_size)})")
    return f"The device's memory is full. To need less, set: {'; '.join(changes)}."


def check_processes(accelerator: object, devices: object) -> None:
    """Raise ValueError if `trainer.devices` asks for more CPU processes than the machine has cores (8 are always allowed).

    Lightning would start any number of processes, even a thousand.
    """
    most = max(8, os.cpu_count() or 1)
    on_cpu = accelerator == "cpu" or (accelerator == "auto" and not torch.accelerator.is_available())
    if on_cpu and str(devices).isdecimal() and int(str(devices)) > most:
        raise ValueError(
            f"trainer.devices: {devices} would start {devices} processes on a CPU of {os.cpu_count()} cores: set {most} at "
            "most, or leave it out"
        )


def refused_trainer(config: Mapping[str, Any], error: Exception) -> str:
    """Return one line for a setting that Lightning's Trainer rejects; if it concerns devices, with those of this machine."""
    text = one_line(error)
    if not re.search(r"device|accelerator|gpu|torch_xla", text, re.IGNORECASE):
        return text
    settings = ", ".join(f"trainer.{name}: {config[name]}" for name in ("accelerator", "devices"))
    hardware = f"{torch.cuda.device_count()} CUDA devices and {os.cpu_count()} CPU cores"
    return (
        f"{settings}: {text.rstrip('.')}. This machine has {hardware}: set no more devices than these, or leave both settings "
        "out to use all of them"
    )


def check_sharded(averaged: bool, clip_mode: str | None) -> None:
    """Raise ValueError if `averaged` (EMA) or for clip_mode "agc": both need whole weights.

    To be called only under a strategy that shards the weights; it does not check the strategy.
    """
    if averaged:
        raise ValueError("model.ema needs whole weights, this strategy shards them: leave model.ema out, or use strategy: ddp")
    if clip_mode == "agc":
        raise ValueError(
            "model.optim.clip_mode agc needs whole rows, this strategy shards them: use another clip_mode, or strategy: ddp"
        )
