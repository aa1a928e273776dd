"""The packaged recipes train every family of models, on any number of images and for any number of epochs."""

import pytest
import timm
import torch
import yaml

import vitrel
from helpers import each
from helpers.runs import read, rows
from helpers.small_runs import Tensors, fit
from vitrel import POSITIONS
from vitrel.cli.options import packaged
from vitrel.cli.train import expanded
from vitrel.evaluate.checkpoint import load_checkpoint
from vitrel.train import Classifier, Optimization, Tuning, run
from vitrel.train.datamodule import default_batch_size

NAMES = timm.list_models("vitrel*")
SMALLEST = [name for name in NAMES if "_n8_" in name or name in ("vitrel_swin_n", "vitrel_swin_n_shaw", "vitrel_swinv2_n")]
SCRATCH = yaml.safe_load(packaged("train")["scratch"].read_text("utf-8"))["model"]


def test_every_family_and_encoding_has_a_smallest_model():
    """Which is trained below; larger ones differ from it in patch, width and depth alone."""
    families = {name.removesuffix("_none").replace("vitrel_", "").split("_")[0] for name in SMALLEST}
    assert families == {"vit", "swin", "swinv2"}
    trained = {name.partition("_n8_")[2] or name.partition("swin_n_")[2] for name in SMALLEST}
    assert trained >= {*POSITIONS} - {"sincos", "absolute"}


@each("name", ["scratch", "finetune"])
@each("images", [30, 320, 1584, 5000])
def test_the_rate_follows_the_batch_of_a_small_folder(name, images):
    optim = yaml.safe_load(packaged("train")[name].read_text("utf-8"))["model"]["optim"]
    assert 2e-4 < Optimization(**optim).scaled_lr(default_batch_size(images)) < 2e-3


def recipe(name, **how):
    optim = Optimization(**SCRATCH["optim"])
    return Classifier(name, 4, 32, SCRATCH["model_args"], optim=optim, label_smoothing=SCRATCH["label_smoothing"], **how)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALLEST)
def test_the_default_recipe_trains_every_family_and_encoding(name):
    trainer = fit(recipe(name), Tensors(batch_size=2, batches=1), max_epochs=1, limit_val_batches=0)
    assert torch.isfinite(trainer.callback_metrics["train/loss_epoch"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vitrel_vit_n8_absolute", "resnet18"])
@pytest.mark.parametrize("tuning", [Tuning(), Tuning(position="table"), Tuning(position="rope_mixed", absolute="drop")])
def test_the_default_recipe_builds_models_of_timm_and_with_another_encoding(name, tuning):
    if name == "resnet18" and tuning.position:
        with pytest.raises(ValueError, match=r"resnet18|ResNet"):
            tuning.build(name, 4, (32, 32), SCRATCH["model_args"])
        return
    model, _ = tuning.build(name, 4, (32, 48), SCRATCH["model_args"])
    assert model.train()(torch.randn(2, 3, 32, 48)).shape == (2, 4)


def test_without_weights_the_arguments_of_a_model_are_free():
    """The weights before the encoding is added are random, so none has to fit."""
    arguments = {"class_token": False, "global_pool": "avg", "depth": 2}
    model, _ = Tuning(position="table").build("vit_tiny_patch16_224", 4, (32, 32), arguments)
    assert len(model.blocks) == 2 and model(torch.randn(1, 3, 32, 32)).shape == (1, 4)


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "start.safetensors"
    torch.manual_seed(0)
    vitrel.save(timm.create_model("vitrel_vit_n8_absolute", num_classes=4, img_size=32, depth=2), path)
    return path


LENGTHS = {"--epochs=1": 1, "--epochs=5": 5, "--trainer.max_steps=2": 0}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "length"), [*(("scratch", length) for length in LENGTHS), ("finetune", "--epochs=5"), ("distill", "--epochs=1")]
)
def test_no_default_is_refused_on_a_small_folder(folder, weights, tmp_path, kind, length):
    """Neither the size of a batch nor the length of the warm-up, both meant for more images."""
    start = {
        "scratch": ["--model=vitrel_vit_n8_absolute", "--model.model_args={depth: 2}", "--data.n_train=25"],
        "finetune": [f"--model={weights}", "--data.n_train=25"],  # mixup pairs images, and 25 is odd
        "distill": [f"--model={weights}", "--distill", "--position=table", "--data.n_train=33"],  # in batches of 32
    }[kind]
    quiet = ["--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false", "--trainer.logger=false", "--data.workers=0"]
    quiet += ["--data.n_val=4", "--data.augment=null"]
    run(["fit", *expanded([*start, length, f"--data={folder}", "--size=32", f"--out={tmp_path}", *quiet])])
    updates = read(tmp_path / "checkpoints" / "last.ckpt")["vitrel"]["step"]
    per_epoch = 1 if kind == "distill" else 3
    assert updates == (per_epoch * LENGTHS[length] or min(2, per_epoch))


@pytest.mark.slow
def test_a_model_without_position_is_trained_and_read_again(folder, tmp_path):
    options = ["--model=resnet18", f"--data={folder}", "--size=32", "--epochs=1", f"--out={tmp_path}"]
    small = ["--data.n_train=16", "--data.n_val=8", "--data.workers=0", "--data.augment=null", "--trainer.logger=false"]
    run(["fit", *expanded([*options, *small, "--trainer.accelerator=cpu", "--trainer.enable_progress_bar=false"])])
    assert len([row for row in rows(tmp_path / "metrics.csv") if row["val/top1"]]) == 1
    trained = load_checkpoint(tmp_path / "checkpoints" / "last.ckpt")
    assert trained.img_size == (32, 32) and trained.model(torch.randn(1, 3, 32, 32)).shape == (1, 4)
