"""Image files by path, as of a CSV of paths and labels."""

import csv
import os
from collections import Counter
from collections.abc import Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor

from vitrel.common.files import shown
from vitrel.common.warn import warn_once
from vitrel.data.readers.base import READERS, ImageSet, Reader
from vitrel.data.readers.classes import class_order
from vitrel.data.readers.decode import Reading
from vitrel.data.readers.splits import NAMES, Split, of_split, one_of

PATHS, LABELS = ("path", "image", "file", "filename", "file_name"), ("label", "class", "target")  # columns of a CSV


class Files(Reader):
    """Reader of image files: the source of an image is its path."""

    def encoded(self, source: str) -> str:
        """Return the path."""
        return source

    def name(self, source: str) -> str:
        """Return the path relative to `root`, or unchanged if it is not inside."""
        return below(source, self.root)

    def title(self, source: str) -> str:
        """Return the path as printable text, with bytes that are not UTF-8 escaped."""
        return shown(source)

    def states(self, sources: Sequence[str]) -> list[str]:
        """Return `file_states` of these paths: "SIZE TIME" of each, "" if it is unreachable."""
        return file_states(sources)


def below(path: str | Path, folder: str | Path) -> str:
    """Return `path` relative to `folder`, or unchanged if it is not inside."""
    return str(path).removeprefix(f"{folder}{os.sep}")  # os.path.relpath would take seconds for a million paths


def file_states(paths: Sequence[str]) -> list[str]:
    """Return "SIZE TIME" of each file: bytes, and time of modification in ns since 1970; "" for an unreachable file."""

    def state(path: str) -> str:
        try:
            found = os.stat(path)
        except OSError:
            return ""
        return f"{found.st_size} {found.st_mtime_ns}"

    with ThreadPool(READERS) as pool:
        return pool.map(state, paths, chunksize=1000)  # a local file takes less time than a task for a thread


class LabelSet(ImageSet):
    """Data set of images with any number of labels: items are (image as of `ImageSet`, float32 [classes] of 0 and 1)."""

    def read(self, index: int) -> tuple[Image.Image, Tensor]:
        """Return (image of mode RGB, float32 [classes] of 0 and 1); `BadImage` if it cannot be decoded."""
        picture, labels = super().read(index)
        target = torch.zeros(len(self.classes))
        target[list(labels)] = 1
        return picture, target


def csv_reader(path: str, split: Split, reading: Reading, several: bool = False) -> Files:
    """Return the images of a split of a CSV with a header, with the classes in `class_order`.

    The columns are the path (`path`, `image`, `file`, `filename` or `file_name`; relative to the CSV's folder), the class
    (`label`, `class` or `target`) and, optionally, `split`, with the names in `vitrel.data.readers.splits`. If none is an
    evaluation split, `reading.val_fraction` of each class is taken from the training images, or from all images if no split is
    named.

    Args:
        path: the CSV.
        split: "train" or "val".
        reading: gives `val_fraction`.
        several: images have any number of classes, with ; between them; `val_fraction` divides them by their rarest class.
            Without it, a ; in a class name gives a warning.

    Raises:
        ValueError: a file that is no CSV in UTF-8, columns are missing or twice, rows without a path, class or known split, an
            image with several rows, or there is neither an evaluation split nor `val_fraction`; with `several`, a class that no
            training image has.
    """
    folder = os.path.normpath(Path(path).parent)
    found: dict[str, tuple[list[str], str]] = {}  # {path of an image: classes, split}
    try:
        with open(path, encoding="utf-8-sig", newline="") as file:
            rows = csv.DictReader(file, skipinitialspace=True, strict=True)
            rows.fieldnames = columns = [column.strip() for column in rows.fieldnames or ()]
            image, label = (one_of(names, columns) for names in (PATHS, LABELS))
            if image is None or label is None:
                raise ValueError(f"{path} has the columns {', '.join(columns)}: it needs {PATHS[0]} and {LABELS[0]}")
            used = [image, label, *(["split"] if "split" in columns else [])]
            if twice := [name for name in used if columns.count(name) > 1]:
                raise ValueError(f"{path} has the column {twice[0]} more than once: keep one")
            for row in rows:
                cells, where = [(row[column] or "").strip() for column in used], f"{path}, line {rows.line_num}"
                if not any(cells):
                    continue
                labels = [name for name in map(str.strip, cells[1].split(";")) if name] if several else [cells[1]]
                if None in row or not all(cells[:1] + cells[1 + several :]):
                    raise ValueError(f"{where} needs {', '.join(used)}, and as many cells as the header: {', '.join(cells)}")
                if cells[2:] and cells[2] not in NAMES:
                    raise ValueError(f"{where} has the split {cells[2]!r}: use one of {', '.join(sorted(NAMES))}")
                place = os.path.normpath(os.path.join(folder, cells[0]))
                if place in found:
                    raise ValueError(f"{where} has the image {cells[0]} again: keep one row")
                found[place] = labels, "".join(cells[2:])
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is no CSV in UTF-8: {error}") from error
    counts = Counter(name for names, _ in found.values() for name in set(names))
    classes = class_order(counts)
    numbers = {name: number for number, name in enumerate(classes)}
    words = [word for _, word in found.values()]
    # images are divided by class, or by their rarest one; one without any by the number beyond the classes
    rarest = [numbers[min(names, key=counts.__getitem__)] if names else len(classes) for names, _ in found.values()]
    own = of_split([*zip(found, rarest, strict=True)], words, split, reading.val_fraction, path)
    if not several:
        if mixed := next((name for name in classes if ";" in name), None):
            warn_once(
                f"{path}: {mixed!r} is taken for one class; several labels an image, with ; between, are --task multilabel"
            )
        return Files(classes, own, path, folder)
    if not classes:
        raise ValueError(f"{path} has no label for any image")
    samples = [(place, tuple(sorted({numbers[name] for name in found[place][0]}))) for place, _ in own]
    if split == "train" and (unseen := {*range(len(classes))}.difference(*(labels for _, labels in samples))):
        names = ", ".join(classes[number] for number in sorted(unseen)[:3])
        raise ValueError(f"no training image of {path} has the labels {names} ({len(unseen)} in all): add some, or remove them")
    return Files(classes, samples, path, folder)
