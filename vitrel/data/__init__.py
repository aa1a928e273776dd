"""Data sets: `shapes` (synthetic images), folders of images, tar shards, and torchvision's sets.

`create_dataset` builds any of them by name or path. Augmentation, decoding and packing into shards are here too.
"""

import re
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from vitrel.common.files import shown
from vitrel.common.names import nearest
from vitrel.data.augment import Augmenter
from vitrel.data.augmentation import Augmentation
from vitrel.data.base import Draw, ImageSet, Split
from vitrel.data.decode import BadImage, Reading, decode
from vitrel.data.folder import Folder, folder_classes
from vitrel.data.prepare import Prepare, normalise
from vitrel.data.sets import SETS, TorchvisionSet, set_classes
from vitrel.data.shapes import Shapes
from vitrel.data.shards import INDEX, Shards, shard_index
from vitrel.data.stream import Batch, ShardBatches

__all__ = [
    "SHAPES",
    "Augmentation",
    "Augmenter",
    "BadImage",
    "Batch",
    "Draw",
    "Folder",
    "ImageSet",
    "Prepare",
    "Reading",
    "Shapes",
    "ShardBatches",
    "Shards",
    "TorchvisionSet",
    "class_names",
    "create_dataset",
    "create_shapes",
    "decode",
    "folder_classes",
    "normalise",
]

SHAPES_TRAIN, SHAPES_VAL = 10_000, 1_000
SHAPES: dict[str, dict[str, Any]] = {  # synthetic data sets, and the arguments of `Shapes` for each
    "shapes": {},
    "shapes-place": {"label": "place"},
    "shapes-corner": {"region": (0.0, 0.0, 0.75, 0.75)},
}


def create_dataset(
    data: str,
    split: Split,
    size: tuple[int, int],
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    augment: Augmentation | None = None,
    n: int | None = None,
    seed: int = 0,
    reading: Reading = Reading(),
    download: bool = False,
    **view: Any,
) -> Dataset:
    """Build a data set of (normalised float32 [3, H, W], class index) pairs, with the attribute `classes: list[str]`.

    Args:
        data: "shapes", "shapes-place" (the class is the quarter of the image in which the objects lie) or "shapes-corner" (the
            objects stay in the upper left three quarters of each axis, in training and evaluation); a folder that holds
            `train/<class>/` and `val/<class>/`; a folder of shards (with `index.json`); or a torchvision set and its root,
            "food101:/path" (`vitrel.data.sets.SETS`).
        split: "train" or "val"; for `shapes` the two never share a seed.
        size: (H, W) of the images, pixels.
        mean, std: per-channel normalisation, from the model's `pretrained_cfg`.
        augment: augmentation of training images; None prepares them as for evaluation. Not for `shapes`.
        n: number of images; by default 10,000 for training and 1,000 for evaluation with `shapes`, otherwise all.
        seed: seed of the shapes, of the augmentation, and of the choice of `n` images.
        reading: decoder, pixel limit, handling of unreadable images, and whether links to folders are followed.
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
    _check_text(data)
    prepare = Prepare(size, mean, std, **view)
    if data in SHAPES:
        if augment is not None:
            raise ValueError("shapes are not augmented, since mirroring would change their labels: leave out augment")
        options = SHAPES[data] | ({} if prepare.base_size is None else {"base": prepare.base_size})
        options["protocol"] = "canvas" if prepare.protocol == "canvas" else "scale"  # for square images, native equals scale
        return create_shapes(split, n, seed, size=size, mean=mean, std=std, **options)
    if augment is not None and split == "val":
        raise ValueError("evaluation images are not augmented: give augment with split='train' only")
    augmenter = None if augment is None else Augmenter(augment, size, mean, std, seed, prepare.crop_pct, prepare.crop_mode)
    name_and_root = _torchvision_set(data)
    if name_and_root:
        return TorchvisionSet(*name_and_root, split, prepare, augmenter, n, seed, reading, download)
    kind = Shards if (Path(data) / INDEX).is_file() else Folder
    return kind(data, split, prepare, augmenter, n, seed, reading)


def class_names(data: str, download: bool = False) -> list[str]:
    """Return the class names of a data set (`data` as in `create_dataset`), by label, without its images.

    A torchvision set must be at its root, or `download` be True; ValueError for data that `create_dataset` does not know.
    """
    _check_text(data)
    if data in SHAPES:
        return list(Shapes(1, label=SHAPES[data].get("label", "relation")).classes)
    name_and_root = _torchvision_set(data)
    if name_and_root:
        return set_classes(*name_and_root, download)
    return shard_index(data)["classes"] if (Path(data) / INDEX).is_file() else folder_classes(data)


def _check_text(data: str) -> None:
    if shown(data) != str(data):
        raise ValueError(f"the path of the data is not valid UTF-8: {shown(data)}; results contain it, so rename the folder")


def _torchvision_set(data: str) -> tuple[str, str] | None:
    """(name, root) of the text "name:root", None for a path; ValueError for an unknown set or an address."""
    name, colon, root = data.partition(":")
    if name in SETS and root:
        return name, root
    if not colon or Path(data).exists() or not re.fullmatch(r"[\w+.-]{2,}", name):
        return None
    near = nearest(name, SETS, 1)
    hint = f"did you mean {near[0]}:{root}? " if near else ""
    raise ValueError(
        f"data {data!r} is neither a folder nor a known set: {hint}The sets are {', '.join(SETS)}, as <set>:<root>. "
        "Addresses such as pipe:, http: or s3: are not read, because they run commands or use the network: copy "
        "the data to a disk first"
    )


def create_shapes(split: Split, n: int | None = None, seed: int = 0, **options: Any) -> Shapes:
    """Return `Shapes(n, **options)` for a split; n is 10,000 for "train" and 1,000 for "val" by default.

    Its seed is 2 · `seed` + 1 for "train" and 2 · `seed` for "val", so that the two splits never share scenes.
    """
    if n is None:
        n = SHAPES_TRAIN if split == "train" else SHAPES_VAL
    return Shapes(n, seed=2 * seed + (split == "train"), **options)
