"""The study from ImageNet weights: the folder it prepares, its tables against plain loops, the flower classifiers."""

from dataclasses import replace

import numpy as np
import pytest
import timm
import torch
from torchvision.io import write_jpeg

from helpers import ROOT
from tools.study import imagenet_weights as study
from tools.study.imagenet_weights import Evaluated, logistic_regression, prepare, table_of
from tools.study.pages import fill
from vitrel.evaluate.checkpoint import trained_model
from vitrel.evaluate.run import at_sizes
from vitrel.evaluate.statistics import estimate


def pictures(folder, names):
    folder.mkdir(parents=True)
    for name in names:
        write_jpeg(torch.randint(0, 255, (3, 240, 260), dtype=torch.uint8), str(folder / name))


@pytest.fixture
def evaluated(tmp_path):
    """Two models of two seeds on 30 scenes at two sizes."""
    models = []
    for label, key in (("a", "absolute"), ("b", "rope_mixed")):
        for seed in (0, 1):
            torch.manual_seed(seed)
            model = timm.create_model(f"vitrel_vit_n8_{key}", num_classes=4, img_size=64, depth=1).eval()
            models.append(replace(trained_model(model, label=label), seed=seed))
    at_sizes(models, "shapes", [64, "32x48"], out=tmp_path, n=30, device="cpu", report=False)
    return Evaluated(tmp_path)


def right(evaluated, label, seed, size):
    row = next(r for r in evaluated.curves.table if (r["label"], r["seed"], r["img_size"]) == (label, seed, size))
    return [int(x) for x in evaluated.scores["top1"][row["key"]]]


@pytest.mark.slow
def test_differences_are_those_of_plain_loops(evaluated):
    a, b = ("a", "bicubic"), ("b", "none")
    sides = [[right(evaluated, label, seed, "32x48") for label in "ab"] for seed in (0, 1)]
    ahead = [100 * sum(x - y for x, y in zip(*of_seed, strict=True)) / 30 for of_seed in sides]
    mean, half = evaluated.ahead(b, a, "32x48").split(" ±")
    assert float(mean) == pytest.approx(sum(ahead) / 2, abs=0.06)
    here_a, here_b = np.array(sides).transpose(1, 0, 2)  # [seeds, images] each
    assert float(half) == pytest.approx(estimate([here_a], [here_b]).half(), abs=0.06)
    with pytest.raises(ValueError, match="no row of c/none at 32x48"):
        evaluated.cell(("c", "none"), "32x48", "scale")
    table = table_of(lambda curve, size: evaluated.cell(curve, size, "scale"), {a: "A", b: "B"}, ["32x48", "64x64"], "64x64")
    assert "32×48" in table and "64 (trained)" in table and table.count("±") == 4


@pytest.mark.slow
def test_the_prepared_photographs_leave_out_what_is_evaluated(tmp_path, monkeypatch):
    monkeypatch.setattr(study, "APART", {"imagenette": 2, "flowers": 1})
    monkeypatch.setattr(study, "FITTED", 2)
    monkeypatch.setattr("vitrel.weights.fit.STEPS", 3)
    data = {name: tmp_path / name for name in ("imagenette", "flowers", "ilsvrc")}
    known = ["ILSVRC2012_val_00000001.JPEG", "ILSVRC2012_val_00000002.JPEG"]
    pictures(data["imagenette"] / "train" / "n01440764", ["n01440764_1.JPEG", known[0], "n01440764_2.JPEG"])
    pictures(data["imagenette"] / "val" / "n01440764", ["n01440764_3.JPEG", known[1]])
    pictures(data["flowers"] / "train" / "rose", ["a.jpg", "b.jpg", "c.jpg"])
    pictures(data["flowers"] / "val" / "rose", ["d.jpg"])
    pictures(data["ilsvrc"] / "val" / "n01440764", known)
    torch.manual_seed(0)
    small = {"embed_dim": 16, "depth": 1, "num_heads": 2}
    model = timm.create_model("vitrel_vit_ti16_absolute", **small)
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    original = timm.create_model
    monkeypatch.setattr(timm, "create_model", lambda name, **how: original(name, **how | small))
    out = tmp_path / "study"
    prepare(data["imagenette"], data["flowers"], data["ilsvrc"], tmp_path / "weights.pth", out)
    found = {part: sorted(path.name for path in (out / "photographs" / part).glob("*/*")) for part in ("train", "val")}
    assert len(found["train"]) == 3 and len(found["val"]) == 3 and not {*found["train"]} & {*found["val"]}
    assert not any("ILSVRC" in name for names in found.values() for name in names)
    relearned = study.vitrel.load(out / "relearned.safetensors")
    assert not relearned.pos_embed.pos_embed.any() and study.vitrel.load(out / "table.safetensors").pos_embed is None
    with pytest.raises(FileExistsError, match="--out"):
        prepare(data["imagenette"], data["flowers"], data["ilsvrc"], tmp_path / "weights.pth", out)


def test_the_flower_classifier_separates_what_is_separable():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(200, 6, generator=generator) * torch.tensor([0.01, 1, 5, 20, 1, 1]) + 3
    labels = (features[:, :3] / torch.tensor([0.01, 1, 5])).argmax(1)
    head = logistic_regression(features, labels, 3)
    assert (head(features).argmax(1) == labels).double().mean() > 0.95


@pytest.mark.slow
def test_the_page_and_the_differences_are_what_the_results_give():
    tables, differences = study.study_tables()
    text = (ROOT / study.PAGE).read_text("utf-8")
    assert fill(text, tables.items()) == text
    assert study.DIFFERENCES.read_text("utf-8") == differences
