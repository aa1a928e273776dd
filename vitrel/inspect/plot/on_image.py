"""Figures of attention on an image: one patch's weights with and without position, and content that overrides a bias."""

import operator
from collections.abc import Sequence
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Rectangle
from torch import Tensor, nn

from vitrel.common.sizes import format_size
from vitrel.inspect.attention import Layer, record
from vitrel.inspect.plot.common import (
    DIVERGING,
    LINES,
    SEQUENTIAL,
    Source,
    check_numbers,
    chosen,
    panel_height,
    sheet,
    source_name,
    visit_layers,
)

LEAST = 0.1  # smallest reduction of a key's logit by position that counts
BARS = 6
CLEAR = (0.0, 0.0, 0.0, 0.0)
_LABEL = {"boxstyle": "circle,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}


class Overruled(NamedTuple):
    """Attention of one query, and the attended key whose logit position lowers most."""

    layer: Layer  # for this image, window, head and query alone
    image: int
    head: int
    window: int
    query: int  # slot in the window
    key: int  # slot in the window
    content: Tensor  # [N] logits minus their mean over the visible keys
    position: Tensor  # [N] likewise
    weights: Tensor  # [N]
    without: Tensor  # [N] weights without position


def attention(
    source: Source,
    image: Tensor,
    query: tuple[int, int],
    layer: int = -1,
    heads: Sequence[int] | None = None,
    shown: Tensor | None = None,
) -> Figure:
    """Draw the image and the attention weights of patch `query` with position, without position, and their difference.

    source: a model that `vitrel.inspect.attention.record` supports, or the layers it recorded with this image first. image:
    [3, height, width] as the model takes it. query: (row, column) in patches of the layer. layer: its index in the order in
    which layers run. heads: indices, a row of panels each; by default their mean. shown: [3, height, width] from 0 to 1, drawn
    in place of the image; by default the image with the model's normalization undone. With windows, only the query's window has
    weights. Raises ValueError for a layer, head or patch that does not exist, and for layers recorded without `content`.
    """
    layers = record(source, image[None]) if isinstance(source, nn.Module) else source
    (seen,) = chosen(layers, [layer])
    alone = seen.needed("content")
    window, slot = slot_of(seen, query)
    check_numbers(seen.name, seen.weights[0])
    both = torch.stack((seen.weights[0, window, :, slot], alone[0, window, :, slot]))  # [2, H, N]
    count = both.shape[1]
    if heads is not None and not len(heads):
        raise ValueError("heads is empty: leave it out for the mean of all heads")
    if heads is not None and (missing := [head for head in heads if not 0 <= head < count]):
        raise ValueError(f"{seen.name} has heads 0 to {count - 1}, not {missing[0]}")
    both = both.mean(1, keepdim=True) if heads is None else both[:, list(heads)]
    names = [f"mean of {count} heads"] if heads is None else [f"head {head}" for head in heads]
    picture = picture_of(source, image) if shown is None else shown
    height, width = _extent(seen)
    title = f"{source_name(source)}, {seen.name}: attention of patch ({query[0]}, {query[1]})"
    title += f" of {seen.grid.h}x{seen.grid.w}"
    title += "" if seen.window is None else f", window {seen.window[0]}x{seen.window[1]}"
    size = panel_height([torch.Size((round(height), round(width)))], 2.1)
    figure, axes = sheet(len(names), 4, 2.1, size, f'{title}\nblue outline: the query; "without": softmax of q and k alone')
    for row, name, weights, content in zip(axes, names, *both, strict=True):
        _row(figure, row, name, seen, (window, query), picture, (weights, content))
    return figure


def overruled(source: Source, images: Tensor, top: int = 1, shown: Tensor | None = None) -> Figure:
    """Draw the clearest case in which content overrides a negative bias, for a model on `images` [B, 3, height, width].

    Among all layers, heads, images and queries that are patches, take the keys that are one of the `top` most attended patches
    of their query and have at least a uniform share of its attention. Of these the figure shows the key whose logit position
    lowers most, relative to the mean of what position adds to the keys that the query sees (softmax ignores a constant).
    Panels: the image with query (blue), key (orange) and the most attended patches by rank; the logits of content, position
    and their sum, each minus its mean over keys; the weights with and without position. source, shown: as for `attention`,
    `shown` [B, 3, height, width]. Raises ValueError if position lowers no such key by 0.1 or more.
    """
    case = find_overruled(source, images, top)
    layer, picture = case.layer, picture_of(source, images[case.image]) if shown is None else shown[case.image]
    patches = layer.patches[case.window].nonzero().flatten()
    ranked = patches[case.weights[patches].argsort(descending=True)][:BARS].tolist()
    ranked = ranked if case.key in ranked else [*ranked[:-1], case.key]
    rank, lowered = ranked.index(case.key) + 1, -float(case.position[case.key])
    query, key = (layer.patch_at(case.window, slot) for slot in (case.query, case.key))
    where = f"{source_name(source)}, {layer.name}, head {case.head}: patch {query} attends to {key}"
    title = f"{where} as no. {rank}\nalthough position takes {lowered:.2f} logits from it, against the mean over the keys"
    figure, axes = sheet(1, 3, 2.7, 2.7, title, width_ratios=(1, 1.25, 1))
    draw_picture(axes[0][0], layer, picture)
    outline(axes[0][0], layer, query, LINES[0])
    outline(axes[0][0], layer, key, LINES[1])
    names = []
    for number, slot in enumerate(ranked, 1):
        y, x = layer.patch_at(case.window, slot)
        names.append(f"{number}: ({y}, {x})")
        center = ((x + 0.5) * layer.stride[1], (y + 0.5) * layer.stride[0])
        axes[0][0].annotate(str(number), center, ha="center", va="center", fontsize=7, color="black", bbox=_LABEL)
    axes[0][0].set_title("blue: query; orange: the key", fontsize=8)
    content, position = case.content[ranked], case.position[ranked]
    logits = {"content": (content, LINES[5]), "position": (position, LINES[1]), "sum": (content + position, "0.3")}
    _bars(axes[0][1], names, logits, "logit less its mean over the keys")
    shares = {"with position": (case.weights[ranked], "0.3"), "without": (case.without[ranked], LINES[5])}
    _bars(axes[0][2], names, shares, "weight")
    for label in (axes[0][1].get_yticklabels()[rank - 1], axes[0][2].get_yticklabels()[rank - 1]):
        label.set(color=LINES[1], fontweight="bold")
    return figure


def find_overruled(source: Source, images: Tensor, top: int = 1) -> Overruled:
    """The case that `overruled` draws; same arguments and errors."""
    if top < 1:
        raise ValueError(f"top is the number of attended patches to look among, at least 1, not {top}")
    best, lowest = None, 0.0

    def look(layer: Layer) -> None:
        nonlocal best, lowest
        lowered, flat = _lowest(layer, top)
        if lowered < lowest:
            lowest, best = lowered, _case(layer, flat)

    visit_layers(source, images, look)
    if best is None or lowest > -LEAST:
        raise ValueError(
            f"content overrides no negative bias in {source_name(source)} on these images: from the {top} most attended of a "
            f"query's patches position takes at most {abs(lowest):.2g} logits, less than {LEAST}"
        )
    return best


def slot_of(layer: Layer, query: tuple[int, int]) -> tuple[int, int]:
    """(window, slot) of the patch `query` (row, column) in a recorded layer; ValueError for a patch outside its grid."""
    (y, x), grid = map(operator.index, query), layer.grid
    if not (0 <= y < grid.h and 0 <= x < grid.w):
        raise ValueError(f"query ({y}, {x}) is outside the {grid.h}x{grid.w} patches of {layer.name}")
    window, slot = (layer.tokens == grid.prefix + y * grid.w + x).nonzero()[0].tolist()
    return window, slot


def on_grid(layer: Layer, window: int, row: Tensor) -> Tensor:
    """Values of a window's slots [N] -> map [h, w] of the patches in these slots, NaN at other patches."""
    values = torch.full((layer.grid.h * layer.grid.w,), torch.nan)
    patches = layer.patches[window]
    values[layer.tokens[window][patches] - layer.grid.prefix] = row[patches].float()
    return values.view(layer.grid.h, layer.grid.w)


def picture_of(source: Source, image: Tensor) -> Tensor:
    """The image [3, height, width] from 0 to 1, with the model's normalization undone, or stretched if that is unknown."""
    image = image.detach().float().cpu()
    if len(image) not in (1, 3):
        raise ValueError(f"an image of {len(image)} channels has no colors to draw: pass shown, [3, height, width] from 0 to 1")
    known = getattr(source, "pretrained_cfg", None) or {}
    if "mean" in known and "std" in known:
        mean, std = (torch.tensor(known[name])[:, None, None] for name in ("mean", "std"))
        return (image * std + mean).clamp(0, 1)
    return (image - image.min()) / (image.max() - image.min()).clamp(min=1e-6)


def draw_picture(axes: Axes, layer: Layer, picture: Tensor, faded: bool = False) -> None:
    """Draw the image at its size in pixels, with room for padding to whole patches."""
    height, width = picture.shape[1:]
    if layer.image is not None and (height, width) != layer.image:
        raise ValueError(
            f"a picture of {format_size((height, width))} pixels for attention on {format_size(layer.image)}: "
            "it belongs to another image"
        )
    axes.imshow(picture.permute(1, 2, 0).numpy(), extent=(0, width, height, 0), alpha=0.35 if faded else 1.0)
    h, w = _extent(layer)
    axes.set(xlim=(0, w), ylim=(h, 0), xticks=[], yticks=[])


def outline(axes: Axes, layer: Layer, patch: tuple[int, int], color: str) -> None:
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
    window, query = at
    weights, content = both
    seen = (weights > 0) | (content > 0)  # a window at the border may include patches of the opposite side
    maps = [on_grid(layer, window, values.masked_fill(~seen, torch.nan)) for values in (weights, content, weights - content)]
    top = max(float(values.nan_to_num().max()) for values in maps[:2])
    largest = max(float(maps[2].nan_to_num().abs().max()), 1e-9)
    draw_picture(row[0], layer, picture)
    row[0].set_ylabel(name, fontsize=9)
    row[0].set_title("image", fontsize=8)
    prefix = layer.tokens[window] < layer.grid.prefix
    prefix &= layer.tokens[window] >= 0
    titles = []
    for label, values in (("with position", weights), ("without position", content)):
        share = f"\n{100 * float(values[prefix].sum()):.0f} % on prefix tokens" if bool(prefix.any()) else ""
        titles.append(f"{label}{share}")
    scales = [(SEQUENTIAL, 0.0, top)] * 2 + [(DIVERGING, -largest, largest)]
    for panel, title, values, scale in zip(row[1:], [*titles, "difference"], maps, scales, strict=True):
        draw_picture(panel, layer, picture, faded=True)
        image = _overlay(panel, layer, values, scale)
        panel.set_title(title, fontsize=8)
        bar = figure.colorbar(image, ax=panel, shrink=0.75, pad=0.02, aspect=16)
        bar.ax.tick_params(labelsize=6)
    for panel in row:
        outline(panel, layer, query, "#0072B2")


def _overlay(axes: Axes, layer: Layer, values: Tensor, scale: tuple) -> AxesImage:
    (colors, low, high), (h, w) = scale, _extent(layer)
    colors = colors.with_extremes(bad=CLEAR)
    return axes.imshow(values.numpy(), colors, vmin=low, vmax=high, extent=(0, w, h, 0), interpolation="nearest")


def _extent(layer: Layer) -> tuple[float, float]:
    """Height and width in pixels of the patches, padding included."""
    return layer.grid.h * layer.stride[0], layer.grid.w * layer.stride[1]


def _lowest(layer: Layer, top: int) -> tuple[float, tuple[int, ...]]:
    """Lowest position logit, minus its query's mean over visible keys, and its (image, window, head, query, key).

    Of queries that are patches, and of the keys that are among their `top` patches by weight and have at least a uniform share;
    inf, with indices of no meaning, if there is none. ValueError for a layer recorded without position.
    """
    position, patches = layer.needed("position"), layer.patches
    keys = check_numbers(layer.name, layer.weights).masked_fill(~patches[:, None, None], -1.0)
    weights, at = keys.topk(min(top, keys.shape[-1]), -1)  # [B, W, H, N, top]
    relative = _relative(position, layer).gather(-1, at)
    seen = (layer.tokens >= 0).sum(-1)[:, None, None, None] if layer.visible is None else layer.visible.sum(-1, keepdim=True)
    attended = patches[:, None, :, None] & (weights >= 1 / seen.clamp(min=1))
    relative = relative.masked_fill(~attended, float("inf"))
    lowest = int(relative.argmin())
    image, window, head, query, rank = (int(i) for i in torch.unravel_index(torch.tensor(lowest), relative.shape))
    return float(relative.flatten()[lowest]), (image, window, head, query, int(at[image, window, head, query, rank]))


def _relative(values: Tensor, layer: Layer) -> Tensor:
    """Values [B, W, H, N, N] minus their mean over the keys that each query sees."""
    seen = torch.ones_like(values) if layer.visible is None else layer.visible.to(values.dtype)
    return values - (values * seen).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp(min=1)


def _case(layer: Layer, at: tuple[int, ...]) -> Overruled:
    image, window, head, query, key = at
    row = (slice(image, image + 1), slice(window, window + 1), slice(head, head + 1), slice(query, query + 1))
    names = ("weights", "content", "position")
    small = {name: getattr(layer, name)[row] for name in names}
    one = layer._replace(**small, visible=None if layer.visible is None else layer.visible[row]).cpu()
    logits = _relative(one.content.clamp(min=torch.finfo(torch.float32).tiny).log(), one)
    values = (logits, _relative(one.position, one), one.weights, one.content)
    return Overruled(one, image, head, window, query, key, *(value.flatten() for value in values))


def _bars(axes: Axes, names: Sequence[str], series: dict[str, tuple[Tensor, str]], label: str) -> None:
    height = 0.8 / len(series)
    for place, (name, (values, color)) in enumerate(series.items()):
        at = [row + (place - (len(series) - 1) / 2) * height for row in range(len(names))]
        axes.barh(at, values.tolist(), height, color=color, label=name)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(label, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=7, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(series), handlelength=1)
