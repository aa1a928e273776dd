"""Images in tar files of class folders, read by index: nothing is extracted to disk, and nothing is written beside the data.

timm finds the images in a tar, for which it reads the tar once when a run starts; then an image is one read. The class is the
folder of an image in the tar, or the name of the tar in which it lies without a folder, also of a tar within a tar.
WebDatasets are read by `vitrel.data.readers.hub`.
"""

import os
import tarfile
from collections.abc import Sequence
from functools import lru_cache
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from timm.data.readers.reader_image_in_tar import extract_tarinfos

from vitrel.common.files import shown
from vitrel.data.readers.base import Reader
from vitrel.data.readers.classes import class_order
from vitrel.data.readers.decode import SUFFIXES, Reading, open_image
from vitrel.data.readers.files import below, file_states
from vitrel.data.readers.folder import hidden
from vitrel.data.readers.splits import Split, of_split, split_word

END = bytes(1024)  # of every whole tar file
FIRST = 20  # members that tell a WebDataset from a tar of class folders


class Member(NamedTuple):
    """One image in a tar file: the tar's path, its name there, offset and size in bytes, and its class name."""

    tar: str
    name: str
    offset: int
    size: int
    label: str


class Tars(Reader):
    """Reader of images in tar files: the source of an image is a `Member`."""

    def encoded(self, source: Member) -> bytes:
        """Return the encoded bytes of an image; `BadImage` if its tar cannot be opened."""
        with open_image(source.tar, self.title(source)) as file:
            file.seek(source.offset)
            return file.read(source.size)

    def name(self, source: Member) -> str:
        """Return tar and member of an image, e.g. "train.tar: cat/12.jpg"."""
        return shown(f"{_below(source.tar, self.root)}: {source.name}")

    title = name

    def states(self, sources: Sequence[Member]) -> list[str]:
        """Return "SIZE TIME" of each image: its bytes, and its tar's time of modification in ns ("" if unreachable)."""
        tars = list(dict.fromkeys(member.tar for member in sources))
        times = {tar: state.partition(" ")[2] for tar, state in zip(tars, file_states(tars), strict=True)}
        return [f"{member.size} {times[member.tar]}" for member in sources]


def tar_reader(root: str, split: Split, reading: Reading) -> Tars:
    """Return the images of a split in a tar file, or in a folder of tars.

    Folders or names of the tars name their split, or else the first folder inside them; otherwise the images are divided by
    `reading.val_fraction`. ValueError for a damaged or compressed tar, one without images, or no images of the split.
    """
    root = root.rstrip("/")
    tars = tar_files(root)
    members = [member for tar, state in zip(tars, file_states(tars), strict=True) for member in _members(tar, state)]
    classes = class_order({member.label for member in members})
    numbers = {name: number for number, name in enumerate(classes)}
    words = [split_word(_below(member.tar, root), member.name) for member in members]
    labeled = [(member, numbers[member.label]) for member in members]
    return Tars(classes, of_split(labeled, words, split, reading.val_fraction, root), root, root)


def _below(tar: str, root: str) -> str:
    """Return the path of a tar below the data's folder; its name if it is the data itself."""
    return PurePosixPath(tar).name if tar == root else below(tar, root)


def tar_files(root: str) -> list[str]:
    """Return [`root`] if it is a tar file, or else the tar files in this folder and in those directly in it, sorted."""
    if root.endswith(".tar"):
        return [root] if Path(root).is_file() else []
    return sorted(str(path) for pattern in ("*.tar", "*/*.tar") for path in Path(root).glob(pattern))


def is_web_dataset(tar: str) -> bool:
    """Return whether one of a tar's FIRST members is a WebDataset's label, as `0001.cls`; False if it cannot be read."""
    try:
        with tarfile.open(tar, "r:") as archive:
            return any(member.name.endswith(".cls") for member in islice(archive, FIRST))
    except (tarfile.TarError, OSError, ValueError):  # `tar_reader` says what is wrong
        return False


@lru_cache(64)  # training, evaluation and class names need the same
def _members(tar: str, state: str) -> list[Member]:
    """Return the images of one tar file, without hidden ones; ValueError if it is damaged, compressed or has none.

    The class of an image is the name of its folder, or else of the tar that holds it, also one within this tar; ValueError if
    that tar's name is a split's. The list is cached by path and `state`, its size and time: a changed file is read again.
    """
    try:
        found = extract_tarinfos(tar, cache_tarinfo=False, extensions=SUFFIXES)[0]
        with open(tar, "rb") as file:
            file.seek(-len(END), os.SEEK_END)
            if file.read() != END:
                raise tarfile.ReadError("its end is missing")
    except (tarfile.TarError, OSError, ValueError) as error:
        reason = f"it has no image with {', '.join(SUFFIXES)}" if "unpack" in str(error) else error
        raise ValueError(
            f"{tar} cannot be read ({reason}): write an uncompressed tar of class folders, as tar -cf {tar} -C FOLDER ."
        ) from error
    members = []
    for info, _, inner in found:
        path = PurePosixPath(info.path)
        if any(map(hidden, path.parts)):
            continue
        start, stem = (0, PurePosixPath(tar).stem) if inner is None else (inner.offset_data, PurePosixPath(inner.path).stem)
        if not path.parent.name and split_word(stem):
            raise ValueError(f"{tar}: {shown(path)} is in no class folder")
        members.append(Member(tar, str(path), start + info.offset_data, info.size, path.parent.name or stem))
    return members
