"""Execution of a run: gradient checkpointing, torch.compile, channels_last, memory, devices, and FSDP2's sharding."""

from dataclasses import dataclass

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy, Strategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils._triton import has_triton

from vitrel.common.resources import loading_failed, out_of_memory
from vitrel.common.sizes import format_size
from vitrel.layers import Block
from vitrel.position import PositionEncoding


@dataclass(frozen=True)
class Execution:
    """Settings that change the memory or time that training takes, but not the training itself.

    Args:
        grad_checkpointing: recompute the blocks' activations in the backward pass instead of storing them.
        compile: run the blocks through torch.compile in training (`Classifier.eager`: not in evaluation). Null: on a GPU with
            Triton, where all training images have one size.
        dynamic: `dynamic` of torch.compile: one graph for all image sizes (true), one graph per size (false), or PyTorch
            decides (null).
        backend: `backend` of torch.compile.
        channels_last: store images and convolution weights in the channels_last memory format.
    """

    grad_checkpointing: bool = False
    compile: bool | None = None
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

    def compiles(self, device: torch.device, one_size: bool) -> bool:
        """Return whether the blocks are compiled for training on `device`, on images of one size or of several."""
        return device.type == "cuda" and one_size and has_triton() if self.compile is None else self.compile

    def compile_blocks(self, model: nn.Module) -> None:
        """Run every `Block` of `model` through torch.compile, in place; the whole model where it has none."""
        from torch._dynamo import config  # takes seconds to import

        blocks: list[nn.Module] = [part for part in model.modules() if isinstance(part, Block)] or [model]
        # blocks differ by drop path and shift, so each needs a graph of its own; beyond the limit they would stay eager
        config.recompile_limit = max(config.recompile_limit, 8 * len(blocks))
        config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, config.recompile_limit)
        for block in blocks:
            block.compile(dynamic=self.dynamic, backend=self.backend)


class ResourceAdvice(Callback):
    """Adds to the error of a run that lacks memory or loader processes the settings that need less, the cheapest first."""

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        workers = getattr(trainer.datamodule, "workers", 0)
        if loading_failed(exception) and workers:
            exception.add_note(f"data.workers is {workers}")
        if not out_of_memory(exception):
            return
        batch, accumulate = trainer.datamodule.batch_size, trainer.accumulate_grad_batches
        changes = []
        if str(trainer.precision) == "32-true":
            changes.append(f"trainer.precision: bf16-mixed (now {trainer.precision})")
        if batch > 1:
            changes.append(
                f"data.batch_size: {max(1, batch // 2)} (now {batch}) with trainer.accumulate_grad_batches: {accumulate * 2} "
                f"(now {accumulate}), which keeps the images per update"
            )
        if not pl_module.execution.grad_checkpointing:
            changes.append("model.execution.grad_checkpointing: true (now false)")
        changes.append(f"a smaller data.size (now {format_size(pl_module.img_size)})")
        exception.add_note(f"to need less, set {'; or '.join(changes)}")


class ShardedStrategy(ModelParallelStrategy):
    """Lightning's ModelParallelStrategy that divides weights and batches between all devices (FSDP2), and saves one file.

    Lightning's own is told the number of devices, and splits the model (tensor parallelism) with its default.
    """

    def __init__(self) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False)

    def setup_environment(self) -> None:
        """Set up the process group and the mesh of devices, whose number is known only now."""
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard every vitrel block, every encoding and the rest of the model over the ranks of a mesh (FSDP2), in place.

    Encodings are separate shards, because the trunk calls a shared encoding outside of its block. They stay gathered until the
    backward pass, because their results may be views of their parameters.
    """
    for part in model.modules():
        if isinstance(part, PositionEncoding) and [*part.parameters()]:
            fully_shard(part, mesh=mesh, reshard_after_forward=False)
    for part in model.modules():
        if isinstance(part, Block):
            fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)


def check_strategy(strategy: Strategy, averaged: bool, clip_mode: str | None) -> None:
    """Raise ValueError for a strategy that is not supported, or that does not fit the run.

    Args:
        strategy: the trainer's strategy.
        averaged: the weights are averaged (EMA), which needs whole weights.
        clip_mode: `Optimization.clip_mode`; "agc" needs whole weights.
    """
    if isinstance(strategy, FSDPStrategy | ModelParallelStrategy) and not isinstance(strategy, ShardedStrategy):
        # FSDP flattens the parameters, so matrices cannot be distinguished from biases and weight decay would silently be off
        name = type(strategy).__name__
        raise ValueError(f"{name} is not supported: use vitrel.train.ShardedStrategy, as imagenet_vit_b_fsdp.yaml does")
    if not isinstance(strategy, ShardedStrategy):
        return
    if averaged:
        raise ValueError("model.ema needs whole weights, this strategy shards them: leave model.ema out, or use strategy: ddp")
    if clip_mode == "agc":
        raise ValueError(
            "model.optim.clip_mode agc needs whole rows, this strategy shards them: use another clip_mode, or strategy: ddp"
        )
