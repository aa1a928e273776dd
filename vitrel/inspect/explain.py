"""`explain`: all terms that position adds to attention, as tensors and as a text, for a few tokens of a small grid."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from numbers import Integral

import numpy as np
import torch
from torch import Tensor

from vitrel.common.sizes import format_size
from vitrel.common.tables import aligned
from vitrel.grid import Grid
from vitrel.inspect.any_model import encoding_name, evaluated
from vitrel.ops import attention
from vitrel.ops.reference import masked_logits, rotated, table_logits
from vitrel.position import PositionEncoding, Table, Terms, create_position

Array = Tensor | np.ndarray | Sequence
Position = str | PositionEncoding | Terms
KEYS = 64  # maximum number of keys printed for each query; of more keys, those of the largest weights
_CHANNELS = 16  # of an output, printed
_MEANING = {
    "content-position": "s q.r, r a vector for the position of the key or for the offset",
    "position-content": "s r.k, r a vector for the position of the query or for the offset",
    "position-position": "s p.r, p added to the query's token, r to the key's; q.k above is without, later terms with them",
    "global content bias": "s u.k, the same vector u for every query",
    "global position bias": "s v.r, the same vector v for every query, r a vector for the offset",
    "rotation": "s q.k with q and k rotated by their positions, less s q.k before the rotation",
    "bias": "a number for the offset",
    "gated row": "s g.r, g gates that q opens, r numbers for the offset",
    "temperature": "the change by the factor {:.4f} on all terms with s",
}
_AXES = {"hw": "dy, dx", "h": "dy", "w": "dx", "h+w": "dy + dx"}


@dataclass(frozen=True, repr=False)
class Explanation:
    """The terms of attention of M chosen queries to all N keys, in H chosen heads, float64; `print` shows them as a text.

    `raw` is q.k, and `scaled` that times the scale. `scaled` plus all of `added` gives `biased`, the mask gives `masked`, and
    its softmax `weights`. `output` is weights @ v plus what value tables add; where position adds to tokens, v includes what it
    adds. Without position the logits are `scaled`, under the same mask. A hidden key has the logit -inf. A query that sees no
    key has weights and an output of 0. `heads` and `queries` are indices, of heads and of tokens, prefix tokens first.
    """

    position: str
    grid: Grid  # of the keys
    names: tuple[str, ...]  # of the N tokens
    heads: tuple[int, ...]
    queries: tuple[int, ...]  # indices of tokens, prefix tokens first
    scale: float  # Terms.scale, part of `scaled`
    temperature: Tensor | None  # Terms.temperature, a term in `added`
    raw: Tensor  # [H, M, N] q.k
    scaled: Tensor  # [H, M, N] the content-content term
    added: dict[str, Tensor]  # {term of position: [H, M, N], what it adds to the logits}
    biased: Tensor  # [H, M, N]
    masked: Tensor  # [H, M, N]
    weights: Tensor  # [H, M, N]
    weights_without: Tensor  # [H, M, N] without position
    output: Tensor  # [H, M, D]
    output_without: Tensor  # [H, M, D] without position

    def __repr__(self) -> str:
        lines = list(self._legend())
        for h in range(len(self.heads)):
            for m in range(len(self.queries)):
                lines += ["", *self._of_query(h, m)]
        return "\n".join(lines)

    def _columns(self) -> dict[str, tuple[str, Tensor]]:
        """Return the columns of the text in the order of the terms: {title: (its meaning, values [H, M, N])}."""
        factor = f"s q.k, s = {self.output.shape[-1]}^-1/2" + (f" times {self.scale:.4f}" if self.scale != 1 else "")
        columns = {"q.k": ("raw score of query and key", self.raw), "scaled": (factor, self.scaled)}
        number = 1.0 if self.temperature is None else float(self.temperature)
        for name, part in self.added.items():
            columns[name] = "+ " + _MEANING[name.split("[")[0].rstrip(" 2345678")].format(number), part
        if self.added:
            columns["biased"] = "scaled and all that position adds", self.biased
        if not torch.equal(self.biased.nan_to_num(), self.masked.nan_to_num()):  # NaN differs from itself
            columns["masked"] = "the same with the mask", self.masked
        columns["weight"] = "softmax of the column before", self.weights
        if self.added:
            columns["without"] = "the weight without position", self.weights_without
        return columns

    def _legend(self) -> Iterator[str]:
        """Yield the lines that name grid and encoding, and say what each column means."""
        prefix = f" with prefix={self.grid.prefix}" if self.grid.prefix else ""
        yield f"attention on a {format_size(self.grid)} grid{prefix}, position: {self.position}"
        yield "(dy, dx) is the offset, query minus key, in patches: dy > 0: the query is below the key, dx > 0: right of it"
        yield from (f"  {line}" for line in aligned([[title, meaning] for title, (meaning, _) in self._columns().items()]))

    def _of_query(self, h: int, m: int) -> Iterator[str]:
        """Yield the lines of the m-th query in the h-th head: a table of all keys, or the 64 of most weight, and the output."""
        query, columns = self.queries[m], self._columns()
        keys: Sequence[int] = range(self.grid.tokens)
        if self.grid.tokens > KEYS:
            keys = sorted(self.weights[h, m].topk(KEYS).indices.tolist())
        yield f"query {self.names[query]}" + (f", head {self.heads[h]}" if self.raw.shape[0] > 1 or self.heads[h] else "")
        cells = [["key", *(self.names[j] for j in keys)], ["(dy, dx)", *(self._offset(query, j) for j in keys)]]
        cells += [[title, *_numbers(part[h, m, keys])] for title, (_, part) in columns.items()]
        widths = [max(map(len, column)) for column in cells]
        for name, *rest in zip(*cells, strict=True):
            numbers = (cell.rjust(n) for cell, n in zip(rest, widths[1:], strict=True))
            yield "  " + "  ".join([name.ljust(widths[0]), *numbers])
        if len(keys) < self.grid.tokens:
            yield f"  keys of less weight: {self.grid.tokens - len(keys)}"
        rows = {"output": self.output[h, m]} | ({"without position": self.output_without[h, m]} if self.added else {})
        more = " ..." if self.output.shape[-1] > _CHANNELS else ""
        yield from (f"  {line}{more}" for line in aligned([[t, *_numbers(row[:_CHANNELS])] for t, row in rows.items()]))

    def _offset(self, query: int, key: int) -> str:
        """Return the offset of two tokens, query minus key in (rows, columns), as text; "-" if one is a prefix token."""
        i, j = query - self.grid.prefix, key - self.grid.prefix
        return "-" if min(i, j) < 0 else f"({i // self.grid.w - j // self.grid.w}, {i % self.grid.w - j % self.grid.w})"


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
    r"""Return all terms that position adds to attention as an `Explanation`, which holds tensors and prints as a table.

    >>> q = [[1, 0, 1, 0], [0, 2, 0, 1], [1, 1, 1, 0], [0, 0, 1, 1], [1, 0, 0, 1]]
    >>> k = [[0, 1, 0, 1], [1, 0, 1, 0], [1, 1, 0, 0], [0, 0, 1, 1], [1, 0, 0.5, 0.5]]
    >>> v = [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1], [0.5, 0.5, 0.5, 0.5]]
    >>> found = vitrel.explain(q, k, v, position="log_decay", decay=0.3, query=0)
    >>> print(found.weights[0, 0], found.output[0, 0], sep="\n")
    tensor([0.1473, 0.3253, 0.1747, 0.1603, 0.1924], dtype=torch.float64)
    tensor([0.2435, 0.4215, 0.2709, 0.2565], dtype=torch.float64)

    Args:
        q: queries [M, D] or [H, M, D] before position acts; all is computed in float64. What an encoding adds to tokens is
            added to q, k and v.
        k: keys [N, D] or [H, N, D].
        v: values [N, D] or [H, N, D].
        position: a key of POSITIONS, built with its `options` and learned values as initialized; an encoding; or Terms.
        grid: (h, w) or (h, w, prefix) of the keys; None: a row of N tokens. The queries are its last M tokens.
        query: the index of one token or (row, column) of one patch; None: all.
        mask: broadcastable to [H, M, N], bool with True = attend, or additive.
        head: the index of one head; None: all.
        tokens: names of the N tokens in the text; None: (row, column), and "prefix 0" and so on.
        options: of the encoding that `position` names.

    Raises:
        TypeError: an argument is of another kind.
        ValueError: shapes do not fit together, or there is no such query, head or key of POSITIONS.
    """
    q, k, v = _with_heads(q=q, k=k, v=v)
    grid = Grid(1, k.shape[-2]) if grid is None else Grid(*grid)
    queries = _chosen_queries(query, grid, q.shape[-2])
    if head is not None and not 0 <= head < len(q):
        raise ValueError(f"there is no head {head}: q has {len(q)}, counted from 0")
    heads = list(range(len(q))) if head is None else [head]
    patches = (f"({y}, {x})" for y, x in grid.coordinates().tolist())
    names = tuple(tokens or (*(f"prefix {i}" for i in range(grid.prefix)), *patches))
    if len(names) != grid.tokens:
        raise ValueError(f"tokens has {len(names)} names for {grid.tokens} tokens")
    mask = None if mask is None else _checked_mask(torch.as_tensor(mask, device=q.device), (*q.shape[:2], k.shape[1]))
    with torch.no_grad():
        if not isinstance(position, str | PositionEncoding | Terms):
            kind = type(position).__name__
            raise TypeError(f"position is a key, an encoding (of a model: model.blocks[0].position) or Terms, not {kind}")
        encoding = position
        if isinstance(position, str):
            encoding = create_position(position, grid, q.shape[0], q.shape[-1], device=q.device, **options)
        elif options:
            raise TypeError(f"options {', '.join(options)} are for a key of POSITIONS; here position is already built")
        terms = encoding if isinstance(encoding, Terms) else evaluated(encoding, grid)
        added, tensors = _terms(q, k, v, terms, grid, mask)
    rows = [i - (grid.tokens - q.shape[-2]) for i in queries]
    return Explanation(
        "Terms" if isinstance(position, Terms) else encoding_name(position, **options),
        grid,
        names,
        tuple(heads),
        tuple(queries),
        scale=terms.scale,
        temperature=terms.temperature,
        added={name: x[heads][:, rows] for name, x in added.items()},
        **{name: x[heads][:, rows] for name, x in tensors.items()},
    )


def _terms(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, grid: Grid, mask: Tensor | None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return `added` of an `Explanation` ("NAME 2" for a name's second term), and its other tensors [H, M, ...] by name, for
    all heads and queries.
    """
    bare = Terms(scale=terms.scale)
    scale = bare.scale * q.shape[-1] ** -0.5
    found = {
        "output_without": attention(q, k, v, bare, grid, mask, backend="reference"),  # first: it checks the shapes
        "raw": q @ k.mT,
        "scaled": masked_logits(q, k, bare, grid),
        "weights_without": _softmax(masked_logits(q, k, bare, grid, mask)),
    }
    added, content_q, content_k = {}, q, k
    q, k, v = _with_tokens(q, k, v, terms)
    if terms.tokens is not None:
        of_query, of_key = q - content_q, k - content_k
        added["content-position"] = content_q @ of_key.mT * scale
        added["position-content"] = of_query @ content_k.mT * scale
        added["position-position"] = of_query @ of_key.mT * scale
    for name, logits in _attention_terms(q, k, terms, grid, scale):
        same = sum(title.startswith(name) for title in added)
        added[f"{name} {same + 1}" if same else name] = logits
    masked = masked_logits(q, k, terms, grid, mask)
    found |= {
        "biased": masked_logits(q, k, terms, grid),
        "masked": masked,
        "weights": _softmax(masked),
        "output": attention(q, k, v, terms, grid, mask, backend="reference"),
    }
    return {name: x.expand_as(masked) for name, x in added.items()}, found


def _attention_terms(q: Tensor, k: Tensor, terms: Terms, grid: Grid, scale: float) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, logits) of each term that position adds in attention; their sum plus scale q.k are the logits.

    Logits are broadcastable to [H, M, N] and without a mask; q and k include what position adds to tokens; `scale` is
    Terms.scale D^-1/2, without the temperature, which is a term itself. Two tables of one axis give terms with equal names.
    """

    def product(q: Tensor, field: str, tables: Sequence[Table]) -> Tensor | None:
        parts = tuple(Table(t.axis, **{field: getattr(t, field)}) for t in tables if getattr(t, field) is not None)
        return table_logits(q, k, parts, grid, scale)

    bias = torch.zeros_like(q) if terms.query_bias is None else terms.query_bias[:, None].to(q.dtype).expand_as(q)
    # Transformer-XL has a bias u of content and a bias v of position; in Terms, v is the query bias and u - v one key vector.
    constant = [
        t for t in terms.tables if t.key is not None and terms.query_bias is not None and bool((t.key == t.key[:, :1]).all())
    ]
    named = {
        "content-position": product(q, "query", terms.tables),
        "position-content": product(q, "key", [t for t in terms.tables if not any(t is other for other in constant)]),
    }
    if terms.query_bias is not None:
        global_content = product(q, "key", constant)
        content = bias @ k.mT * scale
        named["global content bias"] = content if global_content is None else content + global_content
        named["global position bias"] = product(bias, "query", terms.tables)
    yield from ((name, logits) for name, logits in named.items() if logits is not None)
    if terms.rotary is not None:
        rotated_q, rotated_k = rotated(q + bias, k, terms)
        yield "rotation", (rotated_q @ rotated_k.mT - (q + bias) @ k.mT) * scale
    for table in terms.tables:
        logits = product(q + bias, "bias", [table])
        if logits is not None:
            yield f"bias[{_AXES[table.axis]}]", logits
    gated = product(q + bias, "gated", terms.tables)
    if gated is not None:
        yield "gated row[dy, dx]", gated
    if terms.temperature is not None:
        with_factor = terms._replace(tables=tuple(table._replace(bias=None) for table in terms.tables))
        without = with_factor._replace(temperature=None)
        yield "temperature", masked_logits(q, k, with_factor, grid) - masked_logits(q, k, without, grid)


def _softmax(logits: Tensor) -> Tensor:
    """Return the softmax over keys, 0 where a query sees no key."""
    hidden = (logits == float("-inf")).all(-1, keepdim=True)
    return logits.masked_fill(hidden, 0.0).softmax(-1).masked_fill(hidden, 0.0)


def _with_tokens(q: Tensor, k: Tensor, v: Tensor, terms: Terms) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v plus what position adds to the tokens; the queries are the last tokens of the grid."""
    if terms.tokens is None:
        return q, k, v
    rows = terms.tokens.to(q.dtype).unflatten(-1, (q.shape[0], q.shape[-1])).transpose(0, 1)  # [H, N, D]
    return q + rows[:, -q.shape[-2] :], k + rows, v + rows


def _with_heads(**arrays: Array) -> list[Tensor]:
    """Return each array, [N, D] or [H, N, D], as a tensor [H, N, D] in float64; ValueError if they differ in H or D."""
    tensors = [torch.as_tensor(x).detach().double() for x in arrays.values()]
    tensors = [x[None] if x.dim() == 2 else x for x in tensors]
    if len({(len(x), x.shape[-1]) for x in tensors}) > 1:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in zip(arrays, tensors, strict=True))
        raise ValueError(f"q, k and v need the same number of heads and the same width, not {shapes}")
    return tensors


def _checked_mask(mask: Tensor, shape: tuple[int, int, int]) -> Tensor:
    try:
        mask.expand(shape)
    except RuntimeError as error:
        raise ValueError(f"mask {list(mask.shape)} is not broadcastable to [H, M, N] = {list(shape)}") from error
    return mask


def _chosen_queries(query: int | tuple[int, int] | None, grid: Grid, count: int) -> list[int]:
    """Return the chosen queries' indices in the grid, all for None; ValueError if not among its last `count` tokens."""
    first = grid.tokens - count
    if query is None:
        return list(range(first, grid.tokens))
    if isinstance(query, int | Integral):
        index = int(query)
    else:
        row, column = query
        index = grid.prefix + row * grid.w + column if 0 <= row < grid.h and 0 <= column < grid.w else -1
    if not max(first, 0) <= index < grid.tokens:
        has = f"the {grid.h}x{grid.w} grid with prefix={grid.prefix} has queries {first} to {grid.tokens - 1}"
        raise ValueError(f"there is no query {query}: {has}, or (row, column)")
    return [index]


def _numbers(values: Tensor) -> Sequence[str]:
    return ["hidden" if value == float("-inf") else f"{value:z.4f}" for value in values.tolist()]
