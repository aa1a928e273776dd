"""Images of several sizes in one padded batch: the result for each equals its own forward pass, outputs and gradients."""

import pytest
import timm
import torch

import vitrel
from helpers import each
from helpers.variants import IN_ATTENTION, KEYS
from vitrel.inputs import features_mixed, forward_mixed

SIZES = [(64, 64), (40, 88), (72, 57), (64, 64), (8, 96)]
VIT = dict(depth=2, num_classes=5, embed_dim=32, num_heads=2)
SWIN = dict(depths=(2, 2, 2), num_classes=5, embed_dim=16, num_heads=(1, 2, 2), window_size=(4, 3))
TRUNKS = {
    "windows": dict(position="absolute+decomposed", class_token=False, global_pool="avg", block_args=dict(window=(3, 4))),
    "shared": dict(position="table", share_position=True, reg_tokens=2),
}


def build(name, **options):
    torch.manual_seed(0)
    model = timm.create_model(name, **(VIT if "_vit_" in name else SWIN) | options).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "position" in key or "pos_embed" in key or not parameter.any():
                parameter.add_(torch.randn_like(parameter) * 0.5)
    return model


def batch(sizes=SIZES):
    """Images in the upper left of a batch whose padding is anything but zero."""
    images = [torch.randn(3, *size) for size in sizes]
    padded = torch.full((len(sizes), 3, 80, 104), 7.0)
    for place, image in zip(padded, images, strict=True):
        place[:, : image.shape[1], : image.shape[2]] = image
    return images, padded


def check(model, sizes=SIZES):
    images, padded = batch(sizes)
    together = features_mixed(model, padded, sizes)
    for own, image in zip(together, images, strict=True):
        torch.testing.assert_close(own, model.forward_features(image[None])[0], atol=1e-5, rtol=1e-5)
    weight = torch.randn(len(images), 5)
    gradients = []
    for logits in (forward_mixed(model, padded, sizes), torch.cat([model(image[None]) for image in images])):
        model.zero_grad()
        (logits * weight).sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    torch.testing.assert_close(forward_mixed(model, padded, sizes), logits, atol=1e-5, rtol=1e-5)
    for name, expected in gradients[1].items():
        assert (gradients[0][name] - expected).norm() <= 1e-4 * expected.norm() + 1e-6, name


@pytest.mark.slow
@each("key", KEYS)
def test_every_encoding_in_a_vit(key):
    check(build("vitrel_vit_n8_none", position=key), SIZES[1:3])


@pytest.mark.slow
@each("key", [*IN_ATTENTION, "absolute+rope_mixed"])
def test_every_encoding_in_a_swin(key):
    check(build("vitrel_swin_n", position=key, depths=(2, 1), num_heads=(1, 2)), SIZES[1:3])


@each("trunk", TRUNKS)
def test_other_trunks(trunk):
    check(build("vitrel_vit_n8_none", **TRUNKS[trunk]))


def test_swin_v2_and_a_temperature():
    check(build("vitrel_swinv2_n", version=2))
    check(build("vitrel_vit_n8_table", position_args=dict(temperature="log_n")))


@each("name", ["vitrel_vit_n8_table", "vitrel_swin_n"])
def test_gradient_checkpointing_and_training(name):
    model = build(name).train()
    _, padded = batch()
    expected = forward_mixed(model, padded, SIZES)
    model.set_grad_checkpointing()
    again = forward_mixed(model, padded, SIZES)
    torch.testing.assert_close(again, expected)
    again.sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@each("name", ["vitrel_vit_n8_rope_axial", "vitrel_swin_n"])
def test_autocast(name):
    model = build(name)
    images, padded = batch()
    with torch.autocast("cpu", torch.bfloat16):
        together = forward_mixed(model, padded, SIZES)
        alone = torch.cat([model(image[None]) for image in images])
    torch.testing.assert_close(together, alone, atol=2e-2, rtol=2e-2)


def test_sizes_of_any_kind():
    model = build("vitrel_swin_n")
    _, padded = batch()
    expected = forward_mixed(model, padded, SIZES)
    for sizes in (torch.tensor(SIZES), [[*size] for size in SIZES]):
        assert torch.equal(forward_mixed(model, padded, sizes), expected)
    with pytest.raises(ValueError, match="0 sizes for 0 images"):
        forward_mixed(model, padded[:0], [])
    model.reset_classifier(0, "")
    with pytest.raises(ValueError, match=r"without pooling .* the outputs have several sizes: use features_mixed"):
        forward_mixed(model, padded, SIZES)


def test_a_fading_embedding():
    model = vitrel.relativize(build("vitrel_vit_n8_absolute"), "table", absolute="fade", fade_steps=4)
    check(model)
    with pytest.raises(ValueError, match="absolute_fade counts forward passes"):
        forward_mixed(model.train(), batch()[1], SIZES)


def test_errors():
    model = build("vitrel_vit_n8_none")
    _, padded = batch()
    with pytest.raises(ValueError, match=r"4 sizes for 5 images: pass one \(height, width\) in pixels for each"):
        forward_mixed(model, padded, SIZES[:4])
    with pytest.raises(ValueError, match=r"size 81x64 of image 0 must be at least one patch of 8x8 and at most the 80x104"):
        forward_mixed(model, padded, [(81, 64), *SIZES[1:]])
    with pytest.raises(ValueError, match=r"size 7x96 of image 4 must be at least one patch"):
        features_mixed(model, padded, [*SIZES[:4], (7, 96)])
