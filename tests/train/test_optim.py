import math

import pytest
import timm
import torch

import vitrel  # noqa: F401
from helpers import each
from vitrel.train.optim import Optimization, create_optimizer, layer_of, parameter_groups

MODELS = ["vitrel_vit_n8_table", "vitrel_vit_n8_absolute", "vitrel_vit_n8_rope_mixed", "vitrel_vit_n8_none", "vitrel_swin_n"]


def model(name, **kwargs):
    return timm.create_model(name, num_classes=4, **kwargs)


def grouped(net, **settings):
    """The groups, with the names of their parameters."""
    names = {p: n for n, p in net.named_parameters()}
    groups = parameter_groups(net, Optimization(**settings), 1e-3)
    return [group | {"names": [names[p] for p in group["params"]]} for group in groups]


@pytest.mark.slow
@each("name", MODELS)
@each("layer_decay", [None, 0.7])
def test_no_position_parameter_is_decayed_and_none_is_lost(name, layer_decay):
    net = model(name)
    groups = grouped(net, layer_decay=layer_decay)
    names = [n for group in groups for n in group["names"]]
    assert sorted(names) == sorted(n for n, _ in net.named_parameters())
    kinds = {
        kind: {n for g in groups if g["name"].split(".")[0] == kind for n in g["names"]} for kind in ("decayed", "position")
    }
    assert {g["weight_decay"] for g in groups if g["name"].startswith("decayed")} == {0.05}
    assert {g["weight_decay"] for g in groups if not g["name"].startswith("decayed")} == {0.0}
    assert not kinds["decayed"] & (set(net.no_weight_decay()) | set(net.position_parameters()))
    assert kinds["position"] == set(net.position_parameters())
    assert all(net.get_parameter(n).ndim > 1 for n in kinds["decayed"])


def test_timm_models_without_position_parameters_train_too():
    groups = grouped(model("vit_tiny_patch16_224", img_size=32, depth=1))
    undecayed = next(group for group in groups if group["name"] == "undecayed")
    assert {"pos_embed", "cls_token"} <= set(undecayed["names"])


def test_frozen_parameters_stay_out():
    net = model("vitrel_vit_n8_none", depth=1)
    net.patch_embed.requires_grad_(False)
    names = {n for group in grouped(net) for n in group["names"]}
    assert names and not any(n.startswith("patch_embed") for n in names)


@each(
    ("name", "shape", "layers"),
    [
        (
            "vit_tiny_patch16_224",
            {"embed_dim": 24},
            13,
        ),  # steps from the stem over 12 blocks to the head
        ("vitrel_swin_n", {}, 7),
    ],
)
def test_layer_decay_is_by_the_layers_of_the_model(name, shape, layers):
    """That it holds at every update: test_recipe.py."""
    net = model(name, **shape)
    optimizer = create_optimizer(net, Optimization(layer_decay=0.75, position_lr_scale=1.0))
    stem, head = next(iter(net.patch_embed.proj.parameters())), net.get_classifier().weight
    rate = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    assert max(layer_of(net).values()) == layers
    assert rate[id(stem)] / rate[id(head)] == pytest.approx(0.75**layers)
    assert optimizer.param_groups[0]["name"] == f"decayed.{layers}"  # whose rate is logged


def test_encodings_have_their_own_rate_in_fine_tuning():
    """Without layer decay of their own, each part of a composition by its kind; an absolute embedding stays in its layer."""
    net = model("vitrel_vit_n8_absolute", position="absolute+rope_mixed+table")
    optimizer = create_optimizer(net, Optimization(lr=1e-3, layer_decay=0.5))
    rate = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    for block in net.blocks:
        parts = block.position.parts
        assert rate[id(parts["table"].relative_position_bias_table)] == pytest.approx(10e-3)
        assert rate[id(parts["rope_mixed"].freqs)] == pytest.approx(2e-3)
    assert rate[id(net.pos_embed.pos_embed)] == rate[id(net.patch_embed.proj.weight)] == pytest.approx(1e-3 * 0.5**5)
    assert {group["weight_decay"] for group in optimizer.param_groups if group["name"].startswith("position")} == {0.0}
    for settings in (Optimization(lr=1e-3), Optimization(lr=1e-3, layer_decay=0.5, position_lr_scale=1.0)):
        groups = {g["name"]: g["lr"] for g in create_optimizer(net, settings).param_groups}
        assert not any(".x" in name for name in groups) and max(groups.values()) == pytest.approx(1e-3)


def test_what_a_model_or_an_optimizer_cannot_is_refused():
    with pytest.raises(ValueError, match=r"optim.layer_decay: Linear has no group_matcher"):
        grouped(torch.nn.Linear(2, 2), layer_decay=0.5)
    net = model("vitrel_vit_n8_none", depth=1)
    with pytest.raises(ValueError, match=r"position_lr_scale is 2.0, but the model has no position parameters .* set it to 1"):
        grouped(net, position_lr_scale=2.0)
    with pytest.raises(ValueError, match=r"model\.optim\.name: adahessian needs second derivatives"):
        create_optimizer(net, Optimization(name="adahessian"))


@each("name", ["muon", "adafactor", "lookahead_adamw"])
def test_other_optimizers_by_name(name):
    torch.manual_seed(0)
    net = model("vitrel_vit_n8_table", depth=1)
    optimizer = create_optimizer(net, Optimization(name=name, layer_decay=0.9))
    before = net.head.weight.detach().clone()
    for _ in range(2):
        torch.nn.functional.cross_entropy(net(torch.randn(2, 3, 64, 64)), torch.tensor([0, 1])).backward()
        optimizer.step()
    assert not torch.equal(before, net.head.weight) and net.head.weight.isfinite().all()
    assert next(g["lr"] for g in optimizer.param_groups if g["name"] == "position.x10") == pytest.approx(1e-2)


def test_what_the_optimizer_is_given():
    net = model("vitrel_vit_n8_none", depth=1)
    sgd = create_optimizer(net, Optimization(name="sgd", momentum=0.8, opt_args={"nesterov": False}))
    assert isinstance(sgd, torch.optim.SGD) and sgd.defaults["momentum"] == 0.8 and not sgd.defaults["nesterov"]
    extra = {"eps": 1e-6, "amsgrad": True, "fused": False}
    adam = create_optimizer(net, Optimization(betas=(0.8, 0.9), opt_args=extra))
    assert adam.defaults["betas"] == (0.8, 0.9) and adam.defaults["eps"] == 1e-6 and adam.defaults["amsgrad"]
    assert not adam.defaults["fused"]
    own = create_optimizer(net, Optimization()).defaults
    assert own["betas"] == (0.9, 0.999) and own["fused"]


@each(
    ("settings", "text"),
    [
        ({"name": "adamv"}, r"optim.name: timm has no optimizer 'adamv'; nearest: .*adam"),
        ({"lr": 0.0}, r"optim.lr \(0.0\) .* must be positive"),
        ({"position_lr_scale": -1.0}, r"optim.position_lr_scale \(-1.0\) must be positive"),
        ({"warmup_epochs": -1.0}, r"optim.warmup_epochs \(-1.0\) must be at least 0"),
        ({"final_lr": 1.5}, r"optim.final_lr \(1.5\) within 0..1"),
        ({"layer_decay": 1.5}, r"optim.layer_decay must be a factor, 0 < factor <= 1, not 1.5"),
        ({"lr_base_size": 0}, r"optim.lr_base_size must be a number of images, at least 1, not 0"),
    ],
)
def test_settings_are_checked(settings, text):
    with pytest.raises(ValueError, match=text):
        Optimization(**settings)


def test_lr_is_given_for_a_number_of_images():
    linear = Optimization(lr=1e-3, lr_base_size=1024)
    assert linear.scaled_lr(256) == pytest.approx(2.5e-4) and linear.scaled_lr(4096) == pytest.approx(4e-3)
    root = Optimization(lr=1e-3, lr_base_size=1024, lr_base_scale="sqrt")
    assert root.scaled_lr(256) == pytest.approx(5e-4)
    assert Optimization(lr=1e-3).scaled_lr(256) == 1e-3
    optimizer = create_optimizer(model("vitrel_vit_n8_none", depth=1), linear, images=512)
    assert {group["lr"] for group in optimizer.param_groups} == {5e-4}


def factors(updates, **settings):
    factor = Optimization(**settings).factor(100, 10)
    return [factor(update) for update in updates]


def test_cosine_rises_and_falls_per_update():
    values = factors((0, 4, 9, 10, 55, 100, 1000), warmup_epochs=1, final_lr=0.1)
    middle = 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 2))
    assert values == pytest.approx([0.1, 0.5, 1.0, 1.0, middle, 0.1, 0.1])
    assert factors((0, 10, 99), warmup_epochs=1, final_lr=1.0) == [0.1, 1, 1]
    assert factors((0, 4, 9), warmup_epochs=1, initial_lr=0.5) == pytest.approx([0.55, 0.75, 1.0])


def test_a_warm_up_as_long_as_the_run_is_refused():
    with pytest.raises(ValueError, match=r"warm-up of 10 updates in a run of 10: lower model.optim.warmup_epochs"):
        Optimization(warmup_epochs=1).factor(10, 10)


@each(("updates", "per_epoch", "warmup"), [(3000, 10, 50), (500, 10, 50), (100, 10, 10), (10, 10, 1), (5, 5, 0), (1, 100, 0)])
def test_the_default_warm_up_is_5_epochs_or_a_tenth_of_a_short_run(updates, per_epoch, warmup):
    factor = Optimization(final_lr=1.0).factor(updates, per_epoch)
    assert sum(factor(update) < 1 for update in range(updates)) == max(warmup - 1, 0) and factor(updates - 1) == 1
