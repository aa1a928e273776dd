"""Every kind of data that `--data` takes gives the images and labels of the folder it was made of."""

import csv
import hashlib
import http.server
import io
import re
import shutil
import tarfile
import threading
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from helpers.tars import add, write_tars
from vitrel.data import BadImage, Draw, Reading, class_names, create_dataset
from vitrel.data.readers.tars import braces

HOW = {"mean": (0.0,) * 3, "std": (1.0,) * 3}
KINDS = ("cat", "dog", "emu")


def picture(seed):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (20, 24, 3), dtype=np.uint8))


@pytest.fixture(scope="module")
def flowers(tmp_path_factory):
    root = tmp_path_factory.mktemp("data") / "flowers"
    for i, kind in enumerate(KINDS):
        for split, n in (("train", 10), ("val", 4)):
            (root / split / kind).mkdir(parents=True)
            for j in range(n):
                picture(100 * i + 10 * (split == "val") + j).save(root / split / kind / f"{j}.png")
    return root


def items(data, split, **options):
    """What a split holds, whatever its order: (pixels, name of the class)."""
    images = create_dataset(str(data), split, (20, 24), **HOW, **options)
    assert class_names(str(data)) == images.classes
    assert len(images.contents()) == len(images.versions()) == len(images) and len(images.digest()) == 64
    assert sum(images.class_counts()) == len(images)
    return sorted(
        (pixels.numpy().tobytes(), images.classes[label]) for pixels, label in (images[i] for i in range(len(images)))
    )


def assert_same(data, folder, **options):
    for split in ("train", "val"):
        assert items(data, split, **options) == items(folder, split)


@pytest.mark.parametrize("name", ["validation", "valid", "test"])
def test_names_of_the_evaluation_split(flowers, tmp_path, name):
    shutil.copytree(flowers / "train", tmp_path / "train")
    shutil.copytree(flowers / "val", tmp_path / name)
    assert_same(tmp_path, flowers)


def test_validation_comes_before_test(flowers, tmp_path):
    for name, source in (("train", "train"), ("validation", "val"), ("test", "train")):
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


def test_the_only_image_of_a_class_is_for_training_and_told(flowers, tmp_path):
    data = shutil.copytree(flowers / "train", tmp_path / "data")
    for path in sorted((data / "cat").iterdir())[1:]:
        path.unlink()
    with pytest.warns(
        UserWarning, match=r"data: 1 of 3 classes have one image, which is used for training; these classes have"
    ):
        train, val = (items(data, split, reading=Reading(val_fraction=0.9)) for split in ("train", "val"))
    assert [sum(kind == name for _, name in train) for kind in KINDS] == [1, 1, 1]
    assert [sum(kind == name for _, name in val) for kind in KINDS] == [0, 9, 9]
    rows = [(path, path.parent.name) for path in sorted(data.glob("*/0.png"))]
    write_csv(tmp_path / "single.csv", [("path", "label"), *rows])
    with pytest.raises(ValueError, match=r"3 of 3 classes have one image, which is used for training, so none is left"):
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
    write_csv(flowers / "some.csv", [("file_name", "class"), *(row[:2] for row in rows_of(flowers))])
    assert len(items(flowers / "some.csv", "val", reading=Reading(val_fraction=0.5))) == 21
    write_csv(flowers / "bad.csv", [("name", "kind"), ("a", "b")])
    with pytest.raises(ValueError, match=r"has the columns name, kind: it needs a header with path and label"):
        class_names(str(flowers / "bad.csv"))


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


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ("a.jpg,cat,train\nb.jpg,dog\n", "line 3 has 2 cells, and the header has 3"),
        ("a.jpg,cat,train,7\n", "line 2 has 4 cells"),
        ('a.jpg,cat,train\n\nb.jpg,"dog,train\nc.jpg,dog,val\n', "line 4 has a quote that is not closed"),
        ('"a.jpg,cat,train\nb.jpg",dog,val\n', "line 2 has a quote that is not closed"),
        ('a.jpg,"cat"s,train\n', "line 2 has a quote that is not closed, or text beside one"),
        ("a.jpg,cat,train\nb.jpg,caf\xe9,val\n", "line 3 is not UTF-8: save the file"),
        ("a.jpg,cat,train\nb.jpg,dog,val\n./a.jpg,cat,train\n", "line 4 has the image ./a.jpg of line 2 again: keep one row"),
        ("a.jpg,cat,train\na.jpg,dog,train\n", "line 3 has the image a.jpg of line 2 again as dog: keep"),
        ("a.jpg,cat,train\na.jpg,cat,val\n", "line 3 has the image a.jpg of line 2 again as val: keep"),
        ("a.jpg,cat,train\nb.jpg, ,val\n", "line 3 has no label"),
        (",cat,train\n", "line 2 has no path"),
        ("a.jpg,cat,train\nb.jpg,cat,\n", "line 3 has no split"),
        ("a.jpg,cat,Train\n", "line 2 has the split 'Train': use one of test, train, "),
        ("a.jpg,cat,train\nb.jpg,dog,val\nc.jpg,Cat,val\n", "line 4 has the class Cat, and line 2 cat: use one spelling"),
    ],
)
def test_rows_of_a_csv_that_would_be_read_wrong_are_named(tmp_path, rows, text):
    (tmp_path / "all.csv").write_bytes(b"path,label,split\n" + rows.encode("latin-1"))
    with pytest.raises(ValueError, match=re.escape(f"{tmp_path}/all.csv, {text}")):
        class_names(f"{tmp_path}/all.csv")


@pytest.mark.parametrize("header", ["path;label;split", "path,label,label", ""])
def test_other_headers_of_a_csv_are_refused(tmp_path, header):
    (tmp_path / "all.csv").write_text(f"{header}\na.jpg;cat;train\n" if ";" in header else f"{header}\na.jpg,cat,dog\n")
    with pytest.raises(ValueError, match="it needs a header with path and label, each once and separated by commas"):
        class_names(f"{tmp_path}/all.csv")


def test_a_web_dataset_of_someone_else(flowers, tmp_path):
    write_tars(flowers, tmp_path / "tars", 7)
    assert_same(tmp_path / "tars", flowers)
    assert_same(f"wds/{tmp_path}/tars", flowers)
    data = create_dataset(str(tmp_path / "tars"), "train", (20, 24), **HOW)
    assert data.name(8) == "train/00001.tar: 000008.png"
    assert data[Draw(8, (12, 16))][0].shape == (3, 12, 16)


def test_class_folders_in_tars(flowers, tmp_path):
    (tmp_path / "two").mkdir()
    with tarfile.open(tmp_path / "one.tar", "w") as both:
        both.add(flowers / "train", "train")
        both.add(flowers / "val", "val")
    for split in ("train", "val"):
        with tarfile.open(tmp_path / "two" / f"{split}-0000.tar", "w") as archive:
            archive.add(flowers / split, ".")
    assert_same(tmp_path / "one.tar", flowers)
    assert_same(tmp_path / "two", flowers)
    assert len(items(tmp_path / "two" / "train-*.tar", "train")) == 30
    assert_same(tmp_path / "two" / "{train,val}-{0000..0000}.tar", flowers)
    assert braces("a{08..10}{x,y}.tar") == [f"a{n}{x}.tar" for n in ("08", "09", "10") for x in "xy"]


def test_labels_in_json(tmp_path):
    with tarfile.open(tmp_path / "all.tar", "w") as archive:
        for i in range(4):
            file = io.BytesIO()
            picture(i).save(file, "PNG")
            add(archive, f"{i}.json", b'{"label": "%s"}' % (b"cat", b"dog")[i % 2])
            add(archive, f"{i}.png", file.getvalue())
    assert class_names(str(tmp_path / "all.tar")) == ["cat", "dog"]
    assert len(items(tmp_path / "all.tar", "val", reading=Reading(val_fraction=0.5))) == 2


def test_one_bit_that_flipped_in_a_tar_is_noticed_where_its_checksum_is_known(flowers, tmp_path):
    """By a SHA256SUMS as the command writes it, in either of its forms, and without one not."""
    write_tars(flowers, tmp_path, 20)
    tars = sorted((tmp_path / "train").glob("*.tar"))
    sums = [hashlib.sha256(tar.read_bytes()).hexdigest() for tar in tars]
    (tmp_path / "train" / "SHA256SUMS").write_text(
        f"{sums[0]}  {tars[0].name}\n{sums[1]} *{tars[1].name}\n{'0' * 64}  gone.tar\n"
    )
    data = create_dataset(str(tmp_path), "train", (20, 24), **HOW)
    assert len(data) == 30
    member = data.samples[25][0]
    content = bytearray(Path(member.tar).read_bytes())
    content[member.offset + member.size // 2] ^= 1
    Path(member.tar).write_bytes(content)
    with pytest.raises(ValueError, match=f"{Path(member.tar).name} is damaged: it differs from its checksum in SHA256SUMS"):
        create_dataset(str(tmp_path), "train", (20, 24), **HOW)
    (tmp_path / "train" / "SHA256SUMS").write_text(f"{sums[0]}  {tars[0].name}\n")
    tars[1].touch()  # the headers of files that did not change are kept
    assert len(create_dataset(str(tmp_path), "train", (20, 24), **HOW)) == 30


def test_damaged_tars_are_named(flowers, tmp_path):
    write_tars(flowers, tmp_path, 100)
    tar = tmp_path / "train" / "00000.tar"
    whole = tar.read_bytes()
    tar.write_bytes(b"no tar" * 200)
    with pytest.raises(ValueError, match=r"train/00000.tar is not a tar file, or it is damaged or compressed"):
        items(tmp_path, "train")
    with tarfile.open(tar, "w") as archive:
        add(archive, "1.png", b"?")
        add(archive, "2.png", b"?")
        add(archive, "2.cls", b"0")
    with pytest.raises(ValueError, match=r"00000.tar: 1.png has no label"):
        items(tmp_path, "train")
    tar.write_bytes(whole)
    data = create_dataset(str(tmp_path), "train", (20, 24), **HOW)
    tar.write_bytes(whole[: data.samples[3][0].offset + 9])
    assert len(data[2][0]) == 3
    with pytest.raises(BadImage, match=r"train/00000.tar: 000003.png ends after 9 of"):
        data[3]


def test_parquet_and_arrow(flowers, tmp_path):
    datasets = pytest.importorskip("datasets", reason="Hugging Face datasets is not installed")
    found = datasets.DatasetDict(
        {
            name: datasets.Dataset.from_dict(
                {
                    "image": [{"bytes": path.read_bytes(), "path": None} for path in sorted((flowers / split).glob("*/*"))],
                    "label": [KINDS.index(path.parent.name) for path in sorted((flowers / split).glob("*/*"))],
                },
                datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(KINDS))}),
            )
            for name, split in (("train", "train"), ("validation", "val"))
        }
    )
    found.save_to_disk(str(tmp_path / "arrow"))
    (tmp_path / "parquet" / "data").mkdir(parents=True)
    for name, rows in found.items():
        rows.to_parquet(str(tmp_path / "parquet" / "data" / f"{name}-00000-of-00001.parquet"))
    for data in (tmp_path / "arrow", tmp_path / "parquet", f"hfds/{tmp_path}/parquet", f"hfids/{tmp_path}/parquet"):
        assert_same(data, flowers)
    image = create_dataset(str(tmp_path / "parquet"), "val", (20, 24), **HOW)
    assert all(int(size) > 100 for size in image.versions()) and image.name(3).endswith("validation: 3")


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
    (tmp_path / "a.npy").write_bytes(b"?")
    with pytest.raises(ValueError, match=r"found .npy files"):
        class_names(str(tmp_path))
    with pytest.raises(ValueError, match="give hfds/some"):
        class_names("tfds/some")
    with pytest.raises(ValueError, match="give torch/cifar10:<folder of its files>"):
        class_names("torch/cifar10")
    with pytest.raises(ValueError, match="unknown protocol s4://"):
        class_names("s4://bucket/images")
    with pytest.raises(ValueError, match=r"neither a folder nor a known set"):
        class_names("pipe:cat images.tar")


@pytest.fixture
def website(tmp_path):
    """(address, folder) of a web server on the loopback that understands ranges, as those that keep data do."""

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self):
            path = Path(self.translate_path(self.path))
            wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
            if wanted is None or not path.is_file():
                super().do_GET()
                return
            content = path.read_bytes()
            start, stop = int(wanted[1]), min(int(wanted[2] or len(content)) + 1, len(content))
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{len(content)}")
            self.send_header("Content-Length", str(stop - start))
            self.end_headers()
            self.wfile.write(content[start:stop])

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=tmp_path))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", tmp_path
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_a_folder_a_csv_and_tars_of_a_website(website, flowers):
    pytest.importorskip("aiohttp", reason="fsspec reads http with aiohttp, which is not installed")
    address, folder = website
    for split in ("train", "val"):
        shutil.copytree(flowers / split, folder / "flowers" / split)
    write_csv(folder / "flowers" / "all.csv", [("path", "label", "split"), *rows_of(flowers)])
    with tarfile.open(folder / "train-00.tar", "w") as train, tarfile.open(folder / "val-00.tar", "w") as val:
        train.add(flowers / "train", "train")
        val.add(flowers / "val", "val")
    for data in ("flowers", "flowers/all.csv", "{train,val}-{00..00}.tar"):
        assert items(f"{address}/{data}", "val") == items(flowers, "val")
    with pytest.raises(ValueError, match=r"nothing was found at|cannot be read"):
        class_names(f"{address}/nothing.csv")


@pytest.fixture(scope="module")
def bucket(flowers):
    """The address of a bucket of a real server on the loopback that speaks S3."""
    pytest.importorskip("s3fs", reason="s3fs is not installed")
    moto = pytest.importorskip("moto.server", reason="moto's server is not installed")
    import fsspec

    server = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    options = {"key": "k", "secret": "s"}
    before = fsspec.config.conf.get("s3")
    fsspec.config.conf["s3"] = options | {"endpoint_url": f"http://{host}:{port}"}
    files = fsspec.filesystem("s3")
    files.mkdir("bucket")
    yield "s3://bucket"
    server.stop()
    fsspec.config.conf.pop("s3")
    if before is not None:
        fsspec.config.conf["s3"] = before


@pytest.mark.slow(seconds=20)
def test_a_folder_a_csv_and_tars_of_an_object_store(bucket, flowers, tmp_path):
    import fsspec

    files = fsspec.filesystem("s3")
    files.put(str(flowers / "train"), "bucket/flowers/train", recursive=True)
    files.put(str(flowers / "val"), "bucket/flowers/validation", recursive=True)
    assert_same(f"{bucket}/flowers", flowers)
    write_csv(tmp_path / "all.csv", [("path", "label", "split"), *rows_of(flowers)])
    files.put(str(tmp_path / "all.csv"), "bucket/flowers/all.csv")
    write_tars(flowers, tmp_path / "tars", 12)
    files.put(str(tmp_path / "tars" / "train"), "bucket/tars/train", recursive=True)
    files.put(str(tmp_path / "tars" / "val"), "bucket/tars/val", recursive=True)
    for split, n in (("train", 30), ("val", 12)):
        remote = create_dataset(f"{bucket}/tars", split, (20, 24), **HOW)
        local = create_dataset(str(tmp_path / "tars"), split, (20, 24), **HOW)
        assert len(remote) == n and all(torch.equal(remote[i][0], local[i][0]) for i in range(n))
        assert [remote[i][1] for i in range(n)] == [local[i][1] for i in range(n)]
    loader = torch.utils.data.DataLoader(create_dataset(f"{bucket}/flowers", "val", (20, 24), **HOW), 4, num_workers=2)
    assert sum(len(labels) for _, labels in loader) == 12  # processes that are forked reach it too
    with pytest.raises(ValueError, match="nothing was found at s3://bucket/nothing"):
        class_names(f"{bucket}/nothing")
