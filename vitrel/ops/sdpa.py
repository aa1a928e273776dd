"""torch.nn.functional.scaled_dot_product_attention (SDPA), with the position terms gathered into its additive mask.

The mask needs [H, N, N] numbers, with query and key tables [B, H, N, N]. Windows are folded into the head dimension to keep
tensors four-dimensional: five-dimensional ones run the slow math kernel and cannot be exported to ONNX.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from vitrel.geometry import is_exporting, is_known, is_traced
from vitrel.grid import Grid
from vitrel.ops import sdpa_faults
from vitrel.ops.reference import (
    Call,
    gather_bias,
    has_content_terms,
    in_forward_mode,
    in_range,
    lattice_bias,
    needs_gradient,
    query_logits,
    rotated,
    table_logits,
    with_query_bias,
)
from vitrel.ops.window import window_mask, windows
from vitrel.position.terms import Terms

HALF = (torch.float16, torch.bfloat16)
SCALED_KEYS = "keys scaled by the inverse of the queries (Terms.key_rotary) overflow half precision on large grids"
_HIDDEN = -1e30  # in place of -inf in a learned bias: the softmax of a row without a visible key stays finite


def refuses(call: Call) -> str:
    """Return the reason why SDPA (scaled_dot_product_attention) does not serve a call, "" if it does."""
    if any([table.value is not None for table in call.terms.tables]):
        return "scaled_dot_product_attention cannot add position-dependent values (Table.value) to its output"
    return SCALED_KEYS if call.terms.key_rotary is not None and computed_in(call) in HALF else ""


def attention(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, grid: Grid, mask: Tensor | None = None, dropout_p: float = 0.0
) -> Tensor:
    """Compute attention with position terms as vitrel.ops.attention, for calls of which `refuses` returns ""."""
    q, k, bias, scale = prepare(q, k, terms, grid)
    dtype = computed_in(q)
    if mask is None:
        bias = None if bias is None else four_dimensional(bias.to(dtype))
        return fused(q, k, v, bias, dropout_p, scale)
    bias = torch.zeros((), dtype=dtype, device=q.device) if bias is None else bias
    bias = bias.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else in_range(bias + mask, dtype)
    # Hidden by the mask or by a table (a field of view). Kernels disagree on fully masked rows: unmask, then return 0.
    fully_masked = (bias == float("-inf")).all(-1, keepdim=True)
    out = fused(q, k, v, four_dimensional(bias.to(dtype).masked_fill(fully_masked, 0.0)), dropout_p, scale)
    return out.masked_fill(fully_masked, 0.0)


def window_attention(
    qkv: Tensor,
    terms: Terms,
    grid: Grid,
    window: tuple[int, int],
    shift: tuple[int, int],
    num_heads: int,
    dropout_p: float = 0.0,
) -> Tensor:
    """Compute attention in windows as vitrel.ops.window_attention, for calls of which `refuses` returns ""."""
    layout, n = windows(grid.h, grid.w, window, shift, qkv.device), window[0] * window[1]
    dtype = computed_in(qkv)
    mask = window_mask(grid.h, grid.w, window, shift, dtype, qkv.device)  # [L*N, N]
    own_backward = qkv.device.type == "cpu" and needs_gradient(qkv) and not _is_recorded_or_transformed(qkv)
    if own_backward:
        q, k, v = _IntoWindows.apply(qkv.flatten(1, 2), layout.source, layout.inverse, num_heads)
    else:
        x = qkv.flatten(1, 2).unflatten(2, (3, num_heads, -1)).permute(2, 0, 3, 1, 4)  # [3, B, H, h*w, D]
        q, k, v = x.index_select(3, layout.source).unbind(0)  # [B, H, L*N, D]
    if terms.rotary is not None:
        terms = terms._replace(rotary=_of_slots(terms.rotary, layout.slot))
    if terms.key_rotary is not None:
        terms = terms._replace(key_rotary=_of_slots(terms.key_rotary, layout.slot))
    # A bias that depends on offsets only is the same in every window. It is not broadcast where a graph does not know the
    # number of windows: for one window, torch would compile another graph.
    shared = is_known(grid.h, grid.w) and not has_content_terms(terms.tables)
    q, k, bias, scale = prepare(q, k, terms, Grid(*window), None if shared else layout.slot)
    bias = (_repeated if shared else _folded)(bias, mask, num_heads, n, layout.slot.shape[0], dtype)
    q, k, v = (t.flatten(1, 2).unflatten(1, (-1, n)) for t in (q, k, v))  # [B, H*L, N, D]
    out = fused(q, k, v, bias, dropout_p, scale)
    out = out.flatten(1, 2).unflatten(1, (num_heads, -1))  # [B, H, L*N, D]
    if own_backward:
        padded = bool(grid.h % window[0] or grid.w % window[1])
        return _OutOfWindows.apply(out, layout.source, layout.inverse, padded).unflatten(1, (grid.h, grid.w))
    return out.index_select(2, layout.inverse).transpose(1, 2).flatten(2).unflatten(1, (grid.h, grid.w))


def _of_slots(angles: tuple[Tensor, Tensor], slot: Tensor) -> tuple[Tensor, Tensor]:
    """Return a window's (cos, sin), [H|1, N, D/2] each, gathered for L windows, [H|1, L*N, D/2], by Windows.slot [L*N]."""
    return angles[0].index_select(1, slot), angles[1].index_select(1, slot)


class _IntoWindows(torch.autograd.Function):
    """Autograd function that gathers windows: (qkv [B, h*w, 3C], source, inverse, number of heads) -> q, k, v [B, H, L*N, D].

    source and inverse are those of `Windows`. The backward pass of plain indexing would add every slot to zeros. Here it reads
    the gradient of a token from its one slot, since gradients of padded slots are zero. The three results own their memory, so
    what is stored for the backward pass does not keep the unscaled queries.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, source: Tensor, inverse: Tensor, heads: int) -> tuple[Tensor, ...]:
        ctx.inverse = inverse
        rows = qkv.index_select(1, source).unflatten(2, (3, heads, -1)).transpose(1, 3)  # [B, H, 3, L*N, D]
        return tuple(x.contiguous() for x in rows.unbind(2))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows = torch.stack([grad.transpose(1, 2) for grad in grads], 2)  # [B, L*N, 3, H, D]
        return rows.flatten(2).index_select(1, ctx.inverse), None, None, None


class _OutOfWindows(torch.autograd.Function):
    """Autograd function that scatters windows back: (x [B, H, L*N, D], source, inverse, padded) -> [B, h*w, C].

    source and inverse are those of `Windows`; padded says whether there are padded slots, whose gradient is then zero.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, source: Tensor, inverse: Tensor, padded: bool) -> Tensor:
        ctx.source, ctx.inverse, ctx.padded, ctx.heads = source, inverse, padded, x.shape[1]
        return x.transpose(1, 2).index_select(1, inverse).flatten(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows = grad.index_select(1, ctx.source)  # [B, L*N, C]
        if ctx.padded:
            slots = torch.arange(len(ctx.source), device=grad.device)
            rows = rows.masked_fill((ctx.inverse[ctx.source] != slots)[:, None], 0.0)
        return rows.unflatten(2, (ctx.heads, -1)).transpose(1, 2), None, None, None


def _repeated(bias: Tensor | None, mask: Tensor | None, heads: int, n: int, slots: int, dtype: torch.dtype) -> Tensor | None:
    """Return a bias [H, N, N], the same in all L windows, plus the mask [L*N, N]: [1, H*L, N, N] in `dtype`.

    None if both are None. n is N, and slots is L*N.
    """
    if bias is None and mask is None:
        return None
    bias = None if bias is None else bias.to(dtype).unsqueeze(1)  # [H, 1, N, N]
    mask = None if mask is None else mask.unflatten(0, (-1, n))  # [L, N, N]
    both = bias if mask is None else mask[None] if bias is None else bias + mask
    return both.expand(heads, slots // n, n, n).flatten(0, 1)[None]


def _folded(bias: Tensor | None, mask: Tensor | None, heads: int, n: int, slots: int, dtype: torch.dtype) -> Tensor | None:
    """Return a bias per window [(B,) H, L*N, N] plus the mask [L*N, N]: [1 or B, H*L, N, N] in `dtype`.

    None if both are None. n is N, and `slots` is not used.
    """
    if bias is None and mask is None:
        return None
    both = bias if mask is None else mask if bias is None else bias + mask
    both = both.expand(*both.shape[:-3], heads, -1, -1).to(dtype)
    return four_dimensional(both.flatten(-3, -2).unflatten(-2, (-1, n)))


def fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, dropout_p: float, scale: float) -> Tensor:
    """Call F.scaled_dot_product_attention, without those of its kernels that are known to be wrong for the call (`_kernels`).

    With a batch of no images the gradient of the bias is zero, not None.

    Args:
        q: [B, H, M, D].
        k: [B, H, N, D].
        v: [B, H, N, D].
        bias: additive, broadcastable to [B, H, M, N], or None.
        dropout_p: probability of dropping an attention weight.
        scale: factor of q . k.
    """
    if q.device.type == "cuda" and bias is not None and bias.stride(-1) != 1:
        # With another last stride, as of a table of keys alone, a GPU has only the kernel that stores all weights. Rows of a
        # length that is no multiple of 8 are padded by PyTorch itself, by a copy of the mask.
        bias = bias.contiguous()
    if bias is not None and _is_learned(bias, q):
        return _with_learned_bias(q, k, v, bias, dropout_p, scale)
    if names := _kernels(q, k, v, bias):
        with sdpa_kernel([getattr(SDPBackend, name) for name in names.split(" ")]):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout_p, scale=scale)
    else:
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout_p, scale=scale)
    if bias is not None and is_known(q.shape[0]) and q.shape[0] == 0:
        out = out + bias.sum() * 0  # PyTorch returns a sum of q, k and v there
    return out


def _is_learned(bias: Tensor, q: Tensor) -> bool:
    """Return whether `_with_learned_bias` replaces SDPA: a bias that needs a gradient, on a CPU, in full precision, not traced.

    Only SDPA's math kernel, which is slower, gives a mask a gradient on a CPU.
    """
    learned = q.device.type == "cpu" and computed_in(q) not in HALF and needs_gradient(bias)
    return learned and not _is_recorded_or_transformed(q)  # graphs and exported programs keep one fused operator


def _with_learned_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, dropout_p: float, scale: float) -> Tensor:
    """Compute what SDPA's math kernel does, in fewer passes over the weights; arguments and result as of `fused`.

    The kernel scales both q and k, and its softmax looks for fully masked rows in all images. Here only q is scaled. Every row
    of the bias has a finite number, so the softmax has no NaN: `prepare` puts `_HIDDEN` where a table has -inf, and `attention`
    puts 0 into rows that are hidden altogether. The output of rows with nothing above `_HIDDEN` is 0.
    """
    logits = (q * scale) @ k.mT + bias
    seen = bias.detach().amax(-1, keepdim=True) > _HIDDEN / 2
    return (F.dropout(logits.softmax(-1), dropout_p) @ v) * seen


def _kernels(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> str:
    """Return the names of the kernels (SDPBackend) among which SDPA may choose, joined by spaces; "" if among all.

    The math kernel alone, which consists of PyTorch's other operators, is named in two cases. First, in torch.export: a choice
    would compare the batch sizes of images and mask (1), and torch 2.14 records the outcome as a guard, so that the program
    refuses a batch of one image. Second, in forward mode and torch.func.vmap: on a CPU for gradients (in torch.compile always),
    for which its other kernels have no rules there, elsewhere if there is a bias, which a GPU's other kernels reject (pytorch
    issues 151558, 161310). Otherwise, on a GPU, they are those of `sdpa_faults.kernels`.
    """
    if is_exporting():
        return "MATH"
    if _is_mapped():
        differentiated = torch.compiler.is_compiling() or needs_gradient(q, k, v, bias)  # torch.compile does not see it there
        if differentiated if q.device.type == "cpu" else bias is not None:
            return "MATH"
    if q.device.type != "cuda":
        return ""
    half = computed_in(q) in HALF
    queries, keys = (x.shape[-2] if is_known(x.shape[-2]) else None for x in (q, k))
    grad, mask_grad = needs_gradient(q, k, v), needs_gradient(bias)
    return sdpa_faults.kernels(q.device.index, half, queries, keys, grad, mask_grad)


@torch._dynamo.assume_constant_result
def _is_mapped() -> bool:
    """Return whether this runs in forward-mode AD (also inside torch.func.jvp) or inside torch.func.vmap."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return in_forward_mode() or any(level.key() == torch._C._functorch.TransformType.Vmap for level in levels)


def _is_recorded_or_transformed(x: Tensor) -> bool:
    """Return whether a graph, a transform of torch.func or forward-mode AD records operators on x, or x holds no values."""
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or is_traced(x.device) or in_forward_mode()


def computed_in(q: Tensor | Call) -> torch.dtype:
    """Return the dtype in which SDPA computes with q, or the queries of a call, given that autocast may round them."""
    device = q.device.type
    if device == "meta":  # it has no autocast
        return q.dtype
    rounds = torch.is_autocast_enabled(device) and q.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return torch.get_autocast_dtype(device) if rounds else q.dtype


def four_dimensional(bias: Tensor) -> Tensor:
    """Return a bias [H, N, N] as [1, H, N, N], any other as it is: SDPA is 5 times slower with three dimensions on a CPU."""
    return bias[None] if bias.dim() == 3 else bias


def prepare(
    q: Tensor, k: Tensor, terms: Terms, grid: Grid, slot: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None, float]:
    """Return SDPA's arguments: queries, keys, additive bias and scale.

    Args:
        q: [B, H, M, D], before rotation; with `slot` [B, H, L*N, D].
        k: [B, H, N, D], before rotation; with `slot` [B, H, L*N, D].
        terms: what an encoding returns for `grid`; with `slot` the caller has gathered its angles by it, [H|1, L*N, D/2].
        grid: of the keys; with `slot` the window.
        slot: None, or [L*N], the place of each row in its window, where q and k hold L windows.

    Returns:
        q plus query_bias, rotated, times the temperature; k rotated; the bias or None; the scale, a number, in which the
            temperature is not contained. The bias is the sum of what bias, query, gated and key tables add to the logits,
            [..., H, M, N], with `slot` [..., H, L*N, N]. It lies within the range of the dtype in which SDPA computes
            (`reference.in_range`), but is not yet rounded to it. If `_is_learned`, it has `_HIDDEN` in place of -inf.
    """
    q = with_query_bias(q, terms)
    scale = terms.content_scale(q.shape[-1])
    if has_content_terms(terms.tables):
        if slot is None:
            bias = table_logits(q, k, terms.tables, grid, scale)
        else:
            bias = _window_logits(q, k, terms, grid, slot, scale)
        bias = in_range(bias, computed_in(q))
        if bias is not None and _is_learned(bias, q) and any([table.bias is not None for table in terms.tables]):
            bias = bias.clamp(min=_HIDDEN)
    else:  # limited as a table, since it is small and all pairs are not
        bias = lattice_bias(terms, grid, computed_in(q))
        if bias is not None:
            bias = bias.clamp(min=_HIDDEN) if _is_learned(bias, q) else bias
            index = grid.index(device=q.device)
            bias = gather_bias(bias, index[-q.shape[-2] :] if slot is None else index.index_select(0, slot))
    q, k = rotated(q, k, terms)
    if terms.temperature is not None:
        q = q * terms.temperature.to(q.dtype)
    return q, k, bias, terms.scale * q.shape[-1] ** -0.5


def _window_logits(q: Tensor, k: Tensor, terms: Terms, window: Grid, slot: Tensor, scale: float | Tensor) -> Tensor | None:
    """Return what the tables of `terms` add to the logits of L windows of N tokens, [(B,) H, L*N, N]; None if nothing.

    q and k are [B, H, L*N, D] before rotation, `slot` [L*N] is the position of each row in its window, `window` the window's
    grid, and `scale` as of `reference.table_logits`, of which this is the version for windows.
    """
    total = []
    for table in terms.tables:
        index = window.index(table.axis, q.device).index_select(0, slot)  # [L*N, N]
        if table.bias is not None:
            total.append(gather_bias(table.bias, index))
        total += query_logits(q, table, index, scale)
        if table.key is not None:
            score = (k * scale) @ table.key.to(k.dtype).mT  # [B, H, L*N, R]
            first = torch.arange(slot.shape[0], device=q.device) - slot  # first row of each row's window
            keys = first[:, None] + torch.arange(window.tokens, device=q.device)  # [L*N, N]
            at = keys * score.shape[-1] + index
            total.append(score.flatten(-2).index_select(-1, at.flatten()).unflatten(-1, at.shape))
    return sum(total[1:], total[0]) if total else None
