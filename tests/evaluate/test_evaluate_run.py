"""A whole evaluation: a folder that grows, rows that are not made again, a dry run that costs nothing, a DataFrame."""

import copy
import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import timm
import torch
from PIL import Image
from torch.utils.data import Dataset

import vitrel.evaluate
from helpers.locks import locked
from vitrel.common import lock
from vitrel.data import Prepare
from vitrel.evaluate import at_sizes, run
from vitrel.evaluate.checkpoint import trained_model
from vitrel.evaluate.results import table
from vitrel.evaluate.results.advice import judge
from vitrel.evaluate.results.aggregate import read_scores
from vitrel.evaluate.results.table import (
    line_key,
    read_csv,
    read_folder,
    read_predictions,
    read_translation,
    row_key,
    write_folder,
)
from vitrel.evaluate.results.text import summary
from vitrel.evaluate.run import HEAD, describe_trials, evaluate_rows, run_sweep
from vitrel.evaluate.sweep import Sweep

pytestmark = pytest.mark.usefixtures("brief_evaluations")
SIZES = ((32, 32), (64, 64), (32, 48))


def small_sweep(**given):
    return Sweep(**{"data": "noise", "sizes": SIZES, "batch_size": 5, "device": "cpu", "attention_n": 0} | given)


def test_rows_of_the_same_weights_are_not_made_again(trained, noise, tmp_path):
    model = trained("vitrel_vit_n8_none")
    first = list(evaluate_rows([model], small_sweep()))
    write_folder(first, tmp_path)
    done, before = read_folder(tmp_path), noise.decoded
    shares = []
    again = list(evaluate_rows([model], small_sweep(), done, lambda trial, share: shares.append(share)))
    assert noise.decoded == before and [row_key(one.row) for one in again] == [row_key(one.row) for one in done]
    for one, other in zip(again, first, strict=True):
        assert one.predicted.arrays["predicted"].tolist() == other.predicted.arrays["predicted"].tolist()
    assert sum(shares) == len(again) == 6
    model.model.head.bias.data[0] += 1
    list(evaluate_rows([model], small_sweep(), done))
    assert noise.decoded == before + 6 * 12
    list(evaluate_rows([model], small_sweep(data_seed=1), done))
    assert noise.decoded == before + 12 * 12


@pytest.mark.parametrize("lacking", ["predictions", "translations"])
def test_a_row_that_lacks_what_is_asked_for_now_is_made_again(trained, noise, lacking):
    """With an empty column, one whose lines were lost, or one whose content was not translated as far."""
    models, one = [trained("vitrel_vit_n8_none")], dict(sizes=((32, 32),), protocols=("scale",))
    [done] = evaluate_rows(models, small_sweep(**one, translations=(0, 4)))
    before = noise.decoded
    list(evaluate_rows(models, small_sweep(**one, translations=(4,)), [done]))
    assert noise.decoded == before
    if lacking == "predictions":
        done = done._replace(predicted=None)
    list(evaluate_rows(models, small_sweep(**one, translations=(4, 8) if lacking == "translations" else (4,)), [done]))
    assert noise.decoded > before


def test_progress_adds_up(trained, noise, rows_of):
    shares = []
    rows_of([trained("vitrel_vit_n8_none")], small_sweep(), advance=lambda trial, share: shares.append(share))
    assert len(shares) == 6 * 3 and sum(shares) == pytest.approx(6)


def sweep(*sizes, **given):
    """Sizes are sides of squares."""
    how = {"data": "noise", "protocols": ("scale",), "batch_size": 5, "device": "cpu", "attention_n": 0, "border_leak": False}
    return Sweep(sizes=tuple((size, size) for size in sizes), **how | given)


def sizes_of(folder):
    return {row["img_size"] for row in read_csv(folder / "results.csv")}


def files_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.fixture
def model(trained):
    return trained("vitrel_vit_n8_none")


def test_a_second_evaluation_adds_its_rows(model, noise, tmp_path):
    first = run_sweep([model], sweep(48, translations=(0, 4)), tmp_path)
    noise.decoded = 0
    rows = run_sweep([model], sweep(64, 24), tmp_path)
    assert noise.decoded == 2 * 12  # what was there is not made again
    assert sizes_of(tmp_path) == {"32x32", "48x48", "64x64", "24x24"} == {row["img_size"] for row in rows}
    found = {line_key(one.row): one for one in read_folder(tmp_path)}
    assert len(found) == 4 and all(one.predicted is not None for one in found.values())
    for row in first:
        assert found[line_key(row)].row["nll"] == row["nll"]
    assert [line["translation"] for line in read_translation(tmp_path)] == [0, 4]
    text = (tmp_path / "table.md").read_text("utf-8")
    assert all(size in text for size in ("24x24", "48x48", "64x64"))
    assert not list(tmp_path.glob("replaced*"))


def test_weights_are_hashed_once_before_the_rows(model, noise, tmp_path, monkeypatch):
    hashed, state_hash = [], run.state_hash
    monkeypatch.setattr(run, "state_hash", lambda net: hashed.append(net) or state_hash(net))
    run_sweep([model], sweep(48), tmp_path)
    at_sizes(model.model, "noise", [48], **HOW)
    assert hashed == [model.model] * 2


def other_weights(model):
    model = replace(model, model=copy.deepcopy(model.model))
    model.model.head.bias.data[0] += 1
    return model


@pytest.mark.parametrize(
    ("change", "given", "reported"),
    [
        (other_weights, {}, "other weights of vitrel_vit_n8_none"),
        (lambda model: replace(other_weights(model), seed=1), {}, "other weights"),  # would count as a second seed
        (
            lambda model: replace(model, img_size=(64, 64), train_sizes=()),
            {},
            "train_size of vitrel_vit_n8_none: 32x32 there, 64x64 now",
        ),
        (lambda model: replace(model, mean=(0.4,) * 3), {}, "mean of vitrel_vit_n8_none: 0.5 0.5 0.5 there, 0.4 0.4 0.4 now"),
        (lambda model: replace(model, restrict=True), {}, "order there, order, restricted now"),
        (lambda model: model, {"n": 7}, "n_asked: none there, 7 now"),
        (lambda model: model, {"data": "others"}, "data: noise there, others now"),
        (lambda model: model, {"data_seed": 2}, "data_seed: 0 there, 2 now"),
        (lambda model: replace(other_weights(model), label="new"), {"n": 7}, "n_asked: none there, 7 now"),
    ],
)
def test_what_may_not_stand_in_one_table_is_refused_before_anything_runs(model, noise, tmp_path, change, given, reported):
    run_sweep([model], sweep(48), tmp_path)
    before, noise.decoded = files_of(tmp_path), 0
    with pytest.raises(ValueError, match=r"--out.*--replace") as caught:
        run_sweep([change(model)], sweep(24, **given), tmp_path)
    assert reported in str(caught.value) and str(tmp_path) in str(caught.value) and "Nothing was computed" in str(caught.value)
    assert noise.decoded == 0 and files_of(tmp_path) == before
    assert reported in describe_trials([change(model)], sweep(24, **given), tmp_path)


@pytest.fixture
def pictures(tmp_path):
    """A folder of 3 classes with 2 images each."""
    for label, name in enumerate(("above", "left", "right")):
        (tmp_path / "data" / "val" / name).mkdir(parents=True)
        for i in range(2):
            pixels = np.full((40, 48, 3), 80 * label + 10 * i, np.uint8)
            Image.fromarray(pixels).save(tmp_path / "data" / "val" / name / f"{i}.png")
    return tmp_path / "data"


def test_data_that_changed_are_noticed(trained, pictures, tmp_path):
    """A changed file, another one, another label; where the folder lies and how many images a batch has are no matter."""
    model, out = trained("vitrel_vit_n8_none", classes=("above", "left", "right")), tmp_path / "out"
    first = run_sweep([model], sweep(48, data=str(pictures)), out)
    predictions = read_predictions(out)
    assert predictions.images.names[:3] == ["above/0.png", "above/1.png", "left/0.png"]
    assert next(iter(predictions.rows.values())).arrays["labels"].tolist() == [0, 0, 1, 1, 2, 2]
    assert {len(row["images"]) for row in first} == {64}
    moved = pictures.rename(tmp_path / "moved")
    same = run_sweep([model], sweep(48, data=str(moved), batch_size=2), out)
    assert [row["infer_samples_per_sec"] for row in same] == [row["infer_samples_per_sec"] for row in first]
    moved.rename(pictures)
    file, requested = pictures / "val" / "left" / "0.png", sweep(48, 24, data=str(pictures))
    before = file.read_bytes()

    def reported():
        with pytest.raises(ValueError, match=f"the data changed: .*{pictures} differ") as caught:
            run_sweep([model], requested, out)
        return "Nothing was computed" in str(caught.value)

    Image.fromarray(np.full((40, 48, 3), 81, np.uint8)).save(file)
    assert file.stat().st_size == len(before) and reported()  # a file of the same size
    file.rename(pictures / "val" / "right" / "9.png")
    assert reported()
    (pictures / "val" / "right" / "9.png").unlink()
    file.write_bytes(before)
    assert len(run_sweep([model], requested, out)) == 3


@pytest.mark.slow
def test_what_is_replaced_is_moved_aside_whole_and_told(model, noise, tmp_path, capsys):
    run_sweep([model], sweep(48, 64, translations=(0,)), tmp_path)
    first = read_csv(tmp_path / "results.csv")
    (tmp_path / "last.ckpt").write_text("not of the evaluation")
    capsys.readouterr()
    changed, requested = other_weights(model), sweep(48, n=7)
    assert "3 other rows there would be moved" in describe_trials([changed], requested, tmp_path, replace=True)
    rows = run_sweep([changed], requested, tmp_path, replace=True)
    printed = capsys.readouterr().out.replace("\n", " ")
    assert "3 of the 3 rows" in printed and "other weights" in printed and str(tmp_path / "replaced-1") in printed
    assert len(rows) == 2 and {row["n"] for row in rows} == {7} and sizes_of(tmp_path) == {"32x32", "48x48"}
    aside = tmp_path / "replaced-1"
    assert [row["nll"] for row in read_csv(aside / "results.csv")] == [row["nll"] for row in first]
    assert len(read_predictions(aside).rows) == 3 and len(read_translation(aside)) == 1
    assert len(read_predictions(tmp_path).images.names) == 7 and len(read_predictions(tmp_path).rows) == 2
    assert (aside / "plots" / "accuracy.png").exists() and (aside / "table.md").exists()
    assert (tmp_path / "last.ckpt").exists()
    noise.decoded = 0
    run_sweep([changed], requested, tmp_path, replace=True)  # the same again moves nothing
    assert (
        noise.decoded == 0 and not (tmp_path / "replaced-2").exists() and "former files are in" not in capsys.readouterr().out
    )
    run_sweep([changed], sweep(24, n=7), tmp_path, replace=True)
    assert sizes_of(tmp_path) == {"32x32", "24x24"} and sizes_of(tmp_path / "replaced-2") == {"32x32", "48x48"}
    assert noise.decoded == 7  # the row of the training size stayed


@pytest.mark.slow
def test_pictures_of_rows_that_stay_stay(trained, noise, tmp_path):
    models = [trained("vitrel_vit_n8_table", label=label) for label in ("a", "b")]
    requested = dict(policies=("clip",), n=4, report=True)
    run_sweep(models, sweep(48, **requested), tmp_path)
    run_sweep(models[:1], sweep(24, **requested), tmp_path)
    stored = json.loads(gzip.decompress((tmp_path / "pictures.json.gz").read_bytes()))
    found = {one["label"]: one for one in stored["models"]}
    for kind in ("lattices", "maps"):
        assert {item["size"] for item in found["a"][kind]} == {"32x32", "48x48", "24x24"}, kind
        assert {item["size"] for item in found["b"][kind]} == {"32x32", "48x48"}, kind
    keys = {key for one in stored["models"] for item in one["maps"] for key in item["pictures"]}
    keys |= {item["values"] for one in stored["models"] for kind in ("lattices", "similar") for item in one[kind]}
    assert keys | {item["picture"] for item in stored["seen"]} == set(stored["blobs"])
    # pictures alone, of whatever weights, are not taken for those of new rows
    for path in tmp_path.glob("*.csv"):
        path.unlink()
    run_sweep(models[:1], sweep(24, **requested), tmp_path)
    stored = json.loads(gzip.decompress((tmp_path / "pictures.json.gz").read_bytes()))
    assert [one["label"] for one in stored["models"]] == ["a"]
    assert {item["size"] for item in stored["models"][0]["lattices"]} == {"32x32", "24x24"}


def test_two_evaluations_at_once_are_refused(model, noise, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE", 0.0)
    with locked(tmp_path), pytest.raises(BlockingIOError, match="another process is writing into"):
        run_sweep([model], sweep(48), tmp_path)
    assert len(run_sweep([model], sweep(48), tmp_path)) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("a.jpg"), RuntimeError("CUDA out of memory. Tried")])
def test_what_stops_it_leaves_every_finished_row_and_says_how_many(model, noise, tmp_path, monkeypatch, error):
    """Also those that were not written yet, since writing takes a part of the time alone."""
    read, left = noise.item, [12 * 3]

    def item(self, index):
        left[0] -= 1
        if left[0] < 0:
            raise error
        return read(self, index)

    monkeypatch.setattr(noise, "item", item)
    monkeypatch.setattr(table, "WRITE_PAUSE", 1e9)
    kind = MemoryError if isinstance(error, RuntimeError) else type(error)
    with pytest.raises(kind) as caught:
        run_sweep([model], sweep(48, 64, 24, batch_size=1), tmp_path)
    assert len(read_csv(tmp_path / "results.csv")) == 3
    [note] = caught.value.__notes__
    assert note.startswith("3 rows saved in") and "the same command resumes" in note
    assert not list(tmp_path.glob("*.part")) + list(tmp_path.glob(".*.part"))


def test_a_full_disk_names_the_file_and_keeps_the_rows_before(model, noise, tmp_path, monkeypatch):
    write, left = pd.DataFrame.to_csv, [2]

    def full(self, path, **how):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        return write(self, path, **how)

    monkeypatch.setattr(pd.DataFrame, "to_csv", full)
    monkeypatch.setattr(table, "WRITE_PAUSE", 0.0)
    with pytest.raises(OSError, match=r"No space left on device: '.*\.csv'") as caught:
        run_sweep([model], sweep(48, 64, 24), tmp_path)
    assert str(tmp_path) in caught.value.filename and "2 rows saved" in caught.value.__notes__[0]
    monkeypatch.undo()
    assert len(read_csv(tmp_path / "results.csv")) == 2 and not list(tmp_path.glob(".*.part"))


def test_labels_and_classes_of_any_text_come_back(model, noise, tmp_path, monkeypatch):
    formula = replace(model, label='=HYPERLINK("x")', interpolation="-1+1")
    monkeypatch.setattr(noise, "__init__", lambda self, size, n=None: vars(self).update(size=size, n=12, classes=list("=-@")))
    formula = replace(formula, classes=tuple("=-@"))
    run_sweep([formula], sweep(48, translations=(0,)), tmp_path)
    for name in ("results", "translation"):
        frame = pd.read_csv(tmp_path / f"{name}.csv", dtype=str, keep_default_na=False)
        assert set(frame["label"]) == {formula.label}
    noise.decoded = 0
    rows = run_sweep([formula], sweep(48, translations=(0,)), tmp_path)
    assert noise.decoded == 0 and {row["label"] for row in rows} == {formula.label}
    assert set(read_predictions(tmp_path).images.classes) == set("=-@")


@pytest.mark.slow
def test_names_that_are_no_utf8_are_written_escaped(model, noise, tmp_path, monkeypatch):
    bad = b"caf\xe9".decode("utf-8", "surrogateescape")
    names = [bad, "b", "c"]
    monkeypatch.setattr(noise, "__init__", lambda self, size, n=None: vars(self).update(size=size, n=12, classes=names))
    named = replace(model, label=f"model ({bad})", classes=tuple(names))
    run_sweep([named], sweep(48, data=bad, report=True), tmp_path / bad, bad)
    assert "caf\\xe9" in read_predictions(tmp_path / bad).images.classes
    assert "caf\\xe9" in (tmp_path / bad / "table.md").read_text("utf-8")
    noise.decoded = 0
    rows = run_sweep([named], sweep(48, 24, data=bad), tmp_path / bad, bad)
    assert noise.decoded == 12 and {row["label"] for row in rows} == {"model (caf\\xe9)"}
    assert torch.isfinite(torch.tensor([row["nll"] for row in rows])).all()


@pytest.mark.slow
def test_an_interrupted_sweep_keeps_its_rows_and_goes_on(trained, noise, tmp_path, monkeypatch, whole_evaluations):
    models, sweep = [trained("vitrel_vit_n8_table")], Sweep("noise", ((32, 48),), device="cpu", attention_n=0)
    monkeypatch.setattr(noise, "item", _fails_after(noise.item, 12 * 3))
    with pytest.raises(KeyboardInterrupt):
        run_sweep(models, sweep, tmp_path)
    kept = read_csv(tmp_path / "results.csv")
    assert len(kept) == 2 + 3
    monkeypatch.undo()
    before = noise.decoded
    monkeypatch.setattr("vitrel.evaluate.prepare.create_dataset", lambda data, split, size, **how: noise(size))
    rows = run_sweep(models, sweep, tmp_path, "noise")
    assert noise.decoded - before == 12 and len(rows) == 8
    assert [row["nll"] for row in rows[:5]] == [row["nll"] for row in kept]
    assert len(read_csv(tmp_path / "results.csv")) == 8
    text = (tmp_path / "table.md").read_text("utf-8")
    assert text.startswith("# noise\n") and summary(judge(rows, read_scores(tmp_path))) in text
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == ["accuracy.png", "throughput.png", "tradeoff.png"]


def _fails_after(method, calls):
    left = [calls]

    def limited(self, index):
        left[0] -= 1
        if left[0] < 0:
            raise KeyboardInterrupt
        return method(self, index)

    return limited


def cells(text):
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("|")]
    assert lines[0] == list(HEAD)
    return [dict(zip(HEAD, line, strict=True)) for line in lines[2:]]


@pytest.fixture
def models(trained):
    small = dict(embed_dim=48, depth=1, num_heads=3, img_size=32, patch_size=8, num_classes=3)
    foreign = trained_model(timm.create_model("vit_tiny_patch16_224", **small).eval(), "foreign")
    return [trained("vitrel_vit_n8_table"), trained("vitrel_swin_n", model_args={"depths": (1, 1, 1)}), foreign]


def test_rows_that_are_done_are_marked(trained, noise, tmp_path):
    models, sweep = [trained("vitrel_vit_n8_none")], Sweep("noise", ((48, 48),), device="cpu", n=3, attention_n=0)
    run_sweep(models, sweep, tmp_path)
    written = {path: path.read_bytes() for path in Path(tmp_path).rglob("*") if path.is_file()}
    more = Sweep("noise", ((48, 48), (64, 64)), device="cpu", n=3, attention_n=0)
    before = noise.decoded
    text = describe_trials(models, more, tmp_path)
    assert [row["done"] for row in cells(text)] == ["yes"] * 4 + [""] * 2 and "; 4 of them are in" in text
    assert noise.decoded == before
    assert {path: path.read_bytes() for path in Path(tmp_path).rglob("*") if path.is_file()} == written
    assert "; 0 of them" in describe_trials(models, Sweep("noise", ((48, 48),), device="cpu", n=4, attention_n=0), tmp_path)


def test_classes_that_do_not_fit_are_told_before_it_runs(noise, tmp_path):
    model = trained_model(timm.create_model("resnet10t", num_classes=5).eval(), img_size=(32, 32))
    with pytest.raises(ValueError, match="resnet10t has 5 outputs, but noise has 3 classes"):
        describe_trials([model], Sweep("noise", ((64, 64),), device="cpu"), tmp_path)


def test_a_size_that_a_model_refuses_is_told_before_anything_runs(noise, tmp_path):
    ours_first = trained_model(timm.create_model("resnet10t", num_classes=3).eval(), "first", img_size=(32, 32))
    fixed = timm.create_model("mixer_s32_224", num_classes=3).eval()  # its layers mix a fixed number of tokens
    sweep = Sweep("noise", ((64, 64),), device="cpu", attention_n=0)
    models = [ours_first, trained_model(fixed, "mixer")]
    for evaluated in (lambda: describe_trials(models, sweep, tmp_path), lambda: list(evaluate_rows(models, sweep))):
        with pytest.raises(ValueError, match="does not take 64x64 pixels"):
            evaluated()
    assert noise.decoded == 0


HOW = dict(device="cpu", attention_n=0, border_leak=False)


class Pictures(Dataset):
    """7 images of 40x52 pixels as uint8 tensors or PIL images, labeled 0 to 2."""

    classes = ("left", "right", "above")

    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 7

    def __getitem__(self, index):
        pixels = np.random.default_rng(index).integers(0, 256, (40, 52, 3), dtype=np.uint8)
        if self.kind == "pil":
            return Image.fromarray(pixels), index % 3
        tensor = torch.from_numpy(pixels).permute(2, 0, 1)
        return (tensor if self.kind == "uint8" else tensor.float()), index % 3


@pytest.fixture
def plain_model():
    torch.manual_seed(0)
    return timm.create_model("vitrel_vit_n8_table", num_classes=3, img_size=32)


@pytest.mark.parametrize("mode", ["center", "squash", "border"])
def test_images_are_resized_in_the_crop_mode_of_the_model_and_rows_say_so(plain_model, mode):
    """As timm's own transform does it; the native protocol has no crop, and so no crop mode."""
    cfg = {"crop_mode": mode, "crop_pct": 0.9, "mean": (0.5, 0.4, 0.3), "std": (0.5,) * 3, "input_size": (3, 32, 32)}
    plain_model.eval().pretrained_cfg.update(cfg)
    how = {"protocols": ("scale", "native"), "policies": ("clip",)}
    frame = at_sizes(plain_model, Pictures("pil"), [32], **how, **HOW)
    assert frame["crop_mode"].tolist() == [mode, ""]
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(plain_model), is_training=False)
    with torch.no_grad():
        logits = plain_model(torch.stack([transform(Pictures("pil")[i][0]) for i in range(7)]))
    expected = torch.nn.functional.cross_entropy(logits, torch.arange(7) % 3).item()
    assert frame["nll"][0] == pytest.approx(expected, abs=1e-5)
    chosen = at_sizes(plain_model, Pictures("pil"), [32], preprocessing={"crop_mode": "squash"}, **how, **HOW)
    assert chosen["crop_mode"][0] == "squash" and (chosen["nll"][0] == frame["nll"][0]) == (mode == "squash")
    assert chosen["nll"][1] == frame["nll"][1]


@pytest.mark.parametrize("kind", ["uint8", "pil"])
def test_a_data_set_is_prepared_as_a_folder_is(plain_model, kind):
    frame = at_sizes(plain_model, Pictures(kind), [(32, 48)], policies=("clip",), preprocessing={"crop_pct": 0.9}, **HOW)
    assert len(frame) == 4 and set(frame["protocol"]) == {"scale", "canvas"} and set(frame["crop_pct"]) == {0.9}
    assert set(frame["decoder"]) == {"the data set's own"} and set(frame["data"]) == {"Pictures"}
    row = frame[(frame["img_size"] == "32x48") & (frame["protocol"] == "canvas")].iloc[0]
    prepare = Prepare((32, 48), (0.5,) * 3, (0.5,) * 3, 0.9, "bicubic", "canvas", (32, 32))
    images = torch.stack([prepare(Pictures("uint8")[i][0]) for i in range(7)])
    labels = torch.arange(7) % 3
    plain_model.eval().set_position_options(policy="clip")
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(plain_model(images), labels).item()
    assert row["nll"] == pytest.approx(expected, abs=1e-5)


def test_a_function_from_size_to_data_is_taken_as_it_is(plain_model):
    requested = []

    def data(size):
        requested.append(size)
        return [(torch.full((3, *size), 0.1 * i), i % 3) for i in range(5)]

    frame = at_sizes(plain_model, data, [24, 32], **HOW)
    assert frame["img_size"].tolist() == ["32x32", "24x24"] and set(requested) == {(32, 32), (24, 24)}
    assert set(frame["n"]) == {5} and set(frame["data"]) == {"function"}
    with pytest.raises(ValueError, match=r"a function from size to data .*protocols=\('scale',\)"):
        at_sizes(plain_model, data, [24], protocols=("scale", "canvas"), **HOW)


def test_the_model_is_left_as_it_was(plain_model):
    plain_model.train()
    plain_model.head.eval()
    at_sizes(plain_model, Pictures("pil"), [32], n=3, **HOW)
    assert plain_model.training and plain_model.blocks[0].training and not plain_model.head.training
    assert {part.policy for part in plain_model.modules() if getattr(part, "policy", "")} == {"geometric"}


def test_checkpoints_and_timm_models(checkpoint, noise):
    path = checkpoint()
    frame = at_sizes(path, "noise", [(32, 48)], n=4, label="run", **HOW)
    assert set(frame["label"]) == {"run"} and set(frame["model"]) == {"vitrel_vit_n8_table"} and set(frame["seed"]) == {7}
    with pytest.raises(ValueError, match="img_size, preprocessing and class_indices are for plain models"):
        at_sizes(path, "noise", [32], img_size=(32, 32), **HOW)
    closed = at_sizes(path, "noise", [(32, 48)], n=4, restrict=True, **HOW)
    assert set(closed["class_map"]) == {"order, restricted"}
    resnet = timm.create_model("resnet10t", num_classes=9)
    frame = at_sizes(resnet, "noise", [64], class_indices={"left": 8, "right": 2, "above": 0}, img_size=(32, 32), **HOW)
    assert frame["img_size"].unique().tolist() == ["32x32", "64x64"] and set(frame["encoding"]) == {"timm"}
    frame = at_sizes(
        trained_model(resnet, "r", outputs=dict(left=8, right=2, above=0), img_size=(32, 32)), "noise", [32], **HOW
    )
    assert set(frame["label"]) == {"r"}


def test_mistakes_are_named(plain_model):
    with pytest.raises(ValueError, match=r"images of torch\.float32: give uint8 "):
        at_sizes(plain_model, Pictures("float"), [32], **HOW)
    with pytest.raises(ValueError, match="'big' is not an image size"):
        at_sizes(plain_model, Pictures("pil"), ["big"], **HOW)
    with pytest.raises(ValueError, match="vitrel_vit_n8_table has 3 outputs, but shapes has 4 classes"):
        at_sizes(plain_model, "shapes", [32], n=2, **HOW)
    assert vitrel.evaluate.at_sizes is at_sizes


def test_a_name_that_is_no_part_of_the_package():
    with pytest.raises(AttributeError, match="module 'vitrel' has no attribute 'nothing'"):
        vitrel.nothing  # noqa: B018
