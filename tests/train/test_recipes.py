"""The packaged recipes: none is refused on a small folder, and those that no page runs make two updates of a small model."""

import pytest
import timm
import torch
import yaml

import vitrel
from helpers import each
from helpers.runs import read, rows
from vitrel.cli.options import packaged
from vitrel.cli.train import expanded
from vitrel.evaluate.checkpoint import load_checkpoint
from vitrel.train import Optimization, run
from vitrel.train.datamodule import default_batch_size

pytestmark = pytest.mark.slow


@each("name", ["scratch", "finetune"])
@each("images", [30, 320, 1584, 5000])
def test_the_rate_follows_the_batch_of_a_small_folder(name, images):
    optim = yaml.safe_load(packaged("train")[name].read_text("utf-8"))["model"]["optim"]
    assert 2e-4 < Optimization(**optim).scaled_lr(default_batch_size(images)) < 2e-3


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "start.safetensors"
    torch.manual_seed(0)
    vitrel.save(timm.create_model("vitrel_vit_n8_absolute", num_classes=4, img_size=32, depth=2), path)
    return path


@pytest.mark.parametrize("kind", ["scratch", "finetune", "distill"])
def test_no_default_is_refused_on_a_small_folder(folder, weights, tmp_path, kind):
    """Neither the size of a batch nor the length of the warm-up, both meant for more images."""
    start = {
        "scratch": ["--model=vitrel_vit_n8_absolute", "--model.model_args={depth: 2}", "--data.n_train=25"],
        "finetune": [f"--model={weights}", "--data.n_train=25"],  # mixup pairs images, and 25 is odd
        "distill": [f"--model={weights}", "--distill", "--position=table", "--data.n_train=33"],  # in batches of 32
    }[kind]
    quiet = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.logger=false", "--data.workers=0"]
    quiet += ["--data.n_val=4", "--data.augment=null"]
    run(["fit", *expanded([*start, "--epochs=1", f"--data={folder}", "--size=32", f"--out={tmp_path}", *quiet])])
    assert read(tmp_path / "checkpoints" / "last.ckpt")["vitrel"]["step"] == (1 if kind == "distill" else 3)


def test_a_model_without_position_is_trained_and_read_again(folder, tmp_path):
    options = ["--model=resnet10t", f"--data={folder}", "--size=32", "--epochs=1", f"--out={tmp_path}"]
    small = ["--data.n_train=16", "--data.n_val=8", "--data.workers=0", "--data.augment=null", "--trainer.logger=false"]
    run(["fit", *expanded([*options, *small, "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"])])
    assert len([row for row in rows(tmp_path / "metrics.csv") if row["val/top1"]]) == 1
    trained = load_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    assert trained.img_size == (32, 32) and trained.model(torch.randn(1, 3, 32, 32)).shape == (1, 4)


RECIPES = packaged("train")
OF_PAGES = {"scratch", "finetune", "distill", "position_free", "segmentation"}  # tests/docs/test_page_commands.py runs them
IMAGENET = [name for name in RECIPES if name.startswith("imagenet")]
UPDATES = ["--size=64", "--data.batch_size=4", "--trainer.accumulate_grad_batches=2", "--data.n_train=16", "--epochs=1"]
QUICK = ["--data.n_val=4", "--data.workers=0", *["--trainer.devices=1"] * (torch.cuda.device_count() > 1)]


@pytest.fixture(scope="module")
def pretrained(tmp_path_factory):
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


@pytest.mark.parametrize("name", [*IMAGENET, "fixres_finetune"])
def test_it_trains(name, folder, pretrained, tmp_path, capsys):
    run(["fit", *expanded(two_updates(name, folder, pretrained, tmp_path / "run"))])
    (epoch,) = [row for row in rows(tmp_path / "run" / "metrics.csv") if row["train/loss_epoch"]]
    assert float(epoch["train/loss_epoch"]) > 0
    state = read(tmp_path / "run" / "checkpoints" / "last.ckpt")
    assert state["vitrel"]["step"] == 2 and all(torch.isfinite(value).all() for value in state["state_dict"].values())
    if name == "fixres_finetune":
        before = vitrel.load(pretrained).state_dict()
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
