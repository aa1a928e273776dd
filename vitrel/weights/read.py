"""Reading weights from a file: whole, undamaged, and as tensors and plain values alone.

What guards against a damaged disk or a bad copy: a torch file is a zip archive, whose CRC-32 of every record torch itself does
not look at, and what vitrel writes holds a CRC-32 of every tensor beside them ("checksums" in its "vitrel" entry, by the
tensor's place in the file). Files of others in .safetensors or in torch's old format have neither, and nothing can be told of
them. Neither is of use against somebody who changes a file on purpose.
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

ARRAYS = (".npz", ".npy")  # of the authors' own code, read by timm's models themselves
_CHUNK = 2**20  # bytes
_SHOWN = 5
_REFUSED = (
    "{} was refused: it holds more than tensors and plain values ({}), and loading that could run code; have the model's "
    "state_dict() alone saved, as .safetensors or with torch.save"
)


def read_file(path: str | Path, allowed: tuple[type, ...] = ()) -> Any:
    """What a .safetensors file or a torch checkpoint of tensors and plain values holds; metadata of the former as "vitrel".

    Tensors are on the CPU. allowed: classes of plain values that the file may hold too, argparse.Namespace for one.
    FileNotFoundError, or ValueError with path, size and what is wrong: no checkpoint, a damaged one (of a torch file, the
    record; of one that vitrel wrote, the tensor), or one that holds code.
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
        if held := _foreign(path, error):
            # torch's text tells how to run the code: it is neither passed on nor shown as the cause
            raise ValueError(_REFUSED.format(about, held)) from None
        if isinstance(error, pickle.UnpicklingError):
            with path.open("rb") as file:
                reason = f"it is neither .safetensors nor a file of torch's, it begins with {file.read(16)!r}"
            raise ValueError(f"{about} is no readable checkpoint: {reason}; train or copy it again") from None
        reason = re.split(r"\n|\. ", str(error).strip())[0] or "it is cut off"
        reason = reason if path.stat().st_size else "it is empty, the disk may have been full"
        raise ValueError(f"{about} is no readable checkpoint: {reason}; train or copy it again") from error


def check_file(path: str | Path) -> None:
    """The errors of `read_file` for a file that timm will read itself: arrays, or torch's with the settings of its train.py."""
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
    """Around what timm reads itself, for a model built with `arguments`: the errors of `check_file` for a file they name.

    Where timm refuses a file that holds code, ValueError without its advice how to run it. what: the error's name for it.
    """
    if given := (arguments or {}).get("checkpoint_path"):
        check_file(given)
    try:
        yield
    except (RuntimeError, ValueError) as error:
        text = str(error)
        if "weights_only" not in text and "allow_pickle" not in text:
            raise
        held = re.search(r"Unsupported globals: (.*?)\. ", text)
        raise ValueError(_REFUSED.format(what, ascii(held[1])[1:-1][:200] if held else "pickled objects")) from None


def checksums(tree: Any) -> dict[str, int]:
    """CRC-32 of every tensor in nested dictionaries and lists, by its place, e.g. "state_dict.head.bias"; as "vitrel" keeps it.

    About 0.03 s for 100 MB on one core.
    """
    return {place: _crc(tensor) for place, tensor in _tensors(tree)}


class _Damaged(Exception):
    pass


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
    """`_Damaged`, naming the record, where one of a zip archive is not what its CRC-32 says."""
    with zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            if record.external_attr & 0x10 and not record.is_dir():  # torch would pass over its bytes as those of a folder
                raise _Damaged(f"its record {record.filename!a} is marked as a folder")
            if not record.CRC:  # torch can be told to leave them out
                continue
            try:
                with archive.open(record) as file:
                    while file.read(_CHUNK):
                        pass
            except Exception as error:  # also what a damaged header leads to: an unknown compression, a password
                raise _Damaged(f"its record {record.filename!a} is not what was saved ({error})") from error


def _check_tensors(loaded: object) -> None:
    """`_Damaged`, naming the tensor, where one is not as its checksum says. One that was taken out is not missed."""
    about = loaded.get("vitrel") if isinstance(loaded, dict) else None
    known = about.get("checksums") if isinstance(about, dict) else None
    if isinstance(known, dict):
        wrong = [place for place, tensor in _tensors(loaded) if place in known and _crc(tensor) != known[place]]
        if wrong:
            raise _Damaged(
                f"the tensor {wrong[0]}{_more(wrong)} is not what was saved (checksum; if it was changed on purpose, take "
                "'checksums' out of 'vitrel')"
            )


def _tensors(tree: Any, place: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(tree, Tensor):
        yield place, tree
    elif isinstance(tree, dict | list | tuple):
        for name, part in tree.items() if isinstance(tree, dict) else enumerate(tree):
            yield from _tensors(part, f"{place}.{name}" if place else str(name))


def _crc(tensor: Tensor) -> int:
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(f"{tensor.dtype}{list(tensor.shape)}".encode(), zlib.crc32(flat.numpy()))


def _foreign(path: Path, error: Exception) -> str:
    """What a file holds that torch refuses to load; "" where it was not that. Names are anybody's, and shown escaped."""
    text = str(error)
    if "weights_only" in text and not isinstance(error, pickle.UnpicklingError):
        return "it is a TorchScript archive" if "TorchScript" in text else "it is a tar archive, as torch once saved"
    if not isinstance(error, pickle.UnpicklingError):
        return ""
    try:
        names = sorted(get_unsafe_globals_in_checkpoint(path))  # by following the pickle, not by running it
    except Exception:  # of torch's old format, or a pickle that cannot be followed
        names = re.findall(r"GLOBAL (\S+)", text)
    names = [ascii(name)[1:-1][:80] for name in names]
    if not names and zipfile.is_zipfile(path):
        return "a pickle that is not of a state dict"
    return f"{', '.join(names[:_SHOWN])}{_more(names, _SHOWN)}" if names else ""


def _more(names: list[str], shown: int = 1) -> str:
    return f", and {len(names) - shown} more" if len(names) > shown else ""
