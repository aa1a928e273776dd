"""The Triton kernels as a backend: bias tables and rotations without an [N, N] tensor, globally and in windows.

They are for NVIDIA's GPUs from compute capability 8.0 on, and compiled ahead for four architectures (tools.benchmark.kernels).

Position terms are converted for the kernels: bias tables of all axes become one table over both axes; rotations are applied
before global attention, or in the window kernel. Content terms are not served, nor global attention without a bias table, for
which torch has flash attention: `augmented_qk` and `sdpa` are the faster ones there.
"""

import functools
import importlib.util
import os
import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from vitrel.geometry import is_exporting
from vitrel.grid import Grid
from vitrel.ops import sdpa_faults
from vitrel.ops.reference import Call, has_content_terms, in_forward_mode, lattice_bias, needs_gradient, rotated
from vitrel.ops.sdpa import SCALED_KEYS
from vitrel.position.terms import Terms

MISSING = "Triton is not installed"
_INSTALLED = importlib.util.find_spec("triton") is not None  # torch 2.11 cannot compile a call of find_spec


def refuses(call: Call) -> str:
    """Return the reason why the Triton kernels do not serve a call, "" if they do; nothing is run."""
    if not _INSTALLED:
        return MISSING
    if call.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"its kernels run on a GPU, not on {call.device.type} (except in Triton's interpreter, TRITON_INTERPRET=1)"
    if call.device.type == "cuda" and not _can_run_on(call.device.index or 0):
        return "its kernels need a GPU of NVIDIA's, of compute capability 8.0 or later"
    if is_exporting() or torch.jit.is_tracing():
        return "an exported program may contain PyTorch's operators only, so that it runs wherever it is loaded"
    if in_forward_mode() or (not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()):
        return "its kernels support first derivatives by backward() only, no transforms of torch.func"  # they would be zero
    if call.mask is not None:
        return "its kernels have no mask"
    if call.dropout_p:
        return "its kernels have no dropout of attention weights; use attn_drop_rate=0"
    if call.terms.key_rotary is not None:
        return SCALED_KEYS
    if has_content_terms(call.terms.tables) or call.terms.query_bias is not None:
        return "its kernels serve bias tables only, no content tables and no query_bias"
    if call.window is not None:
        from vitrel.ops.backends.triton_window import window_limits  # imports Triton

        return window_limits(call.dtype, call.width, call.window)
    if not call.terms.tables:
        return "there is no bias table: plain scaled_dot_product_attention computes these terms"
    from vitrel.ops.backends.triton_global import global_limits

    return global_limits(call.dtype, call.width, call.grid, call.queries)


class Kind(NamedTuple):
    """What decides which kernels a call needs; the entries are those of Call, or are made of them.

    grid: (h, w, prefix) of the keys, and queries: their number; with a window, those of the window. bias and rotary: whether
    the kernels read a bias table and angles. grads: whether these two need gradients; None in inference. device: GPU's index.
    """

    window: tuple[int, int] | None
    grid: tuple[int, int, int]
    queries: int
    heads: int
    width: int
    dtype: torch.dtype
    bias: bool
    rotary: bool
    grads: tuple[bool, bool] | None
    device: int

    def __str__(self) -> str:
        h, w, prefix = self.grid
        shape = f"windows of {h}x{w}" if self.window else f"attention over {h}x{w}{f' + {prefix}' if prefix else ''} tokens"
        return f"{shape} with {self.heads} heads of {self.width} in {str(self.dtype).removeprefix('torch.')}"


def serves(call: Call) -> bool:
    """Return whether "auto" may take the kernels: they do not refuse the call, and Triton runs them here.

    The first call of a `Kind` runs its kernels on zeros, those of the backward pass too in training, so that a kernel which
    does not compile fails before it is chosen. A RuntimeWarning tells of it once for a shape, and once if Triton is missing.
    """
    if not (reason := refuses(call)):
        reason = failure(call)
    elif reason == MISSING:
        _tell_missing(*_kind(call))
    return not reason


def failure(call: Call, known: bool = False) -> str:
    """Return the reason why Triton fails to run the kernels of a call, "" if it runs them.

    The first call of a `Kind` runs them on zeros and, if they fail, warns; the outcome is stored.

    Args:
        call: what is to be computed, which `refuses` must not refuse.
        known: run nothing, return what is stored; "" where no call of this kind was tried.
    """
    return _failure(known, *_kind(call))


def _kind(call: Call) -> tuple:
    """Return the entries of the Kind of a call, as a tuple, since torch.compile cannot take a named one as a constant."""
    terms, tables = call.terms, call.terms.tables
    rotary = call.window is not None and terms.rotary is not None  # rotated before global attention
    learned = any([table.bias is not None and table.bias.requires_grad for table in tables])
    turning = rotary and any([angle.requires_grad for angle in terms.rotary])  # type: ignore[union-attr]
    grid, queries = (call.grid, call.queries) if call.window is None else ((*call.window, 0), call.window[0] * call.window[1])
    size = call.heads, int(call.width), call.dtype
    grads = (learned, turning) if call.grad else None
    return call.window, tuple(grid), queries, *size, len(tables) > 0, rotary, grads, call.device.index or 0


_failures: dict[Kind, str] = {}
_told: set[str] = set()  # shapes of which a warning has told


@torch._dynamo.assume_constant_result
def _failure(known: bool, *entries: Any) -> str:
    """Return what `failure` returns, for the entries of a `Kind`; a GPU's own errors (out of memory) are raised, not stored."""
    kind = Kind(*entries)
    if kind not in _failures and not known:
        _failures[kind] = ""
        try:
            with _disable_current_modes(), torch.no_grad():
                _try(kind)
        except (torch.OutOfMemoryError, torch.AcceleratorError):  # no fault of Triton's
            del _failures[kind]
            raise
        except Exception as error:  # of Triton, its C compiler, the assembler or the driver, which have no common type
            import triton

            text = f"{type(error).__name__}: {str(error).strip() or 'without a message'}".splitlines()[0]
            _failures[kind] = f"Triton {triton.__version__} (torch {torch.__version__}) fails to run its kernels: {text[:300]}"
            _tell(str(kind), _failures[kind])
    return _failures.get(kind, "")


@torch._dynamo.assume_constant_result
def _tell_missing(*entries: Any) -> None:
    """Warn that Triton is not installed, naming the Kind with these entries, if no warning of this module came before."""
    if not _told:
        _tell(str(Kind(*entries)), f"{MISSING} beside torch {torch.__version__}")


def _tell(shape: str, reason: str) -> None:
    """Warn that another backend computes a shape (the text of a Kind), and why, once for each shape."""
    if shape not in _told:
        _told.add(shape)
        warnings.warn(f"{shape}: {reason}; another backend computes them (vitrel.ops.why)", RuntimeWarning, stacklevel=2)


def _try(kind: Kind) -> None:
    """Run a kind's kernels on zeros of one image or window, forward and, unless `grads` is None, backward.

    Whatever Triton raises is raised. Without a GPU nothing is run, except in Triton's interpreter.
    """
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return  # fake tensors stand for those of a GPU
    from vitrel.ops.backends import triton_global, triton_window

    device = torch.device("cuda", kind.device) if torch.cuda.is_available() else torch.device("cpu")
    grid = Grid(*kind.grid)
    zeros = functools.partial(torch.zeros, device=device)
    bias = zeros(kind.heads, grid.classes()) if kind.bias else None
    if kind.window is None:
        x = zeros(1, grid.tokens, kind.heads, kind.width, dtype=kind.dtype).transpose(1, 2)
        inputs = x[:, :, -kind.queries :], x, x, bias
        out, lse = triton_global.biased_forward(*inputs, grid, 1.0)
        if kind.grads:
            triton_global.biased_backward(out, *inputs, out, lse, grid, 1.0, kind.grads[0])
        return
    qkv = zeros(1, *kind.window, 3 * kind.heads * kind.width, dtype=kind.dtype)
    angle = zeros(1, grid.tokens, kind.width // 2) if kind.rotary else None
    call = qkv, bias, angle, angle
    how = kind.window, (0, 0), kind.heads, 1.0
    out, lse = triton_window.window_forward(*call, *how, kind.grads is not None)
    if kind.grads:
        triton_window.window_backward(out, *call, out, lse, *how, *kind.grads)


@torch._dynamo.assume_constant_result
def _can_run_on(index: int) -> bool:
    """Return whether the GPU of this index is NVIDIA's, of compute capability 8.0 or later; True without one (fake tensors)."""
    gpu = sdpa_faults.stack(index)
    return torch.version.hip is None and (gpu is None or gpu.capability >= (8, 0))


def attention(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, grid: Grid, mask: Tensor | None = None, dropout_p: float = 0.0
) -> Tensor:
    """Compute attention with a bias table by the kernels, as vitrel.ops.attention, for calls of which `refuses` returns "".

    mask and dropout_p are ignored.
    """
    from vitrel.ops.backends import triton_ops  # registers the operators

    shape = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    q, k, v = (x.expand(*shape, *x.shape[-2:]) for x in (q, k, v))
    scale = terms.scale * q.shape[-1] ** -0.5
    if terms.temperature is not None:
        q = q * terms.temperature.to(q.dtype)
    q, k = rotated(q, k, terms)
    return triton_ops.biased_op(q, k, v, lattice_bias(terms, grid, q.dtype), *grid, scale)[0]


def window_attention(
    qkv: Tensor,
    terms: Terms,
    grid: Grid,
    window: tuple[int, int],
    shift: tuple[int, int],
    num_heads: int,
    dropout_p: float = 0.0,
) -> Tensor:
    """Compute attention in windows by the kernels, as vitrel.ops.window_attention, for calls of which `refuses` returns "".

    dropout_p is ignored.
    """
    from vitrel.ops.backends import triton_ops

    width = qkv.shape[-1] // (3 * num_heads)
    scale = terms.scale * width**-0.5
    if terms.temperature is not None:  # rare in windows, so a copy is acceptable
        q, others = qkv.tensor_split((num_heads * width,), -1)
        qkv = torch.cat((q * terms.temperature.to(qkv.dtype), others), -1)
    cos, sin = terms.rotary or (None, None)
    inputs = qkv, lattice_bias(terms, Grid(*window), qkv.dtype), cos, sin
    return triton_ops.windows(*inputs, window, shift, num_heads, scale, needs_gradient(*inputs))
