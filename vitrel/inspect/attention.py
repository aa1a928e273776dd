"""Recorded attention: the weights of every layer of a model for a batch of images (`record`), and their statistics.

The model runs in evaluation mode and uncompiled, under `vitrel.inspect.recorder`, which finds attention of any class by
PyTorch's operators. The logits are split into content and position: what is added to the product of queries and keys is
position, and so is a rotation of them; vitrel's layers say by their terms what position adds.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from vitrel.common.sizes import Size
from vitrel.grid import Grid
from vitrel.inspect.any_model import LocatedCall, located, model_name, on_images, own_call, patch_grid
from vitrel.inspect.recorder import Attention as Seen
from vitrel.inspect.recorder import run
from vitrel.layers import Attention
from vitrel.ops.reference import masked_logits
from vitrel.ops.window import windows
from vitrel.position import PositionEncoding, Terms
from vitrel.position.terms import Composition, no_autocast, upcast

NEGLIGIBLE = 0.01  # share of `position_shares` below which position is said to do nothing


class Layer(NamedTuple):
    """The attention of one layer for B images and H heads, in W windows of N slots each, which hold tokens or padding.

    W is 1 where attention is global. `weights` [B, W, H, N, N] are those of the model. `content` are the weights without
    position: the softmax of the same q and k under the same mask, without tables, rotation and query bias. `position` is what
    position adds to the logits. What an encoding adds to tokens before attention stays in all of them. A field of view (xpos,
    lookhere) is a table, so `content` includes the keys that it hides. A factor that depends on the grid (log_n, yarn:
    `Terms.temperature`) is 1 in `content`; a constant factor (deberta) and the learned scale of cosine attention remain.

    `tokens` [W, N] is the token in each slot, -1 for padding; `stride` and `image` are in pixels (h, w).
    """

    name: str  # path of the module
    grid: Grid  # tokens of the image at this layer, prefix tokens included
    window: Size | None  # None: global
    shift: Size
    tokens: Tensor  # [W, N] index of the token (row-major, prefix first) in every slot of every window, -1 for padding
    weights: Tensor  # [B, W, H, N, N] float32, those the model used; rows of padding are 0
    content: Tensor | None  # [B, W, H, N, N] float32; None if only weights were recorded
    position: Tensor | None  # [B, W, H, N, N] float32, 0 where not visible; None if only weights were recorded
    visible: Tensor | None = None  # [B, W, H, N, N] bool: both tokens real, hidden by neither mask nor encoding; None: all
    stride: tuple[float, float] = (1.0, 1.0)  # pixels between the centers of neighboring tokens, (h, w)
    image: Size | None = None  # pixels (h, w); None: the grid times the stride
    logits: Tensor | None = None  # [B, W, H, N, N] float32, masked, with position; without it they are logits - position
    query: Tensor | None = None  # [B, W, H, N, D] as the product takes them, rotated; of vitrel's layers before position acts
    key: Tensor | None = None
    rotation: tuple[Tensor, ...] = ()  # cosines and sines [..., N, D] by which queries and keys are multiplied
    parameters: frozenset[str] = frozenset()  # names of those that enter between the linear layers and the softmax

    @property
    def patches(self) -> Tensor:
        """[W, N] bool: whether the slot holds a patch of the image, neither padding nor a prefix token."""
        return self.tokens >= self.grid.prefix

    @property
    def places(self) -> Tensor:
        """[W, N, 2]: row and column of the patch in the slot, without meaning for padding and prefix tokens."""
        at = (self.tokens - self.grid.prefix).clamp(min=0)
        return torch.stack((at // self.grid.w, at % self.grid.w), -1)

    def needed(self, what: str) -> Tensor:
        """Return the field "content" or "position"; ValueError if it was left out in recording."""
        values = getattr(self, what)
        if values is None:
            raise ValueError(f"{self.name} was recorded without {what}: use vitrel.inspect.attention.record")
        return values

    def cpu(self) -> "Layer":
        """Return the same layer with every tensor on the CPU."""
        return tree_map(lambda value: value.cpu() if isinstance(value, Tensor) else value, self)


def record(model: nn.Module, images: Tensor) -> list[Layer]:
    """Run images [B, C, height, width] through `model` and return its attention layers in the order they run, on the CPU.

    The model runs in evaluation mode, without gradients. Layers whose tokens are no grid of the image (attention over channels,
    pooled keys, a query that is no patch) are left out.

    Args:
        model: any model that takes images.
        images: of a size that the model takes. Memory: 17 bytes for each pair of tokens of each window, head, image and layer.

    Raises:
        ValueError: the model has no attention, or none whose tokens are a grid of the image.
    """
    layers = []
    for_each_layer(model, images, lambda layer: layers.append(layer.cpu()))
    return layers


def for_each_layer(model: nn.Module, images: Tensor, use: Callable[[Layer], None], position: bool = True) -> None:
    """Call use(layer) with each attention layer as it runs, with tensors on the model's device; no layer is kept.

    Arguments, order and errors are those of `record`. With position=False, `content` and `position` are left out, which saves
    time and memory.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    size = images.shape[-2], images.shape[-1]
    found, left_out = False, []

    def placed(layer: Layer) -> None:
        nonlocal found
        found = True
        use(layer._replace(stride=_stride(model, size, layer.grid), image=size))

    def seen(attention: Seen) -> None:
        call = located(attention, size, model)
        if call.grid is not None and call.square:
            placed(_layer(call, attention, len(images), position))
        else:
            left_out.append(call.name)

    def own(name: str, module: Attention, qkv: Tensor, arguments: tuple) -> None:
        placed(_own_layer(name, module, module.normalized(qkv), position, *arguments))

    run(on_images(model), model, images, use=seen, follow=True, plain=position, own=own)
    if not found:
        reason = f"the tokens of {left_out[0]} are no grid of the image" if left_out else "no softmax of queries and keys"
        raise ValueError(f"no attention that can be seen in {model_name(model)}: {reason}")


def attention_statistics_of(model: nn.Module, images: Tensor) -> dict[str, float]:
    """Return the means over a model's layers of the statistics of `layer_statistics`, under the same four keys.

    attention_span is the exp of the mean entropy instead. One layer at a time is in memory. `images` [B, C, height, width] and
    errors are as for `record`.
    """
    statistics: list[dict[str, float]] = []
    for_each_layer(model, images, lambda layer: statistics.append(layer_statistics(layer)), position=False)
    mean = {name: sum(layer[name] for layer in statistics) / len(statistics) for name in statistics[0]}
    return mean | {"attention_span": math.exp(mean["attention_entropy"])}


def position_shares(model: nn.Module, images: Tensor) -> dict[str, float]:
    """Return how much position changes the attention of each layer: {layer: share}; {} for a model without position.

    The share is the root mean square of what position adds to the layer's logits, divided by that of the logits without it,
    over images, heads and visible pairs. Each query's mean over its keys is subtracted from both first, since softmax ignores
    it. Shares below NEGLIGIBLE (0.01) have no visible effect.

    For encodings of vitrel that add to tokens there is an entry "tokens": it compares the logits of the first layer with and
    without them in the same way. Embeddings of timm's models are not measured. A layer in which position adds nothing has the
    share 0 if an encoding of vitrel acts in the model's attention, and is left out otherwise.

    Args:
        model: of vitrel or timm.
        images: [B, C, height, width], as for `record`.
    """
    embeddings = [module for module in model.modules() if isinstance(module, PositionEncoding) and module.site == "tokens"]
    shares: dict[str, float] = {}
    first: list[Layer] = []

    def use(layer: Layer) -> None:
        if embeddings and not first:
            first.append(layer)
        share = layer_position_share(layer)
        if share or in_attention:
            shares[layer.name] = share

    in_attention = any(_acts_in_attention(module) for module in model.modules())
    for_each_layer(model, images, use)
    if first:
        found: list[Tensor] = []

        def without(layer: Layer) -> None:
            if not found:
                found.append(_spread(first[0], _logits(first[0].weights) - _logits(layer.weights)))
                found.append(_spread(layer, _logits(layer.weights)))

        with ExitStack() as stack:
            for module in embeddings:
                stack.callback(module.register_forward_hook(_without_tokens).remove)
            for_each_layer(model, images, without, position=False)
        shares["tokens"] = _ratio(*found)
    return shares


def layer_position_share(layer: Layer) -> float:
    """Return a recorded layer's share as of `position_shares`, 0 if position adds nothing; ValueError without `position`."""
    return _ratio(_spread(layer, layer.needed("position")), _spread(layer, _logits(layer.needed("content"))))


def _acts_in_attention(module: nn.Module) -> bool:
    """Return whether a module is an encoding that adds something in attention; a composition does not count, its parts do."""
    if not isinstance(module, PositionEncoding) or isinstance(module, Composition):
        return False
    return module.site == "attention" and module.at_larger_grid != "nothing"


def _without_tokens(module: nn.Module, args: tuple, terms: Terms) -> Terms:
    """Return `terms` with zeros in place of what the encoding adds to tokens: a forward hook of the encoding."""
    return terms._replace(tokens=None if terms.tokens is None else torch.zeros_like(terms.tokens))


def _logits(weights: Tensor) -> Tensor:
    """Return logits that give these weights: their logarithms, of 0 that of the smallest float32."""
    return weights.clamp(min=torch.finfo(torch.float32).tiny).log()


def _spread(layer: Layer, logits: Tensor) -> Tensor:
    """Return the root mean square (0-d) of logits [B, W, H, N, N] over visible pairs, after subtracting each query's mean."""
    real = layer.tokens >= 0
    pairs = (real[:, :, None] & real[:, None])[None, :, None]  # [1, W, 1, N, N]
    visible = (pairs if layer.visible is None else pairs & layer.visible).expand(logits.shape)
    count = visible.sum(-1, keepdim=True)
    mean = torch.where(visible, logits, 0.0).sum(-1, keepdim=True) / count.clamp(min=1)
    squares = torch.where(visible, logits - mean, 0.0).double().square().sum()
    return (squares / count.sum().clamp(min=1)).sqrt()


def _ratio(change: Tensor, spread: Tensor) -> float:
    return float(change / spread.clamp(min=1e-9)) if change > 0 else 0.0


def layer_statistics(layer: Layer) -> dict[str, float]:
    """Return statistics of a layer's attention, averaged over images, heads and the queries that are patches.

    attention_entropy: -sum p log p over all keys, prefix tokens and attended padding included, in nats.
    attention_span: exp of the entropy, a number of tokens.
    attention_distance: mean distance between the centers of query and key, in patches of this layer, over keys that are
    patches. Their weights are rescaled to sum to 1; queries without weight on patches are left out.
    attention_distance_share: the same distance in pixels, as a share of the image's diagonal.
    """
    grid, patches, weights = layer.grid, layer.patches, layer.weights
    queries = patches[None, :, None].expand(weights.shape[:-1])  # [B, W, H, N]
    entropy = torch.special.entr(weights).sum(-1)[queries].mean().item()

    at = layer.places.float()
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
    """Return the mean of `what` [B, W, H, N, N] over images, windows and visible pairs of patches that have the same offset.

    The result is [H, 2h-1, 2w-1] for an h x w window (or grid): the offset (dy, dx), query minus key, is at [:, dy + h-1, dx +
    w-1], NaN where no visible pair has it. In windows it is the offset of the slots.
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
    """Return the sum over keys of weights [B, W, H, N, N] times value [W, N, N], as [B, W, H, N]."""
    return torch.einsum("bwhij,wij->bwhi", weights, value)


def _stride(model: nn.Module, size: Size, grid: Grid) -> tuple[float, float]:
    """Return the pixels (h, w) between neighboring tokens of a layer with this grid, for an image of `size` (h, w) pixels."""
    patches = patch_grid(model, size)
    if patches is None:
        return size[0] / grid.h, size[1] / grid.w
    ratio = model.patch_embed.feat_ratio(as_scalar=False)
    # Merging halves the grid and rounds up: from 9 tokens to 5, 3, 2.
    y, x = (float(r * 2 ** math.ceil(math.log2(n / m))) for r, n, m in zip(ratio, patches, grid[:2], strict=True))
    return y, x


def _layer(call: LocatedCall, found: Seen, batch: int, position: bool) -> Layer:
    """Return the `Layer` of an attention of `batch` images, located by `call`; see `for_each_layer` for position=False."""
    logits, content = call.unflattened(found.logits, batch), None
    if position:
        content = logits if found.plain is None else call.unflattened(found.plain, batch)
    layer = _from_logits(call, logits, content, None if call.visible is None else call.visible[None])
    query, key = (call.unflattened(part, batch) for part in (found.query, found.key))
    return layer._replace(query=query, key=key, rotation=found.rotation, parameters=found.entered)


def _own_layer(
    name: str, module: Attention, qkv: Tensor, position: bool, terms: Terms, grid: Grid, mask: Tensor | None = None
) -> Layer:
    """Return the `Layer` of vitrel's attention `module` at path `name`, from the arguments of its forward.

    The tokens are given as `qkv` [..., 3C], the output of the first linear layer after `module.normalized`; `mask` is not used
    in windows, which have their own. position=False: as in `for_each_layer`.
    """
    call = own_call(name, module, grid, qkv.device)
    if call.window is None:
        q, k = (part[:, None] for part in module.heads(qkv)[:2])
        mask = None if mask is None else mask.expand(*q.shape[:1], *q.shape[2:-1], -1)[:, None]  # [B, 1, H, N, N]
    else:
        layout = windows(grid.h, grid.w, call.window, module.shift, qkv.device)
        n, grid = call.tokens.shape[1], Grid(*call.window)
        image = qkv if qkv.dim() == 3 else qkv.flatten(1, 2)  # [B, h*w, 3C]
        slots = image[:, layout.source].unflatten(2, (3, module.num_heads, -1)).unflatten(1, (-1, n))
        q, k, _ = slots.permute(3, 0, 1, 4, 2, 5).unbind(0)  # [B, W, H, N, D] each
        mask = call.visible[None]  # type: ignore[index]  # a window has it
    q, k, content = upcast(q), upcast(k), None
    with no_autocast(q.device):
        logits = masked_logits(q, k, terms, grid, mask)
        if position:
            content = masked_logits(q, k, Terms(scale=terms.scale), grid, mask)
    hidden = logits == float("-inf")
    layer = _from_logits(call, logits, content, ~hidden if bool(hidden.any()) else None)
    return layer._replace(query=q, key=k, rotation=terms.rotary or ())


def _from_logits(call: LocatedCall, logits: Tensor, content: Tensor | None, visible: Tensor | None = None) -> Layer:
    """Return a `Layer` from the masked logits [B, W, H, N, N] of the model.

    Args:
        content: logits without position under the same mask; None leaves out `content` and `position`.
        visible: bool, broadcastable to the logits, without regard to padding; None if every pair is visible.
    """
    where, real = (call.name, call.grid, call.window, call.shift, call.tokens), call.tokens >= 0  # [W, N]
    if not bool(real.all()):
        pairs = (real[:, :, None] & real[:, None])[None, :, None]  # [1, W, 1, N, N]
        visible = pairs if visible is None else pairs & visible
    visible = None if visible is None else visible.expand(logits.shape)
    weights = _softmax(logits, real)
    if content is None:
        return Layer(*where, weights, None, None, visible, logits=logits.float())
    position = (logits - content).float()
    position = position if visible is None else torch.where(visible, position, 0.0)
    return Layer(*where, weights, _softmax(content, real), position, visible, logits=logits.float())


def _softmax(logits: Tensor, real: Tensor) -> Tensor:
    """Return the softmax over keys; 0 for queries that see no key or are padding, where `real` [W, N] is False."""
    logits = logits.float()
    zero = (logits == float("-inf")).all(-1, keepdim=True) | ~real[None, :, None, :, None]
    return logits.masked_fill(zero, 0.0).softmax(-1).masked_fill(zero, 0.0)
