from types import SimpleNamespace

import pytest
import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import ModelCheckpoint
from timm.utils import ModelEmaV3
from torch.nn import functional as F

from helpers import each
from helpers.small_runs import Tensors, fit, small
from vitrel.evaluate.checkpoint import load_checkpoint
from vitrel.train.ema import AveragedWeights, Ema
from vitrel.train.objective import Mixing

pytestmark = pytest.mark.slow


def recipe(ema, **how):
    return small("vitrel_vit_n8_table", ema=ema, mixing=Mixing(mixup=0.2), **how)


def read(path):
    return torch.load(path, weights_only=True)


def same(a, b):
    """Bit-equal tensors, through dictionaries and lists."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


class Follow(Callback):
    """timm's average of the same weights."""

    def __init__(self, settings):
        self.settings = settings

    def on_train_start(self, trainer, module):
        self.ema = ModelEmaV3(module.model, decay=self.settings.decay, use_warmup=self.settings.warmup)

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.ema.update(module.model, step=trainer.global_step)


@each("settings", [Ema(0.9), Ema(0.9, warmup=True)])
def test_the_average_is_timms(settings):
    follow = Follow(settings)
    module = recipe(settings)
    fit(module, callbacks=[follow])
    for name, value in follow.ema.module.state_dict().items():
        torch.testing.assert_close(module.model.state_dict()[name], value, rtol=1e-5, atol=1e-7)


def test_the_average_is_evaluated_and_saved(tmp_path):
    data, module = Tensors(), recipe(Ema(0.9))
    save = ModelCheckpoint(tmp_path, filename="last", save_on_train_epoch_end=True)
    trainer = fit(module, data, callbacks=[save], enable_checkpointing=True)
    checkpoint = read(tmp_path / "last.ckpt")
    assert checkpoint["vitrel"]["ema"] is True and checkpoint["hyper_parameters"]["ema"]["decay"] == 0.9
    average, raw = checkpoint["state_dict"], checkpoint["current_model_state"]
    assert not same(average, raw) and int(checkpoint["averaging_state"]["n_averaged"]) == 12
    model = load_checkpoint(tmp_path / "last.ckpt").model
    assert same(dict(model.state_dict()), {k.removeprefix("model."): v for k, v in average.items()})
    with torch.no_grad():
        loss = F.cross_entropy(model(data.images[:6]), data.labels[:6])
    assert float(trainer.callback_metrics["val/loss"]) == pytest.approx(float(loss), abs=1e-5)
    assert same(dict(module.state_dict()), average)  # training over, the module is what was evaluated
    again = trainer.validate(module, datamodule=data, verbose=False)[0]
    assert again["val/loss"] == pytest.approx(float(trainer.callback_metrics["val/loss"]))


def test_the_average_is_where_the_weights_are():
    """And nothing is read from there, which on the meta device is an error. Lightning copies the weights, then moves them."""
    module, average = LightningModule(), AveragedWeights(Ema(0.9, warmup=True))
    module.layer, trainer = torch.nn.Linear(3, 3), SimpleNamespace(global_step=0, current_epoch=0)
    average.setup(trainer, module, "fit")
    average.on_fit_start(trainer, module.to("meta"))
    for trainer.global_step in (1, 2, 3):
        average.on_train_batch_end(trainer, module, None, None, trainer.global_step - 1)
    assert {p.device.type for p in average._average_model.module.parameters()} == {"meta"}
    assert int(average._average_model.n_averaged) == 3


def test_a_run_of_ones_own_trainer_resumes_at_the_end_of_an_epoch(tmp_path):
    """Exactly, and with an average or without, as it began."""
    save = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    whole, resumed = recipe(Ema(0.9, warmup=True)), recipe(Ema(0.9, warmup=True))
    fit(whole, callbacks=[save], enable_checkpointing=True)
    fit(resumed, ckpt_path=tmp_path / "epoch=0.ckpt")
    assert same(resumed.state_dict(), whole.state_dict())
    with pytest.raises(ValueError, match="cannot resume: the checkpoint's ema is True, this run's is False"):
        fit(recipe(None), ckpt_path=tmp_path / "epoch=0.ckpt")


def test_counters_are_copied():
    averages, weights = [torch.tensor(3), torch.tensor(4)], [torch.tensor(7), torch.tensor(8)]
    AveragedWeights(Ema(0.9))._average(averages, weights, torch.tensor(5))
    assert averages == weights
