"""The profile of a device: how fast each backend computed which calls there, as `vitrel tune` measured it.

"auto" takes the backend that is fastest by the profile, where it has calls like the one at hand: `describe` gives the words
that must be equal, in which numbers of tokens, images and windows are rounded to powers of 2. A profile is a JSON file: the
identity of the device and of the software, and a case per measured call. VITREL_PROFILE is its path, or a folder of profiles,
or "off"; by default it is in the user's cache folder, with a name that depends on the identity.
"""

import functools
import hashlib
import json
import math
import os
import re
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vitrel.common.files import atomic_write, shown
from vitrel.common.machine import driver_version, hardware_name, installed_version
from vitrel.geometry import dtype_name, is_exporting, is_known, is_traced
from vitrel.ops.reference import Call
from vitrel.ops.window import hides_pairs

VARIABLE = "VITREL_PROFILE"
OFF = "off"
_CODE = ("reference.py", "sdpa.py", "window.py", "capability.py", "profile.py", "backends/*.py")  # other code: another profile

Case = dict[str, Any]  # "ms": {backend: milliseconds}, fastest first; "rule": what auto takes without; "out": {backend: why}


class Profile(NamedTuple):
    """Measured cases of one device, by `describe` of their calls."""

    path: Path
    identity: dict[str, str]  # as of `identity` when they were measured
    cases: dict[str, Case]

    def add(self, call: Call, case: Case) -> None:
        """Add a case and write the file, whose folder is made if need be."""
        self.cases[describe(call)] = case
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.path) as part:
            part.write_text(json.dumps({"identity": self.identity, "cases": self.cases}, indent=1) + "\n", "utf-8")


def fastest(call: Call) -> tuple[str, ...]:
    """Return the names of backends for a call, fastest first by the profile in use; () where it says nothing.

    It says nothing about calls with symbolic sizes, and where a program is exported, traced or run on fake tensors.
    """
    compiled = torch.compiler.is_compiling()
    if is_exporting() or not _is_profiled(call.device):
        return ()
    if compiled:
        names = _compiled_names(*_key(call)) if _has_known_sizes(call) else ""
    else:
        names = "" if is_traced(call.device) else _names(*_key(call))  # symbolic sizes come with tracing
    return tuple(names.split(" ")) if names else ()


def relative(call: Call) -> dict[str, float]:
    """Return the times of backends for a call, outside of graphs, over that of the fastest; {} where no profile has it."""
    profile = profile_of(call.device)
    times = {} if profile is None or not fastest(call) else profile.cases[describe(call)]["ms"]
    return {name: ms / min(times.values()) for name, ms in times.items()}


def describe(call: Call) -> str:
    """Return the words of a call that a profile knows it by."""
    return _described(_key(call), call.compiled)


def _described(key: tuple, compiled: bool) -> str:
    (_entry, tables, others, dtype, _device, training, mask, dropout, grid, queries, window, shift, batch, heads, width) = key
    terms = [f"{name} {axis}" for axis, *has in tables for name, part in zip(_PARTS, has, strict=True) if part]
    terms += [name for name, part in zip(_OTHERS, others, strict=True) if part]
    tokens = grid[0] * grid[1] + grid[2]
    if window is None:
        seen = f"{_rounded(tokens)} tokens{' with a prefix' if grid[2] else ''}, {_rounded(batch)} images"
    else:
        count = batch * -(-grid[0] // window[0]) * -(-grid[1] // window[1])
        hidden = hides_pairs(grid[0], grid[1], window, shift)
        seen = f"{_rounded(count)} windows of {window[0]}x{window[1]}{' with hidden pairs' if hidden else ''}"
    few = "few queries" if queries < tokens else ""
    rest = (mask, "dropout" if dropout else "", few, "compiled" if compiled else "")
    of = [f"{heads} heads of {width}", dtype_name(dtype), training, *filter(None, rest)]
    return ", ".join([" + ".join(sorted(terms)) or "no position", seen, *of])


_PARTS = ("bias", "query", "key", "value", "gated")
_OTHERS = ("rotary", "rotary of keys", "query_bias", "temperature")


def _rounded(count: int) -> int:
    return 2 ** round(math.log2(count))


@functools.lru_cache
def profile_of(device: torch.device) -> Profile | None:
    """Return the profile in use for a device, read once per process; None where there is none, or it does not fit."""
    path = path_for(device) if device.type in ("cpu", "cuda") else None
    if path is None or not path.exists():
        return None
    try:
        profile = read(path)
        if ("threads" in profile.identity) != (device.type == "cpu"):
            return None  # VITREL_PROFILE names that of the other device of this process
        check_identity(profile, device)
    except ValueError as error:
        text = f"the profile {shown(path)} is not used: {error}; `vitrel tune --fresh` measures again, {VARIABLE}=off is silent"
        warnings.warn(text, stacklevel=2)
        return None
    return profile


def path_for(device: torch.device) -> Path | None:
    """Return the path of the profile of a device, which need not exist; None for VITREL_PROFILE=off."""
    place = os.environ.get(VARIABLE, "")
    return None if place == OFF else path_in(place, device)


def path_in(place: str | Path, device: torch.device) -> Path:
    """Return the path of a device's profile, given a file, a folder of profiles, or "" for the folder in the user's cache."""
    if place and not Path(place).is_dir():
        return Path(place)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # Path.home() may raise
    known = identity(device)
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:10]
    name = f"{re.sub(r'[^a-z0-9]+', '-', known['device'].lower()).strip('-')}-{digest}.json"
    return (Path(place) if place else cache / "vitrel" / "profiles") / name


def forget() -> None:
    """Read the profile again at its next use. Compiled graphs keep the backends that were chosen for them."""
    profile_of.cache_clear()
    _names.cache_clear()


def read(path: Path) -> Profile:
    """Read a profile. ValueError, with the reason, for a file that is none."""
    try:
        content = json.loads(path.read_text("utf-8"))
        return Profile(path, dict(content["identity"]), dict(content["cases"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"it cannot be read as a profile ({error!r:.100})") from error


def check_identity(profile: Profile, device: torch.device) -> None:
    """Raise ValueError, with the differences, for a profile of another device or other software."""
    known, here = profile.identity, identity(device)
    if differ := [name for name in here if known.get(name) != here[name]]:
        was, now = (", ".join(f"{name} {values.get(name)}" for name in differ) for values in (known, here))
        raise ValueError(f"it was measured with {was}, but here there is {now}")


def identity(device: torch.device) -> dict[str, str]:
    """Return what a profile depends on: the device with its driver or threads, torch, Triton, and the code of the backends."""
    triton = installed_version("triton") or "none"
    known = {"device": hardware_name(device), "torch": torch.__version__, "triton": triton, "code": _code()}
    if device.type == "cuda":
        return known | {"driver": driver_version(), "cuda": str(torch.version.cuda or torch.version.hip)}
    return known | {"threads": str(torch.get_num_threads())}


def _has_known_sizes(call: Call) -> bool:
    return is_known(call.grid.h, call.grid.w, call.grid.prefix, call.batch, call.heads, call.width, call.queries)


def _key(call: Call) -> tuple:
    """Arguments of `_names`: all that `describe` reads, as constants; this runs in every call, and in graphs."""
    terms, grid, mask = call.terms, call.grid, call.mask
    tables = tuple([(t.axis, *[part is not None for part in (t.bias, t.query, t.key, t.value, t.gated)]) for t in terms.tables])
    others = tuple([part is not None for part in (terms.rotary, terms.key_rotary, terms.query_bias, terms.temperature)])
    parts = [x for t in terms.tables for x in (t.bias, t.query, t.key, t.value)]
    fixed = parts and not any([x is not None and x.requires_grad for x in parts])
    training = "inference" if not call.grad else "training with fixed tables" if fixed else "training"
    masked = "" if mask is None else "bool mask" if mask.dtype == torch.bool else "additive mask"
    return (
        call.entry, tables, others, call.dtype, call.device, training, masked, call.dropout_p > 0,
        (grid.h, grid.w, grid.prefix), call.queries, call.window, call.shift, call.batch, call.heads, call.width,
    )  # fmt: skip


@functools.lru_cache(maxsize=4096)
def _names(*key: Any, compiled: bool = False) -> str:
    """Names of the backends for a call, fastest first, joined by spaces."""
    profile = profile_of(key[4])
    case = None if profile is None else profile.cases.get(_described(key, compiled))
    return " ".join(case["ms"]) if case else ""


@torch._dynamo.assume_constant_result
def _is_profiled(device: torch.device) -> bool:
    """Return whether a profile is in use; a graph without one need not trace `_key`."""
    return profile_of(device) is not None


@torch._dynamo.assume_constant_result
def _compiled_names(*key: Any) -> str:
    """As `_names`, for a call in a graph."""
    return _names(*key, compiled=True)


@functools.cache
def _code() -> str:
    digest, folder = hashlib.sha256(), Path(__file__).parent
    for pattern in _CODE:
        for path in sorted(folder.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
