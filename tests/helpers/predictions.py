"""Predictions with a given number of correct images per class."""

import numpy as np

from vitrel.evaluate.prepare import ImageList
from vitrel.evaluate.score import NO_CLASS, Predicted


def predicted(classes, hits, n=10):
    """Return predictions of n images per class: the first hits[class] correct, the rest as the next class (or none)."""
    labels = np.repeat(np.arange(len(classes), dtype=np.int32), n)
    right = np.concatenate([np.arange(n) < count for count in hits])
    names = ImageList([f"{classes[label]}/{at}.jpg" for at, label in enumerate(labels)], [*classes])
    other = (labels + 1) % len(classes) if len(classes) > 1 else np.full_like(labels, NO_CLASS)
    guess = np.where(right, labels, other).astype(np.int32)
    return Predicted(names, labels, guess, np.full(len(labels), 0.5, np.float32), right)
