"""Figures over the offsets of query and key: what position adds (maps, profiles), and the mean offset of each head.

An offset is query minus key, in patches. What position adds is read from the terms of encodings or from recorded layers. Terms
that depend on content have no single number at an offset, so three quantities are drawn:
bias: the part of the logit that does not depend on content, from the tables' biases and the parts of query and gated tables
that remain for a projected query of zero (Transformer-XL's v . W r, PaPE's parabolas);
rotation: the mean over frequencies of cos(angle of the query - angle of the key), which is q . k for q = k with equal energy in
every frequency (xPos: times its decay);
rows: the length of a query or key table's row (summed over both axes) times the scale of the logits, which is the largest term
that a query or key of unit length can give.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor, nn

from vitrel.common.sizes import Size
from vitrel.grid import Grid
from vitrel.inspect.any_model import evaluated
from vitrel.inspect.attention import NEGLIGIBLE, Layer, offset_mean
from vitrel.inspect.plot.common import (
    DX,
    DY,
    LINES,
    SIGN,
    Source,
    check_numbers,
    chosen,
    color_bar,
    draw_offsets,
    encodings_of,
    grid_of_panels,
    head_name,
    legend,
    line_style,
    name_axes,
    panel_height,
    sheet,
    source_name,
    visit_layers,
    whole_numbers,
)
from vitrel.ops.reference import rows_by_offset
from vitrel.position import PositionEncoding, Table, Terms, key_of
from vitrel.position.terms import parts_of, upcast


class Lattice(NamedTuple):
    """Values over offsets, `values` [H, 2h-1, 2w-1]: offset (dy, dx) at [:, dy + h-1, dx + w-1].

    H is 1 if all heads are equal. A value is -inf where position hides the key, NaN where no recorded pair has the offset.
    """

    layer: str  # path of the layer in the model, "" for an encoding alone
    what: str  # the quantity, in a few words
    unit: str
    values: Tensor
    trained: Size | None  # training grid (h, w), None if unknown
    signed: bool = True  # True: the values may have both signs, and 0 adds nothing


def lattices(source: Source, size: int | Size | None = None, layers: Sequence[int] | None = None) -> list[Lattice]:
    """List every quantity over offsets of a model or an encoding, layer by layer; the parts of a composition separately.

    source: a model with vitrel's encodings; an encoding; or layers recorded on images, whose mean logit from position is taken,
    including terms that depend on content. size: pixels for a model, patches for an encoding, one side or (h, w), by default
    that of training. layers: indices into the attention layers that have an encoding. Raises ValueError, saying why, if there
    is nothing to draw.
    """
    if not isinstance(source, nn.Module):
        if size is not None:
            raise ValueError("recorded layers have the size they were recorded at: leave size out")
        measured = [_measured(layer) for layer in chosen(source, layers)]
        if not any(bool(lattice.values.nan_to_num().any()) for lattice in measured):
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
    """Draw what position adds at every offset: a row of panels per layer (or part of a composition), a panel per head.

    Arguments and errors as for `lattices`; the module lists the quantities. Red is positive, blue negative, white 0, on one
    scale per row, of ±1 logit at least; logits with a spread below NEGLIGIBLE are gray.
    If a head's logits do not include 0, each head's mean over the visible offsets is subtracted first (softmax
    does not depend on it), and the color bar says so. An outline encloses the offsets of a smaller training grid. heads:
    indices, by default all; ValueError if no layer has them.
    """
    drawn = lattices(source, size, layers)
    columns = _heads(drawn, heads)
    width, title = 1.75, f"{source_name(source)}: position by offset\n{SIGN}"
    height = panel_height([d.values.shape for d in drawn], width)
    figure, axes = sheet(len(drawn), max(map(len, columns)), width, height, title)
    for row, lattice, shown in zip(axes, drawn, columns, strict=True):
        values, centerd = _centerd(lattice)
        reach, image = _reach(values[shown], lattice.signed, lattice.unit == "logits"), None
        negligible = lattice.unit == "logits" and _spread(values) < NEGLIGIBLE
        for column, panel in enumerate(row):
            if column >= len(shown):
                panel.set_axis_off()
                continue
            drawn_values = values[shown[column]]
            if negligible:  # gray
                drawn_values = torch.full_like(drawn_values, torch.nan)
                panel.text(0.5, 0.5, "negligible", transform=panel.transAxes, ha="center", va="center", fontsize=8)
            image = draw_offsets(panel, drawn_values, lattice.trained, lattice.signed, reach)
            panel.set_title(head_name(shown[column], len(values)), fontsize=8)
            panel.set_xlabel(DX, fontsize=7)
        if image is not None:
            row[0].set_ylabel(f"{lattice.layer}\n{DY}".strip(), fontsize=7)
            label = f"{lattice.what}\n({lattice.unit}{', minus mean of head' if centerd else ''})"
            color_bar(figure, image, row, label)
    hidden = any(not d.values.isfinite().all() for d in drawn)
    legend(figure, any(panel.patches for row in axes for panel in row), hidden)
    return figure


def profiles(
    source: Source, size: int | Size | None = None, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
) -> Figure:
    """Draw sections of `offset_maps` (same arguments and errors) along dy at dx = 0 and along dx at dy = 0, a line per head.

    Hidden offsets are gaps. Dashed lines mark the largest offsets of a smaller training grid.
    """
    drawn = lattices(source, size, layers)
    shown = _heads(drawn, heads)
    figure, axes = sheet(len(drawn), 2, 3.2, 2.0, f"{source_name(source)}: profiles\n{SIGN}", sharey="row")
    handles: dict[str, Line2D] = {}
    for row, lattice, of_layer in zip(axes, drawn, shown, strict=True):
        values = lattice.values.masked_fill(~lattice.values.isfinite(), torch.nan)
        middle = values.shape[1] // 2, values.shape[2] // 2
        for panel, axis, name in zip(row, (0, 1), (f"{DY}, at dx = 0", f"{DX}, at dy = 0"), strict=True):
            along = values[:, :, middle[1]] if axis == 0 else values[:, middle[0]]  # [H, 2n-1]
            offsets = torch.arange(along.shape[1]) - middle[axis]
            for head in of_layer:
                # a marker too, since a grid of one row has a single point along dy
                style = line_style(head) | {"marker": ".", "markersize": 3}
                (line,) = panel.plot(offsets.numpy(), along[head].numpy(), **style)
                handles.setdefault(head_name(head, len(values)), line)
            if lattice.trained is not None and lattice.trained[axis] - 1 < middle[axis]:
                for edge in (1 - lattice.trained[axis], lattice.trained[axis] - 1):
                    panel.axvline(edge, color="0.4", linewidth=1, linestyle=(0, (4, 3)))
            panel.set_xlabel(name, fontsize=8)
            panel.tick_params(labelsize=7)
            panel.grid(alpha=0.25)
            whole_numbers(panel, "x")
        row[0].set_ylabel(f"{lattice.layer}\n{lattice.unit}".strip(), fontsize=8)
        row[0].set_title(lattice.what, fontsize=8, loc="left")
    figure.legend(handles.values(), handles, loc="outside right center", frameon=False, fontsize=8)
    return figure


def directions(
    source: Source, size: int | Size | None = None, layers: Sequence[int] | None = None, images: Tensor | None = None
) -> Figure:
    """Draw an arrow from the query to the mean place of its keys for each head, a panel per layer, scaled to the longest.

    The arrow is the negative of the mean offset, which is query minus key: it points where the head looks. With `images`
    [B, 3, height, width], or for recorded layers (`vitrel.inspect.attention.record`), offsets are weighted by attention, over
    images and over queries and keys that are patches; uniform attention has a mean of zero. Without images they are weighted by
    the softmax of the bias over all offsets. size, layers: as for `lattices`, but with images `layers` are indices into all
    attention layers. Raises ValueError if there is no bias that is independent of content, and if a size is given with images
    or recorded layers.
    """
    if isinstance(source, nn.Module) and images is None:
        found = [(d.layer, bias_mean_offset(d)) for d in lattices(source, size, layers) if d.unit == "logits"]
        how = "softmax of the bias over offsets"
    else:
        if size is not None:
            raise ValueError("images and recorded layers have a size of their own: leave size out")
        means: list[tuple[str, Tensor]] = []
        visit_layers(source, images, lambda layer: means.append((layer.name, attended_offset(layer).cpu())), position=False)
        found, how = chosen(means, layers), "weighted by attention"
    if not found:
        name = source_name(source)
        raise ValueError(f"{name} has no bias apart from content: give images, to weight offsets by attention")
    largest = max(float(mean.abs().max()) for _, mean in found)
    reach = 1.15 * largest if largest > 1e-6 else 1.0  # below, a rounding error
    title = f"{source_name(source)}: where each head looks, {how}\nan arrow points from the query to the mean place of its keys"
    figure, panels = grid_of_panels(len(found), 2.3, 2.5, title)
    for panel, (name, mean) in zip(panels, found, strict=True):
        _arrows(panel, -mean, reach)
        panel.set_title(name, fontsize=8)
    most = max(len(mean) for _, mean in found)
    handles = [panels[0].plot([], [], marker="o", linestyle="", color=_color(head))[0] for head in range(most)]
    names = [f"head {head}" for head in range(most)]
    figure.legend(handles, names, loc="outside right center", frameon=False, fontsize=8)
    return figure


def bias_mean_offset(lattice: Lattice) -> Tensor:
    """Mean offset (dy, dx) of each head under the softmax of its values, without hidden offsets, [H, 2]."""
    values = lattice.values.double().flatten(1).nan_to_num(nan=float("-inf"), neginf=float("-inf"))
    h, w = (n // 2 for n in lattice.values.shape[1:])
    dy, dx = torch.meshgrid(torch.arange(-h, h + 1), torch.arange(-w, w + 1), indexing="ij")
    return values.softmax(1) @ torch.stack((dy.flatten(), dx.flatten()), -1).double()


def attended_offset(layer: Layer) -> Tensor:
    """Mean offset (dy, dx), query minus key in patches, weighted by attention among patches, [H, 2]."""
    patches, at = layer.patches, layer.places.double()
    weights = (
        check_numbers(layer.name, layer.weights).double() * patches[:, None, None] * patches[:, None, :, None]
    )  # [B, W, H, N, N]
    mass = weights.sum(-1, keepdim=True)
    apart = at[None, :, None] - weights @ at[:, None] / mass  # [B, W, H, N, 2]
    valid = (mass > 0).expand_as(apart)  # not for padding, and not for queries without weight on patches
    return torch.where(valid, apart, 0.0).sum((0, 1, 3)) / valid.sum((0, 1, 3))


def _in_attention(source: nn.Module, size: int | Size | None) -> list[tuple[str, list[PositionEncoding], Grid]]:
    named = [
        (name, [part for part in parts_of(encoding) if part.site == "attention" and part.at_larger_grid != "nothing"], grid)
        for name, encoding, grid in encodings_of(source, size)
    ]
    return [layer for layer in named if layer[1]]


def _nothing(source: nn.Module) -> str:
    name = source_name(source)
    added = {key_of(part) for _, encoding, _ in encodings_of(source) for part in parts_of(encoding) if part.site == "tokens"}
    if added:
        keys = " and ".join(sorted(added))
        return f"nothing to draw by offset: {keys} of {name} adds to tokens; use vitrel.inspect.plot.similarity"
    if any(isinstance(module, PositionEncoding) for module in source.modules()):
        return f"nothing to draw by offset: {name} has no position in attention"
    return f"{name} holds no encodings of vitrel: give vitrel.inspect.attention.record(model, images), which sees timm's layers"


def _measured(layer: Layer) -> Lattice:
    position = layer.needed("position")
    check_numbers(layer.name, layer.weights)
    return Lattice(layer.name, "mean of what position adds", "logits", offset_mean(layer, position), None)


@torch.no_grad()
def _drawn(name: str, encoding: PositionEncoding, grid: Grid) -> list[Lattice]:
    terms = evaluated(encoding, grid)
    key, trained = key_of(encoding), None if encoding.grid is None else tuple(encoding.grid[:2])
    found = [
        Lattice(name, f"{key} {what}", unit, check_numbers(name, values.detach()), trained, signed)
        for what, unit, values, signed in _pictures(terms, grid)
    ]
    return [lattice for lattice in found if _varies(lattice.values)] or found[:1]


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
            scale = float(terms.content_scale(rows[0].shape[-1]))
            length = torch.linalg.vector_norm(sum(rows), dim=-1) * scale
            yield f"{kind} rows, length", f"logits per unit of {kind}", length.cpu(), False


def _kernel(terms: Terms, grid: Grid) -> Tensor:
    """Mean over frequencies of cos(angle of query - angle of key), times xpos's decay, [H|1, 2h-1, 2w-1]."""
    y, x = grid.offsets(device=terms.rotary[0].device).unbind(-1)
    query, key = (grid.prefix + dy.clamp(min=0) * grid.w + dx.clamp(min=0) for dy, dx in ((y, x), (-y, -x)))
    cos_q, sin_q = (t[..., query, :] for t in terms.rotary)  # [H|1, R, D/2]
    cos_k, sin_k = (t[..., key, :] for t in terms.key_rotary or terms.rotary)
    kernel = upcast(cos_q * cos_k + sin_q * sin_k).mean(-1)
    return kernel.unflatten(1, (2 * grid.h - 1, 2 * grid.w - 1)).cpu()


def zero_query_bias(terms: Terms, grid: Grid) -> Tensor | None:
    """Logits that all tables add for a key of zero and a query of zero plus Terms.query_bias, [H, 2h-1, 2w-1], on the CPU.

    None if the terms hold no table with such logits.
    """
    parts = [part for table in terms.tables for part in _of_zero_query(table, terms, grid)]
    return sum(parts[1:], parts[0]).cpu() if parts else None


def _of_zero_query(table: Table, terms: Terms, grid: Grid) -> Iterator[Tensor]:
    if table.bias is not None:
        yield _lattice(table.bias[..., None], table.axis, grid)[..., 0]
    if table.query is not None and terms.query_bias is not None:
        scale = float(terms.content_scale(table.query.shape[-1]))
        rows = upcast(table.query) @ upcast(terms.query_bias)[..., None]  # [H, R, 1]
        yield _lattice(rows, table.axis, grid)[..., 0] * scale
    if table.gated is not None:
        weights, rows = (upcast(part) for part in table.gated)
        query = weights.new_zeros(weights.shape[-1]) if terms.query_bias is None else upcast(terms.query_bias)[:, None]
        gates = F.softplus((weights * query).sum(-1))  # [H, G]
        scale = float(terms.content_scale(weights.shape[-1]))
        yield _lattice(rows @ gates[..., None], table.axis, grid)[..., 0] * scale


def _lattice(rows: Tensor, axis: str, grid: Grid) -> Tensor:
    """Rows [H, R, D] of a table -> [H, 2h-1, 2w-1, D]."""
    return upcast(rows_by_offset(rows, axis, grid)).expand(-1, 2 * grid.h - 1, 2 * grid.w - 1, -1)


def _varies(values: Tensor) -> bool:
    seen = values[values.isfinite()]
    return seen.numel() > 0 and bool(seen.max() - seen.min() > 1e-6 * max(1.0, float(seen.abs().max())))


def _heads(drawn: Sequence[Lattice], heads: Sequence[int] | None) -> list[list[int]]:
    """The indices among `heads` that each layer has; [0] if one row of values stands for all heads.

    ValueError if no layer has any of them.
    """
    found = []
    for lattice in drawn:
        rows = range(len(lattice.values))
        found.append(list(rows) if heads is None or len(rows) == 1 else [head for head in heads if head in rows])
    if not any(found):
        raise ValueError(f"no layer has heads {list(heads)}: the most is {max(len(d.values) for d in drawn)}")
    return found


def _centerd(lattice: Lattice) -> tuple[Tensor, bool]:
    """(values, True if centerd): if some head's logits do not include 0, all heads minus each head's mean over visible offsets.

    Hidden offsets are NaN in both cases.
    """
    seen = lattice.values.masked_fill(~lattice.values.isfinite(), torch.nan)
    low, high = (seen.nan_to_num(nan=fill).flatten(1) for fill in (float("inf"), float("-inf")))
    if lattice.unit != "logits" or not bool(((low.amin(1) > 0) | (high.amax(1) < 0)).any()):
        return seen, False
    return seen - seen.flatten(1).nanmean(1)[:, None, None], True


def _spread(values: Tensor) -> float:
    """Root mean square over heads and visible offsets, each head's mean subtracted, of centerd values with NaN where hidden."""
    centerd = values - values.flatten(1).nanmean(1)[:, None, None]
    return float(centerd.square().nanmean().sqrt().nan_to_num())


def _reach(values: Tensor, signed: bool, logits: bool = False) -> tuple[float, float]:
    """Values of the first and last color: symmetric about 0 for signed values, from 0 for others; of logits 1 at least."""
    top = max(float(values.nan_to_num().abs().max()), 1.0 if logits else 1e-9) if values.numel() else 1.0
    return (-top if signed else 0.0), top


def _arrows(axes: Axes, places: Tensor, reach: float) -> None:
    """Draw an arrow from the query to each head's mean place (dy, dx) of the keys, [H, 2], in patches down and right."""
    axes.axhline(0, color="0.8", linewidth=0.8, zorder=0)
    axes.axvline(0, color="0.8", linewidth=0.8, zorder=0)
    for head, (dy, dx) in enumerate(places.tolist()):
        axes.annotate("", (dx, dy), (0, 0), arrowprops={"arrowstyle": "->", "color": _color(head), "lw": 1.4})
        axes.plot(dx, dy, "o", color=_color(head), markersize=5)
        axes.annotate(str(head), (dx, dy), (4, 3), textcoords="offset points", fontsize=7)
    axes.set(xlim=(-reach, reach), ylim=(reach, -reach), aspect="equal")  # down is down
    name_axes(axes, "keys to the right (patches)", "keys below (patches)")


def _color(head: int) -> str:
    return LINES[head % len(LINES)]
