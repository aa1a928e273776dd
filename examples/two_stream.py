"""Two-stream attention with a permutation (XLNet, arXiv 1906.08237, sec. 2.2 and 2.3) over the patches of an image.

A token is predicted from those before it in a random order. Its content stream contains the token itself, its query stream only
the token's position; both attend to keys and values of the content stream. Position is that of the grid; only the mask depends
on the order.
"""

import torch
from torch import Tensor

from vitrel.grid import Grid
from vitrel.ops.dispatch import attention
from vitrel.position.terms import Terms


def permutation_masks(order: Tensor, keys: int) -> tuple[Tensor, Tensor]:
    """Return the masks (content, query), each [..., M, keys] bool: keys that each of the M queries, the last of `keys` tokens,
    may see.

    order: permutation of 0..M-1, [M] or [B, M], the token predicted at each step. The content stream sees tokens up to its own
    step, the query stream those before it; keys before the last M (memory, prefix tokens) are seen by all. ValueError if
    `order` is not a permutation, or there are fewer keys than tokens.
    """
    m = order.shape[-1]
    if keys < m:
        raise ValueError(f"{keys} keys, but an order of {m} tokens: keys must include all of them, after those of memory")
    rank = order.argsort(-1)  # [..., M], the step of each token
    has_values = not (torch.compiler.is_compiling() or order.is_meta)
    if has_values and (
        order.is_floating_point() or bool((order.gather(-1, rank) != torch.arange(m, device=order.device)).any())
    ):
        raise ValueError(f"order must be a permutation of 0..{m - 1}, such as torch.randperm({m})")
    before = rank[..., None, :] < rank[..., None]  # [..., M, M]
    earlier = before.new_ones(*before.shape[:-1], keys - m)
    itself = torch.eye(m, dtype=torch.bool, device=order.device)
    return torch.cat((earlier, before | itself), -1), torch.cat((earlier, before), -1)


def two_stream_attention(
    content: Tensor,
    query: Tensor,
    k: Tensor,
    v: Tensor,
    terms: Terms,
    grid: Grid,
    order: Tensor,
    dropout_p: float = 0.0,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Return the attention of both streams: queries [B, H, M, D] of each, keys and values [B, H, N, D] of the content -> two
    [B, H, M, D].

    grid: of the keys, N = grid.tokens; the M tokens are its last ones, and all tokens before them (memory, prefix tokens) are
    seen by all. order: see `permutation_masks`. In the query stream, a token that is first in the order with no other keys
    returns 0. Raises ValueError as `permutation_masks` and `vitrel.ops.attention`, and for streams of different shapes.
    """
    if content.shape != query.shape or order.shape[-1] != content.shape[-2]:
        raise ValueError(
            f"streams of shapes {tuple(content.shape)} and {tuple(query.shape)} under an order of {order.shape[-1]} tokens: "
            "both streams need one query for each token of the order"
        )
    if order.dim() > 2 or (order.dim() == 2 and len(order) not in (1, len(content))):
        raise ValueError(f"an order of shape {tuple(order.shape)} for a batch of {len(content)}: give [M] for all, or [B, M]")
    masks = (mask[..., None, :, :] for mask in permutation_masks(order, grid.tokens))  # [(B,) 1, M, N]
    first, second = (
        attention(q, k, v, terms, grid, mask, dropout_p, backend) for q, mask in zip((content, query), masks, strict=True)
    )
    return first, second
