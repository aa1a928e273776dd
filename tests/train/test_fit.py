"""Whole runs through the command line's own function, in this process."""

import re

import pytest
import timm
import torch
import yaml
from torchvision.datasets import ImageFolder

import vitrel
from helpers import each
from helpers.runs import read, rows
from vitrel.models.config import PREPROCESSING
from vitrel.train import Classifier, run

pytestmark = pytest.mark.slow


def denormals():
    return bool((torch.tensor(1e-39) * 1).any())


@pytest.fixture(scope="module")
def trained(command_in, tmp_path_factory):
    """A run of six epochs: what `run` returns, its folder, and whether there were denormal numbers at its batches."""
    parent, seen = tmp_path_factory.mktemp("trained"), []
    begin = Classifier.on_train_batch_start

    def look(*args):
        seen.append(denormals())
        return begin(*args)

    assert denormals()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Classifier, "on_train_batch_start", look)
        cli = run(command_in(parent)("run", "--model.label_smoothing=0.1", epochs=6))
    return cli, parent / "run", seen


def test_a_run_flushes_denormal_numbers_and_leaves_the_process_as_it_was(trained):
    """On a CPU: training with pape takes twice the time with them on Intel's."""
    seen = trained[2]
    assert seen and not any(seen) and denormals()


def test_a_run_lowers_the_loss_and_leaves_its_folder(trained):
    cli, folder, _ = trained
    log = rows(folder / "metrics.csv")
    epochs = [row for row in log if row["val/loss"]]
    assert [row["epoch"] for row in epochs] == [str(i) for i in range(6)]
    assert float(epochs[-1]["val/loss"]) < 0.5 * float(epochs[0]["train/loss_epoch"])
    assert float(epochs[-1]["val/top1"]) > 0.9
    assert float(epochs[-1]["images_per_s"]) > 0
    assert float(epochs[0]["lr-AdamW/decayed"]) > float(epochs[-1]["lr-AdamW/decayed"])
    assert any(row["train/loss_step"] for row in log)
    assert list((folder / "tensorboard").glob("events*"))
    assert yaml.safe_load((folder / "config.yaml").read_text())["seed_everything"] == 3
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["best.ckpt", "last.ckpt"]
    assert cli.trainer.current_epoch == 6
    best = max(range(6), key=lambda i: (float(epochs[i]["val/top1"]), -i))
    assert epochs_of(folder) == {"best": best + 1, "last": 6}


def epochs_of(folder):
    return {name: read(folder / "checkpoints" / f"{name}.ckpt")["vitrel"]["epoch"] for name in ("best", "last")}


def test_checkpoint_rebuilds_the_model_without_the_trainer(trained, folder):
    cli, run_folder, _ = trained
    checkpoint = read(run_folder / "checkpoints" / "last.ckpt")
    entry = checkpoint["vitrel"]
    assert entry["model"] == "vitrel_vit_n8_table" and entry["model_args"]["depth"] == 2
    assert entry["classes"] == ["blue", "gray", "green", "red"] and entry["img_size"] == [32, 32]
    assert (entry["data"], entry["seed"], entry["epoch"], entry["step"]) == (str(folder), 3, 6, 36)
    cfg = cli.model.model.pretrained_cfg
    assert all(entry[k] == (list(cfg[k]) if k in ("mean", "std") else cfg[k]) for k in PREPROCESSING)
    assert checkpoint["hyper_parameters"]["label_smoothing"] == 0.1
    assert checkpoint["hyper_parameters"]["optim"]["lr"] == 3e-3
    net = timm.create_model(entry["model"], num_classes=4, img_size=entry["img_size"], **entry["model_args"]).eval()
    net.load_state_dict({k.removeprefix("model."): v for k, v in checkpoint["state_dict"].items()})
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(net(images), cli.model.eval()(images))


def test_evaluation_resizes_in_the_crop_mode_of_the_model(command, tmp_path, native_folder):
    """The loss that is logged is that of the weights saved, on images that timm's own transform prepares."""
    mode = '--model.model_args.pretrained_cfg_overlay={"crop_mode": "squash", "input_size": [3, 32, 32]}'
    run(command("run", mode, f"--data.data={native_folder}", epochs=1))
    checkpoint = read(tmp_path / "run" / "checkpoints" / "last.ckpt")
    net = vitrel.load(tmp_path / "run")
    assert checkpoint["vitrel"]["crop_mode"] == net.pretrained_cfg["crop_mode"] == "squash"
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(net), is_training=False)
    images = ImageFolder(str(native_folder / "val"), transform)
    with torch.no_grad():
        logits = net(torch.stack([image for image, _ in images]))
    loss = float(torch.nn.functional.cross_entropy(logits, torch.tensor(images.targets)))
    assert float(rows(tmp_path / "run" / "metrics.csv")[-1]["val/loss"]) == pytest.approx(loss, abs=1e-4)


@pytest.mark.filterwarnings("error:.*could not find the monitored key.*")
def test_epochs_without_an_evaluation(command, tmp_path):
    run(command("run", "--trainer.check_val_every_n_epoch=2", epochs=3))
    assert epochs_of(tmp_path / "run") == {"best": 2, "last": 3}


def test_a_finished_run_is_not_overwritten_and_another_model_cannot_resume(trained, command_in, tmp_path):
    folder = trained[1]
    last = folder / "checkpoints" / "last.ckpt"
    before = last.read_bytes()
    said = r"holds a run already: resume it with --ckpt_path auto, name another folder with --out"
    with pytest.raises(FileExistsError, match=said):
        run(command_in(folder.parent)(folder.name, epochs=1))
    assert last.read_bytes() == before
    with pytest.raises(ValueError, match=r"the checkpoint's model is vitrel_vit_n8_table, this run's is vitrel_vit_n8_none"):
        run(command_in(tmp_path)("other", f"--ckpt_path={last}", "--model.model=vitrel_vit_n8_none"))


@each(
    ("option", "text"),
    [
        ("--model.ema={decay: 2}", "model.ema.decay must satisfy 0 <= decay < 1, not 2.0"),
        (
            "--model.objective.distillation={alpha: 2}",
            "distillation.alpha (2.0) is within 0..1, distillation.tau (1.0) positive",
        ),
    ],
)
def test_settings_out_of_range_are_told_in_their_own_words(command, option, text):
    """jsonargparse would list the types and the whole group around them, where the group may be null."""
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        run(command("run", option))


@each(
    ("extra", "text"),
    [
        (["--data.batch_size=15", "--model.mixing.mixup=0.2"], "data.batch_size must be even, not 15"),
        (["--model.model_args={num_classes: 7}"], "model_args must not set num_classes"),
        (["--trainer.max_epochs=-1"], "the run has no length: set trainer.max_epochs"),
    ],
)
def test_settings_that_do_not_fit_are_refused(command, tmp_path, extra, text):
    with pytest.raises(ValueError, match=text):
        run(command("run", *extra))
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_the_schedule_ends_with_the_run(command):
    """With a share of the batches, the last of which fill no accumulation: ceil(4 / 3) updates; and with a bound of updates."""
    for extra, updates in (("--trainer.limit_train_batches=4", 2), ("--trainer.max_steps=1000", 2)):
        cli = run(command(extra, extra, "--trainer.accumulate_grad_batches=3", epochs=1))
        assert cli.trainer.global_step == cli.model.updates_per_epoch() == updates
        assert cli.trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0, abs=1e-12)


def test_gradients_are_clipped_in_mixed_precision(command):
    """By value; by norm in test_recipe.py."""
    clip = ["--trainer.gradient_clip_val=0.1", "--trainer.gradient_clip_algorithm=value"]
    cli = run(command("run", "--trainer.precision=bf16-mixed", *clip, "--trainer.limit_train_batches=2", epochs=1))
    assert cli.trainer.optimizers[0].param_groups[0]["fused"] and cli.trainer.global_step == 2
