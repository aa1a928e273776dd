"""Rows of an evaluation, made by hand."""

from pathlib import Path

import numpy as np
import pandas as pd


def row(size="64x64", top1=90.0, policy="none", label="m", **given):
    """A row of classification of 10,000 images by a model trained at 64 px."""
    height, width = map(int, size.split("x"))
    columns = {
        "task": "classification", "model": label, "label": label, "encoding": "absolute", "seed": 0, "img_size": size,
        "train_size": "64x64", "protocol": "scale", "budget": None, "translation": 0, "policy": policy, "top1": top1,
        "n": 10_000, "majority": 10.0, "crop_pct": 1.0, "tokens": height * width // 64, "gflops": height * width / 1e5,
        "resampled": "nothing", "resampled_values": 0, "param_count": 0.45, "unseen": 0.0, "position_share": 0.2,
    } | given  # fmt: skip
    place = (columns[name] for name in ("label", "seed", "img_size", "protocol", "budget", "translation", "policy", "crop_pct"))
    return columns | {"key": "|".join(map(str, place))}


def rows_of(levels, sizes=("64x64", "96x96", "128x128"), **given):
    """A row of every model and size, of {label: top-1 at each size}."""
    return [
        row(size, top1, label=label, **given) for label, of in levels.items() for size, top1 in zip(sizes, of, strict=False)
    ]


def with_scores(rows, right):
    """The rows with top-1 of these masks, [n] each, and the scores of their images."""
    changed = [one | {"top1": 100 * float(np.mean(mask)), "n": len(mask)} for one, mask in zip(rows, right, strict=True)]
    return changed, {one["key"]: mask.astype(float) for one, mask in zip(changed, right, strict=True)}


def published(path: Path):
    """The rows of a results.csv that was written before rows had keys."""
    text = dict.fromkeys(("img_size", "train_size", "policy", "label", "resampled"), str)
    rows = pd.read_csv(path, keep_default_na=False, na_values=[""], dtype=text).to_dict("records")
    return [one | {"task": one.get("task", "classification"), "key": str(at)} for at, one in enumerate(rows)]
