"""Functions shared by the adapters: attention in windows, biases of tables, embeddings of another grid.

Grids, windows and resampling are those of vitrel.grid, vitrel.ops.window and vitrel.position.resample. B images, L windows of
N tokens, H heads, D width of a head, C channels.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrel.geometry import cached_geometry, is_known
from vitrel.grid import Grid, same_size
from vitrel.ops.window import window_mask, windows
from vitrel.position.levit import absolute_offsets, signed_offsets
from vitrel.position.resample import resample_embedding, resample_table

Size = tuple[int, int]


def in_windows(
    x: Tensor,
    window: Size,
    attend: Callable[[Tensor, Tensor | None], Tensor],
    shift: Size = (0, 0),
    strided: bool = False,
) -> Tensor:
    """Apply attention within windows, L in an image and N tokens each, [B, h, w, C] -> [B, h, w, C'].

    Args:
        x: tokens [B, h, w, C]. Sides that are not whole windows are padded on the right and below; no token sees the padding.
        window: (h, w) in tokens.
        attend: a function of tokens [B*L, N, C] and an additive mask [L*N, N], None if every token of a window sees all
            others, -> [B*L, N, C'].
        shift: (sy, sx), by which windows are shifted down and to the right, in tokens; see vitrel.ops.window.windows.
        strided: windows hold tokens at equal distances over the whole grid (MaxViT's grid attention).
    """
    h, w = x.shape[1:3]
    mask = window_mask(h, w, window, shift, x.dtype, x.device, strided)
    return _over_windows(x, window, lambda tokens: attend(tokens, mask), shift, strided)


def in_padded_windows(x: Tensor, window: Size, attend: Callable[[Tensor], Tensor], stride: int = 1) -> Tensor:
    """Apply attention within windows whose tokens see the zeros that pad them, [B, h, w, C] -> [B, h / stride, w / stride, C'].

    SAM and other models were trained so. Zeros pad a map on the right and below to whole windows.

    Args:
        x: tokens [B, h, w, C].
        window: (m, n), rows and columns of a window.
        attend: a function of the L windows of each image, [B*L, m, n, C] -> [B*L, m / stride, n / stride, C'].
        stride: factor by which `attend` reduces both sides of a window, and so of the map; h and w are multiples of it.
    """
    return _over_windows(x, window, lambda tokens: attend(tokens.unflatten(1, window)).flatten(1, 2), stride=stride, zeros=True)


def _over_windows(
    x: Tensor,
    window: Size,
    attend: Callable[[Tensor], Tensor],
    shift: Size = (0, 0),
    strided: bool = False,
    stride: int = 1,
    zeros: bool = False,
) -> Tensor:
    """Apply `attend` to the tokens of all windows, [B*L, N, C] -> [B*L, N / stride**2, C'], and return the results as a map.

    The other arguments are those of `in_windows` and `in_padded_windows`, which call it. Padding is zero with `zeros`;
    otherwise it repeats a token of the border.
    """
    b, h, w, _ = x.shape
    layout = windows(h, w, window, shift, x.device, strided)
    x = x.flatten(1, 2).index_select(1, layout.source)
    if zeros and not (is_known(h, w) and h % window[0] == w % window[1] == 0):
        slots = torch.arange(x.shape[1], device=x.device)
        x = x * (layout.inverse[layout.source] == slots).to(x.dtype)[:, None]
    # no dimension of L: torch would compile another graph for any size if there is one window
    x = attend(x.flatten().unflatten(0, (-1, window[0] * window[1], x.shape[-1])))
    if stride > 1:
        h, w, window = h // stride, w // stride, (window[0] // stride, window[1] // stride)
        layout = windows(h, w, window, shift, x.device, strided)
    return x.flatten().unflatten(0, (b, -1, x.shape[-1])).index_select(1, layout.inverse).unflatten(1, (h, w))


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, drop: nn.Dropout | None = None
) -> Tensor:
    """Return softmax(q k^T * D**-0.5 + bias + mask) v of tokens in windows, [B*L, H, N, E].

    Args:
        q: [B*L, H, N, D].
        k: as q.
        v: [B*L, H, N, E].
        bias: [H, N, N], or None.
        mask: additive, [L*N, N], or None.
        drop: the dropout layer of attention weights, which acts in training mode, or None.
    """
    p = drop.p if drop is not None and drop.training else 0.0
    if mask is None:
        return F.scaled_dot_product_attention(q, k, v, None if bias is None else bias[None], dropout_p=p)
    heads, n = q.shape[1:3]
    logits = _logits_of_windows(bias, mask, heads, n)[None]  # windows as heads: one bias for all images
    q, k, v = (t.flatten().unflatten(0, (-1, logits.shape[1], *t.shape[2:])) for t in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, logits, dropout_p=p)
    return out.flatten().unflatten(0, (-1, heads, *out.shape[2:]))


def _logits_of_windows(bias: Tensor | None, mask: Tensor, heads: int, n: int) -> Tensor:
    """Return the sum of a bias [H, N, N] or None and the mask [L*N, N] of L windows, [L*H, N, N].

    N is `n`, H is `heads`; the first window's heads come first. In a graph for any size no tensor has a dimension of L: torch
    would compile another graph for a single window.
    """
    if is_known(mask.shape[0]):
        logits = mask.unflatten(0, (-1, 1, n))
        return (logits if bias is None else logits + bias).expand(-1, heads, -1, -1).flatten(0, 1)
    row = torch.arange(mask.shape[0] * heads, device=mask.device)
    logits = mask.index_select(0, row // (heads * n) * n + row % n).unflatten(0, (-1, n))
    return logits if bias is None else logits + bias.repeat(mask.shape[0] // n, 1, 1)


def table_bias(table: Tensor, source: Grid, target: Grid) -> Tensor:
    """Return the bias of every query and key [H, N, N] from a table, by `resample_table` ("geometric") if the grids differ.

    Args:
        table: [(2h-1)(2w-1), H], by offset query minus key, in the order of Grid.
        source: grid of the table.
        target: grid of the tokens.
    """
    return pair_bias(resample_table(table, source, target, "geometric"), target)


def pair_bias(rows: Tensor, grid: Grid) -> Tensor:
    """Return the bias of every query and key [H, N, N] from the biases [R, H] of the offset classes of `grid`."""
    index = grid.index(device=rows.device)
    return rows.mT.index_select(1, index.flatten()).unflatten(1, index.shape)


@cached_geometry
def log_offsets(h: int, w: int, trained: Size, dtype: str, device: torch.device) -> Tensor:
    """Return sign(d) * log(1 + |d|) for d = dy and dx of every offset, query minus key, of an h x w grid, [R, 2].

    Args:
        h: rows of the grid.
        w: columns of the grid.
        trained: (h, w) of the window of which the largest offset of each axis is scaled to d = 8, with logarithms to base 8
            (Swin V2); (0, 0): d is in patches, and logarithms are natural.
        dtype: name of the result's type.
        device: of the result.
    """
    offsets = Grid(h, w).offsets(device=device).to(getattr(torch, dtype))
    if trained == (0, 0):
        return offsets.sign() * (1 + offsets.abs()).log()
    offsets = offsets * 8 / (offsets.new_tensor(trained) - 1)
    return offsets.sign() * (1 + offsets.abs()).log2() / 3


def distance_bias(biases: Tensor, source: Grid, target: Grid, stride: int = 1) -> Tensor:
    """Return the bias of every query and key [H, N', N] from LeViT's biases by |row offset| and |column offset|.

    Args:
        biases: [H, h*w], by |row offset| * w + |column offset| (arXiv 2104.01136, sec. 4.2), resampled as a table over signed
            offsets (`resample_table`, "geometric") if the grids differ.
        source: grid of the biases, h x w.
        target: grid of the keys, N tokens.
        stride: the N' queries are at every stride-th row and column of `target`.
    """
    if same_size(source, target):
        index = _distance_index(target.h, target.w, stride, device=biases.device)
    else:
        biases = resample_table(signed_offsets(biases, source), source, target, "geometric").mT
        index = _offset_index(target.h, target.w, stride, device=biases.device)
    return biases.index_select(1, index.flatten()).unflatten(1, index.shape)


@cached_geometry
def _offset_index(h: int, w: int, stride: int, device: torch.device) -> Tensor:
    """Return the offset class (see Grid) of the N' queries at every stride-th row and column and all N keys, [N', N] int64."""
    index = Grid(h, w).index(device=device)
    return index.unflatten(0, (h, w))[::stride, ::stride].flatten(0, 1)


@cached_geometry
def _distance_index(h: int, w: int, stride: int, device: torch.device) -> Tensor:
    """Return |row offset| * w + |column offset| of the queries and keys of `_offset_index`, [N', N] int64."""
    return absolute_offsets(h, w, False, device=device)[_offset_index(h, w, stride, device=device)]


def token_embedding(embedding: Tensor, source: Size, target: Size, prefix: int = 0) -> Tensor:
    """Resample an absolute embedding of prefix tokens and patches bicubically, [1, P + h*w, C] -> [1, P + h'*w', C].

    Args:
        embedding: the trained embedding.
        source: (h, w) of its patches.
        target: (h', w') of the result.
        prefix: number P of prefix tokens, which are kept.
    """
    if is_known(*target) and tuple(target) == tuple(source):
        return embedding
    patches = embedding[0, prefix:].unflatten(0, tuple(source))
    patches = resample_embedding(patches, Grid(*target))[None]
    return patches if not prefix else torch.cat((embedding[:, :prefix], patches), 1)


def map_embedding(embedding: Tensor, target: Size) -> Tensor:
    """Resample an absolute embedding stored as a map bicubically, [1, C, h, w] -> [1, C, h', w'] with (h', w') = `target`."""
    if is_known(*target) and tuple(target) == tuple(embedding.shape[-2:]):
        return embedding
    return resample_embedding(embedding[0].permute(1, 2, 0), Grid(*target)).mT.unflatten(1, tuple(target))[None]
