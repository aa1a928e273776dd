"""Products in oneDNN: linear layers and MLPs against float64, also in many chunks."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vitrel.cpu import linear
from vitrel.cpu.linear import chunks, mlp, onednn_is_faster, product, takes

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


def assert_near(found, expected, limit=2e-6):
    """In norm over norm."""
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32 and a.shape == b.shape
        assert (a.double() - b).norm() <= limit * b.norm()


def plain_mlp(x, weight1, bias1, weight2, bias2):
    return F.linear(F.gelu(F.linear(x, weight1, bias1)), weight2, bias2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("wide", [(12, 20), (20, 12)], ids=["wider", "narrower"])
@pytest.mark.parametrize("shape", [(7,), (1,), (2, 7), (2, 3, 4), (1, 1, 1)], ids=str)
def test_linear(shape, wide, bias):
    inputs = torch.randn(*shape, wide[0]), torch.randn(wide[1], wide[0]), torch.randn(wide[1]) if bias else None
    assert_near([product(*inputs)], [F.linear(*(x if x is None else x.double() for x in inputs))])


def test_linear_of_what_is_not_contiguous():
    """Inputs permuted, weights transposed."""
    x, weight = torch.randn(12, 4, 3).permute(1, 2, 0), torch.randn(12, 20).t()
    assert_near([product(x, weight, None)], [x.double() @ weight.t().double()])
    part = torch.randn(3, 24)[:, ::2]
    assert_near([product(part, weight, None)], [part.double() @ weight.t().double()])


@pytest.mark.parametrize("chunk", [1, 48, 100, 1 << 21])
@pytest.mark.parametrize("biases", [(1, 1), (0, 1), (1, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("rows", [1, 11])
def test_mlp(rows, biases, chunk, monkeypatch):
    """Rows one by one, in fours, and all at once."""
    monkeypatch.setattr(linear, "CHUNK", chunk)
    bias1, bias2 = (torch.randn(n) if there else None for n, there in zip((24, 10), biases, strict=True))
    inputs = torch.randn(rows, 6), torch.randn(24, 6), bias1, torch.randn(10, 24), bias2
    assert_near([mlp(*inputs)], [plain_mlp(*(x if x is None else x.double() for x in inputs))])


def test_mlp_of_what_is_not_contiguous():
    inputs = torch.randn(6, 9).t(), torch.randn(24, 12)[:, ::2], torch.randn(24), torch.randn(24, 6).t(), torch.randn(6)
    assert_near([mlp(*inputs)], [plain_mlp(*(x.double() for x in inputs))])


@pytest.mark.skipif(
    not takes(torch.bfloat16), reason="oneDNN has no bfloat16 on this processor (it takes AVX-512 or an equivalent)"
)
def test_bfloat16_is_no_worse_than_torchs():
    x, weight, bias = torch.randn(50, 64), torch.randn(48, 64), torch.randn(48)
    exact, half = F.linear(x.double(), weight.double(), bias.double()), [t.bfloat16() for t in (x, weight, bias)]
    own, peer = ((f(*half).double() - exact).norm() for f in (product, F.linear))
    assert own <= 1.1 * peer
    gelu, then = F.gelu(exact), product(*half, then="gelu")
    assert (
        then.dtype == torch.bfloat16 and (then.double() - gelu).norm() <= 1.1 * (F.gelu(F.linear(*half)).double() - gelu).norm()
    )


def test_what_it_takes_runs():
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [torch.randn(shape).to(dtype) for shape in ((5, 16), (24, 16), (24,))]
        if takes(dtype):
            assert product(*inputs).dtype == dtype
    assert takes(torch.float32) and not takes(torch.float64)


@pytest.mark.parametrize(("count", "numbers"), [(1, 5), (10, 3), (7, 1000), (8, 4), (0, 4), (3, 0)])
def test_chunks_hold_every_row_once(count, numbers, monkeypatch):
    monkeypatch.setattr(linear, "CHUNK", 12)
    found = list(chunks(count, numbers))
    assert [i for own in found for i in range(own.start, own.stop)] == list(range(count))
    assert all(own.stop - own.start <= max(1, 12 // max(numbers, 1)) for own in found)


def test_the_timing_draws_nothing(monkeypatch):
    model, state = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 40)), torch.get_rng_state()
    assert onednn_is_faster(model) in (True, False)
    assert torch.equal(torch.get_rng_state(), state)
    assert not onednn_is_faster(nn.Conv2d(3, 4, 2))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not onednn_is_faster(model)
