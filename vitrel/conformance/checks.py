"""The checks that compare surveys of a model at several sizes with a definition; the first lines of each give the definition.

A check yields a finding for everything that it compares, or raises why it is not applicable.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from vitrel.common.sizes import Size, format_size
from vitrel.conformance import vectors
from vitrel.conformance.embedding import Derived, derived, difference, single_axis
from vitrel.conformance.measure import (
    SAME,
    Bias,
    Located,
    Rotation,
    aligned,
    apart,
    bias,
    by_columns,
    rotation,
    transposed_order,
    window_slots,
)
from vitrel.conformance.report import Finding
from vitrel.conformance.subject import Subject
from vitrel.conformance.survey import Survey, survey
from vitrel.inspect.any_model import shared_offsets, trained_size

ANGLE = 2 * SAME  # radians between two measured angles


class NotApplicableError(Exception):
    """Raised by a check that finds nothing to compare in a model, or cannot compare it; the message gives the reason."""


@dataclass
class Examined:
    """What all checks read: a model, and at each image size the `Survey` of its position. Sizes are (h, w) in pixels."""

    subject: Subject
    sizes: tuple[Size, ...]  # first two of which one is the other with height and width exchanged
    surveys: dict[Size, Survey]  # of the sizes, the native one first
    native: Size | None  # None: the native size is refused or too large to examine
    reference: "Examined | None" = None  # the model given as `like`

    @functools.cached_property
    def embeddings(self) -> list[Derived]:
        """The embeddings at every size, as many as at the size with the fewest, each with the rule by which it is resampled."""
        return derived(self.surveys, trained_size(self.subject.model), self.subject.model)

    @functools.cached_property
    def one_module(self) -> bool:
        """Whether the model takes the first two of `sizes` without being changed for them; False if there is one size only."""
        return len(self.sizes) > 1 and all(self.subject.takes_as_it_is(size) for size in self.sizes[:2])

    @property
    def exchanged(self) -> tuple[Size, Size]:
        """The first two of `sizes`; NotApplicableError unless one is the other with height and width exchanged."""
        if len(self.sizes) < 2 or self.sizes[0][::-1] != self.sizes[1]:
            raise NotApplicableError("no two sizes with height and width exchanged")
        return self.sizes[0], self.sizes[1]

    def measured(self, *sizes: Size) -> Iterator[tuple[Size, Located, Rotation | None, Bias | None]]:
        """Yield (size, attention, rotation or None, bias or None) of each located attention; no `sizes`: all, native first."""
        for size in sizes or self.surveys:
            for found in self.surveys[size].attentions:
                yield size, found, found.rotation, found.bias

    def not_applicable(self, reason: str) -> NotApplicableError:
        """Return the error of a check with nothing to compare: with `reason`, or, if no attention was located, with why."""
        surveys = self.surveys.values()
        if not any(one.attentions for one in surveys):
            reasons = [why for one in surveys for why in one.unlocated.values()]
            seen = any(one.softmaxes for one in surveys)
            reason = reasons[0] if reasons else "no token was located" if seen else "no attention was seen"
        return NotApplicableError(reason)


def _input(found: Located, size: Size) -> str:
    return f"image of {format_size(size)} px, {format_size(found.grid)} tokens"


def order(examined: Examined) -> Iterator[Finding]:
    """Token i lies at (i // w, i % w): one rotation step per axis, one bias per offset, each sine or cosine along one axis.

    angle[y + 1, x] - angle[y, x] and angle[y, x + 1] - angle[y, x] are constants; bias[i, j] = f(y_i - y_j, x_i - x_j).
    Yields findings for each rotation and bias (`found` is "" where right), and for wrong embeddings and tokens that come column
    by column; NotApplicableError, at the end, if the model has no position.
    """
    for size, found, turn, rows in examined.measured():
        if by_columns(found):
            numbers = vectors.given(torch.arange(len(found.tokens[0])), found.tokens[0], grid=list(found.grid))
            yield Finding(
                "order", found.where, "tokens row by row", "tokens come column by column", _input(found, size), numbers
            )
        if turn is not None and turn.pairs:
            text = ""
            if (worst := float(turn.spread.max())) > ANGLE:
                right = [name for name, how in transposed_order(found).items() if _constant(rotation(found, how))]
                text = f"it differs by up to {worst:.2g} radians over the grid"
                text += f"; it is constant with {right[0]}" if right else ""
            expected, numbers = "one rotation angle between neighbors per axis", functools.partial(vectors.angles, found, turn)
            yield Finding("order", found.where, expected, text, _input(found, size), numbers)
        if rows is not None:
            text, numbers = "", functools.partial(vectors.biases, found, rows)
            if rows.spread > SAME:
                others = {name: bias(found, how) for name, how in transposed_order(found).items()}
                right = [name for name, one in others.items() if one is not None and one.spread <= SAME]
                text = f"pairs of one offset differ by {100 * rows.spread:.0f}% of the range of biases"
                text += f"; they agree with {right[0]}" if right else ""
            yield Finding("order", found.where, "one bias per offset (query minus key)", text, _input(found, size), numbers)
            if not text and rows.content <= SAME and (wrap := _wraps(rows.by_offset)):
                text = f"offsets (dy, dx) and (dy + 1, dx - {wrap}) share a bias, so rows of the table overlap"
                numbers = vectors.given(None, rows.by_offset)
                yield Finding("order", found.where, "a bias for each offset", text, _input(found, size), numbers)
    yield from _order_of_waves(examined)
    position = any(rows or (turn and turn.pairs) for *_, turn, rows in examined.measured())
    if not position and not any(one.embeddings for one in examined.surveys.values()):
        raise examined.not_applicable("the model has no position")


def _constant(turn: Rotation | None) -> bool:
    return turn is not None and float(turn.spread.max()) <= ANGLE


def _wraps(table: Tensor) -> int:
    """Return the least m > 1, w - 1 to 2w - 2, for which a bias table [H, 2h-1, 2w-1] depends on m dy + dx alone, else 0."""
    width = table.shape[2]
    if not (_depends(table, 1) and _depends(table, 2)):
        return 0
    for m in range(max(2, width // 2), width):
        a, b = table[:, :-1, m:], table[:, 1:, : width - m]
        seen = ~(a.isnan() | b.isnan())
        if int(seen.sum()) > 2 * len(table) and torch.equal(a[seen], b[seen]) and float(a[seen].std()) > 0:
            return m
    return 0


def _order_of_waves(examined: Examined) -> Iterator[Finding]:
    """Yield a finding for each embedding with channels along both axes, if any other, or itself transposed, has none such."""
    found = [(size, one) for size, each in examined.surveys.items() for one in each.embeddings]
    pure = [single_axis(one) for _, one in found]
    for (size, one), good in zip(found, pure, strict=True):
        exchanged = one._replace(patches=one.patches.flatten(0, 1).unflatten(0, one.grid[::-1]).transpose(0, 1))
        if not good and (any(pure) or single_axis(exchanged)):
            text = "channels vary along both axes"
            text += "; they have one axis with height and width exchanged" if single_axis(exchanged) else ""
            where = f"image of {format_size(size)} px, {format_size(one.grid)} tokens"
            numbers = vectors.given(None, one.patches[..., : vectors.CHANNELS])
            yield Finding("order", one.where, "each channel varies along rows or along columns", text, where, numbers)


def rotates(examined: Examined) -> Iterator[Finding]:
    """Rotations preserve the norm of pairs of channels: |(a, b)| is the same at all positions.

    Yields a finding for each attention whose queries or keys vary with position; NotApplicableError if there is none.
    """
    turns = [(size, found, turn) for size, found, turn, _ in examined.measured() if turn is not None]
    for size, found, turn in turns:
        text = f"the norm changes by {100 * turn.norms:.0f}% with the position, in the best pairing of channels"
        expected, numbers = "queries and keys are rotated, norms stay", functools.partial(vectors.norms, found, turn)
        yield Finding("rotation", found.where, expected, "" if turn.pairs else text, _input(found, size), numbers)
    if not turns:
        raise examined.not_applicable("queries and keys are not rotated")


def sign(examined: Examined) -> Iterator[Finding]:
    """Keys are rotated as queries are, so a product depends on the difference: step of queries = step of keys, mod 2 pi.

    A step is the angle between neighbors. Yields a finding for each rotated attention; NotApplicableError if there is none.
    """
    turns = [(size, found, turn) for size, found, turn, _ in examined.measured() if turn is not None and turn.pairs]
    for size, found, turn in turns:
        query, key = turn.steps
        text, expected = "", "queries and keys have the same angles"
        if (worst := apart(query, key)) > ANGLE:
            opposite = apart(query, -key) <= ANGLE
            text = "keys are rotated in the opposite direction" if opposite else f"angles differ by {worst:.2g} radians"
        yield Finding("sign", found.where, expected, text, _input(found, size), vectors.given(query, key, pairs=turn.pairs))
    if not turns:
        raise examined.not_applicable("queries and keys are not rotated; the sign of a table needs a reference (like)")


def prefix(examined: Examined) -> Iterator[Finding]:
    """Prefix tokens p are not rotated; bias[p, j] and bias[j, p] do not depend on the patch j, nor embedding[p] on the grid.

    Prefix tokens are those that are no patches, as class and registers. Yields a finding for each rotation and bias of
    attention with them, and each embedding of them; NotApplicableError if no attention has any, nor an embedding at two sizes.
    """
    seen = False
    for size, found, turn, rows in examined.measured():
        seen |= bool(found.prefix)
        if found.prefix and turn is not None and turn.pairs:
            text = f"a prefix token is changed by {100 * turn.prefix:.0f}% of its norm" if turn.prefix > ANGLE else ""
            numbers = functools.partial(vectors.rotated_prefix, found)
            yield Finding("prefix", found.where, "prefix tokens are not rotated", text, _input(found, size), numbers)
        if found.prefix and rows is not None:
            wrong, expected = rows.prefix > SAME, "one bias between a prefix token and all patches"
            text = f"their bias differs between patches by {100 * rows.prefix:.0f}% of the range" if wrong else ""
            numbers = functools.partial(vectors.prefix_biases, found)
            yield Finding("prefix", found.where, expected, text, _input(found, size), numbers)
    firsts: dict[str, Tensor] = {}  # {module: rows of its prefix tokens at the first size}
    for size, one in ((size, e) for size, each in examined.surveys.items() for e in each.embeddings if len(e.prefix)):
        seen |= one.where in firsts
        first = firsts.setdefault(one.where, one.prefix)
        text = "it changes with the grid" if difference(one.prefix, first) > SAME else ""
        expected = "the embedding of prefix tokens is the same at all sizes"
        yield Finding("prefix", one.where, expected, text, f"image of {format_size(size)} px", vectors.given(first, one.prefix))
    if not seen:
        raise examined.not_applicable("the model has no prefix tokens")


def axes(examined: Examined) -> Iterator[Finding]:
    """Position depends on y and on x, and on more than y w + x, the number of the token.

    Yields findings for each attention with position at the first size, unless its grid is a line; none at all if an embedding
    there varies along both axes; NotApplicableError if there is no such attention.
    """
    size, seen = examined.sizes[0], False
    if any(all(_varies(one.patches)) for one in examined.surveys[size].embeddings):
        return
    for _, found, turn, rows in examined.measured(size):
        if min(found.grid) < 2 or (turn is None and rows is None):
            continue
        seen = True
        has = [turn is not None and (not turn.pairs or bool((turn.steps[0][:, a].abs() > 1e-3).any())) for a in (0, 1)]
        has = [a or (rows is not None and _depends(rows.by_offset, axis)) for axis, a in enumerate(has, 1)]
        numbers = functools.partial(vectors.position, turn, rows)
        text = f"position depends on {'rows' if has[0] else 'columns'} only" if any(has) and not all(has) else ""
        yield Finding("axes", found.where, "position depends on rows and columns", text, _input(found, size), numbers)
        if turn is not None and turn.pairs and all(has):
            down, right = turn.steps[0][:, 0], turn.steps[0][:, 1]
            if float((down - turn.grid[1] * right).sin().abs().max()) < SAME < float(right.abs().max()):
                text = "the angle is that of the token's number, row by row"
                yield Finding("axes", found.where, "angles of rows and columns", text, _input(found, size), numbers)
    if not seen:
        raise examined.not_applicable("the model has no position in attention")


def _depends(table: Tensor, axis: int) -> bool:
    """Return whether a bias table [H, 2h-1, 2w-1] varies along axis 1 (dy) or 2 (dx) in any head; NaN is left out."""
    ends = table.nan_to_num(-math.inf).amax(axis) - table.nan_to_num(math.inf).amin(axis)
    return bool((ends[ends.isfinite()] > 1e-6).any())


def _varies(patches: Tensor) -> tuple[bool, bool]:
    """Return whether any channel of an embedding [h, w, C] varies from row to row, and whether one from column to column."""
    scale = float(patches.abs().max()) * SAME
    rows, columns = (patches.shape[axis] > 1 and float(patches.std(axis, correction=0).max()) > scale for axis in (0, 1))
    return rows, columns


def exchange(examined: Examined) -> Iterator[Finding]:
    """Step down at h x w = step right at w x h, for fixed frequencies; bias_hw[dy, dx] = bias_wh[dy, dx] in equal windows.

    A step is the angle of a rotation between neighbors. h x w and w x h are the grids at the first two sizes; frequencies are
    fixed if each pair of channels turns along one axis only. Yields a finding for each such rotation, and each bias in windows
    that depends on offsets alone; NotApplicableError if there is none.
    """
    a, b = examined.exchanged
    seen, where = False, f"images of {format_size(a)} and {format_size(b)} px"
    for (_, one, *first), (_, other, *second) in zip(examined.measured(a), examined.measured(b), strict=False):
        (turn, rows), (other_turn, other_rows) = first, second
        if turn and turn.pairs and other_turn and other_turn.pairs and one.grid == other.grid[::-1]:
            steps = [t.steps[0].abs() for t in (turn, other_turn)]  # [H, 2, P]
            if not bool(((steps[0] > 1e-3).sum(1) > 1).any()):  # one axis per pair, so frequencies are fixed
                seen = True
                here, there = (s.sort(-1)[0] for s in (steps[0], steps[1].flip(1)))
                worst, expected = float((here - there).abs().max()), "steps down at h x w are the steps right at w x h"
                text = f"they differ by up to {worst:.2g} radians" if worst > ANGLE else ""
                yield Finding("exchange", one.where, expected, text, where, vectors.given(here, there))
        slots = [window_slots(found) for found in (one, other)]
        fixed = rows and other_rows and max(rows.content, other_rows.content) <= SAME
        if fixed and min(one.windows, other.windows) > 1 and all(slots) and slots[0][0] == slots[1][0]:
            seen = True
            tables = shared_offsets(rows.by_offset[..., None], other_rows.by_offset[..., None])
            worst = float((tables[0] - tables[1]).abs().nan_to_num(0).max()) / rows.range
            text = f"the bias at one offset differs by {100 * worst:.0f}% of the range" if worst > SAME else ""
            expected, numbers = "a window of one size has the same bias on both grids", vectors.given(tables[0], tables[1])
            yield Finding("exchange", one.where, expected, text, where, numbers)
    if not seen:
        raise examined.not_applicable("no fixed frequencies, and no window of the same size on both grids")


def _learned(examined: Examined) -> list[Derived]:
    """Return the learned embeddings (no sines and cosines) at all sizes that can be compared with a master.

    The master is the parameter, or else the native embedding, which is not compared with itself. NotApplicableError if there
    is none to compare.
    """
    waves = {one.found.where for one in examined.embeddings if single_axis(one.found)}
    found = [one for one in examined.embeddings if one.found.where not in waves]
    found = [one for one in found if one.how is None or one.master is not one.found]
    if not found:
        raise NotApplicableError("the model adds no learned embedding that changes with the size")
    if all(one.how is None for one in found):
        raise NotApplicableError("the native size was not examined")
    return [one for one in found if one.how is not None]


def _grids(one: Derived) -> str:
    return f"image of {format_size(one.size)} px, {format_size(one.found.grid)} patches from {format_size(one.master.grid)}"


def resampling(examined: Examined) -> Iterator[Finding]:
    """embedding(h, w) = resample(master, (h, w)): every learned embedding is its parameter resampled to h rows and w columns.

    If no parameter is recognized, the master is the native embedding. Right are here also moved centers (see `half_pixel`) and
    a crop, unless that of a larger image is filled up with zeros. Yields a finding for each embedding and size;
    NotApplicableError if none can be compared, or (at the end) if no rule is known and no single parameter holds the embedding.
    """
    learned = _learned(examined)
    if any(one.how.rule == "cropped" for one in learned):
        learned += _beyond(examined)
    for one in learned:
        text, expected = "", "the native embedding resampled to h x w"
        if one.how.kind not in ("right", "centers") and (one.how.kind or one.held):
            text = one.how.rule or f"no rule that is known: it is {one.how.nearest:.2g} standard deviations from the nearest"
        yield Finding("resampling", one.found.where, expected, text, _grids(one), _resampled(one, text))
    if not all(one.how.kind or one.held for one in learned):
        raise NotApplicableError("no single parameter holds the embedding, so its rule is not known")


def _resampled(one: Derived, text: str) -> vectors.Later | None:
    """Return a function that makes the `Vectors` of a finding; None if `text` is "" and the rule of `one` is no right one."""
    return functools.partial(vectors.embedding, one) if text or one.how.kind == "right" else None


def _beyond(examined: Examined) -> list[Derived]:
    """Run the model at 2 patches more in height and 3 in width than natively; return each `Derived` with a rule, or []."""
    subject, (h, w) = examined.subject, trained_size(examined.subject.model)
    size = h + 2 * subject.unit(), w + 3 * subject.unit()
    if subject.refusal(size):
        return []
    surveys = {**examined.surveys, size: survey(subject.at(size), size)}
    return [one for one in derived(surveys, (h, w), subject.model) if one.size == size and one.how is not None]


def half_pixel(examined: Examined) -> Iterator[Finding]:
    """Patch centers stay at (i + 1/2) / n of the image: no align_corners, no scale factor other than n / n0.

    n and n0 are the patches along an axis, here and in the master. Where the native embedding is resampled with other centers
    too, the weights were trained so, and it is no error. Yields a finding for each learned embedding and size;
    NotApplicableError if none can be compared, or (at the end) if a rule is unknown.
    """
    learned = _learned(examined)
    trained = {one.found.where for one in learned if one.size == examined.native and one.how.kind == "centers"}
    for one in learned:
        text = one.how.rule if one.how.kind == "centers" and one.found.where not in trained else ""
        yield Finding("half_pixel", one.found.where, "patch centers at (i + 1/2) / n", text, _grids(one), _resampled(one, text))
    if not all(one.how.kind for one in learned):
        raise NotApplicableError("the embedding follows no rule of F.interpolate that the check knows")


def _windowed(examined: Examined) -> Iterator[tuple[Size, Located, Size, Tensor]]:
    """Yield (size, attention, window (h, w), (row, column) of its slots [N, 2]) for attention in windows, or with padding.

    Left out is attention with prefix tokens, with slots in no known order, or in windows of no neighbors (strided ones);
    NotApplicableError if none is left.
    """
    seen, strided = False, False
    for size, found, *_ in examined.measured():
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
        raise examined.not_applicable("windows hold tokens at distances" if strided else "attention is global, without padding")


def window(examined: Examined) -> Iterator[Finding]:
    """No token sees the opposite border: visible[i, j] only if place_i - place_j = slot_i - slot_j.

    place is the (row, column) of a token in the image, slot that in its window. Yields a finding for each size and attention in
    windows of neighbors or with padding, without prefix tokens; NotApplicableError if there is none.
    """
    for size, found, shape, slots in _windowed(examined):
        real = found.tokens >= 0
        across = found.visible & real[:, :, None] & real[:, None] & ~aligned(found, slots)
        text = ""
        if bool(across.any()):
            text = f"tokens {_pair(found, across)} see each other; "
            text += f"{int(across.any(2).sum())} of {int(real.sum())} tokens see such a token"
        expected, numbers = f"windows of {format_size(shape)} hold neighbors", _visible(found, slots, found.visible & ~across)
        yield Finding("window", found.where, expected, text, _input(found, size), numbers)


def _visible(found: Located, slots: Tensor, expected: Tensor) -> vectors.Later:
    """Return a function that makes the `Vectors` of which slots see each other: seen, and `expected` [W, N, N]."""
    return functools.partial(vectors.window, found, slots, expected)


def _pair(found: Located, pairs: Tensor) -> str:
    """Return the two (row, column) in the image of the first true pair of slots in `pairs` [W, N, N], as text."""
    which, a, b = (int(n) for n in pairs.nonzero()[0])
    return " and ".join(str(tuple(found.places[which, slot].tolist())) for slot in (a, b))


def padding(examined: Examined) -> Iterator[Finding]:
    """No token i of the image attends to padding j: not visible[i, j].

    Yields a finding for each size and attention in windows of neighbors or with padding, without prefix tokens (in windows
    without padding it passes); NotApplicableError if there is none.
    """
    for size, found, shape, slots in _windowed(examined):
        real = found.tokens >= 0
        wrong = found.visible & real[:, :, None] & ~real[:, None]
        sees = wrong.any(2)
        text = f"{int(sees.sum())} of {int(real.sum())} tokens attend to padding" if bool(sees.any()) else ""
        expected, numbers = f"windows of {format_size(shape)}, padding masked", _visible(found, slots, found.visible & ~wrong)
        yield Finding("padding", found.where, expected, text, _input(found, size), numbers)


def mask(examined: Examined) -> Iterator[Finding]:
    """visible[i, j] wherever place_i - place_j = slot_i - slot_j, and a mask where a window has pairs of other offsets.

    So tokens of a window that are neighbors in the image see each other; of others, as in shifted windows, one hidden pair is
    enough here (`window` tests all). place is the (row, column) of a token in the image, slot that in its window. Findings and
    NotApplicableError are for the same attention as in `window`: in windows of neighbors or with padding, no prefix tokens.
    """
    for size, found, shape, slots in _windowed(examined):
        real, neighbors = found.tokens >= 0, aligned(found, slots)
        expected, pairs, text = f"windows of {format_size(shape)}, whole inside", real[:, :, None] & real[:, None], ""
        if bool((hidden := neighbors & ~found.visible).any()):
            text = f"a mask hides tokens {_pair(found, hidden)} from each other, which are in one window"
        elif bool((pairs & ~neighbors).any()) and bool(found.visible[pairs].all()):
            text = f"there is no mask, and a window holds tokens {_pair(found, pairs & ~neighbors)}"
            expected = "a mask in shifted windows"
        right = (found.visible | neighbors) & ~(pairs & ~neighbors)
        yield Finding("mask", found.where, expected, text, _input(found, size), _visible(found, slots, right))


def shift(examined: Examined) -> Iterator[Finding]:
    """Where h <= window along an axis, tokens at its two ends see each other: visible[first, last].

    A window that holds a whole axis must not be shifted along it. Yields a finding for each such axis of at least 2 tokens, on
    grids of up to 4,096, of attention in windows of neighbors or with padding, without prefix tokens; NotApplicableError if
    there is none.
    """
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
            ends = sees[first, last]
            text = "" if bool(ends.all()) else f"the first and last of {found.grid[axis]} {name} do not see each other"
            expected = f"windows of {format_size(shape)} are not shifted along {name}"
            numbers = vectors.given(torch.ones_like(ends), ends, first=first, last=last, grid=list(found.grid))
            yield Finding("shift", found.where, expected, text, _input(found, size), numbers)
    if not seen:
        raise NotApplicableError("no window holds an axis of the grid")


OF_SURVEYS = {
    "order": order, "rotation": rotates, "sign": sign, "prefix": prefix, "axes": axes, "exchange": exchange,
    "resampling": resampling, "half_pixel": half_pixel, "window": window, "padding": padding, "mask": mask, "shift": shift,
}  # fmt: skip
