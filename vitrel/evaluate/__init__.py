"""Evaluation of trained models at many image sizes: accuracy, cost, and which parameters were resampled.

`vitrel.evaluate.at_sizes` does it in one call. An evaluation is a pipe, and a stage a module that imports only those before it:

    sweep         the options
    checkpoint    path or model -> TrainedModel (model, preprocessing, classes)
    tasks         what is predicted and scored: classification, segmentation (a file each); which output stands for which class
    prepare       data, preprocessing, size -> batches of images and targets; vitrel.data.Prepare does what a protocol says
    policies      model, size -> the model for that size, and what is resampled for it
    predict       model, batches -> logits, time, memory, attention
    trials        models, sweep -> the list of rows to make
    measure       trial -> row, through prepare, predict and the task's score
    results       rows <-> the files of a folder (table); estimates over seeds and images (statistics); verdicts, and at most
                  three sentences a model (advice); Markdown (text)
    page          rows -> report.html

`run` is a whole evaluation.
"""

from typing import Any

__all__ = ["at_sizes"]


def __getattr__(name: str) -> Any:
    if name == "at_sizes":  # not at import: it brings pandas
        from vitrel.evaluate.run import at_sizes

        return at_sizes
    raise AttributeError(f"module 'vitrel.evaluate' has no attribute {name!r}")
