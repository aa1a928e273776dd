import copy

import numpy as np
import pytest
import timm
import torch
from timm.models.eva import Eva
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from helpers import shared
from vitrel import Grid, create_position, load_pretrained
from vitrel.convert.absolute_to_relative import absolute_to_relative
from vitrel.convert.fit import explained, fit_rotation, fit_tables, mean_logits, refit_linear
from vitrel.convert.observe import observe
from vitrel.data import Folder, Prepare
from vitrel.models.vit import ViT
from vitrel.ops.reference import gather_bias, rotate
from vitrel.position import key_of
from vitrel.position.terms import parts_of

TINY = dict(img_size=(32, 48), patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5)  # 4 x 6 patches


def trained(std=1.0, **options):
    """A vitrel ViT whose absolute embedding matters."""
    model = ViT(**TINY | options).eval()
    with torch.no_grad():
        model.pos_embed.pos_embed.normal_(std=std)
        for block in model.blocks:
            block.attn.qkv.weight.normal_(std=0.2)
            block.attn.proj.weight.normal_(std=0.2)
    return model


def bias_of(encoding, grid):
    """[H, N, N], looked up pair by pair."""
    return sum(gather_bias(table.bias, grid.index(table.axis)) for table in encoding(grid).tables)


def within_rows(logits):
    return logits - logits.mean(-1, keepdim=True)


@pytest.mark.parametrize("key", ["table", "factorised"])
@pytest.mark.parametrize("grid", [Grid(4, 6), Grid(5, 3, 1), Grid(3, 4, 3)])
def test_a_known_table_is_recovered_up_to_a_constant_per_query(key, grid):
    """The bias of a random encoding, plus what softmax does not see, gives back the same attention."""
    known, fitted = (create_position(key, grid, 2, 8, init_std=1.0) for _ in range(2))
    gap = bias_of(known, grid) + torch.randn(2, grid.tokens, 1)
    with torch.no_grad():
        fit_tables(fitted, gap, grid, ridge=1e-9)
    torch.testing.assert_close(within_rows(bias_of(fitted, grid)), within_rows(gap), atol=1e-4, rtol=0)
    assert explained(gap, bias_of(fitted, grid)) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("key", ["table", "factorised"])
@pytest.mark.parametrize("grid", [Grid(2, 4), Grid(3, 2, 2)])
def test_the_fit_of_any_logits_is_the_least_squares_solution(key, grid):
    """Against numpy's lstsq over one column per offset (per axis), three for prefix pairs and one per query, pair by pair."""
    gap, n, heads = torch.randn(2, grid.tokens, grid.tokens), grid.tokens, 2
    columns = {}

    def column(*name):
        return columns.setdefault(name, len(columns))

    entries = []
    for i in range(n):
        for j in range(n):
            names = [("query", i)]
            qi, kj = i - grid.prefix, j - grid.prefix
            if qi < 0 or kj < 0:
                names.append(("prefix", qi < 0, kj < 0))
            else:
                dy, dx = qi // grid.w - kj // grid.w, qi % grid.w - kj % grid.w
                names += [("h", dy), ("w", dx)] if key == "factorised" else [("hw", dy, dx)]
            entries += [(i * n + j, column(*name)) for name in names]
    design = np.zeros((n * n, len(columns)))
    for row, at in entries:
        design[row, at] = 1
    encoding = create_position(key, grid, heads, 8)
    with torch.no_grad():
        fit_tables(encoding, gap, grid, ridge=1e-9)
    for h in range(heads):
        wanted = gap[h].double().numpy().reshape(-1)
        best = design @ np.linalg.lstsq(design, wanted, rcond=None)[0]
        left = within_rows(gap[h] - bias_of(encoding, grid)[h]).square().sum().item()
        assert left == pytest.approx(np.square(wanted - best).sum(), rel=1e-4)


def test_a_rotation_is_recovered_from_what_it_does_to_the_logits():
    grid, scale = Grid(5, 7, 1), 8**-0.5
    known = create_position("rope_mixed", grid, 2, 8)
    base = torch.randn(1, 2, 1, 8)  # tokens have much in common: the part of q . k that averages to a kernel
    q, k = (base + 0.3 * torch.randn(4, 2, grid.tokens, 8) for _ in range(2))
    with torch.no_grad():
        known.freqs.mul_(0.2)
        rotated = [rotate(x, *known(grid).rotary) for x in (q, k)]
        gap = mean_logits(*rotated, scale) - mean_logits(q, k, scale)
        fitted = create_position("rope_mixed", grid, 2, 8)
        fit_rotation(fitted, q, k, gap, scale, grid)
        now = mean_logits(*(rotate(x, *fitted(grid).rotary) for x in (q, k)), scale) - mean_logits(q, k, scale)
    assert fitted.freqs.grad is None and fitted.freqs.requires_grad
    assert explained(gap[:, 1:, 1:], now[:, 1:, 1:]) > 0.95


def test_a_rotation_that_only_harms_is_none():
    grid = Grid(3, 4)
    q = torch.randn(2, 1, grid.tokens, 4)
    encoding = create_position("rope_mixed", grid, 1, 4)
    with torch.no_grad():
        fit_rotation(encoding, q, q, torch.zeros(1, grid.tokens, grid.tokens), 0.5, grid)
    assert not encoding.freqs.any()


@pytest.mark.parametrize("bias", [True, False])
def test_refitting_a_layer_is_weighted_ridge_regression(bias):
    layer, x, wanted = nn.Linear(3, 2, bias=bias), torch.randn(4, 5, 3), torch.randn(4, 5, 2)
    weight, before = torch.rand(4, 5), layer.weight.detach().clone()
    with torch.no_grad():
        refit_linear(layer, x, wanted, weight, 0.0)
    root = weight.flatten().sqrt()[:, None]
    design = torch.cat((x.flatten(0, 1), torch.ones(20, int(bias))), 1) * root
    best = torch.linalg.lstsq(design, wanted.flatten(0, 1) * root).solution.mT
    torch.testing.assert_close(layer.weight, best[:, :3], atol=1e-4, rtol=0)
    if bias:
        torch.testing.assert_close(layer.bias, best[:, 3], atol=1e-4, rtol=0)
    layer.weight.data.copy_(before)
    with torch.no_grad():
        refit_linear(layer, x, wanted, weight, 1e6)  # held back: only the bias, which costs nothing, moves
    torch.testing.assert_close(layer.weight, before, atol=1e-4, rtol=0)


def test_what_a_block_computes_is_seen():
    block, grid = trained().blocks[0], Grid(4, 6, 1)
    x = torch.randn(3, 25, 32)
    seen = observe(block, (x, grid, create_position("table", grid, 2, 16, init_std=1.0)(grid)), {})
    q, k, _ = block.attn.qkv(block.norm1(x)).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
    torch.testing.assert_close(seen.logits(), (q @ k.mT / 4 + seen.bias).mean(0))
    torch.testing.assert_close(seen.between, x + block.attn.proj(seen.attended))
    torch.testing.assert_close(seen.out, seen.between + block.mlp.fc2(seen.hidden))
    assert not block._forward_pre_hooks and not block.norm2._forward_pre_hooks


def test_an_embedding_that_needs_no_place_is_dropped_exactly():
    """Equal rows for all patches and one for the class token: the copy gives the same logits, at another size too."""
    model = trained(reg_tokens=2)
    with torch.no_grad():
        model.pos_embed.pos_embed[:, 3:] = model.pos_embed.pos_embed[:, 3:4]
    ours = absolute_to_relative(model, torch.randn(4, 3, 32, 48), refit=False)
    for size in ((32, 48), (40, 24)):
        image = torch.randn(2, 3, *size)
        torch.testing.assert_close(ours(image), model(image), atol=1e-4, rtol=0)


def test_a_model_that_is_content_and_table_is_found_again():
    """What one block with a table has beyond the same block without it is that table: fitted there, the outputs agree."""
    images, grid = torch.randn(6, 3, 32, 48), Grid(4, 6, 1)
    model = trained(depth=1, position="absolute+table", position_args=dict(init_std=1.0))
    ours = copy.deepcopy(model)
    table = ours.blocks[0].position.relative_position_bias_table
    nn.init.zeros_(table)
    seen = [observe(m.blocks[0], (m.embed(images)[0], grid), {}) for m in (model, ours)]
    assert (ours(images) - model(images)).abs().max() > 1e-3
    with torch.no_grad():
        fit_tables(ours.blocks[0].position, seen[0].logits() - seen[1].logits(), grid, ridge=1e-9)
    torch.testing.assert_close(ours(images), model(images), atol=1e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("refit", [True, False])
@pytest.mark.parametrize("position", ["table", "factorised", "rope_mixed+table", "alibi+table"])
def test_the_copy_is_relative_and_the_original_untouched(position, refit):
    model, images = trained(class_token=True, reg_tokens=1), torch.randn(4, 3, 32, 48)
    before = copy.deepcopy(model.state_dict())
    ours = absolute_to_relative(model, images, position, refit=refit)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(block._forward_pre_hooks for m in (model, ours) for block in m.blocks)
    assert ours.pos_embed is None and not any("absolute" in rule for rule in ours.resized((64, 40)))
    assert ours(torch.randn(2, 3, 64, 40)).isfinite().all() and not ours.training
    report = ours.conversion
    assert report.position == position and report.images == 4 and report.grid == (4, 6) and len(report.logits) == 2
    assert f"{position} fitted to 4 images of 4x6 patches" in str(report) and len(str(report).splitlines()) == 4
    assert all(p.requires_grad and p.grad is None for p in ours.parameters())
    ours(images).sum().backward()


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


def test_fitting_follows_the_original_more_closely_than_dropping():
    model, images = trained(depth=3), torch.randn(64, 3, 32, 48)
    other = torch.randn(32, 3, 32, 48)
    dropped = copy.deepcopy(model)
    dropped.pos_embed = None
    error = [(m(other) - model(other)).square().mean().item() for m in
             (dropped, absolute_to_relative(model, images, refit=False), absolute_to_relative(model, images))]  # fmt: skip
    assert error[1] < 0.9 * error[0] and error[2] < 0.75 * error[1]


def test_fade_starts_as_the_original_with_the_fitted_tables_and_ends_without_the_embedding():
    model, images = trained(), torch.randn(8, 3, 32, 48)
    ours = absolute_to_relative(model, images, absolute="fade", fade_steps=1)
    dropped = absolute_to_relative(model, images, refit=False)
    tables = [m.blocks[1].position.relative_position_bias_table for m in (ours, dropped)]
    torch.testing.assert_close(*tables)
    original = copy.deepcopy(ours)
    for block in original.blocks:
        block.position.relative_position_bias_table.data.zero_()
    torch.testing.assert_close(original(images), model(images), atol=1e-4, rtol=0)
    ours.train()(images)  # the one step
    torch.testing.assert_close(ours.eval()(images), dropped(images), atol=1e-4, rtol=0)


def vision_transformer(**options):
    options = dict(img_size=(32, 48), patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=5) | options
    model = VisionTransformer(**options).eval()
    nn.init.normal_(model.pos_embed)
    return model


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(reg_tokens=2, no_embed_class=True),
        dict(class_token=False, global_pool="avg", init_values=0.1),
        dict(qk_norm=True, pre_norm=True),
    ],
    ids=["plain", "registers", "avg_layer_scale", "qk_norm_pre_norm"],
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
    ours = absolute_to_relative(model, images, "table", refit=False)
    assert any(part.rotates for part in parts_of(ours.blocks[0].position))
    assert ours.pos_embed is None
    torch.testing.assert_close(ours(images), model(images), atol=1e-4, rtol=0)
    if "rope_type" in options:
        return
    nn.init.normal_(model.pos_embed)
    flipped = absolute_to_relative(model, images, "rope_mixed")
    assert [key_of(part) for part in parts_of(flipped.blocks[0].position)] == ["rope_mixed"]
    assert flipped(torch.randn(1, 3, 40, 56)).isfinite().all()


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
    with pytest.raises(ValueError, match="'alibi' cannot be fitted; choose table, factorised, rope_mixed"):
        absolute_to_relative(model, images, "alibi")
    post_norm = Eva(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, use_post_norm=True)
    with pytest.raises(ValueError, match="needs pre-norm blocks: pass refit=False"):
        absolute_to_relative(post_norm, torch.randn(2, 3, 32, 32))
    with pytest.raises(ValueError, match=r"does not call scaled_dot_product_attention.*leave out"):
        absolute_to_relative(model, images, "shaw+table")
    for bad, text in [
        ("x.jpg", r"one tensor \[B, 3, height, width\] of at least one image, got str"),
        (images[0], r"got \(3, 32, 48\)"),
        (images[:, :1], r"got \(2, 1, 32, 48\)"),
        (images[:0], r"got \(0, 3, 32, 48\)"),
        (images[..., :4], "images of 32x4 pixels are smaller than one patch of 8x8"),
        (images.int(), "finite floating-point numbers, normalised as in training, got torch.int32"),
        (images / 0, "finite floating-point"),
    ]:
        with pytest.raises(ValueError, match=text):
            absolute_to_relative(model, bad)


@pytest.mark.slow(seconds=20)
def test_imagenet_weights_survive_the_conversion():
    """ViT-Tiny, fitted to 32 training images of the same ten classes: dropped it is near chance, converted not."""
    folder, images = shared("data/imagenette224"), shared("data/ilsvrc-val-nette224")
    path = shared("weights/vit_tiny_patch16_224.augreg_in21k_ft_in1k.pth")
    model = load_pretrained(timm.create_model("vitrel_vit_ti16_absolute"), path).eval()
    prepare = Prepare((224, 224), (0.5,) * 3, (0.5,) * 3)
    fit, val = Folder(folder, "train", prepare), Folder(images, "val", prepare, n=50)
    fit.samples = [sample for sample in fit.samples if "ILSVRC2012_val" not in sample[0]][::104]  # the others are in `val`
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
