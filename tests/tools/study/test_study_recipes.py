"""The trial of the recipes: both trainings take the same folder and learn it; the table on the page is that of the rows."""

import numpy as np
import pytest
from PIL import Image

from helpers import ROOT
from tools.study import recipes

CLASSES = {"bright": 200, "dark": 30}


@pytest.fixture(scope="module")
def two_brightnesses(tmp_path_factory):
    root, rng = tmp_path_factory.mktemp("brightness"), np.random.default_rng(0)
    for split, n in (("train", 64), ("val", 8)):
        for name, level in CLASSES.items():
            (root / split / name).mkdir(parents=True)
            for i in range(n):
                picture = rng.integers(level - 20, level + 20, (24, 24, 3), np.uint8)
                Image.fromarray(picture).save(root / split / name / f"{i:02}.png")
    return root


@pytest.mark.slow(seconds=4)
@pytest.mark.parametrize("train", [recipes.by_vitrel, recipes.by_timm])
def test_each_learns_what_is_easy(train, two_brightnesses, monkeypatch):
    monkeypatch.setattr(recipes, "SIZE", 32)
    top1 = train("vitrel_vit_n8_cpb", {"patch_size": 16}, str(two_brightnesses), epochs=6, seed=0, weights=None)
    assert top1 == 1.0


def test_every_second_training_image_of_each_class(two_brightnesses, tmp_path):
    data = recipes.thinned(two_brightnesses, 2, str(tmp_path))
    found = {place.relative_to(data).as_posix(): sorted(path.name for path in place.iterdir()) for place in data.glob("*/*")}
    assert found.keys() == {f"{split}/{name}" for split in ("train", "val") for name in CLASSES}
    assert found["train/dark"][:3] == ["00.png", "02.png", "04.png"] and len(found["train/dark"]) == 32
    assert len(found["val/dark"]) == 8 and (data / "val" / "dark" / "00.png").read_bytes()


def test_the_page_has_the_table_of_the_rows():
    assert f"<!-- recipes -->\n\n{recipes.table(recipes.RESULTS)}\n" in (ROOT / recipes.PAGE).read_text("utf-8")
