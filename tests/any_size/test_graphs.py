"""Families that keep timm's trunk in graphs for any size: torch.compile and ONNX of few variants.

All variants take half an hour: `python -m tools.docs.any_size --graphs`.
"""

import pytest
import torch
from timm.layers.pool2d_same import MaxPool2dSame as TimmMaxPool2dSame
from torch._dynamo.testing import CompileCounter

from tools.docs.any_size import graphs, written
from vitrel.any_size.parts import in_padded_windows, in_windows, masked_attention
from vitrel.any_size.vit import MaxPool2dSame
from vitrel.export import TOLERANCE


@pytest.mark.slow(seconds=5)
def test_compiled_for_eight_sizes_in_two_graphs():
    """Tables in padded windows, and of all tokens."""
    assert graphs("samvit_base_patch16") <= 2


@pytest.mark.slow(seconds=3)
def test_an_onnx_graph_serves_any_batch_height_and_width(tmp_path):
    """An embedding of tokens, by way of torch.export."""
    pytest.importorskip("onnxruntime")
    assert written("aimv2_large_patch14_224", "onnx", tmp_path) <= TOLERANCE


class Windows(torch.nn.Module):
    """Two heads of attention in windows of 4 x 3 with a bias of their pairs, and in padded windows."""

    def forward(self, x, bias):
        def attend(tokens, mask):
            heads = tokens.unflatten(2, (2, -1)).transpose(1, 2)
            return masked_attention(heads, heads, heads, bias, mask).transpose(1, 2).flatten(2)

        return in_windows(x, (4, 3), attend, (2, 1)) + in_padded_windows(
            x, (4, 3), lambda window: window.sum(1, keepdim=True) - window
        )


@pytest.mark.slow
@torch.no_grad()
def test_one_window_and_several_are_one_graph():
    torch._dynamo.reset()
    model, counter, bias = Windows(), CompileCounter(), torch.randn(2, 12, 12)
    compiled = torch.compile(model, backend=counter, dynamic=True, fullgraph=True)
    for h, w in ((9, 7), (3, 2), (4, 7), (13, 3)):
        x = torch.randn(5, h, w, 8)
        torch.testing.assert_close(compiled(x, bias), model(x, bias))
    assert counter.frame_count == 1


@pytest.mark.slow
def test_a_hybrids_padding_is_saved_for_any_size(tmp_path):
    dynamic = torch.export.Dim.DYNAMIC
    program = torch.export.export(MaxPool2dSame(3, 2), (torch.randn(1, 2, 16, 24),), dynamic_shapes=({2: dynamic, 3: dynamic},))
    torch.export.save(program, tmp_path / "pool.pt2")
    run = torch.export.load(tmp_path / "pool.pt2").module()
    for size in ((16, 24), (9, 14), (33, 7)):
        x = torch.randn(1, 2, *size)
        assert torch.equal(run(x), TimmMaxPool2dSame(3, 2)(x))
