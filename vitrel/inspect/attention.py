"""Attention as a model computes it, layer by layer, and what can be said of it in numbers.

Nothing of the model is changed: its layers are watched while it runs (vitrel.inspect.attention_own, attention_timm), in
evaluation, and all that watching needs is undone, also after an error.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from vitrel.grid import Grid
from vitrel.inspect.attention_layer import Layer, model_name, replaced
from vitrel.inspect.attention_own import watch_own
from vitrel.inspect.attention_timm import watch_timm

__all__ = [
    "Layer",
    "attention_statistics",
    "attention_statistics_of",
    "for_each_layer",
    "layer_statistics",
    "offset_mean",
    "record",
]


def record(model: nn.Module, images: Tensor) -> list[Layer]:
    """Every layer of attention of `model` for a batch of images [B, C, height, width], in the order they run, on the CPU.

    model: any of ours, any model with our layers inside, any of timm's with the layers of `vitrel.inspect.attention_timm`; of a
    size it takes. Memory: 13 bytes for every pair of tokens of a window, head and image of every layer.
    Raises ValueError naming the model where no attention can be seen, or its tokens cannot be placed on the image.
    """
    layers = []
    for_each_layer(model, images, lambda layer: layers.append(layer.cpu()))
    return layers


def for_each_layer(model: nn.Module, images: Tensor, use: Callable[[Layer], None], position: bool = True) -> None:
    """As `record`, but use(layer) is called when each layer has run, on the model's device, and no layer is kept.

    position False: without `content` and `position`, which saves time and memory.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    size = images.shape[-2], images.shape[-1]

    def see(layer: Layer) -> None:
        use(layer._replace(stride=_stride(model, size, layer.grid), image=size))

    with ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(replaced(module, training=False, _compiled_call_impl=None))
        if not watch_own(model, see, position, stack) + watch_timm(model, size, see, position, stack):
            raise ValueError(
                f"no attention that can be seen in {model_name(model)}: its layers are neither ours nor of those of timm "
                "that vitrel.inspect.attention_timm lists"
            )
        # Not inference mode: a model may keep a tensor it made here, and could then not be trained any more.
        stack.enter_context(torch.no_grad())
        model(images)


def attention_statistics(layers: Sequence[Layer]) -> dict[str, float]:
    """`layer_statistics` of a model: the mean over its layers, and attention_span the exp of the mean entropy."""
    return _mean([layer_statistics(layer) for layer in layers])


def attention_statistics_of(model: nn.Module, images: Tensor) -> dict[str, float]:
    """`attention_statistics` of `model` for images [B, C, height, width], one layer in memory at a time; see `record`."""
    found = []
    for_each_layer(model, images, lambda layer: found.append(layer_statistics(layer)), position=False)
    return _mean(found)


def layer_statistics(layer: Layer) -> dict[str, float]:
    """Means over images, heads and the queries that are patches of the image.

    attention_entropy: -sum p log p over all keys, prefix tokens and padding that is attended to included, in nats.
    attention_span: its exp, a number of tokens. attention_distance: sum p d, d between the centres of query and key in patches
    of this layer, over the keys that are patches, whose weights are made to sum to 1 (a query that gives them none is left
    out). attention_distance_share: the same in pixels, as a share of the image's diagonal.
    """
    grid, patches, weights = layer.grid, layer.patches, layer.weights
    queries = patches[None, :, None].expand(weights.shape[:-1])  # [B, W, H, N]
    entropy = torch.special.entr(weights).sum(-1)[queries].mean().item()

    at = (layer.tokens - grid.prefix).clamp(min=0)
    at = torch.stack((at // grid.w, at % grid.w), -1).float()  # [W, N, 2]
    apart = at[:, :, None] - at[:, None]  # [W, N, N, 2]
    pixels = apart * apart.new_tensor(layer.stride)
    mass = _attended(weights, patches[:, None].expand(apart.shape[:-1]).float())  # [B, W, H, N]
    queries = queries & (mass != 0)
    height, width = layer.image or (grid.h * layer.stride[0], grid.w * layer.stride[1])
    distance, length = (
        (_attended(weights, d.norm(dim=-1) * patches[:, None]) / mass)[queries].mean().item() for d in (apart, pixels)
    )
    return {
        "attention_entropy": entropy,
        "attention_span": math.exp(entropy),
        "attention_distance": distance,
        "attention_distance_share": length / math.hypot(height, width),
    }


def offset_mean(layer: Layer, what: Tensor) -> Tensor:
    """Mean of `what` [B, W, H, N, N] over images, windows and visible pairs of patches with the same offset.

    Returns [H, 2h-1, 2w-1], h and w of the window or of the grid: the signed offset (dy, dx), query minus key, in slots of the
    window, stands at [:, dy + h-1, dx + w-1]; NaN where no visible pair has it.
    """
    h, w = layer.window or layer.grid[:2]
    pairs = (layer.patches[:, :, None] & layer.patches[:, None])[None, :, None]
    visible = (pairs if layer.visible is None else pairs & layer.visible).expand(what.shape)
    first = what.shape[-1] - h * w  # prefix tokens
    index = Grid(h, w).index(device=what.device).flatten()
    sums = [
        torch.zeros(what.shape[2], Grid(h, w).offset_classes(), dtype=torch.float64, device=what.device).index_add(
            1, index, part.sum((0, 1))[:, first:, first:].flatten(1).double()
        )
        for part in (torch.where(visible, what, 0.0), visible)
    ]
    return (sums[0] / sums[1]).float().unflatten(1, (2 * h - 1, 2 * w - 1))


def _attended(weights: Tensor, value: Tensor) -> Tensor:
    """sum_j weights[b, w, h, i, j] value[w, i, j], [B, W, H, N]."""
    return torch.einsum("bwhij,wij->bwhi", weights, value)


def _mean(statistics: list[dict[str, float]]) -> dict[str, float]:
    mean = {name: sum(found[name] for found in statistics) / len(statistics) for name in statistics[0]}
    return mean | {"attention_span": math.exp(mean["attention_entropy"])}


def _stride(model: nn.Module, size: tuple[int, int], grid: Grid) -> tuple[float, float]:
    embed = getattr(model, "patch_embed", None)
    if not hasattr(embed, "feat_ratio"):
        return size[0] / grid.h, size[1] / grid.w
    patches, ratio = embed.dynamic_feat_size(size), embed.feat_ratio(as_scalar=False)
    # Merging halves the grid and rounds up: from 9 tokens to 5, 3, 2.
    return tuple(float(r * 2 ** math.ceil(math.log2(n / m))) for r, n, m in zip(ratio, patches, grid[:2], strict=True))
