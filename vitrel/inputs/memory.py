"""A strip of tiles, from the top down, each seeing the keys and values of those above it: `forward_memory`.

Segment recurrence (Transformer-XL, arXiv 1901.02860, sec. 3.2; XLNet) with tiles for segments: the grid of the keys has the
rows of those above first, so that offsets continue across the border. The result is that of the whole strip under the mask
"a patch sees the patches of its own tile and of the `length` tiles above", with one tile's queries at a time.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from timm.models._manipulate import checkpoint
from torch import Tensor

from vitrel.grid import Grid
from vitrel.inputs.crop import Crop, crop_terms
from vitrel.layers import Block
from vitrel.models.vit import ViT
from vitrel.ops import attention
from vitrel.position import PositionEncoding, Terms

Past = tuple[Tensor, Tensor]  # keys and values [B, H, rows * w, D] of one layer, without prefix tokens


class Memory(NamedTuple):
    """What later tiles see of earlier ones; made by `forward_memory`."""

    heights: tuple[int, ...]  # rows of patches of each tile that is remembered, the topmost first
    width: int  # patches
    below: int  # row of the strip, counted in patches from its top, at which the next tile begins
    layers: tuple[Past, ...]  # keys and values of every block, [B, H, sum(heights) * width, D]

    def detach(self) -> "Memory":
        """The same without its history: gradients end here."""
        return Memory(self.heights, self.width, self.below, tuple((k.detach(), v.detach()) for k, v in self.layers))


def forward_memory(
    model: ViT, image: Tensor, memory: Memory | None = None, length: int = 1, height: int | None = None, detach: bool = True
) -> tuple[Tensor, Memory]:
    """The next tile of a strip [B, in_chans, h, w] -> (tokens [B, N, C] as `forward_features` gives them, memory for the next).

    memory: what the tile above gave, None for the topmost. All tiles have one width, in whole patches; heights may differ.
    length: number of tiles remembered. detach: no gradient flows into earlier tiles, as in the paper; False keeps their graph.
    height: of the whole strip in pixels, where it is known. Then positions are those of the whole; else those of the grid of
    remembered and own rows, which is the same for encodings that read nothing but offsets. Others differ from the whole then:
    tables resampled or normalised by the grid (table, factorised, decomposed, fire, rope_normalised, scaling, log_n), and
    rotations beside prefix tokens, which are not rotated.
    A tile's prefix tokens are its own: they see the patches above, later tiles do not see them.
    Raises TypeError for a memory of another kind, ValueError for blocks with windows, tiles that do not fit below each other
    (only the last may end inside a patch, its strip's height given: that row of patches is filled with zeros,
    as the whole strip's), and for encodings that add to tokens (absolute, sincos) without `height`: their positions would start
    anew in every tile.
    """
    _check(model, memory, length, height)
    x = model.embed_patches(image if memory is None else _filled(model, image))  # [B, h, w, C]
    h, w = x.shape[1:3]
    above, below = ((), 0) if memory is None else (memory.heights, memory.below)
    keys = Grid(sum(above) + h, w, model.num_prefix_tokens)
    whole = None if height is None else Grid(model.token_grid((height, 1)).h, w, keys.prefix)
    _check_tile(model, x, memory, whole)
    _check_rows(model, image, whole is not None and below + h == whole.h)

    def terms_of(encoding: PositionEncoding) -> Terms:
        return encoding(keys) if whole is None else crop_terms(encoding(whole), Crop(whole, (below - sum(above), 0), keys.h, w))

    tokens = None
    if model.pos_embed is not None:
        tokens = crop_terms(model.pos_embed(whole), Crop(whole, (below, 0), h, w)).tokens
    x = model.add_tokens(x, tokens)
    shared = None if model.shared_position is None else terms_of(model.shared_position)
    heights = (*above, h)[-length:] if length else ()
    layers = []
    for i, block in enumerate(model.blocks):
        terms = terms_of(block.position) if shared is None else shared
        past = None if memory is None else memory.layers[i]
        args = x, terms, keys, past, sum(heights) * w
        x, *last = checkpoint(_run_block, block, *args) if model.grad_checkpointing else _run_block(block, *args)
        layers.append(tuple(last))
    found = Memory(heights, w, below + h, tuple(layers))
    return model.norm(x), found.detach() if detach else found


def segment_attention(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, keys: Grid, dropout_p: float = 0.0, backend: str = "auto"
) -> Tensor:
    """Attention of a segment's own tokens [B, H, M, D] to all keys and values [B, H, N, D] -> [B, H, M, D].

    k, v: see `with_past`. keys: the grid of all keys, on which `terms` are. Prefix tokens belong to their segment: they see all
    its keys, and later segments do not see them.
    """
    p, earlier = keys.prefix, k.shape[2] - q.shape[2]
    if not p or not earlier:
        return attention(q, k, v, terms, keys, None, dropout_p, backend)
    # Queries are the last tokens of the key grid and prefix tokens its first: the rows between are filled, then dropped.
    between = q.new_zeros(*q.shape[:2], earlier, q.shape[3])
    out = attention(torch.cat((q[:, :, :p], between, q[:, :, p:]), 2), k, v, terms, keys, None, dropout_p, backend)
    return torch.cat((out[:, :, :p], out[:, :, p + earlier :]), 2)


def with_past(own: Past, past: Past | None, prefix: int) -> Past:
    """Own keys and values with earlier ones, if any, between their prefix tokens and their patches."""
    if past is None:
        return own
    k, v = (torch.cat((x[:, :, :prefix], old, x[:, :, prefix:]), 2) for x, old in zip(own, past, strict=True))
    return k, v


def _run_block(
    block: Block, x: Tensor, terms: Terms, keys: Grid, past: Past | None, remembered: int
) -> tuple[Tensor, Tensor, Tensor]:
    """The tokens after the block, and the last `remembered` keys and values, earlier ones and its own."""
    attn = block.attn
    last: list[Tensor] = []

    def attend(tokens: Tensor) -> Tensor:
        q, k, v = attn.heads(attn.project(tokens))
        k, v = with_past((k, v), past, keys.prefix)
        last.extend(t[:, :, keys.tokens - remembered :] for t in (k, v))
        out = segment_attention(q, k, v, terms, keys, attn.dropout_p, attn.backend)
        return attn.output(out.transpose(1, 2).flatten(2))

    x = block.residuals(x, attend)
    k, v = last
    return x, k, v


def _check(model: ViT, memory: Memory | None, length: int, height: int | None) -> None:
    if not isinstance(memory, Memory | None):
        raise TypeError(
            f"memory is the second of what forward_memory gave for the tile above, or None, not {type(memory).__name__}"
        )
    if not isinstance(length, int) or not isinstance(height, int | None):
        raise TypeError(f"length is a number of tiles and height one of pixels, not {length!r} and {height!r}")
    if any(block.window is not None for block in model.blocks):
        raise ValueError("a block with a window sees nothing beyond it: memory needs global attention in all blocks")
    if length < 0:
        raise ValueError(f"length is the number of tiles remembered, at least 0, not {length}")


def _filled(model: ViT, image: Tensor) -> Tensor:
    """A tile below others that is shorter than a patch, filled up with zeros as the embedding fills a last partial patch."""
    patch = model.patch_embed.patch_size[0]
    short = image.dim() == 4 and 0 < image.shape[2] < patch
    return F.pad(image, (0, 0, 0, patch - image.shape[2])) if short else image


def _check_rows(model: ViT, image: Tensor, last: bool) -> None:
    patch = model.patch_embed.patch_size[0]
    if image.shape[2] % patch and not last:
        raise ValueError(
            f"a tile of {image.shape[2]} pixels is no whole rows of {patch}: its padding would lie inside the strip. Only the "
            "last tile of a strip whose height is given may end so: cut the others at whole patches"
        )


def _check_tile(model: ViT, x: Tensor, memory: Memory | None, whole: Grid | None) -> None:
    """x: patches of the tile [B, h, w, C]."""
    if whole is None and model.pos_embed is not None:
        raise ValueError(
            "this model adds positions to its tokens, which would start anew in every tile: pass height, the whole strip's "
            "in pixels, or use an encoding that acts in attention"
        )
    below = 0 if memory is None else memory.below
    if whole is not None and below + x.shape[1] > whole.h:
        raise ValueError(
            f"the tile ends at row {below + x.shape[1]} of patches, the strip has {whole.h}: pass the height of the whole strip"
        )
    if memory is None:
        return
    if len(memory.layers) != len(model.blocks):
        raise ValueError(f"memory of {len(memory.layers)} blocks, the model has {len(model.blocks)}: it is another model's")
    keys, width, own = memory.layers[0][0], memory.width, model.blocks[0].attn.num_heads
    batch, heads = keys.shape[:2]
    if (heads, keys.shape[3]) != (own, x.shape[3] // own):
        raise ValueError(
            f"memory of {heads} heads, {keys.shape[3]} wide, the model has {own} of {x.shape[3] // own}: it is another's"
        )
    if (batch, width) != (x.shape[0], x.shape[2]):
        raise ValueError(
            f"a batch of {x.shape[0]} tiles {x.shape[2]} patches wide cannot go below one of {batch}, {width} wide: "
            "tiles of a strip have one width; begin another strip with memory=None"
        )
