"""The layout of windows as one operator, vitrel::window_layout, in what torch.compile makes.

Inlined into a graph that serves any size, its divisions by symbolic sizes would be repeated in every kernel that gathers tokens
or biases: inductor took minutes to simplify them, and its kernels were slower than eager ones. In a graph of one size they are
numbers, and inlining is what is fast.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import has_static_value

from vitrel.ops.exporting import exporting
from vitrel.ops.window import Windows, windows


def window_layout(h: int, w: int, window: tuple[int, int], shift: tuple[int, int], device: torch.device) -> Windows:
    """As `windows`. Exported programs keep PyTorch's own operators."""
    compiling = torch.compiler.is_compiling() and not exporting()
    if compiling and not (has_static_value(h) and has_static_value(w)):
        return Windows(*window_layout_op(h, w, window, shift, device))
    return windows(h, w, window, shift, device)


@torch.library.custom_op("vitrel::window_layout", mutates_args=())
def window_layout_op(
    h: int, w: int, window: Sequence[int], shift: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four tensors of `Windows` over a grid of h x w tokens."""
    return tuple(windows(h, w, tuple(window), tuple(shift), device))


@window_layout_op.register_fake
def _(
    h: int, w: int, window: Sequence[int], shift: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    n = window[0] * window[1]
    slots = ((h + window[0] - 1) // window[0]) * ((w + window[1] - 1) // window[1]) * n
    slot = torch.empty(slots, dtype=torch.int64, device=device)
    visible = torch.empty(slots, n, dtype=torch.bool, device=device)
    return slot, torch.empty_like(slot), visible, torch.empty(h * w, dtype=torch.int64, device=device)
