"""A plan that costs nothing: no image decoded, nothing written, every row told with what it would take."""

from pathlib import Path

import pytest
import timm

from vitrel.evaluate.dry_run import HEAD, describe_plan
from vitrel.evaluate.foreign_models import trained_model
from vitrel.evaluate.rows import evaluate_rows
from vitrel.evaluate.settings import Sweep
from vitrel.evaluate.sweep import run_sweep


def cells(text):
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert lines[0] == list(HEAD)
    return [dict(zip(HEAD, line, strict=True)) for line in lines[2:]]


@pytest.fixture
def models(trained):
    small = dict(embed_dim=48, depth=1, num_heads=3, img_size=32, patch_size=8, num_classes=3)
    foreign = trained_model(timm.create_model("vit_tiny_patch16_224", **small).eval(), "foreign")
    return [trained("vitrel_vit_n8_table"), trained("vitrel_swin_n", (32, 32)), foreign]


def test_every_row_is_told(models, noise, tmp_path):
    sweep = Sweep("noise", ((48, 40),), ("scale",), device="cpu", shifts=(0, 4))
    text = describe_plan(models, sweep, tmp_path / "none")
    found = {(row["model"], row["size"], row["policy"]): row for row in cells(text)}
    assert len(found) == 3 + 3 + 5 + 1 and noise.decoded == 0 and not (tmp_path / "none").exists()
    swin = found["vitrel_swin_n", "48x40", "rescale+bicubic"]
    assert (swin["windows"], swin["padded"], swin["tokens"]) == ("6x5 6x5 6x5", "0 0 0", "480")
    assert found["vitrel_swin_n", "48x40", "keep"]["padded"] == "0 0.17 0.53"
    vit = found["vitrel_vit_n8_table", "48x40", "geometric"]
    assert (vit["resized"], vit["values resampled"], vit["windows"]) == ("table geometric", "588", "global")
    assert float(vit["GFLOPs"]) > float(found["vitrel_vit_n8_table", "32x32", "none"]["GFLOPs"]) > 0
    foreign = found["foreign", "48x40", "none"]
    assert (foreign["resized"], foreign["unseen"], foreign["values resampled"]) == ("pos_embed bicubic", "-", "768")
    assert "12 rows of 12 images each, shifted by 0, 4 px at the training size; 0 of them are in " in text


def test_rows_that_are_done_are_marked(trained, noise, tmp_path):
    models, sweep = [trained("vitrel_vit_n8_none")], Sweep("noise", ((48, 48),), device="cpu", n=3, attention_n=0)
    run_sweep(models, sweep, tmp_path)
    written = {path: path.read_bytes() for path in Path(tmp_path).rglob("*") if path.is_file()}
    more = Sweep("noise", ((48, 48), (64, 64)), device="cpu", n=3, attention_n=0)
    before = noise.decoded
    text = describe_plan(models, more, tmp_path)
    assert [row["done"] for row in cells(text)] == ["yes"] * 4 + [""] * 2 and "; 4 of them are in" in text
    assert noise.decoded == before
    assert {path: path.read_bytes() for path in Path(tmp_path).rglob("*") if path.is_file()} == written
    assert "; 0 of them" in describe_plan(models, Sweep("noise", ((48, 48),), device="cpu", n=4, attention_n=0), tmp_path)


def test_classes_that_do_not_fit_are_told_before_it_runs(noise, tmp_path):
    model = trained_model(timm.create_model("resnet10t", num_classes=5).eval(), img_size=(32, 32))
    with pytest.raises(ValueError, match="resnet10t has 5 outputs, but noise has 3 classes: say which output is which class"):
        describe_plan([model], Sweep("noise", ((64, 64),), device="cpu"), tmp_path)


def test_a_size_that_a_model_refuses_is_told_before_anything_runs(noise, tmp_path):
    ours_first = trained_model(timm.create_model("resnet10t", num_classes=3).eval(), "first", img_size=(32, 32))
    fixed = timm.create_model("mixer_s32_224", num_classes=3).eval()  # its layers mix a fixed number of tokens
    sweep = Sweep("noise", ((64, 64),), device="cpu", attention_n=0)
    models = [ours_first, trained_model(fixed, "mixer")]
    for run in (lambda: describe_plan(models, sweep, tmp_path), lambda: list(evaluate_rows(models, sweep))):
        with pytest.raises(ValueError, match="does not take 64x64 pixels"):
            run()
    assert noise.decoded == 0
