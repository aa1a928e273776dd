"""Images are decoded once, shared between processes, and loaded in smaller batches where memory lacks."""

import pytest

from vitrel.data import Reading
from vitrel.evaluate import images

pytestmark = pytest.mark.usefixtures("brief_evaluations")


def test_images_are_decoded_once_for_all_models_and_policies(trained, noise, monkeypatch, rows_of):
    models = [trained("vitrel_vit_n8_table"), trained("vitrel_vit_n8_none")]
    how = {"protocols": ("canvas",), "policies": "all"}
    rows = rows_of(models, [64], **how)
    assert len(rows) == 2 + 4 and noise.decoded == 2 * 12
    assert noise.requested[-1] == {
        "data": "noise", "split": "val", "size": (64, 64), "mean": (0.5,) * 3, "std": (0.5,) * 3, "crop_pct": 1.0,
        "interpolation": "bicubic", "protocol": "canvas", "base_size": (32, 32), "crop_mode": "center", "n": None,
        "seed": 0, "reading": Reading(), "task": "classification",
    }  # fmt: skip
    monkeypatch.setattr(images, "CACHE_BYTES", 0)
    again = rows_of(models, [64], **how)
    assert noise.decoded == 2 * 12 + 6 * 12
    assert [row["nll"] for row in again] == [row["nll"] for row in rows]
