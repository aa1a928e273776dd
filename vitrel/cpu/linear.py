"""Linear layers and MLPs by oneDNN on a CPU without gradients: in float32, and in bfloat16 if the processor supports it."""

import functools
import time
from collections import Counter
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHUNK = 1 << 21  # numbers in the widest tensor of a chunk: 8 MB in float32, which fit into the L3 cache


@functools.cache
def takes(dtype: torch.dtype) -> bool:
    """True if `product` works with this dtype here: float32; bfloat16 on processors that support it (AVX-512 and similar)."""
    if not torch.backends.mkldnn.is_available():
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None, then: str = "none") -> Tensor:
    """Return x [..., in] @ weight.T [out, in] + bias [out], by oneDNN; then="gelu" applies the exact GELU. No autograd.

    The operator is the one that torch.compile uses on a CPU to fuse a linear layer with what follows.
    """
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, then, [], "none" if then == "gelu" else "")


def mlp(x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None) -> Tensor:
    """Return fc2(gelu(fc1(x))) of rows x [M, C] with the exact GELU, [M, C'], computed in chunks of rows."""
    out = x.new_empty(len(x), len(weight2))
    for rows in chunks(len(x), len(weight1)):
        out[rows] = product(product(x[rows], weight1, bias1, "gelu"), weight2, bias2)
    return out


def onednn_is_faster(model: nn.Module) -> bool:
    """Time oneDNN and PyTorch on the three most costly shapes of linear layers; True if oneDNN takes less than 0.95 of the
    time.

    False without linear layers or without oneDNN.
    """
    shapes = Counter((m.out_features, m.in_features) for m in model.modules() if type(m) is nn.Linear)
    if not shapes or not torch.backends.mkldnn.is_available():
        return False
    times = {F.linear: 0.0, product: 0.0}
    with torch.inference_mode():
        for shape in sorted(shapes, key=lambda shape: -shape[0] * shape[1] * shapes[shape])[:3]:
            x, weight, bias = (
                torch.ones(256, shape[1]),
                torch.ones(shape),
                torch.ones(shape[0]),
            )  # no random draw
            seconds: dict = {run: [] for run in times}
            for _ in range(9):
                for run in seconds:
                    start = time.perf_counter()
                    run(x, weight, bias)
                    seconds[run].append(time.perf_counter() - start)
            for run in times:
                times[run] += shapes[shape] * min(seconds[run])
    return times[product] < 0.95 * times[F.linear]


def chunks(count: int, numbers: int) -> Iterator[slice]:
    """Slices that divide `count` rows of `numbers` numbers per row, of at most CHUNK numbers, but at least one row."""
    step = max(1, CHUNK // max(numbers, 1))
    return (slice(first, min(first + step, count)) for first in range(0, count, step))
