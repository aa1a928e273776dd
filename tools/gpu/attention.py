"""Attention alone, on every backend and without position: time of the kernels by the profiler, of the host, and memory."""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tools.benchmark.models import STD
from tools.benchmark.worker import most_bytes
from tools.gpu.parts import sync
from vitrel.grid import Grid
from vitrel.ops import attention, window_attention
from vitrel.position import create_position
from vitrel.position.terms import Table, Terms

FLOOR = "no position"  # SDPA, which takes flash attention
MODES = ("forward", "training")
_WARM, _CALLS = 3, 5


class Shape(NamedTuple):
    """A call of vitrel.ops.attention, or of window_attention if there is a window. width: channels of a head.

    encoding: "table" or "decomposed". float32: on a GPU too, where the others are in bfloat16.
    """

    name: str
    batch: int
    grid: Grid
    heads: int
    width: int = 64
    encoding: str = "table"
    window: tuple[int, int] | None = None
    shift: tuple[int, int] = (0, 0)
    float32: bool = False

    def dtype(self, device: torch.device) -> torch.dtype:
        """Return the precision of the call on a device."""
        return torch.float32 if self.float32 or device.type != "cuda" else torch.bfloat16

    def moved(self, training: bool, size: int) -> int:
        """Return the bytes that have to be read and written: inputs and output, with backward those and their gradients."""
        channels = self.batch * self.grid.tokens * self.heads * self.width
        return size * channels * (4 + 8 * training)


def windows(side: int, batch: int, heads: int, window: int, width: int = 32) -> Shape:
    """Return shifted windows over a square grid."""
    name = f"windows {window}x{window}, {batch}x{side}x{side}, {heads} heads of {width}"
    shift = (window // 2,) * 2 if side > window else (0, 0)
    return Shape(name, batch, Grid(side, side), heads, width, window=(window, window), shift=shift)


def everywhere(side: int, batch: int, encoding: str = "table", heads: int = 12) -> Shape:
    """Return global attention over a square grid."""
    return Shape(f"{encoding}, {batch}x{side}x{side}, {heads} heads of 64", batch, Grid(side, side), heads, encoding=encoding)


SHAPES = (  # the most important first
    windows(56, 128, 3, 7),
    everywhere(64, 8),
    everywhere(14, 128),
    windows(64, 128, 3, 8),
    windows(14, 128, 12, 7),
    everywhere(64, 8, "decomposed"),
    everywhere(14, 128, "decomposed"),
    everywhere(32, 32),
    windows(64, 32, 3, 16),
    windows(48, 64, 3, 12),
    everywhere(128, 2),
    *(one._replace(name=f"{one.name}, float32", float32=True) for one in (windows(56, 128, 3, 7), windows(14, 128, 12, 7))),
)
SMALL = (windows(10, 1, 2, 7), everywhere(8, 1, heads=2), everywhere(8, 1, "decomposed", heads=2))


def contenders(shape: Shape) -> tuple[str, ...]:
    """Return the backends that may serve a shape, and attention without position where it is the same kernel."""
    if shape.window:
        return ("triton", "sdpa")
    return ("augmented_qk" if shape.encoding == "decomposed" else "triton", "sdpa", FLOOR)


def call(shape: Shape, contender: str, training: bool, device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    """Return a function that computes attention once, in training with the gradients of inputs and tables."""
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    (b, grid, heads, width), of = shape[1:5], Grid(*shape.window) if shape.window else shape.grid
    encoding = create_position(shape.encoding, of, heads, width).to(device)
    with torch.no_grad():
        for value in encoding.parameters():
            value.copy_(draw(*value.shape) * STD)
    if shape.window:
        inputs = [draw(b, grid.h, grid.w, 3 * heads * width).to(dtype)]
        grad = draw(b, grid.h, grid.w, heads * width).to(dtype)
    else:  # as a linear layer leaves them: [B, N, 3, H, D], seen as [B, H, N, D]
        inputs = list(draw(b, grid.tokens, 3, heads, width).to(dtype).permute(2, 0, 3, 1, 4))
        grad = draw(b, grid.tokens, heads, width).to(dtype).transpose(1, 2)
    terms = Terms() if contender == FLOOR else encoding(of)
    backend = "sdpa" if contender == FLOOR else contender
    inputs, terms, leaves = _leaves(inputs, terms, training)

    def run() -> object:
        with torch.inference_mode(not training):
            if shape.window:
                out = window_attention(inputs[0], terms, grid, shape.window, shape.shift, heads, backend=backend)
            else:
                out = attention(*inputs, terms, grid, backend=backend)
        return torch.autograd.grad(out, leaves, grad) if training else out

    return run


def _leaves(inputs: Sequence[Tensor], terms: Terms, training: bool) -> tuple[list[Tensor], Terms, list[Tensor]]:
    """Return inputs and terms that no longer depend on anything, and in training the tensors whose gradients are computed."""
    inputs = [x.detach().requires_grad_(training) for x in inputs]
    tables = tuple(
        Table(*(x.detach().requires_grad_(training) if isinstance(x, Tensor) else x for x in table)) for table in terms.tables
    )
    of_tables = [x for table in tables for x in table if isinstance(x, Tensor)]
    return inputs, terms._replace(tables=tables), [*inputs, *of_tables]


def measure(run: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Return microseconds of a call and mb, the most megabytes that its tensors hold.

    gpu_us: of its kernels, by the profiler (without a GPU, of the call). host_us: until the call returns. call_us: until its
    kernels have ended.
    """
    for _ in range(_WARM):
        run()
    whole, host = [], []
    for _ in range(2 * _CALLS):
        sync(device)
        start = time.perf_counter()
        run()
        host.append(time.perf_counter() - start)
        sync(device)
        whole.append(time.perf_counter() - start)
    found = {"call_us": 1e6 * median(whole), "host_us": 1e6 * median(host)}
    found["gpu_us"] = found["call_us"]
    if device.type == "cuda":
        found["gpu_us"] = sum(kernel_us(run, device).values())
    return found | {"mb": most_bytes(run, device) / 1e6}


def kernel_us(run: Callable[[], object], device: torch.device) -> dict[str, float]:
    """Return microseconds of a call by kernel, from the profiler; other events of it have them a second time."""
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(_CALLS):
            run()
        sync(device)
    events: Any = seen.key_averages()
    on_gpu = [event for event in events if event.device_type == DeviceType.CUDA and not event.is_user_annotation]
    return {event.key: event.self_device_time_total / _CALLS for event in on_gpu}
