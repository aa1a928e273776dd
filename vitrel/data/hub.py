"""Data sets of Hugging Face `datasets`: of the Hub (`hfds/<name>`), and folders of Parquet or Arrow files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from vitrel.common.extras import optional_import
from vitrel.data.addresses import is_address, storage_options
from vitrel.data.base import RowSet, Split, sha256, subset
from vitrel.data.decode import Reading
from vitrel.data.prepare import Picture
from vitrel.data.splits import divided, split_of

SAVED = ("dataset_dict.json", "state.json")  # of a folder that `save_to_disk` wrote


class HuggingFace(RowSet):
    """One split of a Hugging Face data set, as a data set of (normalized float32 [3, H, W], class index).

    The images are the first column of images, the classes the first column of class labels, or the column "label".

    Args:
        name: name on the Hub, or path or address of a folder of Parquet files, or of one that `save_to_disk` wrote.
        split: "train" or "val"; without an evaluation split, `reading.val_fraction` divides the images.
        prepare, augment, reading: as in `ImageSet`.
        n, seed: number of randomly chosen images, by default all, and seed of this choice.

    Raises:
        ValueError: the data set cannot be loaded, or has no column of images or of labels.
    """

    def __init__(
        self,
        name: str,
        split: Split,
        prepare: Callable[[Picture], Tensor],
        augment: Callable[..., Tensor] | None = None,
        n: int | None = None,
        seed: int = 0,
        reading: Reading = Reading(),
    ) -> None:
        splits = load(name)
        own, whole = own_split(name, split, splits)
        rows = splits[own]
        self.image, label, classes = columns(name, splits)
        values = rows[label]
        numbers = {value: number for number, value in enumerate(classes)}
        self.labels = [value if isinstance(value, int) and value not in numbers else numbers[str(value)] for value in values]
        indices = list(range(len(rows)))
        if whole:
            indices = divided(indices, self.labels, split, reading.val_fraction, name)
        self.rows = rows.select_columns([self.image])
        self.where = f"{name} {own}"
        self.chosen = [indices[i] for i in subset(len(indices), n, seed, self.where)]
        super().__init__(classes, len(self.chosen), prepare, augment, reading)

    def encoded(self, index: int) -> tuple[bytes | str, int, str]:
        """Return (encoded image or its path, label, name for messages) of an image."""
        image = self.rows[self.chosen[index]][self.image]
        return image["bytes"] or image["path"], self.label(index), self.name(index)

    def versions(self) -> list[str]:
        """Return the size of each encoded image in bytes, in order; "" for images that are files of their own."""
        sizes = byte_counts(self.rows, self.image)
        return [sizes[row] for row in self.chosen]

    def checksums(self) -> list[str]:
        """Return the SHA-256 of each encoded image, in order."""
        return [sha256(self.encoded(index)[0]) for index in range(len(self))]


def own_split(name: str, split: Split, splits: dict[str, Any]) -> tuple[str, bool]:
    """Return (name of a split, whether it holds the images of both splits and has to be divided); ValueError without any."""
    whole = split_of("val", splits) is None
    own = split_of(split, splits) or (next(iter(splits)) if whole else None)
    if own is None:
        raise ValueError(f"{name} has the splits {', '.join(splits)}, and none for {split!r}")
    return own, whole


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
    return image, label, sorted(map(str, values))


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
