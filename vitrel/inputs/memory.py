"""Forward pass over a strip of tiles from top to bottom, each attending to cached keys and values of the tiles above.

This is segment recurrence (Transformer-XL, arXiv 1901.02860, sec. 3.2; XLNet) with tiles as segments. The rows of the tiles
above come first in the key grid, so that offsets continue across the border. The result equals that of the whole strip with the
mask "a patch sees the patches of its tile and of the `length` tiles above", while only one tile's queries are in memory.
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
    """Cached keys and values of earlier tiles, which later tiles attend to; `forward_memory` returns it.

    Attributes:
        heights: number of rows of patches of each cached tile, the topmost first.
        width: of the strip, in patches.
        below: first row of the next tile, in patches from the top of the strip.
        layers: (keys, values) of the cached patches in every block, not rotated, each [B, H, sum(heights) * width, D].
    """

    heights: tuple[int, ...]
    width: int
    below: int
    layers: tuple[Past, ...]

    def detach(self) -> "Memory":
        """Return a memory of the same tensors detached from their graph, so that no gradient flows into earlier tiles."""
        return Memory(self.heights, self.width, self.below, tuple((k.detach(), v.detach()) for k, v in self.layers))


def forward_memory(
    model: ViT, image: Tensor, memory: Memory | None = None, length: int = 1, height: int | None = None, detach: bool = True
) -> tuple[Tensor, Memory]:
    """Process the next tile of a strip (an image cut into tiles from top to bottom); return its tokens and the new memory.

    The prefix tokens of a tile see the cached patches above, but later tiles do not see them. Only the last tile of a strip may
    end within a patch, and only if height is given; its last row of patches is padded with zeros, as in the whole strip.

    Args:
        model: a ViT without windows.
        image: the tile [B, in_chans, h, w]. Tiles of a strip have one width; heights may differ.
        memory: the value returned for the tile above; None for the topmost tile.
        length: most tiles, this one included, whose keys and values are in the new memory; 0: of none.
        height: pixels of the whole strip: positions are then those in the strip. None: positions are those in the grid of the
            cached rows and the tile. Both give the same for encodings that depend on offsets only, but not for those that
            depend on the grid (table, levit, factorized, decomposed, fire, rope_normalized, RoPE with a policy, log_n), nor for
            rotations if there are prefix tokens, which are not rotated.
        detach: no gradient flows into earlier tiles, as in the paper; False keeps their graph.

    Returns:
        The tokens [B, N, C] of the tile after the last norm, prefix tokens first, and the memory to pass with the next tile.

    Raises:
        ValueError: a block has windows, the tile does not continue the strip, length is negative, or height is missing for
            encodings that add to tokens (absolute, sincos, ...), since every tile would have the positions of the first.
    """
    if any(block.window is not None for block in model.blocks):
        raise ValueError("memory needs global attention in all blocks, but this model has blocks with a window")
    if length < 0:
        raise ValueError(f"length is the number of cached tiles, at least 0, not {length}")
    x = model.embed_patches(image if memory is None else _filled(model, image))  # [B, h, w, C]
    h, w = x.shape[1:3]
    above, below = ((), 0) if memory is None else (memory.heights, memory.below)
    keys = Grid(sum(above) + h, w, model.num_prefix_tokens)
    whole = None if height is None else Grid(model.token_grid((height, 1)).h, w, keys.prefix)
    _check_tile(model, image, x, memory, whole)

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
    memory = Memory(heights, w, below + h, tuple(layers))
    return model.norm(x), memory.detach() if detach else memory


def segment_attention(
    q: Tensor, k: Tensor, v: Tensor, terms: Terms, keys: Grid, dropout_p: float = 0.0, backend: str = "auto"
) -> Tensor:
    """Compute attention of a segment's M tokens, prefix tokens first, to N keys: its own and cached ones, [B, H, M, D].

    A segment is a tile of a strip.

    Args:
        q: queries of the segment [B, H, M, D].
        k: keys [B, H, N, D], as `with_past` returns them: prefix tokens, cached patches, the segment's patches.
        v: values [B, H, N, D], as `with_past` returns them.
        terms: what an encoding returns for `keys`.
        keys: grid of all keys, the cached rows above those of the segment.
        dropout_p: as in vitrel.ops.attention.
        backend: as in vitrel.ops.attention.
    """
    p, earlier = keys.prefix, k.shape[2] - q.shape[2]
    if not p or not earlier:
        return attention(q, k, v, terms, keys, None, dropout_p, backend)
    # Queries are the last tokens of the key grid, but prefix tokens are its first: rows between them are filled, then dropped.
    between = q.new_zeros(*q.shape[:2], earlier, q.shape[3])
    out = attention(torch.cat((q[:, :, :p], between, q[:, :, p:]), 2), k, v, terms, keys, None, dropout_p, backend)
    return torch.cat((out[:, :, :p], out[:, :, p + earlier :]), 2)


def with_past(current: Past, past: Past | None, prefix: int) -> Past:
    """Return (keys, values) in the order: `prefix` prefix tokens, cached patches, current patches; `current` for no `past`."""
    if past is None:
        return current
    k, v = (torch.cat((x[:, :, :prefix], old, x[:, :, prefix:]), 2) for x, old in zip(current, past, strict=True))
    return k, v


def _run_block(
    block: Block, x: Tensor, terms: Terms, keys: Grid, past: Past | None, remembered: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Run a block on a tile's tokens x [B, M, C]; return its output, and keys and values of the last `remembered` patches.

    `keys` is the grid of the cached rows and the tile, `terms` are those of this grid, and `past` are the cached (keys, values)
    or None.
    """
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


def _filled(model: ViT, image: Tensor) -> Tensor:
    """Return a tile with fewer rows of pixels than a patch padded with zeros at the bottom, any other tile as it is."""
    patch = model.patch_embed.patch_size[0]
    short = image.dim() == 4 and 0 < image.shape[2] < patch
    return F.pad(image, (0, 0, 0, patch - image.shape[2])) if short else image


def _check_tile(model: ViT, image: Tensor, x: Tensor, memory: Memory | None, whole: Grid | None) -> None:
    """Raise ValueError unless a tile `image` with the patches x [B, h, w, C] continues the strip of `memory`, or begins one.

    `whole` is the grid of the whole strip; None if its height is not given, an error if the model adds an encoding to tokens.
    """
    if whole is None and model.pos_embed is not None:
        raise ValueError(
            "this model adds positions to its tokens, and each tile would have those of the first: pass height, in pixels of "
            "the whole strip, or use an encoding that acts in attention"
        )
    below = 0 if memory is None else memory.below
    if whole is not None and below + x.shape[1] > whole.h:
        raise ValueError(
            f"the tile ends at row {below + x.shape[1]} of patches, but the strip has {whole.h}: pass the strip's height"
        )
    patch, last = model.patch_embed.patch_size[0], whole is not None and below + x.shape[1] == whole.h
    if image.shape[2] % patch and not last:
        raise ValueError(
            f"a tile of height {image.shape[2]} is not divisible into patches of {patch}, so padding would be inside "
            "the strip: cut tiles at whole patches, except for the last tile of a strip whose height is given"
        )
    if memory is None:
        return
    if len(memory.layers) != len(model.blocks):
        raise ValueError(f"memory has {len(memory.layers)} blocks, the model {len(model.blocks)}: it is from another model")
    keys, width, num_heads = memory.layers[0][0], memory.width, model.blocks[0].attn.num_heads
    batch, heads = keys.shape[:2]
    if (heads, keys.shape[3]) != (num_heads, x.shape[3] // num_heads):
        raise ValueError(
            f"memory has {heads} heads of width {keys.shape[3]}, the model {num_heads} of width "
            f"{x.shape[3] // num_heads}: it is from another model"
        )
    if (batch, width) != (x.shape[0], x.shape[2]):
        raise ValueError(
            f"a batch of {x.shape[0]} tiles {x.shape[2]} patches wide cannot continue a strip of {batch} tiles {width} patches "
            "wide: all tiles of a strip need the same width; begin another strip with memory=None"
        )
