"""`vitrel.optimize`: opt-in acceleration of evaluation on a CPU, with the outputs of the plain model.

Linear layers are replaced by layers that share their parameters and multiply in oneDNN, which is faster than PyTorch's default
on many CPUs (docs/performance.md). Names and the state dict stay the same. Every call that is not plain evaluation in float32
(gradients, training, torch.compile, export, tracing, autocast) runs as in nn.Linear.
"""

import time
import warnings
from collections import Counter

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn


def optimize(model: nn.Module, linears: str = "auto") -> nn.Module:
    """Replace the linear layers of `model` by `OneDNNLinear`, to make evaluation on a CPU faster, and return the model.

    Outputs stay within a relative 2e-6 (float32). It changes calls in model.eval() without gradients (torch.no_grad,
    torch.inference_mode) on float32 tensors; all other calls run as before. Layers with hooks, and subclasses of nn.Linear,
    are left as they are. `restore` undoes it.

    Args:
        model: any model, changed in place; an nn.Linear itself is replaced in the result.
        linears: "onednn" replaces them; "auto" first times both ways on the model's most costly shapes, and leaves the model as
            it is, with a warning, if oneDNN is not faster.

    Raises:
        ValueError: `linears` has another value, or is "onednn" and this torch has no oneDNN.
    """
    if linears not in ("auto", "onednn"):
        raise ValueError(f"linears={linears!r} is unknown; choose one of auto, onednn")
    if linears == "onednn" and not torch.backends.mkldnn.is_available():
        raise ValueError("this build of torch has no oneDNN; use linears='auto'")
    model = restore(model)
    if linears == "auto" and not onednn_is_faster(model):
        warnings.warn(
            "oneDNN is no faster here than PyTorch, so the model stays as it is; linears='onednn' uses oneDNN anyway",
            stacklevel=2,
        )
        return model
    return _replaced(model, nn.Linear, OneDNNLinear)


def restore(model: nn.Module) -> nn.Module:
    """Undo `optimize`, and return the model."""
    return _replaced(model, OneDNNLinear, nn.Linear)


@register_notrace_module  # a leaf for the feature extractors of timm and torchvision, as nn.Linear is
class OneDNNLinear(nn.Linear):
    """nn.Linear computed by oneDNN."""

    same_as = nn.Linear  # the class that computes the same, for files

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if self.training or not _is_plain(x) or not self._takes(x):
            return super().forward(x)
        return product(x, self.weight, self.bias)

    def _takes(self, x: Tensor) -> bool:
        weight = self.weight  # no Parameter within functional_call
        return type(weight) is nn.Parameter and weight.dtype == x.dtype and x.shape[-1] == weight.shape[1]


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x [..., in] @ weight.T [out, in] + bias [out], by oneDNN. No autograd.

    The operator is the one that torch.compile uses on a CPU.
    """
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def onednn_is_faster(model: nn.Module) -> bool:
    """Time oneDNN and PyTorch on the three most costly shapes of linear layers; True if oneDNN takes less than 0.95 of the
    time.

    False without linear layers or without oneDNN.
    """
    shapes = Counter((m.out_features, m.in_features) for m in model.modules() if type(m) is nn.Linear)
    if not shapes or not torch.backends.mkldnn.is_available():
        return False
    times = {F.linear: 0.0, product: 0.0}
    with torch.inference_mode():
        for shape in sorted(shapes, key=lambda shape: -shape[0] * shape[1] * shapes[shape])[:3]:
            inputs = torch.ones(256, shape[1]), torch.ones(shape), torch.ones(shape[0])  # no random draw
            seconds: dict = {run: [] for run in times}
            for _ in range(9):
                for run in seconds:
                    start = time.perf_counter()
                    run(*inputs)
                    seconds[run].append(time.perf_counter() - start)
            for run in times:
                times[run] += shapes[shape] * min(seconds[run])
    return times[product] < 0.95 * times[F.linear]


def _replaced(model: nn.Module, old: type[nn.Linear], new: type[nn.Linear]) -> nn.Module:
    """Replace layers of the class `old` by layers of the class `new` with the same parameters, in place if they are parts."""
    found = [layer for layer in model.modules() if type(layer) is old and not _is_hooked(layer)]
    made: dict[nn.Module, nn.Module] = {layer: _as(layer, new) for layer in found}
    for module in [*model.modules()]:
        for name, part in [*module._modules.items()]:  # named_children leaves out a second name of a part
            if part in made:
                setattr(module, name, made[part])
    return made.get(model, model)


def _as(layer: nn.Linear, kind: type[nn.Linear]) -> nn.Linear:
    made = kind(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
    made.weight, made.bias = layer.weight, layer.bias
    return made.train(layer.training)


def _is_hooked(layer: nn.Module) -> bool:
    """True if a replacement would lose something that was put on the layer: a hook, a buffer, a forward of its own."""
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    return any(hooks) or bool(layer._buffers) or "forward" in vars(layer) or layer._parameters.keys() != {"weight", "bias"}


def _is_plain(x: Tensor) -> bool:
    """True for a call of plain evaluation: operators are simply computed, on a float32 tensor on the CPU."""
    return (
        not torch.compiler.is_compiling()  # first: a graph must not hold the sizes that are looked at below
        and type(x) is Tensor  # no proxy, fake tensor or subclass
        and x.dtype == torch.float32
        and x.device.type == "cpu"
        and x.dim() > 1
        and x.numel() > 0
        and not torch.is_grad_enabled()
        and not torch.jit.is_tracing()
        and not torch.is_autocast_enabled("cpu")
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._are_functorch_transforms_active()
    )
