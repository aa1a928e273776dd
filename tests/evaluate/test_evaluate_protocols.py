"""Every protocol alone, on photographs of several shapes, makes its report; a picture that fails costs that picture only."""

import numpy as np
import pytest
from PIL import Image

from vitrel.evaluate.checkpoint import trained_model
from vitrel.evaluate.page import pictures
from vitrel.evaluate.page.pictures import read_pictures
from vitrel.evaluate.run import run_sweep
from vitrel.evaluate.sweep import PROTOCOLS, Sweep
from vitrel.models.create import create_model
from vitrel.models.segmenter import Segmenter

SHAPES = [(40, 40), (64, 32), (30, 61), (24, 48), (48, 20), (33, 50)]  # (h, w) in pixels: the sampled images differ in shape
HOW = {"device": "cpu", "attention_n": 0, "border_leak": False, "batch_size": 4, "report": True}


@pytest.fixture
def folder(tmp_path):
    """Images of noise in three classes, and masks of the same shapes."""
    noise = np.random.default_rng(0)
    for i, (h, w) in enumerate(SHAPES):
        image, mask = noise.integers(0, 256, (h, w, 3), np.uint8), noise.integers(0, 3, (h, w), np.uint8)
        for split in ("train", "val"):
            for place, array in (
                (f"classes/{split}/{'abc'[i % 3]}", image),
                (f"dense/images/{split}", image),
                (f"dense/masks/{split}", mask),
            ):
                (tmp_path / place).mkdir(parents=True, exist_ok=True)
                Image.fromarray(array).save(tmp_path / place / f"{i}.png")
    (tmp_path / "dense" / "classes.txt").write_text("a\nb\nc")
    return tmp_path


def model_of(name, is_dense=False):
    how = {"embed_dim": 24, "num_heads": (2, 4), "depths": (2, 1), "window_size": 4} if "swin" in name else {"depth": 2}
    model = create_model(name, num_classes=3, img_size=32, **how).eval()
    return trained_model(Segmenter(model, 3, "linear").eval() if is_dense else model, name, img_size=(32, 32))


CASES = [
    *(("classes", protocol, "vitrel_vit_n8_table") for protocol in ("scale", "canvas", "native")),
    *(("classes", "native", name) for name in ("vitrel_vit_n8_absolute", "vitrel_swin_n")),
    *(("dense", protocol, "vitrel_vit_n8_table") for protocol in PROTOCOLS),
]


@pytest.mark.slow
@pytest.mark.parametrize(("task", "protocol", "name"), CASES)
def test_every_protocol_alone_makes_its_report(folder, tmp_path, task, protocol, name, recwarn):
    data, out, sizes = folder / task, tmp_path / "out", ((64, 48),)
    rows = run_sweep([model_of(name, task == "dense")], Sweep(str(data), sizes, (protocol,), **HOW), out)
    assert {row["img_size"] for row in rows} == {"32x32", "64x48"} and {row["protocol"] for row in rows} == {protocol}
    assert (out / "report.html").stat().st_size > 50_000
    stored = read_pictures(out / "pictures.json.gz")
    assert not stored["left_out"] and not [str(one.message) for one in recwarn if "left out" in str(one.message)]
    [model] = stored["models"]
    assert model["error"] is None and {item["image"] for item in model["maps"]} == {0, 1}
    if protocol == "native":  # every sample image at its own shape
        grids = {item["image"]: tuple(item["grid"]) for item in model["maps"] if item["size"] == "64x48" and item["layer"] == 0}
        assert len(set(grids.values())) == 2


@pytest.mark.parametrize("part", ["_preprocessed", "_thumbnails", "record_scenes", "_record_trial"])
def test_a_picture_that_fails_costs_the_picture(folder, tmp_path, part, monkeypatch):
    def fail(*args, **how):
        raise RuntimeError("no picture today")

    monkeypatch.setattr(pictures, part, fail)
    sweep = Sweep(str(folder / "classes"), ((48, 48),), ("scale",), **HOW)
    with pytest.warns(UserWarning, match="left out of the report: .*no picture today"):
        rows = run_sweep([model_of("vitrel_vit_n8_table")], sweep, tmp_path / "out")
    assert len(rows) > 1
    assert "no picture today" in (tmp_path / "out" / "report.html").read_text("utf-8")


def test_a_plot_that_fails_costs_the_plot(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("vitrel.evaluate.page.plot_all", lambda *args: 1 / 0)
    sweep = Sweep(str(folder / "classes"), (), ("scale",), **HOW)
    with pytest.warns(UserWarning, match="left out of the report: plots: division by zero"):
        assert run_sweep([model_of("vitrel_vit_n8_table")], sweep, tmp_path / "out")
    assert (tmp_path / "out" / "report.html").exists()
