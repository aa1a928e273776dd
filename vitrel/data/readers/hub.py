"""Data sets of Hugging Face `datasets`: of the Hub (`hfds/<name>`), and Parquet, Arrow or WebDataset files on this machine.

A WebDataset is tar files of samples as `0001.jpg` and `0001.cls`, its class number. `datasets` writes a copy into its cache,
which is then read by index. Labels that are numbers are named by `classes.txt` in the folder; without it each is a class.
"""

import os
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from vitrel.common.extras import optional_import
from vitrel.common.warn import warn_once
from vitrel.data.readers.base import Reader
from vitrel.data.readers.classes import class_order, read_class_names
from vitrel.data.readers.decode import Reading
from vitrel.data.readers.splits import Split, chosen, divided, one_of, split_word
from vitrel.data.readers.tars import is_web_dataset

FILES = {".parquet": "parquet", ".arrow": "arrow", ".tar": "webdataset"}
LABELS = ("label", "cls")  # columns, the latter of a WebDataset


@dataclass
class Rows(Reader):
    """Reader of the encoded images of a Hugging Face data set: the source of an image is the index of its row.

    Args:
        rows: the data set of the split, with the column of images alone.
        keys: name of each row: its index, or of a WebDataset "<tar>: <key of the sample>".
    """

    rows: Any
    keys: Sequence[Any]

    def encoded(self, source: int) -> bytes | str:
        """Return the encoded image or its path; b"" for a sample without an image."""
        (image,) = self.rows[source].values()
        image = image or {"bytes": b""}
        return image["path"] if image["bytes"] is None else image["bytes"]

    def name(self, source: int) -> str:
        """Return the index of the row as text, or of a WebDataset "<tar>: <key of the sample>"."""
        return str(self.keys[source])

    def states(self, sources: Sequence[int]) -> list[str]:
        """Return the size in bytes of each encoded image, as text; "" for none, and for images that are files of their own."""
        import pyarrow.compute as pc

        parts = (part.column(0) for part in self.rows.with_format("arrow").iter(1000))
        sizes = [size for part in parts for size in pc.binary_length(pc.struct_field(part, "bytes")).to_pylist()]
        return ["" if sizes[row] is None else str(sizes[row]) for row in sources]


def rows_reader(place: str, split: Split, reading: Reading) -> Rows:
    """Return the labeled images of a split of a Hugging Face data set, which `load` may download or copy before.

    The images are the first column of images, the classes the first column of class labels, or the column "label" or "cls".

    Args:
        place: name on the Hub, or path of a file or folder of `data_files`, or of a folder that `save_to_disk` wrote.
        split: "train" or "val"; without an evaluation split, `reading.val_fraction` divides the training split, else the first.
        reading: gives this share.

    Raises:
        ValueError: the data set cannot be loaded, or has no column of images or of labels, or no images of the split.
    """
    splits = load(place)
    image, label, names = _columns(place, splits)
    own, whole = chosen(split, splits, reading.val_fraction)
    if own is None and not whole:
        raise ValueError(f"{place} has the splits {', '.join(splits)}, and none for {split!r}")
    own = own or next(iter(splits))
    rows, numbers = splits[own], {value: number for number, value in enumerate(names)}
    samples = [(row, numbers[value]) for row, value in enumerate(rows[label])]
    if whole:
        samples = divided(samples, split, reading.val_fraction, place)
    keys: Sequence[Any] = range(len(rows))
    if {"__url__", "__key__"} <= rows.features.keys():  # of a WebDataset
        keys = [f"{PurePath(url).name}: {key}" for url, key in zip(rows["__url__"], rows["__key__"], strict=True)]
    return Rows(list(names.values()), samples, f"{place} {own}", "", rows.select_columns([image]), keys)


def image_columns(features: dict[str, Any]) -> list[str]:
    """Return the names of the columns of images among the `features` of a data set of `datasets`."""
    import datasets

    return [key for key, kind in features.items() if isinstance(kind, datasets.Image)]


def _columns(place: str, splits: dict[str, Any]) -> tuple[str, str, dict[Any, str]]:
    """Return (column of images, column of labels, {label: class name}), the last in the order of the class numbers.

    ValueError where a column is missing, or a label has no name in `classes.txt`.
    """
    import datasets

    features = next(iter(splits.values())).features
    image = next(iter(image_columns(features)), None)
    label = next((key for key, kind in features.items() if isinstance(kind, datasets.ClassLabel)), one_of(LABELS, features))
    if image is None or label is None:
        missing = "images" if image is None else f"labels (of class labels, or called {' or '.join(LABELS)})"
        raise ValueError(f"{place} has the columns {', '.join(features)}, and none of {missing}")
    if isinstance(features[label], datasets.ClassLabel):
        return image, label, dict(enumerate(features[label].names))
    values = {value for rows in splits.values() for value in rows.unique(label)}
    if not all(isinstance(value, int) for value in values):
        texts = {str(value): value for value in values}
        return image, label, {texts[name]: name for name in class_order(texts)}
    path = Path(place) / "classes.txt"
    if not path.is_file():
        return image, label, {value: str(value) for value in sorted(values)}
    classes = read_class_names(path)
    if len(classes) <= max(values):
        raise ValueError(f"{path} names {len(classes)} classes, but there is a label {max(values)}")
    return image, label, dict(enumerate(classes))


def data_files(place: str) -> tuple[str, list[str]]:
    """Return (kind, files) of the data files at a path: that file, or those in that folder and in the folders directly in it.

    The kind is "parquet", "arrow" or "webdataset", the first that is found; ("", []) where there are none.
    """
    for suffix, kind in FILES.items():
        patterns = (f"*{suffix}", f"*/*{suffix}")
        found = [place] if place.endswith(suffix) else sorted(str(path) for one in patterns for path in Path(place).glob(one))
        if found and (kind != "webdataset" or is_web_dataset(found[0])):
            return kind, found
    return "", []


def load(place: str) -> dict[str, Any]:
    """Return {split: rows} of a data set (`place` as of `rows_reader`), images not decoded; ValueError if it cannot be loaded.

    A data set of the Hub is downloaded, and of any but a saved one (`is_saved`) `datasets` writes a copy into its cache, unless
    it is there. Before that, which can take long, a warning says where and how large it becomes.
    """
    with optional_import():
        import datasets

    kind, files = data_files(place)
    try:
        if is_saved(place):
            found = datasets.load_from_disk(place)
        else:
            if files and not (Path(place) / "README.md").is_file():
                builder = datasets.load_dataset_builder(kind, data_files=_by_split(place, files))
            else:
                builder = datasets.load_dataset_builder(place)
            if not os.path.isdir(builder.cache_dir):  # what its builder does not tell, the files do
                copy, download = builder.info.dataset_size or sum(map(os.path.getsize, files)), builder.info.download_size or 0
                warn_once(
                    f"{place} is read from a copy of {_megabytes(copy)}, which datasets writes in {builder.cache_dir}"
                    f"{f' after a download of {_megabytes(download)}' * (not files)}; HF_DATASETS_CACHE names another folder"
                )
            builder.download_and_prepare()
            found = builder.as_dataset()
    except Exception as error:  # of the Hub, its client, Arrow and others
        text = str(error.__cause__ or error).split("\n", 1)[0]
        raise ValueError(f"{place} cannot be loaded by Hugging Face datasets: {text}") from error
    splits = dict(found) if isinstance(found, dict) else {"train": found}
    for split, rows in splits.items():
        for column in image_columns(rows.features):
            rows = rows.cast_column(column, datasets.Image(decode=False))
        splits[split] = rows
    return splits


def _megabytes(size: int) -> str:
    return f"about {size / 1e6:,.0f} MB" if size else "unknown size"


def is_saved(place: str) -> bool:
    """Return whether the folder `place` was written by `save_to_disk` of `datasets`."""
    return any((Path(place) / file).is_file() for file in ("dataset_dict.json", "state.json"))


def _by_split(place: str, files: list[str]) -> dict[str, list[str]]:
    """Return {`split_word` of the path, as "valid": files}, {"train": all} if none has one; ValueError if only some do."""
    splits: dict[str, list[str]] = defaultdict(list)
    for file in files:
        splits[split_word(file.removeprefix(place) or Path(file).name)].append(file)
    unnamed = splits.pop("", [])
    if unnamed and splits:
        raise ValueError(f"no split is named by {unnamed[0]}, but others are: {', '.join(splits)}")
    return dict(splits) or {"train": unnamed}
