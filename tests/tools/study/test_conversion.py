import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from tools.study import conversion


@pytest.fixture
def folder(tmp_path):
    """train/ and val/ with 3 classes of 5 images each; the pixel value tells class and number."""
    for split in ("train", "val"):
        for label, name in enumerate(("ant", "bee", "cat")):
            (tmp_path / split / name).mkdir(parents=True)
            for number in range(5):
                prefix = "held_out" if number == 1 else "image"
                value = np.full((8, 8, 3), 40 * label + 5 * number, np.uint8)
                Image.fromarray(value).save(tmp_path / split / name / f"{prefix}_{number}.png")
    return tmp_path


def values(images):
    return ((images.float().mean((1, 2, 3)) * 0.5 + 0.5) * 255).round().int().tolist()


def test_images_to_fit_to_leave_out_those_of_the_validation_set(folder):
    tool = conversion
    config = {"fit": {"size": 8, "n": 12, "exclude": "held_out", "sources": {"own": str(folder)}}}
    found = tool.unlabelled(config, 12)["own"]
    assert found.shape == (12, 3, 8, 8)
    assert sorted(values(found)) == [40 * label + 5 * number for label in range(3) for number in (0, 2, 3, 4)]
    again = tool.unlabelled(config, 4)["own"]
    assert torch.equal(again, found[:4])


def test_validation_images_are_thinned_out_above_a_size(folder):
    tool = conversion
    images = tool.Validation({"data": str(folder), "large": {"above": 8, "every": 4}}, {"ant": 7, "bee": 8, "cat": 9})
    pixels, labels = images(8)
    assert pixels.shape == (15, 3, 8, 8) and labels.tolist() == [7] * 5 + [8] * 5 + [9] * 5
    pixels, labels = images(16)
    assert pixels.shape == (4, 3, 16, 16) and labels.tolist() == [7, 7, 8, 9]
    assert values(pixels) == [5, 20, 55, 90]  # of held_out_1, image_0, image_2, ... in each class: numbers 0, 4, 8 and 12


@pytest.mark.parametrize("lacking", ["weights", "data", "source"])
def test_what_is_not_where_the_configuration_says_is_named_at_once(folder, tmp_path, lacking):
    places = {key: str(tmp_path / "none" if key == lacking else folder) for key in ("weights", "data", "source")}
    config = {"name": "trial", "weights": places["weights"], "flowers": {"data": places["data"]}}
    config["fit"] = {"sources": {"own": places["source"]}}
    path = tmp_path / "trial.yaml"
    path.write_text(yaml.safe_dump(config))
    with pytest.raises(SystemExit, match=r"error: .*trial\.yaml names .*none, which does not exist"):
        conversion.main([str(path), "--parts", "flowers", "--runs", str(tmp_path)])
