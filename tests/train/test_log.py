import csv
from types import SimpleNamespace

import pytest
import torch

from vitrel.train.callbacks import CSVLog, FiniteLoss


def rows(log):
    with log.path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_rows_of_a_step_are_joined(tmp_path):
    log = CSVLog(tmp_path)
    log.log_metrics({"epoch": 0, "a": 1.0}, 4)
    log.log_metrics({"epoch": 0, "b": 2.0}, 4)
    log.log_metrics({"epoch": 1, "a": 3.0}, 9)
    log.save()
    assert rows(log) == [
        {"epoch": "0", "step": "4", "a": "1.0", "b": "2.0"},
        {"epoch": "1", "step": "9", "a": "3.0", "b": ""},
    ]


def test_resuming_keeps_the_rows_before_and_drops_those_after(tmp_path):
    log = CSVLog(tmp_path)
    for step in (4, 9, 14):
        log.log_metrics({"a": float(step)}, step)
    log.save()
    resumed = CSVLog(tmp_path, resume=True)
    resumed.save()  # nothing logged yet: the file stays
    assert len(rows(resumed)) == 3
    resumed.log_metrics({"a": 90.0}, 9)
    resumed.save()
    assert [(row["step"], row["a"]) for row in rows(resumed)] == [("4", "4.0"), ("9", "90.0")]
    fresh = CSVLog(tmp_path)
    fresh.log_metrics({"a": 1.0}, 0)
    fresh.save()
    assert len(rows(fresh)) == 1


def finite(losses, device="cpu", every=3):
    """Batch at which the guard speaks, and what it says."""
    guard = FiniteLoss()
    guard.on_train_start(None, SimpleNamespace(device=torch.device("cpu")))
    module = SimpleNamespace(device=SimpleNamespace(type=device))
    for i, loss in enumerate(losses):
        trainer = SimpleNamespace(
            log_every_n_steps=every, is_last_batch=i == len(losses) - 1, current_epoch=2, global_step=10 + i
        )
        try:
            guard.on_train_batch_end(trainer, module, {"loss": torch.tensor(loss)}, None, i)
        except FloatingPointError as error:
            return i, str(error)
    return None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_the_first_bad_batch_is_named(value):
    assert finite([1.0, 2.0]) is None
    when, text = finite([1.0, value, 1.0, 1.0])
    assert when == 1 and "epoch 2, batch 1 " in text
    when, text = finite([1.0, value, value, 1.0, 1.0], device="cuda")
    assert when == 2 and "epoch 2, batch 1 " in text  # looked at every third batch, and still names the first
    when, text = finite([1.0, 1.0, 1.0, 1.0, value], device="cuda")
    assert when == 4 and "batch 4 " in text
