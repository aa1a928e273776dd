"""Which backend serves what, and why not another: `why`, `use_backend`."""

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import vitrel.ops.dispatch as dispatch
from vitrel.ops.dispatch import BACKENDS, Call, chosen, considers, is_auto


@contextlib.contextmanager
def use_backend(name: str) -> Iterator[None]:
    """While it lasts, `name` serves every layer and call that leaves the backend to "auto"; one that it refuses raises.

    The environment variable VITREL_BACKEND does the same for a process. ValueError for an unknown name.
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
    """Runs function(*args, **kwargs), a model, a layer or an entry of `vitrel.ops`, and says which backend served each call.

    Every kind of call once, with the reason of each backend that did not serve it. A compiled model is run as it was written.
    """
    seen: Counter[str] = Counter()
    served = dispatch.choose

    def watched(backend: str, call: Call) -> Any:
        module = served(backend, call)
        seen[_text(call, next(name for name, known in BACKENDS.items() if known is module), backend)] += 1
        return module

    function = getattr(function, "_orig_mod", function)
    dispatch.choose = watched
    try:
        function(*args, **kwargs)
    finally:
        dispatch.choose = served
    return "\n".join(f"{count} x {text}" for text, count in seen.items()) or "no attention of vitrel was called"


def _text(call: Call, name: str, asked: str) -> str:
    h, w, prefix = call.grid
    windows = f" in windows of {call.window[0]}x{call.window[1]}" if call.window else ""
    where = f"{h}x{w}{f' + {prefix}' if prefix else ''} tokens{windows}"
    kind = "training" if call.grad else "inference"
    asked = chosen["auto"] if is_auto(asked) and chosen["auto"] != "auto" else asked
    how = f"first of {asked} that serves it" if is_auto(asked) else "asked for by name"
    lines = [
        f"{call.entry}, {where}, {call.queries} queries, {call.heads} heads of {call.width}, "
        f"{str(call.dtype).removeprefix('torch.')} on {call.device.type}, {kind}: {name} ({how})"
    ]
    for other, module in BACKENDS.items():
        if other != name:
            auto = considers(asked, other) and module.pays(call)
            reason = module.refuses(call) or (f"comes after {name}" if auto else "serves it when asked for by name")
            lines.append(f"    {other}: {reason}")
    return "\n".join(lines)
