"""Tar files and indices made to mislead: named and refused, whatever they claim."""

import io
import json
import signal
import tarfile
import zlib

import pytest
from PIL import Image

from vitrel.data import Batch, Prepare, ShardBatches, Shards
from vitrel.data.shards import pack

PLAIN = Prepare((8, 12), (0.0,) * 3, (1.0,) * 3)
NOT_A_TAR = r"train/00000.tar is not a tar file, or it is damaged or compressed"


@pytest.fixture
def root(tmp_path):
    """Shards of one file for each split, two images in each."""
    for split in ("train", "val"):
        for name in ("cat", "dog"):
            (tmp_path / "source" / split / name).mkdir(parents=True)
            Image.new("RGB", (12, 8)).save(tmp_path / "source" / split / name / "0.png")
    pack(tmp_path / "source", tmp_path / "out")
    return tmp_path / "out"


@pytest.fixture(autouse=True)
def in_time():
    """What never ends fails."""
    before = signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it hangs"))
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def png():
    file = io.BytesIO()
    Image.new("RGB", (12, 8)).save(file, "PNG")
    return file.getvalue()


def member(name, content=b"", size=None, kind=tarfile.REGTYPE):
    """A header and its content; `size` is what the header claims."""
    header = tarfile.TarInfo(name)
    header.size, header.type = len(content) if size is None else size, kind
    return header.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512)


def pax(**values):
    """An empty member whose extended header says something else."""
    header = tarfile.TarInfo("README")
    header.pax_headers = {key.replace("_", "."): value for key, value in values.items()}
    return header.tobuf(tarfile.PAX_FORMAT)


def sample(key, label=b"0"):
    return member(f"{key}.cls", label) + member(f"{key}.png", png())


def checksums(*labels):
    """Of images of `png()`, as the index has them."""
    return "".join(f"{zlib.crc32(png(), label):08x}" for label in labels)


def change(root, edit):
    index = json.loads((root / "index.json").read_text())
    edit(index)
    (root / "index.json").write_text(json.dumps(index))


@pytest.fixture(params=["by index", "streamed"])
def read(root, request):
    """The labels of the two training images of a shard that is made of the given parts."""

    def labels(*parts):
        path = root / "train" / "00000.tar"
        path.write_bytes(b"".join(parts) + bytes(2048))
        entry = {"bytes": path.stat().st_size, "crc32": checksums(0, 1)}
        change(root, lambda index: index["splits"]["train"]["shards"][0].update(entry))
        shards = Shards(root, "train", PLAIN)
        if request.param == "by index":
            return [shards[i][1] for i in range(2)]
        (batch,) = ShardBatches(shards, lambda epoch: [Batch(2)], shuffle=False)
        return batch[1].tolist()

    return labels


def test_such_a_shard_is_read(read):
    assert read(sample("a"), sample("b", b"1\n")) == [0, 1]


@pytest.mark.parametrize(
    "part",
    [
        member("README", size=-512),  # leads back to its own header
        pax(size="-512"),
        member("b.cls", b"0") + member("b.png", size=-1024),
        member("b.cls", b"0") + member("b.png", png(), size=8**11),
        member("b.cls", b"0") + member("b.png", png(), size=2**62),
        member("b.cls", b"0") + member("b.png", png(), size=2**80),
        member("name", size=2**43, kind=tarfile.GNUTYPE_LONGNAME),
        member("x", size=2**43, kind=tarfile.XHDTYPE),
        pax(size="9" * 30),
        pax(GNU_sparse_map="0,1,x", GNU_sparse_size="9"),
        sample("a"),
    ],
    ids=["loop", "pax-loop", "negative", "8GB", "4EB", "no-offset", "long-name", "pax", "pax-size", "pax-sparse", "twice"],
)
def test_impossible_headers_are_named(read, part):
    with pytest.raises(ValueError, match=f"{NOT_A_TAR} .*pack it again with vitrel pack"):
        read(sample("a"), part, sample("c"))


@pytest.mark.parametrize(
    "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE, tarfile.GNUTYPE_SPARSE]
)
def test_links_devices_and_sparse_files_are_no_images(read, kind):
    link = tarfile.TarInfo("b.png")
    link.type, link.linkname = kind, "/etc/hostname"
    with pytest.raises(ValueError, match=r"train/00000.tar holds 1 images, but index.json says 2"):
        read(sample("a"), member("b.cls", b"0"), link.tobuf(tarfile.GNU_FORMAT))


def test_more_images_than_the_index_says(read):
    with pytest.raises(ValueError, match=r"train/00000.tar holds 5 images, but index.json says 2"):
        read(*map(sample, "abcde"))


@pytest.mark.parametrize("label", [b"", b"-1", b"1.5", b"x", "\u0663".encode(), b"0" * 20 + b"1"])
def test_labels_are_short_numbers(read, label):
    with pytest.raises(ValueError, match=r"train/00000.tar: b.cls is not a class number: b'"):
        read(sample("a"), sample("b", label))


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        (sample("b", b"2"), "b has label 2, but there are 2 classes; pack it again"),
        (member("b.png", png()), "b: a sample must be one image and its .cls"),
        (sample("b") + member("b.jpg"), "b: a sample must be one image and its .cls"),
    ],
)
def test_samples_are_one_image_and_a_label_of_the_classes(read, parts, text):
    with pytest.raises(ValueError, match=f"train/00000.tar: {text}"):
        read(sample("a"), parts)


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda i: i.update(format=1), "has format 1, but this version reads format 2"),
        (lambda i: i.update(classes=["dog", "cat"]), "list of classes is empty, not sorted or has duplicates"),
        (lambda i: i.update(classes=["cat"]), "counts of train do not fit its classes"),
        (lambda i: i["splits"]["val"]["counts"].append(0), "counts of val do not fit"),
        (lambda i: i["splits"]["train"]["shards"][0].update(name="../../../etc/passwd"), "names a shard '../../../etc/passwd'"),
        (lambda i: i["splits"]["train"]["shards"][0].update(name="pipe:date"), "names a shard 'pipe:date'"),
        (lambda i: i["splits"]["train"].pop("counts"), r"index.json is damaged \(it has no entry 'counts'\)"),
        (lambda i: i["splits"]["train"]["shards"][0].pop("crc32"), r"index.json is damaged \(it has no entry 'crc32'\)"),
        (lambda i: i["splits"]["train"]["shards"][0].update(crc32="0" * 15), "00000.tar has not one checksum for each image"),
        (lambda i: i["splits"].pop("train"), "has no split 'train', only val"),
    ],
)
def test_a_damaged_index_is_refused(root, edit, text):
    change(root, edit)
    with pytest.raises(ValueError, match=text):
        Shards(root, "train", PLAIN)


def test_no_index(root):
    (root / "index.json").unlink()
    with pytest.raises(ValueError, match=r"index.json is missing: .* was not packed completely"):
        Shards(root, "train", PLAIN)


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (
            lambda train: train["shards"][0].update(images=10**12) or train.update(counts=[1, 10**12 - 1]),
            "00000.tar is too small",
        ),
        (lambda train: train.update(counts=[-1, 3]), "the counts of train do not fit"),
        (lambda train: train.update(counts=[0.5, 1.5]), "the counts of train do not fit"),
        (lambda train: train["shards"][0].update(images="2"), "the counts of train do not fit"),
        (lambda train: train.update(shards=[], counts=[0, 0]), "the counts of train do not fit"),
        (lambda train: train.update(shards=7), r"index.json is damaged \(an entry is not as vitrel pack writes it"),
    ],
)
def test_impossible_counts_are_refused(root, edit, text):
    change(root, lambda index: edit(index["splits"]["train"]))
    with pytest.raises(ValueError, match=f"{text}.*pack it again with vitrel pack"):
        Shards(root, "train", PLAIN)


@pytest.mark.parametrize(
    "text", ["{", "[" * 100_000, '{"format": 2, "classes": ["a"], "splits": []}', "1" * 5000, "[]", '{"format": 2}', "\udcff"]
)
def test_an_index_of_another_form_is_refused(root, text):
    (root / "index.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=r"index.json is damaged \("):
        Shards(root, "train", PLAIN)
