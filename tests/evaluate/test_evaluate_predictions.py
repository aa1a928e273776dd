"""Predictions of every row, image by image: the file, and two rows compared on the same images."""

import numpy as np
import pytest

from vitrel.evaluate.predictions import FILE, LEFT_OUT, NO_CLASS, Predicted, Predictions, read_predictions, write_predictions


def predicted(*classes, confidence=0.5):
    n = len(classes)
    return Predicted(np.array(classes, np.int32), np.full(n, confidence, np.float32), np.arange(n) % 2 == 0)


def predictions(rows, labels=(0, 1, 1, LEFT_OUT)):
    names = [f"a\n{i} é.jpg" for i in range(len(labels))]
    return Predictions(names, np.array(labels, np.int32), ["left", "right"], rows)


def test_the_file_gives_back_what_was_written(tmp_path):
    assert read_predictions(tmp_path) is None
    rows = {("a", "0"): predicted(0, 1, NO_CLASS, LEFT_OUT), ("b", ""): predicted(1, 1, 0, LEFT_OUT, confidence=0.1)}
    write_predictions(predictions(rows), tmp_path)
    back = read_predictions(tmp_path)
    assert (back.names, back.classes, [*back.rows]) == (predictions({}).names, ["left", "right"], [*rows])
    for key, row in rows.items():
        assert back.rows[key].predicted.tolist() == row.predicted.tolist()
        assert back.rows[key].confidence == pytest.approx(row.confidence, rel=1e-3)
        assert back.rows[key].top5.tolist() == row.top5.tolist()
    assert back.right(("a", "0")).tolist() == [True, True, False, False]
    assert [counts.tolist() for counts in back.class_counts(("a", "0"))] == [[1, 2], [1, 1]]
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    write_predictions(predictions({}), tmp_path)
    assert read_predictions(tmp_path) is None


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"no zip"])
def test_a_damaged_file_is_named(tmp_path, damage):
    write_predictions(predictions({("a",): predicted(0, 1, 0, 1)}), tmp_path)
    (tmp_path / FILE).write_bytes(damage((tmp_path / FILE).read_bytes()))
    with pytest.raises(ValueError, match=rf"{FILE} is damaged: delete it"):
        read_predictions(tmp_path)


def test_many_classes_take_more_bytes(tmp_path):
    many = Predictions(["x"], np.array([69_999]), [str(i) for i in range(70_000)], {("a",): predicted(69_999)})
    write_predictions(many, tmp_path)
    assert read_predictions(tmp_path).right(("a",)).all()
