"""Commands that are printed as next steps: complete, quoted for the shell, on a line of their own."""

import math
import shlex
from collections.abc import Sequence
from pathlib import Path

from vitrel.common.sizes import Budget, Size, format_size, short_size


def evaluate_line(model: str | Path, data: str, trained: Sequence[Size | Budget], out: str | Path) -> str:
    """Return the command that evaluates `model` at its training sizes, and at smaller and larger ones.

    These are half the smallest, and one and a half and twice the largest, by their sides.

    Args:
        trained: sizes (h, w) in pixels, or budgets of tokens of a model trained at native shape, which is evaluated so.
    """

    def scaled(size: Size | Budget, factor: float) -> Size | Budget:
        if isinstance(size, Budget):
            return Budget(max(1, round(size.tokens * factor**2)))
        return max(1, round(size[0] * factor)), max(1, round(size[1] * factor))

    by_area = sorted(trained, key=lambda size: size.tokens if isinstance(size, Budget) else math.prod(size))
    sizes = dict.fromkeys([scaled(by_area[0], 0.5), *by_area, scaled(by_area[-1], 1.5), scaled(by_area[-1], 2)])
    texts = [format_size(size) if isinstance(size, Budget) else short_size(size) for size in sizes]
    protocol = ["--protocol", "native"] if any(isinstance(size, Budget) for size in trained) else []
    return shlex.join(["vitrel", "evaluate", str(model), "--data", data, "--size", *texts, *protocol, "--out", str(out)])
