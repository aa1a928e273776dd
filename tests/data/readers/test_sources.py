"""Every kind of data that `--data` takes gives the images and labels of the folder it was made of."""

import csv
import gzip
import pickle
import re
import shutil
import tarfile

import numpy as np
import pytest
import torch

from helpers.pictures import write_classes
from helpers.tars import add, write_shards, write_tars
from vitrel.data import BadImage, Draw, Reading, class_names, create_dataset

HOW = {"mean": (0.0,) * 3, "std": (1.0,) * 3}
KINDS = ("cat", "dog", "emu")


@pytest.fixture(scope="module")
def flowers(tmp_path_factory):
    root = tmp_path_factory.mktemp("data") / "flowers"
    for split, n in (("train", 10), ("val", 4)):
        write_classes(root / split, KINDS, [f"{i}.png" for i in range(n)], (20, 24))
    return root


def table_of(paths, labels, kind):
    """A data set of Hugging Face `datasets` with these image files and labels of a kind."""
    datasets = pytest.importorskip("datasets", reason="Hugging Face datasets is not installed")
    columns = {"image": [{"bytes": path.read_bytes(), "path": None} for path in paths], "label": labels}
    return datasets.Dataset.from_dict(columns, datasets.Features({"image": datasets.Image(), "label": kind(datasets)}))


def items(data, split, **options):
    """What a split holds, whatever its order: (pixels, name of the class)."""
    images = create_dataset(str(data), split, (20, 24), **HOW, **options)
    assert class_names(str(data)) == images.classes
    assert len(images.names()) == len(images)
    assert len(images.labels()) == len(images)
    assert images.image_sizes() == [images.read(i)[0].size[::-1] for i in range(len(images))]
    return sorted(
        (pixels.numpy().tobytes(), images.classes[label]) for pixels, label in (images[i] for i in range(len(images)))
    )


def assert_same(data, folder, **options):
    for split in ("train", "val"):
        assert items(data, split, **options) == items(folder, split)


@pytest.mark.parametrize("others", [{"valid": "val"}, {"test": "val"}, {"validation": "val", "test": "train"}], ids=str)
def test_names_of_the_evaluation_split(flowers, tmp_path, others):
    """Validation comes before test."""
    for name, source in {"train": "train", **others}.items():
        shutil.copytree(flowers / source, tmp_path / name)
    assert_same(tmp_path, flowers)


@pytest.mark.parametrize("layout", ["", "train"])
def test_a_share_of_every_class_is_for_evaluation(flowers, tmp_path, layout):
    shutil.copytree(flowers / "train", tmp_path / "data" / layout)
    data, reading = tmp_path / "data", Reading(val_fraction=0.2)
    train, val = (items(data, split, reading=reading) for split in ("train", "val"))
    assert [sum(kind == name for _, name in val) for kind in KINDS] == [2, 2, 2]
    assert sorted(train + val) == items(flowers, "train")
    with pytest.raises(ValueError, match="val" if layout else "--val-fraction"):
        items(data, "val")
    with pytest.raises(ValueError, match="val_fraction must be a share"):
        Reading(val_fraction=1.0)


def test_the_only_image_of_a_class_is_for_training(flowers, tmp_path):
    data = shutil.copytree(flowers / "train", tmp_path / "data")
    for path in sorted((data / "cat").iterdir())[1:]:
        path.unlink()
    train, val = (items(data, split, reading=Reading(val_fraction=0.9)) for split in ("train", "val"))
    assert [sum(kind == name for _, name in train) for kind in KINDS] == [1, 1, 1]
    assert [sum(kind == name for _, name in val) for kind in KINDS] == [0, 9, 9]
    rows = [(path, path.parent.name) for path in sorted(data.glob("*/0.png"))]
    write_csv(tmp_path / "single.csv", [("path", "label"), *rows])
    with pytest.raises(ValueError, match="every class has one image, so none is left to evaluate"):
        items(tmp_path / "single.csv", "val", reading=Reading(val_fraction=0.5))


def write_csv(path, rows):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(rows)


def rows_of(flowers):
    return [
        (path.relative_to(flowers), path.parent.name, path.parts[-3].replace("val", "validation"))
        for path in sorted(flowers.glob("*/*/*.png"))
    ]


def test_a_csv(flowers):
    write_csv(flowers / "all.csv", [("path", "label", "split"), *rows_of(flowers)])
    assert_same(flowers / "all.csv", flowers)
    prints = create_dataset(str(flowers / "all.csv"), "train", (20, 24), **HOW).fingerprints()
    (first, label, split), *others = rows_of(flowers)
    write_csv(flowers / "all.csv", [("path", "label", "split"), (first, next(k for k in KINDS if k != label), split), *others])
    assert create_dataset(str(flowers / "all.csv"), "train", (20, 24), **HOW).fingerprints() != prints
    write_csv(flowers / "some.csv", [("file_name", "class"), *(row[:2] for row in rows_of(flowers))])
    assert len(items(flowers / "some.csv", "val", reading=Reading(val_fraction=0.5))) == 21


def test_a_csv_as_excel_writes_it(flowers, tmp_path):
    rows = [
        ("path", " label", "split", ""),
        *((flowers / path, f"{kind} ", split, "") for path, kind, split in rows_of(flowers)),
    ]
    for encoding, end in (("utf-8-sig", "\r\n"), ("utf-8", "\r"), ("utf-8", "\n")):
        lines = [", ".join(f'"{cell}"' if i % 2 else f"{cell}" for cell in row) for i, row in enumerate(rows)]
        lines[3:3] = ["", ",,,"]  # of cells that were emptied
        (tmp_path / "all.csv").write_bytes((end.join(lines) + end).encode(encoding))
        assert_same(tmp_path / "all.csv", flowers)


SPLIT = b"path,label,split\n"
NO_CSV = {
    SPLIT + b"a.jpg,cat,train\nb.jpg,dog\n": ", line 3 needs path, label, split, and as many cells as the header: b.jpg, dog, ",
    SPLIT + b"a.jpg,cat,train,7\n": ", line 2 needs path, label, split",
    SPLIT
    + b"a.jpg,cat,train\nb.jpg, ,val\n": ", line 3 needs path, label, split, and as many cells as the header: b.jpg, , val",
    SPLIT + b"a.jpg,cat,train\na.jpg,dog,val\n": ", line 3 has the image a.jpg again: keep one row",
    SPLIT + b"a.jpg,cat,train\n./a.jpg,cat,val\n": ", line 3 has the image ./a.jpg again: keep one row",
    SPLIT + b"a.jpg,cat,Train\n": ", line 2 has the split 'Train': use one of test, train, ",
    b"path,label,label\na.jpg,cat,dog\n": " has the column label more than once: keep one",
    b"path,split,label,split\na.jpg,train,cat,val\n": " has the column split more than once: keep one",
    b"path,label,path\na.jpg,cat,b.jpg\n": " has the column path more than once: keep one",
    b'path,label\na.jpg,"dog\n': " is no CSV in UTF-8: unexpected end of data",
    b"path,label\na.jpg,caf\xe9\n": " is no CSV in UTF-8: 'utf-8' codec can't decode byte 0xe9",
    b"path;label\na.jpg;cat\n": " has the columns path;label: it needs path and label",
    b"": " has the columns : it needs path and label",
}


@pytest.mark.parametrize("content", NO_CSV, ids=range(len(NO_CSV)))
def test_a_csv_that_would_be_read_wrong_is_refused(tmp_path, content):
    (tmp_path / "all.csv").write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path}/all.csv{NO_CSV[content]}")):
        class_names(f"{tmp_path}/all.csv")


def test_class_folders_in_tars(flowers, tmp_path):
    write_tars(flowers, tmp_path / "two")
    assert_same(tmp_path / "two", flowers)
    data = create_dataset(str(tmp_path / "two"), "train", (20, 24), **HOW)
    assert data.name(8) == "train.tar: cat/8.png" and data[Draw(8, (12, 16))][0].shape == (3, 12, 16)
    again = pickle.loads(pickle.dumps(data))
    assert torch.equal(again[8][0], data[8][0])
    assert sorted(path.name for path in (tmp_path / "two").iterdir()) == ["train.tar", "val.tar"]  # nothing is left there
    with tarfile.open(tmp_path / "one.tar", "w") as both:
        both.add(flowers / "train", "train")
        both.add(flowers / "val", "validation")
        add(both, "val/cat/._0.png", b"of macOS")
    assert_same(tmp_path / "one.tar", flowers)
    reading = Reading(val_fraction=0.3)
    assert len(items(tmp_path / "two" / "train.tar", "val", reading=reading)) == 9


@pytest.mark.parametrize("nested", [False, True])
def test_a_tar_of_each_class(flowers, tmp_path, nested):
    """As a folder, or in a tar, as ImageNet is published; both splits have the same tars."""
    for split in ("train", "val"):
        folder = tmp_path / "tars" / split
        folder.mkdir(parents=True)
        for kind in KINDS:
            with tarfile.open(folder / f"{kind}.tar", "w") as archive:
                archive.add(flowers / split / kind, ".")
        if nested:
            with tarfile.open(tmp_path / "tars" / f"{split}.tar", "w") as archive:
                archive.add(folder, ".")
            shutil.rmtree(folder)
    assert_same(tmp_path / "tars", flowers)


def test_folders_of_numbers_in_a_tar_are_as_many_classes(flowers, tmp_path):
    numbers = dict(zip(KINDS, ("204", "17", "3"), strict=True))
    with tarfile.open(tmp_path / "train.tar", "w") as archive:
        for kind, number in numbers.items():
            add(archive, f"{number}/0.txt", b"a caption, which does not make a WebDataset of it")
            archive.add(flowers / "train" / kind, number)
    assert class_names(str(tmp_path)) == ["3", "17", "204"]
    found = items(tmp_path, "val", reading=Reading(val_fraction=0.9))
    assert {pixels: kind for pixels, kind in found}.items() <= {p: numbers[kind] for p, kind in items(flowers, "train")}.items()


@pytest.mark.slow
def test_labels_that_leave_numbers_out_are_as_many_classes(flowers, tmp_path):
    paths = sorted((flowers / "train").glob("*/*"))
    labels = [(204, 17, 73_320)[KINDS.index(path.parent.name)] for path in paths]
    table = table_of(paths, labels, lambda datasets: datasets.Value("int64"))
    table.to_parquet(str(tmp_path / "train.parquet"))
    found = items(tmp_path, "train", reading=Reading(val_fraction=0.1))
    assert class_names(str(tmp_path)) == sorted({kind for _, kind in found}, key=int) == ["17", "204", "73320"]
    assert len(found) == 27


def test_a_web_dataset(flowers, tmp_path):
    pytest.importorskip("datasets", reason="Hugging Face datasets is not installed")
    write_shards(flowers, tmp_path, 7)
    with pytest.warns(UserWarning, match=r"is read from a copy of about \d+ MB, .* in .*; HF_DATASETS_CACHE names"):
        assert_same(tmp_path, flowers)
    data = create_dataset(str(tmp_path), "train", (20, 24), **HOW)
    assert data.name(8).endswith(" train: 00001.tar: 000008") and data[Draw(8, (12, 16))][0].shape == (3, 12, 16)
    (tmp_path / "classes.txt").unlink()
    assert class_names(str(tmp_path)) == ["0", "1", "2"]


def test_bad_images_in_tars_are_named_and_counted(flowers, tmp_path):
    pytest.importorskip("datasets", reason="Hugging Face datasets is not installed")
    folder = shutil.copytree(flowers, tmp_path / "flowers")
    (folder / "val/cat/1.png").write_bytes(b"<html>")
    (folder / "val/emu/2.png").write_bytes(b"")
    write_tars(folder, tmp_path / "tars")
    write_shards(folder, tmp_path / "shards")
    for data, names in (
        ("tars", ["val.tar: cat/1.png", "val.tar: emu/2.png"]),
        ("shards", ["00000.tar: 000001", "00000.tar: 000010"]),
    ):
        images = create_dataset(str(tmp_path / data), "val", (20, 24), **HOW)
        with pytest.raises(BadImage, match=f"cannot decode .*{names[0]}: not a JPEG"):
            images[1]
        images = create_dataset(str(tmp_path / data), "val", (20, 24), **HOW, reading=Reading(on_bad="leave_out"))
        assert [label for _, label in images] == [0, -1, 0, 0, 1, 1, 1, 1, 2, 2, -1, 2]
        assert [images.name(i)[-len(name) :] for i, name in zip(images.bad_indices(), names, strict=True)] == names


def test_a_sample_without_an_image_is_a_bad_image(flowers, tmp_path):
    pytest.importorskip("datasets", reason="Hugging Face datasets is not installed")
    content = next((flowers / "train" / "cat").iterdir()).read_bytes()
    with tarfile.open(tmp_path / "val.tar", "w") as archive:
        for i in range(8):
            add(archive, f"{i}.png" if i < 7 else f"{i}.heic", content)
            add(archive, f"{i}.cls", b"0")
    with pytest.raises(BadImage, match=r"val.tar: 7: the file is empty"):
        create_dataset(str(tmp_path), "val", (20, 24), **HOW)[7]


def test_damaged_tars_are_named(flowers, tmp_path):
    write_tars(flowers, tmp_path)
    tar = tmp_path / "train.tar"
    content = tar.read_bytes()
    data = create_dataset(str(tar.parent), "train", (20, 24), **HOW)
    member = data.samples[3][0]
    header = member.offset - 512
    for damage, reason in (
        (b"no tar" * 200, "truncated header|invalid header|bad checksum"),
        (content[: member.offset + 9], "unexpected end of data"),
        (content[:header], "its end is missing"),
        (gzip.compress(content), "invalid header|bad checksum"),
        (bytes(10240), "it has no image with .jpg, "),
    ):
        tar.write_bytes(damage)
        text = rf"train.tar cannot be read \(.*({reason}).*\): write an uncompressed tar of class"
        with pytest.raises(ValueError, match=text):
            items(tar.parent, "train")
    tar.write_bytes(content[: member.offset + 9])
    assert data[2][0].shape == (3, 20, 24)  # the headers are known
    with pytest.raises(BadImage, match=r"cannot decode train.tar: cat/3.png"):
        data[3]
    tar.unlink()
    with pytest.raises(BadImage, match=r"cannot decode train.tar: cat/3.png: No such file"):
        data[3]
    with tarfile.open(tar, "w") as archive:
        archive.add(flowers / "train/cat/0.png", "0.png")
    with pytest.raises(ValueError, match=r"train.tar: 0.png is in no class folder"):
        items(tar.parent, "train")


def test_parquet_and_arrow(flowers, tmp_path):
    found = {}
    for name, split in (("train", "train"), ("validation", "val")):
        paths = sorted((flowers / split).glob("*/*"))
        labels = [KINDS.index(path.parent.name) for path in paths]
        found[name] = table_of(paths, labels, lambda datasets: datasets.ClassLabel(names=list(KINDS)))
    pytest.importorskip("datasets").DatasetDict(found).save_to_disk(str(tmp_path / "arrow"))
    (tmp_path / "parquet" / "data").mkdir(parents=True)
    for name, rows in found.items():
        rows.to_parquet(str(tmp_path / "parquet" / "data" / f"{name}-00000-of-00001.parquet"))
    for split in ("train", "validation"):  # splits that are links
        (tmp_path / "links").mkdir(exist_ok=True)
        (tmp_path / "real" / split).mkdir(parents=True)
        found[split].to_parquet(str(tmp_path / "real" / split / "0000.parquet"))
        (tmp_path / "links" / split).symlink_to(tmp_path / "real" / split)
    for data in (tmp_path / "arrow", tmp_path / "parquet", tmp_path / "links", f"hfds/{tmp_path}/parquet"):
        assert_same(data, flowers)
    found["train"].to_parquet(str(tmp_path / "links" / "more.parquet"))
    with pytest.raises(ValueError, match=r"no split is named by .*links/more.parquet, but others are: train, validation"):
        class_names(str(tmp_path / "links"))
    image = create_dataset(str(tmp_path / "parquet"), "val", (20, 24), **HOW)
    assert image.name(3).endswith("validation: 3")


def test_a_set_of_torchvision(tmp_path):
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for part, n in (("train", 30), ("t10k", 10)):
        pixels = np.random.default_rng(n).integers(0, 256, (n, 28, 28), dtype=np.uint8)
        (raw / f"{part}-images-idx3-ubyte").write_bytes(np.array([2051, n, 28, 28], ">i4").tobytes() + pixels.tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(np.array([2049, n], ">i4").tobytes() + bytes(i % 10 for i in range(n)))
    assert len(items(f"torch/fashion_mnist:{tmp_path}", "val")) == 10
    assert create_dataset(f"torch/fashion_mnist:{tmp_path}", "train", (28, 28), **HOW)[12][1] == 2
    with pytest.raises(ValueError, match="torch/kmnist is not in"):
        class_names(f"torch/kmnist:{tmp_path}")
    with pytest.raises(ValueError, match="timm has no data set torch/food101"):
        class_names(f"torch/food101:{tmp_path}")


def test_what_is_refused_is_named_by_what_was_found(tmp_path):
    streams = ("tfds/some", "hfids/some", "wds/some", "torch/cifar10", "s3://bucket/images", "pipe:cat images.tar")
    for data in (*streams, "images.tar.gz"):
        with pytest.raises(ValueError, match=rf"{data}' cannot be read by index, .*repeats: give a folder, .*copied by aws s3"):
            class_names(data)
