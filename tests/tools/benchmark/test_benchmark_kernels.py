"""Registers of the Triton kernels: none spills at a few usual shapes, and the page is what the results give."""

import pandas as pd
import pytest
import torch

pytest.importorskip("triton")

from tools.benchmark import kernels
from tools.benchmark.kernels import ARCHITECTURES, PAGE, ROOT, ROWS, SHAPES, Shape, compiling, launch
from vitrel.grid import Grid

FEW = Shape((7, 7), dtype=torch.float32, rotary=True), Shape((16, 16), rotary=True), Shape(grid=Grid(14, 14, 1), width=64)


@pytest.mark.slow(seconds=15)
@pytest.mark.parametrize("architecture", [80, 90])
def test_nothing_spills(architecture):
    """On sm_90 at all three, on sm_80 at the one whose tile depends on the architecture; the page has all four."""
    shapes = FEW if architecture == 90 else FEW[1:2]
    with compiling(architecture) as found:
        for shape in shapes:
            launch(shape)
    assert len(found) == (8 if shapes == FEW else 2)
    assert all(0 < kernel.registers <= 255 and kernel.stack == 0 for kernel in found), [kernel[:5] for kernel in found]


@pytest.mark.slow(seconds=15)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_larger_windows_compile_in_half_precision(architecture):
    """Also the backward pass, of which an earlier form did not compile for sm_90 with Triton 3.6."""
    with compiling(architecture) as found:
        for side in (9, 12, 16):
            launch(Shape((side, side)))
    assert len(found) == 6
    assert all(0 < kernel.registers <= 255 and kernel.stack <= 64 for kernel in found), [kernel[:5] for kernel in found]


def test_the_page_is_what_the_results_give():
    rows = pd.read_csv(ROOT / ROWS)
    assert set(FEW) <= set(SHAPES)
    assert {(row.shape_, row.architecture) for row in rows.rename(columns={"shape": "shape_"}).itertuples()} == {
        (str(shape), architecture) for shape in SHAPES for architecture in ARCHITECTURES
    }
    assert kernels.table(rows) in (ROOT / PAGE).read_text("utf-8")
