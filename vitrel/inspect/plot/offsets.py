"""Heat maps over the lattice of offsets, and their sections along both axes."""

from collections.abc import Sequence

import torch
from matplotlib.figure import Figure
from torch import Tensor

from vitrel.inspect.plot.lattice import Lattice, Source, lattices, source_name
from vitrel.inspect.plot.style import (
    DX,
    DY,
    SIGN,
    draw_offsets,
    head_name,
    legend,
    line_style,
    panel_height,
    sheet,
    whole_numbers,
)
from vitrel.inspect.resolution_report import Pair


def offset_maps(
    source: Source, size: int | Pair | None = None, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
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
    source: Source, size: int | Pair | None = None, layers: Sequence[int] | None = None, heads: Sequence[int] | None = None
) -> Figure:
    """Sections of `offset_maps` (its arguments and errors): along dy at dx = 0 and along dx at dy = 0, one line for each head.

    Hidden offsets are gaps. Dashed lines mark the largest offsets of the training grid where the grid is larger.
    """
    drawn = lattices(source, size, layers)
    figure, axes = sheet(len(drawn), 2, 3.2, 2.0, f"{source_name(source)}: profiles\n{SIGN}", sharey="row")
    handles = {}
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


def _heads(lattice: Lattice, heads: Sequence[int] | None) -> list[int]:
    """Those of the asked heads that a layer has; a single row stands for every head."""
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
