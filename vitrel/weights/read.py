"""Read weights from a file: check that it is complete and undamaged, and load nothing but tensors and plain values.

Damage by a disk or a bad copy is found by checksums: a torch file is a zip archive with a CRC-32 per record (which torch itself
does not check), and .safetensors of vitrel hold a CRC-32 of all tensors. Other libraries' .safetensors and torch's old format
have no checksums, so damage to their numbers is not found. Checksums do not protect against changes made on purpose.
"""

import argparse
import json
import pickle
import re
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

ARRAYS = (".npz", ".npy")  # weights of JAX models, which timm's models read themselves
_CHUNK = 2**20  # bytes
_CRC = "crc32"  # key in the metadata of .safetensors
_TORCH = (b"PK", b"\x80")  # first bytes of a torch file: of a zip archive, and before version 1.6 of a pickle
_SHOWN = 5
_REFUSED = (
    "{} was refused: it holds more than tensors and plain values ({}), and loading that could run code; save the "
    "model's state_dict() alone, as .safetensors or with torch.save"
)


def read_file(path: str | Path, allowed: tuple[type, ...] = ()) -> Any:
    """Return the content of a .safetensors file or a torch checkpoint, with tensors on the CPU.

    Of .safetensors this is {"state_dict": tensors, "vitrel": metadata of `vitrel.save`, {} without}.

    Args:
        path: of the file.
        allowed: classes that a torch file may contain beside tensors and plain values, e.g. argparse.Namespace.

    Raises:
        FileNotFoundError: there is no file.
        ValueError: the file is no checkpoint, damaged, or would run code; the message gives path, size and reason.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}" + (": it is a folder" if path.is_dir() else ""))
    about = f"{path} ({path.stat().st_size:,} bytes)"
    try:
        return _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path, allowed)
    except MemoryError:
        raise
    except _Damaged as error:
        raise ValueError(f"{about} is damaged: {error}; train or copy it again") from error
    except Exception as error:  # a damaged file raises almost anything
        if objects := _unsafe_objects(path, error):
            # torch's message explains how to run the code anyway, so it is not shown
            raise ValueError(_REFUSED.format(about, objects)) from None
        with path.open("rb") as file:
            begin = file.read(16)
        other = path.suffix != ".safetensors" and begin and not begin.startswith(_TORCH)
        if other or isinstance(error, pickle.UnpicklingError):
            reason = f"it is neither .safetensors nor a torch file, it begins with {begin!r}"
            raise ValueError(f"{about} is no readable checkpoint: {reason}; train or copy it again") from None
        reason = re.split(r"\n|\. ", str(error).strip())[0] or "it is cut off"
        reason = reason if path.stat().st_size else "it is empty, the disk may have been full"
        raise ValueError(f"{about} is no readable checkpoint: {reason}; train or copy it again") from error


def check_file(path: str | Path) -> None:
    """Raise the errors of `read_file` for a file that timm will read itself: arrays, or a checkpoint of timm's train.py.

    Of arrays only the checksums of .npz are checked, and that .npy exists: timm finds pickled objects in them.
    """
    path = Path(path)
    if path.suffix not in ARRAYS:
        read_file(path, allowed=(argparse.Namespace,))
        return
    if not path.is_file():
        raise FileNotFoundError(f"no weights at {path}")
    try:
        if zipfile.is_zipfile(path):
            _check_records(path)
    except _Damaged as error:
        raise ValueError(f"{path} ({path.stat().st_size:,} bytes) is damaged: {error}; copy it again") from error


@contextmanager
def guarding(what: str, arguments: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Return a context for building a timm model that reads a file.

    First `check_file` is called for `checkpoint_path`, if any. Inside, timm's error for a file that would run code becomes a
    ValueError without timm's advice to run it anyway; other errors are passed on.

    Args:
        what: the file or model in that error.
        arguments: of the model, which may have `checkpoint_path`.
    """
    if checkpoint := (arguments or {}).get("checkpoint_path"):
        check_file(checkpoint)
    try:
        yield
    except (RuntimeError, ValueError) as error:
        text = str(error)
        if "weights_only" not in text and "allow_pickle" not in text:
            raise
        names = re.search(r"Unsupported globals: (.*?)\. ", text)
        raise ValueError(_REFUSED.format(what, ascii(names[1])[1:-1][:200] if names else "pickled objects")) from None


def write_safetensors(path: Path, state: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Write tensors as .safetensors, with `about` as JSON under "vitrel" in its metadata and a CRC-32 of the tensors beside it.

    Args:
        path: of the file.
        state: contiguous tensors by name.
        about: plain values.
    """
    content = memoryview(to_bytes(state, metadata={"format": "pt", "vitrel": json.dumps(about)}))
    begin = 8 + int.from_bytes(content[:8], "little")  # of the tensors, after the length of a JSON header and the header
    header = json.loads(bytes(content[8:begin]))
    header["__metadata__"][_CRC] = str(zlib.crc32(content[begin:]))
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # the tensors are aligned
    with path.open("wb") as file:
        for part in (len(text).to_bytes(8, "little"), text, content[begin:]):
            file.write(part)


class _Damaged(Exception):
    """A checksum does not match, or a record cannot be read."""


def _read_torch(path: Path, allowed: tuple[type, ...]) -> object:
    if zipfile.is_zipfile(path):  # before anything is unpickled
        _check_records(path)
    with safe_globals(list(allowed)):
        return torch.load(path, map_location="cpu", weights_only=True)


def _read_safetensors(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if _CRC in metadata and metadata[_CRC] != str(_crc_of_tensors(path)):
        raise _Damaged("its tensors are not what was saved (checksum)")
    return {"state_dict": state, "vitrel": json.loads(metadata.get("vitrel", "{}"))}


def _crc_of_tensors(path: Path) -> int:
    """Return the CRC-32 of a .safetensors file after its header."""
    crc = 0
    with path.open("rb") as file:
        file.seek(int.from_bytes(file.read(8), "little"), 1)
        while part := file.read(_CHUNK):
            crc = zlib.crc32(part, crc)
    return crc


def _check_records(path: Path) -> None:
    """Raise `_Damaged` with the name of the first record of a zip archive that does not match its CRC-32."""
    with zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            if record.external_attr & 0x10 and not record.is_dir():  # torch would skip its bytes
                raise _Damaged(f"its record {record.filename!a} is marked as a folder")
            if not record.CRC:  # torch has an option to write none
                continue
            try:
                with archive.open(record) as file:
                    while file.read(_CHUNK):
                        pass
            except Exception as error:  # a damaged header may also look like an unknown compression or a password
                raise _Damaged(f"its record {record.filename!a} is not what was saved ({error})") from error


def _unsafe_objects(path: Path, error: Exception) -> str:
    """Describe the objects for which torch refused the file, "" for another error. Names may be hostile, so are escaped."""
    text = str(error)
    if "weights_only" in text and not isinstance(error, pickle.UnpicklingError):
        return "it is a TorchScript archive" if "TorchScript" in text else "it is a tar archive, as torch once saved"
    if not isinstance(error, pickle.UnpicklingError):
        return ""
    try:
        names = sorted(get_unsafe_globals_in_checkpoint(path))  # reads the pickle without running it
    except Exception:  # torch's old format, or a damaged pickle
        names = re.findall(r"GLOBAL (\S+)", text)
    names = [ascii(name)[1:-1][:80] for name in names]
    if not names and zipfile.is_zipfile(path):
        return "a pickle that is not of a state dict"
    return ", ".join(names[:_SHOWN]) + (f", and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")
