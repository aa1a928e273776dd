"""Which backend serves a call and why the others do not: `why` and `use_backend`."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

from vitrel.ops.backends import triton_backend
from vitrel.ops.dispatch import BACKENDS, Call, chosen, recording, row_of


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Context manager that makes `name` the backend of every layer and call with backend "auto", in all threads.

    A call that this backend refuses raises ValueError, as does an unknown name; "auto" leaves the choice to vitrel.ops.auto.
    The environment variable VITREL_BACKEND, read when vitrel is imported, does the same for a whole process.
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

    Calls of the same kind are listed once, with their number. Below stand the row of vitrel.ops.auto by which "auto" took the
    backend, with its measurement, and for every other backend why it refuses the call, or that it serves it by name.

    Args:
        function: a model, a layer, or a function of `vitrel.ops`. A model from torch.compile is run uncompiled.
        args: its positional arguments.
        kwargs: its keyword arguments.

    Returns:
        Several lines per kind of call; one that says so if no attention was called. The function's result is dropped.
    """
    calls: Counter[str] = Counter()
    function = getattr(function, "_orig_mod", function)
    with recording(lambda *choice: calls.update([_text(*choice)])):
        function(*args, **kwargs)
    return "\n".join(f"{count} x {text}" for text, count in calls.items()) or "no attention of vitrel was called"


def _text(backend: str, call: Call, name: str) -> str:
    h, w, prefix = call.grid
    entry, windows = (
        ("window_attention", f" in windows of {call.window[0]}x{call.window[1]}") if call.window else ("attention", "")
    )
    tokens = f"{h}x{w}{f' + {prefix}' if prefix else ''} tokens{windows}"
    kind = "training" if call.grad else "inference"
    row = row_of(call) if backend == chosen["auto"] == "auto" else None
    lines = [
        f"{entry}, {tokens}, {call.queries} queries, {call.heads} heads of {call.width}, "
        f"{str(call.dtype).removeprefix('torch.')} on {call.device.type}, {kind}: {name} ({'auto' if row else 'given by name'})"
    ]
    if row:
        since = f" from {row.tokens:,} tokens" if row.tokens else ""
        lines.append(f"    auto: {row.kind}{since}: {row.measured}")
    for other in BACKENDS:
        if other != name:
            lines.append(f"    {other}: {_refusal(other, call) or 'serves it if given by name'}")
    return "\n".join(lines)


def _refusal(name: str, call: Call) -> str:
    """Return why the backend `name` refuses a call, or why Triton failed when "auto" tried its kernels; "" if neither."""
    reason = BACKENDS[name].refuses(call)
    return triton_backend.failure(call, known=True) if name == "triton" and not reason else reason
