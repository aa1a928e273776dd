"""Shards hold what the folder held; their readers see each image once, whoever reads, and nothing but images and labels."""

import io
import json
import os
import tarfile
import zlib

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from vitrel.data import BadImage, Batch, Draw, Folder, Prepare, Reading, ShardBatches, Shards, class_names, create_dataset
from vitrel.data.shards import pack

RAW = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
N = {"train": (20, 30), "val": (5, 6)}
TRAIN = sum(N["train"])


def plain(size=(8, 12)):
    return Prepare(size, **RAW)


def identity(image, epoch, index, repeat, size):
    """Stands for an augmentation: puts what it was given in the place of the pixels."""
    return torch.tensor([epoch, index, repeat]).float()[:, None, None].expand(3, 8, 12)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Images of one colour each: red tells the class, green the number within it."""
    root = tmp_path_factory.mktemp("source")
    for split, counts in N.items():
        for label, (name, count) in enumerate(zip(("cat", "dog"), counts, strict=True)):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                Image.new("RGB", (12, 8), (label, i, 0)).save(root / split / name / f"{i:02d}.png")
    return root


@pytest.fixture(scope="module")
def packed(source, tmp_path_factory):
    out = tmp_path_factory.mktemp("packed")
    pack(source, out, images_per_shard=7)
    return out


@pytest.fixture
def root(source, tmp_path):
    """Shards that a test may damage."""
    pack(source, tmp_path / "out", images_per_shard=7)
    return tmp_path / "out"


def checksums(members):
    """Of the images among (name, content) members, as the index has them: CRC-32 with the label as start value."""
    labels = {name.removesuffix(".cls"): int(content) for name, content in members if name.endswith(".cls")}
    images = [(name.rpartition(".")[0], content) for name, content in members if name.endswith((".png", ".jpg", ".gif"))]
    return "".join(f"{zlib.crc32(content, labels[key]):08x}" for key, content in images)


def rewrite(root, members, shard="train/00000.tar", images=None):
    """Replaces a shard by (name, content) members and brings the index up to date."""
    path, members = root / shard, [*members]
    with tarfile.open(path, "w") as tar:
        for name, content in members:
            header = tarfile.TarInfo(name)
            header.size = len(content)
            tar.addfile(header, io.BytesIO(content))
    index = json.loads((root / "index.json").read_text())
    entry = index["splits"]["train"]["shards"][0]
    entry["crc32"] = checksums(members)
    if images is not None:
        index["splits"]["train"]["counts"][0] += images - entry["images"]
        entry["images"] = images
    entry["bytes"] = path.stat().st_size
    (root / "index.json").write_text(json.dumps(index))


def png(colour=(0, 0, 9)):
    file = io.BytesIO()
    Image.new("RGB", (12, 8), colour).save(file, "PNG")
    return file.getvalue()


def key(image):
    """(class, number) that the colour of an image tells."""
    red, green, _ = (image[:, 0, 0] * 255).round().int().tolist()
    return red, green


def test_shards_hold_the_images_of_the_folder(source, packed):
    for split in ("train", "val"):
        folder, shards = Folder(source, split, plain()), Shards(packed, split, plain())
        assert len(shards) == len(folder) and shards.classes == folder.classes == ["cat", "dog"]
        assert shards.class_counts() == folder.class_counts() == list(N[split])
        seen = [(key(image), label) for image, label in shards]
        assert sorted(seen) == sorted((key(image), label) for image, label in folder)
        labels = [label for _, label in seen]
        assert labels != sorted(labels)  # classes are mixed
        assert [shards.label(i) for i in range(len(shards))] == labels
    shards = Shards(packed, "train", plain())
    assert len(shards.shards) == 8 and [shards.name(i) for i in (0, 8)] == [
        "train/00000.tar: 00000000",
        "train/00001.tar: 00000008",
    ]
    part = Shards(packed, "train", plain(), n=9, seed=2)
    assert len(part) == 9 and sum(part.class_counts()) == 9 and key(part[3][0]) == seen_at(packed, part.chosen[3])


def seen_at(packed, index):
    return key(Shards(packed, "train", plain())[index][0])


def test_create_dataset_knows_shards(packed):
    data = create_dataset(str(packed), "val", (16, 16), **RAW)
    assert isinstance(data, Shards) and data[3][0].shape == (3, 16, 16) and data[Draw(3, (4, 6))][0].shape == (3, 4, 6)
    assert class_names(str(packed)) == ["cat", "dog"]
    for address in ("pipe:cat shards.tar", "s3://bucket/train", "http://host/a.tar"):
        with pytest.raises(ValueError, match=r"neither a folder nor a known set.*they run commands or use the network"):
            create_dataset(address, "val", (16, 16), **RAW)


def batches(packed, plan, rank=0, world=1, workers=0, epoch=0, **how):
    data = ShardBatches(Shards(packed, "train", plain(), identity), plan, rank, world, **how)
    data.set_epoch(epoch)
    return data, DataLoader(data, batch_size=None, num_workers=workers)


def indices_seen(loader):
    return [images[:, 1, 0, 0].int().tolist() for images, _ in loader]


def uneven(epoch):
    """Batches of 1 to 5 images, 16 per rank."""
    return [Batch(b) for b in (3, 1, 4, 2, 5, 1)]


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (1, 2), (2, 1), (3, 2)])
def test_each_image_at_most_once_over_ranks_and_workers(packed, world, workers):
    seen = []
    for rank in range(world):
        data, loader = batches(packed, uneven, rank, world, workers, epoch=2, seed=1, buffer=5)
        got = indices_seen(loader)
        assert [len(batch) for batch in got] == [3, 1, 4, 2, 5, 1] and len(loader) == 6
        assert got == data.indices(2, rank, workers)
        seen += [i for batch in got for i in batch]
    assert len(set(seen)) == len(seen) == 16 * world


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (2, 2)])
def test_a_plan_of_all_images_sees_all(packed, world, workers):
    def plan(epoch):
        return [Batch(TRAIN // world // 5)] * 5

    epochs = []
    for epoch in (0, 1):
        loaders = (batches(packed, plan, rank, world, workers, epoch)[1] for rank in range(world))
        epochs.append([i for loader in loaders for batch in indices_seen(loader) for i in batch])
        assert sorted(epochs[-1]) == list(range(TRAIN))
    assert epochs[0] != epochs[1]


def test_labels_images_and_epoch_belong_together(packed):
    data = ShardBatches(Shards(packed, "train", plain()), uneven, seed=4)
    shards = Shards(packed, "train", plain())
    for (images, labels), indices in zip(data, data.indices(0, 0, 0), strict=True):
        assert labels.dtype == torch.int64 and images.dtype == torch.float32 and images.shape[1:] == (3, 8, 12)
        for image, label, i in zip(images, labels.tolist(), indices, strict=True):
            assert torch.equal(image, shards[i][0]) and label == shards[i][1]
    _, loader = batches(packed, uneven, epoch=6)
    assert {epoch for images, _ in loader for epoch in images[:, 0].unique().tolist()} == {6.0}


def test_the_order_is_that_of_seed_and_epoch(packed):
    def order(**how):
        return batches(packed, uneven, **how)[0].indices(how.get("epoch", 0), 0, 0)

    assert order(seed=1) == order(seed=1) != order(seed=2)
    assert order(seed=1, epoch=1) != order(seed=1)


def test_each_epoch_has_its_own_order_of_shards_and_within_them(source, packed, tmp_path):
    def order(root, epoch, buffer):
        data = ShardBatches(Shards(root, "train", plain()), lambda e: [Batch(TRAIN)], buffer=buffer)
        return data.indices(epoch, 0, 0)[0]

    unshuffled = [order(packed, epoch, buffer=1) for epoch in (0, 1)]
    assert unshuffled[0] != unshuffled[1] and sorted(unshuffled[0]) == sorted(unshuffled[1])
    pack(source, tmp_path / "one", images_per_shard=TRAIN)
    assert order(tmp_path / "one", 0, buffer=1) == order(tmp_path / "one", 1, buffer=1) == list(range(TRAIN))
    assert order(tmp_path / "one", 0, buffer=20) != order(tmp_path / "one", 1, buffer=20)


def test_the_buffer_mixes_shards_and_is_bounded(packed, monkeypatch):
    def one(epoch):
        return [Batch(1)] * TRAIN

    def mean_step(buffer):
        order = np.concatenate(batches(packed, one, buffer=buffer)[0].indices(0, 0, 0))
        return np.abs(np.diff(order)).mean()

    assert mean_step(1) < 4 < 10 < mean_step(30)  # 1: within a shard, always the next
    data, _ = batches(packed, one, buffer=10)
    read = []
    original = ShardBatches._read
    monkeypatch.setattr(ShardBatches, "_read", lambda *a: (read.append(x) or x for x in original(*a)))
    ahead = [len(read) - seen for seen, _ in enumerate(data)]
    assert ahead[0] >= 9 and max(ahead) <= 11  # full from the first batch on


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(("workers", "k"), [(0, 1), (0, 6), (2, 0), (2, 5), (3, 3), (3, 6)])
def test_skipping_leaves_the_other_batches_as_they_were(packed, workers, k):
    whole = indices_seen(batches(packed, uneven, workers=workers, buffer=6)[1])
    data, loader = batches(packed, uneven, workers=workers, buffer=6)
    data.skip(k)
    assert indices_seen(loader) == whole[k:]


def test_skipped_images_are_not_read(packed, monkeypatch):
    data, _ = batches(packed, uneven, buffer=6)
    data.skip(4)
    original, kept = ShardBatches._read, []
    monkeypatch.setattr(ShardBatches, "_read", lambda *a: (kept.append(x) or x for x in original(*a)))
    assert len(list(data)) == 2
    assert sum(x.data is not None for x in kept) == 6 and len(kept) == 16


def test_workers_that_live_on_see_the_epoch_and_skip_once(packed):
    data = ShardBatches(Shards(packed, "train", plain(), identity), uneven, buffer=6)
    loader = DataLoader(data, batch_size=None, num_workers=2, persistent_workers=True)
    data.skip(3)
    data.set_epoch(0)  # as the trainer does before every epoch, a resumed one too
    assert indices_seen(loader) == data.indices(0, 0, 2)[3:]
    data.set_epoch(1)
    assert indices_seen(loader) == data.indices(1, 0, 2)


def test_batches_have_the_size_of_the_plan(packed):
    data = ShardBatches(Shards(packed, "train", plain()), lambda epoch: [Batch(2, (4, 10)), Batch(3)])
    assert [tuple(images.shape) for images, _ in data] == [(2, 3, 4, 10), (3, 3, 8, 12)]


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (2, 2), (3, 1)])
def test_evaluation_sees_each_image_once_and_fills_up(packed, world, workers):
    total = sum(N["val"])
    seen, lengths = [], []
    for rank in range(world):
        shards = Shards(packed, "val", plain())
        data = ShardBatches(shards, lambda e: [Batch(4)] * -(-total // (4 * world)), rank, world, shuffle=False)
        loader = DataLoader(data, batch_size=None, num_workers=workers)
        batches_of_rank = list(loader)
        lengths.append(len(batches_of_rank))
        for images, labels in batches_of_rank:
            assert len(images) == len(labels) == 4 and not images[labels == -1].any()
            seen += [key(image) for image in images[labels >= 0]]
    assert len(set(lengths)) == 1
    assert sorted(seen) == sorted(key(image) for image, _ in Shards(packed, "val", plain()))


def test_plans_that_do_not_fit_are_refused(packed):
    shards = Shards(packed, "train", plain())
    with pytest.raises(ValueError, match=r"the plan takes 102 images, but .*train holds 50: plan fewer batches"):
        next(iter(ShardBatches(shards, lambda e: [Batch(51)], 0, 2)))
    with pytest.raises(ValueError, match=r"takes 49 of the 50 images .* evaluation needs all"):
        next(iter(ShardBatches(shards, lambda e: [Batch(49)], shuffle=False)))
    with pytest.raises(ValueError, match="streamed completely: leave out n"):
        ShardBatches(Shards(packed, "train", plain(), n=3), uneven)
    with pytest.raises(ValueError, match=r"rank \(2\) must be .* below world \(2\)"):
        ShardBatches(shards, uneven, 2, 2)


def members(bad=()):
    """Seven samples of a shard; those in `bad` are no images."""
    for i in range(7):
        yield f"{i}.cls", b"0"
        yield f"{i}.png", b"<html>" if i in bad else png((0, 200 + i, 0))


def test_unreadable_images_in_a_shard(root):
    rewrite(root, members(bad=(2, 3)))
    with pytest.raises(BadImage, match=r"cannot decode train/00000.tar: 2: not a JPEG"):
        Shards(root, "train", plain())[2]
    shards = Shards(root, "train", plain(), reading=Reading(on_bad="replace"))
    assert key(shards[2][0]) == (0, 204) and shards.bad_indices() == [2, 3]


@pytest.mark.parametrize(("on_bad", "workers"), [("raise", 0), ("raise", 2), ("replace", 2), ("leave_out", 0)])
def test_unreadable_images_in_a_stream(root, on_bad, workers):
    rewrite(root, members(bad=(2, 3)))
    shards = Shards(root, "train", plain(), reading=Reading(on_bad=on_bad))
    data = ShardBatches(shards, lambda epoch: [Batch(25)] * 2, shuffle=False)
    loader = DataLoader(data, batch_size=None, num_workers=workers)
    if on_bad == "raise":
        with pytest.raises(BadImage, match=r"cannot decode train/00000.tar: 2: not a JPEG"):
            list(loader)
        return
    images, labels = next(iter(loader))
    assert shards.bad_indices() == [2, 3] and (labels[:2] == 0).all()
    if on_bad == "replace":
        assert key(images[2]) == key(images[3]) == key(images[4]) == (0, 204)
    else:
        assert labels[2:5].tolist() == [-1, -1, 0] and not images[2:4].any()


@pytest.mark.parametrize("n", [None, 45])
def test_unreadable_images_have_their_names_in_a_subset_too(root, n):
    """What an evaluation lists: the names of the indices that turned out bad, in whichever process."""
    rewrite(root, members(bad=(1, 2, 3)))
    shards = Shards(root, "train", plain(), n=n, seed=1, reading=Reading(on_bad="leave_out"))
    labels = [int(label) for _, label in DataLoader(shards, num_workers=2)]
    expected = [f"train/00000.tar: {i}" for i in (1, 2, 3) if n is None or i in shards.chosen]
    assert [shards.name(i) for i in shards.bad_indices()] == expected and labels.count(-1) == len(expected) > 1


def test_memory_that_runs_out_in_a_stream_names_the_image(root):
    def full(*args):
        raise MemoryError

    rewrite(root, members(bad=(0,)))
    shards = Shards(root, "train", plain(), full, reading=Reading(on_bad="replace"))
    with pytest.raises(MemoryError, match=r"train/00000.tar: 1 \(8x12 pixels\) was prepared"):  # in the place of 0
        next(iter(ShardBatches(shards, lambda epoch: [Batch(25)] * 2, shuffle=False)))


def test_names_that_are_no_utf8_are_shown_escaped_and_classes_refused(root):
    odd = os.fsdecode(b"caf\xe9")
    rewrite(root, [(f"{odd}.cls", b"0"), (f"{odd}.gif", b"GIF")], images=1)
    with pytest.raises(BadImage, match=r"cannot decode train/00000.tar: caf\\xe9: "):
        Shards(root, "train", plain())[0]
    index = json.loads((root / "index.json").read_text())
    (root / "index.json").write_text(json.dumps(index | {"classes": [odd, "dog"]}))
    with pytest.raises(ValueError, match=r"index.json: class names are not valid UTF-8: caf\\xe9; rename"):
        class_names(str(root))


def test_the_last_of_a_batch_is_replaced_by_its_first(root):
    rewrite(root, members(bad=(4,)))
    shards = Shards(root, "train", plain(), reading=Reading(on_bad="replace"))
    images, _ = next(iter(ShardBatches(shards, lambda epoch: [Batch(5)] * 10, shuffle=False)))
    assert key(images[4]) == key(images[0]) == (0, 200)


def test_a_batch_without_any_readable_image_stops(root):
    rewrite(root, members(bad=(2, 3)))
    shards = Shards(root, "train", plain(), reading=Reading(on_bad="replace"))
    data = ShardBatches(shards, lambda epoch: [Batch(2)] * 25, shuffle=False)
    with pytest.raises(BadImage, match=r"2 images in a row cannot be read, .* the last: cannot decode train/00000.tar: 3"):
        list(data)


def test_only_images_and_labels_are_read_and_nothing_is_written(root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    trap = [
        ("../../escaped.jpg", png()),
        ("../../escaped.cls", b"1"),
        ("/etc/absolute.cls", b"1"),
        ("/etc/absolute.png", png()),
    ]
    ignored = [("x.pkl", b"cos\nsystem\n(S'touch hit'\ntR."), ("x.json", b"{"), ("x.npy", b"")]
    rewrite(root, [*trap, *ignored], images=2)
    shards = Shards(root, "train", plain())
    assert [shards[i][1] for i in (0, 1)] == [1, 1] and shards.name(0) == "train/00000.tar: ../../escaped"
    assert len(list(ShardBatches(shards, lambda e: [Batch(1)] * 2))) == 2
    assert sorted(tmp_path.rglob("*")) == before


def flip(path, place):
    """Flip the lowest bit of one byte."""
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("on_bad", ["raise", "replace", "leave_out"])
@pytest.mark.parametrize("part", ["image", "label"])
def test_one_bit_that_flipped_is_noticed_when_it_is_read(root, part, on_bad):
    """Whatever is done about unreadable images: this one can be read, and would be another."""
    path, reading = root / "train" / "00001.tar", Reading(on_bad=on_bad)
    with tarfile.open(path) as tar:
        member = [item for item in tar.getmembers() if item.name.endswith(".cls") == (part == "label")][3]
    flip(path, member.offset_data + (0 if part == "label" else member.size - 10))
    key = member.name.partition(".")[0]
    shards = Shards(root, "train", plain(), reading=reading)
    assert [shards[i][1] in (0, 1) for i in range(10)] == [True] * 10
    changed = rf"train/00001.tar: image or label of {key} has changed"
    with pytest.raises(ValueError, match=rf"{changed} .*copy the shard again") as error:
        shards[10]
    assert not isinstance(error.value, BadImage) and shards.bad_indices() == []
    for workers in (0, 1):
        data = ShardBatches(Shards(root, "train", plain(), reading=reading), lambda epoch: [Batch(25)] * 2)
        with pytest.raises(ValueError, match=changed):
            list(DataLoader(data, batch_size=None, num_workers=workers))
    with pytest.raises(ValueError, match=r"00001.tar has changed since it was packed"):
        Shards(root, "train", plain()).digest()  # or an evaluation would keep the rows of other images


def test_missing_changed_and_compressed_shards(root):
    path = root / "train" / "00002.tar"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1024])
    with pytest.raises(
        ValueError, match=rf"shard .*00002.tar has {len(whole) - 1024:,} bytes, but index.json says {len(whole):,}"
    ):
        Shards(root, "train", plain())
    path.write_bytes(b"\x1f\x8b" + whole[2:])
    with pytest.raises(ValueError, match=r"00002.tar is not a tar file, or it is damaged or compressed"):
        Shards(root, "train", plain()).name(20)
    with pytest.raises(ValueError, match=r"00002.tar has changed since it was packed"):
        Shards(root, "train", plain()).verify()
    path.unlink()
    with pytest.raises(ValueError, match=r"shard .*00002.tar is missing; copy it again or pack it again"):
        Shards(root, "train", plain())
