"""A relativized model: timm's interface, copies, checkpointing, compile and export go on working."""

import copy
import io

import pytest
import timm
import torch
from timm.models._features import FeatureGetterNet
from timm.models._features_fx import create_feature_extractor
from timm.models._input import get_model_input_config
from timm.models.vision_transformer import VisionTransformer
from timm.optim import param_groups_layer_decay
from torch._dynamo.testing import CompileCounter
from torch.fx.experimental import _config as fx_config

from helpers.relativize_models import MODELS, TINY, build, image, position_parameters, randomise
from vitrel.convert.fade import absolute_scale
from vitrel.convert.relativize import relativize


def test_timm_knows_that_any_size_goes():
    model = relativize(timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=3).eval())
    assert get_model_input_config(model)["fixed_input_size"] is False
    assert isinstance(model, VisionTransformer) and type(model).__name__ == "RelativizedVisionTransformer"
    features = FeatureGetterNet(model, out_indices=[0])(torch.randn(1, 3, 96, 160))
    assert features[0].shape == (1, 192, 6, 10)


@pytest.mark.parametrize("name", MODELS)
def test_interface_of_timm(name):
    model, x = randomise(relativize(build(name))), image(40, 24)
    features = model.forward_features(x)
    assert torch.equal(model.forward_head(features), model(x))
    last, found = model.forward_intermediates(x, indices=2, output_fmt="NCHW")
    assert torch.equal(last, features) and [f.shape for f in found] == [(2, 32, 5, 3)] * 2
    assert set(position_parameters(model)) <= model.no_weight_decay() and "cls_token" in model.no_weight_decay()
    assert copy.deepcopy(model).no_weight_decay() == model.no_weight_decay()
    groups = param_groups_layer_decay(model, 0.05, model.no_weight_decay(), layer_decay=0.5)
    placed = {id(p): group for group in groups for p in group["params"]}
    for key, parameter in position_parameters(model).items():
        block = model.get_parameter(f"blocks.{key.split('.')[1]}.attn.proj.weight")
        assert placed[id(parameter)]["lr_scale"] == placed[id(block)]["lr_scale"]
        assert placed[id(parameter)]["weight_decay"] == 0
    model.prune_intermediate_layers([0], prune_head=False)
    assert len(model.blocks) == 1 and len(model.feature_info) == 2
    model.reset_classifier(7)
    assert model(x).shape == (2, 7) and model.get_classifier() is not None


def test_the_state_of_the_model_is_taken_over():
    model = build("eva").train()
    model.set_grad_checkpointing()
    relativize(model, "rope_normalised", dict(jitter=2.0))
    assert model.blocks[0].grad_checkpointing and not model.grad_checkpointing
    assert model.blocks[0].attn.position.training and relativize(build("eva")).blocks[0].attn.position.training is False


@pytest.mark.parametrize("name", ["reg", "deit", "no_class", "eva02", "cat", "mixed"])
def test_graph_features(name):
    """fx, traced at one size, run at others; the graph notes its own grids and counts its own steps."""
    model = randomise(relativize(build(name), absolute="fade", fade_steps=4))
    extractor = create_feature_extractor(model, ["norm"])
    for size in [(32, 32), (24, 40), (40, 24)]:
        torch.testing.assert_close(extractor(image(*size))["norm"], model.forward_features(image(*size)), atol=0, rtol=0)
    assert absolute_scale(model) == 1
    model.train(), extractor.train()(image())
    assert absolute_scale(model) == 0.75


@pytest.mark.parametrize("name", ["vit", "deit", "mixed", "cat", "vitrel"])
def test_set_input_size_leaves_the_encodings(name):
    model = randomise(relativize(build(name)))
    tables = {key: p.clone() for key, p in position_parameters(model).items()}
    wide = model(image(24, 48))
    model.set_input_size(img_size=(24, 48))
    assert all(torch.equal(p, tables[key]) for key, p in position_parameters(model).items())
    torch.testing.assert_close(model(image(24, 48)), wide, atol=1e-5, rtol=1e-5)
    assert model.blocks[0].get_submodule("position" if name == "vitrel" else "attn.position").grid[:2] == (4, 4)


@pytest.mark.parametrize("name", ["reg", "eva02", "vitrel"])
def test_copies_are_independent(name):
    model = randomise(relativize(build(name), absolute="fade", fade_steps=4)).train()
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        parameter.data.mul_(1.5)
    model(image(24, 40)), other(image(40, 8)), other(image())
    assert (absolute_scale(model), absolute_scale(other)) == (0.75, 0.5)
    buffer = io.BytesIO()
    torch.save(model.eval(), buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    expected, alien = model(image(24, 40)), other.eval()(image(40, 8))
    assert torch.equal(loaded(image(24, 40)), expected) and type(loaded) is type(model)
    assert torch.equal(other(image(40, 8)), alien) and torch.equal(model(image(24, 40)), expected)
    assert (alien - model(image(40, 8))).abs().max() > 1e-4


@pytest.mark.parametrize("name", ["reg", "eva02", "mixed"])
def test_checkpointing_recomputes_on_the_grid_of_its_forward(name):
    """Two crops of the same number of tokens and one smaller, one backward pass: as in multi-crop training."""
    model = randomise(relativize(build(name)))
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        (model(image(24, 40)).sum() + model(image(40, 24)).square().sum() + model(image(16, 16)).sum()).backward()
        gradients.append({key: p.grad.clone() for key, p in model.named_parameters()})
    for key, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][key], gradient, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["reg", "deit", "eva02", "mixed"])
def test_half_precision(name):
    model = randomise(relativize(build(name)), 0.1)
    expected = model(image())
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(image()).float(), expected, atol=0.05, rtol=0.05)
    torch.testing.assert_close(model.bfloat16()(image().bfloat16()).float(), expected, atol=0.1, rtol=0.1)
    model = relativize(build(name).bfloat16())
    assert all(p.dtype == torch.bfloat16 for p in position_parameters(model).values())


def test_meta_device():
    with torch.device("meta"):
        model = relativize(VisionTransformer(**TINY))
    assert all(p.device.type == "meta" for p in position_parameters(model).values())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reg", "deit", "eva02", "mixed", "vitrel"])
def test_compile(name):
    model, counter = randomise(relativize(build(name), absolute="fade", fade_steps=3)), CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        for size in [(32, 32), (40, 56), (24, 37), (64, 48)]:
            torch.testing.assert_close(compiled(image(*size)), model(image(*size)), atol=1e-5, rtol=1e-5)
    assert counter.frame_count <= 2
    torch._dynamo.reset()
    model.train().set_grad_checkpointing()
    torch.compile(model, backend="aot_eager", fullgraph=True)(image()).sum().backward()
    assert model.absolute_fade.steps == 1 and all(p.grad is not None for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reg", "deit", "cat", "mixed", "vitrel"])
def test_export(name):
    model, dynamic = randomise(relativize(build(name))), torch.export.Dim.DYNAMIC
    with fx_config.patch(backed_size_oblivious=True), torch.no_grad():
        program = torch.export.export(model, (image(40, 56),), dynamic_shapes=({0: dynamic, 2: dynamic, 3: dynamic},))
    for size in [(40, 56), (32, 32), (24, 61)]:
        torch.testing.assert_close(program.module()(image(*size)), model(image(*size)), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_export_of_a_static_shape():
    """DINOv3's rope bakes the size into the graph, in timm too."""
    model = randomise(relativize(build("dinov3")))
    program = torch.export.export(model, (image(40, 56),))
    torch.testing.assert_close(program.module()(image(40, 56)), model(image(40, 56)), atol=1e-5, rtol=1e-5)
