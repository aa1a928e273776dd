"""`attention`: the figure of one patch's attention on an image, with and without position."""

from collections.abc import Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from torch import Tensor, nn

from vitrel.inspect.attention import NEGLIGIBLE, Layer, layer_position_share, record
from vitrel.inspect.plot.common import (
    DIVERGING,
    HIDDEN,
    SEQUENTIAL,
    Source,
    check_numbers,
    panel_height,
    sheet,
    source_name,
)

CLEAR, GRAY = (0.0, 0.0, 0.0, 0.0), ListedColormap([HIDDEN])


def attention(
    source: Source,
    image: Tensor,
    query: tuple[int, int],
    layer: int = -1,
    heads: Sequence[int] | None = None,
    shown: Tensor | None = None,
) -> Figure:
    """Draw the image and the attention weights of patch `query` with position, without position, and their difference.

    With windows, only the query's window has weights. The difference is gray where position's share of the layer's logits is
    below NEGLIGIBLE (0.01).

    Args:
        source: any model that `vitrel.inspect.attention.record` takes, or the layers it recorded with this image first.
        image: [channels, height, width] as the model takes it.
        query: (row, column) in patches of the layer.
        layer: its index in the order in which layers run.
        heads: indices, a row of panels each; by default one row for their mean.
        shown: [3, height, width] from 0 to 1, drawn in place of the image; by default the image with the model's normalization
            undone.

    Raises:
        ValueError: the patch is outside the grid, the layers were recorded without `content`, the weights of the layer hold
            NaN, or the image has neither 1 nor 3 channels and `shown` is left out.
    """
    layers = record(source, image[None]) if isinstance(source, nn.Module) else source
    seen = layers[layer]
    alone = seen.needed("content")
    check_numbers(seen.name, seen.weights[0])
    (y, x), grid = query, seen.grid
    if not (0 <= y < grid.h and 0 <= x < grid.w):
        raise ValueError(f"query ({y}, {x}) is outside the {grid.h}x{grid.w} patches of {seen.name}")
    window, slot = (seen.tokens == grid.prefix + y * grid.w + x).nonzero()[0].tolist()
    both = torch.stack((seen.weights[0, window, :, slot], alone[0, window, :, slot]))  # [2, H, N]
    count = both.shape[1]
    both = both.mean(1, keepdim=True) if heads is None else both[:, list(heads)]
    names = [f"mean of {count} heads"] if heads is None else [f"head {head}" for head in heads]
    picture = _picture_of(source, image) if shown is None else shown
    height, width = _extent(seen)
    title = f"{source_name(source)}, {seen.name}: attention of patch ({query[0]}, {query[1]})"
    title += f" of {seen.grid.h}x{seen.grid.w}"
    title += "" if seen.window is None else f", window {seen.window[0]}x{seen.window[1]}"
    size = panel_height([torch.Size((round(height), round(width)))], 2.1)
    figure, axes = sheet(len(names), 4, 2.1, size, f'{title}\nblue outline: the query; "without": softmax of q and k alone')
    for row, name, weights, content in zip(axes, names, *both, strict=True):
        _row(figure, row, name, seen, (window, query), picture, (weights, content))
    return figure


def _picture_of(source: Source, image: Tensor) -> Tensor:
    """Return the image with values from 0 to 1, by the model's mean and std, or stretched if these are unknown.

    ValueError if it has neither 1 nor 3 channels.
    """
    if len(image) not in (1, 3):
        raise ValueError(f"an image of {len(image)} channels has no colors to draw: pass shown, [3, height, width] from 0 to 1")
    image = image.detach().float().cpu()
    known = getattr(source, "pretrained_cfg", None) or {}
    if "mean" in known and "std" in known:
        mean, std = (torch.tensor(known[name])[:, None, None] for name in ("mean", "std"))
        return (image * std + mean).clamp(0, 1)
    return (image - image.min()) / (image.max() - image.min()).clamp(min=1e-6)


def _on_grid(layer: Layer, window: int, row: Tensor) -> Tensor:
    """Return the values of a window's slots [N] as a map [h, w] of the patches in these slots, NaN at other patches."""
    values = torch.full((layer.grid.h * layer.grid.w,), torch.nan)
    patches = layer.patches[window]
    values[layer.tokens[window][patches] - layer.grid.prefix] = row[patches].float()
    return values.view(layer.grid.h, layer.grid.w)


def _draw_picture(axes: Axes, layer: Layer, picture: Tensor, faded: bool = False) -> None:
    """Draw the image (pale if `faded`) at its size in pixels, with room for padding to whole patches."""
    height, width = picture.shape[1:]
    axes.imshow(picture.permute(1, 2, 0).numpy(), extent=(0, width, height, 0), alpha=0.35 if faded else 1.0)
    h, w = _extent(layer)
    axes.set(xlim=(0, w), ylim=(h, 0), xticks=[], yticks=[])


def _outline(axes: Axes, layer: Layer, patch: tuple[int, int], color: str) -> None:
    """Draw a frame around a patch (row, column), with a white border that makes it visible on any image."""
    (y, x), (h, w) = patch, layer.stride
    for ink, width in (("white", 3.2), (color, 1.8)):
        axes.add_patch(Rectangle((x * w, y * h), w, h, fill=False, color=ink, lw=width, clip_on=False))


def _row(
    figure: Figure,
    row: list[Axes],
    name: str,
    layer: Layer,
    at: tuple[int, tuple[int, int]],
    picture: Tensor,
    both: tuple[Tensor, Tensor],
) -> None:
    """Draw a row of panels: the image, the weights with position and without it, and their difference.

    `at` is (index of the window, (row, column) of the query's patch), `both` its weights with and without position, [N] each.
    """
    window, query = at
    weights, content = both
    seen = (weights > 0) | (content > 0)  # a window at the border may include patches of the opposite side
    maps = [_on_grid(layer, window, values.masked_fill(~seen, torch.nan)) for values in (weights, content, weights - content)]
    top = max(float(values.nan_to_num().max()) for values in maps[:2])
    largest = max(float(maps[2].nan_to_num().abs().max()), 1e-9)
    _draw_picture(row[0], layer, picture)
    row[0].set_ylabel(name, fontsize=9)
    row[0].set_title("image", fontsize=8)
    prefix = layer.tokens[window] < layer.grid.prefix
    prefix &= layer.tokens[window] >= 0
    titles = []
    for label, values in (("with position", weights), ("without position", content)):
        share = f"\n{100 * float(values[prefix].sum()):.0f} % on prefix tokens" if bool(prefix.any()) else ""
        titles.append(f"{label}{share}")
    negligible = layer_position_share(layer) < NEGLIGIBLE
    scales = [(SEQUENTIAL, 0.0, top)] * 2 + [(GRAY if negligible else DIVERGING, -largest, largest)]
    titles.append("difference: negligible" if negligible else "difference")
    for panel, title, values, scale in zip(row[1:], titles, maps, scales, strict=True):
        _draw_picture(panel, layer, picture, faded=True)
        image = _overlay(panel, layer, values, scale)
        panel.set_title(title, fontsize=8)
        bar = figure.colorbar(image, ax=panel, shrink=0.75, pad=0.02, aspect=16)
        bar.ax.tick_params(labelsize=6)
    for panel in row:
        _outline(panel, layer, query, "#0072B2")


def _overlay(axes: Axes, layer: Layer, values: Tensor, scale: tuple) -> AxesImage:
    """Draw a map [h, w] over the image; `scale` is (colors, lowest, highest value), and NaN is transparent."""
    (colors, low, high), (h, w) = scale, _extent(layer)
    colors = colors.with_extremes(bad=CLEAR)
    return axes.imshow(values.numpy(), colors, vmin=low, vmax=high, extent=(0, w, h, 0), interpolation="nearest")


def _extent(layer: Layer) -> tuple[float, float]:
    """Return the height and width in pixels of all patches, padding included."""
    return layer.grid.h * layer.stride[0], layer.grid.w * layer.stride[1]
