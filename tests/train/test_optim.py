import math

import pytest
import timm
import torch
from torch.optim.lr_scheduler import LambdaLR

import vitrel  # noqa: F401
from vitrel.train.optim import Mixing, Optimisation, cosine_with_warmup, create_optimizer, parameter_groups

MODELS = ["vitrel_vit_n8_table", "vitrel_vit_n8_absolute", "vitrel_vit_n8_rope_mixed", "vitrel_vit_n8_none", "vitrel_swin_n"]


def model(name, **kwargs):
    return timm.create_model(name, num_classes=4, **kwargs)


@pytest.mark.parametrize("name", MODELS)
def test_no_position_parameter_is_decayed_and_none_is_lost(name):
    net = model(name)
    groups = {group["name"]: group for group in parameter_groups(net, 1e-3, 0.05)}
    names = [n for group in groups.values() for n in group["names"]]
    assert sorted(names) == sorted(n for n, _ in net.named_parameters())
    decayed = set(groups["decayed"]["names"])
    assert groups["decayed"]["weight_decay"] == 0.05 and all(
        g["weight_decay"] == 0 for k, g in groups.items() if k != "decayed"
    )
    assert not decayed & (set(net.no_weight_decay()) | set(net.position_parameters()))
    assert set(groups.get("position", {"names": []})["names"]) == set(net.position_parameters())
    assert all(p.ndim > 1 for p in groups["decayed"]["params"])


def test_timm_models_without_position_parameters_train_too():
    groups = parameter_groups(model("vit_tiny_patch16_224", img_size=32, depth=1), 1e-3, 0.05)
    undecayed = next(group for group in groups if group["name"] == "undecayed")
    assert {"pos_embed", "cls_token"} <= set(undecayed["names"])


def test_frozen_parameters_stay_out():
    net = model("vitrel_vit_n8_none", depth=1)
    net.patch_embed.requires_grad_(False)
    names = {n for group in parameter_groups(net, 1e-3, 0.05) for n in group["names"]}
    assert names and not any(n.startswith("patch_embed") for n in names)


def test_position_lr_scale_holds_under_the_schedule():
    optimizer = create_optimizer(model("vitrel_vit_n8_table", depth=1), Optimisation(lr=1e-3, position_lr_scale=10.0))
    schedule = LambdaLR(optimizer, cosine_with_warmup(20, 4))
    rates = []
    for _ in range(20):
        rate = {group["name"]: group["lr"] for group in optimizer.param_groups}
        assert rate["position"] == pytest.approx(10 * rate["decayed"]) and rate["undecayed"] == rate["decayed"]
        rates.append(rate["decayed"])
        optimizer.step()
        schedule.step()
    assert max(rates) == pytest.approx(1e-3) and rates[0] == pytest.approx(2.5e-4) and rates[-1] < 2e-5


def test_position_parameters_really_move_faster():
    def moved(scale):
        torch.manual_seed(0)
        net = model("vitrel_vit_n8_table", depth=1)
        name = next(iter(net.position_parameters()))
        before = net.get_parameter(name).detach().clone()
        optimizer = create_optimizer(net, Optimisation(lr=1e-3, position_lr_scale=scale))
        torch.nn.functional.cross_entropy(net(torch.randn(2, 3, 64, 64)), torch.tensor([0, 1])).backward()
        optimizer.step()
        return float((net.get_parameter(name).detach() - before).abs().mean())

    assert moved(5.0) == pytest.approx(5 * moved(1.0), rel=1e-3)


def test_position_lr_scale_without_position_parameters_is_refused():
    with pytest.raises(ValueError, match=r"position_lr_scale is 2.0, but the model has no position parameters .* set it to 1"):
        parameter_groups(model("vitrel_vit_n8_none", depth=1), 1e-3, 0.05, 2.0)


def test_schedule_rises_and_falls_per_update():
    factor = cosine_with_warmup(100, 10, final=0.1)
    assert [factor(i) for i in (0, 4, 9, 10)] == pytest.approx([0.1, 0.5, 1.0, 1.0])
    assert factor(55) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 2)))
    assert factor(100) == factor(1000) == pytest.approx(0.1)
    with pytest.raises(ValueError, match=r"warm-up of 10 updates in a run of 10: lower optim.warmup_epochs"):
        cosine_with_warmup(10, 10)


@pytest.mark.parametrize("settings", [{"lr": 0.0}, {"position_lr_scale": -1.0}, {"warmup_epochs": -1.0}, {"final_lr": 1.5}])
def test_settings_are_checked(settings):
    with pytest.raises(ValueError, match=f"optim.{next(iter(settings))}"):
        Optimisation(**settings)


def test_other_optimisers_by_name():
    settings = Optimisation(name="sgd", betas=None)
    assert isinstance(create_optimizer(model("vitrel_vit_n8_none", depth=1), settings), torch.optim.SGD)


def test_mixing_smooths_once():
    assert Mixing().build(4, 0.1) is None
    mixup = Mixing(mixup=0.2, prob=0.0).build(4, 0.1)
    _, target = mixup(torch.zeros(2, 3, 8, 8), torch.tensor([1, 2]))
    torch.testing.assert_close(target[0], torch.tensor([0.025, 0.925, 0.025, 0.025]))
