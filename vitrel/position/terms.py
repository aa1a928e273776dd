"""What a position encoding may add to attention: Table, Terms, and the interface every encoding implements.

Every relative encoding is a table over the (2h-1) x (2w-1) lattice of offsets, or over its two axes; only how the rows are
produced differs. So an encoding is a pure function of the grid that returns tensors, and attention (vitrel.ops) is the only
place where position meets content.
"""

import abc
from collections.abc import Iterable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from vitrel.grid import Grid


class Table(NamedTuple):
    """Rows looked up by the offset class r = grid.index(axis)[i, j] of query i and key j; the tables of an encoding are summed.

    `scale` below is D**-0.5 times Terms.scale; q, k are unrotated, q includes Terms.query_bias.
    """

    axis: str = "hw"  # "hw" | "h" | "w"
    bias: Tensor | None = None  # [H, R]        logit[i, j] += bias[r]
    query: Tensor | None = None  # [H|1, R, D]  logit[i, j] += scale * q[i] . query[r]
    key: Tensor | None = None  # [H|1, R, D]    logit[i, j] += scale * k[j] . key[r]
    value: Tensor | None = None  # [H|1, R, D]  out[i] += sum_j p[i, j] * value[r]


class Terms(NamedTuple):
    """All that a position encoding adds to a transformer, as tensors.

    The content logit is scale * D**-0.5 * rotate(q + query_bias) . rotate(k). Query and key tables meet the *unrotated* q and k
    (rotating first would break translation invariance). `scale` multiplies content, query and key terms, never `Table.bias`.
    """

    tokens: Tensor | None = None  # [N, C]  added once, after patch embedding
    rotary: tuple[Tensor, Tensor] | None = None  # (cos, sin), each [H|1, N, D/2]; 1 and 0 on prefix rows
    query_bias: Tensor | None = None  # [H, D]
    scale: float | Tensor = 1.0  # a 0-d tensor where it depends on the grid (a float would cost a graph per size)
    tables: tuple[Table, ...] = ()


class PositionEncoding(nn.Module, abc.ABC):
    """Abstract: a pure function of the grid. Every subclass is final and is built as (grid, num_heads, head_dim, **options).

    `site` says where the terms act: "attention" (rotary, query_bias, tables) or "tokens" (added to the embedded patches);
    `rotates`, whether they hold a rotary term, of which a model can have only one.
    `policies` are the rules, the default first, by which learned parameters can serve a grid they were not trained on, where
    there is such a choice; the attribute `resize` holds the one in use.
    """

    site: ClassVar[str] = "attention"
    rotates: ClassVar[bool] = False
    policies: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def forward(self, grid: Grid) -> Terms:
        """Terms on `grid`, always computed from the trained parameters; changes nothing in the module."""

    def resized(self, grid: Grid) -> dict[str, int]:
        """What forward(grid) reads other than as it was trained: {rule: number of parameter values interpolated}."""
        return {}

    def unseen(self, grid: Grid) -> float:
        """Share of the offset cells of `grid` whose row no pair of the training grid addressed, 0 to 1."""
        return 0.0


class Composition(PositionEncoding):
    """Several encodings at once, their terms combined. Built by `create_position("a+b", ...)`."""

    def __init__(self, parts: dict[str, PositionEncoding]):
        super().__init__()
        self.parts = nn.ModuleDict(parts)

    def forward(self, grid: Grid) -> Terms:
        return combine(*(part(grid) for part in self.parts.values()))

    def resized(self, grid: Grid) -> dict[str, int]:
        return sum_counts(part.resized(grid) for part in self.parts.values())

    def unseen(self, grid: Grid) -> float:
        return max(part.unseen(grid) for part in self.parts.values())


def combine(*terms: Terms) -> Terms:
    """The sum of several encodings' terms: tokens, query biases and tables add up, scales multiply.

    Raises ValueError for two rotary terms, since a rotation of a rotation has no agreed meaning.
    """
    rotary = [t.rotary for t in terms if t.rotary is not None]
    if len(rotary) > 1:
        raise ValueError("two rotary encodings cannot be combined: choose one of the rope_* keys")
    scale: float | Tensor = 1.0
    for t in terms:
        scale = scale * t.scale
    return Terms(
        tokens=_sum(t.tokens for t in terms),
        rotary=rotary[0] if rotary else None,
        query_bias=_sum(t.query_bias for t in terms),
        scale=scale,
        tables=tuple(table for t in terms for table in t.tables),
    )


def sum_counts(counts: Iterable[dict[str, int]]) -> dict[str, int]:
    """Merge {rule: count} dictionaries, adding the counts of equal rules."""
    total: dict[str, int] = {}
    for count in counts:
        for rule, n in count.items():
            total[rule] = total.get(rule, 0) + n
    return total


def _sum(tensors: Iterable[Tensor | None]) -> Tensor | None:
    present = [t for t in tensors if t is not None]
    return torch.stack(present).sum(0) if len(present) > 1 else present[0] if present else None
