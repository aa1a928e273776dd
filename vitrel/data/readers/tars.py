"""Images in tar files, read by index: a WebDataset, or a tar of class folders.

The headers of every tar file are read once, which gives each image's offset and size; then an image is one read, on this
machine or at an address. In a WebDataset a sample is `<key>.jpg` (or another suffix of `SUFFIXES`) with `<key>.cls`, its label
as a number or a name, or `<key>.json` with "label". Without such members the class is the folder of the image in the tar, or
the name of the tar file. Nothing is extracted to disk or unpickled. Names of numbered classes are the lines of `classes.txt`
beside the tars or above their folder.

The format has checksums of headers alone. Where a file SHA256SUMS is beside the tars (`sha256sum *.tar > SHA256SUMS`), every
tar in it is compared with it before it is used, at the start of each run.
"""

import json
import re
import tarfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from torch import Tensor

from vitrel.common.files import shown
from vitrel.data.prepare import Picture
from vitrel.data.readers.addresses import file_state, is_address, list_files, open_file, read_bytes, read_text
from vitrel.data.readers.base import HEADER_READERS, ImageSet, file_checksums, file_versions
from vitrel.data.readers.classes import class_order
from vitrel.data.readers.decode import SUFFIXES, BadImage, Reading
from vitrel.data.readers.splits import NAMES, Split, of_split

BROKEN = (tarfile.TarError, MemoryError, OSError, ValueError)  # errors of tarfile for damaged headers
LABEL_BYTES = 1 << 16


class Member(NamedTuple):
    """One image in a tar file: the tar's path, its name there, offset and size in bytes, and its class as written."""

    tar: str
    name: str
    offset: int
    size: int
    label: str


class Tars(ImageSet):
    """One split of images in tar files, as a data set of (normalized float32 [3, H, W], class index) with random access.

    Args:
        root: a tar file, a folder of tars, or a pattern as "images/*.tar" or "images/{train,val}-{000..012}.tar"; paths or
            addresses.
        split: "train" or "val": by folders or names of the tars, or by the first folder inside them; otherwise the images are
            divided by `reading.val_fraction`.
        prepare, augment, reading, options: as in `ImageSet`.

    Raises:
        ValueError: no tar files, a damaged tar file, or no images of the split.
    """

    def __init__(
        self,
        root: str,
        split: Split,
        prepare: Callable[[Picture], Tensor],
        augment: Callable[..., Tensor] | None = None,
        reading: Reading = Reading(),
        **options: Any,
    ) -> None:
        members, classes = tar_members(root)
        numbers = {name: number for number, name in enumerate(classes)}
        labeled = [(member, numbers[_class(member.label, classes)]) for member in members]
        self.root = root.rstrip("/")
        samples = of_split(labeled, [_split_word(member, root) for member in members], split, reading.val_fraction, root)
        super().__init__(classes, samples, root, prepare, augment, reading=reading, **options)

    def encoded(self, index: int) -> bytes:
        """Return the bytes of an image."""
        member = self.samples[index][0]
        data = read_bytes(member.tar, member.offset, member.offset + member.size)
        if len(data) < member.size:
            raise BadImage(f"{self.name(index)} ends after {len(data):,} of {member.size:,} bytes; copy the tar file again")
        return data

    def name(self, index: int) -> str:
        """Return tar and member of an image, e.g. "train-0003.tar: 000123.jpg"."""
        member = self.samples[index][0]
        return shown(f"{member.tar.removeprefix(f'{self.root}/')}: {member.name}")

    def contents(self) -> list[str]:
        """Return one line per image, in order: its tar and member, a tab, its label."""
        return [f"{self.name(i)}\t{self.label(i)}" for i in range(len(self))]

    def versions(self) -> list[str]:
        """Return the size of each image, and the time of modification (or version) of its tar file."""
        tars = list(dict.fromkeys(member.tar for member, _ in self.samples))
        states = map(file_state, tars) if is_address(self.root) else file_versions(tars)
        times = {tar: state.partition(" ")[2] for tar, state in zip(tars, states, strict=True)}
        return [f"{member.size} {times[member.tar]}" for member, _ in self.samples]

    def checksums(self) -> list[str]:
        """Return the SHA-256 of each tar file, in order of first use."""
        return list(file_checksums(dict.fromkeys(member.tar for member, _ in self.samples)))


def tar_members(root: str) -> tuple[list[Member], list[str]]:
    """Read the headers of the tar files of `root`, several at once, and return all images and the class names.

    If every label is a whole number, it is an index into the names: the lines of classes.txt, or without that file the numbers.
    Otherwise the names are the labels in their order.

    Raises:
        ValueError: there is no tar file, or classes.txt has fewer names than the labels need.
    """
    tars = tar_files(root)
    if not tars:
        raise ValueError(f"found no tar files at {root}")
    members = _scanned(tuple(tars), tuple(map(file_state, tars) if is_address(root) else file_versions(tars)))
    labels = {member.label for member in members}
    numbered = bool(labels) and all(label.isdecimal() for label in labels)
    names = f"{tars[0].rpartition('/')[0]}/classes.txt"
    if numbered and not is_address(root):
        for place in (Path(names), Path(names).parent.parent / "classes.txt"):
            if place.is_file():
                classes = read_text(place).split("\n")
                classes = [name.strip() for name in classes if name.strip()]
                if len(classes) <= max(map(int, labels)):
                    raise ValueError(f"{place} names {len(classes)} classes, but there is a label {max(map(int, labels))}")
                return members, classes
    return members, [str(i) for i in range(max(map(int, labels)) + 1)] if numbered else class_order(labels)


@lru_cache(4)  # training, evaluation and class names need the same headers
def _scanned(tars: tuple[str, ...], versions: tuple[str, ...]) -> list[Member]:
    _check_sums(tars)
    with ThreadPoolExecutor(HEADER_READERS) as readers:
        return [member for found in readers.map(_scan, tars) for member in found]


def _check_sums(tars: Sequence[str]) -> None:
    """Raise ValueError for a local tar file that differs from its line in SHA256SUMS beside it; each file is read once."""
    expected: dict[str, str] = {}
    for folder in dict.fromkeys(Path(tar).parent for tar in tars if not is_address(tar)):
        if (sums := folder / "SHA256SUMS").is_file():
            lines = [line.split(maxsplit=1) for line in sums.read_text("utf-8").splitlines() if line.strip()]
            listed = {str(folder / line[1].removeprefix("*")): line[0].lower() for line in lines if len(line) == 2}
            expected |= {tar: listed[tar] for tar in tars if tar in listed}
    for (tar, checksum), found in zip(expected.items(), file_checksums(expected), strict=True):
        if found != checksum:
            raise ValueError(f"{tar} is damaged: it differs from its checksum in SHA256SUMS; copy it again")


def braces(pattern: str) -> list[str]:
    """Return the names that a shell would make of a pattern with braces, as "{train,val}-{00..05}.tar", in order."""
    found = re.search(r"\{(?:(\d+)\.\.(\d+)|([^{}]*,[^{}]*))\}", pattern)
    if found is None:
        return [pattern]
    first, last, words = found.groups()
    parts = words.split(",") if words else [f"{i:0{len(first)}d}" for i in range(int(first), int(last) + 1)]
    return [name for part in parts for name in braces(pattern[: found.start()] + part + pattern[found.end() :])]


def tar_files(root: str) -> list[str]:
    """Return the paths or addresses of the tar files at `root` (`Tars`), sorted; of a folder also those one level below."""
    if "{" in root:
        return [tar for part in braces(root) for tar in tar_files(part)]
    if root.endswith(".tar") and "*" not in root:
        return [root] if is_address(root) or Path(root).is_file() else []
    if "*" in root:
        folder = root.rpartition("/")[0] if "*" not in root.rpartition("/")[0] else root.partition("*")[0].rpartition("/")[0]
        return [path for path in tar_files(folder or ".") if fnmatch(path, root)]
    if is_address(root):
        return [path for path in list_files(root) if path.endswith(".tar")]
    return sorted(str(path) for pattern in ("*.tar", "*/*.tar") for path in Path(root).glob(pattern))


def _class(label: str, classes: list[str]) -> str:
    return classes[int(label)] if label.isdecimal() and label not in classes else label


def _split_word(member: Member, root: str) -> str:
    """The name of a split in the tar's folder or name, or as the first folder in the tar; "" without."""
    path = PurePosixPath(member.tar.removeprefix(root.rstrip("/")) if member.tar != root else PurePosixPath(root).name)
    words = [*path.parts[:-1], *path.stem.replace("_", "-").split("-"), *PurePosixPath(member.name).parts[:1]]
    return next((word for word in words if word in NAMES), "")


def _scan(tar: str) -> list[Member]:
    """The images of one tar file, in order; ValueError for a damaged file, or images without a label."""
    images: list[tuple[str, int, int]] = []
    labels: dict[str, str] = {}
    try:
        with open_file(tar) as file, tarfile.open(fileobj=file, mode="r:") as archive:
            while (member := archive.next()) is not None:
                archive.members = []  # otherwise tarfile keeps every header in memory
                if member.size < 0:  # the next header would be this one again, in an endless loop
                    raise ValueError(f"{member.name} has {member.size} bytes")
                if not member.isfile() or member.issparse():  # a sparse member can claim any size in a small file
                    continue
                folder, _, base = member.name.rpartition("/")
                key, suffix = f"{folder}/{base.partition('.')[0]}", f".{base.partition('.')[2]}".lower()
                if PurePosixPath(base).suffix.lower() in SUFFIXES and not base.startswith("."):
                    images.append((member.name, member.offset_data, member.size))
                elif suffix in (".cls", ".json") and member.size <= LABEL_BYTES:
                    text = archive.extractfile(member).read().decode(errors="replace").strip()
                    label = str(json.loads(text).get("label", "")) if suffix == ".json" else text
                    if label:
                        labels.setdefault(key, label)
    except BROKEN as error:
        reason = str(error) or "a member of an impossible size"
        raise ValueError(f"{tar} is not a tar file, or it is damaged or compressed ({reason}): write it again") from error
    found = []
    for name, offset, size in images:
        folder, _, base = name.rpartition("/")
        label = labels.get(f"{folder}/{base.partition('.')[0]}")
        if label is None and labels:
            raise ValueError(f"{tar}: {shown(name)} has no label: a sample of a WebDataset is an image and its .cls or .json")
        found.append(Member(tar, name, offset, size, label or PurePosixPath(folder).name or PurePosixPath(tar).stem))
    return found
