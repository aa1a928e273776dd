"""Families that keep timm's trunk in graphs for any size: torch.compile, torch.export and ONNX of one variant per mechanism.

All variants take a quarter of an hour: `python -m tools.docs.any_size --graphs` compares each with the record, GRAPHS.
"""

import pytest

from tools.docs.any_size import GRAPHS, graphs, recorded, written
from vitrel.export import TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_dpwee_patch16_reg1_gap_256", "pit_xs_224"])  # embeddings of tokens and of a map
def test_compiled_for_eight_sizes_in_two_graphs(name):
    assert graphs(name) <= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["convit_tiny", "samvit_base_patch16"])  # a function of the offset, tables in windows
def test_an_exported_program_serves_any_batch_height_and_width(name, tmp_path):
    assert written(name, "exported", tmp_path) <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_dpwee_patch16_reg1_gap_256", "hiera_tiny_224"])  # by way of torch.export
def test_an_onnx_graph_serves_any_batch_height_and_width(name, tmp_path):
    pytest.importorskip("onnxruntime")
    assert written(name, "onnx", tmp_path) <= TOLERANCE


def test_results_that_differ_from_the_record_are_told():
    assert recorded("cait_xxs24_224", (2, "yes", "yes")) and recorded("maxvit_tiny_pm_256", (7, "yes", "no"))  # not tried
    assert not recorded("cait_xxs24_224", (3, "yes", "yes")) and not recorded("maxvit_tiny_pm_256", (1, "no", ""))
    assert recorded("twins_pcpvt_small", (1, "no", "no")) and "twins_pcpvt_small" not in GRAPHS
