import inspect
import random
from dataclasses import asdict

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from torch.nn import functional as F

from helpers.small_runs import Batches, Tensors, fit, small
from vitrel.data import Augmentation
from vitrel.train import Classifier
from vitrel.train.ema import Ema
from vitrel.train.tuning import Tuning


class At:
    """Where a run is, for hooks that ask."""

    def __init__(self, epoch, rank=0):
        self.current_epoch, self.global_rank, self.world_size = epoch, rank, 1


@pytest.fixture(scope="module")
def classifier():
    return Classifier("vitrel_vit_n8_table", 4, 32, {"depth": 1})


def draws(classifier, epoch, batch, rank=0):
    classifier._trainer = At(epoch, rank)
    classifier.on_train_batch_start(None, batch)
    classifier._trainer = None
    return float(torch.rand(())), float(np.random.rand()), random.random()  # noqa: NPY002


def test_random_state_is_a_function_of_seed_epoch_batch_and_rank(classifier):
    keys = [(epoch, batch, rank) for epoch in range(2) for batch in range(3) for rank in range(2)]
    drawn = [draws(classifier, *key) for key in keys]
    torch.rand(7), random.random()
    assert drawn == [draws(classifier, *key) for key in keys]
    for source in zip(*drawn, strict=True):
        assert len(set(source)) == len(keys)


@pytest.mark.slow
def test_images_of_training_are_erased():
    data, module, seen = Tensors(), small(), {True: [], False: []}
    data.augment, data.images = Augmentation(erase=1.0), torch.ones_like(data.images)
    module.model.register_forward_pre_hook(lambda model, args: seen[model.training].append(bool((args[0] == 0).any())))
    fit(module, data, max_epochs=1)
    assert all(seen[True]) and len(seen[True]) == 6 and not any(seen[False])


@pytest.mark.slow
def test_evaluation_counts_images_not_batches_nor_what_fills_them():
    """Labels of -1 count nowhere, in a batch of them alone too."""
    data, module = Tensors(num_classes=6), small(num_classes=6)
    images, labels = data.images[:6], data.labels[:6]
    filled = torch.cat([images[:2], torch.zeros(2, 3, 32, 32), images[2:], torch.zeros(6, 3, 32, 32)])
    some = torch.cat([labels[:2], torch.tensor([-1, -1]), labels[2:], torch.full((6,), -1)])
    data.val_dataloader = lambda: Batches(filled, some, 4)
    metrics = fit(module, data, max_epochs=1).callback_metrics
    with torch.no_grad():
        logits = module.eval()(images)
    assert float(metrics["val/loss"]) == pytest.approx(float(F.cross_entropy(logits, labels)), abs=1e-6)
    assert float(metrics["val/top1"]) == pytest.approx(float((logits.argmax(-1) == labels).float().mean()))
    lowest = logits.argmin(-1)  # five of six classes
    assert float(metrics["val/top5"]) == pytest.approx(float((lowest != labels).float().mean()))


@pytest.mark.slow
def test_the_epochs_mean_is_that_of_its_images():
    steps = []

    class Steps(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            steps.append((float(outputs["loss"]), len(batch[0])))

    data = Tensors()
    data.train_dataloader = lambda: Batches(data.images[:22], data.labels[:22], 4)
    metrics = fit(small(), data, max_epochs=2, callbacks=[Steps()]).callback_metrics
    assert len(steps) == 12 and steps[-1][1] == 2
    assert "val/top5" not in metrics  # of four classes
    mean = sum(loss * count for loss, count in steps[6:]) / 22
    assert float(metrics["train/loss_epoch"]) == pytest.approx(mean, rel=1e-5)
    assert float(metrics["train/loss_step"]) == pytest.approx(steps[-1][0], rel=1e-5)


@pytest.mark.slow
def test_the_checkpoint_holds_every_setting_as_plain_values(tmp_path):
    data = Tensors()
    fit(small(ema=Ema(0.9)), data, max_epochs=1).save_checkpoint(tmp_path / "run.ckpt")
    checkpoint = torch.load(tmp_path / "run.ckpt", weights_only=True)
    assert checkpoint["vitrel"]["ema"]
    held = checkpoint["hyper_parameters"]
    assert held["tuning"] == asdict(Tuning())
    assert held["optim"]["final_lr"] == 0.0 and held["objective"]["loss"] == "ce"
    assert held["execution"]["compile"] is None and held["ema"]["decay"] == 0.9
    assert set(held) == set(inspect.signature(Classifier).parameters)


@pytest.mark.slow
def test_a_run_of_other_classes_is_not_resumed(tmp_path):
    """In another order they would be other labels, and as many."""
    fit(small(), max_epochs=1).save_checkpoint(tmp_path / "last.ckpt")
    other = Tensors()
    other.classes = ["c1", "c0", "c2", "c3"]
    with pytest.raises(
        ValueError, match=r"cannot resume: the checkpoint's classes is \['c0', 'c1', .*, this run's is \['c1', 'c0'"
    ):
        fit(small(), other, ckpt_path=tmp_path / "last.ckpt")


def test_model_and_data_must_have_as_many_classes():
    with pytest.raises(ValueError, match=r"the model has 5 classes, random tensors has 4: set num_classes to 4"):
        fit(small(num_classes=5), Tensors(4))
