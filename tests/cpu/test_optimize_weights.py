"""An optimized model follows its weights, however they are changed, and holds nothing that the plain one does not."""

import copy
import gc
import pickle
import weakref

import pytest
import torch

import vitrel
from helpers.optimized import assert_near, change, check, lively, operators, picture, small, twins, uses_onednn
from helpers.variants import KEYS
from vitrel.cpu.optimize import restore

PAIR = [("vit", "table"), ("swin", "table"), ("swinv2", "cpb"), ("vit", "absolute+rope_mixed")]
EVERY = pytest.mark.parametrize(("trunk", "key"), PAIR)


def test_encodings_that_blocks_share():
    plain, model = twins(small("vit", position="table", share_position=True, depth=4))
    check(plain, model, picture())
    change(plain, model)
    check(plain, model, picture())
    same = small("vit", position="table", depth=3)
    for block in same.blocks[1:]:
        block.position = same.blocks[0].position
    plain, same = twins(same)
    check(plain, same, picture())
    change(plain, same)
    check(plain, same, picture())


@pytest.mark.parametrize(("trunk", "key"), [*(("vit", k) for k in KEYS), ("swin", "table"), ("swinv2", "cpb")])
def test_every_parameter_changed_in_place_is_seen(trunk, key):
    shallow = dict(depth=1, global_pool="avg") if trunk == "vit" else dict(depths=(2,), num_heads=(1,))
    plain, model = twins(small(trunk, position=key, **shallow))
    image, own, unseen = picture(1, (24, 40)), dict(model.named_parameters()), []
    with torch.no_grad():
        before = plain(image)
        for name, parameter in plain.named_parameters():
            check(plain, model, image)
            value = parameter + 0.3 * torch.randn_like(parameter)
            parameter.copy_(value), own[name].copy_(value)
            after = plain(image)
            assert_near(model(image), after)
            unseen += [name] * torch.equal(before, after)
            before = after
    assert unseen == []


@EVERY
def test_grids_and_guards_alternate(trunk, key):
    """Grids, batches, grad mode and inference mode in turn, with changes of the weights in between."""
    plain, model = twins(small(trunk, position=key))
    for round in range(3):
        for size in ((64, 64), (40, 88), (64, 64), (88, 40)):
            for guard in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
                image = picture(1 + round, size)
                with guard():
                    found, wanted = model(image), plain(image)
                    assert torch.equal(found, wanted) if guard is torch.enable_grad else True
                    assert_near(found.detach(), wanted.detach())
                    assert found.requires_grad is wanted.requires_grad
        change(plain, model)


@EVERY
@pytest.mark.parametrize("training", [False, True])
def test_gradients_after_inference_mode(trunk, key, training):
    """What was kept in inference mode cannot be saved for a backward pass."""
    plain, model = twins(small(trunk, position=key), training=training)
    for _ in range(2):
        with torch.inference_mode():
            image = picture()
            assert_near(model(image), plain(image))
        for m in (plain, model):
            m.zero_grad()
            m(image).square().sum().backward()
        assert_near([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()], 1e-4)
        check(plain, model, image)
        change(plain, model)
        check(plain, model, image)


STEPS = {
    "sgd": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9),
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), 0.05),
    "fused": lambda m: torch.optim.AdamW(m.parameters(), 0.05, fused=True),
    "foreach": lambda m: torch.optim.AdamW(m.parameters(), 0.05, foreach=True),
}


@pytest.mark.parametrize("name", STEPS)
def test_optimizer_steps_are_seen(name):
    plain, model = twins(small("swin"))
    pair = [(m, STEPS[name](m)) for m in (plain, model)]
    for _ in range(3):
        check(plain, model, picture())
        image = picture()
        for m, optimizer in pair:
            m.train()
            optimizer.zero_grad()
            m(image).square().mean().backward()
            optimizer.step()
            m.eval()
        assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


@EVERY
@pytest.mark.parametrize("assign", [False, True])
def test_load_state_dict_is_seen(trunk, key, assign):
    plain, model = twins(small(trunk, position=key))
    for _ in range(3):
        check(plain, model, picture())
        state = lively(copy.deepcopy(plain)).state_dict()
        for m in (plain, model):
            m.load_state_dict({k: v.clone() for k, v in state.items()}, assign=assign)
    check(plain, model, picture())


def test_writes_to_data_are_seen():
    for trunk, key in PAIR:
        plain, model = twins(small(trunk, position=key), linears="onednn")
        check(plain, model, picture())
        for m in (plain, model):
            torch.manual_seed(5)
            for parameter in m.parameters():
                parameter.data.copy_(torch.randn_like(parameter) * 0.3)
        check(plain, model, picture())


def test_parameters_made_in_inference_mode():
    with torch.inference_mode():
        plain, model = twins(small("swin"))
        for _ in range(2):
            image = picture()
            for _ in range(2):
                assert_near(model(image), plain(image))
            change(plain, model)


@pytest.mark.parametrize("how", ["autocast", "compiled", "hooks"])
def test_fused_steps_are_seen_however_they_were_taken(how):
    """AdamW(fused=True) leaves the versions of the parameters as they are."""
    plain, model = twins(small("swin"))
    pair = [(m, torch.optim.AdamW(m.parameters(), 0.05, fused=True)) for m in (plain, model)]
    for _ in range(2):
        check(plain, model, picture())
        image = picture()
        for m, optimizer in pair:
            m.train()
            optimizer.zero_grad()
            handle = m.register_forward_hook(lambda *_: None) if how == "hooks" else None
            run = torch.compile(m, backend="eager") if how == "compiled" else m
            with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
                run(image).float().square().mean().backward()
            optimizer.step()
            if handle is not None:
                handle.remove()
            m.eval()
        plain.load_state_dict(model.state_dict())


class LoRA(torch.nn.Module):
    """A usual wrapper of a linear layer, which has no weight of its own."""

    def __init__(self, linear):
        super().__init__()
        self.base, self.down, self.up = linear, torch.nn.Linear(linear.in_features, 2), torch.nn.Linear(2, linear.out_features)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


@EVERY
def test_wrapped_projections(trunk, key):
    plain, model = twins(small(trunk, position=key))
    for m in (plain, model):
        torch.manual_seed(0)
        for block in m.blocks if trunk == "vit" else m.layers[0].blocks:
            block.attn.qkv = LoRA(block.attn.qkv).eval()
    check(plain, model, picture())


def test_a_temperature_switches_nothing_off():
    plain, model = twins(small("vit", position="table", position_args={"logit_scale": "log_n"}), linears="onednn")
    check(plain, model, picture(1, (40, 88)))
    with torch.no_grad():
        assert uses_onednn(lambda: model.blocks[0](torch.randn(1, 65, model.embed_dim), vitrel.Grid(8, 8, 1)))


def test_nothing_is_held_and_it_goes_with_its_last_reference():
    plain, model = twins(small("swin"))
    with torch.no_grad():
        model(picture())
    held = [t for part in model.modules() for t in vars(part).values() if isinstance(t, torch.Tensor)]
    assert not held and len(pickle.dumps(model)) <= 1.1 * len(pickle.dumps(plain))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_restored_models_keep_nothing():
    plain, model = twins(small("swin"), linears="onednn")
    image = picture()
    check(plain, model, image)
    restore(model)
    for m in (plain, model):
        torch.manual_seed(5)
        for parameter in m.parameters():
            parameter.data.copy_(torch.randn_like(parameter))
    with torch.no_grad():
        assert torch.equal(model(image), plain(image))
        assert not uses_onednn(lambda: model(image)) and operators(lambda: model(image))
