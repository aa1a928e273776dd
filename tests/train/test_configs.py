"""Training recipes that no page's command runs make two updates: their own settings, on a small model and small images."""

import pytest
import timm
import torch
import yaml

import vitrel
from helpers.runs import read, rows
from vitrel.cli.options import packaged
from vitrel.cli.train import expanded
from vitrel.train import run

RECIPES = packaged("train")
OF_PAGES = {"scratch", "finetune", "distill", "position_free", "segmentation"}  # tests/docs/test_page_commands.py runs them
IMAGENET = [name for name in RECIPES if name.startswith("imagenet")]
UPDATES = ["--size=64", "--data.batch_size=4", "--trainer.accumulate_grad_batches=2", "--data.n_train=16", "--epochs=1"]
QUICK = ["--data.n_val=4", "--data.workers=0", *["--trainer.devices=1"] * (torch.cuda.device_count() > 1)]


@pytest.fixture(scope="module")
def start(tmp_path_factory):
    """Weights to begin with, of four other classes."""
    path = tmp_path_factory.mktemp("weights") / "start.safetensors"
    torch.manual_seed(0)
    model = timm.create_model("vitrel_vit_n8_rope_mixed", img_size=64, num_classes=4, block_args={"init_values": 1e-4})
    vitrel.save(model, path)
    return path


def two_updates(name, folder, start, out):
    """Arguments of two updates of a recipe, of which nothing is changed but the model, its weights and the warm-up's length."""
    recipe = yaml.safe_load(RECIPES[name].read_text())["model"]
    args = [f"--config={name}", f"--data={folder}", f"--out={out}", *UPDATES, *QUICK]
    if "warmup_epochs" in recipe["optim"]:
        args.append("--model.optim.warmup_epochs=0.5")
    if name == "fixres_finetune":
        return [*args, "--model=vitrel_vit_n8_rope_mixed", f"--weights={start}"]
    model = recipe["model"]
    return [*args, f"--model={'vitrel_swin_n' if 'swin' in model else model.replace('b16', 'n8').replace('s16', 'n8')}"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*IMAGENET, "fixres_finetune"])
def test_it_trains(name, folder, start, tmp_path, capsys):
    run(["fit", *expanded(two_updates(name, folder, start, tmp_path / "run"))])
    (epoch,) = [row for row in rows(tmp_path / "run" / "metrics.csv") if row["train/loss_epoch"]]
    assert float(epoch["train/loss_epoch"]) > 0
    state = read(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert state["vitrel"]["step"] == 2 and all(torch.isfinite(value).all() for value in state["state_dict"].values())
    if name == "fixres_finetune":
        before = vitrel.load(start).state_dict()
        moved = {key for key, value in before.items() if not torch.equal(state["state_dict"][f"model.{key}"], value)}
        assert moved and all(key.startswith(("norm.", "head.")) for key in moved)
    else:
        meant = yaml.safe_load(RECIPES[name].read_text())["data"]["global_batch_size"]
        said = f"updates of 8 images instead of {meant:,} (data.global_batch_size): 1 device, batches of 4, 2 accumulated"
        assert said in capsys.readouterr().out


def test_every_recipe_is_run_and_those_of_imagenet_keep_their_batch_on_any_number_of_devices():
    assert {*RECIPES} == {*IMAGENET, "fixres_finetune", *OF_PAGES}
    assert len(IMAGENET) == 3
    for recipe in (yaml.safe_load(RECIPES[name].read_text()) for name in IMAGENET):
        assert recipe["data"]["global_batch_size"] == recipe["model"]["optim"]["lr_base_size"]
        assert not {"devices", "num_nodes", "accelerator", "accumulate_grad_batches"} & recipe["trainer"].keys()
