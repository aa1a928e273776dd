"""Data sets: `shapes` (synthetic images), folders of images, CSVs, tar files, Hugging Face's and torchvision's sets.

`create_dataset` builds any of them by name or path. Augmentation and decoding are here too.
"""

import re
from pathlib import Path
from typing import Any, Literal, get_args

from torch.utils.data import Dataset

from vitrel.common.files import shown
from vitrel.data.augment import Augmenter
from vitrel.data.augmentation import Augmentation
from vitrel.data.dense_shapes import DenseShapes
from vitrel.data.prepare import Prepare, normalize
from vitrel.data.readers.base import Draw, ImageSet, collate
from vitrel.data.readers.decode import IGNORED, BadImage, Reading, decode
from vitrel.data.readers.files import Files, csv_files
from vitrel.data.readers.folder import Folder, folder_classes
from vitrel.data.readers.hub import HuggingFace, columns, data_files, is_saved, load
from vitrel.data.readers.masks import (
    MaskFiles,
    MaskRows,
    MaskSet,
    mask_classes,
    mask_folder,
    row_classes,
    torchvision_masks,
)
from vitrel.data.readers.sets import TorchvisionSet, torchvision_set
from vitrel.data.readers.splits import Split
from vitrel.data.readers.tars import Tars, tar_files, tar_members
from vitrel.data.shapes import Drawn, Shapes

__all__ = [
    "IGNORED",
    "SHAPES",
    "Augmentation",
    "Augmenter",
    "BadImage",
    "DenseShapes",
    "Draw",
    "Drawn",
    "Files",
    "Folder",
    "HuggingFace",
    "ImageSet",
    "MaskFiles",
    "MaskRows",
    "MaskSet",
    "Prepare",
    "Reading",
    "Shapes",
    "Tars",
    "TorchvisionSet",
    "class_names",
    "collate",
    "create_dataset",
    "create_shapes",
    "decode",
    "folder_classes",
    "normalize",
]

PACKED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".zip")
INSTEAD = {  # of the first part of data in timm's words
    "tfds": "write the set as Parquet, and give the folder of these files",
    "hfids": "give hfds/<name>, of which Hugging Face datasets keeps a copy on this machine",
    "wds": "give the folder of the .tar files",
    "torch": "give torch/<set>:<folder of its files>",
}
Task = Literal["classification", "segmentation"]
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
    download: bool = False,
    **view: Any,
) -> Dataset:
    """Build a data set of (normalized float32 [3, H, W], class index) pairs, with the attribute `classes: list[str]`.

    With `std` None, images are uint8 instead, for `normalize` where the model runs; `shapes` are never.
    With task "segmentation", the second of a pair is the mask instead (`vitrel.data.readers.masks`): classes uint8 [H, W] with
    `augment`, otherwise at the mask's own resolution; pixels of the value 255 have no class.

    Args:
        data: "shapes", "shapes-place" (the class is the quarter of the image in which the objects lie) or "shapes-corner" (the
            objects stay in the upper left three quarters of each axis, in training and evaluation); "shapes-dense", for
            segmentation (`vitrel.data.dense_shapes`); a folder that holds `train/<class>/` and `val/<class>/`
            (`vitrel.data.readers.folder`); a CSV of paths and labels (`vitrel.data.readers.files`); tars of class folders, or
            one (`vitrel.data.readers.tars`); WebDataset, Parquet or Arrow files, or "hfds/<name>" (`vitrel.data.readers.hub`);
            or a torchvision set and its root, "torch/cifar10:/path".
        split: "train" or "val"; for `shapes` the two never share a seed.
        size: (H, W) of the images, pixels.
        mean, std: per-channel normalization, from the model's `pretrained_cfg`.
        task: "classification" or "segmentation". Data for segmentation are a folder that holds `images/<split>/`,
            `masks/<split>/` and `classes.txt`; a Hugging Face data set with a column of images and one of masks; or
            "torch/VOCSegmentation:/path" and "torch/OxfordIIITPet:/path". The whole image is resized to (H, W),
            in the canvas protocol to `base_size`.
        augment: augmentation of training images; None prepares them as for evaluation. It needs `std` None, and leaves erasing
            to the training. Not for `shapes`.
        n: number of images; by default 10,000 for training and 1,000 for evaluation with `shapes`, otherwise all.
        seed: seed of the shapes, of the augmentation, and of the choice of `n` images.
        reading: pixel limit, handling of unreadable images, links to folders, and the share to evaluate.
        download: let torchvision download a set that is not at its root; nothing else uses the network.
        view: further arguments of `Prepare`: `crop_pct`, `crop_mode` and `interpolation` from the model's `pretrained_cfg`;
            `protocol`, "scale" (the same field of view at every size), "canvas" (objects keep their size in pixels) or "native"
            (the whole image, at the size of each `Draw`); and `base_size`, the training (H, W), which `canvas` needs. Shapes
            ignore `crop_pct`, `crop_mode` and `interpolation` (also `reading` and `download`), and are drawn with "native" as
            with "scale".

    Raises:
        ValueError: an unknown split, data of an unknown kind or layout, or settings that do not apply to `data`.
    """
    if split not in ("train", "val"):
        raise ValueError(f"unknown split {split!r}; use 'train' or 'val'")
    if task not in get_args(Task):
        raise ValueError(f"unknown task {task!r}; use {' or '.join(get_args(Task))}")
    _check_text(data)
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
    augmenter = None if augment is None else Augmenter(augment, size, mean, seed, prepare.crop_pct, prepare.crop_mode)
    kind, place = kind_of(data)
    options: dict[str, Any] = {"prepare": prepare, "augment": augmenter, "n": n, "seed": seed, "reading": reading}
    name, _, root = place.partition(":")
    if task == "segmentation":
        if kind == "hfds":
            return MaskRows(place, split, **options)
        samples, classes, values = _mask_files(data, kind, place, split, reading.val_fraction, download)
        options |= {"values": values, "expected": len(classes) if split == "train" and kind != "torch" else 0}
        return MaskFiles(classes, samples, (root if kind == "torch" else place).rstrip("/"), **options)
    if kind == "torch":
        return TorchvisionSet(name, root, split, download=download, **options)
    if kind == "csv":
        listed, classes = csv_files(place, split, reading.val_fraction)
        return Files(classes, listed, place.rpartition("/")[0], **options)
    readers: dict[str, type[ImageSet]] = {"tar": Tars, "hfds": HuggingFace, "folder": Folder}
    return readers[kind](place, split, **options)


def _mask_files(
    data: str, kind: str, place: str, split: Split, val_fraction: float | None, download: bool
) -> tuple[list[tuple[str, str]], list[str], dict[int, int] | None]:
    """(image, mask) paths of a split, class names and values of the masks, of data that are files."""
    if kind == "torch":
        name, _, root = place.partition(":")
        return torchvision_masks(name, root, split, download)
    if kind != "folder":
        raise ValueError(f"data {data!r} has no masks: segmentation reads folders of images and masks, Parquet and hfds/<name>")
    classes = mask_classes(place)
    return mask_folder(place, split, val_fraction), classes, None


def kind_of(data: str) -> tuple[str, str]:
    """Return (kind, place) of data: "torch", "csv", "hfds", "tar" or "folder", and the path or name of its reader.

    A folder is looked at. ValueError for data that cannot be read by index, and for a set that is not known.
    """
    prefix, _, rest = data.partition("/")
    if not Path(data).exists():
        if prefix == "torch" and ":" in rest:
            return "torch", rest
        if prefix == "hfds":
            return "hfds", rest
        if re.match(r"[\w+.-]{2,}:(?!//)", data):
            raise ValueError(f"data {data!r} is neither a folder nor a known set: torchvision's are torch/<set>:<folder>")
    if instead := _instead(data):
        raise ValueError(f"data {data!r} cannot be read by index, in an order that a resumed run repeats: {instead}")
    if data.endswith(".csv"):
        return "csv", data
    if is_saved(data) or data_files(data)[1]:
        return "hfds", data
    return ("tar" if tar_files(data) else "folder"), data


def _instead(data: str) -> str:
    """What to do with data that cannot be read by index; "" for other data."""
    if data.endswith(PACKED):
        return "unpack it, and give the folder or the .tar file"
    if Path(data).exists():
        return ""
    if "://" in data:
        return "copy the files to this machine (aws s3 sync, rclone copy), or mount them as a folder"
    return INSTEAD.get(data.partition("/")[0], "") if "/" in data else ""


def class_names(data: str, download: bool = False, task: Task = "classification") -> list[str]:
    """Return the class names of a data set (`data` and `task` as in `create_dataset`), by label, without its images.

    A torchvision set must be at its root, or `download` be True; ValueError for data that `create_dataset` does not know.
    """
    _check_text(data)
    if data in SHAPES:
        _check_shapes(data, task)
        if task == "segmentation":
            return DenseShapes(1).classes
        return list(Shapes(1, label=SHAPES[data].get("label", "relation")).classes)
    kind, place = kind_of(data)
    if task == "segmentation":
        if kind == "folder":
            return mask_classes(place)
        return row_classes(place) if kind == "hfds" else _mask_files(data, kind, place, "val", None, download)[1]
    if kind == "torch":
        name, _, root = place.partition(":")
        return list(torchvision_set(name, root, "val", download).classes)
    if kind == "csv":
        return csv_files(place, "val", 0.5)[1]
    if kind == "tar":
        return tar_members(place)[1]
    return columns(place, load(place))[2] if kind == "hfds" else folder_classes(place)


def _check_text(data: str) -> None:
    if shown(data) != str(data):
        raise ValueError(f"the path of the data is not valid UTF-8: {shown(data)}; results contain it, so rename the folder")


def create_shapes(
    split: Split, n: int | None = None, seed: int = 0, task: Task = "classification", **options: Any
) -> Shapes | DenseShapes:
    """Return `Shapes(n, **options)` for a split, or `DenseShapes` for "segmentation".

    n is 10,000 for "train" and 1,000 for "val" by default.
    Its seed is 2 · `seed` + 1 for "train" and 2 · `seed` for "val", so that the two splits never share scenes.
    """
    if n is None:
        n = SHAPES_TRAIN if split == "train" else SHAPES_VAL
    return (DenseShapes if task == "segmentation" else Shapes)(n, seed=2 * seed + (split == "train"), **options)


def _check_shapes(data: str, task: Task) -> None:
    if (data == "shapes-dense") != (task == "segmentation"):
        raise ValueError(
            f"{data} have a class for every {'pixel' if data == 'shapes-dense' else 'image'}, which is not the task {task}: "
            f"use {'the task segmentation' if data == 'shapes-dense' else 'shapes-dense'}"
        )
