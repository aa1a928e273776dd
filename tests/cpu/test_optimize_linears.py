"""vitrel.optimize on linear layers of every kind."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

from helpers.optimized import KINDS, apart, assert_near, build, check, picture, twins, uses_onednn
from vitrel.cpu import optimize
from vitrel.cpu.linear import takes
from vitrel.cpu.optimize import restore

ONEDNN = torch.backends.mkldnn.is_available()
EVERY = pytest.mark.parametrize("kind", KINDS)


class Scaled(nn.Linear):
    """A subclass that computes something else."""

    def forward(self, x):
        return super().forward(x) * 3 + 1


class LowRank(nn.Module):
    """Uses the weights of a linear layer without calling it."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(12, 10)

    def forward(self, x):
        return F.linear(x, self.inner.weight * 2, self.inner.bias) + self.inner(x)


def tied():
    first, second = nn.Linear(12, 12), nn.Linear(12, 12, bias=False)
    second.weight = first.weight
    return nn.Sequential(first, nn.GELU(), second)


def transposed():
    layer = nn.Linear(12, 10)
    layer.weight = nn.Parameter(torch.randn(12, 10).T)
    return layer


def pruned():
    layer = nn.Linear(12, 10)
    with torch.no_grad():  # else it cannot be copied
        prune.random_unstructured(layer, "weight", 0.5)
    return layer


LAYERS = {
    "plain": lambda: nn.Linear(12, 10),
    "no bias": lambda: nn.Linear(12, 10, bias=False),
    "one output": lambda: nn.Linear(12, 1),
    "wide": lambda: nn.Linear(12, 701),
    "mlp": lambda: nn.Sequential(nn.Linear(12, 33), nn.GELU(), nn.Linear(33, 10)),
    "tanh mlp": lambda: nn.Sequential(nn.Linear(12, 33), nn.GELU("tanh"), nn.Linear(33, 10)),
    "subclass": lambda: Scaled(12, 10),
    "weights used elsewhere": LowRank,
    "tied": tied,
    "transposed": transposed,
    "pruned": pruned,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(12, 10)),
    "attention": lambda: nn.TransformerEncoderLayer(12, 2, 24, batch_first=True, activation="gelu"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_every_kind(name):
    torch.manual_seed(0)
    plain, model = twins(nn.Sequential(LAYERS[name]()).eval(), linears="onednn")
    inputs = [torch.randn(shape) for shape in ((3, 5, 12), (1, 1, 12), (2, 700, 12))]
    inputs += [torch.randn(5, 12, 3).mT, torch.randn(3, 10, 24)[:, ::2, 1::2], torch.randn(1, 5, 12).expand(4, -1, -1)]
    if name != "attention":
        inputs += [torch.randn(12), torch.randn(4, 12), torch.randn(2, 3, 4, 12), torch.randn(0, 12), torch.randn(2, 0, 12)]
    for x in inputs:
        check(plain, model, x)
        gradients = []
        for m in (plain, model):
            m.zero_grad()
            given = x.clone().requires_grad_()
            out = m(given)
            out.square().sum().backward()
            found = [given.grad, *(p.grad for p in m.parameters() if p.grad is not None)]
            gradients.append([out.detach(), torch.cat([g.flatten() for g in found])])  # some are zero but for rounding
        assert_near(gradients[1], gradients[0], 1e-5)
    with torch.no_grad():
        for parameter, own in zip(plain.parameters(), model.parameters(), strict=True):
            parameter.mul_(-1.5), own.mul_(-1.5)
    check(plain, model, inputs[0])


def test_a_linear_layer_itself():
    plain, model = twins(nn.Linear(12, 10), linears="onednn")
    assert isinstance(model, nn.Linear)
    check(plain, model, torch.randn(4, 12))
    assert type(restore(model)) is nn.Linear


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_wrong_inputs_are_refused_as_by_the_plain_layer(dtype):
    pair = twins(nn.Sequential(nn.Linear(12, 10)), linears="onednn")
    for x in (torch.randn(4, 12).to(dtype), torch.randn(4, 11), torch.randn(2, 3, 13), torch.randn(12, 4)):
        texts = []
        for m in pair:
            with torch.no_grad(), pytest.raises(RuntimeError) as error:
                m(x)
            texts.append(str(error.value))
        assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("there", [True, False])
def test_bfloat16_where_onednn_has_none(there, kind, monkeypatch):
    """It needs AVX-512 or an equivalent: without, linear layers are PyTorch's, as in the plain model."""
    there = there and takes(torch.bfloat16)
    monkeypatch.setattr(optimize, "takes", lambda dtype: dtype == torch.float32 or there)
    plain, model = twins(build(kind).bfloat16(), linears="onednn")
    image = picture().bfloat16()
    with torch.no_grad():
        assert apart(model(image), plain(image)) <= 0.1
        assert uses_onednn(lambda: model(image)) is there
