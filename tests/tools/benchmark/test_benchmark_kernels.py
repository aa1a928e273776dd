"""The Triton kernels compile on every architecture, spill little, and the page is what the results give."""

import pandas as pd
import pytest
import torch

pytest.importorskip("triton")

from tools.benchmark import kernels
from tools.benchmark.kernels import ARCHITECTURES, MOST_SPILLED, PAGE, ROOT, ROWS, SHAPES, Shape, compiled
from vitrel.grid import Grid

HALF = [Shape((n, n)) for n in (7, 16)]  # of one tile, and of several
OTHERS = Shape((16, 16), rotary=True), Shape((7, 7), dtype=torch.float32, rotary=True), Shape(grid=Grid(14, 14, 1), width=64)


@pytest.mark.slow
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles_and_does_not_spill(architecture):
    """With the installed Triton; the results are those of the oldest and newest (tools.benchmark.kernels --triton)."""
    shapes = (*HALF, *OTHERS) if architecture == 90 else HALF[1:]
    found = [kernel for shape in shapes for kernel in compiled(shape, architecture)]
    assert len(found) == 3 * len(shapes)
    assert all(0 < kernel.registers <= 255 and kernel.stack <= MOST_SPILLED for kernel in found), [k[:5] for k in found]


def test_the_page_is_what_the_results_give():
    rows = pd.read_csv(ROOT / ROWS)
    assert "3.6.0" in set(rows["triton"])  # of the oldest torch that the package allows
    for _, of_version in rows.groupby("triton"):
        assert {*zip(of_version["shape"], of_version["architecture"], strict=True)} == {
            (str(shape), architecture) for shape in SHAPES for architecture in ARCHITECTURES
        }
    half = rows[~rows["shape"].str.endswith("float32")]
    assert (half["stack"] <= MOST_SPILLED).all()
    assert kernels.page(rows) == (ROOT / PAGE).read_text("utf-8")
