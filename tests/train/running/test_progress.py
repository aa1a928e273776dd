from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from vitrel.train.running import progress
from vitrel.train.running.progress import EpochLines, Speed, peak_memory


class Run:
    """Hooks called as by a trainer of 4 updates in each of 2 epochs, on a clock that only moves when told."""

    def __init__(self, monkeypatch, world_size=1, global_step=0):
        self.now = 100.0
        monkeypatch.setattr(progress.time, "perf_counter", lambda: self.now)
        self.trainer = SimpleNamespace(
            max_epochs=2,
            max_steps=-1,
            global_step=global_step,
            world_size=world_size,
            sanity_checking=False,
            log_every_n_steps=50,
        )
        self.module = SimpleNamespace(device=torch.device("cpu"), updates_per_epoch=lambda: 4, updates=lambda: 8)
        self.speed = Speed()
        self.speed.setup(self.trainer, self.module, "fit")
        self.speed.on_train_start(self.trainer, self.module)

    def batch(self, wait, work, images=8):
        self.now += wait
        self.speed.on_train_batch_start(self.trainer, self.module, None, 0)
        self.now += work
        self.trainer.global_step += 1
        self.speed.on_train_batch_end(self.trainer, self.module, None, (torch.zeros(images, 3, 1, 1), None), 0)

    def evaluate(self, seconds):
        self.speed.on_validation_start(self.trainer, self.module)
        self.now += seconds
        self.speed.on_validation_end(self.trainer, self.module)


def test_speed_and_wait_of_an_epoch(monkeypatch):
    run = Run(monkeypatch, world_size=3)
    run.speed.on_train_epoch_start(run.trainer, run.module)
    run.batch(wait=1, work=1)
    run.batch(wait=0, work=2)
    assert run.speed.rate == pytest.approx(3 * 16 / 4) and run.speed.data_wait == pytest.approx(1 / 4)
    run.evaluate(50)  # counts neither as training nor as waiting
    run.batch(wait=0, work=4)
    assert run.speed.rate == pytest.approx(3 * 24 / 8) and run.speed.data_wait == pytest.approx(1 / 8)
    run.speed.on_train_epoch_start(run.trainer, run.module)
    run.batch(wait=3, work=1)
    assert run.speed.rate == pytest.approx(3 * 8 / 4) and run.speed.data_wait == pytest.approx(3 / 4)


def test_time_left_counts_evaluation_and_what_this_start_has_done(monkeypatch):
    run = Run(monkeypatch)
    run.batch(0, 2)
    assert run.speed.eta == pytest.approx(7 * 2)
    run.evaluate(4)
    run.batch(0, 2)
    assert run.speed.eta == pytest.approx(6 * (2 + 4 + 2) / 2)
    resumed = Run(monkeypatch, global_step=6)
    resumed.batch(0, 3)
    assert resumed.speed.eta == pytest.approx(3)


def test_short_epochs_are_logged(monkeypatch):
    assert Run(monkeypatch).trainer.log_every_n_steps == 4


def test_peak_memory_is_what_the_system_tells():
    status = Path("/proc/self/status")
    if not status.exists():
        pytest.skip("the system keeps no such file")
    peak = next(int(line.split()[1]) for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    assert peak_memory(torch.device("cpu")) == pytest.approx(peak / 1024, rel=0.02)


def reported(monkeypatch, capsys, rank_zero=True):
    speed = Speed()
    speed.rate, speed.data_wait, speed.memory_mb, speed.eta = 123.4, 0.25, 2048.0, 3725.0
    lines = EpochLines(speed)
    values = {"train/loss_epoch": 1.25, "train/top1_epoch": 0.5, "val/loss": 1.5, "val/top1": 0.25, "lr": 1e-3}
    trainer = SimpleNamespace(
        callback_metrics={k: torch.tensor(v) for k, v in values.items()},
        current_epoch=1,
        max_epochs=90,
        is_global_zero=rank_zero,
    )
    lines.setup(trainer, None, "fit")
    lines.on_train_epoch_start(trainer, None)
    lines.on_train_epoch_end(trainer, None)
    assert capsys.readouterr().out == ""  # the means of the epoch are not yet logged
    trainer.current_epoch = 2
    lines.on_train_end(trainer, None)
    return capsys.readouterr().out


def test_a_line_of_plain_text(monkeypatch, capsys):
    assert reported(monkeypatch, capsys) == (
        "epoch 2/90  loss 1.2500  top1 0.5000  val loss 1.5000  val top1 0.2500  "
        "images/s 123  data wait 25%  memory 2,048 MiB  eta 1:02:05\n"
    )
    assert reported(monkeypatch, capsys, rank_zero=False) == ""


def test_a_line_a_minute_within_an_epoch(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    values = {"train/loss_step": torch.tensor(1.5), "train/top1_step": torch.tensor(0.5), "val/loss": torch.tensor(9.0)}
    trainer = SimpleNamespace(
        callback_metrics=values,
        current_epoch=1,
        max_epochs=3,
        is_global_zero=True,
        num_training_batches=20,
        num_val_batches=[9],
    )
    module, lines = SimpleNamespace(task=SimpleNamespace(learned="top1")), EpochLines(Speed())
    lines.on_train_start(trainer, module)
    for batch in range(20):
        now[0] += 10
        lines.on_train_batch_end(trainer, module, None, None, batch)
    rest = "  images/s 0  data wait 0%  memory 0 MiB"
    assert capsys.readouterr().out.splitlines() == [
        f"epoch 2/3  batch {batch}/20  loss 1.5000  top1 0.5000{rest}" for batch in (6, 12, 18)
    ]
    lines.on_validation_batch_end(trainer, module, None, None, 1)
    assert capsys.readouterr().out == ""
    now[0] += 40
    lines.on_validation_batch_end(trainer, module, None, None, 2)
    assert capsys.readouterr().out == f"epoch 2/3  evaluation 3/9{rest}\n"
