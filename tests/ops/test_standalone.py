"""The functions in models of others, beside docs/how_to/layer.md, whose examples the tests of pages run."""

import pytest
import torch
import torch.nn.functional as F
from timm.layers import AttentionRope, RotaryEmbeddingCat, apply_rot_embed_cat
from torch.autograd import gradcheck

from helpers import each
from vitrel import Grid, Table, Terms, create_position
from vitrel.ops import attention, rotate, window_attention

double = torch.float64


def assert_same(ours, theirs, inputs):
    """Outputs and all gradients of two results, in float64."""
    weight = torch.randn_like(ours)
    grads = [torch.autograd.grad((out * weight).sum(), inputs, retain_graph=True) for out in (ours, theirs)]
    torch.testing.assert_close([ours, *grads[0]], [theirs, *grads[1]], rtol=1e-10, atol=1e-10)


@each("window", [(3, 3), (2, 5)])
def test_grids_are_grids_or_plain_tuples(window):
    q, k, v = torch.randn(3, 2, 2, 1 + 12, 4, dtype=double)
    terms = create_position("table", (3, 4, 1), 2, 4, dtype=double)((3, 4, 1))
    assert torch.equal(attention(q, k, v, terms, (3, 4, 1)), attention(q, k, v, terms, Grid(3, 4, 1)))
    terms, qkv = create_position("table", window, 2, 4, dtype=double)(window), torch.randn(2, 6, 7, 24, dtype=double)
    ours = window_attention(qkv, terms, qkv.shape[1:3], window, (1, 2), 2)
    assert torch.equal(ours, window_attention(qkv, terms, Grid(6, 7), window, (1, 2), 2))
    with pytest.raises(ValueError, match="prefix=1"):
        window_attention(qkv, terms, (6, 7, 1), window, (1, 2), 2)


@each("half", [True, False])
def test_rotate_is_timms_rotation(half):
    """With halves as they are; interleaved pairs are reordered, which moves channels and keeps logits."""
    rope = RotaryEmbeddingCat(8, in_pixels=False, rotate_half=half).get_embed((3, 5)).double()
    q, k = torch.randn(2, 2, 3, 15, 8, dtype=double, requires_grad=True).unbind(0)
    theirs = [apply_rot_embed_cat(x, rope, half=half) for x in (q, k)]
    if half:
        sin, _, cos, _ = rope.chunk(4, -1)
        ours = [rotate(x, cos, sin) for x in (q, k)]
        assert_same(ours[0], theirs[0], [q])
    else:
        sin, cos = (angle[:, ::2] for angle in rope.chunk(2, -1))
        ours = [rotate(x.unflatten(-1, (-1, 2)).mT.flatten(-2), cos, sin) for x in (q, k)]
        assert not torch.allclose(ours[0], theirs[0])
    assert_same(ours[0] @ ours[1].mT, theirs[0] @ theirs[1].mT, [q, k])


def test_rotate_promotes_types_and_has_all_gradients():
    x, angle = torch.randn(2, 3, 4, dtype=double, requires_grad=True), torch.randn(3, 2, dtype=double, requires_grad=True)
    assert gradcheck(lambda x, angle: rotate(x, angle.cos(), angle.sin()), (x, angle))
    turned = rotate(x.bfloat16(), angle.cos().float(), angle.sin().float())
    assert turned.dtype == torch.float32
    torch.testing.assert_close(turned.norm(dim=-1), x.bfloat16().float().norm(dim=-1))


def test_attention_rotates_as_timms_module():
    """With class and register tokens, whose rows have angle zero."""
    module = AttentionRope(16, num_heads=2, num_prefix_tokens=3, rotate_half=True).double()
    rope = RotaryEmbeddingCat(8, in_pixels=False, rotate_half=True).get_embed((3, 5)).double()
    x = torch.randn(2, 3 + 15, 16, dtype=double, requires_grad=True)
    q, k, v = module.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    sin, _, cos, _ = rope[None].chunk(4, -1)
    terms = Terms(rotary=(F.pad(cos, (0, 0, 3, 0), value=1.0), F.pad(sin, (0, 0, 3, 0))))
    ours = module.proj(attention(q, k, v, terms, (3, 5, 3)).transpose(1, 2).flatten(2))
    assert_same(ours, module(x, rope), [x, *module.parameters()])


@each(("window", "shift"), [((2, 6), (0, 0)), ((2, 6), (1, 3)), ((4, 3), (1, 2))])
def test_windows_around_the_globe(window, shift):
    """Longitudes are rolled and rows shifted: pairs of a window that wraps see each other, poles do not."""
    heads, (h, w), (rows, columns) = 2, (8, 12), window
    qkv = torch.randn(2, h, w, 3 * heads * 4, dtype=double, requires_grad=True)
    table = torch.randn(heads, (2 * rows - 1) * (2 * columns - 1), dtype=double, requires_grad=True)
    terms = Terms(tables=(Table("hw", bias=table),))
    ours = window_attention(qkv.roll(-shift[1], 2), terms, (h, w), window, (shift[0], 0), heads).roll(shift[1], 2)

    y, x = (t.flatten() for t in torch.meshgrid(torch.arange(h), torch.arange(w), indexing="ij"))
    band, at = (y - shift[0]).div(rows, rounding_mode="floor"), (x - shift[1]) % w
    same = (band[:, None] == band) & (at[:, None] // columns == at // columns)
    offset = (y[:, None] - y + rows - 1) * (2 * columns - 1) + at[:, None] - at + columns - 1
    q, k, v = qkv.flatten(1, 2).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    logits = q @ k.mT * 0.5 + table[:, offset.where(same, 0)]
    theirs = logits.masked_fill(~same, -torch.inf).softmax(-1) @ v
    assert_same(ours, theirs.transpose(1, 2).reshape(ours.shape), [qkv, table])


def test_windows_of_monai(monkeypatch):
    """At 224 px windows of 7 divide the grids of all stages."""
    monai = pytest.importorskip("monai.networks.nets.swin_unetr", reason="monai is not installed")

    def attend(block, x):
        attn = block.attn
        terms = Terms(tables=(Table("hw", bias=attn.relative_position_bias_table.T),))
        out = window_attention(attn.qkv(x), terms, x.shape[1:3], block.window_size, block.shift_size, attn.num_heads)
        return attn.proj(out)

    model = monai.SwinUNETR(in_channels=1, out_channels=2, feature_size=12, spatial_dims=2).double()
    image = torch.randn(1, 1, 224, 224, dtype=double)
    theirs = model(image)
    theirs.sum().backward(retain_graph=True)
    used = [parameter for parameter in model.parameters() if parameter.grad is not None]
    monkeypatch.setattr(monai.SwinTransformerBlock, "forward_part1", lambda block, x, mask: attend(block, block.norm1(x)))
    assert_same(model(image), theirs, used)
