"""Forward pass for images of several sizes in one padded batch; images of the same grid run together, without their padding."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from vitrel.grid import Grid
from vitrel.models.backbone import Backbone


def forward_mixed(model: Backbone, image: Tensor, sizes: Sequence[tuple[int, int]]) -> Tensor:
    """Return logits [B, num_classes] of images of several sizes in one padded batch.

    Each image has the logits of a forward pass without padding. Arguments and errors are those of `features_mixed`.

    Raises:
        ValueError: the model has no pooling.
    """
    if not model.global_pool:
        raise ValueError("without pooling (global_pool='') the outputs have several sizes: use features_mixed")
    logits, order = [], []
    for images, features in _by_size(model, image, sizes):
        logits.append(model.forward_head(features))
        order += images
    return torch.cat(logits)[torch.tensor(order, device=image.device).argsort()]


def features_mixed(model: Backbone, image: Tensor, sizes: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return model.forward_features of each image of a padded batch, computed without its padding: ViT [N, C], Swin [h, w, C].

    Each grid of tokens takes one forward pass.

    Args:
        model: a ViT or Swin.
        image: [B, in_chans, height, width], with each image in the upper left.
        sizes: (h, w) of each image in pixels.

    Raises:
        ValueError: there is not one size per image, at least a patch and at most the batch; or the model is in training mode
            with absolute_fade, which counts forward passes.
    """
    by_image: dict[int, Tensor] = {}
    for images, features in _by_size(model, image, sizes):
        by_image |= dict(zip(images, features, strict=True))
    return [by_image[i] for i in range(len(by_image))]


def _by_size(model: Backbone, image: Tensor, sizes: Sequence[tuple[int, int]]) -> Iterator[tuple[list[int], Tensor]]:
    """Yield the indices of its images and their features [n, ...] for each grid of tokens."""
    patch = model.patch_embed.patch_size
    sizes = _valid_sizes(image, sizes, patch)
    if model.training and getattr(model, "absolute_fade", None) is not None:
        raise ValueError("absolute_fade counts forward passes, of which this takes one per grid: train with one size per batch")
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
    """Return images [B, C, h, w] with zeros outside each image's size, as partial patches are padded; not in place."""
    limit = torch.tensor(sizes, device=image.device)
    rows = torch.arange(image.shape[2], device=image.device) < limit[:, :1]  # [B, h]
    columns = torch.arange(image.shape[3], device=image.device) < limit[:, 1:]
    return torch.where((rows[:, :, None] & columns[:, None])[:, None], image, 0.0)
