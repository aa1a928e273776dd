"""Linear layers and MLPs by oneDNN on a CPU: forward and backward in float32, forward in bfloat16
if the processor supports it.
"""

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrel.ops.backends.onednn import product

CHUNK = 1 << 21  # numbers in the widest tensor of a chunk: 8 MB in float32, which fit into the L3 cache


class LinearFunction(torch.autograd.Function):
    """F.linear with the three products of its forward and backward pass in oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        x_grad, weight_grad, bias_grad = ctx.needs_input_grad
        rows, inputs = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        if torch.is_grad_enabled():  # for second derivatives
            return grad @ weight, rows.t() @ inputs, rows.sum(0) if bias_grad else None
        dx = product(rows, weight.t()).view(x.shape) if x_grad else None
        return dx, _weight_gradient(rows, inputs) if weight_grad else None, rows.sum(0) if bias_grad else None


class MlpFunction(torch.autograd.Function):
    """Autograd function of `mlp`, with its arguments; the backward pass computes the hidden layer again, in chunks of rows.

    That repeats a sixth of the products. At the sizes of Swin's first stages it is still faster than writing the hidden layer
    and its gradient to newly allocated memory.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, *weights)
        return mlp(x, *weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight1, bias1, weight2, bias2 = inputs = ctx.saved_tensors
        if torch.is_grad_enabled():  # for second derivatives
            out = F.linear(F.gelu(F.linear(x, weight1, bias1)), weight2, bias2)
            leaves = [x for x, needed in zip(inputs, ctx.needs_input_grad, strict=True) if needed]
            grads = iter(torch.autograd.grad(out, leaves, grad, create_graph=True))
            return tuple(next(grads) if needed else None for needed in ctx.needs_input_grad)
        dx, dweight1, dweight2 = torch.empty_like(x), torch.zeros_like(weight1), torch.zeros_like(weight2)
        dbias1 = weight1.new_zeros(len(weight1))
        for rows in chunks(len(x), len(weight1)):
            before = product(x[rows], weight1, bias1)
            dbefore = torch.ops.aten.gelu_backward(product(grad[rows], weight2.t()), before)
            if ctx.needs_input_grad[3]:
                dweight2 += _weight_gradient(grad[rows], F.gelu(before))
            if ctx.needs_input_grad[1]:
                dweight1 += _weight_gradient(dbefore, x[rows])
            dbias1 += dbefore.sum(0)
            dx[rows] = product(dbefore, weight1.t())
        dbias2 = None if bias2 is None else grad.sum(0)
        return dx, dweight1, None if bias1 is None else dbias1, dweight2, dbias2


def mlp(x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None) -> Tensor:
    """Return fc2(gelu(fc1(x))) of rows x [M, C] with the exact GELU, [M, C'], computed in chunks of rows."""
    out = x.new_empty(len(x), len(weight2))
    for rows in chunks(len(x), len(weight1)):
        out[rows] = product(product(x[rows], weight1, bias1, "gelu"), weight2, bias2)
    return out


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return grad.T @ x [out, in] of grad [M, out] and x [M, in]; oneDNN is faster with the wider side as the weight."""
    return product(grad.t(), x.t()) if grad.shape[1] <= x.shape[1] else product(x.t(), grad.t()).t()


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
