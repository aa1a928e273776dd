"""Which backend serves a call and why the others do not: `why` and `use_backend`."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from vitrel.ops.capability import TABLE, preferred, refusal
from vitrel.ops.dispatch import BACKENDS, Call, chosen, recording
from vitrel.ops.profile import relative


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Context manager that makes `name` the backend of every layer and call with backend "auto".

    A call that this backend refuses raises ValueError, as does an unknown name. The environment variable VITREL_BACKEND does
    the same for a whole process.
    """
    if name not in ("auto", *BACKENDS):
        raise ValueError(f"unknown backend {name!r}; choose auto, {', '.join(BACKENDS)}")
    before = chosen["auto"]
    chosen["auto"] = name
    try:
        yield
    finally:
        chosen["auto"] = before


def why(function: Callable, *args: Any, **kwargs: Any) -> str:
    """Run function(*args, **kwargs) and return a text that says which backend served each of its attention calls.

    Calls of the same kind are listed once, with their number and, for every other backend, the reason why it did not serve
    them, or its time by the profile.

    Args:
        function: a model, a layer, or a function of `vitrel.ops`. A model from torch.compile is run uncompiled.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """
    calls: Counter[str] = Counter()
    function = getattr(function, "_orig_mod", function)
    with recording(lambda *chosen: calls.update([_text(*chosen)])):
        function(*args, **kwargs)
    return "\n".join(f"{count} x {text}" for text, count in calls.items()) or "no attention of vitrel was called"


def _text(backend: str, call: Call, name: str) -> str:
    h, w, prefix = call.grid
    windows = f" in windows of {call.window[0]}x{call.window[1]}" if call.window else ""
    tokens = f"{h}x{w}{f' + {prefix}' if prefix else ''} tokens{windows}"
    kind = "training" if call.grad else "inference"
    auto = backend == "auto" and chosen["auto"] == "auto"
    times = relative(call) if auto else {}  # over that of the fastest
    choice = "fastest by the profile" if name in times else "first of auto that serves it" if auto else "given by name"
    lines = [
        f"{call.entry}, {tokens}, {call.queries} queries, {call.heads} heads of {call.width}, "
        f"{str(call.dtype).removeprefix('torch.')} on {call.device.type}, {kind}: {name} ({choice})"
    ]
    for other in TABLE:
        if other != name:
            served = f"{times[other] / times[name]:.2f} times as slow" if name in times and other in times else ""
            after = preferred(other, call) and name not in times
            served = served or (f"comes after {name}" if after else "serves it if given by name")
            lines.append(f"    {other}: {refusal(other, call) or served}")
    return "\n".join(lines)
