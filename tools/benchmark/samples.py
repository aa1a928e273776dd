"""The raw rows of a measurement: a file of JSON lines, written row by row; rows in it are not measured again."""

import hashlib
import json
import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from vitrel.common.files import commit as commit_of
from vitrel.common.machine import installed_version, processor_name

ROOT = Path(__file__).parents[2]
KEY = ("kind", "case", "mode", "contender")  # columns that identify a measurement
# columns that must agree, else a row is measured again
STAMP = ("device", "threads", "torch", "timm", "triton", "interpreter", "code")
CARRIED = ("cpu", "python", "commit")  # further columns of every row
ENDS = ("refused", "wrong", "failed")  # kinds of rows that hold a reason instead of times


class Samples:
    """The rows of one file. Rows of other code or another machine stay in it, but count as not measured.

    about: the result of `machine`; every row gets its columns CARRIED and STAMP. stamp: columns that must agree.
    """

    def __init__(self, path: Path, about: dict[str, str], stamp: Iterable[str] = STAMP):
        self.path, self.carried = path, {name: about[name] for name in (*CARRIED, *STAMP)}
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rows = read_rows(path)
        self._wanted = {name: about[name] for name in stamp}
        self._known = {_key(row): row for row in self.current()}

    def add(self, kind: str, **row: Any) -> None:
        """Append a row and flush it to the disk."""
        row = {"kind": kind, **row, **self.carried}
        with self.path.open("a+b") as file:
            file.seek(0, os.SEEK_END)
            if file.tell() and not _ends_line(file):
                file.write(b"\n")  # a killed run may leave an incomplete row
            file.write(json.dumps(row).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.rows.append(row)
        self._known[_key(row)] = row

    def current(self) -> list[dict[str, Any]]:
        """Return the rows that were measured with this code on this machine."""
        return [row for row in self.rows if all(row.get(name) == value for name, value in self._wanted.items())]

    def has(self, kind: str, **row: Any) -> bool:
        """Return whether the file has this row, measured with this code on this machine."""
        return _key({"kind": kind, **row}) in self._known


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Return the complete rows of a file, [] if there is no file; a killed run may have left an incomplete one."""
    rows = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def machine(device: torch.device, commit: str = "", code: Iterable[str] = ()) -> dict[str, str]:
    """Return what the numbers depend on: hardware, versions, commit, and a hash of the measured code.

    code: glob patterns of its files, relative to the root of the repository.
    """
    return {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor_name(),
        "cpu": processor_name(),
        "torch": torch.__version__,
        "triton": installed_version("triton") or "none",
        "timm": installed_version("timm") or "none",
        "python": platform.python_version(),
        "threads": str(torch.get_num_threads()),
        "interpreter": os.environ.get("TRITON_INTERPRET", ""),
        "commit": commit or commit_of(ROOT),
        "code": _fingerprint(code),
    }


def last_run(rows: list[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the last "machine" row, and all rows of that machine and code. ValueError if there is none."""
    machines = [row for row in rows if row["kind"] == "machine"]
    if not machines:
        raise ValueError("the rows do not say on which machine they were measured: measure first")
    return machines[-1], [row for row in rows if all(row.get(name) == machines[-1].get(name) for name in STAMP)]


def footer(about: dict[str, Any]) -> str:
    """Return a "machine" row as one line."""
    threads = f"{about['threads']} thread{'s' if about['threads'] != '1' else ''}"
    versions = ", ".join(f"{name} {about[name]}" for name in ("torch", "timm", "python") if about.get(name))
    return ", ".join(filter(None, (about["device"], threads, versions, f"commit {about['commit']}" if about["commit"] else "")))


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
