"""The predictions of every row of an evaluation, image by image, in one file beside results.csv: predictions.npz.

Names, labels and classes are stored once, and a row takes 4 1/8 bytes per image: its class, its confidence in half precision,
and a bit for the top 5. Of two rows on the same images `compare_pairs` tells which images only one of them gets right.
"""

import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vitrel.files import atomic_write

FILE = "predictions.npz"
LEFT_OUT = -1  # an image that could not be read: no prediction
NO_CLASS = -2  # an output that stands for none of the classes of the data
Key = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Predicted:
    """What one row predicts for every image, in the order of the data.

    predicted: int32 [n], index of the class; LEFT_OUT where the image could not be read, NO_CLASS where the highest logit is
    that of an output that stands for none of the classes. confidence: float32 [n], the highest probability, stored as float16;
    0 where left out. top5: bool [n], whether the label is among the 5 highest logits.
    """

    predicted: np.ndarray
    confidence: np.ndarray
    top5: np.ndarray


@dataclass(frozen=True, eq=False)
class Predictions:
    """The predictions of an evaluation.

    names: of the images, below the folder of the data, in their order. labels: int32 [n], LEFT_OUT where no row could read the
    image. classes: names, by label. rows: by `vitrel.evaluate.results.line_key` of the row.
    """

    names: list[str]
    labels: np.ndarray
    classes: list[str]
    rows: Mapping[Key, Predicted]

    def right(self, key: Key) -> np.ndarray:
        """Whether the row `key` predicts the label of each image, bool [n]; False where the image was left out."""
        predicted = self.rows[key].predicted
        return (predicted == self.labels) & (predicted >= 0)

    def class_counts(self, key: Key) -> tuple[np.ndarray, np.ndarray]:
        """Number of images that the row `key` saw of each class, and of those that it got right, int64 [classes] each."""
        seen, right = self.rows[key].predicted != LEFT_OUT, self.right(key)
        n, hits = (np.bincount(self.labels[which], minlength=len(self.classes)) for which in (seen, right))
        return n, hits


def read_predictions(folder: str | Path) -> Predictions | None:
    """The predictions of the evaluation in `folder`; None where it has none. ValueError where the file is damaged."""
    path = Path(folder) / FILE
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as file:
            stored = {name: file[name] for name in file.files}
        names, classes, keys = (_unpacked(stored[name]) for name in ("names", "classes", "keys"))
        labels, n = stored["labels"].astype(np.int32), len(names)
        top5 = np.unpackbits(stored["top5"], axis=1, count=n).astype(bool)  # [rows, n]
        predicted = stored["predicted"].astype(np.int32) + NO_CLASS
        confidence = stored["confidence"].astype(np.float32)
        if not labels.shape == (n,) or not predicted.shape == confidence.shape == top5.shape == (len(keys), n):
            raise ValueError("shapes")
        rows = {tuple(key): Predicted(*row) for key, *row in zip(keys, predicted, confidence, top5, strict=True)}
    except (EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged: delete it, and its rows are made again by the same evaluation") from error
    return Predictions(names, labels, classes, rows)


def write_predictions(predictions: Predictions, folder: str | Path) -> None:
    """Writes predictions.npz, whole or not at all; the file is removed where there are no rows."""
    path, rows = Path(folder) / FILE, [*predictions.rows.values()]
    if not rows:
        path.unlink(missing_ok=True)
        return
    smallest = np.uint16 if len(predictions.classes) - NO_CLASS <= np.iinfo(np.uint16).max else np.uint32
    with atomic_write(path) as part, part.open("wb") as file:
        np.savez(
            file,
            names=_packed(predictions.names),
            classes=_packed(predictions.classes),
            keys=_packed([*predictions.rows]),
            labels=predictions.labels.astype(np.int32),
            predicted=np.stack([row.predicted - NO_CLASS for row in rows]).astype(smallest),
            confidence=np.stack([row.confidence for row in rows]).astype(np.float16),
            top5=np.packbits(np.stack([row.top5 for row in rows]), axis=1),
        )


def _packed(value: Sequence[Any]) -> np.ndarray:
    """Plain values as compressed JSON, uint8 [bytes]."""
    return np.frombuffer(zlib.compress(json.dumps(value).encode(), 1), np.uint8)


def _unpacked(stored: np.ndarray) -> Any:
    return json.loads(zlib.decompress(stored.tobytes()))
