"""Settings of a run's memory and speed: gradient checkpointing and torch.compile."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils._triton import has_triton

from vitrel.layers import Block


@dataclass(frozen=True)
class Execution:
    """Settings that change the memory or time that training takes, but not the training itself.

    Args:
        grad_checkpointing: recompute the blocks' activations in the backward pass instead of storing them.
        compile: run the blocks through torch.compile in training (`Classifier.eager`: not in evaluation). Null: on a GPU with
            Triton, where all training images have one size.
        backend: `backend` of torch.compile.
    """

    grad_checkpointing: bool = False
    compile: bool | None = None
    backend: str = "inductor"

    def apply(self, model: nn.Module) -> None:
        """Switch on gradient checkpointing of `model`, if it is set; ValueError if the model does not support it."""
        if self.grad_checkpointing:
            try:
                model.set_grad_checkpointing(True)
            except (AssertionError, AttributeError) as error:
                name = type(model).__name__
                raise ValueError(f"model.execution.grad_checkpointing: {name} does not support it, leave it out") from error

    def compiles(self, device: torch.device, one_size: bool) -> bool:
        """Return whether the blocks are compiled: `compile`, or if it is None, on a GPU with Triton for images of one size."""
        return device.type == "cuda" and one_size and has_triton() if self.compile is None else self.compile

    def compile_blocks(self, model: nn.Module) -> None:
        """Run every `Block` of `model` through torch.compile, in place; the whole model where it has none.

        Increases torch._dynamo's limits of recompilation, for the process.
        """
        from torch._dynamo import config  # takes seconds to import

        blocks: list[nn.Module] = [part for part in model.modules() if isinstance(part, Block)] or [model]
        # blocks differ by drop path and shift, so each needs a graph of its own; beyond the limit they would stay eager
        config.recompile_limit = max(config.recompile_limit, 8 * len(blocks))
        config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, config.recompile_limit)
        for block in blocks:
            block.compile(backend=self.backend)
