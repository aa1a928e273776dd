"""`create_dataset` builds a data set from the name or path that `--data` takes."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal

from torch.utils.data import Dataset

from vitrel.common.extras import optional_import
from vitrel.data.augmentation import Augmentation
from vitrel.data.dense_shapes import DenseShapes
from vitrel.data.prepare import Prepare
from vitrel.data.readers.base import ImageSet, Reader
from vitrel.data.readers.decode import Reading
from vitrel.data.readers.files import LabelSet, csv_reader
from vitrel.data.readers.folder import folder_classes, folder_reader
from vitrel.data.readers.hub import data_files, is_saved, rows_reader
from vitrel.data.readers.masks import MaskSet, mask_classes, mask_reader
from vitrel.data.readers.sets import torchvision_reader
from vitrel.data.readers.splits import Split
from vitrel.data.readers.tars import tar_files, tar_reader
from vitrel.data.shapes import Shapes

PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".zip")
Task = Literal["classification", "segmentation", "multilabel"]
READERS: dict[str, dict[str, Callable[[str, Split, Reading], Reader]]] = {  # by task and kind of data
    "classification": {
        "folder": folder_reader,
        "csv": csv_reader,
        "tar": tar_reader,
        "hfds": rows_reader,
        "torch": torchvision_reader,
    },
    "segmentation": {"folder": mask_reader},
    "multilabel": {"csv": partial(csv_reader, several=True)},
}
READS = {
    "segmentation": "has no masks: segmentation reads folders of images and masks",
    "multilabel": "has one label an image: the task multilabel reads a CSV with ; between labels",
}
SHAPES_TRAIN, SHAPES_VAL = 10_000, 1_000
SHAPES: dict[str, dict[str, Any]] = {  # synthetic data sets, and the arguments of `Shapes` for each
    "shapes": {},
    "shapes-place": {"label": "place"},
    "shapes-corner": {"region": (0.0, 0.0, 0.75, 0.75)},
    "shapes-dense": {},  # `DenseShapes`
}


def create_dataset(
    data: str,
    split: Split,
    size: tuple[int, int],
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...] | None,
    task: Task = "classification",
    augment: Augmentation | None = None,
    n: int | None = None,
    seed: int = 0,
    reading: Reading = Reading(),
    **view: Any,
) -> Dataset:
    """Build a data set of (normalized float32 [3, H, W], class index) pairs, with the attribute `classes: list[str]`.

    With `std` None, images are uint8 instead, for `normalize` where the model runs; `shapes` need a `std`.
    With task "segmentation", the second of a pair is the mask instead (`vitrel.data.readers.masks`): classes uint8 [H, W] with
    `augment`, otherwise at the mask's own resolution; pixels of the value 255 have no class. With task "multilabel" it is
    float32 [classes], 1 for each class of the image and 0 for the others.

    Args:
        data: "shapes", "shapes-place" (the class is the quarter of the image in which the objects lie) or "shapes-corner" (the
            objects stay in the upper left three quarters of each axis, in training and evaluation); "shapes-dense", for
            segmentation (`vitrel.data.dense_shapes`); a folder that holds `train/<class>/` and `val/<class>/`
            (`vitrel.data.readers.folder`); a CSV of paths and labels (`vitrel.data.readers.files`); tars of class folders, or
            one (`vitrel.data.readers.tars`); WebDataset, Parquet or Arrow files, or "hfds/<name>" (`vitrel.data.readers.hub`);
            or a torchvision set and its root, "torch/cifar10:/path" (`vitrel.data.readers.sets`).
        split: "train" or "val"; for `shapes` the two never share a seed.
        size: (H, W) of the images, pixels.
        mean, std: per-channel normalization, from the model's `pretrained_cfg`.
        task: "classification", "segmentation" or "multilabel". Data for segmentation are a folder that holds `images/<split>/`,
            `masks/<split>/` and `classes.txt`. The whole image is resized to (H, W), in the canvas protocol to `base_size`.
            Data for several labels an image are a CSV with ; between them.
        augment: augmentation of training images; None prepares them as for evaluation. It needs `std` None, and leaves erasing
            to the training. Not for `shapes`.
        n: number of images; by default 10,000 for training and 1,000 for evaluation with `shapes`, otherwise all.
        seed: seed of the shapes, of the augmentation, and of the choice of `n` images.
        reading: handling of unreadable images, links to folders, and the share to evaluate.
        view: further arguments of `Prepare`: `crop_pct`, `crop_mode` and `interpolation` from the model's `pretrained_cfg`;
            `protocol`, "scale" (the same field of view at every size), "canvas" (objects keep their size in pixels) or "native"
            (the whole image, at the size of each `Draw`); and `base_size`, the training (H, W), which `canvas` needs. Shapes
            ignore `crop_pct`, `crop_mode` and `interpolation` (also `reading`), and are drawn with "native" as
            with "scale".

    Raises:
        ValueError: an unknown split, data of an unknown kind or layout, or settings that do not apply to `data`.
    """
    if split not in ("train", "val"):
        raise ValueError(f"unknown split {split!r}; use 'train' or 'val'")
    prepare = Prepare(size, mean, std, **view)
    if data in SHAPES:
        _check_shapes(data, task)
        if std is None:
            raise ValueError("shapes are drawn in normalized colors: give std")
        if augment is not None:
            raise ValueError("shapes are not augmented, since mirroring would change their labels: leave out augment")
        drawn = SHAPES[data] | ({} if prepare.base_size is None else {"base": prepare.base_size})
        drawn["protocol"] = "canvas" if prepare.protocol == "canvas" else "scale"  # for square images, native equals scale
        return create_shapes(split, n, seed, task, size=size, mean=mean, std=std, **drawn)
    if augment is not None and split == "val":
        raise ValueError("evaluation images are not augmented: give augment with split='train' only")
    if augment is not None and std is not None:
        raise ValueError("augmented images are uint8, not normalized: give std=None with augment")
    if task == "segmentation":
        whole = {name: getattr(prepare, name) for name in ("interpolation", "protocol", "base_size")}
        prepare = Prepare(size, mean, std, crop_mode="squash", **whole)
        augment = None if augment is None else augment.for_masks()
    augmenter = None
    if augment is not None:
        with optional_import():  # imported here because evaluation and drawn scenes need neither albumentations nor OpenCV
            from vitrel.data.augment import Augmenter
        augmenter = Augmenter(augment, size, mean, seed, prepare.crop_pct, prepare.crop_mode)
    reader = _read(data, task, split, reading)
    options: dict[str, Any] = {"augment": augmenter, "n": n, "seed": seed, "reading": reading}
    if task != "segmentation":
        return (LabelSet if task == "multilabel" else ImageSet)(reader, prepare, **options)
    expected = len(reader.classes) if split == "train" else 0  # all classes have to occur
    return MaskSet(reader, prepare, expected=expected, **options)


def _kind_of(data: str) -> tuple[str, str]:
    """Return (kind, path) of data: "csv", "hfds" (a saved data set, or `data_files`), "tar", or "folder" for any other path.

    Of "torch/NAME:FOLDER" or "hfds/REST", unless it is a path that exists, it is the part before "/" and that after it.
    ValueError for data that cannot be read by index, such as a compressed archive or a URL.
    """
    prefix, _, rest = data.partition("/")
    named = not Path(data).exists()
    if named and ((prefix == "torch" and ":" in rest) or prefix == "hfds"):
        return prefix, rest
    if (named and (":" in data or (rest and prefix in ("torch", "tfds", "hfids", "wds")))) or data.endswith(PACKED):
        raise ValueError(
            f"data {data!r} cannot be read by index, in an order that a resumed run repeats: give a folder, a CSV, tar, "
            "Parquet or Arrow files on this machine (unpacked; copied by aws s3 sync or rclone, or mounted), hfds/<name>, or "
            "torch/<set>:<folder>"
        )
    place = data.rstrip("/")
    if data.endswith(".csv"):
        return "csv", place
    if is_saved(place) or data_files(place)[1]:
        return "hfds", place
    return "tar" if tar_files(place) else "folder", place


def _read(data: str, task: Task, split: Split, reading: Reading) -> Reader:
    kind, place = _kind_of(data)
    if kind not in READERS[task]:
        raise ValueError(f"data {data!r} {READS[task]}")
    return READERS[task][kind](place, split, reading)


def class_names(data: str, task: Task = "classification") -> list[str]:
    """Return the class names of a data set (`data` and `task` as in `create_dataset`), in the order of the labels.

    Of a folder only the names of its class folders, or classes.txt, are read; other data are opened as for evaluation.

    Raises:
        ValueError: data that `create_dataset` does not know.
    """
    if data in SHAPES:
        _check_shapes(data, task)
        return list(create_shapes("val", 1, 0, task, **SHAPES[data]).classes)
    named = {"classification": folder_classes, "segmentation": mask_classes}
    if _kind_of(data)[0] == "folder" and task in named:
        return named[task](data)
    return _read(data, task, "val", Reading(val_fraction=0.5)).classes


def create_shapes(
    split: Split, n: int | None = None, seed: int = 0, task: Task = "classification", **options: Any
) -> Shapes | DenseShapes:
    """Return the synthetic images of a split: `Shapes(n, **options)`, or `DenseShapes(...)` for "segmentation".

    n is 10,000 for "train" and 1,000 for "val" by default. The seed of the data set is 2 · `seed` + 1 for "train" and
    2 · `seed` for "val", so that the two splits never share scenes.
    """
    if n is None:
        n = SHAPES_TRAIN if split == "train" else SHAPES_VAL
    return (DenseShapes if task == "segmentation" else Shapes)(n, seed=2 * seed + (split == "train"), **options)


def _check_shapes(data: str, task: Task) -> None:
    """Raise ValueError if the synthetic data set `data` (a key of SHAPES) has no targets for `task`."""
    own = "segmentation" if data == "shapes-dense" else "classification"
    if task != own:
        raise ValueError(
            f"{data} have a class for every {'pixel' if data == 'shapes-dense' else 'image'}, which is not the task {task}: "
            f"use {'shapes-dense' if task == 'segmentation' else f'the task {own}'}"
        )
