"""Data sets of Hugging Face `datasets`: of the Hub (`hfds/<name>`), and folders of Parquet or Arrow files."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrel.common.extras import optional_import
from vitrel.data.prepare import Picture
from vitrel.data.readers.addresses import is_address, storage_options
from vitrel.data.readers.base import ImageSet, sha256
from vitrel.data.readers.classes import class_order
from vitrel.data.readers.decode import Reading
from vitrel.data.readers.splits import Split, divided, split_of

SAVED = ("dataset_dict.json", "state.json")  # of a folder that `save_to_disk` wrote


class HuggingFace(ImageSet):
    """One split of a Hugging Face data set, as a data set of (normalized float32 [3, H, W], class index).

    The images are the first column of images, the classes the first column of class labels, or the column "label".

    Args:
        name: name on the Hub, or path or address of a folder of Parquet files, or of one that `save_to_disk` wrote.
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
        super().__init__(classes, samples, f"{name} {own}", prepare, augment, reading=reading, **options)

    def encoded(self, index: int) -> bytes | str:
        """Return the encoded image or its path."""
        return source_of(self.rows, self.samples[index][0], self.image)

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
    """Return the encoded image in a row and column, or its path."""
    image = rows[row][column]
    return image["bytes"] or image["path"]


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
    label = "label" if "label" in features else None
    if image is None or label is None:
        missing = "images" if image is None else "labels (of class labels, or called label)"
        raise ValueError(f"{name} has the columns {', '.join(features)}, and none of {missing}")
    values = {value for rows in splits.values() for value in rows.unique(label)}
    if all(isinstance(value, int) for value in values):
        return image, label, [str(i) for i in range(max(values) + 1)]
    return image, label, class_order(map(str, values))


def load(name: str) -> dict[str, Any]:
    """Return {split: rows} of a data set with encoded images; ValueError where it cannot be loaded."""
    with optional_import():
        import datasets

    options = {"storage_options": storage_options(name)} if is_address(name) else {}
    saved = not is_address(name) and any((Path(name) / file).is_file() for file in SAVED)
    try:
        if saved:
            found = datasets.load_from_disk(name)
        elif is_address(name):
            found = datasets.load_dataset("parquet", data_dir=name, **options)
        else:
            found = datasets.load_dataset(name)
    except Exception as error:  # of the Hub, its client, Arrow and others
        text = str(error).split("\n", 1)[0]
        raise ValueError(f"{name} cannot be loaded by Hugging Face datasets: {text}") from error
    splits = dict(found) if isinstance(found, dict) else {"train": found}
    for split, rows in splits.items():
        for column in image_columns(rows.features):
            rows = rows.cast_column(column, datasets.Image(decode=False))
        splits[split] = rows
    return splits
