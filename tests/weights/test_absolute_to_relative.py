import copy
import inspect

import pytest
import timm
import torch
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from helpers import each, shared
from vitrel import Grid, create_position, load_pretrained
from vitrel.data import create_dataset
from vitrel.layers import Attention, Block
from vitrel.models.vit import ViT
from vitrel.ops.window import windows
from vitrel.position import POSITIONS, Terms, key_of
from vitrel.position.terms import parts_of
from vitrel.weights import fit
from vitrel.weights.absolute_to_relative import absolute_to_relative, observe
from vitrel.weights.fit import attended, change_basis, fit_attention, minimize, refit_linear
from vitrel.weights.relativize import relativize

TINY = dict(img_size=(32, 48), patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5)  # 4 x 6 patches


@pytest.fixture(autouse=True)
def few_updates(monkeypatch):
    """Of distillation, for the time they take."""
    monkeypatch.setattr("vitrel.weights.fit.STEPS", 3)


def trained(std=1.0, **options):
    """A vitrel ViT whose absolute embedding matters."""
    model = ViT(**TINY | options).eval()
    with torch.no_grad():
        model.pos_embed.pos_embed.normal_(std=std)
        for block in model.blocks:
            block.attn.qkv.weight.normal_(std=0.2)
            block.attn.proj.weight.normal_(std=0.2)
    return model


FITTED = [key for key, kind in POSITIONS.items() if kind.site == "attention" and kind.lr_scale != 1 and key != "alibi"]


def block_with(key, grid, **options):
    """A block of 2 heads of width 16 with an encoding, and its input on `grid`."""
    window = {name: options.pop(name) for name in ("window", "shift") if name in options}
    attn = Attention(32, 2, **window)
    trained_on = Grid(*attn.window) if window else grid
    block = Block(32, attn, create_position(key, trained_on, 2, 16, **options)).eval()
    with torch.no_grad():
        attn.qkv.weight.normal_(std=0.2)
        attn.qkv.bias.normal_(std=0.3)
    return block


def copy_with(block, key, **options):
    """The block with another encoding, whose learned rows start at zero."""
    fresh = copy.deepcopy(block)
    grid = fresh.position.grid
    fresh.position = create_position(key, grid, 2, 16, **options)
    if "init_std" in inspect.signature(POSITIONS[key]).parameters:
        for parameter in fresh.position.parameters(recurse=False):
            nn.init.zeros_(parameter)
    return fresh


@pytest.mark.slow
@each("key", FITTED)
def test_attention_of_a_known_encoding_is_found_again(key, monkeypatch):
    """Planted in one block, fitted in a copy that starts without it: its attention comes back, of any kind of encoding."""
    torch.manual_seed(0)
    grid = Grid(3, 4, 1)
    known = block_with(key, grid, **({"init_std": 0.5} if "init_std" in inspect.signature(POSITIONS[key]).parameters else {}))
    if key == "cpb":
        nn.init.normal_(known.position.cpb_mlp[2].weight, std=0.2)
    x = torch.randn(8, grid.tokens, 32)
    fitted = copy_with(known, key)
    with torch.no_grad():
        wanted = attended(known, x, grid)
        target = wanted.logits(known.position(grid))
    before, after = fit_attention(fitted, x, grid, target, new_rotation=POSITIONS[key].rotates)
    share, explained = {"rope_mixed": (0.7, 0.3), "deberta": (0.7, 0.7)}.get(key, (0.5, 0.8))  # not all of these are found
    assert after.divergence < share * before.divergence and after.explained > max(before.explained, explained)
    assert all(p.requires_grad and p.grad is None for p in fitted.parameters())
    if POSITIONS[key].rotates:  # the best of several starts, whichever comes last
        with monkeypatch.context() as patch:
            patch.setattr(fit, "_STARTS", fit._STARTS[::-1])
            other = fit_attention(copy_with(known, key), x, grid, target, new_rotation=True)[1]
        assert other.divergence == pytest.approx(after.divergence, rel=1e-3)


@pytest.mark.slow
@each("key", ["cpb", "rope_mixed", "shaw"])
def test_in_windows_the_table_that_is_there_is_followed(key):
    """Shifted windows of 4x4 on a grid that is padded."""
    torch.manual_seed(0)
    known = block_with("table", None, window=(4, 4), shift=(2, 2), init_std=1.0)
    x, grid = torch.randn(4, 5, 6, 32), Grid(5, 6)
    fitted = copy_with(known, key)
    with torch.no_grad():
        here = attended(known, x, grid)
        logits = here.logits(known.position(here.grid))
        weights = (logits.softmax(-1) @ here.q).isfinite().all()
    before, after = fit_attention(fitted, x, grid, logits, new_rotation=key == "rope_mixed")
    assert weights and here.weight.sum() == pytest.approx(1) and before.explained < after.explained
    assert after.divergence < (0.2 if key == "cpb" else 0.8) * before.divergence


def test_the_windows_of_the_fit_are_those_of_the_layer():
    torch.manual_seed(0)
    block, grid = block_with("table", None, window=(4, 4), shift=(2, 2), init_std=1.0), Grid(5, 6)
    x = torch.randn(2, 5, 6, 32)
    with torch.no_grad():
        here = attended(block, x, grid)
        layout = windows(5, 6, (4, 4), (2, 2))
        v = block.attn.project(block.norm1(x)).flatten(1, 2)[:, layout.source, 64:].unflatten(1, (-1, 16)).flatten(0, 1)
        v = v.unflatten(-1, (2, 16)).transpose(1, 2)
        out = (here.logits(block.position(here.grid)).softmax(-1) @ v).transpose(1, 2).flatten(2)
        out = out.unflatten(0, (2, -1)).flatten(1, 2)[:, layout.inverse].unflatten(1, (5, 6))
        torch.testing.assert_close(out, observe(block, x, grid).attended, atol=1e-5, rtol=1e-4)


def test_the_change_of_basis_leaves_the_logits_and_orders_the_channels():
    torch.manual_seed(0)
    grid = Grid(4, 5, 1)
    block, x = block_with("none", grid), torch.randn(6, grid.tokens, 32)
    with torch.no_grad():
        before = attended(block, x, grid)
        change_basis(block.attn, before)
        after = attended(block, x, grid)
    torch.testing.assert_close(after.logits(Terms()), before.logits(Terms()), atol=1e-4, rtol=1e-4)
    for tokens in (after.q, after.k):
        power = tokens[:, 0, 1:].flatten(0, 1).var(0)
        weaker, stronger = power.view(2, 8).aminmax(dim=0)  # channel p and p + D/2 are rotated together
        assert (weaker[:-1] >= 0.99 * stronger[1:]).all()
    torch.testing.assert_close(after.q[:, :, 1:].flatten(0, 2).std(), after.k[:, :, 1:].flatten(0, 2).std(), rtol=0.2, atol=0)


def test_a_minimum_that_is_not_found_changes_nothing():
    values = [torch.tensor([3.0]), torch.tensor([2.0])]
    assert minimize(values, lambda: (values[0] - 1).square().sum(), 20) == pytest.approx(0, abs=1e-10)
    assert values[0].item() == pytest.approx(1) and values[1].item() == 2 and not values[0].requires_grad
    minimize(values, lambda: values[0].sum() * float("nan"), 5)
    assert values[0].item() == pytest.approx(1)


@each("bias", [True, False])
def test_refitting_a_layer_is_weighted_ridge_regression(bias):
    layer, x, wanted = nn.Linear(3, 2, bias=bias), torch.randn(4, 5, 3), torch.randn(4, 5, 2)
    weight, before = torch.rand(4, 5), layer.weight.detach().clone()
    with torch.no_grad():
        refit_linear(layer, [(x[:1], wanted[:1], weight[:1]), (x[1:], wanted[1:], weight[1:])], 0.0)
    root = weight.flatten().sqrt()[:, None]
    design = torch.cat((x.flatten(0, 1), torch.ones(20, int(bias))), 1) * root
    best = torch.linalg.lstsq(design, wanted.flatten(0, 1) * root).solution.mT
    torch.testing.assert_close(layer.weight, best[:, :3], atol=1e-4, rtol=0)
    if bias:
        torch.testing.assert_close(layer.bias, best[:, 3], atol=1e-4, rtol=0)
    layer.weight.data.copy_(before)
    with torch.no_grad():
        refit_linear(layer, [(x, wanted, weight)], 1e6)  # held back: only the bias, which costs nothing, moves
    torch.testing.assert_close(layer.weight, before, atol=1e-4, rtol=0)


def test_an_embedding_that_needs_no_place_is_dropped_exactly():
    """Equal rows for all patches and one for the class token: the copy gives the same logits, at another size too."""
    model = trained(reg_tokens=2)
    with torch.no_grad():
        model.pos_embed.pos_embed[:, 3:] = model.pos_embed.pos_embed[:, 3:4]
    images = torch.randn(4, 3, 32, 48)
    ours, faded = absolute_to_relative(model, images), absolute_to_relative(model, images, absolute="fade", fade_steps=1)
    faded.train()(images)  # the one step
    for size in ((32, 48), (40, 24)):
        image = torch.randn(2, 3, *size)
        for result in (ours, faded.eval()):
            torch.testing.assert_close(result(image), model(image), atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("position", ["rope_mixed+table", "alibi"])
def test_the_copy_is_relative_and_the_original_untouched(position):
    model, images = trained(class_token=True, reg_tokens=1), torch.randn(4, 3, 32, 48)
    before = copy.deepcopy(model.state_dict())
    ours = absolute_to_relative(model, images, position)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(block._forward_pre_hooks for m in (model, ours) for block in m.blocks)
    assert ours.pos_embed is None and not any("absolute" in rule for rule in ours.resampled((64, 40)))
    assert ours(torch.randn(2, 3, 64, 40)).isfinite().all() and not ours.training
    report = ours.conversion
    assert report.position == position and report.images == 4 and report.grid == (4, 6) and len(report.after) == 2
    assert "to 4 images of 4x6 patches" in str(report) and len(str(report).splitlines()) == 4
    assert report.fitted == (position != "alibi") and 0 < report.seconds < 600
    assert all(p.requires_grad and p.grad is None for p in ours.parameters())
    ours(images).sum().backward()


@pytest.mark.slow
def test_nothing_absolute_is_left():
    """With tables that know no direction, an image whose patches stand in reverse order gives the same pooled features."""
    model = trained(class_token=False, global_pool="avg", img_size=64)
    ours = absolute_to_relative(model, torch.randn(6, 3, 64, 64))
    image = torch.randn(1, 3, 64, 64)
    flipped = image.unflatten(3, (8, 8)).unflatten(2, (8, 8)).flip(2, 4).flatten(4, 5).flatten(2, 3)  # patches, not pixels
    for block in ours.blocks:  # a table that knows no direction
        table = block.position.relative_position_bias_table
        table.data.copy_((table + table.flip(0)) / 2)
    torch.testing.assert_close(ours(flipped), ours(image), atol=1e-5, rtol=0)
    assert (model(flipped) - model(image)).abs().max() > 1e-3


@pytest.mark.slow(seconds=6)
def test_fitting_follows_the_original_more_closely_than_dropping(monkeypatch):
    model, images = trained(depth=3), torch.randn(64, 3, 32, 48)
    other = torch.randn(32, 3, 32, 48)
    dropped, encoding_alone = copy.deepcopy(model), absolute_to_relative(model, images, absolute="fade", fade_steps=1)
    dropped.pos_embed = None
    encoding_alone.train()(images)  # the one step
    short = absolute_to_relative(model, images)
    monkeypatch.setattr("vitrel.weights.fit.STEPS", 32)
    error = [(m(other) - model(other)).square().mean().item() for m in
             (dropped, encoding_alone.eval(), short, absolute_to_relative(model, images))]  # fmt: skip
    assert error[1] < 0.9 * error[0] and error[2] < 0.75 * error[1] and error[3] < error[2]


@pytest.mark.slow
def test_fade_starts_as_the_original_with_the_fitted_tables_and_ends_without_the_embedding():
    model, images = trained(), torch.randn(8, 3, 32, 48)
    ours = absolute_to_relative(model, images, absolute="fade", fade_steps=1)
    tables = [block.position.relative_position_bias_table for block in ours.blocks]
    assert min(table.abs().max() for table in tables) > 0.01
    original = copy.deepcopy(ours)
    for block in original.blocks:
        block.position.relative_position_bias_table.data.zero_()
    torch.testing.assert_close(original(images), model(images), atol=1e-4, rtol=0)
    ours.train()(images)  # the one step
    ended = ours.eval()(images)
    nn.init.normal_(ours.pos_embed.pos_embed)
    assert torch.equal(ours(images), ended)  # nothing of the embedding is left


def vision_transformer(**options):
    options = dict(img_size=(32, 48), patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5) | options
    model = VisionTransformer(**options).eval()
    nn.init.normal_(model.pos_embed)
    return model


@pytest.mark.slow
@each(
    "options",
    [
        dict(reg_tokens=2, no_embed_class=True, qk_norm=True, pre_norm=True),
        dict(class_token=False, global_pool="avg", init_values=0.1),
    ],
)
def test_models_of_timm(options):
    model, images = vision_transformer(**options), torch.randn(4, 3, 32, 48)
    want = model(images)
    ours = absolute_to_relative(model, images, "table")
    assert torch.equal(model(images), want) and ours.pos_embed is None
    assert ours(torch.randn(1, 3, 56, 40)).isfinite().all()
    faded = absolute_to_relative(model, images, "table", absolute="fade", fade_steps=10)
    for block in faded.blocks:
        nn.init.zeros_(block.position.relative_position_bias_table)
    torch.testing.assert_close(faded(images), want, atol=1e-4, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        dict(swiglu_mlp=True, init_values=0.5),
        dict(rope_type="mixed", qkv_fused=False, scale_mlp=True, swiglu_mlp=True, num_reg_tokens=2),
    ],
    ids=["eva02", "rope_vit"],
)
def test_rope_of_the_models_own_stays_beside_a_table(options):
    """An embedding equal at all patches leaves nothing to fit: the rotation stays. A rotation to add replaces the model's."""
    options = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, use_rot_pos_emb=True) | options
    model = Eva(num_classes=5, **options).eval()
    nn.init.normal_(model.pos_embed)
    with torch.no_grad():
        model.pos_embed[:, model.num_prefix_tokens :] = model.pos_embed[:, -1:].clone()
    images = torch.randn(4, 3, 32, 32)
    ours = absolute_to_relative(model, images, "table")
    assert any(part.rotates for part in parts_of(ours.blocks[0].position))
    assert ours.pos_embed is None
    torch.testing.assert_close(ours(images), model(images), atol=1e-4, rtol=0)
    if "rope_type" in options:
        return
    nn.init.normal_(model.pos_embed)
    flipped = absolute_to_relative(model, images, "rope_mixed")
    assert [key_of(part) for part in parts_of(flipped.blocks[0].position)] == ["rope_mixed"]
    assert flipped(torch.randn(1, 3, 40, 56)).isfinite().all()


@pytest.mark.slow(seconds=2)
@pytest.mark.parametrize(("version", "position"), [(1, "cpb"), (2, "rope_mixed")])
def test_a_swin_gets_another_encoding_in_its_windows(version, position):
    name = "vitrel_swin_n" if version == 1 else "vitrel_swinv2_n"
    own = "absolute+table" if version == 1 else "cpb"
    model = timm.create_model(name, num_classes=5, depths=(2,), num_heads=(2,), position=own).eval()
    with torch.no_grad():
        if version == 1:  # an embedding that needs no place
            model.pos_embed.pos_embed[:] = torch.randn(32)
        for name, parameter in model.named_parameters():
            if name.endswith("relative_position_bias_table"):
                parameter.normal_()
            if version == 2 and "norm" in name and name.endswith("weight"):
                parameter.fill_(1.0)  # a new block is the identity
    images, other = torch.randn(8, 3, 48, 48), torch.randn(4, 3, 48, 48)
    ours = absolute_to_relative(model, images, position)
    bare = relativize(model, position)
    error = [(m(other) - model(other)).square().mean() for m in (bare, ours)]
    assert [key_of(block.position) for stage in ours.layers for block in stage.blocks] == [position] * 2
    before, after = ([block.divergence for block in steps] for steps in (ours.conversion.before, ours.conversion.after))
    assert len(after) == 2 and sum(after) < sum(before)
    assert error[1] < 0.5 * error[0]
    assert ours(torch.randn(1, 3, 72, 56)).isfinite().all()
    if version == 1:
        biases = [m.patch_embed.norm.bias for m in (ours, model)]
        torch.testing.assert_close(biases[0] - biases[1], model.pos_embed.pos_embed[0, 0], atol=0.05, rtol=0)


def test_refusals():
    model, images = trained(), torch.randn(2, 3, 32, 48)
    with pytest.raises(ValueError, match="leaves nothing to fit: use relativize"):
        absolute_to_relative(model, images, absolute="keep")
    with pytest.raises(ValueError, match="absolute='gone' is unknown; choose one of drop, fade"):
        absolute_to_relative(model, images, absolute="gone")
    with pytest.raises(ValueError, match="needs fade_steps"):
        absolute_to_relative(model, images, absolute="fade")
    with pytest.raises(ValueError, match="no absolute embedding to convert: use relativize"):
        absolute_to_relative(timm.create_model("vitrel_vit_n8_none"), torch.randn(2, 3, 64, 64))
    with pytest.raises(ValueError, match="the embedding is SinCos, not one learned embedding: use relativize"):
        absolute_to_relative(timm.create_model("vitrel_vit_n8_sincos"), torch.randn(2, 3, 64, 64))
    with pytest.raises(ValueError, match="the blocks share one encoding"):
        absolute_to_relative(ViT(**TINY, share_position=True), images)
    with pytest.raises(ValueError, match="has 'table' in its windows already"):
        absolute_to_relative(timm.create_model("vitrel_swin_n"), torch.randn(2, 3, 64, 64))
    with pytest.raises(ValueError, match=r"absolute='fade' .* absolute embedding"):
        absolute_to_relative(
            timm.create_model("vitrel_swin_n"), torch.randn(2, 3, 64, 64), "cpb", absolute="fade", fade_steps=2
        )
    for bad, text in [
        ("x.jpg", r"one tensor \[B, 3, height, width\] of at least one image, got str"),
        (images[0], r"got \(3, 32, 48\)"),
        (images[:, :1], r"got \(2, 1, 32, 48\)"),
        (images[:0], r"got \(0, 3, 32, 48\)"),
        (images[..., :4], "images of 32x4 pixels are smaller than one patch of 8x8"),
        (images.int(), "finite floating-point numbers, normalized as in training, got torch.int32"),
        (images / 0, "finite floating-point"),
    ]:
        with pytest.raises(ValueError, match=text):
            absolute_to_relative(model, bad)


@pytest.mark.slow(seconds=15)
def test_imagenet_weights_survive_the_conversion():
    """ViT-Tiny, fitted to 64 training images of the same ten classes at 128 px: dropped it is near chance, converted not."""
    folder, images = shared("data/imagenette224"), shared("data/ilsvrc-val-nette224")
    path = shared("weights/vit_tiny_patch16_224.augreg_in21k_ft_in1k.pth")
    model = load_pretrained(timm.create_model("vitrel_vit_ti16_absolute"), path).eval()
    how = {"size": (128, 128), "mean": (0.5,) * 3, "std": (0.5,) * 3}
    fit, val = create_dataset(str(folder), "train", **how), create_dataset(str(images), "val", n=50, **how)
    fit.samples = [sample for sample in fit.samples if "ILSVRC2012_val" not in sample[0]]  # the others are in `val`
    fit.samples = fit.samples[:: len(fit.samples) // 64][:64]
    converted = absolute_to_relative(model, torch.stack([image for image, _ in fit]))
    dropped = copy.deepcopy(model)
    dropped.pos_embed = None
    lines = (images / "imagenet_index.tsv").read_text().splitlines()[1:]
    table = dict(line.split("\t")[:2] for line in lines)
    labels = torch.tensor([int(table[val.classes[label]]) for _, label in val.samples])
    pixels = torch.stack([image for image, _ in val])
    with torch.inference_mode():
        right = [(m(pixels).argmax(1) == labels).float().mean().item() for m in (model, converted, dropped)]
    assert right[1] > 0.75 * right[0] and right[2] < 0.1
