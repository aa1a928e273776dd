"""In which direction each head looks: its mean offset."""

from collections.abc import Sequence

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor, nn

from vitrel.inspect.attention import Layer, for_each_layer
from vitrel.inspect.plot.lattice import Lattice, Source, check_numbers, chosen, lattices, source_name
from vitrel.inspect.plot.style import DX, DY, LINES, SIGN, columns_for, sheet
from vitrel.inspect.resolution_report import Pair


def directions(
    source: Source, size: int | Pair | None = None, layers: Sequence[int] | None = None, images: Tensor | None = None
) -> Figure:
    """One arrow for each head, from no offset to its mean offset (query minus key), one picture for each layer.

    With `images` [B, 3, height, width], or of recorded layers (`vitrel.inspect.attention.record`): the mean offset weighted by
    attention, over images, queries and keys that are patches; as every patch asks, uniform attention has mean zero. Of a model
    or an encoding alone: weighted by the softmax of its bias over all offsets; size, layers: as of `lattices`.
    Raises ValueError where there is no bias apart from content, or a size is given with images, which have their own.
    """
    if images is not None and size is None and isinstance(source, nn.Module):
        seen: list[tuple[str, Tensor]] = []
        for_each_layer(source, images, lambda layer: seen.append((layer.name, attended_offset(layer).cpu())), position=False)
        found, how = chosen(seen, layers), "weighted by attention"
    elif isinstance(source, nn.Module) and images is None:
        found = [(d.layer, bias_mean_offset(d)) for d in lattices(source, size, layers) if d.unit == "logits"]
        how = "softmax of the bias over offsets"
    else:
        if size is not None:
            raise ValueError("images and recorded layers have a size of their own: leave size out")
        found = [(layer.name, attended_offset(layer)) for layer in chosen(source, layers)]
        how = "weighted by attention"
    if not found:
        name = source_name(source)
        raise ValueError(f"{name} has no bias apart from content: give images, whose attention tells")
    reach = 1.15 * max(0.5, *(float(mean.abs().max()) for _, mean in found))
    rows, columns = columns_for(len(found))
    title = f"{source_name(source)}: mean offset of each head, {how}\n{SIGN}"
    figure, axes = sheet(rows, columns, 2.3, 2.5, title)
    panels, most = [panel for row in axes for panel in row], max(len(mean) for _, mean in found)
    for panel, (name, mean) in zip(panels, found, strict=False):
        _arrows(panel, mean, reach)
        panel.set_title(name, fontsize=8)
    for panel in panels[len(found) :]:
        panel.set_axis_off()
    handles = [panels[0].plot([], [], marker="o", linestyle="", color=_colour(head))[0] for head in range(most)]
    names = [f"head {head}" for head in range(most)]
    figure.legend(handles, names, loc="outside right center", frameon=False, fontsize=8)
    return figure


def bias_mean_offset(lattice: Lattice) -> Tensor:
    """Mean (dy, dx) under the softmax of the values over the offsets, hidden ones left out, [H, 2]."""
    values = lattice.values.double().flatten(1).nan_to_num(nan=float("-inf"), neginf=float("-inf"))
    h, w = (n // 2 for n in lattice.values.shape[1:])
    dy, dx = torch.meshgrid(torch.arange(-h, h + 1), torch.arange(-w, w + 1), indexing="ij")
    return values.softmax(1) @ torch.stack((dy.flatten(), dx.flatten()), -1).double()


def attended_offset(layer: Layer) -> Tensor:
    """Mean (dy, dx), query minus key in patches, weighted by attention among patches, over images and queries, [H, 2]."""
    patches, grid = layer.patches, layer.grid
    at = (layer.tokens - grid.prefix).clamp(min=0)
    at = torch.stack((at // grid.w, at % grid.w), -1).double()  # [W, N, 2]
    weights = (
        check_numbers(layer.name, layer.weights).double() * patches[:, None, None] * patches[:, None, :, None]
    )  # [B, W, H, N, N]
    mass = weights.sum(-1, keepdim=True)
    apart = at[None, :, None] - weights @ at[:, None] / mass  # [B, W, H, N, 2]
    asked = (mass > 0).expand_as(apart)  # else a query that is padding, or gives patches nothing
    return torch.where(asked, apart, 0.0).sum((0, 1, 3)) / asked.sum((0, 1, 3))


def _arrows(axes: Axes, mean: Tensor, reach: float) -> None:
    axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    axes.axvline(0, color="0.8", linewidth=0.8, zorder=0)
    for head, (dy, dx) in enumerate(mean.tolist()):
        axes.annotate("", (dx, dy), (0, 0), arrowprops={"arrowstyle": "->", "color": _colour(head), "lw": 1.4})
        axes.plot(dx, dy, "o", color=_colour(head), markersize=5)
        axes.annotate(str(head), (dx, dy), (4, 3), textcoords="offset points", fontsize=7)
    axes.set(xlim=(-reach, reach), ylim=(reach, -reach), aspect="equal")  # dy downwards, as in the maps
    axes.set_xlabel(DX, fontsize=7)
    axes.set_ylabel(DY, fontsize=7)
    axes.tick_params(labelsize=7)


def _colour(head: int) -> str:
    return LINES[head % len(LINES)]
