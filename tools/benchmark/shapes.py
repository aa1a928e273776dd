"""Shapes of attention to benchmark, and random inputs for them."""

from typing import NamedTuple

import torch
from torch import Tensor

from vitrel.grid import Grid
from vitrel.ops.window import windows
from vitrel.position import create_position
from vitrel.position.terms import Table, Terms

STD = 0.5  # of bias and query tables; with values near zero, wrong indices would not show


class Shape(NamedTuple):
    """Shape of a call of vitrel.ops.attention, or of window_attention if `window` is set. width: D, of a head."""

    name: str
    encoding: str  # "table" | "factorized" | "decomposed" | "rope"
    grid: Grid
    batch: int
    heads: int
    width: int
    window: tuple[int, int] | None = None
    shift: tuple[int, int] = (0, 0)
    compiled: bool = True  # whether to measure compiled peers too (their compilation takes most of the time)

    @property
    def tokens(self) -> int:
        """Number of tokens in the batch."""
        return self.batch * self.grid.tokens

    def flops(self, training: bool) -> float:
        """Floating-point operations of the matrix products of attention: two forward, five more in training."""
        keys = self.window[0] * self.window[1] if self.window else self.grid.tokens
        return 4.0 * self.tokens * keys * self.heads * self.width * (3.5 if training else 1.0)


class Problem(NamedTuple):
    """Random inputs of a shape. `inputs` (q, k, v or qkv) and `leaves` (the tables) get gradients."""

    shape: Shape
    inputs: dict[str, Tensor]
    leaves: dict[str, Tensor]
    rotary: tuple[Tensor, Tensor] | None
    grad: Tensor  # of the output
    fixed: tuple[Tensor, ...] = ()  # cached by peers: of windows, visibility and penalty [L, N, N]; offset classes

    def terms(self) -> Terms:
        """Return the position terms that hold the leaves."""
        tables = []
        for name, value in self.leaves.items():
            kind, axis = name.split("_")
            tables.append(Table(axis, **{kind: value}))
        return Terms(rotary=self.rotary, tables=tuple(tables))

    def double(self) -> "Problem":
        """Return the problem in float64."""
        inputs, leaves = ({name: x.double() for name, x in group.items()} for group in (self.inputs, self.leaves))
        rotary = None if self.rotary is None else tuple(x.double() for x in self.rotary)
        return Problem(self.shape, inputs, leaves, rotary, self.grad.double(), self.fixed)


def make_problem(shape: Shape, dtype: torch.dtype, device: torch.device, keep: bool = True) -> Problem:
    """Draw a problem: inputs of standard deviation 1 in `dtype`, tables of STD in float32, as in training.

    keep: whether to make the tensors that peers cache, of which some are [N, N].
    """
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    b, heads, width, grid = shape.batch, shape.heads, shape.width, shape.grid
    bias_grid, channels = Grid(*shape.window) if shape.window else grid, heads * width
    if shape.window:
        inputs = {"qkv": draw(b, grid.h, grid.w, 3 * channels).to(dtype)}
        grad = draw(b, grid.h, grid.w, channels).to(dtype)
    else:  # as a linear layer leaves them: [B, N, 3, H, D], seen as [B, H, N, D]
        q, k, v = draw(b, grid.tokens, 3, heads, width).to(dtype).permute(2, 0, 3, 1, 4)
        inputs = {"q": q, "k": k, "v": v}
        grad = draw(b, grid.tokens, heads, width).to(dtype).transpose(1, 2)
    leaves, rotary = {}, None
    if shape.encoding == "table":
        leaves = {"bias_hw": draw(heads, bias_grid.classes()) * STD}
    elif shape.encoding == "factorized":
        leaves = {f"bias_{axis}": draw(heads, bias_grid.classes(axis)) * STD for axis in ("h", "w")}
    elif shape.encoding == "decomposed":
        leaves = {f"query_{axis}": draw(1, bias_grid.classes(axis), width) * STD for axis in ("h", "w")}
    else:
        rotary = tuple(x.to(device) for x in create_position("rope_axial", bias_grid, heads, width)(bias_grid).rotary)
    return Problem(shape, inputs, leaves, rotary, grad, _kept(shape, bias_grid, tuple(leaves), device) if keep else ())


def _kept(shape: Shape, bias_grid: Grid, leaves: tuple[str, ...], device: torch.device) -> tuple[Tensor, ...]:
    fixed = ()
    if shape.window:
        visible = windows(*shape.grid[:2], shape.window, shape.shift, device).visible.unflatten(0, (-1, bias_grid.tokens))
        fixed = (visible, torch.zeros(visible.shape, device=device).masked_fill(~visible, float("-inf")))
    if shape.encoding == "decomposed":
        return (*fixed, Grid(bias_grid.h, 1).index("h", device), Grid(1, bias_grid.w).index("w", device))
    return fixed + tuple(bias_grid.index(name.split("_")[1], device) for name in leaves)


def _windows(name: str, batch: int, side: int, heads: int, window: int, shift: int, width: int = 32, **options) -> Shape:
    title = f"{name} {side}x{side}, window {window}, shift {shift}, batch {batch}"
    options = {"encoding": "table"} | options
    if options["encoding"] != "table":
        title += f", {options['encoding']}"
    return Shape(
        title, grid=Grid(side, side), batch=batch, heads=heads, width=width, window=(window,) * 2, shift=(shift,) * 2, **options
    )


def _global(side: int, batch: int, encoding: str, prefix: int = 1, compiled: bool = True, model: str = "ViT-B") -> Shape:
    name = f"{model} {side}x{side}{f'+{prefix}' if prefix else ''}, {encoding}, batch {batch}"
    return Shape(name, encoding, Grid(side, side, prefix), batch, 12 if model == "ViT-B" else 6, 64, compiled=compiled)


SHAPES = (  # of a GPU, the most important first
    _windows("Swin-T", 256, 56, 3, 7, 3),
    _global(28, 16, "table"),
    _windows("Swin-T", 256, 14, 12, 7, 3),
    _global(64, 2, "table", prefix=0),
    _global(14, 64, "table"),
    _windows("Swin-B", 32, 96, 4, 12, 6),
    _windows("Swin-T", 64, 64, 3, 16, 8),
    _global(64, 2, "decomposed", prefix=0),
    *(_global(28, 16, name) for name in ("factorized", "rope")),
    *(_global(14, 64, name, prefix=0, compiled=False) for name in ("factorized", "decomposed", "rope")),
    _windows("Swin-T", 256, 28, 6, 7, 3, encoding="rope", compiled=False),
)
CPU_SHAPES = (  # a batch of 1 and 8, sizes at which a call takes seconds at most: a quarter of an hour in all
    _windows("Swin-T", 8, 56, 3, 7, 3),
    _global(28, 1, "table", model="ViT-S"),
    _global(64, 1, "table", 0, model="ViT-S", compiled=False),
    _windows("Swin-T", 1, 56, 3, 7, 3, compiled=False),
    _windows("Swin-T", 8, 14, 12, 7, 3, compiled=False),
    _global(14, 8, "table", model="ViT-S"),
    _global(14, 1, "table", compiled=False),
    Shape("Swin-T 60x50, window 7, shift 3, batch 1", "table", Grid(60, 50), 1, 3, 32, (7, 7), (3, 3), compiled=False),
    _windows("Swin-T", 8, 28, 6, 7, 3, compiled=False),
    _windows("Swin-T", 8, 7, 24, 7, 0, compiled=False),
    _windows("Swin-T", 1, 14, 12, 7, 3, compiled=False),
    *(_global(28, 1, name, 0, model="ViT-S", compiled=False) for name in ("rope", "factorized", "decomposed")),
    _global(28, 1, "table", compiled=False),
    _global(14, 8, "rope", model="ViT-S", compiled=False),
    _global(14, 8, "factorized", model="ViT-S", compiled=False),
    _windows("Swin-T", 1, 28, 6, 7, 3, compiled=False),
    _windows("Swin-T", 1, 7, 24, 7, 0, compiled=False),
    *(_global(48, 1, name, 0, model="ViT-S", compiled=False) for name in ("decomposed", "factorized", "rope")),
    *(_global(side, 1, "decomposed", 0, model="ViT-S", compiled=False) for side in (32, 36)),
)
QUICK_SHAPES = (  # smoke test on any machine
    Shape("quick windows", "table", Grid(6, 9), 1, 2, 16, (3, 3), (1, 2), compiled=False),
    Shape("quick table", "table", Grid(3, 5, 1), 1, 2, 16, compiled=False),
    Shape("quick decomposed", "decomposed", Grid(3, 5), 1, 2, 16, compiled=False),
)
