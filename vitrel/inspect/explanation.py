"""What `vitrel.explain` returns: the steps of attention as tensors, and as a text (`str`)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrel.grid import Grid
from vitrel.sizes import format_size

KEYS = 64  # more keys than these are not shown, but those of the largest weights
ROWS = 1024  # more rows are not read by anyone
_CHANNELS = 16
_SIGN = "(dy, dx) is the offset, query minus key, in patches: dy > 0 where the query is below the key, dx > 0 right of it"
_MEANING = {
    "tokens": "s (q + P).(k + P) less s q.k, P what position adds to the tokens; they stand for q and k from here",
    "query bias": "s u.k, the same vector u for every query; q + u stands for q from here",
    "rotation": "s q.k with q and k turned by their positions, less the same before",
    "bias": "a number for the offset",
    "query row": "s q.r, r a vector for the offset",
    "key row": "s k.r, r a vector for the offset",
    "gated row": "s g.r, g gates that q opens, r numbers for the offset",
    "temperature": "what the factor {:.4f} on all terms with s changes",
}


@dataclass(frozen=True, repr=False)
class Explanation:
    """The steps of attention of the chosen heads and queries, H and M of them, over all N keys; float64. Print it.

    scaled + the sum of `added` = biased; `masked` is biased with the mask; weights = exponentials / total, exponentials =
    exp(masked - maximum); output = weights @ v + output_from_tables (with tokens added, v + their rows). Without position
    the logits are `scaled`, under the same mask. A hidden key has -inf, a query that sees no key weights and output of 0.
    """

    position: str
    grid: Grid  # of the keys
    names: tuple[str, ...]  # of the N tokens
    heads: tuple[int, ...]
    queries: tuple[int, ...]  # numbers of tokens, prefix tokens first
    width: int  # D
    scale: float  # Terms.scale, part of `scaled`
    temperature: Tensor | None  # Terms.temperature, a term in `added`
    raw: Tensor  # [H, M, N] q.k
    scaled: Tensor  # [H, M, N]
    added: dict[str, Tensor]  # {term of position: [H, M, N] what it adds to the logits}
    biased: Tensor  # [H, M, N]
    masked: Tensor  # [H, M, N]
    maximum: Tensor  # [H, M] of masked
    exponentials: Tensor  # [H, M, N]
    total: Tensor  # [H, M] sum of exponentials
    weights: Tensor  # [H, M, N]
    weights_without: Tensor  # [H, M, N] without position
    output: Tensor  # [H, M, D]
    output_from_tables: Tensor  # [H, M, D] the part of output that value tables add
    output_without: Tensor  # [H, M, D] without position

    @property
    def difference(self) -> Tensor:
        """What position changes in the weights, [H, M, N]."""
        return self.weights - self.weights_without

    def __repr__(self) -> str:
        lines = list(self._legend())
        for h in range(len(self.heads)):
            for m in range(len(self.queries)):
                lines += ["", *self._trace(h, m)]
        return "\n".join(lines)

    def _columns(self) -> dict[str, tuple[str, Tensor]]:
        """{title: (what it is, [H, M, N])} in the order of the steps."""
        factor = f"s q.k, s = {self.width}^-1/2"
        if self.scale != 1:
            factor += f" times {self.scale:.4f}"
        columns = {"q.k": (f"raw score of query and key, {self.width} channels", self.raw), "scaled": (factor, self.scaled)}
        for name, part in self.added.items():
            number = 1.0 if self.temperature is None else float(self.temperature)
            columns[name] = "+ " + _MEANING[name.split("[")[0]].format(number), part
        if self.added:
            columns["biased"] = "scaled and all that position adds", self.biased
        logits = "biased" if self.added else "scaled"
        masked = ""
        if not torch.equal(self.biased.nan_to_num(), self.masked.nan_to_num()):  # of NaN too
            columns["masked"], logits, masked = (f"{logits}, with the mask", self.masked), "masked", ", with the same mask"
        columns["exp"] = f"exp({logits} - maximum), so that the largest is 1 and nothing overflows", self.exponentials
        columns["weight"] = "exp / sum of exp", self.weights
        if self.added:
            columns["without"] = f"the weight without position: the same from scaled{masked}", self.weights_without
            columns["change"] = "weight - without", self.difference
        return columns

    def _legend(self) -> Iterator[str]:
        prefix = f" after {self.grid.prefix} prefix tokens" if self.grid.prefix else ""
        yield f"attention on a {format_size(self.grid)} grid{prefix}, position: {self.position}"
        yield _SIGN
        columns = self._columns()
        width = max(map(len, columns))
        yield from (f"  {title.ljust(width)}  {meaning}" for title, (meaning, _) in columns.items())

    def _trace(self, h: int, m: int) -> Iterator[str]:
        query, columns = self.queries[m], self._columns()
        head = f", head {self.heads[h]}" if self.raw.shape[0] > 1 or self.heads[h] else ""
        yield f"query {self.names[query]}{self._place(query)}{head}"
        keys = self._shown(h, m)
        cells = [["key", *(self.names[j] for j in keys)], ["(dy, dx)", *(self._offset(query, j) for j in keys)]]
        cells += [[title, *_numbers(part[h, m, keys])] for title, (_, part) in columns.items()]
        widths = [max(map(len, column)) for column in cells]
        for line in zip(*cells, strict=True):
            name, *rest = (cell.rjust(n) for cell, n in zip(line, widths, strict=True))
            yield "  " + "  ".join([name.strip().ljust(widths[0]), *rest])
        if len(keys) < self.grid.tokens:
            left = self.weights[h, m].sum() - self.weights[h, m, keys].sum()
            yield f"  and {self.grid.tokens - len(keys)} keys of less weight, together {left:z.4f} of the weight"
        if self.total[h, m] == 0:
            yield "  sees no key: its weights and output are 0"
        else:
            yield f"  maximum {self.maximum[h, m]:z.4f}, sum of exp {self.total[h, m]:z.4f}"
        yield from self._outputs(h, m)

    def _outputs(self, h: int, m: int) -> Iterator[str]:
        rows = {"output": self.output[h, m]}
        if self.output_from_tables.any():
            rows["of which value rows of the offsets"] = self.output_from_tables[h, m]
        if self.added or self.output_from_tables.any():
            rows["without position"] = self.output_without[h, m]
        cells = [_numbers(row[:_CHANNELS]) for row in rows.values()]
        width, number = max(map(len, rows)), max(len(cell) for row in cells for cell in row)
        more = " ..." if self.width > _CHANNELS else ""
        for title, row in zip(rows, cells, strict=True):
            yield f"  {title.ljust(width)}  {' '.join(cell.rjust(number) for cell in row)}{more}"

    def _shown(self, h: int, m: int) -> list[int]:
        """The keys of one query: all, or of too many those of the largest weights, in reading order."""
        if self.grid.tokens <= KEYS:
            return list(range(self.grid.tokens))
        return sorted(self.weights[h, m].topk(KEYS).indices.tolist())

    def _place(self, token: int) -> str:
        """Behind the name of a patch, unless that is its place."""
        patch = token - self.grid.prefix
        place = f"({patch // self.grid.w}, {patch % self.grid.w})"
        return f" at {place}" if patch >= 0 and self.names[token] != place else ""

    def _offset(self, query: int, key: int) -> str:
        i, j = query - self.grid.prefix, key - self.grid.prefix
        if min(i, j) < 0:
            return "-"
        return f"({i // self.grid.w - j // self.grid.w}, {i % self.grid.w - j % self.grid.w})"


def lines_of(heads: int, queries: int, keys: int) -> int:
    """Rows of keys in the text."""
    return heads * queries * min(keys, KEYS)


def _numbers(values: Tensor) -> Sequence[str]:
    return ["hidden" if value == float("-inf") else f"{value:z.4f}" for value in values.tolist()]
