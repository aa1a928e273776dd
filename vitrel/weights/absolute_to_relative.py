"""absolute_to_relative: convert a trained ViT or Swin to another position encoding, from unlabeled images.

The original and the converted model run on the same images, and the blocks are fitted one after the other, each on the output
of the blocks converted before (vitrel.weights.fit): the encoding to the original's attention, then the last linear layers of
both residual branches, by ridge regression, to its output. An absolute embedding contributes more than attention logits: its
mean over the patches is added to the bias of the patch embedding, in a Swin of the norm that follows, and its rows of class
and register tokens to these tokens, both exactly. At the end the whole model is trained for a few steps, without labels, on the
original's last features.
"""

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitrel.grid import Grid
from vitrel.layers import Block
from vitrel.models.backbone import Backbone
from vitrel.models.segmenter import Segmenter
from vitrel.models.swin import Swin
from vitrel.models.vit import ViT
from vitrel.position import POSITIONS
from vitrel.position.absolute import Absolute
from vitrel.position.terms import check_choice
from vitrel.weights.fit import PREFIX_SHARE, Agreement, attended, distil, fit_attention, refit_linear
from vitrel.weights.recognize import as_vitrel
from vitrel.weights.relativize import relativize

IMAGES = 256  # by default; with 64 the fit takes a third of the time and keeps clearly less accuracy
_CHUNK = 16  # images that run through a block at a time
_LOGITS = 2**24  # attention logits to which an encoding is fitted, at most (64 MiB in float32), and at most 16 images


@dataclass(frozen=True)
class ConversionReport:
    """How closely a converted model follows the original, by block, on the images it was fitted to; `print` shows a table.

    Attributes:
        position: the encoding's key.
        images: number of images.
        grid: of the images, (h, w) in patches.
        seconds: duration of the fit.
        fitted: whether the encoding has parameters.
        before: agreement of each block's attention with the original's before the fit, on up to 16 images: `explained`, the
            share of the variance of the original's weights within rows, 1 at best; `divergence`, KL(original, model) in nats.
        after: the same after the fit.
        prefix: mean squared distance of each block's output from the original's after refitting, divided by the variance of
            each of the original's tokens, over class and register tokens; nan where there are none.
        patches: the same over patches.
    """

    position: str
    images: int
    grid: tuple[int, int]
    seconds: float
    fitted: bool
    before: tuple[Agreement, ...]
    after: tuple[Agreement, ...]
    prefix: tuple[float, ...]
    patches: tuple[float, ...]

    def __str__(self) -> str:
        lines = [self.head(), "block  attention explained     divergence            error of prefix tokens  of patches"]
        rows = zip(self.before, self.after, self.prefix, self.patches, strict=True)
        lines += [
            f"{i:5d}  {a.explained:8.3f} -> {b.explained:6.3f}   {a.divergence:7.3f} -> {b.divergence:7.3f} {c:23.3f} {d:11.3f}"
            for i, (a, b, c, d) in enumerate(rows)
        ]
        return "\n".join(lines)

    def head(self) -> str:
        """Return encoding, images, grid and seconds of the fit in one line."""
        what = f"{self.position} fitted" if self.fitted else f"{self.position} has no parameters, linear layers fitted"
        return f"{what} to {self.images} images of {self.grid[0]}x{self.grid[1]} patches in {self.seconds:.0f} s"


@torch.no_grad()
def absolute_to_relative(
    model: nn.Module,
    images: Tensor,
    position: str = "table",
    position_args: dict | None = None,
    *,
    absolute: str = "drop",
    fade_steps: int | None = None,
) -> Any:
    """Return a vitrel model with another position encoding, fitted to images; its attribute `conversion` is a ConversionReport.

    Args:
        model: a model that `relativize` takes, not changed: a ViT with a trained absolute embedding, or a Swin, in which
            `position` replaces the encoding in its windows. Of a Segmenter it is the backbone, which has `conversion` then.
        images: [B, C, height, width], prepared as in training, without labels: a few hundred, as varied as the images the model
            will see. Their grid becomes the training grid of the new encoding.
        position: as in `relativize`. An encoding without parameters stays as it is, and only the rest is fitted.
        position_args: as in `relativize`.
        absolute: "drop" removes the embedding, also that of a Swin. "fade", of a ViT alone, scales it to 0 over the first
            `fade_steps` steps of fine-tuning: encodings are fitted as for "drop" and act beside the full embedding at first;
            no other weights are fitted.
        fade_steps: number of training steps, for "fade".

    Raises:
        ValueError: `absolute` is "keep", the model has no position that can be fitted, images have another shape or are not
            finite, or `relativize` raises it.
    """
    if absolute == "keep":
        raise ValueError("absolute='keep' leaves nothing to fit: use relativize(model, position), whose tables start at zero")
    check_choice("absolute_to_relative", "absolute", absolute, ("drop", "fade"))
    if isinstance(model, Segmenter):
        given = dict(absolute=absolute, fade_steps=fade_steps)
        return model.with_backbone(absolute_to_relative(model.backbone, images, position, position_args, **given))
    start = time.perf_counter()
    original = copy.deepcopy(model) if isinstance(model, Backbone) else as_vitrel(model)
    if reason := cannot_fit(original):
        raise ValueError(reason)
    _check(original, images)
    original.eval()
    size = (images.shape[2], images.shape[3])
    options = dict(position_args=position_args, img_size=size)
    result = relativize(original, position, absolute=absolute, fade_steps=fade_steps, **options).eval()
    fitted = result
    if absolute == "fade":  # the encodings are for the model once the embedding is gone
        fitted = relativize(original, position, absolute="drop", **options).eval()
    grid = original.token_grid(size)
    added = None if original.pos_embed is None else original.pos_embed(grid).tokens
    if added is not None:
        _fold(fitted, added, grid)
    new_rotation = any(POSITIONS[key].rotates for key in position.split("+"))
    fits = _convert(fitted, original, images, new_rotation, refit=absolute != "fade")
    if absolute == "fade":
        _fold(result, added, grid)
        _unfold(result, added, grid)
        for block, source in zip(result.blocks, fitted.blocks, strict=True):
            for part in ("position", "attn.qkv"):  # q and k have another basis for a rotation
                block.get_submodule(part).load_state_dict(source.get_submodule(part).state_dict())
    else:
        distil(result, original, images)
    has_parameters = any(True for _, block in layers(result) for _ in block.position.parameters())
    seconds = time.perf_counter() - start
    report = ConversionReport(position, len(images), grid[:2], seconds, has_parameters, *zip(*fits, strict=True))
    result.conversion = report  # type: ignore[assignment]
    return result.train(model.training)


class Observed(NamedTuple):
    """Tensors inside one block in one forward pass, each [B, N, C] or [B, h, w, C].

    They are the inputs of attention's last linear layer, of norm2 and of the MLP's last linear layer, and the output.
    """

    attended: Tensor  # input of the attention's last linear layer
    between: Tensor  # input of norm2: in pre-norm blocks the tokens after attention
    hidden: Tensor  # input of the MLP's last linear layer
    out: Tensor  # output of the block


def observe(block: Block, x: Tensor, grid: Grid) -> Observed:
    """Run a block once on tokens `x`, [B, N, C] or [B, h, w, C]; return inputs of three of its layers, and its output."""
    seen: dict[str, Tensor] = {}
    recorded = {"attended": block.attn.proj, "between": block.norm2, "hidden": block.mlp.fc2}
    hooks = [m.register_forward_pre_hook(lambda _, args, n=n: seen.update({n: args[0]})) for n, m in recorded.items()]
    try:
        out = block(x, grid)
    finally:
        for hook in hooks:
            hook.remove()
    return Observed(**seen, out=out)


def layers(model: Backbone) -> Iterator[tuple[nn.Module, Block]]:
    """Yield (module to apply to the tokens before the block: Swin's downsampling or an identity, the block) in order."""
    if isinstance(model, Swin):
        for stage in model.layers:
            yield from zip([stage.downsample, *(nn.Identity() for _ in stage.blocks[1:])], stage.blocks, strict=True)
    else:
        for block in model.blocks:
            yield nn.Identity(), block


def cannot_fit(model: Backbone) -> str:
    """Return why `absolute_to_relative` cannot fit an encoding to this model, "" if it can."""
    if isinstance(model, Swin):
        return ""
    if model.pos_embed is None:
        return "the model has no absolute embedding to convert: use relativize to add an encoding"
    if not isinstance(model.pos_embed, Absolute):
        return f"the embedding is {type(model.pos_embed).__name__}, not one learned embedding: use relativize"
    if model.shared_position is not None:
        return "the blocks share one encoding: build the model without share_position"
    return ""


class _Fit(NamedTuple):
    """What `_convert` reports of one block; the fields are those of ConversionReport."""

    before: Agreement  # as in ConversionReport, and so are the others
    after: Agreement  # after the fit
    prefix: float  # of class and register tokens
    patches: float  # of patches


def _convert(model: Backbone, original: Backbone, images: Tensor, new_rotation: bool, refit: bool) -> list[_Fit]:
    """Fit the blocks of a model in place, one after the other, to those of the original, and return what is reported of each.

    `new_rotation` says whether the encodings hold a rotation that was not trained with these q and k; `refit` whether linear
    layers are refitted too.
    """
    device = model.patch_embed.proj.weight.device

    def tokens(of: Backbone) -> Tensor:
        embedded = (of.embed(part.to(device)) for part in images.split(_CHUNK))
        return torch.cat([part[0] if isinstance(part, tuple) else part for part in embedded])

    x, goal, fits = tokens(model), tokens(original), []
    for (down, block), (down_original, block_original) in zip(layers(model), layers(original), strict=True):
        x, goal = _chunked(down, x), _chunked(down_original, goal)
        grid = model.token_grid(images.shape[2:]) if x.dim() == 3 else Grid(x.shape[1], x.shape[2])
        few = _few(block, grid, len(x))
        wanted = attended(block_original, goal[:few], grid)
        logits = wanted.logits(block_original.position(wanted.grid))
        before, after = fit_attention(block, x[:few], grid, logits, new_rotation)
        between, goal = _chunked(lambda part, b=block_original, g=grid: observe(b, part, g)[1::2], goal)
        if refit and not block.post_norm:
            _refit(block, x, between, goal, grid)
        x = _chunked(lambda part, b=block, g=grid: b(part, g), x)
        error = ((x - goal).square().mean(-1) / goal.var(-1)).flatten(1)
        fits.append(_Fit(before, after, error[:, : grid.prefix].mean().item(), error[:, grid.prefix :].mean().item()))
    return fits


def _few(block: Block, grid: Grid, images: int) -> int:
    """Return how many of `images` images an encoding is fitted to: 1 to 16, fewer where their logits need much memory."""
    keys = grid.tokens if block.window is None else block.window.tokens
    return max(1, min(images, 16, _LOGITS // (block.attn.num_heads * grid.tokens * keys)))


def _chunked(function: Callable, x: Tensor):
    """Apply a function to 16 images of x at a time, and concatenate what it returns: a tensor or a tuple of tensors."""
    parts = [function(part) for part in x.split(_CHUNK)]
    return torch.cat(parts) if isinstance(parts[0], Tensor) else tuple(torch.cat(part) for part in zip(*parts, strict=True))


def _refit(block: Block, x: Tensor, between: Tensor, out: Tensor, grid: Grid) -> None:
    """Refit the last linear layers of a block's attention and MLP, in place, so that its tokens come close to the original's.

    `x` is the block's input on `grid`; `between` and `out` are the original's tokens after attention and after the MLP.
    """
    share = torch.full_like(out[0, ..., 0], 1 / (grid.h * grid.w))  # [N] or [h, w]
    if grid.prefix:
        share[: grid.prefix] = PREFIX_SHARE / grid.prefix
    # Some tokens have 10 to 100 times the norm of the rest; the next LayerNorm removes that, so the weight is 1 / variance.
    parts = [*zip(*(tensor.split(_CHUNK) for tensor in (x, between, out)), strict=True)]

    def attention():
        for tokens, goal, _ in parts:
            yield observe(block, tokens, grid).attended, (goal - tokens) / _gain(block, 1), share / goal.var(-1)

    def mlp():
        for tokens, _, goal in parts:
            seen = observe(block, tokens, grid)
            yield seen.hidden, (goal - seen.between) / _gain(block, 2), share / goal.var(-1)

    refit_linear(block.attn.proj, attention())
    refit_linear(block.mlp.fc2, mlp())


def _gain(block: nn.Module, branch: int) -> Tensor | float:
    """Return the layer scale of residual branch 1 or 2, with 1 in place of 0 (weights have no effect there); 1 without one."""
    gain = getattr(getattr(block, f"ls{branch}"), "gamma", None)
    return 1.0 if gain is None else torch.where(gain == 0, 1.0, gain)


def _fold(model: Backbone, added: Tensor, grid: Grid) -> None:
    """Move the part of an embedding `added` [N, C] that does not depend on the patch to other parameters of a model, in place.

    The rows of prefix tokens are added to these tokens. The mean over patches is added to the bias of the last layer before the
    embedding, a ViT's convolution of patches or a Swin's norm; the bias is created if missing. The embedding itself is not
    changed (`_unfold` does that).
    """
    layer: Any = model.patch_embed.norm
    if isinstance(model, ViT):
        layer, tokens = model.patch_embed.proj, model.prefix_tokens
        for token, rows in zip(tokens, added[: grid.prefix].split([token.shape[1] for token in tokens]), strict=True):
            token.add_(rows)
    if layer.bias is None:
        layer.bias = nn.Parameter(added.new_zeros(added.shape[1]))
    layer.bias += added[grid.prefix :].mean(0)


def _unfold(model: ViT, added: Tensor, grid: Grid) -> None:
    """Set the rows of prefix tokens in a model's learned embedding to 0, and subtract the mean over patches, both in place.

    `_fold` adds them elsewhere. `added` [N, C] is the embedding on `grid`, of which the mean is taken.
    """
    rows = model.pos_embed.pos_embed  # [1, P + h*w, C]
    rows[:, : grid.prefix] = 0
    rows[:, grid.prefix :] -= added[grid.prefix :].mean(0)


def _check(model: Backbone, images: Tensor) -> None:
    """Raise ValueError unless images are [B, C, height, width], at least one, finite, and no smaller than a patch."""
    channels, patch = model.patch_embed.proj.in_channels, model.patch_embed.patch_size
    shape = tuple(images.shape) if isinstance(images, Tensor) else type(images).__name__
    if not isinstance(images, Tensor) or images.dim() != 4 or images.shape[1] != channels or not len(images):
        raise ValueError(f"images must be one tensor [B, {channels}, height, width] of at least one image, got {shape}")
    if images.shape[2] < patch[0] or images.shape[3] < patch[1]:
        raise ValueError(f"images of {shape[2]}x{shape[3]} pixels are smaller than one patch of {patch[0]}x{patch[1]}")
    if not images.is_floating_point() or not images.isfinite().all():
        raise ValueError(f"images must be finite floating-point numbers, normalized as in training, got {images.dtype}")
