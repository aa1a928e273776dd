"""Policies: how a model reads a size it was not trained at, and the model brought to a size with one of them in force.

A policy is written as the `policy` column has it: "none" where none makes a difference; else that of the windows where there
is a choice, then one resize policy of each kind of encodings: "clip", "geometric+keep", "divisor", "rescale+geometric".

Window policies say which windows a windowed model has at a new size. fixed: they stay as trained, and grids that they do not
divide are padded and masked. divisor: in every stage and along each axis the largest window up to the trained one that divides
the grid; its encoding reads the sub-table, exactly, and nothing is padded. rescale: the window grows and shrinks with the
image, M * r / r_train rounded down along each axis (r / 32 for the published Swin), and the encoding is read on it by its
resize policy.
"""

import contextlib
import copy
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import torch
from timm.layers import to_2tuple
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from vitrel.evaluate.settings import Row
from vitrel.grid import Grid
from vitrel.inspect.any_model import StageWindows, at_size, model_at_size
from vitrel.inspect.footprint import border_leak
from vitrel.inspect.resolution_report import StageReport, resolution_report, stages
from vitrel.layers import Attention
from vitrel.models.backbone import LARGE, Backbone, resizable_parts
from vitrel.ops import BACKENDS
from vitrel.ops.dispatch import Call, choose
from vitrel.position import PositionEncoding
from vitrel.sizes import Size, token_count

WINDOW_POLICIES = ("fixed", "divisor", "rescale")
MOST_SHAPES = 5  # of which costs are counted at native shape: a second for each


def policies_at(model: nn.Module, size: tuple[int, int], wanted: Sequence[str] | None = None) -> tuple[str, ...]:
    """The policies to try at `size` (h, w) pixels, all or those `wanted`; ("none",) where each reads as trained.

    Encodings that share a policy are switched together; of encodings that share none, all combinations are tried. Where none of
    an encoding's policies is wanted, the one in use is kept; where no window policy is, the window. A model of another library
    has none.
    """
    if not isinstance(model, Backbone):
        return ("none",)
    windows = window_policies_at(model, size)
    if not windows:
        return _resize_policies_at(model, size, wanted)
    found = []
    for window in [name for name in windows if wanted is None or name in wanted] or windows[:1]:
        with window_policy(model, window, size):
            found += [join_policy(window, policy) for policy in _resize_policies_at(model, size, wanted)]
    return tuple(found)


def policies_of(model: nn.Module) -> tuple[str, ...]:
    """All policies that a model may be asked for at some size, those of windows first; none of another library's model."""
    if not isinstance(model, Backbone):
        return ()
    if not any(isinstance(part, Attention) and part.window is not None for part in model.modules()):
        return model.resize_policies
    parts = (part for part in model.modules() if isinstance(part, PositionEncoding))
    return tuple(dict.fromkeys((*WINDOW_POLICIES, *(policy for part in parts for policy in part.policies))))


@contextlib.contextmanager
def in_force(model: nn.Module, policy: str, size: tuple[int, int], options: Mapping[str, Any] | None = None) -> Iterator[None]:
    """The model with `policy`, one that `policies_at(model, size)` lists, and `options` of `Backbone.set_position_options` in
    force; afterwards its own are back.
    """
    window, _, rest = policy.partition("+")
    window, rest = (window, rest or "none") if window in WINDOW_POLICIES else ("fixed", policy)
    own = model.position_options(**options) if options else contextlib.nullcontext()
    with own, window_policy(model, window, size), resize_policy(model, rest):  # which policies there are depends on windows
        yield


@contextlib.contextmanager
def resize_policy(model: nn.Module, policy: str) -> Iterator[None]:
    """The model with resize policies such as "geometric+keep", or "none", in force; afterwards its own are back."""
    with model.position_options(resize=policy) if policy != "none" else contextlib.nullcontext():
        yield


def window_policies_at(model: nn.Module, size: tuple[int, int]) -> tuple[str, ...]:
    """The window policies that differ at `size` (h, w) pixels, "fixed" first; () where there is nothing to choose."""
    layers = list(_windowed(model, size))
    divided = any(
        min(m, n) != d
        for attn, grid in layers
        for m, n, d in zip(attn.window, grid, _window_at(model, attn, grid, size, "divisor"), strict=True)
    )
    rescaled = any(tuple(attn.window) != _window_at(model, attn, grid, size, "rescale") for attn, grid in layers)
    others = [name for name, differs in (("divisor", divided), ("rescale", rescaled)) if differs]
    return ("fixed", *others) if others else ()


@contextlib.contextmanager
def window_policy(model: nn.Module, policy: str, size: tuple[int, int]) -> Iterator[None]:
    """The model with the windows that `policy` gives it at `size` (h, w) pixels; afterwards its own are back.

    Nothing else changes: encodings read the new window from the parameters they have. ValueError for an unknown policy.
    """
    if policy not in WINDOW_POLICIES:
        raise ValueError(f"unknown window policy {policy!r}; choose one of {', '.join(WINDOW_POLICIES)}")
    layers = list(_windowed(model, size)) if policy != "fixed" else []
    before = [(attn, attn.window, attn.shift) for attn, _ in layers]
    try:
        for attn, grid in layers:
            attn.window = _window_at(model, attn, grid, size, policy)
            if any(attn.shift):
                attn.shift = attn.window[0] // 2, attn.window[1] // 2
        yield
    finally:
        for attn, own, shift in before:
            attn.window, attn.shift = own, shift


def join_policy(window: str, resize: str) -> str:
    """("rescale", "geometric") -> "rescale+geometric", ("divisor", "none") -> "divisor"."""
    return window if resize == "none" else f"{window}+{resize}"


def policy_parts(policy: str) -> frozenset[str]:
    """The policies of windows and encodings that one consists of: {"rescale", "geometric"} of "rescale+geometric"."""
    return frozenset(policy.split("+")) - {"none"}


class ModelWithPolicy(NamedTuple):
    """A model ready for images of one size: `model` is the very one, or a changed copy; the rest says what that took.

    resized: number of values resampled, by rule. unseen, saturated: shares of offsets, see `resolution_report`.
    """

    model: nn.Module
    resized: dict[str, int]
    unseen: float  # NaN where it is not known
    saturated: float
    tokens: float
    stages: tuple[StageReport, ...] | tuple[StageWindows, ...]


@contextlib.contextmanager
def brought_to(model: nn.Module, size: Size, policy: str) -> Iterator[nn.Module]:
    """The model of `at_size_with` alone, without what it tells, which takes a forward pass of most models."""
    if not isinstance(model, Backbone):
        yield model_at_size(model, size, share_weights=True)
        return
    with in_force(model, policy, size):
        yield model


@contextlib.contextmanager
def at_size_with(model: nn.Module, size: Size, policy: str) -> Iterator[ModelWithPolicy]:
    """The model at `size` (h, w) pixels with `policy` in force; then it is as before. ValueError for a size it refuses."""
    if not isinstance(model, Backbone):
        found = at_size(model, size, share_weights=True)
        unknown = float("nan")
        h, w = found.windows[0].grid if found.windows else (unknown, 1)
        yield ModelWithPolicy(found.model, found.resized, unknown, unknown, h * w, found.windows)
        return
    grid = model.token_grid(size)
    with in_force(model, policy, size):
        report = resolution_report(model, size)
        own = report.resized, report.unseen, report.saturated
        yield ModelWithPolicy(model, *own, grid.h * grid.w, report.stages)


def static_columns(model: nn.Module, size: Size, policy: str, leak: bool = False, batch: int = 1) -> Row:
    """The columns that follow from architecture, size, policy and batch size alone, without an image; leak: with the
    border-leak test.
    """
    with at_size_with(model, size, policy) as ready:
        windows = any(stage.window is not None for stage in ready.stages)
        seen = border_leak(ready.model, size) if leak and windows else None
        share = float("nan") if seen is None else round(seen, 4)
        backend = _own_backend(model, size, batch) if isinstance(model, Backbone) else _foreign_backend(ready.model)
        return _geometry(ready) | {"backend": backend, "gflops": round(gflops(ready.model, size), 4), "border_leak": share}


def native_columns(model: nn.Module, policy: str, shapes: Counter[Size], patch: Size) -> Row:
    """The columns of `static_columns` that depend on the shapes of images: how many there are of every size (h, w) in pixels.

    tokens: mean over the images. The others are of `telling_shapes` alone: gflops and pad_fraction the mean over their images,
    what is resized at any of them, and of shares and numbers the largest.
    """
    images, told, columns, costs = shapes.total(), telling_shapes(shapes), [], []
    for size in told:
        with at_size_with(model, size, policy) as ready:
            columns.append(_geometry(ready) | {"rules": ready.resized})
            costs.append(gflops(ready.model, size) * shapes[size])
    shown = sum(shapes[size] for size in told)
    pads = [
        [float(share) * shapes[size] for share in own["pad_fraction"].split()] for size, own in zip(told, columns, strict=True)
    ]
    alike = len({len(one) for one in pads}) == 1  # else stages differ from shape to shape, in a model of another library
    rules = dict.fromkeys(rule for own in columns for rule in own["rules"])
    return {
        "tokens": round(sum(token_count(size, patch) * n for size, n in shapes.items()) / images, 2),
        "pad_fraction": " ".join(f"{sum(stage) / shown:.2g}" for stage in zip(*pads, strict=True)) if alike else "",
        "gflops": round(sum(costs) / shown, 4),
        "resized": " + ".join(rules) or "nothing",
        **{name: max(own[name] for own in columns) for name in ("resized_params", "unseen", "saturated")},
    }


def telling_shapes(shapes: Counter[Size]) -> list[Size]:
    """The sizes that most images have, and the tallest and the widest: what is told of all shapes is found at these."""
    extremes = [pick(shapes, key=lambda size: size[0] / size[1]) for pick in (min, max)]
    return list(dict.fromkeys([size for size, _ in shapes.most_common(MOST_SHAPES)] + extremes))


def gflops(model: nn.Module, size: Size) -> float:
    """10^9 multiply-adds of the forward pass of one image, matrix products and convolutions alone, as timm's GMACs."""
    named = [*model.named_parameters(), *model.named_buffers()]
    shapes = {name: torch.empty_like(tensor, device="meta", requires_grad=False) for name, tensor in named}
    pixels = torch.empty(1, getattr(model, "in_chans", 3), *size, device="meta", dtype=next(model.parameters()).dtype)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        functional_call(model, shapes, pixels)
    return counter.get_total_flops() / 2e9  # it counts a multiply-add as two


def _resize_policies_at(model: Backbone, size: tuple[int, int], wanted: Sequence[str] | None) -> tuple[str, ...]:
    here = [part.policies for part, grid in resizable_parts(model, size) if _matters(part, grid)]
    options = []
    for group in _groups(model):
        if any(set(group) & set(policies) for policies in here):
            chosen = [policy for policy in group if wanted is None or policy in wanted]
            options.append(chosen or [next(part.resize for part, _ in resizable_parts(model, size) if part.resize in group)])
    return tuple("+".join(names) for names in product(*options)) if options else ("none",)


def _groups(model: Backbone) -> list[tuple[str, ...]]:
    """Policies of the encodings that can meet another grid; those that share a name form one group."""
    groups: list[tuple[str, ...]] = []
    for policies in dict.fromkeys(part.policies for part, grid in resizable_parts(model, LARGE) if _matters(part, grid)):
        near = [group for group in groups if set(group) & set(policies)]
        merged = tuple(dict.fromkeys(name for group in (*near, policies) for name in group))
        groups = [group for group in groups if group not in near] + [merged]
    return groups


def _matters(part: PositionEncoding, grid: Grid) -> bool:
    """Whether some policy reads `part` on `grid` other than as it was trained."""
    other = copy.copy(part)  # shares the parameters; the model's own policy stays
    rules = []
    for policy in part.policies:
        other.resize = policy
        rules.append(other.resized(grid))
    return any(rules)


def _window_at(model: Backbone, attn: Attention, grid: tuple[int, int], size: tuple[int, int], policy: str) -> tuple[int, int]:
    if policy == "divisor":
        h, w = (max(d for d in range(1, m + 1) if n % d == 0) for m, n in zip(attn.window, grid, strict=True))
    else:
        trained = to_2tuple(model.patch_embed.img_size)
        h, w = (max(1, m * r // at) for m, r, at in zip(attn.window, size, trained, strict=True))
    return h, w


def _windowed(model: nn.Module, size: tuple[int, int]) -> Iterator[tuple[Attention, tuple[int, int]]]:
    """Every windowed attention of a vitrel model, with the (h, w) tokens it meets at `size`; none of another model."""
    if not isinstance(model, Backbone):
        return
    for blocks, grid, _ in stages(model, model.token_grid(size)):
        yield from ((block.attn, grid[:2]) for block in blocks if block.attn.window is not None)  # type: ignore[misc]


def _geometry(ready: ModelWithPolicy) -> Row:
    windows = ["global" if stage.window is None else f"{stage.window[0]}x{stage.window[1]}" for stage in ready.stages]
    return {
        "tokens": ready.tokens,
        "window": " ".join(windows),
        "pad_fraction": " ".join(f"{stage.padded_share:.2g}" for stage in ready.stages),
        "resized": " + ".join(ready.resized) or "nothing",
        "resized_params": sum(ready.resized.values()),
        "unseen": round(ready.unseen, 4),
        "saturated": round(ready.saturated, 4),
    }


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
