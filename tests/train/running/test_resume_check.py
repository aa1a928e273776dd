"""A run that goes on is the run that was saved: the same images, settings and weights, or it says what is another."""

import os
import re
import shutil
import signal
import warnings

import pytest
import timm
import torch

from helpers import each
from helpers.runs import EVERYTHING, assert_same_run, at, in_child, read, resumed, status
from helpers.tars import write_tars
from vitrel import save
from vitrel.data import create_dataset
from vitrel.train import run

pytestmark = pytest.mark.slow


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
    "--model.mixing.cutmix=0.5": "mixing.cutmix: 1.0, now 0.5",
    "--model.label_smoothing=0.0": "label_smoothing: 0.1, now 0.0",
    "--model.objective.loss=bce": "objective.loss: ce, now bce",
    "--model.model_args.drop_path_rate=0.1": "model_args.drop_path_rate: 0.2, now 0.1",
    "--model.tuning.trainable=[head, norm]": "tuning.trainable: None, now ['head', 'norm']",
    "--model.ema.decay=0.8": "ema.decay: 0.9, now 0.8",
    "--trainer.gradient_clip_val=2": "gradient_clip_val: 1.0, now 2",
    "--trainer.gradient_clip_algorithm=value": "gradient_clip_algorithm: None, now value",
    "--data.batch_size=8": "images per batch of all devices: 16, now 8",
    "--seed_everything=4": "seed: 3, now 4",
    "--trainer.accumulate_grad_batches=3": "accumulate_grad_batches: 2, now 3",
    "--data.n_train=80": "training images: 96, now 80",
    "--model.optim.lr=1e-3": "optim.lr: 0.003, now 0.001",
    "--trainer.limit_train_batches=4": "updates per epoch: 3, now 2",
}


@each(
    "changes",
    [CHANGES, {"--data.augment=null": "data.augment: {'scale': ", "--data.size=48": "data.size: [32, 32], now [48, 48]"}],
)
def test_other_settings_are_named_with_both_values(command_in, whole, changes):
    folder = whole(*EVERYTHING, epochs=2)
    said = refused([*command_in(folder.parent)(folder.name, *EVERYTHING, epochs=2), *changes], folder)
    last = folder / "checkpoints" / "last.ckpt"
    assert [text for text in changes.values() if text not in said] == []
    assert f"--model.tuning.init_from={last}" in said and str(last) in said


def test_a_teacher_is_known_by_its_weights(command, tmp_path):
    """Its file may be moved; another one of the same name is another teacher."""
    shape = "{depth: 1, embed_dim: 32, num_heads: 2}"
    paths = [tmp_path / name / "teacher.safetensors" for name in ("a", "b", "c")]
    for seed, path in enumerate(paths[:2]):
        torch.manual_seed(seed)
        path.parent.mkdir()
        save(timm.create_model("vitrel_vit_n8_none", num_classes=4, img_size=32, depth=1, embed_dim=32, num_heads=2), path)

    def distilled(path, tau=1.0, epochs=1):
        teacher = f"teacher: vitrel_vit_n8_none, teacher_args: {shape}, img_size: 32, tau: {tau}, checkpoint: {path}"
        return [*command("run", epochs=epochs), f"--model.objective.distillation={{{teacher}}}"]

    run(distilled(paths[0]))
    said = refused(distilled(paths[1], tau=2.0), tmp_path / "run")
    assert re.search(r"objective\.distillation\.weights: [0-9a-f]{64}, now [0-9a-f]{64}; set", said)
    assert "objective.distillation.tau: 1.0, now 2.0" in said
    paths[0].parent.rename(paths[2].parent)
    run(resumed(distilled(paths[2], epochs=2), tmp_path / "run"))
    assert read(tmp_path / "run" / "checkpoints" / "last.ckpt")["vitrel"]["epoch"] == 2


def test_other_drawn_images_are_named(command, tmp_path):
    args = command("run", "--model.optim.warmup_epochs=0", "--data.n_train=16", "--data.n_val=4", epochs=1)
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


@each("tars", [False, True])
def test_other_names_labels_or_sizes_are_other_files(folder, data, tmp_path, tars):
    def fingerprint():
        if tars:
            write_tars(data, tmp_path / "tars")
        where = str(tmp_path / "tars" if tars else data)
        return create_dataset(where, "train", (32, 32), mean=(0.5,) * 3, std=(0.5,) * 3).fingerprints()[0]

    found = {fingerprint()}
    for number, change in enumerate((rename, add, relabel, grow), 2):
        change(data)
        found.add(fingerprint())
        assert len(found) == number, change
        shutil.rmtree(data)
        shutil.copytree(folder, data)
    assert fingerprint() in found


def test_other_files_are_refused(command_in, whole, data):
    done = whole(*EVERYTHING, epochs=2)
    add(data)
    said = refused([*command_in(done.parent)(done.name, *EVERYTHING, epochs=2), f"--data.data={data}"], done)
    assert "training files: other names, labels or sizes" in said and "training images: 96, now 97" in said
    assert str(data) not in said  # where the images lie may change


def test_images_of_other_times_are_told_and_the_run_goes_on(command, whole, data, tmp_path):
    """Some ways of copying do not keep the times."""
    shutil.copytree(whole(*EVERYTHING, epochs=2), tmp_path / "run")
    args = [*resumed(command("run", *EVERYTHING), tmp_path / "run"), f"--data.data={data}"]
    for path in (data / "train").glob("*/*.png"):
        path.touch()
    with pytest.warns(UserWarning, match="training images have other times of modification than when .* the same names and"):
        run(args)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="training images have other times")
        run([*args, "--trainer.max_epochs=4"])  # compared with the times of the second run
    assert read(tmp_path / "run" / "checkpoints" / "last.ckpt")["vitrel"]["epoch"] == 4


def test_what_may_change_ends_in_the_same_weights(command, whole, data, tmp_path):
    """Where the data lies, how it is loaded, how it is computed and what else is written."""
    args = command("cut", *EVERYTHING, f"--data.data={data}", "--run.save_every=1", epochs=2)
    assert status(in_child(args, at(3, signal.SIGKILL))) == -signal.SIGKILL
    data.rename(tmp_path / "moved")
    (tmp_path / "moved" / "val" / "red" / "0.png").rename(tmp_path / "moved" / "val" / "red" / "0b.png")
    free = [f"--data.data={tmp_path}/moved", "--data.workers=1", "--run.save_every=2"]
    free += ["--data.reading.bad_share=0.5", "--model.execution.grad_checkpointing=true", "--trainer.logger=false"]
    assert status(in_child([*resumed(args, tmp_path / "cut"), *free])) == 0
    assert_same_run(tmp_path / "cut", whole(*EVERYTHING, epochs=2))


def test_weights_alone_are_no_run(command, tmp_path):
    torch.save({"state_dict": {"model.head.bias": torch.zeros(4)}}, tmp_path / "weights.ckpt")
    with pytest.raises(ValueError, match=r"weights\.ckpt holds no run.*--model\.tuning\.init_from=.*weights\.ckpt"):
        run([*command("other", epochs=1), f"--ckpt_path={tmp_path}/weights.ckpt"])
    assert not (tmp_path / "other").exists()
