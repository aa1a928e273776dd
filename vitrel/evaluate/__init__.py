"""Evaluation of trained classifiers at many image sizes: accuracy, cost, and which parameters were resampled.

`vitrel.evaluate.at_sizes` does it in one call. Each module imports only modules listed before it: settings (the options of an
evaluation, and its processes), models (loading trained models, policies for other sizes), images, statistics (estimates over
seeds and images), metrics (and predictions), measure (tasks, and one task measured as a row), results (the output folder and
its rows), rescue (settings that help at other sizes, found without labels), advice (verdicts on rows), claims (verdicts on
claims), report (tables, pictures, report.html), run (a whole evaluation), compare (training and evaluating several models and
seeds).
"""

from typing import Any

__all__ = ["at_sizes"]


def __getattr__(name: str) -> Any:
    if name == "at_sizes":  # not at import: it brings pandas
        from vitrel.evaluate.run import at_sizes

        return at_sizes
    raise AttributeError(f"module 'vitrel.evaluate' has no attribute {name!r}")
