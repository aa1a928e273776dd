"""Registration with timm, construction, and forward/backward of every small model at sizes other than the native one."""

import re

import pytest
import timm
import torch
from timm.models import save_for_hf

import vitrel
from helpers import each
from helpers.variants import WAYS
from vitrel import POSITIONS
from vitrel.models.create import on_meta

NAMES = timm.list_models("vitrel_*")
# Every encoding in a ViT; in windows one for each way to enter attention.
SMALL = [name for name in NAMES if "_n8_" in name] + [f"vitrel_swin_n_{key}" for key in WAYS]
SMALL += ["vitrel_swin_n", "vitrel_swin_n_absolute_rope_mixed", "vitrel_swinv2_n"]
TINY = ["vitrel_vit_ti16_table", "vitrel_swin_t", "vitrel_swinv2_t"]
VIT_SIZES, SWIN_SIZES, SWINV2_SIZES = ["n8", "ti16", "s16", "b16", "l16"], ["n", "t", "s", "b", "l"], ["n", "t", "s", "b"]


def expected_names():
    composed = ["absolute_rope_mixed", "rope_mixed_table"]
    attention = [key for key, encoding in POSITIONS.items() if encoding.site == "attention"] + composed
    vits = {f"vitrel_vit_{size}_{key}" for size in VIT_SIZES for key in [*POSITIONS, *composed]}
    swins = {f"vitrel_swin_{size}_{key}" for size in SWIN_SIZES for key in attention}
    plain = {f"vitrel_swin_{size}" for size in SWIN_SIZES} | {f"vitrel_swinv2_{size}" for size in SWINV2_SIZES}
    return vits | swins | plain | {"vitrel_vit", "vitrel_swin"}


def test_every_row_is_registered():
    assert set(NAMES) == expected_names()


@pytest.mark.parametrize("name", SMALL + TINY)
def test_forward_and_backward(name):
    """Any size, also odd, non-square and below the window; every parameter gets a gradient; nothing in the model changes."""
    few = dict(depth=2) if "_vit_" in name else dict(depths=(2, 1, 1, 1)[: 4 if name in TINY else 3])
    model = timm.create_model(name, num_classes=5, **few)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    height, width = model.img_size
    sizes = [(height, width)] if name in TINY else [(height // 2 + 3, width - 5), model.patch_embed.patch_size]
    for size in sizes:
        model.zero_grad()
        out = model(torch.randn(2, 3, *size))
        assert out.shape == (2, 5)
        out.square().sum().backward()
        for n, parameter in model.named_parameters():
            assert parameter.grad is not None and parameter.grad.isfinite().all(), n
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items())


PUBLISHED = r"vitrel_(vit_[a-z]+\d+_table|swin_[a-z]|swinv2_[a-z])"  # every size; SMALL has every encoding
EVERY = [*dict.fromkeys([*SMALL, *(name for name in NAMES if re.fullmatch(PUBLISHED, name))])]


@pytest.mark.slow
@each("name", EVERY)
def test_config_and_construction_on_meta(name):
    stages = 3 if re.match(r"vitrel_swin(v2)?_n", name) else 4
    model = timm.create_model(name, device="meta", **({"depth": 1} if "_vit_" in name else {"depths": (1,) * stages}))
    cfg = model.pretrained_cfg
    assert cfg["architecture"] == name and cfg["num_classes"] == 1000 and not cfg["fixed_input_size"]
    assert model.get_submodule(cfg["first_conv"]).weight.shape[1] == 3
    assert model.get_submodule(cfg["classifier"]) is model.get_classifier()
    assert tuple(cfg["input_size"][1:]) == model.img_size
    assert all(t.is_meta for t in model.state_dict().values())
    assert model.no_weight_decay() <= {n for n, _ in model.named_parameters()}
    key = name.split("_", 3)[-1] if name.count("_") > 2 else "table"
    key = {"absolute_rope_mixed": "absolute+rope_mixed", "rope_mixed_table": "rope_mixed+table"}.get(key, key)
    learned = any(True for _ in vitrel.create_position(key, (4, 4), 4, 8).parameters())
    assert bool(model.position_parameters()) == learned


def test_compositions():
    model = timm.create_model("vitrel_vit_n8_table", position="absolute+rope_mixed", num_classes=3)
    assert model.pos_embed is not None and len(model.position_parameters()) == 1 + 4
    assert model(torch.randn(1, 3, 40, 72)).shape == (1, 3)
    assert model.resampled((40, 72)) == {"absolute bicubic": 64 * 96}
    swin = timm.create_model("vitrel_swin_n", position="absolute+rope_mixed+table", num_classes=3)
    assert swin(torch.randn(1, 3, 40, 72)).shape == (1, 3)
    assert swin.policies == ("bicubic",)


def test_keywords():
    model = timm.create_model(
        "vitrel_vit_n8_table",
        num_classes=7,
        in_chans=1,
        img_size=(32, 48),
        global_pool="avg",
        class_token=False,
        drop_path_rate=0.1,
        position_args=dict(policy="clip"),
    )
    assert model(torch.randn(2, 1, 32, 48)).shape == (2, 7)
    assert model.token_grid((32, 48)) == (4, 6, 0)
    assert model.resampled((64, 96)) == {"table clip": 0}
    window = timm.create_model("vitrel_swin_n", window_size=(4, 6), num_classes=2)
    assert window.layers[0].blocks[1].attn.shift == (2, 3)
    assert [grid for _, grid in window.encodings((50, 62))] == [(4, 6, 0)] * 6
    assert window(torch.randn(1, 3, 50, 62)).shape == (1, 2)


def test_policies():
    vit = timm.create_model("vitrel_vit_n8_table", num_classes=2)
    assert vit.policies == ("geometric", "clip", "bicubic")
    image, outputs = torch.randn(1, 3, 128, 128), []
    with torch.no_grad():
        for parameter in vit.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
        for policy in vit.policies:
            vit.set_position_options(policy=policy)
            outputs.append(vit(image))
            assert list(vit.resampled((128, 128))) == [f"table {policy}"]
    assert (outputs[0] - outputs[1]).abs().max() > 1e-3 and (outputs[0] - outputs[2]).abs().max() > 1e-3
    assert vit.resampled((64, 64)) == {} and vit.unseen((64, 64)) == 0
    assert vit.unseen((128, 128)) == pytest.approx(1 - 15**2 / 31**2)
    with pytest.raises(ValueError, match=r"no policy 'nearest' \(it has geometric, clip, bicubic\)"):
        vit.set_position_options(policy="nearest")
    swin = timm.create_model("vitrel_swin_n")
    assert swin.policies == () and swin.resampled((512, 96)) == {}
    with pytest.raises(ValueError, match="nothing is resampled"):
        swin.set_position_options(policy="clip")


def test_set_input_size_takes_timms_call():
    swin, vit = timm.create_model("vitrel_swin_n"), timm.create_model("vitrel_vit_n8_table")
    swin.set_input_size((96, 128), window_size=4)
    vit.set_input_size(patch_size=8)
    assert swin.img_size == (96, 128) and vit.img_size == (64, 64)
    with pytest.raises(ValueError, match=r"window_size 7 differs from the model's \(4, 4\)"):
        swin.set_input_size(224, window_size=7)
    with pytest.raises(ValueError, match=r"patch_size 16 differs from the model's \(8, 8\)"):
        vit.set_input_size(224, patch_size=16)


def test_init_gain():
    usual, strong = (timm.create_model("vitrel_vit_n8_table", init_gain=gain) for gain in (None, 1.5))
    assert usual.blocks[0].mlp.fc2.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert strong.blocks[0].mlp.fc2.weight.std().item() == pytest.approx(1.5 / 384**0.5, rel=0.05)
    assert strong.blocks[0].attn.qkv.weight.std().item() == pytest.approx(1.5 / 96**0.5, rel=0.05)


def test_rectangular_patches_and_other_depths():
    swin = timm.create_model("vitrel_swin_n", patch_size=(2, 4), features_only=True)
    assert swin.feature_info.reduction() == [4, 8, 16]
    assert [f.shape[2:] for f in swin(torch.randn(1, 3, 64, 64))] == [(32, 16), (16, 8), (8, 4)]
    shallow = timm.create_model("vitrel_vit_ti16_table", depth=3, img_size=64, features_only=True)
    assert len(shallow(torch.randn(1, 3, 64, 64))) == 3
    assert len(timm.create_model("vitrel_swin_n", depths=(2, 2), num_heads=(1, 2), features_only=True).feature_info) == 2


@each(
    ("keywords", "error", "text"),
    [
        (dict(position="tabel"), ValueError, "did you mean 'table'"),
        (dict(position_args=dict(bse=1)), TypeError, "has no option 'bse'"),
        (
            dict(embed_dimm=96),
            TypeError,
            "vitrel_vit_n8_table: .*unexpected keyword argument 'embed_dimm'; did you mean 'embed_dim'",
        ),
        (dict(positions="table"), TypeError, "did you mean 'position'"),
        (
            dict(position="rope_axial", num_heads=16),
            ValueError,
            "rope_axial needs a head width divisible by 4 .*, not 6; choose",
        ),
        (dict(embed_dim=98), ValueError, "dim 98 is not divisible by num_heads 3"),
        (dict(class_token=False), ValueError, "global_pool='token' needs class_token=True; choose one of 'avg'"),
        (dict(global_pool="prr"), ValueError, "global_pool='prr' is unknown; choose one of 'token', 'avg'"),
    ],
)
def test_construction_errors(keywords, error, text):
    with pytest.raises(error, match=text):
        timm.create_model("vitrel_vit_n8_table", **keywords)


def test_create_model_imports_and_delegates(tmp_path):
    torch.manual_seed(0)
    model = vitrel.create_model("vitrel_swin_n", num_classes=3, position="rope_mixed")
    assert type(model).__name__ == "Swin" and model.num_classes == 3
    assert vitrel.create_model("resnet18", num_classes=2).num_classes == 2
    save_for_hf(model, tmp_path)
    assert vitrel.create_model(f"local-dir:{tmp_path}").num_classes == 3
    with pytest.raises(
        ValueError, match=r"unknown model 'vitrel_swin_tt'; nearest: vitrel_swin_t, .* \(timm\.list_models lists all"
    ):
        vitrel.create_model("vitrel_swin_tt")


@each("name", ["vitrel_vit_n8_table", "vitrel_swin_n"])
def test_input_errors(name):
    model = timm.create_model(name)
    patch = model.patch_embed.patch_size[0]
    with pytest.raises(ValueError, match=f"image of {patch - 1}x64 pixels is smaller than one patch of {patch}x{patch}"):
        model(torch.zeros(1, 3, patch - 1, 64))
    with pytest.raises(ValueError, match=r"expected images \[B, C, height, width\], got shape \(3, 64, 64\)"):
        model(torch.zeros(3, 64, 64))
    with pytest.raises(ValueError, match="expected 3 channels, got 1; build the model with in_chans=1"):
        model(torch.zeros(1, 1, 64, 64))


@each("name", ["vitrel_vit_n8_cpb", "vitrel_swinv2_n", "test_vit", "swin_tiny_patch4_window7_224"])
def test_a_model_on_the_meta_device_has_the_shapes_of_the_model(name):
    with on_meta():
        shapes = timm.create_model(name)
    state = timm.create_model(name).state_dict()
    assert all(value.is_meta for value in shapes.parameters())
    assert {key: value.shape for key, value in shapes.state_dict().items()} == {
        key: value.shape for key, value in state.items()
    }
    torch.ones(2).mul_(3)  # after the context values are filled as ever
    with on_meta():
        assert torch.ones(2, device="cpu").mul_(3).tolist() == [3, 3]  # and inside it those on a device
