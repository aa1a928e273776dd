"""Helpers of the figures: the encodings and layers of a source, colors for common color blindness, axes, legends."""

import math
import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator
from timm.layers import to_2tuple
from torch import Tensor, nn

from vitrel.common.sizes import Size
from vitrel.grid import Grid
from vitrel.inspect.any_model import encoding_name, model_name, own_encodings
from vitrel.inspect.attention import Layer, for_each_layer
from vitrel.models.backbone import Backbone
from vitrel.position import PositionEncoding

Source = nn.Module | Sequence[Layer]  # a model, an encoding, or the layers that `vitrel.inspect.attention.record` returns

HIDDEN = "0.62"
DIVERGING = matplotlib.colormaps["RdBu_r"].with_extremes(bad=HIDDEN)
SEQUENTIAL = matplotlib.colormaps["viridis"].with_extremes(bad=HIDDEN)
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")  # Okabe and Ito's palette
DASHES = ("-", "--", ":", "-.")
DY, DX = "dy (patches)", "dx (patches)"
SIGN = "query minus key: dy > 0, key above; dx > 0, key to the left"


def check_numbers(name: str, values: Tensor) -> Tensor:
    """Return the values; ValueError if one is NaN, which a figure would show as hidden."""
    if bool(values.isnan().any()):
        raise ValueError(f"{name or 'the encoding'} holds NaN: its weights, or the image, are not numbers")
    return values


def visit_layers(source: Source, images: Tensor, use: Callable[[Layer], None], position: bool = True) -> None:
    """Call use(layer) for each recorded layer, or for each layer of a model as it runs `images`; see `for_each_layer`."""
    if isinstance(source, nn.Module):
        for_each_layer(source, images, use, position)
    else:
        for layer in source:
            use(layer)


def source_name(source: Source) -> str:
    """The name of a model, an encoding or recorded layers in titles."""
    if isinstance(source, PositionEncoding):
        return encoding_name(source)
    return model_name(source) if isinstance(source, nn.Module) else "recorded attention"


def chosen(layers: Sequence, indices: Sequence[int] | None) -> list:
    """The `layers` at `indices` (negative ones count from the end), all for None; ValueError for an index out of range."""
    if indices is None:
        return list(layers)
    for index in indices:
        if layers and not -len(layers) <= index < len(layers):
            raise ValueError(f"there is no layer {index}: the layers that can be drawn are 0 to {len(layers) - 1}")
    return [layers[index] for index in indices] if layers else []


def encodings_of(source: nn.Module, size: int | Size | None = None) -> list[tuple[str, PositionEncoding, Grid]]:
    """[(name, encoding, grid)] of every encoding of a model, or of an encoding itself with the name "".

    size: pixels for a model of vitrel, patches for an encoding, one side or (h, w); None: the training size. Raises ValueError
    for a size with another model that holds encodings. Empty for an encoding without a training grid.
    """
    if size is not None and min(to_2tuple(size)) < 1:
        raise ValueError(f"size is a side or (h, w), at least 1, not {size}")
    if isinstance(source, PositionEncoding):
        grids = (getattr(part, "grid", None) for part in source.modules())
        trained: Grid | None = next((grid for grid in grids if grid is not None), None)
        if trained is None:
            return []
        h, w = trained[:2] if size is None else to_2tuple(size)
        return [("", source, Grid(h, w, trained.prefix))]
    encodings = own_encodings(source)
    if isinstance(source, Backbone):
        names = {encoding: name for name, encoding in encodings.items()}
        pixels = source.img_size if size is None else to_2tuple(size)
        return [(_path(names[encoding]), encoding, grid) for encoding, grid in source.encodings(pixels)]
    if encodings and size is not None:
        raise ValueError(f"the encodings of {source_name(source)} are drawn on their own grids: leave size out")
    return [(_path(name), encoding, grid) for name, encoding in encodings.items() for _, _, grid in encodings_of(encoding)]


def sheet(rows: int, columns: int, width: float, height: float, title: str, **how: Any) -> tuple[Figure, list[list[Axes]]]:
    """A figure and its rows x columns panels of width x height inches, under a title whose lines are wrapped."""
    across = columns * width + 1.1
    lines = [part for line in title.split("\n") for part in textwrap.wrap(line, int(across / 0.078))]
    figure = Figure(figsize=(across, rows * height + 0.3 + 0.18 * len(lines)), layout="constrained")
    figure.suptitle("\n".join(lines), fontsize=9)
    return figure, figure.subplots(rows, columns, squeeze=False, **how).tolist()


def grid_of_panels(count: int, width: float, height: float, title: str) -> tuple[Figure, list[Axes]]:
    """`sheet` with `count` panels of width x height inches in rows of at most four."""
    columns = min(count, 4)
    figure, rows = sheet(math.ceil(count / columns), columns, width, height, title)
    panels = [panel for row in rows for panel in row]
    for panel in panels[count:]:
        panel.set_axis_off()
    return figure, panels[:count]


def color_bar(figure: Figure, image: AxesImage, beside: Sequence[Axes], label: str) -> None:
    """Add the colors of `image` with their values and a label beside panels."""
    bar = figure.colorbar(image, ax=beside, shrink=0.9, pad=0.01, aspect=14)
    bar.set_label(label, fontsize=7)
    bar.ax.tick_params(labelsize=7)


def head_name(head: int, heads: int) -> str:
    """Label of a panel or line of a head; "all heads" if there is only one."""
    return "all heads" if heads == 1 else f"head {head}"


def draw_offsets(axes: Axes, values: Tensor, trained: Size | None, signed: bool, reach: tuple[float, float]) -> AxesImage:
    """Draw values [2h-1, 2w-1] as cells at their offsets, dy downwards, and outline the offsets of a smaller training grid.

    reach: the values of the first and last color.
    """
    h, w = values.shape[0] / 2, values.shape[1] / 2  # half a cell beyond the largest offsets
    shown = values.masked_fill(~values.isfinite(), torch.nan).numpy()
    image = axes.imshow(
        shown, DIVERGING if signed else SEQUENTIAL, vmin=reach[0], vmax=reach[1], extent=(-w, w, h, -h), interpolation="nearest"
    )
    y, x = (h, w) if trained is None else (min(trained[0] - 0.5, h), min(trained[1] - 0.5, w))
    if y < h or x < w:
        axes.add_patch(Rectangle((-x, -y), 2 * x, 2 * y, fill=False, color="black", lw=1.2))
    whole_numbers(axes)
    axes.tick_params(labelsize=7, length=2)
    return image


def whole_numbers(panel: Axes, sides: str = "xy") -> None:
    """Set at most five ticks on each of `sides`, at whole patches."""
    for side in sides:
        getattr(panel, f"{side}axis").set_major_locator(MaxNLocator(nbins=5, integer=True, min_n_ticks=1))


def name_axes(panel: Axes, x: str, y: str, fontsize: int = 7) -> None:
    """Set the names of both axes, and the size of the numbers at the ticks."""
    panel.set_xlabel(x, fontsize=fontsize)
    panel.set_ylabel(y, fontsize=fontsize)
    panel.tick_params(labelsize=7)


def legend(figure: Figure, outlined: bool, hidden: bool) -> None:
    """Add a legend below the panels for outlines and gray cells, if there are any."""
    handles = [Patch(facecolor="none", edgecolor="black", label="offsets of the training grid")] if outlined else []
    handles += [Patch(facecolor=HIDDEN, label="hidden, or no pair has it")] if hidden else []
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=8)


def line_style(number: int) -> dict[str, object]:
    """Color, dashes and width of line `number`, from 0."""
    return {"color": LINES[number % len(LINES)], "linestyle": DASHES[number // len(LINES) % len(DASHES)], "linewidth": 1.4}


def panel_height(shapes: Sequence[Sequence[int]], width: float) -> float:
    """Height in inches of panels of this width that show arrays [.., rows, columns] of all `shapes` with square cells."""
    return width * min(2.0, max(rows / columns for *_, rows, columns in shapes)) + 0.35


def _path(name: str) -> str:
    return "all blocks" if name == "shared_position" else name.removesuffix(".position") or "layer"
