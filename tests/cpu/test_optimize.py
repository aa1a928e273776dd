"""vitrel.optimize: the plain model's outputs, of models of any code; off wherever a call is more than plain evaluation."""

import copy
import io
import pickle

import pytest
import timm
import torch
import torch.nn.functional as F
import torchvision
from timm.layers import get_notrace_modules
from timm.models import swin_transformer, vision_transformer
from timm.models._features_fx import create_feature_extractor
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrizations, prune
from torchvision.models import feature_extraction

import vitrel
from helpers import each
from helpers.optimized import assert_near, check, graph, lively, picture, small, twins, uses_onednn
from vitrel.cpu import optimize as module
from vitrel.cpu.optimize import OneDNNLinear, onednn_is_faster, restore

pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
TRUNKS = pytest.mark.parametrize("trunk", ["vit", "swin"])


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


class Twice(nn.Module):
    """One layer under two names."""

    def __init__(self):
        super().__init__()
        self.first = self.second = nn.Linear(12, 12)

    def forward(self, x):
        return self.second(self.first(x).relu())


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
    "subclass": lambda: Scaled(12, 10),
    "weights used elsewhere": LowRank,
    "twice": Twice,
    "tied": tied,
    "transposed": transposed,
    "pruned": pruned,
    "weight norm": lambda: parametrizations.weight_norm(nn.Linear(12, 10)),
    "attention": lambda: nn.TransformerEncoderLayer(12, 2, 24, batch_first=True, activation="gelu"),
}


@each("name", LAYERS)
def test_layers_of_every_kind(name):
    plain, model = twins(nn.Sequential(LAYERS[name]()).eval())
    inputs = [torch.randn(3, 5, 12), torch.randn(5, 12, 3).mT, torch.randn(1, 5, 12).expand(4, -1, -1)]
    if name != "attention":
        inputs += [torch.randn(12), torch.randn(4, 12), torch.randn(2, 3, 4, 12), torch.randn(0, 12), torch.randn(2, 0, 12)]
    for x in inputs:
        check(plain, model, x)
        gradients = []
        for m in (plain, model):
            m.zero_grad()
            given = x.clone().requires_grad_()
            m(given).square().sum().backward()
            gradients.append([given.grad, *(p.grad for p in m.parameters() if p.grad is not None)])
        assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    with torch.no_grad():
        for parameter, own in zip(plain.parameters(), model.parameters(), strict=True):
            parameter.mul_(-1.5), own.mul_(-1.5)
    check(plain, model, inputs[0])


def test_a_linear_layer_itself():
    plain, model = twins(nn.Linear(12, 10).eval())
    assert type(model) is OneDNNLinear
    check(plain, model, torch.randn(4, 12))
    assert type(restore(model)) is nn.Linear


@each("x", [torch.randn(4, 12).double(), torch.randn(4, 11), torch.randn(12, 4), torch.randn(4, 12).half()])
def test_wrong_inputs_are_refused_as_by_the_plain_layer(x):
    texts = []
    for m in twins(nn.Linear(12, 10).eval()):
        with torch.no_grad(), pytest.raises(RuntimeError) as error:
            m(x)
        texts.append(str(error.value))
    assert texts[0] == texts[1]


MODELS = {
    "vit": lambda: small("vit"),
    "swin": lambda: small("swin"),
    "timm vit": lambda: vision_transformer.VisionTransformer(32, 8, embed_dim=24, depth=2, num_heads=2, act_layer="gelu_tanh"),
    "timm swin": lambda: swin_transformer.SwinTransformer(32, 2, embed_dim=16, depths=(2, 2), num_heads=(1, 2), window_size=4),
    "timm convnext": lambda: timm.create_model("convnext_atto", depths=(1, 1, 1, 1), dims=(8, 8, 16, 16)),
    "torchvision vit": lambda: torchvision.models.VisionTransformer(32, 8, 2, 2, 24, 48, num_classes=5),
}


@each("name", MODELS)
def test_models(name):
    """Outputs near the plain model's, through oneDNN; weights put in place of others are seen; and `restore` undoes it."""
    plain, model = twins(lively(MODELS[name]()))
    image = picture(3, (32, 32))
    check(plain, model, image)
    with torch.inference_mode():
        assert_near(model(image), plain(image))
        assert uses_onednn(lambda: model(image)) and not uses_onednn(lambda: plain(image))
    changed = {name: torch.randn_like(parameter) * 0.3 for name, parameter in plain.named_parameters()}
    with torch.no_grad():
        assert_near(torch.func.functional_call(model, changed, image), torch.func.functional_call(plain, changed, image))
        model.load_state_dict(changed, strict=False), plain.load_state_dict(changed, strict=False)
    check(plain, model, image)
    assert vitrel.optimize(model, linears="onednn") is model and restore(model) is model
    assert [(n, type(m)) for n, m in model.named_modules()] == [(n, type(m)) for n, m in plain.named_modules()]
    with torch.no_grad():
        assert torch.equal(model(image), plain(image))


@TRUNKS
def test_state_dict_copies_and_files(trunk, tmp_path):
    model = small(trunk)
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    plain, model = twins(model)
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert [*model.state_dict()] == [*plain.state_dict()]
    assert [name for name, _ in model.named_modules()] == [name for name, _ in plain.named_modules()]
    assert all(isinstance(a, type(b)) for a, b in zip(model.modules(), plain.modules(), strict=True))
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    vitrel.save(model, tmp_path / "model.safetensors")
    copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)
    for again in (*copies, vitrel.load(tmp_path / "model.safetensors").eval()):
        check(plain, again, picture())


@TRUNKS
def test_off_while_gradients_are_recorded_and_in_training(trunk):
    plain, model = twins(small(trunk, drop_rate=0.2, attn_drop_rate=0.2))
    image = picture()
    found, wanted = model(image), plain(image)
    assert torch.equal(found, wanted) and graph(found) == graph(wanted)
    plain.train(), model.train()
    outs = []
    for m in (model, plain):
        torch.manual_seed(1)
        with torch.no_grad():
            outs.append(m(image))
    assert torch.equal(*outs) and not uses_onednn(lambda: model(image))
    check(plain.eval(), model.eval(), image)


def test_off_under_compile():
    plain, model = twins(nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 5)).eval())
    x, found, frames = torch.randn(3, 7, 12), [], []
    with torch.no_grad():
        for m in (plain, model):
            torch._dynamo.reset()
            counter = CompileCounter()
            compiled = torch.compile(m, backend=counter, fullgraph=True, dynamic=True)
            found.append([compiled(x), compiled(x[:2, :5])])
            frames.append((counter.frame_count, counter.op_count))
    assert frames[0] == frames[1] and torch.equal(found[0][1], found[1][1])
    torch._dynamo.reset()


def test_off_under_export_and_trace():
    plain, model = twins(small("vit", depth=1))
    image = picture(2, (64, 64))
    with torch.no_grad():
        programs = [torch.export.export(m, (image,)) for m in (plain, model)]
        operations = [[str(node.target) for node in program.graph.nodes] for program in programs]
        assert operations[0] == operations[1]
        traced = [torch.jit.trace(m, image, check_trace=False) for m in (plain, model)]
        assert torch.equal(traced[1](image), traced[0](image))


def test_fx_sees_the_plain_graph():
    plain, model = twins(small("vit"))
    leaves = dict(leaf_modules=[*get_notrace_modules()])
    extractors = []
    for m in (plain, model):
        timms = create_feature_extractor(m, {m.feature_info[0]["module"]: "mid", "norm": "last"})
        visions = feature_extraction.create_feature_extractor(m, {"blocks.1": "mid", "norm": "last"}, tracer_kwargs=leaves)
        extractors.append((timms, visions))
    image = picture()
    for wanted, found in zip(*extractors, strict=True):
        nodes = [[(node.op, str(node.target)) for node in extractor.graph.nodes] for extractor in (found, wanted)]
        assert nodes[0] == nodes[1]
        with torch.no_grad():
            for own, other in zip(found(image).values(), wanted(image).values(), strict=True):
                assert_near(own, other)


def test_off_on_other_devices_and_types():
    plain, model = twins(small("swin"))
    image = picture()
    with torch.no_grad():
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert model(torch.empty(2, 3, 64, 48)).shape == (2, 5)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(model(image), plain(image))
        assert torch.equal(torch.func.vmap(model)(image[:, None]), torch.func.vmap(plain)(image[:, None]))
        check(plain, model, image)
        for dtype in (torch.bfloat16, torch.float64):
            assert torch.equal(model.to(dtype)(image.to(dtype)), plain.to(dtype)(image.to(dtype)))
        assert model.to("meta")(image.double().to("meta")).device.type == "meta"


def test_hooks_of_before_and_after_run():
    model, calls = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).eval(), []
    model[0].register_forward_hook(lambda *_: calls.append("before"))
    vitrel.optimize(model, linears="onednn")
    model[1].register_forward_hook(lambda *_: calls.append("after"))
    with torch.no_grad():
        model(torch.randn(2, 4))
    assert calls == ["before", "after"] and [type(layer) for layer in model] == [nn.Linear, OneDNNLinear]


def test_where_onednn_is_no_faster_it_says_so(monkeypatch):
    monkeypatch.setattr(module, "onednn_is_faster", lambda model: False)
    with pytest.warns(UserWarning, match="oneDNN is no faster here"):
        model = vitrel.optimize(small("vit"))
    assert not any(isinstance(part, OneDNNLinear) for part in model.modules())
    for wrong in ("mkl", "", None, True):
        with pytest.raises(ValueError, match=r"linears.*(auto.*onednn)"):
            vitrel.optimize(model, linears=wrong)


def test_the_timing_draws_nothing(monkeypatch):
    model, state = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 40)), torch.get_rng_state()
    assert onednn_is_faster(model) in (True, False)
    assert torch.equal(torch.get_rng_state(), state)
    assert not onednn_is_faster(nn.Conv2d(3, 4, 2))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert not onednn_is_faster(model)
