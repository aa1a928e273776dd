"""What is recorded is what the layers computed, ours and timm's, for the true tokens; the statistics against double loops."""

import copy
import math

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
from timm.models.vision_transformer import VisionTransformer
from timm.models.vision_transformer_relpos import RelPosAttention, VisionTransformerRelPos
from torch import nn
from torch._dynamo.testing import CompileCounter

import vitrel
from helpers import each
from helpers.relativize_models import MODELS
from helpers.variants import WAYS, perturbed, small_model
from vitrel import Grid
from vitrel.inspect.attention import (
    NEGLIGIBLE,
    Layer,
    attention_statistics_of,
    layer_position_share,
    layer_statistics,
    offset_mean,
    position_shares,
    record,
)
from vitrel.layers import Attention
from vitrel.models.vit import ViT
from vitrel.ops import BACKENDS

TINY = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=5)
KEYS = [*WAYS, "none", "fire", "absolute", "sincos+deberta+alibi"]
SCALED = [
    ("table", dict(temperature="log_n")),
    ("rope_axial", dict(policy="yarn")),
    ("rope_mixed+fire", dict(policy="ntk")),
]
WINDOWED = dict(class_token=False, global_pool="avg", block_args=dict(window=(3, 2), global_blocks=(1,)))
TIMM = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5)
SWIN = dict(img_size=(48, 40), patch_size=4, embed_dim=16, depths=(2, 2), num_heads=(2, 4), window_size=7, num_classes=5)
ATTENTION = (TimmAttention, AttentionRope, BeitAttention, EvaAttention, RelPosAttention, SwinAttention, SwinV2Attention)
PLAIN = ("vit", "reg", "map", "eva", "dynamic")  # whose attention has no position
BUILD = {name: MODELS[name] for name in (*PLAIN[:-1], "eva02", "cat", "mixed", "dinov3", "attention_rope")} | {
    "dynamic": lambda: VisionTransformer(dynamic_img_size=True, **TIMM),
    "grouped_rope": lambda: Eva(use_rot_pos_emb=True, attn_type="rope", qkv_fused=False, num_kv_heads=1, **TIMM),
    "beit": lambda: Beit(use_rel_pos_bias=True, use_abs_pos_emb=False, qkv_bias=True, **TIMM),
    "beit_shared": lambda: Beit(use_shared_rel_pos_bias=True, **TIMM),
    "relpos_mlp": lambda: VisionTransformerRelPos(rel_pos_type="mlp", **TIMM),
    "relpos_shared": lambda: VisionTransformerRelPos(rel_pos_type="mlp", shared_rel_pos=True, **TIMM),
    "swin_dynamic": lambda: SwinTransformer(dynamic_img_size=True, **SWIN),
    "swinv2": lambda: SwinTransformerV2(**SWIN | dict(window_size=(7, 5))),
}


def vit(position, **options):
    torch.manual_seed(1)
    return perturbed(ViT(**TINY | dict(position=position) | options).eval(), 0.3)


def images(h, w):
    return torch.randn(2, 3, h, w)


def run_ours(model, x):
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
    trained = Grid(*layer.window) if layer.window else layer.grid
    for table in tables:
        if table.value is not None:
            rows = table.value.expand(module.num_heads, -1, -1)[:, trained.index(table.axis)]  # [H, N, N, D]
            out = out + torch.einsum("bwhij,hijd->bwihd", layer.weights, rows)
    back = torch.zeros(len(v), layer.grid.tokens, *v.shape[-2:])
    back[:, layer.tokens[layer.tokens >= 0]] = out[:, layer.tokens >= 0]
    return back.flatten(2)


def check(model, x):
    layers, seen = run_ours(model, x)
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


@pytest.mark.slow
@each("key", KEYS)
def test_weights_of_ours(key):
    layers = check(vit(key, reg_tokens=1), images(40, 24))
    assert [layer.grid for layer in layers] == [Grid(5, 3, 2)] * 2
    assert [layer.stride for layer in layers] == [(8.0, 8.0)] * 2


@each(("key", "options"), SCALED)
def test_scales_that_depend_on_the_grid(key, options):
    check(vit(key, position_args=options), images(40, 56))


@each("key", ["decomposed", "rope_mixed+table"])
def test_block_windows(key):
    layers = check(vit(key, **WINDOWED), images(40, 25))
    assert [layer.window for layer in layers] == [(3, 2), None]
    assert layers[0].tokens.tolist()[1::2] == [[2, 3, 6, 7, 10, 11], [14, 15, 18, 19, -1, -1]]


@pytest.mark.slow
@each("key", WAYS)
def test_shifted_padded_windows(key):
    layers = check(small_model(f"vitrel_swin_n_{key}"), images(22, 31))
    assert [layer.shift for layer in layers] == [(0, 0), (2, 2), (0, 0), (2, 2), (0, 0), (0, 0)]
    assert [layer.grid[:2] for layer in layers[::2]] == [(11, 16), (6, 8), (3, 4)]
    assert [layer.stride for layer in layers[::2]] == [(2.0, 2.0), (4.0, 4.0), (8.0, 8.0)]


def test_cosine_attention_and_a_shared_position():
    check(small_model("vitrel_swinv2_n"), images(22, 30))
    check(vit("transformer_xl", share_position=True), images(24, 40))


@pytest.mark.slow
@each("key", [key for key in WAYS if key != "deberta"])
def test_content_of_ours_is_the_layer_without_position(key):
    """The first layer of a model with the same weights and no position at all has these weights."""
    x = images(40, 48)
    for options in ({}, WINDOWED):
        model = vit(key, position_args=dict(temperature="log_n"), **options)
        bare = ViT(**TINY | options, position="none").eval()
        bare.load_state_dict({k: v for k, v in model.state_dict().items() if ".position." not in k})
        with_position, without = record(model, x)[0], record(bare, x)[0]
        torch.testing.assert_close(with_position.content, without.weights, atol=1e-5, rtol=1e-5)
        assert (with_position.content - with_position.weights).abs().max() > 1e-3
        assert not without.position.any()


class Alone(nn.Module):
    """Our drop-in layer in someone else's model, [B, h, w, C] in place of images."""

    def __init__(self, position, mask=None, **options):
        super().__init__()
        self.layer, self.mask = vitrel.RelativeAttention(16, 2, position=position, grid=(4, 3), **options), mask

    def forward(self, x):
        return self.layer(x.flatten(1, 2), x.shape[1:3], self.mask)


@each("additive", [False, True])
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


@pytest.mark.slow
def test_compiled_models_run_uncompiled():
    model, x, counter = vit("table", depth=1), images(32, 32), CompileCounter()
    (expected,) = record(model, x)
    around = torch.compile(model, backend=counter)
    model.compile(backend=counter)
    for compiled in (around, model):
        (layer,) = record(compiled, x)
        assert layer.name == expected.name and torch.equal(layer.weights, expected.weights)
    assert counter.frame_count == 0
    model(x)
    assert counter.frame_count == 1


def build(name):
    torch.manual_seed(0)
    model = BUILD[name]().eval()
    for key, parameter in model.named_parameters():
        if key != "rope.freqs":
            nn.init.normal_(parameter, std=0.2)
    return model


def images_for(model):
    height, width = model.patch_embed.img_size
    return torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(3))


def keep(notes, key, value):
    """A hook that returns nothing, so that it changes nothing."""
    notes[key] = value


def run_timm(model, x):
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
                hooks.append(
                    module.register_forward_pre_hook(lambda m, given, note=note: keep(note, "v", project_values(m, given[0])))
                )
    layers = record(model, x)
    for hook in hooks:
        hook.remove()
    return layers, found


def project_values(module, x):
    weight, bias = module.qkv.weight.chunk(3)[2], getattr(module, "v_bias", None)
    if bias is None and module.qkv.bias is not None:
        bias = module.qkv.bias.chunk(3)[2]
    return torch.nn.functional.linear(x, weight, bias)


@pytest.mark.slow
@each("name", BUILD)
def test_weights_of_timm(name):
    """Of the whole, and of content: those of the first layer of the same model without position."""
    model = build(name)
    x = images_for(model)
    layers, found = run_timm(model, x)
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
        if name in PLAIN:
            assert torch.equal(layer.content, layer.weights) and not layer.position.any()
            continue
        assert (layer.content - layer.weights).abs().max() > 1e-3
        if layer.tokens.min() >= 0:
            whole = (layer.content.log() + layer.position).softmax(-1)
            torch.testing.assert_close(whole, layer.weights, atol=1e-5, rtol=1e-3)
    without = record(unpositioned(model), x)
    torch.testing.assert_close(layers[0].content, without[0].weights, atol=1e-5, rtol=1e-4)


def unpositioned(model):
    """A copy whose attention has no position, by its parameters or by what its blocks are given."""
    bare = copy.deepcopy(model)
    for name, parameter in bare.named_parameters():
        if "relative_position_bias_table" in name or "cpb_mlp.2" in name or ".rel_pos." in name or "shared_rel_pos." in name:
            parameter.data.zero_()
    if getattr(bare, "rope", None) is not None:
        bare.rope.get_embed = lambda *_, **__: [None] * len(bare.blocks) if bare.rope_mixed else None
    return bare


@each("name", ["swin_dynamic", "swinv2"])
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
    layers = record(model, images_for(model))
    for layer in layers:
        block = blocks[layer.name]
        assert (layer.window, layer.shift) == (tuple(block.window_size), tuple(block.shift_size))
        x = whole[layer.name].flatten(1, 2)  # [B, h*w, C]
        there = torch.where((layer.tokens >= 0)[..., None], x[:, layer.tokens.clamp(min=0)], 0.0)
        torch.testing.assert_close(parts[layer.name].view(there.shape), there, atol=0, rtol=0)
        real = layer.tokens[layer.tokens >= 0]
        assert real.sort().values.tolist() == list(range(layer.grid.tokens))


def test_any_size_that_timm_takes():
    layers = record(build("dynamic"), torch.randn(1, 3, 24, 56))
    assert {layer.grid for layer in layers} == {Grid(3, 7, 1)} and {layer.stride for layer in layers} == {(8.0, 8.0)}
    found = attention_statistics_of(build("swin_dynamic"), torch.randn(1, 3, 52, 36))
    assert 0 < found["attention_distance_share"] < 1


def state(model):
    names = ("backend", "fused_attn")
    return [
        (m.training, set(vars(m)), [getattr(m, name, None) for name in names], len(m._forward_hooks), len(m._forward_pre_hooks))
        for m in model.modules()
    ]


@each("name", ["ours", "mixed"])
def test_nothing_is_left_behind(name):
    model = (small_model("vitrel_swin_n") if name == "ours" else build(name)).train()
    model.patch_embed.eval()
    attention = next(m for m in model.modules() if isinstance(m, (*ATTENTION, Attention)))
    if name == "ours":
        attention.backend = "reference"
    before, known, x = state(model), dict(BACKENDS), images(64, 64) if name == "ours" else images_for(model)
    record(model, x)
    assert (state(model), BACKENDS) == (before, known)
    handle = attention.proj.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        record(model, x)
    handle.remove()
    assert (state(model), BACKENDS) == (before, known)
    model(x).sum().backward()
    assert attention.proj.weight.grad is not None


def test_a_model_in_training_is_recorded_in_evaluation():
    model, x = timm.create_model("vitrel_swin_n", num_classes=5, drop_path_rate=0.5).train(), images(64, 64)
    for layer, other in zip(record(model, x), record(copy.deepcopy(model).eval(), x), strict=True):  # nothing is dropped
        assert torch.equal(layer.weights, other.weights)
    before = state(model)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        record(model.layers, x)
    assert state(model) == before


def projected(name, model, x):
    """q and k of one layer [B, N, H, D] in numpy, from the output of its first linear map."""
    found = []
    hook = model.get_submodule(name).qkv.register_forward_hook(lambda _, given, out: found.append(out.detach()))
    with torch.no_grad():
        model(x)
    hook.remove()
    heads = model.get_submodule(name).num_heads
    q, k, _ = found[0].flatten(1, -2).unflatten(-1, (3, heads, -1)).double().unbind(2)
    return q.numpy(), k.numpy()


def softmax(scores):
    top = max(scores)
    e = [math.exp(s - top) for s in scores]
    return [x / sum(e) for x in e]


def looped(q, k, keys, score, place, patch, image, prefix):
    """The four statistics of one layer; keys(i): those query i sees; score(i, j): bias of a pair for each head."""
    entropies, distances, shares = [], [], []
    batch, tokens, heads, width = q.shape
    for b in range(batch):
        for head in range(heads):
            for i in range(prefix, tokens):
                seen = keys(i)
                p = softmax([q[b, i, head] @ k[b, j, head] / math.sqrt(width) + score(i, j)[head] for j in seen])
                entropies.append(-sum(x * math.log(x) for x in p))
                mass = sum(x for x, j in zip(p, seen, strict=True) if j >= prefix)
                d = [(place(i)[0] - place(j)[0], place(i)[1] - place(j)[1]) if j >= prefix else None for j in seen]
                distances.append(sum(x * math.hypot(*o) for x, o in zip(p, d, strict=True) if o) / mass)
                pixels = [math.hypot(o[0] * patch[0], o[1] * patch[1]) if o else 0.0 for o in d]
                shares.append(sum(x * o for x, o in zip(p, pixels, strict=True)) / mass / math.hypot(*image))
    mean = [sum(values) / len(values) for values in (entropies, distances, shares)]
    return dict(
        attention_entropy=mean[0],
        attention_span=math.exp(mean[0]),
        attention_distance=mean[1],
        attention_distance_share=mean[2],
    )


def test_statistics_of_global_attention():
    torch.manual_seed(1)
    shape = dict(img_size=32, patch_size=(8, 4), embed_dim=16, depth=2, num_heads=2, num_classes=5, reg_tokens=1)
    model = perturbed(ViT(**shape, position="none").eval(), 0.5)
    x = torch.randn(2, 3, 22, 15)  # 3 x 4 patches of 8 x 4 pixels, the last ones partial
    layers = record(model, x)
    found = []
    for layer in layers:
        q, k = projected(layer.name, model, x)
        how = dict(patch=(8, 4), image=(22, 15), prefix=2)
        found.append(looped(q, k, lambda i: range(14), lambda i, j: (0, 0), lambda i: divmod(i - 2, 4), **how))
        assert layer_statistics(layer) == pytest.approx(found[-1], rel=1e-5)
    mean = {name: (found[0][name] + found[1][name]) / 2 for name in found[0]}
    mean["attention_span"] = math.exp(mean["attention_entropy"])
    assert attention_statistics_of(model, x) == pytest.approx(mean, rel=1e-5)
    assert found[0]["attention_entropy"] != pytest.approx(found[1]["attention_entropy"], rel=1e-3)


def test_statistics_in_shifted_windows():
    model = small_model("vitrel_swin_n_table")
    h, w, x = 5, 6, torch.randn(1, 3, 10, 12)
    layers = record(model, x)
    assert [(layer.grid[:2], layer.stride) for layer in layers[4:]] == [((2, 2), (8.0, 8.0))] * 2  # 5 x 6, 3 x 3, 2 x 2
    layer = layers[1]
    assert (layer.name, layer.grid, layer.shift) == ("layers.0.blocks.1.attn", Grid(h, w), (2, 2))
    block = model.get_submodule("layers.0.blocks.1")
    table = block.position(block.window).tables[0].bias.detach().double().numpy()

    def window(i):
        y, x = divmod(i, w)
        return (y - 2) // 4, (x - 2) // 4

    def score(i, j):
        (y, x), (v, u) = divmod(i, w), divmod(j, w)
        return table[:, (y - v + 3) * 7 + x - u + 3]

    q, k = projected(layer.name, model, x)
    how = dict(patch=(2, 2), image=(10, 12), prefix=0)
    alike = [[j for j in range(h * w) if window(j) == window(i)] for i in range(h * w)]
    expected = looped(q, k, alike.__getitem__, score, lambda i: divmod(i, w), **how)
    assert layer_statistics(layer) == pytest.approx(expected, rel=1e-5)


def test_known_values():
    """Uniform attention over four tokens in a row: every value is known by hand."""
    weights = torch.full((1, 1, 1, 4, 4), 0.25)
    layer = Layer("", Grid(1, 4), None, (0, 0), torch.arange(4)[None], weights, None, None, stride=(16.0, 16.0))
    mean = (1.5 + 1 + 1 + 1.5) / 4
    share = mean * 16 / math.hypot(16, 64)
    assert list(layer_statistics(layer).values()) == pytest.approx([math.log(4), 4, mean, share])
    one = layer._replace(weights=torch.eye(4)[None, None, None])
    assert list(layer_statistics(one).values()) == pytest.approx([0, 1, 0, 0])
    prefixed = layer._replace(grid=Grid(1, 3, 1))  # patches see patches at distances 0, 1, 2 | 1, 0, 1 | 2, 1, 0
    assert layer_statistics(prefixed)["attention_distance"] == pytest.approx((1 + 2 / 3 + 1) / 3)
    unattending = prefixed._replace(weights=weights.clone().index_fill_(4, torch.arange(1, 4), 0.0))
    assert math.isnan(layer_statistics(unattending)["attention_distance"])  # no query attends to a patch
    unattending.weights[..., 3, :] = 0.25  # now the last one does
    assert layer_statistics(unattending)["attention_distance"] == pytest.approx(1)


@each("name", ["vitrel_swin_n_rope_mixed", "vitrel_vit_n8_lookhere"])
def test_offset_mean(name):
    for layer in record(small_model(name), torch.randn(2, 3, 22, 18))[:2]:
        (h, w), visible = layer.window or layer.grid[:2], layer.visible
        first = layer.weights.shape[-1] - h * w
        total, count = torch.zeros(2, layer.weights.shape[2], 2 * h - 1, 2 * w - 1).double().unbind(0)
        for i in range(h * w):
            for j in range(h * w):
                dy, dx = i // w - j // w, i % w - j % w
                for window, tokens in enumerate(layer.tokens):
                    if tokens[first + i] >= 0 and tokens[first + j] >= 0:
                        pair = layer.weights[:, window, :, first + i, first + j]
                        seen = torch.ones_like(pair) if visible is None else visible[:, window, :, first + i, first + j]
                        total[:, dy + h - 1, dx + w - 1] += (pair * seen).sum(0)
                        count[:, dy + h - 1, dx + w - 1] += seen.sum(0)
        torch.testing.assert_close(offset_mean(layer, layer.weights), (total / count).float(), equal_nan=True)


def test_refused_by_name():
    with pytest.raises(ValueError, match="no attention that can be seen in resnet10t: no softmax of queries and keys"):
        record(timm.create_model("resnet10t"), torch.randn(1, 3, 32, 32))
    with pytest.raises(ValueError, match="no attention that can be seen in Conv2d"):
        record(torch.nn.Conv2d(3, 3, 1), torch.randn(1, 3, 32, 32))


@each("key", ["none", "table", "shaw", "rope_mixed", "absolute", "sincos+rope_mixed"])
def test_encodings_have_a_share_of_attention(key):
    model = small_model("vitrel_vit_n8_none", img_size=32, depth=1, position=key)
    shares = position_shares(model, torch.randn(1, 3, 32, 32))
    assert key == "none" or max(shares.values()) > NEGLIGIBLE
    assert ("tokens" in shares) == any(part in ("absolute", "sincos") for part in key.split("+"))


def test_the_share_is_that_of_a_double_loop_and_none_without_position():
    torch.manual_seed(0)
    model = timm.create_model("vitrel_vit_n8_alibi", img_size=32, num_classes=3).eval()
    layer = record(model, torch.randn(1, 3, 32, 32))[0]
    change, content = [], []
    for head in range(layer.weights.shape[2]):
        for query in range(layer.weights.shape[3]):
            keys = range(layer.weights.shape[4])
            for found, values in (
                (change, [float(layer.position[0, 0, head, query, key]) for key in keys]),
                (content, [math.log(float(layer.content[0, 0, head, query, key])) for key in keys]),
            ):
                mean = sum(values) / len(values)
                found += [(value - mean) ** 2 for value in values]
    assert layer_position_share(layer) == pytest.approx(math.sqrt(sum(change) / sum(content)), rel=1e-4)
    none = timm.create_model("vitrel_vit_n8_none", img_size=32, num_classes=3).eval()
    assert position_shares(none, torch.randn(1, 3, 32, 32)) == {}
