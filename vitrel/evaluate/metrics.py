"""Accuracy of a classifier with its uncertainty, and the fingerprint that shows whether a model was touched."""

import hashlib
import math
from collections import Counter
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ECE_BINS = 15
Z95 = 1.959963984540054
# Student's t at 97.5 % for 1 to 30 degrees of freedom: SciPy is no dependency for thirty numbers.
# fmt: off
T975 = (
    12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281, 2.2010, 2.1788, 2.1604, 2.1448, 2.1314,
    2.1199, 2.1098, 2.1009, 2.0930, 2.0860, 2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423,
)
# fmt: on


def wilson(hits: int, n: int) -> tuple[float, float]:
    """95 % score interval of a proportion hits / n, in percent (Wilson 1927): right at 0 and n, where hits ± 1.96 s is not."""
    if not 0 <= hits <= n or n == 0:
        raise ValueError(f"wilson interval needs 0 <= hits <= n and n > 0, got hits={hits}, n={n}")
    share, z2 = hits / n, Z95 * Z95
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z95 / (1 + z2 / n) * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n))
    # exactly 0 and 100 at the ends, where rounding would put a bound beyond the share itself
    return 100 * (centre - half) * (hits > 0), 100.0 if hits == n else 100 * (centre + half)


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % Student interval of the mean of two or more independent values, in their unit."""
    n = len(values)
    if n < 2:
        raise ValueError(f"an interval over seeds needs at least 2 values, got {n}")
    mean = sum(values) / n
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
    half = (T975[n - 2] if n - 1 <= len(T975) else Z95) * deviation / math.sqrt(n)
    return mean - half, mean + half


def difference_interval(ours: Sequence[float], theirs: Sequence[float] | float, n: int) -> tuple[float, float]:
    """(mean, half width of the 95 % interval) of the top-1 `ours` minus `theirs`, percent, over n images each.

    ours, theirs: one value a seed, in the same order; differences are taken seed by seed. `theirs` may be a known number.
    The interval is Student's over seeds, and never narrower than that over images of two independent samples (Agresti and
    Caffo 2000: normal, with one hit and one miss more in each, so that it has a width at 0 and 100 % too).
    """
    sides = [ours] if isinstance(theirs, (int, float)) else [ours, theirs]
    others = [theirs] * len(ours) if isinstance(theirs, (int, float)) else theirs
    differences = [a - b for a, b in zip(ours, others, strict=True)]
    shares = [(n * sum(side) / len(side) / 100 + 1) / (n + 2) for side in sides]
    half = 100 * Z95 * math.sqrt(sum(share * (1 - share) for share in shares) / (n + 2))
    if len(differences) > 1:
        low, high = t_interval(differences)
        half = max(half, (high - low) / 2)
    return sum(differences) / len(differences), half


class Tally:
    """Running top-1, top-5, negative log-likelihood and calibration over batches of logits [B, K] and labels [B].

    With K < 5 classes top-5 is top-K, which is 100 %, as in timm. `class_n` and `class_hits` count images and hits by label.
    """

    def __init__(self) -> None:
        self.n = self.hits1 = self.hits5 = 0
        self.nll_sum = 0.0
        self.class_n: Counter[int] = Counter()
        self.class_hits: Counter[int] = Counter()
        self.bin_gap: Counter[int] = Counter()  # hits minus confidence, by bin of the confidence

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Adds one batch; raises FloatingPointError when a logit is not finite, since every rank would be arbitrary."""
        logits = logits.double()
        if not torch.isfinite(logits).all():
            raise FloatingPointError("the logits hold NaN or infinity")
        ranked = logits.topk(min(5, logits.shape[-1]), dim=-1).indices  # [B, min(5, K)]
        right = ranked == labels[:, None]
        self.n += len(labels)
        self.hits1 += int(right[:, 0].sum())
        self.hits5 += int(right.sum())
        self.nll_sum += F.cross_entropy(logits, labels, reduction="sum").item()
        self.class_n.update(labels.tolist())
        self.class_hits.update(labels[right[:, 0]].tolist())
        confidence = logits.softmax(-1).amax(-1)  # [B]
        bins = (confidence * ECE_BINS).ceil().long() - 1  # (0, 1/15], (1/15, 2/15], ...
        for place, gap in zip(bins.tolist(), (right[:, 0].double() - confidence).tolist(), strict=True):
            self.bin_gap[place] += gap

    def add(self, other: "Tally") -> None:
        """Adds what another one counted on other images."""
        for name, value in vars(other).items():
            if isinstance(value, Counter):
                getattr(self, name).update(value)
            else:
                setattr(self, name, getattr(self, name) + value)

    def columns(self) -> dict[str, float | int]:
        """The columns top1, top1_err, top5, top5_err (percent), top1_low, top1_high (95 % Wilson), nll (nats), ece (percent;
        15 equal bins, arXiv 1706.04599, eq. 3), n, majority (percent).
        """
        top1, top5 = 100 * self.hits1 / self.n, 100 * self.hits5 / self.n
        low, high = wilson(self.hits1, self.n)
        return {
            "top1": round(top1, 4),
            "top1_err": round(100 - top1, 4),
            "top1_low": round(low, 4),
            "top1_high": round(high, 4),
            "top5": round(top5, 4),
            "top5_err": round(100 - top5, 4),
            "nll": round(self.nll_sum / self.n, 6),
            "ece": round(100 * sum(map(abs, self.bin_gap.values())) / self.n, 4),
            "n": self.n,
            "majority": round(100 * max(self.class_n.values()) / self.n, 4),
        }


def state_hash(model: nn.Module) -> str:
    """sha256 over the state dict: every name, dtype, shape and byte, in order."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
