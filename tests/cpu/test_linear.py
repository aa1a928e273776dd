"""Products in oneDNN: linear layers and MLPs against float64, forward and backward, also in many chunks."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vitrel.cpu import linear
from vitrel.cpu.linear import LinearFunction, MlpFunction, chunks, mlp, onednn_is_faster
from vitrel.ops.backends.onednn import product, takes

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")


def assert_near(found, expected, limit=2e-6):
    """In norm over norm."""
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == torch.float32 and a.shape == b.shape
        assert (a.double() - b).norm() <= limit * b.norm()


def both(function, plain, inputs, learned=None):
    """Output and gradients of the learned inputs (all): in float32 by the function, in float64 by the plain definition."""
    learned, found = [True] * len(inputs) if learned is None else learned, []
    for run, dtype in ((function, torch.float32), (plain, torch.float64)):
        own = [None if x is None else x.detach().to(dtype).requires_grad_(ask) for x, ask in zip(inputs, learned, strict=True)]
        out = run(*own)
        weight = torch.cos(torch.arange(out.numel())).view(out.shape).to(dtype)
        requested = [x for x in own if x is not None and x.requires_grad]
        found.append([out, *torch.autograd.grad((out * weight).sum(), requested)])
    return found


def plain_mlp(x, weight1, bias1, weight2, bias2):
    return F.linear(F.gelu(F.linear(x, weight1, bias1)), weight2, bias2)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("wide", [(12, 20), (20, 12)], ids=["wider", "narrower"])
@pytest.mark.parametrize("shape", [(7,), (1,), (2, 7), (2, 3, 4), (1, 1, 1)], ids=str)
def test_linear(shape, wide, bias):
    inputs = torch.randn(*shape, wide[0]), torch.randn(wide[1], wide[0]), torch.randn(wide[1]) if bias else None
    assert_near(*both(LinearFunction.apply, F.linear, inputs))
    assert_near([product(*inputs)], [F.linear(*(x if x is None else x.double() for x in inputs))])


@pytest.mark.parametrize("learned", [(0, 1, 1), (1, 0, 0), (1, 0, 1), (0, 0, 1), (0, 1, 0)], ids=str)
def test_linear_in_part_frozen(learned):
    inputs = torch.randn(3, 5, 12), torch.randn(20, 12), torch.randn(20)
    assert_near(*both(LinearFunction.apply, F.linear, inputs, list(map(bool, learned))))


@pytest.mark.parametrize("function", [LinearFunction.apply, product])
def test_linear_of_what_is_not_contiguous(function):
    """Inputs permuted, weights transposed, gradients expanded."""
    x, weight = torch.randn(12, 4, 3).permute(1, 2, 0), torch.randn(12, 20).t()
    assert_near([function(x, weight, None)], [x.double() @ weight.t().double()])
    part = torch.randn(3, 24)[:, ::2]
    assert_near([function(part, weight, None)], [part.double() @ weight.t().double()])
    if function is not product:
        x, weight = x.requires_grad_(), weight.requires_grad_()
        found = torch.autograd.grad(function(x, weight, None).sum(), (x, weight))
        assert_near(found, torch.autograd.grad((x.double() @ weight.t().double()).sum(), (x, weight)))


@pytest.mark.parametrize("chunk", [1, 48, 100, 1 << 21])
@pytest.mark.parametrize("biases", [(1, 1), (0, 1), (1, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("rows", [1, 11])
def test_mlp(rows, biases, chunk, monkeypatch):
    """Rows one by one, in fours, and all at once."""
    monkeypatch.setattr(linear, "CHUNK", chunk)
    bias1, bias2 = (torch.randn(n) if there else None for n, there in zip((24, 10), biases, strict=True))
    inputs = torch.randn(rows, 6), torch.randn(24, 6), bias1, torch.randn(10, 24), bias2
    assert_near(*both(MlpFunction.apply, plain_mlp, inputs))
    assert_near([mlp(*inputs)], [plain_mlp(*(x if x is None else x.double() for x in inputs))])


@pytest.mark.parametrize("learned", [(0, 1, 1, 1, 1), (1, 0, 0, 0, 0), (0, 0, 0, 0, 1), (1, 0, 1, 1, 0)], ids=str)
def test_mlp_in_part_frozen(learned, monkeypatch):
    monkeypatch.setattr(linear, "CHUNK", 48)
    inputs = torch.randn(9, 6), torch.randn(24, 6), torch.randn(24), torch.randn(6, 24), torch.randn(6)
    assert_near(*both(MlpFunction.apply, plain_mlp, inputs, list(map(bool, learned))))


def test_mlp_of_what_is_not_contiguous():
    inputs = torch.randn(6, 9).t(), torch.randn(24, 12)[:, ::2], torch.randn(24), torch.randn(24, 6).t(), torch.randn(6)
    assert_near(*both(MlpFunction.apply, plain_mlp, inputs))
    leaves = [x.requires_grad_() for x in inputs]
    found = torch.autograd.grad(MlpFunction.apply(*leaves).sum(), leaves)  # an expanded gradient
    assert_near(found, torch.autograd.grad(plain_mlp(*(x.double() for x in leaves)).sum(), leaves))


@pytest.mark.parametrize(
    ("function", "plain", "shapes"),
    [
        (LinearFunction.apply, F.linear, [(2, 5, 6), (10, 6), (10,)]),
        (MlpFunction.apply, plain_mlp, [(7, 6), (24, 6), (24,), (10, 24), (10,)]),
    ],
    ids=["linear", "mlp"],
)
def test_second_derivatives(function, plain, shapes):
    """With respect to every input, as of a penalty on gradients."""

    def penalty(run):
        def of(*inputs):
            slopes = torch.autograd.grad(run(*inputs).square().sum(), inputs, create_graph=True)
            return sum(slope.square().sum() for slope in slopes)

        return of

    assert_near(*both(penalty(function), penalty(plain), [torch.randn(shape) for shape in shapes]))


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
