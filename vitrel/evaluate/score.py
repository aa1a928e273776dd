"""From predictions to the metrics of a row, for classification: top-1, calibration, the prediction of every image.

A new task has its own form of `Classification`, the rest of the pipe stays.
"""

import hashlib
import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from timm.data import ImageNetInfo, infer_imagenet_subset
from torch import Tensor

from vitrel.evaluate.checkpoint import TrainedModel
from vitrel.evaluate.prepare import ImageList
from vitrel.evaluate.statistics import wilson


def class_outputs(trained: TrainedModel, classes: Sequence[str], data: str) -> tuple[int, ...]:
    """Return the index of the model's output for each class of the data, in the data's order.

    A model that knows its classes has to know all classes of the data, by name, and may know more. For others:
    `trained.outputs` where it is given; an ImageNet head where the classes are named by WordNet IDs (n01440764); else the
    classes' own order, with as many outputs as classes. ValueError where classes and outputs do not match; `data` names the
    data in messages.
    """
    if trained.classes:
        return _by_name(trained, classes, data)
    count = trained.model.num_classes
    if trained.outputs is not None:
        if missing := [name for name in classes if name not in trained.outputs]:
            raise ValueError(f"the class indices of {trained.label} lack {', '.join(missing[:5])}, classes of {data}")
        if invalid := [name for name in classes if not 0 <= trained.outputs[name] < count]:
            mapping = f"{invalid[0]} to output {trained.outputs[invalid[0]]}"
            raise ValueError(f"{trained.label} has outputs 0 to {count - 1}, but its class indices map {mapping}")
        return tuple(trained.outputs[name] for name in classes)
    if (outputs := _by_wordnet(count, classes)) is not None:
        return outputs
    if count != len(classes):
        raise ValueError(
            f"{trained.label} has {count} outputs, but {data} has {len(classes)} classes: give the output of each class "
            "(--class-indices FILE, a class and its index per line)"
        )
    return tuple(range(count))


def class_map(trained: TrainedModel, classes: Sequence[str]) -> str:
    """Return the column class_map, how `class_outputs` maps classes to outputs: "order", "names" (the model knows them in
    another order, or knows more), "wordnet" (by WordNet IDs), or "file" with a digest of `trained.outputs`; followed by
    ", restricted" where only these outputs are compared.
    """
    if trained.classes:
        source = "order" if list(trained.classes) == list(classes) else "names"
    elif trained.outputs is not None:
        pairs = repr(sorted(trained.outputs.items()))
        source = f"file {hashlib.sha256(pairs.encode('utf-8', 'surrogatepass')).hexdigest()[:12]}"
    else:
        by_id = _by_wordnet(trained.model.num_classes, classes) is not None
        source = "wordnet" if by_id else "order"
    return f"{source}, restricted" if trained.restrict else source


def _by_wordnet(count: int, classes: Sequence[str]) -> tuple[int, ...] | None:
    """The outputs of classes named by WordNet IDs, for an ImageNet head of `count` outputs; None for other names or heads."""
    subset = infer_imagenet_subset({"num_classes": count})
    if subset is None or not all(re.fullmatch(r"n\d{8}", name) for name in classes):
        return None
    index = {name: i for i, name in enumerate(ImageNetInfo(subset).label_names())}
    return tuple(index[name] for name in classes) if all(name in index for name in classes) else None


def _by_name(trained: TrainedModel, classes: Sequence[str], data: str) -> tuple[int, ...]:
    """The outputs of classes by the names that the model knows; ValueError where it does not know all, or one name twice."""
    if list(trained.classes) == list(classes):
        return tuple(range(len(classes)))
    index = {name: i for i, name in enumerate(trained.classes)}
    if unknown := [name for name in classes if name not in index]:
        raise ValueError(
            f"{trained.path} was trained on {len(trained.classes)} classes ({_listed(trained.classes)}), which lack "
            f"{len(unknown)} of the {len(classes)} classes of {data}: {_listed(unknown)}. Evaluate on data with classes of the "
            "training data alone, under the same names"
        )
    if len(index) < len(trained.classes):
        twice = next(name for name in trained.classes if trained.classes.count(name) > 1)
        raise ValueError(f"{trained.path} has several outputs named {twice}: evaluate on data with its classes in its order")
    return tuple(index[name] for name in classes)


def _listed(names: Sequence[str], most: int = 5) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


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


LEFT_OUT = -1  # no prediction: the image could not be read


NO_CLASS = -2  # the predicted output stands for none of the data's classes


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


class Classification:
    """The score of a classifier's predictions, batch by batch.

    outputs: the model's output for each class of the data. count: number of the model's outputs. restrict: compare only those
    of the data's classes. Attributes: `tally`, the metrics; `answers`, the predictions; `left_out`, the number of images that
    could not be read.
    """

    def __init__(self, outputs: Sequence[int], count: int, restrict: bool) -> None:
        self.tally, self.answers, self.left_out = Tally(), Answers(), 0
        self._outputs, self._restrict = torch.tensor(outputs), restrict
        self._among = self._outputs if len(outputs) < count else None

    def add(self, labels: Tensor, logits: Tensor) -> None:
        """Add a batch of labels [B], -1 where an image could not be read, and logits [R, K] of the others."""
        known, outputs = labels[labels >= 0], self._outputs
        self.left_out += len(labels) - len(known)
        if not len(known):
            self.answers.add(labels)
        elif self._restrict:
            self.answers.add(labels, *self.tally.update(logits[:, outputs], known))
        else:
            best, *rest = self.tally.update(logits, outputs[known], self._among)
            self.answers.add(labels, class_of_output(best, known, outputs), *rest)


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
