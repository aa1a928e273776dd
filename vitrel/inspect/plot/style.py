"""What the pictures share: colours that are told apart with every common colour blindness, and the axes of offsets."""

import math
import textwrap
from collections.abc import Sequence

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from vitrel.inspect.resolution_report import Pair

HIDDEN = "0.62"
DIVERGING = matplotlib.colormaps["RdBu_r"].with_extremes(bad=HIDDEN)
SEQUENTIAL = matplotlib.colormaps["viridis"].with_extremes(bad=HIDDEN)
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito's palette
DASHES = ("-", "--", ":", "-.")
DY, DX = "dy (patches)", "dx (patches)"
SIGN = "query minus key: dy > 0, key above; dx > 0, key to the left"


def sheet(rows: int, columns: int, width: float, height: float, title: str, **how: object) -> tuple[Figure, list[list[Axes]]]:
    """A figure with rows x columns panels of width x height inches and a title, whose lines are wrapped."""
    across = columns * width + 1.1
    lines = [part for line in title.split("\n") for part in textwrap.wrap(line, int(across / 0.078))]
    figure = Figure(figsize=(across, rows * height + 0.3 + 0.18 * len(lines)), layout="constrained")
    figure.suptitle("\n".join(lines), fontsize=9)
    return figure, figure.subplots(rows, columns, squeeze=False, **how).tolist()


def head_name(head: int, heads: int) -> str:
    """The name of a panel or line; a single one stands for all heads."""
    return "all heads" if heads == 1 else f"head {head}"


def draw_offsets(axes: Axes, values: Tensor, trained: Pair | None, signed: bool, reach: tuple[float, float]) -> AxesImage:
    """values [2h-1, 2w-1] as cells at their offsets, dy downwards; the offsets of a smaller training grid are outlined.

    reach: colours from the first to the second value.
    """
    h, w = values.shape[0] / 2, values.shape[1] / 2  # half a cell beyond the largest offsets
    shown = values.masked_fill(~values.isfinite(), torch.nan).numpy()
    image = axes.imshow(
        shown, DIVERGING if signed else SEQUENTIAL, vmin=reach[0], vmax=reach[1], extent=(-w, w, h, -h), interpolation="nearest"
    )
    y, x = (h, w) if trained is None else (min(trained[0] - 0.5, h), min(trained[1] - 0.5, w))
    if y < h or x < w:
        axes.add_patch(Rectangle((-x, -y), 2 * x, 2 * y, fill=False, color="black", lw=1.2))
    whole_numbers(axes.xaxis, axes.yaxis)
    axes.tick_params(labelsize=7, length=2)
    return image


def whole_numbers(*sides: Axis) -> None:
    """Few ticks, at whole patches."""
    for axis in sides:
        axis.set_major_locator(MaxNLocator(nbins=5, integer=True, min_n_ticks=1))


def legend(figure: Figure, outlined: bool, hidden: bool) -> None:
    """What outline and grey mean, below the panels, where there are any."""
    handles = [Patch(facecolor="none", edgecolor="black", label="offsets of the training grid")] if outlined else []
    handles += [Patch(facecolor=HIDDEN, label="hidden, or no pair has it")] if hidden else []
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=8)


def line_style(place: int) -> dict[str, object]:
    """Colour and dashes of line number `place`."""
    return {"color": LINES[place % len(LINES)], "linestyle": DASHES[place // len(LINES) % len(DASHES)], "linewidth": 1.4}


def panel_height(shapes: Sequence[torch.Size], width: float) -> float:
    """Height in inches of panels `width` wide that hold cells [.., rows, columns] of the tallest of `shapes`."""
    return width * min(2.0, max(rows / columns for *_, rows, columns in shapes)) + 0.35


def columns_for(panels: int, most: int = 4) -> tuple[int, int]:
    """(rows, columns) of a sheet of so many panels."""
    columns = min(panels, most)
    return math.ceil(panels / columns), columns
