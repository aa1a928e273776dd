"""The Triton kernels as PyTorch operators, vitrel::window_attention and vitrel::biased_attention, with gradients.

Their arguments are flat tensors, ints and floats, since operator schemas have no named tuples. Sizes are arguments, so a
compiled model has no graph break; Triton itself compiles the global kernels again for sizes that are 1 or divisible by 16 if
earlier ones were not. `triton_backend` imports this module at its first computation, so that importing vitrel does not need
Triton. Second derivatives are not defined.
"""

from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from vitrel.grid import Grid
from vitrel.ops.backends import triton_global, triton_window

_Maybe = Optional[Tensor]  # noqa: UP045  infer_schema of torch 2.11 needs this form


def _operator(name: str, function: Callable) -> Any:
    """Register a function that launches kernels as the operator `name`, and return the operator.

    A graph of torch.compile contains the kernels themselves, not the operator. Triton's interpreter has no kernels that a graph
    could contain, so there a graph contains the operator.
    """
    if not triton.knobs.runtime.interpret:
        return torch.library.triton_op(name, function, mutates_args=())
    operator = torch.library.custom_op(name, function, mutates_args=())
    operator.register_fake(function)
    return operator


def _window_attention(
    qkv: Tensor, bias: _Maybe, cos: _Maybe, sin: _Maybe,
    window: Sequence[int], shift: Sequence[int], heads: int, scale: float, grad: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return windowed attention, [B, h, w, 3C] -> [B, h, w, C], and its log-sum-exp, as `triton_window.window_forward` does."""
    return triton_window.window_forward(qkv, bias, cos, sin, tuple(window), tuple(shift), heads, scale, grad)


def _window_attention_backward(
    grad: Tensor, qkv: Tensor, bias: _Maybe, cos: _Maybe, sin: _Maybe, out: _Maybe, lse: _Maybe,
    window: Sequence[int], shift: Sequence[int], heads: int, scale: float, bias_grad: bool, rotary_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of qkv, bias, cos and sin, given that of the output, as `triton_window.window_backward` does.

    That of an input that is None is an empty tensor, since an operator cannot return None; so is that of bias without
    bias_grad, and those of cos and sin without rotary_grad.
    """
    grads = triton_window.window_backward(
        grad, qkv, bias, cos, sin, out, lse, tuple(window), tuple(shift), heads, scale, bias_grad, rotary_grad
    )
    return tuple(_or_empty(x, qkv) for x in grads)  # type: ignore[return-value]


window_op = _operator("vitrel::window_attention", _window_attention)
window_backward_op = _operator("vitrel::window_attention_backward", _window_attention_backward)


def _setup_window_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    *ctx.sizes, _ = inputs[4:]
    ctx.save_for_backward(*inputs[:4], *(output if triton_window.saves_lse(tuple(inputs[4])) else (None, None)))


def _window_gradients(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple:
    saved = ctx.saved_tensors  # read once, since activation checkpointing recomputes them at each access
    _, of_bias, of_cos, of_sin, *_ = ctx.needs_input_grad
    grads = torch.ops.vitrel.window_attention_backward.default(grad, *saved, *ctx.sizes, of_bias, of_cos or of_sin)
    return (*_needed(grads, saved, ctx.needs_input_grad), None, None, None, None, None)


window_op.register_autograd(_window_gradients, setup_context=_setup_window_context)


class _Windows(torch.autograd.Function):
    """Autograd function of the arguments of `windows` to the output; it takes a third of the operator's time on the host."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = triton_window.window_forward(*inputs)
        _setup_window_context(ctx, inputs, output)
        return output[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple:
        saved, needs = ctx.saved_tensors, ctx.needs_input_grad
        which = {"bias_grad": needs[1], "rotary_grad": needs[2] or needs[3]}
        grads = triton_window.window_backward(grad, *saved, *ctx.sizes, **which)
        return (*_needed(grads, saved, needs), None, None, None, None, None)


def windows(
    qkv: Tensor, bias: _Maybe, cos: _Maybe, sin: _Maybe,
    window: tuple[int, int], shift: tuple[int, int], heads: int, scale: float, grad: bool,
) -> Tensor:  # fmt: skip
    """Return the output [B, h, w, C] of windowed attention by the kernels, differentiable once if `grad`.

    The arguments are those of `triton_window.window_forward`. The operator vitrel::window_attention is called only under
    torch.compile and with tensors of a subclass, such as FakeTensor, since it takes more time on the host.
    """
    inputs = qkv, bias, cos, sin, window, shift, heads, scale, grad
    if torch.compiler.is_compiling() or not triton_window.is_plain(qkv):
        return torch.ops.vitrel.window_attention.default(*inputs)[0]
    return _Windows.apply(*inputs) if grad else triton_window.window_forward(*inputs)[0]


@torch.library.custom_op("vitrel::biased_attention", mutates_args=())
def biased_op(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, h: int, w: int, prefix: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return global attention with a bias table, q [B, H, M, D], k and v [B, H, N, D] -> [B, H, M, D], and its log-sum-exp.

    It is the operator of `triton_global.biased_forward`, whose grid is given as h, w and prefix.
    """
    return triton_global.biased_forward(q, k, v, bias, Grid(h, w, prefix), scale)


@biased_op.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, h: int, w: int, prefix: int, scale: float) -> tuple[Tensor, Tensor]:
    return triton_global.like_tokens(q), q.new_empty(q.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("vitrel::biased_attention_backward", mutates_args=())
def biased_backward_op(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor, lse: Tensor,
    h: int, w: int, prefix: int, scale: float, bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients of q, k, v and bias by `triton_global.biased_backward`; that of bias is empty without bias_grad."""
    dq, dk, dv, dbias = triton_global.biased_backward(grad, q, k, v, bias, out, lse, Grid(h, w, prefix), scale, bias_grad)
    return dq, dk, dv, _or_empty(dbias, q)


@biased_backward_op.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, out: Tensor, lse: Tensor,
    h: int, w: int, prefix: int, scale: float, bias_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (triton_global.like_tokens(x) for x in (q, k, v))
    return dq, dk, dv, q.new_empty(bias.shape if bias_grad else 0, dtype=torch.float32)


def _setup_biased_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:4], *output)
    ctx.sizes = inputs[4:]


def _biased_gradients(ctx: Any, grad: Tensor, grad_lse: Tensor) -> tuple:
    saved = ctx.saved_tensors
    grads = torch.ops.vitrel.biased_attention_backward(grad, *saved, *ctx.sizes, bool(ctx.needs_input_grad[3]))
    return (*_needed(grads, saved, ctx.needs_input_grad), None, None, None, None)


biased_op.register_autograd(_biased_gradients, setup_context=_setup_biased_context)


def _needed(grads: Sequence[Tensor], inputs: Sequence[Tensor | None], needs_grad: Sequence[bool]) -> list[Tensor | None]:
    """Return the gradients, one for each of the first inputs, in the dtype of their inputs; None for those not needed."""
    rows = zip(grads, inputs, needs_grad, strict=False)
    return [grad.to(x.dtype) if x is not None and needs else None for grad, x, needs in rows]


def _or_empty(x: Tensor | None, like: Tensor) -> Tensor:
    """Return x, or an empty float32 tensor on the device of `like` in place of None."""
    return like.new_empty(0, dtype=torch.float32) if x is None else x
