"""Predictions of every row, image by image: the file, and two rows compared on the same images."""

import numpy as np
import pytest

from vitrel.evaluate.images import ImageList
from vitrel.evaluate.predictions import FILE, LEFT_OUT, NO_CLASS, Predicted, read_predictions, write_predictions

LABELS = (0, 1, 1, LEFT_OUT)


def row(classes, labels=LABELS, confidence=0.5):
    n = len(classes)
    images = ImageList([f"a\n{i} é.jpg" for i in range(n)], ["left", "right"])
    answers = np.array(labels, np.int32), np.array(classes, np.int32), np.full(n, confidence, np.float32)
    return Predicted(images, *answers, np.arange(n) % 2 == 0)


def test_the_file_gives_back_what_was_written(tmp_path):
    assert read_predictions(tmp_path) is None
    rows = {("a", "0"): row([0, 1, NO_CLASS, LEFT_OUT]), ("b", ""): row([1, LEFT_OUT, 0, LEFT_OUT], (0, -1, 1, -1), 0.1)}
    write_predictions(rows, tmp_path)
    back = read_predictions(tmp_path)
    assert (back.names, back.classes, [*back.rows]) == (*rows["a", "0"].images, [*rows])
    assert back.labels.tolist() == [*LABELS]  # though the second row could not read one of them
    for key, one in rows.items():
        assert back.rows[key].predicted.tolist() == one.predicted.tolist()
        assert back.rows[key].confidence == pytest.approx(one.confidence, rel=1e-3)
        assert back.rows[key].top5.tolist() == one.top5.tolist()
    assert back.rows["a", "0"].right.tolist() == [True, True, False, False]
    assert [counts.tolist() for counts in back.rows["a", "0"].class_counts()] == [[1, 2], [1, 1]]
    assert [counts.tolist() for counts in back.rows["b", ""].class_counts()] == [[1, 1], [0, 0]]
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    write_predictions({}, tmp_path)
    assert read_predictions(tmp_path) is None


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"no zip"])
def test_a_damaged_file_is_named(tmp_path, damage):
    write_predictions({("a",): row([0, 1, 0, 1])}, tmp_path)
    (tmp_path / FILE).write_bytes(damage((tmp_path / FILE).read_bytes()))
    with pytest.raises(ValueError, match=rf"{FILE} is damaged: delete it"):
        read_predictions(tmp_path)


def test_many_classes_take_more_bytes(tmp_path):
    write_predictions({("a",): row([69_999], [69_999])}, tmp_path)
    assert read_predictions(tmp_path).rows["a",].right.all()
