"""`offset_maps`: the figure of what position adds to attention at every offset of query and key.

An offset is query minus key, in patches. For recorded layers, the mean of what position adds to the logits is drawn. For an
encoding, that is drawn which does not depend on content:
bias: the logit of a query and a key of zeros (Transformer-XL's v . W r and PaPE's parabolas among them);
rotation: the logit of equal query and key with the same energy in every frequency, which is the mean over frequencies of
cos(angle of the query - angle of the key), for xPos times its decay.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.patches import Patch, Rectangle
from torch import Tensor, nn

from vitrel.common.sizes import Size
from vitrel.grid import Grid
from vitrel.inspect.any_model import by_offset, evaluated
from vitrel.inspect.attention import NEGLIGIBLE, Layer, layer_position_share, offset_mean
from vitrel.inspect.plot.common import (
    DIVERGING,
    HIDDEN,
    Source,
    check_numbers,
    color_bar,
    encodings_of,
    panel_height,
    sheet,
    source_name,
    whole_numbers,
)
from vitrel.ops.reference import masked_logits
from vitrel.position import PositionEncoding, Terms, key_of
from vitrel.position.terms import parts_of


class Lattice(NamedTuple):
    """One quantity of one layer by offset, query minus key: `values` [H, 2h-1, 2w-1] have (dy, dx) at [:, dy + h-1, dx + w-1].

    H is 1 if all heads are equal. A value is -inf where position hides the key, NaN where no recorded pair has the offset.

    Args:
        layer: path of the layer in the model, "" for an encoding alone.
        what: the quantity, in a few words.
        unit: of `values`.
        trained: training grid (h, w), None if unknown.
        share: of position in the logits of a recorded layer, as of `position_shares`; None otherwise.
    """

    layer: str
    what: str
    unit: str
    values: Tensor
    trained: Size | None
    share: float | None = None


def lattices(source: Source, size: int | Size | None = None) -> list[Lattice]:
    """Return bias and rotation by offset of each encoding of a model, layer by layer; those that are 0 everywhere are left out.

    Args:
        source: a model with vitrel's encodings; an encoding, of a composition its parts; or layers recorded on images, of which
            the mean of what position adds to the logits is taken, including terms that depend on content.
        size: in pixels for a model, in patches for an encoding, one side or (h, w), by default that of training.

    Raises:
        ValueError: there is nothing to draw, what is drawn holds NaN, or a size is given for recorded layers.
    """
    if isinstance(source, nn.Module):
        found = [
            lattice
            for name, encoding, grid in encodings_of(source, size)
            for part in parts_of(encoding)
            for lattice in _of_encoding(name, part, grid)
        ]
    elif size is not None:
        raise ValueError("recorded layers have the size they were recorded at: leave size out")
    else:
        found = [_measured(layer) for layer in source]
    found = [lattice for lattice in found if bool(lattice.values.nan_to_num().any())]
    if not found:
        hint = "record(model, images) of vitrel.inspect.attention measures what depends on content, in any model"
        raise ValueError(
            f"{source_name(source)} has nothing to draw by offset; {hint}; `similarity` draws embeddings of tokens"
        )
    return found


def offset_maps(
    source: Source,
    size: int | Size | None = None,
    heads: Sequence[int] | None = None,
) -> Figure:
    """Draw what position adds at every offset: a row of panels per layer (or part of a composition), a panel per head.

    Arguments and errors as for `lattices`; the module lists the quantities. Red is positive, blue negative, white 0, on one
    scale per row, of ±1 logit at least. Recorded layers whose share of the logits is below 0.01 are gray. If a head's
    logits do not include 0, each head's mean over the visible offsets is subtracted first (softmax does not depend on it), and
    the color bar says so. An outline encloses the offsets of a smaller training grid.

    Args:
        heads: indices, by default all; a layer shows those that it has. ValueError if no layer has any of them.
    """
    drawn = lattices(source, size)
    columns = [[h for h in range(len(d.values)) if heads is None or h in heads or len(d.values) == 1] for d in drawn]
    if not any(columns):
        raise ValueError(f"no layer has heads {heads}: the most is {max(len(d.values) for d in drawn)}")
    width = 1.75
    title = f"{source_name(source)}: position by offset\nquery minus key: dy > 0, key above; dx > 0, key to the left"
    height = panel_height([d.values.shape for d in drawn], width)
    figure, axes = sheet(len(drawn), max(map(len, columns)), width, height, title)
    for row, lattice, shown in zip(axes, drawn, columns, strict=True):
        values, centered = _centered(lattice)
        top = max([1.0 if lattice.unit == "logits" else 1e-9, *values[shown].nan_to_num().abs().flatten().tolist()])
        negligible, image = lattice.share is not None and lattice.share < NEGLIGIBLE, None
        for column, panel in enumerate(row):
            if column >= len(shown):
                panel.set_axis_off()
                continue
            drawn_values = values[shown[column]]
            if negligible:  # gray
                drawn_values = torch.full_like(drawn_values, torch.nan)
                panel.text(0.5, 0.5, "negligible", transform=panel.transAxes, ha="center", va="center", fontsize=8)
            image = _draw(panel, drawn_values, lattice.trained, top)
            panel.set_title("all heads" if len(values) == 1 else f"head {shown[column]}", fontsize=8)
            panel.set_xlabel("dx (patches)", fontsize=7)
        if image is not None:
            row[0].set_ylabel(f"{lattice.layer}\ndy (patches)".strip(), fontsize=7)
            label = f"{lattice.what}\n({lattice.unit}{', minus mean of head' if centered else ''})"
            color_bar(figure, image, row, label)
    hidden = any(not d.values.isfinite().all() for d in drawn)
    _legend(figure, any(panel.patches for row in axes for panel in row), hidden)
    return figure


def _measured(layer: Layer) -> Lattice:
    """Return the mean by offset of what position adds to a recorded layer's logits; ValueError if its weights hold NaN."""
    check_numbers(layer.name, layer.weights)
    values = offset_mean(layer, layer.needed("position"))
    return Lattice(layer.name, "mean of what position adds", "logits", values, None, layer_position_share(layer))


@torch.no_grad()
def _of_encoding(name: str, encoding: PositionEncoding, grid: Grid) -> Iterator[Lattice]:
    """Yield the rotation and the bias (unless constant) of an encoding on a grid as lattices; none if it adds to tokens."""
    terms = evaluated(encoding, grid)
    parts = [part for part in terms.in_attention if part is not None and part.dim() > 1]
    if encoding.site == "tokens" or not parts:
        return
    content = [part for table in terms.tables for part in (table.query, table.key, *(table.gated or ())[:1])]
    width = next((part.shape[-1] for part in (*content, terms.query_bias) if part is not None), 1)
    about = None if encoding.grid is None else tuple(encoding.grid[:2])

    def lattice(what: str, unit: str, logits: Tensor) -> Lattice:
        values = by_offset(logits, grid[:2], grid.prefix).movedim(-1, 0).cpu()
        return Lattice(name, f"{key_of(encoding)} {what}", unit, values, about)

    zeros = parts[0].new_zeros(max(map(len, parts)), grid.tokens, width)
    bias = check_numbers(name, masked_logits(zeros, zeros, terms._replace(rotary=None, key_rotary=None), grid))
    if terms.rotary is not None:
        n = 2 * terms.rotary[0].shape[-1]
        equal = terms.rotary[0].new_full((len(terms.rotary[0]), grid.tokens, n), n**-0.25)
        rotation = masked_logits(equal, equal, Terms(rotary=terms.rotary, key_rotary=terms.key_rotary), grid)
        rotation = torch.where(bias == float("-inf"), bias, rotation) if terms.tables else rotation  # a field of view
        yield lattice("rotation", "mean cos of angle", check_numbers(name, rotation))
    finite = bias[bias.isfinite()]
    if terms.tables and bool((finite != finite[:1]).any()):
        gated = any(table.gated is not None for table in terms.tables)
        yield lattice("bias, query 0" if gated or terms.query_bias is not None else "bias", "logits", bias)


def _centered(lattice: Lattice) -> tuple[Tensor, bool]:
    """Return the values of a lattice, and whether they are centered; hidden offsets are NaN in both cases.

    If the logits of some head do not include 0, the mean over visible offsets is subtracted from every head.
    """
    seen = lattice.values.masked_fill(~lattice.values.isfinite(), torch.nan)
    low, high = (seen.nan_to_num(nan=fill).flatten(1) for fill in (float("inf"), float("-inf")))
    if lattice.unit != "logits" or not bool(((low.amin(1) > 0) | (high.amax(1) < 0)).any()):
        return seen, False
    return seen - seen.flatten(1).nanmean(1)[:, None, None], True


def _draw(axes: Axes, values: Tensor, trained: Size | None, top: float) -> AxesImage:
    """Draw values [2h-1, 2w-1] as cells at their offsets, dy downwards, and outline the offsets of a smaller training grid.

    Args:
        top: the colors range from -top to top.
    """
    h, w = values.shape[0] / 2, values.shape[1] / 2  # half a cell beyond the largest offsets
    shown = values.masked_fill(~values.isfinite(), torch.nan).numpy()
    image = axes.imshow(shown, DIVERGING, vmin=-top, vmax=top, extent=(-w, w, h, -h), interpolation="nearest")
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
