"""Data sets: `shapes`, drawn by the package itself, and any folder of images in class folders."""

from typing import Any

from torch.utils.data import Dataset

from vitrel.data.augment import Augmentation, Augmenter
from vitrel.data.folder import Folder, Prepare, Split, decode, folder_classes, normalise
from vitrel.data.shapes import Shapes

__all__ = [
    "Augmentation",
    "Augmenter",
    "Folder",
    "Prepare",
    "Shapes",
    "class_names",
    "create_dataset",
    "create_shapes",
    "decode",
    "folder_classes",
    "normalise",
]

SHAPES_TRAIN, SHAPES_VAL = 10_000, 1_000


def create_dataset(
    data: str,
    split: Split,
    size: tuple[int, int],
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    crop_pct: float = 1.0,
    interpolation: str = "bicubic",
    protocol: str = "scale",
    base_size: tuple[int, int] | None = None,
    augment: Augmentation | None = None,
    n: int | None = None,
    seed: int = 0,
) -> Dataset:
    """A data set of (float32 [3, H, W] normalised, class index) with `.classes: list[str]`.

    Args:
        data: "shapes", or a folder that holds `train/<class>/` and `val/<class>/`.
        split: "train" or "val"; for `shapes` the two never share a seed.
        size: (H, W) of the images, pixels.
        mean, std, crop_pct, interpolation: from the model's `pretrained_cfg`.
        protocol: "scale" (the same field of view at every size) or "canvas" (objects keep their pixels).
        base_size: (H, W) of training, which `canvas` needs.
        augment: what is drawn for each training image of a folder; None prepares them as for evaluation.
        n: number of images: for `shapes` 10,000 to train and 1,000 to evaluate by default, for a folder all.
        seed: of the shapes, of the augmentation, and of the choice of n.

    Raises:
        ValueError: for an unknown split, a folder of another layout, or settings that do not apply to `data`.
    """
    if split not in ("train", "val"):
        raise ValueError(f"unknown split {split!r}; use 'train' or 'val'")
    if data == "shapes":
        if augment is not None:
            raise ValueError("shapes vary in place, size and colour by themselves, and mirroring changes the label: no augment")
        base = {} if base_size is None else {"base": base_size}
        return create_shapes(split, n, seed, size=size, mean=mean, std=std, protocol=protocol, **base)
    if augment is not None and split == "val":
        raise ValueError("evaluation images are not augmented: give augment with split='train' only")
    prepare = Prepare(size, mean, std, crop_pct, interpolation, protocol, base_size)
    augmenter = None if augment is None else Augmenter(augment, size, mean, std, seed)
    return Folder(data, split, prepare, augmenter, n, seed)


def class_names(data: str) -> list[str]:
    """The classes of a data set to train on, without building it."""
    return list(Shapes(1).classes) if data == "shapes" else folder_classes(data)


def create_shapes(split: Split, n: int | None = None, seed: int = 0, **how: Any) -> Shapes:
    """`Shapes(n, **how)` with the default n of the split and a seed of its own, so that no evaluation image is trained on."""
    if n is None:
        n = SHAPES_TRAIN if split == "train" else SHAPES_VAL
    return Shapes(n, seed=2 * seed + (split == "train"), **how)
