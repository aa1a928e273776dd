"""torchvision's sets by name, on small files in their formats."""

import json
import socket
import struct

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from vitrel.data import BadImage, Draw, Prepare, Reading, TorchvisionSet, class_names, create_dataset
from vitrel.data.sets import SETS

RAW = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
DIGITS = np.random.default_rng(0).integers(0, 256, (6, 28, 28), dtype=np.uint8)


@pytest.fixture
def mnist(tmp_path):
    """Six training and three test images in the format of MNIST."""
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part, count in (("train", 6), ("t10k", 3)):
        (raw / f"{part}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 0x803, count, 28, 28) + DIGITS[:count].tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 0x801, count) + bytes([7, 2, 1, 0, 4, 1][:count]))
    return tmp_path


@pytest.fixture
def food(tmp_path):
    """Two classes of Food101, with two training images and one test image each."""
    for split, numbers in (("train", (0, 1)), ("test", (2,))):
        listed = {name: [f"{name}/{i}" for i in numbers] for name in ("waffles", "apple_pie")}
        (tmp_path / "food-101" / "meta").mkdir(parents=True, exist_ok=True)
        (tmp_path / "food-101" / "meta" / f"{split}.json").write_text(json.dumps(listed))
        for paths in listed.values():
            for path in paths:
                file = tmp_path / "food-101" / "images" / f"{path}.jpg"
                file.parent.mkdir(parents=True, exist_ok=True)
                Image.new("RGB", (20, 10), (60, 90, 120)).save(file)
    return tmp_path


def test_an_array_set(mnist):
    train, val = (create_dataset(f"mnist:{mnist}", split, (28, 28), **RAW) for split in ("train", "val"))
    assert (len(train), len(val)) == (6, 3) and train.classes == class_names(f"mnist:{mnist}") and len(train.classes) == 10
    image, label = train[4]
    assert label == 4 and image.shape == (3, 28, 28) and torch.equal(image[0], image[2])  # grey in three channels
    assert torch.equal((image[0] * 255).round().byte(), torch.from_numpy(DIGITS[4]))
    assert train.class_counts() == [1, 2, 1, 0, 1, 0, 0, 1, 0, 0]
    assert train[Draw(4, (16, 20))][0].shape == (3, 16, 20)
    assert train.name(4) == f"mnist train in {mnist}: 4"
    changed = train.versions()
    train.source.data[2, 0, 0] ^= 1
    assert [i for i, version in enumerate(train.versions()) if version != changed[i]] == [2]
    assert train.contents() == ["0\t7", "1\t2", "2\t1", "3\t0", "4\t4", "5\t1"]


def test_a_set_of_files(food):
    train = create_dataset(f"food101:{food}", "train", (8, 16), **RAW)
    assert train.classes == ["apple_pie", "waffles"] and len(train) == 4 and train.class_counts() == [2, 2]
    assert train.name(0).endswith("food-101/images/waffles/0.jpg") and train[0][1] == train.label(0) == 1
    assert train.contents()[0] == "food-101/images/waffles/0.jpg\t1" and len(train.contents()) == 4
    assert train[0][0].shape == (3, 8, 16)
    assert len(create_dataset(f"food101:{food}", "val", (8, 16), **RAW)) == 2
    part = create_dataset(f"food101:{food}", "train", (8, 16), **RAW, n=2, seed=5)
    assert [part.name(i) for i in range(2)] == [train.name(i) for i in part.chosen]


def jpeg(path, colour):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (20, 10), colour).save(path, quality=95)


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def dtd(root):
    for split, names in (
        ("train1", "banded/0.jpg\nzigzagged/1.jpg\nzigzagged/2.jpg"),
        ("test1", "banded/3.jpg\nzigzagged/4.jpg"),
    ):
        write(root / "dtd" / "dtd" / "labels" / f"{split}.txt", names + "\n")
        for name in names.split():
            jpeg(root / "dtd" / "dtd" / "images" / name, (200, 0, 0))


def fgvc_aircraft(root):
    data = root / "fgvc-aircraft-2013b" / "data"
    write(data / "variants.txt", "707-320\nYak-42\n")
    for split, lines in (("trainval", "01 707-320\n02 Yak-42\n03 Yak-42\n"), ("test", "04 707-320\n05 Yak-42\n")):
        write(data / f"images_variant_{split}.txt", lines)
        for line in lines.splitlines():
            jpeg(data / "images" / f"{line[:2]}.jpg", (200, 0, 0))


def flowers102(root):
    base = root / "flowers-102"
    for i in range(1, 6):
        jpeg(base / "jpg" / f"image_{i:05d}.jpg", (200, 0, 0))
    savemat(base / "imagelabels.mat", {"labels": np.array([1, 2, 2, 1, 2])})
    savemat(base / "setid.mat", {"trnid": np.array([1, 2, 3]), "valid": np.array([1, 2]), "tstid": np.array([4, 5])})


def stl10(root):
    base = root / "stl10_binary"
    write(base / "class_names.txt", "airplane\nbird\n")
    for split, labels in (("train", (1, 2, 2)), ("test", (1, 2))):
        columns = np.zeros((len(labels), 3, 96, 96), np.uint8)
        columns[:, 0] = 200
        (base / f"{split}_X.bin").write_bytes(columns.tobytes())
        (base / f"{split}_y.bin").write_bytes(bytes(labels))


@pytest.mark.parametrize("make", [dtd, fgvc_aircraft, flowers102, stl10])
def test_the_other_sets_in_their_formats(make, tmp_path, monkeypatch):
    for place in ("flowers102", "stl10"):  # which compare checksums with those of the whole set
        monkeypatch.setattr(f"torchvision.datasets.{place}.check_integrity", lambda path, md5=None: True)
    make(tmp_path)
    data = f"{make.__name__}:{tmp_path}"
    for split, labels in (("train", [0, 1, 1]), ("val", [0, 1])):
        dataset = create_dataset(data, split, (10, 20), **RAW)
        items = [dataset[i] for i in range(len(dataset))]
        assert [label for _, label in items] == [dataset.label(i) for i in range(len(dataset))] == labels
        for image, _ in items:
            assert (image.mean((1, 2)) - torch.tensor([200 / 255, 0, 0])).abs().max() < 0.02
    assert dataset.classes == class_names(data) and len(dataset.classes) in (2, 102)


def test_files_are_read_by_our_rules(food):
    small = TorchvisionSet("food101", food, "train", Prepare((8, 16), **RAW), reading=Reading(max_pixels=199))
    with pytest.raises(BadImage, match=r"waffles/0.jpg has 10x20 \(H x W\) pixels, more than max_pixels=199"):
        small[0]
    (food / "food-101" / "images" / "waffles" / "1.jpg").write_bytes(b"")
    data = TorchvisionSet("food101", food, "train", Prepare((8, 16), **RAW), reading=Reading(on_bad="replace"))
    assert data[1][1] == 0 and data.bad_indices() == [1]


@pytest.mark.parametrize("name", SETS)
def test_a_set_that_is_not_there_is_not_fetched(name, tmp_path, monkeypatch):
    def fail(*args, **how):
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", fail)
    with pytest.raises(ValueError, match=rf"{name} is not in {tmp_path}: Dataset not found.* Set download=True to download it"):
        create_dataset(f"{name}:{tmp_path}", "val", (8, 8), **RAW)


def test_download_is_handed_on(mnist, monkeypatch):
    requested = []
    monkeypatch.setattr("torchvision.datasets.MNIST.download", lambda self: requested.append(self.root))
    create_dataset(f"mnist:{mnist}", "val", (8, 8), **RAW)
    assert requested == []
    create_dataset(f"mnist:{mnist}", "val", (8, 8), **RAW, download=True)
    assert requested == [str(mnist)]


def test_unknown_sets(tmp_path):
    with pytest.raises(ValueError, match=r"did you mean fashion_mnist:/data\? The sets are mnist, fashion_mnist"):
        create_dataset("fashionmnist:/data", "val", (8, 8), **RAW)
    with pytest.raises(ValueError, match=r"unknown set 'cifar10'; use one of mnist, .* or a folder of class folders"):
        TorchvisionSet("cifar10", tmp_path, "val", Prepare((8, 8), **RAW))


def test_the_array_sets_are_read_without_unpickling(mnist, monkeypatch):
    def fail(*args, **how):
        raise AssertionError("unpickled")

    for where in ("pickle.load", "pickle.loads", "pickle.Unpickler", "torch.load", "numpy.load"):
        monkeypatch.setattr(where, fail)
    assert create_dataset(f"mnist:{mnist}", "val", (8, 8), **RAW)[0][1] == 7
