"""Evaluation of trained models at many image sizes: accuracy, cost, and which parameters were resampled.

`vitrel.evaluate.at_sizes` does it in one call. An evaluation is a pipe, and a stage a module that imports only those before it:

    sweep         the options
    checkpoint    path or model -> TrainedModel (model, preprocessing, classes)
    prepare       data, preprocessing, size -> batches of images
    policies      model, size -> the model for that size, and what is resampled for it
    predict       model, batches -> logits, time, memory, attention
    score         logits, labels -> metrics and the prediction of every image, for classification
    trials         models, sweep -> the list of rows to make
    measure       trial -> row, through prepare, predict and score
    table         rows <-> the files of a folder
    advice        rows -> verdicts, and at most three sentences a model
    text, page    rows -> Markdown, report.html

`statistics` has the estimates over seeds and images, `rescue` the search for settings that help without training, `claims` the
verdicts on claims, `run` a whole evaluation, `compare` the configuration of training and evaluating several models and seeds.
"""

from typing import Any

__all__ = ["at_sizes"]


def __getattr__(name: str) -> Any:
    if name == "at_sizes":  # not at import: it brings pandas
        from vitrel.evaluate.run import at_sizes

        return at_sizes
    raise AttributeError(f"module 'vitrel.evaluate' has no attribute {name!r}")
