"""Names of the training and the evaluation split, and the division of images that have none."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Literal, TypeVar

import numpy as np

Split = Literal["train", "val"]
SPLITS: dict[str, tuple[str, ...]] = {  # names that folders, files and tables have for a split, the first found is used
    "train": ("train", "training"),
    "val": ("val", "validation", "valid", "test"),
}
T = TypeVar("T")


def one_of(names: Iterable[str], present: Iterable[str]) -> str | None:
    """Return the first of the names that is present; None if none is."""
    found = set(present)
    return next((name for name in names if name in found), None)


def split_of(split: Split, present: Iterable[str]) -> str | None:
    """Return the name that `split` has among those present, e.g. "validation" for "val"; None if it has none."""
    return one_of(SPLITS[split], present)


def divided(items: Sequence[T], labels: Sequence[int], split: Split, val_fraction: float | None, where: str) -> list[T]:
    """Return the items of a split of data that is not divided: of each class `val_fraction`, at least one, is for evaluation.

    The choice depends on the order of the items alone, so training and evaluation agree. ValueError without `val_fraction`.
    """
    if val_fraction is None:
        raise ValueError(
            f"{where} has no evaluation split ({', '.join(SPLITS['val'])}): set the share of the images to evaluate with "
            "--val-fraction, as 0.1 (data.reading.val_fraction)"
        )
    of_class: dict[int, list[int]] = defaultdict(list)
    for index, label in enumerate(labels):
        of_class[label].append(index)
    chosen: set[int] = set()
    for label, indices in of_class.items():
        order = np.random.default_rng(label).permutation(len(indices))
        chosen.update(indices[i] for i in order[: max(1, round(val_fraction * len(indices)))])
    return [item for index, item in enumerate(items) if (index in chosen) == (split == "val")]
