"""Helpers for tests of vitrel.optimize: small models, comparison of outputs, operators that ran."""

import copy

import timm
import torch
from torch import Tensor, nn

import vitrel

SMALL = {
    "vit": ("vitrel_vit_n8_table", dict(depth=2, embed_dim=48, reg_tokens=1)),
    "swin": ("vitrel_swin_n", dict(depths=(2, 2), num_heads=(1, 2))),
}
NEAR = 2e-6
IMAGE = (40, 88)  # not square, no multiple of a window


def small(trunk: str, **options) -> nn.Module:
    """A small model in evaluation mode with noise on all weights: std 0.5 on position and zero weights, 0.1 on others."""
    name, sizes = SMALL[trunk]
    return lively(timm.create_model(name, **(dict(num_classes=5, init_gain=1.0) | sizes | options)))


def lively(model: nn.Module) -> nn.Module:
    own = model.position_parameters() if hasattr(model, "position_parameters") else set()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std = 0.5 if name in own or not parameter.any() else 0.1
            parameter.add_(torch.randn_like(parameter) * std)
    return model.eval()


def twins(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Return a plain copy of the model, and the model with oneDNN, even if slower."""
    plain = copy.deepcopy(model)
    return plain, vitrel.optimize(model, linears="onednn")


def picture(batch: int = 2, size: tuple[int, int] = IMAGE, channels: int = 3) -> Tensor:
    return torch.randn(batch, channels, *size)


def assert_near(found: Tensor, wanted: Tensor, limit: float = NEAR) -> None:
    """By the norm of the difference over the norm."""
    assert found.shape == wanted.shape and found.dtype == wanted.dtype and found.isfinite().all()
    assert (found.double() - wanted.double()).norm() <= limit * wanted.double().norm()


def check(plain: nn.Module, model: nn.Module, x: Tensor) -> None:
    """Compare the outputs of both models without gradients."""
    with torch.no_grad():
        assert_near(model(x), plain(x))


def uses_onednn(call) -> bool:
    """Return whether a linear layer of the call runs through an operator of oneDNN."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return any(event.key.startswith("mkldnn") and "linear" in event.key for event in profile.key_averages())


def graph(output: Tensor) -> list[str]:
    """Return the names of all nodes of the autograd graph of `output`, in a fixed order."""
    names, seen, todo = [], set(), [output.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        names.append(node.name())
        todo += [parent for parent, _ in node.next_functions]
    return names
