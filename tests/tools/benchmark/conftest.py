import pytest
import torch

from helpers.workers import Here
from tools.benchmark import attention
from tools.benchmark.engine import Engine
from tools.benchmark.samples import Samples, machine

CPU = torch.device("cpu")


@pytest.fixture
def here(monkeypatch):
    """Contenders run in the test's process, whose memory is not limited."""
    for name, value in (("wrong", {}), ("failing", {}), ("started", [])):
        monkeypatch.setattr(Here, name, value)
    monkeypatch.setattr(attention.resource, "setrlimit", lambda *of: None)


@pytest.fixture
def engine(tmp_path, here):
    return Engine(Samples(tmp_path / "samples.jsonl", machine(CPU)), CPU, Here)
