import pandas as pd
import pytest
import timm
import torch

from helpers import script
from vitrel.data import class_names


@pytest.fixture(scope="module")
def tool():
    return script("tools/evaluate_transfer.py")


@pytest.fixture
def checkpoint(tmp_path):
    def write(name, file):
        torch.manual_seed(0)
        classes = list(class_names("shapes"))
        model = timm.create_model(name, num_classes=len(classes), img_size=64)
        about = {
            "model": name, "model_args": {}, "classes": classes, "img_size": [64, 64], "mean": [0.5] * 3, "std": [0.5] * 3,
            "crop_pct": 1.0, "interpolation": "bicubic", "data": "shapes", "seed": 0, "epoch": 1,
        }  # fmt: skip
        path = tmp_path / file
        torch.save({"state_dict": {f"model.{k}": v for k, v in model.state_dict().items()}, "vitrel": about}, path)
        return str(path)

    return write


def test_table_verdicts_and_files(tool, checkpoint, tmp_path, capsys):
    paths = [checkpoint("vitrel_vit_n8_table", "a.ckpt"), checkpoint("vitrel_swin_n", "b.ckpt")]
    out = tmp_path / "out"
    arguments = ["--data", "shapes", "--sizes", "64x96", "80", "--n", "8", "--device", "cpu", "--out", str(out)]
    tool.main(["--checkpoint", *paths, *arguments, "--policies", "clip"])
    printed = capsys.readouterr().out
    assert "Top-1 in percent, scale protocol:" in printed and "Top-1 in percent, canvas protocol:" in printed
    assert "- vitrel_vit_n8_table: nothing interpolated at any of 3 sizes (state dict bit-identical), up to " in printed
    assert (
        "- vitrel_swin_n: nothing interpolated, re-created or touched at any of 3 sizes (state dict bit-identical);" in printed
    )
    frame = pd.read_csv(out / "results.csv")
    assert len(frame) == 2 * 2 * 3 and set(frame["img_size"]) == {"64x64", "64x96", "80x80"}
    assert frame["unchanged"].all() and (frame["n"] == 8).all()
    assert (out / "table.md").read_text("utf-8").startswith("# shapes\n")
    assert (out / "plots" / "accuracy.png").exists() and (out / "plots" / "throughput.png").exists()


def test_two_checkpoints_of_one_model_are_told_apart(tool, checkpoint, tmp_path, capsys):
    paths = [checkpoint("vitrel_vit_n8_none", "a.ckpt"), checkpoint("vitrel_vit_n8_none", "b.ckpt")]
    arguments = ["--data", "shapes", "--sizes", "64", "--n", "4", "--protocols", "scale", "--device", "cpu"]
    tool.main(["--checkpoint", *paths, *arguments, "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert all(f"- vitrel_vit_n8_none ({path}): " in printed for path in paths)


def test_mistakes_end_with_one_line(tool, checkpoint, tmp_path, capsys):
    path = checkpoint("vitrel_vit_n8_none", "a.ckpt")
    for arguments, message in [
        (["--checkpoint", str(tmp_path / "none"), "--data", "shapes", "--sizes", "64"], "error: no checkpoint at"),
        (
            ["--checkpoint", path, "--data", "shapes", "--sizes", "64", "--policies", "clip"],
            "no model has the resize policy 'clip'",
        ),
        (["--checkpoint", path, "--data", "shapes", "--sizes", "64", "--protocols", "zoom"], "unknown protocol 'zoom'"),
        (["--checkpoint", path, "--data", str(tmp_path / "no"), "--sizes", "64"], "no"),
    ]:
        with pytest.raises(SystemExit, match=message):
            tool.main([*arguments, "--device", "cpu", "--out", str(tmp_path / "out")])
    with pytest.raises(SystemExit):
        tool.main(["--checkpoint", path, "--data", "shapes", "--sizes", "64", "96by128"])
    assert "'96by128' is not an image size: write pixels as 96, or height x width as 160x224" in capsys.readouterr().err
