"""Names of the training and the evaluation split, and the division of images that have none."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import PurePosixPath
from typing import Any, Literal, TypeVar

import numpy as np

Split = Literal["train", "val"]
SPLITS: dict[str, tuple[str, ...]] = {  # names that folders, files and tables have for a split, the first found is used
    "train": ("train", "training"),
    "val": ("val", "validation", "valid", "test"),
}
NAMES = frozenset(name for names in SPLITS.values() for name in names)
Sample = TypeVar("Sample", bound=tuple[Any, Any])


def one_of(names: Iterable[str], present: Iterable[str]) -> str | None:
    """Return the first of the names that is present; None if none is."""
    found = set(present)
    return next((name for name in names if name in found), None)


def split_of(split: Split, present: Iterable[str]) -> str | None:
    """Return the first name of `split` in SPLITS that is present, e.g. "validation" for "val"; None if none is."""
    return one_of(SPLITS[split], present)


def split_word(path: str, inside: str = "") -> str:
    """Return the first name of a split, as "validation", among a path's folders, then the parts of its file's name; else "".

    Args:
        path: below the data's folder, such as "val/0001.tar" or "images-train_0001.tar".
        inside: path of an image inside this file, whose first folder names the split if `path` names none.
    """
    words = [*PurePosixPath(path).parts[:-1], *re.split(r"[-_.]", PurePosixPath(path).name), *PurePosixPath(inside).parts[:1]]
    return next((word for word in words if word in NAMES), "")


def divided(samples: Sequence[Sample], split: Split, val_fraction: float | None, where: str) -> list[Sample]:
    """Divide the (source, label) samples of data without an evaluation split, and return those of `split`.

    Of each label `val_fraction`, at least one and not all, is for evaluation; a label's only sample is for training. The choice
    depends on samples and `val_fraction` alone, so no sample is in both splits. ValueError without `val_fraction`, or if there
    is nothing to evaluate; `where` is the name of the data in it.
    """
    if val_fraction is None:
        raise ValueError(
            f"{where} has no evaluation split ({', '.join(SPLITS['val'])}): set the share of the images to evaluate with "
            "--val-fraction, as 0.1 (data.reading.val_fraction)"
        )
    of_class: dict[Any, list[int]] = defaultdict(list)
    for index, (_, label) in enumerate(samples):
        of_class[label].append(index)
    chosen: set[int] = set()
    for label, indices in of_class.items():
        order = np.random.default_rng(label).permutation(len(indices))
        number = min(max(1, round(val_fraction * len(indices))), len(indices) - 1)
        chosen.update(indices[i] for i in order[:number])
    if not chosen:
        raise ValueError(f"{where}: every class has one image, so none is left to evaluate: add images or an evaluation split")
    return [sample for index, sample in enumerate(samples) if (index in chosen) == (split == "val")]


def chosen(split: Split, present: Iterable[str], val_fraction: float | None) -> tuple[str | None, bool]:
    """Return which of the named splits to read for `split`, and whether it has to be divided.

    Training takes the whole training split where there is no evaluation split, unless `val_fraction` is given.

    Returns:
        The name in `present`, or None if there is none; and whether the images of this name, or all images where no name is
        one of a split, are for training and evaluation and have to be divided by `divided`. (None, False) if the data has an
        evaluation split only, and `split` is "train".
    """
    names = set(present)
    if split_of("val", names) is not None:
        return split_of(split, names), False
    train = split_of("train", names)
    return train, train is None or split == "val" or val_fraction is not None


def of_split(
    samples: Sequence[Sample], words: Sequence[str], split: Split, val_fraction: float | None, where: str
) -> list[Sample]:
    """Return the (source, label) samples of a split.

    Without an evaluation split, `val_fraction` divides the training samples, or all if no word names a split; ValueError if it
    is then needed and None (`chosen`), or if "train" is asked for and the data have an evaluation split only.

    Args:
        words: name of the split of each sample, "" where it has none.
        where: name of the data, for errors.
    """
    own, whole = chosen(split, words, val_fraction)
    if own is None and not whole:
        raise ValueError(f"{where} has the splits {', '.join(sorted(set(words) - {''}))}, and none for {split!r}")
    found = [sample for sample, word in zip(samples, words, strict=True) if own in (None, word)]
    return divided(found, split, val_fraction, where) if whole else found
