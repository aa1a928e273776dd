"""The profile of a device: how fast each backend computed which calls there, as `vitrel tune` measured it.

"auto" takes the backend that is fastest by the profile, where it says anything about a call. A profile is a JSON file: the
identity of the device and of the software that was measured, and a case per measured call. VITREL_PROFILE is its path, or a
folder of profiles, or "off"; by default it is in the user's cache folder, with a name that depends on the identity.

Calls are of the same kind if they differ in sizes only. A profile says of a call what was measured of the nearest of its kind.
Far from all of them, and about kinds that were not measured, it says nothing.
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
from vitrel.geometry import is_exporting, is_known, is_traced
from vitrel.ops.reference import Call
from vitrel.ops.window import hides_pairs

VARIABLE = "VITREL_PROFILE"
FORMAT = 2
OFF = "off"
FARTHEST = 1.5  # distance to the nearest measured call beyond which a profile says nothing, see `_place`
_CODE = (
    "reference.py",
    "sdpa.py",
    "window.py",
    "capability.py",
    "backends/*.py",
)  # in this folder; another version of it needs another profile

Case = dict[str, Any]  # "call": traits as a dict; "ms": {backend: milliseconds}; "wrong", "failed", "refused": {backend: why}


class Traits(NamedTuple):
    """All that a profile knows of a call. sizes: what may differ within a kind; the rest is the kind.

    terms: for example "bias hw", or "query h + query w + rotary". gradients: "none", "inputs", or "bias" where a bias needs
    one too. mask: "none", "bool" or "additive".
    """

    entry: str
    terms: str
    dtype: str
    gradients: str
    mask: str
    dropout: bool
    compiled: bool
    grid: tuple[int, int, int]  # h, w, prefix
    queries: int
    window: tuple[int, int] | None
    shift: tuple[int, int]
    batch: int
    heads: int
    width: int

    @property
    def kind(self) -> tuple:
        """What must be equal for the times of one call to say something about another."""
        hidden = self.window is not None and hides_pairs(*self.grid[:2], self.window, self.shift)
        return (*self[:7], hidden, self.queries < self.tokens)

    @property
    def tokens(self) -> int:
        """Number of tokens of an image, prefix tokens included."""
        return self.grid[0] * self.grid[1] + self.grid[2]


class Profile:
    """Measured cases of one device. identity: as of `identity` when they were measured. path: of its file."""

    def __init__(self, path: Path, identity: dict[str, str], cases: list[Case] | None = None):
        self.path, self.identity, self.cases = path, identity, cases or []

    def add(self, case: Case) -> None:
        """Add a case and write the file, whose folder is made if need be."""
        self.cases.append(case)
        self.write()

    def write(self) -> None:
        """Write the file."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        content = {"format": FORMAT, "identity": self.identity, "cases": self.cases}
        with atomic_write(self.path) as part:
            part.write_text(json.dumps(content, indent=1) + "\n", "utf-8")

    def has(self, traits: Traits) -> bool:
        """True if exactly this call was measured."""
        return any(traits_of(case) == traits for case in self.cases)

    def relative(self, traits: Traits) -> dict[str, float]:
        """Times of the backends for a call over that of the fastest, fastest first; {} where the profile says nothing.

        They are those of the nearest measured call of the same kind, without backends that were wrong for this entry and dtype.
        """
        near, wrong = [], set()
        for case in self.cases:
            known = traits_of(case)
            if (known.entry, known.dtype) == (traits.entry, traits.dtype):
                wrong |= case["wrong"].keys()
            if case["ms"] and known.kind == traits.kind:
                near.append((math.dist(_place(traits), _place(known)), case["ms"]))
        distance, times = min(near, key=lambda pair: pair[0], default=(math.inf, {}))
        times = {name: ms for name, ms in times.items() if name not in wrong}
        if distance > FARTHEST or not times:
            return {}
        return {name: times[name] / min(times.values()) for name in sorted(times, key=lambda name: (times[name], name))}


def fastest(call: Call) -> tuple[str, ...]:
    """Return the names of backends for a call, fastest first by the profile in use; () where it says nothing.

    It says nothing about calls with symbolic sizes, and where a program is exported, traced or run on fake tensors.
    """
    compiled = torch.compiler.is_compiling()
    if not compiled and profile_of(call.device) is None:
        return ()
    if not _is_plain(call, compiled):
        return ()
    names = _compiled_names(*_key(call)) if compiled else _names(*_key(call))
    return tuple(names.split(" ")) if names else ()


def relative(call: Call) -> dict[str, float]:
    """`Profile.relative` of a call outside of graphs, by the profile in use; {} without one."""
    profile = profile_of(call.device)
    return {} if profile is None or not _is_plain(call, False) else profile.relative(traits(call))


def traits(call: Call) -> Traits:
    """Return the traits of a call with known sizes."""
    return _traits(*_key(call), call.compiled)


def traits_of(case: Case) -> Traits:
    """Return the traits of a measured case, from its JSON."""
    call = dict(case["call"])
    for name in ("grid", "window", "shift"):
        call[name] = None if call[name] is None else tuple(call[name])
    return Traits(**call)


def describe(traits: Traits) -> str:
    """Return the traits as a line of a table."""
    h, w, prefix = traits.grid
    windows = f", windows of {traits.window[0]}x{traits.window[1]}" if traits.window else ""
    shifted = f" shifted by {traits.shift[0]}x{traits.shift[1]}" if any(traits.shift) else ""
    others = [
        f"{traits.queries} queries" if traits.queries < traits.tokens else "",
        f"{traits.mask} mask" if traits.mask != "none" else "",
        "dropout" if traits.dropout else "",
        "compiled" if traits.compiled else "",
    ]
    what = "inference" if traits.gradients == "none" else "training"
    if traits.gradients == "inputs" and "bias " in traits.terms:
        what = "training with a fixed bias"
    return ", ".join(
        [f"{traits.terms}, {h}x{w}{f' + {prefix}' if prefix else ''}{windows}{shifted}", f"batch {traits.batch}",
         f"{traits.heads} heads of {traits.width}", traits.dtype, what, *filter(None, others)]
    )  # fmt: skip


@functools.lru_cache
def profile_of(device: torch.device) -> Profile | None:
    """Return the profile in use for a device, read once per process; None where there is none, or it does not fit."""
    if device.type not in ("cpu", "cuda"):
        return None
    path = path_for(device)
    return None if path is None or not path.exists() else _read_or_warn(path, device)


def path_for(device: torch.device) -> Path | None:
    """Return the path of the profile of a device, which need not exist; None for VITREL_PROFILE=off."""
    place = os.environ.get(VARIABLE, "")
    return None if place == OFF else path_in(place, device)


def path_in(place: str | Path, device: torch.device) -> Path:
    """Return the path of a device's profile, given a file, a folder of profiles, or "" for the folder in the user's cache."""
    if place and not Path(place).is_dir():
        return Path(place)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))  # Path.home() may raise
    return (Path(place) if place else cache / "vitrel" / "profiles") / file_name(identity(device))


def forget() -> None:
    """Read the profile again at its next use. Compiled graphs keep the backends that were chosen for them."""
    profile_of.cache_clear()
    _names.cache_clear()


def read(path: Path, device: torch.device) -> Profile:
    """Read a profile. ValueError, with the reason, for a file that is none, or one of another device or other software."""
    try:
        content = json.loads(path.read_text("utf-8"))
        number, known, cases = content["format"], content["identity"], content["cases"]
        if number != FORMAT:
            raise ValueError(f"its format is {number}, not {FORMAT}")
        profile = Profile(path, known, cases)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it cannot be read as a profile ({type(error).__name__}: {error})") from error
    here = identity(device)
    if differ := [name for name in here if known.get(name) != here[name]]:
        was = ", ".join(f"{name} {known.get(name)}" for name in differ)
        raise ValueError(
            f"it was measured with {was}, but here there is {', '.join(f'{name} {here[name]}' for name in differ)}"
        )
    return profile


def identity(device: torch.device) -> dict[str, str]:
    """Return what a profile depends on: the device with its driver or threads, torch, Triton, and the code of the backends."""
    known = {
        "device": hardware_name(device),
        "torch": torch.__version__,
        "triton": installed_version("triton") or "none",
        "code": _code(),
    }
    if device.type == "cuda":
        return known | {"driver": driver_version(), "cuda": str(torch.version.cuda or torch.version.hip)}
    return known | {"threads": str(torch.get_num_threads())}


def file_name(identity: dict[str, str]) -> str:
    """Return the name of the file of a profile: the device, and a digest of the whole identity."""
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:10]
    return f"{re.sub(r'[^a-z0-9]+', '-', identity['device'].lower()).strip('-')}-{digest}.json"


def _read_or_warn(path: Path, device: torch.device) -> Profile | None:
    try:
        known = json.loads(path.read_text("utf-8"))["identity"]
        if ("threads" in known) != (device.type == "cpu"):
            return None  # VITREL_PROFILE names that of the other device of this process
    except (OSError, ValueError, KeyError, TypeError):
        pass  # `read` says what is wrong
    try:
        return read(path, device)
    except ValueError as error:
        warnings.warn(
            f"the profile {shown(path)} is not used: {error}; `vitrel tune --fresh` measures again, {VARIABLE}=off is silent",
            stacklevel=2,
        )
        return None


def _is_plain(call: Call, compiled: bool) -> bool:
    """True if the sizes of a call are known, and it is neither exported nor traced nor made of fake tensors."""
    if is_exporting():
        return False
    return _has_known_sizes(call) if compiled else not is_traced(call.device)  # symbolic sizes come with tracing


def _has_known_sizes(call: Call) -> bool:
    return is_known(call.grid.h, call.grid.w, call.grid.prefix, call.batch, call.heads, call.width, call.queries)


def _key(call: Call) -> tuple:
    """Arguments of `_names`: all that `Traits` are made of, as constants; this runs in every call, and in graphs."""
    terms, grid, mask = call.terms, call.grid, call.mask
    tables = tuple(
        [
            (t.axis, t.bias is not None, t.query is not None, t.key is not None, t.value is not None, t.gated is not None)
            for t in terms.tables
        ]
    )
    others = (
        terms.rotary is not None,
        terms.key_rotary is not None,
        terms.query_bias is not None,
        terms.temperature is not None,
    )
    gradients = 0
    if call.grad:
        gradients = 2 if any([t.bias is not None and t.bias.requires_grad for t in terms.tables]) else 1
    masked = 0 if mask is None else 1 if mask.dtype == torch.bool else 2
    return (
        call.entry, tables, others, call.dtype, call.device, gradients, masked, call.dropout_p > 0,
        (grid.h, grid.w, grid.prefix), call.queries, call.window, call.shift, call.batch, call.heads, call.width,
    )  # fmt: skip


def _traits(
    entry: str, tables: tuple, others: tuple, dtype: torch.dtype, device: torch.device, gradients: int, masked: int, *rest: Any
) -> Traits:
    dropout, compiled = rest[0], rest[-1]
    parts = [
        f"{name} {axis}" for axis, *has in tables for name, part in zip(_PARTS, has, strict=True) if part
    ] + [name for name, part in zip(_OTHERS, others, strict=True) if part]  # fmt: skip
    text = " + ".join(sorted(parts)) or "no position"
    grad, mask = ("none", "inputs", "bias")[gradients], ("none", "bool", "additive")[masked]
    return Traits(entry, text, str(dtype).removeprefix("torch."), grad, mask, dropout, compiled, *rest[1:-1])


_PARTS = ("bias", "query", "key", "value", "gated")
_OTHERS = ("rotary", "rotary of keys", "query_bias", "temperature")


@functools.lru_cache(maxsize=4096)
def _names(*key: Any) -> str:
    """Names of the backends for a call, fastest first, joined by spaces."""
    profile = profile_of(key[4])
    return "" if profile is None else " ".join(profile.relative(_traits(*key, False)))


@torch._dynamo.assume_constant_result
def _compiled_names(*key: Any) -> str:
    """As `_names`, for a call in a graph."""
    profile = profile_of(key[4])
    return "" if profile is None else " ".join(profile.relative(_traits(*key, True)))


def _place(traits: Traits) -> tuple[float, ...]:
    """Coordinates of a call's sizes. At distance 1 are twice the tokens that see each other, or four times the batch, the
    windows of an image or the head width, or sixteen times the heads; prefix tokens are 0.5.
    """
    h, w, prefix = traits.grid
    seen = traits.tokens
    windows = 1
    if traits.window is not None:
        seen = traits.window[0] * traits.window[1]
        windows = -(-h // traits.window[0]) * -(-w // traits.window[1])
    logs = (math.log2(n) for n in (seen, windows, traits.batch, traits.width, traits.heads))
    factors = (1.0, 0.5, 0.5, 0.5, 0.25)
    return (*(log * factor for log, factor in zip(logs, factors, strict=True)), 0.5 if prefix else 0.0)


@functools.cache
def _code() -> str:
    digest, folder = hashlib.sha256(), Path(__file__).parent
    for pattern in _CODE:
        for path in sorted(folder.glob(pattern)):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
