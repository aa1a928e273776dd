"""Generate the pages with all tables of the studies on photographs and from ImageNet weights."""

from tools.study import imagenet_weights as imagenet
from tools.study.photographs import DATA, ROOT, study_tables

RESULTS = ROOT / "results" / "study"
PHOTOGRAPHS = """# Photographs: all tables

Made from results/study; the reading is in [the study](photographs.md). ± is half the 95 % interval. A policy is named where
a model has a choice; "none" resampled means that no value of the model was.
"""
IMAGENET_WEIGHTS = """# From ImageNet weights: all tables

Made from results/study; the reading is in [the study](imagenet_weights.md). In percent or points, ± half the 95 % interval.
Above the training size tables are resampled by `geometric`, `cpb` and `log_decay` have `keep`, unless a policy is named.
"""
TITLES = {
    "scale": "Trained at 224 px, scale, top-1 of 1,000 classes",
    "scale_among": "Trained at 224 px, scale, top-1 among the ten classes",
    "policies": "Other policies, scale, top-1 of 1,000 classes",
    "policies_among": "Other policies, scale, top-1 among the ten classes",
    "canvas": "Trained at 224 px, canvas, top-1 of 1,000 classes",
    "canvas_among": "Trained at 224 px, canvas, top-1 among the ten classes",
    "ahead": "Difference to the absolute embedding learned again, scale, top-1 of 1,000 classes",
    "ahead_among": "The same among the ten classes",
    "kept": "Points less lost from 224 px on than by the absolute embedding learned again, scale, top-1 of 1,000 classes",
    "kept_among": "The same among the ten classes",
    "several": "Trained at 128 to 288 px, scale, top-1 of 1,000 classes",
    "several_among": "Trained at 128 to 288 px, scale, top-1 among the ten classes",
    "several_canvas": "Trained at 128 to 288 px, canvas, top-1 of 1,000 classes",
    "several_canvas_among": "Trained at 128 to 288 px, canvas, top-1 among the ten classes",
    "several_ahead": "Trained at 128 to 288 px, scale: difference to the absolute embedding learned again, of 1,000 classes",
    "several_ahead_among": "The same among the ten classes",
    "flowers_scale": "Flowers, linear classifiers, scale",
    "flowers_native": "Flowers, linear classifiers, native: as many tokens as a square of this side has",
}


def photographs() -> str:
    """Return Markdown: top-1 against size of every model and policy, for both sets of photographs."""
    parts = [f"## {name}\n\n{table}\n" for name, table in study_tables(RESULTS, DATA)]
    return "\n".join([PHOTOGRAPHS, *parts])


def imagenet_weights() -> str:
    """Return Markdown: every table of the study from ImageNet weights."""
    tables = imagenet.study_tables(RESULTS)
    return "\n".join([IMAGENET_WEIGHTS, *(f"## {title}\n\n{tables[name]}\n" for name, title in TITLES.items())])
