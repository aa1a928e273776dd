"""Position in a model at one image size, from outside: where each token lies in the image, biases, masks and rotations.

Tokens are located by what they are made of, not by an assumed order: `vitrel.inspect.recorder` follows the pixels of the image
through every operator to the queries of attention.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vitrel.common.sizes import Size
from vitrel.conformance.measure import Located
from vitrel.inspect.any_model import channels_of, located, on_images
from vitrel.inspect.recorder import Added, Attention, constant, run

CONTENTS = 3  # constant passes, each with other contents, so that no single content is degenerate


class Unlocated(ValueError):
    """Raised where the tokens of an attention cannot be placed on the image; the message gives the reason."""


class Embedding(NamedTuple):
    """A position embedding that is added to tokens before the first attention: a map of patches, rows of prefix tokens."""

    where: str
    grid: Size
    patches: Tensor  # [h, w, C]
    prefix: Tensor  # [P, C]; P may be 0
    parameter: str  # name of the first parameter or buffer that it is made of; "" if there is none


@dataclass
class Survey:
    """What forward passes at one image size show of position: attentions whose tokens could be placed on it, and embeddings."""

    size: Size  # of the image, (h, w) in pixels
    attentions: list[Located] = field(default_factory=list)
    embeddings: list[Embedding] = field(default_factory=list)
    unlocated: dict[str, str] = field(default_factory=dict)  # {module: why its tokens could not be placed}
    softmaxes: int = 0  # attention that was seen at all
    alike: bool = True  # equal patches give equal queries and keys in every attention, where no embedding is added


def survey(model: nn.Module, size: Size, call: Callable[[Tensor], Any] | None = None) -> Survey:
    """Return what up to five forward passes of a float32 model on the CPU, at `size` (h, w) pixels, show of position.

    Raises what the model raises for the size. `call` runs the model on images; by default it is `on_images(model)`.
    """
    call = on_images(model) if call is None else call
    images = torch.randn(1, channels_of(model), *size, generator=torch.Generator().manual_seed(0))
    plain = run(call, model, images, follow=True)
    found = Survey(size, softmaxes=len(plain.attentions))
    if not plain.attentions and not plain.added:
        return found
    fixed = [run(call, model, images, constant(plain, content), plain=True).attentions for content in range(CONTENTS)]
    for group in _groups(plain.attentions):
        try:
            found.attentions.append(_locate(group, plain.attentions, fixed, size, model))
        except Unlocated as reason:
            found.unlocated[plain.attentions[group[0]].where] = str(reason)
    found.embeddings = [embedding for added in plain.added if (embedding := _embedding(added, size)) is not None]
    if found.attentions and not found.embeddings:
        equal = images[:, :, :1, :1].expand_as(images).contiguous()
        found.alike = _alike(plain.attentions, run(call, model, equal).attentions)
    return found


def _alike(located: list[Attention], equal: list[Attention]) -> bool:
    """Return whether equal patches give all tokens of a head and window the same query, and all the same key.

    Args:
        located: the attentions of a pass that tell the places of their tokens; those without places are skipped.
        equal: the same attentions in a pass whose patches are all equal.
    """
    for place, one in ((a.places, b) for a, b in zip(located, equal, strict=True) if a.places is not None):
        for pixel, values in zip(place, (one.query, one.key), strict=True):  # [L, N], [L, N, D]
            real, first = (pixel >= 0)[..., None], (pixel >= 0).long().argmax(1)
            apart = (values - values[torch.arange(len(values)), first][:, None]).masked_fill(~real, 0.0)
            if float(apart.abs().max()) > 1e-4 * float(values.abs().max()):
                return False
    return True


def _groups(found: list[Attention]) -> list[list[int]]:
    """Return lists of indices into `found` that are one attention: a module may compute its windows in parts."""
    groups: list[list[int]] = []
    for number, one in enumerate(found):
        before = found[groups[-1][-1]] if groups else None
        same = before is not None and before.where == one.where and before.linears == one.linears
        if same and before.logits.shape[1:] == one.logits.shape[1:]:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


def _locate(group: list[int], plain: list[Attention], fixed: list[list[Attention]], size: Size, model: nn.Module) -> Located:
    """Return one attention, computed in the parts `group`, with its tokens in the image; Unlocated if they cannot be placed.

    `group` are indices of attentions in a pass: in `plain`, an ordinary pass, and in each of `fixed`, with constant content.
    """
    first = plain[group[0]]
    queries, keys = first.logits.shape[-2:]
    if queries != keys:
        raise Unlocated(f"{queries} queries attend to {keys} keys, so the tokens are pooled")
    if any(plain[n].mixed for n in group):
        raise Unlocated(f"{first.where} depends on several patches before attention, as after convolutions")
    if any(plain[n].places is None for n in group):
        raise Unlocated(f"the tokens of {first.where} are none of the image")
    places = tuple(torch.cat([plain[n].places[side] for n in group]) for side in (0, 1))
    whole = len(group) == 1
    call = located(first if whole else replace(first, places=places, bias=None, logits=places[0]), size, model)
    if call.grid is None:
        raise Unlocated(f"the tokens of {first.where} are no grid of {size[0]}x{size[1]} pixels, each once")

    def passes(parts: list[Tensor | None]) -> Tensor | None:
        """Return [B, W, H, ...] of the constant passes (B), each joined from its parts; None if one lacks it."""
        return None if any(part is None for part in parts) else call.unflattened(torch.cat(parts), len(fixed))  # type: ignore[arg-type]

    tokens = (call.tokens - call.grid.prefix).clamp(min=-1)
    names = ("logits", "query", "key")
    logits, query, key = (passes([torch.cat([getattr(one[n], name) for n in group]) for one in fixed]) for name in names)
    before = tuple(passes([one[group[0]].unrotated[side] if whole else None for one in fixed]) for side in (0, 1))
    grid, full = call.grid[:2], len(tokens) == 1 and int((tokens >= 0).sum()) + call.grid.prefix == tokens.shape[1]
    about = first.where, grid, tokens, grid if full else call.window, call.heads, call.grid.prefix
    return Located(*about, logits, query, key, before)


def _embedding(added: Added, size: Size) -> Embedding | None:
    """Return what was added to tokens as a map; None if it has no row for each patch of a grid, and so is no position."""
    patch = added.place >= 0
    place = added.place[patch]
    grid = len((place // size[1]).unique()), len((place % size[1]).unique())
    if not len(place) or len(place.unique()) != len(place) or len(place) != grid[0] * grid[1]:
        return None
    position = added.position
    if position.dim() < len(added.shape):
        position = position.expand(1, *added.shape[1:])
    if position.shape[1:] != added.shape[1:]:
        return None
    rows = position[0].flatten(0, -2)
    if len(rows) != len(patch):  # as of logits of several windows
        return None
    return Embedding(added.where, grid, rows[patch][place.argsort()].unflatten(0, grid), rows[~patch], added.parameter)
