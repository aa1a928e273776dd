"""The checks that run a model: sizes one after another, batches, dtypes, devices, torch.compile and torch.export."""

import copy
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from vitrel.common.sizes import Size, format_size
from vitrel.conformance.checks import Examined, NotApplicableError
from vitrel.conformance.measure import SAME, apart, in_pairs
from vitrel.conformance.report import Finding
from vitrel.conformance.subject import REFUSALS, Subject, one_line
from vitrel.conformance.survey import Survey, survey
from vitrel.conformance.vectors import given, outputs
from vitrel.inspect.any_model import on_images
from vitrel.inspect.recorder import first_tensor

LOW_PRECISION = 0.05  # radians, or share of the biases: queries in bfloat16 leave 0.01 after the mean over tokens
OUTPUT = 1e-3  # share of the standard deviation of outputs: float32 in another order leaves 1e-5


def _same(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two outputs, divided by the standard deviation of `a`; inf if their shapes differ."""
    if a.shape != b.shape:
        return math.inf
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    return float((a - b).abs().max() / a.std(correction=0).clamp(min=1e-9))


def _small(subject: Subject) -> list[Size]:
    """Return [size] in pixels of an image of 2 x 2 patches, smaller than many windows, or [] if the model does not take it."""
    size = 2 * subject.unit(), 2 * subject.unit()
    return [] if subject.refusal(size) else [size]


def cache(examined: Examined) -> Iterator[Finding]:
    """model(b) after model(a) = model(b) of a model that ran nothing before.

    a and b are images of the first two sizes, in both orders, then of 2 x 2 patches and the first. A model fails that stores
    tables or masks of one size and uses them at another. Yields a finding for each pair up to the first failure;
    NotApplicableError if it is built for one size, or the two are not each other with height and width exchanged.
    """
    if not examined.one_module:
        raise NotApplicableError("the model is built for one size; another one is another module")
    subject, (a, b) = examined.subject, examined.exchanged
    for first, second in ((a, b), (b, a), *((size, a) for size in _small(subject))):
        used, fresh = copy.deepcopy(subject.model), copy.deepcopy(subject.model)
        images = subject.images(second)
        subject.output(used, subject.images(first))
        expected, seen, text = subject.output(fresh, images), None, ""
        try:
            seen = subject.output(used, images)
            if (change := _same(expected, seen)) > OUTPUT:
                text = f"the output changes by {change:.2g} of its standard deviation after an image of {format_size(first)} px"
        except REFUSALS as error:
            text = f"the model fails after an image of {format_size(first)} px: {one_line(error)}"
        sizes = f"an image of {format_size(first)} px, then one of {format_size(second)} px"
        numbers = outputs(expected, seen, images)
        yield Finding("cache", subject.name, "the output of a model that ran nothing before", text, sizes, numbers)
        if text:
            return


def state(examined: Examined) -> Iterator[Finding]:
    """model(native) after other sizes = model(native) before, and no weight has changed.

    native is an image of the size that the model was built for. Parameters that `set_input_size` resamples are restored before
    the last run, since after two resamplings they are others. Yields one finding; NotApplicableError if that size was not
    examined, or the model takes no other size and has no `set_input_size`.
    """
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
                    yield Finding("state", name, "the same shape again", text, run, given(parameters[name], value))
                    return
            model.load_state_dict(parameters, strict=False)  # resampled there and back, they are others
        after = subject.output(model, images)
    except REFUSALS as error:
        text = f"it fails: {one_line(error)}"
        yield Finding("state", subject.name, "sizes that the model takes, one after another", text, run)
        return
    changed = [n for n, v in model.state_dict().items() if n in weights and not torch.equal(v, weights[n])]
    change, text = _same(before, after), ""
    if change > OUTPUT or changed:
        text = f"{changed[0]} was changed" if changed else f"the output changes by {change:.2g} of its standard deviation"
    where, numbers = changed[0] if changed else subject.name, outputs(before, after, images)
    yield Finding("state", where, "the same output again", text, run, numbers)


def batch(examined: Examined) -> Iterator[Finding]:
    """model((a, b)) = (model(a), model(b)).

    a and b are images of the first size. Yields one finding; a model fails if the images of a batch depend on each other.
    """
    subject, size = examined.subject, examined.sizes[0]
    model, images = subject.at(size), subject.images(size, 2, seed=1)
    alone = torch.cat([subject.output(model, image[None]) for image in images])
    together = subject.output(model, images)
    change, text = _same(alone, together), ""
    if change > OUTPUT:
        text = f"outputs differ by {change:.2g} of their standard deviation" if change < math.inf else "shapes differ"
    where, numbers = f"a batch of 2 images of {format_size(size)} px", outputs(alone, together, images, seed=1)
    yield Finding("batch", subject.name, "each image as it is alone", text, where, numbers)


def dtype(examined: Examined) -> Iterator[Finding]:
    """model.double()(image) = model(image), and angles and biases under autocast to bfloat16 are those of float32.

    Yields a finding for float64 (none if it fails there for another reason than the dtype), then for each wrong angle or bias;
    NotApplicableError, after that for float64, if the model does not run under autocast.
    """
    subject, size = examined.subject, examined.sizes[0]
    model, images = subject.at(size), subject.images(size)
    expected, where = subject.output(model, images), f"image of {format_size(size)} px"
    try:
        exact = subject.output(copy.deepcopy(model).double(), images.double())
        change = _same(expected, exact)
        text = f"the output changes by {change:.2g} of its standard deviation in float64" if change > OUTPUT * 10 else ""
        yield Finding("dtype", subject.name, "the same output in float64", text, where, outputs(expected, exact, images))
    except REFUSALS as error:
        if any(word in str(error) for word in ("dtype", "same type", "Double")):
            yield Finding("dtype", subject.name, "the model runs in float64", one_line(error), where)

    def low(images: Tensor) -> object:
        with torch.autocast("cpu", torch.bfloat16):
            return on_images(model)(images)

    try:
        found = survey(model, size, low)
    except REFUSALS as error:
        raise NotApplicableError(f"the model does not run under autocast: {one_line(error)}") from error
    yield from _low_precision(examined, found, where)


def _low_precision(examined: Examined, low: Survey, where: str) -> Iterator[Finding]:
    """Yield findings where angles or biases in `low`, a survey under autocast, differ from float32; `where` is their input."""
    for (_, one, turn, rows), other in zip(examined.measured(low.size), low.attentions, strict=False):
        if turn is not None and turn.pairs:
            lost, steps = other.rotation is None, in_pairs(other, turn.pairs)
            change = math.inf if lost else apart(turn.steps[0], steps)  # norms are not exact
            if change > LOW_PRECISION:
                text = "the rotation disappears" if lost else f"angles change by {change:.2g} radians"
                text, numbers = f"{text} under autocast to bfloat16", given(turn.steps[0], None if lost else steps)
                yield Finding("dtype", one.where, "angles in float32", text, where, numbers)
        if rows is not None and other.bias is not None and rows.content <= SAME:
            change = float((rows.by_offset - other.bias.by_offset).abs().nan_to_num(0).max())
            rounding = 2**-7 * float(rows.by_offset.nan_to_num(0).abs().max())  # of bfloat16, twice
            if change > max(LOW_PRECISION * rows.range, rounding):
                text = f"biases change by {100 * change / rows.range:.0f}% of their range under autocast to bfloat16"
                numbers = given(rows.by_offset, other.bias.by_offset)
                yield Finding("dtype", one.where, "biases in float32", text, where, numbers)


def device(examined: Examined) -> Iterator[Finding]:
    """model.to(device)(image.to(device)) runs after a pass on the CPU; the meta device stands for another one.

    Yields a finding only if it fails. Raises NotApplicableError if the model fails there for another reason than the device.
    """
    subject, size = examined.subject, examined.sizes[0]
    model = subject.at(size)
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
    """torch.compile(model)(image) = model(image), with one graph for each size and without code generation.

    Two sizes are checked if one module takes the first two, else the first. What torch compiled before is reset.
    NotApplicableError if the model does not compile.
    """
    subject = examined.subject
    sizes = examined.sizes[:2] if examined.one_module else examined.sizes[:1]
    model = subject.at(sizes[0])
    torch._dynamo.reset()
    fast = torch.compile(copy.deepcopy(model), backend="eager", dynamic=False)  # sizes as symbols take minutes
    for size in sizes:
        images = subject.images(size)
        try:
            expected, seen = subject.output(model, images), subject.output(fast, images)
        except Exception as error:  # of the compiler, of many classes
            raise NotApplicableError(f"the model does not compile: {one_line(error)}") from error
        change = _same(expected, seen)
        text = f"the output differs by {change:.2g} of its standard deviation" if change > OUTPUT else ""
        where = f"image of {format_size(size)} px" + ("" if size == sizes[0] else f" after one of {format_size(sizes[0])} px")
        yield Finding("compile", subject.name, "the eager output", text, where, outputs(expected, seen, images))


def exported(examined: Examined) -> Iterator[Finding]:
    """torch.export.export(model).module()(image) = model(image), for one size.

    It is the first size. Yields one finding; NotApplicableError if the model does not export.
    """
    subject, size = examined.subject, examined.sizes[0]
    model, images = subject.at(size), subject.images(size)
    expected = subject.output(model, images)
    try:
        with torch.no_grad():
            program = torch.export.export(_Plain(model), (images,), strict=False).module()
            seen = program(images)
    except Exception as error:  # of the exporter, of many classes
        raise NotApplicableError(f"the model does not export: {one_line(error)}") from error
    change = _same(expected, seen)
    text, where = "", f"image of {format_size(size)} px"
    if change > OUTPUT:
        text = f"the output differs by {change:.2g} of its standard deviation"
    yield Finding("export", subject.name, "the output of the model", text, where, outputs(expected, seen, images))


class _Plain(nn.Module):
    """A module that takes images only and returns the first tensor that `model` returns for them."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return first_tensor(on_images(self.model)(images))


OF_RUNS = {
    "cache": cache, "state": state, "batch": batch, "dtype": dtype, "device": device, "compile": compiled, "export": exported,
}  # fmt: skip
