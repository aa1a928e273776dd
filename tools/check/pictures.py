"""Draw docs/images/check/*.png: what position makes of one token in a right model and in each fault of the tests.

python -m tools.check.pictures

Left the right model, right the fault, both at 6 x 8 patches (windows: as many as their image has): how near other tokens are to
the marked one by position alone. In attention, the weights that equal contents give; for an embedding, products of its rows.
"""

import re
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "tests")]

from conformance import faults  # noqa: E402

from vitrel.conformance.measure import as_pairs  # noqa: E402
from vitrel.conformance.survey import Survey, survey  # noqa: E402

OUT = ROOT / "docs" / "images" / "check"
SIZE, AT = (48, 64), (1, 2)  # pixels; row and column of the token
WITHOUT = ("device", "batch", "padding", "state")  # checks whose faults show in no single image, or outside of it

ALIKE = (  # faults whose picture would be that of another one, or the right one turned
    "embedding of the transposed grid", "embedding transposed", "embedding padded with zeros beyond its grid",
    "windows: of the transposed grid",
)  # fmt: skip


def main() -> None:
    """Draw a picture for every fault that shows in an image, and print their names."""
    OUT.mkdir(parents=True, exist_ok=True)
    for fault in faults.FAULTS:
        if fault.check not in WITHOUT and fault.name not in ALIKE:
            figure(fault).savefig(OUT / f"{name(fault.name)}.png", dpi=80)
            print(name(fault.name))


def name(text: str) -> str:
    """Return the name of a picture, made from the name of its fault."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


def figure(fault: faults.Fault) -> Figure:
    """Return the figure of the right model and the fault side by side."""
    windows = fault.name.startswith("windows")
    right = faults.swin() if windows else fault.right() if fault.right else _right(fault.build)
    size = (28, 112) if fault.check == "shift" else (56, 112) if windows else SIZE
    if windows:
        right = faults.Fixed(faults.swin(size, always_partition=fault.check != "shift"), size)
    size_of_fault = (48, 80) if "padded" in fault.name else size
    drawn = Figure(figsize=(7.2, 2.4), layout="constrained")
    for axes, title, model, pixels in zip(
        drawn.subplots(1, 2), ("right", fault.name), (right, fault.build()), (size, size_of_fault), strict=True
    ):
        found = examined(model, pixels, fault if title != "right" else None)
        values = nearness(found, fault)
        axes.imshow(values, cmap="magma")
        if fault.check != "prefix":
            y, x = _at(values.shape, fault)
            axes.plot(x, y, "+", color="white", markersize=12, markeredgewidth=2)
        axes.set_title(title, fontsize=9)
        axes.set_xticks([])
        axes.set_yticks([])
    return drawn


def _right(build: type) -> nn.Module:
    return next(kind for kind in build.__mro__[1:] if kind in (faults.Rope, faults.Table, faults.Sincos, faults.Oblong,
                                                               faults.Tiny))()  # fmt: skip


def _at(shape: tuple[int, ...], fault: faults.Fault) -> tuple[int, int]:
    if fault.check == "mask":
        return shape[0] - 1, shape[1] - 1
    return (0, 1) if fault.name.startswith("windows") else AT


def examined(model: nn.Module, size: tuple[int, int], fault: faults.Fault | None) -> Survey:
    """Return the survey of a model under the condition that shows the fault."""
    model = model.eval()
    if fault is not None and fault.check == "cache":
        model(torch.zeros(1, 3, *size[::-1]))
    with ExitStack() as stack:
        if fault is not None and fault.check == "export":
            stack.enter_context(patch("torch.compiler.is_exporting", return_value=True))
        if fault is not None and fault.check == "compile":
            stack.enter_context(patch("torch.compiler.is_dynamo_compiling", return_value=True))
        if fault is not None and fault.check == "dtype":
            stack.enter_context(torch.autocast("cpu", torch.bfloat16))
        return survey(model, size)


def nearness(found: Survey, fault: faults.Fault) -> Tensor:
    """Return how near every token is to the marked one, [h, w]: products of embeddings, or weights by position alone.

    Weights are means over heads. The class token is marked where the fault is one of prefix tokens; in windows the map is of
    visible tokens.
    """
    if found.embeddings:
        rows = torch.nn.functional.normalize(found.embeddings[0].patches.float(), dim=-1)
        return rows @ rows[AT]
    windows = fault.name.startswith("windows")
    one = found.attentions[-1 if windows and fault.check != "mask" else 0]
    (h, w), at = one.grid, _at(one.grid, fault)
    index = -1 if fault.check == "prefix" else at[0] * w + at[1]
    which, slot = (int(n) for n in (one.tokens == index).nonzero()[0])
    if windows:
        weights = one.visible[which, slot].float()
    else:
        turns = [as_pairs(part, "half") for part in (one.query[:, 0], one.key[:, 0])]  # complex [B, H, N, P]
        plain = [turn[:, :, 1:2] for turn in turns]  # the first patch, whose angle is 0
        query, key = (turn * at_zero.conj() / at_zero.abs().square() for turn, at_zero in zip(turns, plain, strict=True))
        logits = (query[:, :, slot, None] * key.conj()).real.sum(-1) + one.logits[:, 0, :, slot]
        weights = logits.softmax(-1).mean((0, 1)).float()
    real = one.tokens[which] >= 0
    out = torch.zeros(h * w)
    out[one.tokens[which][real]] = weights[real]
    return out.view(h, w)


if __name__ == "__main__":
    main()
