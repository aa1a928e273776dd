"""What a timm model owes: features, intermediates, pruning, classifier, checkpointing, layer decay, fx, compile, export."""

import copy

import pytest
import torch
import torch.fx.experimental._config as fx_config
from timm.layers import get_notrace_modules
from timm.models.vision_transformer import VisionTransformer
from torch._dynamo.testing import CompileCounter
from torchvision.models import feature_extraction

from helpers import each
from helpers.variants import perturbed
from helpers.variants import small_model as build
from vitrel import load_pretrained
from vitrel.layers import Block

PAIR = ["vitrel_vit_n8_table", "vitrel_swin_n"]
TRIO = [*PAIR, "vitrel_swinv2_n"]


@each("name", TRIO)
def test_intermediates_equal_features(name):
    model, image = build(name), torch.randn(2, 3, 96, 72)
    final, found = model.forward_intermediates(image)
    assert torch.equal(final, model.forward_features(image))
    assert len(found) == len(model.feature_info)
    for feature, info in zip(found, model.feature_info, strict=True):
        assert feature.shape == (2, info["num_chs"], -(-96 // info["reduction"]), -(-72 // info["reduction"]))
    only = model.forward_intermediates(image, indices=[1], intermediates_only=True, stop_early=True)
    assert len(only) == 1 and torch.equal(only[0], found[1])


def shallow(name):
    """As `build`, with two blocks (a Swin: two in its first stage, one in a second), for what takes long."""
    return build(name, **({"depth": 2} if "_vit_" in name else {"depths": (2, 1), "num_heads": (1, 2)}))


class Calls:
    """Inputs and outputs of every block of a model, in the order of the calls."""

    def __init__(self, model):
        self.inputs, self.outputs = [], []
        for block in (m for m in model.modules() if isinstance(m, Block)):
            block.register_forward_pre_hook(lambda _, inputs: self.inputs.append(inputs[0]))
            block.register_forward_hook(lambda _, inputs, output: self.outputs.append(output))

    def clear(self):
        self.inputs.clear(), self.outputs.clear()


@each("norm", [False, True])
def test_intermediates_of_a_vit(norm):
    """Prefix tokens apart, both layouts, and the last norm on all of them or on none."""
    model, image = build("vitrel_vit_n8_table", reg_tokens=2), torch.randn(2, 3, 96, 72)
    calls = Calls(model)
    final, maps = model.forward_intermediates(image, norm=norm)
    tokens = [model.norm(x) if norm else x for x in calls.outputs]
    assert len(tokens) == len(maps) == 4 and torch.equal(final, model.norm(calls.outputs[-1]))
    pairs = model.forward_intermediates(image, norm=norm, output_fmt="NLC", return_prefix_tokens=True, intermediates_only=True)
    for x, feature, (patches, prefix) in zip(tokens, maps, pairs, strict=True):
        assert prefix.shape == (2, 3, 96) and torch.equal(torch.cat((prefix, patches), 1), x)
        assert feature.shape == (2, 96, 12, 9) and torch.equal(feature.flatten(2).mT, patches)
    plain = model.forward_intermediates(image, norm=norm, output_fmt="NLC", intermediates_only=True)
    assert all(torch.equal(a, b) for a, (b, _) in zip(plain, pairs, strict=True))
    with pytest.raises(ValueError, match="output_fmt must be NCHW or NLC, not 'NHWC'"):
        model.forward_intermediates(image, output_fmt="NHWC")


@pytest.fixture(scope="module")
def twins():
    """timm's ViT with register tokens, and ours with its weights."""
    sizes = dict(img_size=64, patch_size=8, embed_dim=96, depth=4, num_heads=3, reg_tokens=2, num_classes=5)
    theirs = VisionTransformer(**sizes, dynamic_img_size=True).eval()
    return perturbed(theirs, 0.2), load_pretrained(build("vitrel_vit_n8_absolute", reg_tokens=2), theirs.state_dict()).eval()


@each("n", [1, 3, (0, 2), [1]])
@each("how", [{}, {"norm": True}, {"reshape": True}, {"return_prefix_tokens": True}, {"mask": True}])
def test_intermediate_layers_are_timms(n, how, twins):
    """The interface of DINO: shapes, prefix tokens apart, the last norm, and masks of both kinds."""
    ours = twins[1]
    image, masks = torch.randn(2, 3, 64, 48), [None]
    if how == {"mask": True}:
        visible = torch.rand(2, 1, 51, 51) < 0.5
        visible[..., 0] = True
        how, masks = {}, [visible, torch.randn(51, 51)]
    for mask in masks:
        found, wanted = (model.get_intermediate_layers(image, n, attn_mask=mask, **how) for model in twins)
        assert type(found) is type(wanted) and len(found) == len(wanted)
        torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)
        if mask is not None:
            plain = ours.get_intermediate_layers(image, n, **how)
            assert (plain[0] - found[0]).abs().max() > 1e-2
    everything = dict(reshape=True, return_prefix_tokens=True, norm=True)
    found, wanted = (model.get_intermediate_layers(image, n, **everything) for model in twins)
    torch.testing.assert_close(found, wanted, atol=2e-4, rtol=1e-4)


def test_masks_of_intermediates_in_other_models(twins):
    """With gradient checkpointing they are the same; blocks with windows have masks of their own."""
    _, ours = twins
    image, mask = torch.randn(1, 3, 64, 64), torch.rand(67, 67) < 0.5
    mask[:, 0] = True
    wanted = ours.forward_intermediates(image, attn_mask=mask)
    changed = copy.deepcopy(ours)
    changed.set_grad_checkpointing()
    torch.testing.assert_close(changed.forward_intermediates(image, attn_mask=mask), wanted)
    windowed = build("vitrel_vit_n8_table", class_token=False, global_pool="avg", block_args=dict(window=4))
    with pytest.raises(ValueError, match="a windowed layer computes its own mask"):
        windowed.get_intermediate_layers(image, attn_mask=mask[:64, :64])


@each("norm", [False, True])
def test_intermediates_of_a_swin(norm):
    """The last norm has the width of the last stage, so it acts there alone."""
    model, image = build("vitrel_swin_n"), torch.randn(2, 3, 96, 72)
    calls = Calls(model)
    final, maps = model.forward_intermediates(image, norm=norm)
    expected = calls.outputs[1::2]
    assert torch.equal(final, model.norm(expected[-1]))
    expected = [*expected[:2], model.norm(expected[2]) if norm else expected[2]]
    rasters = model.forward_intermediates(image, norm=norm, output_fmt="NHWC", intermediates_only=True)
    for x, feature, raster in zip(expected, maps, rasters, strict=True):
        assert torch.equal(raster, x) and torch.equal(feature, x.permute(0, 3, 1, 2))
    with pytest.raises(ValueError, match="output_fmt must be NCHW or NHWC, not 'NLC'"):
        model.forward_intermediates(image, output_fmt="NLC")


@each("name", PAIR)
def test_intermediates_stop_early(name):
    model, image = build(name), torch.randn(1, 3, 64, 64)
    calls, units, each = Calls(model), len(model.feature_info), 1 if "_vit_" in name else 2  # blocks of a unit
    for early in (False, True):
        for last in range(units):
            calls.clear()
            model.forward_intermediates(image, indices=[0, last], stop_early=early, intermediates_only=True)
            assert len(calls.outputs) == each * (last + 1 if early else units)


@each("name", PAIR)
def test_pruning(name):
    model, image = build(name), torch.randn(1, 3, 64, 64)
    expected = model.forward_intermediates(image, indices=[0, 1], intermediates_only=True)
    assert model.prune_intermediate_layers([0, 1], prune_norm=True) == [0, 1]
    pruned = model.forward_intermediates(image, indices=[0, 1], intermediates_only=True)
    assert all(torch.equal(a, b) for a, b in zip(expected, pruned, strict=True))
    assert len(getattr(model, "blocks", getattr(model, "layers", None))) == 2
    assert model(image).shape[-1] == model.num_features


@each("name", [*TRIO, "vitrel_vit_n8_deberta"])
def test_gradient_checkpointing(name):
    """Off, on, off again: equal gradients, and when on every block runs a second time, in the backward pass."""
    model, image = shallow(name), torch.randn(2, 3, 72, 64)
    calls, blocks, gradients = Calls(model), sum(isinstance(m, Block) for m in model.modules()), []
    for enable in (False, True, False):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        calls.clear()
        loss = model(image).square().sum()
        assert len(calls.inputs) == blocks
        loss.backward()
        assert len(calls.inputs) == (2 * blocks if enable else blocks)
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters()})
    for n, gradient in gradients[0].items():
        for other in gradients[1:]:
            torch.testing.assert_close(gradient, other[n], atol=1e-6, rtol=1e-5)
    model.set_grad_checkpointing()
    calls.clear()
    model.forward_intermediates(image)[0].sum().backward()
    assert len(calls.inputs) == 2 * blocks


@each("name", TRIO)
def test_torchvision_feature_extraction(name):
    """With timm's list of leaves, torchvision's extractor is exact at sizes it was not traced at."""
    model, leaves = build(name), dict(leaf_modules=[*get_notrace_modules()])
    _, nodes = feature_extraction.get_graph_node_names(model, tracer_kwargs=leaves)
    middle = model.feature_info[1]["module"] + (".blocks.1.drop_path2" if "swin" in name else ".drop_path2")
    extractor = feature_extraction.create_feature_extractor(model, {nodes[-1]: "out", middle: "middle"}, tracer_kwargs=leaves)
    for size in ((64, 64), (40, 88)):
        image = torch.randn(2, 3, *size)
        out = extractor(image)
        assert torch.equal(out["out"], model(image)) and out["middle"].shape[0] == 2


SIZES = [(56, 40), (64, 64), (24, 28)]  # down to one window; the graph for any size serves that of training too


@pytest.mark.slow(seconds=4)
def test_compile_many_sizes_in_two_graphs():
    """No graph break, exact results, and not one graph per resolution; tests/layers compiles all encodings in attention."""
    model = build("vitrel_swin_n", position="absolute+decomposed", depths=(1, 1), num_heads=(1, 2))
    counter = CompileCounter()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    with torch.no_grad():
        for size in SIZES:
            image = torch.randn(2, 3, *size)
            torch.testing.assert_close(compiled(image), model(image), atol=1e-4, rtol=1e-4)
    assert counter.frame_count <= 2


@pytest.mark.slow
def test_export_serves_any_size():
    """One torch.export with dynamic batch, height and width, run at other batches and sizes, non-square and not divisible; of a
    model pruned to two blocks, which share an encoding, with a new head. Swins are exported to ONNX, by way of torch.export.
    """
    mlp = dict(mlp="swiglu", mlp_norm=True, init_values=0.1)
    position = dict(position="absolute+rope_axial", position_args=dict(reference=(8, 8), base=1e4), share_position=True)
    model = build("vitrel_vit_n8_none", depth=3, block_args=mlp, **position)
    model.prune_intermediate_layers(indices=[0, 1])
    model.reset_classifier(4, "avg")
    dynamic = torch.export.Dim.DYNAMIC
    with fx_config.patch(backed_size_oblivious=True), torch.no_grad():
        shapes = ({0: dynamic, 2: dynamic, 3: dynamic},)
        program = torch.export.export(model, (torch.randn(2, 3, 64, 64),), dynamic_shapes=shapes).module()
    for batch, size in [(1, (64, 64)), (3, (96, 96)), (2, (56, 40)), (4, (100, 53))]:
        image = torch.randn(batch, 3, *size)
        torch.testing.assert_close(program(image), model(image), atol=1e-4, rtol=1e-4)
