"""Evaluation at any size: a trained model, what had to be resized for a size, and what became of its accuracy.

`vitrel.evaluate.at_sizes` does it in one call. Every file imports only those before it: settings (what is asked), models (what
is evaluated), policies (how a model reads another size), images, metrics, processes, measure (tasks, and one task as a row),
results (the folder and its tables), rescue (settings that help at another size, found without labels), report (answers, plots,
report.html), run (the whole), compare (several models and seeds); pairs compares two folders row by row, image by image.
"""

from typing import Any

__all__ = ["at_sizes"]


def __getattr__(name: str) -> Any:
    if name == "at_sizes":  # not at import: it brings pandas
        from vitrel.evaluate.run import at_sizes

        return at_sizes
    raise AttributeError(f"module 'vitrel.evaluate' has no attribute {name!r}")
