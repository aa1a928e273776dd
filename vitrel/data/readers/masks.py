"""Data sets for segmentation: images with masks, which give every pixel a class.

A mask is a PNG of one channel, gray or palette, of 1 to 16 bits and the size of its image. Its values are the classes, 255
where a pixel has none; the colors of a palette do not matter. Image and mask are turned by their EXIF orientation. Masks are in
folders beside the images (`mask_reader`).

Every mask is decoded once when a data set is made: one that does not fit its image or the classes, or has no pixel with a
class, is an error before training, as is a class that no mask has. Nothing is resampled to fit.
"""

import os
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrel.data.prepare import Picture
from vitrel.data.readers.base import READERS, Draw, ImageSet, Reader
from vitrel.data.readers.classes import read_class_names
from vitrel.data.readers.decode import IGNORED, BadImage, Reading, decode_mask, image_size
from vitrel.data.readers.files import Files, below
from vitrel.data.readers.folder import SHOWN, Scan, split_folder
from vitrel.data.readers.splits import Split, divided

LAYOUT = "images/<split>/*.jpg, masks/<split>/*.png with the same names, and classes.txt, whose line i names class i from 0"
_checked: set[tuple] = set()  # sets whose masks were checked, since an evaluation makes its set for every size


class MaskSet(ImageSet):
    """Data set of images with masks: items are (image [3, H, W] as of `ImageSet`, classes uint8 of the mask).

    With `augment` the mask [H, W] is cropped as the image; otherwise it keeps its own resolution, so masks of a batch can
    differ (`collate`), and a prediction is compared with it there. Pixels of the value 255 (`IGNORED`) have no class. All masks
    of the split are read when the set is made, once per process.

    Args:
        reader: samples are (source of the image, source of the mask), classes by value of the masks.
        expected: each of the classes 0 to expected - 1 has to occur in a mask of the split; 0: not checked.
        view: `prepare`, then `augment`, as of `ImageSet`; an `augment` has the method `joint`.
        options: the other arguments of `ImageSet`.

    Raises:
        ValueError: masks that do not fit their images or the classes, or have no pixel with a class, which the text counts and
            names some of; or expected classes that no mask has.
    """

    upright = True

    def __init__(self, reader: Reader, *view: Any, expected: int = 0, **options: Any) -> None:
        super().__init__(reader, *view, **options)
        check_masks(reader, expected)

    def read(self, index: int) -> tuple[Image.Image, np.ndarray]:
        """Return (image of mode RGB, classes uint8 [h, w]); `BadImage` if either cannot be decoded."""
        picture, mask = super().read(index)
        return picture, _values(self.reader, self.samples[index][0], mask).astype(np.uint8)

    def finish(self, picture: Picture, target: np.ndarray, draw: Draw) -> tuple[Tensor, Tensor]:
        """Return (image [3, H, W], classes uint8 of the mask): both by `augment`, without it the mask as it is, [h, w]."""
        if self.augment is not None:
            return self.augment.joint(picture, target, self.epoch, draw.index, draw.repeat, draw.size)
        return super().finish(picture, torch.from_numpy(target), draw)

    def left_out(self, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return the item that stands for an unreadable image: zeros [3, H, W], and a mask [H, W] of 255 (no class)."""
        return super().left_out(size)[0], torch.full(size, IGNORED, dtype=torch.uint8)

    def labels(self) -> list[int]:
        """Return []: the masks have the labels."""
        return []

    def sources(self) -> list[Any]:
        """Return the sources of all files that are read, in one list: of each image, and of its mask after it."""
        return [source for pair in self.samples for source in pair]


def check_masks(reader: Reader, expected: int) -> None:
    """Raise ValueError as of `MaskSet` for a reader's masks; unchanged ones that passed in this process are not read again."""
    sources = [source for pair in reader.samples for source in pair]
    key = (reader.where, *reader.classes, expected, *map(reader.name, sources), *reader.states(sources))
    if key not in _checked:
        with ThreadPoolExecutor(READERS) as readers:
            found = list(readers.map(lambda pair: _classes_of(reader, *pair), reader.samples))
        if faults := [fault for fault in found if isinstance(fault, str)]:
            raise ValueError(f"{len(faults)} of {len(found)} masks do not fit: {'; '.join(faults[:SHOWN])}")
        _check_classes(reader, np.any(found, 0), expected)
        _checked.add(key)


def _values(reader: Reader, image: Any, mask: Any) -> np.ndarray:
    """Return the values [h, w] of a mask, uint8 or uint16, from the sources of image and mask; errors as of `decode_mask`."""
    return decode_mask(reader.encoded(mask), f"the mask of {reader.title(image)}")


def _classes_of(reader: Reader, image: Any, mask: Any) -> np.ndarray | str:
    """Return which values a mask has, bool [256], or what is wrong with it, as text.

    Of a mask, or its image, that cannot be read, all are False here; it is reported when the image is read.
    """
    present, classes = np.zeros(256, bool), len(reader.classes)
    try:
        values = _values(reader, image, mask)
        size = image_size(reader.encoded(image), upright=True)
    except BadImage:
        return present
    except ValueError as error:
        return str(error)
    name = f"the mask of {reader.title(image)}"
    if values.shape != size:
        sizes = "{}x{} pixels and its image {}x{}".format(*values.shape, *size)
        return f"{name} has {sizes}, both turned by their EXIF orientation; make them the same size, nothing is resampled"
    there = np.bincount(values.ravel()).nonzero()[0]  # faster than unique
    if (beyond := there[(there >= classes) & (there != IGNORED)]).size:
        return f"{name} has the value {beyond[-1]}, beyond the {classes} classes known"
    present[there] = True
    return present if present[:classes].any() else f"{name} has no pixel with a class, only {IGNORED}"


def _check_classes(reader: Reader, seen: np.ndarray, expected: int) -> None:
    """Raise ValueError if one of the first `expected` classes is not `seen` (bool [256]: the values in all masks).

    Also if the masks have only one class, and `expected` is not 0 or some pixels have no class (255).
    """
    missing = ", ".join(f"{reader.classes[i]} (value {i})" for i in (~seen[:expected]).nonzero()[0])
    if missing or (seen[: len(reader.classes)].sum() == 1 and (expected or seen[IGNORED])):
        what = f"the class {missing}" if missing else "a second class"
        raise ValueError(
            f"no pixel of the {len(reader.samples)} masks of {reader.where} has {what}: give every pixel the number of its "
            f"class, from 0 in the order of classes.txt ({IGNORED} means no class), or take unused classes out of that file"
        )


def mask_reader(root: str, split: Split, reading: Reading) -> Files:
    """Return the images and masks of a split of a folder that holds `images/<split>/`, `masks/<split>/` and `classes.txt`.

    The evaluation split may have the names that it has for classification; without it, or without folders of splits,
    `reading.val_fraction` divides the images. Links and hidden files are as in `Scan`, where `images/<split>` and
    `masks/<split>` are the folders that may be links. ValueError for another layout, and for missing, doubled or left over
    masks.
    """
    classes = mask_classes(root)
    root = root.rstrip("/")
    own, whole = split_folder(f"{root}/images", split, reading.val_fraction)
    folders = [os.path.normpath(f"{folder}/{own.relative_to(f'{root}/images')}") for folder in ("images", "masks")]
    if not all(os.path.isdir(f"{root}/{folder}") for folder in folders):
        raise ValueError(f"found no {' and '.join(folders)} for segmentation in {root}: its layout must be {LAYOUT}")
    found: dict[str, tuple[list[str], list[str]]] = defaultdict(lambda: ([], []))
    for path, kind in Scan(root, folders, reading.follow_links).samples:
        found[os.path.splitext(below(path, f"{root}/{folders[kind]}"))[0]][kind].append(path)
    pairs = [(images[0], masks[0]) for images, masks in found.values() if len(images) == len(masks) == 1]
    if len(pairs) < len(found):
        wrong = [f"{name}: {len(i)} and {len(m)}" for name, (i, m) in found.items() if not len(i) == len(m) == 1]
        raise ValueError(
            f"{len(wrong)} of {len(found)} names in {root}/{folders[0]} and {folders[1]} have not one image and one mask: "
            f"{', '.join(wrong[:SHOWN])}; the layout is {LAYOUT}"
        )
    if whole:
        samples = [(pair, 0) for pair in pairs]
        pairs = [pair for pair, _ in divided(samples, split, reading.val_fraction, f"{root}/{folders[0]}")]
    return Files(classes, pairs, root, root)


def mask_classes(root: str) -> list[str]:
    """Return the class names of a folder with masks, the lines of its `classes.txt`; ValueError unless it lists 1 to 255."""
    path = f"{root.rstrip('/')}/classes.txt"
    try:
        classes = read_class_names(path)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}): write one class a line, line i for the value i in the masks"
        ) from error
    if not 0 < len(classes) <= IGNORED:
        raise ValueError(f"{path} names {len(classes)} classes: it must be 1 to {IGNORED}, since {IGNORED} means no class")
    return classes
