"""absolute_to_relative: convert a trained ViT with an absolute embedding to relative position, from unlabelled images.

The original and the converted model run on the same images, and the blocks are fitted one after the other, each on the output
of the blocks converted before. The encoding of a block is the least-squares fit to the original's attention logits minus those
of the converted block without its encoding (vitrel.convert.fit). The embedding contributes to more than the logits: its mean
over the patches is added to the bias of the patch embedding and its rows of class and register tokens to these tokens, both
exactly; and the last linear layers of both residual branches are refitted by ridge regression to the original block's output.
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

# Share of the weight of class and register tokens in refitting: they are few, but the class token feeds the head.
_PREFIX_SHARE = 0.1


@dataclass(frozen=True)
class ConversionReport:
    """How closely a converted model follows the original, by block, on the images it was fitted to.

    position: the encoding's key. images: number of images. grid: theirs in patches, (h, w). One value per block:
    logits: share of variance within rows (R^2) that the fitted encoding explains of the gap in logits, which is the mean over
    images of the original's logits minus those of the converted block without the encoding: 1 is all.
    prefix, patches: mean squared distance of the block's output from the original's, divided by the variance of each of the
    original's tokens, over class and register tokens (nan where there are none) and over patches.
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
    """Return a vitrel ViT with relative position, fitted to `images`; its attribute `conversion` is the ConversionReport.

    model: a model that `relativize` takes, with a trained absolute embedding; it is not changed.
    images: [B, C, height, width], prepared as in training, without labels: about 100, as varied as the images the model will
    see. Their grid becomes the training grid of the new encoding.
    position: table, factorised, rope_mixed, or several encodings joined by '+' with at least one of these; only these three are
    fitted. position_args: their options.
    absolute: "drop" removes the embedding. "fade" scales it to 0 over the first `fade_steps` steps of fine-tuning: the tables
    are fitted as for "drop" and are added to the full embedding at first; no linear layer is refitted.
    refit: refit the last linear layers of attention and MLP; needs pre-norm blocks. ridge: strength of the ridge penalty, in
    units of the mean power of a layer's input channels; a lower one follows the original more closely on these images, and less
    closely on others. The initial directions of a rotation are random: set a seed to reproduce the result.
    Raises ValueError for a model without an absolute embedding, an encoding that cannot be fitted, images of another shape or
    not finite, and wherever `relativize` does.
    """
    if absolute == "keep":
        raise ValueError("absolute='keep' leaves nothing to fit: use relativize(model, position), whose tables start at zero")
    check_choice("absolute_to_relative", "absolute", absolute, ("drop", "fade"))
    original = copy.deepcopy(model) if isinstance(model, Backbone) else as_vitrel(model)
    _check(original, images, position)
    original.eval()
    grid = original.token_grid(tuple(images.shape[2:]))
    inputs: list[tuple[tuple, dict]] = []  # of the original's blocks
    options = dict(position_args=position_args, img_size=tuple(images.shape[2:]))
    result = relativize(original, position, absolute=absolute, fade_steps=fade_steps, **options)
    dropped = result
    if absolute == "fade":  # the tables are for the model once the embedding is gone
        dropped = relativize(original, position, absolute="drop", **options)
        refit = False
    added = original.pos_embed(grid).tokens  # type: ignore[misc]  # [N, C]; `_check` refuses a model without
    _fold(dropped, added, grid)
    with before_blocks(original.blocks, lambda i, block, args, kwargs: inputs.append((args, kwargs))):
        original(images)
    steps: list[_Step] = []

    def convert(i: int, block: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        target, inputs[i] = observe(original.blocks[i], *inputs[i]), ((), {})  # the input is freed
        steps.append(_convert_block(block, args, kwargs, target, grid, ridge if refit else None))
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
    """One block's values in the ConversionReport."""

    logits: float
    prefix: float
    patches: float


def _convert_block(block: nn.Module, args: tuple, kwargs: dict, target: Observed, grid: Grid, ridge: float | None) -> _Step:
    """Fit a block in place to what the original's block computed (`target`) and return its values for the report.

    Its encoding is fitted, whose tables must be 0 before, then its last linear layers unless ridge is None. args, kwargs: the
    block's inputs.
    """
    encoding = block.position
    rotations = parts(encoding, ROTATIONS)
    initial = [part.freqs.clone() for part in rotations]
    for part in rotations:
        part.freqs.zero_()
    bare = seen = observe(block, args, kwargs)
    gap = target.logits() - bare.logits()
    for part, freqs in zip(rotations, initial, strict=True):
        part.freqs.copy_(freqs)
        fit_rotation(part, bare.q, bare.k, gap, bare.scale, grid)
        seen = observe(block, args, kwargs)
    for part in parts(encoding, TABLES):
        fit_tables(part, target.logits() - seen.logits(), grid)
        seen = observe(block, args, kwargs)
    logits = explained(gap, seen.logits() - bare.logits())
    if ridge is not None:
        seen = _refit_block(block, args, kwargs, target, seen, grid, ridge)
    error = (seen.out - target.out).square().mean(-1) / target.out.var(-1)  # [B, N]
    return _Step(logits, error[:, : grid.prefix].mean().item(), error[:, grid.prefix :].mean().item())


def _refit_block(
    block: nn.Module, args: tuple, kwargs: dict, target: Observed, seen: Observed, grid: Grid, ridge: float
) -> Observed:
    """Refit the last linear layers of attention and MLP in place to `target`, and return what the block computes then.

    seen: what the block computes before. ValueError for post-norm blocks.
    """
    if seen.between is None or target.between is None:
        raise ValueError("refitting needs pre-norm blocks: pass refit=False")
    share = torch.full_like(target.out[0, :, 0], 1 / (grid.h * grid.w))  # [N]
    share[: grid.prefix] = _PREFIX_SHARE / max(grid.prefix, 1)
    # Some tokens have 10 to 100 times the norm of the rest; the next LayerNorm removes that, so the weight is 1 / variance.
    weight = share / target.between.var(-1)
    refit_linear(block.attn.proj, seen.attended, (target.between - args[0]) / _gain(block, 1), weight, ridge)
    seen = observe(block, args, kwargs)
    refit_linear(block.mlp.fc2, seen.hidden, (target.out - seen.between) / _gain(block, 2), share / target.out.var(-1), ridge)
    return observe(block, args, kwargs)


def _gain(block: nn.Module, branch: int) -> Tensor | float:
    """The layer scale of a residual branch, 1 where it has none and for channels scaled by 0, whose weights do not matter."""
    gain = getattr(getattr(block, f"ls{branch}"), "gamma", None)
    return 1.0 if gain is None else torch.where(gain == 0, 1.0, gain)


def _fold(model: ViT, added: Tensor, grid: Grid) -> None:
    """Add to a model, in place, the prefix rows of an embedding `added` [N, C] and its mean over patches.

    The prefix rows are added to the prefix tokens, the mean to the bias of the patch embedding, which is created if missing.
    """
    tokens = model.prefix_tokens
    for token, rows in zip(tokens, added[: grid.prefix].split([token.shape[1] for token in tokens]), strict=True):
        token.add_(rows)
    layer = model.patch_embed.proj
    if layer.bias is None:
        layer.bias = nn.Parameter(added.new_zeros(added.shape[1]))
    layer.bias += added[grid.prefix :].mean(0)


def _unfold(model: ViT, added: Tensor, grid: Grid) -> None:
    """Subtract from a learned embedding what `_fold` has added to prefix tokens and patch embedding."""
    rows = model.pos_embed.pos_embed  # [1, P + h*w, C]
    rows[:, : grid.prefix] = 0
    rows[:, grid.prefix :] -= added[grid.prefix :].mean(0)


def _check(model: nn.Module, images: Tensor, position: str) -> None:
    if not isinstance(model, ViT):
        raise ValueError(f"{type(model).__name__} attends in windows: its position is relative already")
    if model.pos_embed is None:
        raise ValueError("the model has no absolute embedding to convert: use relativize to add an encoding")
    if not isinstance(model.pos_embed, Absolute):
        raise ValueError(f"the embedding is {type(model.pos_embed).__name__}, not one learned embedding: use relativize")
    if set(position.split("+")).isdisjoint(TABLES + ROTATIONS):
        raise ValueError(
            f"position {position!r} cannot be fitted; choose {', '.join(TABLES + ROTATIONS)}, or join one of them to other "
            "encodings by '+'"
        )
    channels, patch = model.patch_embed.proj.in_channels, model.patch_embed.patch_size
    shape = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
    if not isinstance(images, Tensor) or images.dim() != 4 or images.shape[1] != channels or not len(images):
        raise ValueError(f"images must be one tensor [B, {channels}, height, width] of at least one image, got {shape}")
    if images.shape[2] < patch[0] or images.shape[3] < patch[1]:
        raise ValueError(f"images of {shape[2]}x{shape[3]} pixels are smaller than one patch of {patch[0]}x{patch[1]}")
    if not images.is_floating_point() or not images.isfinite().all():
        raise ValueError(f"images must be finite floating-point numbers, normalised as in training, got {images.dtype}")
