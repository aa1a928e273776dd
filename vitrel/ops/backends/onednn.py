"""Global attention in float32 on a CPU, with oneDNN's matrix products, per head and block of queries.

PyTorch uses MKL for float32 products, which is half as fast on AMD processors. "auto" does not consider this backend;
`vitrel.optimize` selects it ("auto+onednn") where it has measured that oneDNN is faster. The operator is the one that
torch.compile uses on a CPU to fuse a linear layer with what follows.
"""

import functools

import torch
from torch import Tensor

from vitrel.constants import is_traced
from vitrel.grid import Grid
from vitrel.ops.backends.bias_by_row import QUERIES, expanded, query_blocks, refuses_all_but_biases, row_bias, softmax_under
from vitrel.ops.reference import Call, lattice_bias
from vitrel.ops.sdpa import prepare
from vitrel.position.terms import Terms


def refuses(call: Call) -> str:
    if call.entry == "window_attention":
        return "it computes one product per head and image, too slow for small windows"
    if reason := refuses_all_but_biases(call):
        return reason
    if call.device.type != "cpu" or call.dtype != torch.float32:
        return "it serves float32 on a CPU only"
    if not takes(call.dtype):
        return "this build of torch has no oneDNN"
    if call.grad:
        return "its products have no backward pass; it serves calls under torch.no_grad() only"
    if torch.is_autocast_enabled("cpu"):
        return "it computes in float32, but autocast is on"
    if torch.compiler.is_compiling() or is_traced(call.device):
        return "a graph would contain every block of queries of every head, and serve a single grid"
    return ""


def pays(call: Call) -> bool:
    """True from 512 tokens; below that, SDPA with a bias [H, N, N] is as fast."""
    return call.grid.tokens >= 512


def attention(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, grid: Grid, mask: Tensor | None = None, dropout_p: float = 0.0
) -> Tensor:
    """Compute attention with position terms; arguments and result as in vitrel.ops.attention."""
    q, k, _, scale = prepare(q, k, terms._replace(tables=()), grid)
    q, bias = q * scale, lattice_bias(terms, grid, q.dtype)
    lines = None if bias is None else expanded(bias.float(), grid)
    softmax = softmax_under(*(lines or ()))
    out = v.new_empty(*q.transpose(1, 2).shape[:3], v.shape[-1])  # [B, N, H, D], as a linear layer takes it
    for image in range(len(q)):
        for head in range(q.shape[1]):
            keys, values = k[image, head].contiguous(), v[image, head].mT.contiguous()
            for rows in query_blocks(grid, QUERIES):
                scores = product(q[image, head, rows.tokens], keys)  # [M, N]
                if lines is not None:
                    scores += row_bias(lines[0][head : head + 1], lines[1][head : head + 1], grid, rows)[0]
                out[image, rows.tokens, head] = product(softmax(scores, -1), values)
    return out.transpose(1, 2)


@functools.cache
def takes(dtype: torch.dtype) -> bool:
    """True if `product` works with this dtype here: float32; bfloat16 on processors that support it (AVX-512 and similar)."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, then: str = "none") -> Tensor:
    """Return x [..., in] @ weight.T [out, in] + bias [out], by oneDNN; then="gelu" applies the exact GELU. No autograd."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, then, [], "none" if then == "gelu" else "")
