"""Helpers for tests of vitrel.optimize: small models, comparison of outputs, operators that ran."""

import copy

import timm
import torch
from torch import Tensor, nn

import vitrel

SMALL = {
    "vit": ("vitrel_vit_n8_none", dict(depth=2, embed_dim=48)),
    "swin": ("vitrel_swin_n", dict(depths=(2, 2), num_heads=(1, 2))),
    "swinv2": ("vitrel_swinv2_n", dict(depths=(2, 2), num_heads=(1, 2))),
}
KINDS = {
    "vit": ("vit", dict(position="table", reg_tokens=1, block_args=dict(init_values=0.5))),
    "vit swiglu": ("vit", dict(position="absolute+rope_mixed", block_args=dict(mlp="swiglu"))),
    "vit shared": ("vit", dict(position="table", share_position=True)),
    "swin": ("swin", {}),
    "swinv2": ("swinv2", {}),
}
NEAR = 2e-6
IMAGE = (40, 88)  # not square, no multiple of a window


def lively(model: nn.Module) -> nn.Module:
    """Return the model in evaluation mode with noise on all weights: std 0.5 on position and zero weights, 0.1 on others."""
    own = model.position_parameters() if hasattr(model, "position_parameters") else set()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            std = 0.5 if name in own or not parameter.any() else 0.1
            parameter.add_(torch.randn_like(parameter) * std)
    return model.eval()


def small(trunk: str, **options) -> nn.Module:
    name, sizes = SMALL[trunk]
    return lively(timm.create_model(name, **(dict(num_classes=5, init_gain=1.0) | sizes | options)))


def build(kind: str, **options) -> nn.Module:
    """A small model of one of KINDS."""
    trunk, own = KINDS[kind]
    return small(trunk, **own | options)


def twins(model: nn.Module, **how) -> tuple[nn.Module, nn.Module]:
    """Return a plain copy of the model, and the model optimized, with oneDNN if available, even if slower."""
    plain = copy.deepcopy(model)
    return plain, vitrel.optimize(model, **({"linears": "onednn" if torch.backends.mkldnn.is_available() else "torch"} | how))


def picture(batch: int = 2, size: tuple[int, int] = IMAGE, channels: int = 3) -> Tensor:
    return torch.randn(batch, channels, *size)


def apart(found, wanted) -> float:
    """Return the largest relative error (norm of the difference / norm) of tensors in lists, tuples and dictionaries."""
    if isinstance(wanted, Tensor):
        assert found.shape == wanted.shape and found.dtype == wanted.dtype
        assert found.isfinite().all() and wanted.isfinite().all()
        size = wanted.double().norm().item()
        return (found.double() - wanted.double()).norm().item() / size if size else float(found.any())
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        found, wanted = list(found.values()), list(wanted.values())
    assert len(found) == len(wanted) > 0
    return max(apart(own, other) for own, other in zip(found, wanted, strict=True))


def assert_near(found, wanted, limit: float = NEAR) -> None:
    assert apart(found, wanted) <= limit


def check(plain: nn.Module, model: nn.Module, image: Tensor) -> None:
    """Compare the logits of both models, without gradients, twice (the second call may use caches)."""
    with torch.no_grad():
        wanted = plain(image)
        assert_near(model(image), wanted)
        assert_near(model(image), wanted)


def change(*models: nn.Module, scale: float = 0.3) -> None:
    """Add the same noise to the parameters of all models, in place."""
    with torch.no_grad():
        for group in zip(*(m.parameters() for m in models), strict=True):
            noise = torch.randn(group[0].shape, dtype=torch.float64) * scale
            for parameter in group:
                parameter.add_(noise.to(parameter.dtype))


def operators(call) -> set[str]:
    """Return the names of all operators that a call runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    return {event.key for event in profile.key_averages()}


def uses_onednn(call) -> bool:
    """Return whether a linear layer of the call runs through an operator of oneDNN."""
    return any(name.startswith("mkldnn") and "linear" in name for name in operators(call))


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
