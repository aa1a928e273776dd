"""Metrics of a row, and the prediction of every image (predictions.npz).

predictions.npz lies beside results.csv. Image names, labels and classes are stored once; a row takes 4 1/4 bytes per image:
predicted class, confidence in half precision, one bit for top-5 and one for top-1 among the data's classes. `Predicted.scores`
are what `vitrel.evaluate.statistics` compares.
"""

import hashlib
import json
import math
import zipfile
import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vitrel.common.files import atomic_write
from vitrel.evaluate.images import ImageList
from vitrel.evaluate.statistics import wilson

ECE_BINS = 15


class Tally:
    """Running top-1, top-5, negative log-likelihood and calibration error over batches of logits [B, K] and labels [B].

    With K < 5 classes top-5 is top-K, that is 100 %, as in timm. `class_n` counts images by label.
    """

    def __init__(self) -> None:
        self.n = self.hits1 = self.hits5 = self.n_among = self.hits_among = 0
        self.nll_sum = 0.0
        self.class_n: Counter[int] = Counter()
        self.bin_gap: Counter[int] = Counter()  # sum of (hit - confidence), by bin of the confidence

    def update(self, logits: Tensor, labels: Tensor, classes: Tensor | None = None) -> tuple[Tensor, ...]:
        """Add a batch of logits [B, K] and labels [B]; return four tensors [B]: the index of the highest logit, its
        probability, whether the label is among the 5 highest, and whether it is the highest of `classes`. FloatingPointError
        when a logit is not finite.

        classes: the labels of the data's classes, for top1_among; None: all K.
        """
        logits = logits.double()
        if not torch.isfinite(logits).all():
            raise FloatingPointError("the logits hold NaN or infinity")
        ranked = logits.topk(min(5, logits.shape[-1]), dim=-1).indices  # [B, min(5, K)]
        right = ranked == labels[:, None]
        self.n += len(labels)
        self.hits1 += int(right[:, 0].sum())
        self.hits5 += int(right.sum())
        among = right[:, 0]
        if classes is not None:
            among = classes[logits[:, classes].argmax(-1)] == labels
            self.n_among += len(labels)
            self.hits_among += int(among.sum())
        self.class_n.update(labels.tolist())
        self.nll_sum += F.cross_entropy(logits, labels, reduction="sum").item()
        confidence = logits.softmax(-1).amax(-1)  # [B]
        bins = (confidence * ECE_BINS).ceil().long() - 1  # (0, 1/15], (1/15, 2/15], ...
        for confidence_bin, gap in zip(bins.tolist(), (right[:, 0].double() - confidence).tolist(), strict=True):
            self.bin_gap[confidence_bin] += gap
        return ranked[:, 0], confidence, right.any(1), among

    def add(self, other: "Tally") -> None:
        """Add the counts of another Tally, of other images."""
        for name, value in vars(other).items():
            if isinstance(value, Counter):
                getattr(self, name).update(value)
            else:
                setattr(self, name, getattr(self, name) + value)

    def columns(self) -> dict[str, float | int]:
        """Return the metrics as columns of results.csv: top1, top1_err, top5, top5_err (percent), top1_low, top1_high (95 %
        Wilson interval), top1_among (percent, among the data's classes; nan where these are all), nll (nats), ece (percent; 15
        equal bins, arXiv 1706.04599, eq. 3), n, and majority (share of the most frequent class, percent).
        """
        top1, top5 = 100 * self.hits1 / self.n, 100 * self.hits5 / self.n
        low, high = wilson(self.hits1 / self.n, self.n)
        return {
            "top1": round(top1, 4),
            "top1_err": round(100 - top1, 4),
            "top1_low": round(low, 4),
            "top1_high": round(high, 4),
            "top1_among": round(100 * self.hits_among / self.n_among, 4) if self.n_among else math.nan,
            "top5": round(top5, 4),
            "top5_err": round(100 - top5, 4),
            "nll": round(self.nll_sum / self.n, 6),
            "ece": round(100 * sum(map(abs, self.bin_gap.values())) / self.n, 4),
            "n": self.n,
            "majority": round(100 * max(self.class_n.values()) / self.n, 4),
        }


def state_hash(model: nn.Module) -> str:
    """SHA-256 of a model's state dict, as hex: every name, dtype, shape and byte, in order."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


PREDICTIONS = "predictions.npz"
LEFT_OUT = -1  # no prediction: the image could not be read
NO_CLASS = -2  # the predicted output stands for none of the data's classes
Key = tuple[str, ...]


@dataclass(frozen=True, eq=False)
class Predicted:
    """The predictions of one row of an evaluation, for n images in the order of the data.

    images: names of the images and classes. labels: int32 [n], LEFT_OUT where the image could not be read. predicted:
    int32 [n], index of the class; LEFT_OUT where the image could not be read, NO_CLASS where the highest logit is that of an
    output that stands for none of the classes. confidence: float32 [n], the highest probability, stored as float16; 0 where
    the image could not be read. top5: bool [n], whether the label is among the 5 highest logits. among: bool [n], whether it
    has the highest logit among the outputs of the data's classes; None: the model has no others.
    """

    images: ImageList
    labels: np.ndarray
    predicted: np.ndarray
    confidence: np.ndarray
    top5: np.ndarray
    among: np.ndarray | None = None

    @property
    def seen(self) -> np.ndarray:
        """Whether each image was read, bool [n]."""
        return self.predicted != LEFT_OUT

    @property
    def right(self) -> np.ndarray:
        """Whether each image is classified correctly, bool [n]; False where it could not be read."""
        return (self.predicted == self.labels) & self.seen

    @property
    def right_among(self) -> np.ndarray:
        """Whether each image is classified correctly among the data's classes, bool [n]; False where it could not be read."""
        return self.right if self.among is None else self.among & self.seen

    def scores(self, metric: str = "top1") -> np.ndarray:
        """Return the score of each image, 1 where it is classified correctly, else 0; NaN where it could not be read: [n].

        metric: "top1", or "top1_among", among the data's classes.
        """
        return np.where(self.seen, self.right_among if metric == "top1_among" else self.right, np.nan)

    def class_counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Return two arrays int64 [classes]: images of each class that were read, and how many are classified correctly."""
        n, hits = (np.bincount(self.labels[mask], minlength=len(self.images.classes)) for mask in (self.seen, self.right))
        return n, hits


@dataclass(frozen=True, eq=False)
class Predictions:
    """The content of predictions.npz: the predictions of all rows of an evaluation of n images.

    names: paths of the images relative to the data folder, in the order of the data. labels: int32 [n], LEFT_OUT where no row
    could read the image. classes: class names, by label. rows: predictions by `vitrel.evaluate.results.line_key`.
    """

    names: list[str]
    labels: np.ndarray
    classes: list[str]
    rows: Mapping[Key, Predicted]


def check_same_images(a: Predicted, b: Predicted) -> None:
    """Raise ValueError, naming the first difference, where two rows differ in images, their order, classes or labels."""
    first, second = a.images, b.images
    if first.names != second.names:
        unmatched = sorted({*first.names} ^ {*second.names})
        what = f"{len(unmatched)} are only in one of them, such as {unmatched[0]!r}" if unmatched else "their order differs"
        raise ValueError(f"the images differ ({len(first.names)} and {len(second.names)}): {what}. Evaluate on the same data")
    if first.classes != second.classes:
        raise ValueError(f"the classes differ: {first.classes[:5]}... and {second.classes[:5]}...; evaluate on the same data")
    differs = (a.labels != b.labels) & (a.labels != LEFT_OUT) & (b.labels != LEFT_OUT)
    if differs.any():
        index = int(differs.argmax())
        raise ValueError(
            f"the labels of {int(differs.sum())} images differ, such as {first.names[index]!r} ({a.labels[index]} and "
            f"{b.labels[index]}): evaluate on the same data"
        )


class Answers:
    """The predictions of one process, collected batch by batch."""

    def __init__(self) -> None:
        self._batches: list[tuple[Tensor, ...]] = []

    def add(self, labels: Tensor, *values: Tensor) -> None:
        """Add a batch: labels [B], LEFT_OUT for unreadable images.

        values: predicted, confidence, top5 and among (`Predicted`) of the readable images only; left out where there are none.
        """
        read = labels >= 0
        none = torch.zeros_like(read)
        batch = labels.int(), torch.full_like(labels, LEFT_OUT).int(), torch.zeros(len(labels)), none, none.clone()
        if values:
            for column, new in zip(batch[1:], values, strict=True):
                column[read] = new.to(column.dtype)
        self._batches.append(batch)

    def arrays(self, order: Sequence[int]) -> list[np.ndarray]:
        """Return labels, predicted, confidence, top5 and among, [n] each, in the order of the data.

        order: index in the data of each image, in the order in which images were added.
        """
        in_data = np.argsort(np.asarray(order))
        return [torch.cat(parts).numpy()[in_data] for parts in zip(*self._batches, strict=True)]


def class_of_output(best: Tensor, labels: Tensor, outputs: Tensor) -> Tensor:
    """Return the class that each output in `best` [B] stands for, NO_CLASS for outputs without a class.

    outputs: the output of each class, [classes]. Where several classes share an output, it counts as the label [B] if that is
    among them.
    """
    classes = torch.full((int(torch.cat((best, outputs)).max()) + 1,), NO_CLASS)
    classes[outputs] = torch.arange(len(outputs))
    return torch.where(best == outputs[labels], labels, classes[best])


def predicted_by(shares: Sequence[Sequence[np.ndarray]], images: ImageList) -> Predicted:
    """Merge the predictions of several processes into one row; shares: `Answers.arrays` of every process, by rank.

    Rank r of w has the images r, r + w, r + 2 w, ...
    """
    columns = []
    for parts in zip(*(share for share in shares if share), strict=True):
        values = np.empty(sum(map(len, parts)), parts[0].dtype)
        for rank, part in enumerate(parts):
            values[rank :: len(shares)] = part
        columns.append(values)
    return Predicted(images, *columns)


def read_predictions(folder: str | Path) -> Predictions | None:
    """Read predictions.npz in the folder of an evaluation; None where it is missing. ValueError where it is damaged."""
    path = Path(folder) / PREDICTIONS
    if not path.exists():
        return None
    try:
        with np.load(path, allow_pickle=False) as file:
            stored = {name: file[name] for name in file.files}
        names, classes, keys = (_unpacked(stored[name]) for name in ("names", "classes", "keys"))
        labels, n = stored["labels"].astype(np.int32), len(names)
        top5, among = (np.unpackbits(stored[name], axis=1, count=n).astype(bool) for name in ("top5", "among"))  # [rows, n]
        predicted = stored["predicted"].astype(np.int32) + NO_CLASS
        confidence = stored["confidence"].astype(np.float32)
        if not labels.shape == (n,) or not predicted.shape == confidence.shape == top5.shape == among.shape == (len(keys), n):
            raise ValueError("shapes")
        images = ImageList(names, classes)
        columns = zip(keys, predicted, confidence, top5, among, strict=True)
        rows = {tuple(key): Predicted(images, labels, *row) for key, *row in columns}
    except (EOFError, KeyError, TypeError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is damaged: delete it and repeat the evaluation, which computes its rows again") from error
    return Predictions(names, labels, classes, rows)


def write_predictions(predictions: Mapping[Key, Predicted], folder: str | Path) -> None:
    """Write predictions.npz atomically, from predictions by `line_key`, all of the same images; without any, remove it."""
    path, rows = Path(folder) / PREDICTIONS, [*predictions.values()]
    if not rows:
        path.unlink(missing_ok=True)
        return
    images, labels = rows[0].images, np.max([row.labels for row in rows], axis=0)  # rows may differ in unreadable images
    largest = max(len(images.classes), *(row.predicted.max() for row in rows)) - NO_CLASS
    class_dtype = np.uint16 if largest <= np.iinfo(np.uint16).max else np.uint32
    with atomic_write(path) as part, part.open("wb") as file:
        np.savez(
            file,
            names=_packed(images.names),
            classes=_packed(images.classes),
            keys=_packed([*predictions]),
            labels=labels.astype(np.int32),
            predicted=np.stack([row.predicted - NO_CLASS for row in rows]).astype(class_dtype),
            confidence=np.stack([row.confidence for row in rows]).astype(np.float16),
            top5=np.packbits(np.stack([row.top5 for row in rows]), axis=1),
            among=np.packbits(np.stack([row.right_among for row in rows]), axis=1),
        )


def _packed(value: Sequence[Any]) -> np.ndarray:
    """Compress a JSON-serialisable sequence: uint8 [bytes]."""
    return np.frombuffer(zlib.compress(json.dumps(value).encode(), 1), np.uint8)


def _unpacked(stored: np.ndarray) -> Any:
    """Inverse of `_packed`."""
    return json.loads(zlib.decompress(stored.tobytes()))
