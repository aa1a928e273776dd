"""The study on photographs: a slice of the whole grid, and that its pages are its results."""

import functools
import math
import re

import pandas as pd
import pytest
import torch
import yaml
from torchvision.io import write_jpeg

from helpers import ROOT, command
from tools.study import photographs as tool
from tools.study.photographs import headline, kept_beside


def photographs(folder, side=40):
    """Two classes, told apart by color, three training and two validation images each."""
    generator = torch.Generator().manual_seed(0)
    for split, n in (("train", 6), ("val", 2)):
        for label, channel in (("blue", 2), ("red", 0)):
            (folder / split / label).mkdir(parents=True)
            for i in range(n):
                image = torch.randint(0, 120, (3, side, side + 8 * (i % 2)), generator=generator, dtype=torch.uint8)
                image[channel] += 120
                write_jpeg(image, str(folder / split / label / f"{i}.jpg"))
    return folder


@pytest.mark.slow
def test_a_slice_of_the_whole_grid_from_training_to_tables(tmp_path, capsys):
    """Own training, tuning at another size, borrowed weights: every kind of line of the configuration, on twelve images."""
    config = yaml.safe_load((ROOT / "configs" / "study_photographs.yaml").read_text("utf-8"))
    labels = ["absolute", "rope_mixed", "rope_mixed-mixed", "absolute-fixres"]
    config["models"] = [entry for entry in config["models"] if entry["label"] in (*labels, "rope_mixed+yarn")]
    config |= {"data": str(photographs(tmp_path / "photographs")), "seeds": [0]}
    config["train"]["trainer"] |= {"max_epochs": 1, "accelerator": "cpu", "precision": "32-true", "enable_progress_bar": False}
    config["train"]["data"] |= {"size": 32, "batch_size": 4, "workers": 0}
    config["train"]["model"]["optim"]["warmup_epochs"] = 0.5
    config["evaluate"] |= {"sizes": [24, 64], "batch_size": 4, "workers": 0, "attention_n": 1, "device": "cpu"}
    for entry in config["models"]:  # nano models
        entry["name"] = entry["name"].replace("vit_ti16", "vit_n8").replace("swin_t", "swin_n")
        entry.get("model_args", {}).pop("embed_dim", None)
        entry["model_args"] = entry.get("model_args", {}) | {"depth": 1}
        if "train_sizes" in entry.get("train", {}).get("data", {}):
            entry["train"] = {"data": {"train_sizes": [24, 32, 48]}}
        elif "train" in entry:
            entry["train"] |= {"trainer": {"max_epochs": 1}, "data": entry["train"]["data"] | {"size": 64}}
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(config))
    compare = command("compare")
    compare.main([str(path), "--out", str(tmp_path), "--no-report"])
    printed = capsys.readouterr().out
    assert re.findall(r"\] ([\w-]+)-seed0: training", printed) == labels  # what is tuned comes last
    folder = tmp_path / "study_photographs"
    rows = pd.read_csv(folder / "results.csv")
    assert set(rows["label"]) == {*labels, "rope_mixed+yarn"}
    trained = rows.groupby("label")["train_size"].unique().map(list).to_dict()
    assert trained["absolute"] == ["32x32"] and trained["absolute-fixres"] == ["64x64"]

    def state(label):
        return torch.load(folder / f"{label}-seed0" / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]

    before, after = state("absolute"), state("absolute-fixres")
    changed = {name.split(".")[1] for name, value in before.items() if not torch.equal(value, after[name])}
    assert changed == {"pos_embed", "norm", "head"}  # resampled to the other grid, and what was tuned


def test_the_pages_are_what_the_results_give(monkeypatch):
    for name in ("read_rows", "_table"):  # of the same folders each time
        monkeypatch.setattr(tool, name, functools.cache(getattr(tool, name)))
    tool.main(["--check"])


ROWS = ROOT / "results" / "study"
SHOWN = {("absolute", "bicubic"): "interpolated", ("rope_mixed", "none"): "turned"}


def test_figures_of_the_tables_are_those_of_the_rows():
    """Taken from the rows by pandas alone."""
    frame = pd.read_csv(ROWS / "flowers256" / "results.csv")
    frame = frame[frame["protocol"] == "scale"].set_index(["label", "seed", "img_size"])["top1"]
    means = {label: frame.loc[label, :, "128x128"].groupby("seed").first() for label in ("absolute", "rope_mixed")}
    lost = {label: means[label] - frame.loc[label, :, "64x64"] for label in means}
    place = [("128x128", "scale")]
    lines = headline(ROWS, ["flowers256"], SHOWN, [("64x64", "scale"), *place]).splitlines()
    assert "flowers256: 64 (trained)" in lines[0] and "flowers256: 128, scale" in lines[0]
    assert "interpolated | absolute bicubic" in lines[2] and "turned" in lines[3] and "nothing" in lines[3]
    for line, label in zip(lines[2:], means, strict=True):
        assert re.search(rf"\| +{means[label].mean():.1f} ±", line)
    (line,) = kept_beside(ROWS, ["flowers256"], SHOWN, place).splitlines()[2:]
    gap = lost["rope_mixed"] - lost["absolute"]
    shares = [means[label].mean() for label in means] + [(means[label] - lost[label]).mean() for label in means]
    own, images = gap.var() / 3, sum(share * (100 - share) / 540 for share in shares)  # of seeds, of independent images
    critical = (4.30265 * own + 1.95996 * images) / (own + images)  # Student's and the normal one
    mean, half = map(float, re.search(r"([+-][\d.]+) ±([\d.]+)", line).groups())
    assert mean == pytest.approx(gap.mean(), abs=0.06)
    assert half == pytest.approx(critical * math.sqrt(own + images), abs=0.15)
