"""Content overriding a negative bias: a key that position speaks against and that is attended to all the same."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from vitrel.inspect.attention import Layer, for_each_layer
from vitrel.inspect.plot.lattice import Source, check_numbers, source_name
from vitrel.inspect.plot.on_image import draw_picture, outline, picture_of
from vitrel.inspect.plot.style import LINES, sheet
from vitrel.inspect.resolution_report import Pair

LEAST = 0.1  # logits that position must take from a key
BARS = 6


class Overruled(NamedTuple):
    """The attention of one query, and the patch among its keys that position lowers although it is attended.

    Content and position are logits less their mean over the keys the query sees, [N]; `weights`, `without` [N].
    """

    layer: Layer  # of the image alone
    image: int
    head: int
    window: int
    query: int  # slots
    key: int
    content: Tensor
    position: Tensor
    weights: Tensor
    without: Tensor


def overruled(source: Source, images: Tensor, top: int = 1, shown: Tensor | None = None) -> Figure:
    """The clearest case of content overriding a negative bias in a model, on `images` [B, 3, height, width].

    Over all layers, heads, images and queries that are patches: the key among the `top` most attended patches of its query, one
    that gets at least an even share of attention, whose logit position lowers most, against the mean of what position adds to
    the keys that this query sees (softmax does not see a constant), by at least 0.1. Drawn: the image with query (blue) and key
    (orange), the most attended patches by number; for each the logits of content, position and their sum, less the mean over
    keys; and its weight with position and without. source, shown: as of `attention`, `shown` [B, 3, height, width].
    Raises ValueError where there is no such key: position takes less than 0.1 from every one.
    """
    case = find_overruled(source, images, top)
    layer, picture = case.layer, picture_of(source, images[case.image]) if shown is None else shown[case.image]
    patches = layer.patches[case.window].nonzero().flatten()
    ranked = patches[case.weights[patches].argsort(descending=True)][:BARS].tolist()
    ranked = ranked if case.key in ranked else [*ranked[:-1], case.key]
    place, lowered = ranked.index(case.key) + 1, -float(case.position[case.key])
    query, key = (_patch(layer, case.window, slot) for slot in (case.query, case.key))
    where = f"{source_name(source)}, {layer.name}, head {case.head}: patch {query} attends to {key}"
    title = f"{where} as no. {place}\nalthough position takes {lowered:.2f} logits from it, against the mean over the keys"
    figure, axes = sheet(1, 3, 2.7, 2.7, title, width_ratios=(1, 1.25, 1))
    draw_picture(axes[0][0], layer, picture)
    outline(axes[0][0], layer, query, LINES[0])
    outline(axes[0][0], layer, key, LINES[1])
    names = []
    for number, slot in enumerate(ranked, 1):
        y, x = _patch(layer, case.window, slot)
        names.append(f"{number}: ({y}, {x})")
        centre = ((x + 0.5) * layer.stride[1], (y + 0.5) * layer.stride[0])
        axes[0][0].annotate(str(number), centre, ha="center", va="center", fontsize=7, color="black", bbox=_LABEL)
    axes[0][0].set_title("blue: query; orange: the key", fontsize=8)
    content, position = case.content[ranked], case.position[ranked]
    logits = {"content": (content, LINES[5]), "position": (position, LINES[1]), "sum": (content + position, "0.3")}
    _bars(axes[0][1], names, logits, "logit less its mean over the keys")
    shares = {"with position": (case.weights[ranked], "0.3"), "without": (case.without[ranked], LINES[5])}
    _bars(axes[0][2], names, shares, "weight")
    for label in (axes[0][1].get_yticklabels()[place - 1], axes[0][2].get_yticklabels()[place - 1]):
        label.set(color=LINES[1], fontweight="bold")
    return figure


def find_overruled(source: Source, images: Tensor, top: int = 1) -> Overruled:
    """What `overruled` draws, with its arguments and errors."""
    if top < 1:
        raise ValueError(f"top is the number of attended patches to look among, at least 1, not {top}")
    best, lowest = None, 0.0

    def look(layer: Layer) -> None:
        nonlocal best, lowest
        lowered, flat = _lowest(layer, top)
        if lowered < lowest:
            lowest, best = lowered, _case(layer, flat)

    if isinstance(source, nn.Module):
        for_each_layer(source, images, look)
    else:
        for layer in source:
            look(layer)
    if best is None or lowest > -LEAST:
        raise ValueError(
            f"content overrides no negative bias in {source_name(source)} on these images: from the {top} most attended of a "
            f"query's patches position takes at most {abs(lowest):.2g} logits, and {LEAST} are asked for"
        )
    return best


_LABEL = {"boxstyle": "circle,pad=0.15", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}


def _lowest(layer: Layer, top: int) -> tuple[float, tuple[int, ...]]:
    """The lowest relative position among the attended keys, and where: (image, window, head, query, key)."""
    if layer.position is None:
        raise ValueError(f"{layer.name} was recorded without position: use vitrel.inspect.attention.record")
    patches = layer.patches
    keys = check_numbers(layer.name, layer.weights).masked_fill(~patches[:, None, None], -1.0)
    weights, at = keys.topk(min(top, keys.shape[-1]), -1)  # [B, W, H, N, top]
    relative = _relative(layer.position, layer).gather(-1, at)
    seen = (layer.tokens >= 0).sum(-1)[:, None, None, None] if layer.visible is None else layer.visible.sum(-1, keepdim=True)
    asked = patches[:, None, :, None] & (weights >= 1 / seen.clamp(min=1))
    relative = relative.masked_fill(~asked, float("inf"))
    place = int(relative.argmin())
    image, window, head, query, rank = (int(i) for i in torch.unravel_index(torch.tensor(place), relative.shape))
    return float(relative.flatten()[place]), (image, window, head, query, int(at[image, window, head, query, rank]))


def _relative(values: Tensor, layer: Layer) -> Tensor:
    """[B, W, H, N, N] less the mean over the keys that each query sees."""
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


def _patch(layer: Layer, window: int, slot: int) -> Pair:
    return divmod(int(layer.tokens[window, slot]) - layer.grid.prefix, layer.grid.w)


def _bars(axes: Axes, names: Sequence[str], series: dict[str, tuple[Tensor, str]], label: str) -> None:
    height = 0.8 / len(series)
    for place, (name, (values, colour)) in enumerate(series.items()):
        at = [row + (place - (len(series) - 1) / 2) * height for row in range(len(names))]
        axes.barh(at, values.tolist(), height, color=colour, label=name)
    axes.axvline(0, color="black", linewidth=0.8)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(label, fontsize=8)
    axes.tick_params(labelsize=7)
    axes.legend(fontsize=7, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(series), handlelength=1)
