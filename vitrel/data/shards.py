"""Images in WebDataset tar shards on a local disk: `root/index.json`, `root/train/00000.tar`, `root/val/00000.tar`, ...

A sample consists of `<key>.jpg` (or another suffix of `SUFFIXES`) and `<key>.cls`, the label as a number; members with other
suffixes are ignored. Nothing is extracted to disk or unpickled: names of members are used in messages only, never as paths.

The index has the SHA-256 of every shard, and the CRC-32 of every image with its label, which is compared whenever an image is
read.
"""

import json
import re
import tarfile
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from io import BytesIO
from itertools import accumulate
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.functional import resize, to_pil_image

from vitrel.common.extras import optional_import
from vitrel.common.files import atomic_write, shown
from vitrel.data.base import ImageSet, Split, file_checksums, sha256, subset
from vitrel.data.decode import MAX_PIXELS, SUFFIXES, BadImage, Reading, decode, names_image, open_image
from vitrel.data.folder import Folder
from vitrel.data.prepare import INTERPOLATIONS

INDEX = "index.json"
FORMAT = 2
QUALITY = 95  # of JPEGs that `pack` makes smaller
LABEL_BYTES = 20
SAMPLE_BYTES = 2 * 512  # minimum size of a sample: two tar headers
BROKEN = (tarfile.TarError, MemoryError, OSError, ValueError)  # errors of tarfile for damaged headers
REPACK = "pack it again with vitrel pack"


CRC_DIGITS = 8  # hexadecimal digits of a checksum in the index


class Sample(NamedTuple):
    """One encoded image in a shard: key, label, its offset and size in bytes, and its `checksum` when it was packed."""

    key: str
    label: int
    offset: int
    size: int
    checksum: str = ""


def checksum(data: bytes, label: int) -> str:
    """Return the CRC-32 of an encoded image, with the label as start value, as 8 hexadecimal digits."""
    return f"{zlib.crc32(data, label):0{CRC_DIGITS}x}"


class Shards(ImageSet):
    """One split of a folder of shards, as a data set of (normalised float32 [3, H, W], class index) with random access.

    An image's index is its position in the sequence of all shards, in the order of `index.json`. The headers of a shard are
    scanned when its first image is read. `ShardBatches` reads shards sequentially, which is faster for training on more data
    than memory.

    Args:
        root: folder with `index.json`, as `vitrel pack` writes it.
        split: "train" or "val".
        prepare, augment: as in `ImageSet`.
        n, seed: number of randomly chosen images, by default all, and seed of this choice.
        reading: decoder, pixel limit, and handling of unreadable images.

    Raises:
        ValueError: the index is missing or damaged, or a shard is missing or its size differs from the index.
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

    def encoded(self, index: int) -> tuple[bytes, int, str]:
        """Return (encoded image, label, shard and key for messages) of an image."""
        shard, sample = self._find(index)
        with open(self.path(shard), "rb") as file:
            return self.data_of(sample, shard, file), sample.label, self.sample_name(shard, sample)

    def data_of(self, sample: Sample, shard: int, file: IO[bytes]) -> bytes:
        """Return the encoded image of a sample; file: the shard, open. ValueError if it or its label has changed."""
        file.seek(sample.offset)
        data = file.read(sample.size)
        if checksum(data, sample.label) != sample.checksum:
            raise ValueError(
                f"{self.path(shard)}: image or label of {shown(sample.key)} has changed since it was packed (CRC-32); copy the "
                f"shard again or {REPACK}"
            )
        return data

    def label(self, index: int) -> int:
        """Return the label of an image, without decoding it."""
        return self._find(index)[1].label

    def name(self, index: int) -> str:
        """Return shard and key of an image, e.g. "train/00003.tar: 000123"; scans the headers of the shard."""
        return self.sample_name(*self._find(index))

    def class_counts(self) -> list[int]:
        """Return the number of images of each class."""
        return list(self.counts) if self.chosen is None else super().class_counts()

    def contents(self) -> list[str]:
        """Return one line per shard, in order: its name, a tab, its SHA-256 when it was packed; independent of `n`."""
        return [f"{shard['name']}\t{shard.get('sha256')}" for shard in self.shards]

    def names(self) -> list[str]:
        """Return shard and key of each image; scans all headers."""
        return [self.name(i) for i in range(len(self))]

    def checksums(self) -> list[str]:
        """Return one text: the list of indices chosen by `n`, or "None" for all; `contents` has the shards' SHA-256."""
        return [str(self.chosen)]

    def path(self, shard: int) -> Path:
        """Return the file of shard number `shard`."""
        return self.folder / self.shards[shard]["name"]

    def samples(self, shard: int) -> Iterator[Sample]:
        """Yield the samples of a shard in order, from its headers; ValueError if labels or number contradict the index."""
        classes, images, expected = len(self.classes), 0, self.shards[shard]["images"]
        checksums = self.shards[shard]["crc32"]
        previous = None  # yielded one step late, so that the last sample comes only after the number of images was checked
        for sample in _scan(self.path(shard)):
            if sample.label >= classes:
                where = self.sample_name(shard, sample)
                raise ValueError(f"{where} has label {sample.label}, but there are {classes} classes; {REPACK}")
            start = CRC_DIGITS * images
            images += 1
            if previous is not None and images <= expected:
                yield previous
            previous = sample._replace(checksum=checksums[start : start + CRC_DIGITS])
        if images != expected:
            raise ValueError(f"{self.path(shard)} holds {images} images, but {INDEX} says {expected}; {REPACK}")
        if previous is not None:
            yield previous

    def digest(self) -> str:
        """Return a SHA-256 of the classes, `contents` and `checksums`, after `verify`."""
        self.verify()
        return super().digest()

    def verify(self) -> None:
        """Raise ValueError if the SHA-256 of a shard differs from the index; reads every shard."""
        paths = [self.path(i) for i in range(len(self.shards))]
        for path, shard, found in zip(paths, self.shards, file_checksums(paths), strict=True):
            if found != shard["sha256"]:
                raise ValueError(f"{path} has changed since it was packed (SHA-256); copy it again or {REPACK}")

    def _find(self, index: int) -> tuple[int, Sample]:
        """(number of the shard, sample) of an image; scans the shard's headers the first time."""
        if self.chosen is not None:
            index = self.chosen[index]
        shard = bisect_right(self.starts, index) - 1
        if shard not in self._scanned:
            self._scanned[shard] = list(self.samples(shard))
        return shard, self._scanned[shard][index - self.starts[shard]]

    def sample_name(self, shard: int, sample: Sample) -> str:
        """Return shard and key of a sample, e.g. "train/00003.tar: 000123"."""
        return f"{self.folder.name}/{self.shards[shard]['name']}: {shown(sample.key)}"


def shard_index(root: str | Path) -> dict[str, Any]:
    """Return the content of `root/index.json`; ValueError if it is missing, damaged or contradictory."""
    path = Path(root) / INDEX
    if not path.is_file():
        raise ValueError(f"{path} is missing: {root} was not packed completely; {REPACK}")
    try:
        index = json.loads(path.read_text())
    except (RecursionError, ValueError) as error:
        raise ValueError(f"{path} is damaged ({error}); {REPACK}") from error
    try:
        _check_index(index, path)
    except KeyError as error:
        raise ValueError(f"{path} is damaged (it has no entry {error}); {REPACK}") from error
    except (AttributeError, LookupError, TypeError) as error:
        raise ValueError(f"{path} is damaged (an entry is not as vitrel pack writes it: {error}); {REPACK}") from error
    return index


def _check_index(index: dict[str, Any], path: Path) -> None:
    if index["format"] != FORMAT:
        raise ValueError(f"{path} has format {index['format']}, but this version reads format {FORMAT}; {REPACK}")
    classes = index["classes"]
    if not classes or classes != sorted(set(classes)) or not all(isinstance(name, str) for name in classes):
        raise ValueError(f"{path}: the list of classes is empty, not sorted or has duplicates; {REPACK}")
    if invalid := [shown(name) for name in classes if shown(name) != name]:
        raise ValueError(f"{path}: class names are not valid UTF-8: {', '.join(invalid)}; rename their folders and {REPACK}")
    for name, split in index["splits"].items():
        counts, shards = split["counts"], split["shards"]
        images = [shard["images"] for shard in shards]
        valid = all(type(number) is int and number >= 0 for number in (*counts, *images))
        if not valid or not images or 0 in images or len(counts) != len(classes) or sum(counts) != sum(images):
            raise ValueError(f"{path}: the counts of {name} do not fit its classes and shards; {REPACK}")
        for shard in shards:
            if not re.fullmatch(r"\d+\.tar", shard["name"]):  # a plain file name cannot lead out of the folder
                raise ValueError(f"{path} names a shard {shard['name']!r}; shards are called 00000.tar, 00001.tar, ...")
            if shard["images"] * SAMPLE_BYTES > shard["bytes"]:
                raise ValueError(f"{path}: {shard['name']} is too small for {shard['images']:,} images; {REPACK}")
            if len(shard["crc32"]) != CRC_DIGITS * shard["images"]:
                raise ValueError(f"{path}: {shard['name']} has not one checksum for each image; {REPACK}")


def _check_size(path: Path, size: int) -> None:
    if not path.is_file():
        raise ValueError(f"shard {path} is missing; copy it again or {REPACK}")
    if path.stat().st_size != size:
        raise ValueError(
            f"shard {path} has {path.stat().st_size:,} bytes, but {INDEX} says {size:,}; copy it again or {REPACK}"
        )


def _scan(path: Path) -> Iterator[Sample]:
    """Yield every sample of a tar file that has an image, from its headers, reading the labels but no images.

    ValueError for a damaged file, and for a sample with several images or without a valid label.
    """
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
                raise ValueError(f"{where}: a sample must be one image and its .cls; {REPACK}")
            yield Sample(sample["__key__"], _label(tar, sample["cls"], where), images[0].offset_data, images[0].size)


def _members(tar: tarfile.TarFile, path: Path) -> Iterator[dict[str, Any]]:
    """Yield the regular files of a tar file in webdataset's format, but with the header (TarInfo) instead of the data."""
    while True:
        try:
            member = tar.next()
        except BROKEN as error:
            raise _damaged(path, error) from error
        if member is None:
            return
        tar.members = []  # otherwise tarfile keeps every header in memory
        if member.size < 0:  # the next header would be this one again, in an endless loop
            raise _damaged(path, f"{member.name} has {member.size} bytes")
        if member.isfile() and not member.issparse():  # a sparse member can claim any size in a small file
            yield {"fname": member.name, "data": member, "__url__": str(path)}


def _label(tar: tarfile.TarFile, member: tarfile.TarInfo, where: str) -> int:
    text = tar.extractfile(member).read(LABEL_BYTES).strip()
    if not text.isdigit() or member.size > LABEL_BYTES:
        raise ValueError(f"{where}.cls is not a class number: {text!r}; {REPACK}")
    return int(text)


def _damaged(path: Path, reason: object) -> ValueError:
    text = str(reason) or "a member of an impossible size"
    return ValueError(f"{path} is not a tar file, or it is damaged or compressed ({text}); {REPACK}")


class Encode(Dataset):
    """A data set of encoded images (suffix without dot, bytes, label, error), checked and optionally resized.

    The error is "" for a good image; for a bad one it is the message, and the bytes are empty.

    Args:
        samples: (path, label) of each image.
        short_side: resize images with a longer shorter side to this number of pixels (bicubic, antialiased) and encode them as
            JPEG of quality 95 without chroma subsampling; None keeps the original bytes.
        check: decode every image to find errors, which `short_side` does in any case; without either, only files that cannot
            be opened are errors, and `max_pixels` has no effect.
        max_pixels: images with more pixels are errors.
    """

    def __init__(self, samples: Sequence[tuple[str, int]], short_side: int | None, check: bool, max_pixels: int) -> None:
        self.samples, self.short_side, self.check, self.max_pixels = samples, short_side, check, max_pixels

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[str, bytes, int, str]:
        path, label = Path(self.samples[index][0]), self.samples[index][1]
        ending, name = path.suffix[1:].lower(), shown(path)
        try:
            if self.check or self.short_side:
                image = decode(path, self.max_pixels)
                if self.short_side and min(image.shape[-2:]) > self.short_side:
                    return "jpg", self._smaller(image, name), label, ""
            with names_image(lambda: f"{name} was read"), open_image(path, name) as file:
                return ending, file.read(), label, ""
        except BadImage as error:
            return ending, b"", label, str(error)

    def _smaller(self, image: Tensor, name: str) -> bytes:
        with names_image(lambda: f"{name} ({image.shape[-2]}x{image.shape[-1]} pixels) was resized"):
            small = resize(image, [self.short_side], INTERPOLATIONS["bicubic"], antialias=True)
            file = BytesIO()
            to_pil_image(small).save(file, "JPEG", quality=QUALITY, subsampling=0)
            return file.getvalue()


def pack(
    source: Path,
    out: Path,
    splits: Sequence[str] | None = None,
    *,
    shard_bytes: float = 100e6,
    images_per_shard: int | None = None,
    short_side: int | None = None,
    seed: int = 0,
    check: bool = True,
    max_pixels: int = MAX_PIXELS,
    workers: int = 0,
    follow_links: bool = False,
    advance: Callable[[str, int, int], None] = lambda split, done, total: None,
) -> dict[str, Any]:
    """Write the shards `out/{train,val}/00000.tar`, ... and at last `out/index.json`; return the content of the index.

    Args:
        source: folder that holds `train/<class>/` and `val/<class>/`.
        out: folder to write; must not exist or be empty.
        splits: "train", "val" or both; by default those in `source`.
        shard_bytes: a shard ends when its images have at least this number of bytes.
        images_per_shard: number of images per shard, instead of `shard_bytes`.
        short_side, check, max_pixels: as in `Encode`.
        seed: seed of the order of images, which mixes the classes of a split.
        workers: processes that read and check images.
        follow_links: as in `Reading`.
        advance: called after each image with (split, number of images done, number of images).

    Raises:
        ValueError: `out` is not empty, or images cannot be read; the text lists them, and no index is written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not empty, and is not overwritten: name another folder or delete it")
    splits = splits or [name for name in ("train", "val") if (source / name).is_dir()] or ["train"]
    reading = Reading(follow_links=follow_links)
    folders = {split: Folder(source, split, prepare=lambda image: image, reading=reading) for split in splits}
    limits = {"maxcount": images_per_shard or 10**12, "maxsize": np.inf if images_per_shard else shard_bytes}
    index: dict[str, Any] = {"format": FORMAT, "classes": folders[splits[0]].classes, "splits": {}}
    bad: list[str] = []
    for split, folder in folders.items():
        order = np.random.default_rng(seed).permutation(len(folder))
        encode = Encode([folder.samples[i] for i in order], short_side, check, max_pixels)
        images = DataLoader(encode, batch_size=None, num_workers=workers)
        shards = _write(out / split, _readable(images, bad, partial(advance, split)), limits)
        index["splits"][split] = {"counts": folder.class_counts(), "shards": shards}
    if bad:
        listed = "\n".join(bad[:20]) + (f"\nand {len(bad) - 20} more" if len(bad) > 20 else "")
        raise ValueError(f"{len(bad)} images cannot be packed, so {out} has no index and cannot be used; delete it:\n{listed}")
    with atomic_write(out / INDEX) as part:
        part.write_text(json.dumps(index, indent=1) + "\n")
    return index


def _readable(images: DataLoader, bad: list[str], advance: Callable[[int, int], None]) -> Iterator[dict[str, Any]]:
    """Yield the images without an error as webdataset's samples, in order; append the error texts of the others to `bad`.

    advance: called after every image with (number of images done, number of images).
    """
    for done, (ending, data, label, error) in enumerate(images, 1):
        if error:
            bad.append(error)
        else:
            yield {"__key__": f"{done - 1:08d}", ending: data, "cls": str(label).encode()}
        advance(done, len(images))


def _write(folder: Path, samples: Iterator[dict[str, Any]], limits: dict[str, float]) -> list[dict[str, Any]]:
    """Write the samples as shards into a new folder; return the index's entry for each shard."""
    with optional_import():
        from webdataset import ShardWriter

    shards: list[dict[str, Any]] = []
    checksums: list[str] = []  # of the images in the current shard

    def closed(name: str) -> None:
        path = Path(name)
        crc32 = "".join(checksums)
        checksums.clear()
        entry = {"name": path.name, "images": writer.count, "bytes": path.stat().st_size}
        shards.append(entry | {"sha256": sha256(path), "crc32": crc32})

    folder.mkdir(parents=True)
    pattern = str(folder.resolve()).replace("%", "%%") + "/%05d.tar"
    with ShardWriter(pattern, post=closed, verbose=0, encoder=False, mtime=0, **limits) as writer:
        for sample in samples:
            writer.write(sample)  # may close the former shard first
            [data] = (value for ending, value in sample.items() if ending not in ("__key__", "cls"))
            checksums.append(checksum(data, int(sample["cls"])))
    return shards
