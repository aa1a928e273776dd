"""relativize: nothing but position changes, at any size; the result goes on as any model of timm; what is refused."""

import copy
import io
import warnings

import pytest
import timm
import torch
from timm.layers import PatchEmbed
from timm.models._features import FeatureGetterNet
from timm.models._features_fx import create_feature_extractor
from timm.models._input import get_model_input_config
from timm.models.naflexvit import NaFlexVit
from timm.models.swin_transformer import SwinTransformer
from timm.models.vision_transformer import ParallelScalingBlock, ParallelThingsBlock, VisionTransformer
from timm.optim import param_groups_layer_decay
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental import _config as fx_config

from helpers.relativize_models import MODELS, TINY, build, image, position_parameters, randomise
from vitrel.convert.fade import Fade, absolute_scale, drop_absolute
from vitrel.convert.relativize import relativize
from vitrel.models.vit import ViT
from vitrel.position import POSITIONS

ROPE = ("eva02", "cat", "mixed", "dinov3", "attention_rope")
SILENT = ("table", "factorised", "clipped", "t5", "shaw", "decomposed", "transformer_xl")


def bias_matrix(table, h, w, prefix):
    """[H, N, N] from the definition: rows of [(2h-1)(2w-1) + 3, H] by offset, then cls to token, token to cls, cls to cls."""
    n, last = prefix + h * w, (2 * h - 1) * (2 * w - 1)
    out = torch.zeros(table.shape[1], n, n)
    for i in range(n):
        for j in range(n):
            if i < prefix or j < prefix:
                row = last + (2 if i < prefix and j < prefix else 0 if i < prefix else 1)
            else:
                (yi, xi), (yj, xj) = divmod(i - prefix, w), divmod(j - prefix, w)
                row = (yi - yj + h - 1) * (2 * w - 1) + xi - xj + w - 1
            out[:, i, j] = table[row]
    return out


@pytest.mark.parametrize("name", MODELS)
def test_nothing_changes_but_position(name):
    model, x = build(name), image()
    before, state = model(x), {k: v.clone() for k, v in model.state_dict().items()}
    assert relativize(model) is model
    torch.testing.assert_close(model(x), before, atol=1e-5, rtol=1e-5)
    after = model.state_dict()
    assert all(torch.equal(after[k], v) for k, v in state.items())
    assert set(after) - set(state) == set(position_parameters(model)) != set()
    report = model.load_state_dict(state, strict=False)
    assert not report.unexpected_keys and set(report.missing_keys) == set(position_parameters(model))


@pytest.mark.parametrize("position", SILENT)
@pytest.mark.parametrize("name", ["vit", "mixed"])
def test_learned_rows_start_at_zero(name, position):
    model, x = build(name), image()
    before = model(x)
    torch.testing.assert_close(relativize(model, position)(x), before, atol=1e-5, rtol=1e-5)
    model = relativize(build(name), position, zero_init=False)
    assert all(parameter.any() for parameter in position_parameters(model).values())


@pytest.mark.parametrize("name", [name for name in MODELS if name != "vitrel"])
def test_table_is_a_mask_of_the_original(name):
    """A random table on a non-square grid, next to the model's own rope, against timm's attention with the bias as its mask."""
    options = dict(img_size=(24, 40), dynamic_img_size=True) if name != "deit" else dict(img_size=(24, 40))
    original = build(name, **options)
    model, x = randomise(relativize(copy.deepcopy(original))), image(24, 40)
    for block in model.blocks:
        block.attn.position = model.blocks[0].attn.position
    table = model.blocks[0].attn.position.relative_position_bias_table.detach()
    mask = bias_matrix(table, 3, 5, original.num_prefix_tokens)
    torch.testing.assert_close(model(x), original(x, attn_mask=mask), atol=1e-5, rtol=1e-5)
    assert (model(x) - original(x)).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["reg", "vitrel"])
def test_attention_against_a_double_loop(name):
    model = randomise(relativize(build(name, img_size=(24, 40), qkv_bias=True)))
    seen, attn = {}, model.blocks[1].attn
    attn.register_forward_hook(lambda module, args, out: seen.update(x=args[0][0], out=out[0]))
    with torch.no_grad():
        model(image(24, 40))
        position = model.blocks[1].position if name == "vitrel" else attn.position
        bias = bias_matrix(position.relative_position_bias_table, 3, 5, model.num_prefix_tokens)
        n, width = seen["x"].shape[0], 16
        q, k, v = (t.view(n, 2, width) for t in attn.qkv(seen["x"]).chunk(3, -1))
        if name == "reg":
            q, k = attn.q_norm(q), attn.k_norm(k)
        rows = []
        for i in range(n):
            heads = []
            for head in range(2):
                logits = torch.stack([q[i, head] @ k[j, head] / width**0.5 + bias[head, i, j] for j in range(n)])
                heads.append(logits.softmax(0) @ v[:, head])
            rows.append(torch.cat(heads))
        torch.testing.assert_close(seen["out"], attn.proj(torch.stack(rows)), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ROPE)
def test_rope_is_kept_dropped_or_replaced(name):
    x = image()
    kept, dropped, replaced = (build(name) for _ in range(3))
    relativize(dropped, rope="drop")
    relativize(replaced, "rope_axial+table")
    assert dropped.rope is None and replaced.rope is None
    assert not any(key.startswith("rope.") for key in replaced.state_dict())
    without = build(name)
    without.rope = None
    torch.testing.assert_close(dropped(x), without(x), atol=1e-5, rtol=1e-5)
    assert (replaced(x) - kept(x)).abs().max() > 1e-5 < (replaced(x) - dropped(x)).abs().max()
    assert relativize(kept)(image(16, 56)).shape == replaced(image(20, 50)).shape == (2, 5)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("absolute", ["keep", "drop"])
def test_any_size(name, absolute):
    model = randomise(relativize(build(name), absolute=absolute))
    if name not in ("vitrel", "deit", "dinov3"):
        peer = build(name, dynamic_img_size=True, dynamic_img_pad=True)
        if absolute == "drop":
            peer.pos_embed = None
        for parameter in position_parameters(silent := copy.deepcopy(model)).values():
            nn.init.zeros_(parameter)
        torch.testing.assert_close(silent(image(40, 20)), peer(image(40, 20)), atol=1e-5, rtol=1e-5)
    state = copy.deepcopy(model.state_dict())
    for size in [(8, 8), (64, 24), (37, 50), (32, 32)]:
        assert model(image(*size)).isfinite().all()
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert (model.pos_embed is None) == (absolute == "drop" or name in ("no_absolute", "dinov3"))


def test_permuting_patches_matters_only_through_position():
    model = relativize(build("no_class"), absolute="drop")
    patches = image().unfold(2, 8, 8).unfold(3, 8, 8)  # [B, 3, 4, 4, 8, 8]
    mixed = patches.flatten(2, 3)[:, :, torch.randperm(16)].unflatten(2, (4, 4)).permute(0, 1, 2, 4, 3, 5).reshape(2, 3, 32, 32)
    torch.testing.assert_close(model(mixed), model(image()), atol=1e-5, rtol=1e-5)
    randomise(model)
    assert (model(mixed) - model(image())).abs().max() > 1e-3


@pytest.mark.parametrize("position", [k for k, v in POSITIONS.items() if v.site == "attention" and k != "none"])
def test_gradient_reaches_every_parameter(position):
    """With rows drawn at random (at zero, Transformer-XL's v has none) and pooled patches (prefix queries may have no term)."""
    model = relativize(build("reg", global_pool="avg"), position, zero_init=False).train()
    model(image(24, 16)).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    missing = [name for name, p in position_parameters(model).items() if not p.grad.any()]
    assert missing == []


def test_masks():
    model, original = relativize(build("vit")), build("vit")
    mask = torch.rand(17, 17, generator=torch.Generator().manual_seed(0)) > 0.4
    mask.fill_diagonal_(True)
    for options in (dict(attn_mask=mask), dict(attn_mask=mask[None, None].float().log()), dict(is_causal=True)):
        torch.testing.assert_close(model(image(), **options), original(image(), **options), atol=1e-5, rtol=1e-5)
    with pytest.raises(ValueError, match="attn_mask and is_causal exclude each other"):
        model(image(), attn_mask=mask, is_causal=True)


def test_timm_knows_that_any_size_goes():
    model = relativize(timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=3).eval())
    assert get_model_input_config(model)["fixed_input_size"] is False
    assert isinstance(model, VisionTransformer) and type(model).__name__ == "RelativizedVisionTransformer"
    features = FeatureGetterNet(model, out_indices=[0])(torch.randn(1, 3, 96, 160))
    assert features[0].shape == (1, 192, 6, 10)


@pytest.mark.parametrize("name", MODELS)
def test_interface_of_timm(name):
    model, x = randomise(relativize(build(name))), image(40, 24)
    features = model.forward_features(x)
    assert torch.equal(model.forward_head(features), model(x))
    last, found = model.forward_intermediates(x, indices=2, output_fmt="NCHW")
    assert torch.equal(last, features) and [f.shape for f in found] == [(2, 32, 5, 3)] * 2
    assert set(position_parameters(model)) <= model.no_weight_decay() and "cls_token" in model.no_weight_decay()
    assert copy.deepcopy(model).no_weight_decay() == model.no_weight_decay()
    groups = param_groups_layer_decay(model, 0.05, model.no_weight_decay(), layer_decay=0.5)
    placed = {id(p): group for group in groups for p in group["params"]}
    for key, parameter in position_parameters(model).items():
        block = model.get_parameter(f"blocks.{key.split('.')[1]}.attn.proj.weight")
        assert placed[id(parameter)]["lr_scale"] == placed[id(block)]["lr_scale"]
        assert placed[id(parameter)]["weight_decay"] == 0
    model.prune_intermediate_layers([0], prune_head=False)
    assert len(model.blocks) == 1 and len(model.feature_info) == 2
    model.reset_classifier(7)
    assert model(x).shape == (2, 7) and model.get_classifier() is not None


def test_the_state_of_the_model_is_taken_over():
    model = build("eva").train()
    model.set_grad_checkpointing()
    relativize(model, "rope_normalised", dict(jitter=2.0))
    assert model.blocks[0].grad_checkpointing and not model.grad_checkpointing
    assert model.blocks[0].attn.position.training and relativize(build("eva")).blocks[0].attn.position.training is False


@pytest.mark.parametrize("name", ["reg", "deit", "no_class", "eva02", "cat", "mixed"])
def test_graph_features(name):
    """fx, traced at one size, run at others; the graph notes its own grids and counts its own steps."""
    model = randomise(relativize(build(name), absolute="fade", fade_steps=4))
    extractor = create_feature_extractor(model, ["norm"])
    for size in [(32, 32), (24, 40), (40, 24)]:
        torch.testing.assert_close(extractor(image(*size))["norm"], model.forward_features(image(*size)), atol=0, rtol=0)
    assert absolute_scale(model) == 1
    model.train(), extractor.train()(image())
    assert absolute_scale(model) == 0.75


@pytest.mark.parametrize("name", ["vit", "deit", "mixed", "cat", "vitrel"])
def test_set_input_size_leaves_the_encodings(name):
    model = randomise(relativize(build(name)))
    tables = {key: p.clone() for key, p in position_parameters(model).items()}
    wide = model(image(24, 48))
    model.set_input_size(img_size=(24, 48))
    assert all(torch.equal(p, tables[key]) for key, p in position_parameters(model).items())
    torch.testing.assert_close(model(image(24, 48)), wide, atol=1e-5, rtol=1e-5)
    assert model.blocks[0].get_submodule("position" if name == "vitrel" else "attn.position").grid[:2] == (4, 4)


@pytest.mark.parametrize("name", ["reg", "eva02", "vitrel"])
def test_copies_are_independent(name):
    model = randomise(relativize(build(name), absolute="fade", fade_steps=4)).train()
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data.mul_(1.5)
    model(image(24, 40)), other(image(40, 8)), other(image())
    assert (absolute_scale(model), absolute_scale(other)) == (0.75, 0.5)
    buffer = io.BytesIO()
    torch.save(model.eval(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    expected, alien = model(image(24, 40)), other.eval()(image(40, 8))
    assert torch.equal(loaded(image(24, 40)), expected) and type(loaded) is type(model)
    assert torch.equal(other(image(40, 8)), alien) and torch.equal(model(image(24, 40)), expected)
    assert (alien - model(image(40, 8))).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["reg", "eva02", "mixed"])
def test_checkpointing_recomputes_on_the_grid_of_its_forward(name):
    """Two crops of the same number of tokens and one smaller, one backward pass: as in multi-crop training."""
    model = randomise(relativize(build(name)))
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        (model(image(24, 40)).sum() + model(image(40, 24)).square().sum() + model(image(16, 16)).sum()).backward()
        gradients.append({key: p.grad.clone() for key, p in model.named_parameters()})
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["reg", "deit", "eva02", "mixed"])
def test_half_precision(name):
    model = randomise(relativize(build(name)), 0.1)
    expected = model(image())
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(image()).float(), expected, atol=0.05, rtol=0.05)
    torch.testing.assert_close(model.bfloat16()(image().bfloat16()).float(), expected, atol=0.1, rtol=0.1)
    model = relativize(build(name).bfloat16())
    assert all(p.dtype == torch.bfloat16 for p in position_parameters(model).values())


def test_meta_device():
    with torch.device("meta"):
        model = relativize(VisionTransformer(**TINY))
    assert all(p.device.type == "meta" for p in position_parameters(model).values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reg", "deit", "eva02", "mixed", "vitrel"])
def test_compile(name):
    model, counter = randomise(relativize(build(name), absolute="fade", fade_steps=3)), CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        for size in [(32, 32), (40, 56), (24, 37), (64, 48)]:
            torch.testing.assert_close(compiled(image(*size)), model(image(*size)), atol=1e-5, rtol=1e-5)
    assert counter.frame_count <= 2
    torch._dynamo.reset()
    model.train().set_grad_checkpointing()
    torch.compile(model, backend="aot_eager", fullgraph=True)(image()).sum().backward()
    assert model.absolute_fade.steps == 1 and all(p.grad is not None for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reg", "deit", "cat", "mixed", "vitrel"])
def test_export(name):
    model, dynamic = randomise(relativize(build(name))), torch.export.Dim.DYNAMIC
    with fx_config.patch(backed_size_oblivious=True), torch.no_grad():
        program = torch.export.export(model, (image(40, 56),), dynamic_shapes=({0: dynamic, 2: dynamic, 3: dynamic},))
    for size in [(40, 56), (32, 32), (24, 61)]:
        torch.testing.assert_close(program.module()(image(*size)), model(image(*size)), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_export_of_a_static_shape():
    """DINOv3's rope bakes the size into the graph, in timm too."""
    model = randomise(relativize(build("dinov3")))
    program = torch.export.export(model, (image(40, 56),))
    torch.testing.assert_close(program.module()(image(40, 56)), model(image(40, 56)), atol=1e-5, rtol=1e-5)


def without_size():
    model = build("no_absolute")
    model.patch_embed = PatchEmbed(None, 8, 3, 32)
    return model


class OwnEmbedding(VisionTransformer):
    def _pos_embed(self, x):
        return super()._pos_embed(x)


REFUSED = [
    (lambda: "vit_tiny", {}, "takes a model object, not str; build it first"),
    (lambda: relativize(build("vit")), {}, "is relativized already: build the model anew"),
    (lambda: ViT(position="absolute+table", **TINY), {}, "has position in attention already: build it with"),
    (lambda: relativize(build("vitrel")), {}, "has position in attention already"),
    (lambda: build("vit"), dict(position="absolute+table"), "'absolute' adds to the tokens, .* attention keys only"),
    (lambda: build("vit"), dict(position="tabel"), "did you mean 'table'"),
    (lambda: build("vit"), dict(position_args=dict(radius=3)), "has no option 'radius'"),
    (lambda: build("vit"), dict(position_args=dict(init_std=1.0)), "init_std=1.0 has no effect, .* pass zero_init=False"),
    (lambda: build("vit"), dict(absolute="remove"), "absolute='remove' is unknown; choose one of keep, drop, fade"),
    (lambda: build("vit"), dict(rope="replace"), "rope='replace' is unknown; choose one of keep, drop"),
    (lambda: build("vit"), dict(absolute="fade"), "needs fade_steps, .* not None"),
    (lambda: build("vit"), dict(absolute="fade", fade_steps=0), "a whole number from 1, not 0"),
    (lambda: build("vit"), dict(fade_steps=9), "fade_steps=9 needs absolute='fade', not 'keep'"),
    (lambda: build("dinov3"), dict(absolute="fade", fade_steps=9), "needs an absolute embedding, and the model has none"),
    (lambda: build("vit", num_heads=16), dict(position="rope_mixed"), "head width divisible by 4"),
    (lambda: build("vit", patch_drop_rate=0.5), {}, r"drops patches \(patch_drop_rate=0.5\)"),
    (lambda: build("eva", patch_drop_rate=0.5), {}, r"drops patches \(patch_drop_rate=0.5\)"),
    (lambda: build("vit", block_fn=ParallelScalingBlock), {}, "ParallelScalingBlock has no attention of its own"),
    (lambda: build("vit", block_fn=ParallelThingsBlock), {}, "ParallelThingsBlock has no attention of its own"),
    (lambda: build("vit", attn_layer="diff"), {}, "DiffAttention computes attention in a way of its own"),
    (
        lambda: build("attention_rope", num_kv_heads=1, qkv_fused=False),
        {},
        r"grouped-query attention \(2 heads share 1 of keys and values\) .* num_kv_heads=None",
    ),
    (lambda: SwinTransformer(img_size=32, embed_dim=8, depths=(1,), num_heads=(1,), window_size=4), {}, "already windowed"),
    (lambda: timm.create_model("vitrel_swin_n"), {}, "already windowed"),
    (lambda: NaFlexVit(embed_dim=32, depth=1, num_heads=2), {}, "not NaFlexVit: load the weights into one of them"),
    (lambda: timm.create_model("beit_base_patch16_224", depth=1), {}, "already has a relative bias of its own"),
    (lambda: timm.create_model("vit_relpos_small_patch16_224", depth=1), {}, "already has a relative bias of its own"),
    (lambda: nn.DataParallel(build("vit")), {}, "not DataParallel: .* unwrap a model that is compiled, parallel"),
    (lambda: OwnEmbedding(**TINY), {}, "OwnEmbedding has a _pos_embed of its own"),
]


def test_grid():
    model = relativize(build("vit"), grid=(2, 3))
    assert model.blocks[0].attn.position.grid == (2, 3, 1)
    assert model.blocks[0].attn.position.relative_position_bias_table.shape == (3 * 5 + 3, 2)
    with pytest.raises(ValueError, match=r"grid \(2, 0\) must be \(h, w\) in patches"):
        relativize(build("vit"), grid=(2, 0))
    with pytest.raises(ValueError, match="names no image size: pass grid="):
        relativize(without_size())
    with pytest.warns(UserWarning, match=r"\(30, 45\) pixels are not whole patches: .* now padded to \(4, 6\)"):
        model = relativize(build("vit", img_size=(30, 45)))
    assert model.blocks[0].attn.position.grid == (4, 6, 1) and model(image(30, 45)).isfinite().all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        relativize(build("vit", img_size=(30, 45), dynamic_img_size=True, dynamic_img_pad=True))


@pytest.mark.parametrize(("make", "options", "message"), REFUSED, ids=range(len(REFUSED)))
def test_refusals_name_the_thing_and_change_nothing(make, options, message):
    model = make()
    state = model.state_dict() if isinstance(model, nn.Module) else {}
    kind, keys = type(model), set(state)
    with pytest.raises((ValueError, TypeError), match=message):
        relativize(model, **options)
    assert type(model) is kind and (not keys or set(model.state_dict()) == keys)


def test_errors_of_use():
    model = relativize(build("vit"))
    with pytest.raises(ValueError, match="attention got 17 tokens, but the model's last grid is None: call the whole model"):
        model.blocks[0](torch.randn(1, 17, 32))
    model(image())
    with pytest.raises(ValueError, match=r"attention got 9 tokens, but the model's last grid is Grid\(h=4, w=4, prefix=1\)"):
        model.blocks[0](torch.randn(1, 9, 32))
    model.patch_embed.output_fmt, model.patch_embed.flatten = None, True
    with pytest.raises(ValueError, match=r"patch_embed must give \[B, h, w, C\], not \(2, 16, 32\)"):
        model(image())
    with pytest.raises(ValueError, match="Linear has no pos_embed: pass the model that relativize returned"):
        absolute_scale(nn.Linear(1, 1))


def test_a_vitrel_vit_with_a_shared_encoding_has_position_already():
    with pytest.raises(ValueError, match="this vitrel ViT has position in attention already"):
        relativize(timm.create_model("vitrel_vit_n8_table", share_position=True), "rope_mixed")


def test_windows_of_a_vitrel_vit_are_the_grids_of_their_encodings():
    options = dict(class_token=False, global_pool="avg", block_args=dict(window=(4, 3), global_blocks=(1,)))
    model = relativize(timm.create_model("vitrel_vit_n8_absolute", depth=2, **options), "table")
    assert [tuple(block.position.grid) for block in model.blocks] == [(4, 3, 0), (8, 8, 0)]
    assert model.resized((64, 64)) == {}


@pytest.mark.parametrize("name", ["vit", "no_embed_class", "deit", "cat", "vitrel"])
def test_fade(name):
    x, model = image(), relativize(build(name), absolute="fade", fade_steps=4)
    full, bare = relativize(build(name))(x), relativize(build(name), absolute="drop")(x)
    assert absolute_scale(model) == 1 and torch.equal(model(x), full)
    with pytest.raises(ValueError, match="still acts, at scale 1: train on, or pass force=True"):
        drop_absolute(model)
    scales = []
    for _ in range(5):
        model.train()(x)
        model.eval()(x)
        scales.append(absolute_scale(model))
    assert scales == [0.75, 0.5, 0.25, 0, 0]
    torch.testing.assert_close(model(x), bare, atol=1e-6, rtol=1e-6)
    faded = model(x)
    assert drop_absolute(model) is model and torch.equal(model(x), faded)
    assert not any("absolute_fade" in key or "pos_embed" in key for key in model.state_dict())
    assert absolute_scale(model) == 0
    with pytest.raises(ValueError, match="no absolute embedding"):
        drop_absolute(model)


def test_fade_resumes():
    model = relativize(build("vit"), absolute="fade", fade_steps=8).train()
    with torch.no_grad():
        model(image())
    assert absolute_scale(model) == 1, "a forward pass without gradients is no training step"
    for _ in range(3):
        model(image())
    resumed = relativize(build("vit"), absolute="fade", fade_steps=8)
    resumed.load_state_dict(model.state_dict())
    assert absolute_scale(resumed) == absolute_scale(model) == 0.625
    resumed.set_input_size((24, 40))
    assert absolute_scale(resumed) == 0.625 and resumed.pos_embed.shape[1] == 16
    assert absolute_scale(drop_absolute(resumed, force=True)) == 0
    half = Fade(3).bfloat16()
    half.steps += 1
    assert half(torch.ones(1, dtype=torch.bfloat16)).dtype == torch.bfloat16 and half.steps == 2
