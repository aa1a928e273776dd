"""torch.nn.attention.flex_attention with the position terms looked up in its kernel, by the offset class of each pair.

It is a general alternative to our Triton kernels, taken by name only, since no measured case speaks for it. On a
GPU it is compiled once per shape; it stores the content scores of every offset class, [B, H, N, R], for query and key tables,
and adds the gradient of a table by one atomic addition per pair. On a CPU it has no backward pass and runs uncompiled with all
scores [B, H, N, N] in memory, which is useful for tests only.
"""

import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vitrel.grid import Grid
from vitrel.ops.reference import gated_scores, rotated, with_query_bias
from vitrel.position.terms import Table, Terms

_compiled = functools.cache(torch.compile)


def attention(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, grid: Grid, mask: Tensor | None = None, dropout_p: float = 0.0
) -> Tensor:
    """Compute attention with position terms; arguments and result as in vitrel.ops.attention."""
    q = with_query_bias(q, terms)
    scale = terms.content_scale(q.shape[-1])
    lookups = [lookup for table in terms.tables for lookup in _lookups(q, k, table, grid, scale)]
    q, k = rotated(q, k, terms)
    if isinstance(scale, Tensor):  # flex_attention takes a number
        q, scale = q * scale.to(q.dtype), 1.0
    if not torch.is_grad_enabled():  # on a CPU it refuses tensors that require gradients even then
        q, k, v = q.detach(), k.detach(), v.detach()
    mask = None if mask is None else mask.expand(*q.shape[:-1], k.shape[-2])
    return _run(q, k, v, score_mod=_score_mod(lookups, mask, grid.prefix), scale=scale)


class _Lookup(NamedTuple):
    """Part of a table, which adds a value to every logit (i, j).

    The value is values[h, r], values[b, h, i, r] or values[b, h, j, r], by `side`. The prefix classes are the first three of R
    here, not the last three as in Grid.
    """

    values: Tensor  # [H, R], [B, H, M, R] or [B, H, N, R]
    side: str  # "none" (bias), "queries" or "keys"
    queries: Tensor  # [M]: r = queries[i] - keys[j], -1 for a prefix token
    keys: Tensor  # [N]: the same for keys

    def __call__(self, b: Tensor, h: Tensor, i: Tensor, j: Tensor, prefix: int) -> Tensor:
        query, key = self.queries[i], self.keys[j]
        r = query - key
        if prefix:
            r = torch.where(query < 0, torch.where(key < 0, 2, 0), torch.where(key < 0, 1, r))
        return self.values[h, r] if self.side == "none" else self.values[b, h, i if self.side == "queries" else j, r]


def _lookups(q: Tensor, k: Tensor, table: Table, grid: Grid, scale: float | Tensor) -> list[_Lookup]:
    first = 3 if grid.prefix else 0  # prefix classes come first here, so that no grid size is a constant of the kernel
    y, x = grid.coordinates(q.device).unbind(-1)
    at = {"hw": y * (2 * grid.w - 1) + x, "h": y, "w": x, "h+w": y + x}[table.axis]  # [h*w]
    keys = F.pad(at, (grid.prefix, 0), value=-1)  # [N]
    queries = keys[-q.shape[-2] :]
    queries = torch.where(queries < 0, -1, queries + (grid.offset_classes(table.axis) // 2 + first))  # [M]
    values = []
    if table.bias is not None:
        values.append((table.bias.roll(first, -1), "none"))
    if table.query is not None:
        values.append((q * scale @ table.query.roll(first, -2).to(q.dtype).mT, "queries"))
    if table.gated is not None:
        gates, rows = table.gated
        values.append((gated_scores(q, (gates, rows.roll(first, -2)), scale), "queries"))
    if table.key is not None:
        values.append((k * scale @ table.key.roll(first, -2).to(k.dtype).mT, "keys"))
    return [_Lookup(*pair, queries, keys) for pair in values]


def _score_mod(lookups: list[_Lookup], mask: Tensor | None, prefix: int) -> Callable[..., Tensor]:
    def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        for lookup in lookups:
            score = score + lookup(b, h, i, j, prefix)
        if mask is None:
            return score
        return torch.where(mask[b, h, i, j], score, -float("inf")) if mask.dtype == torch.bool else score + mask[b, h, i, j]

    return score_mod


def _run(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    from torch.nn.attention.flex_attention import flex_attention  # imported here, since it takes half a second

    if torch.compiler.is_compiling():
        return flex_attention(q, k, v, **options)
    if q.device.type != "cpu":
        return _compiled(flex_attention)(q, k, v, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "flex_attention called without torch.compile")  # known, see the top of this file
        return flex_attention(q, k, v, **options)
