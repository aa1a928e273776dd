"""t5: one learned bias per bucket of offsets (T5, arXiv 1910.10683, sec. 2.1), buckets exact near 0, logarithmic further off,
logit[i, j] += B[bucket(y_i - y_j), bucket(x_i - x_j)], or B_h[..] + B_w[..].

Each sign has `count` buckets. The first e = count // 2 hold one distance each; bucket e + t begins at distance e (max_distance
/ e)^(t / (count - e)), and the last holds all larger distances, so a larger grid reads the same buckets. Negative offsets (a
key to the right or below) have buckets of their own, numbered from `count` as in T5. By default max_distance is the largest
training offset, and count about half the training axis, at most 16, such that every bucket holds a training distance; T5's 32
buckets and max_distance 128 would leave 6 of 16 untrained on a 14 x 14 grid. Pairs with a prefix token read three rows.
"""

from typing import NamedTuple, Unpack

import torch
from torch import Tensor, nn

from vitrel.geometry import cached_geometry
from vitrel.grid import Grid, unseen_share
from vitrel.position.terms import Factory, PositionEncoding, Table, Terms, check_choice, check_pair, check_prefix


class T5(PositionEncoding):
    """Learned bias per head and bucket of offsets; the axes have n_h and n_w buckets.

    Args:
        num_buckets: buckets per axis, both signs together, as in T5; one number, or (rows, columns). An axis of one patch has
            one bucket unless a pair is given, so a sequence, a grid of one row, has num_buckets rows. None: about half of the
            training axis per sign, at most 16, such that no bucket is empty.
        max_distance: in patches, one number or (rows, columns), the end of the logarithmic range; all larger distances share
            the last bucket. None: the largest distance on the training axis.
        mode: "product", a table of all pairs of buckets, or "sum", one table per axis.
        bidirectional: False puts all offsets below 0 into bucket 0, for causal attention.
        init_std: standard deviation of the initial values.

    Attributes:
        relative_attention_bias: learned biases [n_h n_w (+3), H] with mode="product"; +3 with prefix tokens.
        table_h: learned biases [n_h (+3), H] with mode="sum"; +3 with prefix tokens.
        table_w: learned biases [n_w, H] with mode="sum".

    Raises:
        ValueError: num_buckets is 1, or odd with bidirectional, max_distance too small for it, or an option has an impossible
            value.
    """

    at_larger_grid = "nothing changes"
    lr_scale = 10.0  # rows are logits, which have to move by tenths in some hundred updates

    def __init__(
        self,
        grid: Grid,
        num_heads: int,
        head_dim: int,
        *,
        num_buckets: int | tuple[int, int] | None = None,
        max_distance: int | tuple[int, int] | None = None,
        mode: str = "product",
        bidirectional: bool = True,
        init_std: float = 0.02,
        **factory: Unpack[Factory],
    ):
        super().__init__()
        self.grid, self.init_std = grid, init_std
        self.mode = check_choice("t5", "mode", mode, ("product", "sum"))
        counts, reaches = (
            [None, None] if value is None else [*check_pair("t5", name, value)]
            for name, value in (("num_buckets", num_buckets), ("max_distance", max_distance))
        )
        if counts == [1, 1]:
            raise ValueError(f"t5 needs num_buckets of 2 or more along one axis: with {num_buckets} all offsets have one bias")
        rules = []
        for n, count, reach in zip(grid[:2], counts, reaches, strict=True):
            if n == 1 and not isinstance(num_buckets, tuple | list):  # it has offset 0 only: other buckets stay untrained
                count = 1
            rules.append(Rule(_first(n, count, reach, bidirectional), bidirectional, bidirectional and count != 1))
        self.rules = tuple(rules)
        (n_h, n_w), extra = (rule.count for rule in self.rules), 3 if grid.prefix else 0
        product = {"relative_attention_bias": n_h * n_w + extra}
        for name, rows in (product if mode == "product" else {"table_h": n_h + extra, "table_w": n_w}).items():
            self.register_parameter(name, nn.Parameter(torch.empty(rows, num_heads, **factory)))
        self.reset_parameters()

    def terms(self, grid: Grid) -> Terms:
        check_prefix("t5", self.grid, grid)
        (h, w), n_h, n_w = self.rules, *(rule.count for rule in self.rules)
        if self.mode == "sum":
            rows, columns = self.bucket("h", grid), self.bucket("w", grid)
            bias = torch.cat((self.table_h.index_select(0, rows), self.table_h[n_h:]))
            zeros = self.table_w.new_zeros(len(self.table_h) - n_h, self.table_w.shape[1])
            columns = torch.cat((self.table_w.index_select(0, columns), zeros))  # prefix rows are in table_h only
            return Terms(tables=(Table("h", bias=bias.mT), Table("w", bias=columns.mT)))
        table = self.relative_attention_bias
        index = _pairs(*grid[:2], *h, *w, device=table.device)
        return Terms(tables=(Table("hw", bias=torch.cat((table.index_select(0, index), table[n_h * n_w :])).mT),))

    def bucket(self, axis: str, grid: Grid) -> Tensor:
        """Return the bucket of every offset of `grid` along "h" or "w", [2n-1] int64 for n patches, from offset 1-n to n-1."""
        return buckets(getattr(grid, axis), *self.rules["hw".index(axis)], device=next(self.parameters()).device)

    def saturated(self, grid: Grid) -> float:
        served = 1.0
        for n, trained, rule in zip(grid[:2], self.grid[:2], self.rules, strict=True):
            trained_buckets = buckets(trained, *rule, device="cpu")  # the module itself may be on the meta device
            served *= torch.isin(buckets(n, *rule, device="cpu"), trained_buckets).double().mean().item()
        return max(served - (1 - unseen_share(self.grid, grid)), 0.0)


class Rule(NamedTuple):
    """Division of the offsets along an axis into buckets by distance; those below 0 are in the same, others, or bucket 0."""

    first: tuple[int, ...]  # first distance of every bucket of one sign, from 0
    bidirectional: bool  # False: all offsets below 0 are in bucket 0
    signed: bool  # negative offsets have separate buckets

    @property
    def count(self) -> int:  # type: ignore[override]
        """Number of buckets, of both signs together."""
        return len(self.first) * (2 if self.signed else 1)


@cached_geometry
def buckets(length: int, first: tuple[int, ...], bidirectional: bool, signed: bool, device: torch.device) -> Tensor:
    """Return the bucket of every offset, 1-length to length-1, along an axis of `length` patches, [2*length-1] int64.

    Args:
        length: of the axis, in patches.
        first: first distance of every bucket of one sign, from 0.
        bidirectional: False: all offsets below 0 are in bucket 0.
        signed: negative offsets have buckets of their own, from len(first) on.
        device: of the result.
    """
    offset = torch.arange(1 - length, length, device=device)
    distance = offset.abs() if bidirectional else offset.clamp(min=0)
    bucket = torch.zeros_like(offset)
    for bound in first[1:]:
        bucket = bucket + (distance >= bound)
    return bucket + len(first) * (offset < 0) if signed else bucket


@cached_geometry
def _pairs(
    h: int, w: int, h_first: tuple[int, ...], h_both: bool, h_signed: bool, w_first: tuple[int, ...], w_both: bool,
    w_signed: bool, device: torch.device,
) -> Tensor:  # fmt: skip
    """Return the row of `relative_attention_bias` that every offset of an h x w grid reads, [(2h-1)(2w-1)] int64.

    The other arguments are the parts of the `Rule` of each axis.
    """
    count = Rule(w_first, w_both, w_signed).count
    rows, columns = buckets(h, h_first, h_both, h_signed, device=device), buckets(w, w_first, w_both, w_signed, device=device)
    return (rows[:, None] * count + columns).flatten()


def _first(length: int, num_buckets: int | None, max_distance: int | None, bidirectional: bool) -> tuple[int, ...]:
    """Return the first distance of every bucket of one sign, for a training axis of `length` patches.

    Args:
        length: of the axis.
        num_buckets: of both signs together; None: about half of `length` per sign, at most 16, such that none is empty.
        max_distance: the last bucket holds it and all larger ones; None: length - 1.
        bidirectional: False: num_buckets are those of offsets of 0 and more.

    Raises:
        ValueError: an odd number of buckets in two directions, or a max_distance below the exact buckets.
    """
    if num_buckets == 1:
        return (0,)
    reach = max_distance if max_distance is not None else length - 1
    if num_buckets is None:
        choices = (_boundaries(count, reach) for count in range(min(16, length // 2 + 1), 0, -1) if reach >= count // 2)
        return next(first for first in choices if sorted({*first, length}) == [*first, length])  # no bucket is empty
    count = num_buckets // 2 if bidirectional else num_buckets
    if count < 1 or (bidirectional and num_buckets % 2):
        raise ValueError(f"t5 needs an even number of buckets, one half for each sign, not {num_buckets}")
    if reach < count // 2:
        raise ValueError(
            f"t5's max_distance {reach} lies below its {count // 2} exact buckets per sign; give a larger max_distance or "
            f"fewer than {num_buckets} buckets"
        )
    return _boundaries(count, reach)


def _boundaries(count: int, max_distance: int) -> tuple[int, ...]:
    """Return the first distance of each of `count` buckets of one sign: count // 2 hold one distance, the others grow.

    The last one holds `max_distance` and all larger distances.
    """
    exact = count // 2
    logs = count - exact
    first = list(range(exact))
    for t in range(logs):
        # ceil(e (max/e)^(t/logs)) in integers, since rounding could move a boundary that is a whole number
        d = exact
        while d**logs * exact**t < max_distance**t * exact**logs:
            d += 1
        first.append(d)
    return tuple(first)
