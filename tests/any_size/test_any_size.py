"""Families that keep timm's trunk: timm's function at its own size, any other size, timm's checkpoints, clear refusals."""

import copy

import pytest
import timm
import torch

import vitrel
from helpers import ROOT, each
from helpers.launches import Launches
from tools.docs.any_size import VARIANTS, apart, native, table, try_logits, variant
from vitrel.any_size import ADAPTERS, adapter_of, any_size, side_multiple
from vitrel.any_size.convolved import adaptive_means
from vitrel.models.backbone import Backbone

# Largest difference where timm's float64 is not: it stores the offsets that MLPs read rounded to float32, and interpolates
# NaFlexViT's tables in float32. All other models are equal to the rounding of float64.
ROUNDED = dict.fromkeys(("swinv2_cr_tiny_ns_224", "maxvit_rmlp_pico_rw_256"), 1e-8)
ROUNDED["naflexvit_base_patch16_parfac_gap"] = 1e-6
# Others have the same adapter, which exchanges the same parts in them.
AGAIN = {"coat_tiny", "coatnet_rmlp_nano_rw_224", "levit_conv_128s", "twins_pcpvt_small", "vit_small_patch16_18x2_224",
         "vitamin_small_224"}  # fmt: skip
# One of each way of the adapters to compute position: {name: largest ratio of operators to timm's}
WAYS = dict.fromkeys((
    "vit_tiny_r_s16_p8_224", "samvit_base_patch16", "swin_s3_tiny_224", "swinv2_cr_tiny_ns_224", "maxvit_rmlp_pico_rw_256",
    "maxvit_tiny_pm_256", "hiera_small_abswin_256", "efficientformer_l1", "xcit_nano_12_p16_224", "naflexvit_base_patch16_gap",
), 1.02) | {"levit_128s": 1.05, "convit_tiny": 1.03}  # fmt: skip  # timm caches LeViT's biases in evaluation
# Here timm's backward pass differs from finite differences of timm's own logits, by 8% and 76% along a random direction of the
# first weight; the adapters' agrees with them to 1e-8.
FINITE = {"levit_128s", "efficientformer_l1"}


def exchanged(model, adapter):
    return {type(part) for part in model.modules()} & {*adapter.exchanged}


@pytest.mark.slow(seconds=6)
def test_every_family_has_timms_logits_and_takes_another_size():
    """In float64; every adapter has a variant, and exchanges what it lists; every parameter has a gradient."""
    taken = {}
    for name in [name for name in VARIANTS if name not in AGAIN]:
        theirs = variant(name).double()
        ours, adapter = vitrel.from_timm(theirs), adapter_of(theirs)
        assert not isinstance(ours, Backbone) and [*ours.state_dict()] == [*theirs.state_dict()] and not ours.training, name
        taken.setdefault(ADAPTERS.index(adapter), set()).update(exchanged(theirs, adapter))
        assert not exchanged(ours, adapter), name
        image = torch.randn(1, 3, *native(name, theirs)).double()
        logits = ours(image)
        logits.sum().backward()
        assert [key for key, p in ours.named_parameters() if p.grad is None] == [], name
        step = side_multiple(ours)
        images = torch.randn(2, 3, *((133, 170) if step == 1 else (3 * step, 5 * step))).double()  # odd grids in later stages
        with torch.no_grad():
            expected, both = theirs(image), ours(images)
            assert expected.std() > 0.05 and apart(logits, expected) < ROUNDED.get(name, 1e-13), name
            assert both.isfinite().all() and apart(ours(images[1:]), both[1:]) < 1e-12, name
    assert {*taken} == {*range(len(ADAPTERS))}
    missing = {kind.__name__ for i, found in taken.items() for kind in {*ADAPTERS[i].exchanged} - found}
    assert missing <= {"Levit", "PartitionAttention2d"}, missing


@pytest.mark.slow
@each(("name", "ratio"), WAYS.items())
def test_timms_gradients_in_as_many_operators(name, ratio):
    theirs = variant(name).double()
    ours, image = vitrel.from_timm(theirs), torch.randn(1, 3, *native(name, theirs)).double()
    operators = []
    for model in (ours, theirs):
        model(image).square().sum().backward()
        with torch.no_grad(), Launches() as counted:  # what is kept is kept by now
            model(image)
        operators.append(counted.count)
    assert operators[0] <= ratio * operators[1]
    gradients = {key: p.grad for key, p in theirs.named_parameters() if p.grad is not None}
    assert {*gradients} == {key for key, p in ours.named_parameters() if p.grad is not None}
    if name in FINITE:
        check_finite_differences(ours, image)
        return
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())  # those of key biases are 0 but for rounding
    for key, gradient in gradients.items():
        difference = float((ours.get_parameter(key).grad - gradient).abs().max())
        assert difference < ROUNDED.get(name, 1e-13) * largest, key


def check_finite_differences(model, image, step=1e-7):
    """Compare the gradient along a random direction of the first convolution."""
    weight = next(p for p in model.parameters() if p.dim() == 4)
    direction, losses = torch.randn_like(weight), []
    with torch.no_grad():
        for move in (step, -2 * step):
            weight.add_(direction, alpha=move)
            losses.append(model(image).square().sum())
    torch.testing.assert_close((weight.grad * direction).sum(), (losses[0] - losses[1]) / (2 * step), atol=1e-5, rtol=1e-5)


DEFINED = {  # {name: (arguments with which timm takes other sizes, size)}: there the numbers are timm's
    "vit_tiny_r_s16_p8_224": (dict(dynamic_img_size=True), (96, 160)),
    "aimv2_large_patch14_224": (dict(dynamic_img_size=True), (70, 140)),
    "vitamin_small_224": (dict(dynamic_img_size=True), (96, 160)),
    "samvit_base_patch16": ({}, (176, 256)),  # where tables grow
    "sam2_hiera_tiny": ({}, (96, 160)),
    "maxvit_tiny_tf_224": ({}, (128, 192)),  # whole windows
    "tiny_vit_5m_224": ({}, (448, 224)),
}


@pytest.mark.slow
@torch.no_grad()
@each("name", DEFINED)
def test_numbers_are_those_of_timm_where_timm_takes_the_size(name):
    options, size = DEFINED[name]
    theirs = variant(name, **options)
    ours, image = vitrel.from_timm(theirs), torch.randn(1, 3, *size)
    assert apart(ours(image), theirs(image)) < 3e-6


@each("size", [(7, 7), (5, 9), (16, 23), (1, 14)])
def test_means_of_a_graph_are_those_of_adaptive_pooling(size):
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    rows, columns = (adaptive_means(n, 7, "float64", device=x.device) for n in size)
    torch.testing.assert_close(rows @ x @ columns.mT, torch.nn.functional.adaptive_avg_pool2d(x, 7))


def test_a_model_that_is_taken_already_is_returned_itself():
    ours = vitrel.from_timm(variant("vit_tiny_r_s16_p8_224"))
    assert vitrel.from_timm(ours) is ours
    with pytest.raises(ValueError, match="has no vitrel model"):
        vitrel.from_timm(ours, position="table")


@torch.no_grad()
def test_patches_cover_every_pixel_of_a_swin_v2_cr():
    model, image = vitrel.from_timm(variant("swinv2_cr_tiny_ns_224")), torch.randn(1, 3, 81, 145)
    assert torch.equal(model(image), model(torch.nn.functional.pad(image, (0, 3, 0, 3))))


def test_refusals():
    model = vitrel.from_timm(variant("hiera_tiny_224"))
    with pytest.raises(ValueError, match=r"multiples of 32 pixels, not 70x96.*96x96"):
        model(torch.randn(1, 3, 70, 96))
    with pytest.raises(ValueError, match=r"cait_xxs24_224 .* has no vitrel model"):
        vitrel.from_timm("cait_xxs24_224", depth=1, position="table")
    theirs = variant("cait_xxs24_224")
    theirs.forward = lambda x: x
    with pytest.raises(ValueError, match=r"a forward that is not its class's"):
        vitrel.from_timm(theirs)
    with pytest.raises(ValueError, match=r"botnet26t_256 .* has no vitrel model"):
        vitrel.from_timm("botnet26t_256")


def test_a_model_without_position_is_returned_itself_and_the_given_one_is_not_changed():
    resnet, cait = timm.create_model("resnet18"), variant("cait_xxs24_224")
    assert vitrel.from_timm(resnet) is resnet
    ours = vitrel.from_timm(cait)
    assert (
        type(cait) is timm.models.cait.Cait and isinstance(ours, timm.models.cait.Cait) and ours.cls_token is not cait.cls_token
    )


def test_the_page_has_the_table_that_the_command_prints():
    page = (ROOT / "docs" / "how_to" / "any_size.md").read_text("utf-8")
    assert page.partition("<!-- any_size -->\n")[2].partition("\n<!-- /any_size -->")[0] == table()


def test_names_of_one_architecture_are_compared_with_timm_once(capsys):
    assert try_logits(["vit_tiny_patch16_224", "deit_tiny_patch16_224", "test_resnet"])  # the last has no position
    found = capsys.readouterr().out
    assert "deit_tiny_patch16_224 (vitrel): equal" in found and "test_resnet" not in found
    assert "1 architectures of 2 names {'equal': 2}" in found


def test_learned_frequencies_rotate_on_any_grid():
    """A RoPE-ViT with timm's trunk is vitrel's ViT with the same weights, also where images are not of the trained size."""
    peer = timm.create_model("vit_small_patch16_rope_mixed_224", depth=2, embed_dim=48, num_heads=2, img_size=64).eval()
    ours, images = vitrel.from_timm(peer), torch.randn(1, 3, 48, 80)
    with torch.no_grad():
        torch.testing.assert_close(any_size(copy.deepcopy(peer))(images), ours(images))
