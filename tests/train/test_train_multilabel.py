"""Training on several labels an image: the CSV, runs, resumption, what an evaluation and other commands make of it."""

import csv
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from PIL import Image

import vitrel
from helpers import each
from helpers.runs import on_two, read, rows
from vitrel.cli import main
from vitrel.data import Reading, class_names, create_dataset
from vitrel.evaluate import at_sizes
from vitrel.evaluate.checkpoint import load_checkpoint
from vitrel.evaluate.frozen import frozen_rows
from vitrel.train import run

COLORS = {"blue": (30, 30, 230), "green": (30, 230, 30), "red": (230, 30, 30)}
PIXELS = {"mean": (0.5,) * 3, "std": (0.5,) * 3}


def write(path, lines):
    with open(path, "w", newline="") as file:
        csv.writer(file).writerows(lines)
    return str(path)


@pytest.fixture(scope="session")
def squares(tmp_path_factory):
    """A CSV of gray images with squares of any of three colors, or none."""
    root, rng, lines = tmp_path_factory.mktemp("squares"), np.random.default_rng(0), [("path", "label", "split")]
    for split, n in (("train", 96), ("val", 33)):
        for i in range(n):
            picture = rng.integers(0, 60, (32, 32, 3), dtype=np.uint8)
            shown = [name for at, name in enumerate(COLORS) if i >> at & 1]
            for place, name in zip(rng.permutation(4), shown, strict=False):
                y, x = 16 * (place // 2), 16 * (place % 2)
                picture[y : y + 16, x : x + 16] = COLORS[name]
            Image.fromarray(picture).save(root / f"{split}{i}.png")
            lines.append((f"{split}{i}.png", "; ".join(shown), split))
    return write(root / "labels.csv", lines)


@pytest.fixture
def several(command, squares):
    """several(name, *extra, epochs=3): arguments of a run that learns the squares."""

    def build(name, *extra, epochs=3):
        options = f"--data.data={squares}", "--model.task=multilabel", "--data.augment={flip: true}"
        return command(name, *options, *extra, epochs=epochs)

    return build


def test_a_csv_of_several_labels(squares, tmp_path):
    data = create_dataset(squares, "train", (32, 32), task="multilabel", **PIXELS)
    assert data.classes == class_names(squares, "multilabel") == ["blue", "green", "red"]
    assert data.labels()[:4] == [(), (0,), (1,), (0, 1)]
    torch.testing.assert_close(data[3][1], torch.tensor([1.0, 1.0, 0.0]))
    lines = [("path", "label"), *((f"{i}.png", ";".join("abc"[: i % 4]) + " ;" * (i % 2)) for i in range(40)), ("x.png", "d;a")]
    path, splits = write(tmp_path / "one.csv", lines), {}
    for split in ("train", "val"):
        some = create_dataset(path, split, (32, 32), task="multilabel", reading=Reading(val_fraction=0.2), **PIXELS)
        splits[split] = some.names()
        assert {0, 1, 2} <= {*chain(*some.labels())} and some.classes == ["a", "b", "c", "d"]
    assert len(splits["val"]) == 8 and len({*splits["train"], *splits["val"]}) == 41


@each(
    ("lines", "text"),
    [
        (
            [("1.png", "a", "train"), ("2.png", "a;b", "val")],
            r"no training image of .*labels\.csv has the labels b \(1 in all\)",
        ),
        ([("1.png", "", "train"), ("2.png", " ; ", "val")], "has no label for any image"),
        ([("1.png", "a", "")], "line 2 needs path, label, split"),
    ],
)
def test_labels_that_cannot_be_learned_are_named(tmp_path, lines, text):
    path = write(tmp_path / "labels.csv", [("path", "label", "split"), *lines])
    with pytest.raises(ValueError, match=text):
        create_dataset(path, "train", (32, 32), task="multilabel", **PIXELS)


def test_data_of_another_task_are_refused_or_told(folder, tmp_path):
    several_as_one = write(tmp_path / "one.csv", [("path", "label"), ("1.png", "blue; green"), ("2.png", "a"), ("3.png", "a")])
    with pytest.raises(ValueError, match="has one label an image: the task multilabel reads a CSV"):
        class_names(str(folder), "multilabel")
    with pytest.warns(UserWarning, match=r"'blue; green' is taken for one class; several labels .* are --task multilabel"):
        class_names(several_as_one)
    with pytest.raises(ValueError, match="use the task classification"):
        class_names("shapes", "multilabel")


@pytest.mark.slow
def test_a_run_learns_and_its_checkpoint_is_evaluated(several, squares, tmp_path):
    cli = run(several("run", epochs=10))
    log = [row for row in rows(tmp_path / "run" / "metrics.csv") if row["val/loss"]]
    assert float(log[-1]["val/map"]) > 0.7  # 0.48 by chance
    assert float(log[0]["val/loss"]) > 0.6 > float(log[-1]["val/loss"])
    assert float(log[0]["train/label_accuracy_epoch"]) < 0.62 < float(log[-1]["train/label_accuracy_epoch"])
    entry = read(tmp_path / "run" / "checkpoints" / "last.ckpt")["vitrel"]
    assert (entry["task"], entry["classes"]) == ("multilabel", [*COLORS])
    trained = load_checkpoint(tmp_path / "run" / "checkpoints" / "last.ckpt")
    frame = at_sizes(trained, squares, [48], out=tmp_path / "out", device="cpu", report=False)
    row = frame.set_index("img_size").loc["32x32"]
    assert row["map"] / 100 == pytest.approx(float(log[-1]["val/map"]), abs=2e-3)
    assert row["map_low"] < row["map"] <= row["map_high"] and row["majority"] == pytest.approx(48.48, abs=0.01)
    assert "mAP in percent" in (tmp_path / "out" / "report.html").read_text()
    vitrel.save(vitrel.load(tmp_path / "run"), tmp_path / "model.safetensors")
    assert load_checkpoint(tmp_path / "model.safetensors").task == "multilabel"
    with pytest.raises(ValueError, match="need one class an image"):
        next(frozen_rows(trained, squares, [(32, 32)]))
    with pytest.raises(SystemExit, match="need one class an image"):
        main(["features", str(tmp_path / "run"), "--data", squares])
    with pytest.raises(ValueError, match="models of classification and multilabel cannot share an evaluation"):
        at_sizes([replace(trained, task="classification", label="one"), trained], squares, [32], out=tmp_path / "both")
    assert float(cli.trainer.checkpoint_callbacks[0].best_model_score) == max(float(row["val/map"]) for row in log)


@pytest.mark.slow
def test_two_processes_sum_their_metrics(several, squares, tmp_path):
    """The evaluation set is an odd number of images: one rank fills its share, and the metrics are those of one process."""
    quick = "--data.batch_size=8", "--trainer.limit_train_batches=2"
    assert on_two(several("two", "--trainer.devices=2", "--trainer.strategy=ddp", *quick, epochs=1)) == [0, 0]
    [row] = [row for row in rows(tmp_path / "two" / "metrics.csv") if row["val/loss"]]
    frame = at_sizes(load_checkpoint(tmp_path / "two" / "checkpoints" / "last.ckpt"), squares, device="cpu")
    found = frame.set_index("img_size").loc["32x32"]
    assert (100 * float(row["val/map"]), float(row["val/loss"])) == pytest.approx((found["map"], found["bce"]), rel=1e-4)
    assert vitrel.load(tmp_path / "two").num_classes == 3
