"""RelativeAttention as a drop-in layer, and patch merging, in eager mode, compiled and exported."""

import pytest
import torch
import torch.fx.experimental._config as fx_config
from timm.models.swin_transformer import PatchMerging as TimmPatchMerging
from torch._dynamo.testing import CompileCounter

import vitrel
from vitrel import POSITIONS, Grid
from vitrel.layers import PatchMerging

KEYS = [key for key, encoding in POSITIONS.items() if encoding.site == "attention"]
GRIDS = [(4, 5), (7, 3), (2, 2), (9, 11), (3, 8), (12, 12), (5, 5), (6, 10)]  # some below the window, some not divisible


class Layer(torch.nn.Module):
    """[B, h, w, C] in and out, so that the grid comes from the input's shape."""

    def __init__(self, **keywords):
        super().__init__()
        self.layer = vitrel.RelativeAttention(16, 2, **keywords).eval()
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.5)

    def forward(self, x):
        return self.layer(x.flatten(1, 2), (x.shape[1], x.shape[2])).unflatten(1, x.shape[1:3])


CONFIGS = [dict(position=key, grid=(4, 5)) for key in KEYS]
CONFIGS += [dict(position=key, window=(4, 3), shift=(2, 1)) for key in KEYS]
CONFIGS += [dict(position="rope_mixed+table", grid=(4, 5), position_args=dict(resize=r)) for r in ("clip", "bicubic")]


@pytest.mark.parametrize("keywords", CONFIGS, ids=str)
def test_compiled_for_every_grid(keywords):
    layer, counter = Layer(**keywords), CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for h, w in GRIDS:
        x = torch.randn(2, h, w, 16)
        torch.testing.assert_close(compiled(x), layer(x), atol=1e-5, rtol=1e-5)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("keywords", CONFIGS, ids=str)
def test_exported_once_for_every_grid(keywords):
    layer, dynamic = Layer(**keywords), torch.export.Dim.DYNAMIC
    with fx_config.patch(backed_size_oblivious=True):
        shapes = ({0: dynamic, 1: dynamic, 2: dynamic},)
        program = torch.export.export(layer, (torch.randn(2, 8, 10, 16),), dynamic_shapes=shapes).module()
    for h, w in GRIDS:
        x = torch.randn(3, h, w, 16)
        torch.testing.assert_close(program(x), layer(x), atol=1e-5, rtol=1e-5)


def test_prefix_tokens_and_masks():
    layer = vitrel.RelativeAttention(16, 2, position="table", grid=(4, 5, 1)).eval()
    x = torch.randn(2, 1 + 6 * 3, 16)
    assert layer(x, (6, 3, 1)).shape == x.shape
    mask = torch.ones(19, 19, dtype=torch.bool).tril()
    changed = x.clone()
    changed[:, -1] += 1
    causal = layer(x, Grid(6, 3, 1), mask), layer(changed, Grid(6, 3, 1), mask)
    assert torch.equal(causal[0][:, :-1], causal[1][:, :-1])


def test_errors():
    with pytest.raises(ValueError, match="'sincos' adds to the tokens, not in attention"):
        vitrel.RelativeAttention(16, 2, position="sincos+table")
    with pytest.raises(ValueError, match="dim 16 is not divisible by num_heads 3"):
        vitrel.RelativeAttention(16, 3)
    with pytest.raises(ValueError, match="window height must be at least 1 token, not 0"):
        vitrel.RelativeAttention(16, 2, window=0)
    with pytest.raises(ValueError, match=r"shift \(2, 2\) needs a window"):
        vitrel.RelativeAttention(16, 2, shift=2)
    with pytest.raises(ValueError, match="unknown backend 'flash9'"):
        vitrel.RelativeAttention(16, 2, backend="flash9")(torch.zeros(1, 15, 16), (3, 5))
    with pytest.raises(ValueError, match=r"x must be \[B, N, C\], got shape \(15, 16\)"):
        vitrel.RelativeAttention(16, 2)(torch.zeros(15, 16), (3, 5))
    layer = vitrel.RelativeAttention(16, 2, window=4)
    with pytest.raises(ValueError, match="the grid has 1 prefix tokens: leave them out"):
        layer(torch.zeros(1, 16, 16), (3, 5, 1))
    with pytest.raises(ValueError, match="x has 12 tokens, the 3x5 grid with 0 prefix has 15"):
        layer(torch.zeros(1, 12, 16), (3, 5))
    with pytest.raises(ValueError, match="makes its own mask"):
        layer(torch.zeros(1, 12, 16), (3, 4), torch.ones(12, 12, dtype=torch.bool))


@pytest.mark.parametrize(("h", "w"), [(4, 6), (5, 6), (6, 3), (1, 1), (7, 5)])
def test_patch_merging_equals_timm(h, w):
    ours, theirs = PatchMerging(8, 16), TimmPatchMerging(8, 16)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, h, w, 8)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(torch.compile(ours, backend="eager", fullgraph=True)(x), theirs(x), atol=1e-6, rtol=1e-6)
