"""Predictions by numbers of hits."""

import numpy as np

from vitrel.evaluate.images import ImageList
from vitrel.evaluate.predictions import Predicted


def predicted(classes, hits, n=10):
    """n images of each class, of which the first hits[class] are predicted right, and the others to be of the next class."""
    labels = np.repeat(np.arange(len(classes), dtype=np.int32), n)
    right = np.concatenate([np.arange(n) < count for count in hits])
    names = ImageList([f"{classes[label]}/{at}.jpg" for at, label in enumerate(labels)], [*classes])
    guess = np.where(right, labels, labels + 1).astype(np.int32)
    return Predicted(names, labels, guess, np.full(len(labels), 0.5, np.float32), right)
