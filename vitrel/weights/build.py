"""Build a named model with as many classes as a file of weights."""

from typing import Any

import timm
from torch import nn

from vitrel.names import nearest
from vitrel.weights.load import WeightPlan, plan_weights
from vitrel.weights.read import guarding


def model_for(
    name: str,
    model_args: dict[str, Any],
    loaded: object,
    source_grid: tuple[int, int] | None = None,
    key_minus_query: bool = False,
) -> tuple[nn.Module, WeightPlan]:
    """Return the model `name`, and the plan for the file's weights, which are not loaded into it (`apply_plan` does).

    The model has as many classes as the file's classifier, 0 if the file has none, unless model_args sets num_classes. loaded:
    the result of `read_file`; other arguments and errors as in `plan_weights`. ValueError also if vitrel has no model of that
    name.
    """
    if not timm.is_model(name) or not name.startswith("vitrel_"):
        near = ", ".join(nearest(name, timm.list_models("vitrel*"), cutoff=0.0))
        raise ValueError(f"unknown model {name!r}; the nearest of timm.list_models('vitrel*') are {near}")
    with guarding(name, model_args):
        model, source = timm.create_model(name, **model_args), loaded if isinstance(loaded, dict) else {}
    plan = plan_weights(model, source, source_grid, key_minus_query)
    classifier = plan.state.get(f"{model.default_cfg['classifier']}.weight")
    classes = 0 if classifier is None else len(classifier)
    if "num_classes" not in model_args and classes != model.num_classes:
        model = timm.create_model(name, num_classes=classes, **model_args)
        plan = plan_weights(model, source, source_grid, key_minus_query)
    return model, plan
