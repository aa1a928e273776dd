"""Data sets: `shapes` (synthetic images), folders of images, CSVs, tar files, Hugging Face's and torchvision's sets.

`create_dataset` builds any of them by name, path or address. Augmentation and decoding are here too.
"""

import re
from pathlib import Path
from typing import Any, Literal, get_args

import fsspec
from torch.utils.data import Dataset

from vitrel.common.files import shown
from vitrel.data.augment import Augmenter
from vitrel.data.augmentation import Augmentation
from vitrel.data.dense_shapes import DenseShapes
from vitrel.data.prepare import Prepare, normalize
from vitrel.data.readers.addresses import is_address, list_files
from vitrel.data.readers.base import Draw, ImageSet
from vitrel.data.readers.decode import IGNORED, BadImage, Reading, decode
from vitrel.data.readers.files import Files, csv_files, files_at
from vitrel.data.readers.folder import Folder, folder_classes
from vitrel.data.readers.hub import SAVED, HuggingFace, columns, load
from vitrel.data.readers.masks import (
    MaskFiles,
    MaskRows,
    MaskSet,
    collate_masks,
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
    "collate_masks",
    "create_dataset",
    "create_shapes",
    "decode",
    "folder_classes",
    "normalize",
]

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
    std: tuple[float, ...],
    task: Task = "classification",
    augment: Augmentation | None = None,
    n: int | None = None,
    seed: int = 0,
    reading: Reading = Reading(),
    download: bool = False,
    **view: Any,
) -> Dataset:
    """Build a data set of (normalized float32 [3, H, W], class index) pairs, with the attribute `classes: list[str]`.

    With task "segmentation", the second of a pair is the mask instead (`vitrel.data.readers.masks`): classes int64 [H, W] with
    `augment`, otherwise at the mask's own resolution; pixels of the value 255 have no class.

    Args:
        data: "shapes", "shapes-place" (the class is the quarter of the image in which the objects lie) or "shapes-corner" (the
            objects stay in the upper left three quarters of each axis, in training and evaluation); "shapes-dense", for
            segmentation (`vitrel.data.dense_shapes`); a folder that holds `train/<class>/` and `val/<class>/`
            (`vitrel.data.readers.folder`); a CSV of paths and labels (`vitrel.data.readers.files`); tar files
            (`vitrel.data.readers.tars`), "wds/<path>" in timm's words; a folder of Parquet or Arrow files, or "hfds/<name>",
            "hfids/<name>" (`vitrel.data.readers.hub`); or a torchvision set and its root, "torch/cifar10:/path". Folders, CSVs,
            tars and Parquet may lie at addresses that fsspec reads, as "s3://bucket/images".
        split: "train" or "val"; for `shapes` the two never share a seed.
        size: (H, W) of the images, pixels.
        mean, std: per-channel normalization, from the model's `pretrained_cfg`.
        task: "classification" or "segmentation". Data for segmentation are a folder or address that holds `images/<split>/`,
            `masks/<split>/` and `classes.txt`; a Hugging Face data set with a column of images and one of masks; or
            "torch/VOCSegmentation:/path" and "torch/OxfordIIITPet:/path". The whole image is resized to (H, W),
            in the canvas protocol to `base_size`.
        augment: augmentation of training images; None prepares them as for evaluation. Not for `shapes`.
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
        if augment is not None:
            raise ValueError("shapes are not augmented, since mirroring would change their labels: leave out augment")
        drawn = SHAPES[data] | ({} if prepare.base_size is None else {"base": prepare.base_size})
        drawn["protocol"] = "canvas" if prepare.protocol == "canvas" else "scale"  # for square images, native equals scale
        return create_shapes(split, n, seed, task, size=size, mean=mean, std=std, **drawn)
    if augment is not None and split == "val":
        raise ValueError("evaluation images are not augmented: give augment with split='train' only")
    if task == "segmentation":
        whole = {name: getattr(prepare, name) for name in ("interpolation", "protocol", "base_size")}
        prepare = Prepare(size, mean, std, crop_mode="squash", **whole)
        augment = None if augment is None else augment.for_masks()
    augmenter = None if augment is None else Augmenter(augment, size, mean, std, seed, prepare.crop_pct, prepare.crop_mode)
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
    if kind in ("csv", "address"):
        listed, classes = (csv_files if kind == "csv" else files_at)(place, split, reading.val_fraction)
        return Files(classes, listed, place.rpartition("/")[0] if kind == "csv" else place, **options)
    if kind == "tar":
        return Tars(place, split, **options)
    return (HuggingFace if kind == "hfds" else Folder)(place, split, **options)


def _mask_files(
    data: str, kind: str, place: str, split: Split, val_fraction: float | None, download: bool
) -> tuple[list[tuple[str, str]], list[str], dict[int, int] | None]:
    """(image, mask) paths of a split, class names and values of the masks, of data that are files."""
    if kind == "torch":
        name, _, root = place.partition(":")
        return torchvision_masks(name, root, split, download)
    if kind not in ("folder", "address"):
        raise ValueError(f"data {data!r} has no masks: segmentation reads folders of images and masks, Parquet and hfds/<name>")
    classes = mask_classes(place)
    return mask_folder(place, split, val_fraction), classes, None


def kind_of(data: str) -> tuple[str, str]:
    """Return (kind, place) of data: "torch", "csv", "address", "tar", "hfds" or "folder", and the path or name of its reader.

    A folder, or what lies at an address, is looked at. ValueError for an address or a set that is not known.
    """
    prefix, slash, rest = data.partition("/")
    if slash and not Path(data).exists():
        if prefix == "torch" and ":" in rest:
            return "torch", rest
        if prefix in ("hfds", "hfids", "wds"):  # timm streams the last two; read by index, a resumed run repeats their order
            return "tar" if prefix == "wds" else "hfds", rest
        if prefix in ("tfds", "torch"):
            instead = {"torch": f"torch/{rest}:<folder of its files>"}.get(prefix, f"hfds/{rest}, which reads images by index")
            raise ValueError(f"data {data!r} cannot be read in an order that a resumed run repeats: give {instead}")
    if re.match(r"[\w+.-]{2,}:(?!//)", data) and not Path(data).exists():
        raise ValueError(
            f"data {data!r} is neither a folder nor a known set: torchvision's are torch/<set>:<folder>, and addresses have "
            "//, as s3://bucket/images"
        )
    if data.endswith(".csv"):
        return "csv", data
    if data.endswith(".tar") or "*" in data or ("{" in data and not Path(data).exists()):
        return "tar", data
    if is_address(data):
        _check_protocol(data)
        found = {file.rpartition(".")[2] for file in list_files(data)}
        return ("tar" if "tar" in found else "hfds" if "parquet" in found else "address"), data
    folder = Path(data)
    if any((folder / name).is_file() for name in SAVED) or any(
        any(folder.glob(pattern)) for pattern in ("*.parquet", "*/*.parquet", "*.arrow", "*/*.arrow")
    ):
        return "hfds", data
    return ("tar" if folder.is_dir() and tar_files(data) else "folder"), data


def _check_protocol(data: str) -> None:
    protocol = data.partition("://")[0]
    if protocol not in fsspec.available_protocols():
        raise ValueError(f"data {data!r} has an unknown protocol {protocol}://: fsspec reads s3://, gs:// and others")


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
        if kind in ("folder", "address"):
            return mask_classes(place)
        return row_classes(place) if kind == "hfds" else _mask_files(data, kind, place, "val", None, download)[1]
    if kind == "torch":
        name, _, root = place.partition(":")
        return list(torchvision_set(name, root, "val", download).classes)
    if kind in ("csv", "address"):
        return (csv_files if kind == "csv" else files_at)(place, "val", 0.5)[1]
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
