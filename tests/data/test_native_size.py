"""What native shape needs of data sets: the sizes of images from their headers."""

import numpy as np
import pytest
from PIL import Image

from helpers.tars import write_tars
from vitrel.data import BadImage, Reading, create_dataset

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
