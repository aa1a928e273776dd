import math
import random
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import auto_augment as peer
from torchvision.transforms import v2

from vitrel.data import aug_albumentations
from vitrel.data.aug_albumentations import AUGMIX, RAND, RAND_INCREASING, TRIVIAL
from vitrel.data.augment import Augmenter
from vitrel.data.augmentation import Augmentation, Policy, parse_policy

HALF = (0.5, 0.5, 0.5)
FILL = (124, 116, 104)
PLAIN = {"scale": (1.0, 1.0), "ratio": (1.0, 1.0), "flip": False, "jitter": 0.0}
# every argument that the operation takes somewhere between magnitude 0 and 10, at its ends and between
LUT_OPERATIONS = {
    "AutoContrast": (0,),
    "Equalize": (0,),
    "Invert": (0,),
    "Posterize": (1, 2, 4, 7, 8),
    "Solarize": (0, 26, 128, 256),
    "SolarizeAdd": (0, 40, 110, 128),
}
FACTOR_OPERATIONS = {name: (0.1, 0.55, 1.0, 1.3, 1.9) for name in ("Color", "Contrast", "Brightness", "Sharpness")}
GEOMETRIC_OPERATIONS = {
    "Rotate": (-27.0, 10.0, 30.0),
    "ShearX": (-0.3, 0.2),
    "ShearY": (-0.3, 0.2),
    "TranslateX": (-0.4, 0.25),
    "TranslateY": (-0.4, 0.25),
}
PEERS = {
    "AutoContrast": lambda image, _, **how: peer.auto_contrast(image),
    "Equalize": lambda image, _, **how: peer.equalize(image),
    "Invert": lambda image, _, **how: peer.invert(image),
    "Posterize": peer.posterize,
    "Solarize": peer.solarize,
    "SolarizeAdd": peer.solarize_add,
    "Color": peer.color,
    "Contrast": peer.contrast,
    "Brightness": peer.brightness,
    "Sharpness": peer.sharpness,
    "Rotate": peer.rotate,
    "ShearX": peer.shear_x,
    "ShearY": peer.shear_y,
    "TranslateX": peer.translate_x_rel,
    "TranslateY": peer.translate_y_rel,
}


def cases(*tables):
    return [(name, argument) for table in tables for name, arguments in table.items() for argument in arguments]


def picture(h=80, w=120):
    """Waves, edges and a narrow range of values, uint8 [h, w, 3]: something for every operation to act on."""
    y, x = np.mgrid[:h, :w]
    waves = [80 * np.sin(x / 9 + c) * np.cos(y / 7 - c) + 90 + 20 * c for c in range(3)]
    image = np.stack(waves, -1)
    image[h // 3 : h // 2, w // 4 : w // 2] = (200, 40, 90)
    return (image + np.random.default_rng(0).normal(0, 3, image.shape)).clip(9, 240).astype(np.uint8)


def operate(name, image, argument, fill=FILL, **how):
    return aug_albumentations.operate(name, image, argument, fill, **how).astype(int)


def by_peer(name, image, argument, resample=Image.Resampling.BILINEAR):
    """timm's operation, which is PIL's."""
    return np.asarray(PEERS[name](Image.fromarray(image), argument, fillcolor=FILL, resample=resample)).astype(int)


@pytest.mark.parametrize(("name", "argument"), cases(LUT_OPERATIONS, FACTOR_OPERATIONS))
def test_color_operations_are_those_of_pil(name, argument):
    """Exactly, but for one gray level here and there where OpenCV rounds a blend otherwise."""
    image = picture()
    apart = np.abs(operate(name, image, argument) - by_peer(name, image, argument))
    assert apart.max() <= (1 if name in FACTOR_OPERATIONS else 0) and (apart > 0).mean() < 0.01
    changed = not np.array_equal(operate(name, image, argument), image)
    idle = (name, argument) in {("Posterize", 8), ("Solarize", 256), ("SolarizeAdd", 0)} or (
        name in FACTOR_OPERATIONS and argument == 1
    )
    assert changed != idle


@pytest.mark.parametrize("name", ["AutoContrast", "Equalize", "Contrast", "Color", "Sharpness"])
def test_flat_and_tiny_images(name):
    for image in (np.full((8, 8, 3), 77, np.uint8), np.full((1, 1, 3), 5, np.uint8), picture()[:3, :2]):
        assert np.array_equal(operate(name, image, 1.5), by_peer(name, image, 1.5))


@pytest.mark.parametrize("flag", ["INTER_LINEAR", "INTER_CUBIC"])
@pytest.mark.parametrize(("name", "argument"), cases(GEOMETRIC_OPERATIONS))
def test_geometric_operations_are_those_of_pil_but_for_the_rim(name, argument, flag):
    """PIL cuts at the image's edge where OpenCV blends into the fill color over one pixel; its cubic is a softer one."""
    import cv2

    cubic = flag == "INTER_CUBIC"
    image = picture()
    apart = np.abs(
        operate(name, image, argument, flag=getattr(cv2, flag))
        - by_peer(name, image, argument, Image.Resampling.BICUBIC if cubic else Image.Resampling.BILINEAR)
    )
    assert apart.mean() < (2 if cubic else 1)
    inside = by_peer(name, np.full_like(image, 255), argument).min(-1) == 255
    inside = cv2.erode(inside.astype(np.uint8), np.ones((5, 5)), borderValue=0).astype(bool)
    outside = cv2.erode((by_peer(name, np.zeros_like(image), argument) == FILL).all(-1).astype(np.uint8), np.ones((5, 5)))
    assert inside.mean() > 0.3 and apart[inside].max() <= (30 if cubic else 3)
    assert apart[outside.astype(bool)].max(initial=0) == 0


@pytest.mark.parametrize("magnitude", [0, 1.7, 5, 9.4, 10])
@pytest.mark.parametrize("sign", [-1, 1])
def test_levels_are_those_of_timm(magnitude, sign, monkeypatch):
    monkeypatch.setattr(peer, "_randomly_negate", lambda value: sign * value)
    tables = {"rand": (RAND, peer._RAND_TRANSFORMS, {})}
    tables["rand-inc1"] = (RAND_INCREASING, peer._RAND_INCREASING_TRANSFORMS, {})
    tables["augmix"] = (AUGMIX, peer._AUGMIX_TRANSFORMS, {"translate_pct": 0.3})
    for ours, names, hparams in tables.values():
        assert {name.removesuffix("Increasing").removesuffix("Rel") for name in names} == set(ours)
        for name in names:
            level = peer.LEVEL_TO_ARG[name]
            expected = level(magnitude, hparams)[0] if level else 0.0
            mine = ours[name.removesuffix("Increasing").removesuffix("Rel")](magnitude / 10, sign)
            assert mine == pytest.approx(expected, abs=1e-12), name


def test_policies_are_parsed():
    assert parse_policy("rand-m9-mstd0.5-inc1") == Policy("rand", 9, 0.5, 10, 2, 0.5, True)
    assert parse_policy("rand-m7-n3-p0.8-mmax15") == Policy("rand", 7, 0.0, 15, 3, 0.8, False)
    assert parse_policy("rand-mstd101").std == math.inf and parse_policy("rand").magnitude == 10
    assert parse_policy("augmix-m5-w4-d2-a0.5") == Policy("augmix", 5, math.inf, width=4, depth=2, alpha=0.5)
    assert parse_policy("augmix-m3-mstd1").std == 1 and parse_policy("augmix").depth == -1
    assert parse_policy("3a").kind == "3a" and parse_policy("trivial").kind == "trivial"


@pytest.mark.parametrize("text", ["rand-m9-mstd0.5-inc1", "rand-m6-n3-p0.7-mstd101", "rand-m12-mmax15"])
def test_the_same_string_means_the_same_to_timm(text):
    policy, theirs = parse_policy(text), peer.rand_augment_transform(text, {})
    operation = theirs.ops[0]
    assert (policy.layers, policy.prob, policy.magnitude) == (theirs.num_layers, operation.prob, operation.magnitude)
    assert (policy.std, policy.maximum) == (operation.magnitude_std, operation.magnitude_max or 10)
    assert policy.increasing == ("ColorIncreasing" in [op.name for op in theirs.ops])


def test_strengths():
    rng = random.Random(0)
    assert parse_policy("rand-m9").draw(rng) == 9
    normal = [parse_policy("rand-m9-mstd0.5").draw(rng) for _ in range(2000)]
    assert max(normal) == 10 and np.median(normal) == pytest.approx(9, abs=0.05)
    assert np.std(normal) == pytest.approx(0.5, abs=0.05)
    uniform = [parse_policy("augmix-m4").draw(rng) for _ in range(2000)]
    assert 0 < min(uniform) < 0.1 and 3.9 < max(uniform) < 4 and np.mean(uniform) == pytest.approx(2, abs=0.1)


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ("randm9", "unknown augment.policy 'randm9'; nearest: rand-m9-mstd0.5-inc1"),
        ("augmx-m3", "nearest: augmix-m3-w3"),
        ("original", "unknown augment.policy 'original'; nearest: "),
        ("rand-m9-std0.5", "rand has no part 'std0.5'; its parts: m, n, p, mstd, mmax, inc"),
        ("rand-m9-tweights", "rand has no part 'tweights'"),
        ("3a-m9", "3a has no part 'm9'; its parts: none"),
        ("rand-m9.5", "m must be a whole number, not 9.5"),
        ("rand-m12", r"out of range: m must be within 0..10 \(mmax\)"),
        ("rand-m9-n0", "out of range"),
        ("rand-m9-p1.5", "out of range"),
        ("augmix-a0", "out of range: a must be positive"),
    ],
)
def test_policies_that_cannot_be(policy, text):
    with pytest.raises(ValueError, match=text):
        Augmentation(policy=policy)


def views(policy, count, image=None, **settings):
    """Gray levels [3, 48, 64] of `count` views on which nothing but the policy acts."""
    image = torch.from_numpy(picture(48, 64)).permute(2, 0, 1) if image is None else image
    augment = Augmenter(Augmentation(policy=policy, **PLAIN | settings), (48, 64), HALF, HALF)
    return [((augment(image, 0, index) * 0.5 + 0.5) * 255).round() for index in range(count)]


def test_layers_and_probability():
    (still,) = views(None, 1)

    def untouched(policy):
        return sum(torch.equal(view, still) for view in views(policy, 200)) / 200

    for layers, prob in ((1, 0.5), (2, 0.5), (1, 1.0)):
        expected = (1 - prob) ** layers
        assert untouched(f"rand-m8-n{layers}-p{prob}-inc1") == pytest.approx(expected, abs=0.1)


@pytest.mark.parametrize("policy", ["rand-m9-n1-p1-inc1", "augmix-m9-w1-d1"])
def test_what_geometry_uncovers_has_the_mean_color(policy):
    mean, image = (0.25, 0.5, 0.75), torch.full((3, 48, 64), 255, dtype=torch.uint8)
    augment = Augmenter(Augmentation(policy=policy, **PLAIN), (48, 64), mean, (1.0, 1.0, 1.0))
    fill = torch.tensor([64, 128, 191]) / 255 - torch.tensor(mean)
    towards_white = torch.tensor([191, 127, 64]) / 255  # AugMix blends it with the image
    filled = 0
    for index in range(60):
        apart = augment(image, 0, index).flatten(1) - fill[:, None]  # [3, pixels]
        share = apart / towards_white[:, None]
        filled += bool(((share.max(0).values - share.min(0).values < 0.02) & (share.mean(0) < 0.9)).any())
    assert filled > 8


def test_every_operation_is_drawn_about_equally():
    """Told apart by their results on one image at a fixed magnitude and sign of either kind."""
    image = picture(48, 64)
    known = {}
    for name, level in RAND_INCREASING.items():
        for sign in (-1, 1):
            result = operate(name, image, level(0.8, sign), (128, 128, 128), flag=2).astype(np.uint8)  # bicubic
            known[result.tobytes()] = (name, sign)
    drawn = Counter()
    for view in views("rand-m8-n1-p1-inc1", 450, torch.from_numpy(image).permute(2, 0, 1)):
        drawn[known.get(view.to(torch.uint8).permute(1, 2, 0).contiguous().numpy().tobytes(), ("none", 0))[0]] += 1
    assert set(drawn) == set(RAND_INCREASING)
    assert min(drawn.values()) >= 10 and max(drawn.values()) <= 60  # 30 each


def test_three_augment():
    (still,) = views(None, 1)
    kinds = Counter()
    for view in views("3a", 90):
        if (view == view[:1]).all():
            kinds["gray"] += 1
        elif torch.equal(view, torch.where(still < 128, still, 255 - still)):
            kinds["solarized"] += 1
        else:
            assert (view - still).abs().mean() < 20
            kinds["blurred"] += 1
    assert min(kinds.values()) > 15 and len(kinds) == 3


def test_augmix_stays_near_the_image():
    """Shares of the image and of its chains add to one: a flat image keeps its gray but for what the operations change."""
    (still,) = views(None, 1)
    apart = [float((view - still).abs().mean()) for view in views("augmix-m3-w3", 60)]
    assert len(set(apart)) > 50 and 1 < np.median(apart) < 30
    flat = torch.full((3, 48, 64), 128, dtype=torch.uint8)
    means = [float(view.mean()) for view in views("augmix-m1-w3", 30, flat)]
    assert np.median(means) == pytest.approx(128, abs=6)


@pytest.mark.parametrize("share", [0, 0.3, 1])
def test_trivial_augment_has_the_operations_and_ranges_of_torchvision(share):
    theirs = v2.TrivialAugmentWide()._AUGMENTATION_SPACE
    assert len({view.numpy().tobytes() for view in views("trivial", 40)}) > 30
    assert set(TRIVIAL) == set(theirs)
    for name, (magnitudes, _) in theirs.items():
        strengths = magnitudes(31, 224, 224)
        if strengths is None or name == "Rotate":
            continue
        expected = float(strengths[round(30 * share)])
        if name.startswith("Translate"):
            expected /= 224  # the share of the side
        elif name in FACTOR_OPERATIONS:
            expected += 1
        elif name == "Solarize":
            expected *= 255
        assert TRIVIAL[name](round(30 * share) / 30, 1) == pytest.approx(expected, abs=1e-5), name


def test_full_magnitude_keeps_no_bits():
    black = sum(not view.any() for view in views("rand-m10-n1-p1-inc1", 150))
    assert 1 <= black <= 30
