"""Images of several sizes in one padded batch, each as in a forward pass of its own: `Backbone.features_mixed`.

Padding is never attended to, merged or pooled, windows begin at each image's own corner and shift by its own rule, and every
encoding sees each image's own grid, so that the result does not depend on what else is in the batch.
"""

from typing import TYPE_CHECKING

import torch
from timm.models._manipulate import checkpoint
from torch import Tensor, nn

from vitrel.grid import Grid
from vitrel.ops.mixed import Mixed

if TYPE_CHECKING:
    from vitrel.models.backbone import Backbone
    from vitrel.models.swin import Swin
    from vitrel.models.vit import ViT


def mixed_logits(model: "Backbone", image: Tensor, sizes: list[tuple[int, int]]) -> Tensor:
    """Logits [B, num_classes] of images of several sizes in one padded batch; arguments as `features_mixed`."""
    if not model.global_pool:
        raise ValueError("without pooling (global_pool='') the outputs have several sizes: use features_mixed")
    return torch.cat([model.forward_head(x[None]) for x in model.features_mixed(image, sizes)])


def valid_sizes(image: Tensor, sizes: list[tuple[int, int]], patch: tuple[int, int]) -> list[tuple[int, int]]:
    """Sizes (h, w) in pixels as ints; ValueError unless there is one for every image, of a patch or more, within the batch."""
    sizes = [(int(h), int(w)) for h, w in sizes]
    if len(sizes) != image.shape[0] or not sizes:
        raise ValueError(f"{len(sizes)} sizes for {image.shape[0]} images: pass one (height, width) in pixels for each")
    for b, (h, w) in enumerate(sizes):
        if not (patch[0] <= h <= image.shape[2] and patch[1] <= w <= image.shape[3]):
            raise ValueError(
                f"size {h}x{w} of image {b} must be at least one patch of {patch[0]}x{patch[1]} and at most the "
                f"{image.shape[2]}x{image.shape[3]} pixels of the batch"
            )
    return sizes


def without_padding(image: Tensor, sizes: list[tuple[int, int]]) -> Tensor:
    """[B, C, h, w] with zeros below and right of each image's size: what a partial patch is filled with."""
    limit = torch.tensor(sizes, device=image.device)
    rows = torch.arange(image.shape[2], device=image.device) < limit[:, :1]  # [B, h]
    columns = torch.arange(image.shape[3], device=image.device) < limit[:, 1:]
    return torch.where((rows[:, :, None] & columns[:, None])[:, None], image, 0.0)


def vit_mixed(model: "ViT", x: Tensor, grids: list[Grid]) -> list[Tensor]:
    """Patches [B, h, w, C] -> features after the last norm of every image, [N, C] each."""
    if model.training and getattr(model, "absolute_fade", None) is not None:
        raise ValueError("an embedding that fades counts forward passes, and this is one per grid: train with one size a batch")
    mixed = Mixed.of(grids, x.device)
    x = mixed.map(x, lambda part, g: model.add_tokens(part, mixed.grids[g]), (max(grid.tokens for grid in grids),))
    shared = None if model.shared_position is None else tuple(model.shared_position(grid) for grid in mixed.grids)
    for block in model.blocks:
        terms = tuple(block.position(block.window or grid) for grid in mixed.grids) if shared is None else shared
        x = checkpoint(block, x, terms, mixed) if model.grad_checkpointing else block(x, terms, mixed)
    return [y[: grid.tokens] for y, grid in zip(model.norm(x), grids, strict=True)]


def swin_mixed(model: "Swin", x: Tensor, grids: list[Grid]) -> list[Tensor]:
    """Patches [B, h, w, C] -> features after the last stage and norm of every image, [h, w, C] each."""
    mixed = Mixed.of(grids, x.device)
    x = mixed.map(x, lambda part, g: model.add_tokens(part, mixed.grids[g]))
    for stage in model.layers:
        if not isinstance(stage.downsample, nn.Identity):
            x = stage.downsample(mixed.map(x, lambda part, g: part))  # zeros around each image, as around a grid that is odd
            grids = [Grid((grid.h + 1) // 2, (grid.w + 1) // 2) for grid in grids]
            mixed = Mixed.of(grids, x.device)
        for block in stage.blocks:
            terms = (block.position(block.window),) * len(mixed.grids)
            x = checkpoint(block, x, terms, mixed) if stage.grad_checkpointing else block(x, terms, mixed)
    return [y[: grid.h, : grid.w] for y, grid in zip(model.norm(x), grids, strict=True)]
