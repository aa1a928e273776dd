"""Record intermediate tensors of a transformer block by hooks: q, k, and the tokens between its two residual branches."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vitrel.convert.fit import mean_logits

_RECORDED = ("norm1", "attn.proj", "norm2", "mlp.fc2")


class Observed(NamedTuple):
    """Tensors of one block in one forward pass; None for those it does not have.

    between: input of norm2, [B, N, C], the tokens after the residual addition of attention; None unless the block is pre-norm.
    """

    q: Tensor  # [B, H, N, D]
    k: Tensor
    bias: Tensor | None  # added to scale * q . k, broadcastable to [B, H, N, N]
    scale: float
    attended: Tensor | None  # input of the attention's last linear layer, [B, N, C]
    between: Tensor | None  # tokens after attention
    hidden: Tensor | None  # input of the MLP's last linear layer
    out: Tensor

    def logits(self) -> Tensor:
        """Attention logits with the bias, before softmax, mean over images, [H, N, N] float32."""
        logits = mean_logits(self.q.float(), self.k.float(), self.scale)
        if self.bias is None:
            return logits
        return logits + self.bias.expand(-1, *logits.shape).mean(0)


def observe(block: nn.Module, args: tuple, kwargs: dict) -> Observed:
    """Run a block once, without the hooks on the block itself, and return its intermediate tensors and its output.

    ValueError if its attention does not call scaled_dot_product_attention (shaw, xpos).
    """
    inputs: dict[str, Tensor] = {}
    recorded = {name: module for name, module in block.named_modules() if name in _RECORDED}
    hooks = [m.register_forward_pre_hook(lambda _, args, n=n: inputs.update({n: args[0]})) for n, m in recorded.items()]
    try:
        with _RecordAttention() as attention:
            out = block.forward(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    if attention.call is None:
        raise ValueError(
            "a block's attention does not call scaled_dot_product_attention, so its logits cannot be recorded: leave out "
            "encodings that add to values or scale keys (shaw, xpos)"
        )
    between = inputs.get("norm2") if inputs.get("norm1") is args[0] else None
    q, k, bias, scale = attention.call
    return Observed(q, k, bias, scale, inputs.get("attn.proj"), between, inputs.get("mlp.fc2"), out)


@contextmanager
def before_blocks(blocks: nn.Sequential, call: Callable[[int, nn.Module, tuple, dict], tuple | None]) -> Iterator[None]:
    """Context in which `call(i, block, args, kwargs)` runs before block i; it may return other (args, kwargs) for the block."""
    hooks = [
        block.register_forward_pre_hook(lambda block, args, kwargs, i=i: call(i, block, args, kwargs), with_kwargs=True)
        for i, block in enumerate(blocks)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


class _RecordAttention(TorchFunctionMode):
    """Records (q, k, mask, scale) of the last call of scaled_dot_product_attention in `call`; None if there is no call."""

    call: tuple[Tensor, Tensor, Tensor | None, float] | None = None

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            self.call = (*args[:2], kwargs["attn_mask"], kwargs["scale"])
        return func(*args, **kwargs)
