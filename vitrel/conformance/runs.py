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
from vitrel.inspect.any_model import on_images
from vitrel.inspect.recorder import first_tensor

LOW_PRECISION = 0.05  # radians, or share of the biases: queries in bfloat16 leave 0.01 after the mean over tokens
OUTPUT = 1e-3  # share of the standard deviation of outputs: float32 in another order leaves 1e-5


def _same(a: Tensor, b: Tensor) -> float:
    """Largest difference of two outputs as a share of the standard deviation of the first one's values."""
    if a.shape != b.shape:
        return math.inf
    a, b = a.detach().double().cpu(), b.detach().double().cpu()
    return float((a - b).abs().max() / a.std(correction=0).clamp(min=1e-9))


def _small(subject: Subject) -> list[Size]:
    """An image of 2 x 2 patches, which a window may exceed, if the model takes it."""
    size = 2 * subject.unit(), 2 * subject.unit()
    return [] if subject.refusal(size) else [size]


def cache(examined: Examined) -> Iterator[Finding]:
    """model(b) after model(a) = model(b) of a model that ran nothing before."""
    if not examined.one_module:
        raise NotApplicableError("the model is built for one size; another one is another module")
    subject, (a, b) = examined.subject, examined.exchanged
    for first, second in ((a, b), (b, a), *((size, a) for size in _small(subject))):
        used, fresh = copy.deepcopy(subject.model), copy.deepcopy(subject.model)
        images = subject.images(second)
        subject.output(used, subject.images(first))
        expected = subject.output(fresh, images)
        try:
            change = _same(expected, subject.output(used, images))
            text = f"the output changes by {change:.2g} of its standard deviation after an image of {format_size(first)} px"
        except REFUSALS as error:
            change, text = math.inf, f"the model fails after an image of {format_size(first)} px: {one_line(error)}"
        if change > OUTPUT:
            sizes = f"an image of {format_size(first)} px, then one of {format_size(second)} px"
            yield Finding("cache", subject.name, "the output of a model that ran nothing before", text, sizes)
            return


def state(examined: Examined) -> Iterator[Finding]:
    """model(native) after other sizes = model(native) before, and no weight has changed.

    With `set_input_size` parameters that it resamples are restored first.
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
                    yield Finding("state", name, "the same shape again", text, run)
                    return
            model.load_state_dict(parameters, strict=False)  # resampled there and back, they are others
        change = _same(before, subject.output(model, images))
    except REFUSALS as error:
        text = f"it fails: {one_line(error)}"
        yield Finding("state", subject.name, "sizes that the model takes, one after another", text, run)
        return
    changed = [n for n, v in model.state_dict().items() if n in weights and not torch.equal(v, weights[n])]
    if change > OUTPUT or changed:
        text = f"{changed[0]} was changed" if changed else f"the output changes by {change:.2g} of its standard deviation"
        yield Finding("state", changed[0] if changed else subject.name, "the same output again", text, run)


def batch(examined: Examined) -> Iterator[Finding]:
    """model((a, b)) = (model(a), model(b))."""
    subject, size = examined.subject, examined.sizes[0]
    model, images = subject.at(size), subject.images(size, 2, seed=1)
    alone = torch.cat([subject.output(model, image[None]) for image in images])
    together = subject.output(model, images)
    change = _same(alone, together)
    if change > OUTPUT:
        text = f"outputs differ by {change:.2g} of their standard deviation" if change < math.inf else "shapes differ"
        where = f"a batch of 2 images of {format_size(size)} px"
        yield Finding("batch", subject.name, "each image as it is alone", text, where)


def dtype(examined: Examined) -> Iterator[Finding]:
    """model.double()(image) = model(image), and angles and biases under autocast to bfloat16 are those of float32."""
    subject, size = examined.subject, examined.sizes[0]
    model, images = subject.at(size), subject.images(size)
    expected, where = subject.output(model, images), f"image of {format_size(size)} px"
    try:
        change = _same(expected, subject.output(copy.deepcopy(model).double(), images.double()))
    except REFUSALS as error:
        change = 0.0
        if any(word in str(error) for word in ("dtype", "same type", "Double")):
            yield Finding("dtype", subject.name, "the model runs in float64", one_line(error), where)
    if change > OUTPUT * 10:
        text = f"the output changes by {change:.2g} of its standard deviation in float64"
        yield Finding("dtype", subject.name, "the same output in float64", text, where)

    def low(images: Tensor) -> object:
        with torch.autocast("cpu", torch.bfloat16):
            return on_images(model)(images)

    try:
        found = survey(model, size, low)
    except REFUSALS as error:
        raise NotApplicableError(f"the model does not run under autocast: {one_line(error)}") from error
    yield from _low_precision(examined, found, where)


def _low_precision(examined: Examined, low: Survey, where: str) -> Iterator[Finding]:
    for (_, one, turn, rows), other in zip(examined.measured(low.size), low.attentions, strict=False):
        if turn is not None and turn.pairs:
            lost = other.rotation is None
            change = math.inf if lost else apart(turn.steps[0], in_pairs(other, turn.pairs))  # norms are not exact
            if change > LOW_PRECISION:
                what = "the rotation disappears" if lost else f"angles change by {change:.2g} radians"
                yield Finding("dtype", one.where, "angles in float32", f"{what} under autocast to bfloat16", where)
        if rows is not None and other.bias is not None and rows.content <= SAME:
            change = float((rows.by_offset - other.bias.by_offset).abs().nan_to_num(0).max())
            rounding = 2**-7 * float(rows.by_offset.nan_to_num(0).abs().max())  # of bfloat16, twice
            if change > max(LOW_PRECISION * rows.range, rounding):
                text = f"biases change by {100 * change / rows.range:.0f}% of their range under autocast to bfloat16"
                yield Finding("dtype", one.where, "biases in float32", text, where)


def device(examined: Examined) -> Iterator[Finding]:
    """model.to(device)(image.to(device)) runs after a pass on the CPU; the meta device stands for another one."""
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

    Both sizes are checked if one module takes both, else the first.

    Raises:
        NotApplicableError: the model does not compile.
    """
    subject = examined.subject
    sizes = examined.sizes[:2] if examined.one_module else examined.sizes[:1]
    model = subject.at(sizes[0])
    torch._dynamo.reset()
    fast = torch.compile(copy.deepcopy(model), backend="eager", dynamic=False)  # sizes as symbols take minutes
    for size in sizes:
        images = subject.images(size)
        try:
            change = _same(subject.output(model, images), subject.output(fast, images))
        except Exception as error:  # of the compiler, of many classes
            raise NotApplicableError(f"the model does not compile: {one_line(error)}") from error
        if change > OUTPUT:
            text = f"the output differs by {change:.2g} of its standard deviation"
            before = "" if size == sizes[0] else f" after one of {format_size(sizes[0])} px"
            yield Finding("compile", subject.name, "the eager output", text, f"image of {format_size(size)} px{before}")


def exported(examined: Examined) -> Iterator[Finding]:
    """torch.export.export(model).module()(image) = model(image), for one size."""
    subject, size = examined.subject, examined.sizes[0]
    model, images = subject.at(size), subject.images(size)
    expected = subject.output(model, images)
    try:
        with torch.no_grad():
            program = torch.export.export(_Plain(model), (images,), strict=False).module()
            change = _same(expected, program(images))
    except Exception as error:  # of the exporter, of many classes
        raise NotApplicableError(f"the model does not export: {one_line(error)}") from error
    if change > OUTPUT:
        text = f"the output differs by {change:.2g} of its standard deviation"
        yield Finding("export", subject.name, "the output of the model", text, f"image of {format_size(size)} px")


class _Plain(nn.Module):
    """A model that returns one tensor and takes images only."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        return first_tensor(on_images(self.model)(images))


OF_RUNS = {
    "cache": cache, "state": state, "batch": batch, "dtype": dtype, "device": device, "compile": compiled, "export": exported,
}  # fmt: skip
