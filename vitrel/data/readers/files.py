"""Lists of image files as a data set: a CSV of paths and labels, or the class folders at an address."""

import csv
import io
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from vitrel.common.files import shown
from vitrel.data.readers.addresses import is_address, list_files, read_text
from vitrel.data.readers.base import ImageSet, file_checksums, file_versions
from vitrel.data.readers.classes import class_order
from vitrel.data.readers.decode import SUFFIXES
from vitrel.data.readers.splits import NAMES, Split, of_split, one_of

PATHS, LABELS = ("path", "image", "file", "filename", "file_name"), ("label", "class", "target")  # columns of a CSV


class Files(ImageSet):
    """Image files as a data set: the source of a sample is a path or address, `where` the folder that `contents` leaves out."""

    def encoded(self, index: int) -> str:
        """Return the path of an image."""
        return self.samples[index][0]

    def name(self, index: int) -> str:
        """Return the path of an image as printable text, with bytes that are not UTF-8 escaped."""
        return shown(self.samples[index][0])

    def contents(self) -> list[str]:
        """Return one line per image, in order: its path relative to the folder, a tab, its class index."""
        return [f"{below(path, self.where)}\t{label}" for path, label in self.samples]

    def versions(self) -> list[str]:
        """Return size and time of modification of each file, in order (`file_versions`)."""
        return file_versions([path for path, _ in self.samples])

    def checksums(self) -> Iterator[str]:
        """Yield the SHA-256 of each file, in order, "" for a file that cannot be opened."""
        return file_checksums(path for path, _ in self.samples)


def below(path: str | Path, folder: str | Path) -> str:
    """Return `path` relative to `folder`, or unchanged if it is not inside."""
    return str(path).removeprefix(f"{folder}{os.sep}")  # os.path.relpath would take seconds for a million paths


Listed = tuple[list[tuple[str, int]], list[str]]  # (path, label) of each image, and the class names


def files_at(root: str, split: Split, val_fraction: float | None = None) -> Listed:
    """Return (address, class index) of the images of a split, and the sorted class names, of class folders at an address.

    An address is, for example, s3://bucket/folder.
    The layouts are those of a local folder: `train/<class>/` with an evaluation split (`vitrel.data.readers.splits`), or
    `<class>/` with `val_fraction`. ValueError for another layout.
    """
    places = [PurePosixPath(path.removeprefix(root.rstrip("/") + "/")) for path in list_files(root)]
    images = [place for place in places if place.suffix.lower() in SUFFIXES and len(place.parts) > 1]
    if not images:
        raise ValueError(
            f"found no images in class folders at {root}: its layout must be train/<class>/*.jpg, val/<class>/*.jpg"
        )
    words = [place.parts[0] if place.parts[0] in NAMES and len(place.parts) > 2 else "" for place in images]
    named = [place.parts[1 if word else 0] for place, word in zip(images, words, strict=True)]
    classes = class_order(set(named))
    numbers = {name: number for number, name in enumerate(classes)}
    samples = [(f"{root.rstrip('/')}/{place}", numbers[name]) for place, name in zip(images, named, strict=True)]
    return of_split(samples, words, split, val_fraction, root), classes


def csv_files(path: str | Path, split: Split, val_fraction: float | None = None) -> Listed:
    """Return (path, class index) of the images of a split of a CSV with a header, and the class names.

    Names are sorted, as numbers if all are digits, and an index is a place in that order. The columns are the path (`path`,
    `image`, `file`, `filename` or `file_name`; relative to the CSV's folder, or an address), the class (`label`, `class` or
    `target`) and, optionally, `split`, with the names in `vitrel.data.readers.splits`. If none is an evaluation split,
    `val_fraction` of each class is taken from the training images, or from all images if no split is named.

    Raises:
        ValueError: columns or the split are missing, or there is neither an evaluation split nor `val_fraction`.
    """
    rows = list(csv.DictReader(io.StringIO(read_text(path))))
    columns = list(rows[0]) if rows else []
    image, label = (one_of(names, columns) for names in (PATHS, LABELS))
    if image is None or label is None:
        raise ValueError(
            f"{path} has the columns {', '.join(columns) or 'none'}: it needs a header with {PATHS[0]} and {LABELS[0]}, one "
            "row for each image"
        )
    names = {row[label] for row in rows}
    classes = class_order(names)
    numbers = {name: number for number, name in enumerate(classes)}
    folder = str(path).rpartition("/")[0] if is_address(path) else str(Path(path).parent)
    samples = [
        (row[image] if is_address(row[image]) else os.path.join(folder, row[image]), numbers[row[label]]) for row in rows
    ]
    words = [row.get("split", "") for row in rows]
    return of_split(samples, words, split, val_fraction, str(path)), classes
