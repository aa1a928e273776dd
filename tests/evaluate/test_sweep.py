"""A whole evaluation in one folder: a second one adds to it, refuses what does not belong, or moves it aside; what stops it."""

import copy
import gzip
import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
import torch

from vitrel.evaluate import folder as folder_module
from vitrel.evaluate.dry_run import describe_plan
from vitrel.evaluate.folder import only_writer, read_folder, read_lines
from vitrel.evaluate.report import read_csv
from vitrel.evaluate.rows import line_key
from vitrel.evaluate.settings import Sweep
from vitrel.evaluate.sweep import run_sweep
from vitrel.files import guarded


def sweep(*sizes, **given):
    """Sizes are sides of squares."""
    how = {"data": "noise", "protocols": ("scale",), "batch_size": 5, "device": "cpu", "attention_n": 0, "border_leak": False}
    return Sweep(sizes=tuple((size, size) for size in sizes), **how | given)


def sizes_of(folder, label=None):
    return {row["img_size"] for row in read_csv(folder / "results.csv") if label in (None, row["label"])}


def files_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


@pytest.fixture
def model(trained):
    return trained("vitrel_vit_n8_none")


def test_a_second_evaluation_adds_its_rows(model, noise, tmp_path):
    first = run_sweep([model], sweep(48, shifts=(0, 4)), tmp_path)
    noise.decoded = 0
    rows = run_sweep([model], sweep(64, 24), tmp_path)
    assert noise.decoded == 2 * 12  # what was there is not made again
    assert sizes_of(tmp_path) == {"32x32", "48x48", "64x64", "24x24"} == {row["img_size"] for row in rows}
    found = {line_key(one.row): one for one in read_folder(tmp_path)}
    assert len(found) == 4 and all(len(one.per_class) == 3 for one in found.values())
    for row in first:
        assert found[line_key(row)].row["nll"] == row["nll"]
    assert [line["shift"] for line in read_lines(tmp_path, "translation")] == [0, 4]
    text = (tmp_path / "table.md").read_text("utf-8")
    assert all(size in text for size in ("24x24", "48x48", "64x64")) and "any of 4 sizes" in text
    assert not list(tmp_path.glob("replaced*"))


def test_further_shifts_and_models_are_added(model, trained, noise, tmp_path):
    run_sweep([model], sweep(48, shifts=(4, 0)), tmp_path)
    run_sweep([model], sweep(48, shifts=(8, 0)), tmp_path)
    assert [line["shift"] for line in read_lines(tmp_path, "translation")] == [0, 4, 8]
    noise.decoded = 0
    rows = run_sweep([trained("vitrel_vit_n8_table", label="other")], sweep(48, policies=("clip",)), tmp_path)
    assert noise.decoded == 2 * 12 and [row["label"] for row in rows] == ["vitrel_vit_n8_none"] * 2 + ["other"] * 2
    assert len(read_lines(tmp_path, "translation")) == 3 and sizes_of(tmp_path, "vitrel_vit_n8_none") == {"32x32", "48x48"}


def other_weights(model):
    model = replace(model, model=copy.deepcopy(model.model))
    model.model.head.bias.data[0] += 1
    return model


@pytest.mark.parametrize(
    ("change", "given", "told"),
    [
        (other_weights, {}, "other weights of vitrel_vit_n8_none"),
        (lambda model: replace(other_weights(model), seed=1), {}, "other weights"),  # would count as a second seed
        (lambda model: replace(model, img_size=(64, 64)), {}, "train_size of vitrel_vit_n8_none: 32x32 there, 64x64 now"),
        (lambda model: replace(model, mean=(0.4,) * 3), {}, "mean of vitrel_vit_n8_none: 0.5 0.5 0.5 there, 0.4 0.4 0.4 now"),
        (lambda model: replace(model, restrict=True), {}, "order there, order, restricted now"),
        (lambda model: model, {"n": 7}, "n_asked: none there, 7 now"),
        (lambda model: model, {"data": "others"}, "data: noise there, others now"),
        (lambda model: model, {"data_seed": 2}, "data_seed: 0 there, 2 now"),
        (lambda model: model, {"batch_size": 4}, "batch_asked: 5 there, 4 now"),
        (lambda model: replace(other_weights(model), label="new"), {"n": 7}, "n_asked: none there, 7 now"),
    ],
)
def test_what_may_not_stand_in_one_table_is_refused_before_anything_runs(model, noise, tmp_path, change, given, told):
    run_sweep([model], sweep(48), tmp_path)
    before, noise.decoded = files_of(tmp_path), 0
    with pytest.raises(ValueError, match=r"--out.*--replace") as caught:
        run_sweep([change(model)], sweep(24, **given), tmp_path)
    assert told in str(caught.value) and str(tmp_path) in str(caught.value) and "Nothing was computed" in str(caught.value)
    assert noise.decoded == 0 and files_of(tmp_path) == before
    assert told in describe_plan([change(model)], sweep(24, **given), tmp_path)


def test_a_model_beside_others_may_have_other_weights(model, noise, tmp_path):
    run_sweep([model], sweep(48), tmp_path)
    assert len(run_sweep([replace(other_weights(model), label="new", mean=(0.4,) * 3)], sweep(24), tmp_path)) == 4
    assert "may not stand" not in describe_plan([model], sweep(64), tmp_path)


def test_what_is_replaced_is_moved_aside_whole_and_told(model, noise, tmp_path, capsys):
    run_sweep([model], sweep(48, 64, shifts=(0,)), tmp_path)
    first = read_csv(tmp_path / "results.csv")
    (tmp_path / "last.ckpt").write_text("not of the evaluation")
    (tmp_path / "claims.md").write_text("- **It holds.** This is so.")
    capsys.readouterr()
    changed, asked = other_weights(model), sweep(48, n=7)
    assert "3 other rows there would be moved aside" in describe_plan([changed], asked, tmp_path, replace=True)
    rows = run_sweep([changed], asked, tmp_path, replace=True)
    printed = capsys.readouterr().out.replace("\n", " ")
    assert "3 of the 3 rows" in printed and "other weights" in printed and str(tmp_path / "replaced-1") in printed
    assert len(rows) == 2 and {row["n"] for row in rows} == {7} and sizes_of(tmp_path) == {"32x32", "48x48"}
    aside = tmp_path / "replaced-1"
    assert [row["nll"] for row in read_csv(aside / "results.csv")] == [row["nll"] for row in first]
    assert len(read_lines(aside, "per_class")) == 9 and len(read_lines(aside, "translation")) == 1
    assert (aside / "plots" / "accuracy.png").exists() and (aside / "table.md").exists() and (aside / "claims.md").exists()
    assert not (tmp_path / "claims.md").exists() and (tmp_path / "last.ckpt").exists()
    noise.decoded = 0
    run_sweep([changed], asked, tmp_path, replace=True)  # the same again moves nothing
    assert noise.decoded == 0 and not (tmp_path / "replaced-2").exists() and "are not asked for" not in capsys.readouterr().out
    run_sweep([changed], sweep(24, n=7), tmp_path, replace=True)
    assert sizes_of(tmp_path) == {"32x32", "24x24"} and sizes_of(tmp_path / "replaced-2") == {"32x32", "48x48"}
    assert noise.decoded == 7  # the row of the training size stayed


def test_pictures_of_rows_that_stay_stay(trained, noise, tmp_path):
    models = [trained("vitrel_vit_n8_table", label=label) for label in ("a", "b")]
    asked = dict(policies=("clip",), n=4)
    run_sweep(models, sweep(48, **asked), tmp_path, report=True)
    run_sweep(models[:1], sweep(24, **asked), tmp_path, report=True)
    stored = json.loads(gzip.decompress((tmp_path / "pictures.json.gz").read_bytes()))
    found = {one["label"]: one for one in stored["models"]}
    for kind in ("lattices", "maps"):
        assert {item["size"] for item in found["a"][kind]} == {"32x32", "48x48", "24x24"}, kind
        assert {item["size"] for item in found["b"][kind]} == {"32x32", "48x48"}, kind
    keys = {key for one in stored["models"] for item in one["maps"] for key in item["pictures"]}
    assert keys == set(stored["pictures"])
    # pictures alone, of whatever weights, are not taken for those of new rows
    for path in tmp_path.glob("*.csv"):
        path.unlink()
    run_sweep(models[:1], sweep(24, **asked), tmp_path, report=True)
    stored = json.loads(gzip.decompress((tmp_path / "pictures.json.gz").read_bytes()))
    assert [one["label"] for one in stored["models"]] == ["a"]
    assert {item["size"] for item in stored["models"][0]["lattices"]} == {"32x32", "24x24"}


def test_two_evaluations_at_once_are_refused(model, noise, tmp_path, monkeypatch):
    monkeypatch.setattr(folder_module, "PATIENCE", 0.0)
    with only_writer(tmp_path), pytest.raises(BlockingIOError, match="another evaluation is writing into"):
        run_sweep([model], sweep(48), tmp_path)
    assert len(run_sweep([model], sweep(48), tmp_path)) == 2


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ValueError("a.jpg"), RuntimeError("CUDA out of memory. Tried")])
def test_what_stops_it_leaves_every_finished_row_and_says_how_many(model, noise, tmp_path, monkeypatch, error):
    """Also those that were not written yet, since writing takes a part of the time alone."""
    read, left = noise.__getitem__, [12 * 3]

    def item(self, index):
        left[0] -= 1
        if left[0] < 0:
            raise error
        return read(self, index)

    monkeypatch.setattr(noise, "__getitem__", item)
    monkeypatch.setattr(folder_module, "REST", 1e9)
    kind = MemoryError if isinstance(error, RuntimeError) else type(error)
    with pytest.raises(kind) as caught:
        run_sweep([model], sweep(48, 64, 24, batch_size=1), tmp_path)
    assert len(read_csv(tmp_path / "results.csv")) == 3
    [note] = caught.value.__notes__
    assert note.startswith("3 rows saved in") and "the same command goes on" in note
    assert not list(tmp_path.glob("*.part")) + list(tmp_path.glob(".*.part"))


def test_a_full_disk_names_the_file_and_keeps_the_rows_before(model, noise, tmp_path, monkeypatch):
    write, left = pd.DataFrame.to_csv, [5]

    def full(self, path, **how):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        return write(self, path, **how)

    monkeypatch.setattr(pd.DataFrame, "to_csv", full)
    monkeypatch.setattr(folder_module, "REST", 0.0)
    with pytest.raises(OSError, match=r"No space left on device: '.*\.csv'") as caught:
        run_sweep([model], sweep(48, 64, 24), tmp_path)
    assert str(tmp_path) in caught.value.filename and "2 rows saved" in caught.value.__notes__[0]
    monkeypatch.undo()
    assert len(read_csv(tmp_path / "results.csv")) == 2 and not list(tmp_path.glob(".*.part"))


def test_labels_that_a_spreadsheet_would_run_come_back(model, noise, tmp_path, monkeypatch):
    formula = replace(model, label='=HYPERLINK("x")', interpolation="-1+1")
    monkeypatch.setattr(noise, "__init__", lambda self, size, n=None: vars(self).update(size=size, n=12, classes=list("=-@")))
    formula = replace(formula, classes=tuple("=-@"))
    run_sweep([formula], sweep(48, shifts=(0,)), tmp_path)
    for name in ("results", "per_class", "translation"):
        frame = pd.read_csv(tmp_path / f"{name}.csv", dtype=str, keep_default_na=False)
        assert set(frame["label"]) == {"'" + formula.label}
        cells = [cell for column in frame for cell in frame[column]]
        assert not [cell for cell in cells if guarded(cell) != cell and cell[0] != "'"]
    noise.decoded = 0
    rows = run_sweep([formula], sweep(48, shifts=(0,)), tmp_path)
    assert noise.decoded == 0 and {row["label"] for row in rows} == {formula.label}
    assert {line["class"] for line in read_lines(tmp_path, "per_class")} == set("=-@")


def test_names_that_are_no_utf8_are_written_escaped(model, noise, tmp_path, monkeypatch):
    bad = b"caf\xe9".decode("utf-8", "surrogateescape")
    names = [bad, "b", "c"]
    monkeypatch.setattr(noise, "__init__", lambda self, size, n=None: vars(self).update(size=size, n=12, classes=names))
    named = replace(model, label=f"model ({bad})", classes=tuple(names))
    run_sweep([named], sweep(48, data=bad), tmp_path / bad, bad, report=True)
    assert "caf\\xe9" in {line["class"] for line in read_lines(tmp_path / bad, "per_class")}
    assert "caf\\xe9" in (tmp_path / bad / "table.md").read_text("utf-8")
    noise.decoded = 0
    rows = run_sweep([named], sweep(48, 24, data=bad), tmp_path / bad, bad)
    assert noise.decoded == 12 and {row["label"] for row in rows} == {"model (caf\\xe9)"}
    assert torch.isfinite(torch.tensor([row["nll"] for row in rows])).all()
