"""Known faults of the kernels behind scaled_dot_product_attention (SDPA) on a GPU, each with its condition and source.

Where the condition of a fault holds, SDPA chooses among the other kernels. Newer versions of PyTorch refuse a few of these
cases themselves; the conditions are for the older ones that vitrel supports. One fault is avoided elsewhere: cuDNN read a
float32 mask as if it had the dtype of half-precision queries (pytorch 191612), so `vitrel.ops.sdpa` gives every mask the dtype
in which SDPA computes.
"""

import functools
from typing import NamedTuple

import torch
from torch.torch_version import TorchVersion


class Stack(NamedTuple):
    """A GPU and the libraries on it.

    Attributes:
        capability: compute capability, (9, 0) for sm_90.
        cudnn: version, 92600 for 9.26.0; 0 if there is none.
        torch: version, which compares with tuples.
    """

    capability: tuple[int, int]
    cudnn: int
    torch: TorchVersion


class Case(NamedTuple):
    """What decides whether a fault concerns a call of SDPA.

    Attributes:
        half: whether it computes in float16 or bfloat16.
        queries: number of queries; None in a graph that serves several.
        keys: number of keys; None in a graph that serves several.
        grad: whether q, k or v need a gradient.
        mask_grad: whether the mask needs a gradient, as a learned bias does.
    """

    half: bool
    queries: int | None
    keys: int | None
    grad: bool
    mask_grad: bool


def excluded(stack: Stack, case: Case) -> set[str]:
    """Return the names of the kernels (members of SDPBackend) that have a known fault for this case on this GPU."""
    found = set()
    # PyTorch may give the call to cuDNN, which serves half precision and masks that need no gradient.
    if stack.cudnn > 0 and case.half and not case.mask_grad:
        hopper, single = stack.capability[0] == 9, case.queries == 1
        # Gradients of queries are NaN if a row's log-sum-exp is below -88.7, with 64 keys modulo 128 (windows of 8x8, 24x24),
        # with and without a mask: pytorch issue 196678, cudnn-frontend pull request 628, fixed in cuDNN 9.26.
        if hopper and stack.cudnn < 92600 and case.grad and (case.keys is None or case.keys % 128 == 64):
            found.add("CUDNN_ATTENTION")
        # Gradients of keys and values are NaN for a single query with a very negative log-sum-exp: cudnn-frontend issue 1072,
        # cuDNN 9.26 and earlier, no fix known.
        if hopper and case.grad and single:
            found.add("CUDNN_ATTENTION")
        # Wrong output for a single query: pytorch issue 193893, pull request 194927, cuDNN 9.19 to 9.25.0 except 9.24.1.
        blackwell = stack.capability[0] in (10, 11)
        if blackwell and 91900 <= stack.cudnn <= 92500 and stack.cudnn != 92401 and single:
            found.add("CUDNN_ATTENTION")
    # Illegal memory access in the backward pass if the mask alone needs a gradient, as when only tables are trained: pytorch
    # issue 148476, pull request 188302, fixed in 2.15 at the latest.
    if case.mask_grad and not case.grad and stack.torch < (2, 15):
        found.add("EFFICIENT_ATTENTION")
    return found


@torch._dynamo.assume_constant_result
def kernels(index: int | None, *case: bool | int | None) -> str:
    """Return the kernels (SDPBackend) without a known fault for a call on a CUDA device, their names joined by spaces.

    "" if none has a fault, or no other is enabled: then SDPA's choice is left as it is. Kernels that are disabled already, as
    by torch.nn.attention.sdpa_kernel, are not named. The result is a string, since torch.compile handles strings.

    Args:
        index: of the CUDA device; None: the current one.
        case: the fields of a Case, in its order.
    """
    found = stack(torch.cuda.current_device() if index is None else index)
    out = excluded(found, Case(*case)) if found else set()
    if not out:
        return ""
    cuda = torch.backends.cuda
    enabled = {
        "CUDNN_ATTENTION": cuda.cudnn_sdp_enabled(),
        "FLASH_ATTENTION": cuda.flash_sdp_enabled(),
        "EFFICIENT_ATTENTION": cuda.mem_efficient_sdp_enabled(),
        "MATH": cuda.math_sdp_enabled(),
    }
    return " ".join(name for name, on in enabled.items() if on and name not in out)


@functools.cache
def stack(index: int) -> Stack | None:
    """Return the CUDA GPU with this index and its libraries, cached.

    None for AMD's, which no known fault concerns, and where there is no GPU, as with fake tensors of one.
    """
    if torch.version.hip or not torch.cuda.is_available():
        return None
    return Stack(torch.cuda.get_device_capability(index), torch.backends.cudnn.version() or 0, torch.__version__)
