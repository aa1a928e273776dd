"""The pictures of a report: which there are, what they hold, and that none of them can end a run."""

import base64
import io

import numpy as np
import pytest
import timm
import torch
from PIL import Image

from vitrel.evaluate import pictures as module
from vitrel.evaluate.checkpoint import trained_model
from vitrel.evaluate.pictures import Picture, collect
from vitrel.evaluate.run import opened
from vitrel.evaluate.sweep import Settings
from vitrel.tasks import task_named

CPU = torch.device("cpu")


@pytest.fixture
def brief_figures(monkeypatch):
    """Figures of attention and position are not rendered, which takes most of the time."""
    monkeypatch.setattr(module, "_drawn", lambda figure, alt: Picture("data:", 1, 1, alt, ""))


def made(models, data="noise", photographs=True, **settings):
    images, plan = opened(models, data, Settings(device="cpu", n=4, **settings))
    return collect(plan, images, CPU, photographs)


def opened_picture(picture):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(picture.uri.partition(",")[2]))).convert("RGB"))


def segmenter(key="table"):
    backbone = timm.create_model(f"vitrel_vit_n8_{key}", num_classes=6, img_size=(32, 32))
    model = task_named("segmentation").with_head(backbone, 6, "linear").eval()
    return trained_model(model, key, img_size=(32, 32), task="segmentation")


@pytest.mark.usefixtures("brief_figures")
def test_the_input_is_shown_once_in_every_protocol_at_every_size(noise, trained):
    models = [trained("vitrel_vit_n8_table"), trained("vitrel_vit_n8_absolute")]
    inputs, *_ = made(models, sizes=(48, "32x64"), protocols=("scale", "canvas"))
    assert [*inputs.tables] == ["scale protocol", "canvas protocol"]
    [line] = inputs.tables["scale protocol"].values()
    assert [picture.caption for picture in line] == ["32 px", "32x64 px", "48 px"]
    assert line[1].width == 2 * line[1].height and opened_picture(line[1]).shape[1] == 2 * opened_picture(line[1]).shape[0]


@pytest.mark.usefixtures("brief_figures")
def test_attention_and_position_are_shown_of_every_model_at_its_first_and_largest_size(noise, trained):
    models = [trained("vitrel_vit_n8_none"), trained("vitrel_swin_n")]
    _, attends, adds = made(models, sizes=(48, 64))
    assert [*attends.tables] == [model.label for model in models]
    names = ["32 px, first layer", "32 px, last layer", "64 px, first layer", "64 px, last layer"]
    assert all([*lines] == names for lines in attends.tables.values())
    assert [*adds.tables] == ["vitrel_swin_n"]  # the other has no position
    for size, [picture] in adds.tables["vitrel_swin_n"].items():
        assert picture.alt == f"what position adds in vitrel_swin_n at {size}"
    assert [*adds.tables["vitrel_swin_n"]] == ["32 px", "64 px"]


@pytest.mark.slow(seconds=2)
def test_without_photographs_there_is_no_image_of_the_data(noise, trained):
    model = trained("vitrel_vit_n8_table", model_args={"depth": 1})
    shown, hidden = (made([model], photographs=allowed, sizes=(32,)) for allowed in (True, False))
    assert [section.title for section in hidden] == ["Where a patch attends", "Position in attention"]
    first, second = (sections[-2].tables["vitrel_vit_n8_table"]["32 px, first layer"][0] for sections in (shown, hidden))
    panel = np.s_[80:140, 30:110]  # within the leftmost image
    assert opened_picture(first)[panel].std() > 3 * opened_picture(second)[panel].std()


@pytest.mark.usefixtures("brief_figures")
def test_predictions_of_every_model_at_every_size_with_all_classes():
    found = made([segmenter(), segmenter("shaw")], "shapes-dense", sizes=(48,), protocols=("scale", "canvas"))
    section = found[0]
    assert section.title == "Predictions" and [*section.tables] == ["scale protocol", "canvas protocol"]
    lines = section.tables["scale protocol"]
    assert [*lines] == ["image", "truth", "table", "shaw"] and all(len(cells) == 2 for cells in lines.values())
    assert all(picture.caption.endswith(" %") for picture in lines["shaw"])
    assert len(section.colors) == 6 and len({*section.colors.values()}) == 6  # the legend is whole
    colors = {tuple(color) for color in opened_picture(lines["truth"][0]).reshape(-1, 3)}
    assert colors <= {tuple(map(int, text[4:-1].split(","))) for text in section.colors.values()} | {module.NOTHING}
    hidden = made([segmenter()], "shapes-dense", photographs=False)[0].tables["scale protocol"]
    assert [*hidden] == ["truth", "table"]


def test_a_picture_that_cannot_be_made_is_named_and_the_others_stay(noise, trained, monkeypatch):
    monkeypatch.setattr(module, "attention", lambda *given, **how: 1 / 0)
    with pytest.warns(
        UserWarning, match="left out of the report: attention of vitrel_vit_n8_table at 32x32 .*division by zero"
    ):
        found = made([trained("vitrel_vit_n8_table")])
    assert [section.title for section in found] == ["Inputs"]
