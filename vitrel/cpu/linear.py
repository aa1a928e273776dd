"""Linear layers and MLPs by oneDNN, forward and backward; float32 on a CPU, and forward in bfloat16 where the processor has
what oneDNN needs for it (vitrel.ops.backends.onednn).
"""

import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrel.ops.backends.onednn import product

CHUNK = 1 << 21  # numbers in the widest tensor of a chunk: 8 MB in float32, which the third-level cache holds


class LinearFunction(torch.autograd.Function):
    """F.linear, its three products in oneDNN."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        to_x, to_weight, to_bias = ctx.needs_input_grad
        rows, inputs = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
        if torch.is_grad_enabled():  # for the gradient of this gradient
            return grad @ weight, rows.t() @ inputs, rows.sum(0) if to_bias else None
        dx = product(rows, weight.t()).view(x.shape) if to_x else None
        return dx, _weight_gradient(rows, inputs) if to_weight else None, rows.sum(0) if to_bias else None


class MlpFunction(torch.autograd.Function):
    """fc2(gelu(fc1(x))) of rows x [M, C], a chunk at a time both ways; the backward pass computes the hidden layer anew.

    That costs a sixth of the products; at the sizes of Swin's first stages writing the hidden layer and its gradients to fresh
    memory costs more.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, *weights)
        return mlp(x, *weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight1, bias1, weight2, bias2 = inputs = ctx.saved_tensors
        if torch.is_grad_enabled():  # for the gradient of this gradient
            out = F.linear(F.gelu(F.linear(x, weight1, bias1)), weight2, bias2)
            asked = [one for one, needed in zip(inputs, ctx.needs_input_grad, strict=True) if needed]
            found = iter(torch.autograd.grad(out, asked, grad, create_graph=True))
            return tuple(next(found) if needed else None for needed in ctx.needs_input_grad)
        dx, dweight1, dweight2 = torch.empty_like(x), torch.zeros_like(weight1), torch.zeros_like(weight2)
        dbias1 = weight1.new_zeros(len(weight1))
        for own in chunks(len(x), len(weight1)):
            before = product(x[own], weight1, bias1)
            through = torch.ops.aten.gelu_backward(product(grad[own], weight2.t()), before)
            if ctx.needs_input_grad[3]:
                dweight2 += _weight_gradient(grad[own], F.gelu(before))
            if ctx.needs_input_grad[1]:
                dweight1 += _weight_gradient(through, x[own])
            dbias1 += through.sum(0)
            dx[own] = product(through, weight1.t())
        dbias2 = None if bias2 is None else grad.sum(0)
        return dx, dweight1, None if bias1 is None else dbias1, dweight2, dbias2


def mlp(x: Tensor, weight1: Tensor, bias1: Tensor | None, weight2: Tensor, bias2: Tensor | None) -> Tensor:
    """fc2(gelu(fc1(x))) of rows x [M, C] with the exact GELU, a chunk at a time: [M, C']."""
    out = x.new_empty(len(x), len(weight2))
    for own in chunks(len(x), len(weight1)):
        out[own] = product(product(x[own], weight1, bias1, "gelu"), weight2, bias2)
    return out


def _weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """grad [M, out], x [M, in] -> grad^T x [out, in]; the wider side takes the place of the weight, which is faster."""
    return product(grad.t(), x.t()) if grad.shape[1] <= x.shape[1] else product(x.t(), grad.t()).t()


def onednn_is_faster(model: nn.Module) -> bool:
    """Times both on the weights that make most of the model's work; False without linear layers or without oneDNN."""
    shapes = Counter((m.out_features, m.in_features) for m in model.modules() if type(m) is nn.Linear)
    if not shapes or not torch.backends.mkldnn.is_available():
        return False
    times = {F.linear: 0.0, product: 0.0}
    with torch.inference_mode():
        for shape in sorted(shapes, key=lambda one: -one[0] * one[1] * shapes[one])[:3]:
            x, weight, bias = torch.ones(256, shape[1]), torch.ones(shape), torch.ones(shape[0])  # draws nothing
            found: dict = {run: [] for run in times}
            for _ in range(9):
                for run in found:
                    start = time.perf_counter()
                    run(x, weight, bias)
                    found[run].append(time.perf_counter() - start)
            for run in times:
                times[run] += shapes[shape] * min(found[run])
    return times[product] < 0.95 * times[F.linear]


def chunks(count: int, numbers: int) -> Iterator[slice]:
    """`count` rows with so many `numbers` each, in chunks of about CHUNK numbers."""
    step = max(1, CHUNK // max(numbers, 1))
    return (slice(first, min(first + step, count)) for first in range(0, count, step))
