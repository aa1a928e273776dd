"""What is recorded of our own layers is what they computed: every encoding, globally and in shifted, padded windows."""

import copy

import pytest
import timm
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter

import vitrel
from helpers.variants import IN_ATTENTION, perturbed, small_model
from vitrel.inspect.attention import offset_mean, record
from vitrel.layers import Attention
from vitrel.models.vit import ViT
from vitrel.ops import BACKENDS

TINY = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=5)
KEYS = [*IN_ATTENTION, "absolute", "sincos", "absolute+rope_mixed", "rope_mixed+table", "shaw+table", "sincos+deberta+alibi"]
SCALED = [
    ("table", dict(logit_scale="log_n")),
    ("rope_axial", dict(scaling="yarn")),
    ("rope_mixed+fire", dict(scaling="ntk")),
]
WINDOWED = dict(class_token=False, global_pool="avg", block_args=dict(window=(3, 2), global_blocks=(1,)))


def vit(position, **options):
    torch.manual_seed(1)
    return perturbed(ViT(**TINY | dict(position=position) | options).eval(), 0.3)


def images(h, w):
    return torch.randn(2, 3, h, w)


def run(model, x):
    """The layers, and what went into the last linear map of each attention with q, k and v, [B, h*w, C] and [B, h*w, 3C]."""
    found, hooks = {}, []
    for name, module in model.named_modules():
        if isinstance(module, Attention):
            hooks.append(
                module.proj.register_forward_pre_hook(lambda _, given, n=name: found.setdefault(n, []).insert(0, given[0]))
            )
            hooks.append(module.qkv.register_forward_hook(lambda _, given, out, n=name: found.setdefault(n, []).append(out)))
    layers = record(model, x)
    for hook in hooks:
        hook.remove()
    return layers, {name: [t.reshape(len(x), -1, t.shape[-1]) for t in both] for name, both in found.items()}


def reproduced(layer, module, values, tables):
    """[B, tokens, C] from the weights of `layer` and v [B, tokens, C]."""
    if getattr(module, "v_bias", None) is not None:
        values = values + module.v_bias
    v = values.unflatten(-1, (module.num_heads, -1))[:, layer.tokens.clamp(min=0)]  # [B, W, N, H, D]
    out = torch.einsum("bwhij,bwjhd->bwihd", layer.weights, v)
    trained = vitrel.Grid(*layer.window) if layer.window else layer.grid
    for table in tables:
        if table.value is not None:
            rows = table.value.expand(module.num_heads, -1, -1)[:, trained.index(table.axis)]  # [H, N, N, D]
            out = out + torch.einsum("bwhij,hijd->bwihd", layer.weights, rows)
    back = torch.zeros(len(v), layer.grid.tokens, *v.shape[-2:])
    back[:, layer.tokens[layer.tokens >= 0]] = out[:, layer.tokens >= 0]
    return back.flatten(2)


def check(model, x):
    layers, seen = run(model, x)
    blocks = {f"{name}.attn": block for name, block in model.named_modules() if hasattr(block, "attn")}
    assert [layer.name for layer in layers] == list(blocks)
    for layer in layers:
        block, (out, qkv) = blocks[layer.name], seen[layer.name]
        with torch.no_grad():
            shared = getattr(model, "shared_position", None)
            terms = (shared or block.position)(block.window or layer.grid)
            torch.testing.assert_close(
                reproduced(layer, block.attn, qkv.chunk(3, -1)[2], terms.tables), out, atol=1e-5, rtol=1e-5
            )
        real = (layer.tokens >= 0)[None, :, None].expand(layer.weights.shape[:-1])
        for weights in (layer.weights, layer.content):
            assert weights.dtype == torch.float32 and not weights.requires_grad
            torch.testing.assert_close(weights.sum(-1), real.float())
        assert layer.image == tuple(x.shape[2:])
        visible = torch.ones_like(layer.weights, dtype=torch.bool) if layer.visible is None else layer.visible
        assert (layer.weights[~visible] == 0).all() and (layer.position[~visible] == 0).all()
        # The two parts make the whole.
        whole = (layer.content.log() + layer.position).masked_fill(~visible, float("-inf"))
        torch.testing.assert_close(whole.softmax(-1)[real], layer.weights[real], atol=1e-5, rtol=1e-4)
    return layers


@pytest.mark.parametrize("key", KEYS)
def test_weights_are_those_of_the_model(key):
    layers = check(vit(key, reg_tokens=1), images(40, 24))
    assert [layer.grid for layer in layers] == [vitrel.Grid(5, 3, 2)] * 2
    assert [layer.stride for layer in layers] == [(8.0, 8.0)] * 2


@pytest.mark.parametrize(("key", "options"), SCALED)
def test_scales_that_depend_on_the_grid(key, options):
    check(vit(key, position_args=options), images(40, 56))


@pytest.mark.parametrize("key", KEYS)
def test_block_windows(key):
    layers = check(vit(key, **WINDOWED), images(40, 25))
    assert [layer.window for layer in layers] == [(3, 2), None]
    assert layers[0].tokens.tolist()[1::2] == [[2, 3, 6, 7, 10, 11], [14, 15, 18, 19, -1, -1]]


@pytest.mark.parametrize("key", [*IN_ATTENTION, "rope_mixed+table"])
def test_shifted_padded_windows(key):
    layers = check(small_model(f"vitrel_swin_n_{key.replace('+', '_')}"), images(22, 31))
    assert [layer.shift for layer in layers] == [(0, 0), (2, 2), (0, 0), (2, 2), (0, 0), (0, 0)]
    assert [layer.grid[:2] for layer in layers[::2]] == [(11, 16), (6, 8), (3, 4)]
    assert [layer.stride for layer in layers[::2]] == [(2.0, 2.0), (4.0, 4.0), (8.0, 8.0)]


def test_cosine_attention():
    check(small_model("vitrel_swinv2_n"), images(22, 30))


def test_shared_position():
    check(vit("transformer_xl", share_position=True), images(24, 40))


@pytest.mark.parametrize("key", [key for key in IN_ATTENTION if key not in ("none", "deberta")])
def test_content_is_the_layer_without_position(key):
    """The first layer of a model with the same weights and no position at all has these weights."""
    x = images(40, 48)
    for options in ({}, WINDOWED):
        model = vit(key, position_args=dict(logit_scale="log_n"), **options)
        bare = ViT(**TINY | options, position="none").eval()
        bare.load_state_dict({k: v for k, v in model.state_dict().items() if ".position." not in k})
        with_position, without = record(model, x)[0], record(bare, x)[0]
        torch.testing.assert_close(with_position.content, without.weights, atol=1e-5, rtol=1e-5)
        assert (with_position.content - with_position.weights).abs().max() > 1e-3
        assert not without.position.any()


def test_position_is_the_table():
    for model, size in ((vit("table"), (32, 32)), (small_model("vitrel_swin_n_table"), (24, 22))):
        for layer in record(model, images(*size)):
            position = model.get_submodule(layer.name.removesuffix(".attn")).position
            h, w = layer.window or layer.grid[:2]
            with torch.no_grad():
                table = position(vitrel.Grid(h, w, layer.grid.prefix)).tables[0].bias
            table = table[:, : (2 * h - 1) * (2 * w - 1)].unflatten(1, (2 * h - 1, 2 * w - 1))
            found = offset_mean(layer, layer.position)
            met = ~found.isnan()
            torch.testing.assert_close(found[met], table[met], atol=2e-5, rtol=0)
            assert met[..., h - 1, w - 1].all() and met.float().mean() > 0.5


def test_a_constant_scale_is_no_position():
    """DeBERTa's 3**-0.5 stays."""
    model, x = perturbed(Alone("deberta"), 0.3), torch.randn(1, 4, 3, 16)
    layer = record(model, x)[0]
    q, k, _ = model.layer.attn.qkv(x.flatten(1, 2)).unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    torch.testing.assert_close(layer.content[:, 0], (q @ k.mT * (3 * 8) ** -0.5).softmax(-1))


class Alone(nn.Module):
    """Our drop-in layer in someone else's model, [B, h, w, C] in place of images."""

    def __init__(self, position, mask=None, **options):
        super().__init__()
        self.layer, self.mask = vitrel.RelativeAttention(16, 2, position=position, grid=(4, 3), **options), mask

    def forward(self, x):
        return self.layer(x.flatten(1, 2), x.shape[1:3], self.mask)


@pytest.mark.parametrize("additive", [False, True])
def test_masks(additive):
    mask = torch.ones(2, 1, 12, 12, dtype=torch.bool).tril()
    mask[0, :, 3] = False  # a query that sees nothing
    given = torch.zeros(mask.shape).masked_fill(~mask, float("-inf")) if additive else mask
    layer = record(Alone("table", given), torch.randn(2, 4, 3, 16))[0]
    assert torch.equal(layer.visible, mask[:, None].expand(-1, -1, 2, -1, -1))
    assert not layer.weights[0, 0, :, 3].any() and not layer.content[0, 0, :, 3].any()
    assert not layer.weights[~layer.visible].any()
    mean = offset_mean(layer, layer.position)  # a query before its key is never seen
    assert mean[:, 0].isnan().all() and not mean[:, 4:].isnan().any()


def test_fields_of_view_are_not_visible():
    layer = record(Alone("xpos"), torch.randn(2, 4, 3, 16))[0]
    assert not layer.visible.all() and layer.content.min() > 0
    found = offset_mean(layer, layer.weights)
    assert found[0, :3].isnan().all() and not found[0, 3:].isnan().any()  # head 0 looks up


def test_half_precision():
    model = small_model("vitrel_vit_n8_rope_mixed_table").bfloat16()
    for layer in record(model, images(64, 64).bfloat16()):
        assert {layer.weights.dtype, layer.content.dtype, layer.position.dtype} == {torch.float32}
        torch.testing.assert_close(layer.weights.sum(-1), torch.ones(layer.weights.shape[:-1]))


def test_nothing_is_left_behind():
    model = timm.create_model("vitrel_swin_n", num_classes=5, drop_path_rate=0.5).train()
    model.layers[0].eval()
    attn = model.layers[1].blocks[0].attn
    attn.backend = "reference"

    def state():
        return [(m.training, set(vars(m)), getattr(m, "backend", None), len(m._forward_hooks)) for m in model.modules()]

    before, known, x = state(), dict(BACKENDS), images(64, 64)
    layers = record(model, x)
    assert (state(), BACKENDS) == (before, known)
    for layer, other in zip(layers, record(copy.deepcopy(model).eval(), x), strict=True):  # nothing is dropped
        assert torch.equal(layer.weights, other.weights)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        record(model.layers, x)
    handle = attn.proj.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        record(model, x)
    handle.remove()
    assert (state(), BACKENDS) == (before, known)
    model(x).sum().backward()
    assert attn.qkv.weight.grad is not None


def test_a_backend_that_refuses_still_does():
    model = vit("shaw")
    model.blocks[0].attn.backend = "sdpa"
    with pytest.raises(ValueError, match="backend 'sdpa' refuses"):
        record(model, images(32, 32))


@pytest.mark.parametrize("in_place", [False, True])
def test_compiled_models_run_uncompiled(in_place):
    model, x, counter = vit("table"), images(32, 32), CompileCounter()
    expected = record(model, x)
    if in_place:
        model.compile(backend=counter)
    layers = record(model if in_place else torch.compile(model, backend=counter), x)
    for layer, other in zip(layers, expected, strict=True):
        assert layer.name == other.name and torch.equal(layer.weights, other.weights)
    assert counter.frame_count == 0
    if in_place:
        model(x)
        assert counter.frame_count == 1
