"""vitrel.optimize in evaluation: the plain model's outputs, of every encoding, trunk and size, of models of other code too."""

import copy

import pytest
import timm
import torch
import torchvision
from timm.models import mlp_mixer, swin_transformer, vision_transformer
from torch import nn

import vitrel
from helpers.optimized import NEAR, assert_near, check, lively, operators, picture, small, twins
from helpers.variants import IN_ATTENTION, KEYS
from vitrel.cpu import linear
from vitrel.cpu import optimize as optimize_module
from vitrel.cpu.optimize import FastLinear
from vitrel.inputs import features_mixed, forward_memory, forward_mixed, tiled_features
from vitrel.inspect.attention import record
from vitrel.models.registry import COMPOSITIONS

SIZES = [(3, (64, 64)), (2, (72, 57)), (3, (8, 96))]
TRUNKS = [("vit", key) for key in (*KEYS, *COMPOSITIONS)] + [("swin", key) for key in (*IN_ATTENTION, *COMPOSITIONS)]
WINDOWED = dict(class_token=False, global_pool="avg", position="absolute+decomposed")
OPTIONS = {
    "v2": ("swinv2", {}),
    "v2 with a table": ("swinv2", dict(position="table", window_size=(3, 5))),
    "v2 with content": ("swinv2", dict(position="rope_mixed+shaw")),
    "window not square": ("swin", dict(window_size=(3, 5))),
    "window larger than the grid": ("swin", dict(window_size=16)),
    "stages of one block": ("swin", dict(depths=(1, 3))),
    "patches of 3": ("swin", dict(patch_size=3)),
    "no qkv bias": ("swin", dict(qkv_bias=False)),
    "narrow mlp": ("swin", dict(mlp_ratio=0.35)),
    "one channel": ("swin", dict(in_chans=1)),
    "max pool": ("swin", dict(global_pool="max")),
    "layer scale and registers": ("vit", dict(position="table", reg_tokens=3, block_args=dict(init_values=0.5))),
    "swiglu": ("vit", dict(position="absolute+rope_axial", block_args=dict(mlp="swiglu"))),
    "swiglu norm": (
        "vit",
        dict(position="rope_mixed", block_args=dict(mlp="swiglu", mlp_norm=True, init_values=0.5, norm_eps=1e-3)),
    ),
    "windows": ("vit", WINDOWED | dict(block_args=dict(window=(3, 4)))),
    "windows and global": ("vit", WINDOWED | dict(position="table", block_args=dict(window=4, global_blocks=(1,)))),
    "shared": ("vit", dict(position="absolute+table", share_position=True)),
    "temperature": ("vit", dict(position="table", position_args=dict(temperature="log_n"))),
    "average": ("vit", dict(position="table", class_token=False, global_pool="avg", qkv_bias=False)),
    "no classifier": ("vit", dict(position="table", num_classes=0, global_pool="")),
    "dropout": ("vit", dict(position="table", drop_rate=0.5, attn_drop_rate=0.5, drop_path_rate=0.5)),
}


def outputs(model, image):
    """Logits, features and gradients of a vitrel model."""
    for _ in range(2):
        yield model(image)
        yield model.forward_features(image)
        yield list(model.forward_intermediates(image, norm=True))
        yield model.forward_intermediates(image, indices=[0], intermediates_only=True, stop_early=True)


def check_outputs(model):
    plain, model = twins(model)
    for (batch, size), guard in zip(SIZES[1:], (torch.inference_mode, torch.no_grad), strict=True):
        image = picture(batch, size, plain.in_chans)
        given = image.clone()
        with guard():
            for found, wanted in zip(outputs(model, image), outputs(plain, image), strict=True):
                assert_near(found, wanted)
        assert torch.equal(image, given)


@pytest.mark.parametrize(("trunk", "key"), TRUNKS)
def test_every_encoding(trunk, key):
    check(*twins(small(trunk, position=key)), picture(*SIZES[1]))


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option(name):
    trunk, options = OPTIONS[name]
    check_outputs(small(trunk, **options))


@pytest.mark.parametrize(("trunk", "key"), [("vit", "table"), ("vit", "rope_mixed"), ("swin", "table"), ("swinv2", "cpb")])
def test_as_exact_as_the_plain_model(trunk, key):
    """Against float64, with whatever the linears run through."""
    for linears in ("auto", "onednn", "torch"):
        plain, model = twins(small(trunk, position=key), linears=linears)
        exact = copy.deepcopy(plain).double()
        for batch, size in SIZES:
            image = picture(batch, size)
            with torch.no_grad():
                wanted = exact(image.double()).float()
                assert_near(model(image), wanted)
                assert_near(model(image), plain(image))


def test_many_tokens_and_one():
    """Beyond any chunk of tokens, by an odd number of them; and a single token."""
    for model in (small("swin", patch_size=1, embed_dim=8, num_heads=(1, 1)), small("vit", depth=1, position="table")):
        plain, model = twins(model)
        size = (133, 257) if plain.patch_embed.patch_size == (1, 1) else (133 * 8, 17 * 8)
        for image in (picture(1, size), picture(3, (8, 8)), picture(70, (16, 24)), picture(1, (1, 1))[..., :0, :0]):
            if image.numel():
                check(plain, model, image)


def test_images_of_any_layout():
    plain, model = twins(small("swin"))
    image = picture(3, (48, 56))
    check(plain, model, image.to(memory_format=torch.channels_last))
    check(plain, model, image.transpose(2, 3))
    check(plain, model, image[:, :, ::2, 1::3])
    check(plain, model, image[:0].new_zeros(1, 3, 48, 56).expand(3, -1, -1, -1))


def test_gelu_is_exact():
    """By values of the hidden layer from -12 to 12, where the tanh approximation is off by 1e-3."""
    model = vitrel.create_model("vitrel_vit_n8_none", depth=1, embed_dim=48, num_classes=5).eval()
    mlp = model.blocks[0].mlp
    with torch.no_grad():
        nn.init.zeros_(mlp.fc1.bias)
        mlp.fc1.weight.copy_(torch.eye(192, 48))
        mlp.fc2.weight.copy_(torch.eye(48, 192))
    exact = copy.deepcopy(mlp).double()
    values = torch.linspace(-12, 12, 48 * 50).view(2, 25, 48)
    vitrel.optimize(model)
    with torch.no_grad():
        found, wanted = mlp(values), exact(values.double())
        torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=2e-6)
        x = mlp(values[0, 0])  # one token
        torch.testing.assert_close(x.double(), wanted[0, 0], rtol=1e-5, atol=2e-6)


FOREIGN = {
    "timm vit": lambda: vision_transformer.VisionTransformer(32, 8, embed_dim=24, depth=2, num_heads=2, num_classes=5),
    "timm vit, tanh": lambda: vision_transformer.VisionTransformer(
        32, 8, embed_dim=24, depth=2, num_heads=2, act_layer="gelu_tanh", init_values=0.5
    ),
    "timm vit, quick": lambda: vision_transformer.VisionTransformer(
        32, 8, embed_dim=24, depth=2, num_heads=2, act_layer="quick_gelu", qk_norm=True
    ),
    "timm vit, relu": lambda: vision_transformer.VisionTransformer(32, 8, embed_dim=24, depth=1, num_heads=2, act_layer="relu"),
    "timm swin": lambda: swin_transformer.SwinTransformer(
        32, 2, embed_dim=16, depths=(2, 2), num_heads=(1, 2), window_size=4, num_classes=5
    ),
    "timm mixer": lambda: mlp_mixer.MlpMixer(img_size=32, patch_size=8, embed_dim=24, num_blocks=2, num_classes=5),
    "timm eva": lambda: timm.create_model("eva02_tiny_patch14_224", img_size=56, depth=2, embed_dim=24, num_heads=2),
    "timm convnext": lambda: timm.create_model("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
    "torchvision vit": lambda: torchvision.models.VisionTransformer(32, 8, 2, 2, 24, 48, num_classes=5),
    "torchvision swin": lambda: torchvision.models.SwinTransformer([2, 2], 16, [2, 2], [1, 2], [4, 4], num_classes=5),
}


@pytest.mark.parametrize("linears", ["onednn", "torch"])
@pytest.mark.parametrize("name", FOREIGN)
def test_models_of_other_code(name, linears):
    plain, model = twins(lively(FOREIGN[name]()), linears=linears)
    assert type(plain) is not type(small("vit"))
    side = 56 if "eva" in name else 32
    for batch in (1, 3):
        check(plain, model, picture(batch, (side, side)))


def test_auto_decides_between_the_two():
    """Logits and operators are those of one of the two."""
    image, model = picture(), small("vit", position="table")
    with torch.no_grad():
        ran = {how: operators(lambda m=twins(model, linears=how)[1]: m(image)) for how in ("auto", "onednn", "torch")}
    through = {how: any(op.startswith("mkldnn") and "linear" in op for op in names) for how, names in ran.items()}
    assert through["onednn"] is torch.backends.mkldnn.is_available() and not through["torch"]
    for wrong in ("mkl", "", None, True):
        with pytest.raises(ValueError, match=r"linears.*(auto.*onednn.*torch)"):
            vitrel.optimize(model, linears=wrong)


@pytest.mark.parametrize(
    ("trunk", "key", "linears"),
    [("vit", "table", "onednn"), ("vit", "shaw", "torch"), ("swin", "table", "torch"), ("swinv2", "cpb", "onednn")],
)
def test_a_batch_in_several_chunks(monkeypatch, trunk, key, linears):
    """An image at a time, some, and all."""
    if linears == "onednn" and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch has no oneDNN")
    plain, model = twins(small(trunk, position=key), linears=linears)
    image = picture(5, (24, 40))
    for numbers in (1, 10000, 40000, 1 << 21):
        monkeypatch.setattr(linear, "CHUNK", numbers)
        with torch.no_grad():
            assert_near(model(image), plain(image))


def test_where_onednn_is_no_faster_it_says_so(monkeypatch):
    monkeypatch.setattr(optimize_module, "onednn_is_faster", lambda model: False)
    with pytest.warns(UserWarning, match="oneDNN is no faster here"):
        model = vitrel.optimize(small("vit"))
    assert not any(isinstance(module, FastLinear) for module in model.modules())


def test_segments_mixed_sizes_and_tiles():
    plain, model = twins(small("vit", position="rope_mixed"))
    with torch.no_grad():
        for _ in range(2):
            found, wanted = [], []
            for m, kept in ((model, found), (plain, wanted)):
                torch.manual_seed(1)
                memory = None
                for rows in (3, 1, 2):
                    tokens, memory = forward_memory(m, picture(2, (rows * 8, 40)), memory, length=2)
                    kept += [tokens, *memory.layers[0]]
            assert_near(found, wanted)
    sizes = [(64, 64), (40, 88), (72, 57)]
    for trunk, options in (("vit", dict(position="table")), ("swin", {}), ("swinv2", {}), ("vit", dict(share_position=True))):
        plain, model = twins(small(trunk, **options))
        images = picture(3, (80, 96))
        with torch.no_grad():
            check(plain, model, images)
            for _ in range(2):
                assert_near(features_mixed(model, images, sizes), features_mixed(plain, images, sizes))
            assert_near(forward_mixed(model, images, sizes), forward_mixed(plain, images, sizes))
            check(plain, model, images)
    plain, model = twins(small("swin", window_size=2, depths=(2, 2)))
    image = picture(1, (96, 120))
    with torch.no_grad():
        wanted = plain.forward_features(image)
        for _ in range(2):
            assert_near(tiled_features(model, image, (64, 72)), wanted, 2 * NEAR)
            assert_near(model.forward_features(image), wanted)


def test_attention_that_is_recorded():
    """The recording sees each layer as in the plain model, whether or not other layers are recorded."""
    for trunk in ("vit", "swin", "swinv2"):
        plain, model = twins(small(trunk, position="table"))
        image = picture()
        check(plain, model, image)
        wanted, found = record(plain, image), record(model, image)
        assert len(found) == len(wanted) == len(list(plain.encodings((40, 88))))
        for own, other in zip(found, wanted, strict=True):
            for name, value in other._asdict().items():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    torch.testing.assert_close(getattr(own, name), value, rtol=1e-4, atol=1e-5)
        check(plain, model, image)


@pytest.mark.parametrize(("trunk", "key"), [("vit", "table"), ("swinv2", "cpb")])
def test_half_precision_is_no_worse(trunk, key):
    """Against the plain model in float32: of bfloat16 weights, and of autocast, in either order with float32.

    Other roundings give other errors: the mean over 32 images of one as exact is within 10 % of it.
    """
    plain, model = twins(small(trunk, position=key))
    images = [picture(8, (24, 40)) for _ in range(4)]

    def errors(m, cast):
        found = []
        for image in images:
            with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                out = m(image.to(next(m.parameters()).dtype))
            found.append((out.float() - plain(image)).norm() / plain(image).norm())
        return torch.stack(found).mean().item()

    with torch.no_grad():
        check(plain, model, images[0])
        assert errors(model, True) <= 1.15 * errors(plain, True) > 0
        check(plain, model, images[0])
        fresh = vitrel.optimize(copy.deepcopy(plain))
        assert errors(fresh, True) <= 1.15 * errors(plain, True)
        check(plain, fresh, images[0])
        half = copy.deepcopy(plain).bfloat16()
        assert errors(model.bfloat16(), False) <= 1.15 * errors(half, False)
        assert errors(vitrel.optimize(copy.deepcopy(half)), False) <= 1.15 * errors(half, False)
        assert model(images[0].bfloat16()).dtype == torch.bfloat16


def test_double_precision():
    plain, model = twins(small("swin").double())
    with torch.no_grad():
        for _ in range(2):
            image = picture().double()
            assert_near(model(image), plain(image), 1e-12)
