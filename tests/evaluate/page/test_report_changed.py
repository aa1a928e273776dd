"""Images whose prediction changes with size."""

import numpy as np
import pytest

from helpers import ROOT
from helpers.predictions import classified
from vitrel.evaluate.page import changed as pictures
from vitrel.evaluate.page.changed import changed_images, place_of
from vitrel.evaluate.results.aggregate import aggregate, protocol_names
from vitrel.evaluate.results.table import Predictions, line_key, read_csv
from vitrel.evaluate.tasks.base import ImageList

LABELS = [0, 0, 0, 1, 1, 2]


@pytest.fixture
def some():
    """Rows of one model at two sizes, in two seeds."""
    rows = read_csv(ROOT / "results" / "shapes_classified" / "results.csv")
    own = [row for row in rows if row["label"] == "vitrel_vit_n8_absolute" and row["protocol"] == "scale"]
    first = [next(row for row in own if row["img_size"] == size) for size in ("64x64", "96x96")]
    return [row | {"seed": seed} for seed in (0, 1) for row in first]


def predictions(rows, *predicted):
    kept = [np.array(classes, np.int32) for classes in predicted]
    images, labels = ImageList([f"{i}.jpg" for i in range(6)], ["a", "b", "c"]), np.array(LABELS, np.int32)
    made = {line_key(row): classified(images, labels, one) for row, one in zip(rows, kept, strict=True)}
    return Predictions(images, made)


def test_images_whose_prediction_changes_are_those_first_that_were_right(some, monkeypatch):
    found = predictions(some, [0, 0, 2, 1, 1, -1], [0, 1, 1, 1, 0, 2], *[LABELS] * 2)
    (one,) = changed_images(some, found)
    assert (one["sizes"], one["changed"], one["of"]) == (["64x64", "96x96"], 3, 5)
    assert [(item["image"], item["predicted"]) for item in one["images"]] == [(1, [0, 1]), (4, [1, 0]), (2, [2, 1])]
    monkeypatch.setattr(pictures, "CHANGED", 1)
    (short,) = changed_images(some, found)
    assert short["changed"] == 3 and [item["image"] for item in short["images"]] == [1]


def test_places_are_those_of_the_table_in_the_native_protocol_too(some):
    """Whose crop is always 1, and which has several token budgets at a size."""
    native = [some[0] | {"protocol": "native", "crop_pct": 1.0, "budget": budget} for budget in (16, 64)]
    rows = [row | {"crop_pct": 0.9} for row in some] + native
    table, name = aggregate(rows), protocol_names(rows)
    assert [*dict.fromkeys(map(name, rows))] == ["scale", "native, 16 tokens", "native, 64 tokens"]
    protocols = {row["protocol"] for row in table}
    assert protocols == set(map(name, rows)) and name({"protocol": "scale", "crop_pct": 0.9}) == "scale"
    assert {place_of(row, name)[1] for row in rows} == protocols
    several = [row | {"crop_pct": crop} for row in some for crop in (0.9, 1.0)]
    assert {row["protocol"] for row in aggregate(several)} == {"scale, crop 0.9", "scale, crop 1"}
