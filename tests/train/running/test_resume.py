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
from vitrel.train.running.saving import Best, Saving


@pytest.mark.slow
@pytest.mark.parametrize(
    ("extra", "call"),
    [
        (["--trainer.val_check_interval=4", "--trainer.check_val_every_n_epoch=null"], 5),  # just after an evaluation
        (["--trainer.val_check_interval=0.5", "--trainer.accumulate_grad_batches=2"], 4),  # which lies in an accumulation
    ],
)
def test_killed_where_epochs_and_evaluations_do_not_end_together(command, whole, tmp_path, extra, call):
    extra = ("--model.ema={decay: 0.9}", "--run.save_every=1", *extra)
    args = command("cut", *extra, epochs=2)
    assert status(in_child(args, at(call, signal.SIGKILL))) == -signal.SIGKILL
    assert status(in_child(resumed(args, tmp_path / "cut"))) == 0
    assert_same_run(tmp_path / "cut", whole(*extra, epochs=2))


@pytest.mark.slow
def test_a_finished_run_leaves_no_handler(command):
    """What follows in the same process, such as an evaluation, must end at a signal."""
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    run(command("run", epochs=1))
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before


@pytest.mark.slow
def test_sigterm_to_loader_processes_too(command, tmp_path):
    """As SLURM and `timeout` send it; a run without its loader could not save."""

    def to_all():
        subprocess.run(["kill", "-TERM", "--", f"-{os.getpgrp()}"], check=False)  # not by the run, which ends them so itself

    def install():
        os.setpgid(0, 0)
        at(8, to_all)()

    args = command("run", "--data.workers=2")
    assert status(in_child(args, install)) == 143
    assert read(tmp_path / "run" / "checkpoints" / "last.ckpt")["vitrel"]["step"] == 8


def test_sigterm_before_the_first_update_saves_after_it(command, tmp_path, capfd):
    assert status(in_child(command("run"), at(1, signal.SIGTERM, "on_train_epoch_start"))) == 143
    assert f"SIGTERM: saved {tmp_path}/run/checkpoints/last.ckpt (update 1)" in capfd.readouterr().out


@pytest.mark.slow
def test_killed_while_reading_tars(command, whole, folder, tmp_path):
    write_tars(folder, tmp_path / "tars")
    extra = (*EVERYTHING, f"--data.data={tmp_path}/tars", "--data.workers=2", "--run.save_every=1")
    args = command("cut", *extra, epochs=2)
    assert status(in_child(args, at(10, signal.SIGKILL))) == -signal.SIGKILL
    assert status(in_child([*resumed(args, tmp_path / "cut"), "--data.workers=1"])) == 0
    assert_same_run(tmp_path / "cut", whole(*extra, epochs=2))


@pytest.mark.slow
def test_killed_with_sizes_in_turn_and_repeated_views(command, whole, tmp_path):
    extra = (*EVERYTHING, "--data.train_sizes=[32, [24, 40], 48]", "--data.repeats=2", "--run.save_every=1")
    args = command("cut", *extra, epochs=2)
    assert status(in_child(args, at(11, signal.SIGKILL))) == -signal.SIGKILL
    assert status(in_child(resumed(args, tmp_path / "cut"))) == 0
    assert_same_run(tmp_path / "cut", whole(*extra, epochs=2))


@pytest.mark.slow
def test_killed_just_after_the_save_at_the_end_of_an_epoch(command, whole, tmp_path):
    """Lightning logs the epoch's metrics after that save, and a resumed run does not come back there."""
    args = command("cut", *EVERYTHING, "--run.save_every=1", epochs=2)

    def install():
        save = Saving.on_train_epoch_end

        def patched(self, trainer, module):
            save(self, trainer, module)
            os.kill(os.getpid(), signal.SIGKILL)

        Saving.on_train_epoch_end = patched

    assert status(in_child(args, install)) == -signal.SIGKILL
    assert status(in_child(resumed(args, tmp_path / "cut"))) == 0
    assert_same_run(tmp_path / "cut", whole(*EVERYTHING, epochs=2))


@pytest.mark.slow
def test_killed_in_an_evaluation(command, whole, tmp_path):
    """And again, in the evaluation that makes up for it."""
    args = command("cut", *EVERYTHING, epochs=2)
    for _ in range(2):
        kill = at(2, signal.SIGKILL, "validation_step")
        assert status(in_child(resumed(args, tmp_path / "cut"), kill)) == -signal.SIGKILL
    saved = read(tmp_path / "cut" / "checkpoints" / "last.ckpt")["vitrel"]
    assert (saved["epoch"], saved["step"]) == (1, 3)  # trained, and to be evaluated again
    assert status(in_child(resumed(args, tmp_path / "cut"))) == 0
    assert_same_run(tmp_path / "cut", whole(*EVERYTHING, epochs=2))


@pytest.mark.slow
@pytest.mark.parametrize(("call", "hook", "step"), [(8, "on_train_batch_start", 4), (1, "validation_step", 3)])
def test_sigterm_saves_and_exits_143(command, whole, tmp_path, call, hook, step):
    args = command("cut", *EVERYTHING, epochs=2)
    assert status(in_child(args, at(call, signal.SIGTERM, hook))) == 143
    saved = read(tmp_path / "cut" / "checkpoints" / "last.ckpt")["vitrel"]
    assert (saved["epoch"], saved["step"]) == (step // 3, step)
    assert status(in_child(resumed(args, tmp_path / "cut"))) == 0
    assert_same_run(tmp_path / "cut", whole(*EVERYTHING, epochs=2))


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


@pytest.mark.slow
def test_ctrl_c_twice_ends_a_step_that_does_not(command, tmp_path, capfd):
    def wait():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)  # as a terminal and torchrun send it: still one
        time.sleep(1.1)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(300)

    begin = time.perf_counter()
    args, last = command("run", "--run.save_every=1", epochs=2), tmp_path / "run" / "checkpoints" / "last.ckpt"
    assert status(in_child(args, at_ctrl_c(8, wait, "training_step"))) == 130 and time.perf_counter() - begin < 200
    said = capfd.readouterr()
    assert f"ctrl-c: saved {last} (update 7); to resume" in said.out and "Traceback" not in said.err
    assert read(last)["vitrel"]["step"] == 7


@pytest.mark.slow
def test_ctrl_c_is_nobodys_in_the_background(command):
    """Where a shell has started the run with ctrl-c ignored, it stays ignored."""

    def install():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        at(8, signal.SIGINT)()

    assert status(in_child(command("run", epochs=2), install)) == 0


@pytest.mark.slow
def test_from_the_best_checkpoint(command, tmp_path, monkeypatch):
    """Saved when an evaluation ended, before the epoch did: the resumed run ends the epoch and goes on."""
    judge = Best.check_monitor_top_k
    monkeypatch.setattr(Best, "check_monitor_top_k", lambda *given: given[1].current_epoch < 2 and judge(*given))
    run(command("whole", *EVERYTHING, epochs=3))
    epoch = read(tmp_path / "whole" / "checkpoints" / "best.ckpt")["vitrel"]["epoch"]
    assert epoch < 3
    shutil.copytree(tmp_path / "whole", tmp_path / "again")
    run([*command("again", *EVERYTHING, epochs=3), f"--ckpt_path={tmp_path}/again/checkpoints/best.ckpt"])
    assert_same_run(tmp_path / "again", tmp_path / "whole")


@pytest.mark.slow
def test_a_full_disk_leaves_the_former_checkpoint(command, whole, tmp_path, capfd):
    def fill():
        resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, 60_000))  # bytes; a checkpoint has more, the logs fewer

    args, last = command("cut", "--run.save_every=1", epochs=2), tmp_path / "cut" / "checkpoints" / "last.ckpt"
    assert status(in_child(args, at(9, fill))) == 1
    text = capfd.readouterr().err
    assert f"cannot write the checkpoint {last}" in text and "a former one is unchanged" in text
    assert read(last)["vitrel"]["step"] == 8 and last.stat().st_size > 60_000
    assert {path.name for path in last.parent.iterdir()} <= {"last.ckpt", "best.ckpt"}
    assert status(in_child(resumed(args, tmp_path / "cut"))) == 0
    assert_same_run(tmp_path / "cut", whole(epochs=2))


def saved_at(folder):
    last = folder / "checkpoints" / "last.ckpt"
    return last.stat().st_mtime_ns if last.exists() else None


@pytest.mark.slow
def test_kills_at_random(command, tmp_path):
    """kill -9 at any moment, in the middle of a save too; every run goes on from what the killed one left."""
    extra = (*EVERYTHING, "--run.save_every=1", "--data.workers=2")
    begin = time.perf_counter()
    assert status(in_child(command("whole", *extra, epochs=5))) == 0
    length = time.perf_counter() - begin
    args, folder = command("cut", *extra, epochs=5), tmp_path / "cut"
    chance, kills = random.Random(2), 0
    while kills < 2:
        before = saved_at(folder)
        pid = in_child(resumed(args, folder))
        early = chance.random() < 0.2  # some while they start, the others once they have got on
        while not early and saved_at(folder) == before and os.waitpid(pid, os.WNOHANG) == (0, 0):
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.1) * length)  # more would be the whole run where the machine has grown faster
        os.kill(pid, signal.SIGKILL)
        if status(pid) == 0:
            break
        kills += 1
    assert status(in_child(resumed(args, folder))) == 0
    assert kills == 2  # where in an epoch depends on the machine; others above kill inside one
    assert_same_run(folder, tmp_path / "whole")
