"""The checks: each reads surveys of a model at several sizes, or runs it, and yields findings or why it is not applicable."""

import copy
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from vitrel.common.sizes import Size, format_size
from vitrel.conformance.identify import embedding_axes, frequency_base, named_bias, resampled_from
from vitrel.conformance.measure import (
    SAME,
    Bias,
    Rotation,
    aligned,
    bias,
    difference,
    interpolated,
    rotation,
    transposed_order,
    window_slots,
)
from vitrel.conformance.report import Finding
from vitrel.conformance.subject import REFUSALS, Subject, one_line
from vitrel.conformance.survey import Embedding, Located, Survey, survey

LOW_PRECISION = 0.05  # radians, or share of the biases: queries in bfloat16 leave 0.01 after the mean over tokens
OUTPUT = 1e-3  # share of the standard deviation of outputs: float32 in another order leaves 1e-5


class NotApplicableError(Exception):
    """The check says nothing about this model; the message gives the reason."""


@dataclass
class Examined:
    """A model and its surveys, which the checks share."""

    subject: Subject
    sizes: tuple[Size, ...]  # first the two with height and width exchanged
    surveys: dict[Size, Survey]
    native: Size | None  # None: the native size is refused or too large to examine
    reference: "Examined | None" = None  # the model given as `like`
    rotations: dict[tuple[Size, int], Rotation | None] = field(default_factory=dict)
    biases: dict[tuple[Size, int], Bias | None] = field(default_factory=dict)

    @property
    def one_module(self) -> bool:
        """Whether the same module takes both sizes."""
        return len(self.sizes) > 1 and all(self.subject.takes_as_it_is(size) for size in self.sizes[:2])

    def rotation(self, size: Size, number: int) -> Rotation | None:
        """The rotation of the attention `number` among the located ones, measured once."""
        if (size, number) not in self.rotations:
            self.rotations[size, number] = rotation(self.surveys[size].attentions[number])
        return self.rotations[size, number]

    def bias(self, size: Size, number: int) -> Bias | None:
        """The bias of the attention `number` among the located ones, measured once."""
        if (size, number) not in self.biases:
            self.biases[size, number] = bias(self.surveys[size].attentions[number])
        return self.biases[size, number]

    def attentions(self) -> Iterator[tuple[Size, int, Located]]:
        """(size, number, attention) of all that could be located."""
        for size, one in self.surveys.items():
            yield from ((size, number, attention) for number, attention in enumerate(one.attentions))


def _input(found: Located, size: Size) -> str:
    return f"image of {format_size(size)} px, {format_size(found.grid)} tokens"


def _need_attention(examined: Examined) -> None:
    if any(one.attentions for one in examined.surveys.values()):
        return
    reasons = [reason for one in examined.surveys.values() for reason in one.unlocated.values()]
    softmaxes = sum(one.softmaxes for one in examined.surveys.values())
    raise NotApplicableError(reasons[0] if reasons else "no attention was seen" if not softmaxes else "no token was located")


def order(examined: Examined) -> Iterator[Finding]:
    """Rotations have one step per axis, biases one value per offset, sines and cosines one axis per channel."""
    any_position = False
    for size, number, found in examined.attentions():
        turn, rows = examined.rotation(size, number), examined.bias(size, number)
        if turn is not None and turn.pairs:
            any_position = True
            if float(turn.spread.max()) > SAME * 2:
                right = {name: rotation(found, how) for name, how in _orders(found).items()}
                names = [name for name, one in right.items() if one is not None and float(one.spread.max()) <= SAME * 2]
                what = f"it differs by up to {float(turn.spread.max()):.2g} radians over the grid"
                text = f"{what}; it is constant with {names[0]}" if names else what
                yield Finding("order", found.where, "one rotation angle between neighbors per axis", text, _input(found, size))
        if rows is not None:
            any_position = True
            if rows.spread > SAME:
                names = [
                    name for name, how in _orders(found).items()
                    if (one := bias(found, how)) is not None and one.spread <= SAME
                ]  # fmt: skip
                what = f"pairs of one offset differ by {100 * rows.spread:.0f}% of the range of biases"
                text = f"{what}; they agree with {names[0]}" if names else what
                yield Finding("order", found.where, "one bias per offset (query minus key)", text, _input(found, size))
            elif (wrap := _wraps(rows.by_offset)) and rows.content <= SAME:
                text = f"offsets (dy, dx) and (dy + 1, dx - {wrap}) share a bias, so rows of the table overlap"
                yield Finding("order", found.where, "a bias for each offset", text, _input(found, size))
    yield from _order_of_sincos(examined)
    if not any_position and not any(one.embeddings for one in examined.surveys.values()):
        _need_attention(examined)
        raise NotApplicableError("the model has no position")


def _wraps(table: Tensor) -> int:
    """The m for which a table [H, 2h-1, 2w-1] is a function of m dy + dx, so that its rows overlap; 0 if there is none."""
    width = table.shape[2]
    if not (_depends(table, 1) and _depends(table, 2)):
        return 0
    for m in range(max(2, width // 2), width):
        a, b = table[:, :-1, m:], table[:, 1:, : width - m]
        seen = ~(a.isnan() | b.isnan())
        if int(seen.sum()) > 2 * len(table) and torch.equal(a[seen], b[seen]) and float(a[seen].std()) > 0:
            return m
    return 0


def _orders(found: Located) -> dict[str, Tensor]:
    whole = found.windows == 1 and found.tokens.shape[1] == found.grid[0] * found.grid[1] + found.prefix
    return transposed_order(found) if whole else {}


def _order_of_sincos(examined: Examined) -> Iterator[Finding]:
    """An embedding whose channels have one axis at one size has so at all, whichever order of tokens is wrong."""
    found = [(size, one) for size, each in examined.surveys.items() for one in each.embeddings]
    pure = [embedding_axes(one) for _, one in found]
    for (size, one), good in zip(found, pure, strict=True):
        exchanged = one._replace(patches=one.patches.flatten(0, 1).unflatten(0, one.grid[::-1]).transpose(0, 1))
        if not good and (any(pure) or embedding_axes(exchanged)):
            text = "channels vary along both axes"
            if embedding_axes(exchanged):
                text += "; they have one axis with height and width exchanged"
            where = f"image of {format_size(size)} px, {format_size(one.grid)} tokens"
            yield Finding("order", one.where, "each channel varies along rows or along columns", text, where)


def rotates(examined: Examined) -> Iterator[Finding]:
    """Rotations preserve the norm of pairs."""
    seen = False
    for size, number, found in examined.attentions():
        turn = examined.rotation(size, number)
        if turn is None:
            continue
        seen = True
        if not turn.pairs:
            text = f"the norm changes by {100 * turn.norms:.0f}% with the position, in the best pairing of channels"
            yield Finding("rotation", found.where, "queries and keys are rotated, norms stay", text, _input(found, size))
    if not seen:
        _need_attention(examined)
        raise NotApplicableError("queries and keys are not rotated")


def sign(examined: Examined) -> Iterator[Finding]:
    """Keys are rotated as queries are."""
    seen = False
    for size, number, found in examined.attentions():
        turn = examined.rotation(size, number)
        if turn is None or not turn.pairs:
            continue
        seen = True
        apart = _apart(turn.steps[0], turn.steps[1])
        if apart > SAME * 2:
            opposite = _apart(turn.steps[0], -turn.steps[1]) <= SAME * 2
            text = "keys are rotated in the opposite direction" if opposite else f"angles differ by {apart:.2g} radians"
            yield Finding("sign", found.where, "queries and keys have the same angles", text, _input(found, size))
    if not seen:
        _need_attention(examined)
        raise NotApplicableError("queries and keys are not rotated; the sign of a table needs a reference (like)")


def _apart(a: Tensor, b: Tensor) -> float:
    """Largest difference of angles, modulo 2 pi."""
    if a.shape != b.shape:
        return math.inf
    apart = torch.atan2((a - b).sin(), (a - b).cos()).abs()
    return float(apart.nan_to_num(0).max())


def prefix(examined: Examined) -> Iterator[Finding]:
    """Prefix tokens are not rotated, have a constant bias, and an embedding that does not depend on the grid."""
    seen = False
    for size, number, found in examined.attentions():
        if not found.prefix:
            continue
        seen = True
        turn, rows = examined.rotation(size, number), examined.bias(size, number)
        if turn is not None and turn.pairs and turn.prefix > SAME * 2:
            text = f"a prefix token is changed by {100 * turn.prefix:.0f}% of its norm"
            yield Finding("prefix", found.where, "prefix tokens are not rotated", text, _input(found, size))
        if rows is not None and rows.prefix > SAME:
            text = f"their bias differs between patches by {100 * rows.prefix:.0f}% of the range"
            yield Finding("prefix", found.where, "one bias between a prefix token and all patches", text, _input(found, size))
    embeddings = [(size, one) for size, each in examined.surveys.items() for one in each.embeddings]
    for (_, one), (size, other) in itertools.pairwise(embeddings):
        if one.where == other.where and len(one.prefix):
            seen = True
            if difference(other.prefix, one.prefix) > SAME:
                text = "it changes with the grid"
                where = f"image of {format_size(size)} px"
                yield Finding("prefix", one.where, "the embedding of prefix tokens is the same at all sizes", text, where)
    if not seen:
        _need_attention(examined)
        raise NotApplicableError("the model has no prefix tokens")


def axes(examined: Examined) -> Iterator[Finding]:
    """Position has both axes."""
    seen = False
    for size, one in list(examined.surveys.items())[:1]:
        if any(_varies(e.patches) == (True, True) for e in one.embeddings):
            return  # the embedding has both
        for number, found in enumerate(one.attentions):
            turn, rows = examined.rotation(size, number), examined.bias(size, number)
            if min(found.grid) < 2 or (turn is None and rows is None):
                continue
            seen = True
            has = [False, False]
            if turn is not None and turn.pairs:
                has = [bool((turn.steps[0][:, axis].abs() > 1e-3).any()) for axis in (0, 1)]
            elif turn is not None:
                has = [True, True]
            if rows is not None:
                has = [a or _depends(rows.by_offset, axis) for axis, a in enumerate(has, 1)]
            if has != [True, True] and any(has):
                name = "rows" if has[0] else "columns"
                text = f"position depends on {name} only"
                yield Finding("axes", found.where, "position depends on rows and columns", text, _input(found, size))
            if turn is not None and turn.pairs and all(has):
                steps = turn.steps[0]
                if float((steps[:, 0] - turn.grid[1] * steps[:, 1]).sin().abs().max()) < SAME and float(
                    steps[:, 1].abs().max()
                ) > SAME:  # fmt: skip
                    text = "the angle is that of the token's number, row by row"
                    yield Finding("axes", found.where, "angles of rows and columns", text, _input(found, size))
    if not seen:
        _need_attention(examined)
        raise NotApplicableError("the model has no position in attention")


def _depends(table: Tensor, axis: int) -> bool:
    """Whether a table [H, 2h-1, 2w-1] differs along an axis, unseen offsets (NaN) left out."""
    apart = table.nan_to_num(-math.inf).amax(axis) - table.nan_to_num(math.inf).amin(axis)
    return bool((apart[apart.isfinite()] > 1e-6).any())


def _varies(patches: Tensor) -> tuple[bool, bool]:
    scale = float(patches.abs().max()) * SAME
    rows, columns = (patches.shape[axis] > 1 and float(patches.std(axis, correction=0).max()) > scale for axis in (0, 1))
    return rows, columns


def exchange(examined: Examined) -> Iterator[Finding]:
    """Exchanging height and width exchanges the frequencies of y and x, and leaves the bias of a window."""
    a, b = _exchanged(examined)
    seen = False
    for number, (one, other) in enumerate(zip(*(examined.surveys[s].attentions for s in (a, b)), strict=False)):
        turns = [examined.rotation(size, number) for size in (a, b)]
        if all(turn is not None and turn.pairs for turn in turns) and one.grid == other.grid[::-1]:
            steps = [turn.steps[0] for turn in turns]  # [H, 2, P]
            if not bool(((steps[0].abs() > 1e-3).sum(1) > 1).any()):  # one axis per pair, so frequencies are fixed
                seen = True
                down = [step[:, 0].abs().sort(-1)[0] for step in steps]
                right = [step[:, 1].abs().sort(-1)[0] for step in steps]
                apart = max(float((down[0] - right[1]).abs().max()), float((right[0] - down[1]).abs().max()))
                if apart > SAME * 2:
                    text = f"they differ by up to {apart:.2g} radians"
                    expected = "steps down at h x w are the steps right at w x h"
                    yield Finding("exchange", one.where, expected, text, f"images of {format_size(a)} and {format_size(b)} px")
        rows = [examined.bias(size, number) for size in (a, b)]
        slots = [window_slots(found) for found in (one, other)]
        if all(r is not None and r.content <= SAME for r in rows) and one.windows > 1 and other.windows > 1 and all(slots):
            if slots[0][0] != slots[1][0]:
                continue
            seen = True
            tables = _common(*(r.by_offset for r in rows))
            apart = float((tables[0] - tables[1]).abs().nan_to_num(0).max()) / rows[0].range
            if apart > SAME:
                text = f"the bias at one offset differs by {100 * apart:.0f}% of the range"
                expected = "a window of one size has the same bias on both grids"
                yield Finding("exchange", one.where, expected, text, f"images of {format_size(a)} and {format_size(b)} px")
    if not seen:
        _need_attention(examined)
        raise NotApplicableError("no fixed frequencies, and no window of the same size on both grids")


def _common(*tables: Tensor) -> list[Tensor]:
    found = list(tables)
    for axis in (1, 2):
        n = min(table.shape[axis] for table in found)
        found = [table.narrow(axis, (table.shape[axis] - n) // 2, n) for table in found]
    return found


def _learned(examined: Examined) -> Iterator[tuple[Size, Embedding, Embedding]]:
    """(size, native embedding, embedding at the size) of learned embeddings."""
    if examined.native is None:
        raise NotApplicableError("the native size was not examined")
    seen = False
    for number, native in enumerate(examined.surveys[examined.native].embeddings):
        if embedding_axes(native):
            continue
        for size, each in examined.surveys.items():
            if len(each.embeddings) > number and size != examined.native:
                seen = True
                yield size, native, each.embeddings[number]
    if not seen:
        raise NotApplicableError("the model adds no learned embedding that changes with the size")


def _rule(native: Embedding, other: Embedding) -> str:
    return "unchanged" if native.grid == other.grid and difference(native.patches, other.patches) < 0.01 else resampled_from(
        native, other
    )  # fmt: skip


def _error_rules(native: Embedding, grid: Size) -> dict[str, Tensor]:
    """{error: embedding [h, w, C] that it gives} of common errors of resampling."""
    errors: dict[str, Tensor] = {}
    exchanged = native.patches.transpose(0, 1)
    for mode in ("bicubic", "bilinear"):
        for antialias in (False, True):
            how = dict(mode=mode, antialias=antialias)
            swapped = interpolated(native.patches, grid[::-1], **how)
            errors[f"{mode} to {format_size(grid[::-1])} patches, read as {format_size(grid)}"] = swapped.reshape(*grid, -1)
            errors[f"{mode} to {format_size(grid[::-1])} patches, transposed"] = swapped.transpose(0, 1)
            errors[f"{mode} of the transposed embedding"] = interpolated(exchanged, grid, **how)
            side = math.isqrt(exchanged.shape[0] * exchanged.shape[1])
            if side * side == exchanged.shape[0] * exchanged.shape[1] and native.grid != (side, side):
                square = native.patches.flatten(0, 1).unflatten(0, (side, side))
                errors[f"{mode} of the embedding read as {side}x{side}"] = interpolated(square, grid, **how)
    return errors


def _off_center(native: Embedding, grid: Size) -> dict[str, Tensor]:
    errors = {}
    for mode in ("bicubic", "bilinear"):
        corner = interpolated(native.patches, grid, mode=mode, align_corners=True)
        errors[f"{mode} with align_corners, which puts the outer patches at the borders"] = corner
        for antialias in (False, True):
            for offset in (0.1, 0.01, 0.001, 0.5):
                moved = interpolated(native.patches, grid, offset, mode=mode, antialias=antialias)
                if moved.shape[:2] == grid:
                    name = f"{mode}{', antialias,' * antialias} by a scale factor of the size plus {offset}"
                    errors[name] = moved
    return errors


def resampling(examined: Examined) -> Iterator[Finding]:
    """A learned embedding at another size is the native one, resampled with the right axes."""
    unknown = []
    for size, native, other in _learned(examined):
        if _rule(native, other) or other.grid == native.grid:
            continue
        for name, wrong in _error_rules(native, other.grid).items():
            if difference(wrong, other.patches) < 0.01:
                where = f"image of {format_size(size)} px, {format_size(other.grid)} patches from {format_size(native.grid)}"
                yield Finding("resampling", other.where, "the native embedding resampled to h x w", name, where)
                break
        else:
            if not any(difference(wrong, other.patches) < 0.01 for wrong in _off_center(native, other.grid).values()):
                unknown.append(other.where)
    if unknown:
        raise NotApplicableError("the embedding follows no rule of F.interpolate that the check knows")


def half_pixel(examined: Examined) -> Iterator[Finding]:
    """Resampling keeps the centers of patches."""
    unknown = False
    for size, native, other in _learned(examined):
        rule = _rule(native, other)
        if rule and "align_corners" not in rule:
            continue
        unknown = True
        for name, wrong in _off_center(native, other.grid).items():
            if difference(wrong, other.patches) < 0.01:
                where = f"image of {format_size(size)} px, {format_size(other.grid)} patches from {format_size(native.grid)}"
                yield Finding("half_pixel", other.where, "patch centers at (i + 1/2) / n", name, where)
                break
    if unknown:  # of no use after a finding
        raise NotApplicableError("the embedding follows no rule of F.interpolate that the check knows")


def _windowed(examined: Examined) -> Iterator[tuple[Size, Located, Size, Tensor]]:
    """(size, attention, window, slots [N, 2]) of attention in windows, or with padding, at every size."""
    seen, strided = False, False
    for size, _, found in examined.attentions():
        slots = window_slots(found)
        if slots is None or (found.windows == 1 and not bool((found.tokens < 0).any())):
            continue
        real = found.tokens >= 0
        pairs = real[:, :, None] & real[:, None]
        if float((aligned(found, slots[1]) & pairs).sum()) < 0.3 * float(pairs.sum()):
            strided = True
            continue
        seen = True
        yield size, found, *slots
    if not seen:
        _need_attention(examined)
        why = "windows hold tokens at distances" if strided else "attention is global, without padding"
        raise NotApplicableError(why)


def window(examined: Examined) -> Iterator[Finding]:
    """No token sees the opposite border of the image."""
    for size, found, shape, slots in _windowed(examined):
        real = found.tokens >= 0
        across = found.visible & real[:, :, None] & real[:, None] & ~aligned(found, slots)
        if bool(across.any()):
            which, a, b = (int(n) for n in across.nonzero()[0])
            pair = " and ".join(str(tuple(found.places[which, slot].tolist())) for slot in (a, b))
            text = f"tokens {pair} see each other; {int(across.any(2).sum())} of {int(real.sum())} tokens see such a token"
            yield Finding("window", found.where, f"windows of {format_size(shape)} hold neighbors", text, _input(found, size))


def padding(examined: Examined) -> Iterator[Finding]:
    """No token attends to padding."""
    for size, found, shape, _ in _windowed(examined):
        real = found.tokens >= 0
        sees = (found.visible & real[:, :, None] & ~real[:, None]).any(2)
        if bool(sees.any()):
            text = f"{int(sees.sum())} of {int(real.sum())} tokens attend to padding"
            yield Finding("padding", found.where, f"windows of {format_size(shape)}, padding masked", text, _input(found, size))


def mask(examined: Examined) -> Iterator[Finding]:
    """No mask hides tokens of one window that are neighbors in the image."""
    for size, found, shape, slots in _windowed(examined):
        hidden = aligned(found, slots) & ~found.visible
        if bool(hidden.any()):
            which, a, b = (int(n) for n in hidden.nonzero()[0])
            pair = " and ".join(str(tuple(found.places[which, slot].tolist())) for slot in (a, b))
            text = f"a mask hides tokens {pair} from each other, which are in one window"
            yield Finding("mask", found.where, f"windows of {format_size(shape)}, whole inside", text, _input(found, size))


def shift(examined: Examined) -> Iterator[Finding]:
    """Where one window holds an axis, all tokens along it see each other."""
    seen = False
    for size, found, shape, _ in _windowed(examined):
        h, w = found.grid
        for axis, name in ((0, "rows"), (1, "columns")):
            if found.grid[axis] > shape[axis] or found.grid[axis] < 2 or h * w > 4096:
                continue
            seen = True
            sees = torch.zeros(h * w, h * w, dtype=torch.bool)
            for tokens, visible in zip(found.tokens, found.visible, strict=True):
                at = (tokens >= 0).nonzero().flatten()
                sees[tokens[at][:, None], tokens[at]] |= visible[at][:, at]
            first, last = (torch.arange(h * w).view(h, w).select(axis, n).flatten() for n in (0, -1))
            apart = ~sees[first, last]
            if bool(apart.any()):
                text = f"the first and last of {found.grid[axis]} {name} do not see each other"
                expected = f"windows of {format_size(shape)} are not shifted along {name}"
                yield Finding("shift", found.where, expected, text, _input(found, size))
    if not seen:
        raise NotApplicableError("no window holds an axis of the grid")


def _same(a: Tensor, b: Tensor) -> float:
    """Largest difference of two outputs as a share of the standard deviation of the first one's values."""
    if a.shape != b.shape:
        return math.inf
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    return float((a - b).abs().max() / a.std(correction=0).clamp(min=1e-9))


def _exchanged(examined: Examined) -> tuple[Size, Size]:
    if len(examined.sizes) < 2 or examined.sizes[0][::-1] != examined.sizes[1]:
        raise NotApplicableError("no two sizes with height and width exchanged")
    return examined.sizes[0], examined.sizes[1]


def _small(subject: Subject) -> list[Size]:
    """An image of 2 x 2 patches, which a window may exceed, if the model takes it."""
    size = 2 * subject.unit(), 2 * subject.unit()
    return [] if subject.takes(size) else [size]


def cache(examined: Examined) -> Iterator[Finding]:
    """A size runs the same whatever ran before."""
    if not examined.one_module:
        raise NotApplicableError("the model is built for one size; another one is another module")
    subject, (a, b) = examined.subject, _exchanged(examined)
    for first, second in ((a, b), (b, a), *((size, a) for size in _small(subject))):
        used, fresh = copy.deepcopy(subject.model), copy.deepcopy(subject.model)
        images = subject.images(second)
        subject.output(used, subject.images(first))
        expected = subject.output(fresh, images)
        try:
            apart = _same(expected, subject.output(used, images))
            text = f"the output changes by {apart:.2g} of its standard deviation after an image of {format_size(first)} px"
        except REFUSALS as error:
            apart, text = math.inf, f"the model fails after an image of {format_size(first)} px: {one_line(error)}"
        if apart > OUTPUT:
            sizes = f"an image of {format_size(first)} px, then one of {format_size(second)} px"
            yield Finding("cache", subject.name, "the output of a model that ran nothing before", text, sizes)
            return


def state(examined: Examined) -> Iterator[Finding]:
    """Another size leaves the native one as it was; with `set_input_size`, but for parameters that it resamples."""
    native, subject = examined.native, examined.subject
    if native is None:
        raise NotApplicableError("no native size to compare")
    changes = not examined.one_module
    if changes and not hasattr(subject.model, "set_input_size"):
        raise NotApplicableError("the model is built for one size")
    model, images = copy.deepcopy(subject.model), subject.images(native)
    before, weights = subject.output(model, images), {n: v.clone() for n, v in model.state_dict().items()}
    parameters = {n: v.clone() for n, v in model.named_parameters()}
    run = f"{format_size(native)} px, then other sizes, then {format_size(native)} px again"
    try:
        for size in (*[size for size in examined.sizes if size != native][:2], *_small(subject)):
            if changes:
                model.set_input_size(img_size=size)
            subject.output(model, subject.images(size))
        if changes:
            model.set_input_size(img_size=native)
            for name, value in model.named_parameters():
                if name in parameters and value.shape != parameters[name].shape:
                    text = f"it is of {tuple(value.shape)}, not {tuple(parameters[name].shape)}"
                    yield Finding("state", name, "the same shape again", text, run)
                    return
            model.load_state_dict(parameters, strict=False)  # resampled there and back, they are others
        apart = _same(before, subject.output(model, images))
    except REFUSALS as error:
        text = f"it fails: {one_line(error)}"
        yield Finding("state", subject.name, "sizes that the model takes, one after another", text, run)
        return
    changed = [n for n, v in model.state_dict().items() if n in weights and not torch.equal(v, weights[n])]
    if apart > OUTPUT or changed:
        text = f"{changed[0]} was changed" if changed else f"the output changes by {apart:.2g} of its standard deviation"
        yield Finding("state", changed[0] if changed else subject.name, "the same output again", text, run)


def batch(examined: Examined) -> Iterator[Finding]:
    """An image does not depend on others of its batch."""
    subject, size = examined.subject, examined.sizes[0]
    model, images = subject.at(size), subject.images(size, 2, seed=1)
    alone = torch.cat([subject.output(model, image[None]) for image in images])
    together = subject.output(model, images)
    apart = _same(alone, together)
    if apart > OUTPUT:
        text = f"outputs differ by {apart:.2g} of their standard deviation" if apart < math.inf else "shapes differ"
        where = f"a batch of 2 images of {format_size(size)} px"
        yield Finding("batch", subject.name, "each image as it is alone", text, where)


def dtype(examined: Examined) -> Iterator[Finding]:
    """Positions are those of float32 in float64 and under autocast."""
    subject, size = examined.subject, examined.sizes[0]
    model, images = subject.at(size), subject.images(size)
    expected = subject.output(model, images)
    double = copy.deepcopy(model).double()
    where = f"image of {format_size(size)} px"
    try:
        apart = _same(expected, subject.output(double, images.double()))
    except REFUSALS as error:
        if "dtype" in str(error) or "same type" in str(error) or "Double" in str(error):
            yield Finding("dtype", subject.name, "the model runs in float64", one_line(error), where)
        apart = 0.0
    if apart > OUTPUT * 10:
        text = f"the output changes by {apart:.2g} of its standard deviation in float64"
        yield Finding("dtype", subject.name, "the same output in float64", text, where)

    def low(images: Tensor) -> object:
        with torch.autocast("cpu", torch.bfloat16):
            return subject.call(model)(images)

    try:
        found = survey(low, model, size, subject.channels)
    except REFUSALS as error:
        raise NotApplicableError(f"the model does not run under autocast: {one_line(error)}") from error
    for number, (one, other) in enumerate(zip(examined.surveys[size].attentions, found.attentions, strict=False)):
        turn, turn_low = examined.rotation(size, number), rotation(other)
        if turn is not None and turn.pairs and turn_low is not None:
            apart = _apart(turn.steps[0], _with_pairs(other, turn).steps[0])
            if apart > LOW_PRECISION:
                text = f"angles change by {apart:.2g} radians under autocast to bfloat16"
                yield Finding("dtype", one.where, "angles in float32", text, where)
        elif turn is not None and turn.pairs and turn_low is None:
            text = "the rotation disappears under autocast to bfloat16"
            yield Finding("dtype", one.where, "angles in float32", text, where)
        rows, rows_low = examined.bias(size, number), bias(other)
        if rows is not None and rows_low is not None and rows.content <= SAME:
            apart = float((rows.by_offset - rows_low.by_offset).abs().nan_to_num(0).max())
            rounding = 2**-7 * float(rows.by_offset.nan_to_num(0).abs().max())  # of bfloat16, twice
            if apart > max(LOW_PRECISION * rows.range, rounding):
                text = f"biases change by {100 * apart / rows.range:.0f}% of their range under autocast to bfloat16"
                yield Finding("dtype", one.where, "biases in float32", text, where)


def _with_pairs(found: Located, turn: Rotation) -> Rotation:
    """The rotation in low precision, in which norms are not exact, so its pairs are those of float32."""
    from vitrel.conformance import measure

    query = measure.maps(found, found.query.float())
    rotated = measure._pairs(query, turn.pairs)
    steps = torch.stack([measure._step(rotated, axis)[0] for axis in (2, 3)], 1)
    return turn._replace(steps=torch.stack((steps, steps)))


def device(examined: Examined) -> Iterator[Finding]:
    """Constants follow the model to another device; the meta device stands for it."""
    subject, size = examined.subject, examined.sizes[0]
    model = copy.deepcopy(subject.at(size))
    subject.output(model, subject.images(size))  # what it caches is on the first device
    try:
        subject.output(model.to("meta"), subject.images(size).to("meta"))
    except REFUSALS as error:
        if "device" in str(error) and "meta" in str(error) and "item" not in str(error):
            text = f"after a pass on the CPU and .to(another device): {one_line(error)}"
            yield Finding(
                "device", subject.name, "constants on the device of the model", text, f"image of {format_size(size)} px"
            )
            return
        raise NotApplicableError(f"the model does not run on the meta device: {one_line(error)}") from error


def compiled(examined: Examined) -> Iterator[Finding]:
    """torch.compile (its tracing, a graph per size, without code generation) gives the eager outputs at both sizes."""
    subject = examined.subject
    sizes = examined.sizes[:2] if examined.one_module else examined.sizes[:1]
    model = copy.deepcopy(subject.at(sizes[0]))
    torch._dynamo.reset()
    fast = torch.compile(copy.deepcopy(model), backend="eager", dynamic=False)  # sizes as symbols take minutes
    for size in sizes:
        images = subject.images(size)
        try:
            apart = _same(subject.output(model, images), subject.output(fast, images))
        except Exception as error:  # of the compiler, of many classes
            raise NotApplicableError(f"the model does not compile: {one_line(error)}") from error
        if apart > OUTPUT:
            text = f"the output differs by {apart:.2g} of its standard deviation"
            before = "" if size == sizes[0] else f" after one of {format_size(sizes[0])} px"
            yield Finding("compile", subject.name, "the eager output", text, f"image of {format_size(size)} px{before}")


def exported(examined: Examined) -> Iterator[Finding]:
    """torch.export gives the outputs of the model, for one size."""
    subject, size = examined.subject, examined.sizes[0]
    model, images = copy.deepcopy(subject.at(size)), subject.images(size)
    expected = subject.output(model, images)
    try:
        with torch.no_grad():
            program = torch.export.export(_Plain(subject, model), (images,), strict=False).module()
            apart = _same(expected, program(images))
    except Exception as error:  # of the exporter, of many classes
        raise NotApplicableError(f"the model does not export: {one_line(error)}") from error
    if apart > OUTPUT:
        text = f"the output differs by {apart:.2g} of its standard deviation"
        yield Finding("export", subject.name, "the output of the model", text, f"image of {format_size(size)} px")


class _Plain(nn.Module):
    """A model that returns one tensor and takes images only."""

    def __init__(self, subject: Subject, model: nn.Module):
        super().__init__()
        self.model, self._extra = model, subject._extra

    def forward(self, images: Tensor) -> Tensor:
        from vitrel.inspect.recorder import first_tensor

        return first_tensor(self.model(images, **self._extra))


def like(examined: Examined) -> Iterator[Finding]:
    """Position is that of the reference model: rotations, biases, windows, embeddings, one layer after another."""
    other = examined.reference
    if other is None:
        raise NotApplicableError("no reference model (like)")
    size = examined.sizes[0]
    ours, theirs = examined.surveys[size], other.surveys[size]
    if len(ours.attentions) != len(theirs.attentions):
        text = f"{len(ours.attentions)} attention layers were located, {len(theirs.attentions)} in the reference"
        yield Finding("like", examined.subject.name, "as many layers", text, f"image of {format_size(size)} px")
        return
    for number, (one, reference) in enumerate(zip(ours.attentions, theirs.attentions, strict=True)):
        for text in (_other_rotation(examined, number), _other_bias(examined, number), _other_window(one, reference)):
            if text:
                yield Finding("like", one.where, "as in the reference", text, _input(one, size))
    yield from _other_embedding(examined)


def _other_rotation(examined: Examined, number: int) -> str:
    size = examined.sizes[0]
    one, other = examined.rotation(size, number), examined.reference.rotation(size, number)
    if one is None or other is None:
        return "" if one is other else f"rotation: {'missing' if one is None else 'not in the reference'}"
    if one.pairs != other.pairs:
        return f"interleaving: pairs are {one.pairs or 'none'}, not {other.pairs}"
    if one.steps.shape != other.steps.shape:
        return "rotation: other numbers of heads or channels"
    if _apart(one.steps, other.steps) <= SAME * 2:
        apart = (one.origin - other.origin).sin().abs().nan_to_num(0).max()
        return f"origin: the first patch is rotated by {float(apart):.2g} radians more" if float(apart) > SAME * 2 else ""
    exchanged = one.steps.flip(2)
    half = one.steps.shape[-1] // 2
    if _apart(exchanged.roll(half, -1), other.steps) <= SAME * 2 or _apart(exchanged, other.steps) <= SAME * 2:
        return "axes: y and x are exchanged"
    if _apart(one.steps.roll(half, -1), other.steps) <= SAME * 2:
        return "axes: the bands of y and x are exchanged"
    if _apart(-one.steps, other.steps) <= SAME * 2:
        return "sign: angles have the opposite sign"
    ratio = one.steps[0].abs() / other.steps[0].abs()
    ratio = ratio[(other.steps[0].abs() > 1e-3) & (one.steps[0].abs() > 1e-3)]
    slow = ratio[-max(1, len(ratio) // 4) :]
    bases = [frequency_base(turn.steps[0, 0, axis]) for turn in (one, other) for axis in (0, 1)]
    if all(bases) and abs(bases[0] / bases[2] - 1) > 0.01:
        return f"base: {bases[0]:.4g}, not {bases[2]:.4g}"
    if len(slow) and float(slow.max() - slow.min()) < 0.5 * float(slow.mean()):
        return f"normalization: angles are about {float(slow.mean()):.2g} times those of the reference"
    return f"angles differ by up to {_apart(one.steps, other.steps):.2g} radians"


def _other_bias(examined: Examined, number: int) -> str:
    size = examined.sizes[0]
    one, other = examined.bias(size, number), examined.reference.bias(size, number)
    if one is None or other is None:
        return "" if one is other else f"bias: {'missing' if one is None else 'not in the reference'}"
    a, b = one.by_offset, other.by_offset
    if a.shape != b.shape:
        return f"bias: {tuple(a.shape)} heads and offsets, not {tuple(b.shape)}"
    if one.content > SAME or other.content > SAME:
        kinds = named_bias(one, examined.subject.model)[0], named_bias(other, examined.reference.subject.model)[0]
        return f"bias: {kinds[0]}, not {kinds[1]}" if kinds[0] != kinds[1] else ""

    def equal(x: Tensor, y: Tensor) -> bool:
        return x.shape == y.shape and float((x - y).abs().nan_to_num(0).max()) <= SAME * max(one.range, other.range)

    if equal(a, b):
        return ""
    if equal(a.flip(1, 2), b):
        return "sign: the bias is that of the opposite offset (key minus query)"
    if equal(a.mT, b):
        return "axes: y and x are exchanged"
    return "bias: other values (are the weights the same?)"


def _other_window(one: Located, other: Located) -> str:
    if one.tokens.shape != other.tokens.shape or not torch.equal(one.tokens, other.tokens):
        return "windows: they hold other tokens"
    return "" if torch.equal(one.visible, other.visible) else "mask: other pairs are hidden"


def _other_embedding(examined: Examined) -> Iterator[Finding]:
    other = examined.reference
    for size in examined.sizes:
        ours, theirs = (one.surveys[size].embeddings if size in one.surveys else [] for one in (examined, other))
        if len(ours) != len(theirs):
            text = f"embedding: {len(ours)}, not {len(theirs)}"
            yield Finding("like", examined.subject.name, "as in the reference", text, f"image of {format_size(size)} px")
            return
        for number, (one, reference) in enumerate(zip(ours, theirs, strict=True)):
            if difference(one.patches, reference.patches) > 0.01:
                rules = []
                for each in (examined, other):
                    native = each.surveys[each.native].embeddings if each.native in each.surveys else []
                    known = len(native) > number and each.native != size
                    rules.append(_rule(native[number], each.surveys[size].embeddings[number]) if known else "")
                text = f"resampling: {rules[0] or 'unknown'}, not {rules[1] or 'unknown'}" if rules[0] != rules[1] else (
                    f"embedding: it differs by {difference(one.patches, reference.patches):.2g} standard deviations"
                )  # fmt: skip
                yield Finding("like", one.where, "as in the reference", text, f"image of {format_size(size)} px")


CHECKS: dict[str, Callable[[Examined], Iterator[Finding]]] = {
    "order": order, "rotation": rotates, "sign": sign, "prefix": prefix, "axes": axes, "exchange": exchange,
    "resampling": resampling, "half_pixel": half_pixel, "window": window, "padding": padding, "mask": mask, "shift": shift,
    "cache": cache, "state": state, "batch": batch, "dtype": dtype, "device": device, "compile": compiled, "export": exported,
    "like": like,
}  # fmt: skip
OF_SURVEYS = frozenset(list(CHECKS)[:12])  # checks that need surveys only, so that smaller grids can be tried for them
