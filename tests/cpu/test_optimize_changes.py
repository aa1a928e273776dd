"""An optimized model follows its weights, parts and settings, and holds nothing that the plain one does not."""

import gc
import itertools
import pickle
import weakref

import pytest
import torch
from torch import nn

import vitrel
from helpers.optimized import assert_near, change, check, lively, picture, small, twins, uses_onednn
from vitrel.position import create_position

PAIR = [("vit", "table"), ("swin", "table"), ("swinv2", "cpb"), ("vit", "absolute+rope_mixed")]
EVERY = pytest.mark.parametrize(("trunk", "key"), PAIR)


@EVERY
def test_parameters_put_in_place_of_others_are_seen(trunk, key):
    plain, model = twins(small(trunk, position=key))
    for _ in range(3):
        check(plain, model, picture())
        for name, parameter in list(plain.named_parameters()):
            path, _, last = name.rpartition(".")
            value = torch.randn_like(parameter) * 0.5
            for m in (plain, model):
                setattr(m.get_submodule(path), last, nn.Parameter(value.clone()))
    check(plain, model, picture())
    changed = {name: torch.randn_like(p) * 0.5 for name, p in plain.named_parameters()}
    with torch.no_grad():
        image = picture()
        wanted = torch.func.functional_call(plain, changed, image)
        assert_near(torch.func.functional_call(model, changed, image), wanted)
    check(plain, model, image)


CASTS = {
    "through bfloat16": lambda m: m.bfloat16().float(),
    "through half": lambda m: m.to(torch.float16).to(torch.float32),
    "a part through bfloat16": lambda m: [part.bfloat16().float() for part in m.children()],
    "each module through bfloat16": lambda m: [part.bfloat16().float() for part in m.modules()],
    "to double": lambda m: m.double(),
}


@EVERY
@pytest.mark.parametrize("cast", CASTS)
def test_conversions_are_seen(trunk, key, cast):
    """Through bfloat16 and back: rounded values of the old type, which may lie where the old ones lay."""
    plain, model = twins(small(trunk, position=key))
    check(plain, model, picture())
    for m in (plain, model):
        CASTS[cast](m)
    check(plain, model, picture().to(next(plain.parameters()).dtype))


def test_structure_changed_afterwards():
    """Parts put in place of others, and what timm and this package do to models."""
    changes = {
        "act": lambda m: [setattr(b.mlp, "act", nn.ReLU()) for b in blocks(m)],
        "tanh": lambda m: [setattr(b.mlp.act, "approximate", "tanh") for b in blocks(m) if hasattr(b.mlp.act, "approximate")],
        "norm": lambda m: [setattr(b, "norm1", nn.Identity()) for b in blocks(m)],
        "eps": lambda m: [setattr(b.norm2, "eps", 0.5) for b in blocks(m)],
        "mlp": lambda m: [setattr(b, "mlp", nn.Tanh()) for b in blocks(m)],
        "proj": lambda m: [setattr(b.attn, "proj", nn.Sequential(b.attn.proj, nn.Tanh())) for b in blocks(m)],
        "scale": lambda m: [setattr(b, "ls1", nn.Hardtanh(-0.1, 0.1)) for b in blocks(m)],
        "position": lambda m: [setattr(b, "position", create_position("none", (8, 8), 1, 8)) for b in blocks(m)],
        "forward": lambda m: [setattr(b.attn, "forward", lambda x, *_: x * 2) for b in blocks(m)],
        "shift": lambda m: [setattr(b.attn, "shift", (1, 0)) for b in blocks(m) if b.window],
        "classifier": lambda m: (torch.manual_seed(3), m.reset_classifier(7)),
        "pruned": lambda m: m.prune_intermediate_layers([0]),
    }
    for trunk, key in (("vit", "table"), ("swin", "table")):
        for name, edit in changes.items():
            plain, model = twins(small(trunk, position=key))
            image = picture()
            check(plain, model, image)
            edit(plain), edit(model)
            try:
                check(plain, model, image)
            except AssertionError as error:
                raise AssertionError(f"{trunk}, {name}") from error


def blocks(model):
    return [block for block in model.modules() if isinstance(block, vitrel.layers.Block)]


@EVERY
def test_grids_and_guards_alternate(trunk, key):
    """Grids, batches, grad mode and inference mode in turn, with changes of the weights in between."""
    plain, model = twins(small(trunk, position=key))
    for round in range(2):
        for size in ((40, 48), (24, 88), (40, 48), (88, 24)):
            for guard in (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode):
                image = picture(1 + round, size)
                with guard():
                    found, wanted = model(image), plain(image)
                    assert torch.equal(found, wanted) if guard is torch.enable_grad else True
                    assert_near(found.detach(), wanted.detach())
                    assert found.requires_grad is wanted.requires_grad
        change(plain, model)


@EVERY
def test_gradients_after_inference_mode(trunk, key):
    """What was kept in inference mode cannot be saved for a backward pass."""
    plain, model = twins(small(trunk, position=key))
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


def test_writes_to_data_are_seen():
    for trunk, key in PAIR:
        plain, model = twins(small(trunk, position=key), linears="onednn")
        check(plain, model, picture())
        for m in (plain, model):
            torch.manual_seed(5)
            for parameter in m.parameters():
                parameter.data.copy_(torch.randn_like(parameter) * 0.3)
        check(plain, model, picture())


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
    plain, model = twins(small("vit", position="table", position_args={"temperature": "log_n"}), linears="onednn")
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


def test_resize_policies_are_seen():
    for key in ("table", "cpb"):
        plain, model = twins(small("vit", position=key, global_pool="avg"))
        image, outs = picture(2, (96, 120)), []
        assert len(plain.resize_policies) > 1
        for policy in (*plain.resize_policies, plain.resize_policies[0]):
            for m in (plain, model):
                m.set_resize_policy(policy)
            check(plain, model, image)
            with torch.no_grad():
                outs.append(model(image))
        assert min((a - b).abs().max() for a, b in itertools.pairwise(outs)) > 1e-3


def test_a_fading_embedding_is_seen():
    model = lively(vitrel.relativize(small("vit", position="absolute"), "table", absolute="fade", fade_steps=4))
    plain, model = twins(model)
    for _ in range(5):
        check(plain, model, picture())
        image = picture()
        for m in (plain, model):
            m.train()(image)
            m.eval()


def test_draws_of_training_are_not_kept():
    plain, model = twins(small("vit", position="rope_axial", position_args=dict(jitter_coords=2.0, shift_coords=3.0)))
    image = picture()
    check(plain, model, image)
    with torch.no_grad():
        first, second = model.train()(image), model(image)
    assert (first - second).abs().max() > 1e-3
    check(plain, model.eval(), image)
