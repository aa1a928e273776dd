"""relativize: nothing but position changes, at any size; the result is a vitrel model; what is refused."""

import copy

import pytest
import timm
import torch
from timm.models._input import get_model_input_config
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from helpers import each
from helpers.relativize_models import MODELS, TINY, build, image, position_parameters, randomize
from vitrel.layers import Fade
from vitrel.models.vit import ViT
from vitrel.position import POSITIONS
from vitrel.weights import absolute_scale, drop_absolute, relativize

ROPE = ("eva02", "cat", "mixed", "dinov3", "attention_rope")
SILENT = ("table", "factorized", "clipped", "t5", "shaw", "decomposed", "transformer_xl")


def _table(block):
    return next(part for part in block.position.modules() if isinstance(part, POSITIONS["table"]))


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


@each("name", MODELS)
def test_nothing_changes_but_position(name):
    model, x = build(name), image()
    before, state = model(x), {k: v.clone() for k, v in model.state_dict().items()}
    result = relativize(model)
    assert type(result) is ViT and result is not model
    torch.testing.assert_close(result(x), before, atol=1e-5, rtol=1e-5)
    randomize(result)
    assert (result(x) - before).abs().max() > 1e-4
    after = model.state_dict()
    assert after.keys() == state.keys() and all(torch.equal(after[k], v) for k, v in state.items())
    assert torch.equal(model(x), before), "the model given stays as it is, its parameters its own"


@each("position", SILENT)
def test_learned_rows_start_at_zero(position):
    model, x = build("mixed"), image()
    before = model(x)
    torch.testing.assert_close(relativize(model, position)(x), before, atol=1e-5, rtol=1e-5)


@pytest.mark.slow
@each("name", [name for name in MODELS if name != "vitrel"])
def test_table_is_a_mask_of_the_original(name):
    """A random table on a non-square grid, next to the model's own rope, against timm's attention with the bias as its mask."""
    options = dict(img_size=(24, 40), dynamic_img_size=True) if name != "deit" else dict(img_size=(24, 40))
    original = build(name, **options)
    model, x = randomize(relativize(copy.deepcopy(original))), image(24, 40)
    table = _table(model.blocks[0]).relative_position_bias_table.detach()
    for block in model.blocks:
        _table(block).relative_position_bias_table.data.copy_(table)
    mask = bias_matrix(table, 3, 5, original.num_prefix_tokens)
    torch.testing.assert_close(model(x), original(x, attn_mask=mask), atol=1e-5, rtol=1e-5)
    assert (model(x) - original(x)).abs().max() > 1e-4


@pytest.mark.slow
@each("name", ROPE)
def test_rope_is_kept_dropped_or_replaced(name):
    x, model = image(), build(name)
    kept, dropped, replaced = relativize(model), relativize(model, rope="drop"), relativize(model, "rope_axial+table")
    torch.testing.assert_close(kept(x), model(x), atol=1e-5, rtol=1e-5)
    without = build(name)
    without.rope = None
    torch.testing.assert_close(dropped(x), without(x), atol=1e-5, rtol=1e-5)
    assert (replaced(x) - kept(x)).abs().max() > 1e-5 < (replaced(x) - dropped(x)).abs().max()
    assert kept(image(16, 56)).shape == replaced(image(20, 50)).shape == (2, 5)


@pytest.mark.slow
@each(
    ("name", "absolute"), [*((name, "keep") for name in MODELS), *((name, "drop") for name in ("vit", "deit", "cat", "vitrel"))]
)
def test_any_size(name, absolute):
    model = randomize(relativize(build(name), absolute=absolute))
    if name not in ("vitrel", "deit", "dinov3"):
        peer = build(name, dynamic_img_size=True, dynamic_img_pad=True)
        if absolute == "drop":
            peer.pos_embed = None
        for parameter in position_parameters(silent := copy.deepcopy(model)).values():
            nn.init.zeros_(parameter)
        torch.testing.assert_close(silent(image(40, 20)), peer(image(40, 20)), atol=1e-5, rtol=1e-5)
    state = copy.deepcopy(model.state_dict())
    for size in [(8, 8), (64, 24), (37, 50)]:
        assert model(image(*size)).isfinite().all()
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert (model.pos_embed is None) == (absolute == "drop" or name in ("no_absolute", "dinov3"))


def test_permuting_patches_matters_only_through_position():
    model = relativize(build("no_class"), absolute="drop")
    patches = image().unfold(2, 8, 8).unfold(3, 8, 8)  # [B, 3, 4, 4, 8, 8]
    mixed = patches.flatten(2, 3)[:, :, torch.randperm(16)].unflatten(2, (4, 4)).permute(0, 1, 2, 4, 3, 5).reshape(2, 3, 32, 32)
    torch.testing.assert_close(model(mixed), model(image()), atol=1e-5, rtol=1e-5)
    randomize(model)
    assert (model(mixed) - model(image())).abs().max() > 1e-3


def test_timm_knows_that_any_size_goes():
    model = relativize(timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=3).eval())
    assert get_model_input_config(model)["fixed_input_size"] is False


def test_pooling_that_a_model_does_not_have_is_refused():
    with pytest.raises(ValueError, match="global_pool='map' needs a model built with global_pool='map'"):
        relativize(build("vit")).reset_classifier(3, "map")
    with pytest.raises(ValueError, match="dist_token needs global_pool='token'"):
        relativize(build("deit")).reset_classifier(3, "avg")
    with pytest.raises(ValueError, match="dist_token needs class_token=True and global_pool='token'"):
        ViT(**TINY, dist_token=True, global_pool="avg")
    with pytest.raises(ValueError, match="need attention pooling"):
        ViT(**TINY, pool_args=dict(num_heads=2))
    with pytest.raises(ValueError, match="needs a position that adds to the tokens; 'table' does not"):
        ViT(**TINY, position="table", absolute_fade=3)


def test_mode_and_type_of_the_model_are_taken_over():
    model = relativize(build("eva").train().bfloat16())
    assert model.training and all(p.dtype == torch.bfloat16 for p in model.parameters())
    assert not relativize(build("eva")).training
    with torch.device("meta"):
        model = relativize(VisionTransformer(**TINY))
    assert all(p.device.type == "meta" for p in model.parameters())


@pytest.mark.slow
def test_compile():
    """A step of training counts for the fade in a graph too."""
    model = randomize(relativize(build("mixed", depth=1), absolute="fade", fade_steps=3))
    torch._dynamo.reset()
    model.train().set_grad_checkpointing()
    torch.compile(model, backend="aot_eager", fullgraph=True)(image()).sum().backward()
    assert model.absolute_fade.steps == 1 and all(p.grad is not None for p in model.parameters())


REFUSED = [
    (lambda: relativize(build("vit")), {}, "has 'table' in attention already: .* build the model with it"),
    (lambda: ViT(position="absolute+table", **TINY), {}, "has 'table' in attention already"),
    (lambda: build("vit"), dict(position="absolute+table"), "'absolute' adds to the tokens, .* attention keys only"),
    (lambda: build("vit"), dict(position="tabel"), "did you mean 'table'"),
    (lambda: build("vit"), dict(position_args=dict(radius=3)), "has no option 'radius'"),
    (lambda: build("vit"), dict(position_args=dict(init_std=1.0)), "init_std=1.0 has no effect .* leave it out"),
    (lambda: build("vit"), dict(absolute="remove"), "absolute='remove' is unknown; choose one of keep, drop, fade"),
    (lambda: build("vit"), dict(rope="replace"), "rope='replace' is unknown; choose one of keep, drop"),
    (lambda: build("vit"), dict(absolute="fade"), "needs fade_steps"),
    (lambda: build("vit"), dict(absolute="fade", fade_steps=0), "of 1 or more, not 0"),
    (lambda: build("vit"), dict(fade_steps=9), "fade_steps=9 needs absolute='fade', not 'keep'"),
    (lambda: build("dinov3"), dict(absolute="fade", fade_steps=9), "needs an absolute embedding, and the model has none"),
    (lambda: build("vit", num_heads=16), dict(position="rope_mixed"), "head width divisible by 4"),
    (lambda: timm.create_model("vitrel_swin_n"), {}, "has 'table' in its windows already"),
    (lambda: timm.create_model("beit_base_patch16_224", depth=1), {}, "has 'table' in attention already"),
    (lambda: timm.create_model("vitrel_vit_n8_table", share_position=True), {}, "has 'table' in attention already"),
]


@each(("make", "options", "message"), REFUSED, ids=range(len(REFUSED)))
def test_refusals_name_the_thing(make, options, message):
    with pytest.raises((ValueError, TypeError), match=message):
        relativize(make(), **options)


def test_the_size_that_new_encodings_are_trained_at():
    model = build("reg")
    result = relativize(model, img_size=(48, 40))
    assert _table(result.blocks[0]).grid[:2] == result.pos_embed.grid[:2] == (6, 5) and result.img_size == (48, 40)
    wide = relativize(model)(image(48, 40))
    torch.testing.assert_close(result(image(48, 40)), wide, atol=1e-5, rtol=1e-5)  # resampled once, as by forward


def test_windows_of_a_vitrel_vit_are_the_grids_of_their_encodings():
    options = dict(class_token=False, global_pool="avg", block_args=dict(window=(4, 3), global_blocks=(1,)))
    model = relativize(timm.create_model("vitrel_vit_n8_absolute", depth=2, **options), "table")
    assert [tuple(block.position.grid) for block in model.blocks] == [(4, 3, 0), (8, 8, 0)]
    assert model.resampled((64, 64)) == {}


@pytest.mark.slow
@each("name", ["no_embed_class", "deit", "vitrel"])
def test_fade(name):
    x, model = image(), relativize(build(name), absolute="fade", fade_steps=4)
    full, bare = relativize(build(name))(x), relativize(build(name), absolute="drop")(x)
    assert absolute_scale(model) == 1 and torch.equal(model(x), full)
    with pytest.raises(ValueError, match=r"still has scale 1: train .*start again .*absolute=.drop"):
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
    half = Fade(3).bfloat16()
    half.steps += 1
    assert half(torch.ones(1, dtype=torch.bfloat16)).dtype == torch.bfloat16 and half.steps == 2
