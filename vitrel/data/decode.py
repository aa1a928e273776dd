"""Encoded images to uint8 RGB, by one rule for every decoder.

The header is read first; an image of too many pixels is refused before anything is decoded. JPEG, PNG, WebP, GIF and BMP are
told apart by content, not by name. Of each:

- grey is repeated into three channels, palettes are looked up, CMYK is converted as Pillow does;
- alpha and transparent colours are dropped, not blended: the stored colour stays;
- 16 bits per channel keep their high byte;
- the orientation that EXIF asks for is ignored, as timm and torchvision's `ImageFolder` do;
- of an animation the first frame is taken.

torchvision decodes 8-bit RGB and grey JPEG and WebP, Pillow the rest under either name: torchvision's PNG decoder returns
uint16 for 16-bit files and ends the process (segmentation fault) at a damaged stream.
"""

import errno
import os
import re
import stat
from contextlib import nullcontext
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Literal, get_args

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor
from torchvision.io import ImageReadMode, decode_image

from vitrel.data.memory import names_image, ran_out
from vitrel.files import shown

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".gif", ".bmp")  # of files that are taken for images
MAX_PIXELS = 89_478_485  # where Pillow begins to warn: 268 MB of RGB
HARD_LIMIT = 2 * MAX_PIXELS  # where Pillow refuses by itself
WAY_OUT = "repair or remove it"
# what is wrong with the path and not with the machine, such as too many open files
UNREADABLE = (
    errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG
)  # fmt: skip

Decoder = Literal["torchvision", "pillow"]
OnBad = Literal["raise", "replace", "leave_out"]


class BadImage(ValueError):
    """An image that cannot be decoded whole, or that is too large; the text names it."""


@dataclass(frozen=True)
class Reading:
    """How images are read, and what happens to those that cannot be.

    Args:
        decoder: "torchvision" or "pillow"; the rule and the result are the same.
        max_pixels: larger images are refused before they are decoded; at most 178,956,970, where Pillow ends.
        on_bad: "raise" stops; "replace" (training) takes the next readable image with its own label; "leave_out" (evaluation)
            gives zeros labelled -1, which metrics must leave out. The last two mark the image in `.bad`.
        bad_limit: "replace" stops after this many unreadable images in a row.
        bad_share: training stops when more than this share of its images turned out to be unreadable.
        cached_side: shorter side, pixels, to which larger images are reduced once decoded (antialiased bicubic), then cached in
            the memory of every process that loads them: a small set is decoded once. In training alone. Null caches nothing.
        follow_links: look for images in folders that links inside class folders lead to. Class folders and image files may be
            links in any case, and one file counts once. Of an image folder alone.

    Raises:
        ValueError: for an unknown decoder or on_bad, or a limit out of range.
    """

    decoder: Decoder = "torchvision"
    max_pixels: int = MAX_PIXELS
    on_bad: OnBad = "raise"
    bad_limit: int = 100
    bad_share: float = 0.01
    cached_side: int | None = None
    follow_links: bool = False

    def __post_init__(self) -> None:
        _check_decoder(self.decoder)
        if self.on_bad not in get_args(OnBad):
            raise ValueError(f"unknown on_bad {self.on_bad!r}; use one of {', '.join(get_args(OnBad))}")
        if not 1 <= self.max_pixels <= HARD_LIMIT:
            raise ValueError(f"max_pixels lies between 1 and {HARD_LIMIT:,}, where Pillow ends, not {self.max_pixels:,}")
        if self.bad_limit < 1:
            raise ValueError(f"bad_limit is at least 1, not {self.bad_limit}")
        if not 0 <= self.bad_share <= 1:
            raise ValueError(f"bad_share lies between 0 and 1, not {self.bad_share}")
        if self.cached_side is not None and self.cached_side < 1:
            raise ValueError(f"cached_side is the shorter side of cached images, at least 1 pixel, not {self.cached_side}")


def decode(
    source: str | Path | bytes, max_pixels: int = MAX_PIXELS, decoder: Decoder = "torchvision", name: str = ""
) -> Tensor:
    """uint8 RGB [3, h, w] of an image file, or of its bytes.

    Args:
        source: path, or encoded bytes.
        max_pixels: h · w above which the image is refused.
        decoder: "torchvision" or "pillow".
        name: what error texts call the image; the path by default.

    Raises:
        BadImage: (a ValueError) with the name, what is wrong and the way out.
        MemoryError: with the name and the size where memory runs out, which is no fault of the image.
    """
    _check_decoder(decoder)
    name = name or (f"{len(source)} bytes" if isinstance(source, bytes) else shown(source))
    image = None
    with (
        nullcontext(BytesIO(source)) if isinstance(source, bytes) else open_image(source, name) as file,
        names_image(lambda: f"{name}{'' if image is None else ' ({1}x{0} pixels)'.format(*image.size)} was decoded"),
    ):
        image = _header(file, max_pixels, name)
        try:
            if decoder == "torchvision" and _plain(image):
                file.seek(0)
                data = torch.frombuffer(bytearray(file.read()), dtype=torch.uint8)
                return decode_image(data, mode=ImageReadMode.RGB).contiguous()  # WebP comes channels last
            return _by_pillow(image)
        except Exception as error:  # a damaged file raises almost anything: OSError, SyntaxError, zlib.error, RuntimeError ...
            if ran_out(error):
                raise
            what = re.sub(r"^.*\.cpp:\d+, ", "", str(error).split("\n", 1)[0])  # torchvision's begin with its source file
            raise BadImage(f"cannot decode {name}: {what}; {WAY_OUT}") from error


def image_size(source: str | Path | bytes, max_pixels: int = MAX_PIXELS, name: str = "") -> tuple[int, int]:
    """(height, width) in pixels that `decode` would give, from the header alone; `BadImage` where it cannot be read."""
    name = name or (f"{len(source)} bytes" if isinstance(source, bytes) else shown(source))
    with nullcontext(BytesIO(source)) if isinstance(source, bytes) else open_image(source, name) as file:
        w, h = _header(file, max_pixels, name).size
    return h, w


def open_image(path: str | Path, name: str) -> IO[bytes]:
    """The opened file; `BadImage` with its name for a path that cannot be opened, a pipe or a device."""
    try:
        mode = os.stat(path).st_mode
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            return open(path, "rb")
    except OSError as error:
        if error.errno not in UNREADABLE:
            raise
        raise BadImage(f"cannot decode {name}: {error.strerror}; {WAY_OUT}") from error
    raise BadImage(f"cannot decode {name}: it is a pipe or a device; {WAY_OUT}")  # would be waited for


def _check_decoder(decoder: str) -> None:
    if decoder not in get_args(Decoder):
        raise ValueError(f"unknown decoder {decoder!r}; use one of {', '.join(get_args(Decoder))}")


def _header(file: IO[bytes], max_pixels: int, name: str) -> Image.Image:
    """The image with its header read and nothing decoded."""
    limit = f"more than max_pixels={max_pixels:,}, so it was not decoded; make it smaller, or raise max_pixels if you trust it"
    try:
        image = Image.open(file, formats=FORMATS)
    except Image.DecompressionBombError as error:
        pixels = int(re.search(r"\d+", str(error))[0])  # Pillow's own, higher limit; it does not tell the sides
        raise BadImage(f"{name} has {pixels:,} pixels, {limit}") from error
    except UnidentifiedImageError as error:
        file.seek(0)
        begins = file.read(16)
        what = f"not a JPEG, PNG, WebP, GIF or BMP image, it begins with {begins!r}" if begins else "the file is empty"
        raise BadImage(f"cannot decode {name}: {what}; {WAY_OUT}") from error
    except (OSError, SyntaxError, ValueError) as error:
        raise BadImage(f"cannot decode {name}: {error}; {WAY_OUT}") from error
    w, h = image.size
    if h * w > max_pixels:
        raise BadImage(f"{name} has {h}x{w} (H x W) pixels, {limit}")
    return image


def _plain(image: Image.Image) -> bool:
    """Whether torchvision decodes it, safely and by the rule."""
    still = image.format in ("JPEG", "MPO") or (image.format == "WEBP" and not getattr(image, "is_animated", False))
    return still and image.mode in ("RGB", "L")


def _by_pillow(image: Image.Image) -> Tensor:
    if image.mode.startswith("I"):  # 16-bit grey, which convert() would cut off at 255
        grey = torch.from_numpy((np.asarray(image) >> 8).astype(np.uint8))
        return grey.expand(3, -1, -1).contiguous()
    if "transparency" in image.info and image.mode == "P":
        image = image.convert("RGBA")  # straight to RGB, Pillow warns
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()
