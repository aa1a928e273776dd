"""A model brought to a size: ours with a policy in force, any other as timm itself does it; and what that took."""

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from vitrel.evaluate.policies import in_force
from vitrel.evaluate.settings import Row
from vitrel.inspect.any_model import StageWindows, fit_to
from vitrel.inspect.footprint import border_leak
from vitrel.inspect.resolution_report import StageReport, resolution_report
from vitrel.layers import Attention
from vitrel.models.backbone import Backbone
from vitrel.ops import BACKENDS
from vitrel.ops.dispatch import Call, choose
from vitrel.sizes import Size

Stages = tuple[StageReport, ...] | tuple[StageWindows, ...]


class Fit(NamedTuple):
    """A model ready for images of one size: `model` is the very one, or a changed copy; the rest is for `static_columns`."""

    model: nn.Module
    resized: dict[str, int]
    unseen: float  # NaN where it is not known
    saturated: float
    tokens: float
    stages: Stages


@contextlib.contextmanager
def fitted(model: nn.Module, size: Size, policy: str) -> Iterator[Fit]:
    """The model at `size` (h, w) pixels with `policy` in force; then it is as before. ValueError for a size it refuses."""
    if not isinstance(model, Backbone):
        found = fit_to(model, size)
        grid = found.windows[0].grid if found.windows else (float("nan"), 1)
        unknown = float("nan")
        yield Fit(found.model, found.resized, unknown, unknown, grid[0] * grid[1], found.windows)
        return
    grid = model.token_grid(size)
    with in_force(model, policy, size):
        report = resolution_report(model, size)
        own = report.resized, report.unseen, report.saturated
        yield Fit(model, *own, grid.h * grid.w, report.stages)


def static_columns(model: nn.Module, size: Size, policy: str, leak: bool = False, batch: int = 1) -> Row:
    """The columns that follow from architecture, size, policy and batch size alone, without an image; leak: with the
    border-leak test.
    """
    with fitted(model, size, policy) as fit:
        windows = any(stage.window is not None for stage in fit.stages)
        seen = border_leak(fit.model, size) if leak and windows else None
        share = float("nan") if seen is None else round(seen, 4)
        backend = _own_backend(model, size, batch) if isinstance(model, Backbone) else _foreign_backend(fit.model)
        return _geometry(fit) | {"backend": backend, "gflops": round(gflops(fit.model, size), 4), "border_leak": share}


def _geometry(fit: Fit) -> Row:
    windows = ["global" if stage.window is None else f"{stage.window[0]}x{stage.window[1]}" for stage in fit.stages]
    return {
        "tokens": fit.tokens,
        "window": " ".join(windows),
        "pad_fraction": " ".join(f"{stage.padded_share:.2g}" for stage in fit.stages),
        "resized": " + ".join(fit.resized) or "nothing",
        "resized_params": sum(fit.resized.values()),
        "unseen": round(fit.unseen, 4),
        "saturated": round(fit.saturated, 4),
    }


def gflops(model: nn.Module, size: Size) -> float:
    """10^9 multiply-adds of the forward pass of one image, matrix products and convolutions alone, as timm's GMACs."""
    named = [*model.named_parameters(), *model.named_buffers()]
    shapes = {name: torch.empty_like(tensor, device="meta", requires_grad=False) for name, tensor in named}
    pixels = torch.empty(1, getattr(model, "in_chans", 3), *size, device="meta", dtype=next(model.parameters()).dtype)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        functional_call(model, shapes, pixels)
    return counter.get_total_flops() / 2e9  # it counts a multiply-add as two


def _own_backend(model: Backbone, size: Size, batch: int) -> str:
    """The backends that serve the layers in batches of that size, as vitrel.ops chooses them."""
    layers = [module for module in model.modules() if isinstance(module, Attention)]
    names, weight, grid = {layer.backend for layer in layers}, layers[0].proj.weight, model.token_grid(size)
    if "auto" in names:
        heads, entry = layers[0].num_heads, "attention" if layers[0].window is None else "window_attention"
        how = layers[0].window, heads, len(weight) // heads, grid.tokens, weight.dtype, weight.device
        with torch.no_grad():
            terms = [encoding(own) for encoding, own in model.encodings(size) if encoding.site == "attention"]
            modules = [choose("auto", Call(entry, own, grid, *how, grad=False, batch=batch)) for own in terms]
        names = names - {"auto"} | {name for name, module in BACKENDS.items() if module in modules}
    return "+".join(sorted(names))


def _foreign_backend(model: nn.Module) -> str:
    fused = {module.fused_attn for module in model.modules() if isinstance(getattr(module, "fused_attn", None), bool)}
    return "+".join(sorted("timm fused" if flag else "timm" for flag in fused))
