"""Heads of segmentation: logits lie where their pixels are, at any size, for models with and without stages."""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

import vitrel  # noqa: F401  registers our names with timm
from vitrel.models.segmenter import HEADS, Segmenter

SMALL = {"depth": 2, "embed_dim": 32, "num_heads": 2, "num_classes": 5}


def vit(position="table", **options):
    return timm.create_model("vitrel_vit_n8_none", img_size=(32, 48), position=position, **SMALL | options)


class Places(nn.Module):
    """A model of three stages whose features are the places of their tokens' centers, in pixels (y, x)."""

    def __init__(self):
        super().__init__()
        self.feature_info = [{"num_chs": 2, "reduction": reduction} for reduction in (4, 8, 16)]

    def reset_classifier(self, num_classes, global_pool=None):
        pass

    def forward_intermediates(self, image, indices, norm, output_fmt, intermediates_only):
        assert (indices, norm, output_fmt, intermediates_only) == (3, True, "NCHW", True)
        maps = []
        for level in self.feature_info:
            sides = [(torch.arange(-(-n // level["reduction"])) + 0.5) * level["reduction"] for n in image.shape[-2:]]
            maps.append(torch.stack(torch.meshgrid(*sides, indexing="ij"))[None])
        return maps


@pytest.mark.parametrize("size", [(64, 96), (52, 100)])
def test_stages_are_joined_where_their_tokens_lie(size):
    """Inside, where no interpolation meets a border, every stage says the same place as the finest."""
    places = Segmenter(Places(), 3).features(torch.zeros(1, 3, *size)).view(3, 2, size[0] // 4, size[1] // 4)
    inside = places[..., 2:-4, 2:-4]
    assert inside.numel()
    for stage in inside[1:]:
        torch.testing.assert_close(stage, inside[0])


def test_logits_lie_where_their_pixels_are():
    model = Segmenter(Places(), 2)
    model.head = nn.Conv2d(6, 2, 1, bias=False)  # the place by the finest stage
    with torch.no_grad():
        model.head.weight.copy_(torch.eye(2, 6)[..., None, None])
        logits = model(torch.zeros(1, 3, 61, 90))
    assert logits.shape == (1, 2, 61, 90)
    y, x = torch.meshgrid(torch.arange(61) + 0.5, torch.arange(90) + 0.5, indexing="ij")
    torch.testing.assert_close(logits[0, :, 4:-6, 4:-6], torch.stack((y, x))[:, 4:-6, 4:-6])


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", ["vitrel_vit_n8_rope_mixed", "vitrel_swin_n"])
def test_any_height_and_width(name, head):
    if head != "linear":
        pytest.importorskip("segmentation_models_pytorch")
    model = Segmenter(timm.create_model(name, img_size=(32, 48), num_classes=7), 3, head).eval()
    with torch.no_grad():
        for size in ((32, 48), (33, 70), (17, 24)):
            logits = model(torch.randn(2, 3, *size))
            assert logits.shape == (2, 3, *size) and logits.isfinite().all()
    assert model.num_classes == 3 and model.img_size == (32, 48) and model.pretrained_cfg["mean"]


def test_the_linear_head_reads_the_last_normalized_tokens():
    model = Segmenter(vit(global_pool="token", class_token=True), 3)
    image = torch.randn(2, 3, 32, 48)
    with torch.no_grad():
        tokens = model.backbone.forward_features(image)[:, 1:].mT.unflatten(2, (4, 6))
        at_tokens = torch.einsum("kc,bchw->bkhw", model.head.weight[:, :, 0, 0], tokens) + model.head.bias[:, None, None]
        want = F.interpolate(at_tokens, scale_factor=8, mode="bilinear", align_corners=False)
        torch.testing.assert_close(model(image), want, atol=1e-5, rtol=1e-5)


def swin():
    return timm.create_model("vitrel_swin_t", img_size=(64, 96), embed_dim=16, depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1))


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("build", [vit, swin])
def test_every_parameter_learns_and_stands_in_timms_layers(build, head):
    if head != "linear":
        pytest.importorskip("segmentation_models_pytorch")
    model = Segmenter(build(), 3, head)
    model(torch.randn(2, 3, 32, 48)).square().mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    layers = timm.models.group_parameters(model, model.group_matcher(), reverse=True)
    assert layers.keys() == {name for name, _ in model.named_parameters()}
    assert {name for name, layer in layers.items() if layer == max(layers.values())} >= {
        name for name, _ in model.named_parameters() if name.startswith("head.")
    }
    assert layers["features.body.patch_embed.proj.weight"] == 0
    assert model.position_parameters() <= model.no_weight_decay() and model.position_parameters()
    assert model.position_lr_scales().keys() <= model.position_parameters()


def test_a_timm_model_is_a_backbone_too():
    """Without the norm after its pooling, which no map meets."""
    backbone = timm.create_model("vit_tiny_patch16_224", img_size=(32, 48), depth=2, class_token=False, global_pool="avg")
    model = Segmenter(backbone, 4).eval()
    assert isinstance(backbone.fc_norm, nn.Identity)
    assert model(torch.randn(1, 3, 32, 48)).shape == (1, 4, 32, 48)


def test_what_cannot_be_segmented_is_refused():
    with pytest.raises(ValueError, match="unknown head 'lines'"):
        Segmenter(vit(), 3, "lines")
    linear = nn.Linear(3, 3)
    linear.feature_info = []
    with pytest.raises(ValueError, match="Linear gives no feature maps"):
        Segmenter(linear, 3)
    with pytest.raises(ValueError, match="at least 1 class, not 0"):
        Segmenter(vit(), 0)
