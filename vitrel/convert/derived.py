"""What a relativized model is: classes derived from those of timm at run time, replacing a few methods and nothing else.

The trunk's `_pos_embed` notes the grid and may fade the absolute embedding; the blocks recompute on the grid they had; the
attention's `forward` computes q, k and v as before and hands them to vitrel.ops with the terms of its own encoding.
"""

import functools
import types
from typing import SupportsIndex

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module, resample_abs_pos_embed
from timm.models._manipulate import checkpoint
from timm.models.eva import Eva
from torch import Tensor, nn

from vitrel.grid import Grid
from vitrel.models.backbone import Backbone
from vitrel.ops import attention
from vitrel.position import Terms, combine


@register_notrace_module  # a leaf of fx graphs, which notes the grid when the graph runs
class GridRecord(nn.Module):
    """The grid of the tokens now in the blocks, which receive tokens only. One per model, copied with it."""

    grid: Grid | None = None

    def forward(self, x: Tensor, prefix: int) -> Tensor:
        """x: [B, h, w, C] before `prefix` tokens are added to it, given back."""
        if x.dim() != 4:
            raise ValueError(
                f"patch_embed must give [B, h, w, C], not {tuple(x.shape)}: keep its flatten=False and NHWC format"
            )
        self.grid = Grid(x.shape[1], x.shape[2], prefix)
        return x


class Derived:
    """Abstract: a class made at run time from a mixin and a class of timm, whose objects can be copied and pickled."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple:
        return _revive, type(self).__bases__, self.__dict__


class RelativeTrunk(Derived):
    """The model: as it was, but for `_pos_embed`, and for what is said about its new parameters."""

    def _pos_embed(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor | None]:
        x = self.grid_record(x, self.num_prefix_tokens)
        grid = Grid(x.shape[1], x.shape[2], self.num_prefix_tokens)
        own = getattr(self, "rope", None)
        rope = None if own is None else own.get_embed(shape=(grid.h, grid.w))
        second = "dist_token" if hasattr(self, "dist_token") else "reg_token"
        tokens = [getattr(self, name) for name in ("cls_token", second) if getattr(self, name) is not None]
        prefix = [token.expand(x.shape[0], -1, -1) for token in tokens]
        x, absolute = x.flatten(1, 2), self._absolute(grid)
        if self.no_embed_class and absolute is not None:
            x = x + absolute
        x = torch.cat((*prefix, x), 1)  # [B, N, C]
        if not self.no_embed_class and absolute is not None:
            x = x + absolute
        x = self.pos_drop(x)
        return (x, rope) if isinstance(self, Eva) else x

    def _absolute(self, grid: Grid) -> Tensor | None:
        if self.pos_embed is None:
            return None
        prefix = 0 if self.no_embed_class else grid.prefix
        rows = resample_abs_pos_embed(self.pos_embed, grid[:2], self.patch_embed.grid_size, prefix)
        return rows if self.absolute_fade is None else self.absolute_fade(rows)

    def no_weight_decay(self) -> set[str]:
        """timm's names and those of the position parameters."""
        # mypy does not see the class of timm that is joined to a mixin: its methods are `type: ignore[misc]`
        return set(super().no_weight_decay()) | Backbone.position_parameters(self)  # type: ignore[misc]

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the blocks in the backward pass, each on the grid of its own forward pass."""
        super().set_grad_checkpointing(enable)  # type: ignore[misc]
        self.grad_checkpointing = False  # timm would recompute a block on whatever grid came last
        for block in self.blocks:
            block.grad_checkpointing = enable


class RelativeBlock(Derived):
    """The block: as it was, but for gradient checkpointing."""

    grad_checkpointing = False

    def forward(self, x: Tensor, **context: Tensor | bool | None) -> Tensor:
        if not self.grad_checkpointing:
            return super().forward(x, **context)  # type: ignore[misc]
        return checkpoint(self._on_grid, x, self.attn.grid_record.grid, **context)

    def _on_grid(self, x: Tensor, grid: Grid, **context: Tensor | bool | None) -> Tensor:
        if not torch.compiler.is_compiling():  # a graph recomputes what it computed
            self.attn.grid_record.grid = grid
        return super().forward(x, **context)  # type: ignore[misc]


class RelativeForward(Derived):
    """The attention: q, k and v as they were, then vitrel.ops.attention with `position` and the rope given."""

    def forward(
        self, x: Tensor, *, rope: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """x: [B, N, C]. attn_mask as in scaled_dot_product_attention; is_causal: a token sees itself and those before it."""
        grid = self.grid_record.grid
        if not torch.compiler.is_compiling() and (grid is None or x.shape[1] != grid.tokens):
            raise ValueError(
                f"attention got {x.shape[1]} tokens, but the model's last grid is {grid}: call the whole model, keep all its "
                "tokens, and switch checkpointing on by model.set_grad_checkpointing()"
            )
        q, k, v = self._project(x)
        terms = self.position(grid)
        if rope is not None:
            terms = combine(terms, Terms(rotary=_rotary(rope, grid, self.rotate_half)))
            if not self.rotate_half:
                q, k = _halves(q), _halves(k)
        if is_causal:
            if attn_mask is not None:
                raise ValueError("attn_mask and is_causal exclude each other: put the causal part into the mask")
            attn_mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        dropout = self.attn_drop.p if self.training else 0.0
        out = attention(q, k, v, terms, grid, attn_mask, dropout).transpose(1, 2).flatten(2)  # [B, N, H*D]
        out = self.norm(out)
        if self.gate is not None:
            out = out * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(out))

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, [B, H, N, D] each."""
        if self.qkv is None:  # one tensor all the same: SDPA's compiled backward mistakes the strides of q, k and v that differ
            qkv = torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), -1)
        elif getattr(self, "q_bias", None) is None:
            qkv = self.qkv(x)
        else:
            bias = torch.cat((self.q_bias, self.k_bias, self.v_bias))
            qkv = self.qkv(x) + bias if self.qkv_bias_separate else F.linear(x, self.qkv.weight, bias)
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        return self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype), v


def _rotary(rope: Tensor, grid: Grid, half: bool) -> tuple[Tensor, Tensor]:
    """timm's sines and cosines, [(H,) h*w, 2D], as Terms.rotary: (cos, sin), [H|1, N, D/2] each."""
    rope = rope if rope.dim() == 3 else rope[None]
    sin, cos = (t.chunk(2, -1)[0] if half else t[..., ::2] for t in rope.chunk(2, -1))  # each angle stands there twice
    rows = (0, 0, grid.prefix, 0)
    return F.pad(cos, rows, value=1.0), F.pad(sin, rows)


def _halves(x: Tensor) -> Tensor:
    """Channels from interleaved pairs (2p, 2p + 1) to pairs (p, p + D/2): the same for q and k, so q . k stays."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


@functools.cache
def derive(mixin: type, base: type) -> type:
    """The class `base` with the methods of `mixin`, one class per pair."""
    name = f"Relativized{base.__name__}"
    derived = types.new_class(name, (mixin, base), exec_body=lambda body: body.update(__module__=__name__))
    return register_notrace_module(derived) if mixin is RelativeForward else derived  # a leaf: it computes with sizes


def _revive(mixin: type, base: type) -> Derived:
    derived = derive(mixin, base)
    return derived.__new__(derived)
