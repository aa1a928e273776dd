"""`explain`: attention with position taken apart into its steps, for a few tokens of a small grid."""

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vitrel.grid import Grid
from vitrel.inspect.any_model import evaluating
from vitrel.ops import attention
from vitrel.ops.reference import masked_logits, rotated, table_logits
from vitrel.position import PositionEncoding, Table, Terms, create_position, key_of
from vitrel.position.terms import Composition
from vitrel.sizes import format_size

Array = Tensor | np.ndarray | Sequence
Position = str | PositionEncoding | Terms
KEYS = 64  # shown for each query: of more keys those of the largest weights
ROWS = 1024  # of keys in the text, at most
_CHANNELS = 16
_SIGN = "(dy, dx) is the offset, query minus key, in patches: dy > 0 where the query is below the key, dx > 0 right of it"
_MEANING = {
    "tokens": "s (q + P).(k + P) less s q.k, P what position adds to the tokens; they stand for q and k from here",
    "query bias": "s u.k, the same vector u for every query; q + u stands for q from here",
    "rotation": "s q.k with q and k rotated by their positions, less the same before",
    "bias": "a number for the offset",
    "query row": "s q.r, r a vector for the offset",
    "key row": "s k.r, r a vector for the offset",
    "gated row": "s g.r, g gates that q opens, r numbers for the offset",
    "temperature": "what the factor {:.4f} on all terms with s changes",
}
_AXES = {"hw": "dy, dx", "h": "dy", "w": "dx"}


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
        """Text after the name of a patch: its place, unless the name says it."""
        patch = token - self.grid.prefix
        place = f"({patch // self.grid.w}, {patch % self.grid.w})"
        return f" at {place}" if patch >= 0 and self.names[token] != place else ""

    def _offset(self, query: int, key: int) -> str:
        i, j = query - self.grid.prefix, key - self.grid.prefix
        if min(i, j) < 0:
            return "-"
        return f"({i // self.grid.w - j // self.grid.w}, {i % self.grid.w - j % self.grid.w})"


def explain(
    q: Array,
    k: Array,
    v: Array,
    position: Position = "none",
    grid: Grid | tuple[int, int] | tuple[int, int, int] | None = None,
    query: int | tuple[int, int] | None = None,
    mask: Array | None = None,
    head: int | None = None,
    tokens: Sequence[str] | None = None,
    **options,
) -> Explanation:
    """Every step of attention with position, as tensors (the fields of the result) and as a text to follow: print it.

    >>> q = [[1, 0, 1, 0], [0, 2, 0, 1], [1, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1]]
    >>> k = [[0, 1, 0, 1], [1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0.5, 0.5]]
    >>> v = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0.5, 0.5, 0.5, 0.5]]
    >>> trace = vitrel.explain(q, k, v, position="log_decay", decay=0.3, query=0)
    >>> print(trace.weights[0, 0], trace.output[0, 0], sep="\\n")
    tensor([0.1473, 0.3253, 0.1747, 0.1603, 0.1924], dtype=torch.float64)
    tensor([0.2435, 0.4215, 0.2709, 0.2565], dtype=torch.float64)

    q [M, D] or [H, M, D], k and v [N, D] or [H, N, D]: as attention takes them, in float64 here. position: a key of POSITIONS
    with its `options`, learned values as initialised; an encoding; or Terms. What it adds to tokens is added to q, k and v,
    as with identity projections. grid: (h, w) or (h, w, prefix) of the keys, a row of N tokens unless given; the queries are
    its last M tokens. query: one of them, a number counted as the keys are or (row, column) of a patch; None for all. mask:
    broadcastable to [H, M, N], bool with True = attend, or additive. head: one of H, None for all. tokens: N names.
    Raises TypeError for what is of another kind, ValueError for what does not fit together and for more rows of text than one
    can read, naming the way out.
    """
    q, k, v = _of_heads(q=q, k=k, v=v)
    grid = Grid(1, k.shape[-2]) if grid is None else _checked_grid(grid)
    queries = _chosen_queries(query, grid, q.shape[-2])
    heads = _chosen_heads(head, len(q))
    if (rows := len(heads) * len(queries) * min(grid.tokens, KEYS)) > ROWS:
        way_out = "choose query=(row, column) or a number, and head=" if len(heads) > 1 else "choose query=(row, column)"
        raise ValueError(f"{rows} rows are too many to read, at most {ROWS}: {way_out}")
    names = _names(tokens, grid)
    with torch.no_grad():
        terms = _terms(position, grid, q, options)
        steps = _steps(q, k, v, terms, grid, _checked_mask(mask, q, k))
    at = [i - (grid.tokens - q.shape[-2]) for i in queries]
    added = {name: _part(t, heads, at) for name, t in steps.pop("added").items()}
    tensors = {name: _part(t, heads, at) for name, t in steps.items()}
    about = _title(position, options), grid, names, tuple(heads), tuple(queries), q.shape[-1], terms.scale, terms.temperature
    return Explanation(*about, added=added, **tensors)


def _steps(q: Tensor, k: Tensor, v: Tensor, terms: Terms, grid: Grid, mask: Tensor | None) -> dict:
    """The tensors of an Explanation, of all heads and queries."""
    bare = Terms(scale=terms.scale)
    output_without = attention(q, k, v, bare, grid, mask, backend="reference")
    raw, scaled, unbiased = q @ k.mT, masked_logits(q, k, bare, grid), masked_logits(q, k, bare, grid, mask)
    added, (q, k, v) = {}, _with_tokens(q, k, v, terms)
    if terms.tokens is not None:
        added["tokens"] = masked_logits(q, k, bare, grid) - scaled
    output = attention(q, k, v, terms, grid, mask, backend="reference")
    added |= _added(q, k, terms, grid, bare.scale * q.shape[-1] ** -0.5)
    masked = masked_logits(q, k, terms, grid, mask)
    maximum, exponentials, total, weights = _softmax(masked)
    return {
        "raw": raw,
        "scaled": scaled,
        "added": {name: t.expand_as(raw) for name, t in added.items()},
        "biased": masked_logits(q, k, terms, grid),
        "masked": masked,
        "maximum": maximum,
        "exponentials": exponentials,
        "total": total,
        "weights": weights,
        "weights_without": _softmax(unbiased)[-1],
        "output": output,
        "output_from_tables": attention(q, k, torch.zeros_like(v), terms, grid, mask, backend="reference"),
        "output_without": output_without,
    }


def _added(q: Tensor, k: Tensor, terms: Terms, grid: Grid, scale: float) -> dict[str, Tensor]:
    """What each term adds to the logits, broadcastable to [H, M, N]; scaled q.k plus their sum are the logits."""
    added: dict[str, Tensor] = {}
    with_bias = q
    if terms.query_bias is not None:
        bias = terms.query_bias[:, None].to(q.dtype)  # [H, 1, D]
        added["query bias"] = bias @ k.mT * scale
        with_bias = q + bias
    if terms.rotary is not None:
        rotated_q, rotated_k = rotated(with_bias, k, terms)
        added["rotation"] = (rotated_q @ rotated_k.mT - with_bias @ k.mT) * scale
    for table in terms.tables:
        for field, label in (("bias", "bias"), ("query", "query row"), ("key", "key row"), ("gated", "gated row")):
            if getattr(table, field) is not None:
                one = Table(table.axis, **{field: getattr(table, field)})
                name = f"{label}[{_AXES[table.axis]}]"
                same = sum(known.startswith(name) for known in added)
                logits = table_logits(with_bias, k, (one,), grid, scale)
                added[f"{name} {same + 1}" if same else name] = logits  # type: ignore[assignment]  # `one` has rows
    if terms.temperature is not None:
        content = terms._replace(tables=tuple(table._replace(bias=None) for table in terms.tables))
        without = content._replace(temperature=None)
        added["temperature"] = masked_logits(q, k, content, grid) - masked_logits(q, k, without, grid)
    return added


def _softmax(logits: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Row maximum [H, M], exponentials [H, M, N], their sum [H, M], weights [H, M, N]; 0 where a query sees no key."""
    maximum = logits.amax(-1)
    shift = torch.where(maximum == float("-inf"), 0.0, maximum)
    exponentials = (logits - shift[..., None]).exp()
    total = exponentials.sum(-1)
    return maximum, exponentials, total, exponentials / torch.where(total == 0, 1.0, total)[..., None]


def _with_tokens(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v with what position adds to the tokens; queries are the last tokens."""
    if terms.tokens is None:
        return q, k, v
    heads, width = q.shape[0], q.shape[-1]
    if tuple(terms.tokens.shape) != (k.shape[-2], heads * width):
        shape = tuple(terms.tokens.shape)
        needed = k.shape[-2], heads * width
        raise ValueError(f"what position adds to tokens has shape {shape}, {heads} heads of width {width} need {needed}")
    rows = terms.tokens.to(q.dtype).unflatten(-1, (heads, width)).transpose(0, 1)  # [H, N, D]
    return q + rows[:, -q.shape[-2] :], k + rows, v + rows


def _terms(position: Position, grid: Grid, q: Tensor, options: dict) -> Terms:
    if isinstance(position, str):
        position = create_position(position, grid, q.shape[0], q.shape[-1], device=q.device, **options).eval()
    elif options:
        raise TypeError(f"options {', '.join(options)} are for a key of POSITIONS; here position is already built")
    if isinstance(position, Terms):
        return position
    if not isinstance(position, PositionEncoding):
        kind = type(position).__name__
        raise TypeError(f"position is a key, an encoding (of a model: model.blocks[0].position) or Terms, not {kind}")
    with evaluating(position):  # which in training may shift positions at random
        return position(grid)


def _title(position: Position, options: dict) -> str:
    if isinstance(position, Terms):
        return "given terms"
    if isinstance(position, Composition):
        return "+".join(position.parts)
    key = position if isinstance(position, str) else key_of(position)
    return " ".join([key, *(f"{name}={value}" for name, value in options.items())])


def _of_heads(**arrays: Array) -> list[Tensor]:
    """Each as [H, N, D] in float64."""
    found = [torch.as_tensor(x).detach().double() for x in arrays.values()]
    shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in zip(arrays, found, strict=True))
    if any(x.dim() not in (2, 3) for x in found):
        raise ValueError(f"q, k and v are [N, D] or [H, N, D], of one image, not {shapes}")
    found = [x if x.dim() == 3 else x[None] for x in found]
    if len({(len(x), x.shape[-1]) for x in found}) > 1:
        raise ValueError(f"q, k and v need the same number of heads and the same width, not {shapes}")
    return found


def _checked_mask(mask: Array | None, q: Tensor, k: Tensor) -> Tensor | None:
    if mask is None:
        return None
    mask, shape = torch.as_tensor(mask, device=q.device), (*q.shape[:-1], k.shape[-2])
    try:
        fits = torch.broadcast_shapes(mask.shape, shape) == shape
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"the mask has shape {tuple(mask.shape)}, which does not broadcast to [H, M, N] = {list(shape)}")
    return mask


def _chosen_queries(query: int | tuple[int, int] | None, grid: Grid, count: int) -> list[int]:
    first = grid.tokens - count
    if query is None:
        return list(range(first, grid.tokens))
    try:
        if isinstance(query, Sequence):
            row, column = map(operator.index, query)
            inside = 0 <= row < grid.h and 0 <= column < grid.w
            index = grid.prefix + row * grid.w + column if inside else -1
        else:
            index = operator.index(query)
    except (TypeError, ValueError):
        raise TypeError(f"query is the number of a token or (row, column) of a patch, not {query!r}") from None
    if not max(first, 0) <= index < grid.tokens:
        has = f"the {grid.h}x{grid.w} grid with {grid.prefix} prefix tokens has queries {first} to {grid.tokens - 1}"
        raise ValueError(f"there is no query {query}: {has}, or (row, column)")
    return [index]


def _checked_grid(grid: Sequence[int]) -> Grid:
    if not isinstance(grid, Sequence) or len(grid) not in (2, 3) or not all(isinstance(n, int) for n in grid):
        raise TypeError(f"grid is (h, w) or (h, w, prefix) of the keys, in tokens, not {grid!r}")
    return Grid(*grid)


def _chosen_heads(head: int | None, count: int) -> list[int]:
    if head is not None and not 0 <= head < count:
        raise ValueError(f"there is no head {head}: q has {count}, counted from 0")
    return list(range(count)) if head is None else [head]


def _names(tokens: Sequence[str] | None, grid: Grid) -> tuple[str, ...]:
    if tokens is None:
        patches = (f"({y}, {x})" for y, x in grid.coordinates().tolist())
        return (*(f"prefix {i}" for i in range(grid.prefix)), *patches)
    if len(tokens) != grid.tokens:
        raise ValueError(f"{len(tokens)} names for {grid.tokens} tokens, prefix tokens included")
    return tuple(map(str, tokens))


def _part(x: Tensor, heads: list[int], rows: list[int]) -> Tensor:
    return x[heads][:, rows]


def _numbers(values: Tensor) -> Sequence[str]:
    return ["hidden" if value == float("-inf") else f"{value:z.4f}" for value in values.tolist()]
