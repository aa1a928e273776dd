"""torch.nn.attention.flex_attention: the position terms are looked up inside its kernel, by the offset class of every pair.

The general peer of our own kernels. On a GPU it is compiled, once per shape; beside the output it holds the content scores of
every offset class, [B, H, N, R] for query and key tables, and the gradient of a table is scattered with one atomic addition per
pair. On a CPU it has no backward and runs uncompiled, with all [B, H, N, N] scores in memory: to be checked there, not used.
"""

import functools
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrel.grid import Grid
from vitrel.ops.reference import Call, rotated, with_query_bias
from vitrel.ops.sdpa import KEY_ROTARY
from vitrel.position.terms import Table, Terms

_WINDOWED = "flex_attention works in blocks of 128 tokens, of which a window fills a part: 49 of 128 for a window of 7x7"
_compiled = functools.cache(torch.compile)


def refuses(call: Call) -> str:
    cpu = call.device.type == "cpu"
    if call.entry == "window_attention":
        return _WINDOWED
    if any(table.value is not None for table in call.terms.tables):
        return "flex_attention cannot add position-dependent values (Table.value) to its output"
    if call.terms.key_rotary is not None:
        return KEY_ROTARY
    if call.dropout_p:
        return "flex_attention has no dropout of attention weights"
    if call.grad and cpu:
        return "flex_attention has no backward on a CPU"
    if call.grad and torch.are_deterministic_algorithms_enabled():
        return "flex_attention adds up the gradients of tables in no fixed order, but deterministic algorithms are asked for"
    if cpu and torch.compiler.is_compiling():
        return "compiled for a CPU, flex_attention takes no index that is itself looked up"
    if call.dtype == torch.float64 and not cpu:
        return "compiled flex_attention has no float64"
    return ""


def pays(call: Call) -> bool:
    """Never before a GPU has shown where; on a CPU it is slower than the others."""
    return False


def attention(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, grid: Grid, mask: Tensor | None = None, dropout_p: float = 0.0
) -> Tensor:
    """See vitrel.ops.attention."""
    q = with_query_bias(q, terms)
    scale = terms.logit_scale(q.shape[-1])
    lookups = [lookup for table in terms.tables for lookup in _lookups(q, k, table, grid, scale)]
    q, k = rotated(q, k, terms)
    if isinstance(scale, Tensor):  # flex_attention takes a number
        q, scale = q * scale.to(q.dtype), 1.0
    if not torch.is_grad_enabled():  # on a CPU it refuses tensors that require gradients even so
        q, k, v = q.detach(), k.detach(), v.detach()
    mask = None if mask is None else mask.expand(*q.shape[:-1], k.shape[-2])
    return _run(q, k, v, score_mod=_score_mod(lookups, mask, grid.prefix), scale=scale)


class _Lookup(NamedTuple):
    """What a table adds to a pair: values[h, r], of queries values[b, h, i, r], of keys values[b, h, j, r]."""

    values: Tensor  # [H, R], [B, H, M, R] or [B, H, N, R]
    whose: str  # "nobody", "queries" or "keys"
    queries: Tensor  # [M] and
    keys: Tensor  # [N]: r = queries[i] - keys[j], -1 for a prefix token

    def __call__(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, prefix: int) -> Tensor:
        own, other = self.queries[i], self.keys[j]
        r = own - other
        if prefix:
            r = torch.where(own < 0, torch.where(other < 0, 2, 0), torch.where(other < 0, 1, r))
        return self.values[h, r] if self.whose == "nobody" else self.values[b, h, i if self.whose == "queries" else j, r]


def _lookups(q: Tensor, k: Tensor, table: Table, grid: Grid, scale: float | Tensor) -> list[_Lookup]:
    first = 3 if grid.prefix else 0  # prefix classes come first here: no size of the grid is a constant of the kernel
    y, x = grid.coordinates(q.device).unbind(-1)
    at = y * (2 * grid.w - 1) + x if table.axis == "hw" else y if table.axis == "h" else x  # [h*w]
    keys = F.pad(at, (grid.prefix, 0), value=-1)  # [N]
    queries = keys[-q.shape[-2] :]
    queries = torch.where(queries < 0, -1, queries + (grid.offset_classes(table.axis) // 2 + first))  # [M]
    found = []
    if table.bias is not None:
        found.append((table.bias.roll(first, -1), "nobody"))
    if table.query is not None:
        found.append((q * scale @ table.query.roll(first, -2).to(q.dtype).mT, "queries"))
    if table.gated is not None:
        gates, rows = table.gated[0].to(q.dtype), table.gated[1].roll(first, -2).to(q.dtype)
        found.append((F.softplus(q @ gates.mT) * scale @ rows.mT, "queries"))
    if table.key is not None:
        found.append((k * scale @ table.key.roll(first, -2).to(k.dtype).mT, "keys"))
    return [_Lookup(*one, queries, keys) for one in found]


def _score_mod(lookups: list[_Lookup], mask: Tensor | None, prefix: int) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        for lookup in lookups:
            score = score + lookup(b, h, i, j, prefix)
        if mask is None:
            return score
        return torch.where(mask[b, h, i, j], score, -float("inf")) if mask.dtype == torch.bool else score + mask[b, h, i, j]

    return score_mod


def _run(q: Tensor, k: Tensor, v: Tensor, **options: Callable | float) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention  # not above: importing it takes half a second

    if torch.compiler.is_compiling():
        return flex_attention(q, k, v, **options)
    if q.device.type != "cpu":
        return _compiled(flex_attention)(q, k, v, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")  # as the first lines of this file say
        return flex_attention(q, k, v, **options)
