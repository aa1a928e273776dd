"""Decoding of image files to RGB by Pillow, as timm decodes them.

The header is read first: an image with too many pixels is an error before it is decoded. JPEG, PNG, WebP, GIF, BMP and TIFF
are recognized by content, not by name. The rules of conversion:

- gray is repeated into three channels, palettes are looked up, CMYK is converted as Pillow does;
- alpha and transparent colors are dropped, not blended: the stored color stays;
- 16 bits per channel keep their high byte; a TIFF of 32 bits, which have no common meaning, is not decoded;
- the EXIF orientation is ignored, as timm and torchvision's `ImageFolder` do, unless the image has a mask: image and mask are
  then turned as viewers do, and so do the tools that masks are drawn with; Pillow always turns a TIFF;
- of an animation or a TIFF of several pages, the first is taken.
"""

import errno
import os
import re
import stat
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import IO, Literal, get_args

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError

from vitrel.common.files import shown

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF")
# suffixes of image files
SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".apng", ".webp", ".gif", ".bmp", ".tif", ".tiff")
IGNORED = 255  # value of mask pixels that have no class
MAX_PIXELS = 89_478_485  # Pillow warns above this number: 268 MB of RGB
HARD_LIMIT = 2 * MAX_PIXELS  # Pillow raises an error above this number
REMEDY = "repair or remove it"
# errors of the path itself, as opposed to errors of the machine, such as too many open files
UNREADABLE = (
    errno.ENOENT, errno.EISDIR, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.ELOOP, errno.ENAMETOOLONG
)  # fmt: skip

OUT_OF_MEMORY = ("DefaultCPUAllocator", "Insufficient memory")  # of PyTorch; of OpenCV

OnBad = Literal["raise", "replace", "leave_out"]


class BadImage(ValueError):
    """An image cannot be read: its path cannot be opened, or it is damaged, of another format, or has too many pixels.

    The message names the image and the reason.
    """


@dataclass(frozen=True)
class Reading:
    """Settings of reading image files: limits, unreadable images, symbolic links.

    Args:
        max_pixels: images with more pixels count as unreadable, before they are decoded; at most 178,956,970, Pillow's limit.
        on_bad: handling of unreadable images: "raise" an error; "replace" (for training) by the next readable image and its
            label; "leave_out" (for evaluation), an image of zeros with label -1, which metrics must ignore. "replace" and
            "leave_out" mark the image in the data set's `bad`.
        bad_share: training stops when more than this share of its images is unreadable.
        follow_links: also read folders that symbolic links inside class folders point to (image folders only). Class folders
            and image files may always be links, and a file that several links point to counts once.
        val_fraction: share of the images of every class that is used for evaluation, where the data has no evaluation split,
            as a folder with one level of classes; the others are for training.

    Raises:
        ValueError: an unknown on_bad, or a limit out of range.
    """

    max_pixels: int = MAX_PIXELS
    on_bad: OnBad = "raise"
    bad_share: float = 0.01
    follow_links: bool = False
    val_fraction: float | None = None

    def __post_init__(self) -> None:
        if self.on_bad not in get_args(OnBad):
            raise ValueError(f"unknown on_bad {self.on_bad!r}; use one of {', '.join(get_args(OnBad))}")
        if not 1 <= self.max_pixels <= HARD_LIMIT:
            raise ValueError(f"max_pixels must be between 1 and {HARD_LIMIT:,} (Pillow's limit), not {self.max_pixels:,}")
        if not 0 <= self.bad_share <= 1:
            raise ValueError(f"bad_share must be between 0 and 1, not {self.bad_share}")
        if self.val_fraction is not None and not 0 < self.val_fraction < 1:
            raise ValueError(f"val_fraction must be a share of the images, above 0 and below 1, not {self.val_fraction}")


def decode(
    source: str | Path | bytes | Image.Image, max_pixels: int = MAX_PIXELS, name: str = "", upright: bool = False
) -> Image.Image:
    """Decode an image file, or its bytes, to a Pillow image of mode RGB.

    Args:
        source: path, or encoded bytes; an image that another library decoded is converted alone.
        max_pixels: maximum h · w.
        name: name of the image in errors; by default the path.
        upright: turn the image by its EXIF orientation.

    Raises:
        BadImage: (a ValueError) the image cannot be decoded or has too many pixels; the text has its name and the reason.
        MemoryError: memory runs out, which does not mean that the image is bad.
    """
    if isinstance(source, Image.Image):
        return _rgb(source)
    name = name or _name(source)
    with open_image(source, name) as file:
        image = _header(file, max_pixels, name)
        try:
            return _rgb(ImageOps.exif_transpose(image) if upright and _orientation(image) > 1 else image)
        except Exception as error:  # damaged files raise OSError, SyntaxError, zlib.error, RuntimeError and others
            raise _undecoded(name, error) from error


def decode_mask(source: str | Path | bytes, max_pixels: int = MAX_PIXELS, name: str = "") -> np.ndarray:
    """Return the values of a mask, [h, w] of an unsigned integer type: gray levels or indices into a palette, never its colors.

    Gray levels are as stored, also of less than 8 bits, and the mask is turned by its EXIF orientation if it has one.

    Args:
        source, max_pixels, name: as in `decode`.

    Raises:
        BadImage: the mask cannot be decoded or has too many pixels.
        ValueError: it is no mask: several channels, or a format with losses.
    """
    name = name or _name(source)
    with open_image(source, name) as file:
        image = _header(file, max_pixels, name)
        if image.format != "PNG" or image.mode not in ("1", "L", "P", "I", "I;16"):
            raise ValueError(f"{name} is a {image.format} of mode {image.mode}, and a mask is a gray or palette PNG")
        scale = {"L;2": 85, "L;4": 17}.get(image.tile[0].args, 1)  # Pillow scales levels of 2 and 4 bits to 0 to 255
        try:
            values = np.asarray(ImageOps.exif_transpose(image) if _orientation(image) > 1 else image)
            return values.astype(np.uint8 if image.mode in "1LP" else np.uint16) // scale
        except Exception as error:
            raise _undecoded(name, error) from error


def image_size(
    source: str | Path | bytes | Image.Image, max_pixels: int = MAX_PIXELS, name: str = "", upright: bool = False
) -> tuple[int, int]:
    """Return (height, width) of an image in pixels from its header, without decoding it; otherwise as `decode`."""
    if isinstance(source, Image.Image):
        return source.height, source.width
    name = name or _name(source)
    with open_image(source, name) as file:
        image = _header(file, max_pixels, name)
        w, h = image.size
        return (w, h) if upright and _orientation(image) > 4 else (h, w)


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation of an image, 1 to 8, from what its header contains; from 5 on height and width are exchanged."""
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
        BadImage: the path is bad, or that of a pipe or a device.
        OSError: the machine fails, such as by too many open files.
    """
    if isinstance(source, bytes):
        return BytesIO(source)
    try:
        mode = os.stat(source).st_mode
        if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
            return open(source, "rb")
    except OSError as error:
        if error.errno not in UNREADABLE:
            raise
        raise BadImage(f"cannot decode {name}: {error.strerror}; {REMEDY}") from error
    raise BadImage(f"cannot decode {name}: it is a pipe or a device; {REMEDY}")  # opening it could block for ever


def ran_out(error: Exception) -> bool:
    """Return whether `error` means that CPU memory ran out, in Python, PyTorch or OpenCV."""
    if isinstance(error, MemoryError):
        return True
    from_library = isinstance(error, RuntimeError) or type(error).__module__ == "cv2"
    return from_library and any(message in str(error) for message in OUT_OF_MEMORY)


def _undecoded(name: str, error: Exception) -> Exception:
    """The error to raise of an image that cannot be decoded; a lack of memory is not its fault."""
    if ran_out(error):
        return MemoryError(f"memory ran out while {name} was decoded")
    return BadImage(f"cannot decode {name}: {error}; {REMEDY}")


def _name(source: str | Path | bytes) -> str:
    return f"{len(source)} bytes" if isinstance(source, bytes) else shown(source)


def _header(file: IO[bytes], max_pixels: int, name: str) -> Image.Image:
    """The image opened by Pillow with only its header read; `BadImage` for a bad header or too many pixels."""
    limit = f"more than max_pixels={max_pixels:,}, so it was not decoded; make it smaller, or raise max_pixels if you trust it"
    try:
        image = Image.open(file, formats=FORMATS)
    except Image.DecompressionBombError as error:
        pixels = int(re.search(r"\d+", str(error))[0])  # above Pillow's limit; its error has no height and width
        raise BadImage(f"{name} has {pixels:,} pixels, {limit}") from error
    except UnidentifiedImageError as error:
        file.seek(0)
        begins = file.read(16)
        kinds = "not a JPEG, PNG, WebP, GIF, BMP or TIFF image, or of a kind that Pillow does not read"
        reason = f"{kinds}; it begins with {begins!r}" if begins else "the file is empty"
        raise BadImage(f"cannot decode {name}: {reason}; {REMEDY}") from error
    except (OSError, SyntaxError, ValueError) as error:
        raise BadImage(f"cannot decode {name}: {error}; {REMEDY}") from error
    w, h = image.size
    if h * w > max_pixels:
        raise BadImage(f"{name} has {h}x{w} (H x W) pixels, {limit}")
    return image


def _rgb(image: Image.Image) -> Image.Image:
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
