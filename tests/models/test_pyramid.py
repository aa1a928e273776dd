"""The feature pyramid: its maps against the model's own features, and in the libraries that take it."""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

import vitrel

NAMES = ("vitrel_vit_n8_rope_mixed", "vitrel_swin_n", "vit_tiny_patch16_224")
SIZE = (200, 312)  # no patch of 16, no window, and no stride of 32 divides it


def model_of(name):
    options = {} if name.startswith("vitrel") else dict(dynamic_img_size=True, dynamic_img_pad=True, depth=2)
    return timm.create_model(name, **options).eval()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "channels"), [(NAMES[0], 12), (NAMES[1], None), (NAMES[2], None)])
def test_maps_have_the_strides_and_widths_that_are_said(name, channels):
    body = vitrel.pyramid(model_of(name), channels=channels)
    maps = body(torch.randn(2, 3, *SIZE))
    info = body.feature_info
    assert info.reduction() == [4, 8, 16, 32] and list(maps) == ["0", "1", "2", "3"]
    assert body.out_channels == (info.channels() if channels is None else channels)
    for x, width, stride in zip(maps.values(), info.channels(), info.reduction(), strict=True):
        assert x.shape == (2, width, -(-SIZE[0] // stride), -(-SIZE[1] // stride))
    sum(x.square().mean() for x in maps.values()).backward()
    assert [n for n, p in body.named_parameters() if p.grad is None] == []  # as DDP wants it


@torch.no_grad()
def test_maps_are_the_models_own_features():
    image, model = torch.randn(1, 3, *SIZE), model_of("vitrel_swin_n")
    stages = model.forward_intermediates(image, intermediates_only=True)
    maps = vitrel.pyramid(model, (2, 4, 8, 32))(image)
    for own, x in zip(stages, maps.values(), strict=False):
        torch.testing.assert_close(x, own)
    torch.testing.assert_close(maps["3"], F.max_pool2d(stages[-1], 4, ceil_mode=True))

    vit = model_of("vitrel_vit_n8_rope_mixed")
    last = vit.forward_intermediates(image, [len(vit.blocks) - 1], intermediates_only=True)[0]
    body = vitrel.pyramid(vit, (4, 8, 16))
    finer, same, coarser = body(image).values()
    torch.testing.assert_close(same, last)
    torch.testing.assert_close(coarser, F.max_pool2d(last, 2, ceil_mode=True))
    double = body.rescale[0][0]
    cell = torch.einsum("c,cdyx->dyx", last[0, :, 7, 11], double.weight) + double.bias[:, None, None]  # its 2 x 2 finer cells
    torch.testing.assert_close(finer[0, :, 14:16, 22:24], cell)


def test_what_cannot_be_reached_is_refused():
    with pytest.raises(ValueError, match="no power of 2 times one of the model's, 2, 4, 8"):
        vitrel.pyramid(model_of("vitrel_swin_n"), (4, 12))
    with pytest.raises(ValueError, match="fine to coarse"):
        vitrel.pyramid(model_of("vitrel_swin_n"), (8, 4))
    with pytest.raises(ValueError, match="Linear has no forward_intermediates"):
        vitrel.pyramid(nn.Linear(2, 2))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), [(NAMES[0], "fpn"), (NAMES[1], "alone")])
def test_torchvisions_detector_trains_on_it(name, way):
    detection, ops = pytest.importorskip("torchvision.models.detection"), pytest.importorskip("torchvision.ops")
    torch.manual_seed(0)
    model = timm.create_model(name, drop_path_rate=0.0)
    if way == "fpn":
        body = vitrel.pyramid(model)
        pool = ops.feature_pyramid_network.LastLevelMaxPool()
        backbone = nn.Sequential(body, ops.FeaturePyramidNetwork(body.out_channels, 16, pool))
        backbone.out_channels = 16
    else:
        backbone = vitrel.pyramid(model, (4, 8, 16, 32, 64), channels=16)
    few = {f"rpn_{when}_nms_top_n_{mode}": 20 for when in ("pre", "post") for mode in ("train", "test")}
    detector = detection.FasterRCNN(backbone, 3, min_size=SIZE[0], max_size=SIZE[1], box_detections_per_img=5, **few)
    images = [torch.rand(3, *SIZE)]
    boxes = dict(boxes=torch.tensor([[10.0, 20, 90, 120]]), labels=torch.tensor([1]))
    losses = detector(images, [boxes])
    sum(losses.values()).backward()
    assert all(loss.isfinite() for loss in losses.values())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in backbone.parameters())
    assert detector.eval()(images)[0]["boxes"].shape[1:] == (4,)


class Encoder(nn.Module):
    """A pyramid as an encoder of segmentation_models_pytorch, as in docs/how_to/detection.md."""

    output_stride = 32

    def __init__(self, depth, output_stride):
        super().__init__()
        self.body = vitrel.pyramid(timm.create_model("vitrel_vit_n8_rope_mixed"), (2, 4, 8, 16, 32))
        self.out_channels = [3, *self.body.out_channels]

    def set_in_channels(self, in_channels, pretrained=True):
        assert in_channels == 3

    def forward(self, x):
        return [x, *self.body(x).values()]


@pytest.mark.parametrize(("architecture", "encoder"), [("Unet", "a vit"), ("UPerNet", "tu-vitrel_swin_t")])
def test_segmentation_models_take_it(encoder, architecture, monkeypatch):
    smp = pytest.importorskip("segmentation_models_pytorch")
    monkeypatch.setitem(smp.encoders.encoders, "a vit", dict(encoder=Encoder, params={}, pretrained_settings={}))
    small = dict(embed_dim=24, depths=(1, 1, 1, 1), num_heads=(1, 2, 3, 4)) if encoder.startswith("tu") else {}
    net = smp.create_model(architecture, encoder_name=encoder, encoder_weights=None, classes=5, **small).eval()
    net.requires_divisible_input_shape = False  # both decoders enlarge maps to the size of the finer one
    out = net(torch.randn(1, 3, *SIZE))
    assert out.shape == (1, 5, *SIZE) and out.isfinite().all()


@pytest.mark.slow
@torch.no_grad()
def test_transformers_takes_the_features():
    transformers, name = pytest.importorskip("transformers"), "vitrel_swin_n"
    config = transformers.TimmBackboneConfig(backbone=name, use_pretrained_backbone=False, out_indices=(0, 1, 2))
    backbone = transformers.TimmBackbone(config).eval()
    image = torch.randn(1, 3, *SIZE)
    own = timm.create_model(name, features_only=True, out_indices=(0, 1, 2)).eval()
    own.load_state_dict(backbone._backbone.state_dict())
    maps = backbone(image).feature_maps
    assert len(maps) == 3 and backbone.channels == own.feature_info.channels()
    for a, b in zip(maps, own(image), strict=True):
        torch.testing.assert_close(a, b)
