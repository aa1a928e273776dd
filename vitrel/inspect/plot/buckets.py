"""Which offsets share a learned row: the buckets of t5 (arXiv 1910.10683, sec. 2.1) and the edge rows of clipped encodings."""

from typing import NamedTuple

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import Tensor, nn

from vitrel.grid import Grid
from vitrel.inspect.plot.lattice import encodings_of, parts_of, source_name
from vitrel.inspect.plot.style import DX, DY, SEQUENTIAL, SIGN, sheet, whole_numbers
from vitrel.inspect.resolution_report import Pair
from vitrel.position import key_of
from vitrel.position.clip import clipped_rows
from vitrel.position.t5 import T5

_MARK = "#D55E00"


class Buckets(NamedTuple):
    """Along one axis of a grid: `number` [2n-1] of every offset's row; `ring` [2n-1], the same of its length alone; `exact`,
    the first and the last offset between which each has a row of its own.
    """

    number: Tensor
    ring: Tensor
    exact: tuple[int, int]


def bucket_map(source: nn.Module, size: int | Pair | None = None) -> Figure:
    """Every offset with the number of the learned row it reads, a colour for each distance; inside the outline every offset
    has a row of its own (t5: exact, logarithmic beyond; clipped: beyond it the edge row).

    source, size: as of `lattices`; the first encoding with buckets is drawn. Numbers are rows of the product's
    table (t5, clipped), else "row,column" of the tables of both axes. Raises ValueError where nothing has buckets.
    """
    for _, encoding, grid in encodings_of(source, size):
        for part in parts_of(encoding):
            if isinstance(part, T5) or part.radius is not None:
                return _figure(source_name(source), part, grid)
    raise ValueError(f"{source_name(source)} has no buckets: t5 has, and what clips offsets (clipped, shaw, deberta)")


def axis_buckets(encoding: nn.Module, axis: str, grid: Grid) -> Buckets:
    """The buckets of t5, or of an encoding that clips offsets to a radius, along "h" or "w" of `grid`."""
    offsets = grid.offsets(axis)
    if isinstance(encoding, T5):
        rule = encoding.rules["hw".index(axis)]
        first, number = torch.tensor(rule.first), encoding.bucket(axis, grid).cpu()
        length = offsets.abs() if rule.bidirectional else offsets.clamp(min=0)
        own = int((first[1:] - first[:-1] == 1).long().cumprod(0).sum()) - 1
        return Buckets(number, (length[:, None] >= first).sum(1) - 1, (-own if rule.bidirectional else 0, own))
    radius = encoding.radius["hw".index(axis)]
    rows = clipped_rows(len(offsets) // 2 + 1, radius, device="cpu")
    return Buckets(rows, offsets.abs().clamp(max=radius), (-radius, radius))


def _figure(name: str, encoding: nn.Module, grid: Grid) -> Figure:
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
    panel.set_xlabel(DX, fontsize=8)
    panel.set_ylabel(DY, fontsize=8)
    whole_numbers(panel.xaxis, panel.yaxis)
    panel.tick_params(labelsize=7)
    return figure


def _numbers(encoding: nn.Module, rows: Tensor, columns: Tensor) -> list[list[str]]:
    if getattr(encoding, "mode", "product" if key_of(encoding) == "clipped" else "") != "product":
        return [[f"{y},{x}" for x in columns.tolist()] for y in rows.tolist()]
    count = encoding.rules[1].count if isinstance(encoding, T5) else 2 * encoding.radius[1] + 1
    return [[str(y * count + x) for x in columns.tolist()] for y in rows.tolist()]


def _edges(exact: tuple[int, int], count: int) -> tuple[float, float]:
    """Where cells `exact` begin and end among `count` that are centred on 0."""
    return max(exact[0] - 0.5, -count / 2), min(exact[1] + 0.5, count / 2)


def _borders(axes: Axes, rows: Tensor, columns: Tensor) -> None:
    """A white line wherever one bucket ends and another begins."""
    for lines, numbers in ((axes.axhline, rows), (axes.axvline, columns)):
        for place in ((numbers[1:] != numbers[:-1]).nonzero().flatten() + 1).tolist():
            lines(place - len(numbers) / 2, color="white", linewidth=0.8)
