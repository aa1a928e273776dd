"""Predictions of a classifier, made by hand."""

import numpy as np

from vitrel.evaluate.tasks.base import ImageList, Predicted
from vitrel.evaluate.tasks.classes import NO_CLASS
from vitrel.evaluate.tasks.classification import LEFT_OUT


def classified(images, labels, guess, confidence=None, top5=None, among=None):
    """Return predictions from arrays [n]; images whose guess is LEFT_OUT could not be read."""
    right = np.asarray(guess) == labels
    arrays = {
        "labels": np.asarray(labels, np.int32),
        "predicted": np.asarray(guess, np.int32),
        "confidence": np.asarray(np.ones(len(right)) if confidence is None else confidence, np.float32),
        "top5": right if top5 is None else np.asarray(top5, bool),
        "among": right if among is None else np.asarray(among, bool),
    }
    return Predicted(images, arrays, arrays["predicted"] != LEFT_OUT)


def predicted(classes, hits, n=10):
    """Return predictions of n images per class: the first hits[class] correct, the rest as the next class (or none)."""
    labels = np.repeat(np.arange(len(classes), dtype=np.int32), n)
    right = np.concatenate([np.arange(n) < count for count in hits])
    names = ImageList([f"{classes[label]}/{at}.jpg" for at, label in enumerate(labels)], [*classes])
    other = (labels + 1) % len(classes) if len(classes) > 1 else np.full_like(labels, NO_CLASS)
    return classified(names, labels, np.where(right, labels, other), np.full(len(labels), 0.5))
