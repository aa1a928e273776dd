"""Branches that only a GPU takes, on doubles of one."""

from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import vitrel.train.datamodule
import vitrel.train.running.command
from helpers import each
from helpers.runs import run
from helpers.small_runs import Tensors, fit
from vitrel.train import Classifier, Execution
from vitrel.train.datamodule import default_workers
from vitrel.train.running import execution
from vitrel.train.running.faults import FiniteLoss

GPU = torch.device("cuda", 0)


class WithGPU:
    """The module torch, whose torch.cuda says that there is a GPU; Lightning still finds none, and takes the CPU."""

    cuda = SimpleNamespace(is_available=lambda: True)

    def __getattr__(self, name):
        return getattr(torch, name)


def test_a_loss_is_read_at_logging_steps_only(monkeypatch, tmp_path):
    """On the meta device reading is an error."""
    guard, checks = FiniteLoss(tmp_path), []
    module = SimpleNamespace(device=torch.device("meta"))
    trainer = SimpleNamespace(log_every_n_steps=3, is_last_batch=False)
    monkeypatch.setattr(guard, "check", lambda trainer: checks.append(batch))
    guard.on_train_start(trainer, module)
    for batch in range(7):
        guard.on_train_batch_end(trainer, module, {"loss": torch.zeros((), device="meta")}, None, batch)
    assert checks == [2, 5]


@pytest.mark.slow
def test_a_run_is_in_bfloat16_with_pinned_memory(command, monkeypatch):
    for module in (vitrel.train.running.command, vitrel.train.datamodule):
        monkeypatch.setattr(module, "torch", WithGPU())
    cli = run(command("run", "--trainer.accelerator=auto", epochs=1))
    assert cli.trainer.precision == "bf16-mixed"
    assert cli.trainer.train_dataloader.pin_memory and cli.trainer.val_dataloaders.pin_memory


def test_loader_processes_are_the_cores_but_two(monkeypatch):
    monkeypatch.setattr(vitrel.train.datamodule, "cores", lambda: 16)
    assert [default_workers(GPU, devices) for devices in (1, 2, 4, 16)] == [14, 7, 3, 1]
    monkeypatch.setattr(vitrel.train.datamodule, "cores", lambda: 192)
    assert [default_workers(GPU, devices) for devices in (1, 8, 16)] == [16, 16, 11]
    assert default_workers(torch.device("cpu")) == 0


@each("triton", [True, False])
def test_blocks_are_compiled_where_one_size_is_trained(monkeypatch, triton):
    monkeypatch.setattr(execution, "has_triton", lambda: triton)
    assert Execution().compiles(GPU, one_size=True) is triton
    assert not Execution().compiles(GPU, one_size=False) and not Execution().compiles(torch.device("cpu"), one_size=True)
    assert Execution(compile=True).compiles(GPU, one_size=False)
    assert not Execution(compile=False).compiles(GPU, one_size=True)


@pytest.mark.slow
@torch._dynamo.config.patch(recompile_limit=2)  # monkeypatch would delete the setting afterwards
def test_every_block_has_a_graph_and_evaluation_none():
    """Blocks that differ by drop path may be more than torch.compile keeps graphs of a function: 8, and here 2."""
    graphs = CompileCounter()
    args = {"depth": 3, "embed_dim": 16, "num_heads": 2, "drop_path_rate": 0.2}
    module = Classifier("vitrel_vit_n8_table", 4, 32, args, execution=Execution(compile=True, backend=graphs))
    fit(module, Tensors(batches=2), max_epochs=2)
    assert graphs.frame_count == 3
