"""A run that goes on is the run that was saved: the same images, settings and weights, or it says what is another."""

import os
import re
import shutil
import signal
import warnings

import pytest
import timm
import torch

from helpers.runs import EVERYTHING, assert_same_run, at, in_child, read, resumed, status
from helpers.tars import write_tars
from vitrel.train import run

SETTINGS = ("--data.augment={flip: false, erase: 0.2}", "--model.mixing.mixup=0.2", "--model.label_smoothing=0.1")


@pytest.fixture
def data(folder, tmp_path):
    """A copy of the images that a test may change."""
    shutil.copytree(folder, tmp_path / "data")
    return tmp_path / "data"


def content(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file() and "tensorboard" not in path.parts}


def refused(args, folder):
    """The error that refuses to resume a run; nothing it left may have changed."""
    before = content(folder)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        run(resumed(args, folder))
    after = content(folder)
    assert before.keys() == after.keys()
    assert [path.name for path in before if before[path] != after[path]] == []
    return str(caught.value)


CHANGES = {
    "--data.augment.erase=0.3": "data.augment.erase: 0.2, now 0.3",
    "--data.train_sizes=[32, 24]": "train_sizes: [], now [[32, 32], [24, 24]]",
    "--data.repeats=2": "repeats: 1, now 2",
    "--model.mixing.mixup=0.3": "mixing.mixup: 0.2, now 0.3",
    "--model.mixing.cutmix=1.0": "mixing.cutmix: 0.0, now 1.0",
    "--model.label_smoothing=0.0": "label_smoothing: 0.1, now 0.0",
    "--model.objective.loss=bce": "objective.loss: ce, now bce",
    "--model.model_args.drop_path_rate=0.1": "model_args.drop_path_rate: 0.2, now 0.1",
    "--model.tuning.trainable=[head, norm]": "tuning.trainable: None, now ['head', 'norm']",
    "--trainer.gradient_clip_val=2": "gradient_clip_val: None, now 2",
    "--data.batch_size=8": "images per batch of all devices: 16, now 8",
    "--seed_everything=4": "seed: 3, now 4",
    "--trainer.accumulate_grad_batches=2": "accumulate_grad_batches: 1, now 2",
    "--data.n_train=80": "training images: 96, now 80",
    "--model.optim.lr=1e-3": "optim.lr: 0.003, now 0.001",
    "--trainer.limit_train_batches=4": "updates per epoch: 6, now 2",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [CHANGES, {"--data.augment=null": "data.augment: {'scale': ", "--data.size=48": "data.size: [32, 32], now [48, 48]"}],
)
def test_other_settings_are_named_with_both_values(command_in, whole, changes):
    folder = whole(*SETTINGS, epochs=1)
    said = refused([*command_in(folder.parent)(folder.name, *SETTINGS, epochs=1), *changes], folder)
    last = folder / "checkpoints" / "last.ckpt"
    assert [text for text in changes.values() if text not in said] == []
    assert f"--model.tuning.init_from={last}" in said and str(last) in said


@pytest.mark.slow
def test_a_teacher_is_known_by_its_weights(command, tmp_path):
    """Its file may be moved; another one of the same name is another teacher."""
    paths = [tmp_path / name / "teacher.pth" for name in ("a", "b", "c")]
    for seed, path in enumerate(paths[:2]):
        torch.manual_seed(seed)
        path.parent.mkdir()
        torch.save(timm.create_model("resnet10t", num_classes=4).state_dict(), path)
    distillation = "--model.objective.distillation={{teacher: resnet10t, img_size: 32, tau: {tau}, checkpoint: {path}}}"
    args = [*command("run", epochs=1), distillation.format(tau=1.0, path=paths[0])]
    run(args)
    said = refused([*args, distillation.format(tau=1.0, path=paths[1])], tmp_path / "run")
    assert re.search(r": objective\.distillation\.weights: [0-9a-f]{64}, now [0-9a-f]{64}; set", said)
    assert "objective.distillation.tau: 1.0, now 2.0" in refused(
        [*args, distillation.format(tau=2.0, path=paths[0])], tmp_path / "run"
    )
    paths[0].parent.rename(paths[2].parent)
    moved = distillation.format(tau=1.0, path=paths[2])
    run([*resumed(args, tmp_path / "run"), moved, "--trainer.max_epochs=2"])
    assert read(tmp_path / "run" / "checkpoints" / "last.ckpt")["vitrel"]["epoch"] == 2


@pytest.mark.slow
def test_other_drawn_images_are_named(tmp_path):
    args = ["fit", "--model.model=vitrel_vit_n8_none", "--model.optim.warmup_epochs=0", "--data.size=64", "--data.n_val=8"]
    args += ["--data.n_train=64", "--model.model_args={depth: 1, embed_dim: 32, num_heads: 2}", "--trainer.accelerator=cpu"]
    args += [f"--trainer.default_root_dir={tmp_path}/run", "--trainer.max_epochs=1", "--trainer.enable_progress_bar=false"]
    run([*args, "--data.data=shapes"])
    assert "drawn data: shapes, now shapes-corner" in refused([*args, "--data.data=shapes-corner"], tmp_path / "run")


def rename(data):
    (data / "train" / "red" / "3.png").rename(data / "train" / "red" / "3b.png")


def add(data):
    shutil.copy(data / "train" / "blue" / "0.png", data / "train" / "blue" / "00\udcff.png")


def relabel(data):
    (data / "train" / "red" / "3.png").rename(data / "train" / "red" / "x")
    (data / "train" / "blue" / "3.png").rename(data / "train" / "red" / "3.png")
    (data / "train" / "red" / "x").rename(data / "train" / "blue" / "3.png")


def grow(data):
    """Another size, at the same time."""
    for i in range(5):
        path = data / "train" / "gray" / f"{i}.png"
        before = path.stat()
        path.write_bytes(path.read_bytes() + b"0")
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.slow
def test_other_files_are_refused(command_in, whole, folder, data):
    done = whole(epochs=1)
    args = [*command_in(done.parent)(done.name, epochs=1), f"--data.data={data}"]
    for change, number in ((rename, ""), (add, "96, now 97"), (relabel, ""), (grow, "")):
        change(data)
        said = refused(args, done)
        assert "training files: other names, labels or sizes" in said and (f"training images: {number}" in said) == bool(number)
        assert str(data) not in said  # where the images lie may change
        shutil.rmtree(data)
        shutil.copytree(folder, data)


@pytest.mark.slow
def test_images_of_other_times_are_told_and_the_run_goes_on(command, data, tmp_path):
    """Some ways of copying do not keep the times."""
    args = [*command("run", epochs=1), f"--data.data={data}"]
    run(args)
    for path in (data / "train").glob("*/*.png"):
        path.touch()
    with pytest.warns(UserWarning, match="training images have other times of modification than when .* the same names and"):
        run([*resumed(args, tmp_path / "run"), "--trainer.max_epochs=2"])
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="training images have other times")
        run([*resumed(args, tmp_path / "run"), "--trainer.max_epochs=3"])  # compared with the times of the second run
    assert read(tmp_path / "run" / "checkpoints" / "last.ckpt")["vitrel"]["epoch"] == 3


@pytest.mark.slow
def test_other_tars_are_named(command, folder, data, tmp_path):
    write_tars(folder, tmp_path / "tars")
    args = [*command("run", epochs=1), f"--data.data={tmp_path}/tars"]
    run(args)
    shutil.copy(data / "train" / "red" / "3.png", data / "train" / "red" / "4.png")
    write_tars(data, tmp_path / "tars")
    assert "training files: other names, labels or sizes" in refused(args, tmp_path / "run")


@pytest.mark.slow
def test_what_may_change_ends_in_the_same_weights(command, whole, data, tmp_path):
    """Where the data lies, how it is loaded, how it is computed and what else is written."""
    args = command("cut", *EVERYTHING, f"--data.data={data}", "--run.save_every=1", epochs=2)
    assert status(in_child(args, at(8, signal.SIGKILL))) == -signal.SIGKILL
    data.rename(tmp_path / "moved")
    (tmp_path / "moved" / "val" / "red" / "0.png").rename(tmp_path / "moved" / "val" / "red" / "0b.png")
    free = [f"--data.data={tmp_path}/moved", "--data.workers=1", "--run.save_every=2"]
    free += ["--data.reading.bad_share=0.5", "--model.execution.grad_checkpointing=true", "--trainer.logger=false"]
    assert status(in_child([*resumed(args, tmp_path / "cut"), *free])) == 0
    assert_same_run(tmp_path / "cut", whole(*EVERYTHING, *free, epochs=2))


def flip(path):
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_refused_before_anything_is_changed(command, whole, tmp_path):
    settings = ("--model.ema={decay: 0.9}", "--model.optim.warmup_epochs=0")
    args = command("run", *settings, epochs=2)
    shutil.copytree(whole(*settings, epochs=2), tmp_path / "run")
    checkpoints = tmp_path / "run" / "checkpoints"
    shutil.copy(checkpoints / "last.ckpt", tmp_path / "whole.ckpt")
    flip(checkpoints / "last.ckpt")
    said = refused(args, tmp_path / "run")
    assert re.search(r"last\.ckpt \([\d,]+ bytes\) is damaged: its record 'archive/data/\d+' is not what was saved", said)
    assert "is damaged" in refused([*args, "--ckpt_path=auto"], tmp_path / "run")
    run([*args, f"--ckpt_path={checkpoints}/best.ckpt"])  # as requested
    whole = read(tmp_path / "whole.ckpt")["state_dict"]
    assert all(torch.equal(whole[name], value) for name, value in read(checkpoints / "last.ckpt")["state_dict"].items())


@pytest.mark.slow
def test_weights_alone_are_no_run(command, whole, tmp_path):
    stored = read(whole(epochs=1) / "checkpoints" / "last.ckpt")
    torch.save({"state_dict": stored["state_dict"]}, tmp_path / "weights.ckpt")
    with pytest.raises(ValueError, match=r"weights\.ckpt holds no run.*--model\.tuning\.init_from=.*weights\.ckpt"):
        run([*command("other", epochs=1), f"--ckpt_path={tmp_path}/weights.ckpt"])
    assert not (tmp_path / "other").exists()
