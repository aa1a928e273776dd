import pickle
import random
from collections import Counter
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from helpers import each
from vitrel.data.augment import Augmenter
from vitrel.data.augmentation import Augmentation
from vitrel.data.prepare import normalize

HALF = (0.5, 0.5, 0.5)
PLAIN = {"scale": (1.0, 1.0), "ratio": (1.0, 1.0), "flip": False, "jitter": 0.0}
EVERYTHING = {"policy": "rand-m9-mstd0.5-inc1", "jitter": 0.3}


class Normalized(Augmenter):
    """Its views as the training module normalizes them."""

    def __call__(self, *args, **how):
        view = super().__call__(*args, **how)
        assert view.dtype == torch.uint8
        return normalize(view, HALF, HALF)


def augmenter(size=(32, 32), **settings):
    return Normalized(Augmentation(**settings), size, HALF)


def noise(h=48, w=48, seed=0):
    return torch.randint(0, 256, (3, h, w), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def ramp(h=48, w=48):
    """Brighter from left to right."""
    return torch.linspace(0, 255, w).to(torch.uint8).expand(3, h, w)


def levels(out):
    """Back to gray levels."""
    return (out * 0.5 + 0.5) * 255


@each("policy", ["rand-m9-mstd0.5-inc1", "augmix-m3-w3", "3a"])
def test_a_pickled_augmenter_draws_the_same(policy):
    """Loader processes that are spawned get it by pickle."""
    augment = augmenter(policy=policy)
    again = pickle.loads(pickle.dumps(augment))
    assert all(torch.equal(augment(noise(), 0, i), again(noise(), 0, i)) for i in range(4))


def test_a_view_is_independent_of_the_global_state_and_leaves_it_alone():
    def streams():
        return random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), torch.rand(2).tolist()  # noqa: NPY002

    augment = augmenter(**EVERYTHING)
    seen, views = [], []
    for between in (0, 3):
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002
        torch.manual_seed(1)
        streams()  # the odd normal draw leaves a second one behind in the state
        views.append([augment(noise(), 0, index) for index in range(between)])
        seen.append(streams())
    assert seen[0] == seen[1]
    assert all(torch.equal(view, augment(noise(), 0, index)) for index, view in enumerate(views[1]))


def test_transforms_draw_independently():
    """albumentations hands one seed to every transform: both mirrorings would then move together."""
    augment = augmenter(**PLAIN | {"flip": True}, vflip=True)
    counts = Counter()
    image = ramp().clone()
    image[1, :24] //= 2
    for index in range(200):
        out = augment(image, 0, index)
        mirrored = out[0].diff(dim=1).sign().sum(1).median() < 0
        down = out[1, :16].mean() > out[1, 16:].mean()
        counts[bool(mirrored), bool(down)] += 1
    assert len(counts) == 4 and min(counts.values()) > 25


def test_labels_of_direction_survive_without_flip():
    augment = augmenter(flip=False)
    assert all(augment(ramp(), 0, index)[0].diff(dim=1).mean() > 0 for index in range(50))


@each("interpolation", ["bicubic", "bilinear"])
def test_shrinking_is_antialiased(interpolation):
    """16 pixels make one: black and white noise turns gray, where sampling 2 by 2 of them would keep half its deviation."""
    image = (noise(128, 128) > 127).to(torch.uint8) * 255
    for crop in ("random_resized", "simple", "center"):
        out = augmenter(**PLAIN | {"crop": crop, "interpolation": interpolation})(image, 0, 0)
        assert 0.15 < out.std() < 0.36, crop


@each("size", [None, (40, 20), (20, 60)])
def test_crops_keep_the_shape_of_the_target(size):
    """Red grows with x and green with y: what a crop spans of both is its width and height."""
    image = torch.stack([ramp(192, 256)[0], ramp(256, 192)[0].T, ramp(192, 256)[0]])
    augment = augmenter(size=(32, 64), **PLAIN | {"scale": (0.1, 0.3)})
    h, w = size or (32, 64)
    for index in range(10):
        out = levels(augment(image, 0, index, size=size))
        assert out.shape == (3, h, w)
        wide = (out[0, :, -1] - out[0, :, 0]).mean() * w / (w - 1)
        tall = (out[1, -1] - out[1, 0]).mean() * h / (h - 1)
        assert float(wide * 256 / (tall * 192)) == pytest.approx(w / h, rel=0.12)
        assert 0.08 < wide * tall / 255**2 < 0.32  # the share of the area


def test_ratio_is_relative_to_the_target():
    image = torch.stack([ramp(256, 256)[0], ramp(256, 256)[0].T, ramp(256, 256)[0]])
    settings = PLAIN | {"scale": (0.1, 0.1), "ratio": (2.0, 2.0)}
    out = levels(augmenter(size=(64, 32), **settings)(image, 0, 0))  # 2 times 32 / 64: square in the image
    assert float((out[0, :, -1] - out[0, :, 0]).mean() / (out[1, -1] - out[1, 0]).mean()) == pytest.approx(1, rel=0.1)


def test_a_size_for_one_image_does_not_change_the_next():
    augment, other = (augmenter() for _ in range(2))
    assert augment(noise(), 0, 0, size=(16, 48)).shape == (3, 16, 48)
    assert torch.equal(augment(noise(), 0, 1), other(noise(), 0, 1))
    assert torch.equal(augment(noise(), 0, 1, size=(32, 32)), other(noise(), 0, 1))


def test_another_seed_epoch_image_or_repeat_is_another_view():
    given = [(3, 0, 0, 0), (4, 0, 0, 0), (3, 1, 0, 0), (3, 0, 1, 0), (3, 0, 0, 1)]
    views = [Augmenter(Augmentation(), (32, 32), HALF, seed)(noise(), *numbers) for seed, *numbers in given]
    assert len({view.numpy().tobytes() for view in views}) == len(given)


def test_a_lack_of_memory_is_told_as_such():
    augment = augmenter()
    augment.pipelines[32, 32] = Mock(side_effect=RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"))
    with pytest.raises(MemoryError, match="memory ran out in the augmentation: "):
        augment(noise(), 0, 0)


def test_simple_crops_lie_within_the_padded_image():
    """The image covers 32×48 as it is, so every crop is a window of it after reflecting 4 pixels."""
    image = noise(40, 48)
    padded = torch.nn.functional.pad(image[None].float(), (4, 4, 4, 4), mode="reflect")[0]
    windows = padded.unfold(1, 32, 1).unfold(2, 48, 1)  # [3, 17, 9, 32, 48]
    augment = augmenter((32, 48), **PLAIN | {"crop": "simple"})
    places = set()
    for index in range(40):
        out = levels(augment(image, 0, index)).round()
        found = (windows == out[:, None, None]).flatten(3).all(3).all(0).nonzero()
        assert len(found) == 1
        places.add(tuple(found[0].tolist()))
    assert len(places) > 25 and len({y for y, _ in places}) > 8 and len({x for _, x in places}) > 5


def test_jitter_of_each_kind():
    gray = torch.full((3, 32, 32), 100, dtype=torch.uint8)
    brightness = augmenter(**PLAIN | {"jitter": (0.5, 0.0, 0.0)})
    seen = [float(levels(brightness(gray, 0, index)).mean()) for index in range(50)]
    assert 49 <= min(seen) < 60 and 140 < max(seen) <= 151
    others = levels(augmenter(**PLAIN | {"jitter": (0.0, 0.5, 0.5)})(gray, 0, 0))
    assert (others - 100).abs().max() < 1.01  # contrast and saturation leave a gray area as it is
    red = torch.tensor([200, 50, 50], dtype=torch.uint8)[:, None, None].expand(3, 32, 32)
    hues = [levels(augmenter(**PLAIN | {"jitter": (0, 0, 0, 0.5)})(red, 0, i))[:, 0, 0] for i in range(20)]
    assert {int(hue.argmax()) for hue in hues} == {0, 1, 2}


def test_jitter_gives_way_to_a_policy_as_in_timm():
    assert Augmentation().jitter_ranges == (0.3, 0.3, 0.3, 0.075)
    assert Augmentation(policy="3a").jitter_ranges == (0.3, 0.3, 0.3, 0.075)
    assert Augmentation(policy="rand-m9-inc1").jitter_ranges == (0, 0, 0, 0)
    assert Augmentation(policy="rand-m9-inc1", jitter=0.4).jitter_ranges == (0.4, 0.4, 0.4, 0.1)
    assert Augmentation(jitter=(0.1, 0.2, 0.3)).jitter_ranges == (0.1, 0.2, 0.3, 0)


@each("interpolation", ["bicubic", "bilinear", "random"])
def test_interpolation(interpolation):
    """Enlarging a step overshoots with bicubic weights only."""
    step = torch.zeros(3, 8, 8, dtype=torch.uint8)
    step[..., :4], step[..., 4:] = 50, 200
    kinds = set()
    for crop in ("random_resized", "simple"):
        augment = augmenter((64, 64), **PLAIN | {"interpolation": interpolation, "crop": crop})
        kinds |= {bool(levels(augment(step, 0, index)).max() > 201) for index in range(12)}
    assert kinds == {"bicubic": {True}, "bilinear": {False}, "random": {True, False}}[interpolation]


@each(
    ("settings", "text"),
    [
        ({"scale": (0.8, 0.5)}, r"augment.scale must be \[minimum, maximum\], both above 0 and at most 1, not \[0.8, 0.5\]"),
        ({"scale": (0.5, 1.5)}, "augment.scale"),
        ({"scale": (0.0, 1.0)}, "augment.scale"),
        ({"scale": (0.1, 0.2, 0.3)}, "augment.scale"),
        ({"ratio": (2.0, 1.0)}, r"augment.ratio .*both above 0, not \[2.0, 1.0\]"),
        ({"ratio": (1.0, float("nan"))}, "augment.ratio"),
        ({"factor": (0.0, 2.0)}, "augment.factor"),
        ({"factor": (0.5, float("inf"))}, "augment.factor"),
        ({"erase": 25}, "augment.erase must be a probability"),
        ({"jitter": (0.1, 0.1, 0.1, 0.6)}, "augment.jitter must be from 0 to 1, its hue from 0 to 0.5"),
        ({"jitter": 1.5}, "augment.jitter must be from 0 to 1"),
        ({"jitter": -0.1}, "augment.jitter must be from 0 to 1"),
        ({"jitter": (0.1, 0.1)}, r"a number or \[brightness, contrast, saturation"),
        ({"crop": "middle"}, "unknown augment.crop 'middle'; use one of random_resized, random_scale, simple, center"),
        ({"interpolation": "nearest"}, "unknown augment.interpolation 'nearest'"),
        ({"erase_mode": "noise"}, "unknown augment.erase_mode 'noise'"),
    ],
)
def test_settings_are_checked_where_they_are_made(settings, text):
    with pytest.raises(ValueError, match=text):
        Augmentation(**settings)
