"""`vitrel.optimize`: evaluation on a CPU without waste, opt-in and in place, with the numbers of the plain model.

What it changes, measured in docs/performance.md: linear layers run through oneDNN where that is faster, with the exact GELU
inside the first product of an MLP; blocks go through a batch in chunks that stay in the cache, so that neither the hidden layer
of an MLP nor q, k and v of all images ever exist at once; residuals are added in place; terms and expanded biases are computed
once per grid and version of the weights, windows with the same mask share one bias, and long global attention is oneDNN's too.

Modules get a subclass of their own class, so that names, state dict and isinstance stay. Its forward returns to the class above
whenever anything else than evaluation is asked of it: gradients, training, torch.compile, export, tracing, hooks, autocast.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from timm.layers import Mlp
from torch import Tensor, nn

from vitrel.grid import Grid
from vitrel.layers import Attention, Block
from vitrel.models.kept import Kept, KeptPosition, KeptTerms, elsewhere, watched
from vitrel.ops.dispatch import chosen
from vitrel.ops.onednn import LinearFunction, MlpFunction, blockwise_attention, chunks, mlp, onednn_is_faster, product, takes
from vitrel.ops.reference import gather_bias
from vitrel.ops.rows import expanded
from vitrel.ops.sdpa import prepare
from vitrel.ops.triton_backend import lattice_bias
from vitrel.ops.window_kinds import window_kinds
from vitrel.position import PositionEncoding, Terms

_LONG = 512  # tokens from which attention runs in blocks of queries, with products of its own
_LARGE = 4096  # tokens above which expanded biases, 25 MB a block of ViT-B there, are not kept: expanding takes 3 % of the time


def optimize(model: nn.Module, training: bool = False, linears: str = "auto") -> nn.Module:
    """Makes evaluation of `model` on a CPU faster, in place; returns it. Outputs stay within 2e-6 of what they were (float32).

    Acts on every nn.Linear and timm Mlp of any model, and on the blocks of vitrel's own. Active in model.eval() without
    gradients (torch.no_grad, torch.inference_mode), in float32 or bfloat16 (its linear layers where oneDNN has bfloat16, which
    takes AVX-512 or its like); everything else runs as before.
    training: linear layers use oneDNN, with its products in the backward pass, also while gradients are recorded (float32).
    linears: "onednn", "torch", or "auto", which times both here and takes the faster.
    Changed weights are noticed, but for those written through `.data` or made in inference mode: call `refresh` after that.
    `restore` undoes all of it. Raises ValueError for another value of `linears`, or where this torch has no oneDNN.
    """
    if linears not in ("auto", "onednn", "torch"):
        raise ValueError(f"linears={linears!r} is unknown; choose one of auto, onednn, torch")
    if linears == "onednn" and not torch.backends.mkldnn.is_available():
        raise ValueError("this build of torch has no oneDNN; use linears='auto' or 'torch'")
    restore(model)
    onednn, layouts = linears == "onednn" or (linears == "auto" and onednn_is_faster(model)), Kept()
    for module in model.modules():
        for fast in _FAST:
            if type(module) is fast.__bases__[0] and (onednn or fast is FastBlock):
                module.__class__ = fast
                module.__dict__["_fast"] = _State(onednn, training, layouts)
        if type(module) is FastLinear:
            module.__dict__["__module__"] = nn.Linear.__module__  # by which fx takes it for a leaf, as nn.Linear
        if isinstance(module, PositionEncoding):
            module.forward = KeptPosition(module)
    return model


def restore(model: nn.Module) -> nn.Module:
    """The plain model again, in place."""
    for module in model.modules():
        if type(module) in _FAST:
            del module.__dict__["_fast"]
            module.__dict__.pop("__module__", None)
            module.__class__ = type(module).__bases__[0]
        if isinstance(vars(module).get("forward"), KeptPosition):
            del module.__dict__["forward"]
    return model


def refresh(model: nn.Module) -> None:
    """Drops all that an optimized model keeps; the next call computes it anew."""
    for module in model.modules():
        if isinstance(vars(module).get("forward"), KeptPosition):
            module.forward.kept.clear()


class _State(NamedTuple):
    onednn: bool
    training: bool
    layouts: Kept  # of windows, for all blocks of a model


class FastLinear(nn.Linear):
    """nn.Linear through oneDNN."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if _off(self, x, self) or not takes(x.dtype):
            return super().forward(x)
        return (LinearFunction.apply if torch.is_grad_enabled() else product)(x, self.weight, self.bias)


class FastMlp(Mlp):
    """timm's Mlp with the GELU inside the first product, a chunk of tokens at a time."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., C']."""
        if not _is_gelu_mlp(self) or watched(self) or _off(self, x, self.fc1) or not takes(x.dtype):
            return super().forward(x)
        weights = self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias
        run = MlpFunction.apply if torch.is_grad_enabled() else mlp
        return run(x.reshape(-1, x.shape[-1]), *weights).view(*x.shape[:-1], -1)


class FastBlock(Block):
    """A block that evaluates a few images at a time and keeps what position adds."""

    def forward(self, x: Tensor, terms: Terms, grid: Grid, mask: Tensor | None = None) -> Tensor:
        """See Block.forward."""
        if torch.is_grad_enabled() or mask is not None or type(grid) is not Grid or type(self.attn) is not Attention:
            return super().forward(x, terms, grid, mask)
        # Each part says by itself whether it is in training: dropout in an evaluated model is a method too.
        if any(part.training for part in self.modules()) or _off(self, x, self.attn.qkv) or watched(self):
            return super().forward(x, terms, grid)
        tokens = x.reshape(x.shape[0], -1, x.shape[-1])
        out = torch.empty_like(tokens, memory_format=torch.contiguous_format)
        for images in chunks(len(tokens), 6 * tokens[0].numel()):  # q, k and v, twice where there are windows
            own = tokens[images]
            qkv = self.attn.qkv(own if self.post_norm else self.norm1(own))
            qkv = self.attn._cosine(qkv) if self.attn.cosine else qkv
            branch = self.attn.proj(self._attend(qkv, terms, grid))
            torch.add(own, self.norm1(branch) if self.post_norm else self.ls1(branch), out=out[images])
        rows = out.view(-1, x.shape[-1])
        for part in chunks(len(rows), 4 * x.shape[-1]):
            own = rows[part]
            own += self.norm2(self.mlp(own)) if self.post_norm else self.ls2(self.mlp(self.norm2(own)))
        return out.view(x.shape)

    def _attend(self, qkv: Tensor, terms: Terms, grid: Grid) -> Tensor:
        """[b, N, 3C] -> [b, N, C]."""
        kept = terms.expanded if isinstance(terms, KeptTerms) and {self.attn.backend, chosen["auto"]} == {"auto"} else None
        if kept is not None and _biases_alone(terms):
            if self.window is not None:
                return self._in_windows(qkv, terms, grid)
            if grid.tokens < _LONG:
                q, k, v, scale = self._split(qkv, terms, grid)
                mask = kept.get_or_make(q.dtype, 4, lambda: _mask(terms, grid, q.dtype))
                return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale).transpose(1, 2).flatten(2)
            if self._fast.onednn and qkv.dtype == torch.float32:
                q, k, v, scale = self._split(qkv, terms, grid)
                most = 4 if grid.tokens <= _LARGE else 0
                lines = kept.get_or_make("lines", most, lambda: _lines(terms, grid))
                return blockwise_attention(q * scale, k, v, lines, grid)
        return self.attn._attend(qkv, terms, grid, None)

    def _in_windows(self, qkv: Tensor, terms: Terms, grid: Grid) -> Tensor:
        """The same with windows sorted by their masks, of which there are at most nine."""
        window, shift = self.window, self.attn.shift
        key = grid, window, shift, len(qkv)
        layout = self._fast.layouts.get_or_make(key, 32, lambda: window_kinds(*key))
        qkv = qkv.flatten(0, 1).index_select(0, layout.source).unflatten(0, (-1, window.tokens))
        q, k, v, scale = self._split(qkv, terms, window)  # [L, H, N, D], of all images
        masks = terms.expanded.get_or_make((grid, shift, q.dtype), 4, lambda: _masks(terms, window, layout.visible, q))
        out, at = torch.empty_like(v.transpose(1, 2), memory_format=torch.contiguous_format), 0  # [L, N, H, D]
        for mask, count in zip(masks, layout.counts, strict=True):
            own = slice(at, at + count)
            out[own] = F.scaled_dot_product_attention(q[own], k[own], v[own], attn_mask=mask, scale=scale).transpose(1, 2)
            at += count
        return out.view(-1, v.shape[1] * v.shape[3]).index_select(0, layout.inverse).unflatten(0, (-1, grid.tokens))

    def _split(self, qkv: Tensor, terms: Terms, place: Grid) -> tuple[Tensor, Tensor, Tensor, float]:
        """[b, N, 3C] -> q, k, v [b, H, N, D] with what position does to them, and the scale of the logits."""
        q, k, v = qkv.unflatten(-1, (3, self.attn.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        q, k, _, scale = prepare(q, k, terms._replace(tables=()), place)
        return q, k, v, scale


_FAST = (FastLinear, FastMlp, FastBlock)


def _biases_alone(terms: Terms) -> bool:
    parts = [part for table in terms.tables for part in (table.query, table.key, table.value, table.gated)]
    return terms.key_rotary is None and all(part is None for part in parts)


def _mask(terms: Terms, grid: Grid, dtype: torch.dtype) -> Tensor | None:
    """All biases on a grid, [1, H, N, N]."""
    bias = lattice_bias(terms, grid)
    return None if bias is None else gather_bias(bias, grid.index()).to(dtype)[None]


def _masks(terms: Terms, window: Grid, visible: Tensor, q: Tensor) -> list[Tensor | None]:
    """Biases and mask of each kind of window, [1, H, N, N]; None where there is neither."""
    bias = _mask(terms, window, q.dtype)
    zero = q.new_zeros(1, q.shape[1], window.tokens, window.tokens)
    return [bias if seen.all() else (zero if bias is None else bias).masked_fill(~seen, float("-inf")) for seen in visible]


def _lines(terms: Terms, grid: Grid) -> tuple[Tensor, Tensor] | None:
    bias = lattice_bias(terms, grid)
    return None if bias is None else expanded(bias.float(), grid)


def _off(module: nn.Module, x: Tensor, linear: nn.Linear) -> bool:
    """Whether a call has to go the plain way, because of its tensors or of what is done with it."""
    learns = module.training or torch.is_grad_enabled()
    return (
        elsewhere()
        or (learns and not (module._fast.training and x.dtype == torch.float32))
        or type(x) is not Tensor  # a proxy, a fake or a subclass
        or type(linear.weight) is not nn.Parameter
        or x.device.type != "cpu"
        or x.dtype not in (torch.float32, torch.bfloat16)
        or linear.weight.dtype != x.dtype
        or x.dim() < 2
        or not x.numel()
        or x.shape[-1] != linear.weight.shape[1]
    )


def _is_gelu_mlp(mlp: Mlp) -> bool:
    linear = isinstance(mlp.fc1, FastLinear) and isinstance(mlp.fc2, FastLinear)
    drops = any(drop.training and drop.p for drop in (mlp.drop1, mlp.drop2))
    return linear and not drops and type(mlp.act) is nn.GELU and mlp.act.approximate == "none" and type(mlp.norm) is nn.Identity
