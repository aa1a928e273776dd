"""What vitrel.optimize keeps: made once per grid and weights, never used when they are other weights, let go with the model."""

import copy
import gc
import weakref

import pytest
import torch

import vitrel
from optimized import assert_near, change, check, encoding_calls, lively, operators, picture, small, twins, uses_onednn
from variants import IN_ATTENTION, KEYS
from vitrel.models.optimize import refresh, restore

PAIR = [("vit", "table"), ("swin", "table"), ("swinv2", "cpb"), ("vit", "absolute+rope_mixed")]
EVERY = pytest.mark.parametrize(("trunk", "key"), PAIR)


@pytest.mark.parametrize(("trunk", "key"), [*(("vit", k) for k in KEYS), *(("swin", k) for k in IN_ATTENTION)])
def test_an_encoding_is_called_once_per_grid(trunk, key, monkeypatch):
    model = small(trunk, position=key)
    calls = encoding_calls(model, monkeypatch)
    vitrel.optimize(model)
    sizes, blocks = [(64, 64), (40, 88)], len([*model.encodings((64, 64))])
    with torch.no_grad():
        found = [model(picture(2, size)) for size in sizes] and [len(calls)]
        for batch in (2, 1, 3):
            for size in sizes:
                model(picture(batch, size))
                found.append(len(calls))
    assert blocks <= found[0] <= 2 * blocks
    assert found == [found[0]] * len(found), "called again at a grid and weights it had seen"
    change(model)
    with torch.no_grad():
        model(picture())
    assert len(calls) > found[0] or not next(iter(model.encodings((8, 8))))[0].state_dict()


def test_a_shared_encoding_is_called_once(monkeypatch):
    model = small("vit", position="table", share_position=True, depth=4)
    calls = encoding_calls(model, monkeypatch)
    calls_of = lambda: sum(part is model.shared_position for part in calls)  # noqa: E731
    plain, model = twins(model)
    with torch.no_grad():
        for expected, size in ((1, (64, 64)), (2, (40, 88)), (2, (64, 64)), (2, (40, 88))):
            model(picture(1, size))
            assert calls_of() == expected
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


def test_writes_to_data_need_a_refresh():
    for trunk, key in PAIR:
        plain, model = twins(small(trunk, position=key), linears="onednn")
        check(plain, model, picture())
        for m in (plain, model):
            torch.manual_seed(5)
            for parameter in m.parameters():
                parameter.data.copy_(torch.randn_like(parameter) * 0.3)
        refresh(model)
        check(plain, model, picture())


def test_parameters_made_in_inference_mode():
    """They have no version: served as they are, and again after a refresh."""
    with torch.inference_mode():
        plain, model = twins(small("swin"))
        for _ in range(2):
            image = picture()
            for _ in range(2):
                assert_near(model(image), plain(image))
            change(plain, model)
            refresh(model)


def test_nothing_is_kept_beyond_its_use():
    """Old weights' rows go when new ones come, and all of it with the model."""
    model = vitrel.optimize(small("swin"))

    def held():
        gc.collect()
        return sum(t.numel() for t in gc.get_objects() if type(t) is torch.Tensor)

    with torch.no_grad():
        sizes = []
        for _ in range(3):
            change(model)
            model(picture())
            sizes.append(held())
        assert sizes[-1] <= sizes[0] * 1.01
        refresh(model)
        assert held() < sizes[-1]
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
