"""RelativeAttention as a drop-in layer, patches and patch merging, eager and compiled. The export to ONNX is of models."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from timm.layers import PatchEmbed as TimmPatchEmbed
from timm.models.swin_transformer import PatchMerging as TimmPatchMerging
from timm.models.swin_transformer_v2 import PatchMerging as TimmPatchMergingV2
from torch._dynamo.testing import CompileCounter

import vitrel
from helpers import each
from helpers.variants import IN_ATTENTION
from vitrel import Grid
from vitrel.layers import Attention, PatchEmbed, PatchMerging
from vitrel.ops import attention
from vitrel.position import Terms

GRIDS = [(7, 3), (4, 5), (2, 2), (12, 10)]  # some below the window, some not divisible; the second is that of training


class Layer(torch.nn.Module):
    """[B, h, w, C] in, so that the grid comes from the input's shape, [B, N, C] out; with a prefix token where the grid has."""

    def __init__(self, **keywords):
        super().__init__()
        self.layer = vitrel.RelativeAttention(16, 2, **keywords).eval()
        self.token = torch.nn.Parameter(torch.zeros(1, Grid(*keywords.get("grid", (1, 1))).prefix, 16))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.5)

    def forward(self, x):
        tokens = torch.cat((self.token.expand(x.shape[0], -1, -1), x.flatten(1, 2)), 1)
        return self.layer(tokens, (x.shape[1], x.shape[2], self.token.shape[1]))


TOGETHER = ["table+factorized+fire+rope_axial", "clipped+t5+levit", "cpb+alibi+decomposed+rope_normalized"]
TOGETHER += ["log_decay+transformer_xl+deberta+pape+xpos", "rope_mixed+shaw+lookhere"]  # several in one; it rotates once
TOGETHER += [key for key in IN_ATTENTION if key != "none" and all(key not in position.split("+") for position in TOGETHER)]
CONFIGS = [dict(position=position, grid=(4, 5, 1)) for position in TOGETHER]
CONFIGS[1] |= dict(position_args=dict(policy="clip", temperature="log_n"))
CONFIGS[4] = dict(position=TOGETHER[4], cosine=True, window=(4, 3), shift=(2, 1))


@pytest.mark.slow
@torch.no_grad()
@each("options", [{}, {"flatten": False}, {"flatten": False, "output_fmt": "NHWC"}], ids=str)
def test_patches_are_those_of_timm_that_pads(options):
    """Whole patches and others, and in one graph for all sizes."""
    theirs = TimmPatchEmbed(8, (4, 3), 3, 6, torch.nn.LayerNorm, strict_img_size=False, dynamic_img_pad=True, **options)
    if options == {"flatten": False}:
        theirs.norm = torch.nn.Identity()
    ours = PatchEmbed(8, (4, 3), 3, 6, torch.nn.LayerNorm, **options)
    ours.norm = copy.deepcopy(theirs.norm)
    ours.load_state_dict(theirs.state_dict())
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(ours, backend=counter, dynamic=True, fullgraph=True)
    for size in ((8, 9), (13, 17), (5, 7), (16, 24)):
        image = torch.randn(2, 3, *size)
        assert torch.equal(ours(image), theirs(image)) and torch.equal(compiled(image), theirs(image))
    assert counter.frame_count == 1


@pytest.mark.slow(seconds=6)
@pytest.mark.parametrize("keywords", CONFIGS, ids=str)
def test_compiled_for_every_grid(keywords):
    layer, counter = Layer(**keywords), CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(layer, backend=counter, fullgraph=True)
    for h, w in GRIDS:
        x = torch.randn(2, h, w, 16)
        torch.testing.assert_close(compiled(x), layer(x), atol=1e-5, rtol=1e-5)
    assert counter.frame_count <= 2


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
    with pytest.raises(ValueError, match="'sincos' adds to tokens, not in attention"):
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
    with pytest.raises(ValueError, match="the grid has prefix=1: leave them out"):
        layer(torch.zeros(1, 16, 16), (3, 5, 1))
    with pytest.raises(ValueError, match="x has 12 tokens, but the 3x5 grid with prefix=0 has 15"):
        layer(torch.zeros(1, 12, 16), (3, 5))
    with pytest.raises(ValueError, match="computes its own mask"):
        layer(torch.zeros(1, 12, 16), (3, 4), torch.ones(12, 12, dtype=torch.bool))


def cosine_layer(**keywords):
    """In float64, parameters far from their initialization, one head of two beyond the largest scale."""
    layer = vitrel.RelativeAttention(16, 2, cosine=True, dtype=torch.float64, **keywords).eval()
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.5)
        layer.attn.logit_scale[1] = math.log(300.0)
    return layer


@each("qkv_bias", [True, False])
def test_cosine_attention_is_its_formula(qkv_bias):
    """Swin V2's eq. 2 as a double loop: cos(q, k) * min(exp(logit_scale), 100) + bias, no bias on keys."""
    layer, (h, w) = cosine_layer(grid=(3, 4), qkv_bias=qkv_bias), (3, 4)
    attn, table = layer.attn, layer.position.relative_position_bias_table
    x = torch.randn(1, h * w, 16, dtype=torch.float64)
    q, k, v = (x[0] @ weight.mT for weight in attn.qkv.weight.chunk(3))
    q, v = (q + attn.q_bias, v + attn.v_bias) if qkv_bias else (q, v)
    out = torch.zeros(h * w, 16, dtype=torch.float64)
    for head, scale in enumerate((attn.logit_scale[0].exp().item(), 100.0)):
        of = slice(8 * head, 8 * head + 8)
        for i in range(h * w):
            logits = torch.stack([F.cosine_similarity(q[i, of], k[j, of], 0) * scale for j in range(h * w)])
            for j in range(h * w):
                dy, dx = i // w - j // w, i % w - j % w
                logits[j] += table[(dy + h - 1) * (2 * w - 1) + dx + w - 1, head]
            out[i, of] = logits.softmax(0) @ v[:, of]
    torch.testing.assert_close(layer(x, (h, w))[0], attn.proj(out), atol=1e-12, rtol=0)


@each("key", IN_ATTENTION)
@each("where", [dict(grid=(3, 4, 1)), dict(window=(2, 3), shift=(1, 1))], ids=str)
def test_cosine_with_every_position(key, where):
    """Directions alone matter: q and k of other lengths change nothing, and the logit scale has a gradient below its clamp."""
    layer = cosine_layer(position=key, qkv_bias=False, **where)
    grid = Grid(5, 3, 1 if "grid" in where else 0)
    x = torch.randn(2, grid.tokens, 16, dtype=torch.float64)
    longer = copy.deepcopy(layer)
    with torch.no_grad():
        longer.attn.qkv.weight[:32] *= torch.tensor([3.0, 0.2, 7.0, 11.0]).repeat_interleave(8)[:, None]  # q and k, by head
    out = layer(x, grid)
    torch.testing.assert_close(longer(x, grid), out, atol=1e-9, rtol=0)
    out.square().sum().backward()
    scale = layer.attn.logit_scale.grad.flatten()
    assert scale[0].abs() > 1e-6 and scale[1] == 0
    assert all(p.grad.isfinite().all() for p in layer.parameters())


@each("key", IN_ATTENTION)
def test_cosine_gives_position_unit_keys_and_scaled_queries(key):
    """Whatever position does to q and k, it does to q / |q| * scale * sqrt(D) and k / |k|."""
    layer, grid = cosine_layer(position=key, grid=(3, 4, 1), qkv_bias=False), Grid(4, 3, 1)
    x = torch.randn(2, 13, 16, dtype=torch.float64)
    q, k, v = layer.attn.qkv(x).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)  # [B, H, N, D] each
    scale = layer.attn.logit_scale.exp().clamp(max=100.0) * math.sqrt(8.0)
    q, k = q / q.norm(dim=-1, keepdim=True) * scale, k / k.norm(dim=-1, keepdim=True)
    out = attention(q, k, v, layer.position(grid), grid, backend="reference").transpose(1, 2).flatten(2)
    torch.testing.assert_close(layer(x, grid), layer.attn.proj(out), atol=1e-9, rtol=0)


def test_cosine_of_a_token_without_a_direction():
    """A zero query or key has cosine 0 with everything: finite, forward and backward."""
    attn, x = Attention(16, 2, cosine=True), torch.zeros(1, 12, 16, requires_grad=True)
    out = attn(x, Terms(), Grid(3, 4))
    out.sum().backward()
    assert out.isfinite().all() and x.grad.isfinite().all()


@pytest.mark.slow
@each(("h", "w"), [(4, 6), (5, 6), (6, 3), (1, 1), (7, 5)])
@each("version", [1, 2])
def test_patch_merging_equals_timm(h, w, version):
    ours, theirs = PatchMerging(8, 16, post_norm=version == 2), (TimmPatchMerging, TimmPatchMergingV2)[version - 1](8, 16)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, h, w, 8)
    torch.testing.assert_close(ours(x), theirs(x), atol=1e-6, rtol=1e-6)
    if (h, w) == (7, 5):
        torch.testing.assert_close(torch.compile(ours, backend="eager", fullgraph=True)(x), theirs(x), atol=1e-6, rtol=1e-6)
