"""Models trained at several sizes or at native shape are judged against these, and the text says so."""

import pytest
import torch

from vitrel.common.sizes import Budget
from vitrel.evaluate.checkpoint import load_checkpoint
from vitrel.evaluate.results.advice import judge
from vitrel.evaluate.results.aggregate import is_training
from vitrel.evaluate.results.table import columns_of
from vitrel.evaluate.results.text import table_page
from vitrel.evaluate.sweep import Sweep
from vitrel.evaluate.trials import default_protocols, trials_of
from vitrel.models.create import create_model

SEVERAL = ("24x24", "48x48", "32x64")


def saved(path, train_sizes, name="vitrel_vit_n8_table", img_size=(32, 32)):
    model = create_model(name, num_classes=3, img_size=img_size, depth=1)
    about = {
        "model": name, "model_args": {"depth": 1}, "classes": ["left", "right", "above"], "img_size": [*img_size],
        "mean": [0.5] * 3, "std": [0.5] * 3, "crop_pct": 1.0, "crop_mode": "center", "interpolation": "bicubic", "seed": 0,
    }  # fmt: skip
    about |= {} if train_sizes is None else {"train_sizes": [*train_sizes]}
    torch.save({"state_dict": {f"model.{key}": value for key, value in model.state_dict().items()}, "vitrel": about}, path)
    return load_checkpoint(path)


def row(size, top1, train_size, protocol="scale", budget=None, **how):
    """A judged row: intervals of 2,000 images, of which a share is right."""
    base = dict.fromkeys(columns_of("classification"), float("nan")) | {
        "task": "classification", "label": "model", "seed": 0, "policy": "none", "crop_pct": 1.0, "n": 2000, "majority": 10.0,
        "resampled": "nothing", "resampled_values": 0, "params": 1, "unchanged": True, "oom": 0, "batch_size": 1,
    }  # fmt: skip
    return base | {"img_size": size, "top1": top1, "train_size": train_size, "protocol": protocol, "budget": budget} | how


def test_a_checkpoint_knows_its_training_sizes(tmp_path):
    plain, several = saved(tmp_path / "a.ckpt", None), saved(tmp_path / "b.ckpt", SEVERAL)
    assert plain.train_sizes == plain.train_pixels == ((32, 32),) and not plain.is_native
    # the model is built for 32x32, which it never saw: 24x24 is nearest in area, by ratio
    assert several.train_sizes == ((24, 24), (48, 48), (32, 64)) and several.img_size == (24, 24)
    assert saved(tmp_path / "c.ckpt", ("24x24", "32x32")).img_size == (32, 32)
    native = saved(tmp_path / "d.ckpt", ("9t", "30t"), img_size=(224, 224))
    assert native.is_native and native.train_sizes == (Budget(9), Budget(30))
    assert native.img_size == (40, 40) and native.train_pixels == ((40, 40), (24, 24))
    assert default_protocols([plain, several]) == ("scale", "canvas") and default_protocols([native]) == ("native",)
    assert default_protocols([plain, native]) == ("scale", "canvas", "native")


def test_training_sizes_are_evaluated_first_and_are_the_references(tmp_path, noise, rows_of):
    several = saved(tmp_path / "b.ckpt", SEVERAL)
    sweep = Sweep("noise", ((32, 32), (64, 64)), ("scale",), ("clip",), device="cpu", attention_n=0, border_leak=False)
    trials = trials_of([several], sweep)
    assert [trial.size for trial in trials] == [(24, 24), (48, 48), (32, 64), (32, 32), (64, 64)]
    assert [trial.is_training for trial in trials] == [True] * 3 + [False] * 2
    rows = rows_of([several], sweep)
    assert {row["train_size"] for row in rows} == {"24x24 48x48 32x64"}
    assert [row["retention"] for row in rows[:3]] == [1.0] * 3
    by_size = {row["img_size"]: row for row in rows}
    assert by_size["32x32"]["retention"] == pytest.approx(by_size["32x32"]["top1"] / by_size["24x24"]["top1"], abs=1e-4)
    assert by_size["64x64"]["retention"] == pytest.approx(by_size["64x64"]["top1"] / by_size["48x48"]["top1"], abs=1e-4)
    # offsets of all training sizes were seen, also those beyond the grid of 4x4 that the model is built for
    assert [by_size[size]["unseen"] for size in (*SEVERAL, "32x32")] == [0.0] * 4
    assert by_size["64x64"]["unseen"] == pytest.approx(1 - 11 * 11 / 15**2, abs=1e-4)


def test_verdicts_are_against_the_nearest_training_size():
    sizes = "24x24 48x48"
    rows = [row("24x24", 60.0, sizes), row("48x48", 80.0, sizes), row("26x26", 60.0, sizes), row("64x64", 60.0, sizes)]
    judged = judge(rows)
    verdicts = {one["img_size"]: (one["verdict"], one["difference"]) for one in judged.rows}
    assert verdicts["26x26"][1] == pytest.approx(0.0) and verdicts["64x64"] == ("loses", pytest.approx(-20.0))
    assert verdicts["24x24"][0] == verdicts["48x48"][0] == ""
    page = table_page(judged, "t")
    assert page.count("training size ") >= 2 and "Trained at 24x24 and 48x48 px." in page
    alone = judge([row("26x26", 60.0, sizes), row("64x64", 60.0, sizes)])
    assert "evaluate it at its training sizes, 24 and 48 px, too" in alone.advice[0].text.lower()
    only = judge(rows[:2])
    assert "only its training sizes, 24 and 48 px, were evaluated" in only.advice[0].text.lower()


def test_a_model_trained_at_native_shape_is_judged_there():
    native = [row("24x24", 60.0, "9t", "native", 9), row("48x48", 40.0, "9t", "native", 36)]
    scale = [row("24x24", 60.0, "9t"), row("48x48", 40.0, "9t")]
    assert [*map(is_training, native + scale)] == [True, False, False, False]
    judged = judge(scale + native)
    assert [one["verdict"] for one in judged.rows if one["protocol"] == "scale"] == ["", ""]
    assert [one["verdict"] for one in judged.rows if one["protocol"] == "native"] == ["", "loses"]
    assert judged.advice[0].protocol == "native" and "native shape, 9 tokens at most" in table_page(judged, "t")
    text = judge(scale).advice[0].text
    assert "training size, native shape, 9 tokens at most (--protocol native), too: without it no size can be called" in text
