"""Figures of an encoding's learned rows: the offsets that share a row (`bucket_map`), the rows' similarity (`similarity`).

Buckets are those of t5 (arXiv 1910.10683, sec. 2.1) and the edge rows of encodings that clip offsets. The similarity of
embeddings is the figure of the ViT paper (arXiv 2010.11929).
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import Tensor, nn

from vitrel.common.sizes import Size
from vitrel.grid import Grid
from vitrel.inspect.any_model import evaluated
from vitrel.inspect.plot.common import (
    DX,
    DY,
    SEQUENTIAL,
    SIGN,
    check_numbers,
    color_bar,
    encodings_of,
    grid_of_panels,
    name_axes,
    panel_height,
    sheet,
    source_name,
    whole_numbers,
)
from vitrel.position import key_of
from vitrel.position.resample import clipped_rows
from vitrel.position.t5 import T5
from vitrel.position.terms import parts_of

_MARK = "#D55E00"


class Buckets(NamedTuple):
    """The buckets of all offsets along one axis of n patches."""

    number: Tensor  # [2n-1] index of the table row that each offset reads
    ring: Tensor  # [2n-1] bucket of the offset's length, without its sign
    exact: tuple[int, int]  # first and last offset that does not share its row


def bucket_map(source: nn.Module, size: int | Size | None = None) -> Figure:
    """Draw the index of the learned row that each offset reads, colored by distance.

    Inside the outline each offset has its own row; outside, t5 has logarithmic buckets, and encodings that clip read the edge
    rows. source, size: as for `lattices`; the first encoding with buckets is drawn. Indices are rows of the table of both axes
    (t5, clipped), or "row,column" of two tables of one axis each (deberta: `key_h` and `key_w`; `query_*` are read at the
    opposite offset). Raises ValueError if no encoding has buckets.
    """
    for _, encoding, grid in encodings_of(source, size):
        for part in parts_of(encoding):
            if isinstance(part, T5) or part.radius is not None:
                return _bucket_figure(source_name(source), part, grid)
    raise ValueError(f"{source_name(source)} has no buckets: t5 and encodings that clip offsets (clipped, shaw, deberta) do")


def similarity(source: nn.Module, size: int | Size | None = None, patches: Sequence[tuple[int, int]] | None = None) -> Figure:
    """Draw the cosine similarity of every patch's embedding to those of `patches`, one panel for each, that patch outlined.

    source, size: as for `lattices`; for timm's ViTs the stored embedding, without a size. patches: (row, column) pairs, by
    default the middle patch. Raises ValueError if no embedding is added to tokens, and for a patch outside the grid.
    """
    name, trained, rows = _embedding(source, size)  # [h, w, C]
    grid = Grid(*rows.shape[:2])
    patches = list(patches or [(grid.h // 2, grid.w // 2)])
    if outside := [patch for patch in patches if not (0 <= patch[0] < grid.h and 0 <= patch[1] < grid.w)]:
        raise ValueError(f"patch {tuple(outside[0])} is outside the {grid.h}x{grid.w} patches of {source_name(source)}")
    alike = cosine_similarity(check_numbers(name, rows).flatten(0, 1), grid.w, patches)  # [M, h*w]
    title = f"{source_name(source)}: similarity of embeddings"
    if trained != grid[:2]:
        title += f"\n{grid.h}x{grid.w} patches, trained on {trained[0]}x{trained[1]}"
    figure, panels = grid_of_panels(len(patches), 2.2, panel_height([grid[:2]], 2.2), title)
    low = float(alike.min())
    for panel, (y, x), values in zip(panels, patches, alike, strict=True):
        image = panel.imshow(values.view(grid.h, grid.w).numpy(), SEQUENTIAL, vmin=low, vmax=1, interpolation="nearest")
        panel.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, color="black", lw=1.5))
        panel.set_title(f"to patch ({y}, {x})", fontsize=8)
        name_axes(panel, "column (patches)", "row (patches)")
        whole_numbers(panel)
    color_bar(figure, image, figure.axes, f"{name}: cosine similarity")
    return figure


def axis_buckets(encoding: nn.Module, axis: str, grid: Grid) -> Buckets:
    """The buckets of t5, or of an encoding that clips offsets to a radius, along "h" or "w" of `grid`."""
    offsets = grid.offsets(axis)
    if isinstance(encoding, T5):
        rule = encoding.rules["hw".index(axis)]
        first, number = torch.tensor(rule.first), encoding.bucket(axis, grid).cpu()
        length = offsets.abs() if rule.bidirectional else offsets.clamp(min=0)
        last = max(int((first[1:] - first[:-1] == 1).long().cumprod(0).sum()) - 1, 0)
        return Buckets(number, (length[:, None] >= first).sum(1) - 1, (-last if rule.bidirectional else 0, last))
    radius = encoding.radius["hw".index(axis)]
    rows = clipped_rows(len(offsets) // 2 + 1, radius, device="cpu")
    return Buckets(rows, offsets.abs().clamp(max=radius), (-radius, radius))


def cosine_similarity(rows: Tensor, width: int, patches: Sequence[tuple[int, int]]) -> Tensor:
    """Cosines of the rows [h*w, C] of a grid `width` patches wide with those of `patches` (row, column), [M, h*w]."""
    rows = torch.nn.functional.normalize(rows.float(), dim=-1)
    return rows[[y * width + x for y, x in patches]] @ rows.mT


def _bucket_figure(name: str, encoding: nn.Module, grid: Grid) -> Figure:
    rows, columns = (axis_buckets(encoding, axis, grid) for axis in "hw")
    far = torch.maximum(rows.ring[:, None], columns.ring)  # [2h-1, 2w-1]
    text, cell = _numbers(encoding, rows.number, columns.number), 0.24
    if any("," in word for line in text for word in line):
        cell = 0.34
    h, w = far.shape
    key = key_of(encoding)
    title = f"{name}: learned rows of {key}" if name != key else f"{key}: learned rows"
    figure, axes = sheet(1, 1, max(w * cell + 0.6, 3.6), h * 0.24 + 0.9, f"{title}, {grid.h}x{grid.w} patches\n{SIGN}")
    panel = axes[0][0]
    panel.imshow(far.numpy(), SEQUENTIAL, extent=(-w / 2, w / 2, h / 2, -h / 2), interpolation="nearest", aspect="auto")
    middle = float(far.max()) / 2
    for y, line in enumerate(text):
        for x, word in enumerate(line):
            ink = "white" if far[y, x] <= middle else "black"
            panel.text(x - w // 2, y - h // 2, word, ha="center", va="center", fontsize=6, color=ink)
    _borders(panel, rows.number, columns.number)
    (top, left), (bottom, right) = zip(*(_edges(one.exact, n) for one, n in ((rows, h), (columns, w))), strict=True)
    panel.add_patch(Rectangle((left, top), right - left, bottom - top, fill=False, color=_MARK, lw=2.5))
    meaning = "one row an offset inside, logarithmic buckets beyond" if key == "t5" else "beyond this, the edge rows"
    figure.legend(
        handles=[Patch(facecolor="none", edgecolor=_MARK, lw=2, label=meaning)],
        loc="outside lower center", frameon=False, fontsize=8,
    )  # fmt: skip
    name_axes(panel, DX, DY, fontsize=8)
    whole_numbers(panel)
    return figure


def _numbers(encoding: nn.Module, rows: Tensor, columns: Tensor) -> list[list[str]]:
    if getattr(encoding, "mode", "product" if key_of(encoding) == "clipped" else "") != "product":
        return [[f"{y},{x}" for x in columns.tolist()] for y in rows.tolist()]
    count = encoding.rules[1].count if isinstance(encoding, T5) else 2 * encoding.radius[1] + 1
    return [[str(y * count + x) for x in columns.tolist()] for y in rows.tolist()]


def _edges(exact: tuple[int, int], count: int) -> tuple[float, float]:
    """First and last edge of the cells of offsets `exact`, within `count` cells centerd on 0."""
    return max(exact[0] - 0.5, -count / 2), min(exact[1] + 0.5, count / 2)


def _borders(axes: Axes, rows: Tensor, columns: Tensor) -> None:
    """Draw a white line between cells of different buckets."""
    for lines, numbers in ((axes.axhline, rows), (axes.axvline, columns)):
        for place in ((numbers[1:] != numbers[:-1]).nonzero().flatten() + 1).tolist():
            lines(place - len(numbers) / 2, color="white", linewidth=0.8)


@torch.no_grad()
def _embedding(source: nn.Module, size: int | Size | None) -> tuple[str, Size, Tensor]:
    """(name, training grid (h, w), rows [h, w, C]) of the embedding added to patches; ValueError if there is none."""
    for _, encoding, grid in encodings_of(source, size):
        for part in parts_of(encoding):
            if part.site == "tokens":
                rows = evaluated(part, grid).tokens[grid.prefix :]
                return key_of(part), part.grid[:2], rows.detach().unflatten(0, grid[:2]).cpu()
    stored, patches = getattr(source, "pos_embed", None), getattr(getattr(source, "patch_embed", None), "grid_size", None)
    if isinstance(stored, nn.Parameter) and stored.dim() == 3 and patches is not None and size is None:
        return "pos_embed", patches, stored[0, -patches[0] * patches[1] :].detach().unflatten(0, patches).cpu()
    hint = "vitrel.inspect.plot.offset_maps draws what position adds in attention"
    raise ValueError(f"{source_name(source)} adds no embedding to tokens: {hint}")
