"""The order of classes, which decides what their labels mean."""

import csv

import numpy as np
import pytest
from PIL import Image

from vitrel.data import class_names, create_dataset
from vitrel.data.readers.classes import class_order, order_note, read_class_names

HOW = {"mean": (0.0,) * 3, "std": (1.0,) * 3}
NUMBERS = [str(i) for i in range(12)]


def test_names_that_are_all_digits_are_numbers(tmp_path):
    """Of folders and of a CSV; image i is i in all its pixels."""
    rows = []
    for i in range(12):
        for split in ("train", "val"):
            path = tmp_path / split / f"{i}" / "a.png"
            path.parent.mkdir(parents=True)
            Image.fromarray(np.full((8, 8), i, np.uint8)).save(path)
            rows.append((str(path), i, split))
    with open(tmp_path / "all.csv", "w", newline="") as file:
        csv.writer(file).writerows([("path", "label", "split"), *rows])
    for data in (tmp_path, tmp_path / "all.csv"):
        images = create_dataset(str(data), "val", (8, 8), **HOW)
        assert class_names(str(data)) == images.classes == NUMBERS
        assert all((image * 255).round().eq(label).all() for image, label in images)


def test_other_names_are_sorted_as_text():
    assert class_order(["10", "9", "x"]) == ["10", "9", "x"] and class_order(["b", "A", "a"]) == ["A", "a", "b"]
    assert class_order({"10", "010", "9"}) == ["9", "010", "10"]


def test_the_order_is_told_where_timm_has_another():
    for same in (["cat", "dog"], ["n01440764", "n02102040"], ["0", "1"], ["b", "a", "c"]):
        assert order_note(same) == ""
    assert order_note(NUMBERS) == (
        "sorted as timm's readers do, by numbers and without case, so class 2 is '2'; as text, it would be '10'"
    )
    assert order_note(["Zebra", "ant"]).startswith("sorted as text, so class 0 is 'Zebra'; as timm's readers do")
    assert "class 0 is 'a10'" in order_note(["a10", "a2"])


def test_a_file_of_names(tmp_path):
    path = tmp_path / "classes.txt"
    path.write_bytes("\ufeffsky\r\n great white shark \r\n\r\n".encode())
    assert read_class_names(path) == ["sky", "great white shark"]
    path.write_text("sky\n\nroad\n")
    with pytest.raises(ValueError, match="line 2 is empty, which would shift"):
        read_class_names(path)
