"""Data sets for segmentation: images with masks, which give every pixel a class.

A mask is a PNG of one channel, gray or palette, of 1 to 16 bits and the size of its image. Its values are the classes, 255
where a pixel has none; the colors of a palette do not matter. Image and mask are turned by their EXIF orientation. Masks are in
folders beside the images (`mask_reader`), in a column of a Hugging Face data set (`mask_rows_reader`), or in torchvision's VOC.

Every mask is decoded once when a data set is made: one that does not fit its image or the classes, or has no pixel with a
class, is an error before training, as is a class that no mask has. Nothing is resampled to fit.
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vitrel.common.files import shown
from vitrel.common.warn import warn_once
from vitrel.data.prepare import Picture
from vitrel.data.readers.base import READERS, SHOWN, Draw, ImageSet, Reader
from vitrel.data.readers.classes import read_class_names
from vitrel.data.readers.decode import IGNORED, SUFFIXES, BadImage, Reading, decode_mask, image_size
from vitrel.data.readers.files import Files, below
from vitrel.data.readers.folder import hidden
from vitrel.data.readers.hub import Rows, Source, image_columns, load, read_rows
from vitrel.data.readers.splits import Split, of_split, one_of

LAYOUT = "images/<split>/*.jpg, masks/<split>/*.png with the same names, and classes.txt, whose line i names class i from 0"
MASK_COLUMNS = ("mask", "label", "annotation", "segmentation", "segmentation_mask", "semantic_mask")
_checked: dict[tuple, np.ndarray] = {}  # of every checked set [n, 256], because evaluation makes it for every size


class MaskSet(ImageSet):
    """Data set of images with masks: items are (image [3, H, W] as of `ImageSet`, classes uint8 of the mask).

    With `augment` the mask [H, W] is that of the view; otherwise it keeps its own resolution, so masks of a batch can differ
    (`collate`), and a prediction is compared with it there. Pixels of the value `IGNORED` have no class.

    Args:
        reader: samples are (source of the image, source of the mask), classes by value of the masks.
        expected: number of classes, from 0, that have to occur in the masks of the split.
        view, options: the other arguments of `ImageSet`; `augment` has the method `joint`.

    Raises:
        ValueError: masks that do not fit their images or the classes, which the text counts and names some of, or expected
            classes that no mask has.
    """

    upright = True

    def __init__(self, reader: Reader, *view: Any, expected: int = 0, **options: Any) -> None:
        super().__init__(reader, *view, **options)
        self._present = classes_in_masks(reader, self.reading.max_pixels, expected)[self.chosen]  # bool [n, 256]

    def read(self, index: int) -> tuple[Image.Image, np.ndarray]:
        """Return (image of mode RGB, classes uint8 [h, w]); `BadImage` if either cannot be decoded."""
        picture, mask = super().read(index)
        return picture, _values(self.reader, self.samples[index][0], mask, self.reading.max_pixels).astype(np.uint8)

    def finish(self, picture: Picture, target: np.ndarray, draw: Draw) -> tuple[Tensor, Tensor]:
        """Return the item of a decoded image and its mask: augmented alike, or the image prepared and the mask as it is."""
        if self.augment is not None:
            return self.augment.joint(picture, target, self.epoch, draw.index, draw.repeat, draw.size)
        return super().finish(picture, torch.from_numpy(target), draw)

    def left_out(self, size: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return the item (H, W) that stands for an unreadable image: zeros, and a mask without classes."""
        return torch.zeros(3, *size), torch.full(size, IGNORED, dtype=torch.uint8)

    def class_counts(self) -> list[int]:
        """Return the number of images in which each class occurs."""
        return self._present.sum(0)[: len(self.classes)].tolist()

    def labels(self) -> list[int]:
        """Return []: the masks have the labels."""
        return []

    def sources(self) -> list[Any]:
        """Return the sources of each image and its mask, in order."""
        return [source for pair in self.samples for source in pair]


def classes_in_masks(reader: Reader, max_pixels: int, expected: int) -> np.ndarray:
    """Return whether each class is in each mask of a reader, bool [n, 256]; ValueError as of `MaskSet`."""
    sources = [source for pair in reader.samples for source in pair]
    key = (reader.where, *reader.classes, expected, *map(reader.name, sources), *reader.states(sources))
    if key not in _checked:
        with ThreadPoolExecutor(READERS) as readers:
            found = list(readers.map(lambda pair: _fault(reader, pair[0], pair[1], max_pixels), reader.samples))
        faults: dict[str, list[str]] = defaultdict(list)
        for (image, _), (fault, detail, _) in zip(reader.samples, found, strict=True):
            if fault:
                faults[fault].append(f"{reader.title(image)}{detail}")
        if faults:
            raise ValueError("; ".join(_counted(names, len(found), fault) for fault, names in faults.items()))
        present = np.stack([classes for _, _, classes in found])
        _check_classes(reader, present.any(0), expected)
        _checked[key] = present
    return _checked[key]


def _values(reader: Reader, image: Any, mask: Any, max_pixels: int) -> np.ndarray:
    """The values of a mask [h, w]; errors as of `decode_mask`."""
    return decode_mask(reader.encoded(mask), max_pixels, f"the mask of {reader.title(image)}")


def _fault(reader: Reader, image: Any, mask: Any, max_pixels: int) -> tuple[str, str, np.ndarray]:
    """What is wrong with a mask, details, and the classes in it [256]; unreadable files are left to reading."""
    present, classes = np.zeros(256, bool), len(reader.classes)
    try:
        values = _values(reader, image, mask, max_pixels)
        size = image_size(reader.encoded(image), max_pixels, upright=True)
    except BadImage:
        return "", "", present
    except ValueError as error:
        return "no mask of one channel (a gray or palette PNG)", f" ({error})", present
    if values.shape != size:
        sizes = "{}x{} and {}x{} pixels".format(*values.shape, *size)
        if values.shape == image_size(reader.encoded(image), max_pixels):
            sizes += ": the image is turned by its EXIF orientation, as viewers do, and the mask is not"
        return "a mask of another size, and nothing is resampled: make both the same size", f" ({sizes})", present
    there = np.bincount(values.ravel()).nonzero()[0]  # faster than unique
    if (beyond := there[(there >= classes) & (there != IGNORED)]).size:
        return f"classes in the mask beyond the {classes} known", f" (value {beyond[-1]})", present
    present[there] = True
    if not present[:classes].any():
        return f"a mask in which no pixel has a class, only {IGNORED}", "", present
    return "", "", present


def _check_classes(reader: Reader, seen: np.ndarray, expected: int) -> None:
    """Raise ValueError if no mask has one of the `expected` classes, or if all have one class and 255."""
    missing = [f"{reader.classes[i]} (value {i})" for i in (~seen[:expected]).nonzero()[0]]
    alone = seen[: len(reader.classes)].sum() == 1 and (expected or seen[IGNORED])
    if missing or alone:
        what = f"has the class {', '.join(missing)}" if missing else "has a second class"
        ignored = f"; the value {IGNORED} occurs and means that a pixel has no class" if seen[IGNORED] else ""
        raise ValueError(
            f"no pixel of the {len(reader.samples)} masks of {reader.where} {what}{ignored}: give every pixel the number of "
            "its class, from 0 in the order of classes.txt, or take classes that do not occur out of that file"
        )


def _counted(names: Sequence[str], total: int, fault: str) -> str:
    """Return e.g. "3 of 367 images have no mask, such as a.jpg", for the names of faulty images."""
    some = ", ".join(names[:SHOWN])
    return f"{len(names)} of {total} image{'s' * (total != 1)} ha{'s' if len(names) == 1 else 've'} {fault}, such as {some}"


def mask_reader(root: str, split: Split, reading: Reading) -> Files:
    """Return the images and masks of a split of a folder of LAYOUT.

    The evaluation split may have the names that it has for classification; without it, or without folders of splits,
    `reading.val_fraction` divides the images. ValueError for another layout, and for missing, doubled or left over masks.
    """
    classes = mask_classes(root)
    root = root.rstrip("/")
    images, masks = (_files(f"{root}/{folder}") for folder in ("images", "masks"))
    if not images or not masks:
        raise ValueError(f"found no {'images' if masks else 'masks'} for segmentation in {root}: its layout must be {LAYOUT}")
    by_stem: dict[str, list[list[str]]] = defaultdict(lambda: [[], []])
    for number, paths in enumerate((images, masks)):
        for path in paths:
            by_stem[str(PurePosixPath(path).with_suffix(""))][number].append(path)
    words = [stem.partition("/")[0] for stem in by_stem]
    samples = of_split([(found, 0) for found in by_stem.values()], words, split, reading.val_fraction, f"{root}/images")
    pairs = [found for found, _ in samples]
    faults = {
        "no mask": [found[0] for found, of in pairs if not of],
        "several masks": [found[0] for found, of in pairs if found and len(of) > 1],
        "the name of another": [found[1] for found, _ in pairs if len(found) > 1],
    }
    total = sum(len(found) for found, _ in pairs)
    texts = [_counted([f"{root}/images/{name}" for name in some], total, fault) for fault, some in faults.items() if some]
    if alone := [of[0] for found, of in pairs if not found]:
        texts.append(f"{len(alone)} of {sum(len(of) for _, of in pairs)} masks have no image, such as {root}/masks/{alone[0]}")
    if texts:
        raise ValueError(f"{'; '.join(texts)}: every image needs one mask of the same name, as {LAYOUT}")
    return Files(classes, [(f"{root}/images/{found[0]}", f"{root}/masks/{of[0]}") for found, of in pairs], root, root)


def mask_classes(root: str) -> list[str]:
    """Return the class names of a folder with masks, the lines of its `classes.txt`; ValueError where it cannot be read."""
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


def mask_rows_reader(place: str, split: Split, reading: Reading) -> Rows:
    """Return the images and masks of a split of a Hugging Face data set with a column of images and one of masks.

    The classes are named by `classes.txt` in the folder, or else numbered up to the largest in the masks.

    Args:
        place, split, reading: as of `vitrel.data.readers.hub.rows_reader`.

    Raises:
        ValueError: the data set cannot be loaded, or has no such columns.
    """
    splits = load(place)
    image, mask = _mask_columns(place, splits)

    def samples(rows: Any) -> list[tuple[Source, Source]]:
        return [((row, image), (row, mask)) for row in range(len(rows))]

    return read_rows(place, split, reading, splits, mask_row_classes(place), [image, mask], samples)


def _mask_columns(place: str, splits: dict[str, Any]) -> tuple[str, str]:
    """(column of images, column of masks); ValueError where there are none."""
    features = next(iter(splits.values())).features
    columns = image_columns(features)
    mask = one_of(MASK_COLUMNS, columns) or (columns[1] if len(columns) > 1 else None)
    image = next((column for column in columns if column != mask), None)
    if image is None or mask is None:
        raise ValueError(f"{place} has the columns {', '.join(features)}: segmentation needs one of images and one of masks")
    return image, mask


def mask_row_classes(place: str) -> list[str]:
    """Return the class names of a Hugging Face data set with masks (`mask_rows_reader`)."""
    return mask_classes(place) if are_named(place) else [str(i) for i in range(_largest(place) + 1)]


def are_named(place: str) -> bool:
    """Return whether a folder names the classes of its masks."""
    return (Path(place) / "classes.txt").is_file()


@lru_cache(8)
def _largest(place: str) -> int:
    """The largest class in the masks of all splits, which are decoded; values of masks that cannot be decoded do not count."""
    splits = load(place)
    _, column = _mask_columns(place, splits)

    def largest(mask: dict[str, Any]) -> int:
        try:
            values = decode_mask(mask["bytes"] or mask["path"])
        except ValueError:
            return 0
        return int(values[values < IGNORED].max(initial=0))

    with ThreadPoolExecutor(READERS) as readers:
        return max(value for rows in splits.values() for value in readers.map(largest, rows[column]))


def _files(folder: str) -> list[str]:
    """The image files at or below a folder, sorted, as paths relative to it; without hidden ones.

    The folder and those directly in it, which are the splits, may be links. Other links to folders are not followed, and told.
    """
    found = [below(path, folder) for path in sorted(_walk(folder))]
    return [path for path in found if path.lower().endswith(SUFFIXES) and not any(map(hidden, path.split("/")))]


def _walk(folder: str) -> Iterator[str]:
    """Yield the paths of all files below a folder, also of splits that are links; a warning names other links to folders."""
    left_out: list[str] = []
    for split in (folder, *(str(path) for path in Path(folder).glob("*") if path.is_symlink() and path.is_dir())):
        for parent, folders, names in os.walk(split, onerror=_refuse):
            yield from (path for name in names if os.path.isfile(path := os.path.join(parent, name)))
            if parent != folder:
                left_out += [path for name in folders if os.path.islink(path := os.path.join(parent, name))]
    if left_out:
        warn_once(f"left out of {shown(folder)}: {len(left_out)} folder links below its splits, such as {shown(min(left_out))}")


def _refuse(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):  # of the folder itself, which the layout's error names
        raise error
