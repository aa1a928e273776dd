import pytest
import timm

from vitrel.evaluate.policies import in_force, policies_at, policies_of, policy_parts, resize_policy
from vitrel.position import PositionEncoding

THREE = ("geometric", "clip", "bicubic")


@pytest.fixture
def vit(trained):
    """vit("table+cpb"): a ViT trained on a 4x4 grid of patches of 8 pixels."""
    return lambda position, **how: trained("vitrel_vit_n8_none", model_args={"position": position, **how}).model


@pytest.mark.parametrize(
    ("position", "size", "policies"),
    [
        ("table", (32, 32), ("none",)),
        ("table", (31, 29), ("none",)),  # the same patches
        ("table", (16, 24), ("none",)),  # the exact centre, whatever the policy
        ("table", (32, 48), THREE),
        ("table", (16, 48), THREE),
        ("absolute", (16, 24), ("bicubic",)),
        ("rope_mixed", (64, 64), ("none",)),
        ("cpb", (32, 32), ("none",)),
        ("cpb", (16, 24), ("keep", "renormalise")),
        ("cpb+alibi", (64, 64), ("keep", "renormalise")),
        ("table+factorised", (64, 64), THREE),
        ("table+decomposed", (64, 64), (*THREE, "linear")),
        ("absolute+table", (64, 64), ("bicubic", "geometric", "clip")),
        ("absolute+table", (16, 16), ("bicubic", "geometric", "clip")),
        ("absolute+cpb", (64, 64), ("bicubic+keep", "bicubic+renormalise")),
        ("table+cpb", (16, 24), ("keep", "renormalise")),
        ("table+cpb", (64, 64), tuple(f"{a}+{b}" for a in THREE for b in ("keep", "renormalise"))),
    ],
)
def test_policies_are_listed_where_they_differ(vit, position, size, policies):
    assert policies_at(vit(position), size) == policies


def test_a_window_that_is_kept_meets_no_other_grid(trained):
    for position, policies in (("table", ("keep",)), ("cpb", ("keep",)), ("absolute+table", ("keep+bicubic",))):
        model = trained("vitrel_swin_n", (64, 64), {"position": position}).model
        assert policies_at(model, (96, 64), ("keep", "bicubic")) == policies


def test_windows_and_encodings_are_combined(trained):
    models = {
        key: trained("vitrel_swin_n", (64, 64), {"position": key}).model for key in ("table", "cpb", "none", "absolute+table")
    }
    assert policies_at(models["table"], (64, 64)) == policies_at(models["cpb"], (64, 64)) == ("none",)
    assert policies_at(models["table"], (128, 64)) == ("keep", *(f"rescale+{policy}" for policy in THREE))
    assert policies_at(models["table"], (48, 48)) == ("keep", "divisor", "rescale")  # sub-tables, exact
    distances = [f"{window}+{policy}" for window in ("divisor", "rescale") for policy in ("keep", "renormalise")]
    assert policies_at(models["cpb"], (80, 80)) == ("keep", *distances)
    assert policies_at(models["cpb"], (80, 80), ["keep", "rescale"]) == ("keep", "rescale+keep")
    assert policies_at(models["none"], (80, 80)) == ("keep", "divisor", "rescale")
    assert policies_at(models["absolute+table"], (80, 80), ["rescale", "clip"]) == ("rescale+clip",)
    assert policies_at(models["table"], (80, 80), ["clip"]) == ("keep",)  # no policy of windows is wanted: theirs is kept


def test_what_a_model_may_be_asked_for(trained, vit):
    assert policies_of(vit("table")) == THREE and policies_of(vit("none")) == ()
    assert policies_of(trained("vitrel_swin_n").model) == ("keep", "divisor", "rescale", *THREE)
    assert policies_of(timm.create_model("resnet10t")) == ()
    assert policies_at(timm.create_model("resnet10t"), (64, 64)) == ("none",)


def test_a_policy_of_windows_and_encodings_is_in_force_inside(trained):
    model = trained("vitrel_swin_n", (64, 64), {"position": "cpb"}).model
    block = model.layers[0].blocks[1]
    with in_force(model, "rescale+renormalise", (96, 128)):
        assert (block.attn.window, block.attn.shift, block.position.resize) == ((6, 8), (3, 4), "renormalise")
    with in_force(model, "keep", (96, 128)):
        assert (block.attn.window, block.position.resize) == ((4, 4), "keep")
    assert (block.attn.window, block.attn.shift, block.position.resize) == ((4, 4), (2, 2), "keep")


def test_the_keep_of_windows_is_not_that_of_distances():
    parts = policy_parts(["none", "keep", "divisor+keep", "rescale+renormalise"])
    assert parts["none"] == frozenset() and parts["keep"] == {"window keep"}
    assert parts["divisor+keep"] == {"window divisor", "keep"}
    assert policy_parts(["keep", "geometric+keep"])["keep"] == {"keep"}  # no windows here


def test_of_several_only_those_wanted(vit):
    assert policies_at(vit("table"), (64, 64), ["bicubic", "clip"]) == ("clip", "bicubic")
    assert policies_at(vit("absolute"), (64, 64), ["clip"]) == ("bicubic",)
    assert policies_at(vit("table+cpb"), (64, 64), ["clip", "renormalise"]) == ("clip+renormalise",)
    # a model that has none of the wanted ones is still evaluated, with its own
    cpb = vit("cpb", position_args={"resize": "renormalise"})
    assert policies_at(cpb, (64, 64), ["clip"]) == ("renormalise",)
    assert policies_at(vit("table+cpb"), (64, 64), ["clip"]) == ("clip+keep",)


@pytest.mark.parametrize("policy", ["clip+renormalise", "bicubic+keep", "none", "clip+keep+stretch"])
def test_a_policy_is_in_force_inside_and_the_models_own_after(vit, policy):
    model = vit("table+cpb")
    in_use = {part.resize for part in model.modules() if isinstance(part, PositionEncoding) and part.policies}
    assert in_use == {"geometric", "keep"}
    if "stretch" in policy:
        with pytest.raises(ValueError, match="no resize policy 'stretch'"), resize_policy(model, policy):
            pass
    else:
        with resize_policy(model, policy):
            parts = model.blocks[-1].position.parts
            assert policy in ("none", f"{parts['table'].resize}+{parts['cpb'].resize}")
    assert {part.resize for part in model.modules() if isinstance(part, PositionEncoding) and part.policies} == in_use
