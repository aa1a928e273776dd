"""Images in tar files of class folders, read by index: nothing is extracted to disk, and nothing is written beside the data.

timm's reader finds the images in a tar, for which it reads the tar once when a run starts; then an image is one read. The class
is the folder of an image in the tar, or the name of the tar in which it lies without a folder, also of a tar within a tar.
WebDatasets are read by `vitrel.data.readers.hub`.
"""

import os
import tarfile
from collections.abc import Callable
from functools import lru_cache
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from timm.data.readers import get_img_extensions, set_img_extensions
from timm.data.readers.reader_image_in_tar import ReaderImageInTar
from torch import Tensor

from vitrel.common.files import shown
from vitrel.data.prepare import Picture
from vitrel.data.readers.base import ImageSet, file_checksums, file_versions
from vitrel.data.readers.classes import class_order
from vitrel.data.readers.decode import SUFFIXES, BadImage, Reading, open_image
from vitrel.data.readers.folder import hidden
from vitrel.data.readers.splits import Split, of_split, split_word

END = bytes(1024)  # of every whole tar file
FIRST = 20  # members that tell a WebDataset from a tar of class folders
FIELDS = (".cls", ".json", ".txt")  # of a WebDataset's samples, beside the image


class Member(NamedTuple):
    """One image in a tar file: the tar's path, its name there, offset and size in bytes, and its class."""

    tar: str
    name: str
    offset: int
    size: int
    label: str


class Tars(ImageSet):
    """One split of images in tar files, as a data set of (normalized float32 [3, H, W], class index) with random access.

    Args:
        root: a tar file, or a folder of tars.
        split: "train" or "val": by folders or names of the tars, or by the first folder inside them; otherwise the images are
            divided by `reading.val_fraction`.
        prepare, augment, reading, options: as in `ImageSet`.

    Raises:
        ValueError: a damaged or compressed tar file, one without images, or no images of the split.
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
        labeled = [(member, numbers[member.label]) for member in members]
        self.root = root.rstrip("/")
        words = [split_word(self._below(member.tar), member.name) for member in members]
        samples = of_split(labeled, words, split, reading.val_fraction, root)
        super().__init__(classes, samples, root, prepare, augment, reading=reading, **options)

    def encoded(self, index: int) -> bytes:
        """Return the bytes of an image."""
        member = self.samples[index][0]
        with open_image(member.tar, self.name(index)) as file:
            file.seek(member.offset)
            data = file.read(member.size)
        if len(data) < member.size:
            raise BadImage(f"{self.name(index)} ends after {len(data):,} of {member.size:,} bytes; copy the tar file again")
        return data

    def name(self, index: int) -> str:
        """Return tar and member of an image, e.g. "train.tar: cat/12.jpg"."""
        member = self.samples[index][0]
        return shown(f"{self._below(member.tar)}: {member.name}")

    def contents(self) -> list[str]:
        """Return one line per image, in order: its tar and member, a tab, its label."""
        return [f"{self.name(i)}\t{self.label(i)}" for i in range(len(self))]

    def versions(self) -> list[str]:
        """Return the size of each image, and the time of modification of its tar file."""
        tars = list(dict.fromkeys(member.tar for member, _ in self.samples))
        times = {tar: state.partition(" ")[2] for tar, state in zip(tars, file_versions(tars), strict=True)}
        return [f"{member.size} {times[member.tar]}" for member, _ in self.samples]

    def checksums(self) -> list[str]:
        """Return the SHA-256 of each tar file, in order of first use."""
        return list(file_checksums(dict.fromkeys(member.tar for member, _ in self.samples)))

    def _below(self, tar: str) -> str:
        """The path of a tar below the data's folder; its name if it is the data itself."""
        return PurePosixPath(tar).name if tar == self.root else tar.removeprefix(f"{self.root}/")


def tar_files(root: str) -> list[str]:
    """Return `root` if it is a tar file, or else the tar files in this folder and in those directly in it, sorted."""
    if root.endswith(".tar"):
        return [root] if Path(root).is_file() else []
    return sorted(str(path) for pattern in ("*.tar", "*/*.tar") for path in Path(root).glob(pattern))


def is_web_dataset(tar: str) -> bool:
    """Return whether a tar holds samples of a WebDataset, as `0001.jpg` and `0001.cls`, by its first members."""
    try:
        with tarfile.open(tar, "r:") as archive:
            return any(PurePosixPath(member.name).suffix.lower() in FIELDS for member in islice(archive, FIRST))
    except (tarfile.TarError, OSError, ValueError):  # `tar_members` says what is wrong
        return False


def tar_members(root: str) -> tuple[list[Member], list[str]]:
    """Return all images in the tar files of `root`, and the class names in `class_order`; errors as of `Tars`."""
    tars = tar_files(root)
    members = [member for tar, version in zip(tars, file_versions(tars), strict=True) for member in _members(tar, version)]
    return members, class_order({member.label for member in members})


@lru_cache(64)  # training, evaluation and class names need the same
def _members(tar: str, version: str) -> list[Member]:
    """The images of one tar file by name, without hidden ones."""
    extensions = get_img_extensions()
    try:
        set_img_extensions(SUFFIXES)
        found = ReaderImageInTar(tar, cache_tarinfo=False).samples
        with open(tar, "rb") as file:
            file.seek(-len(END), os.SEEK_END)
            if file.read() != END:
                raise tarfile.ReadError("its end is missing")
            last = max((inner or info for info, _, inner in found), key=lambda member: member.offset_data)
            file.seek(last.offset_data + last.size + -last.size % 512)
            if (header := file.read(512)).strip(b"\0"):  # tarfile stops without a word at a damaged header
                tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
    except (tarfile.TarError, OSError, ValueError, MemoryError) as error:
        reason = f"it has no image with {', '.join(SUFFIXES)}" if "unpack" in str(error) else error
        raise ValueError(
            f"{tar} cannot be read ({reason}): write an uncompressed tar of class folders, as tar -cf {tar} -C FOLDER ."
        ) from error
    finally:
        set_img_extensions(extensions)
    members = []
    for info, _, inner in found:
        path = PurePosixPath(info.path)
        if any(map(hidden, path.parts)):
            continue
        start, stem = (0, PurePosixPath(tar).stem) if inner is None else (inner.offset_data, PurePosixPath(inner.path).stem)
        if info.issparse() or (not path.parent.name and split_word(stem)):
            fault = "is a sparse file: write it again without --sparse" if info.issparse() else "is in no class folder"
            raise ValueError(f"{tar}: {shown(path)} {fault}")
        members.append(Member(tar, str(path), start + info.offset_data, info.size, path.parent.name or stem))
    return members
