"""Which backend serves a call and why the others do not: `why` and `use_backend`."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import vitrel.ops.dispatch as dispatch
from vitrel.ops.dispatch import BACKENDS, Call, chosen, considers, is_auto


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Context manager that makes `name` the backend of every layer and call with backend "auto".

    A call that this backend refuses raises ValueError, as does an unknown name. The environment variable VITREL_BACKEND does
    the same for a whole process.
    """
    if not is_auto(name) and name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}; choose auto, {', '.join(BACKENDS)}")
    before = chosen["auto"]
    chosen["auto"] = name
    try:
        yield
    finally:
        chosen["auto"] = before


def why(function: Callable, *args: Any, **kwargs: Any) -> str:
    """Run function(*args, **kwargs), and return a text about the backend that served each attention call in it.

    function: a model, a layer, or one of the functions of `vitrel.ops`. Each kind of call is listed once, with its number and
    the reason why each of the other backends did not serve it. A compiled model is run uncompiled.
    """
    calls: Counter[str] = Counter()
    choose = dispatch.choose

    def recording(backend: str, call: Call) -> Any:
        module = choose(backend, call)
        calls[_text(call, next(name for name, other in BACKENDS.items() if other is module), backend)] += 1
        return module

    function = getattr(function, "_orig_mod", function)
    dispatch.choose = recording
    try:
        function(*args, **kwargs)
    finally:
        dispatch.choose = choose
    return "\n".join(f"{count} x {text}" for text, count in calls.items()) or "no attention of vitrel was called"


def _text(call: Call, name: str, backend: str) -> str:
    h, w, prefix = call.grid
    windows = f" in windows of {call.window[0]}x{call.window[1]}" if call.window else ""
    tokens = f"{h}x{w}{f' + {prefix}' if prefix else ''} tokens{windows}"
    kind = "training" if call.grad else "inference"
    backend = chosen["auto"] if is_auto(backend) and chosen["auto"] != "auto" else backend
    choice = f"first of {backend} that serves it" if is_auto(backend) else "given by name"
    lines = [
        f"{call.entry}, {tokens}, {call.queries} queries, {call.heads} heads of {call.width}, "
        f"{str(call.dtype).removeprefix('torch.')} on {call.device.type}, {kind}: {name} ({choice})"
    ]
    for other, module in BACKENDS.items():
        if other != name:
            auto = considers(backend, other) and module.pays(call)
            reason = module.refuses(call) or (f"comes after {name}" if auto else "serves it if given by name")
            lines.append(f"    {other}: {reason}")
    return "\n".join(lines)
