from collections import Counter

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from vitrel.data.augment import Augmenter
from vitrel.data.augmentation import Augmentation, policy_transform

HALF = (0.5, 0.5, 0.5)
PLAIN = {"scale": (1.0, 1.0), "ratio": (1.0, 1.0), "flip": False, "jitter": 0.0}


def picture(h=48, w=64):
    """Waves, edges and a narrow range of values, uint8 [3, h, w]: something for every operation to act on."""
    y, x = np.mgrid[:h, :w]
    waves = [80 * np.sin(x / 9 + c) * np.cos(y / 7 - c) + 90 + 20 * c for c in range(3)]
    image = np.stack(waves)
    image[:, h // 3 : h // 2, w // 4 : w // 2] = np.array((200, 40, 90))[:, None, None]
    return torch.from_numpy((image + np.random.default_rng(0).normal(0, 3, image.shape)).clip(9, 240).astype(np.uint8))


def views(policy, count, image=None, **settings):
    """Gray levels [3, 48, 64] of `count` views on which nothing but the policy acts."""
    augment = Augmenter(Augmentation(policy=policy, **PLAIN | settings), (48, 64), HALF, HALF)
    image = picture() if image is None else image
    return [((augment(image, 0, index) * 0.5 + 0.5) * 255).round() for index in range(count)]


def test_a_string_means_what_it_means_to_timm():
    policy = policy_transform("rand-m6-n3-p0.7-mstd101-mmax15-inc1", "bilinear", (1, 2, 3))
    operation = policy.ops[0]
    assert (policy.num_layers, operation.prob, operation.magnitude) == (3, 0.7, 6)
    assert (operation.magnitude_std, operation.magnitude_max) == (float("inf"), 15)
    assert "ColorIncreasing" in [op.name for op in policy.ops]
    assert operation.kwargs["fillcolor"] == (1, 2, 3) and operation.kwargs["resample"].name == "BILINEAR"
    mixed = policy_transform("augmix-m5-w4-d2-a0.5")
    assert (mixed.width, mixed.depth, mixed.alpha, mixed.ops[0].magnitude) == (4, 2, 0.5, 5)
    assert {op.hparams["translate_pct"] for op in mixed.ops} == {0.3}  # as timm's loaders set it


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        ("randm9", "unknown augment.policy 'randm9'; nearest: rand-m9-mstd0.5-inc1"),
        ("augmx-m3", "nearest: augmix-m3-w3"),
        ("cubist", "unknown augment.policy 'cubist'; nearest: "),
        ("rand-m9-std0.5", "'std0.5' is no part of rand, or out of range; .* as in 'rand-m9-mstd0.5-inc1'"),
        ("rand-weights", "'weights' is no part of rand"),
        ("trivial-m9", "'m9' is no part of trivial"),
        ("rand-m9.5", "'m9.5' is no part of rand"),
        ("rand-m12", r"out of range: m must be within 0..10 \(mmax\)"),
        ("rand-m9-n0", "'n0' is no part of rand, or out of range"),
        ("rand-m9-p1.5", "out of range"),
        ("augmix-a0", "'a0' is no part of augmix, or out of range"),
    ],
)
def test_policies_that_cannot_be(policy, text):
    with pytest.raises(ValueError, match=text):
        Augmentation(policy=policy)


@pytest.mark.parametrize(
    "policy", ["rand-m9-mstd0.5-inc1", "rand-m9-tweights", "augmix-m3-w3", "original", "v0r", "3a", "trivial"]
)
def test_every_view_differs(policy):
    drawn = views(policy, 24, interpolation="random")
    assert len({view.numpy().tobytes() for view in drawn}) > (2 if policy == "3a" else 8)


def test_layers_and_probability():
    (still,) = views(None, 1)
    for layers, prob in ((1, 0.5), (2, 0.5), (1, 1.0)):
        untouched = sum(torch.equal(view, still) for view in views(f"rand-m8-n{layers}-p{prob}-inc1", 100))
        assert untouched == pytest.approx(100 * (1 - prob) ** layers, abs=14)


def test_what_geometry_uncovers_has_the_mean_color():
    mean, image = (0.25, 0.5, 0.75), torch.full((3, 48, 64), 255, dtype=torch.uint8)
    augment = Augmenter(Augmentation(policy="rand-m9-n1-p1-inc1", **PLAIN), (48, 64), mean, (1.0, 1.0, 1.0))
    fill = torch.tensor([64, 128, 191]) / 255 - torch.tensor(mean)
    filled = sum(bool(((augment(image, 0, index) - fill[:, None, None]).abs() < 1e-3).all(0).any()) for index in range(60))
    assert filled > 8


def test_three_augment():
    (still,) = views(None, 1)
    kinds = Counter()
    for view in views("3a", 60):
        if (view == view[:1]).all():
            kinds["gray"] += 1
        elif torch.equal(view, torch.where(still < 128, still, 255 - still)):
            kinds["solarized"] += 1
        else:
            assert (view - still).abs().mean() < 20
            kinds["blurred"] += 1
    assert min(kinds.values()) > 8 and len(kinds) == 3


def test_trivial_augment_is_torchvisions():
    policy = policy_transform("trivial", "random", (1, 2, 3))
    assert {type(choice) for choice in policy.transforms} == {v2.TrivialAugmentWide} and len(policy.transforms) == 2
