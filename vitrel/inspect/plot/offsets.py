"""Pictures over the offsets of query and key: what position adds there (maps, profiles), and where heads look on average.

An offset is query minus key, in patches. What position adds is read from the terms of encodings or from recorded layers. What
depends on content has no single number at an offset, so there are three readings of `Terms`:
bias, what the logit gains whatever the content: the tables' biases, and those parts of query and gated tables that remain
where the projected query is zero (Transformer-XL's v . W r, PaPE's parabolas);
rotation, the mean over frequencies of cos(angle of the query - angle of the key), what q . k becomes for q = k with equal
energy in every frequency (xPos: times its decay);
rows, the length of a query or key table's row (both axes added) times the scale of the logits: what a query or key of unit
length gains at most.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor, nn

from vitrel.grid import Grid
from vitrel.inspect.any_model import evaluating
from vitrel.inspect.attention import Layer, for_each_layer, offset_mean
from vitrel.inspect.plot.common import (
    DX,
    DY,
    LINES,
    SIGN,
    Source,
    check_numbers,
    chosen,
    columns_for,
    draw_offsets,
    encodings_of,
    head_name,
    legend,
    line_style,
    panel_height,
    sheet,
    source_name,
    whole_numbers,
)
from vitrel.inspect.position_changes import rows_by_offset
from vitrel.position import PositionEncoding, Table, Terms, key_of
from vitrel.position.terms import parts_of, upcast
from vitrel.sizes import Size


class Lattice(NamedTuple):
    """Values over offsets, `values` [H, 2h-1, 2w-1]: offset (dy, dx) at [:, dy + h-1, dx + w-1].

    H is 1 where all heads are alike. -inf where position hides the key, NaN where no pair with that offset was recorded.
    signed: zero means that nothing is added.
    """

    layer: str  # path of the layer in the model, "" for an encoding alone
    what: str  # what is drawn, in a few words
    unit: str
    values: Tensor
    trained: Size | None  # grid (h, w) of training, None where it is not known
    signed: bool = True


def lattices(source: Source, size: int | Size | None = None, layers: Sequence[int] | None = None) -> list[Lattice]:
    """All that can be drawn over offsets of a model or an encoding, layer by layer; a composition part by part.

    source: any of our models or one with our encodings inside; an encoding; or layers recorded on images, whose mean logit
    from position is taken, also where it depends on content. size: of our models, pixels; of an encoding, patches; one side or
    (h, w), that of training unless given. layers: indices into the layers of attention that have an encoding.
    Raises ValueError where there is nothing to draw, and why.
    """
    if not isinstance(source, nn.Module):
        if size is not None:
            raise ValueError("recorded layers have the size they were recorded at: leave size out")
        measured = [_measured(layer) for layer in chosen(source, layers)]
        if not any(bool(one.values.nan_to_num().any()) for one in measured):
            raise ValueError("nothing to draw by offset: position adds nothing to the logits that were recorded")
        return measured
    found = [
        [lattice for part in parts for lattice in _drawn(name, part, grid)]
        for name, parts, grid in chosen(_in_attention(source, size), layers)
    ]
    if not any(found):
        raise ValueError(_nothing(source))
    return [lattice for layer in found for lattice in layer]


def offset_maps(
    source: Source, size: int | Size | None = None, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
) -> Figure:
    """What position adds at every offset, one row of pictures for each layer (and part of a composition), one for each head.

    Arguments and errors as of `lattices`, which says what is drawn of which encoding. Red adds, blue takes away,
    white is 0, on one scale for each row; where zero lies outside a head's logits, every head's mean over the visible offsets
    is taken off first (softmax does not see it) and the colour bar says so. The outline encloses the offsets of the training
    grid where the grid is larger. heads: indices, all unless given; ValueError where no layer has them.
    """
    drawn = lattices(source, size, layers)
    columns = [_heads(lattice, heads) for lattice in drawn]
    if not any(columns):
        raise ValueError(f"no layer has heads {list(heads)}: the most is {max(len(d.values) for d in drawn)}")
    width, title = 1.75, f"{source_name(source)}: position by offset\n{SIGN}"
    height = panel_height([d.values.shape for d in drawn], width)
    figure, axes = sheet(len(drawn), max(map(len, columns)), width, height, title)
    for row, lattice, own in zip(axes, drawn, columns, strict=True):
        values, centred = _centred(lattice)
        reach, image = _reach(values[own], lattice.signed), None
        for place, panel in enumerate(row):
            if place >= len(own):
                panel.set_axis_off()
                continue
            image = draw_offsets(panel, values[own[place]], lattice.trained, lattice.signed, reach)
            panel.set_title(head_name(own[place], len(values)), fontsize=8)
            panel.set_xlabel(DX, fontsize=7)
        if image is not None:
            row[0].set_ylabel(f"{lattice.layer}\n{DY}".strip(), fontsize=7)
            label = f"{lattice.what}\n({lattice.unit}{', minus mean of head' if centred else ''})"
            bar = figure.colorbar(image, ax=row, shrink=0.9, pad=0.01, aspect=14)
            bar.set_label(label, fontsize=7)
            bar.ax.tick_params(labelsize=7)
    hidden = any(not d.values.isfinite().all() for d in drawn)
    legend(figure, any(panel.patches for row in axes for panel in row), hidden)
    return figure


def profiles(
    source: Source, size: int | Size | None = None, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
) -> Figure:
    """Sections of `offset_maps` (its arguments and errors): along dy at dx = 0 and along dx at dy = 0, one line for each head.

    Hidden offsets are gaps. Dashed lines mark the largest offsets of the training grid where the grid is larger.
    """
    drawn = lattices(source, size, layers)
    figure, axes = sheet(len(drawn), 2, 3.2, 2.0, f"{source_name(source)}: profiles\n{SIGN}", sharey="row")
    handles: dict[str, Line2D] = {}
    for row, lattice in zip(axes, drawn, strict=True):
        values = lattice.values.masked_fill(~lattice.values.isfinite(), torch.nan)
        middle = values.shape[1] // 2, values.shape[2] // 2
        for panel, axis, name in zip(row, (0, 1), (f"{DY}, at dx = 0", f"{DX}, at dy = 0"), strict=True):
            along = values[:, :, middle[1]] if axis == 0 else values[:, middle[0]]  # [H, 2n-1]
            offsets = torch.arange(along.shape[1]) - middle[axis]
            for head in _heads(lattice, heads):
                # a marker too, for a grid of one row leaves a single point
                style = line_style(head) | {"marker": ".", "markersize": 3}
                (line,) = panel.plot(offsets.numpy(), along[head].numpy(), **style)
                handles.setdefault(head_name(head, len(values)), line)
            if lattice.trained is not None and lattice.trained[axis] - 1 < middle[axis]:
                for edge in (1 - lattice.trained[axis], lattice.trained[axis] - 1):
                    panel.axvline(edge, color="0.4", linewidth=1, linestyle=(0, (4, 3)))
            panel.set_xlabel(name, fontsize=8)
            panel.tick_params(labelsize=7)
            panel.grid(alpha=0.25)
            whole_numbers(panel.xaxis)
        row[0].set_ylabel(f"{lattice.layer}\n{lattice.unit}".strip(), fontsize=8)
        row[0].set_title(lattice.what, fontsize=8, loc="left")
    if not handles:
        raise ValueError(f"no layer has heads {list(heads)}: the most is {max(len(d.values) for d in drawn)}")
    figure.legend(handles.values(), handles, loc="outside right center", frameon=False, fontsize=8)
    return figure


def directions(
    source: Source, size: int | Size | None = None, layers: Sequence[int] | None = None, images: Tensor | None = None
) -> Figure:
    """One arrow for each head, from no offset to its mean offset (query minus key), one picture for each layer.

    With `images` [B, 3, height, width], or of recorded layers (`vitrel.inspect.attention.record`): the mean offset weighted by
    attention, over images, queries and keys that are patches; every patch is a query, so uniform attention has mean zero.
    Of a model or an encoding alone: weighted by the softmax of its bias over all offsets; size, layers: as of `lattices`.
    Raises ValueError where there is no bias apart from content, or a size is given with images, which have their own.
    """
    if images is not None and size is None and isinstance(source, nn.Module):
        means: list[tuple[str, Tensor]] = []
        for_each_layer(source, images, lambda layer: means.append((layer.name, attended_offset(layer).cpu())), position=False)
        found, how = chosen(means, layers), "weighted by attention"
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
    largest = max(float(mean.abs().max()) for _, mean in found)
    reach = 1.15 * largest if largest > 1e-6 else 1.0  # below, a rounding error
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


def _in_attention(source: nn.Module, size: int | Size | None) -> list[tuple[str, list[PositionEncoding], Grid]]:
    named = [
        (name, [part for part in parts_of(encoding) if part.site == "attention" and part.behaviour != "nothing"], grid)
        for name, encoding, grid in encodings_of(source, size)
    ]
    return [layer for layer in named if layer[1]]


def _nothing(source: nn.Module) -> str:
    name = source_name(source)
    own = {key_of(part) for _, encoding, _ in encodings_of(source) for part in parts_of(encoding) if part.site == "tokens"}
    if own:
        keys = " and ".join(sorted(own))
        return f"nothing to draw by offset: {keys} of {name} adds to tokens; use vitrel.inspect.plot.similarity"
    if any(isinstance(module, PositionEncoding) for module in source.modules()):
        return f"nothing to draw by offset: {name} has no position in attention"
    return f"{name} holds no encodings of vitrel: give vitrel.inspect.attention.record(model, images), which sees timm's layers"


def _measured(layer: Layer) -> Lattice:
    if layer.position is None:
        raise ValueError(f"{layer.name} was recorded without position: use vitrel.inspect.attention.record")
    check_numbers(layer.name, layer.weights)
    return Lattice(layer.name, "mean of what position adds", "logits", offset_mean(layer, layer.position), None)


@torch.no_grad()
def _drawn(name: str, encoding: PositionEncoding, grid: Grid) -> list[Lattice]:
    with evaluating(encoding):
        terms = encoding(grid)
    key, trained = key_of(encoding), None if encoding.grid is None else tuple(encoding.grid[:2])
    found = [
        Lattice(name, f"{key} {what}", unit, check_numbers(name, values.detach()), trained, signed)
        for what, unit, values, signed in _pictures(terms, grid)
    ]
    return [one for one in found if _varies(one.values)] or found[:1]


def _pictures(terms: Terms, grid: Grid) -> Iterator[tuple[str, str, Tensor, bool]]:
    """(what, unit, values, signed) of everything in the terms that has a number at each offset."""
    bias, content = zero_query_bias(terms, grid), any(table.gated is not None for table in terms.tables)
    if terms.rotary is not None:
        kernel = _kernel(terms, grid)
        if bias is not None:  # a field of view
            kernel = torch.where(bias == float("-inf"), bias, kernel)
        yield "rotation", "mean cos of angle", kernel, True
    if bias is not None:
        yield "bias, query 0" if content or terms.query_bias is not None else "bias", "logits", bias, True
    for kind in ("query", "key"):
        rows = [_lattice(getattr(t, kind), t.axis, grid) for t in terms.tables if getattr(t, kind) is not None]
        if rows:
            scale = float(terms.logit_scale(rows[0].shape[-1]))
            length = torch.linalg.vector_norm(sum(rows), dim=-1) * scale
            yield f"{kind} rows, length", f"logits per unit of {kind}", length.cpu(), False


def _kernel(terms: Terms, grid: Grid) -> Tensor:
    """Mean over frequencies of cos(angle of query - angle of key), scales of xpos included, [H|1, 2h-1, 2w-1]."""
    y, x = grid.offsets(device=terms.rotary[0].device).unbind(-1)
    query, key = (grid.prefix + dy.clamp(min=0) * grid.w + dx.clamp(min=0) for dy, dx in ((y, x), (-y, -x)))
    cos_q, sin_q = (t[..., query, :] for t in terms.rotary)  # [H|1, R, D/2]
    cos_k, sin_k = (t[..., key, :] for t in terms.key_rotary or terms.rotary)
    kernel = upcast(cos_q * cos_k + sin_q * sin_k).mean(-1)
    return kernel.unflatten(1, (2 * grid.h - 1, 2 * grid.w - 1)).cpu()


def zero_query_bias(terms: Terms, grid: Grid) -> Tensor | None:
    """The logit that remains of the tables where the projected query and the key are zero, [H, 2h-1, 2w-1], or None."""
    found = [part for table in terms.tables for part in _of_zero_query(table, terms, grid)]
    return sum(found[1:], found[0]).cpu() if found else None


def _of_zero_query(table: Table, terms: Terms, grid: Grid) -> Iterator[Tensor]:
    if table.bias is not None:
        yield _lattice(table.bias[..., None], table.axis, grid)[..., 0]
    if table.query is not None and terms.query_bias is not None:
        scale = float(terms.logit_scale(table.query.shape[-1]))
        rows = upcast(table.query) @ upcast(terms.query_bias)[..., None]  # [H, R, 1]
        yield _lattice(rows, table.axis, grid)[..., 0] * scale
    if table.gated is not None:
        weights, rows = (upcast(part) for part in table.gated)
        query = weights.new_zeros(weights.shape[-1]) if terms.query_bias is None else upcast(terms.query_bias)[:, None]
        gates = F.softplus((weights * query).sum(-1))  # [H, G]
        scale = float(terms.logit_scale(weights.shape[-1]))
        yield _lattice(rows @ gates[..., None], table.axis, grid)[..., 0] * scale


def _lattice(rows: Tensor, axis: str, grid: Grid) -> Tensor:
    """Rows [H, R, D] of a table -> [H, 2h-1, 2w-1, D]."""
    return upcast(rows_by_offset(rows, axis, grid)).expand(-1, 2 * grid.h - 1, 2 * grid.w - 1, -1)


def _varies(values: Tensor) -> bool:
    seen = values[values.isfinite()]
    return seen.numel() > 0 and bool(seen.max() - seen.min() > 1e-6 * max(1.0, float(seen.abs().max())))


def _heads(lattice: Lattice, heads: Sequence[int] | None) -> list[int]:
    """Those of `heads` that a layer has; a single row stands for every head."""
    own = range(len(lattice.values))
    return list(own) if heads is None or len(own) == 1 else [head for head in heads if head in own]


def _centred(lattice: Lattice) -> tuple[Tensor, bool]:
    """The values, minus their mean over visible offsets where zero would lie outside what a head has."""
    seen = lattice.values.masked_fill(~lattice.values.isfinite(), torch.nan)
    low, high = (seen.nan_to_num(nan=fill).flatten(1) for fill in (float("inf"), float("-inf")))
    if lattice.unit != "logits" or not bool(((low.amin(1) > 0) | (high.amax(1) < 0)).any()):
        return seen, False
    return seen - seen.flatten(1).nanmean(1)[:, None, None], True


def _reach(values: Tensor, signed: bool) -> tuple[float, float]:
    """First and last value of the colours: symmetric for signed values, from zero for others."""
    top = max(float(values.nan_to_num().abs().max()), 1e-9) if values.numel() else 1.0
    return (-top if signed else 0.0), top


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
