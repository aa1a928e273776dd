"""Settings as they act in a run: rates, clipping, memory, speed."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import ModelParallelStrategy

from helpers.small_runs import SMALL, fit, small
from vitrel.train import Classifier, Optimization
from vitrel.train.ema import Ema
from vitrel.train.running.execution import Execution

TABLE = "vitrel_vit_n8_table"


class Seen(Callback):
    """Rates of every group and the clipped gradients, at every update."""

    def __init__(self):
        self.rates, self.gradients = [], []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.rates.append({group["name"]: group["lr"] for group in trainer.optimizers[0].param_groups})

    def on_before_zero_grad(self, trainer, module, optimizer):
        grads = {n: p.grad.clone() for n, p in module.model.named_parameters() if p.grad is not None}
        if grads:
            self.gradients.append(grads)


def optimized(settings, **how):
    seen, module = Seen(), small(TABLE, optim=settings)
    fit(module, callbacks=[seen], **how)
    return seen, module


def test_layer_decay_holds_in_a_run():
    settings = Optimization(lr=1e-2, warmup_epochs=0.5, layer_decay=0.5, position_lr_scale=4.0)
    seen, _ = optimized(settings)
    assert len(seen.rates) == 12
    for rate in seen.rates:
        assert rate["decayed.0"] / rate["decayed.3"] == pytest.approx(0.5**3)  # the stem, two blocks, the head
        assert rate["position.2"] / rate["decayed.3"] == pytest.approx(4 * 0.5)
    assert [rate["decayed.3"] for rate in seen.rates[:4]] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2, 1e-2])


def test_the_rate_is_for_the_images_of_an_update():
    settings = Optimization(lr=1e-3, warmup_epochs=0.0, lr_base_size=64, final_lr=1.0)
    seen, _ = optimized(settings, accumulate_grad_batches=2)
    assert {round(rate["decayed"], 12) for rate in seen.rates} == {1e-3 * 8 / 64}  # 4 images a batch, 2 batches an update


@pytest.mark.slow
def test_less_memory_is_the_same_training():
    """In float64: the exact gradient of the keys' biases is zero, and in float32 Adam makes steps of its rounding."""
    checkpointing = Execution(grad_checkpointing=True)

    def trained(execution):
        torch.manual_seed(0)
        module = Classifier(
            TABLE, 4, 32, SMALL | {"drop_path_rate": 0.2}, Optimization(lr=1e-3, warmup_epochs=0.5), execution=execution
        )
        fit(module, precision="64-true")
        return module.state_dict()

    assert small(TABLE, execution=checkpointing).model.grad_checkpointing
    plain, other = trained(Execution()), trained(checkpointing)
    for name, value in plain.items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(other[name], value, rtol=1e-10, atol=1e-11)


def test_grad_checkpointing_a_model_without_it_is_refused():
    with pytest.raises(ValueError, match=r"execution.grad_checkpointing: .* does not support it, leave it out"):
        Execution(grad_checkpointing=True).apply(torch.nn.Linear(2, 2))


def test_strategies_that_shard_weights_are_refused():
    with pytest.raises(ValueError, match=r"strategies that shard the weights are not supported: use trainer.strategy ddp"):
        fit(small(TABLE), strategy=ModelParallelStrategy())


COMPILED = Execution(compile=True, backend="eager")


@pytest.mark.slow
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


def test_a_model_of_timm_trains_with_everything():
    args = {"depth": 2, "embed_dim": 24, "num_heads": 2, "patch_size": 8}
    settings = Optimization(name="lamb", lr=1e-3, warmup_epochs=0.5, layer_decay=0.8)
    how = {"ema": Ema(0.9), "execution": Execution(grad_checkpointing=True)}
    trainer = fit(Classifier("vit_tiny_patch16_224", 4, 32, args, settings, **how), gradient_clip_val=0.1)
    assert torch.isfinite(trainer.callback_metrics["train/loss_epoch"])
