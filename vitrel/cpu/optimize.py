"""`vitrel.optimize`: opt-in, in-place acceleration of evaluation on a CPU, with the outputs of the plain model.

Its changes, measured in docs/performance.md: linear layers run in oneDNN where that is faster, with the exact GELU fused into
the first product of an MLP; blocks with windows process a batch in chunks that stay in the cache, so that the hidden layers of
MLPs and q, k and v never exist for the whole batch, and add residuals in place. In training, in blocks with global attention
and in attention itself the same changes were slower than the plain path, so they are not made there.

Modules receive a subclass of their class, so that names, state dict and isinstance stay the same. For everything but evaluation
(gradients, training, torch.compile, export, tracing, hooks, autocast) its forward calls that of the original class. Nothing
that depends on a weight is cached between calls.
"""

import warnings

import torch
from timm.layers import Mlp
from torch import Tensor, nn

from vitrel.cpu.linear import chunks, mlp, onednn_is_faster, product, takes
from vitrel.grid import Grid
from vitrel.layers import Attention, Block
from vitrel.position import PositionEncoding, Terms


def optimize(model: nn.Module, linears: str = "auto") -> nn.Module:
    """Make evaluation of `model` on a CPU faster, in place, and return it. Outputs stay within a relative 2e-6 (float32).

    Two changes: every nn.Linear and timm Mlp of any model runs in oneDNN (see `linears`), and vitrel's blocks with windows
    process a few images at a time. They apply to calls in model.eval() without gradients (torch.no_grad, torch.inference_mode)
    on float32 or bfloat16 tensors; in bfloat16, oneDNN needs a processor with AVX-512 or similar. All other calls run as
    before. `restore` undoes the changes.

    Args:
        model: any model, changed in place.
        linears: what computes linear layers and MLPs: "onednn"; "torch", which leaves them as they are; or "auto", which times
            both now on the model's most costly shapes, and warns if it leaves them as they are because oneDNN is not faster.

    Raises:
        ValueError: `linears` has another value, or is "onednn" and this torch has no oneDNN.
    """
    if linears not in ("auto", "onednn", "torch"):
        raise ValueError(f"linears={linears!r} is unknown; choose one of auto, onednn, torch")
    if linears == "onednn" and not torch.backends.mkldnn.is_available():
        raise ValueError("this build of torch has no oneDNN; use linears='auto' or 'torch'")
    restore(model)
    onednn = linears == "onednn" or (linears == "auto" and onednn_is_faster(model))
    if linears == "auto" and not onednn and any(type(module) is nn.Linear for module in model.modules()):
        warnings.warn(
            "oneDNN is no faster here than PyTorch, so linear layers stay as they are, and only windows of several images "
            "become faster; pass linears='torch' to silence this warning, or linears='onednn' to use oneDNN anyway",
            stacklevel=2,
        )
    for module in model.modules():
        for fast in _FAST:
            if type(module) is fast.__bases__[0] and (onednn or fast is FastBlock):
                module.__class__ = fast
                module.__dict__["_fast"] = onednn
        if type(module) is FastLinear:
            module.__dict__["__module__"] = nn.Linear.__module__  # so that fx treats it as a leaf, like nn.Linear
    return model


def restore(model: nn.Module) -> nn.Module:
    """Undo `optimize` in place, and return the model."""
    for module in model.modules():
        if type(module) in _FAST:
            del module.__dict__["_fast"]
            module.__dict__.pop("__module__", None)
            module.__class__ = type(module).__bases__[0]
    return model


class FastLinear(nn.Linear):
    """nn.Linear computed by oneDNN."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., in] -> [..., out]."""
        if _off(self, x) or not _takes_product(self, x):
            return super().forward(x)
        return product(x, self.weight, self.bias)


class FastMlp(Mlp):
    """timm's Mlp with the GELU fused into the first product, computed in chunks of tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] -> [..., C']."""
        if not _is_gelu_mlp(self) or _has_hooks(self) or _off(self, x) or not _takes_product(self.fc1, x):
            return super().forward(x)
        weights = self.fc1.weight, self.fc1.bias, self.fc2.weight, self.fc2.bias
        return mlp(x.reshape(-1, x.shape[-1]), *weights).view(*x.shape[:-1], -1)


class FastBlock(Block):
    """Block with windows that processes a few images at a time."""

    def forward(self, x: Tensor, grid: Grid, terms: Terms | None = None, mask: Tensor | None = None) -> Tensor:
        """Apply the block, as Block.forward, a few images at a time if nothing requires the original forward."""
        attn = self.attn
        if mask is not None or self.window is None or type(attn) is not Attention or _off(self, x) or _has_hooks(self):
            return super().forward(x, grid, terms, mask)
        images = list(chunks(len(x), 6 * x[0].numel()))  # q, k and v, twice with windows
        # Checked for each part: dropout may be in training mode in an evaluated model (Monte Carlo dropout).
        if any(part.training for part in self.modules()) or (len(images) == 1 and not self._fast):
            return super().forward(x, grid, terms)
        terms = self.position(self.window) if terms is None else terms
        tokens = x.reshape(x.shape[0], -1, x.shape[-1])
        out = torch.empty_like(tokens, memory_format=torch.contiguous_format)
        for chunk in images:
            residual = tokens[chunk]
            qkv = attn.project(residual if self.post_norm else self.norm1(residual))
            branch = attn.output(attn.attend(qkv, terms, grid))
            torch.add(residual, self.norm1(branch) if self.post_norm else self.ls1(branch), out=out[chunk])
        rows = out.view(-1, x.shape[-1])
        for chunk in chunks(len(rows), 4 * x.shape[-1]):
            residual = rows[chunk]
            residual += self.norm2(self.mlp(residual)) if self.post_norm else self.ls2(self.mlp(self.norm2(residual)))
        return out.view(x.shape)


_FAST = (FastLinear, FastMlp, FastBlock)


def _off(module: nn.Module, x: Tensor) -> bool:
    """True if this call must use the original forward, because of its tensors or the mode in which it runs."""
    return (
        module.training
        or torch.is_grad_enabled()
        or _is_recorded()
        or type(x) is not Tensor  # a proxy, a fake tensor or a subclass
        or x.device.type != "cpu"
        or x.dtype not in (torch.float32, torch.bfloat16)
        or x.dim() < 2
        or not x.numel()
    )


def _takes_product(linear: nn.Linear, x: Tensor) -> bool:
    """True if oneDNN can multiply x with the layer's weight."""
    weight = linear.weight
    return type(weight) is nn.Parameter and weight.dtype == x.dtype and x.shape[-1] == weight.shape[1] and takes(x.dtype)


def _is_recorded() -> bool:
    """True under torch.compile, tracing, autocast or torch.func, where operators are not simply computed."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch.is_autocast_enabled("cpu")
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._are_functorch_transforms_active()
    )


def _has_hooks(module: nn.Module) -> bool:
    """True if a part of the module, its encoding excepted, has a hook or a replaced forward."""
    nn_module = torch.nn.modules.module
    in_encodings = {part for each in module.modules() if isinstance(each, PositionEncoding) for part in each.modules()}
    return bool(nn_module._global_forward_hooks or nn_module._global_forward_pre_hooks) or any(
        part._forward_hooks
        or part._forward_pre_hooks
        or part._backward_hooks
        or part._backward_pre_hooks
        or "forward" in vars(part)
        for part in module.modules()
        if part not in in_encodings
    )


def _is_gelu_mlp(mlp: Mlp) -> bool:
    linear = isinstance(mlp.fc1, FastLinear) and isinstance(mlp.fc2, FastLinear)
    drops = any(drop.training and drop.p for drop in (mlp.drop1, mlp.drop2))
    return linear and not drops and type(mlp.act) is nn.GELU and mlp.act.approximate == "none" and type(mlp.norm) is nn.Identity
