"""Packing an image folder into tar shards, which `shards.py` reads."""

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision.transforms.functional import resize, to_pil_image

from vitrel.data.base import sha256
from vitrel.data.decode import MAX_PIXELS, BadImage, Reading, decode, open_image
from vitrel.data.folder import INTERPOLATIONS, Folder
from vitrel.data.memory import names_image
from vitrel.data.shards import FORMAT, INDEX
from vitrel.extras import optional_import
from vitrel.files import atomic_write, shown

QUALITY = 95


class Encode(Dataset):
    """A data set of encoded images (suffix without dot, bytes, label, error), checked and optionally resized.

    The error is "" for a good image; for a bad one it is the message, and the bytes are empty.

    Args:
        samples: (path, label) of each image.
        short_side: resize images with a longer shorter side to this number of pixels (bicubic, antialiased) and encode them as
            JPEG of quality 95 without chroma subsampling; None keeps the original bytes.
        check: decode every image to find errors, which `short_side` does in any case; without either, only files that cannot
            be opened are errors, and `max_pixels` has no effect.
        max_pixels: images with more pixels are errors.
    """

    def __init__(self, samples: Sequence[tuple[str, int]], short_side: int | None, check: bool, max_pixels: int) -> None:
        self.samples, self.short_side, self.check, self.max_pixels = samples, short_side, check, max_pixels

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[str, bytes, int, str]:
        path, label = Path(self.samples[index][0]), self.samples[index][1]
        ending, name = path.suffix[1:].lower(), shown(path)
        try:
            if self.check or self.short_side:
                image = decode(path, self.max_pixels)
                if self.short_side and min(image.shape[-2:]) > self.short_side:
                    return "jpg", self._smaller(image, name), label, ""
            with names_image(lambda: f"{name} was read"), open_image(path, name) as file:
                return ending, file.read(), label, ""
        except BadImage as error:
            return ending, b"", label, str(error)

    def _smaller(self, image: Tensor, name: str) -> bytes:
        with names_image(lambda: f"{name} ({image.shape[-2]}x{image.shape[-1]} pixels) was resized"):
            small = resize(image, [self.short_side], INTERPOLATIONS["bicubic"], antialias=True)
            file = BytesIO()
            to_pil_image(small).save(file, "JPEG", quality=QUALITY, subsampling=0)
            return file.getvalue()


def pack(
    source: Path,
    out: Path,
    splits: Sequence[str] | None = None,
    *,
    shard_bytes: float = 100e6,
    images_per_shard: int | None = None,
    short_side: int | None = None,
    seed: int = 0,
    check: bool = True,
    max_pixels: int = MAX_PIXELS,
    workers: int = 0,
    follow_links: bool = False,
    advance: Callable[[str, int, int], None] = lambda split, done, total: None,
) -> dict[str, Any]:
    """Write the shards `out/{train,val}/00000.tar`, ... and at last `out/index.json`; return the content of the index.

    Args:
        source: folder that holds `train/<class>/` and `val/<class>/`.
        out: folder to write; must not exist or be empty.
        splits: "train", "val" or both; by default those in `source`.
        shard_bytes: a shard ends when its images have at least this number of bytes.
        images_per_shard: number of images per shard, instead of `shard_bytes`.
        short_side, check, max_pixels: as in `Encode`.
        seed: seed of the order of images, which mixes the classes of a split.
        workers: processes that read and check images.
        follow_links: as in `Reading`.
        advance: called after each image with (split, number of images done, number of images).

    Raises:
        ValueError: `out` is not empty, or images cannot be read; the text lists them, and no index is written.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(f"{out} exists and is not empty, and is not overwritten: name another folder or delete it")
    splits = splits or [name for name in ("train", "val") if (source / name).is_dir()] or ["train"]
    reading = Reading(follow_links=follow_links)
    folders = {split: Folder(source, split, prepare=lambda image: image, reading=reading) for split in splits}
    limits = {"maxcount": images_per_shard or 10**12, "maxsize": np.inf if images_per_shard else shard_bytes}
    index: dict[str, Any] = {"format": FORMAT, "classes": folders[splits[0]].classes, "splits": {}}
    bad: list[str] = []
    for split, folder in folders.items():
        order = np.random.default_rng(seed).permutation(len(folder))
        encode = Encode([folder.samples[i] for i in order], short_side, check, max_pixels)
        images = DataLoader(encode, batch_size=None, num_workers=workers)
        shards = _write(out / split, _readable(images, bad, partial(advance, split)), limits)
        index["splits"][split] = {"counts": folder.class_counts(), "shards": shards}
    if bad:
        shown = "\n".join(bad[:20]) + (f"\nand {len(bad) - 20} more" if len(bad) > 20 else "")
        raise ValueError(f"{len(bad)} images cannot be packed, so {out} has no index and cannot be used; delete it:\n{shown}")
    with atomic_write(out / INDEX) as part:
        part.write_text(json.dumps(index, indent=1) + "\n")
    return index


def _readable(images: DataLoader, bad: list[str], advance: Callable[[int, int], None]) -> Iterator[dict[str, Any]]:
    """Yield the images without an error as webdataset's samples, in order; append the error texts of the others to `bad`.

    advance: called after every image with (number of images done, number of images).
    """
    for done, (ending, data, label, error) in enumerate(images, 1):
        if error:
            bad.append(error)
        else:
            yield {"__key__": f"{done - 1:08d}", ending: data, "cls": str(label).encode()}
        advance(done, len(images))


def _write(folder: Path, samples: Iterator[dict[str, Any]], limits: dict[str, float]) -> list[dict[str, Any]]:
    """Write the samples as shards into a new folder; return the index's entry for each shard."""
    with optional_import():
        from webdataset import ShardWriter

    shards: list[dict[str, Any]] = []

    def closed(name: str) -> None:
        path = Path(name)
        shards.append({"name": path.name, "images": writer.count, "bytes": path.stat().st_size, "sha256": sha256(path)})

    folder.mkdir(parents=True)
    pattern = str(folder.resolve()).replace("%", "%%") + "/%05d.tar"
    with ShardWriter(pattern, post=closed, verbose=0, encoder=False, mtime=0, **limits) as writer:
        for sample in samples:
            writer.write(sample)
    return shards
