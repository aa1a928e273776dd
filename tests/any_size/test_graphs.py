"""Families that keep timm's trunk in graphs for any size: torch.compile, torch.export and ONNX of one variant per mechanism.

All variants take a quarter of an hour: `python -m tools.docs.any_size --graphs` compares each with the record, GRAPHS.
"""

import pytest

from tools.docs.any_size import GRAPHS, graphs, recorded, written
from vitrel.export import TOLERANCE


def variants(fast, *slow):
    marked = [pytest.param(name, marks=pytest.mark.slow) for name in slow]
    return pytest.mark.parametrize("name", [*fast, *marked])


# Resampled embeddings of tokens and of a map, a Fourier encoding, timm's own resampling.
@variants(["vit_dpwee_patch16_reg1_gap_256"], "pit_xs_224", "xcit_nano_12_p16_224", "naflexvit_base_patch16_gap")
def test_compiled_for_eight_sizes_in_two_graphs(name):
    assert graphs(name) <= 2


# Embeddings of tokens and of a map, tables per axis, a function of the offset, units of windows, tables over distances in
# windows, convolutions.
@variants(
    ["cait_xxs24_224", "pit_xs_224"], "samvit_base_patch16", "convit_tiny", "hiera_tiny_224", "tiny_vit_5m_224", "pvt_v2_b0"
)
def test_an_exported_program_serves_any_batch_height_and_width(name, tmp_path):
    assert written(name, "exported", tmp_path) <= TOLERANCE


@variants(["vit_dpwee_patch16_reg1_gap_256"], "pit_xs_224", "hiera_tiny_224")
def test_an_onnx_graph_serves_any_batch_height_and_width(name, tmp_path):
    pytest.importorskip("onnxruntime")
    assert written(name, "onnx", tmp_path) <= TOLERANCE


def test_results_that_differ_from_the_record_are_told():
    assert recorded("cait_xxs24_224", (2, "yes", "yes")) and recorded("samvit_base_patch16", (7, "yes", "no"))  # not tried
    assert not recorded("cait_xxs24_224", (3, "yes", "yes")) and not recorded("samvit_base_patch16", (1, "no", ""))
    assert recorded("efficientvit_m0", (1, "no", "no")) and "efficientvit_m0" not in GRAPHS
