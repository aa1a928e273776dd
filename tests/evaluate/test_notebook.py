"""The evaluation as one function: a model and data in, a DataFrame out, the model as it was."""

import subprocess
import sys

import numpy as np
import pandas as pd
import pytest
import timm
import torch
from PIL import Image
from torch.utils.data import Dataset

import vitrel.evaluate
from vitrel.data import Prepare
from vitrel.evaluate import evaluate
from vitrel.evaluate.columns import COLUMNS
from vitrel.evaluate.foreign_models import trained_model

HOW = dict(device="cpu", attention_n=0, border_leak=False)


class Pictures(Dataset):
    """7 images of 40x52 pixels as uint8 tensors or PIL images, labelled 0 to 2."""

    classes = ("left", "right", "above")

    def __init__(self, kind):
        self.kind = kind

    def __len__(self):
        return 7

    def __getitem__(self, index):
        pixels = np.random.default_rng(index).integers(0, 256, (40, 52, 3), dtype=np.uint8)
        if self.kind == "pil":
            return Image.fromarray(pixels), index % 3
        tensor = torch.from_numpy(pixels).permute(2, 0, 1)
        return (tensor if self.kind == "uint8" else tensor.float()), index % 3


@pytest.fixture
def model():
    torch.manual_seed(0)
    return timm.create_model("vitrel_vit_n8_table", num_classes=3, img_size=32)


def test_the_built_in_data_by_name():
    torch.manual_seed(0)
    model = timm.create_model("vitrel_swin_n", num_classes=4)
    frame = evaluate(model, "shapes", [48, "64x96"], n=6, protocols=["canvas"], policies=["keep"], label="mine", **HOW)
    assert isinstance(frame, pd.DataFrame) and list(frame.columns) == list(COLUMNS)
    assert frame["img_size"].tolist() == ["64x64", "48x48", "64x96"] and set(frame["label"]) == {"mine"}
    assert frame["n"].tolist() == [6] * 3 and frame["unchanged"].all() and set(frame["policy"]) == {"none", "keep"}
    assert frame["top1_area"].notna().any()


@pytest.mark.parametrize("kind", ["uint8", "pil"])
def test_a_data_set_is_prepared_as_a_folder_is(model, kind):
    frame = evaluate(model, Pictures(kind), [(32, 48)], policies=("clip",), preprocessing={"crop_pct": 0.9}, **HOW)
    assert len(frame) == 4 and set(frame["protocol"]) == {"scale", "canvas"} and set(frame["crop_pct"]) == {0.9}
    assert set(frame["decoder"]) == {"the data set's own"} and set(frame["data"]) == {"Pictures"}
    row = frame[(frame["img_size"] == "32x48") & (frame["protocol"] == "canvas")].iloc[0]
    prepare = Prepare((32, 48), (0.5,) * 3, (0.5,) * 3, 0.9, "bicubic", "canvas", (32, 32))
    images = torch.stack([prepare(Pictures("uint8")[i][0]) for i in range(7)])
    labels = torch.arange(7) % 3
    model.eval().set_resize_policy("clip")
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(images), labels).item()
    assert row["nll"] == pytest.approx(expected, abs=1e-5)


def test_a_function_from_size_to_data_is_taken_as_it_is(model):
    asked = []

    def data(size):
        asked.append(size)
        return [(torch.full((3, *size), 0.1 * i), i % 3) for i in range(5)]

    frame = evaluate(model, data, [24, 32], **HOW)
    assert frame["img_size"].tolist() == ["32x32", "24x24"] and set(asked) == {(32, 32), (24, 24)}
    assert set(frame["n"]) == {5} and set(frame["data"]) == {"function"}
    with pytest.raises(ValueError, match=r"decides itself how images fill a size: protocols=\('scale',\)"):
        evaluate(model, data, [24], protocols=("scale", "canvas"), **HOW)


def test_the_model_is_left_as_it_was(model):
    model.train()
    model.head.eval()
    evaluate(model, Pictures("pil"), [32], n=3, **HOW)
    assert model.training and model.blocks[0].training and not model.head.training
    assert {part.resize for part in model.modules() if getattr(part, "policies", ())} == {"geometric"}


def test_checkpoints_and_timm_models(checkpoint, noise):
    path = checkpoint()
    frame = evaluate(path, "noise", [(32, 48)], n=4, label="run", **HOW)
    assert set(frame["label"]) == {"run"} and set(frame["model"]) == {"vitrel_vit_n8_table"} and set(frame["seed"]) == {7}
    with pytest.raises(ValueError, match="a checkpoint says itself how it was trained"):
        evaluate(path, "noise", [32], img_size=(32, 32), **HOW)
    resnet = timm.create_model("resnet10t", num_classes=9)
    frame = evaluate(resnet, "noise", [64], class_indices={"left": 8, "right": 2, "above": 0}, img_size=(32, 32), **HOW)
    assert frame["img_size"].unique().tolist() == ["32x32", "64x64"] and set(frame["encoding"]) == {"timm"}
    frame = evaluate(
        trained_model(resnet, "r", outputs=dict(left=8, right=2, above=0), img_size=(32, 32)), "noise", [32], **HOW
    )
    assert set(frame["label"]) == {"r"}


def test_mistakes_are_named(model):
    with pytest.raises(
        ValueError, match=r"gives images of torch\.float32: give uint8 \[3, h, w\] or PIL images, or, of images"
    ):
        evaluate(model, Pictures("float"), [32], **HOW)
    with pytest.raises(ValueError, match="'big' is not an image size"):
        evaluate(model, Pictures("pil"), ["big"], **HOW)
    with pytest.raises(ValueError, match="vitrel_vit_n8_table has 3 outputs, but shapes has 4 classes"):
        evaluate(model, "shapes", [32], n=2, **HOW)
    assert vitrel.evaluate.evaluate is evaluate


def test_it_needs_no_import_of_its_own():
    code = "import sys, vitrel; assert 'pandas' not in sys.modules; vitrel.evaluate.evaluate; assert 'pandas' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(AttributeError, match="module 'vitrel' has no attribute 'transfers'"):
        vitrel.transfers  # noqa: B018
