"""Runs that are killed, terminated or stopped anywhere end, once resumed, bit-equal to one that never was."""

import os
import random
import resource
import shutil
import signal
import subprocess
import time

import pytest

from helpers.runs import EVERYTHING, assert_same_run, at, in_child, read, resumed, status
from helpers.tars import write_tars
from vitrel.train import run
from vitrel.train.running.saving import Saving

pytestmark = pytest.mark.slow


def test_stopped_where_epochs_and_evaluations_do_not_end_together(command, whole, tmp_path):
    """Killed after an evaluation that lies in an accumulation; told to stop before one of the second epoch that does not."""
    extra = ("--model.ema={decay: 0.9}", "--run.save_every=1", "--trainer.accumulate_grad_batches=2")
    extra += ("--trainer.val_check_interval=5", "--trainer.check_val_every_n_epoch=null")
    args = command("cut", *extra, epochs=2)
    assert status(in_child(args, at(6, signal.SIGKILL))) == -signal.SIGKILL
    assert status(in_child(resumed(args, tmp_path / "cut"), at(6, signal.SIGTERM))) == 143  # of batches 5 to 10
    assert status(in_child(resumed(args, tmp_path / "cut"))) == 0
    assert_same_run(tmp_path / "cut", whole(*extra, epochs=2))


def test_a_finished_run_leaves_no_handler_and_ctrl_c_is_nobodys_in_the_background(command):
    """What follows in the same process must end at a signal; where a shell has ctrl-c ignored, it stays ignored."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def both(args):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        run(args)
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN and signal.getsignal(signal.SIGTERM) == before[signal.SIGTERM]

    assert status(in_child(command("run", epochs=1), at(4, signal.SIGINT), main=both)) == 0


def test_sigterm_to_loader_processes_too(command, tmp_path):
    """As SLURM and `timeout` send it; a run without its loader could not save."""

    def to_all():
        subprocess.run(["kill", "-TERM", "--", f"-{os.getpgrp()}"], check=False)  # not by the run, which ends them so itself

    def install():
        os.setpgid(0, 0)
        at(3, to_all)()

    args = command("run", "--data.workers=2")
    assert status(in_child(args, install)) == 143
    assert read(tmp_path / "run" / "checkpoints" / "last.ckpt")["vitrel"]["step"] == 3


def test_sigterm_before_the_first_update_saves_after_it(command, tmp_path, capfd):
    assert status(in_child(command("run"), at(1, signal.SIGTERM, "on_train_epoch_start"))) == 143
    assert f"SIGTERM: saved {tmp_path}/run/checkpoints/last.ckpt (update 1)" in capfd.readouterr().out


def position(folder):
    saved = read(folder / "checkpoints" / "last.ckpt")["vitrel"]
    return saved["epoch"], saved["step"]


def test_stopped_inside_an_epoch_and_killed_just_after_the_save_at_its_end(command, whole, tmp_path):
    """Lightning logs the epoch's metrics after that save, and a resumed run does not come back there.

    With max_steps, Lightning would skip the epoch after it.
    """
    args, folder = command("cut", *EVERYTHING, "--trainer.max_steps=100", epochs=2), tmp_path / "cut"

    def install():
        save = Saving.on_train_epoch_end

        def patched(self, trainer, module):
            save(self, trainer, module)
            os.kill(os.getpid(), signal.SIGKILL)

        Saving.on_train_epoch_end = patched

    assert status(in_child(args, at(3, signal.SIGTERM))) == 143
    assert position(folder) == (0, 2)
    assert status(in_child(resumed(args, folder), install)) == -signal.SIGKILL
    assert status(in_child(resumed(args, folder))) == 0
    assert_same_run(folder, whole(*EVERYTHING, epochs=2))


def test_killed_in_an_evaluation_and_stopped_in_the_one_that_makes_up_for_it(command, whole, tmp_path):
    args, folder = command("cut", *EVERYTHING, epochs=2), tmp_path / "cut"
    for number, left in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 143)):
        assert status(in_child(resumed(args, folder), at(2, number, "validation_step"))) == left
        assert position(folder) == (1, 3)  # trained, and to be evaluated again
        assert "val/" not in (folder / "metrics.csv").read_text()  # it stops at once
    assert status(in_child(resumed(args, folder))) == 0
    assert_same_run(folder, whole(*EVERYTHING, epochs=2))


def at_ctrl_c(*args):
    """As `at`, where ctrl-c is not ignored: whoever runs the tests may do so."""

    def install():
        signal.signal(signal.SIGINT, signal.default_int_handler)
        at(*args)()

    return install


def test_ctrl_c_before_training_saves_nothing(command, tmp_path, capfd):
    assert status(in_child(command("run"), at_ctrl_c(1, signal.SIGINT, "setup"))) == 130
    assert "ctrl-c: nothing is saved yet" in capfd.readouterr().out
    assert not (tmp_path / "run" / "checkpoints" / "last.ckpt").exists()


def test_ctrl_c_twice_ends_a_step_that_does_not(command, tmp_path, capfd):
    def wait():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # as a terminal and torchrun send it: still one
        time.sleep(1.1)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(300)

    begin = time.perf_counter()
    args, last = command("run", "--run.save_every=1"), tmp_path / "run" / "checkpoints" / "last.ckpt"
    assert status(in_child(args, at_ctrl_c(3, wait, "training_step"))) == 130 and time.perf_counter() - begin < 200
    said = capfd.readouterr()
    assert f"ctrl-c: saved {last} (update 2); to resume" in said.out and "Traceback" not in said.err
    assert read(last)["vitrel"]["step"] == 2


def flip(path):
    damaged = bytearray(path.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    path.write_bytes(damaged)


def test_from_the_best_checkpoint_where_the_last_is_damaged(command, whole, tmp_path):
    """Saved when an evaluation ended, before the epoch did: the resumed run ends the epoch and goes on."""
    done, folder = whole(*EVERYTHING, epochs=2), tmp_path / "again"
    assert read(done / "checkpoints" / "best.ckpt")["vitrel"]["epoch"] == 1
    shutil.copytree(done, folder)
    flip(folder / "checkpoints" / "last.ckpt")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    args = command("again", *EVERYTHING, epochs=2)
    with pytest.raises(ValueError, match=r"last\.ckpt \([\d,]+ bytes\) is damaged: its record '.*' is not what was saved"):
        run([*args, "--ckpt_path=auto"])
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    run([*args, f"--ckpt_path={folder}/checkpoints/best.ckpt"])
    assert_same_run(folder, done)


def test_a_full_disk_leaves_the_former_checkpoint(command, tmp_path, capfd):
    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))  # bytes; a checkpoint has more, the logs fewer

    args, last = command("cut", "--run.save_every=1", epochs=1), tmp_path / "cut" / "checkpoints" / "last.ckpt"
    assert status(in_child(args, at(4, fill))) == 1
    text = capfd.readouterr().err
    assert f"cannot write the checkpoint {last}" in text and "a former one is unchanged" in text
    assert read(last)["vitrel"]["step"] == 3 and last.stat().st_size > 60_000
    assert {path.name for path in last.parent.iterdir()} == {"last.ckpt"}


def saved_at(folder):
    last = folder / "checkpoints" / "last.ckpt"
    return last.stat().st_mtime_ns if last.exists() else None


def test_kills_at_random(command, whole, folder, tmp_path):
    """kill -9 at any moment, in the middle of a save too, while loader processes read tars at sizes in turn."""
    write_tars(folder, tmp_path / "tars")
    extra = (*EVERYTHING, f"--data.data={tmp_path}/tars", "--data.train_sizes=[32, [24, 40], 48]", "--data.repeats=2")
    extra += ("--data.workers=2", "--run.save_every=1")
    args, cut, chance = command("cut", *extra, epochs=2), tmp_path / "cut", random.Random(2)
    for _ in range(2):
        before = saved_at(cut)
        pid = in_child(resumed(args, cut))
        while saved_at(cut) == before and os.waitpid(pid, os.WNOHANG) == (0, 0):
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.05))
        os.kill(pid, signal.SIGKILL)
        assert status(pid) == -signal.SIGKILL
    assert status(in_child([*resumed(args, cut), "--data.workers=1"])) == 0
    assert_same_run(cut, whole(*extra, epochs=2))
