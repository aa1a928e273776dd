"""What native shape needs of data sets: sizes from headers, images resized whole, crops that are not squashed."""

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.tars import write_tars
from vitrel.common.sizes import native_size
from vitrel.data import BadImage, Reading, create_dataset
from vitrel.data.augment import Augmenter
from vitrel.data.augmentation import Augmentation
from vitrel.data.prepare import normalize

CFG = {"mean": (0.5,) * 3, "std": (0.5,) * 3}


def save(path, h, w, rotated=False):
    path.parent.mkdir(parents=True, exist_ok=True)
    exif = Image.Exif()
    if rotated:
        exif[0x0112] = 6  # a quarter turn, which is ignored
    Image.fromarray(np.full((h, w, 3), 90, np.uint8)).save(path, exif=exif)


@pytest.fixture
def folder(tmp_path):
    for split in ("train", "val"):
        save(tmp_path / split / "a" / "0.png", 20, 30)
        save(tmp_path / split / "a" / "1.jpg", 40, 25, rotated=True)
        save(tmp_path / split / "b" / "2.png", 16, 16)
    return tmp_path


def test_sizes_are_those_of_the_decoded_images(folder):
    write_tars(folder, folder / "tars")
    for data in (folder, folder / "tars"):
        images = create_dataset(str(data), "train", (32, 32), **CFG)
        assert sorted(images.image_sizes()) == [(16, 16), (20, 30), (40, 25)]
        assert images.image_sizes() == [images.read(i)[0].size[::-1] for i in range(3)]


def test_an_unreadable_header_stops_or_counts_as_square(folder):
    (folder / "train" / "a" / "1.jpg").write_bytes(b"no image")
    (folder / "train" / "b" / "2.png").write_bytes(b"")
    with pytest.raises(BadImage, match=r"cannot decode .*1\.jpg: not a JPEG"):
        create_dataset(str(folder), "train", (32, 32), **CFG).image_sizes()
    save(folder / "train" / "b" / "2.png", 16, 16)
    left_out = create_dataset(str(folder), "train", (32, 32), **CFG, reading=Reading(on_bad="leave_out"))
    assert left_out.image_sizes() == [(20, 30), (1, 1), (16, 16)]


def axes(h, w):
    """A picture whose first channel rises by two a row and whose second by two a column."""
    y, x = torch.arange(h)[:, None].expand(h, w), torch.arange(w)[None].expand(h, w)
    return torch.stack([2 * y, 2 * x, 0 * x]).to(torch.uint8)


def slopes(image):
    """How fast the two channels rise along their axes, by pixel of the view."""
    levels = image * 127.5
    return float(levels[0].diff(dim=0).mean()), float(levels[1].diff(dim=1).mean())


def test_a_crop_is_squashed_by_what_is_drawn_alone():
    """Without jitter of the aspect ratio a pixel of any native view is as high as it is wide in the image."""
    for h, w in ((64, 96), (100, 60), (120, 61)):
        size = native_size(h, w, 64, (8, 8))
        augment = Augmenter(
            Augmentation(ratio=(1.0, 1.0), scale=(0.3, 0.6), flip=False, jitter=0.0, interpolation="bilinear"),
            size,
            CFG["mean"],
        )
        for index in range(3):
            view = normalize(augment(axes(h, w), 0, index), **CFG)
            assert view.shape == (3, *size)
            down, across = slopes(view)
            assert down == pytest.approx(across, rel=0.06)  # crops are whole pixels
