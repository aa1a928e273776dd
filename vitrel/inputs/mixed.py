"""Images of several sizes in one padded batch, each as in a forward pass of its own: those of one size run together."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from vitrel.grid import Grid
from vitrel.models.backbone import Backbone


def forward_mixed(model: Backbone, image: Tensor, sizes: Sequence[tuple[int, int]]) -> Tensor:
    """Logits [B, num_classes] of images of several sizes in one padded batch; arguments and errors as `features_mixed`."""
    if not model.global_pool:
        raise ValueError("without pooling (global_pool='') the outputs have several sizes: use features_mixed")
    found, order = [], []
    for images, features in _by_size(model, image, sizes):
        found.append(model.forward_head(features))
        order += images
    return torch.cat(found)[torch.tensor(order, device=image.device).argsort()]


def features_mixed(model: Backbone, image: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """model.forward_features of every image of a padded batch as if it came alone: ViT [N, C] each, Swin [h, w, C].

    image: [B, in_chans, height, width]; sizes: (h, w) in pixels of each image, whose pixels are those in the upper left. There
    is one forward pass for each grid of tokens. ValueError unless there is a size for every image, of a patch or more, within
    the batch, and for a model in training whose absolute embedding fades with every forward pass.
    """
    found: dict[int, Tensor] = {}
    for images, features in _by_size(model, image, sizes):
        found |= dict(zip(images, features, strict=True))
    return [found[i] for i in range(len(found))]


def _by_size(model: Backbone, image: Tensor, sizes: Sequence[tuple[int, int]]) -> Iterator[tuple[list[int], Tensor]]:
    """The indices of the images of each grid, and their features [n, ...]."""
    patch = model.patch_embed.patch_size
    sizes = _valid_sizes(image, sizes, patch)
    if model.training and getattr(model, "absolute_fade", None) is not None:
        raise ValueError("an embedding that fades counts forward passes, and this is one per grid: train with one size a batch")
    image = _without_padding(image, sizes)
    groups: dict[Grid, list[int]] = {}
    for i, size in enumerate(sizes):
        groups.setdefault(model.token_grid(size), []).append(i)
    for grid, images in groups.items():
        part = image[images, :, : grid.h * patch[0], : grid.w * patch[1]]
        yield images, model.forward_features(part)


def _valid_sizes(image: Tensor, sizes: Sequence[tuple[int, int]], patch: tuple[int, int]) -> list[tuple[int, int]]:
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


def _without_padding(image: Tensor, sizes: list[tuple[int, int]]) -> Tensor:
    """[B, C, h, w] with zeros below and right of each image's size: what a partial patch is filled with."""
    limit = torch.tensor(sizes, device=image.device)
    rows = torch.arange(image.shape[2], device=image.device) < limit[:, :1]  # [B, h]
    columns = torch.arange(image.shape[3], device=image.device) < limit[:, 1:]
    return torch.where((rows[:, :, None] & columns[:, None])[:, None], image, 0.0)
