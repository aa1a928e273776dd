"""`vitrel predict`: rows, probabilities against the model itself, names, bad images, what is refused."""

import csv

import pytest
import timm
import torch
from PIL import Image

import vitrel
from helpers.pictures import write_classes
from vitrel import cli
from vitrel.data import Prepare
from vitrel.models.segmenter import Segmenter

NAMES = ["rose", "tulip", "aster"]
SMALL = {"depth": 2, "embed_dim": 32, "num_heads": 2}


@pytest.fixture
def model():
    torch.manual_seed(0)
    made = timm.create_model("vitrel_vit_n8_table", img_size=32, num_classes=3, **SMALL).eval()
    torch.nn.init.normal_(made.head.weight)
    made.pretrained_cfg["label_names"] = NAMES
    return made


@pytest.fixture
def pictures(tmp_path, monkeypatch):
    """Eight pictures of 40x56 px in two folders, one of which cannot be read."""
    monkeypatch.chdir(tmp_path)
    write_classes(tmp_path / "pictures", ("a", "b"), [f"{i}.png" for i in range(4)], (40, 56))
    (tmp_path / "pictures" / "b" / "1.png").write_text("no picture")
    (tmp_path / "pictures" / ".hidden.png").write_text("")
    return tmp_path / "pictures"


def lines(path="predictions.csv"):
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.reader(file))


def probabilities(model, path, size=(32, 32), answer=torch.softmax):
    cfg = model.pretrained_cfg
    prepare = Prepare(size, cfg["mean"], cfg["std"], crop_pct=cfg["crop_pct"], interpolation=cfg["interpolation"])
    with torch.no_grad():
        return answer(model(prepare(Image.open(path).convert("RGB"))[None])[0], 0)


def test_rows_have_the_best_classes_with_their_probabilities(model, pictures, capsys):
    vitrel.save(model, "model.safetensors")
    cli.main(["predict", "model.safetensors", "pictures", "pictures/a/0.png", "--top", "2", "--batch-size", "3"])
    header, *found = lines()
    assert header == ["path", "label", "probability", "label_2", "probability_2"]
    names = [f"pictures/{kind}/{i}.png" for kind in "ab" for i in range(4)]
    assert [row[0] for row in found] == [name for name in names if name != "pictures/b/1.png"]
    for path, *cells in found:
        best = probabilities(model, path).topk(2)
        assert cells[::2] == [NAMES[at] for at in best.indices]
        assert [float(cell) for cell in cells[1::2]] == pytest.approx(best.values.tolist(), abs=1e-5)
    out = capsys.readouterr()
    assert "images: 7, at 32x32; classes: 3; written to predictions.csv" in out.out
    assert "left out, because they could not be read, 1: pictures/b/1.png" in out.err


def test_another_size_is_that_of_an_evaluation_and_a_file_needs_no_suffix(model, pictures):
    vitrel.save(model, "model.safetensors")
    (pictures / "a" / "0.png").rename(pictures / "upload")
    cli.main(["predict", "model.safetensors", "pictures/upload", "--size", "48x64", "--out", "one.csv"])
    [_, [path, *cells]] = lines("one.csv")
    best = probabilities(model, path, (48, 64)).topk(3)
    assert cells[::2] == [NAMES[at] for at in best.indices]
    assert [float(cell) for cell in cells[1::2]] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_a_model_of_native_shape_gets_whole_images_within_its_tokens(model, pictures, capsys):
    model.train_sizes = ("24t",)
    vitrel.save(model, "model.safetensors")
    cli.main(["predict", "model.safetensors", "pictures/b", "--top", "1"])
    assert [row[0][-5] for row in lines()[1:]] == ["0", "2", "3"] and "images: 3, at 24t" in capsys.readouterr().out
    for path, name, value in lines()[1:]:
        cfg = model.pretrained_cfg
        prepare = Prepare(
            (32, 48), cfg["mean"], cfg["std"], crop_pct=1.0, interpolation=cfg["interpolation"], protocol="native"
        )
        with torch.no_grad():
            best = model(prepare(Image.open(path))[None])[0].softmax(0).max(0)
        assert (name, float(value)) == (NAMES[best.indices], pytest.approx(float(best.values), abs=1e-5))


def test_several_labels_have_a_column_of_every_class(model, pictures):
    model.task = "multilabel"
    vitrel.save(model, "model.safetensors")
    cli.main(["predict", "model.safetensors", "pictures/a"])
    header, *found = lines()
    assert header == ["path", "label", *NAMES] and len(found) == 4
    for path, label, *cells in found:
        want = probabilities(model, path, answer=lambda logits, _: logits.sigmoid())
        assert [float(cell) for cell in cells] == pytest.approx(want.tolist(), abs=1e-5)
        assert label == ";".join(name for name, p in zip(NAMES, want, strict=True) if p >= 0.5)


def test_a_class_named_as_a_column_has_another_one(model, pictures):
    model.task, model.pretrained_cfg["label_names"] = "multilabel", ["path", "rose", "label"]
    vitrel.save(model, "model.safetensors")
    cli.main(["predict", "model.safetensors", "pictures/a"])
    assert lines()[0] == ["path", "label", "class path", "rose", "class label"]


def test_imagenet_heads_are_described_and_others_numbered(pictures):
    for classes, want in ((1000, "tench, Tinca tinca"), (3, "0")):
        model = timm.create_model("vitrel_vit_n8_none", img_size=32, num_classes=classes, **SMALL)
        with torch.no_grad():
            model.head.bias[0] = 100
        vitrel.save(model, "model.safetensors")
        cli.main(["predict", "model.safetensors", "pictures/a/0.png"])
        assert lines()[1][1:3] == [want, "1"]


def ended(capsys, *argv):
    with pytest.raises(SystemExit) as stop:
        cli.main(["predict", "model.safetensors", *argv])
    assert stop.value.code == 1 or isinstance(stop.value.code, str)
    return f"{stop.value.code} {capsys.readouterr().err}"


def test_what_cannot_be_predicted_is_named(model, pictures, capsys):
    vitrel.save(model, "model.safetensors")
    assert "no folder and no file nowhere" in ended(capsys, "nowhere")
    assert "none of the 1 images can be read: pictures/b/1.png" in ended(capsys, "pictures/b/1.png")
    (pictures / "empty").mkdir()
    assert "folders without images: pictures/empty; add .jpg" in ended(capsys, "pictures/empty")
    assert "no folder missing for out.csv" in ended(capsys, "pictures", "--out", "missing/out.csv")
    assert "pictures is a folder: name a file" in ended(capsys, "pictures/a", "--out", "pictures")
    vitrel.save(Segmenter(model, 3, "linear"), "model.safetensors")
    assert "has the task segmentation: vitrel predict writes the classes of whole images" in ended(capsys, "pictures")
