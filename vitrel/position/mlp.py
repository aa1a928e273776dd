"""A small network from offsets to biases, as the encodings that learn a function of the offset have one (cpb, fire)."""

import torch.nn.functional as F
from torch import Tensor, nn

from vitrel.position.terms import no_autocast, upcast


def run_wide(mlp: nn.Sequential, x: Tensor) -> Tensor:
    """mlp(x), [R, in] -> [R, out], in at least float32 whatever the type of its weights, autocast or not."""
    with no_autocast(x.device):
        for layer in mlp:
            parameters = [upcast(p) for p in layer.parameters()]  # weight and bias of a linear layer
            x = F.linear(x.to(parameters[0].dtype), *parameters) if parameters else layer(x)
    return x
