"""`offset_maps`: the figure of what position adds to attention at every offset of query and key.

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
from matplotlib.image import AxesImage
from matplotlib.patches import Patch, Rectangle
from torch import Tensor, nn

from vitrel.common.sizes import Size
from vitrel.grid import Grid
from vitrel.inspect.any_model import evaluated
from vitrel.inspect.attention import NEGLIGIBLE, Layer, layer_position_share, offset_mean, position_shares
from vitrel.inspect.plot.common import (
    DIVERGING,
    HIDDEN,
    SEQUENTIAL,
    Source,
    check_numbers,
    chosen,
    color_bar,
    encodings_of,
    panel_height,
    sheet,
    source_name,
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
    share: float | None = None  # of the layer's logits, see `position_shares`; None if unknown


def lattices(
    source: Source, size: int | Size | None = None, layers: Sequence[int] | None = None, images: Tensor | None = None
) -> list[Lattice]:
    """List every quantity over offsets of a model or an encoding, layer by layer; the parts of a composition separately.

    Args:
        source: a model with vitrel's encodings; an encoding; or layers recorded on images, whose mean logit from position is
            taken, including terms that depend on content.
        size: pixels for a model, patches for an encoding, one side or (h, w), by default that of training.
        layers: indices into the attention layers that have an encoding.
        images: [B, C, height, width] by which the shares of a model's layers are measured.

    Raises:
        ValueError: there is nothing to draw, for a reason in the message.
    """
    if not isinstance(source, nn.Module):
        if size is not None:
            raise ValueError("recorded layers have the size they were recorded at: leave size out")
        measured = [_measured(layer) for layer in chosen(source, layers)]
        if not any(bool(lattice.values.nan_to_num().any()) for lattice in measured):
            raise ValueError("nothing to draw by offset: position adds nothing to the logits that were recorded")
        return measured
    found = [
        lattice
        for name, parts, grid in chosen(_in_attention(source, size), layers)
        for part in parts
        for lattice in _drawn(name, part, grid)
    ]
    if not found:
        raise ValueError(_nothing(source))
    if images is None:
        return found
    shares = position_shares(source, images)
    return [lattice._replace(share=_share_of(lattice.layer, shares)) for lattice in found]


def offset_maps(
    source: Source,
    size: int | Size | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    images: Tensor | None = None,
) -> Figure:
    """Draw what position adds at every offset: a row of panels per layer (or part of a composition), a panel per head.

    Arguments and errors as for `lattices`; the module lists the quantities. Red is positive, blue negative, white 0, on one
    scale per row, of ±1 logit at least. Layers whose share of the logits is below NEGLIGIBLE are gray; the share is known of
    recorded layers, and of a model with `images`. If a head's logits do not include 0, each head's mean over the visible
    offsets is subtracted first (softmax does not depend on it), and the color bar says so. An outline encloses the offsets of a
    smaller training grid.

    Args:
        heads: indices, by default all.

    Raises:
        ValueError: no layer has these heads.
    """
    drawn = lattices(source, size, layers, images)
    columns = _heads(drawn, heads)
    width, title = (
        1.75,
        f"{source_name(source)}: position by offset\nquery minus key: dy > 0, key above; dx > 0, key to the left",
    )
    height = panel_height([d.values.shape for d in drawn], width)
    figure, axes = sheet(len(drawn), max(map(len, columns)), width, height, title)
    for row, lattice, shown in zip(axes, drawn, columns, strict=True):
        values, centered = _centered(lattice)
        reach, image = _reach(values[shown], lattice.signed, lattice.unit == "logits"), None
        negligible = lattice.share is not None and lattice.share < NEGLIGIBLE
        for column, panel in enumerate(row):
            if column >= len(shown):
                panel.set_axis_off()
                continue
            drawn_values = values[shown[column]]
            if negligible:  # gray
                drawn_values = torch.full_like(drawn_values, torch.nan)
                panel.text(0.5, 0.5, "negligible", transform=panel.transAxes, ha="center", va="center", fontsize=8)
            image = _draw(panel, drawn_values, lattice.trained, lattice.signed, reach)
            panel.set_title("all heads" if len(values) == 1 else f"head {shown[column]}", fontsize=8)
            panel.set_xlabel("dx (patches)", fontsize=7)
        if image is not None:
            row[0].set_ylabel(f"{lattice.layer}\ndy (patches)".strip(), fontsize=7)
            label = f"{lattice.what}\n({lattice.unit}{', minus mean of head' if centered else ''})"
            color_bar(figure, image, row, label)
    hidden = any(not d.values.isfinite().all() for d in drawn)
    _legend(figure, any(panel.patches for row in axes for panel in row), hidden)
    return figure


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
    share = layer_position_share(layer)
    return Lattice(layer.name, "mean of what position adds", "logits", offset_mean(layer, position), None, share=share)


def _share_of(layer: str, shares: dict[str, float]) -> float | None:
    """The largest share of the attention at the path `layer` or below it; of all layers for one encoding of "all blocks"."""
    inside = [share for name, share in shares.items() if layer == "all blocks" or f"{name}.".startswith(f"{layer}.")]
    return max(inside, default=None)


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


def _centered(lattice: Lattice) -> tuple[Tensor, bool]:
    """Return (values, whether they are centered); hidden offsets are NaN in both cases.

    If the logits of some head do not include 0, the mean over visible offsets is subtracted from every head.
    """
    seen = lattice.values.masked_fill(~lattice.values.isfinite(), torch.nan)
    low, high = (seen.nan_to_num(nan=fill).flatten(1) for fill in (float("inf"), float("-inf")))
    if lattice.unit != "logits" or not bool(((low.amin(1) > 0) | (high.amax(1) < 0)).any()):
        return seen, False
    return seen - seen.flatten(1).nanmean(1)[:, None, None], True


def _reach(values: Tensor, signed: bool, logits: bool = False) -> tuple[float, float]:
    """Values of the first and last color: symmetric about 0 for signed values, from 0 for others; of logits 1 at least."""
    top = max(float(values.nan_to_num().abs().max()), 1.0 if logits else 1e-9) if values.numel() else 1.0
    return (-top if signed else 0.0), top


def _draw(axes: Axes, values: Tensor, trained: Size | None, signed: bool, reach: tuple[float, float]) -> AxesImage:
    """Draw values [2h-1, 2w-1] as cells at their offsets, dy downwards, and outline the offsets of a smaller training grid.

    Args:
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
    return image


def _legend(figure: Figure, outlined: bool, hidden: bool) -> None:
    """Add a legend below the panels for outlines and gray cells, if there are any."""
    handles = [Patch(facecolor="none", edgecolor="black", label="offsets of the training grid")] if outlined else []
    handles += [Patch(facecolor=HIDDEN, label="hidden, or no pair has it")] if hidden else []
    if handles:
        figure.legend(handles=handles, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
