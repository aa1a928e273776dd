"""Recorded attention: the weights of every layer of a model for a batch of images (`record`), and their statistics.

The model runs in evaluation mode and uncompiled, with hooks on its attention, which are removed afterwards, also after an
error. For vitrel's layers the logits are computed from the projected tokens; for timm's they are read where the code of the
layer calls softmax or scaled_dot_product_attention.

Classes of timm that are covered, each without its subclasses: timm.layers.Attention (ViT, DeiT, FlexiViT, hybrids),
AttentionRope and EvaAttention (EVA, RoPE-ViT, DINOv3, PE), BEiT's Attention, RelPosAttention, ParallelScalingBlock, and
WindowAttention of Swin V1 and V2. The logits of all of them are split into content and position: biases are
read from the module, and a layer with a rotation runs a second time without it.
"""

import math
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import Attention as TimmAttention
from timm.layers import AttentionRope
from timm.models.beit import Attention as BeitAttention
from timm.models.eva import EvaAttention
from timm.models.swin_transformer import SwinTransformerBlock
from timm.models.swin_transformer_v2 import SwinTransformerV2Block
from timm.models.vision_transformer import ParallelScalingBlock
from timm.models.vision_transformer_relpos import RelPosAttention
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from vitrel.common.modules import evaluating
from vitrel.common.sizes import Size
from vitrel.grid import Grid
from vitrel.inspect.any_model import coordinate_bias, model_name, patch_grid
from vitrel.layers import Attention
from vitrel.ops.reference import masked_logits
from vitrel.ops.window import axis_shift, windows
from vitrel.position import PositionEncoding, Terms
from vitrel.position.terms import Composition, no_autocast, upcast

NEGLIGIBLE = 0.01  # share of `position_shares` below which position is said to do nothing

_GLOBAL = (TimmAttention, AttentionRope, EvaAttention, BeitAttention, RelPosAttention, ParallelScalingBlock)
_WINDOWED = (SwinTransformerBlock, SwinTransformerV2Block)


class Layer(NamedTuple):
    """Attention of one layer for a batch of images, in W windows of N slots each (W = 1 where attention is global).

    `weights` are those of the model. `content` are the weights without position: the softmax of the same q and k under the same
    mask, without tables, rotation and query bias. A field of view (xpos, lookhere) is a table, so `content` includes the keys
    it hides. A factor that depends on the grid (log_n, yarn: `Terms.temperature`) is 1 in `content`; a constant factor
    (deberta) and the learned scale of cosine attention remain, and so does what position adds to tokens. `position` is what
    position adds to the logits inside attention.
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

    @property
    def patches(self) -> Tensor:
        """[W, N] bool: slots that hold a patch of the image, neither padding nor a prefix token."""
        return self.tokens >= self.grid.prefix

    @property
    def places(self) -> Tensor:
        """[W, N, 2] (row, column) of the patch in each slot; of no meaning for padding and prefix tokens."""
        at = (self.tokens - self.grid.prefix).clamp(min=0)
        return torch.stack((at // self.grid.w, at % self.grid.w), -1)

    def needed(self, what: str) -> Tensor:
        """The layer's "content" or "position"; ValueError if it was left out in recording."""
        values = getattr(self, what)
        if values is None:
            raise ValueError(f"{self.name} was recorded without {what}: use vitrel.inspect.attention.record")
        return values

    def cpu(self) -> "Layer":
        """The same layer with every tensor on the CPU."""
        return Layer._make(field.cpu() if isinstance(field, Tensor) else field for field in self)


def record(model: nn.Module, images: Tensor) -> list[Layer]:
    """Run images [B, C, height, width] through `model` and return its attention layers in the order they run, on the CPU.

    Args:
        model: one of vitrel, any model with vitrel's layers, or one of timm with the layers listed at the top of this file.
        images: of a size that the model takes. Memory: 13 bytes for each pair of tokens of each window, head, image and layer.

    Raises:
        ValueError: none of the model's attention can be recorded, or its tokens cannot be located in the image.
    """
    layers = []
    for_each_layer(model, images, lambda layer: layers.append(layer.cpu()))
    return layers


def for_each_layer(model: nn.Module, images: Tensor, use: Callable[[Layer], None], position: bool = True) -> None:
    """Call use(layer) as each attention layer runs, with tensors on the model's device; nothing is stored.

    Arguments, order and errors are those of `record`. position False: leave out `content` and `position`, which saves time
    and memory.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    size = images.shape[-2], images.shape[-1]

    def use_placed(layer: Layer) -> None:
        use(layer._replace(stride=_stride(model, size, layer.grid), image=size))

    found = False
    with ExitStack() as stack:
        stack.enter_context(evaluating(model))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        logits = _LogitsRecorder()
        for hooks in (_own_hooks(model, use_placed, position), _timm_hooks(model, size, use_placed, position, logits)):
            stack.callback(_remove, hooks)
            found = found or bool(hooks)
        if not found:
            raise ValueError(
                f"no attention that can be seen in {model_name(model)}: its layers are neither vitrel's nor among those of "
                "timm that vitrel.inspect.attention lists"
            )
        # Not inference mode: a tensor that a model caches here could not be used in training afterwards.
        with torch.no_grad(), logits:
            model(images)


def attention_statistics_of(model: nn.Module, images: Tensor) -> dict[str, float]:
    """Mean of `layer_statistics` over the layers of `model`, except for attention_span, the exp of the mean entropy.

    images [B, C, height, width] as for `record`. One layer is in memory at a time.
    """
    statistics: list[dict[str, float]] = []
    for_each_layer(model, images, lambda layer: statistics.append(layer_statistics(layer)), position=False)
    mean = {name: sum(layer[name] for layer in statistics) / len(statistics) for name in statistics[0]}
    return mean | {"attention_span": math.exp(mean["attention_entropy"])}


def position_shares(model: nn.Module, images: Tensor) -> dict[str, float]:
    """Return how much position changes attention: {layer: share}, and {"tokens": share} for an embedding of a vitrel model.

    The share of a layer is the root mean square of what position adds to its logits, divided by that of the logits without it,
    over images, heads and visible pairs; each query's mean over its keys is subtracted from both, since softmax ignores it.
    The share of an embedding compares the logits of the first layer with and without it in the same way. Shares below
    NEGLIGIBLE have no visible effect.

    A layer in which position adds nothing has the share 0 if an encoding of vitrel acts in the model's attention, and is left
    out otherwise. Embeddings of timm's models are not measured. {} for a model without position.

    Args:
        model: of vitrel or timm.
        images: [B, C, height, width], as for `record`.
    """
    embeddings = [module for module in model.modules() if isinstance(module, PositionEncoding) and module.site == "tokens"]
    own = any(isinstance(module, PositionEncoding) and module.at_larger_grid != "nothing" for module in model.modules())
    shares: dict[str, float] = {}
    first: list[Layer] = []

    def use(layer: Layer) -> None:
        if embeddings and not first:
            first.append(layer)
        share = layer_position_share(layer)
        if share or (own and in_attention):
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
    """The share of `position_shares` of one recorded layer; 0 if position adds nothing, ValueError if it was not recorded."""
    return _ratio(_spread(layer, layer.needed("position")), _spread(layer, _logits(layer.needed("content"))))


def _acts_in_attention(module: nn.Module) -> bool:
    """Whether a module is an encoding, not a composition, that adds to attention."""
    if not isinstance(module, PositionEncoding) or isinstance(module, Composition):
        return False
    return module.site == "attention" and module.at_larger_grid != "nothing"


def _without_tokens(module: nn.Module, args: tuple, terms: Terms) -> Terms:
    """Forward hook of an encoding that adds zeros to the tokens."""
    return terms._replace(tokens=None if terms.tokens is None else torch.zeros_like(terms.tokens))


def _logits(weights: Tensor) -> Tensor:
    """Logits up to a constant per query, from the weights that they give."""
    return weights.clamp(min=torch.finfo(torch.float32).tiny).log()


def _spread(layer: Layer, logits: Tensor) -> Tensor:
    """Root mean square of logits [B, W, H, N, N] over visible pairs, each query's mean over its keys subtracted; 0-d."""
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
    """Entropy, span and distance of a layer's attention, averaged over images, heads and queries that are patches.

    attention_entropy: -sum p log p over all keys, prefix tokens and attended padding included, in nats. attention_span: exp of
    the entropy, a number of tokens. attention_distance: mean distance between the centers of query and key in patches of this
    layer, over keys that are patches, with their weights rescaled to sum to 1 (queries without weight on patches are left out).
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
    """Mean of `what` [B, W, H, N, N] over images, windows and visible pairs of patches with the same offset.

    Returns [H, 2h-1, 2w-1] for an h x w window (or grid): the offset (dy, dx), query minus key, at [:, dy + h-1, dx + w-1], NaN
    where no visible pair has it. With windows it is the offset of slots in the window.
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


def _stride(model: nn.Module, size: Size, grid: Grid) -> tuple[float, float]:
    patches = patch_grid(model, size)
    if patches is None:
        return size[0] / grid.h, size[1] / grid.w
    ratio = model.patch_embed.feat_ratio(as_scalar=False)
    # Merging halves the grid and rounds up: from 9 tokens to 5, 3, 2.
    y, x = (float(r * 2 ** math.ceil(math.log2(n / m))) for r, n, m in zip(ratio, patches, grid[:2], strict=True))
    return y, x


_Where = tuple[str, Grid, Size | None, Size, Tensor]  # the fields of Layer from name to tokens


def _from_logits(where: _Where, logits: Tensor, content: Tensor | None, visible: Tensor | None = None) -> Layer:
    """A Layer from the model's masked logits [B, W, H, N, N].

    Args:
        content: logits without position under the same mask, or None to leave out content and position.
        visible: bool, broadcastable to the logits, without regard to padding; None if every pair is visible.
    """
    real = where[-1] >= 0  # [W, N]
    if not bool(real.all()):
        pairs = (real[:, :, None] & real[:, None])[None, :, None]  # [1, W, 1, N, N]
        visible = pairs if visible is None else pairs & visible
    visible = None if visible is None else visible.expand(logits.shape)
    weights = _softmax(logits, real)
    if content is None:
        return Layer(*where, weights, None, None, visible)
    position = (logits - content).float()
    position = position if visible is None else torch.where(visible, position, 0.0)
    return Layer(*where, weights, _softmax(content, real), position, visible)


def _softmax(logits: Tensor, real: Tensor) -> Tensor:
    """Softmax over keys; 0 in rows of padding and of fully masked queries, as in `vitrel.ops.attention`."""
    logits = logits.float()
    zero = (logits == float("-inf")).all(-1, keepdim=True) | ~real[None, :, None, :, None]
    return logits.masked_fill(zero, 0.0).softmax(-1).masked_fill(zero, 0.0)


def _remove(hooks: list[RemovableHandle]) -> None:
    for hook in hooks:
        hook.remove()


def _own_hooks(model: nn.Module, use: Callable[[Layer], None], position: bool) -> list[RemovableHandle]:
    """Hook each `Attention` (vitrel's) in `model` to call use(layer) after it runs.

    Args:
        position: record `content` and `position` too.
    """

    def hook(name: str, module: Attention) -> list[RemovableHandle]:
        projected: list[Tensor] = []  # output of the linear layer, [..., 3C]

        def record(_: nn.Module, args: tuple, kwargs: dict[str, Any], out: Tensor) -> None:
            use(_own_layer(name, module, module.normalized(projected.pop()), position, *args, **kwargs))

        return [
            module.qkv.register_forward_hook(lambda _, args, out: projected.append(out)),
            module.register_forward_hook(record, with_kwargs=True),
        ]

    modules = [(name, module) for name, module in model.named_modules() if isinstance(module, Attention)]
    return [handle for name, module in modules for handle in hook(name, module)]


def _own_layer(
    name: str,
    module: Attention,
    qkv: Tensor,
    position: bool,
    x: Tensor,
    terms: Terms,
    grid: Grid,
    mask: Tensor | None = None,
) -> Layer:
    """A Layer of vitrel's attention, from its projected tokens `qkv` and the arguments of its forward."""
    if module.window is None:
        q, k, _ = module.heads(qkv)
        tokens = torch.arange(grid.tokens, device=x.device)[None]
        visible = None if mask is None else mask.expand(*q.shape[:-1], -1)[:, None]  # [B, 1, H, N, N]
        return _own_logits((name, grid, None, (0, 0), tokens), q[:, None], k[:, None], terms, grid, visible, position)
    window, shift, n = module.window, module.shift, module.window[0] * module.window[1]
    layout = windows(grid.h, grid.w, window, shift, x.device)
    tokens = torch.full_like(layout.source, -1)
    tokens[layout.inverse] = torch.arange(grid.tokens, device=x.device)
    image = qkv if qkv.dim() == 3 else qkv.flatten(1, 2)  # [B, h*w, 3C]
    slots = image[:, layout.source].unflatten(2, (3, module.num_heads, -1)).unflatten(1, (-1, n))
    q, k, _ = slots.permute(3, 0, 1, 4, 2, 5).unbind(0)  # [B, W, H, N, D] each
    shifted = tuple(axis_shift(*axis) for axis in zip(grid[:2], window, shift, strict=True))
    where = name, grid, window, shifted, tokens.unflatten(0, (-1, n))
    visible = layout.visible.unflatten(0, (-1, n))[None, :, None]  # [1, W, 1, N, N]
    return _own_logits(where, q, k, terms, Grid(*window), visible, position)


def _own_logits(where: _Where, q: Tensor, k: Tensor, terms: Terms, grid: Grid, mask: Tensor | None, position: bool) -> Layer:
    q, k = upcast(q), upcast(k)
    bare = Terms(scale=terms.scale)
    with no_autocast(q.device):
        logits = masked_logits(q, k, terms, grid, mask)
        content = masked_logits(q, k, bare, grid, mask) if position else None
    hidden = logits == float("-inf")
    return _from_logits(where, logits, content, ~hidden if bool(hidden.any()) else None)


def _timm_hooks(
    model: nn.Module, size: Size, use: Callable[[Layer], None], position: bool, recorder: "_LogitsRecorder"
) -> list[RemovableHandle]:
    """Hook timm's attention layers in `model` to call use(layer) after they run, with the logits that `recorder` saw last.

    Args:
        size: of the image, (h, w) in pixels.
        position: record `content` and `position` too.

    Raises:
        ValueError: here or in the model's forward: the tokens of a layer cannot be located in the image.
    """

    def hook(name: str, module: nn.Module) -> RemovableHandle:
        windowed = type(module) in _WINDOWED
        read = partial(_window, f"{name}.attn", module) if windowed else partial(_global, name, module, _grid(model, size))

        def record(_: nn.Module, args: tuple, kwargs: dict[str, Any], out: Tensor) -> None:
            extra = next((value for value in (*args[1:], *kwargs.values()) if isinstance(value, Tensor)), None)
            use(read(recorder.logits, position, args[0], extra))

        return module.register_forward_hook(record, with_kwargs=True)

    return [hook(name, module) for name, module in model.named_modules() if type(module) in (*_GLOBAL, *_WINDOWED)]


def _global(name: str, module: nn.Module, grid: Grid, logits: Tensor, position: bool, x: Tensor, extra: Tensor | None) -> Layer:
    """A Layer of global attention.

    Args:
        extra: a rotation or bias shared by all layers, which blocks pass beside x.
    """
    if logits.shape[-1] != grid.tokens:
        expected = f"{grid.h}x{grid.w} patches and {grid.prefix} prefix tokens"
        raise ValueError(f"the {logits.shape[-1]} tokens of {name} cannot be placed on the image, which has {expected}")
    tokens = torch.arange(grid.tokens, device=logits.device)[None]
    content = _without_position(module, logits, x, extra)[:, None] if position else None
    return _from_logits((name, grid, None, (0, 0), tokens), logits[:, None], content)


def _without_position(module: nn.Module, logits: Tensor, x: Tensor, extra: Tensor | None) -> Tensor:
    """Logits [B, H, N, N] of a global layer without its rotation or bias."""
    if isinstance(module, AttentionRope | EvaAttention) and extra is not None:
        with suppress(_EnoughError), _LogitsRecorder(stop=True) as recorder:
            module.forward(x)
        return recorder.logits
    if isinstance(module, BeitAttention) and module.relative_position_bias_table is not None:
        logits = logits - module._get_rel_pos_bias()
    if isinstance(module, RelPosAttention) and module.rel_pos is not None:
        logits = logits - module.rel_pos.get_bias()
    return logits - extra if isinstance(module, BeitAttention | RelPosAttention) and extra is not None else logits


def _window(name: str, block: nn.Module, logits: Tensor, position: bool, x: Tensor, extra: Tensor | None) -> Layer:
    """A Layer of Swin's windows. timm rolls the image before it pads: wrapped rows and columns come before the padding."""
    (batch, h, w), window, shift = x.shape[:3], tuple(block.window_size), tuple(block.shift_size)
    at = torch.arange(h * w, device=x.device).view(h, w).roll([-s for s in shift], (0, 1))
    at = F.pad(at, (0, -w % window[1], 0, -h % window[0]), value=-1)
    tokens = at.unfold(0, window[0], window[0]).unfold(1, window[1], window[1]).flatten(2).flatten(0, 1)  # [W, N]
    mask = block.get_attn_mask(x.new_zeros(1, *at.shape, 1))  # [W, N, N], 0 or -100
    logits = logits.unflatten(0, (batch, -1))  # [B, W, H, N, N]
    content = logits - _window_bias(block.attn) if position else None
    visible = None if mask is None else (mask == 0)[None, :, None]
    return _from_logits((name, Grid(h, w), window, shift, tokens), logits, content, visible)


def _window_bias(attn: nn.Module) -> Tensor:
    """Bias [H, N, N] of a Swin layer; in V2 computed by its MLP (arXiv 2111.09883, eq. 3 and its code)."""
    if hasattr(attn, "relative_position_bias_table"):
        return attn._get_rel_pos_bias()[0]
    rows = coordinate_bias(attn, attn).flatten(0, -2)  # [R, H]
    return rows[attn.relative_position_index].permute(2, 0, 1)


def _grid(model: nn.Module, size: Size) -> Grid:
    patches = patch_grid(model, size)
    if patches is None or not hasattr(model, "num_prefix_tokens"):
        raise ValueError(f"the tokens of {model_name(model)} cannot be placed on the image: it has no patch_embed of timm")
    return Grid(*patches, model.num_prefix_tokens)


class _EnoughError(Exception):
    """Raised to stop a forward pass once its logits are recorded."""


class _LogitsRecorder(TorchFunctionMode):
    """Records the logits of the last softmax or scaled_dot_product_attention; with `stop`, the pass ends at the first one."""

    logits: Tensor

    def __init__(self, stop: bool = False):
        super().__init__()
        self.stop = stop

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        seen = func in (torch.softmax, F.softmax, Tensor.softmax)
        if seen:
            self.logits = args[0]
        elif func is F.scaled_dot_product_attention:
            seen = True
            self.logits = _fused_logits(*args, **kwargs)
        if seen and self.stop:
            raise _EnoughError
        return func(*args, **kwargs)


def _fused_logits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **how: Any,
) -> Tensor:
    """Logits [..., N, N] of scaled_dot_product_attention, with its mask. dropout_p is not used: nothing is dropped here."""
    scale = how.get("scale") or q.shape[-1] ** -0.5
    if how.get("enable_gqa"):
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
    logits = (q * scale) @ k.mT
    if is_causal:
        attn_mask = torch.ones_like(logits[0, 0], dtype=torch.bool).tril()
    if attn_mask is None:
        return logits
    return logits.masked_fill(~attn_mask, float("-inf")) if attn_mask.dtype == torch.bool else logits + attn_mask
