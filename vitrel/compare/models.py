"""Building the models of a comparison: before training, to check that they can be trained and evaluated, and after it."""

import contextlib
import io
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import timm
from timm.models import get_model_args
from torch import nn

from vitrel.compare.config import Comparison, merged
from vitrel.data import class_names
from vitrel.evaluate.checkpoint import TrainedModel, encoding_of, load_checkpoint, trained_model
from vitrel.evaluate.run import at_sizes
from vitrel.models.segmenter import Segmenter
from vitrel.train.module import Classifier
from vitrel.train.tuning import Tuning


def trained_models(comparison: Comparison) -> list[TrainedModel]:
    """Load the model of every run from its checkpoint, in eval mode, in the order of the runs.

    A run with `options` gets a model with these arguments and the checkpoint's weights; ValueError where they do not fit.
    """
    models = []
    for run in comparison.runs:
        trained = load_checkpoint(run.checkpoint, run.label, run.seed)
        if run.options is not None:
            model = _with_options(trained.model, trained.name, run.options, run.label).eval()
            arguments = json.dumps(run.options, sort_keys=True)
            trained = replace(trained, model=model, encoding=encoding_of(model), model_args=arguments)
        models.append(trained)
    return models


def evaluate(comparison: Comparison, how: Mapping[str, Any]) -> None:
    """Evaluate the trained models of all runs by `at_sizes`, which writes into the comparison's folder and prints.

    `how` has arguments of `at_sizes`, which take precedence over those of the comparison.
    """
    settings = {"out": comparison.folder, "title": comparison.name, **comparison.settings, **how}
    at_sizes(trained_models(comparison), comparison.evaluated, **settings)


def untrained_models(comparison: Comparison) -> list[TrainedModel]:
    """Build each model of the comparison once, by the configuration of its first run, in eval mode and not trained.

    No seed is set, so its random weights are not those that training begins with. A model that is tuned from another run is
    built without the weights of that run. ValueError or OSError where a model cannot be built.
    """
    models = []
    for run in {run.label: run for run in reversed(comparison.runs)}.values():
        settings, size = run.training["model"], run.training["data"]["size"]
        task = settings.get("task", "classification")
        classes = class_names(comparison.data, task=task)
        tuning = {**settings.get("tuning", {}), **({"init_from": None, "reset_head": None} if run.tuned else {})}
        built = {name: settings[name] for name in ("model_args", "task", "head") if name in settings}
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # it tells what happens to position
                module = Classifier(settings["model"], len(classes), size, tuning=Tuning(**tuning), **built)
        except (RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"{run.label} cannot be built: {error}") from error
        model = module.model
        if run.options is not None:
            model = _with_options(model, settings["model"], run.options, run.label)
        trained = trained_model(model.eval(), settings["model"], label=run.label, img_size=module.img_size, task=task)
        models.append(replace(trained, classes=tuple(classes)))
    return models[::-1]


def _with_options(source: nn.Module, name: str, options: Mapping[str, Any], label: str) -> nn.Module:
    """Return a new model `name` with the weights of `source` and its arguments, changed by `options` also in nested ones.

    ValueError, which names `label`, where it cannot be built or the weights do not fit.
    """
    backbone = source.backbone if isinstance(source, Segmenter) else source
    try:
        model = timm.create_model(name, **merged(get_model_args(backbone), options))
        model = Segmenter(model, source.num_classes, source.head_name) if isinstance(source, Segmenter) else model
        model.load_state_dict(source.state_dict())
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"{label} cannot have the weights that it names: {error}") from error
    return model
