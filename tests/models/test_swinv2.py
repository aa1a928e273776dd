"""Swin V2: timm's logits and gradients, masks that hold at the largest cosine scale, blocks that start at rest."""

import math

import pytest
import timm
import torch
from timm.models.swin_transformer_v2 import SwinTransformerV2

import vitrel
from helpers import each
from vitrel.grid import Grid
from vitrel.layers import Attention
from vitrel.position import Terms

SMALL = dict(patch_size=4, embed_dim=32, num_classes=6)


def perturb(model):
    """Every parameter away from its initialization, the norms that start at zero most of all. One head of each block without a
    shift goes beyond the clamp; with a shift timm's mask of -100 would leak there."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.5 if "norm" in name or "bias" in name else 0.1))
            if name.endswith("blocks.0.attn.logit_scale"):
                parameter[-1] = math.log(200.0)
    return model.eval()


def assert_same(ours, theirs, image, tolerance):
    """Logits within `tolerance`, every gradient within `tolerance` of its norm."""
    a, b = ours(image), theirs(image)
    torch.testing.assert_close(a, b, atol=tolerance, rtol=0)
    weight = torch.randn_like(a)
    (a * weight).sum().backward(), (b * weight).sum().backward()
    expected = {n.replace("attn.cpb_mlp", "position.cpb_mlp"): p.grad for n, p in theirs.named_parameters()}
    assert {n for n, _ in ours.named_parameters()} == set(expected)
    for name, parameter in ours.named_parameters():
        assert (parameter.grad - expected[name]).norm() <= tolerance * (1 + expected[name].norm()), name


@each("backend", ["sdpa", "reference"])
@each(
    "options",
    [
        dict(img_size=64, window_size=4, depths=(2, 2), num_heads=(2, 4)),
        dict(img_size=(64, 96), window_size=4, depths=(2, 2), num_heads=(2, 4)),
        dict(img_size=64, window_size=8, depths=(2, 2), num_heads=(2, 4), qkv_bias=False),
        dict(img_size=64, window_size=4, depths=(1, 2, 2), num_heads=(1, 2, 4)),
    ],
    ids=str,
)
def test_equals_timm(options, backend):
    theirs = perturb(SwinTransformerV2(**SMALL, **options)).double()
    ours = vitrel.models.Swin(**SMALL, **options, version=2, position="cpb").double().eval()
    vitrel.load_pretrained(ours, theirs.state_dict())
    for module in ours.modules():
        if isinstance(module, Attention):
            module.backend = backend
    h, w = ours.img_size
    assert_same(ours, theirs, torch.randn(2, 3, h, w, dtype=torch.float64), 1e-7)  # timm's offsets are float32


def test_equals_timm_after_a_change_of_window():
    """M0 stays the window of the weights: timm's pretrained_window_sizes is our option pretrained_window."""
    trained = perturb(SwinTransformerV2(**SMALL, img_size=64, window_size=4, depths=(2, 2), num_heads=(2, 4))).state_dict()
    options = dict(img_size=(64, 128), window_size=8, depths=(2, 2), num_heads=(2, 4))
    theirs = SwinTransformerV2(**SMALL, **options, pretrained_window_sizes=(4, 4)).eval()
    theirs.load_state_dict(trained)
    outputs, image = [], torch.randn(1, 3, 64, 128, dtype=torch.float64)
    for window in (4, None):
        ours = vitrel.models.Swin(
            **SMALL, **options, version=2, position="cpb", position_args=dict(pretrained_window=window)
        ).eval()
        vitrel.load_pretrained(ours, trained)
        outputs.append(ours.double()(image))
    torch.testing.assert_close(outputs[0], theirs.double()(image), atol=1e-7, rtol=0)
    assert (outputs[1] - outputs[0]).abs().max() > 1e-3


@pytest.mark.slow
@each(("name", "peer"), [("t", "tiny"), ("s", "small"), ("b", "base")])
def test_shapes_of_the_published_models(name, peer):
    ours = timm.create_model(f"vitrel_swinv2_{name}", device="meta")
    theirs = timm.create_model(f"swinv2_{peer}_window8_256", device="meta")
    expected = {n.replace("attn.cpb_mlp", "position.cpb_mlp"): p.shape for n, p in theirs.named_parameters()}
    assert {n: p.shape for n, p in ours.state_dict().items()} == expected
    assert ours.pretrained_cfg["hf_hub_id"] == f"timm/swinv2_{peer}_window8_256.ms_in1k"


def test_initialization():
    """Blocks start as the identity, scales at 10; a model from the meta device starts the same."""
    built = timm.create_model("vitrel_swinv2_n", num_classes=5)
    empty = timm.create_model("vitrel_swinv2_n", num_classes=5, device="meta").to_empty(device="cpu")
    with torch.no_grad():
        for parameter in empty.parameters():
            parameter.fill_(7.0)
    empty.init_weights()
    for model in (built.eval(), empty.eval()):
        for block in model.layers[1].blocks:
            assert all(not p.any() for norm in (block.norm1, block.norm2) for p in norm.parameters())
            assert (block.attn.logit_scale == math.log(10.0)).all() and block.attn.logit_scale.shape == (2, 1, 1)
            assert not block.attn.q_bias.any() and not block.attn.v_bias.any() and block.attn.qkv.bias is None
        assert (model.layers[1].downsample.norm.weight == 1).all() and (model.norm.weight == 1).all()
        assert not any((p == 7.0).any() for p in model.parameters())
        x = torch.randn(1, 6, 9, 64)
        for block in model.layers[1].blocks:
            assert torch.equal(block(x, Grid(6, 9)), x)


def test_version_1_is_untouched_and_others_are_refused():
    names = set(timm.create_model("vitrel_swin_n").state_dict())
    assert not any("logit_scale" in n or "q_bias" in n for n in names) and "layers.1.blocks.0.attn.qkv.bias" in names
    with pytest.raises(ValueError, match="version must be 1 or 2, not 3"):
        timm.create_model("vitrel_swin_n", version=3)


def opposed(dim, heads, window, shift):
    """Cosine attention at scale 100 in which a key of the same direction repels and one of the opposite direction attracts."""
    attn = Attention(dim, heads, window, shift, cosine=True)
    with torch.no_grad():
        eye = torch.eye(dim)
        attn.qkv.weight.copy_(torch.cat((eye, -eye, eye)))
        attn.proj.weight.copy_(eye), attn.proj.bias.zero_()
        attn.logit_scale.fill_(math.log(100.0))
    return attn


@each(("h", "w"), [(8, 8), (7, 10), (3, 5), (12, 6)])
@each("backend", ["sdpa", "reference"])
def test_no_weight_leaks_at_the_largest_scale(h, w, backend):
    """Each token sees its own region at cosine -1 (logit -100), all others at +1 (logit 100): exactly zero weight there."""
    attn, (mh, mw), shift = opposed(8, 1, (4, 4), (2, 2)), (4, 4), (2, 2)
    attn.backend = backend
    which = [[(t + s) // m if n > m else 0 for t in range(n)] for n, m, s in ((h, mh, shift[0]), (w, mw, shift[1]))]
    region = torch.tensor([[100 * a + b for b in which[1]] for a in which[0]])  # of every token, on the unrolled canvas
    for r in region.unique():
        inside = region == r
        x = torch.where(inside[..., None], 1.0, -1.0) * torch.rand(8).add(0.5)  # [h, w, 8]
        x = (x * torch.rand(h, w, 1).add(0.5))[None].requires_grad_()
        out = attn(x, Terms(), Grid(h, w))
        (gradient,) = torch.autograd.grad(out[0][inside].sum(), x)
        assert not gradient[0][~inside].any()
        torch.testing.assert_close(out[0][inside], x[0][inside].mean(0).expand(int(inside.sum()), 8), atol=1e-5, rtol=0)


def test_autocast_normalizes_in_float32():
    """bfloat16 keeps 8 bits: q and k are rounded to it once, after lengths and scale, and the output stays near float32's."""
    attn, x = Attention(64, 2, cosine=True), torch.randn(2, 30, 64)
    with torch.no_grad():
        attn.qkv.weight.mul_(50.0)
        exact = attn(x, Terms(), Grid(5, 6))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = attn(x, Terms(), Grid(5, 6))
            q, k, _ = attn._cosine(attn.qkv(x)).unflatten(-1, (3, 2, 32)).unbind(-3)
    assert half.dtype == q.dtype == torch.bfloat16
    torch.testing.assert_close(q.float().norm(dim=-1), torch.full((2, 30, 2), 10 * math.sqrt(32.0)), atol=0, rtol=2**-9)
    torch.testing.assert_close(k.float().norm(dim=-1), torch.ones(2, 30, 2), atol=0, rtol=2**-9)
    assert (half.float() - exact).abs().max() < 0.02 * exact.abs().max()


def test_the_window_of_the_bias_is_that_of_each_stage():
    """Swin V2 at 256 px in windows of 16: the last grid is 8x8, and with it the window of its bias, as in timm."""
    small = dict(depths=(1, 1, 1, 1), num_heads=(1, 1, 2, 2), embed_dim=16, window_size=16, img_size=256, num_classes=3)
    theirs = perturb(timm.create_model("swinv2_tiny_window16_256", **small))
    ours = vitrel.load_pretrained(timm.create_model("vitrel_swinv2_t", **small).eval(), theirs.state_dict())
    assert [stage.blocks[0].position.pretrained_window[0] for stage in ours.layers] == [16, 16, 16, 8]
    image = torch.randn(1, 3, 256, 256)
    torch.testing.assert_close(ours(image), theirs(image), atol=2e-5, rtol=0)
    tuned = timm.create_model("vitrel_swinv2_t", position_args=dict(pretrained_window=(12, 12, 12, 6)), **small).eval()
    theirs = perturb(timm.create_model("swinv2_base_window12to16_192to256", **small))  # trained at 192 px in windows of 12
    vitrel.load_pretrained(tuned, theirs.state_dict())
    torch.testing.assert_close(tuned(image), theirs(image), atol=2e-5, rtol=0)
    with pytest.raises(ValueError, match="pretrained_window must be a whole number of 1 or more, or two"):
        timm.create_model("vitrel_swinv2_t", position_args=dict(pretrained_window=(12, 12, 6)), **small)
