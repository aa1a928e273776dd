"""What becomes of the windows of a windowed model at a new size.

keep: they stay, grids they do not divide are padded and masked. divisor: in every stage and along each axis the largest window
up to the trained one that divides the grid; its encoding reads the sub-table, exactly, and nothing is padded. rescale: the
window grows and shrinks with the image, M * r / r_train rounded down along each axis (r / 32 for the published Swin), and the
encoding is read on it by its resize policy.
"""

import contextlib
from collections.abc import Iterator

from timm.layers import to_2tuple
from torch import nn

from vitrel.inspect.resolution_report import stages
from vitrel.layers import Attention
from vitrel.models.backbone import Backbone

WINDOW_POLICIES = ("keep", "divisor", "rescale")


def window_policies_at(model: nn.Module, size: tuple[int, int]) -> tuple[str, ...]:
    """The window policies that differ at `size` (h, w) pixels, "keep" first; () where there is nothing to choose."""
    layers = list(_windowed(model, size))
    divided = any(
        min(m, n) != d
        for attn, grid in layers
        for m, n, d in zip(attn.window, grid, _window(model, attn, grid, size, "divisor"), strict=True)
    )
    rescaled = any(tuple(attn.window) != _window(model, attn, grid, size, "rescale") for attn, grid in layers)
    others = [name for name, differs in (("divisor", divided), ("rescale", rescaled)) if differs]
    return ("keep", *others) if others else ()


@contextlib.contextmanager
def window_policy(model: nn.Module, policy: str, size: tuple[int, int]) -> Iterator[None]:
    """The model with the windows that `policy` gives it at `size` (h, w) pixels; afterwards its own are back.

    Nothing else changes: encodings read the new window from the parameters they have. ValueError for an unknown policy.
    """
    if policy not in WINDOW_POLICIES:
        raise ValueError(f"unknown window policy {policy!r}; choose one of {', '.join(WINDOW_POLICIES)}")
    layers = list(_windowed(model, size)) if policy != "keep" else []
    before = [(attn, attn.window, attn.shift) for attn, _ in layers]
    try:
        for attn, grid in layers:
            attn.window = _window(model, attn, grid, size, policy)
            if any(attn.shift):
                attn.shift = attn.window[0] // 2, attn.window[1] // 2
        yield
    finally:
        for attn, own, shift in before:
            attn.window, attn.shift = own, shift


def _window(model: Backbone, attn: Attention, grid: tuple[int, int], size: tuple[int, int], policy: str) -> tuple[int, int]:
    if policy == "divisor":
        return tuple(max(d for d in range(1, m + 1) if n % d == 0) for m, n in zip(attn.window, grid, strict=True))
    trained = to_2tuple(model.patch_embed.img_size)
    return tuple(max(1, m * r // at) for m, r, at in zip(attn.window, size, trained, strict=True))


def _windowed(model: nn.Module, size: tuple[int, int]) -> Iterator[tuple[Attention, tuple[int, int]]]:
    """Every windowed attention of a vitrel model, with the (h, w) tokens it meets at `size`; none of another model."""
    if not isinstance(model, Backbone):
        return
    for blocks, grid, _ in stages(model, model.token_grid(size)):
        yield from ((block.attn, grid[:2]) for block in blocks if block.attn.window is not None)
