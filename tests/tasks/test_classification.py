"""Classification as a task: metrics against plain computations, and which outputs count."""

import numpy as np
import pytest
import torch
from torch import nn

from helpers import each
from vitrel.tasks import Kept, task_named
from vitrel.tasks.classification import TASK
from vitrel.weights.record import state_hash


def kept_of(logits, labels, outputs=None):
    """What is kept of logits [n, K], by default with a class for every output, in batches of 17."""
    parts = [
        TASK.keep(logits[at : at + 17], labels[at : at + 17].tolist(), outputs or range(logits.shape[1]))
        for at in range(0, len(logits), 17)
    ]
    return Kept({name: np.concatenate([part[name] for part in parts]) for name in parts[0]}, np.ones(len(logits), bool))


def columns(logits, labels):
    return TASK.score(kept_of(logits, labels))


@each("scale", [0.5, 3.0, 30.0])  # confidences near 1/K, everywhere, and 1
def test_calibration_error_agrees_with_torchmetrics(scale):
    calibration = pytest.importorskip("torchmetrics.functional.classification").multiclass_calibration_error
    generator = torch.Generator().manual_seed(0)
    logits, labels = scale * torch.randn(200, 4, generator=generator), torch.randint(4, (200,), generator=generator)
    expected = calibration(logits.double().softmax(-1), labels, num_classes=4, n_bins=15, norm="l1").item()
    assert columns(logits, labels)["ece"] == pytest.approx(100 * expected, abs=1e-3)


@each("classes", [3, 12])
def test_metrics_agree_with_a_plain_computation(classes):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, classes, generator=generator)
    labels = torch.randint(classes, (50,), generator=generator)
    top1 = top5 = nll = 0.0
    for row, label in zip(logits.double().tolist(), labels.tolist(), strict=True):
        order = sorted(range(classes), key=lambda k: -row[k])
        top1 += order[0] == label
        top5 += label in order[:5]
        nll -= row[label] - torch.tensor(row, dtype=torch.float64).logsumexp(0).item()
    got = columns(logits, labels)
    assert got["top1"] == pytest.approx(2 * top1)
    assert got["top5"] == pytest.approx(2 * top5) and (classes >= 5 or got["top5"] == 100.0)
    assert got["nll"] == pytest.approx(nll / 50, abs=1e-6)
    assert set(TASK.columns) | {"majority"} == set(got)


def test_outputs_without_a_class_are_wrong_and_one_column_leaves_them_out():
    """The data have two of the model's three classes, in the other order."""
    logits = torch.tensor([[3.0, 1.0, 2.0], [0.0, 1.0, 5.0], [0.0, 4.0, 1.0]])  # best: output 0, 2 and 1
    labels = torch.tensor([1, 1, 0])  # outputs 0, 0 and 1
    whole = kept_of(logits, labels, (1, 0))
    assert TASK.scores(whole, "top1").tolist() == [1, 0, 1] and TASK.scores(whole, "top1_among").tolist() == [1, 0, 1]
    assert TASK.score(whole)["top1_among"] == pytest.approx(200 / 3, abs=1e-3)
    assert np.isnan(TASK.score(kept_of(logits, labels, (2, 1, 0)))["top1_among"])
    logits[1, 0] = 2.0  # now above the other class of the data, below the output without a class
    whole = kept_of(logits, labels, (1, 0))
    assert TASK.scores(whole, "top1").tolist() == [1, 0, 1] and TASK.scores(whole, "top1_among").tolist() == [1, 1, 1]


def test_images_that_could_not_be_read_have_no_score_and_are_in_no_class():
    kept = kept_of(torch.eye(3), torch.tensor([0, 1, 0]))
    kept = kept._replace(seen=np.array([True, False, True]))
    scores = TASK.scores(kept, "top1")
    assert scores[[0, 2]].tolist() == [1, 0] and np.isnan(scores[1])
    assert [counts.tolist() for counts in TASK.by_class(kept, 4)] == [[2, 0, 0, 0], [1, 0, 0, 0]]
    assert TASK.score(kept)["top1"] == 50


def test_a_task_is_found_by_the_name_of_its_file():
    assert task_named("classification") is TASK
    with pytest.raises(ValueError, match="unknown task 'detection': choose from classification, multilabel, segmentation"):
        task_named("detection")


@each(
    "change",
    [
        lambda m: m.weight.data[0, 0].add_(1e-7),
        lambda m: m.bias.data.copy_(m.bias.data.flip(0)),
        lambda m: m.bfloat16(),
        lambda m: m.register_buffer("extra", torch.zeros(1)),
    ],
)
def test_state_hash_sees_every_change_and_only_changes(change):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    model.weight.data[0, 0] = 0.5
    before = state_hash(model)
    assert state_hash(model) == before and len(before) == 64
    change(model)
    assert state_hash(model) != before
