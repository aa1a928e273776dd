"""Settings as they act in a run: rates, clipping, memory, speed."""

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

from helpers.small_runs import SMALL, Tensors, fit, small
from vitrel.train import Classifier, Optimization
from vitrel.train.ema import Ema
from vitrel.train.optim import Schedule
from vitrel.train.running.execution import Execution, ShardedStrategy, check_strategy

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
    settings = Optimization(lr=1e-2, warmup_epochs=0.5, layer_decay=0.5, position_lr_scale=4.0, schedule=Schedule("linear"))
    seen, _ = optimized(settings)
    assert len(seen.rates) == 12
    for rate in seen.rates:
        assert rate["decayed.0"] / rate["decayed.3"] == pytest.approx(0.5**3)  # the stem, two blocks, the head
        assert rate["position.2"] / rate["decayed.3"] == pytest.approx(4 * 0.5)
    assert [rate["decayed.3"] for rate in seen.rates[:4]] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2, 1e-2])


def test_the_rate_is_for_the_images_of_an_update():
    settings = Optimization(lr=1e-3, warmup_epochs=0.0, lr_base_size=64, schedule=Schedule("constant"))
    seen, _ = optimized(settings, accumulate_grad_batches=2)
    assert {round(rate["decayed"], 12) for rate in seen.rates} == {1e-3 * 8 / 64}  # 4 images a batch, 2 batches an update


@pytest.fixture(scope="module")
def unclipped():
    seen, _ = optimized(Optimization(lr=1e-8, warmup_epochs=0.0))
    return seen.gradients


@pytest.mark.parametrize(
    ("mode", "bound"),
    [
        ("norm", lambda grads: torch.stack([g.norm() for g in grads.values()]).norm()),
        (None, lambda grads: torch.stack([g.norm() for g in grads.values()]).norm()),
        ("value", lambda grads: max(g.abs().max() for g in grads.values())),
    ],
)
def test_clipping(unclipped, mode, bound):
    settings = Optimization(lr=1e-8, warmup_epochs=0.0, clip_mode=mode)
    seen, _ = optimized(settings, gradient_clip_val=1e-3)
    assert seen.gradients and all(float(bound(grads)) <= 1e-3 * 1.001 for grads in seen.gradients)
    assert all(float(bound(grads)) > 1e-2 for grads in unclipped)


def test_adaptive_clipping_spares_the_head():
    settings = Optimization(lr=1e-8, warmup_epochs=0.0, clip_mode="agc")
    seen, module = optimized(settings, gradient_clip_val=1e-3)
    for grads in seen.gradients:
        for name, weight in module.model.named_parameters():
            if weight.ndim == 2 and name in grads and not name.startswith("head."):
                rows = weight.detach().norm(dim=1).clamp(min=1e-3)
                assert (grads[name].norm(dim=1) <= 1e-3 * rows * 1.001).all(), name
        assert float(grads["head.weight"].norm()) > 0.1


@pytest.mark.parametrize(
    ("settings", "how", "text"),
    [
        ({"clip_mode": "agc"}, {}, "optim.clip_mode agc has no effect without trainer.gradient_clip_val"),
        (
            {"clip_mode": "norm"},
            {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"},
            "optim.clip_mode is norm, trainer.gradient_clip_algorithm value: leave the latter out",
        ),
        ({"warmup_epochs": 5.0}, {}, "warm-up of 30 updates in a run of 12: lower model.optim.warmup_epochs"),
    ],
)
def test_settings_that_do_not_fit_the_trainer_are_refused(settings, how, text):
    with pytest.raises(ValueError, match=text):
        fit(small(TABLE, optim=Optimization(**{"warmup_epochs": 0.5} | settings)), **how)


@pytest.mark.parametrize("execution", [Execution(grad_checkpointing=True), Execution(channels_last=True)])
def test_less_memory_is_the_same_training(execution):
    """In float64: the exact gradient of the keys' biases is zero, and in float32 Adam makes steps of its rounding."""

    def trained(execution):
        torch.manual_seed(0)
        module = Classifier(
            TABLE, 4, 32, SMALL | {"drop_path_rate": 0.2}, Optimization(lr=1e-3, warmup_epochs=0.5), execution=execution
        )
        fit(module, precision="64-true")
        return module.state_dict()

    assert small(TABLE, execution=execution).model.grad_checkpointing is execution.grad_checkpointing
    plain, other = trained(Execution()), trained(execution)
    for name, value in plain.items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(other[name], value, rtol=1e-10, atol=1e-11)


def test_images_are_channels_last_too():
    module, seen = small(TABLE, execution=Execution(channels_last=True)), []
    module.model.patch_embed.register_forward_pre_hook(
        lambda _, args: seen.append(args[0].is_contiguous(memory_format=torch.channels_last))
    )
    fit(module, max_epochs=1)
    assert seen and all(seen)
    assert module.model.patch_embed.proj.weight.is_contiguous(memory_format=torch.channels_last)


def test_grad_checkpointing_a_model_without_it_is_refused():
    with pytest.raises(ValueError, match=r"execution.grad_checkpointing: .* does not support it, leave it out"):
        Execution(grad_checkpointing=True).apply(torch.nn.Linear(2, 2))


def test_sharded_weights_are_neither_averaged_nor_clipped_by_row():
    with pytest.raises(ValueError, match=r"leave model.ema out, or use strategy: ddp"):
        fit(small(TABLE, ema=Ema()), strategy=ShardedStrategy())
    with pytest.raises(ValueError, match=r"optim.clip_mode agc needs whole rows, .* or strategy: ddp"):
        check_strategy(ShardedStrategy(), averaged=False, clip_mode="agc")


def test_strategies_that_flatten_weights_or_split_the_model_are_refused():
    with pytest.raises(ValueError, match=r"ModelParallelStrategy is not supported: use vitrel.train.ShardedStrategy"):
        fit(small(TABLE), strategy=ModelParallelStrategy())
    with pytest.raises(ValueError, match=r"FSDPStrategy is not supported: use vitrel.train.ShardedStrategy"):
        check_strategy(FSDPStrategy(), averaged=False, clip_mode=None)


COMPILED = Execution(compile=True, dynamic=True, backend="eager")


def test_compiling_keeps_the_names_of_the_weights():
    module = small(TABLE, ema=Ema(0.9), execution=COMPILED)
    module.execution.compile_blocks(module.model)
    assert all(block._compiled_call_impl is not None for block in module.model.blocks)
    assert list(module.state_dict()) == list(small(TABLE).state_dict())


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


class Full(Callback):
    """A device whose memory is full at the second batch."""

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 1:
            module.model.forward = self.forward

    def forward(self, images):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


@pytest.mark.parametrize("backward", [False, True])
def test_out_of_memory_says_what_needs_less(backward, monkeypatch):
    callbacks = [Full()]
    if backward:
        callbacks = []

        def full(self, loss, *args):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")

        monkeypatch.setattr(Classifier, "backward", full)
    with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
        fit(small(TABLE), Tensors(batch_size=6), callbacks=callbacks, accumulate_grad_batches=2)
    (note,) = caught.value.__notes__
    for text in (
        "data.batch_size: 3 (now 6) with trainer.accumulate_grad_batches: 4 (now 2)",
        "trainer.precision: bf16-mixed (now 32-true)",
        "model.execution.grad_checkpointing: true (now false)",
        "a smaller data.size (now 32x32)",
    ):
        assert text in note
    assert "Tried to allocate 1.00 GiB" in str(caught.value)


def test_other_errors_are_left_alone():
    with pytest.raises(RuntimeError) as caught:
        fit(small(TABLE), callbacks=[Broken()])
    assert not hasattr(caught.value, "__notes__")


class Broken(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        raise RuntimeError("not memory")


def test_a_model_of_timm_trains_with_everything():
    args = {"depth": 2, "embed_dim": 24, "num_heads": 2, "patch_size": 8}
    settings = Optimization(name="lamb", lr=1e-3, warmup_epochs=0.5, layer_decay=0.8, clip_mode="agc")
    how = {"ema": Ema(0.9), "execution": Execution(grad_checkpointing=True)}
    trainer = fit(Classifier("vit_tiny_patch16_224", 4, 32, args, settings, **how), gradient_clip_val=0.1)
    assert torch.isfinite(trainer.callback_metrics["train/loss_epoch"])
