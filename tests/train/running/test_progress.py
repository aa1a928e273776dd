from types import SimpleNamespace

import pytest
import torch

from helpers import each
from vitrel.tasks import task_named
from vitrel.train.running import progress
from vitrel.train.running.progress import Progress


class Run:
    """Hooks called as by a trainer of 4 updates in each of 2 epochs, on a clock that only moves when told."""

    def __init__(self, monkeypatch, world_size=1, global_step=0, rank_zero=True):
        self.now, self.logged = 100.0, {}
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)
        self.trainer = SimpleNamespace(max_epochs=2, current_epoch=0, global_step=global_step, world_size=world_size)
        self.trainer.sanity_checking, self.trainer.log_every_n_steps, self.trainer.is_global_zero = False, 50, rank_zero
        self.trainer.num_training_batches, self.trainer.num_val_batches = 4, [9]
        self.trainer.ckpt_path, self.trainer.callback_metrics = None, {}
        self.module = SimpleNamespace(device=torch.device("cpu"), task=task_named("classification"))
        self.module.updates_per_epoch, self.module.updates = lambda: 4, lambda: 8
        self.module.log_dict = lambda values, **how: self.logged.update(values)
        self.progress = Progress(best=None, every=60.0)
        self.progress.setup(self.trainer, self.module, "fit")
        self.call("on_train_start")
        self.call("on_train_epoch_start")

    def call(self, hook, *args):
        getattr(self.progress, hook)(self.trainer, self.module, *args)

    def batch(self, wait, work, images=8, index=0):
        self.now += wait
        self.call("on_train_batch_start", None, index)
        self.now += work
        self.trainer.global_step += 1
        self.call("on_train_batch_end", None, (torch.zeros(images, 3, 1, 1), None), index)

    def evaluate(self, seconds):
        self.call("on_validation_start")
        self.now += seconds
        self.call("on_validation_end")


def test_speed_and_wait_of_an_epoch(monkeypatch):
    run = Run(monkeypatch, world_size=3)
    run.batch(wait=1, work=1)
    run.batch(wait=0, work=2)
    assert run.progress.speed == pytest.approx({"images_per_s": 3 * 16 / 4, "data_wait": 1 / 4})
    run.evaluate(50)  # counts neither as training nor as waiting
    run.batch(wait=0, work=4)
    run.call("on_train_epoch_end")
    assert run.logged == pytest.approx({"images_per_s": 3 * 24 / 8, "data_wait": 1 / 8})
    run.call("on_train_epoch_start")
    run.batch(wait=3, work=1)
    assert run.progress.speed == pytest.approx({"images_per_s": 3 * 8 / 4, "data_wait": 3 / 4})
    assert run.trainer.log_every_n_steps == 4  # an epoch is shorter than 50


@each("rank_zero", [True, False])
def test_a_line_of_an_epoch_when_its_means_are_known(monkeypatch, capsys, rank_zero):
    run = Run(monkeypatch, global_step=2, rank_zero=rank_zero)
    run.batch(wait=1, work=1)
    run.evaluate(8)
    run.call("on_train_epoch_end")
    assert capsys.readouterr().out == ""
    values = {"train/loss_epoch": 1.25, "train/loss_step": 9.0, "train/top1_epoch": 0.5, "val/loss": 1.5, "val/top1": 0.25}
    run.trainer.callback_metrics = {name: torch.tensor(value) for name, value in values.items()}
    run.trainer.current_epoch = 1
    run.call("on_train_end")
    line = "epoch 1/2  loss 1.2500  top1 0.5000  val loss 1.5000  val top1 0.2500  images/s 4  data wait 50%  eta 0:00:50\n"
    assert capsys.readouterr().out == (line if rank_zero else "")  # 5 updates of 10 s, with evaluation, are left


def test_an_epoch_without_an_evaluation_repeats_none(monkeypatch, capsys):
    run = Run(monkeypatch, global_step=2)
    run.trainer.callback_metrics = {"train/loss_epoch": torch.tensor(1.25), "val/top1": torch.tensor(0.25)}
    for evaluated in (True, False, True):
        run.batch(wait=1, work=1)
        if evaluated:
            run.evaluate(8)
        run.call("on_train_epoch_end")
        run.call("on_train_epoch_start")
        line = capsys.readouterr().out
        assert "loss 1.2500" in line and ("val top1 0.2500" in line) == evaluated


def test_a_line_a_minute_within_an_epoch(monkeypatch, capsys):
    run = Run(monkeypatch)
    run.trainer.callback_metrics = {"train/loss_step": torch.tensor(1.5), "val/loss": torch.tensor(9.0)}
    for index in range(4):
        run.batch(wait=0, work=40, index=index)
    rest = "images/s 0  data wait 0%"
    assert capsys.readouterr().out.splitlines() == [
        f"epoch 1/2  batch 2/4  loss 1.5000  {rest}  eta 0:04:00",
        f"epoch 1/2  batch 4/4  loss 1.5000  {rest}  eta 0:02:40",
    ]
    run.call("on_validation_batch_end", None, None, 1)
    assert capsys.readouterr().out == ""
    run.now += 70
    run.call("on_validation_batch_end", None, None, 2)
    assert capsys.readouterr().out == f"epoch 1/2  evaluation 3/9  {rest}  eta 0:03:50\n"
