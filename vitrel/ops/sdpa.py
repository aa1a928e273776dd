"""torch.nn.functional.scaled_dot_product_attention with the position terms gathered into its additive mask.

Memory is that of the bias, [H, N, N] (times B for query and key tables). Windows are folded into heads, so that the call stays
four-dimensional: five dimensions take the slow math path and do not export to ONNX.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrel.grid import Grid
from vitrel.ops.reference import merge_windows, rotated, split_windows, table_logits
from vitrel.ops.window import windows
from vitrel.position.terms import Terms


def refuses(terms: Terms, mask: Tensor | None = None, dropout_p: float = 0.0) -> str:
    if any(table.value is not None for table in terms.tables):
        return "scaled_dot_product_attention cannot add position-dependent values (Table.value) to its output"
    return ""


def attention(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, grid: Grid, mask: Tensor | None = None, dropout_p: float = 0.0
) -> Tensor:
    """See vitrel.ops.attention."""
    q, k, bias, scale = _prepare(q, k, terms, grid)
    if mask is None:
        bias = None if bias is None else bias.to(q.dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout_p, scale=scale)
    hidden = ~mask if mask.dtype == torch.bool else mask == float("-inf")
    blind = hidden.all(-1, keepdim=True)  # backends disagree on a query that sees no key: show it all, then return 0
    mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(hidden, float("-inf")) if mask.dtype == torch.bool else mask
    mask = mask.masked_fill(blind, 0.0)
    bias = mask if bias is None else bias + mask
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias.to(q.dtype), dropout_p=dropout_p, scale=scale)
    return out.masked_fill(blind, 0.0)


def window_attention(
    qkv: Tensor,
    terms: Terms,
    grid: Grid,
    window: tuple[int, int],
    shift: tuple[int, int],
    num_heads: int,
    dropout_p: float = 0.0,
) -> Tensor:
    """See vitrel.ops.window_attention."""
    layout = windows(grid.h, grid.w, window, shift, qkv.device)
    q, k, v = split_windows(qkv, layout.source, layout.label.shape, num_heads)  # [B, L, H, N, D]
    q, k, bias, scale = _prepare(q, k, terms, Grid(*window))
    mask = torch.zeros((), dtype=q.dtype, device=q.device)
    # -inf is safe: padding sees padding, so no row is ever wholly masked; -100 is not, where logits reach it.
    mask = mask.masked_fill(layout.label[:, None, :, None] != layout.label[:, None, None, :], float("-inf"))  # [L, 1, N, N]
    bias = mask if bias is None else bias + mask
    bias = bias.to(q.dtype)
    shape = (bias.shape[0] if bias.dim() == 5 else 1, q.shape[1], num_heads, q.shape[3], q.shape[3])
    bias = bias.expand(shape).flatten(1, 2)  # [1 or B, L*H, N, N]
    q, k, v = (t.flatten(1, 2) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout_p, scale=scale)
    return merge_windows(out.unflatten(1, (-1, num_heads)), layout.inverse, grid)


def _prepare(q: Tensor, k: Tensor, terms: Terms, grid: Grid) -> tuple[Tensor, Tensor, Tensor | None, float]:
    """Rotated q and k, the sum of the table terms or None, and the scale SDPA takes (a tensor scale is folded into q)."""
    if terms.query_bias is not None:
        q = q + terms.query_bias[:, None].to(q.dtype)
    width_scale = q.shape[-1] ** -0.5
    bias = table_logits(q, k, terms.tables, grid, terms.scale * width_scale)
    q, k = rotated(q, k, terms)
    if isinstance(terms.scale, Tensor):
        return q * terms.scale.to(q.dtype), k, bias, width_scale
    return q, k, bias, terms.scale * width_scale
