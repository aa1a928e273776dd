"""block_args and share_position: the options that make a ViT the trunk of DeiT III, BEiT, EVA-02, DINOv3 and SAM."""

import pytest
import torch
from timm.layers import LayerScale, SwiGLU
from torch import nn

from helpers import each
from vitrel.grid import Grid
from vitrel.inspect.any_model import at_size
from vitrel.layers import Attention
from vitrel.models import ViT
from vitrel.position import key_of

SMALL = dict(img_size=48, patch_size=8, embed_dim=32, depth=3, num_heads=2, num_classes=5)
WINDOWED = dict(class_token=False, global_pool="avg", position="absolute+decomposed")
KINDS = {
    "scaled": dict(block_args=dict(init_values=0.5, norm_eps=1e-5), reg_tokens=2),
    "swiglu": dict(block_args=dict(mlp="swiglu"), position="absolute+rope_axial", mlp_ratio=8 / 3),
    "swiglu_norm": dict(block_args=dict(mlp="swiglu", mlp_norm=True, init_values=0.5), position="rope_mixed"),
    "windows": dict(WINDOWED, block_args=dict(window=(3, 2), global_blocks=(1,))),
    "shared": dict(share_position=True, position="absolute+table", block_args=dict(init_values=0.5)),
}
EVERY = pytest.mark.parametrize("kind", KINDS)


def build(kind=None, **options):
    """A model in evaluation whose parameters are all away from their initialization."""
    model = ViT(**(SMALL | KINDS.get(kind, {}) | options)).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.5 if name in model.position_parameters() else 0.1))
    return model


def gradients(model, image):
    model.zero_grad()
    out = model(image)
    out.square().sum().backward()
    return out.detach(), {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@EVERY
def test_forward_and_backward_at_any_size(kind):
    for size in ((48, 48), (40, 72), (8, 8)):
        out, grads = gradients(build(kind), torch.randn(2, 3, *size))
        assert out.shape == (2, 5) and out.isfinite().all()
        assert all(g.isfinite().all() for g in grads.values())
        zero = [n for n, g in grads.items() if not g.any()]
        assert zero == [] or size == (8, 8), zero  # one token: most position has nothing to tell


def test_where_the_options_go():
    model = ViT(**SMALL, block_args=dict(init_values=0.25, mlp="swiglu", mlp_norm=True, norm_eps=1e-3), reg_tokens=1)
    assert {norm.eps for norm in model.modules() if isinstance(norm, nn.LayerNorm)} == {1e-3}
    scales = [scale for scale in model.modules() if isinstance(scale, LayerScale)]
    assert len(scales) == 6 and all((scale.gamma == 0.25).all() for scale in scales)
    assert all(isinstance(block.mlp, SwiGLU) and isinstance(block.mlp.norm, nn.LayerNorm) for block in model.blocks)
    assert ViT(**SMALL, block_args=dict(norm_eps=1e-3), global_pool="avg").fc_norm.eps == 1e-3
    plain = ViT(**SMALL)
    assert {norm.eps for norm in plain.modules() if isinstance(norm, nn.LayerNorm)} == {1e-6}
    assert plain.shared_position is None and all(block.window is None for block in plain.blocks)


def test_impossible_options():
    with pytest.raises(TypeError, match=r"block_args has no option 'windows'; it has init_values, mlp, mlp_norm, post_norm, "):
        ViT(**SMALL, block_args=dict(windows=3))
    with pytest.raises(ValueError, match="mlp='relu' is unknown; choose one of gelu, gelu_tanh, quick_gelu, swiglu"):
        ViT(**SMALL, block_args=dict(mlp="relu"))
    words = r"blocks with a window need class_token=False, reg_tokens=0 and share_position=False"
    for own in (dict(), dict(WINDOWED, reg_tokens=1), dict(WINDOWED, share_position=True)):
        with pytest.raises(ValueError, match=words):
            ViT(**SMALL | own, block_args=dict(window=3))
    for index in (3, -1):
        with pytest.raises(ValueError, match=rf"global_blocks contains {index}; it needs a window, and indices from 0 to 2"):
            ViT(**SMALL | WINDOWED, block_args=dict(window=3, global_blocks=(1, index)))
    with pytest.raises(ValueError, match="global_blocks contains 0; it needs a window"):
        ViT(**SMALL | WINDOWED, block_args=dict(global_blocks=(0,)))


@each("position", ["decomposed", "table", "rope_mixed"])
@each("size", [(48, 48), (56, 40), (16, 8)])
def test_windows_are_windows(position, size):
    """Equal to attention in every window apart; what is left at the edge is a smaller window, no padding is seen."""
    options = dict(
        WINDOWED, position=position, global_pool="", num_classes=0, block_args=dict(window=(3, 2), global_blocks=(1,))
    )
    model, image = build(**options), torch.randn(2, 3, *size)
    assert [block.window for block in model.blocks] == [(3, 2, 0), None, (3, 2, 0)]
    x, grid = model.embed(image)
    x = x.unflatten(1, (grid.h, grid.w))
    for block in model.blocks:
        step = block.window or grid
        attn = Attention(32, 2)
        attn.load_state_dict(block.attn.state_dict())
        y, out = block.norm1(x), torch.zeros_like(x)
        for i in range(0, grid.h, step.h):
            for j in range(0, grid.w, step.w):
                part = y[:, i : i + step.h, j : j + step.w]
                own = Grid(*part.shape[1:3])
                out[:, i : i + step.h, j : j + step.w] = attn(part.flatten(1, 2), block.position(own), own).view(part.shape)
        x = x + out
        x = x + block.mlp(block.norm2(x))
    torch.testing.assert_close(model(image), model.norm(x.flatten(1, 2)), atol=2e-6, rtol=1e-5)


def test_report_of_windows():
    """Windows keep their grid at every size; only the global block and the embedding are resampled."""
    model = build("windows")
    windows, everywhere = at_size(model, (56, 72)).windows
    assert (windows.blocks, windows.grid, windows.window) == (2, (7, 9), (3, 2))
    assert windows.padding == (2, 1)
    assert (everywhere.blocks, everywhere.window, everywhere.grid) == (1, None, (7, 9))
    assert model.resampled((56, 72)) == {"absolute bicubic": 36 * 32, "decomposed linear": 2 * 11 * 16}
    assert model.resampled((48, 48)) == {}


def test_one_encoding_for_all_blocks():
    """Equal to one each with the same values; its gradient is the sum of theirs."""
    shared, each = build("shared"), build("shared", share_position=False)
    name = "shared_position.relative_position_bias_table"
    state = shared.state_dict()
    copies = {f"blocks.{i}.position.relative_position_bias_table": state[name] for i in range(3)}
    each.load_state_dict({n: t for n, t in state.items() if n != name} | copies)
    assert name in shared.position_parameters() and name in shared.no_weight_decay()
    for size in ((48, 48), (56, 40)):
        image = torch.randn(2, 3, *size)
        (a, own), (b, theirs) = gradients(shared, image), gradients(each, image)
        torch.testing.assert_close(a, b, atol=1e-6, rtol=0)
        torch.testing.assert_close(own.pop(name), sum(theirs.pop(n) for n in copies), atol=1e-4, rtol=1e-4)
        assert own.keys() == theirs.keys()
    assert [key_of(encoding) for encoding, _ in shared.encodings((56, 56))] == ["absolute", "table", *["none"] * 3]
    assert sum("relative_position_bias_table" in n for n in state) == 1


@EVERY
def test_initialized_after_the_meta_device(kind):
    """As at construction: the same constants, the same spread of random values, and nothing left uninitialized."""
    model = ViT(**SMALL | KINDS[kind], device="meta").to_empty(device="cpu").eval()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
    model.init_weights()
    built = ViT(**SMALL | KINDS[kind])
    for (name, a), b in zip(model.state_dict().items(), built.state_dict().values(), strict=True):
        assert a.isfinite().all(), name
        if b.std(unbiased=False) == 0:
            assert torch.equal(a, b), name
        elif b.numel() >= 500:
            torch.testing.assert_close(a.std(), b.std(), rtol=0.25, atol=0, msg=name)
    assert model(torch.randn(1, 3, 40, 56)).isfinite().all()
