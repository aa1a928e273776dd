"""`vitrel pack`: the bytes of the folder in shards, an index only when all went well, nothing overwritten."""

import hashlib
import json
import os
import tarfile

import numpy as np
import pytest
from PIL import Image

from helpers import command
from helpers.pictures import write_classes
from vitrel.data import Prepare, Shards, decode

tool = command("pack")
PREPARE = Prepare((8, 8), (0.0,) * 3, (1.0,) * 3)


@pytest.fixture
def source(tmp_path):
    for split, count in (("train", 9), ("val", 3)):
        files = [f"{i}.{'png' if i % 2 else 'JPEG'}" for i in range(count)]
        write_classes(tmp_path / "in" / split, ["cat", "dog"], files, (40, 60))
    return tmp_path / "in"


def members(path):
    with tarfile.open(path) as tar:
        return {member.name: tar.extractfile(member).read() for member in tar}


def test_original_bytes_are_kept_and_the_index_is_right(source, tmp_path, capsys):
    out = tmp_path / "out"
    tool.main([str(source), str(out), "--images-per-shard", "7"])
    assert "train: 18 images in 3 shards" in capsys.readouterr().out
    index = json.loads((out / "index.json").read_text())
    assert index["classes"] == ["cat", "dog"] and index["splits"]["val"]["counts"] == [3, 3]
    assert [shard["images"] for shard in index["splits"]["train"]["shards"]] == [7, 7, 4]
    packed = {}
    for shard in index["splits"]["train"]["shards"]:
        path = out / "train" / shard["name"]
        assert path.stat().st_size == shard["bytes"]
        assert hashlib.sha256(path.read_bytes()).hexdigest() == shard["sha256"]
        packed |= members(path)
    assert sorted({name.split(".")[1] for name in packed}) == ["cls", "jpeg", "png"]
    images = {content for name, content in packed.items() if not name.endswith("cls")}
    assert images == {path.read_bytes() for path in (source / "train").rglob("*.*")}
    for name, content in packed.items():
        if not name.endswith("cls"):
            [label] = [
                i for i, c in enumerate(index["classes"]) for p in (source / "train" / c).iterdir() if p.read_bytes() == content
            ]
            assert packed[name.split(".")[0] + ".cls"] == str(label).encode()


def test_the_same_seed_writes_the_same_bytes(source, tmp_path):
    def checksums(out, *options):
        tool.main([str(source), str(tmp_path / out), *options])
        index = json.loads((tmp_path / out / "index.json").read_text())
        return [shard["sha256"] for split in index["splits"].values() for shard in split["shards"]]

    first = checksums("a")
    assert first == checksums("b", "--workers", "2") != checksums("c", "--seed", "1")


def test_shards_end_by_size_and_splits_can_be_chosen(source, tmp_path):
    tool.main([str(source), str(tmp_path / "out"), "--shard-size", "20KB", "--splits", "train"])
    index = json.loads((tmp_path / "out" / "index.json").read_text())
    assert list(index["splits"]) == ["train"] and len(index["splits"]["train"]["shards"]) > 2
    assert not (tmp_path / "out" / "val").exists()


def test_resizing(source, tmp_path):
    Image.new("RGB", (30, 20), (10, 200, 30)).save(source / "train" / "cat" / "small.png")
    tool.main([str(source), str(tmp_path / "out"), "--resize", "24", "--splits", "train"])
    packed = members(tmp_path / "out" / "train" / "00000.tar")
    shapes = sorted(tuple(decode(data).shape[1:]) for name, data in packed.items() if not name.endswith("cls"))
    assert shapes == [(20, 30), *[(24, 36)] * 18]
    assert sum(name.endswith("png") for name in packed) == 1  # the small one, as it was


def test_unreadable_images_are_all_named_and_no_index_is_left(source, tmp_path):
    (source / "train" / "cat" / "0.JPEG").write_bytes(b"<html>")
    (source / "val" / "dog" / "1.png").write_bytes(b"")
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as caught:
        tool.main([str(source), str(out)])
    text = str(caught.value)
    assert (
        "2 images cannot be packed" in text and "train/cat/0.JPEG: not a JPEG" in text and "val/dog/1.png: the file is" in text
    )
    assert not (out / "index.json").exists()
    with pytest.raises(ValueError, match=r"index\.json is missing"):
        Shards(out, "train", PREPARE)
    with pytest.raises(SystemExit, match=r"out exists and is not empty, and is not overwritten"):
        tool.main([str(source), str(out)])
    tool.main([str(source), str(tmp_path / "unchecked"), "--no-check"])
    assert len(Shards(tmp_path / "unchecked", "train", PREPARE)) == 18


def test_every_kind_is_packed_as_it_is_and_what_is_left_out_is_told(source, tmp_path):
    colours = Image.fromarray(np.arange(96, dtype=np.uint8).reshape(4, 8, 3))
    for kind in ("gif", "bmp", "webp"):
        colours.save(source / "train" / "cat" / f"x.{kind}")
    (source / "train" / "cat" / os.fsdecode(b"caf\xe9.png")).write_bytes((source / "train" / "cat" / "1.png").read_bytes())
    (source / "train" / "dog" / "x.tiff").write_bytes(b"?")
    with pytest.warns(UserWarning, match=r"train: 1 file of kinds that are not decoded: 1 .tiff \(.*dog/x.tiff\)"):
        tool.main([str(source), str(tmp_path / "out"), "--splits", "train"])
    data = Shards(tmp_path / "out", "train", PREPARE)
    assert len(data) == 22 and data.class_counts() == [13, 9] and all(label >= 0 for _, label in data)
    packed = members(tmp_path / "out" / "train" / "00000.tar")
    assert {"gif", "bmp", "webp"} < {name.split(".")[1] for name in packed}


def test_links_to_folders_are_followed_where_asked(source, tmp_path):
    (source / "val" / "dog" / "up").symlink_to("..")
    Image.new("RGB", (30, 20)).save(tmp_path / "more.png")
    (source / "val" / "dog" / "more").symlink_to(tmp_path)
    with pytest.warns(UserWarning, match=r"val: 2 folder links \(.*dog/more, .*dog/up\)"):
        tool.main([str(source), str(tmp_path / "out"), "--splits", "val"])
    assert Shards(tmp_path / "out", "val", PREPARE).class_counts() == [3, 3]
    with pytest.warns(UserWarning, match="already used"):
        tool.main([str(source), str(tmp_path.parent / "followed"), "--splits", "val", "--follow-links"])
    # all of tmp_path lies behind the link: the training images are found there too, and more.png; its shards are no images
    assert Shards(tmp_path.parent / "followed", "val", PREPARE).class_counts() == [3, 22]


def test_what_cannot_be_opened_or_does_not_fit_in_memory_is_named(source, tmp_path, monkeypatch):
    (source / "val" / "dog" / "a.png").symlink_to("a.png")
    os.mkfifo(source / "val" / "cat" / "b.png")
    for number, options in enumerate(([], ["--no-check"])):
        with pytest.raises(SystemExit) as caught:
            tool.main([str(source), str(tmp_path / str(number)), *options])
        assert all(
            text in str(caught.value) for text in ("2 images cannot", "dog/a.png: Too many levels", "cat/b.png: it is a pipe")
        )

    def full(*args, **how):
        raise MemoryError

    monkeypatch.setattr("vitrel.data.shards.resize", full)
    with pytest.raises(SystemExit, match=r"error: memory ran out while .*train/.* \(40x60 pixels\) was resized"):
        tool.main([str(source), str(tmp_path / "small"), "--resize", "8"])


def test_a_failure_while_writing_leaves_no_index(source, tmp_path, monkeypatch):
    def full(self, sample):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("webdataset.ShardWriter.write", full)
    with pytest.raises(SystemExit, match="No space left on device"):
        tool.main([str(source), str(tmp_path / "out")])
    assert not list((tmp_path / "out").glob("index*"))


def test_verify(source, tmp_path, capsys):
    out = tmp_path / "out"
    tool.main([str(source), str(out)])
    tool.main(["--verify", str(out)])
    assert "train: 18 images in 1 shards are as they were packed" in capsys.readouterr().out
    path = out / "val" / "00000.tar"
    path.write_bytes(path.read_bytes().replace(b"IDAT", b"IDAX"))
    with pytest.raises(SystemExit, match=r"val/00000.tar has changed since it was packed"):
        tool.main(["--verify", str(out)])


def test_bad_usage_and_bad_folders(source, tmp_path, capsys):
    for arguments, text in (
        ([str(source)], "give SOURCE and OUT"),
        ([str(source), "o", "--shard-size", "many"], "'many' is not a size: write 100MB"),
        ([str(source), "o", "--images-per-shard", "0"], "'0' is no count"),
        ([str(source), "o", "--shard-size", "1MB", "--images-per-shard", "5"], "not allowed with"),
    ):
        with pytest.raises(SystemExit) as caught:
            tool.main(arguments)
        assert caught.value.code == 2 and text in capsys.readouterr().err
    (source / "val" / "cat").rename(source / "val" / "cow")
    with pytest.raises(SystemExit, match=r"shift the labels: missing \['cat'\]"):
        tool.main([str(source), str(tmp_path / "out")])
    with pytest.raises(SystemExit, match=r"no folder .*nowhere: give one with train/<class>/"):
        tool.main([str(tmp_path / "nowhere"), str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()
