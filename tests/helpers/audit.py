"""Which addresses and files of weights Python code asks for while it runs, by an audit hook."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SUFFIXES = (".pth", ".ckpt", ".safetensors", ".json", ".bin", ".npz")
_lists: list[list[str]] = []  # of the contexts that are entered


def _hook(event: str, args: tuple) -> None:
    if not _lists:
        return
    if event.startswith(("socket.connect", "socket.getaddrinfo", "socket.gethostby", "urllib.Request")):
        asked = f"{event} {args[-1] if event == 'socket.connect' else args[0]}"
    elif event == "open" and isinstance(args[0], str) and Path(args[0]).suffix in _SUFFIXES:
        asked = args[0]
    else:
        return
    for entries in _lists:
        entries.append(asked)


sys.addaudithook(_hook)  # it cannot be removed


@contextmanager
def asked() -> Iterator[list[str]]:
    """Return a context with the list of what was asked for in it: connections, addresses, and files of weights by their suffix.

    Files that safetensors itself opens are not seen.
    """
    entries: list[str] = []
    _lists.append(entries)
    try:
        yield entries
    finally:
        _lists.remove(entries)
