"""Predictions of every row, image by image: scores and the file."""

from dataclasses import replace

import numpy as np
import pytest

from helpers.predictions import classified
from vitrel.evaluate.results.table import PREDICTIONS, read_predictions, write_predictions
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
