import random
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import auto_augment
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from vitrel.common.resources import without_traceback
from vitrel.data import create_dataset
from vitrel.data.augment import POLICIES, Augmenter, _warping, operations_of, policy_transform
from vitrel.data.augmentation import Augmentation, AugmentationError
from vitrel.data.prepare import as_array

HALF = (0.5, 0.5, 0.5)
PLAIN = {"scale": (1.0, 1.0), "ratio": (1.0, 1.0), "flip": False, "jitter": 0.0}


def picture(h=48, w=64):
    """Waves, edges and a narrow range of values, uint8 [3, h, w]: something for every operation to act on."""
    y, x = np.mgrid[:h, :w]
    waves = [80 * np.sin(x / 9 + c) * np.cos(y / 7 - c) + 90 + 20 * c for c in range(3)]
    image = np.stack(waves)
    image[:, h // 3 : h // 2, w // 4 : w // 2] = np.array((200, 40, 90))[:, None, None]
    return torch.from_numpy((image + np.random.default_rng(0).normal(0, 3, image.shape)).clip(9, 240).astype(np.uint8))


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


def test_policies_that_cannot_be():
    for policy, text in (
        ("randm9", "unknown .*'randm9': it begins with one of rand, augmix, "),
        ("rand-m9-std0.5", "-std0.5'"),
    ):
        with pytest.raises(ValueError, match=text):
            Augmenter(Augmentation(policy=policy), (48, 64), HALF)


VARIANTS = {  # of every kind of policy, so that together they have all operations
    "rand": ("rand-inc0", "rand-inc1", "rand-tweights", "rand-t3a", "rand-t3aw", "rand-m99-mmax99", "rand-m99-mmax99-inc1"),
    "augmix": ("augmix", "augmix-b1-a0.5", "augmix-w9-d9-a100-m10-mstd9"),
    **{name: (name,) for name in ("original", "originalr", "v0", "v0r", "3a")},
}


def test_every_operation_takes_every_magnitude():
    """With which the oldest and the newest Pillow give the same image."""
    assert VARIANTS.keys() == POLICIES.keys() - {"trivial"}
    policies = [policy_transform(text) for variants in VARIANTS.values() for text in variants]
    operations = {(op.name, op.magnitude_max or 10): op for policy in policies for op in operations_of(policy)}
    without = {"TranslateX", "TranslateY"}  # by a fixed number of pixels; no policy has them
    assert {name for name, _ in operations} == auto_augment.NAME_TO_OP.keys() - without
    image = Image.fromarray(as_array(picture()))
    for (name, most), operation in operations.items():
        operation.prob, operation.magnitude_std = 1.0, 0
        for magnitude in np.linspace(0, most, 24).tolist():
            operation.magnitude = magnitude
            view = operation(image)
            assert view.size == image.size and view.mode == "RGB"
            if name.startswith("Posterize"):
                bits = min(max(operation.level_fn(magnitude, operation.hparams)[0], 0), 8)
                kept = np.asarray(image) & np.uint8((0xFF00 >> bits) & 0xFF)
                assert (np.asarray(view) == kept).all(), f"{name} at {magnitude}: {bits} bits"


@pytest.mark.parametrize("interpolation", ["bicubic", "bilinear"])
def test_geometry_is_pillows_to_a_level(interpolation):
    """OpenCV computes it: shifted by half a pixel, this image would differ by more than three levels."""
    image = Image.fromarray(as_array(picture(96, 128)))
    pillows, ours = (operations_of(policy_transform("rand-m9-inc1", interpolation)) for _ in range(2))
    _warping(SimpleNamespace(ops=ours))
    warped = [(one, other) for one, other in zip(pillows, ours, strict=True) if one.aug_fn is not other.aug_fn]
    assert {one.name for one, _ in warped} == {"Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel"}
    for pair in warped:
        views = []
        for operation in pair:
            operation.prob = 1.0
            random.seed(3)
            views.append(np.asarray(operation(image)).astype(int))
        assert np.abs(views[0] - views[1]).mean() < 1.5, pair[0].name


def fails(image, *args, **how):
    raise TypeError("no such image")


FAULTS = {  # library: what fails, the settings with which it does, the operation's name
    "timm": ("timm.data.auto_augment.ImageOps.solarize", {"policy": "3a"}, "Solarize of magnitude 5"),
    "torchvision": ("torchvision.transforms.v2.functional.solarize", {"policy": "trivial"}, r"Solarize of magnitude [\d.]+"),
    "albumentations": ("albumentations.ColorJitter.apply", {"jitter": 0.3}, "ColorJitter"),
}


@pytest.mark.parametrize("place", FAULTS)
def test_an_error_names_image_operation_and_seed(place, tmp_path, monkeypatch):
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        Image.fromarray(as_array(picture())).save(tmp_path / split / "a" / "0.png")
    name, settings, operation = FAULTS[place]
    monkeypatch.setattr(name, fails)
    data = create_dataset(str(tmp_path), "train", (48, 64), mean=HALF, std=None, augment=Augmentation(**settings), seed=7)

    with pytest.raises(AugmentationError) as caught:  # noqa: PT012  a policy's operation is one of several
        for epoch in range(200):
            data.set_epoch(epoch)
            list(DataLoader(data, num_workers=int(place == "albumentations")))
    seed = f"seed 7, epoch {data.epoch}, image number 0, view 0"
    text = rf"train/a/0.png \(48x64 pixels\): {operation} failed with the random numbers of {seed}: no such image$"
    assert re.search(text, without_traceback(str(caught.value)))


def test_what_geometry_uncovers_has_the_mean_color():
    mean, image = (0.25, 0.5, 0.75), torch.full((3, 48, 64), 255, dtype=torch.uint8)
    augment = Augmenter(Augmentation(policy="rand-m9-n1-p1-inc1", **PLAIN), (48, 64), mean)
    fill = torch.tensor([64, 128, 191])[:, None, None]
    filled = sum(bool((augment(image, 0, index) == fill).all(0).any()) for index in range(60))
    assert filled > 8


def test_trivial_augment_is_torchvisions():
    policy = policy_transform("trivial", "random", (1, 2, 3))
    assert {type(choice) for choice in policy.transforms} == {v2.TrivialAugmentWide} and len(policy.transforms) == 2
