"""Hooks on an optimized model see, and may change, what passes through the plain one; outputs stay as they were given."""

import pytest
import torch
from torch import nn

import vitrel
from helpers.optimized import KINDS, apart, build, check, picture, twins
from vitrel.layers import Attention, Block

EVERY = pytest.mark.parametrize("kind", KINDS)


def seen_by_hooks(model, image):
    """Name -> (inputs and output of every call, as they were, and as they are in the end)."""
    found, handles = {}, []

    def hook(name):
        def see(module, args, out):
            kept = [t for t in (*args, out) if isinstance(t, torch.Tensor)]
            found.setdefault(name, []).append((kept, [t.clone() for t in kept]))

        return see

    for name, module in model.named_modules():
        handles.append(module.register_forward_hook(hook(name)))
    with torch.no_grad():
        model(image)
    for handle in handles:
        handle.remove()
    return found


@EVERY
def test_hooks_see_the_plain_values(kind):
    """Everywhere at once; and nothing they kept is written over by what comes after."""
    plain, model = twins(build(kind))
    image = picture()
    for _ in range(2):
        wanted, found = seen_by_hooks(plain, image), seen_by_hooks(model, image)
        assert [*found] == [*wanted], "some module was not called, or not in its place"
        for name, calls in wanted.items():
            assert len(found[name]) == len(calls), name
            for (kept, then), (other, _) in zip(found[name], calls, strict=True):
                for now, before, own in zip(kept, then, other, strict=True):
                    assert torch.equal(now, before), f"{name}: written over"
                    assert apart(now, own) <= 3e-6, name
        check(plain, model, image)


@EVERY
def test_a_hook_on_any_one_module_fires(kind):
    """Alone, set after the model has run: it sees the plain output, may replace it, and is gone when it is removed."""
    plain, model = twins(build(kind))
    image = picture(1, (24, 40))
    check(plain, model, image)
    wanted = seen_by_hooks(plain, image)
    for name, calls in wanted.items():
        module, fired = model.get_submodule(name), []
        for register in (module.register_forward_hook, module.register_forward_pre_hook):
            handle = register(lambda _, args, *out, fired=fired: fired.append((args, *out)))
            with torch.no_grad():
                model(image)
            handle.remove()
            assert len(fired) == len(calls), f"{name}: {register.__name__}"
            fired.clear()
    check(plain, model, image)


@EVERY
def test_hooks_that_change_what_passes(kind):
    plain, model = twins(build(kind))
    image = picture(1, (24, 40))
    check(plain, model, image)
    names = [name for name, m in plain.named_modules() if isinstance(m, nn.Linear | nn.LayerNorm | nn.GELU | Attention | Block)]
    for name in names:
        handles = []
        for m in (plain, model):
            handles.append(m.get_submodule(name).register_forward_hook(lambda _, args, out: out * 1.5 + 0.25))
            handles.append(m.get_submodule(name).register_forward_pre_hook(lambda _, args: (args[0] * 0.5, *args[1:])))
        check(plain, model, image)
        for handle in handles:
            handle.remove()
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, args, out: out * 1.5 if isinstance(module, nn.LayerNorm) else None
    )
    try:
        check(plain, model, image)
    finally:
        handle.remove()
    check(plain, model, image)


def test_outputs_stay_as_they_were_given():
    for kind in KINDS:
        _, model = twins(build(kind))
        with torch.no_grad():
            final, maps = model.forward_intermediates(picture())
            features = model.forward_features(picture())
            given = [final, *maps, features, model(picture())]
            copies = [t.clone() for t in given]
            for batch, size in ((2, (40, 88)), (3, (64, 64))):
                model(picture(batch, size)), model.forward_intermediates(picture(batch, size))
            assert all(torch.equal(a, b) for a, b in zip(given, copies, strict=True))
            block = next(m for m in model.modules() if isinstance(m, Block))
            grid = vitrel.Grid(6, 5, model.num_prefix_tokens)
            x = torch.randn(2, grid.tokens, block.norm1.normalized_shape[0] if block.post_norm is False else 32)
            shared = getattr(model, "shared_position", None)
            terms = shared(grid) if shared is not None else block.position(block.window or grid)
            before, out = x.clone(), block(x, grid, terms)
            assert torch.equal(x, before) and out.data_ptr() != x.data_ptr()


def test_a_hook_on_an_encoding_fires():
    plain, model = twins(build("vit"))
    fired = []
    handle = model.blocks[0].position.register_forward_hook(lambda *_: fired.append(1))
    for times in (1, 2, 3):
        with torch.no_grad():
            model(picture())
        assert len(fired) == times
    handle.remove()
    check(plain, model, picture())
