import pytest
import torch
from torch import nn

from vitrel.evaluate.predict import state_hash
from vitrel.evaluate.score import Tally


@pytest.mark.parametrize("scale", [0.5, 3.0, 30.0])  # confidences near 1/K, everywhere, and 1
def test_calibration_error_agrees_with_torchmetrics(scale):
    calibration = pytest.importorskip("torchmetrics.functional.classification").multiclass_calibration_error
    generator = torch.Generator().manual_seed(0)
    logits, labels = scale * torch.randn(200, 4, generator=generator), torch.randint(4, (200,), generator=generator)
    tally, other = Tally(), Tally()
    tally.update(logits[:90], labels[:90])
    other.update(logits[90:], labels[90:])
    tally.add(other)
    expected = calibration(logits.double().softmax(-1), labels, num_classes=4, n_bins=15, norm="l1").item()
    assert tally.columns()["ece"] == pytest.approx(100 * expected, abs=1e-3) and tally.n == 200


@pytest.mark.parametrize("classes", [3, 12])
def test_tally_agrees_with_a_plain_computation(classes):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(50, classes, generator=generator)
    labels = torch.randint(classes, (50,), generator=generator)
    tally = Tally()
    for start in range(0, 50, 17):
        tally.update(logits[start : start + 17], labels[start : start + 17])
    top1 = top5 = nll = 0.0
    for row, label in zip(logits.double().tolist(), labels.tolist(), strict=True):
        order = sorted(range(classes), key=lambda k: -row[k])
        top1 += order[0] == label
        top5 += label in order[:5]
        nll -= row[label] - torch.tensor(row, dtype=torch.float64).logsumexp(0).item()
    got = tally.columns()
    assert got["top1"] == pytest.approx(2 * top1)
    assert got["top5"] == pytest.approx(2 * top5) and (classes >= 5 or got["top5"] == 100.0)
    assert (got["top1_err"], got["top5_err"]) == pytest.approx((100 - 2 * top1, 100 - 2 * top5))
    assert got["nll"] == pytest.approx(nll / 50, abs=1e-6)
    assert got["n"] == 50 and got["top1_low"] < got["top1"] < got["top1_high"]


def test_tally_refuses_logits_that_are_not_finite():
    with pytest.raises(FloatingPointError, match="NaN or infinity"):
        Tally().update(torch.tensor([[0.0, float("nan")]]), torch.tensor([0]))


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
