"""Data sets of Hugging Face `datasets`: of the Hub (`hfds/<name>`), and Parquet, Arrow or WebDataset files on this machine.

A WebDataset is tar files of samples as `0001.jpg` and `0001.cls`, its class number. `datasets` writes a copy of all but Arrow
files into its cache, which is then read by index; a warning says where, and how large it is.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path, PurePath
from typing import Any

from torch import Tensor

from vitrel.common.extras import optional_import
from vitrel.common.warn import warn_once
from vitrel.data.prepare import Picture
from vitrel.data.readers.base import ImageSet, sha256
from vitrel.data.readers.classes import class_order, read_class_names
from vitrel.data.readers.decode import Reading
from vitrel.data.readers.splits import Split, divided, one_of, split_of, split_word
from vitrel.data.readers.tars import is_web_dataset

FILES = {".parquet": "parquet", ".arrow": "arrow", ".tar": "webdataset"}
LABELS = ("label", "cls")  # columns, the latter of a WebDataset


class HuggingFace(ImageSet):
    """One split of a Hugging Face data set, as a data set of (normalized float32 [3, H, W], class index).

    The images are the first column of images, the classes the first column of class labels, or the column "label".

    Args:
        name: name on the Hub, or path of a file or folder of `data_files`, or of a folder that `save_to_disk` wrote.
        split: "train" or "val"; without an evaluation split, `reading.val_fraction` divides the images.
        prepare, augment, reading, options: as in `ImageSet`.

    Raises:
        ValueError: the data set cannot be loaded, or has no column of images or of labels.
    """

    def __init__(
        self,
        name: str,
        split: Split,
        prepare: Callable[[Picture], Tensor],
        augment: Callable[..., Tensor] | None = None,
        reading: Reading = Reading(),
        **options: Any,
    ) -> None:
        splits = load(name)
        self.image, label, classes = columns(name, splits)
        numbers = {value: number for number, value in enumerate(classes)}

        def labels(rows: Any) -> list[int]:
            return [value if isinstance(value, int) else numbers[str(value)] for value in rows[label]]

        own, samples = rows_of(name, split, splits, reading.val_fraction, labels)
        self.rows = splits[own].select_columns([self.image])
        self.keys: Sequence[Any] = range(len(self.rows))
        if {"__url__", "__key__"} <= splits[own].features.keys():  # of a WebDataset
            pairs = zip(splits[own]["__url__"], splits[own]["__key__"], strict=True)
            self.keys = [f"{PurePath(url).name}: {key}" for url, key in pairs]
        super().__init__(classes, samples, f"{name} {own}", prepare, augment, reading=reading, **options)

    def encoded(self, index: int) -> bytes | str:
        """Return the encoded image or its path."""
        return source_of(self.rows, self.samples[index][0], self.image)

    def name(self, index: int) -> str:
        """Return data, split and row of an image, of a WebDataset with its tar and key instead of the row."""
        return f"{self.where}: {self.keys[self.samples[index][0]]}"

    def versions(self) -> list[str]:
        """Return the size of each encoded image in bytes, in order; "" for images that are files of their own."""
        sizes = byte_counts(self.rows, self.image)
        return [sizes[row] for row, _ in self.samples]

    def checksums(self) -> list[str]:
        """Return the SHA-256 of each encoded image, in order."""
        return [sha256(self.encoded(index)) for index in range(len(self))]


def rows_of(
    name: str, split: Split, splits: dict[str, Any], val_fraction: float | None, labels: Callable[[Any], Iterable[Any]]
) -> tuple[str, list[tuple[int, Any]]]:
    """Return the name of a split and its (row, label) samples, with `labels(rows)`; ValueError where there is no such split."""
    whole = split_of("val", splits) is None
    own = split_of(split, splits) or (next(iter(splits)) if whole else None)
    if own is None:
        raise ValueError(f"{name} has the splits {', '.join(splits)}, and none for {split!r}")
    samples = list(enumerate(labels(splits[own])))
    return own, divided(samples, split, val_fraction, name) if whole else samples


def source_of(rows: Any, row: int, column: str) -> bytes | str:
    """Return the encoded image in a row and column, or its path; b"" for a sample without an image."""
    image = rows[row][column] or {"bytes": b""}
    return image["path"] if image["bytes"] is None else image["bytes"]


def byte_counts(rows: Any, column: str) -> list[str]:
    """Return the size of the encoded image in bytes of every row; "" for images that are files of their own."""
    import pyarrow.compute as pc

    parts = (part[column] for part in rows.with_format("arrow").iter(1000))
    sizes = [size for part in parts for size in pc.binary_length(pc.struct_field(part, "bytes")).to_pylist()]
    return ["" if size is None else str(size) for size in sizes]


def image_columns(features: dict[str, Any]) -> list[str]:
    """Return the names of the columns of images."""
    import datasets

    return [key for key, kind in features.items() if isinstance(kind, datasets.Image)]


def columns(name: str, splits: dict[str, Any]) -> tuple[str, str, list[str]]:
    """Return (column of images, column of labels, class names); ValueError where there is none."""
    import datasets

    first = next(iter(splits.values()))
    features = first.features
    image = next(iter(image_columns(features)), None)
    label = next((key for key, kind in features.items() if isinstance(kind, datasets.ClassLabel)), None)
    if label is not None and image is not None:
        return image, label, list(features[label].names)
    label = one_of(LABELS, features)
    if image is None or label is None:
        missing = "images" if image is None else f"labels (of class labels, or called {' or '.join(LABELS)})"
        raise ValueError(f"{name} has the columns {', '.join(features)}, and none of {missing}")
    values = {value for rows in splits.values() for value in rows.unique(label)}
    if not all(isinstance(value, int) for value in values):
        return image, label, class_order(map(str, values))
    names = Path(name) / "classes.txt"
    classes = read_class_names(names) if names.is_file() else [str(i) for i in range(max(values) + 1)]
    if len(classes) <= max(values):
        raise ValueError(f"{names} names {len(classes)} classes, but there is a label {max(values)}")
    return image, label, classes


def data_files(place: str) -> tuple[str, list[str]]:
    """Return the kind of data files at a path as `datasets` calls it, and the files: one, or those in a folder and its folders.

    ("", []) where there are none.
    """
    for suffix, kind in FILES.items():
        patterns = (f"*{suffix}", f"*/*{suffix}")
        found = [place] if place.endswith(suffix) else sorted(str(path) for one in patterns for path in Path(place).glob(one))
        if found and (kind != "webdataset" or is_web_dataset(found[0])):
            return kind, found
    return "", []


def load(name: str) -> dict[str, Any]:
    """Return {split: rows} of a data set with encoded images; ValueError where it cannot be loaded."""
    with optional_import():
        import datasets

    kind, files = data_files(name)
    try:
        if is_saved(name):
            found = datasets.load_from_disk(name)
        elif files and not (Path(name) / "README.md").is_file():
            found = datasets.load_dataset(kind, data_files=_by_split(name, files))
        else:
            found = datasets.load_dataset(name)
    except Exception as error:  # of the Hub, its client, Arrow and others
        text = str(error.__cause__ or error).split("\n", 1)[0]
        raise ValueError(f"{name} cannot be loaded by Hugging Face datasets: {text}") from error
    splits = dict(found) if isinstance(found, dict) else {"train": found}
    cached = {file["filename"] for rows in splits.values() for file in rows.cache_files if not is_saved(name)}
    if cached:
        size, folder = sum(map(os.path.getsize, cached)) / 1e6, datasets.config.HF_DATASETS_CACHE
        warn_once(f"{name} is read from a copy of {size:,.0f} MB below {folder}; HF_DATASETS_CACHE names another folder")
    for split, rows in splits.items():
        for column in image_columns(rows.features):
            rows = rows.cast_column(column, datasets.Image(decode=False))
        splits[split] = rows
    return splits


def is_saved(place: str) -> bool:
    """Return whether `save_to_disk` wrote a folder."""
    return any((Path(place) / file).is_file() for file in ("dataset_dict.json", "state.json"))


def _by_split(name: str, files: list[str]) -> dict[str, list[str]]:
    """{name of the split: its files}, of which all are for training where no path names a split."""
    splits: dict[str, list[str]] = defaultdict(list)
    for file in files:
        splits[split_word(file.removeprefix(name) or Path(file).name)].append(file)
    unnamed = splits.pop("", [])
    if unnamed and splits:
        raise ValueError(f"no split is named by {unnamed[0]}, but others are: {', '.join(splits)}")
    return dict(splits) or {"train": unnamed}
