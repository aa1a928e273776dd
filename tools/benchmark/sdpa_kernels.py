"""Which kernel of scaled_dot_product_attention serves an additive bias, in inference and in training, and what it allocates."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from tools.benchmark.gates import relative_errors
from tools.benchmark.timing import Repeats, Stopwatch, one_round, peak_bytes, warm_up

KERNELS = {
    "default": None,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
MODES = ("inference", "training without bias gradient", "training")  # in the last the bias requires its gradient


class Biased(NamedTuple):
    """q, k, v [B, H, N, D] and a bias [1, H, N, N] of one type."""

    name: str
    batch: int
    heads: int
    tokens: int
    width: int
    dtype: torch.dtype


def sdpa_shapes(gpu: bool) -> list[Biased]:
    """ViT-B at 224, 448 and 1024 px in half precision, and Swin-T's first stage with windows folded into heads."""
    if not gpu:
        return [Biased("N=12", 1, 2, 12, 16, torch.float32)]
    sizes = (
        ("N=197", 64, 12, 197, 64),
        ("N=785", 16, 12, 785, 64),
        ("N=4096", 2, 12, 4096, 64),
        ("64 windows, N=49", 256, 192, 49, 32),
    )
    return [Biased(*one, dtype) for dtype in (torch.bfloat16, torch.float16) for one in sizes]


def probe(shape: Biased, kernel: str, mode: str, device: torch.device, plan: Repeats) -> dict[str, Any]:
    """Errors against float32, operators and kernels that ran, milliseconds, and bytes beyond the inputs at the peak.

    RuntimeError, with what torch says of the reason, where the kernel does not serve the shape.
    """
    generator = torch.Generator(device).manual_seed(0)
    b, h, n, d = shape.batch, shape.heads, shape.tokens, shape.width
    sizes = (*((b, h, n, d),) * 4, (1, h, n, n))
    q, k, v, grad, bias = (torch.randn(s, generator=generator, device=device).to(shape.dtype) for s in sizes)
    leaves = [q, k, v, bias] if mode == MODES[2] else [q, k, v] if mode == MODES[1] else []
    for leaf in leaves:
        leaf.requires_grad_()

    def run() -> tuple[Tensor, ...]:
        with torch.set_grad_enabled(bool(leaves)):
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return out.detach(), *(torch.autograd.grad(out, leaves, grad) if leaves else ())

    def around() -> Any:
        return nullcontext() if KERNELS[kernel] is None else sdpa_kernel([KERNELS[kernel]])

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            with around():
                found = run()
        except RuntimeError as error:
            reasons = dict.fromkeys(str(w.message).partition(" (Triggered internally")[0] for w in said)
            raise RuntimeError(" ".join([str(error), *reasons])) from error
    errors = _errors(found, [x.float() for x in (q, k, v, bias)], grad.float(), len(leaves))
    del found
    watch = Stopwatch(device)
    calls, busy = warm_up(run, around, watch, plan)
    return {
        "errors": errors,
        "ran": _names(run, around, device),
        "peak_bytes": peak_bytes(run, around, device),
        "rounds": [[ms for ms, _ in one_round(run, around, watch, calls, busy)] for _ in range(plan.rounds)],
    }


def _errors(found: tuple[Tensor, ...], inputs: list[Tensor], grad: Tensor, leaves: int) -> dict[str, float]:
    """Of the first image; the gradient of the bias, a sum over images, is left to the gates."""
    q, k, v, bias = (x[:1].detach() for x in inputs)
    out = (q.double() @ k.double().mT * q.shape[-1] ** -0.5 + bias.double()).softmax(-1) @ v.double()
    errors = {"output": relative_errors(found[0][:1], out)[1]}
    if leaves:
        q, k, v = (x.double().requires_grad_() for x in (q, k, v))
        out = (q @ k.mT * q.shape[-1] ** -0.5 + bias.double()).softmax(-1) @ v
        true = torch.autograd.grad(out, (q, k, v), grad[:1].double())
        errors |= {n: relative_errors(a[:1], b)[1] for n, a, b in zip("qkv", found[1:], true, strict=False)}
    return errors


def _names(run: Callable[[], object], around: Callable[[], Any], device: torch.device) -> list[str]:
    """Operators of attention and kernels of the device, in order; the reason, where the profiler gives none."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    try:
        with around(), torch.profiler.profile(activities=activities) as profile:
            run()
            if device.type == "cuda":
                torch.cuda.synchronize()
        names = [
            event.name
            for event in profile.events()
            if event.device_type == torch.autograd.DeviceType.CUDA or event.name.startswith("aten::_scaled_dot_product")
        ]
    except Exception as error:  # a profiler that does not work here is no reason to measure nothing
        return [f"profiler: {error}"]
    return list(dict.fromkeys(names))
