"""Predictions of every row, image by image: the file, and two rows compared on the same images."""

import argparse
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from helpers import ROOT
from helpers.predictions import classified, predicted
from vitrel.cli import report
from vitrel.evaluate.results.statistics import estimate
from vitrel.evaluate.results.table import PREDICTIONS, line_key, read_csv, read_predictions, write_csv, write_predictions
from vitrel.evaluate.results.text import compare_folders
from vitrel.evaluate.tasks.base import ImageList
from vitrel.evaluate.tasks.classes import NO_CLASS
from vitrel.evaluate.tasks.classification import LEFT_OUT, TASK, right_of

LABELS = (0, 1, 1, LEFT_OUT)


def row(classes, labels=LABELS, confidence=0.5):
    n = len(classes)
    images = ImageList([f"a\n{i} é.jpg" for i in range(n)], ["left", "right"])
    return classified(images, labels, classes, np.full(n, confidence), np.arange(n) % 2 == 0)


def test_scores_are_among_the_classes_of_the_data_where_asked(tmp_path):
    a, b = row([0, NO_CLASS, NO_CLASS, LEFT_OUT]), row([0, 1, 0, LEFT_OUT])
    a = replace(a, arrays=a.arrays | {"among": np.array([True, True, True, False])})
    write_predictions({("a",): a, ("b",): b}, tmp_path)
    rows = read_predictions(tmp_path).rows
    assert TASK.scores(rows["a",], "top1_among").tolist()[:3] == [1, 1, 1]
    assert TASK.scores(rows["b",], "top1_among").tolist()[:3] == right_of(rows["b",]).tolist()[:3]  # it has no other classes
    assert TASK.scores(rows["a",], "top1").tolist()[:3] == [1, 0, 0] and np.isnan(TASK.scores(rows["a",], "top1")[3])


def test_the_file_gives_back_what_was_written(tmp_path):
    assert read_predictions(tmp_path) is None
    rows = {("a", "0"): row([0, 1, NO_CLASS, LEFT_OUT]), ("b", ""): row([1, LEFT_OUT, 0, LEFT_OUT], (0, -1, 1, -1), 0.1)}
    write_predictions(rows, tmp_path)
    back = read_predictions(tmp_path)
    assert (back.images, [*back.rows]) == (rows["a", "0"].images, [*rows])
    for key, one in rows.items():
        assert back.rows[key].arrays["labels"].tolist() == [*LABELS]  # though the second row could not read one of them
        assert back.rows[key].arrays["predicted"].tolist() == one.arrays["predicted"].tolist()
        assert back.rows[key].arrays["confidence"] == pytest.approx(one.arrays["confidence"], rel=1e-3)
        assert back.rows[key].arrays["top5"].tolist() == one.arrays["top5"].tolist()
    assert right_of(back.rows["a", "0"]).tolist() == [True, True, False, False]
    assert [counts.tolist() for counts in TASK.by_class(back.rows["a", "0"])] == [[1, 2], [1, 1]]
    assert [counts.tolist() for counts in TASK.by_class(back.rows["b", ""])] == [[1, 1], [0, 0]]
    assert [path.name for path in tmp_path.iterdir()] == [PREDICTIONS]
    write_predictions({}, tmp_path)
    assert read_predictions(tmp_path) is None


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"no zip"])
def test_a_damaged_file_is_named(tmp_path, damage):
    write_predictions({("a",): row([0, 1, 0, 1])}, tmp_path)
    (tmp_path / PREDICTIONS).write_bytes(damage((tmp_path / PREDICTIONS).read_bytes()))
    with pytest.raises(ValueError, match=rf"{PREDICTIONS} is damaged: delete it"):
        read_predictions(tmp_path)


def test_many_classes_take_more_bytes(tmp_path):
    write_predictions({("a",): row([69_999], [69_999])}, tmp_path)
    assert right_of(read_predictions(tmp_path).rows["a",]).all()


def test_other_images_or_labels_are_refused_by_name():
    one = predicted("ab", (5, 5))
    for images, reported in (
        (
            ImageList([*one.images.names[:-1], "new.jpg"], one.images.classes),
            r"2 are only .*such as 'b/19\.jpg'",
        ),
        (ImageList(one.images.names[::-1], one.images.classes), "order differs"),
        (ImageList(one.images.names, ["a", "c"]), "classes differ"),
    ):
        with pytest.raises(ValueError, match=reported):
            TASK.check_same_images(one, replace(one, images=images))
    labels = one.arrays["labels"].copy()
    labels[2] = 1
    with pytest.raises(ValueError, match=r"labels of 1 images differ, such as 'a/2\.jpg' \(0 and 1\)"):
        TASK.check_same_images(one, replace(one, arrays=one.arrays | {"labels": labels}))


@pytest.fixture
def folders(tmp_path):
    """folders(name, rows, hits): a folder of an evaluation with these rows, of which each has hits[i] per class, of 10."""
    base = read_csv(ROOT / "results" / "shapes_classified" / "results.csv")[0]

    def make(name, changes, hits):
        (tmp_path / name).mkdir()
        rows = [base | {"label": "m", "img_size": "64x64", "protocol": "scale", "policy": "none"} | one for one in changes]
        rows = [one | {"top1": sum(own) / 20} for one, own in zip(rows, hits, strict=True)]
        write_csv(rows, tmp_path / name / "results.csv")
        write_predictions({line_key(one): predicted("ab", own) for one, own in zip(rows, hits, strict=True)}, tmp_path / name)
        return tmp_path / name

    return make


def test_rows_of_two_folders_are_matched_and_written(folders, tmp_path, capsys):
    sizes = [{"img_size": "64x64"}, {"img_size": "96x64"}]
    a = folders("a", [one | {"seed": seed} for one in sizes for seed in (0, 1)], [(9, 9), (8, 8), (7, 7), (6, 6)])
    seeds = [{"label": "other", "seed": seed} for seed in (1, 2, 0)]
    b = folders("b", [*seeds, {"label": "other", "img_size": "32x32"}], [(5, 5), (6, 6), (5, 6), (1, 1)])
    lines = compare_folders(a, b)
    assert [(line["img_size"], line["seed"], line["only_a"]) for line in lines] == [
        ("64x64", "0", 7), ("64x64", "1", 6), ("64x64", "all 2", None)
    ]  # fmt: skip
    assert lines[-1]["difference"] == pytest.approx((35 + 30) / 2) and [line["verdict"] for line in lines[:2]] == ["", ""]
    sides = [
        np.stack([TASK.scores(predicted("ab", own), "top1") for own in hits]) for hits in (((9, 9), (8, 8)), ((5, 6), (5, 5)))
    ]
    found = estimate([sides[0]], [sides[1]])
    assert (lines[-1]["low"], lines[-1]["high"]) == pytest.approx((found.low(), found.high()))
    assert lines[-1]["verdict"] == ("A" if found.low() > 0 else "cannot tell")
    parser = argparse.ArgumentParser()
    report.add_arguments(parser)
    report.run(parser.parse_args([str(a), str(b), "--out", str(tmp_path / "out")]))
    text = (tmp_path / "out" / "compare.md").read_text("utf-8")
    assert text.strip() == capsys.readouterr().out.strip() and "+35.00" in text and "verdict" in text
    frame = pd.read_csv(tmp_path / "out" / "compare.csv")
    assert frame["only_a"].tolist()[:2] == [7, 6] and set(frame["a"]) == {"m"} and set(frame["b"]) == {"other"}
    assert sorted(path.name for path in a.iterdir()) == [PREDICTIONS, "results.csv"]
    with pytest.raises(ValueError, match="--out is for the comparison"):
        report.run(parser.parse_args([str(a), "--out", str(tmp_path)]))


def test_policies_that_differ_are_matched_by_the_best_and_labels_by_name(folders):
    a = folders("a", [{}, {"label": "n"}], [(5, 5), (9, 9)])
    b = folders("b", [{"policy": "clip"}, {"policy": "bicubic"}, {"label": "n"}], [(4, 4), (6, 6), (9, 8)])
    assert [(line["a"], line["b"], line["policy"], line["difference"]) for line in compare_folders(a, b)] == [
        ("m", "m", "best: none / bicubic", -10),
        ("n", "n", "none", 5),
    ]
    levels = {margin: [line["verdict"] for line in compare_folders(a, b, margin)] for margin in (2.0, 90.0)}
    assert levels == {2.0: ["cannot tell"] * 2, 90.0: ["level"] * 2}
    c = folders("c", [{"label": "x"}], [(5, 5)])
    with pytest.raises(ValueError, match="labels are m, n and x"):
        compare_folders(a, c)
    (c / PREDICTIONS).unlink()
    with pytest.raises(ValueError, match=r"c has no predictions\.npz"):
        compare_folders(a, c)
