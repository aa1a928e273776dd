import pytest
import torch
from torch import nn

from vitrel.evaluate.metrics import T975, Tally, state_hash, t_interval, wilson


@pytest.mark.parametrize(
    ("hits", "n", "low", "high"),
    # Newcombe 1998, table I, method 3 (score without continuity correction)
    [(81, 263, 25.53, 36.62), (15, 148, 6.24, 16.05), (0, 20, 0.0, 16.11), (1, 29, 0.61, 17.18)],
)
def test_wilson_agrees_with_published_intervals(hits, n, low, high):
    assert wilson(hits, n) == pytest.approx((low, high), abs=0.005)


def test_wilson_stays_within_0_and_100_and_refuses_impossible_counts():
    for n in range(1, 1001):
        assert wilson(n, n)[1] == 100.0 and wilson(0, n)[0] == 0.0
        for hits in range(0, n + 1, max(1, n // 7)):
            low, high = wilson(hits, n)
            assert 0 <= low <= 100 * hits / n <= high <= 100
    with pytest.raises(ValueError, match="0 <= hits <= n"):
        wilson(6, 5)
    with pytest.raises(ValueError, match="n > 0"):
        wilson(0, 0)


def test_t_interval_agrees_with_a_worked_example():
    # 3 values, mean 2, standard deviation 1: half width 4.3027 / sqrt(3)
    assert t_interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 2.48414, 2 + 2.48414), abs=1e-4)
    with pytest.raises(ValueError, match="at least 2 values, got 1"):
        t_interval([1.0])


def test_t_quantiles_integrate_to_975_per_mille():
    for df, quantile in enumerate(T975, 1):
        x = torch.linspace(0, quantile, 200_001, dtype=torch.float64)
        log_scale = torch.lgamma(torch.tensor([(df + 1) / 2, df / 2], dtype=torch.float64))
        scale = torch.exp(log_scale[0] - log_scale[1]) / (df * torch.pi) ** 0.5
        mass = torch.trapezoid(scale * (1 + x * x / df) ** (-(df + 1) / 2), x)
        assert 0.5 + mass.item() == pytest.approx(0.975, abs=4e-6), df


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
