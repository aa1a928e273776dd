"""Families that keep timm's trunk in graphs for any size: torch.compile, torch.export, ONNX, one small variant each."""

import pytest

from tools.docs.any_size import GRAPHS, graphs, written
from vitrel.export import TOLERANCE


def variants(column, fast):
    """The variants for which GRAPHS has a "yes" or number in a column; all but `fast` are slow."""
    names = [name for name, row in GRAPHS.items() if row[column] in (1, 2, "yes")]
    return pytest.mark.parametrize(
        "name", [name if name in fast else pytest.param(name, marks=pytest.mark.slow) for name in names]
    )


@variants(0, {"vit_dpwee_patch16_reg1_gap_256"})
def test_compiled_for_eight_sizes_in_two_graphs(name):
    assert graphs(name) <= 2


@variants(1, {"cait_xxs24_224", "pit_xs_224"})
def test_an_exported_program_serves_any_batch_height_and_width(name, tmp_path):
    assert written(name, "exported", tmp_path) <= TOLERANCE


@variants(2, {"vit_dpwee_patch16_reg1_gap_256"})
def test_an_onnx_graph_serves_any_batch_height_and_width(name, tmp_path):
    pytest.importorskip("onnxruntime")
    assert written(name, "onnx", tmp_path) <= TOLERANCE
