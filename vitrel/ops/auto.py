"""The table by which backend "auto" is chosen: rows by device and kind of call, each with the measurement that put it there.

A call takes the first row that applies to it and whose backend does not refuse it. In a graph of torch.compile that serves any
size, rows with a minimum of tokens are left out: comparing the size would give a graph for each outcome. In exported and traced
programs only the last two rows count, so that a program does not depend on the machine that wrote it.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch

from vitrel.geometry import is_exporting, is_known
from vitrel.ops.reference import Call, has_content_terms
from vitrel.ops.sdpa import HALF


class Row(NamedTuple):
    """A row of ROWS: calls of one kind on one device, and the backend that "auto" takes for them.

    Attributes:
        backend: a key of vitrel.ops.BACKENDS.
        device: "cuda": NVIDIA's GPUs, in float16 and bfloat16; "cpu": outside of graphs; or "any".
        kind: of the calls, in words.
        applies: whether a call is of this kind.
        tokens: least number of tokens of the grid; 0: every grid, also where a graph does not know its size.
        measured: times, sizes and memory that put the row here, as `vitrel.ops.why` returns them.
    """

    backend: str
    device: str
    kind: str
    applies: Callable[[Call], bool]
    tokens: int
    measured: str


def _windows(call: Call) -> bool:
    return call.window is not None


def _biases(call: Call) -> bool:
    return call.window is None and bool(call.terms.tables) and not has_content_terms(call.terms.tables)


def _learned_biases(call: Call) -> bool:
    return call.grad and _biases(call) and any([table.bias.requires_grad for table in call.terms.tables])


def _content(call: Call) -> bool:
    return call.window is None and has_content_terms(call.terms.tables)


def _content_of_any_size(call: Call) -> bool:
    return _content(call) and not is_known(*call.grid)


def _values(call: Call) -> bool:
    return call.window is None and any([table.value is not None for table in call.terms.tables])


# Measured on a GPU: one NVIDIA H200, torch 2.11.0, Triton 3.6.0, bfloat16, sizes as images x rows x columns. On a CPU: one
# thread of an AMD EPYC, torch 2.14.1, float32, one image of 6 heads of 64. Compiled for one size, sdpa is the faster one there
# (decomposed at 48x48 with backward 1.25 times).
ROWS = (
    Row(
        "triton", "cuda", "windows", _windows, 0,
        "Swin-T compiled 19,740 images/s against 10,280 by sdpa, in training 5,173 against 3,691; of windows of more than 64 "
        "tokens the backward pass was compiled, not timed",
    ),
    Row(
        "triton", "cuda", "learned biases in training", _learned_biases, 4096,
        "8x64x64 with backward 14.6 ms and 0.3 GB against 21.4 ms and 4.6 GB by sdpa; 128x14x14 1.8 ms against 1.4",
    ),
    Row(
        "triton", "cuda", "biases", _biases, 16384,
        "2x128x128 11.7 ms against 22.1 by sdpa; 8x64x64 2.9 ms against 2.5",
    ),
    Row(
        "augmented_qk", "cuda", "content tables in training", lambda call: _content(call) and call.grad, 0,
        "128x14x14 with backward 2.2 ms against 3.9 by sdpa",
    ),
    Row(
        "augmented_qk", "cuda", "content tables", _content, 1024,
        "8x64x64 2.9 ms and 0.8 GB; 128x14x14 0.92 ms against 0.78 by sdpa",
    ),
    Row(
        "augmented_qk", "cuda", "content tables in a graph for any size", _content_of_any_size, 0,
        "0.85 times the speed of sdpa at 128x14x14, and no [N, N] tensor at larger sizes",
    ),
    Row(
        "augmented_qk", "cuda", "value tables, which sdpa refuses", _values, 0,
        "not timed below 1,024 tokens; the reference, which else serves them, computes several [N, N] tensors in turn",
    ),
    Row(
        "augmented_qk", "cpu", "content tables", _content, 1296,
        "decomposed at 36x36 1.88 times as fast as sdpa, with backward 1.41, deberta 2.41 and 1.81; decomposed at 32x32 0.95",
    ),
    Row(
        "augmented_qk", "cpu", "value tables, which sdpa refuses", _values, 196,
        "shaw at 14x14 1.34 times as fast as the reference, with backward 1.13; 8x8 0.93",
    ),
    Row("sdpa", "any", "all other calls", lambda call: True, 0, "no other backend was measured to be faster"),
    Row("reference", "any", "calls that sdpa refuses", lambda call: True, 0, "no other backend serves them"),
)  # fmt: skip


def rows_of(call: Call) -> list[Row]:
    """Return the rows of ROWS whose device, kind and tokens fit a call, in order, whether or not their backends refuse it.

    The last is that of the reference, which serves every call.
    """
    if is_exporting() or torch.jit.is_tracing():
        device = "any"
    elif call.device.type == "cuda":
        device = "cuda" if call.dtype in HALF and torch.version.hip is None else "any"
    else:
        device = "any" if torch.compiler.is_compiling() else call.device.type
    sized = is_known(*call.grid)
    return [
        row
        for row in ROWS
        if row.device in (device, "any")
        and (not row.tokens or (sized and call.grid.tokens >= row.tokens))
        and row.applies(call)
    ]
