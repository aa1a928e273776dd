"""Decoding of image files to RGB by Pillow, as timm decodes them.

JPEG, PNG, WebP, GIF, BMP and TIFF are recognized by content, not by name. More than Pillow's limit of
178,956,970 pixels are an error before an image is decoded. The rules of conversion:

- gray is repeated into three channels, palettes are looked up, CMYK is converted as Pillow does;
- alpha and transparent colors are dropped, not blended: the stored color stays;
- 16 bits per channel keep their high byte; a TIFF of 32 bits, which have no common meaning, is not decoded;
- the EXIF orientation is ignored, as timm and torchvision's `ImageFolder` do, unless the image has a mask: image and mask are
  then turned as viewers do, and so do the tools that masks are drawn with; Pillow always turns a TIFF;
- of an animation or a TIFF of several pages, the first is taken.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Literal, get_args

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from vitrel.common.files import shown
from vitrel.common.resources import out_of_memory

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
# suffixes of image files
SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".gif", ".bmp", ".tif", ".tiff")
IGNORED = 255  # value of mask pixels that have no class
REMEDY = "repair or remove it"
# errors of the path itself, as opposed to errors of the machine, such as too many open files
UNREADABLE = (
    errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG
)  # fmt: skip

OnBad = Literal["raise", "leave_out"]


class BadImage(ValueError):
    """An image cannot be read: its path cannot be opened, or it is damaged, of another format, or has too many pixels.

    The message names the image and the reason.
    """


@dataclass(frozen=True)
class Reading:
    """Settings of reading image files: limits, unreadable images, symbolic links.

    Args:
        on_bad: handling of unreadable images: "raise" an error; or "leave_out", which marks the image in the data set's `bad`
            and gives an image of zeros with label -1, for training and metrics to ignore.
        bad_share: training stops when more than this share of its images, or of the evaluation images, is unreadable.
        follow_links: also read folders that symbolic links inside class folders point to (image folders only). Class folders
            and image files may always be links, and a file that several links point to counts once.
        val_fraction: share of the images of every class that is used for evaluation, where the data has no evaluation split,
            as a folder with one level of classes; the others are for training.

    Raises:
        ValueError: an unknown on_bad, or a limit out of range.
    """

    on_bad: OnBad = "raise"
    bad_share: float = 0.01
    follow_links: bool = False
    val_fraction: float | None = None

    def __post_init__(self) -> None:
        if self.on_bad not in get_args(OnBad):
            raise ValueError(f"unknown on_bad {self.on_bad!r}; use one of {', '.join(get_args(OnBad))}")
        if not 0 <= self.bad_share <= 1:
            raise ValueError(f"bad_share must be between 0 and 1, not {self.bad_share}")
        if self.val_fraction is not None and not 0 < self.val_fraction < 1:
            raise ValueError(f"val_fraction must be a share of the images, above 0 and below 1, not {self.val_fraction}")


def decode(source: str | Path | bytes | Image.Image, name: str = "", upright: bool = False) -> Image.Image:
    """Decode an image file, or its bytes, to a Pillow image of mode RGB.

    Args:
        source: path, or encoded bytes; a Pillow image, decoded elsewhere, is only converted to RGB.
        name: name of the image in errors; by default the path.
        upright: turn the image by its EXIF orientation.

    Raises:
        BadImage: (a ValueError) the image cannot be decoded or has too many pixels; the text has its name and the reason.
        MemoryError: memory runs out, which does not mean that the image is bad.
    """
    if isinstance(source, Image.Image):
        return _rgb(source)
    with _opened(source, name) as image:
        return _rgb(ImageOps.exif_transpose(image) if upright and _orientation(image) > 1 else image)


def decode_mask(source: str | Path | bytes, name: str = "the mask") -> np.ndarray:
    """Return the values of a mask, [h, w] of an unsigned integer type: gray levels or indices into a palette, never its colors.

    Gray levels are as stored, also of less than 8 bits, and the mask is turned by its EXIF orientation if it has one. The type
    is uint8, or uint16 for 16 bits.

    Args:
        source: path, or encoded bytes.
        name: name of the mask in errors.

    Raises:
        BadImage: the mask cannot be decoded.
        ValueError: it is not a gray or palette PNG.
        MemoryError: memory runs out.
    """
    with _opened(source, name) as image:
        kind, mode = image.format, image.mode
        if fits := kind == "PNG" and mode in ("1", "L", "P", "I", "I;16"):
            scale = {"L;2": 85, "L;4": 17}.get(image.tile[0].args, 1)  # Pillow scales levels of 2 and 4 bits to 0 to 255
            values = np.asarray(ImageOps.exif_transpose(image) if _orientation(image) > 1 else image)
    if not fits:
        raise ValueError(f"{name} is a {kind} of mode {mode}, and a mask is a gray or palette PNG")
    return values.astype(np.uint8 if mode in "1LP" else np.uint16) // scale


def image_size(source: str | Path | bytes | Image.Image, name: str = "", upright: bool = False) -> tuple[int, int]:
    """Return (height, width) of an image in pixels from its header, without decoding it; arguments, errors as of `decode`."""
    if isinstance(source, Image.Image):
        return source.height, source.width
    with _opened(source, name) as image:
        w, h = image.size
        return (w, h) if upright and _orientation(image) > 4 else (h, w)


@contextmanager
def _opened(source: str | Path | bytes, name: str) -> Iterator[Image.Image]:
    """Context that yields the image with only its header read; an error inside it becomes `BadImage` or MemoryError."""
    name = name or (f"{len(source)} bytes" if isinstance(source, bytes) else shown(source))
    with open_image(source, name) as file:
        try:
            yield Image.open(file, formats=FORMATS)
        except UnidentifiedImageError as error:
            file.seek(0)
            begins = file.read(16)
            text = f"not a JPEG, PNG, WebP, GIF, BMP or TIFF image: it begins with {begins!r}"
            raise BadImage(f"cannot decode {name}: {text if begins else 'the file is empty'}; {REMEDY}") from error
        except Exception as error:  # damaged files raise OSError, SyntaxError, zlib.error, RuntimeError and others
            if out_of_memory(error):
                raise MemoryError(f"memory ran out while {name} was decoded") from error
            raise BadImage(f"cannot decode {name}: {error}; {REMEDY}") from error


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation of an image, 1 to 8, from its header; from 5 on height and width are exchanged.

    It is 1 if there is none before the pixels, or a damaged one, and for a TIFF, which Pillow turns by itself.
    """
    if image.format == "TIFF":  # Pillow turns it while it decodes it, and its header has the turned size
        return 1
    if image.format == "PNG" and "exif" not in image.info:  # otherwise Pillow decodes a PNG to look for it after the pixels
        return 1
    try:
        return image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # a damaged EXIF block raises SyntaxError, struct.error and others, and viewers ignore it
        return 1


def open_image(source: str | Path | bytes, name: str) -> IO[bytes]:
    """Open an image file, or its bytes, without decoding it; the caller closes the stream.

    Args:
        source: path or content of the file.
        name: of the image, for messages.

    Raises:
        BadImage: the path does not lead to a file that may be read.
        OSError: the machine fails, such as by too many open files.
    """
    if isinstance(source, bytes):
        return BytesIO(source)
    try:
        return open(source, "rb")
    except OSError as error:
        if error.errno not in UNREADABLE:
            raise
        raise BadImage(f"cannot decode {name}: {error.strerror}; {REMEDY}") from error


def _rgb(image: Image.Image) -> Image.Image:
    """Return the image in mode RGB: gray is repeated, 16 bits keep the high byte, alpha is dropped; ValueError for 32 bits."""
    if image.mode == "RGB" and "transparency" not in image.info:
        image.load()
        return image  # convert() would copy it
    if image.mode == "F" or (image.mode == "I" and image.format == "TIFF"):
        raise ValueError("its values have 32 bits: save it with 8 or 16 bits per channel")
    if image.mode.startswith("I"):  # 16-bit gray, which convert() would clip at 255
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if "transparency" in image.info and image.mode == "P":
        image = image.convert("RGBA")  # Pillow warns of a conversion directly to RGB
    return image.convert("RGB")
