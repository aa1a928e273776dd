"""Commands that are printed as next steps: complete, quoted for the shell, on a line of their own."""

import shlex
from pathlib import Path

from vitrel.common.sizes import Size, format_size


def command_line(command: str, *words: str | Path) -> str:
    """Return a command of vitrel as a line to paste into a shell."""
    return shlex.join(["vitrel", command, *map(str, words)])


def evaluate_line(model: str | Path, data: str, size: Size, out: str | Path) -> str:
    """Return the command that evaluates `model` at a half, once, one and a half times and twice the size (h, w) in pixels."""
    sizes = dict.fromkeys(tuple(max(1, round(side * factor)) for side in size) for factor in (0.5, 1, 1.5, 2))
    texts = [str(h) if h == w else format_size((h, w)) for h, w in sizes]
    return command_line("evaluate", model, "--data", data, "--size", *texts, "--out", out)
