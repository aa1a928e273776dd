"""Several labels an image: average precision by loops, its contributions by derivatives, targets and losses by hand."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from helpers import each
from vitrel.evaluate import at_sizes
from vitrel.evaluate.checkpoint import trained_model
from vitrel.evaluate.statistics import estimate
from vitrel.tasks import Kept, task_named
from vitrel.tasks.multilabel import TASK, contributions
from vitrel.train.objective import Mixing, Objective


def average_precision(scores, labels, weights=None):
    """Mean, over the images that have a class, of the precision among images with a score that is not lower; weighted."""
    weights = np.ones(len(scores)) if weights is None else weights
    total = above = 0.0
    for score, label, weight in zip(scores, labels, weights, strict=True):
        if label:
            higher = scores >= score
            above += weight * (weights * labels)[higher].sum() / weights[higher].sum()
            total += weight
    return above / total


def kept_of(n=40, classes=4, seed=0):
    """Scores of 13 values, so that some are equal; a class that never occurs; an image that was not read."""
    rng = np.random.default_rng(seed)
    labels = rng.random((n, classes)) < (0.1, 0.5, 0.3, 0.0)[:classes]
    scores = np.round((rng.random((n, classes)) + labels) * 6) / 13
    seen = np.arange(n) != 5
    return Kept({"labels": labels.astype(np.uint8), "scores": scores.astype(np.float32), "bce": rng.random(n)}, seen)


def test_map_is_the_mean_over_the_classes_that_occur():
    kept = kept_of()
    of = kept.of_seen()
    want = np.mean([average_precision(of["scores"][:, at], of["labels"][:, at].astype(float)) for at in range(3)])
    row = TASK.score(kept)
    assert row["map"] == pytest.approx(100 * want, abs=1e-3) and row["bce"] == pytest.approx(of["bce"].mean(), abs=1e-6)
    assert row["majority"] == pytest.approx(100 * of["labels"][:, :3].mean(), abs=1e-3)
    same = kept._replace(arrays=kept.arrays | {"scores": np.full_like(kept.arrays["scores"], 0.5)})
    assert TASK.score(same)["map"] == pytest.approx(row["majority"], abs=1e-3)
    scores = TASK.scores(kept, "map")
    assert math.isnan(scores[5]) and np.nanmean(scores) == pytest.approx(want, abs=1e-6)
    whole, found = TASK.by_class(kept, 4)
    ratios = [found[:, at].sum() / whole[:, at].sum() for at in range(3)]
    assert np.mean(ratios) == pytest.approx(want, abs=1e-6) and not whole[:, 3].any() and not whole[5].any()


def test_no_label_at_all_is_an_error():
    kept = kept_of()
    with pytest.raises(ValueError, match="no image has a label"):
        TASK.score(kept._replace(arrays=kept.arrays | {"labels": np.zeros_like(kept.arrays["labels"])}))


def test_contributions_are_derivatives_by_the_weights_of_images():
    of = kept_of(30).of_seen()
    scores, labels, step = of["scores"][:, 0].astype(float), of["labels"][:, 0].astype(float), 1e-5
    found, mean = contributions(scores, labels), average_precision(scores, labels)
    for image in range(len(scores)):
        more, less = np.ones(len(scores)), np.ones(len(scores))
        more[image], less[image] = 1 + step, 1 - step
        slope = (average_precision(scores, labels, more) - average_precision(scores, labels, less)) / (2 * step)
        assert (found[image] - mean) / len(scores) == pytest.approx(slope, abs=1e-7)


def test_intervals_have_the_map_of_more_images_inside():
    """95 % intervals of 200 samples of 500 images, and the mAP of 20,000 images like them."""

    def sample(n, rng):
        labels = rng.random((n, 3)) < (0.15, 0.5, 0.3)
        return Kept({"labels": labels, "scores": labels * (1.0, 2.0, 1.5) + rng.normal(size=(n, 3))}, np.ones(n, bool))

    rng = np.random.default_rng(0)
    true = 100 * TASK.scores(sample(20_000, rng), "map").mean()
    ends = [estimate([TASK.scores(sample(500, rng), "map")[None]]).of_share() for _ in range(200)]
    assert 0.91 <= np.mean([low <= true <= high for low, high in ends]) <= 0.99


def learning(classes=3, smoothing=0.0, **options):
    return task_named("multilabel").learning(classes, Objective(**options), smoothing)


def test_the_loss_is_binary_cross_entropy():
    torch.manual_seed(0)
    logits, target = torch.randn(5, 3), torch.tensor([[0, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0], [1, 0, 1]]).float()
    p = logits.double().sigmoid()

    def by_hand(t):
        return float(-(t * p.log() + (1 - t) * (1 - p).log()).mean())

    assert float(learning().loss(logits, target)) == pytest.approx(by_hand(target.double()), rel=1e-6)
    assert float(learning(smoothing=0.2).loss(logits, target)) == pytest.approx(by_hand(target.double() * 0.8 + 0.1), rel=1e-6)
    right = ((p > 0.5) == (target > 0.5)).double().mean(1)
    torch.testing.assert_close(learning().right(logits, target).double(), right)


def test_mixup_mixes_targets_and_the_loss_smooths_them_once():
    mixup, target = Mixing(mixup=0.4, cutmix=0.0).build(3, 0.2, several=True), torch.tensor([[1.0, 1, 0], [0, 1, 0]])
    images = torch.stack((torch.zeros(3, 4, 4), torch.ones(3, 4, 4)))
    mixed, found = mixup(images, target)
    share = 1 - float(mixed[0, 0, 0, 0])  # of the first image in the first
    torch.testing.assert_close(found, torch.tensor([[share, 1, 0], [1 - share, 1, 0]]))


def test_metrics_of_an_epoch_leave_out_what_fills_the_batches():
    kept = kept_of(24)
    logits = torch.from_numpy(kept.arrays["scores"]).logit(1e-6)
    labels, it = torch.from_numpy(kept.arrays["labels"]).float(), learning(4)
    for start in (0, 8, 16):
        known = [one if kept.seen[start + at] else -1 for at, one in enumerate(labels[start : start + 8])]
        it.update(logits[start : start + 8], known)
    it.update(logits[:2], [-1, torch.tensor(-1)])
    assert 100 * float(it.values["val/map"].compute()) == pytest.approx(TASK.score(kept)["map"], abs=1e-3)
    want = nn.functional.binary_cross_entropy_with_logits(logits[kept.seen], labels[kept.seen])
    assert float(it.values["val/loss"].compute()) == pytest.approx(float(want), rel=1e-5)


@each("options", [{"dice": 1.0}, {"class_weights": [1.0, 1.0, 1.0]}, {"distillation": object()}])
def test_settings_of_other_tasks_are_refused(options):
    with pytest.raises(ValueError, match="several labels an image are learned by binary cross-entropy"):
        learning(**options)


class Colors(Dataset):
    """Images with red, green, both or neither."""

    classes = ("red", "green")

    def __len__(self):
        return 12

    def __getitem__(self, index):
        image = torch.randint(0, 60, (3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(index))
        target = np.array([index % 2, index // 2 % 2])
        for channel in range(2):
            image[channel] += np.uint8(150 * target[channel])
        return image, target


class Brightness(nn.Module):
    """The logit of a class is the mean of its channel."""

    num_classes = 2

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, pixels):
        return self.scale * pixels.mean((2, 3))[:, :2]


def test_a_users_data_set_is_evaluated():
    how = {"mean": (0.5,) * 3, "std": (0.5,) * 3, "interpolation": "bilinear"}
    model = trained_model(Brightness(), "brightness", img_size=(32, 32), preprocessing=how, task="multilabel")
    [row] = at_sizes(model, Colors(), [32], device="cpu", attention_n=0, border_leak=False).to_dict("records")
    assert (row["map"], row["majority"], row["n"]) == (100, 50, 12) and row["map_low"] < 100 == row["map_high"]
    assert "top1" not in row
