"""Helpers of the figures: the encodings of a model, colors that are distinct in color blindness, sheets of panels."""

import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import MaxNLocator
from timm.layers import to_2tuple
from torch import Tensor, nn

from vitrel.common.sizes import Size
from vitrel.grid import Grid
from vitrel.inspect.any_model import encoding_name, model_name, own_encodings
from vitrel.inspect.attention import Layer
from vitrel.models.backbone import Backbone
from vitrel.position import PositionEncoding

Source = nn.Module | Sequence[Layer]  # a model, an encoding, or the layers that `vitrel.inspect.attention.record` returns

HIDDEN = "0.62"
DIVERGING = matplotlib.colormaps["RdBu_r"].with_extremes(bad=HIDDEN)
SEQUENTIAL = matplotlib.colormaps["viridis"].with_extremes(bad=HIDDEN)


def check_numbers(name: str, values: Tensor) -> Tensor:
    """Return the values; ValueError, with `name` in the message, if one is NaN, which a figure would show as hidden."""
    if bool(values.isnan().any()):
        raise ValueError(f"{name or 'the encoding'} holds NaN: its weights, or the image, are not numbers")
    return values


def source_name(source: Source) -> str:
    """Return the name of a model or an encoding for titles; "recorded attention" for recorded layers."""
    if isinstance(source, PositionEncoding):
        return encoding_name(source)
    return model_name(source) if isinstance(source, nn.Module) else "recorded attention"


def encodings_of(source: nn.Module, size: int | Size | None = None) -> list[tuple[str, PositionEncoding, Grid]]:
    """Return (layer, encoding, grid) of every encoding of a model; layer is "blocks.0" or "all blocks", "" for one alone.

    Args:
        source: a model or an encoding.
        size: in pixels for a model of vitrel, in patches for an encoding, one side or (h, w); None: the training size. The
            result is empty for an encoding without a training grid.

    Raises:
        ValueError: a size is given for a model of another library that holds encodings.
    """
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
    """Return a figure and its rows x columns panels of width x height inches, under a title whose lines are wrapped.

    `how` are arguments of Figure.subplots.
    """
    across = columns * width + 1.1
    lines = [part for line in title.split("\n") for part in textwrap.wrap(line, int(across / 0.078))]
    figure = Figure(figsize=(across, rows * height + 0.3 + 0.18 * len(lines)), layout="constrained")
    figure.suptitle("\n".join(lines), fontsize=9)
    return figure, figure.subplots(rows, columns, squeeze=False, **how).tolist()


def color_bar(figure: Figure, image: AxesImage, beside: Sequence[Axes], label: str) -> None:
    """Draw the color scale of `image`, with a label, beside panels."""
    bar = figure.colorbar(image, ax=beside, shrink=0.9, pad=0.01, aspect=14)
    bar.set_label(label, fontsize=7)
    bar.ax.tick_params(labelsize=7)


def whole_numbers(panel: Axes) -> None:
    """Set at most five ticks on each axis, at whole patches, with small labels."""
    for axis in (panel.xaxis, panel.yaxis):
        axis.set_major_locator(MaxNLocator(nbins=5, integer=True, min_n_ticks=1))
    panel.tick_params(labelsize=7, length=2)


def panel_height(shapes: Sequence[Sequence[int]], width: float) -> float:
    """Return the height in inches of panels `width` wide, with square cells for the tallest of arrays [.., rows, columns].

    It is 2 `width` at most, plus 0.35 for a title.
    """
    return width * min(2.0, max(rows / columns for *_, rows, columns in shapes)) + 0.35


def _path(name: str) -> str:
    """Return "blocks.0" for the encoding "blocks.0.position", "all blocks" for "shared_position", "layer" for ""."""
    return "all blocks" if name == "shared_position" else name.removesuffix(".position") or "layer"
