"""Settings as they act in a run: rates, clipping, memory, speed."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import ModelParallelStrategy

from helpers.gpu import Unread
from helpers.small_runs import fit, small
from vitrel.train import Optimization
from vitrel.train.ema import Ema
from vitrel.train.objective import Mixing
from vitrel.train.running.execution import Execution

pytestmark = pytest.mark.slow
TABLE = "vitrel_vit_n8_table"


class Rates(Callback):
    """Rates of every group at every update."""

    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.seen.append({group["name"]: group["lr"] for group in trainer.optimizers[0].param_groups})


def rates(settings, **how):
    rates = Rates()
    fit(small(TABLE, optim=settings), callbacks=[rates], **how)
    return rates.seen


def test_layer_decay_holds_in_a_run():
    settings = Optimization(lr=1e-2, warmup_epochs=0.5, layer_decay=0.5, position_lr_scale=4.0)
    seen = rates(settings)
    assert len(seen) == 12
    for rate in seen:
        assert rate["decayed.0"] / rate["decayed.3"] == pytest.approx(0.5**3)  # the stem, two blocks, the head
        assert rate["position.2"] / rate["decayed.3"] == pytest.approx(4 * 0.5)
    assert [rate["decayed.3"] for rate in seen[:4]] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2, 1e-2])


def test_the_rate_is_for_the_images_of_an_update():
    settings = Optimization(lr=1e-3, warmup_epochs=0.0, lr_base_size=64, final_lr=1.0)
    seen = rates(settings, accumulate_grad_batches=2)
    assert {round(rate["decayed"], 12) for rate in seen} == {1e-3 * 8 / 64}  # 4 images a batch, 2 batches an update


def test_grad_checkpointing_is_on_or_refused():
    """That it changes no weight: running/test_resume_check.py."""
    assert small(TABLE, execution=Execution(grad_checkpointing=True)).model.grad_checkpointing
    with pytest.raises(ValueError, match=r"execution.grad_checkpointing: .* does not support it, leave it out"):
        Execution(grad_checkpointing=True).apply(torch.nn.Linear(2, 2))


def test_strategies_that_shard_weights_are_refused():
    with pytest.raises(ValueError, match=r"strategies that shard the weights are not supported: use trainer.strategy ddp"):
        fit(small(TABLE), strategy=ModelParallelStrategy())


COMPILED = Execution(compile=True, backend="eager")


def test_compiled_training_is_the_same(tmp_path):
    def trained(execution):
        torch.manual_seed(0)
        module = small(TABLE, ema=Ema(0.9), execution=execution)
        fit(module, max_epochs=1, limit_val_batches=0).save_checkpoint(tmp_path / "run.ckpt")
        return torch.load(tmp_path / "run.ckpt", weights_only=True)["state_dict"]

    plain, compiled = trained(Execution()), trained(COMPILED)
    assert list(plain) == list(compiled)
    for name, value in plain.items():
        torch.testing.assert_close(compiled[name], value, rtol=1e-4, atol=2e-5)


class EveryBatch(Callback):
    """Refuses reads within every batch."""

    def __init__(self):
        self.mode, self.batches = Unread(), 0

    def begin(self, *_):
        self.mode.__enter__()
        self.batches += 1

    def end(self, *_):
        self.mode.__exit__(None, None, None)

    on_train_batch_start, on_validation_batch_start = begin, begin
    on_train_batch_end, on_validation_batch_end = end, end


def test_a_step_reads_nothing_back():
    """Forward, loss, backward, clipping and update in bf16-mixed, and an evaluation batch."""
    unread, optim = EveryBatch(), Optimization(lr=1e-3, warmup_epochs=0.5)
    module = small("vitrel_vit_n8_table", num_classes=6, mixing=Mixing(mixup=0.2, cutmix=1.0), optim=optim)
    fit(module, callbacks=[unread], max_epochs=1, gradient_clip_val=1.0, precision="bf16-mixed")
    assert unread.batches == 6 + 2
