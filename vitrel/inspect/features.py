"""`measure_features`: how much position there is in the patch features of any model, and how features change with position.

Four questions, for a layer and an image size:

leak: can row and column of a token be read from its features? A linear probe (ridge regression in closed form) is fitted to the
tokens of half of the images; the leak is R², the share of the variance of row and of column that it explains on the other half.
On natural images content tells position too (the sky is above); on images of one color only the model does. The linear probe is
that of "What DINO saw" (arXiv 2603.16840), which asks for position in pretrained ViTs; images of one color, and R² on images
that the linear probe has not seen, are ours. Its penalty is chosen for each axis: of those tried, it gives the smallest error
on one half of the images for fitting, after a fit to the other half.

share: how much of the features is position? The variance over tokens that row, column and distance to the border explain,
divided by the variance over tokens on natural images. R² asks whether position can be read, and calls even rounding noise a
leak; the share asks how large it is. It is also measured on textures: patches of the images, shuffled over places and images,
so that content tells nothing of position.

equivariance: the cosine of a token's features with those of the token that shows the same pixels after the image was shifted by
whole patches, mean over the tokens that both views contain. 1: features depend on content, not on place. New content enters at
the border, so attention sees other tokens, and a model without position does not reach 1 either.

agreement: the cosine of features at one size, resampled to the grid of another, with those of the same images there.

Features are centered by their mean over images and tokens before a cosine, since deep features share one large vector, by which
any two tokens have a cosine near 1.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrel.common.modules import evaluating
from vitrel.common.sizes import Size, format_size
from vitrel.inspect.any_model import at_size, checked_size, model_name, patch_grid, trained_size

SHIFTS = ((1, 0), (0, 1), (2, 3))  # tokens (down, right)
RIDGES = (1e-3, 1e-2, 1e-1, 1.0)  # penalties, in shares of the tokens' number, for features of unit variance
COLORS = 64  # images of one color, at most


class Leak(NamedTuple):
    """R² of a linear probe for row and column on held-out images: 1 if position can be read, 0 or less if not."""

    row: float
    column: float


class Share(NamedTuple):
    """Variance over tokens that position explains on three kinds of images, each divided by all variance on natural ones.

    They are natural images, images of one color, and textures: shuffled patches of the natural images.
    """

    natural: float
    colors: float  # on images of one color
    textures: float  # on shuffled patches


class FeatureRow(NamedTuple):
    """A result of `measure_features`: position in the features of a layer at an image size; NaN where it was not measured.

    `equivariance` is the mean cosine of a token's features with those of the same pixels in the shifted image, `agreement`
    {other size: mean cosine with the features there}.
    """

    model: str
    layer: int  # as given: negative from the end
    size: Size  # (h, w) in pixels
    grid: Size  # (h, w) in tokens
    leak: Leak  # on natural images
    leak_of_colors: Leak  # on images of one color
    share: Share
    equivariance: float
    agreement: dict[Size, float]  # {other size: cosine}

    def to_dict(self) -> dict[str, Any]:
        """Return the row as {column: value} of a table, with sizes as text."""
        columns = {"model": self.model, "layer": self.layer, "size": format_size(self.size), "grid": format_size(self.grid)}
        columns |= {f"leak_{name}": value for name, value in self.leak._asdict().items()}
        columns |= {f"leak_{name}_of_colors": value for name, value in self.leak_of_colors._asdict().items()}
        columns |= dict(zip(("share", "share_of_colors", "share_of_textures"), self.share, strict=True))
        columns["equivariance"] = self.equivariance
        return columns | {f"agreement_{format_size(size)}": value for size, value in self.agreement.items()}


def measure_features(
    model: nn.Module,
    images: Tensor,
    size: int | Size | None = None,
    layers: Sequence[int] = (-1,),
    sizes: Sequence[int | Size] = (),
    batch_size: int = 32,
) -> list[FeatureRow]:
    """Measure leak, share, equivariance and agreement of position in a model's features, one `FeatureRow` for each of `layers`.

    >>> measure_features(timm.create_model("vitrel_vit_n8_table"), torch.randn(8, 3, 96, 96), sizes=[48])[0].equivariance

    Args:
        model: of timm or vitrel, with `forward_intermediates`. Of a model that has only `forward_features`, which returns maps
            [B, C, h, w] or tokens [B, N, C], the last layer can be measured. It is brought to a size by `at_size` and not
            changed.
        images: [B, C, height, width] of any size, normalized for the model, at least 4; resized (antialiased) to each size.
        size: of the images in pixels, int or (h, w); None: the size that the model was trained at.
        layers: indices of `forward_intermediates`, negative ones from the end.
        sizes: other sizes in pixels, for the agreement.
        batch_size: of a forward pass.

    Raises:
        ValueError: too few images, a size or layer that the model does not have, tokens of no whole number of pixels, or
            features that are no map of tokens.
    """
    size = trained_size(model) if size is None else checked_size(size)
    if images.dim() != 4 or len(images) < 4:
        raise ValueError(f"images are [B, C, height, width] with at least 4 images, not {list(images.shape)}")
    changed, others = at_size(model, size).model, [checked_size(other) for other in sizes]

    def features(x: Tensor, of: nn.Module = changed, chosen: Sequence[int] = layers) -> list[Tensor]:
        parts = [patch_features(of, part, chosen) for part in x.split(batch_size)]
        return [torch.cat(maps) for maps in zip(*parts, strict=True)]

    natural = features(resized(images, size))
    colors = features(images[:COLORS].mean((2, 3), keepdim=True).expand(-1, -1, *size))
    textures = features(shuffled(images, size, min(_grid(x) for x in natural)))
    rows = []
    for layer, *on in zip(layers, natural, colors, textures, strict=True):
        variance = _centered(on[0]).square().sum(1).mean()
        share = Share(*(float(position_variance(x) / variance.double()) for x in on))  # NaN of features that are all equal
        leaks = position_leak(on[0]), position_leak(on[1])
        rows.append(FeatureRow(model_name(model), layer, size, _grid(on[0]), *leaks, share, torch.nan, {}))
    for grid in dict.fromkeys(row.grid for row in rows):
        alike = [number for number, row in enumerate(rows) if row.grid == grid]
        moved = _equivariances(features, images, size, grid, [layers[number] for number in alike])
        for number, value in zip(alike, moved, strict=True):
            rows[number] = rows[number]._replace(equivariance=value)
    for other in others:
        there = features(resized(images, other), at_size(model, other).model)
        for row, here, maps in zip(rows, natural, there, strict=True):
            row.agreement[other] = agreement(here, maps)
    return rows


def patch_features(model: nn.Module, images: Tensor, layers: Sequence[int] = (-1,)) -> list[Tensor]:
    """Return the features [B, C, h, w] of the patches at each of `layers`, after the final norm and without prefix tokens.

    Arguments and errors are as for `measure_features`; the model must take the size of `images`.
    """
    with evaluating(model), torch.no_grad():
        if hasattr(model, "forward_intermediates"):
            options = {"norm": True, "output_fmt": "NCHW", "intermediates_only": True}
            last = set(layers) == {-1}
            maps = model.forward_intermediates(images, indices=[-1] if last else None, **options)
            if not last and (wrong := [layer for layer in layers if not -len(maps) <= layer < len(maps)]):
                raise ValueError(f"there is no layer {wrong[0]}: {model_name(model)} has layers 0 to {len(maps) - 1}")
            return [maps[layer].float() for layer in layers]
        if set(layers) != {-1} or not hasattr(model, "forward_features"):
            raise ValueError(f"{model_name(model)} has no forward_intermediates: only layer -1 of forward_features is possible")
        x, grid = model.forward_features(images), patch_grid(model, _grid(images))
    if x.dim() == 3 and grid is not None and x.shape[1] >= grid[0] * grid[1]:
        x = x[:, x.shape[1] - grid[0] * grid[1] :].mT.unflatten(2, grid)
    if x.dim() != 4:
        raise ValueError(f"the features of {model_name(model)} are {list(x.shape)}, no map of tokens [B, C, h, w]")
    return [x.float()] * len(layers)


def position_leak(features: Tensor) -> Leak:
    """Return R² of linear probes for row and column, fitted to images 0, 2, ... of features [B, C, h, w], tested on the others.

    It is NaN along an axis with a single token. The ridge penalty is chosen within images 0, 2, ...
    """
    *_, h, w = features.shape
    tokens = features.permute(0, 2, 3, 1).double()  # [B, h, w, C]
    y, x = torch.meshgrid(*((2 * torch.arange(n, dtype=torch.float64) + 1) / n - 1 for n in (h, w)), indexing="ij")
    places = torch.stack((y, x), -1).flatten(0, 1).to(tokens.device)  # [h*w, 2], centered
    fit, held = tokens[::2], tokens[1::2]
    chosen = torch.stack([_probe_error(fit[::2], fit[1::2], places, ridge) for ridge in RIDGES]).argmin(0)  # [2], by axis
    error = torch.stack([_probe_error(fit, held, places, ridge) for ridge in RIDGES]).gather(0, chosen[None])[0]
    variance = places.square().mean(0)
    return Leak(*(float(1 - e / v) if v > 0 else float("nan") for e, v in zip(error, variance, strict=True)))


def _probe_error(fit: Tensor, held: Tensor, places: Tensor, ridge: float) -> Tensor:
    """Return the mean squared errors [2] of row and column on tokens `held` [B, h, w, C], of a probe fitted to tokens `fit`.

    `places` [h*w, 2] are row and column of the tokens of an image, from -1 to 1; `ridge` is the penalty as a share of the
    number of tokens, for features scaled to unit variance.
    """
    fit, held = fit.flatten(0, 2), held.flatten(0, 2)
    mean, spread = fit.mean(0), fit.std(0, correction=0)
    known = spread > 1e-6 * spread.max().clamp(min=1e-12)  # a channel without variance says nothing
    fit, held = ((part[:, known] - mean[known]) / spread[known] for part in (fit, held))
    targets, truth = (places.repeat(len(part) // len(places), 1) for part in (fit, held))
    gram = fit.mT @ fit + ridge * len(fit) * torch.eye(fit.shape[1], dtype=fit.dtype, device=fit.device)
    return (held @ torch.linalg.solve(gram, fit.mT @ targets) - truth).square().mean(0)


def position_variance(features: Tensor) -> float:
    """Return how much variance over tokens row, column and distance to the border explain in features [B, C, h, w].

    It is summed over channels. The mean of images 0, 2, ... and that of the others are regressed on indicators of each row,
    column and distance to the border in tokens. The product of both is without the noise of a mean over few images, and 0 on
    average where position explains nothing.
    """
    h, w = _grid(features)
    y, x = torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij")
    border = torch.stack((y, h - 1 - y, x, w - 1 - x)).amin(0)
    known = torch.cat([F.one_hot(place.flatten()) for place in (y, x, border)], 1).double()
    basis, strength, _ = torch.linalg.svd(known - known.mean(0), full_matrices=False)
    basis = basis[:, strength > 1e-9 * strength.max()].to(features.device)  # [h*w, rank], orthonormal, each of mean 0
    even, odd = (basis.mT @ part.double().mean(0).flatten(1).mT for part in (features[::2], features[1::2]))
    return float((even * odd).sum() / (h * w))


def shuffled(images: Tensor, size: Size, grid: Size) -> Tensor:
    """Return images resized to `size` whose patches, `grid` (down, across), are shuffled over all images (fixed seed)."""
    h, w = (-(-n // m) for n, m in zip(size, grid, strict=True))  # rounded up
    whole = resized(images, (h * grid[0], w * grid[1]))
    patches = whole.unflatten(3, (grid[1], w)).unflatten(2, (grid[0], h)).permute(0, 2, 4, 1, 3, 5)  # [B, h, w, C, side, side]
    order = torch.randperm(len(images) * grid[0] * grid[1], generator=torch.Generator().manual_seed(0))
    mixed = patches.flatten(0, 2)[order.to(images.device)].view(patches.shape)
    return mixed.permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)[:, :, : size[0], : size[1]]


def agreement(a: Tensor, b: Tensor) -> float:
    """Return the mean cosine of features a [B, C, h, w], resampled to the grid of b, with b [B, C, h', w'], both centered."""
    a = resized(a, _grid(b))
    return float(F.cosine_similarity(_centered(a), _centered(b), dim=1).mean())


def resized(images: Tensor, size: Size) -> Tensor:
    """Return images or features [B, C, h, w] resized to `size`, bilinear and antialiased; themselves if they have that size."""
    if _grid(images) == size:
        return images
    return F.interpolate(images, size, mode="bilinear", antialias=True)


def _equivariances(
    features: Callable[..., list[Tensor]],
    images: Tensor,
    size: Size,
    grid: Size,
    layers: Sequence[int],
) -> list[float]:
    """Return for each of `layers`, all of this grid, the mean cosine of tokens with those of the same pixels in shifted images.

    `images` are resized to more than `size` pixels; crops of `size`, moved by each of SHIFTS, go to `features(crops,
    chosen=layers)`. On a grid that is too small for these shifts it is NaN. ValueError if a token is no whole number of pixels.
    """
    furthest = tuple(map(max, zip(*SHIFTS, strict=True)))
    if any(step >= n for step, n in zip(furthest, grid, strict=True)):
        return [torch.nan] * len(layers)
    if any(n % m for n, m in zip(size, grid, strict=True)):
        where = f"a token of the {format_size(grid)} grid is no whole number of pixels at {format_size(size)}"
        raise ValueError(f"{where}: choose another size")
    (h, w), (y, x) = size, (n // m for n, m in zip(size, grid, strict=True))
    whole = resized(images, (h + y * furthest[0], w + x * furthest[1]))
    still, found = features(whole[:, :, :h, :w], chosen=layers), [0.0] * len(layers)
    for down, right in SHIFTS:
        moved = features(whole[:, :, down * y : down * y + h, right * x : right * x + w], chosen=layers)
        for number, (a, b) in enumerate(zip(still, moved, strict=True)):
            mean = a.mean((0, 2, 3), keepdim=True)
            cosine = F.cosine_similarity(
                a[:, :, down:, right:] - mean, b[:, :, : grid[0] - down, : grid[1] - right] - mean, dim=1
            )
            found[number] += float(cosine.mean()) / len(SHIFTS)
    return found


def _grid(maps: Tensor) -> Size:
    return maps.shape[2], maps.shape[3]


def _centered(features: Tensor) -> Tensor:
    return features - features.mean((0, 2, 3), keepdim=True)
