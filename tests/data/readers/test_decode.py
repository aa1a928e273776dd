"""One rule for every kind of file; what is damaged or too large is named and not decoded."""

import errno
import io
import os
import random
import struct
import sys
import tracemalloc
import zlib
from unittest.mock import Mock

import numpy as np
import pytest
from PIL import Image

from helpers import each
from vitrel.data import BadImage, decode
from vitrel.data.readers.decode import decode_mask, image_size

H, W = 24, 32
rng = np.random.default_rng(0)
RGB = rng.integers(0, 256, (H, W, 3), dtype=np.uint8)
ALPHA = rng.integers(0, 256, (H, W, 1), dtype=np.uint8)
DEEP = rng.integers(0, 65536, (H, W, 4), dtype=np.uint16)
SMOOTH = np.asarray(Image.fromarray(RGB[:4, :5]).resize((W, H), Image.BICUBIC))
ROTATED = Image.Exif()
ROTATED[0x112] = 6  # orientation: turn by 90 degrees


def encoded(array, kind, **how):
    file = io.BytesIO()
    (array if isinstance(array, Image.Image) else Image.fromarray(array)).save(file, kind, **how)
    return file.getvalue()


def chunk(name, data):
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def png(h, w, bits, color, stream, before=b"", after=b""):
    """A PNG of rows already filtered and compressed, with other chunks before and after them."""
    header = struct.pack(">IIBBBBB", w, h, bits, color, 0, 0, 0)
    image = before + chunk(b"IDAT", stream) + after
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + image + chunk(b"IEND", b"")


def gif(h, w, frame_h, frame_w):
    """A GIF whose one frame, of another size than the whole, holds nothing."""
    screen = b"GIF89a" + struct.pack("<HH", w, h) + b"\x80\0\0" + b"\0\0\0\xff\xff\xff"
    return screen + b"," + struct.pack("<HHHH", 0, 0, frame_w, frame_h) + b"\0\x02\x02\x44\x01\0;"


def deep(channels, color):
    rows = DEEP[..., channels].astype(">u2")
    return png(H, W, 16, color, zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows)))


def gray(array):
    return np.repeat(array.reshape(H, W, 1), 3, 2)


PALETTE = Image.fromarray(RGB).quantize(16)
COLORS = np.asarray(PALETTE.convert("RGB"))
CMYK = Image.merge("CMYK", [Image.fromarray(SMOOTH[..., i % 3]) for i in range(4)])
FRAMES = {"save_all": True, "append_images": [Image.fromarray(RGB)], "lossless": True}
HIGH = (DEEP >> 8).astype(np.uint8)
EXACT = {
    "png": (encoded(RGB, "PNG"), RGB),
    "tiff": (encoded(RGB, "TIFF", compression="tiff_lzw"), RGB),
    "tiff of two pages": (encoded(RGB, "TIFF", save_all=True, append_images=[Image.fromarray(SMOOTH)]), RGB),
    "tiff cmyk": (encoded(Image.fromarray(RGB).convert("CMYK"), "TIFF"), RGB),
    "tiff of 16 bits": (encoded(DEEP[..., 0].astype(np.uint16), "TIFF"), gray(HIGH[..., 0])),
    "png gray": (encoded(RGB[..., 0], "PNG"), gray(RGB[..., 0])),
    "png black and white": (encoded(RGB[..., 0] > 99, "PNG"), gray(RGB[..., 0] > 99) * np.uint8(255)),
    "png gray and alpha": (encoded(np.concatenate([RGB[..., :1], ALPHA], 2), "PNG"), gray(RGB[..., 0])),
    "png alpha": (encoded(np.concatenate([RGB, ALPHA], 2), "PNG"), RGB),
    "png palette": (encoded(PALETTE, "PNG"), COLORS),
    "png palette, one transparent": (encoded(PALETTE, "PNG", transparency=3), COLORS),
    "png palette, many transparent": (encoded(PALETTE, "PNG", transparency=bytes(range(0, 160, 10))), COLORS),
    "png transparent color": (encoded(RGB, "PNG", transparency=tuple(RGB[0, 0].tolist())), RGB),
    "png 16-bit gray": (deep([0], 0), gray(HIGH[..., 0])),
    "png 16-bit gray and alpha": (deep([0, 1], 4), gray(HIGH[..., 0])),
    "png 16-bit": (deep([0, 1, 2], 2), HIGH[..., :3]),
    "png 16-bit alpha": (deep([0, 1, 2, 3], 6), HIGH[..., :3]),
    "png rotated by exif": (encoded(RGB, "PNG", exif=ROTATED), RGB),
    "webp": (encoded(RGB, "WEBP", lossless=True), RGB),
    "webp alpha": (encoded(np.concatenate([RGB, ALPHA], 2), "WEBP", lossless=True, exact=True), RGB),
    "webp animated": (encoded(SMOOTH, "WEBP", **FRAMES), SMOOTH),
    "bmp": (encoded(RGB, "BMP"), RGB),
    "gif": (encoded(PALETTE, "GIF"), COLORS),
}
SMOOTH_GRAY = np.asarray(Image.fromarray(SMOOTH).convert("L"))
LOSSY = {
    "jpg": (encoded(SMOOTH, "JPEG", quality=95, subsampling=0), SMOOTH),
    "jpg subsampled": (encoded(SMOOTH, "JPEG", quality=90), SMOOTH),
    "jpg progressive": (encoded(SMOOTH, "JPEG", quality=95, progressive=True), SMOOTH),
    "jpg gray": (encoded(SMOOTH_GRAY, "JPEG", quality=95), gray(SMOOTH_GRAY)),
    "jpg cmyk": (encoded(CMYK, "JPEG", quality=95), np.asarray(CMYK.convert("RGB"))),
    "jpg rotated by exif": (encoded(SMOOTH, "JPEG", quality=95, exif=ROTATED), SMOOTH),
    "webp lossy": (encoded(SMOOTH, "WEBP", quality=95), SMOOTH),
}


def as_array(image):
    assert image.mode == "RGB"
    return np.asarray(image)


@pytest.mark.filterwarnings("error::UserWarning")  # Pillow warns of palettes with transparency
@each("kind", [*EXACT, *LOSSY])
def test_kinds_by_the_rule(kind):
    data, expected = (EXACT | LOSSY)[kind]
    found = as_array(decode(data)).astype(int)
    assert found.shape == (H, W, 3)  # not turned
    assert np.abs(found - expected).mean() < (6 if kind in LOSSY else 1e-9)


@each("bits", [1, 2, 4, 8])
def test_gray_masks_of_few_bits_are_read_as_stored(bits):
    """As annotation tools write them; Pillow writes gray levels of 1 and 8 bits, and palettes of all."""
    values = (np.arange(W * H).reshape(H, W) % 2 ** min(bits, 5)).astype(np.uint8)
    rows = np.packbits(np.unpackbits(values[..., None], axis=2)[..., 8 - bits :].reshape(H, -1), axis=1)
    stream = zlib.compress(b"".join(b"\0" + row.tobytes() for row in rows))
    assert np.array_equal(decode_mask(png(H, W, bits, 0, stream)), values)
    palette = Image.fromarray(values)
    palette.putpalette(rng.integers(0, 256, 768, dtype=np.uint8).tobytes())
    assert np.array_equal(decode_mask(encoded(palette, "PNG", bits=bits)), values)


def test_paths_and_bytes_are_the_same(tmp_path):
    path = tmp_path / "picture.JPEG"
    path.write_bytes(EXACT["png"][0])  # the content tells, not the name; ImageNet has such a file
    assert decode(path) == decode(str(path)) == decode(path.read_bytes())


def cut(kind, share):
    data = {**EXACT, **LOSSY}[kind][0]
    return data[: int(len(data) * share)]


BROKEN_STREAM = bytearray(zlib.compress(b"".join(b"\0" + row.tobytes() for row in RGB)))
BROKEN_STREAM[-2] ^= 255
DAMAGED = {
    "jpg cut": (cut("jpg", 0.6), "[Tt]runcated"),
    "jpg without its end": (LOSSY["jpg"][0][:-2], "[Tt]runcated"),
    "progressive jpg cut": (cut("jpg progressive", 0.7), "[Tt]runcated"),
    "cmyk jpg cut": (cut("jpg cmyk", 0.6), "[Tt]runcated"),
    "png cut": (cut("png", 0.6), "[Tt]runcated"),
    "webp cut": (cut("webp lossy", 0.6), "."),
    "png with a broken stream": (png(H, W, 8, 2, bytes(BROKEN_STREAM)), "broken data stream"),
    "tiff of floats": (encoded(RGB[..., 0].astype(np.float32), "TIFF"), "its values have 32 bits: save it with 8 or 16"),
    "tiff of integers": (encoded(RGB[..., 0].astype(np.int32), "TIFF"), "its values have 32 bits: save it with 8 or 16"),
    "empty": (b"", "the file is empty"),
    "html": (b"<html>not found</html>", r"not a JPEG, PNG, .* image: it begins with b'<html>not found<'"),
}


@each("fault", DAMAGED)
def test_damaged_files_are_named(tmp_path, fault):
    data, text = DAMAGED[fault]
    path = tmp_path / "bad.jpg"
    path.write_bytes(data)
    for source, name in ((path, str(path)), (data, "val/00003.tar: 17")):
        with pytest.raises(BadImage, match=f"cannot decode {name}: .*{text}.*; repair or remove it"):
            decode(source, name=name)


@each("orientation", [1, 3, 6])
def test_a_tiff_is_turned_and_so_is_its_size(orientation):
    data = encoded(RGB, "TIFF", tiffinfo={274: orientation})
    expected = np.rot90(RGB, {1: 0, 3: 2, 6: -1}[orientation])
    for upright in (False, True):
        assert np.array_equal(as_array(decode(data, upright=upright)), expected)
        assert image_size(data, upright=upright) == expected.shape[:2]


def test_a_path_that_leads_nowhere_is_a_bad_image_and_a_fault_of_the_machine_is_not(tmp_path, monkeypatch):
    (tmp_path / "folder.jpg").mkdir()
    (tmp_path / "a.jpg").symlink_to("a.jpg")
    (tmp_path / "file").write_bytes(b"")
    for name, text in (
        ("folder.jpg", "Is a directory"),
        ("gone.jpg", "No such file"),
        ("a.jpg", "Too many levels"),
        ("file/c.jpg", "Not a directory"),
        ("x" * 300 + ".jpg", "too long"),
    ):
        with pytest.raises(BadImage, match=f"cannot decode .*{name}: .*{text}.*; repair or remove it"):
            decode(tmp_path / name)

    def no_more_files(path, mode):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))

    monkeypatch.setattr("builtins.open", no_more_files)
    with pytest.raises(OSError, match=r"Too many open files: 'cat.jpg'"):
        decode("cat.jpg")


@each(
    "error", [RuntimeError("DefaultCPUAllocator: not enough memory: you tried to"), MemoryError("Unable to allocate 3.00 GiB")]
)
def test_a_lack_of_memory_is_no_bad_image(monkeypatch, error):
    monkeypatch.setattr(sys.modules["vitrel.data.readers.decode"], "_rgb", Mock(side_effect=error))
    with pytest.raises(MemoryError, match=r"memory ran out while train/0.tar: 7 was decoded"):
        decode(LOSSY["jpg"][0], name="train/0.tar: 7")


@each("kind", ["jpg", "jpg progressive", "webp lossy", "webp", "png", "png palette"])
def test_any_damage_is_an_image_or_a_bad_image(kind):
    """Flipped bytes never end the process, and raise nothing else."""
    data, draw = {**EXACT, **LOSSY}[kind][0], random.Random(0)
    refused = 0
    for _ in range(60):
        flipped = bytearray(data)
        for _ in range(draw.randint(1, 6)):
            flipped[draw.randrange(len(data))] = draw.randrange(256)
        try:
            assert decode(bytes(flipped)).mode == "RGB"
        except BadImage:
            refused += 1
    assert refused > 4


MEGABYTES = zlib.compress(bytes(100_000_000))  # 97 kB
ROWS = zlib.compress(b"".join(b"\0" + row.tobytes() for row in RGB))
BOMBS = {
    "profile": (png(H, W, 8, 2, ROWS, chunk(b"iCCP", b"x\0\0" + MEGABYTES)), "data too large"),
    "text": (png(H, W, 8, 2, ROWS, chunk(b"zTXt", b"x\0\0" + MEGABYTES)), "data too large"),
    "international text": (png(H, W, 8, 2, ROWS, chunk(b"iTXt", b"x\0\1\0\0\0" + MEGABYTES)), "data too large"),
    "text at the end": (png(H, W, 8, 2, ROWS, after=chunk(b"zTXt", b"x\0\0" + MEGABYTES)), "data too large"),
    "frame beyond the screen": (gif(8, 8, 60_000, 60_000), "3600000000 pixels"),
    "four hundred megapixels": (png(20_000, 20_000, 1, 0, zlib.compress(bytes(20_000 * 2501))), "400000000 pixels"),
    "screen beyond the frame": (gif(60_000, 60_000, 8, 8), "3600000000 pixels"),
}


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@each("bomb", BOMBS)
def test_small_files_that_grow_are_refused(bomb):
    data, text = BOMBS[bomb]
    tracemalloc.start()
    with pytest.raises(BadImage, match=f"cat.*{text}"):
        decode(data, name="cat")
    assert tracemalloc.get_traced_memory()[1] < 10e6
    tracemalloc.stop()
