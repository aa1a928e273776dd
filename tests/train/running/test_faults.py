"""What stops a run: a loss or weight that is not a number, images that cannot be read. Nothing saved before is lost."""

import multiprocessing
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from PIL import Image

from helpers import each
from helpers.runs import at, in_child, read, resumed, rows, status
from vitrel.common import lock
from vitrel.common.exits import reported
from vitrel.train import Classifier, datamodule, run
from vitrel.train.running.command import _threads_in_a_line
from vitrel.train.running.faults import FiniteLoss

pytestmark = pytest.mark.slow


@pytest.fixture
def own(folder, tmp_path):
    """A copy of the folder that a test may damage."""
    return shutil.copytree(folder, tmp_path / "images")


def last_step(folder):
    return read(folder / "checkpoints" / "last.ckpt")["vitrel"]["step"]


def test_a_bad_loss_names_step_and_images(command, own, tmp_path, capfd):
    """One white image makes the loss NaN: it is among the images named, and the checkpoint before is kept."""
    name = str(own / "train" / "red" / "white.png")
    Image.new("RGB", (32, 32), "white").save(name)

    def spoil():
        def training_step(self, batch, batch_idx):
            loss = original(self, batch, batch_idx)
            return loss * torch.nan if self.current_epoch == 1 and (batch[0].float().flatten(1).std(1) == 0).any() else loss

        original, Classifier.training_step = Classifier.training_step, training_step

    args = command("run", f"--data.data={own}", "--run.save_every=1", epochs=2)
    assert status(in_child(args, spoil)) == 1
    text, listed = capfd.readouterr().err, (tmp_path / "run" / "bad_batch.0.txt").read_text().splitlines()
    assert "FloatingPointError: loss is not finite at epoch 1, batch " in text
    assert len(listed) == 16 and name in listed and f"all listed in {tmp_path}/run/bad_batch.0.txt" in text
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    batch = int(text.partition("epoch 1, batch ")[2].partition(" ")[0])
    assert last_step(tmp_path / "run") == 6 + batch
    assert all(torch.isfinite(value).all() for value in read(last)["state_dict"].values())


def test_a_bad_weight_is_not_saved(command, tmp_path, capfd):
    """An update may spoil a weight after a loss that was finite."""

    def spoil():
        def step(self, *args):
            original(self, *args)
            if self.global_step == 2:  # before this update is counted
                self.model.head.bias.data[0] = torch.inf

        original, Classifier.optimizer_step = Classifier.optimizer_step, step

    assert status(in_child(command("run", "--run.save_every=1"), spoil)) == 1
    text = capfd.readouterr().err
    assert "FloatingPointError: model.head.bias not finite after update 3" in text
    assert last_step(tmp_path / "run") == 2


def damage(path):
    path.write_bytes(path.read_bytes()[:200])


def test_unreadable_images_are_left_out_and_listed(command, own, tmp_path, capfd):
    """In training the batch is smaller, by an even number since mixup pairs them; in evaluation they count nowhere.

    Names that are no UTF-8 are listed escaped; links to folders are followed where asked.
    """
    bad = [own / "train" / "red" / "3.png", own / "train" / "blue" / "11.png", own / "val" / "blue" / "2.png"]
    for path in bad:
        damage(path)
    (own / "train" / "red" / os.fsdecode(b"caf\xe9.png")).write_bytes(b"<html>")
    (own / "train" / "red" / "more").symlink_to(tmp_path / "extra")
    (tmp_path / "extra").mkdir()
    Image.new("RGB", (32, 32), "red").save(tmp_path / "extra" / "more.gif")
    seen = tmp_path / "seen"

    def record():
        def step(self, batch, batch_idx):
            with seen.open("a") as file:
                file.write(f"{len(batch[0])}\n")
            return original(self, batch, batch_idx)

        original, Classifier.training_step = Classifier.training_step, step

    options = "--model.mixing.mixup=0.2", "--data.reading={bad_share: 0.05, follow_links: true}", "--data.workers=2"
    args = command("run", *options, f"--data.data={own}", "--run.save_every=1", epochs=2)
    assert status(in_child(args, at(9, 9))) == -9
    assert status(in_child(resumed(args, tmp_path / "run"), record)) == 0
    assert sorted(listed(tmp_path / "run")) == sorted([*map(str, bad), f"{own}/train/red/caf\\xe9.png"])
    assert "3 of 98 training images and 1 of 32 evaluation images cannot be read" in capfd.readouterr().out
    log = [row for row in rows(tmp_path / "run" / "metrics.csv") if row["val/top1"]]
    assert len(log) == 2 and float(log[-1]["val/top1"]) * 31 == pytest.approx(round(float(log[-1]["val/top1"]) * 31), abs=1e-3)
    lengths = [*map(int, seen.read_text().split())]
    assert min(lengths) < 16 and not any(length % 2 for length in lengths)


def listed(folder):
    return sorted((folder / "bad_images.csv").read_text().splitlines()[1:])


def test_too_many_unreadable_images_stop_the_run_and_all_are_listed(command, own, tmp_path, capfd):
    """Of the evaluation; of training in the next test."""
    bad = sorted(str(own / "val" / "red" / f"{i}.png") for i in range(2))
    for path in map(Path, bad):
        damage(path)
    assert status(in_child(command("share", f"--data.data={own}"), main=one_line_of)) == 1
    text = capfd.readouterr().err.splitlines()[-1]
    assert f"error: 2 of 32 evaluation images cannot be read ({bad[0]}, {bad[1]};" in text
    assert str(tmp_path / "share" / "bad_images.csv") in text and listed(tmp_path / "share") == bad
    assert "bad_share (0.01)" in text
    assert status(in_child(command("raise", f"--data.data={own}", "--data.reading.on_bad=raise"), main=one_line_of)) == 1
    assert f"error: cannot decode {bad[0]}: " in capfd.readouterr().err.splitlines()[-1]  # the first alone, where asked


def test_a_batch_of_which_no_image_can_be_read_is_left_out(command, own, tmp_path, capfd):
    """Such an image is named and counted as others are, and a run that has no other ends with their number."""
    for path in own.glob("*/*/*.png"):
        if int(path.stem) > 1:
            path.unlink()
    bad = [own / "train" / "red" / f"{i}.png" for i in range(2)]
    for path in bad:
        damage(path)
    args = [f"--data.data={own}", "--data.batch_size=1", "--data.reading.bad_share=0.25"]
    assert status(in_child(command("single", *args, epochs=1), main=one_line_of)) == 0
    assert "2 of 8 training images cannot be read" in capfd.readouterr().out
    assert listed(tmp_path / "single") == sorted(map(str, bad))
    for path in (own / "train").glob("*/*.png"):
        damage(path)
    assert status(in_child(command("all", *args), main=one_line_of)) == 1
    text = capfd.readouterr().err.splitlines()[-1]
    assert text.startswith("error: 8 of 8 training images cannot be read") and f"{own}/train/" in text


def test_a_folder_of_images_that_is_gone_is_named_once(command, own, tmp_path, capfd):
    def gone():
        (own / "train").rename(own / "elsewhere")

    args = command("run", f"--data.data={own}", "--trainer.log_every_n_steps=1")
    assert status(in_child(args, at(2, gone, "on_train_batch_start"), main=one_line_of)) == 1
    text = capfd.readouterr().err.splitlines()[-1]
    assert f"{own}/train is gone, with the images in it" in text and "cannot be read" not in text
    assert not (tmp_path / "run" / "bad_images.csv").exists()


@pytest.mark.parametrize(("call", "hook"), [(3, "on_train_batch_start"), (1, "on_train_epoch_end")])
def test_a_folder_that_is_removed_ends_the_run_with_its_name(command, tmp_path, capfd, call, hook):
    gone = tmp_path / "run"
    assert status(in_child(command("run", "--trainer.log_every_n_steps=2"), at(call, lambda: shutil.rmtree(gone), hook))) == 1
    said = capfd.readouterr().err
    assert "FileNotFoundError" in said and f"{gone}/" in said and "Exception in thread" not in said
    assert not gone.exists()  # a part of a run that looks whole would be worse


def test_a_second_run_in_a_folder_is_refused_until_the_first_has_died(command, tmp_path, monkeypatch):
    args, there = command("run", "--run.save_every=1", epochs=1), tmp_path / "there"
    first = in_child([*args, "--data.workers=1"], at(3, lambda: (there.touch(), time.sleep(300))))
    while not there.exists():
        time.sleep(0.05)
    before = {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()}
    with monkeypatch.context() as patch:
        patch.setattr(lock, "PATIENCE", 0.0)
        for more in ([], ["--ckpt_path=auto"]):
            with pytest.raises(BlockingIOError, match=f"another process is writing into {tmp_path}/run"):
                run([*args, *more])
    assert {path: path.read_bytes() for path in (tmp_path / "run").rglob("*") if path.is_file()} == before
    os.kill(first, signal.SIGKILL)
    assert status(first) == -signal.SIGKILL
    run([*args, "--ckpt_path=auto"])  # waits for the loader process that outlives the killed one
    assert last_step(tmp_path / "run") == 6


def kill_a_loader_process():
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)


def test_a_killed_loader_process_ends_the_run_with_one_line(command, tmp_path, capfd):
    args = command("run", "--data.workers=2", "--run.save_every=1")
    assert status(in_child(args, at(3, kill_a_loader_process), main=one_line_of)) == 1
    *_, line = capfd.readouterr().err.splitlines()  # a thread of the other loader process may complain before
    # torch says how it noticed: that the process is gone, or that the batch it was handing over broke off
    assert re.match(r"error: (DataLoader worker \(pid|\[Errno 104\] .*; a DataLoader worker was killed)", line), line
    assert f"the run has ended: saved {tmp_path}/run/checkpoints/last.ckpt (update " in line and "--ckpt_path auto" in line


def one_line_of(args):
    with reported():
        run(args)


def test_a_lack_of_memory_ends_the_run_with_one_line(command, monkeypatch):
    monkeypatch.setattr(Classifier, "training_step", lambda self, *_: torch.empty(2**58))
    with pytest.raises(SystemExit) as ended:
        one_line_of(command("run"))
    line = ended.value.code
    assert line.startswith("error: ") and "memory" in line and "\n" not in line
    assert "nothing is saved yet; the same command starts again" in line


def test_loader_processes_that_cannot_be_started_end_the_run_with_one_line(command, monkeypatch, capfd):
    """As where /dev/shm is missing: Lightning would then report a fault of its own cleaning up."""

    def none(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("multiprocessing.synchronize._multiprocessing", SimpleNamespace(SemLock=none))
    with pytest.raises(SystemExit) as ended:
        one_line_of(command("run", "--data.workers=2"))
    assert "No space left on device" in ended.value.code and "/dev/shm" in ended.value.code

    def later():
        datamodule.check_workers = lambda workers: None  # as where it is full only when the loader starts

    assert status(in_child(command("run", "--data.workers=2"), later, main=one_line_of)) == 1
    said = capfd.readouterr().err
    assert "No space left on device" in said and "iter(" not in said


def test_without_shared_memory_a_run_needs_no_loader_processes(command, monkeypatch):
    def none(self):
        raise RuntimeError("unable to open shared memory object </torch_1> in read-write mode: Read-only file system (30)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", none)
    run(command("run", epochs=1))


def test_a_thread_that_cannot_write_is_a_line_and_another_error_is_not(tmp_path, monkeypatch, capsys):
    """As TensorBoard's writer on a full disk."""
    heard = []
    monkeypatch.setattr(threading, "excepthook", lambda failed: heard.append(failed.exc_type))

    def full():
        raise OSError(28, "No space left on device", "events.out")

    with _threads_in_a_line():
        for work in (full, lambda: 1 / 0):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
    assert heard == [ZeroDivisionError]
    assert capsys.readouterr().err == "warning: a log could not be written: events.out: No space left on device\n"


def finite(folder, losses, device="cpu", every=3, strategy=SingleDeviceStrategy("cpu")):
    """Batch at which the guard speaks, and what it says."""
    guard = FiniteLoss(folder)
    guard.on_train_start(None, SimpleNamespace(device=torch.device("cpu")))
    module = SimpleNamespace(device=SimpleNamespace(type=device))
    for i, loss in enumerate(losses):
        trainer = SimpleNamespace(log_every_n_steps=every, is_last_batch=i == len(losses) - 1, current_epoch=2)
        trainer.global_step, trainer.world_size = 10 + i, 1
        trainer.datamodule = SimpleNamespace(names=lambda epoch, batch: [f"{epoch}-{batch}.png"] * 10)
        trainer.strategy, trainer.global_rank = strategy, 0
        try:
            guard.on_train_batch_end(trainer, module, {"loss": torch.tensor(loss)}, None, i)
        except FloatingPointError as error:
            return i, str(error)
    return None


@each("value", [float("nan"), float("-inf")])
def test_the_first_bad_batch_is_named(tmp_path, value):
    assert finite(tmp_path, [1.0, 2.0]) is None
    elsewhere = SimpleNamespace(reduce_boolean_decision=lambda here, all: True)  # of two processes, in the other
    assert finite(tmp_path, [1.0, 2.0], strategy=elsewhere) == (0, "loss is not finite on another device, which names it")
    when, text = finite(tmp_path, [1.0, value, 1.0, 1.0])
    assert when == 1 and "epoch 2, batch 1 " in text
    assert ", 2-1.png and 2 more, all listed in" in text and (tmp_path / "bad_batch.0.txt").read_text() == "2-1.png\n" * 10
    when, text = finite(tmp_path, [1.0, value, value, 1.0, 1.0], device="cuda")
    assert when == 2 and "epoch 2, batch 1 " in text  # looked at every third batch, and still names the first
    when, text = finite(tmp_path, [1.0, 1.0, 1.0, 1.0, value], device="cuda")
    assert when == 4 and "batch 4 " in text
