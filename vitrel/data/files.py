"""Lists of image files as a data set: a CSV of paths and labels, or the class folders at an address."""

import csv
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from torch import Tensor

from vitrel.common.files import shown
from vitrel.data.addresses import is_address, list_files, read_text
from vitrel.data.base import ImageSet, Split, file_checksums, file_versions, subset
from vitrel.data.decode import SUFFIXES, Reading
from vitrel.data.prepare import Picture
from vitrel.data.splits import divided, one_of, split_of

PATHS, LABELS = ("path", "image", "file", "filename", "file_name"), ("label", "class", "target")  # columns of a CSV


class Files(ImageSet):
    """Image files as a data set of (normalized float32 [3, H, W], class index).

    Args:
        samples: (path or address, label) of each image.
        folder: folder that the paths are relative to in `contents`.
        classes, prepare, augment, reading: as in `ImageSet`.
        n, seed: number of randomly chosen images, by default all, and seed of this choice.
    """

    def __init__(
        self,
        samples: list[tuple[str, int]],
        folder: str | Path,
        classes: list[str],
        prepare: Callable[[Picture], Tensor],
        augment: Callable[..., Tensor] | None = None,
        n: int | None = None,
        seed: int = 0,
        reading: Reading = Reading(),
    ) -> None:
        self.samples = [samples[i] for i in subset(len(samples), n, seed, str(folder))]
        super().__init__(classes, len(self.samples), prepare, augment, reading)
        self.folder = folder

    def encoded(self, index: int) -> tuple[str, int, str]:
        """Return (path, label, path for messages) of an image."""
        return *self.samples[index], self.name(index)

    def label(self, index: int) -> int:
        """Return the label of an image, without decoding it."""
        return self.samples[index][1]

    def name(self, index: int) -> str:
        """Return the path of an image as printable text, with bytes that are not UTF-8 escaped."""
        return shown(self.samples[index][0])

    def contents(self) -> list[str]:
        """Return one line per image, in order: its path relative to the folder, a tab, its class index."""
        return [f"{below(path, self.folder)}\t{label}" for path, label in self.samples]

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
    """Return (path, label) of the images of a split, and all classes, in class folders at an address.

    The layouts are those of a local folder: `train/<class>/` with an evaluation split (`vitrel.data.splits`), or `<class>/`
    with `val_fraction`. ValueError for another layout.
    """
    places = [PurePosixPath(path.removeprefix(root.rstrip("/") + "/")) for path in list_files(root)]
    images = [place for place in places if place.suffix.lower() in SUFFIXES and len(place.parts) > 1]
    if not images:
        raise ValueError(
            f"found no images in class folders at {root}: its layout must be train/<class>/*.jpg, val/<class>/*.jpg"
        )
    own = split_of(split, {place.parts[0] for place in images})
    if own is not None:
        other = split_of("val" if split == "train" else "train", {place.parts[0] for place in images})
        classes = sorted({place.parts[1] for place in images if place.parts[0] in (own, other) and len(place.parts) > 2})
        pairs = [(place, place.parts[1]) for place in images if place.parts[0] == own and len(place.parts) > 2]
    else:
        classes = sorted({place.parts[0] for place in images})
        pairs = [(place, place.parts[0]) for place in images]
    samples = [(f"{root.rstrip('/')}/{place}", classes.index(name)) for place, name in pairs]
    return (samples if own else divided(samples, [label for _, label in samples], split, val_fraction, root)), classes


def csv_files(path: str | Path, split: Split, val_fraction: float | None = None) -> Listed:
    """Return (path, label) of the images of a split, and all classes, of a CSV with a header.

    Its columns are the path (`path`, `image`, `file`, `filename` or `file_name`; relative to the CSV's folder, or an address),
    the class (`label`, `class` or `target`) and, optionally, `split`; without that, `val_fraction` divides the images.
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
    classes = sorted(names, key=int) if all(name.isdecimal() for name in names) else sorted(names)
    numbers = {name: number for number, name in enumerate(classes)}
    folder = str(path).rpartition("/")[0] if is_address(path) else str(Path(path).parent)
    samples = [
        (row[image] if is_address(row[image]) else os.path.join(folder, row[image]), numbers[row[label]]) for row in rows
    ]
    if "split" not in columns:
        return divided(samples, [label for _, label in samples], split, val_fraction, str(path)), classes
    own = split_of(split, {row["split"] for row in rows})
    if own is None:
        raise ValueError(f"{path} has the splits {', '.join(sorted({row['split'] for row in rows}))}, and no {split}")
    return [sample for sample, row in zip(samples, rows, strict=True) if row["split"] == own], classes
