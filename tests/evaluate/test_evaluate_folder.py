"""A folder is one evaluation: it goes on where it stopped, grows, and refuses what does not belong to it."""

import copy
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import timm
import torch

from helpers.locks import locked
from helpers.pictures import write_classes
from helpers.runs import in_child, status
from vitrel.common import lock
from vitrel.evaluate.checkpoint import trained_model
from vitrel.evaluate.folder import Folder, read_folder, read_rows
from vitrel.evaluate.run import at_sizes
from vitrel.tasks import Kept

pytestmark = pytest.mark.usefixtures("brief_evaluations")
# what differs from one measurement to the next
TIMED = ["infer_samples_per_sec", "peak_memory_mb"]


@pytest.fixture
def model(trained):
    return trained("vitrel_vit_n8_none")


def files_of(folder):
    return {path.relative_to(folder): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def table(folder):
    return pd.read_csv(folder / "results.csv").drop(columns=TIMED)


@pytest.mark.slow
def test_more_sizes_models_protocols_and_policies_add_rows(trained, rows_of, noise, tmp_path):
    model, other = trained("vitrel_vit_n8_table"), trained("vitrel_vit_n8_none")
    rows_of([model], [48], out=tmp_path, command="first")
    first, noise.decoded = table(tmp_path), 0
    rows_of([model], [48], out=tmp_path, command="first")
    assert noise.decoded == 0 and table(tmp_path).equals(first)
    found = rows_of([model, other], [48], out=tmp_path, protocols=("scale", "canvas"), policies="all", command="second")
    assert len(found) == 2 * (3 + 1) + 2 * 2 and {row["label"] for row in found} == {model.label, other.label}
    rows = read_folder(tmp_path).rows
    assert len(rows) == len(found) and [row["nll"] for row in rows[:2]] == first["nll"].tolist()
    rows_of([other], [24], out=tmp_path)
    assert len(table(tmp_path)) == len(rows) + 1
    assert read_folder(tmp_path).settings["command"] == ["first", "second"]
    assert len(rows_of([model], [48], out=tmp_path)) == 2  # those that it asked for


def test_a_folder_holds_what_the_rows_need(model, rows_of, tmp_path):
    found = rows_of([model], [48], out=tmp_path, n=11)
    assert {path.name for path in tmp_path.iterdir()} == {
        ".lock", "settings.json", "rows.jsonl", "images.npz", "results.csv", "report.html",
    }  # fmt: skip
    folder = read_folder(tmp_path)
    assert [row["top1"] for row in folder.rows] == [row["top1"] for row in found] == table(tmp_path)["top1"].tolist()
    for row in folder.rows:
        assert 100 * folder.scores[row["key"]].mean() == pytest.approx(row["top1"], abs=1e-3)
        images, right = folder.by_class[row["key"]]
        assert images.tolist() == [4, 4, 3] and right.sum() * 100 / 11 == pytest.approx(row["top1"], abs=1e-3)
    assert folder.settings["classes"] == ["left", "right", "above"] and folder.settings["same"]["number of images"] == 11


def other_weights(model):
    model = replace(model, model=copy.deepcopy(model.model))
    model.model.head.bias.data[0] += 1
    return model


ANOTHER = [  # (change of the model, settings given, what is reported)
    (other_weights, {}, "other weights of vitrel_vit_n8_none"),
    (lambda model: replace(model, img_size=(64, 64), train_sizes=()), {}, "train_size of vitrel_vit_n8_none: 32x32 there"),
    (lambda model: replace(model, outputs={"left": 2, "right": 1, "above": 0}), {}, "outputs of vitrel_vit_n8_none: "),
    (lambda model: model, {"n": 7}, "number of images: 12 there, 7 now"),
    (lambda model: model, {"data_seed": 2}, "other images"),
    (lambda model: replace(other_weights(model), label="new"), {"n": 7}, "number of images: 12 there, 7 now"),
    (lambda model: model, {"attention_n": 2}, "attention_n: 0 there, 2 now"),
    (lambda model: model, {"on_bad_image": "count"}, "on_bad_image: raise there, count now"),
]


def test_another_evaluation_is_refused_before_anything_runs(model, rows_of, noise, tmp_path):
    rows_of([model], [48], out=tmp_path)
    before, noise.decoded = files_of(tmp_path), 0
    for change, given, reported in ANOTHER:
        with pytest.raises(ValueError, match=r"another evaluation is in .*give another --out, or --overwrite") as caught:
            rows_of([change(model)], [24], out=tmp_path, **given)
        assert reported in str(caught.value) and str(tmp_path) in str(caught.value)
        assert noise.decoded == 0 and files_of(tmp_path) == before
    rows_of([model], [24], out=tmp_path, batch_size=3, margin=1.0, photographs=False)  # what changes no number
    assert len(table(tmp_path)) == 3


def test_overwriting_leaves_what_is_not_of_the_evaluation(model, rows_of, tmp_path):
    rows_of([model], [48], out=tmp_path)
    (tmp_path / "last.ckpt").write_text("not of the evaluation")
    rows_of([other_weights(model)], [24], out=tmp_path, overwrite=True)
    assert table(tmp_path)["img_size"].tolist() == ["32x32", "24x24"] and (tmp_path / "last.ckpt").exists()
    (tmp_path / "rows.jsonl").unlink()
    with pytest.raises(ValueError, match=r"another evaluation is in .* \(results.csv without rows.jsonl\)"):
        rows_of([model], [48], out=tmp_path)


def test_data_that_changed_are_noticed(trained, tmp_path):
    """A changed file, another one, another label; where the folder lies and when files were written are no matter."""
    model, out, pictures = (
        trained("vitrel_vit_n8_none", classes=("above", "left", "right")),
        tmp_path / "out",
        tmp_path / "data",
    )
    write_classes(pictures / "val", model.classes, ["0.bmp", "1.bmp"])

    def evaluate(data):
        at_sizes(model, str(data), [48], out=out, device="cpu", attention_n=0, border_leak=False, report=False)

    evaluate(pictures)
    file = pictures / "val" / "left" / "0.bmp"
    before = file.read_bytes()
    os.utime(file, (1, 1))
    moved = pictures.rename(tmp_path / "moved")
    evaluate(moved)
    moved.rename(pictures)

    def refused():
        with pytest.raises(ValueError, match="other images: names or contents differ"):
            evaluate(pictures)

    file.write_bytes(before[:-1] + bytes([before[-1] ^ 1]))
    refused()
    file.rename(pictures / "val" / "right" / "9.bmp")
    refused()
    (pictures / "val" / "right" / "9.bmp").unlink()
    file.write_bytes(before)
    evaluate(pictures)


def test_rows_that_were_edited_or_damaged_are_refused_by_what_they_are(model, rows_of, tmp_path):
    rows_of([model], [48], out=tmp_path)
    rows = tmp_path / "rows.jsonl"
    whole = rows.read_text()
    for changed, line in (whole.replace('"n": 12', '"n": 13', 1), 1), (whole.replace("\n", "\nnot a row\n", 1), 2):
        rows.write_text(changed)
        with pytest.raises(ValueError, match=rf"rows.jsonl, line {line}, is not as it was written") as caught:
            rows_of([model], [48], out=tmp_path)
        assert "the same command" not in str(caught.value) and not hasattr(caught.value, "__notes__")
    rows.write_text(whole + whole.splitlines(keepends=True)[0])
    with pytest.raises(ValueError, match="has a row twice"):
        rows_of([model], [48], out=tmp_path)


def test_other_files_that_are_damaged_or_gone_are_named(model, rows_of, tmp_path):
    rows_of([model], [48], out=tmp_path)
    for name in ("settings.json", "images.npz"):
        whole = (tmp_path / name).read_bytes()
        for damage in (lambda path, whole: path.write_bytes(whole[:200]), lambda path, whole: path.unlink()):
            damage(tmp_path / name, whole)
            with pytest.raises(ValueError, match=f"{name}|has no images of the row vitrel_vit_n8_none") as caught:
                rows_of([model], [48], out=tmp_path)
            assert "--overwrite" in str(caught.value)
        (tmp_path / name).write_bytes(whole)


def test_half_a_line_does_not_count(model, rows_of, tmp_path):
    rows_of([model], (48, 24), out=tmp_path)
    whole, rows = table(tmp_path), tmp_path / "rows.jsonl"
    text = rows.read_text()
    for cut in (1, len(text.splitlines()[-1])):
        rows.write_text(text[:-cut])
        assert len(read_rows(tmp_path)[0]) == 2
        rows_of([model], (48, 24), out=tmp_path)
        assert table(tmp_path).equals(whole) and len(rows.read_text().splitlines()) == 3


def test_two_evaluations_at_once_are_refused(model, rows_of, tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE", 0.0)
    with locked(tmp_path), pytest.raises(BlockingIOError, match="another process is writing into"):
        rows_of([model], [48], out=tmp_path)
    assert len(rows_of([model], [48], out=tmp_path)) == 2


def test_what_stops_it_leaves_every_finished_row_and_says_how_many(model, rows_of, noise, tmp_path, monkeypatch):
    """Such as a full disk; ctrl-c is asked of the command."""
    read, left = noise.item, [12 * 2]

    def item(self, index):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left")
        return read(self, index)

    monkeypatch.setattr(noise, "item", item)
    with pytest.raises(OSError, match="No space left") as caught:
        rows_of([model], (48, 24), out=tmp_path, batch_size=1)
    assert len(read_rows(tmp_path)[0]) == 2
    assert f"rows in {tmp_path}: 2; the same command measures the others" in caught.value.__notes__
    assert not list(tmp_path.glob("*.part")) + list(tmp_path.glob(".*.part"))


def test_labels_and_classes_of_any_text_come_back(model, rows_of, noise, tmp_path, monkeypatch):
    formula = replace(model, label='=HYPERLINK("x")|a/é\n', classes=tuple("=-@"))
    monkeypatch.setattr(noise, "__init__", lambda self, size, n=None: vars(self).update(size=size, n=12, classes=list("=-@")))
    rows_of([formula], [48], out=tmp_path)
    assert set(table(tmp_path)["label"]) == {formula.label}
    found = read_folder(tmp_path)
    assert found.settings["classes"] == ["=", "-", "@"] and len(found.scores) == 2


def test_missing_numbers_are_empty_and_others_come_back_exactly(tmp_path):
    kept = Kept({name: np.arange(3) % 2 for name in ("labels", "right", "among")}, np.ones(3, bool))
    row = {"key": "a", "task": "classification", "nll": 0.1 + 0.2, "retention": float("nan"), "seed": None}
    about = {"classes": ["x", "y"], "same": {}, "models": {}, "command": [], "bad_images": []}
    Folder(tmp_path, about).add(row, kept, ["bad.png"])
    [found] = read_folder(tmp_path).rows
    assert found == row | {"retention": None} and read_folder(tmp_path).settings["bad_images"] == ["bad.png"]
    assert read_folder(tmp_path).scores["a"].tolist() == [0, 1, 0]


@pytest.mark.slow(seconds=4)
def test_killed_at_any_moment_the_same_command_gives_the_same_table(tmp_path):
    """At three random moments, the last of them often while the table is written."""
    torch.manual_seed(0)
    model = trained_model(timm.create_model("vitrel_vit_n8_table", num_classes=4, img_size=32, depth=1).eval())

    def evaluate(out):
        how = {"device": "cpu", "attention_n": 0, "batch_size": 4, "report": False}
        at_sizes(model, "shapes", (24, 48), out=out, n=8, protocols=("scale", "canvas"), policies="all", **how)

    start = time.monotonic()
    assert status(in_child(tmp_path / "whole", main=evaluate)) == 0
    seconds, expected = time.monotonic() - start, table(tmp_path / "whole")
    moments, cut, outs = random.Random(0), set(), [tmp_path / "out0"]
    for _ in range(3):
        process = in_child(outs[-1], main=evaluate)
        time.sleep(moments.uniform(0, seconds / 2))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        rows, _ = read_rows(outs[-1]) if outs[-1].exists() else ([], 0)
        cut.add(len(rows))
        if len(rows) == len(expected):  # it was killed as it ended: the next begins anew
            outs.append(tmp_path / f"out{len(outs)}")
    assert len(cut) > 1
    for out in outs:
        assert status(in_child(out, main=evaluate)) == 0
        pd.testing.assert_frame_equal(table(out), expected)
        found, whole = read_folder(out), read_folder(tmp_path / "whole")
        assert [row["key"] for row in found.rows] == [row["key"] for row in whole.rows] and not (out / "images").exists()
        for key, scores in whole.scores.items():
            assert np.array_equal(scores, found.scores[key]), key
