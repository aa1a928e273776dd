"""vitrel.optimize on linear layers of every kind, and its backward pass through oneDNN (training=True)."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, prune

import vitrel
from helpers.optimized import KINDS, NEAR, apart, assert_near, build, check, picture, twins, uses_onednn
from vitrel.cpu import optimize
from vitrel.cpu.optimize import restore
from vitrel.ops.backends.onednn import takes

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


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_every_kind(name, training):
    torch.manual_seed(0)
    plain, model = twins(nn.Sequential(LAYERS[name]()).eval(), training=training, linears="onednn")
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


def step(model, image):
    """(logits, gradients of the image and of all parameters), None where there is none."""
    model.zero_grad()
    image = image.clone().requires_grad_()
    out = model(image)
    (out * torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view_as(out)).sum().backward()
    return [out.detach(), image.grad, *(p.grad for p in model.parameters())]


@pytest.mark.slow
@pytest.mark.parametrize("train", [False, True])
@EVERY
def test_gradients_against_float64(kind, train):
    """No worse than twice the plain model's own error, each of them; outputs as near as in evaluation.

    Where a gradient nearly cancels what is left of it is rounding, in both models: that is held to the scale of the others.
    """
    plain, model = twins(build(kind), training=True, linears="onednn")
    plain.train(train), model.train(train)
    exact = copy.deepcopy(plain).double()
    image = picture(3)
    assert uses_onednn(lambda: step(model, image)) is ONEDNN
    found, own, wanted = step(model, image), step(plain, image), step(exact, image.double())
    assert_near(found[0], own[0])
    names = ["logits", "image", *(name for name, _ in plain.named_parameters())]
    for name, new, old, truth in zip(names, found, own, wanted, strict=True):
        assert (new is None) is (truth is None), name
        if truth is not None and truth.norm() > 1e-6 * wanted[1].norm():
            error, others = (new - truth).norm(), torch.stack([t.norm() for t in wanted[2:] if t is not None]).median()
            assert error <= max(2 * (old - truth).norm(), NEAR * max(truth.norm(), others)), (
                name,
                error,
                truth.norm(),
                others,
            )
    check(plain.eval(), model.eval(), image)


@pytest.mark.parametrize("kind", ["vit", "swin"])
def test_training_with_all_that_draws_and_checkpoints(kind):
    options = dict(drop_rate=0.3, attn_drop_rate=0.3, drop_path_rate=0.3)
    plain, model = twins(build(kind, **options), training=True, linears="onednn")
    image, found = picture(3), []
    for checkpoints in (False, True):
        for m in (plain.train(), model.train()):
            m.set_grad_checkpointing(checkpoints)
            torch.manual_seed(1)
            found.append(step(m, image))
        assert_near(found[-1], found[-2], 1e-4)
        assert_near(found[-1][0], found[-2][0])


def test_training_follows_the_plain_model():
    """Ten updates by AdamW, evaluated in between."""
    plain, model = twins(build("swin"), training=True, linears="onednn")
    exact = copy.deepcopy(plain).double()
    models = (plain, model, exact)
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-3, eps=1e-3) for m in models]
    torch.manual_seed(1)
    for _ in range(10):
        image, target = picture(4, (32, 40)), torch.randint(5, (4,))
        losses = []
        for m, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss = F.cross_entropy(m.train()(image.to(next(m.parameters()).dtype)), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            with torch.no_grad():
                m.eval()(image.to(next(m.parameters()).dtype))
        assert losses[1] == pytest.approx(losses[2], rel=1e-4)


def test_frozen_parts_and_inputs_without_gradients():
    plain, model = twins(build("vit"), training=True, linears="onednn")
    image = picture()
    for frozen in ("blocks.0", "blocks.0.mlp.fc1.weight", "head.bias", ""):
        for m in (plain, model):
            m.zero_grad()
            for name, parameter in m.named_parameters():
                parameter.requires_grad_(not name.startswith(frozen) or not frozen)
            m(image).square().sum().backward()
        for (name, own), other in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert (own.grad is None) is (other.grad is None), name
            assert own.grad is None or apart(own.grad, other.grad) <= 1e-4, name
    for m in (plain, model):
        m.requires_grad_(False)
    assert not model(image).requires_grad
    assert_near(model(image), plain(image))
    given = [image.clone().requires_grad_() for _ in range(2)]
    for m, x in zip((plain, model), given, strict=True):
        m(x).sum().backward()
    assert_near(given[1].grad, given[0].grad, 1e-4)


@pytest.mark.parametrize("kind", ["vit", "swin"])
def test_gradients_of_gradients_are_right_or_refused(kind):
    """A backward pass that autograd cannot see through would drop terms in silence, where only some gradients are needed."""
    plain, model = twins(build(kind), training=True, linears="onednn")
    image, found = picture(), []
    for m in (plain, model):
        x = image.clone().requires_grad_()
        try:
            (slope,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
            found += torch.autograd.grad(slope.square().sum(), x)
        except RuntimeError:
            assert m is model
            return
    assert_near(found[1], found[0], 1e-4)


def test_weights_changed_before_the_backward_pass_are_refused():
    """As by autograd: a gradient by other weights than those of the forward pass would be wrong in silence."""
    for m in twins(nn.Sequential(nn.Linear(12, 10), nn.Linear(10, 3)), training=True, linears="onednn"):
        out = m(torch.randn(4, 12)).sum()
        with torch.no_grad():
            m[1].weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()


@pytest.mark.parametrize("kind", ["vit", "swin"])
def test_training_under_autocast_is_no_worse(kind):
    plain, model = twins(build(kind), training=True, linears="onednn")
    image = picture(4)
    wanted, errors = step(plain, image), []
    for m in (plain, model):
        with torch.autocast("cpu", torch.bfloat16):
            found = step(m, image)
        assert all(p.grad.dtype == torch.float32 for p in m.parameters())
        errors.append(sum(apart(a.float(), b) for a, b in zip(found[1:], wanted[1:], strict=True) if b.norm() > 1e-3))
    assert errors[1] <= 1.1 * errors[0]


@pytest.mark.slow
def test_compiled_training_is_the_plain_models():
    plain, model = twins(build("vit", depth=1), training=True, linears="onednn")
    found = []
    for m in (plain, model):
        torch._dynamo.reset()
        compiled = torch.compile(m, backend="aot_eager", fullgraph=True, dynamic=False)
        found.append(step(compiled, picture(2, (16, 24)) * 0 + 0.5))
    assert apart(found[1], found[0]) == 0
    torch._dynamo.reset()


def test_training_false_keeps_out_of_gradients_when_both_are_asked_in_turn():
    plain, model = twins(build("vit"), training=True, linears="onednn")
    assert uses_onednn(lambda: model(picture())) is ONEDNN
    assert not uses_onednn(lambda: vitrel.optimize(model, linears="onednn")(picture()))
    image = picture()
    assert torch.equal(model(image), plain(image))
