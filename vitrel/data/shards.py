"""Images in WebDataset tar shards on a local disk: `root/index.json`, `root/train/00000.tar`, `root/val/00000.tar`, ...

A sample is `<key>.jpg` (or another of `SUFFIXES`) and `<key>.cls`, the label as a number; members with other endings are passed
over. Nothing is ever extracted or unpickled: a member's name is a name in messages and no path.
"""

import hashlib
import json
import re
import tarfile
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from vitrel.data.base import ImageSet, subset
from vitrel.data.decode import SUFFIXES, Reading, decode, image_size
from vitrel.data.folder import Split
from vitrel.extras import optional_import
from vitrel.files import shown

INDEX = "index.json"
FORMAT = 1
LABEL_BYTES = 20
SAMPLE_BYTES = 2 * 512  # two headers, at least
BROKEN = (tarfile.TarError, MemoryError, OSError, ValueError)  # what tarfile raises for headers with impossible numbers
REPACK = "pack it again with vitrel pack"


class Sample(NamedTuple):
    """Where one encoded image lies in its shard: key, label, and offset and size in bytes."""

    key: str
    label: int
    offset: int
    size: int


class Shards(ImageSet):
    """One split of a folder of shards: items are (float32 [3, H, W] normalised, class index), by index.

    An image's index is its position when the shards are read one after the other, as `index.json` lists them. The headers of a
    shard are scanned when the first of its images is asked for. To train on more shards than memory, read them in order:
    `ShardBatches`.

    Args:
        root: folder with `index.json`, as `vitrel pack` writes it.
        split: "train" or "val".
        prepare: uint8 [3, h, w] to the item's image, when nothing is augmented.
        augment: (uint8 [3, h, w], epoch, index, repeat, size) to the item's image; takes the place of `prepare`.
        n: take only n images, drawn by `seed`; all by default.
        seed: of that draw.
        reading: decoder, pixel limit, and what happens to unreadable images.

    Raises:
        ValueError: where the index is missing or damaged, or a shard is missing or has another size than the index says.
    """

    def __init__(
        self,
        root: str | Path,
        split: Split,
        prepare: Callable[[Tensor], Tensor],
        augment: Callable[..., Tensor] | None = None,
        n: int | None = None,
        seed: int = 0,
        reading: Reading = Reading(),
    ) -> None:
        index = shard_index(root)
        if split not in index["splits"]:
            raise ValueError(f"{Path(root) / INDEX} has no split {split!r}, only {', '.join(index['splits'])}; {REPACK}")
        self.folder = Path(root) / split
        self.shards = index["splits"][split]["shards"]
        self.counts = index["splits"][split]["counts"]
        self.starts = [0, *accumulate(shard["images"] for shard in self.shards)]
        for shard in self.shards:
            _check_size(self.folder / shard["name"], shard["bytes"])
        self.chosen = None if n is None else subset(self.starts[-1], n, seed, str(self.folder))
        self._scanned: dict[int, list[Sample]] = {}
        super().__init__(index["classes"], self.starts[-1] if n is None else n, prepare, augment, reading)

    def read(self, index: int) -> tuple[Tensor, int]:
        """(uint8 [3, h, w], label) of an image; `BadImage` where it cannot be decoded."""
        data, label, name = self._encoded(index)
        return decode(data, self.reading.max_pixels, self.reading.decoder, name), label

    def image_size(self, index: int) -> tuple[int, int]:
        """(height, width) of an image, pixels, without decoding it; `BadImage` where its header cannot be read."""
        data, _, name = self._encoded(index)
        return image_size(data, self.reading.max_pixels, name)

    def label(self, index: int) -> int:
        """The label of an image, without decoding it."""
        return self._find(index)[1].label

    def name(self, index: int) -> str:
        """The shard and the key of an image, found by a scan of the shard's headers: "train/00003.tar: 000123"."""
        return self.sample_name(*self._find(index))

    def class_counts(self) -> list[int]:
        """Number of images of each class."""
        return list(self.counts) if self.chosen is None else super().class_counts()

    def contents(self) -> list[str]:
        """Of each shard in order its name, a tab and the SHA-256 that it was packed with; which images are taken is `n`'s."""
        return [f"{shard['name']}\t{shard.get('sha256')}" for shard in self.shards]

    def path(self, shard: int) -> Path:
        """The file of a shard."""
        return self.folder / self.shards[shard]["name"]

    def samples(self, shard: int) -> Iterator[Sample]:
        """The samples of a shard in order, from its headers; ValueError where they are not what the index says."""
        classes, images, says = len(self.classes), 0, self.shards[shard]["images"]
        held = None  # one behind, so that the last is given out once the end was seen
        for sample in _scan(self.path(shard)):
            if sample.label >= classes:
                where = self.sample_name(shard, sample)
                raise ValueError(f"{where} has label {sample.label}, but there are {classes} classes; {REPACK}")
            images += 1
            if held is not None and images <= says:
                yield held
            held = sample
        if images != says:
            raise ValueError(f"{self.path(shard)} holds {images} images and {INDEX} says {says}; {REPACK}")
        if held is not None:
            yield held

    def verify(self) -> None:
        """ValueError where a shard's bytes are not those that were packed (SHA-256); reads every shard."""
        for i, shard in enumerate(self.shards):
            if sha256(self.path(i)) != shard["sha256"]:
                raise ValueError(f"{self.path(i)} has changed since it was packed (SHA-256); {REPACK}")

    def _encoded(self, index: int) -> tuple[bytes, int, str]:
        """(encoded image, label, name)."""
        shard, sample = self._find(index)
        with open(self.path(shard), "rb") as file:
            file.seek(sample.offset)
            return file.read(sample.size), sample.label, self.sample_name(shard, sample)

    def _find(self, index: int) -> tuple[int, Sample]:
        if self.chosen is not None:
            index = self.chosen[index]
        shard = bisect_right(self.starts, index) - 1
        if shard not in self._scanned:
            self._scanned[shard] = list(self.samples(shard))
        return shard, self._scanned[shard][index - self.starts[shard]]

    def sample_name(self, shard: int, sample: Sample) -> str:
        """The shard and the key of a sample: "train/00003.tar: 000123"."""
        return f"{self.folder.name}/{self.shards[shard]['name']}: {shown(sample.key)}"


def shard_index(root: str | Path) -> dict[str, Any]:
    """The checked content of `root/index.json`; ValueError where it is missing, damaged, or its classes and counts disagree."""
    path = Path(root) / INDEX
    if not path.is_file():
        raise ValueError(f"{path} is missing: {root} was not packed to its end; {REPACK}")
    try:
        index = json.loads(path.read_text())
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error!r}); {REPACK}") from error
    try:
        _check_index(index, path)
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error!r}); {REPACK}") from error
    return index


def _check_index(index: dict[str, Any], path: Path) -> None:
    if index["format"] != FORMAT:
        raise ValueError(f"{path} has format {index['format']}, and this version reads {FORMAT}; {REPACK}")
    classes = index["classes"]
    if not classes or classes != sorted(set(classes)) or not all(isinstance(name, str) for name in classes):
        raise ValueError(f"{path} does not list its classes once each and sorted; {REPACK}")
    if strange := [shown(name) for name in classes if shown(name) != name]:
        raise ValueError(f"{path} names classes that are no UTF-8: {', '.join(strange)}; rename their folders and {REPACK}")
    for name, split in index["splits"].items():
        counts, shards = split["counts"], split["shards"]
        images = [shard["images"] for shard in shards]
        whole = all(type(number) is int and number >= 0 for number in (*counts, *images))
        if not whole or not images or 0 in images or len(counts) != len(classes) or sum(counts) != sum(images):
            raise ValueError(f"{path}: the counts of {name} do not fit its classes and shards; {REPACK}")
        for shard in shards:
            if not re.fullmatch(r"\d+\.tar", shard["name"]):  # a plain file name, nothing that leads out of the folder
                raise ValueError(f"{path} names a shard {shard['name']!r}; shards are called 00000.tar, 00001.tar, ...")
            if shard["images"] * SAMPLE_BYTES > shard["bytes"]:
                raise ValueError(f"{path}: {shard['name']} is too small for {shard['images']:,} images; {REPACK}")


def sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_size(path: Path, size: int) -> None:
    if not path.is_file():
        raise ValueError(f"shard {path} is missing; copy it again or {REPACK}")
    if path.stat().st_size != size:
        raise ValueError(f"shard {path} has {path.stat().st_size:,} bytes and {INDEX} says {size:,}; copy it again or {REPACK}")


def _scan(path: Path) -> Iterator[Sample]:
    """Every sample of a tar file, from its headers; only labels are read."""
    with optional_import():
        from webdataset.tariterators import group_by_keys

    def refuse(error: Exception) -> bool:
        raise _damaged(path, error.args[0])

    endings = {suffix[1:] for suffix in SUFFIXES}
    try:
        tar = tarfile.open(path, "r:")  # noqa: SIM115 (closed below)
    except BROKEN as error:
        raise _damaged(path, error) from error
    with tar:
        for sample in group_by_keys(_members(tar, path), handler=refuse):
            images = [member for ending, member in sample.items() if ending in endings]
            if not images:
                continue
            where = f"{path.parent.name}/{path.name}: {sample['__key__']}"
            if len(images) > 1 or "cls" not in sample:
                raise ValueError(f"{where} is not one image and its .cls; {REPACK}")
            yield Sample(sample["__key__"], _label(tar, sample["cls"], where), images[0].offset_data, images[0].size)


def _members(tar: tarfile.TarFile, path: Path) -> Iterator[dict[str, Any]]:
    """Plain files as webdataset groups them, but with the header in the place of the content."""
    while True:
        try:
            member = tar.next()
        except BROKEN as error:
            raise _damaged(path, error) from error
        if member is None:
            return
        tar.members = []  # otherwise it keeps every header
        if member.size < 0:  # leads back to itself, for ever
            raise _damaged(path, f"{member.name} has {member.size} bytes")
        if member.isfile() and not member.issparse():  # a sparse member of a small file can claim any size
            yield {"fname": member.name, "data": member, "__url__": str(path)}


def _label(tar: tarfile.TarFile, member: tarfile.TarInfo, where: str) -> int:
    text = tar.extractfile(member).read(LABEL_BYTES).strip()
    if not text.isdigit() or member.size > LABEL_BYTES:
        raise ValueError(f"{where}.cls is not a class number: {text!r}; {REPACK}")
    return int(text)


def _damaged(path: Path, what: object) -> ValueError:
    return ValueError(f"{path} is no tar file, or a damaged or compressed one ({what}); {REPACK}")
