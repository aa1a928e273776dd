import time

import pytest
import torch
from torch.utils.data import Dataset

from vitrel.data import Shapes
from vitrel.train import run
from vitrel.train.profile import DataProfile, Measured, _measure_loader


def measured(**given):
    return Measured(
        **{"loading": 100.0, "training": 100.0, "workers": 2, "devices": 1, "one_process": 50.0, "decoding": None, "cores": 8}
        | given
    )


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"loading": 300.0}, "training is the limit: the loader is 3.0 times as fast"),
        ({"loading": 50.0}, "the loader is the limit, at 50% of the training speed: set data.workers to 3"),
        ({"loading": 50.0, "devices": 4}, "set data.workers to 1 (this machine has 8 cores)"),
        (
            {"loading": 50.0, "one_process": 10.0},
            "data.workers 12 would be enough, but this machine has only 8 cores",
        ),
        (
            {"loading": 300.0, "workers": 0, "one_process": 300.0},
            "loading and training alternate, at 75 images/s: set data.workers to 1",
        ),
    ],
)
def test_advice(given, text):
    assert text in measured(**given).advice()


def test_the_report_names_all_that_was_measured():
    first, second, _ = str(measured(loading=1234.4, devices=4, decoding=0.012)).splitlines()
    one = "one process prepares 50 images/s, 20.00 ms per image, 12.00 ms of it for decoding"
    assert first == f"loading   1,234 images/s with 2 workers for each of 4 devices ({one})"
    assert second == "training  100 images/s on one batch, repeated"


class Slow(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        time.sleep(0.005)
        return torch.zeros(3), 0


def test_the_loader_alone_is_measured_over_several_epochs():
    batch, rate = _measure_loader(torch.utils.data.DataLoader(Slow(), batch_size=4), 0.05)
    assert len(batch[0]) == 4 and 60 < rate < 200  # 5 ms for each image


@pytest.mark.slow
def test_slow_data_is_found_to_be_the_limit(tmp_path, capsys, monkeypatch):
    get = Shapes.__getitems__

    def slowly(self, indices):
        time.sleep(0.03 * len(indices))
        return get(self, indices)

    monkeypatch.setattr(Shapes, "__getitems__", slowly)
    monkeypatch.setattr(DataProfile.__init__, "__defaults__", (0.1,))
    arguments = ["--model.model=vitrel_vit_n8_none", "--model.model_args={depth: 1}", "--data.data=shapes", "--data.size=32"]
    small = ["--data.batch_size=4", "--data.n_train=16", "--data.n_val=8", "--trainer.accelerator=cpu", "--profile_data"]
    done = run(["fit", *arguments, *small, f"--trainer.default_root_dir={tmp_path / 'run'}"])
    result = next(c for c in done.trainer.callbacks if isinstance(c, DataProfile)).measured
    assert result.loading == pytest.approx(1 / 0.03, rel=0.3) and result.one_process == pytest.approx(1 / 0.03, rel=0.3)
    assert result.training > 3 * result.loading
    assert "alternate" in capsys.readouterr().out
    assert not (tmp_path / "run").exists() and not done.trainer.validating
