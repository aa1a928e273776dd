"""What is recorded of timm's models is what they computed, and their slots name the true tokens of the image."""

import copy

import pytest
import timm
import torch
from timm.layers import Attention as TimmAttention
from timm.layers import AttentionRope
from timm.models.beit import Attention as BeitAttention
from timm.models.beit import Beit
from timm.models.eva import Eva, EvaAttention
from timm.models.swin_transformer import SwinTransformer
from timm.models.swin_transformer import WindowAttention as SwinAttention
from timm.models.swin_transformer_v2 import SwinTransformerV2
from timm.models.swin_transformer_v2 import WindowAttention as SwinV2Attention
from timm.models.vision_transformer import ParallelScalingBlock, VisionTransformer
from timm.models.vision_transformer_relpos import RelPosAttention, VisionTransformerRelPos
from torch import nn

from helpers.relativize_models import MODELS
from vitrel import Grid
from vitrel.inspect.attention import attention_statistics, offset_mean, record

TINY = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5)
SWIN = dict(img_size=(48, 40), patch_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4), window_size=7, num_classes=5)
ATTENTION = (TimmAttention, AttentionRope, BeitAttention, EvaAttention, RelPosAttention, SwinAttention, SwinV2Attention)
BUILD = {name: make for name, make in MODELS.items() if name != "vitrel"} | {
    "dynamic": lambda: VisionTransformer(dynamic_img_size=True, **TINY),
    "grouped_rope": lambda: Eva(use_rot_pos_emb=True, attn_type="rope", qkv_fused=False, num_kv_heads=1, **TINY),
    "beit": lambda: Beit(use_rel_pos_bias=True, use_abs_pos_emb=False, qkv_bias=True, **TINY),
    "beit_shared": lambda: Beit(use_shared_rel_pos_bias=True, **TINY),
    "relpos_mlp": lambda: VisionTransformerRelPos(rel_pos_type="mlp", **TINY),
    "relpos_table": lambda: VisionTransformerRelPos(rel_pos_type="bias", class_token=True, global_pool="token", **TINY),
    "relpos_shared": lambda: VisionTransformerRelPos(rel_pos_type="mlp", shared_rel_pos=True, **TINY),
    "swin": lambda: SwinTransformer(**SWIN),
    "swin_dynamic": lambda: SwinTransformer(dynamic_img_size=True, **SWIN),
    "swinv2": lambda: SwinTransformerV2(**SWIN | dict(window_size=(7, 5))),
}


def build(name):
    torch.manual_seed(0)
    model = BUILD[name]().eval()
    for key, parameter in model.named_parameters():
        if key != "rope.freqs":
            nn.init.normal_(parameter, std=0.2)
    return model


def images(model):
    height, width = model.patch_embed.img_size
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(3))


def keep(notes, key, value):
    """A hook that returns nothing, so that it changes nothing."""
    notes[key] = value


def run(model, x):
    """The layers, and of each module v and what attention made of it: {name: {"v": .., "out": ..}}, [.., N, C]."""
    found, hooks = {}, []
    for name, module in model.named_modules():
        if isinstance(module, ATTENTION):
            note = found[name] = {}
            last = module.norm if isinstance(getattr(module, "norm", None), nn.LayerNorm) else module.proj
            hooks.append(last.register_forward_pre_hook(lambda _, given, note=note: keep(note, "out", given[0])))
            if getattr(module, "v_proj", None) is not None:
                hooks.append(module.v_proj.register_forward_hook(lambda _, given, out, note=note: keep(note, "v", out)))
            else:
                hooks.append(module.register_forward_pre_hook(lambda m, given, note=note: keep(note, "v", values(m, given[0]))))
    layers = record(model, x)
    for hook in hooks:
        hook.remove()
    return layers, found


def values(module, x):
    weight, bias = module.qkv.weight.chunk(3)[2], getattr(module, "v_bias", None)
    if bias is None and module.qkv.bias is not None:
        bias = module.qkv.bias.chunk(3)[2]
    return torch.nn.functional.linear(x, weight, bias)


@pytest.mark.parametrize("name", BUILD)
def test_weights_are_those_of_the_model(name):
    model = build(name)
    x = images(model)
    layers, found = run(model, x)
    assert [layer.name for layer in layers] == list(found)
    for layer in layers:
        _, windows, heads, n, _ = layer.weights.shape
        v, out = (found[layer.name][key].view(2, windows, n, -1) for key in ("v", "out"))
        v = v.unflatten(-1, (-1, out.shape[-1] // heads))  # of fewer heads where queries share them
        v = v.repeat_interleave(heads // v.shape[3], 3)
        again = torch.einsum("bwhij,bwjhd->bwihd", layer.weights, v).flatten(3)
        real = layer.tokens >= 0
        torch.testing.assert_close(again[:, real], out[:, real], atol=1e-5, rtol=1e-4)
        assert not layer.weights.transpose(2, 3)[:, ~real].any()
        torch.testing.assert_close(layer.weights.transpose(2, 3)[:, real].sum(-1), torch.ones(2, int(real.sum()), heads))
        visible = torch.ones_like(layer.weights, dtype=torch.bool) if layer.visible is None else layer.visible
        assert not layer.position[~visible].any()
        if layer.window is None:
            assert layer.grid == Grid(4, 4, model.num_prefix_tokens) and layer.tokens.tolist() == [list(range(n))]


def unpositioned(model):
    """A copy whose attention has no position, by its parameters or by what its blocks are given."""
    bare = copy.deepcopy(model)
    for name, parameter in bare.named_parameters():
        if "relative_position_bias_table" in name or "cpb_mlp.2" in name or ".rel_pos." in name or "shared_rel_pos." in name:
            parameter.data.zero_()
    if getattr(bare, "rope", None) is not None:
        bare.rope.get_embed = lambda *_, **__: [None] * len(bare.blocks) if bare.rope_mixed else None
    return bare


@pytest.mark.parametrize("name", BUILD)
def test_content_is_the_layer_without_position(name):
    model = build(name)
    x = images(model)
    with_position, without = record(model, x), record(unpositioned(model), x)
    torch.testing.assert_close(with_position[0].content, without[0].weights, atol=1e-5, rtol=1e-4)
    if name in ("vit", "reg", "no_class", "no_embed_class", "map", "no_absolute", "deit", "eva", "dynamic"):
        assert all(torch.equal(layer.content, layer.weights) and not layer.position.any() for layer in with_position)
    else:
        for layer in with_position:
            assert (layer.content - layer.weights).abs().max() > 1e-3
            whole = (layer.content.log() + layer.position).softmax(-1)
            if layer.tokens.min() >= 0:
                torch.testing.assert_close(whole, layer.weights, atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("name", ["swin", "swin_dynamic", "swinv2"])
def test_slots_name_the_true_tokens(name):
    """Swin rolls before it pads, so that opposite borders meet in a window: the slots must say so."""
    model = build(name)
    blocks = {f"{n}.attn": b for n, b in model.named_modules() if hasattr(b, "shift_size")}
    whole, parts, hooks = {}, {}, []
    for key, block in blocks.items():
        first = block if name == "swinv2" else block.norm1  # V2 norms after attention
        how = first.register_forward_pre_hook if name == "swinv2" else first.register_forward_hook
        hooks.append(how(lambda _, given, *out, key=key: keep(whole, key, out[0] if out else given[0])))
        hooks.append(block.attn.register_forward_pre_hook(lambda _, given, key=key: keep(parts, key, given[0])))
    layers = record(model, images(model))
    for layer in layers:
        block = blocks[layer.name]
        assert (layer.window, layer.shift) == (tuple(block.window_size), tuple(block.shift_size))
        x = whole[layer.name].flatten(1, 2)  # [B, h*w, C]
        there = torch.where((layer.tokens >= 0)[..., None], x[:, layer.tokens.clamp(min=0)], 0.0)
        torch.testing.assert_close(parts[layer.name].view(there.shape), there, atol=0, rtol=0)
        real = layer.tokens[layer.tokens >= 0]
        assert real.sort().values.tolist() == list(range(layer.grid.tokens))


def test_opposite_borders_meet_in_swin():
    layer = record(build("swin"), torch.randn(1, 3, 48, 40))[1]  # 12 x 10 tokens, windows of 7, shift 3
    assert (layer.grid, layer.shift) == (Grid(12, 10), (3, 3))
    row = layer.tokens // 10
    pairs = layer.visible[0, :, 0]
    both = {(int(a), int(b)) for w in range(len(row)) for a, b in zip(*[row[w][i] for i in pairs[w].nonzero().T], strict=True)}
    assert {(11, 0), (10, 1), (0, 11)} <= both and not {(10, 2), (1, 2), (2, 11)} & both  # row 2 is masked off from them
    padding = layer.tokens < 0
    assert padding.any() and (layer.weights.transpose(2, 4)[:, padding].sum() > 0)  # queries do attend to padding
    assert not layer.visible[0, :, 0].mT[padding].any()
    hidden = ~layer.visible & ~padding[None, :, None, None]
    assert hidden.any() and layer.weights[hidden].max() < 1e-9


def test_position_is_the_table():
    model = build("swin")
    for layer in record(model, images(model)):
        attn = model.get_submodule(layer.name)
        h, w = layer.window
        table = attn.relative_position_bias_table.detach().T.unflatten(1, (2 * h - 1, 2 * w - 1))
        found = offset_mean(layer, layer.position)
        met = ~found.isnan()
        torch.testing.assert_close(found[met], table[met], atol=2e-5, rtol=0)
        assert met.float().mean() > 0.5


def test_parallel_blocks():
    model = VisionTransformer(block_fn=ParallelScalingBlock, **TINY).eval()
    layers = record(model, torch.randn(1, 3, 32, 32))
    assert [layer.name for layer in layers] == ["blocks.0", "blocks.1"] and layers[0].weights.shape == (1, 1, 2, 17, 17)


def test_any_size_the_model_takes():
    layers = record(build("dynamic"), torch.randn(1, 3, 24, 56))
    assert {layer.grid for layer in layers} == {Grid(3, 7, 1)} and {layer.stride for layer in layers} == {(8.0, 8.0)}
    with pytest.raises(AssertionError):  # timm's own
        record(build("vit"), torch.randn(1, 3, 24, 56))
    found = attention_statistics(record(build("swin_dynamic"), torch.randn(1, 3, 52, 36)))
    assert 0 < found["attention_distance_share"] < 1


def test_registered_models():
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1)
    layer = record(model, torch.randn(1, 3, 64, 64))[0]
    assert (layer.grid, layer.stride, layer.image) == (Grid(4, 4, 1), (16.0, 16.0), (64, 64))
    features = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=1, out_indices=[0], features_only=True)
    with pytest.raises(ValueError, match="tokens of vit_tiny_patch16_224 cannot be placed on the image: it has no patch_embed"):
        record(features, torch.randn(1, 3, 64, 64))


def test_tokens_that_are_not_the_image():
    model = build("vit")
    model.num_prefix_tokens = 3
    with pytest.raises(ValueError, match=r"the 17 tokens of blocks\.0\.attn cannot be placed on the image.* 4x4 patches and 3"):
        record(model, torch.randn(1, 3, 32, 32))


@pytest.mark.parametrize("name", ["vit", "swin", "mixed"])
def test_nothing_is_left_behind(name):
    model = build(name).train()
    model.patch_embed.eval()

    def state():
        return [(m.training, set(vars(m)), getattr(m, "fused_attn", None), len(m._forward_pre_hooks)) for m in model.modules()]

    before, x = state(), images(model)
    record(model, x)
    assert state() == before
    handle = next(m for m in model.modules() if isinstance(m, ATTENTION)).proj.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        record(model, x)
    handle.remove()
    assert state() == before
    model(x).sum().backward()


def test_a_rotated_layer_does_not_answer_twice():
    """It is run again for its logits alone."""
    model, calls = build("mixed"), []
    for block in model.blocks:
        for module in (block.attn, block.attn.proj):
            module.register_forward_hook(lambda *_: calls.append(1))
    record(model, images(model))
    assert len(calls) == 2 * len(model.blocks)
