"""Files of weights: they are read only if complete and undamaged, and only tensors and plain values are loaded from them.

Damage by a disk or a bad copy is found by checksums: a torch file is a zip archive with a CRC-32 per record (which torch itself
does not check), and .safetensors of vitrel hold a CRC-32 of all tensors. Other libraries' .safetensors and torch's old format
have no checksums, so damage to their numbers is not found. Checksums do not protect against changes made on purpose.
"""

import argparse
import json
import pathlib
import pickle
import re
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save as to_bytes
from torch import Tensor
from torch.serialization import safe_globals

ARRAYS = (".npz", ".npy")  # weights of JAX models, which timm's models read themselves
_CHUNK = 2**20  # bytes
_CRC = "crc32"  # key in the metadata of .safetensors
# What trainers store beside weights, as timm's train.py does: options, paths in them, numbers of numpy. None of them runs code.
_SAFE: list[Any] = [
    argparse.Namespace,
    *((pathlib.PurePosixPath, f"{module}.PosixPath") for module in ("pathlib", "pathlib._local")),  # in Python 3.13
    *((pathlib.PureWindowsPath, f"{module}.WindowsPath") for module in ("pathlib", "pathlib._local")),
    *((np.float64(0).__reduce__()[0], f"numpy.{core}.multiarray.scalar") for core in ("core", "_core")),  # before numpy 2
    np.dtype,
    *(type(np.dtype(kind)) for kind in ("float64", "float32", "int64", "bool")),
]
_OTHERS = (  # (first bytes, what such a file is, the way out)
    (b"version https://git-lfs", "a pointer of git-lfs, which stands for the file", "fetch the file with git lfs pull"),
    (b"<", "a web page or XML", "download the file again, not the page about it"),
)
# Keys of dictionaries. The first that a file has is used: averaged weights before others, as timm does.
_AVERAGED = ("state_dict_ema", "model_ema", "ema_state_dict", "ema_model", "ema", "teacher")
_KEYS = (*_AVERAGED, "state_dict", "model", "module", "model_state_dict", "student", "online_model")
_COUNTER = "n_averaged"  # of torch's AveragedModel
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})")


def read_file(path: str | Path) -> Any:
    """Return the content of a .safetensors file or a torch checkpoint, with tensors on the CPU.

    For .safetensors it is {"state_dict": tensors, "vitrel": the metadata of `vitrel.save`, or {}}.

    Raises:
        FileNotFoundError: there is no file.
        ValueError: the file is no checkpoint, one of several shards, damaged, unpacks to more than it holds, or would run code;
            the message gives path, size and reason.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no checkpoint at {path}" + (": it is a folder" if path.is_dir() else ""))
    about = f"{path} ({path.stat().st_size:,} bytes)"
    if (shard := _SHARD.fullmatch(path.stem)) and int(shard[3]) > 1:
        raise ValueError(
            f"{about} is shard {int(shard[2])} of {int(shard[3])}: join the tensors of all {shard[1]}-... in one state dict, "
            "and save that"
        )
    with path.open("rb") as file:
        begin = file.read(24)
    for first, what, remedy in _OTHERS:
        if b"\0" not in begin and begin.lstrip().startswith(first):  # the length of a .safetensors header has zeros
            raise ValueError(f"{about} is {what}, not weights: {remedy}")
    try:
        return _read_safetensors(path) if path.suffix == ".safetensors" else _read_torch(path)
    except MemoryError:
        raise
    except _Damaged as error:
        raise ValueError(f"{about} is damaged: {error}; train or copy it again") from error
    except Exception as error:  # a damaged file raises almost anything
        if isinstance(error, pickle.UnpicklingError) and (objects := re.findall(r"GLOBAL (\S+)", str(error))):
            raise ValueError(  # torch's message explains how to run the code anyway, so it is not shown
                f"{about} was refused: it holds more than tensors and plain values ({ascii(objects[0])[1:-1]}), and loading "
                "that could run code; save the model's state_dict() alone, as .safetensors or with torch.save"
            ) from None
        if "TorchScript" in str(error):  # torch's message says how to run it anyway
            raise ValueError(
                f"{about} was refused: it is a TorchScript archive, which holds code; save the model's state_dict() "
                "alone, as .safetensors or with torch.save"
            ) from None
        reason = re.split(r"\n|\. ", str(error).strip())[0] or "it is cut off"
        if not begin:
            reason = "it is empty, the disk may have been full"
        elif path.suffix != ".safetensors" and not begin.startswith(b"PK"):  # not torch's zip archive, nor its old format
            reason = f"it is neither .safetensors nor a torch file, it begins with {begin[:16]!r}"
        raise ValueError(f"{about} is no readable checkpoint: {reason}; train or copy it again") from None


def check_folder(folder: str | Path) -> None:
    """Raise ValueError, as `read_file` does, if a folder that timm will read has a *.bin file that is damaged or holds code.

    timm finds no damage, and its message for code tells how to run it.
    """
    for file in Path(folder).glob("*.bin"):
        read_file(file)


def unwrap(loaded: object, origin: str) -> dict[str, Tensor]:
    """Return the state dict found in nested dictionaries, without a prefix that all of its names share ("module.", "model.").

    Averaged weights ("state_dict_ema", "model_ema", "ema", "teacher", ...) precede "state_dict", "model", ...; other keys are
    not read.

    Args:
        loaded: content of a file.
        origin: the name of the file in errors.

    Raises:
        ValueError: there is no state dict, or averaged weights are not in a dictionary by name.
    """
    state = _find(loaded, origin)
    if state is None:
        raise ValueError(f"{origin} holds no state dict (a dictionary of tensors, perhaps under 'model' or 'state_dict')")
    state = {name: value for name, value in state.items() if name != _COUNTER}
    while len(firsts := {name.partition(".")[0] for name in state}) == 1 and all("." in name for name in state):
        prefix = f"{firsts.pop()}."
        state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state


def _find(loaded: object, origin: str) -> dict[str, Tensor] | None:
    """Return the state dict that `unwrap` prefers in nested dictionaries, None if there is none; `origin` is for errors."""
    if not isinstance(loaded, dict) or not loaded:
        return None
    if all(isinstance(name, str) and isinstance(value, Tensor) for name, value in loaded.items()):
        return loaded
    for key in _KEYS:
        if (inner := _find(loaded.get(key), origin)) is not None:
            return inner
        if key in _AVERAGED and _holds_weights(loaded.get(key)):
            raise ValueError(
                f"{origin} holds averaged weights under {key!r}, but no dictionary of tensors by name: pass a dictionary of "
                "the averaged or the plain weights instead of the file"
            )
    return None


def _holds_weights(value: object) -> bool:
    """Return whether nested dictionaries and lists contain a tensor that is not a scalar."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return any(part.dim() > 0 if isinstance(part, Tensor) else _holds_weights(part) for part in parts)


def write_safetensors(path: Path, state: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Write tensors, which must be contiguous, as .safetensors, with a CRC-32 of them in its metadata.

    `about`, plain values, is stored there as JSON under "vitrel".
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
    """A file does not match a checksum, or a record of it cannot be read."""


def _read_torch(path: Path) -> object:
    if zipfile.is_zipfile(path):  # before anything is unpickled
        _check_records(path)
    with safe_globals(_SAFE):
        return torch.load(path, map_location="cpu", weights_only=True)


def _read_safetensors(path: Path) -> dict[str, Any]:
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if _CRC in metadata and metadata[_CRC] != str(_crc_of_tensors(path)):
        raise _Damaged("its tensors are not what was saved (checksum)")
    return {"state_dict": state, "vitrel": json.loads(metadata.get("vitrel", "{}"))}


def _crc_of_tensors(path: Path) -> int:
    """Return the CRC-32 of what follows the header of a .safetensors file."""
    crc = 0
    with path.open("rb") as file:
        file.seek(int.from_bytes(file.read(8), "little"), 1)
        while part := file.read(_CHUNK):
            crc = zlib.crc32(part, crc)
    return crc


def _check_records(path: Path) -> None:
    """Raise `_Damaged` for a zip archive with a record that does not match its CRC-32; records without one are not checked.

    So it does for a record marked as a folder, and first for an archive that unpacks to more than its own size.
    """
    with zipfile.ZipFile(path) as archive:
        records, size = archive.infolist(), path.stat().st_size
        if (unpacked := sum(record.file_size for record in records)) > size:
            raise _Damaged(f"it would unpack to {unpacked:,} bytes, and torch does not compress")
        for record in records:
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
