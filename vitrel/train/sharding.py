"""Parameters, gradients and moments divided over the devices: FSDP2 (`torch.distributed.fsdp.fully_shard`) by Lightning."""

from lightning.pytorch.strategies import FSDPStrategy, Strategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from vitrel.layers import Block
from vitrel.position import PositionEncoding


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """Divide each of our blocks, each encoding and the rest over the mesh's data-parallel ranks, in place.

    Encodings are called by the trunk, outside of their block, and what they return may be a view of their parameters: they are
    gathered apart from the block and stay so until the backward pass.

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
    """ValueError for strategies under which the training would be another one without a word."""
    if isinstance(strategy, FSDPStrategy):
        # it hands the optimiser flattened parameters, in which matrices cannot be told from biases: nothing would be decayed
        raise ValueError("FSDPStrategy is not supported: use ModelParallelStrategy, as configs/imagenet_vit_b_fsdp.yaml does")
    if getattr(strategy, "_save_distributed_checkpoint", False):
        # a folder of shards, which torch unpickles whatever it is told
        raise ValueError("ModelParallelStrategy has to save one file: set its save_distributed_checkpoint: false")
