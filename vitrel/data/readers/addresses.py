"""Files at addresses such as s3://bucket/images, read by fsspec; a path without "://" is local."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import fsspec


def is_address(path: object) -> bool:
    """Return whether a path is an address, as opposed to a path on this machine."""
    return "://" in str(path)


@contextmanager
def _reached(address: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:  # fsspec's text names the package, as "Install s3fs to access S3"
        raise ValueError(f"{address} cannot be read: {error}") from error
    except FileNotFoundError as error:
        raise ValueError(f"nothing was found at {address}: check the address") from error
    except Exception as error:  # of every store its own
        raise ValueError(f"{address} cannot be read ({error}): check the address and the credentials") from error


def list_files(root: str) -> list[str]:
    """Return the addresses of all files at or below an address, sorted; ValueError where there are none."""
    with _reached(root):
        files, path = fsspec.core.url_to_fs(root)
        found = [files.unstrip_protocol(name) for name in sorted(files.find(path))]
        if not found:
            raise FileNotFoundError(root)
        return found


def file_state(path: str) -> str:
    """Return "SIZE VERSION" of the file at an address: bytes, and its ETag or time of modification where the store has them."""
    files, name = fsspec.core.url_to_fs(path)
    about = files.info(name)
    return f"{about.get('size')} {about.get('ETag') or about.get('LastModified') or about.get('mtime') or ''}".strip()


def read_bytes(path: str, start: int | None = None, stop: int | None = None) -> bytes:
    """Return the bytes of a file, from `start` up to `stop`, at an address or on this machine."""
    if is_address(path):
        files, name = fsspec.core.url_to_fs(path)
        return files.cat_file(name, start=start, end=stop)
    with open(path, "rb") as file:
        file.seek(start or 0)
        return file.read(-1 if stop is None else stop - (start or 0))


def open_file(path: str) -> IO[bytes]:
    """Open a file for reading; at an address it is read in blocks of 1 MB as they are needed."""
    if not is_address(path):
        return open(path, "rb")
    with _reached(path):
        files, name = fsspec.core.url_to_fs(path)
        return files.open(name, "rb", block_size=1 << 20)


def read_text(path: str | Path) -> str:
    """Return the text of a file; ValueError where it cannot be read."""
    if not is_address(path):
        return Path(path).read_text("utf-8-sig")
    with _reached(str(path)):
        return read_bytes(str(path)).decode("utf-8-sig")


def storage_options(path: str) -> dict[str, Any]:
    """Return fsspec's configuration for the protocol of an address, as `datasets` takes it."""
    return dict(fsspec.config.conf.get(path.partition("://")[0], {}))
