"""Evaluation in float32 of the small networks that map offsets to biases (cpb, fire)."""

import torch.nn.functional as F
from torch import Tensor, nn

from vitrel.position.terms import no_autocast, upcast


def run_upcast(mlp: nn.Sequential, x: Tensor) -> Tensor:
    """Return mlp(x), [R, in] -> [R, out], in at least float32 (result too), even with half-precision weights or autocast."""
    with no_autocast(x.device):
        for layer in mlp:
            parameters = [upcast(p) for p in layer.parameters()]  # weight and bias of a linear layer
            x = F.linear(x.to(parameters[0].dtype), *parameters) if parameters else layer(x)
    return x
