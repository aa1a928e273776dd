"""The check that compares a model with a reference, layer by layer: rotations, biases, windows, masks and embeddings."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from vitrel.common.sizes import format_size
from vitrel.conformance.checks import ANGLE, Examined, NotApplicableError
from vitrel.conformance.embedding import SAME_ROWS, difference
from vitrel.conformance.identify import frequency_base, named_bias
from vitrel.conformance.measure import SAME, Bias, Located, Rotation, apart
from vitrel.conformance.report import Finding
from vitrel.conformance.vectors import CHANNELS, given


def like(examined: Examined) -> Iterator[Finding]:
    """angle, bias, window, mask and embedding of each layer are those of the same layer of the reference.

    Yields findings for each layer at the first size, and each embedding at all; layers are paired in order, and if one
    model has more, that is the only finding. NotApplicableError without a reference.
    """
    other = examined.reference
    if other is None:
        raise NotApplicableError("no reference model (like)")
    size = examined.sizes[0]
    ours, theirs = (list(each.measured(size)) for each in (examined, other))
    where = f"image of {format_size(size)} px"
    if len(ours) != len(theirs):
        text = f"attention layers that were located: {len(ours)}, in the reference: {len(theirs)}"
        yield Finding("like", examined.subject.name, "as many layers", text, where)
        return
    for (_, one, turn, rows), (_, reference, other_turn, other_rows) in zip(ours, theirs, strict=True):
        models = examined.subject.model, other.subject.model
        about = f"{where}, {format_size(one.grid)} tokens"
        for text, expected, seen in (
            (_rotation(turn, other_turn), other_turn and other_turn.steps, turn and turn.steps),
            (_bias(rows, other_rows, models), other_rows and other_rows.by_offset, rows and rows.by_offset),
            (_window(one, reference), reference.visible, one.visible),
        ):
            yield Finding("like", one.where, "as in the reference", text, about, given(expected, seen))
    yield from _embeddings(examined, other)


def _rotation(one: Rotation | None, other: Rotation | None) -> str:
    """Return in words how a rotation (None: there is none) differs from that of the reference, `other`; "" if it does not."""
    if one is None or other is None:
        return "" if one is other else f"rotation: {'missing' if one is None else 'not in the reference'}"
    if one.pairs != other.pairs:
        return f"interleaving: pairs are {one.pairs or 'none'}, not {other.pairs}"
    if one.steps.shape != other.steps.shape:
        return "rotation: other numbers of heads or channels"
    if apart(one.steps, other.steps) <= ANGLE:
        origin = float((one.origin - other.origin).sin().abs().nan_to_num(0).max())
        return f"origin: the first patch is rotated by {origin:.2g} radians more" if origin > ANGLE else ""
    exchanged, half = one.steps.flip(2), one.steps.shape[-1] // 2
    for steps, text in (
        (exchanged.roll(half, -1), "axes: y and x are exchanged"),
        (exchanged, "axes: y and x are exchanged"),
        (one.steps.roll(half, -1), "axes: the bands of y and x are exchanged"),
        (-one.steps, "sign: angles have the opposite sign"),
    ):
        if apart(steps, other.steps) <= ANGLE:
            return text
    bases = [frequency_base(turn.steps[0, 0, axis]) for turn in (one, other) for axis in (0, 1)]
    if all(bases) and abs(bases[0] / bases[2] - 1) > 0.01:
        return f"base: {bases[0]:.4g}, not {bases[2]:.4g}"
    ratio = one.steps[0].abs() / other.steps[0].abs()
    ratio = ratio[(other.steps[0].abs() > 1e-3) & (one.steps[0].abs() > 1e-3)]
    slow = ratio[-max(1, len(ratio) // 4) :]
    if len(slow) and float(slow.max() - slow.min()) < 0.5 * float(slow.mean()):
        return f"normalization: angles are about {float(slow.mean()):.2g} times those of the reference"
    return f"angles differ by up to {apart(one.steps, other.steps):.2g} radians"


def _bias(one: Bias | None, other: Bias | None, models: tuple[nn.Module, nn.Module]) -> str:
    """Return in words how a bias differs from that of the reference, `other`; "" if it does not. None is no bias.

    If one depends on content, only their kinds are compared. `models` are the model and the reference.
    """
    if one is None or other is None:
        return "" if one is other else f"bias: {'missing' if one is None else 'not in the reference'}"
    a, b = one.by_offset, other.by_offset
    if a.shape != b.shape:
        return f"bias: {tuple(a.shape)} heads and offsets, not {tuple(b.shape)}"
    if one.content > SAME or other.content > SAME:
        kinds = [named_bias(rows, model)[0] for rows, model in zip((one, other), models, strict=True)]
        return f"bias: {kinds[0]}, not {kinds[1]}" if kinds[0] != kinds[1] else ""

    def equal(x: Tensor) -> bool:
        return x.shape == b.shape and float((x - b).abs().nan_to_num(0).max()) <= SAME * max(one.range, other.range)

    if equal(a):
        return ""
    if equal(a.flip(1, 2)):
        return "sign: the bias is that of the opposite offset (key minus query)"
    return "axes: y and x are exchanged" if equal(a.mT) else "bias: other values (are the weights the same?)"


def _window(one: Located, other: Located) -> str:
    """Return in words how the tokens of windows, or masks, differ from those of the reference, `other`; "" if they do not."""
    if one.tokens.shape != other.tokens.shape or not torch.equal(one.tokens, other.tokens):
        return "windows: they hold other tokens"
    return "" if torch.equal(one.visible, other.visible) else "mask: other pairs are hidden"


def _embeddings(examined: Examined, other: Examined) -> Iterator[Finding]:
    """Yield a finding for each embedding at each size, against `other`, or one of the first size with more or fewer of them."""
    for size in examined.sizes:
        ours, theirs = (len(each.surveys[size].embeddings) for each in (examined, other))
        if ours != theirs:
            where = f"image of {format_size(size)} px"
            yield Finding("like", examined.subject.name, "as in the reference", f"embedding: {ours}, not {theirs}", where)
            return
    both = (sorted(each.embeddings, key=lambda one: examined.sizes.index(one.size)) for each in (examined, other))
    for one, reference in zip(*both, strict=True):
        worst = difference(one.found.patches, reference.found.patches)
        text = ""
        if worst > SAME_ROWS:
            rules = [(each.how.rule if each.how else "") or "unknown" for each in (one, reference)]
            differ = rules[0] != rules[1]
            text = f"embedding: it differs by {worst:.2g} standard deviations"
            text = f"resampling: {rules[0]}, not {rules[1]}" if differ else text
        numbers = given(*(each.found.patches[..., :CHANNELS] for each in (reference, one)))
        where = f"image of {format_size(one.size)} px"
        yield Finding("like", one.found.where, "as in the reference", text, where, numbers)
