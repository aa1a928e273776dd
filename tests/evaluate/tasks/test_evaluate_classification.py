from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from vitrel.evaluate.predict import state_hash
from vitrel.evaluate.tasks.base import ImageList, Predicted
from vitrel.evaluate.tasks.classification import TASK


def columns(logits, labels):
    """The metrics of logits [n, K] with a class for every output, kept in batches of 17."""
    count, trained = logits.shape[1], SimpleNamespace(restrict=False)
    parts = [
        TASK.keep(logits[start : start + 17], labels[start : start + 17].tolist(), range(count), trained)
        for start in range(0, len(logits), 17)
    ]
    arrays = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
    return TASK.columns_of(Predicted(ImageList([], []), arrays, np.ones(len(logits), bool)))


@pytest.mark.parametrize("scale", [0.5, 3.0, 30.0])  # confidences near 1/K, everywhere, and 1
def test_calibration_error_agrees_with_torchmetrics(scale):
    calibration = pytest.importorskip("torchmetrics.functional.classification").multiclass_calibration_error
    generator = torch.Generator().manual_seed(0)
    logits, labels = scale * torch.randn(200, 4, generator=generator), torch.randint(4, (200,), generator=generator)
    expected = calibration(logits.double().softmax(-1), labels, num_classes=4, n_bins=15, norm="l1").item()
    assert columns(logits, labels)["ece"] == pytest.approx(100 * expected, abs=1e-3)


@pytest.mark.parametrize("classes", [3, 12])
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
    assert (got["top1_err"], got["top5_err"]) == pytest.approx((100 - 2 * top1, 100 - 2 * top5))
    assert got["nll"] == pytest.approx(nll / 50, abs=1e-6)
    assert got["n"] == 50 and got["top1_low"] < got["top1"] < got["top1_high"]


def test_metrics_refuse_logits_that_are_not_finite():
    with pytest.raises(FloatingPointError, match="NaN or infinity"):
        columns(torch.tensor([[0.0, float("nan")]]), torch.tensor([0]))


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.weight.data[0, 0].add_(1e-7),
        lambda m: m.bias.data.copy_(m.bias.data.flip(0)),
        lambda m: m.bfloat16(),
        lambda m: m.register_buffer("extra", torch.zeros(1)),
    ],
    ids=["one ulp", "order", "dtype", "a buffer"],
)
def test_state_hash_sees_every_change_and_only_changes(change):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    model.weight.data[0, 0] = 0.5
    before = state_hash(model)
    assert state_hash(model) == before and len(before) == 64
    change(model)
    assert state_hash(model) != before
