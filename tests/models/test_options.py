"""Options of the models: pooling, classifiers, dropout, registers, precision, copies, and the way through a folder or file."""

import copy
import itertools
import pickle

import pytest
import timm
import torch
from timm.layers import DropPath
from timm.models import group_modules, group_parameters
from timm.optim import param_groups_weight_decay

from helpers import each
from vitrel import POSITIONS, load_pretrained
from vitrel.layers import Block

PAIR = ["vitrel_vit_n8_table", "vitrel_swin_n"]
FOUR = ["vitrel_vit_n8_absolute", "vitrel_vit_n8_table", "vitrel_vit_n8_rope_mixed", "vitrel_swin_n"]


def build(name, std=0.2, **keywords):
    """A small model in evaluation with parameters away from their initialization, those of position most of all."""
    model = timm.create_model(name, **({"num_classes": 5} | keywords)).eval()
    with torch.no_grad():
        for n, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter) * (0.5 if n in model.position_parameters() else std))
    return model


def shallow(name, **keywords):
    """As `build`, with one block (a Swin: one in each of two stages)."""
    return build(name, **({"depth": 1} if "_vit_" in name else {"depths": (1, 1), "num_heads": (1, 2)}), **keywords)


def pooled(x, kind, dims):
    """What each kind of pooling means, over `dims`."""
    average, largest = x.mean(dims), x.amax(dims)
    return {"avg": average, "max": largest, "avgmax": (average + largest) / 2}[kind]


@each("pool", ["avg", "max", "avgmax", "token", ""])
def test_pooling_of_a_vit(pool):
    """Prefix tokens, here a class token and two registers, take no part but in "token" and in ""."""
    model, image = shallow("vitrel_vit_n8_table", global_pool=pool, reg_tokens=2), torch.randn(2, 3, 48, 72)
    x = model.forward_features(image)  # [B, 3 + 6 * 9, C]
    x = x if pool == "" else x[:, 0] if pool == "token" else pooled(x[:, 3:], pool, 1)
    torch.testing.assert_close(model(image), model.head(model.fc_norm(x)))
    assert model(image).shape == ((2, 57, 5) if pool == "" else (2, 5))
    torch.testing.assert_close(model.forward_head(model.forward_features(image), pre_logits=True), model.fc_norm(x))
    by_pooling = isinstance(model.fc_norm, torch.nn.LayerNorm), isinstance(model.norm, torch.nn.LayerNorm)
    assert by_pooling == ((True, False) if pool in ("avg", "max", "avgmax") else (False, True))


@each("name", PAIR)
def test_classifier_back_and_forth(name):
    """No pooling and back, new classes, none and back: always the definition, from the same features."""
    model, image = shallow(name), torch.randn(2, 3, 48, 72)
    features = model.forward_features(image)
    patches, dims = (features[:, 1:], 1) if "_vit_" in name else (features, (1, 2))
    for classes, pool in [(0, ""), (7, "avg"), (3, ""), (0, "max"), (4, None), (6, "avgmax"), (2, "avg")]:
        before = model.global_pool
        model.reset_classifier(classes, pool)
        assert model.global_pool == (before if pool is None else pool) and model.num_classes == classes
        x = features if model.global_pool == "" else pooled(patches, model.global_pool, dims)
        x = model.get_classifier()(getattr(model, "fc_norm", torch.nn.Identity())(x))
        torch.testing.assert_close(model(image), x)
        assert x.shape[-1] == (classes or model.num_features)
    assert torch.equal(model.forward_features(image), features)


@each("name", PAIR)
def test_other_numbers_of_channels(name):
    for channels in (1, 5):
        model = shallow(name, in_chans=channels)
        model(torch.randn(2, channels, 40, 56)).square().sum().backward()
        assert model.patch_embed.proj.weight.grad.shape[1] == channels
        assert all(p.grad.isfinite().all() and p.grad.abs().sum() > 0 for p in model.parameters())


def test_register_tokens():
    model = build("vitrel_vit_n8_absolute", reg_tokens=4)
    assert model.no_weight_decay() == {"pos_embed.pos_embed", "cls_token", "reg_token"}
    (decayed,) = (
        group
        for group in param_groups_weight_decay(model, 0.05, no_weight_decay_list=model.no_weight_decay())
        if group["weight_decay"]
    )
    assert not {id(model.cls_token), id(model.reg_token), id(model.pos_embed.pos_embed)} & {id(p) for p in decayed["params"]}
    image = torch.randn(1, 3, 64, 40)
    tokens, grid = model.embed(image)
    assert tokens.shape == (1, 5 + 8 * 5, 96) and grid == (8, 5, 5)
    for row, token in enumerate((model.cls_token[0, 0], *model.reg_token[0])):  # the class token first, as pooling takes it
        torch.testing.assert_close(tokens[0, row], token + model.pos_embed.pos_embed[0, row])
    before = model(image)
    with torch.no_grad():
        model.reg_token.add_(torch.randn_like(model.reg_token))
    assert (model(image) - before).abs().max() > 1e-3


@each("name", PAIR)
def test_attention_dropout(name):
    model, plain = shallow(name, attn_drop_rate=0.5), shallow(name)
    plain.load_state_dict(model.state_dict())
    image = torch.randn(2, 3, 64, 40)
    assert torch.equal(model(image), plain(image))
    assert not torch.equal(model.train()(image), model(image))
    assert torch.equal(plain.train()(image), plain(image))


TWINS = {
    "vit": ("vitrel_vit_ti16_absolute", "vit_tiny_patch16_224", dict(depth=2, num_classes=5, img_size=48)),
    "swin": ("vitrel_swin_t", "swin_tiny_patch4_window7_224", dict(depths=(1, 2), num_heads=(2, 4), num_classes=5)),
    "swinv2": ("vitrel_swinv2_t", "swinv2_tiny_window8_256", dict(depths=(1, 2), num_heads=(2, 4), num_classes=5)),
}


@each("rates", [dict(proj_drop_rate=0.3), dict(pos_drop_rate=0.4), dict(pos_drop_rate=0.1, proj_drop_rate=0.2)])
def test_dropout_of_a_vit_is_timms(rates):
    """The same random numbers drop the same activations; none in evaluation."""
    ours, theirs = (timm.create_model(name, **TWINS["vit"][2], **rates) for name in TWINS["vit"][:2])
    load_pretrained(ours, theirs.state_dict())
    image, outputs = torch.randn(2, 3, 48, 48), []
    for model, training in itertools.product((ours, theirs), (True, False)):
        torch.manual_seed(3)
        outputs.append(model.train(training)(image))
    torch.testing.assert_close(outputs[:2], outputs[2:], atol=1e-5, rtol=1e-5)
    assert (outputs[0] - outputs[1]).abs().max() > 1e-3


@each("name", PAIR)
def test_dropout_before_the_classifier(name):
    model, image = shallow(name, drop_rate=0.5), torch.randn(2, 3, 64, 40)
    features = model.forward_features(image)
    assert torch.equal(model(image), model(image))
    model.train()
    assert torch.equal(model.forward_features(image), features)
    dropped = (model.forward_head(features, pre_logits=True) == 0).float().mean()
    assert dropped == pytest.approx(0.5, abs=0.15)


@each("name", PAIR)
def test_stochastic_depth(name):
    """The rate rises from 0 to `drop_path_rate` with depth; each sample drops attention and MLP independently, in training."""
    model, image = build(name, drop_path_rate=0.5), torch.randn(2, 3, 64, 40)
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    for paths in zip(*((block.drop_path1, block.drop_path2) for block in blocks), strict=True):
        rates = [getattr(path, "drop_prob", 0.0) for path in paths]
        assert rates == pytest.approx([0.5 * i / (len(blocks) - 1) for i in range(len(blocks))])
        assert all(isinstance(path, DropPath) for path in paths[1:])
    assert torch.equal(model(image), model(image))
    model.train()
    outputs = torch.stack([model(image) for _ in range(4)])
    assert (outputs - outputs[0]).abs().max() > 1e-3

    given = []
    blocks[-1].register_forward_pre_hook(lambda _, inputs: given.append(inputs))
    model(image[:1])
    inputs, outcomes = given[0], []
    for _ in range(48):
        change = (blocks[-1](*inputs) - inputs[0])[0]
        if not any(torch.allclose(change, other, atol=1e-5) for other in outcomes):
            outcomes.append(change)
    assert len(outcomes) == 4  # neither, attention alone, MLP alone, both
    assert any((change == 0).all() for change in outcomes)


@each("coarse", [False, True])
@each("name", ["vitrel_vit_n8_absolute", "vitrel_vit_n8_table", "vitrel_swin_n"])
def test_groups(name, coarse):
    """Stem, blocks (coarse, for a Swin: stages) in order, head: every parameter and every module in one group."""
    model = timm.create_model(name, num_classes=5, device="meta")
    layer = group_parameters(model, model.group_matcher(coarse=coarse), reverse=True)
    assert set(layer) == {n for n, _ in model.named_parameters()}
    stem = [n for n in layer if n.startswith(("patch_embed", "pos_embed", "cls_token"))]
    assert {layer[n] for n in stem} == {0} and [n for n in layer if layer[n] == 0] == stem
    units = [f"blocks.{i}." for i in range(4)]
    if "swin" in name:
        units = (
            [f"layers.{i}." for i in range(3)] if coarse else [f"layers.{i}.blocks.{j}." for i in range(3) for j in range(2)]
        )
    found = [{layer[n] for n in layer if n.startswith(unit)} for unit in units]
    assert all(len(group) == 1 for group in found)
    order = [next(iter(group)) for group in found]
    assert order == sorted(set(order)) and order[0] > 0
    assert {layer[n] for n in layer if n.startswith("head.")} == {max(layer.values())} and order[-1] < max(layer.values())
    modules = group_modules(model, model.group_matcher(coarse=coarse), reverse=True)
    assert all(modules[n.rpartition(".")[0]] == layer[n] for n in layer if "." in n)


@each("name", FOUR)
def test_copies(name):
    model, image = shallow(name), torch.randn(2, 3, 72, 56)
    expected = model(image)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(image), expected)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        assert torch.equal(model(image), expected)


UNTRAINED = (72, 104)  # pixels; the models are built for 64x64


@each(("name", "dtype"), itertools.product(PAIR, [torch.bfloat16, torch.float64]))
def test_training_step_in_another_precision(name, dtype):
    model = shallow(name, std=0.05).to(dtype).train()
    model(torch.randn(2, 3, *UNTRAINED, dtype=dtype)).square().sum().backward()
    assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.slow
@each(("trunk", "key"), [("vit_n8", key) for key in POSITIONS] + [("swin_n", key) for key in ("absolute", "table", "alibi")])
def test_what_another_size_does_is_known_on_the_meta_device(trunk, key):
    few = {"depths": (1, 1), "num_heads": (1, 2)} if trunk == "swin_n" else {"num_heads": 4, "depth": 1}
    name = "vitrel_vit_n8_none" if trunk == "vit_n8" else "vitrel_swin_n"
    with torch.device("meta"):
        model = timm.create_model(name, position=key, **few)
    real = timm.create_model(name, position=key, **few)
    for size in ((64, 64), (96, 72)):
        assert model.resampled(size) == real.resampled(size)
        assert (model.unseen(size), model.saturated(size)) == (real.unseen(size), real.saturated(size))
        if trunk == "swin_n" and POSITIONS[key].site == "attention":
            assert not model.resampled(size) and model.unseen(size) == 0
