"""Data sets for segmentation: images with masks, which give every pixel a class.

A mask is a PNG of one channel, gray or palette, of 1 to 16 bits and the size of its image. Its values are the classes, 255
where a pixel has none; the colors of a palette do not matter. Image and mask are turned by their EXIF orientation. Masks are in
folders beside the images (`MaskFiles`), in a column of a Hugging Face data set (`MaskRows`), or in a set of torchvision
(`torchvision_masks`).

Every mask is decoded once when a data set is made: one that does not fit its image or the classes, or has no pixel with a
class, is an error before training, as is a class that no mask has. Nothing is resampled to fit.
"""

import os
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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
from vitrel.data.readers.base import READERS, SHOWN, Draw, ImageSet, file_checksums, file_versions, sha256
from vitrel.data.readers.classes import read_class_names
from vitrel.data.readers.decode import IGNORED, SUFFIXES, BadImage, Reading, decode, decode_mask, image_size
from vitrel.data.readers.files import Files, below
from vitrel.data.readers.folder import hidden
from vitrel.data.readers.hub import byte_counts, image_columns, load, rows_of, source_of
from vitrel.data.readers.splits import Split, of_split, one_of

LAYOUT = "images/<split>/*.jpg, masks/<split>/*.png with the same names, and classes.txt, whose line i names class i from 0"
MASK_COLUMNS = ("mask", "label", "annotation", "segmentation", "segmentation_mask", "semantic_mask")
VOC = [  # the classes of VOC, in the order of its masks
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "dining table", "dog",
    "horse", "motorbike", "person", "potted plant", "sheep", "sofa", "train", "tv",
]  # fmt: skip
PETS = {1: 1, 2: 0, 3: IGNORED}  # values of a trimap: foreground, background, not classified
_classes_in_masks: dict[tuple, np.ndarray] = {}  # of every checked set [n, 256], because evaluation makes it for every size


class MaskSet(ImageSet):
    """Abstract data set of images with masks: items are (image [3, H, W] as of `ImageSet`, classes uint8 of the mask).

    With `augment` the mask [H, W] is that of the view; otherwise it keeps its own resolution, so masks of a batch can differ
    (`collate`), and a prediction is compared with it there. Pixels of the value `IGNORED` have no class.

    Args:
        classes: class names, by value of the masks.
        samples: (source of the image, source of the mask) of each image.
        where: name of the data and split, for messages.
        view, options: the other arguments of `ImageSet`; `augment` has the method `joint`.
        values: {value in the masks: class} where they differ.
        expected: number of classes, from 0, that have to occur in the masks of the split, also if only some are chosen.

    Raises:
        ValueError: masks that do not fit their images or the classes, which the text counts and names some of, or expected
            classes that no mask has.
    """

    upright = True

    def __init__(
        self,
        classes: list[str],
        samples: Sequence[tuple[Any, Any]],
        where: str,
        *view: Any,
        values: dict[int, int] | None = None,
        expected: int = 0,
        **options: Any,
    ) -> None:
        super().__init__(classes, samples, where, *view, **options)
        self.table = np.arange(256)
        for value, number in (values or {}).items():
            self.table[value] = number
        self.values = values
        self._counts = self._checked()
        self._check_classes(samples, expected)

    @abstractmethod
    def mask_of(self, sample: tuple[Any, Any]) -> str | bytes:
        """Return the path of the mask of a sample or its bytes."""

    def read(self, index: int) -> tuple[Image.Image, np.ndarray]:
        """Return (image of mode RGB, classes uint8 [h, w]); `BadImage` if either cannot be decoded."""
        image = decode(self.encoded(index), self.reading.max_pixels, self.name(index), self.upright)
        return image, self.table[self._values(index)].astype(np.uint8)

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
        return self._counts.sum(0)[: len(self.classes)].tolist()

    def _values(self, index: int) -> np.ndarray:
        return decode_mask(self.mask_of(self.samples[index]), self.reading.max_pixels, f"the mask of {self.name(index)}")

    def _checked(self) -> np.ndarray:
        """Whether each class is in each mask, bool [n, 256]; ValueError for masks that do not fit."""
        key = (*self.classes, *self.contents(), *self.versions(), self.name(0))
        if key not in _classes_in_masks:
            with ThreadPoolExecutor(READERS) as readers:
                found = list(readers.map(self._fault, range(len(self))))
            faults: dict[str, list[str]] = defaultdict(list)
            for index, (fault, detail, _) in enumerate(found):
                if fault:
                    faults[fault].append(f"{self.name(index)}{detail}")
            if faults:
                raise ValueError("; ".join(counted(names, len(self), fault) for fault, names in faults.items()))
            _classes_in_masks[key] = np.stack([present for _, _, present in found])
        return _classes_in_masks[key]

    def _fault(self, index: int) -> tuple[str, str, np.ndarray]:
        """What is wrong with a mask, details, and the classes in it [256]; unreadable files are left to reading."""
        present = np.zeros(256, bool)
        try:
            values, size = self._values(index), self.image_size(index)
        except BadImage:
            return "", "", present
        except ValueError as error:
            return "no mask of one channel (a gray or palette PNG)", f" ({error})", present
        if values.shape != size:
            sizes = "{}x{} and {}x{} pixels".format(*values.shape, *size)
            if values.shape == image_size(self.encoded(index), self.reading.max_pixels):
                sizes += ": the image is turned by its EXIF orientation, as viewers do, and the mask is not"
            return "a mask of another size, and nothing is resampled: make both the same size", f" ({sizes})", present
        known = range(len(self.classes)) if self.values is None else self.values
        there = np.bincount(values.ravel()).nonzero()[0]  # faster than unique
        beyond = sorted({*there.tolist()} - {*known, IGNORED})
        if beyond:
            return f"classes in the mask beyond the {len(self.classes)} known", f" (value {beyond[-1]})", present
        present[self.table[there]] = True
        if not present[: len(self.classes)].any():
            return f"a mask in which no pixel has a class, only {IGNORED}", "", present
        return "", "", present

    def _check_classes(self, samples: Sequence[tuple[Any, Any]], expected: int) -> None:
        """Raise ValueError if no mask of `samples` has one of the `expected` classes, or if all have one class and 255."""
        seen = self._counts.any(0)

        def fit() -> bool:
            several = seen[: len(self.classes)].sum() > 1
            return bool(seen[:expected].all() and (several or not (expected or seen[IGNORED])))

        for sample in samples if len(samples) > len(self) else ():  # a class that is rare need not be among the chosen
            if fit():
                break
            with suppress(ValueError):  # masks that cannot be decoded, or do not fit, are errors where they are chosen
                values = decode_mask(self.mask_of(sample), self.reading.max_pixels)
                seen[self.table[np.unique(values[values <= IGNORED])]] = True
        if not fit():
            missing = [f"{self.classes[i]} (value {i})" for i in (~seen[:expected]).nonzero()[0]]
            what = f"has the class {', '.join(missing)}" if missing else "has a second class"
            ignored = f"; the value {IGNORED} occurs and means that a pixel has no class" if seen[IGNORED] else ""
            raise ValueError(
                f"no pixel of the {len(samples)} masks of {self.where} {what}{ignored}: give every pixel the number of its "
                "class, from 0 in the order of classes.txt, or take classes that do not occur out of that file"
            )


def counted(names: Sequence[str], total: int, fault: str) -> str:
    """Return e.g. "3 of 367 images have no mask, such as a.jpg", for the names of faulty images."""
    some = ", ".join(names[:SHOWN])
    return f"{len(names)} of {total} image{'s' * (total != 1)} ha{'s' if len(names) == 1 else 've'} {fault}, such as {some}"


class MaskFiles(MaskSet, Files):
    """Image files with files of masks: the source and the label of a sample are the paths of an image and its mask."""

    def mask_of(self, sample: tuple[str, str]) -> str:
        """Return the path of the mask of a sample."""
        return sample[1]

    def contents(self) -> list[str]:
        """Return one line per image, in order: the paths of image and mask relative to the folder, with a tab between."""
        return ["\t".join(below(path, self.where) for path in pair) for pair in self.samples]

    def versions(self) -> list[str]:
        """Return size and time of modification of each image and its mask, in order."""
        found = file_versions([path for pair in self.samples for path in pair])
        return [" ".join(pair) for pair in zip(found[::2], found[1::2], strict=True)]

    def checksums(self) -> Iterator[str]:
        """Yield the SHA-256 of each image and each mask, in order, "" for a file that cannot be opened."""
        return file_checksums(path for pair in self.samples for path in pair)


class MaskRows(MaskSet):
    """One split of a Hugging Face data set with a column of images and one of masks, as a `MaskSet`.

    The classes are named by `classes.txt` in the folder, or else numbered up to the largest in the masks.

    Args:
        name, split, prepare, augment, reading, options: as in `vitrel.data.HuggingFace`.

    Raises:
        ValueError: the data set cannot be loaded, has no such columns, or masks that do not fit.
    """

    def __init__(
        self,
        name: str,
        split: Split,
        prepare: Callable[[Picture], Tensor],
        augment: Callable[..., Tensor] | None = None,
        reading: Reading = Reading(),
        **options: Any,
    ) -> None:
        splits = load(name)
        self.image, self.mask = mask_columns(name, splits)
        own, samples = rows_of(name, split, splits, reading.val_fraction, lambda rows: [0] * len(rows))
        self.rows = splits[own].select_columns([self.image, self.mask])
        classes = row_classes(name)
        options["expected"] = len(classes) if split == "train" and _are_named(name) else 0
        super().__init__(classes, samples, f"{name} {own}", prepare, augment, reading=reading, **options)

    def encoded(self, index: int) -> bytes | str:
        """Return the encoded image or its path."""
        return source_of(self.rows, self.samples[index][0], self.image)

    def mask_of(self, sample: tuple[int, Any]) -> bytes | str:
        """Return the encoded mask of a sample or its path."""
        return source_of(self.rows, sample[0], self.mask)

    def versions(self) -> list[str]:
        """Return the sizes of each encoded image and mask in bytes, in order."""
        sizes = [byte_counts(self.rows, column) for column in (self.image, self.mask)]
        return [" ".join(column[row] for column in sizes) for row, _ in self.samples]

    def checksums(self) -> Iterable[str]:
        """Yield the SHA-256 of each encoded image and mask, in order."""
        pairs = ((self.encoded(index), self.mask_of(sample)) for index, sample in enumerate(self.samples))
        return (sha256(source) for pair in pairs for source in pair)


def mask_folder(root: str, split: Split, val_fraction: float | None = None) -> list[tuple[str, str]]:
    """Return (path of the image, path of the mask) of every image of a split, in order; see LAYOUT for the folder `root`.

    The evaluation split may have the names that it has for classification; without it, or without folders of splits,
    `val_fraction` divides the images. ValueError for another layout, and for missing, doubled or left over masks.
    """
    root = root.rstrip("/")
    images, masks = (_files(f"{root}/{folder}") for folder in ("images", "masks"))
    if not images or not masks:
        raise ValueError(f"found no {'images' if masks else 'masks'} for segmentation in {root}: its layout must be {LAYOUT}")
    by_stem: dict[str, list[list[str]]] = defaultdict(lambda: [[], []])
    for number, paths in enumerate((images, masks)):
        for path in paths:
            by_stem[str(PurePosixPath(path).with_suffix(""))][number].append(path)
    words = [stem.partition("/")[0] for stem in by_stem]
    samples = of_split([(found, 0) for found in by_stem.values()], words, split, val_fraction, f"{root}/images")
    pairs = [found for found, _ in samples]
    faults = {
        "no mask": [found[0] for found, of in pairs if not of],
        "several masks": [found[0] for found, of in pairs if found and len(of) > 1],
        "the name of another": [found[1] for found, _ in pairs if len(found) > 1],
    }
    total = sum(len(found) for found, _ in pairs)
    texts = [counted([f"{root}/images/{name}" for name in some], total, fault) for fault, some in faults.items() if some]
    if alone := [of[0] for found, of in pairs if not found]:
        texts.append(f"{len(alone)} of {sum(len(of) for _, of in pairs)} masks have no image, such as {root}/masks/{alone[0]}")
    if texts:
        raise ValueError(f"{'; '.join(texts)}: every image needs one mask of the same name, as {LAYOUT}")
    return [(f"{root}/images/{found[0]}", f"{root}/masks/{of[0]}") for found, of in pairs]


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


def torchvision_masks(
    name: str, root: str, split: Split, download: bool = False
) -> tuple[list[tuple[str, str]], list[str], dict[int, int] | None]:
    """Return (path of the image, of the mask) pairs, class names and `values` of a set of torchvision.

    Args:
        name: "VOCSegmentation" (2012; 21 classes) or "OxfordIIITPet" (background and pet; the border is not classified).
        root: root folder of torchvision's class.
        split: "train" or "val"; of the pets "trainval" and "test".
        download: let torchvision download a missing set.

    Raises:
        ValueError: another set, or a set that is not at `root`.
    """
    import torchvision.datasets as sets

    try:
        if name.lower() == "vocsegmentation":
            voc = sets.VOCSegmentation(root, image_set=split, download=download)
            return list(zip(voc.images, voc.masks, strict=True)), VOC, None
        if name.lower() == "oxfordiiitpet":
            part = "trainval" if split == "train" else "test"
            pets = sets.OxfordIIITPet(root, part, target_types="segmentation", download=download)
            return (
                [(str(image), str(mask)) for image, mask in zip(pets._images, pets._segs, strict=True)],
                ["background", "pet"],
                PETS,
            )
    except (RuntimeError, OSError) as error:
        text = str(error).split(" You can use", 1)[0]
        raise ValueError(
            f"torch/{name} is not in {root}: {text} Set download=True to download it, or give another path"
        ) from error
    raise ValueError(f"torch/{name} has no masks: use VOCSegmentation or OxfordIIITPet, as torch/VOCSegmentation:{root}")


def mask_columns(name: str, splits: dict[str, Any]) -> tuple[str, str]:
    """Return (column of images, column of masks) of a Hugging Face data set; ValueError where there are none."""
    features = next(iter(splits.values())).features
    columns = image_columns(features)
    mask = one_of(MASK_COLUMNS, columns) or (columns[1] if len(columns) > 1 else None)
    image = next((column for column in columns if column != mask), None)
    if image is None or mask is None:
        raise ValueError(f"{name} has the columns {', '.join(features)}: segmentation needs one of images and one of masks")
    return image, mask


def row_classes(name: str) -> list[str]:
    """Return the class names of a Hugging Face data set with masks (`MaskRows`)."""
    return mask_classes(name) if _are_named(name) else [str(i) for i in range(_largest(name) + 1)]


def _are_named(name: str) -> bool:
    return (Path(name) / "classes.txt").is_file()


@lru_cache(8)
def _largest(name: str) -> int:
    """The largest class in the masks of all splits, which are decoded; values of masks that cannot be decoded do not count."""
    splits = load(name)
    _, column = mask_columns(name, splits)

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
