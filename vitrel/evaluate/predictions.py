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
import torch
from torch import Tensor

from vitrel.evaluate.images import ImageList
from vitrel.evaluate.metrics import mcnemar, paired_interval, t_interval
from vitrel.files import atomic_write

FILE = "predictions.npz"
LEFT_OUT = -1  # an image that could not be read: no prediction
NO_CLASS = -2  # an output that stands for none of the classes of the data
Key = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Predicted:
    """What one row predicts for every image, in the order of the data.

    images: their names, and those of the classes. labels: int32 [n], LEFT_OUT where the image could not be read. predicted:
    int32 [n], index of the class; LEFT_OUT where the image could not be read, NO_CLASS where the highest logit is that of an
    output that stands for none of the classes. confidence: float32 [n], the highest probability, stored as float16; 0 where
    left out. top5: bool [n], whether the label is among the 5 highest logits.
    """

    images: ImageList
    labels: np.ndarray
    predicted: np.ndarray
    confidence: np.ndarray
    top5: np.ndarray

    @property
    def seen(self) -> np.ndarray:
        """Whether each image was read, bool [n]."""
        return self.predicted != LEFT_OUT

    @property
    def right(self) -> np.ndarray:
        """Whether the label of each image is predicted, bool [n]; False where the image was left out."""
        return (self.predicted == self.labels) & self.seen

    def class_counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Number of images of each class that were read, and of those that are predicted right, int64 [classes] each."""
        n, hits = (np.bincount(self.labels[i], minlength=len(self.images.classes)) for i in (self.seen, self.right))
        return n, hits


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


@dataclass(frozen=True)
class Pair:
    """Two rows, a and b, on the images that both could read: how many of n both, one alone, or none of them gets right.

    difference: a minus b, percentage points, with the ends of its 95 % interval (`paired_interval`). p: two-sided, of McNemar's
    exact test (`mcnemar`).
    """

    n: int
    both: int
    only_a: int
    only_b: int
    neither: int
    difference: float
    low: float
    high: float
    p: float


def compare_pairs(a: Predicted, b: Predicted) -> Pair:
    """Two models, sizes or protocols compared image by image. ValueError where they were not evaluated on the same images."""
    check_same_images(a, b)
    read = a.seen & b.seen
    if not read.any():
        raise ValueError("no image was read by both rows: there is nothing to compare")
    n, one, other = int(read.sum()), a.right[read], b.right[read]
    both, only_a, only_b = (int(which.sum()) for which in (one & other, one & ~other, other & ~one))
    interval = paired_interval(n, only_a, only_b)
    neither = n - both - only_a - only_b
    return Pair(n, both, only_a, only_b, neither, 100 * (only_a - only_b) / n, *interval, mcnemar(only_a, only_b))


def over_seeds(pairs: Sequence[Pair]) -> tuple[float, float, float]:
    """(mean difference, lower, upper end of its 95 % interval) of pairs of several seeds on the same images, points.

    The mean of the seeds' intervals is at least as wide as that of the mean over images, and Student's over seeds is added to
    it as of an independent chance, the squares of the half widths.
    """
    mean = sum(pair.difference for pair in pairs) / len(pairs)
    ends = [sum(getattr(pair, end) for pair in pairs) / len(pairs) for end in ("low", "high")]
    if len(pairs) == 1:
        return mean, *ends
    half = (lambda low, high: (high - low) / 2)(*t_interval([pair.difference for pair in pairs]))
    low, high = (((end - mean) ** 2 + half**2) ** 0.5 for end in ends)
    return mean, max(-100.0, mean - low), min(100.0, mean + high)


def check_same_images(a: Predicted, b: Predicted) -> None:
    """ValueError that names the first difference where images, their order, classes or labels differ."""
    first, second = a.images, b.images
    if first.names != second.names:
        alone = sorted({*first.names} ^ {*second.names})
        which = f"{len(alone)} are in one of them alone, such as {alone[0]!r}" if alone else "they come in another order"
        raise ValueError(f"the images differ ({len(first.names)} and {len(second.names)}): {which}. Evaluate on the same data")
    if first.classes != second.classes:
        raise ValueError(f"the classes differ: {first.classes[:5]}... and {second.classes[:5]}...; evaluate on the same data")
    other = (a.labels != b.labels) & (a.labels != LEFT_OUT) & (b.labels != LEFT_OUT)
    if other.any():
        at = int(other.argmax())
        raise ValueError(
            f"{int(other.sum())} images have other labels, such as {first.names[at]!r} ({a.labels[at]} and {b.labels[at]}): "
            "evaluate on the same data"
        )


class Answers:
    """What a model predicts for the images of one process, batch by batch."""

    def __init__(self) -> None:
        self._batches: list[tuple[Tensor, ...]] = []

    def add(
        self, labels: Tensor, predicted: Tensor | None = None, confidence: Tensor | None = None, top5: Tensor | None = None
    ) -> None:
        """Adds a batch: labels [B], LEFT_OUT for images that could not be read, and of the others what `Predicted` holds."""
        read = labels >= 0
        whole = labels.int(), torch.full_like(labels, LEFT_OUT).int(), torch.zeros(len(labels)), torch.zeros_like(read)
        for values, own in zip(whole[1:], (predicted, confidence, top5), strict=True):
            if own is not None:
                values[read] = own.to(values.dtype)
        self._batches.append(whole)

    def arrays(self, order: Sequence[int]) -> list[np.ndarray]:
        """labels, predicted, confidence, top5 of all images in the order of the data, [n] each; order: theirs here."""
        in_data = np.argsort(np.asarray(order))
        return [torch.cat(parts).numpy()[in_data] for parts in zip(*self._batches, strict=True)]


def class_of_output(best: Tensor, labels: Tensor, outputs: Tensor) -> Tensor:
    """The class that each output in `best` [B] stands for, NO_CLASS for none; the label [B] itself where several share it.

    outputs: of each class, [classes].
    """
    classes = torch.full((int(torch.cat((best, outputs)).max()) + 1,), NO_CLASS)
    classes[outputs] = torch.arange(len(outputs))
    return torch.where(best == outputs[labels], labels, classes[best])


def predicted_by(shares: Sequence[Sequence[np.ndarray]], images: ImageList) -> Predicted:
    """One row of what the processes predict, `Answers.arrays` of each: process r of w has the images r, r + w, r + 2 w, ..."""
    whole = []
    for parts in zip(*(share for share in shares if share), strict=True):
        values = np.empty(sum(map(len, parts)), parts[0].dtype)
        for rank, part in enumerate(parts):
            values[rank :: len(shares)] = part
        whole.append(values)
    return Predicted(images, *whole)


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
        images = ImageList(names, classes)
        rows = {
            tuple(key): Predicted(images, labels, *row) for key, *row in zip(keys, predicted, confidence, top5, strict=True)
        }
    except (EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged: delete it, and its rows are made again by the same evaluation") from error
    return Predictions(names, labels, classes, rows)


def write_predictions(found: Mapping[Key, Predicted], folder: str | Path) -> None:
    """Writes the rows, all of the same images, whole or not at all; the file is removed where there are none."""
    path, rows = Path(folder) / FILE, [*found.values()]
    if not rows:
        path.unlink(missing_ok=True)
        return
    images, labels = rows[0].images, np.max([row.labels for row in rows], axis=0)  # one row may have read what another left out
    largest = max(len(images.classes), *(row.predicted.max() for row in rows)) - NO_CLASS
    smallest = np.uint16 if largest <= np.iinfo(np.uint16).max else np.uint32
    with atomic_write(path) as part, part.open("wb") as file:
        np.savez(
            file,
            names=_packed(images.names),
            classes=_packed(images.classes),
            keys=_packed([*found]),
            labels=labels.astype(np.int32),
            predicted=np.stack([row.predicted - NO_CLASS for row in rows]).astype(smallest),
            confidence=np.stack([row.confidence for row in rows]).astype(np.float16),
            top5=np.packbits(np.stack([row.top5 for row in rows]), axis=1),
        )


def _packed(value: Sequence[Any]) -> np.ndarray:
    """Plain values as compressed JSON, uint8 [bytes]."""
    return np.frombuffer(zlib.compress(json.dumps(value).encode(), 1), np.uint8)


def _unpacked(stored: np.ndarray) -> Any:
    return json.loads(zlib.decompress(stored.tobytes()))
