"""The raw rows of a measurement: one JSON line each, written as they come; what is there is not measured again."""

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from vitrel.cli.doctor import installed_version, processor_name
from vitrel.files import commit as commit_of

ROOT = Path(__file__).parents[2]
KEY = ("kind", "case", "mode", "contender")  # what makes two rows the same measurement
STAMP = ("device", "threads", "torch", "timm", "triton", "interpreter", "code")  # what decides whether a row is measured anew
ENDS = ("refused", "wrong", "failed")  # kinds of rows that say why there is no time


class Samples:
    """Rows of one file. A row of other code, or of another machine, is kept there but counts as not measured.

    stamp: what every row carries and has to agree in. carried: what every row carries besides.
    """

    def __init__(self, path: Path, stamp: dict[str, str], carried: dict[str, str] | None = None):
        self.path, self.stamp, self.carried = path, stamp, carried or {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rows = read_rows(path)
        self._known = {_key(row) for row in self.rows if all(row.get(name) == value for name, value in stamp.items())}

    def add(self, kind: str, **row: Any) -> None:
        """Write a row and see it on the disk before anything else happens."""
        row = {"kind": kind, **row, **self.carried, **self.stamp}
        with self.path.open("a+b") as file:
            file.seek(0, os.SEEK_END)
            if file.tell() and not _ends_line(file):
                file.write(b"\n")  # a killed run left a part of a row
            file.write(json.dumps(row).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.rows.append(row)
        self._known.add(_key(row))

    def has(self, kind: str, **row: Any) -> bool:
        """Whether this code has such a row on this machine."""
        return _key({"kind": kind, **row}) in self._known

    def find(self, kind: str, **row: Any) -> dict[str, Any]:
        """The last such row. KeyError where there is none."""
        key = _key({"kind": kind, **row})
        for found in reversed(self.rows):
            if _key(found) == key and all(found.get(name) == value for name, value in self.stamp.items()):
                return found
        raise KeyError(key)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All whole rows of a file, none where there is no file; a killed run may have left a part of one."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def machine(device: torch.device, commit: str = "", code: Iterable[str] = ()) -> dict[str, str]:
    """What the figures depend on: hardware, driver, versions, commit, and a fingerprint of the code that is measured.

    code: patterns of its files, from the root of the repository.
    """
    gpu = device.type == "cuda"
    return {
        "device": hardware_name(device),
        "cpu": processor_name(),
        "driver": _driver() if gpu else "",
        "cuda": str(torch.version.cuda) if gpu else "",
        "cudnn": str(torch.backends.cudnn.version()) if gpu else "",
        "torch": torch.__version__,
        "triton": installed_version("triton") or "none",
        "timm": installed_version("timm") or "none",
        "torchvision": installed_version("torchvision") or "none",
        "transformers": installed_version("transformers") or "none",
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
        "interpreter": os.environ.get("TRITON_INTERPRET", ""),
        "commit": commit or commit_of(ROOT),
        "code": _fingerprint(code),
    }


def stamp(found: dict[str, str]) -> dict[str, str]:
    """The part of `machine` that decides whether a row is measured anew."""
    return {name: found[name] for name in STAMP}


def last_run(rows: list[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The "machine" row that was written last, and all rows of that machine and code. ValueError where there is none."""
    machines = [row for row in rows if row["kind"] == "machine"]
    if not machines:
        raise ValueError("the rows do not say on which machine they were measured: measure first")
    return machines[-1], [row for row in rows if all(row.get(name) == machines[-1].get(name) for name in STAMP)]


def machine_lines(found: dict[str, Any]) -> list[str]:
    """A "machine" row as a list in Markdown, but what is unknown or does not apply; how it was measured is the last line."""
    left_out = ("kind", "how", *(("device",) if found.get("device") == found.get("cpu") else ()))
    lines = [f"- {name}: {value}" for name, value in found.items() if value and name not in left_out]
    return [*lines, "", f"How: {found['how']}"] if found.get("how") else lines


def footer(found: dict[str, Any]) -> str:
    """A "machine" row as one line, for the bottom of a plot."""
    threads = f"{found['threads']} thread{'s' if found['threads'] != '1' else ''}"
    versions = ", ".join(f"{name} {found[name]}" for name in ("torch", "timm", "python") if found.get(name))
    return ", ".join(filter(None, (found["device"], threads, versions, f"commit {found['commit']}" if found["commit"] else "")))


def hardware_name(device: torch.device) -> str:
    """Name of the accelerator or of the processor."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name()


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.split("\n")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found[0].strip()


def _fingerprint(patterns: Iterable[str]) -> str:
    digest = hashlib.sha256()
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def _key(row: dict[str, Any]) -> tuple:
    return tuple(row.get(name) for name in KEY)


def _ends_line(file: Any) -> bool:
    file.seek(-1, os.SEEK_END)
    return file.read(1) == b"\n"
