"""Read weights from a file: check that it is complete and undamaged, and load nothing but tensors and plain values.

Damage by a disk or a bad copy is found by checksums: a torch file is a zip archive with a CRC-32 per record (which torch itself
does not check), and files of vitrel also hold a CRC-32 per tensor ("checksums" in the "vitrel" entry, by the tensor's path in
the file). Other libraries' .safetensors and torch's old format have no checksums, so damage to their numbers is not found.
Checksums do not protect against changes made on purpose.
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
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

ARRAYS = (".npz", ".npy")  # weights of JAX models, which timm's models read themselves
_CHUNK = 2**20  # bytes
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
        ValueError: the file is no checkpoint, damaged, or would run code; the message gives path, size and reason, with the
            damaged record or tensor.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}" + (": it is a folder" if path.is_dir() else ""))
    about = f"{path} ({path.stat().st_size:,} bytes)"
    try:
        loaded = _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path, allowed)
        _check_tensors(loaded)
        return loaded
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


def checksums(tree: Any) -> dict[str, int]:
    """Return {path: CRC-32 of values, dtype and shape} of every tensor in nested dictionaries and lists.

    A path is, e.g., "state_dict.head.bias". About 0.03 s for 100 MB on one core.
    """
    return {path: _crc(tensor) for path, tensor in _tensors(tree)}


class _Damaged(Exception):
    """A checksum does not match, or a record cannot be read."""


def _read_torch(path: Path, allowed: tuple[type, ...]) -> object:
    if zipfile.is_zipfile(path):  # before anything is unpickled
        _check_records(path)
    with safe_globals(list(allowed)):
        return torch.load(path, map_location="cpu", weights_only=True)


def _read_safetensors(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        about = json.loads((file.metadata() or {}).get("vitrel", "{}"))
        return {"state_dict": {name: file.get_tensor(name) for name in file.keys()}, "vitrel": about}  # noqa: SIM118


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


def _check_tensors(loaded: object) -> None:
    """Raise `_Damaged` with the first tensor that does not match its checksum.

    Nothing is raised for tensors without a checksum, files without any, and checksums whose tensor is missing.
    """
    about = loaded.get("vitrel") if isinstance(loaded, dict) else None
    sums = about.get("checksums") if isinstance(about, dict) else None
    if isinstance(sums, dict):
        wrong = [path for path, tensor in _tensors(loaded) if path in sums and _crc(tensor) != sums[path]]
        if wrong:
            raise _Damaged(
                f"the tensor {wrong[0]}{_more(wrong)} is not what was saved (checksum; if it was changed on purpose, "
                "remove 'checksums' from 'vitrel')"
            )


def _tensors(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield (path, tensor) of every tensor in nested dictionaries and lists."""
    if isinstance(tree, Tensor):
        yield path, tree
    elif isinstance(tree, dict | list | tuple):
        for name, part in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _tensors(part, f"{path}.{name}" if path else str(name))


def _crc(tensor: Tensor) -> int:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(f"{tensor.dtype}{list(tensor.shape)}".encode(), zlib.crc32(flat.numpy()))


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
    return f"{', '.join(names[:_SHOWN])}{_more(names, _SHOWN)}" if names else ""


def _more(names: list[str], shown: int = 1) -> str:
    return f", and {len(names) - shown} more" if len(names) > shown else ""
