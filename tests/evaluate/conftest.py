from dataclasses import replace
from pathlib import Path

import pytest
import timm
import torch
from torch.utils.data import Dataset

from helpers.checkpoints import CLASSES, write_checkpoint
from vitrel.common import processes
from vitrel.evaluate import images, run
from vitrel.evaluate.checkpoint import TrainedModel, encoding_of
from vitrel.evaluate.run import at_sizes

FAST = {"device": "cpu", "attention_n": 0, "border_leak": False, "batch_size": 5, "report": False}


class Noise(Dataset):
    """12 random images in 3 classes; counts how often one is decoded."""

    decoded = 0

    def __init__(self, size, n=None):
        self.size, self.n, self.classes = size, n or 12, list(CLASSES)

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        return self.item(index)  # what tests replace: Python 3.13.0 does not always see a replaced __getitem__

    def item(self, index):
        Noise.decoded += 1
        return torch.randn(3, *self.size, generator=torch.Generator().manual_seed(index)), index % 3


@pytest.fixture
def noise(monkeypatch):
    """Replaces the data sets by Noise and records the requests."""
    requested = []

    def create(data, split, size, **how):
        requested.append({"data": data, "split": split, "size": size, **how})
        return Noise(size, how["n"])

    monkeypatch.setattr(images, "create_dataset", create)
    monkeypatch.setattr(Noise, "decoded", 0)
    Noise.requested = requested
    return Noise


@pytest.fixture
def rows_of(noise):
    """rows_of(models, sizes, ...): the rows of `at_sizes` on Noise, with the settings FAST and those given."""

    def rows_of(models, sizes=(), data="noise", **settings):
        rows = at_sizes(models, data, sizes, **FAST | settings).to_dict("records")
        return [{name: None if value != value else value for name, value in row.items()} for row in rows]

    return rows_of


@pytest.fixture
def trained():
    """trained("vitrel_vit_n8_table", model_args=..., label=...): an untrained model, of two blocks, as if from a checkpoint."""

    def make(name, img_size=(32, 32), model_args=(), **changes):
        torch.manual_seed(0)
        how = ({"depth": 2} if "vit_n8" in name else {}) | dict(model_args)
        model = timm.create_model(name, num_classes=3, img_size=img_size, **how).eval()
        whole = TrainedModel(
            model=model, name=name, label=name, encoding=encoding_of(model), img_size=img_size, classes=tuple(CLASSES),
            mean=(0.5,) * 3, std=(0.5,) * 3, crop_pct=1.0, interpolation="bicubic", seed=0, path=Path("last.ckpt"),
        )  # fmt: skip
        return replace(whole, **changes)

    return make


@pytest.fixture
def checkpoint(tmp_path):
    """checkpoint(name, edit=None): the path of a file laid out as `vitrel train` writes it; `edit` changes what is in it."""

    def write(name="vitrel_vit_n8_table", edit=None, **about):
        torch.manual_seed(0)
        model = timm.create_model(name, num_classes=3, img_size=(32, 48))
        return write_checkpoint(tmp_path / "last.ckpt", model, edit, **about)

    return write


@pytest.fixture
def pretend_world(monkeypatch):
    """pretend_world(world): the evaluation runs as if in that many processes, one after the other."""

    def pretend(world):
        def on_all(work):
            found = []
            for rank in range(world):
                for part in (processes, run):
                    monkeypatch.setattr(part, "rank_and_world", lambda rank=rank: (rank, world))
                found.append(work())
            for part in (processes, run):
                monkeypatch.setattr(part, "rank_and_world", lambda: (0, world))
            return found

        monkeypatch.setattr(run, "on_all", on_all)
        monkeypatch.setattr(images, "CACHE_BYTES", -1)  # what one process decoded, the next must not see
        for part in (processes, run):
            monkeypatch.setattr(part, "rank_and_world", lambda: (0, world))

    return pretend
