"""How large the tensors of a computation are, to show that it makes none of all pairs of tokens."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Sizes(TorchDispatchMode):
    """Number of elements of every tensor that an operator returns, in `seen`."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.seen += [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        return out
