"""`diagnose`: what happens to position in any model at other image sizes, without training it and without data."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import timm
import torch
from timm.layers import PatchEmbed, to_2tuple
from torch import nn

from vitrel.inspect.attention_layer import model_name
from vitrel.inspect.bias import foreign_changes, names_compared, own_changes
from vitrel.inspect.diagnosis import Diagnosis, SizeDiagnosis, StageDiagnosis, WayDiagnosis
from vitrel.inspect.footprint import Sight, sights_of
from vitrel.inspect.foreign import REFUSALS, changes, fit_to, reason, refusal, replaced_parameters
from vitrel.inspect.graphs import count_graphs
from vitrel.inspect.positions import Constants, PositionChange, common_grids, compare, constants
from vitrel.inspect.resolution_report import Pair
from vitrel.inspect.trace import SeenBlock, StageWindows, Traced, patch_grid, stage_windows, trace
from vitrel.models.backbone import Backbone
from vitrel.models.create import create_model
from vitrel.sizes import format_size


class _Way(NamedTuple):
    name: str
    base: nn.Module
    at: Callable[[Pair], nn.Module]  # the model for a size
    kept: bool  # the weights of `base` are those of the model, resampled or not


def diagnose(model: str | nn.Module, size: int | Pair | Sequence[int | Pair], compile: bool = False) -> Diagnosis:
    """What position in `model` does at images of `size` pixels: what is interpolated, which tokens see which, what changes.

    model: a name for timm.create_model (random weights; every way in which timm can bring it to a size), or any model (the way
    it takes sizes itself, see `vitrel.inspect.foreign.fit_to`), which stays as it is. size: an int, a tuple (h, w), or a list.
    compile: count the graphs of torch.compile over the sizes too, which takes seconds a size and clears what it has cached.
    What cannot be asked of a model is said in the result. Raises ValueError for an unknown name or an impossible size.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    sizes = [_checked(one) for one in (size if isinstance(size, list) else [size])]
    if isinstance(model, nn.Module) and any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"{model_name(model)} is on the meta device and has no values to look at; give its name instead")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        base = _created(model) if isinstance(model, str) else model
        trained = trained_size(base)
        noted = cache(lambda base: constants(base, trained))
        ways = [_over(way, trained, sizes, compile, noted) for way in _ways(model, base)]
    versions = {"timm": timm.__version__, "torch": torch.__version__}
    return Diagnosis(model_name(base), trained, versions, tuple(_merged(ways)))


def _created(name: str, **keywords: bool) -> nn.Module:
    model = create_model(name, **keywords).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and not parameter.any():
                parameter.normal_(std=0.02)  # a table of zeros would not change by resampling
    return model


def trained_size(model: nn.Module) -> Pair:
    """Pixels (h, w) a model was built for, or its weights were trained at."""
    known = getattr(getattr(model, "patch_embed", None), "img_size", None) or getattr(model, "img_size", None)
    cfg = getattr(model, "pretrained_cfg", None) or {}
    return tuple(to_2tuple(known or cfg.get("input_size", (3, 224, 224))[-2:]))


def _ways(model: str | nn.Module, base: nn.Module) -> Iterator[_Way]:
    """The ways in which timm brings this model to a size; of a model that is given, the one it takes by itself."""
    if getattr(base, "dynamic_img_size", False) or not hasattr(base, "set_input_size") or isinstance(base, Backbone):
        yield _Way("as built", base, lambda size: fit_to(base, size).model, True)
    else:
        if isinstance(model, str) and _accepts(model, dynamic_img_size=True):
            dynamic = _created(model, dynamic_img_size=True)
            yield _Way("dynamic_img_size=True", dynamic, lambda size: dynamic, True)
        yield _Way("set_input_size()", base, lambda size: fit_to(base, size).model, True)
    if isinstance(model, str) and not isinstance(base, Backbone) and _accepts(model, img_size=trained_size(base)):
        yield _Way("img_size=", base, lambda size: timm.create_model(model, img_size=size).eval(), False)


def _accepts(name: str, **arguments) -> bool:
    try:
        with torch.device("meta"):
            timm.create_model(name, **arguments)
    except TypeError:
        return False
    return True


_Positions = tuple[tuple[PositionChange, ...], tuple[str, ...]]  # what changes, and what cannot be examined
_Noted = Callable[[nn.Module], Constants]  # at the size a model was made for


def _over(way: _Way, trained: Pair, sizes: Sequence[Pair], compile: bool, noted: _Noted) -> WayDiagnosis:
    lines, models = [], []
    for size in sizes:
        try:
            model = way.at(size)
            traced = trace(model, size)
            positions = _positions(way, model, trained, size, noted)
        except REFUSALS as error:
            lines.append(SizeDiagnosis(size, refusal=(str(error).splitlines() or [type(error).__name__])[0]))
            continue
        lines.append(_at(way, model, traced, trained, size, positions))
        models += [(model, size)] if compile else []
    return WayDiagnosis(way.name, tuple(lines), count_graphs(models) if compile else None)


def _positions(way: _Way, model: nn.Module, trained: Pair, size: Pair, noted: _Noted) -> _Positions:
    """What changes for one and the same token, and what cannot be examined. Raises ValueError where a table is too short."""
    if isinstance(model, Backbone) or size == trained:
        return (), ()
    replaced = replaced_parameters(way.base, model, way.kept)
    told = replaced | names_compared(way.base, *_patches(way, trained, size))
    kept = {} if way.kept else {name: value for name, value in way.base.named_parameters() if name not in replaced}
    try:
        before = noted(way.base)
    except REFUSALS as error:
        return (), (f"forward at {format_size(trained)} ({reason(error)})",)
    try:
        after = constants(model, size, told, kept)
    except IndexError as error:  # a table that ends before the grid, which a trace without values does not meet
        raise refusal(model, size, error) from error
    except REFUSALS as error:
        return (), (f"forward ({reason(error)})",)
    return compare(before, after, common_grids(model, trained, size))


def _patches(way: _Way, *sizes: Pair) -> list[Pair]:
    return [patch_grid(way.base, size) or (1, 1) for size in sizes]


def _at(way: _Way, model: nn.Module, traced: Traced, trained: Pair, size: Pair, positions: _Positions) -> SizeDiagnosis:
    resized, changed = traced.resampled, own_changes(traced.encodings)
    if not isinstance(model, Backbone):
        resized = changes(way.base, model, way.kept) | resized
        changed += foreign_changes(way.base, model, *_patches(way, trained, size), tables=way.kept)
    embed, unread = getattr(model, "patch_embed", None), (0, 0)
    if isinstance(embed, PatchEmbed) and not embed.dynamic_img_pad:
        unread = tuple(n % p for n, p in zip(size, embed.patch_size, strict=True))
    return SizeDiagnosis(size, "", resized, changed, tuple(_stages(traced.blocks)), unread, *positions)


def _stages(blocks: Sequence[SeenBlock]) -> Iterator[StageDiagnosis]:
    shifts = any(any(seen.shift or ()) for seen in blocks)
    for line in stage_windows(blocks):
        alike = [seen for seen in blocks if (seen.grid, seen.window, seen.strided) == (line.grid, line.window, line.strided)]
        yield _stage(line, alike, sights_of(alike), shifts)


def _stage(line: StageWindows, blocks: Sequence[SeenBlock], sights: Mapping[str, Sight], shifts: bool) -> StageDiagnosis:
    never = [s == 0 and n > m for s, n, m in zip(line.shift, line.grid, line.window or line.grid, strict=True)]
    frozen = shifts and len(blocks) > 1 and blocks[0].shift is not None and any(never)
    if not sights:
        return StageDiagnosis(blocks[0].name, line, looked=False, frozen=frozen)
    name = max(reversed(sights), key=lambda name: int(sights[name].leaking.sum()))  # where none leaks, the last: shifted
    sight = sights[name]
    return StageDiagnosis(
        name,
        line,
        looked=True,
        rows=sight.rows,
        columns=sight.columns,
        row_pairs=sight.row_pairs,
        column_pairs=sight.column_pairs,
        leaking=_share(sight.leaking),
        padded=max(_share(other.padding) for other in sights.values()),
        frozen=frozen,
        map=(sight.leaking.int() + 2 * sight.padding.int()).numpy(),
        token=sight.token,
        sees=sight.sees.numpy(),
    )


def _merged(ways: Sequence[WayDiagnosis]) -> Iterator[WayDiagnosis]:
    """Ways that come to the same are told once."""
    names: dict[tuple, list[str]] = {}
    told: dict[tuple, WayDiagnosis] = {}
    for way in ways:
        key = repr(way.sizes), way.graphs
        names.setdefault(key, []).append(way.way)
        told[key] = way
    for key, way in told.items():
        yield WayDiagnosis(" or ".join(names[key]), way.sizes, way.graphs)


def _checked(size: int | Pair) -> Pair:
    pair = tuple(to_2tuple(size))
    if len(pair) != 2 or not all(isinstance(side, int) and side > 0 for side in pair):
        raise ValueError(f"a size is one whole number of pixels or (height, width), not {size!r}; give several as a list")
    return pair


def _share(tokens: torch.Tensor) -> float:
    return float(tokens.float().mean())
