"""Bringing a model to an image size under a policy, and the columns of results.csv that need no images.

Policies are choices of what happens to windows and position encodings at image sizes other than the training size.
A policy is written as in the column `policy` of results.csv: "none" where no policy changes anything; else the window policy,
where window policies differ, and one policy for each kind of encoding, joined by "+": "clip", "geometric+keep",
"divisor", "rescale+geometric".

Window policies choose the windows of a windowed model at a new size. fixed: windows stay as trained, and grids that they do not
divide are padded and masked. divisor: in every stage and along each axis, the largest window up to the trained one that divides
the grid; the bias is the matching part of the table, without resampling, and nothing is padded. rescale: the window scales with
the image, M * r / r_train rounded down along each axis (r / 32 for the published Swin), and the encoding is resampled for it by
its policy.

log_n, which a sweep with that option adds to a policy ("geometric+log_n"), multiplies the logits of attention by
sqrt(log N / log N_train) (`vitrel.position.log_n`).
"""

import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import torch
from timm.layers import to_2tuple
from torch import nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from vitrel.common.sizes import Size, token_count
from vitrel.grid import Grid, unseen_share
from vitrel.inspect.any_model import StageWindows, at_size, model_at_size, own_windows, stage_windows
from vitrel.inspect.leaks import border_leak
from vitrel.layers import Attention
from vitrel.models.backbone import LARGE, Backbone, backbone_of, parts_with_policies
from vitrel.position import PositionEncoding
from vitrel.tasks import Row

WINDOW_POLICIES = ("fixed", "divisor", "rescale")
LOG_N = "log_n"
MOST_SHAPES = 5  # image shapes whose cost is counted in the native protocol, about a second each


def policies_at(
    model: nn.Module, size: tuple[int, int], wanted: Sequence[str] | None = None, log_n: bool = False
) -> tuple[str, ...]:
    """Return the policies that give different models at `size` (h, w) pixels, as "rescale+geometric".

    A policy joins a choice for the windows and one for each kind of position encoding. Encodings that share a policy's name
    switch together; encodings that do not are tried in all combinations. ("none",) where none makes a difference, and
    for a model of another library.

    Args:
        wanted: only these policies; encodings and windows for which none is named keep their current policy. None: all.
        log_n: also return every policy with the temperature log N ("+log_n"; for "none": "log_n") where that changes the model.
    """
    backbone = backbone_of(model)
    if backbone is None:
        return ("none",)
    found: dict[str, None] = {}
    for policy in _policies_at(backbone, size, wanted):
        found[policy] = None
        if log_n and _tempers(with_policy(backbone, size, policy), size):
            found[LOG_N if policy == "none" else f"{policy}+{LOG_N}"] = None
    return tuple(found)


def _tempers(model: nn.Module, size: Size) -> bool:
    """Return whether the attention temperature log N changes the model at `size`: an encoding that does not have it yet gets
    another number of tokens than in training. False for a model of another library.
    """
    if not isinstance(model, Backbone):
        return False
    both = zip(model.encodings(size), model.trained_encodings(), strict=True)
    return any(grid.tokens != trained.tokens and encoding.temperature != LOG_N for (encoding, grid), (_, trained) in both)


def _policies_at(model: Backbone, size: tuple[int, int], wanted: Sequence[str] | None) -> tuple[str, ...]:
    """Return `policies_at` of a vitrel model, without those with "log_n"."""
    windows = window_policies_at(model, size)
    if not windows:
        return _encoding_policies_at(model, size, wanted)
    joined = []
    for window in [name for name in windows if wanted is None or name in wanted] or windows[:1]:
        windowed = with_policy(model, size, window)
        of_encodings = _encoding_policies_at(windowed, size, wanted)
        joined += [window if policy == "none" else f"{window}+{policy}" for policy in of_encodings]
    return tuple(joined)


def policies_of(model: nn.Module) -> tuple[str, ...]:
    """Return the names of all policies that a model has, window policies first; () for a model of another library."""
    backbone = backbone_of(model)
    if backbone is None:
        return ()
    if not has_windows(backbone):
        return backbone.policies
    parts = (part for part in model.modules() if isinstance(part, PositionEncoding))
    return tuple(dict.fromkeys((*WINDOW_POLICIES, *(policy for part in parts for policy in part.policies))))


def has_windows(backbone: Backbone) -> bool:
    """Return whether any attention layer of a model has windows."""
    return any(isinstance(part, Attention) and part.window is not None for part in backbone.modules())


def with_policy(model: nn.Module, size: tuple[int, int], policy: str) -> nn.Module:
    """Return a model for images of `size` (h, w) pixels under `policy`, one of `policies_at(model, size)`.

    It is a copy that shares parameters and buffers, or the model itself for "none" and "fixed". Encodings resample their
    parameters for another window. A window policy has no effect on a vitrel model without windows.

    For a model of another library `policy` is ignored. If that model takes only one size, the result is a copy set to `size`,
    which shares the weights of layers but not buffers; its forward is not tried.

    Raises:
        ValueError: the model does not have the encoding policy, or the other library refuses the size.
    """
    if backbone_of(model) is None:
        return model_at_size(model, size)
    names = policy.split("+")
    window = names[0] if names[0] in WINDOW_POLICIES else "fixed"
    encoding = "+".join(name for name in names if name not in (*WINDOW_POLICIES, LOG_N)) or "none"
    if (window, encoding) == ("fixed", "none") and LOG_N not in names:
        return model
    whole = copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})
    changed = backbone_of(whole)
    if LOG_N in names:
        changed.set_position_options(temperature=LOG_N)
    if window != "fixed":  # first: which policies the encodings have depends on its windows
        for attn, grid in _windowed(changed, size):
            attn.window = _window_at(changed, attn, grid, size, window)
            if any(attn.shift):
                attn.shift = attn.window[0] // 2, attn.window[1] // 2
    # at some of the native protocol's shapes the rescaled window is the trained one, and nothing is resampled
    if encoding != "none" and (window != "rescale" or changed.policies):
        changed.set_position_options(policy=encoding)
    return whole


def window_policies_at(model: nn.Module, size: tuple[int, int]) -> tuple[str, ...]:
    """Return "fixed" and which of "divisor" and "rescale" give other windows at `size` (h, w) pixels; () if neither does."""
    layers = list(_windowed(model, size))
    divided = any(
        min(m, n) != d
        for attn, grid in layers
        for m, n, d in zip(attn.window, grid, _window_at(model, attn, grid, size, "divisor"), strict=True)
    )
    rescaled = any(tuple(attn.window) != _window_at(model, attn, grid, size, "rescale") for attn, grid in layers)
    different = [name for name, differs in (("divisor", divided), ("rescale", rescaled)) if differs]
    return ("fixed", *different) if different else ()


class ModelWithPolicy(NamedTuple):
    """A model for images of one size, and what is resampled for it.

    Args:
        model: see `with_policy`.
        resampled: {encoding and policy: number of parameter values resampled}.
        unseen: share of the offsets between tokens that did not occur in training; NaN for a model of another library.
        saturated: share of the offsets that are unseen and use a trained edge value; NaN for a model of another library.
        tokens: number of patch tokens, NaN where unknown.
        stages: grid, window and padding of every stage at this size.
    """

    model: nn.Module
    resampled: dict[str, int]
    unseen: float
    saturated: float
    tokens: float
    stages: tuple[StageWindows, ...]


def at_size_with(model: nn.Module, size: Size, policy: str) -> ModelWithPolicy:
    """Return the model for `size` (h, w) pixels under `policy` (see `with_policy`), and what is resampled for it.

    ValueError for a size that the model does not support.
    """
    backbone = backbone_of(model)
    if backbone is None:
        adapted = at_size(model, size)
        unknown = float("nan")
        h, w = adapted.windows[0].grid if adapted.windows else (unknown, 1)
        return ModelWithPolicy(adapted.model, adapted.resampled, unknown, unknown, h * w, adapted.windows)
    changed, grid = with_policy(model, size, policy), backbone.token_grid(size)
    backbone = backbone_of(changed)
    shares = backbone.unseen(size), backbone.saturated(size)
    stages = tuple(line for blocks, at in _stages(backbone, size) for line in _windows(blocks, at))
    return ModelWithPolicy(changed, backbone.resampled(size), *shares, grid.h * grid.w, stages)


def costs_at(model: nn.Module, size: Size, policy: str, shapes: Counter[Size] | None = None, patch: Size | None = None) -> Row:
    """Return the columns of results.csv that need no images: tokens, windows, resampling, multiply-adds.

    For images of several shapes, window is that at `size`, and tokens the mean over all of them. Other columns use
    `sample_shapes` alone: gflops and pad_fraction ("" if they differ in stages) are means over their images, resampled names
    all policies, and resampled_values, unseen and saturated are the largest values.

    Args:
        size: (h, w) in pixels.
        policy: one of `policies_at(model, size)`.
        shapes: {size (h, w) in pixels: number of images} in the native protocol, None in others.
        patch: (h, w) of a patch in pixels; None without `shapes`.

    Raises:
        ValueError: the model does not take the size.
    """
    ready = at_size_with(model, size, policy)
    if shapes is not None and patch is not None:
        return _geometry(ready) | _native_columns(model, policy, shapes, patch)
    return _geometry(ready) | {"gflops": round(gflops(ready.model, size), 4)}


def leak_at(model: nn.Module, size: Size, policy: str) -> float | None:
    """Return the largest share, over the stages, of tokens that see the opposite border of an image of `size` (h, w) pixels.

    None for a model without windows, or where it is not known.
    """
    ready = at_size_with(model, size, policy)
    if all(stage.window is None for stage in ready.stages):
        return None
    leaked = border_leak(backbone_of(ready.model) or ready.model, size)
    return None if leaked is None else round(leaked, 4)


def unseen_after(model: nn.Module, sizes: Iterable[Size], size: Size) -> float:
    """Return the share, 0 to 1, of the offsets between tokens at `size` that did not occur at the best of the training `sizes`.

    Sizes are (h, w) in pixels, and the best is that with the smallest share. 1 for a model with windows or of another library.
    `Backbone.unseen` compares with the grid alone that a model was built for.
    """
    backbone = backbone_of(model)
    if backbone is None or has_windows(backbone):
        return 1.0
    grid = backbone.token_grid(size)
    return min(unseen_share(backbone.token_grid(trained), grid) for trained in sizes)


def _native_columns(model: nn.Module, policy: str, shapes: Counter[Size], patch: Size) -> Row:
    """Return the columns of `costs_at` that depend on the images' shapes; ValueError where the model does not take a shape."""
    sampled, columns, costs = sample_shapes(shapes), [], []
    for size in sampled:
        try:
            ready = at_size_with(model, size, policy)
        except ValueError as error:
            raise ValueError(f"{error}; the native protocol has images of many shapes: give --protocol scale") from error
        columns.append(_geometry(ready) | {"policies": ready.resampled})
        costs.append(gflops(ready.model, size) * shapes[size])
    count = sum(shapes[size] for size in sampled)
    pads = [
        [float(share) * shapes[size] for share in row["pad_fraction"].split()]
        for size, row in zip(sampled, columns, strict=True)
    ]
    same_stages = len({len(stages) for stages in pads}) == 1  # not so in every model of another library
    policies = dict.fromkeys(name for row in columns for name in row["policies"])
    return {
        "tokens": round(sum(token_count(size, patch) * n for size, n in shapes.items()) / shapes.total(), 2),
        "pad_fraction": " ".join(f"{sum(stage) / count:.2g}" for stage in zip(*pads, strict=True)) if same_stages else "",
        "gflops": round(sum(costs) / count, 4),
        "resampled": " + ".join(policies) or "nothing",
        **{name: max(row[name] for row in columns) for name in ("resampled_values", "unseen", "saturated")},
    }


def sample_shapes(shapes: Counter[Size]) -> list[Size]:
    """Return the MOST_SHAPES most frequent image sizes of {(h, w): images}, and those with the smallest and largest h / w."""
    extremes = [pick(shapes, key=lambda size: size[0] / size[1]) for pick in (min, max)]
    return list(dict.fromkeys([size for size, _ in shapes.most_common(MOST_SHAPES)] + extremes))


def gflops(model: nn.Module, size: Size) -> float:
    """Return the multiply-adds, in 10^9, of one forward pass on an image of `size` (h, w) pixels, without computing it.

    Only matrix products and convolutions count (timm's GMACs).
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    shapes = {name: torch.empty_like(tensor, device="meta", requires_grad=False) for name, tensor in named}
    pixels = torch.empty(1, getattr(model, "in_chans", 3), *size, device="meta", dtype=next(model.parameters()).dtype)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        functional_call(model, shapes, pixels)
    return counter.get_total_flops() / 2e9  # the counter counts a multiply-add as two operations


def _encoding_policies_at(model: Backbone, size: tuple[int, int], wanted: Sequence[str] | None) -> tuple[str, ...]:
    """Return the policies of encodings alone, as ("clip", "bicubic+keep"), that differ at `size` with the model's windows.

    ("none",) where there are none; `wanted` as in `policies_at`.
    """
    parts = [*parts_with_policies(model, size)]
    affected = [part.policies for part, grid in parts if _is_affected(part, grid)]
    options = []
    for group in _policy_groups(model):
        if any(set(group) & set(policies) for policies in affected):
            chosen = [policy for policy in group if wanted is None or policy in wanted]
            options.append(chosen or [next(part.policy for part, _ in parts if part.policy in group)])
    return tuple("+".join(names) for names in product(*options)) if options else ("none",)


def _policy_groups(model: Backbone) -> list[tuple[str, ...]]:
    """Return the names of the encodings' policies in groups: encodings that share a policy's name are in one group.

    An encoding on which no policy acts at the size LARGE is left out.
    """
    groups: list[tuple[str, ...]] = []
    for policies in dict.fromkeys(
        part.policies for part, grid in parts_with_policies(model, LARGE) if _is_affected(part, grid)
    ):
        overlapping = [group for group in groups if set(group) & set(policies)]
        merged = tuple(dict.fromkeys(name for group in (*overlapping, policies) for name in group))
        groups = [group for group in groups if group not in overlapping] + [merged]
    return groups


def _is_affected(part: PositionEncoding, grid: Grid) -> bool:
    """Return whether some policy of an encoding acts on `grid`: it resamples parameters, or reads edge values for offsets that
    did not occur in training.
    """
    trial = copy.copy(part)  # shares the parameters; the model keeps its policy
    resampled = []
    for policy in part.policies:
        trial.policy = policy
        resampled.append(trial.resampled(grid))
    return any(resampled)


def _window_at(model: Backbone, attn: Attention, grid: tuple[int, int], size: tuple[int, int], policy: str) -> tuple[int, int]:
    """Return the window (h, w) in tokens of a layer with `grid` (h, w) tokens, under the policy "divisor" or "rescale".

    "divisor" is the largest divisor of the grid's side up to the trained window. "rescale" multiplies the trained window by
    `size`, the image's (h, w) in pixels, over the training size, and rounds down.
    """
    if policy == "divisor":
        h, w = (max(d for d in range(1, m + 1) if n % d == 0) for m, n in zip(attn.window, grid, strict=True))
    else:
        trained = to_2tuple(model.patch_embed.img_size)
        h, w = (max(1, m * r // at) for m, r, at in zip(attn.window, size, trained, strict=True))
    return h, w


def _windowed(model: nn.Module, size: Size) -> Iterator[tuple[Attention, Size]]:
    """Yield every windowed attention layer of a vitrel model with its grid (h, w) at `size`; none for other models."""
    if not isinstance(model, Backbone):
        return
    for blocks, grid in _stages(model, size):
        yield from ((block.attn, grid) for block in blocks if block.attn.window is not None)  # type: ignore[misc]


def _stages(model: Backbone, size: Size) -> Iterator[tuple[Iterable[nn.Module], Size]]:
    """Yield the blocks of each stage of a model with their grid (h, w) at `size`; a plain ViT has one stage."""
    h, w, _ = model.token_grid(size)
    if model.window_size is None:
        yield model.blocks, (h, w)  # type: ignore[misc]
        return
    for stage in model.layers:
        if not isinstance(stage.downsample, nn.Identity):
            h, w = (h + 1) // 2, (w + 1) // 2
        yield stage.blocks, (h, w)


def _windows(blocks: Iterable[nn.Module], grid: Size) -> tuple[StageWindows, ...]:
    """Return windows and padding in a stage of `grid` (h, w) tokens, one item for all blocks with the same window."""
    return stage_windows(own_windows(block.attn, grid) for block in blocks)  # type: ignore[arg-type]


def _geometry(ready: ModelWithPolicy) -> Row:
    """Return {column of results.csv: value} on tokens, windows, padding and resampling."""
    windows = ["global" if stage.window is None else f"{stage.window[0]}x{stage.window[1]}" for stage in ready.stages]
    return {
        "tokens": ready.tokens,
        "window": " ".join(windows),
        "pad_fraction": " ".join(f"{stage.padded_share:.2g}" for stage in ready.stages),
        "resampled": " + ".join(ready.resampled) or "nothing",
        "resampled_values": sum(ready.resampled.values()),
        "unseen": round(ready.unseen, 4),
        "saturated": round(ready.saturated, 4),
    }
