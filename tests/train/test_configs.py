"""Every training configuration trains: its own recipe, on a small model and small images."""

import pytest
import timm
import torch
import yaml

from helpers import ROOT
from helpers.runs import read, rows
from vitrel.train import run

FOLDER = ROOT / "vitrel" / "configs" / "train"
CONFIGS = [*sorted(FOLDER.glob("imagenet_*.yaml")), FOLDER / "fixres_finetune.yaml"]


def small(path, folder, out):
    """Arguments that make a configuration cheap and leave its recipe."""
    name = yaml.safe_load(path.read_text())["model"]["model"]
    shrunk = "vitrel_swin_n" if "swin" in name else name.replace("b16", "n8").replace("s16", "n8")
    return [
        "fit",
        f"--config={path}",
        f"--data.data={folder}",
        "--data.size=32",
        "--data.batch_size=16",
        "--data.n_train=32",
        "--data.n_val=16",
        "--data.workers=0",
        f"--model.model={shrunk}",
        "--model.optim.warmup_epochs=0.5",
        f"--trainer.default_root_dir={out}",
        "--trainer.max_epochs=1",
        "--trainer.accelerator=cpu",
        "--trainer.devices=1",
        "--trainer.num_nodes=1",
        "--trainer.strategy=auto",
        "--trainer.precision=32-true",
        "--trainer.enable_progress_bar=false",
    ]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_it_trains(path, folder, tmp_path):
    args = small(path, folder, tmp_path / "run")
    if "finetune" in path.name:
        torch.manual_seed(0)
        start = timm.create_model("vitrel_vit_n8_rope_mixed", img_size=32, num_classes=4, block_args={"init_values": 1e-4})
        torch.save(start.state_dict(), tmp_path / "start.pth")
        args.append(f"--model.tuning.init_from={tmp_path / 'start.pth'}")
    run(args)
    epochs = [row for row in rows(tmp_path / "run" / "metrics.csv") if row["train/loss_epoch"]]
    assert len(epochs) == 1 and all(float(row["train/loss_epoch"]) > 0 for row in epochs)
    state = read(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert all(torch.isfinite(value).all() for value in state["state_dict"].values())
    if "finetune" in path.name:
        moved = {n for n, v in start.state_dict().items() if not torch.equal(state["state_dict"][f"model.{n}"], v)}
        assert moved and all(name.startswith(("norm.", "head.")) for name in moved)
