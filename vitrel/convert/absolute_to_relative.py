"""absolute_to_relative: from a trained ViT with an absolute embedding to one with relative position that does nearly the same,
in closed form, from unlabelled images.

Block by block the converted model, whose earlier blocks are done already, meets the same images as the original. Its encoding
is set to the least squares fit of what the original's logits have beyond its own (vitrel.convert.fit). What the embedding
carried besides logits is restored where it needs no place: its mean over the patches goes into the patch embedding and the
rows of class and register tokens into these tokens, both exactly; and the last linear layers of both residual branches are
solved anew, so that each block's output is closest to the original's.
"""

import copy
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vitrel.convert.fit import ROTATIONS, TABLES, explained, fit_rotation, fit_tables, parts, refit_linear
from vitrel.convert.observe import Observed, before_blocks, observe
from vitrel.convert.recognise import as_vitrel
from vitrel.convert.relativize import relativize
from vitrel.grid import Grid
from vitrel.models.backbone import Backbone
from vitrel.models.vit import ViT
from vitrel.position.absolute import Absolute
from vitrel.position.terms import check_choice

_PREFIX_SHARE = 0.1  # of all weight in refitting that class and register tokens get: few, but one of them is what is classified


@dataclass(frozen=True)
class ConversionReport:
    """How closely a converted model follows the original, by block, on the images it was fitted to.

    logits: share of the variance of the original's position logits that the fitted encoding explains: of the mean over images
    of its logits less those of the converted model without the encoding, within rows. prefix, patches: mean squared distance
    of the block's output from the original's, relative to the variance of each of the original's tokens, over class and
    register tokens (nan where there are none) and over patches.
    """

    position: str
    images: int
    grid: tuple[int, int]
    logits: tuple[float, ...]
    prefix: tuple[float, ...]
    patches: tuple[float, ...]

    def __str__(self) -> str:
        head = f"{self.position} fitted to {self.images} images of {self.grid[0]}x{self.grid[1]} patches"
        lines = [f"{head}\nblock  logits explained  error of prefix tokens  of patches"]
        rows = zip(self.logits, self.prefix, self.patches, strict=True)
        lines += [f"{i:5d} {a:17.3f} {b:23.3f} {c:11.3f}" for i, (a, b, c) in enumerate(rows)]
        return "\n".join(lines)


@torch.no_grad()
def absolute_to_relative(
    model: nn.Module,
    images: Tensor,
    position: str = "table",
    position_args: dict | None = None,
    *,
    absolute: str = "drop",
    fade_steps: int | None = None,
    refit: bool = True,
    ridge: float = 1.0,
) -> ViT:
    """A vitrel ViT with relative position, fitted to `images`; its attribute `conversion` is the ConversionReport.

    model: what `relativize` takes, with a trained absolute embedding; it is left as it was.
    images: [B, C, height, width], prepared as in training, without labels; those the model is meant for, of as many kinds: some
    100 serve. Learned tables count as trained on their grid.
    position: table, factorised, rope_mixed or several encodings joined by '+' with at least one of these, of which the others
    stay as they are built; position_args: their options.
    absolute: "drop" the embedding: nothing in the result refers to an absolute place. "fade" it out over the first `fade_steps`
    steps of fine-tuning: the tables are those of the model without it and act beside it at first; nothing is refitted.
    refit: solve the last linear layers of attention and MLP anew; needs pre-norm blocks. ridge: how much that is held back, in
    units of the mean power of a layer's input channels: less of it follows the original more closely on such images, and less
    so on others. A rotation starts from random directions: set a seed to get the same again.
    Raises ValueError for a model without an absolute embedding, an encoding that cannot be fitted, images of another shape or
    not finite, and all that relativize refuses.
    """
    if absolute == "keep":
        raise ValueError(
            "with absolute='keep' nothing is left to fit: relativize(model, position) does that, with tables of zeros"
        )
    check_choice("absolute_to_relative", "absolute", absolute, ("drop", "fade"))
    original = copy.deepcopy(model) if isinstance(model, Backbone) else as_vitrel(model)
    _check(original, images, position)
    original.eval()
    grid, found = original.token_grid(tuple(images.shape[2:])), []
    how = dict(position_args=position_args, img_size=tuple(images.shape[2:]))
    result = relativize(original, position, absolute=absolute, fade_steps=fade_steps, **how)
    dropped = result
    if absolute == "fade":  # the tables are to serve once it has gone
        dropped = relativize(original, position, absolute="drop", **how)
        refit = False
    added = original.pos_embed(grid).tokens  # type: ignore[misc]  # [N, C]; `_check` refuses a model without
    _fold(dropped, added, grid)
    with before_blocks(original.blocks, lambda i, block, args, kwargs: found.append((args, kwargs))):
        original(images)
    steps: list[_Step] = []

    def convert(i: int, block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        aim, found[i] = observe(original.blocks[i], *found[i]), ((), {})
        steps.append(_convert_block(block, args, kwargs, aim, grid, ridge if refit else None))
        return args, kwargs

    with before_blocks(dropped.eval().blocks, convert):
        dropped(images)
    if absolute == "fade":
        _fold(result, added, grid)
        _unfold(result, added, grid)
        for block, fitted in zip(result.blocks, dropped.blocks, strict=True):
            block.position.load_state_dict(fitted.position.state_dict())
    report = ConversionReport(position, len(images), (grid.h, grid.w), *zip(*steps, strict=True))
    result.conversion = report  # type: ignore[assignment]
    return result.train(model.training)


class _Step(NamedTuple):
    logits: float
    prefix: float
    patches: float


def _convert_block(block: nn.Module, args: tuple, kwargs: dict, aim: Observed, grid: Grid, ridge: float | None) -> _Step:
    """Fit a block to what the original's computed; returns how close it is now."""
    encoding = block.position
    rotations = parts(encoding, ROTATIONS)
    initial = [part.freqs.clone() for part in rotations]
    for part in rotations:
        part.freqs.zero_()
    bare = seen = observe(block, args, kwargs)
    gap = aim.logits() - bare.logits()
    for part, freqs in zip(rotations, initial, strict=True):
        part.freqs.copy_(freqs)
        fit_rotation(part, bare.q, bare.k, gap, bare.scale, grid)
        seen = observe(block, args, kwargs)
    for part in parts(encoding, TABLES):
        fit_tables(part, aim.logits() - seen.logits(), grid)
        seen = observe(block, args, kwargs)
    logits = explained(gap, seen.logits() - bare.logits())
    if ridge is not None:
        seen = _refit_block(block, args, kwargs, aim, seen, grid, ridge)
    error = (seen.out - aim.out).square().mean(-1) / aim.out.var(-1)  # [B, N]
    return _Step(logits, error[:, : grid.prefix].mean().item(), error[:, grid.prefix :].mean().item())


def _refit_block(
    block: nn.Module, args: tuple, kwargs: dict, aim: Observed, seen: Observed, grid: Grid, ridge: float
) -> Observed:
    if seen.between is None or aim.between is None:
        raise ValueError("the last linear layers can be refitted in pre-norm blocks only: pass refit=False")
    share = torch.full_like(aim.out[0, :, 0], 1 / (grid.h * grid.w))  # [N]
    share[: grid.prefix] = _PREFIX_SHARE / max(grid.prefix, 1)
    # A few tokens are ten or a hundred times as long as the others; the next norm makes them equal, so they count the same.
    weight = share / aim.between.var(-1)
    refit_linear(block.attn.proj, seen.attended, (aim.between - args[0]) / _gain(block, 1), weight, ridge)
    seen = observe(block, args, kwargs)
    refit_linear(block.mlp.fc2, seen.hidden, (aim.out - seen.between) / _gain(block, 2), share / aim.out.var(-1), ridge)
    return observe(block, args, kwargs)


def _gain(block: nn.Module, branch: int) -> Tensor | float:
    """The layer scale of a residual branch, where it has one; 1 for a channel that is shut, whose weights do not matter."""
    gain = getattr(getattr(block, f"ls{branch}"), "gamma", None)
    return 1.0 if gain is None else torch.where(gain == 0, 1.0, gain)


def _fold(model: ViT, added: Tensor, grid: Grid) -> None:
    """Add to the prefix tokens and to the bias of the patch embedding what needs no place."""
    tokens = model.prefix_tokens
    for token, rows in zip(tokens, added[: grid.prefix].split([token.shape[1] for token in tokens]), strict=True):
        token.add_(rows)
    layer = model.patch_embed.proj
    if layer.bias is None:
        layer.bias = nn.Parameter(added.new_zeros(added.shape[1]))
    layer.bias += added[grid.prefix :].mean(0)


def _unfold(model: ViT, added: Tensor, grid: Grid) -> None:
    """Take from a learned embedding what `_fold` has put elsewhere."""
    rows = model.pos_embed.pos_embed  # [1, P + h*w, C]
    rows[:, : grid.prefix] = 0
    rows[:, grid.prefix :] -= added[grid.prefix :].mean(0)


def _check(model: nn.Module, images: Tensor, position: str) -> None:
    if not isinstance(model, ViT):
        raise ValueError(f"{type(model).__name__} attends in windows: its position is relative already")
    if model.pos_embed is None:
        raise ValueError("the model has no absolute embedding to convert from: use relativize for a fresh encoding")
    if not isinstance(model.pos_embed, Absolute):
        raise ValueError(f"the embedding is {type(model.pos_embed).__name__}, not one learned embedding: use relativize")
    if set(position.split("+")).isdisjoint(TABLES + ROTATIONS):
        raise ValueError(
            f"position {position!r} has nothing to fit; name one of {', '.join(TABLES + ROTATIONS)}, alone or joined to others "
            "by '+'"
        )
    channels, patch = model.patch_embed.proj.in_channels, model.patch_embed.patch_size
    shape = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
    if not isinstance(images, Tensor) or images.dim() != 4 or images.shape[1] != channels or not len(images):
        raise ValueError(f"images must be one tensor [B, {channels}, height, width] of at least one image, got {shape}")
    if images.shape[2] < patch[0] or images.shape[3] < patch[1]:
        raise ValueError(f"images of {shape[2]}x{shape[3]} pixels are smaller than one patch of {patch[0]}x{patch[1]}")
    if not images.is_floating_point() or not images.isfinite().all():
        raise ValueError(f"images must be finite floating-point numbers, normalised as in training, got {images.dtype}")
