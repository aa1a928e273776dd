"""Classification metrics with 95 % intervals, tests of paired predictions, and a hash of a model's state dict."""

import hashlib
import math
from collections import Counter
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ECE_BINS = 15
Z95 = 1.959963984540054
# Student's t at 97.5 % for 1 to 30 degrees of freedom, written out to avoid a dependency on SciPy
# fmt: off
T975 = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448, 2.1314,
    2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)
# fmt: on


def wilson(hits: int, n: int) -> tuple[float, float]:
    """95 % score interval (low, high) of the proportion hits / n, in percent (Wilson 1927).

    Unlike the normal approximation it has a positive width at 0 and n hits. ValueError unless 0 <= hits <= n and n > 0.
    """
    if not 0 <= hits <= n or n == 0:
        raise ValueError(f"wilson interval needs 0 <= hits <= n and n > 0, got hits={hits}, n={n}")
    share, z2 = hits / n, Z95 * Z95
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    # exactly 0 and 100 at the ends, where rounding could exclude the share itself from the interval
    return 100 * (centre - half) * (hits > 0), 100.0 if hits == n else 100 * (centre + half)


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % Student interval (low, high) of the mean of two or more independent values, in their unit."""
    n = len(values)
    if n < 2:
        raise ValueError(f"an interval over seeds needs at least 2 values, got {n}")
    mean = sum(values) / n
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
    half = (T975[n - 2] if n - 1 <= len(T975) else Z95) * deviation / math.sqrt(n)
    return mean - half, mean + half


def paired_interval(n: int, only_a: int, only_b: int) -> tuple[float, float]:
    """95 % score interval (low, high) of accuracy a minus accuracy b on the same n images, in percentage points.

    Tango 1998 (Statistics in Medicine 17, 891-908): all differences that the score test of paired proportions does not reject.
    only_a, only_b: number of images that only a, or only b, classifies correctly.
    """
    if min(only_a, only_b) < 0 or only_a + only_b > n or n == 0:
        raise ValueError(f"paired_interval needs n > 0, and counts of at most n images, got {n=}, {only_a=}, {only_b=}")
    estimate = (only_a - only_b) / n

    def rejected(difference: float) -> bool:
        # q: maximum-likelihood share of images that only b gets right, given the difference
        b = -only_a - only_b + (2 * n - only_a + only_b) * difference
        c = -only_b * difference * (1 - difference)
        q = (math.sqrt(max(0.0, b * b - 8 * n * c)) - b) / (4 * n)
        variance = n * (2 * q + difference * (1 - difference))
        return (only_a - only_b - n * difference) ** 2 > Z95 * Z95 * max(variance, 0.0)

    ends = []
    for outside in (-1.0, 1.0):
        inside = estimate
        for _ in range(60):
            middle = (inside + outside) / 2
            inside, outside = (inside, middle) if rejected(middle) else (middle, outside)
        ends.append(100 * inside)
    return ends[0], ends[1]


def mcnemar(only_a: int, only_b: int) -> float:
    """Two-sided p-value of McNemar's exact (binomial) test of the hypothesis that two models are equally accurate.

    only_a, only_b: number of images that only a, or only b, classifies correctly.
    """
    n = only_a + only_b
    logs = [math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1) for k in range(min(only_a, only_b) + 1)]
    return min(1.0, 2 * math.fsum(math.exp(log - n * math.log(2)) for log in logs))


def difference_interval(ours: Sequence[float], theirs: Sequence[float] | float, n: int) -> tuple[float, float]:
    """Return the mean difference of two models' top-1, `ours` minus `theirs` in points, and half its 95 % interval.

    ours, theirs: top-1 in percent on n images, one value per seed in the same order; differences are taken seed by seed.
    `theirs` may be a number, taken as exact. The interval covers the choice of images: normal, of two independent samples of n
    images, or of one if `theirs` is a number, after adding a hit and a miss to each (Agresti and Caffo 2000). With two or more
    seeds, Student's interval over seeds is used where it is wider.
    """
    sides = [ours] if isinstance(theirs, (int, float)) else [ours, theirs]
    subtracted = [theirs] * len(ours) if isinstance(theirs, (int, float)) else theirs
    differences = [a - b for a, b in zip(ours, subtracted, strict=True)]
    shares = [(n * sum(side) / len(side) / 100 + 1) / (n + 2) for side in sides]
    half = 100 * Z95 * math.sqrt(sum(share * (1 - share) for share in shares) / (n + 2))
    if len(differences) > 1:
        low, high = t_interval(differences)
        half = max(half, (high - low) / 2)
    return sum(differences) / len(differences), half


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
        low, high = wilson(self.hits1, self.n)
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
