import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from vitrel.data import Augmentation, Augmenter, Folder, create_dataset
from vitrel.train.datamodule import EpochSampler

HALF = (0.5, 0.5, 0.5)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("a", "b"):
            (root / split / name).mkdir(parents=True)
            for i in range(8):
                Image.fromarray(rng.integers(0, 256, (48, 40, 3), dtype=np.uint8)).save(root / split / name / f"{i}.png")
    return root


def augmenter(size=(32, 32), seed=0, **settings):
    return Augmenter(Augmentation(**settings), size, HALF, HALF, seed)


def test_sixteen_of_sixteen_draws_are_distinct():
    image = torch.randint(0, 256, (3, 48, 48), dtype=torch.uint8)
    augment = augmenter(size=(24, 40))
    draws = {augment(image, 0, index).numpy().tobytes() for index in range(16)}
    draws |= {augment(image, epoch, 0).numpy().tobytes() for epoch in range(1, 16)}
    assert len(draws) == 31
    assert augment(image, 0, 0).shape == (3, 24, 40) and augment(image, 0, 0).dtype == torch.float32
    assert torch.equal(augment(image, 3, 5), augmenter(size=(24, 40))(image, 3, 5))
    assert not torch.equal(augment(image, 3, 5), augmenter(size=(24, 40), seed=1)(image, 3, 5))


@pytest.mark.parametrize("persistent", [False, True])
def test_batches_are_the_same_for_any_number_of_workers(root, persistent):
    def epochs(workers):
        data = create_dataset(str(root), "train", (32, 32), mean=HALF, std=HALF, augment=Augmentation(erase=0.5), seed=3)
        sampler = EpochSampler(data, seed=3)
        loader = DataLoader(data, 4, sampler=sampler, num_workers=workers, persistent_workers=persistent and workers > 0)
        seen = []
        for epoch in range(3):
            sampler.set_epoch(epoch)
            seen.append(torch.cat([images for images, _ in loader]))
        return torch.stack(seen)

    alone = epochs(0)
    assert len({image.numpy().tobytes() for image in alone.flatten(0, 1)}) == 48  # 16 images, 3 epochs, no repeat
    for workers in (1, 2):
        assert torch.equal(epochs(workers), alone)


def test_transforms_draw_independently():
    """albumentations hands one seed to every transform: mirroring, erasing and crop would then move together."""
    ramp = torch.arange(48, dtype=torch.uint8).mul(5).expand(3, 48, 48)
    augment = augmenter(scale=(1.0, 1.0), ratio=(1.0, 1.0), jitter=0.0, erase=0.5)
    counts = {(mirrored, erased): 0 for mirrored in (False, True) for erased in (False, True)}
    for index in range(200):
        out = augment(ramp, 0, index)[0]
        rows = out.diff(dim=1).sign().sum(1)
        erased = bool((out.std(0) > 1e-3).any())
        counts[bool(rows.median() < 0), erased] += 1
    assert min(counts.values()) > 25


def test_labels_of_direction_survive_without_flip():
    ramp = torch.arange(48, dtype=torch.uint8).mul(5).expand(3, 48, 48)
    augment = augmenter(flip=False)
    assert all(augment(ramp, 0, index)[0].diff(dim=1).mean() > 0 for index in range(50))


def test_shrinking_is_antialiased():
    board = (torch.arange(128)[:, None] + torch.arange(128)) % 2 * 255
    out = augmenter(scale=(1.0, 1.0), ratio=(1.0, 1.0), jitter=0.0)(board.to(torch.uint8).expand(3, 128, 128), 0, 0)
    assert out.abs().max() < 0.02  # mid grey; point samples would be black and white


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"scale": (0.0, 1.0)}, "augment.scale is a range of area shares"),
        ({"scale": (0.8, 0.5)}, "augment.scale is a range of area shares"),
        ({"ratio": (2.0, 1.0)}, "augment.ratio is a range"),
        ({"erase": 1.5}, "augment.erase"),
        ({"jitter": -0.1}, "augment.jitter"),
    ],
)
def test_settings_are_checked(settings, text):
    with pytest.raises(ValueError, match=text):
        Augmentation(**settings)


def test_albumentations_is_imported_only_to_augment(root):
    code = (
        "import sys, vitrel.data as d\n"
        f"d.create_dataset({str(root)!r}, 'val', (32, 32), mean=(0.5,) * 3, std=(0.5,) * 3)[0]\n"
        "print(sorted({'albumentations', 'cv2', 'lightning'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


def test_folder_without_augmentation_ignores_the_epoch(root):
    data = Folder(root, "train", lambda image: image)
    before = data[0][0]
    data.set_epoch(5)
    assert torch.equal(before, data[0][0])
