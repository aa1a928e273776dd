"""Evaluation of trained models at many image sizes: accuracy, cost, and which parameters were resampled.

`vitrel.evaluate.at_sizes` does it in one call. An evaluation is a pipe, and a stage a module that imports only those before it:

    checkpoint    path or model -> TrainedModel (model, preprocessing, classes)
    classes       which output stands for which class
    images        data, and what a protocol shows of them at a size -> batches of images and targets
    policies      model, size -> the model for that size, and what is resampled for it
    predict       model, batches -> results of every image, by the task (`vitrel.tasks`); speed, memory, attention
    folder        rows <-> the files of one evaluation
    statistics    scores of images -> estimates and intervals
    verdicts      rows, scores -> which model is better, which size is safe
    sweep         models, settings -> trials: the rows that an evaluation has
    sentences     the verdicts in words
    plots         accuracy by size and by cost, as charts
    pictures      inputs, predictions and attention of a few images
    report        all of it -> table.md, plots/, report.html
    run           the whole: settings -> trials -> rows, through the stages above
    frozen        accuracy of frozen features; no stage of the pipe, it uses images, predict and statistics alone
"""

from typing import Any

__all__ = ["at_sizes", "trained_model"]


def __getattr__(name: str) -> Any:
    if name == "at_sizes":  # not at import: it brings pandas
        from vitrel.evaluate.run import at_sizes

        return at_sizes
    if name == "trained_model":
        from vitrel.evaluate.checkpoint import trained_model

        return trained_model
    raise AttributeError(f"module 'vitrel.evaluate' has no attribute {name!r}")
