"""Policies of encodings and windows, and a model brought to a size."""

import pytest
import timm
import torch

from helpers import each
from vitrel.evaluate.policies import (
    WINDOW_POLICIES,
    at_size_with,
    costs_at,
    gflops,
    leak_at,
    policies_at,
    window_policies_at,
    with_policy,
)
from vitrel.grid import Grid
from vitrel.position import PositionEncoding
from vitrel.position.resample import resample_table

THREE = ("geometric", "clip", "bicubic")

pytestmark = pytest.mark.usefixtures("brief_evaluations")


@pytest.fixture
def vit(trained):
    """vit("table+cpb"): a ViT trained on a 4x4 grid of patches of 8 pixels."""
    return lambda position, **how: trained("vitrel_vit_n8_none", model_args={"position": position, **how}).model


@each(
    ("position", "size", "policies"),
    [
        ("table", (32, 32), ("none",)),
        ("table", (31, 29), ("none",)),  # the same patches
        ("table", (16, 24), ("none",)),  # the exact center, whatever the policy
        ("table", (32, 48), THREE),
        ("table", (16, 48), THREE),
        ("absolute", (16, 24), ("bicubic",)),
        ("rope_mixed", (64, 64), ("keep", "linear", "ntk", "yarn")),
        ("rope_mixed", (16, 16), ("none",)),
        ("rope_mixed+table", (64, 64), tuple(f"{a}+{b}" for a in ("keep", "linear", "ntk", "yarn") for b in THREE)),
        ("cpb", (32, 32), ("none",)),
        ("cpb", (16, 24), ("keep", "renormalize")),
        ("cpb+alibi", (64, 64), ("keep", "renormalize")),
        ("table+factorized", (64, 64), THREE),
        ("table+decomposed", (64, 64), (*THREE, "linear")),
        ("absolute+table", (64, 64), ("bicubic", "geometric", "clip")),
        ("absolute+table", (16, 16), ("bicubic", "geometric", "clip")),
        ("absolute+cpb", (64, 64), ("bicubic+keep", "bicubic+renormalize")),
        ("table+cpb", (16, 24), ("keep", "renormalize")),
        ("table+cpb", (64, 64), tuple(f"{a}+{b}" for a in THREE for b in ("keep", "renormalize"))),
    ],
)
def test_policies_are_listed_where_they_differ(vit, position, size, policies):
    assert policies_at(vit(position), size) == policies


def test_windows_and_encodings_are_combined(trained):
    models = {
        key: trained("vitrel_swin_n", (64, 64), {"position": key}).model for key in ("table", "cpb", "none", "absolute+table")
    }
    assert policies_at(models["table"], (64, 64)) == policies_at(models["cpb"], (64, 64)) == ("none",)
    assert policies_at(models["table"], (128, 64)) == ("fixed", *(f"rescale+{policy}" for policy in THREE))
    assert policies_at(models["table"], (48, 48)) == ("fixed", "divisor", "rescale")  # sub-tables, exact
    distances = [f"{window}+{policy}" for window in ("divisor", "rescale") for policy in ("keep", "renormalize")]
    assert policies_at(models["cpb"], (80, 80)) == ("fixed", *distances)
    assert policies_at(models["cpb"], (80, 80), ["fixed", "keep", "rescale"]) == ("fixed", "rescale+keep")
    assert policies_at(models["cpb"], (80, 80), ["keep", "rescale"]) == ("rescale+keep",)
    assert policies_at(models["none"], (80, 80)) == ("fixed", "divisor", "rescale")
    assert policies_at(models["absolute+table"], (80, 80), ["rescale", "clip"]) == ("rescale+clip",)
    assert policies_at(models["table"], (80, 80), ["clip"]) == ("fixed",)  # no policy of windows is wanted


def test_a_policy_of_windows_and_encodings_is_that_of_a_copy_with_the_same_parameters(trained):
    model = trained("vitrel_swin_n", (64, 64), {"position": "cpb"}).model
    changed, own = with_policy(model, (96, 128), "rescale+renormalize"), model.layers[0].blocks[1]
    block = changed.layers[0].blocks[1]
    assert (block.attn.window, block.attn.shift, block.position.policy) == ((6, 8), (3, 4), "renormalize")
    assert (own.attn.window, own.attn.shift, own.position.policy) == ((4, 4), (2, 2), "keep")
    assert with_policy(model, (96, 128), "fixed") is model
    for tensors in ("parameters", "buffers"):
        assert [*map(id, getattr(changed, tensors)())] == [*map(id, getattr(model, tensors)())]


def test_of_several_only_those_wanted(vit):
    assert policies_at(vit("table"), (64, 64), ["bicubic", "clip"]) == ("clip", "bicubic")
    assert policies_at(vit("absolute"), (64, 64), ["clip"]) == ("bicubic",)
    assert policies_at(vit("table+cpb"), (64, 64), ["clip", "renormalize"]) == ("clip+renormalize",)
    # a model that has none of the wanted ones is still evaluated, with its own
    cpb = vit("cpb", position_args={"policy": "renormalize"})
    assert policies_at(cpb, (64, 64), ["clip"]) == ("renormalize",)
    assert policies_at(vit("table+cpb"), (64, 64), ["clip"]) == ("clip+keep",)


def test_a_temperature_is_added_to_every_policy_where_the_number_of_tokens_differs(vit, trained):
    table = vit("table")
    assert policies_at(table, (64, 64), ["clip"], True) == ("clip", "clip+log_n")
    assert policies_at(table, (32, 32), None, True) == ("none",)
    assert policies_at(table, (16, 24), None, True) == ("none", "log_n")
    assert policies_at(vit("alibi"), (64, 64), ["keep"], True) == ("keep", "keep+log_n")
    assert policies_at(trained("vitrel_swin_n").model, (40, 40), ["fixed"], True) == ("fixed",)  # its windows stay
    changed = with_policy(table, (64, 64), "clip+log_n")
    built = vit("table", position_args={"policy": "clip", "temperature": "log_n"})
    built.load_state_dict(table.state_dict())
    image = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert torch.allclose(changed(image), built(image)) and not torch.allclose(changed(image), table(image))
    assert table.blocks[0].position.temperature == "none"


@each("policy", ["clip+renormalize", "bicubic+keep", "none", "clip+keep+stretch"])
def test_a_policy_leaves_the_model_its_own(vit, policy):
    model = vit("table+cpb")
    in_use = {part.policy for part in model.modules() if isinstance(part, PositionEncoding) and part.policies}
    assert in_use == {"geometric", "keep"}
    if "stretch" in policy:
        with pytest.raises(ValueError, match="no policy 'stretch'"):
            with_policy(model, (64, 64), policy)
    else:
        parts = with_policy(model, (64, 64), policy).blocks[-1].position.parts
        assert policy in ("none", f"{parts['table'].policy}+{parts['cpb'].policy}")
    assert {part.policy for part in model.modules() if isinstance(part, PositionEncoding) and part.policies} == in_use


def swin(img_size, window, depths=(2,), **how):
    torch.manual_seed(0)
    heads = (1, 2, 4)[: len(depths)]
    how = dict(img_size=img_size, window_size=window, depths=depths, num_heads=heads, num_classes=3) | how
    model = timm.create_model("vitrel_swin_n", **how).eval().double()
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:  # far from zero, so that the bias matters
            torch.nn.init.normal_(parameter, std=2.0 if "table" in name else 0.3)
    return model


def with_tables(other, model, policy):
    """`other` with the weights of `model`, whose tables are brought to its window by `policy`."""
    source, target = (Grid(*m.layers[0].blocks[0].attn.window) for m in (model, other))
    state = model.state_dict()
    for name in state:
        if "table" in name:
            state[name] = resample_table(state[name], source, target, policy)
    other.load_state_dict(state)
    return other


@each(("size", "window"), [((18, 16), (3, 4)), ((10, 6), (1, 3)), ((26, 24), (1, 4))])
def test_divisor_is_the_model_with_that_window_and_the_center_of_the_table(size, window):
    model, images = swin((16, 16), 4), torch.randn(2, 3, *size, dtype=torch.float64)
    built = with_tables(swin(size, window), model, "clip")  # which reads the center of a larger table
    changed = with_policy(model, size, "divisor")
    assert changed.resampled(size) == {} and changed.unseen(size) == 0
    [stage] = at_size_with(model, size, "divisor").stages
    assert (stage.window, stage.padding, stage.padded_share) == (window, (0, 0), 0.0)
    with torch.no_grad():
        torch.testing.assert_close(changed(images), built(images), rtol=0, atol=1e-12)
        assert (model(images) - built(images)).abs().max() > 0.1  # with its own window it is another model


@each(
    ("policy", "size", "window"), [("geometric", (24, 40), (6, 10)), ("clip", (28, 16), (7, 4)), ("bicubic", (32, 32), (8, 8))]
)
def test_rescale_is_the_model_with_that_window_and_the_resampled_table(policy, size, window):
    model, images = swin((16, 16), 4, depths=(2, 2)), torch.randn(2, 3, *size, dtype=torch.float64)
    built = with_tables(swin(size, window, depths=(2, 2)), model, policy)
    tables = [name for name, _ in model.named_parameters() if "table" in name]
    values = sum(model.state_dict()[name].numel() for name in tables)
    changed = with_policy(model, size, f"rescale+{policy}")
    assert changed.resampled(size) == {f"table {policy}": 0 if policy == "clip" else values}
    assert changed.unseen(size) == pytest.approx(1 - min(1, 7 / (2 * window[0] - 1)) * min(1, 7 / (2 * window[1] - 1)))
    assert [grid[:2] for _, grid in changed.encodings(size)] == [window] * 4
    with torch.no_grad():
        torch.testing.assert_close(changed(images), built(images), rtol=0, atol=1e-12)
    assert model.resampled(size) == {}


def test_a_smaller_window_reads_the_center_and_rounds_down():
    model = swin((16, 16), 4)
    changed = with_policy(model, (14, 10), "rescale")
    attn = changed.layers[0].blocks[1].attn
    assert (attn.window, attn.shift) == ((3, 2), (1, 1)) and changed.resampled((14, 10)) == {}
    wide = with_policy(swin((16, 24), (4, 6)), (32, 12), "rescale")  # each axis by its own trained side
    assert wide.layers[0].blocks[0].attn.window == (8, 3)
    assert with_policy(model, (2, 6), "rescale").layers[0].blocks[1].attn.window == (1, 1)


def test_window_policies_are_listed_where_they_differ():
    model = timm.create_model("vitrel_swin_n")  # trained at 64, grids 32, 16, 8
    assert window_policies_at(model, (64, 64)) == ()
    assert window_policies_at(model, (128, 128)) == ("fixed", "rescale")
    assert window_policies_at(model, (80, 64)) == ("fixed", "divisor", "rescale")
    assert window_policies_at(model, (66, 64)) == ("fixed", "divisor")  # 4 * 66 // 64 = 4
    assert window_policies_at(swin((32, 32), 4), (6, 6)) == ("fixed", "rescale")  # 3 tokens: one masked window is exact too
    assert window_policies_at(timm.create_model("vitrel_vit_n8_table"), (80, 80)) == ()
    assert window_policies_at(timm.create_model("resnet10t"), (80, 80)) == ()


def test_blocks_of_a_plain_trunk_that_have_a_window():
    how = dict(class_token=False, global_pool="avg", block_args={"window": 4, "global_blocks": (3,)}, num_classes=3)
    model = timm.create_model("vitrel_vit_n8_table", img_size=64, **how).eval()
    assert window_policies_at(model, (96, 96)) == ("fixed", "rescale")
    changed = with_policy(model, (96, 96), "rescale")
    assert [block.window and block.window[:2] for block in changed.blocks] == [(6, 6)] * 3 + [None]
    assert model.blocks[0].window == Grid(4, 4)


@pytest.mark.slow
def test_gflops_are_timms_gmacs():
    """4.6 for ViT-S/16 and 4.5 for Swin-T at 224 px (the papers; timm's result tables), however position enters."""
    for name, expected in (("vitrel_vit_s16_absolute", 4.60), ("vitrel_swin_t", 4.49)):
        assert gflops(timm.create_model(name), (224, 224)) == pytest.approx(expected, abs=0.01), name
    model = timm.create_model("vitrel_vit_n8_none", img_size=64)
    n, d, mlp = 65, 96, 4 * 96
    blocks = 4 * (n * d * 3 * d + 2 * n * n * d + n * d * d + 2 * n * d * mlp)
    assert gflops(model, (64, 64)) == pytest.approx((64 * 3 * 64 * d + blocks + d * 1000) / 1e9)


def test_windows_and_padding_are_told():
    swin = timm.create_model("vitrel_swin_n")
    columns = costs_at(swin, (80, 72), "fixed")
    assert columns["window"] == "4x4 4x4 4x4" and columns["pad_fraction"] == "0 0.1 0.38"  # 18 of 20, 10 and 9 of 12
    columns = costs_at(swin, (80, 72), "divisor")
    assert (columns["window"], columns["pad_fraction"]) == ("4x4 4x3 2x3", "0 0 0")
    columns = costs_at(swin, (128, 128), "rescale+bicubic")
    assert (columns["window"], columns["resampled"], columns["tokens"]) == ("8x8 8x8 8x8", "table bicubic", 64 * 64)
    vit = timm.create_model("vitrel_vit_n8_shaw")
    assert costs_at(vit, (64, 96), "none")["window"] == "global"


def test_attention_across_borders_is_found():
    """timm's Swin rolls before it pads: with a window of 4, 4 of 9 rows leak. Ours does not, whatever the policy."""
    how = dict(img_size=32, patch_size=2, embed_dim=32, depths=(2,), num_heads=(1,), window_size=4)
    peer = timm.create_model("swin_tiny_patch4_window7_224", strict_img_size=False, **how)
    assert leak_at(peer, (32, 32), "none") == 0
    assert leak_at(peer, (18, 18), "none") == pytest.approx(1 - (5 / 9) ** 2, abs=1e-4)
    ours = timm.create_model("vitrel_swin_n", **how)
    for policy in WINDOW_POLICIES:
        assert leak_at(ours, (18, 26), policy) == 0
    assert leak_at(timm.create_model("vitrel_vit_n8_none"), (64, 64), "none") is None


def test_a_rescaled_window_may_be_the_trained_one_at_another_shape():
    """Images of the native protocol have many shapes; at some of them a policy of the size changes nothing."""
    model = timm.create_model("vitrel_swin_n", num_classes=4, img_size=64).eval()
    policy = "rescale+geometric"
    assert policy in policies_at(model, (96, 64))
    assert at_size_with(model, (64, 64), policy).resampled == {} and at_size_with(model, (96, 96), policy).resampled
    with pytest.raises(ValueError, match="no policy"):
        with_policy(model, (96, 96), "rescale+nearest")
