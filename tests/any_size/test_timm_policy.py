"""policy="timm": timm's numbers at other sizes, bit for bit, and where vitrel's own differ from them."""

import copy

import pytest
import timm
import torch

import vitrel
from helpers import each
from tools.docs.any_size import VARIANTS, apart

TINY = dict(depth=2, embed_dim=64, num_heads=2)
SWIN = dict(depths=(2, 1), num_heads=(2, 2), embed_dim=32, img_size=224)
CASES = {  # {name: (arguments, size, largest difference of vitrel's own numbers, 0 where they differ for a named reason)}
    "vit_tiny_patch16_224": (TINY | dict(img_size=64), (48, 96), 3e-6),
    "eva02_tiny_patch14_224": (TINY | dict(img_size=56), (42, 84), 3e-6),
    # timm's MLP is evaluated, vitrel's table resampled
    "vit_relpos_small_patch16_224": (TINY | dict(img_size=64), (80, 96), 0),
    "beit_base_patch16_224": (TINY | dict(img_size=64), (96, 80), 3e-6),
    "beitv2_base_patch16_224": (TINY | dict(img_size=64), (48, 96), 0),  # an axis that shrinks: read exactly, timm interpolates
    "swin_tiny_patch4_window7_224": (SWIN, (112, 168), 3e-6),  # whole windows
    "swin_small_patch4_window7_224": (SWIN, (96, 160), 0),  # padding is seen, and shifted windows join opposite borders
    # windows grow with the image, vitrel's keep their size
    "maxvit_tiny_pm_256": (VARIANTS["maxvit_tiny_pm_256"], (96, 128), 0),
    "xcit_nano_12_p16_224": (VARIANTS["xcit_nano_12_p16_224"], (64, 96), 3e-6),
}


def built(name, options, **more):
    torch.manual_seed(0)
    model = timm.create_model(name, num_classes=7, **options, **more).eval()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if any(word in key for word in ("pos", "bias", "mlp.fc", "gamma", "head")):
                value.normal_(0, 4 if "relative" in key else 0.5)
    return model


@pytest.mark.slow
@torch.no_grad()
@each("name", CASES)
def test_timms_numbers_bit_for_bit(name):
    options, size, largest = CASES[name]
    theirs, image = built(name, options), torch.randn(2, 3, *size)
    ours, default = vitrel.from_timm(theirs, policy="timm"), vitrel.from_timm(theirs)
    own = torch.randn(1, 3, *2 * (options.get("img_size", 64),))
    expected = theirs(own)
    if "swin" in name:
        there = built(name, options, dynamic_img_size=True)(image)
    else:
        there = copy.deepcopy(theirs)
        if hasattr(theirs, "set_input_size"):
            there.set_input_size(size)
        there = there(image)
    for _ in range(2):
        assert torch.equal(ours(image), there) and torch.equal(ours(own), expected)
    assert {key: value.shape for key, value in ours.state_dict().items()} == {
        key: value.shape for key, value in theirs.state_dict().items() if "attn_mask" not in key
    }
    difference = apart(default(image), there)
    assert difference < largest if largest else difference > 1e-5, difference


@torch.no_grad()
def test_dynamic_img_size_gives_the_same():
    options, size, _ = CASES["vit_tiny_patch16_224"]
    ours, image = vitrel.from_timm(built("vit_tiny_patch16_224", options), policy="timm"), torch.randn(2, 3, *size)
    assert torch.equal(ours(image), built("vit_tiny_patch16_224", options, dynamic_img_size=True)(image))


def test_refusals():
    model = vitrel.from_timm(built("vit_tiny_patch16_224", TINY | dict(img_size=64)), policy="timm").train()
    with pytest.raises(ValueError, match='policy="timm" trains at the size of the model only'):
        model(torch.randn(1, 3, 48, 96))
    model(torch.randn(1, 3, 64, 64)).sum().backward()
    with pytest.raises(ValueError, match=r"policy is 'timm'.* not 'clip'"):
        vitrel.from_timm("vit_tiny_patch16_224", policy="clip")
