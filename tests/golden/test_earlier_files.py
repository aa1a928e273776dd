"""Files that an earlier version wrote still give the same model: logits, position, classes and preprocessing.

Written by version 0.1 before its formats changed: three files of `vitrel.save`, with random weights, and the last.ckpt of three
runs of two epochs on drawn images. expected.json has what `vitrel.load` gave then, for `picture` at two sizes.
"""

import json
from pathlib import Path

import pytest
import torch

import vitrel
from vitrel.models.config import preprocessing_of
from vitrel.models.segmenter import Segmenter

FOLDER = Path(__file__).parent / "earlier"
EXPECTED = json.loads((FOLDER / "expected.json").read_text())


def picture(h, w):
    channel, y, x = torch.meshgrid(torch.arange(3.0), torch.arange(float(h)), torch.arange(float(w)), indexing="ij")
    return torch.sin(0.3 * x * (channel + 1) + 0.2 * y + 0.01 * x * y)[None]


@pytest.mark.parametrize("name", EXPECTED)
def test_the_same_model(name):
    expected, model = EXPECTED[name], vitrel.load(FOLDER / name)
    assert not model.training
    assert type(model).__name__ == expected["type"]
    assert sum(p.numel() for p in model.parameters()) == expected["parameters"]
    names = model.pretrained_cfg.get("label_names")
    assert (names and [*names]) == expected["classes"]
    assert json.loads(json.dumps(preprocessing_of(model))) == expected["preprocessing"]
    if "position" in expected:
        backbone = model.backbone if isinstance(model, Segmenter) else model
        assert backbone.current_arguments()["position"] == expected["position"]
    for size, values in expected["logits"].items():
        with torch.no_grad():
            logits = model(picture(*map(int, size.split("x"))))
        logits = logits[..., ::8, ::8] if logits.dim() == 4 else logits  # of a segmentation, every eighth pixel
        torch.testing.assert_close(logits.flatten(), torch.tensor(values), atol=2e-6, rtol=1e-5)
