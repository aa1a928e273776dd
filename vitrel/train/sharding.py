"""Sharding of parameters, gradients and optimiser states over devices with FSDP2 (`torch.distributed.fsdp.fully_shard`)."""

from lightning.pytorch.strategies import FSDPStrategy, Strategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from vitrel.layers import Block
from vitrel.position import PositionEncoding


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard every vitrel block, every encoding and the rest of the model over the mesh's data-parallel ranks, in place.

    Encodings are separate shards, because the trunk calls a shared encoding outside of its block. They stay gathered until the
    backward pass, because their results may be views of their parameters.

    Args:
        model: the model whose modules are sharded.
        mesh: Lightning's device mesh, with the dimensions "data_parallel" and "tensor_parallel".

    Raises:
        ValueError: the mesh also splits the model (tensor parallelism).
    """
    if mesh["tensor_parallel"].size() > 1:
        raise ValueError(
            "ModelParallelStrategy would split the model, which is not supported: set its tensor_parallel_size: 1 and its "
            "data_parallel_size to the number of all devices"
        )
    ranks = mesh["data_parallel"]
    for part in model.modules():
        if isinstance(part, PositionEncoding) and [*part.parameters()]:
            fully_shard(part, mesh=ranks, reshard_after_forward=False)
    for part in model.modules():
        if isinstance(part, Block):
            fully_shard(part, mesh=ranks)
    fully_shard(model, mesh=ranks)


def check_strategy(strategy: Strategy) -> None:
    """Raise ValueError for FSDPStrategy, and for a strategy set to save checkpoints as a folder of shards."""
    if isinstance(strategy, FSDPStrategy):
        # it flattens the parameters, so matrices cannot be distinguished from biases and weight decay would silently be off
        raise ValueError("FSDPStrategy is not supported: use ModelParallelStrategy, as configs/imagenet_vit_b_fsdp.yaml does")
    if getattr(strategy, "_save_distributed_checkpoint", False):
        # torch unpickles a folder of shards, which may run code, whatever `weights_only` is
        raise ValueError("ModelParallelStrategy has to save one file: set its save_distributed_checkpoint: false")
