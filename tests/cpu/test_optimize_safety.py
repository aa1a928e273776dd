"""Where vitrel.optimize stays out of the way: gradients, training, tracing, hooks; and what it leaves of the model."""

import copy
import io
import pickle
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from safetensors import safe_open
from timm.layers import get_notrace_modules
from timm.models._features_fx import create_feature_extractor
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torchvision.models import feature_extraction

import vitrel
from helpers.optimized import KINDS, apart, assert_near, build, check, graph, picture, twins, uses_onednn
from vitrel.cpu.optimize import restore
from vitrel.layers import Attention, Block

EVERY = pytest.mark.parametrize("kind", KINDS)
HOOKED = pytest.mark.parametrize("kind", ["vit", "vit swiglu", "swinv2"])
PAIR = pytest.mark.parametrize("kind", ["vit", "swin"])
TRACED = pytest.mark.parametrize("kind", ["vit", pytest.param("swin", marks=pytest.mark.slow)])
SHALLOW = {"vit": dict(depth=1), "swin": dict(depths=(2,), num_heads=(1,))}


def kinds(model):
    return [(name, type(module)) for name, module in model.named_modules()]


@EVERY
def test_off_while_gradients_are_recorded(kind):
    plain, model = twins(build(kind), linears="onednn")
    for _ in range(2):
        image = picture()
        found, wanted = model(image), plain(image)
        assert torch.equal(found, wanted) and graph(found) == graph(wanted)
        assert not uses_onednn(lambda image=image: model(image))
        for out in (found, wanted):
            out.square().sum().backward()
        for own, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(own.grad, other.grad)
        for m in (plain, model):
            m.zero_grad()
        check(plain, model, image)
    for m in (plain, model):
        m.set_grad_checkpointing()
    assert torch.equal(model(image), plain(image))


@EVERY
def test_off_in_train_mode(kind):
    """Dropout and drop path draw as in the plain model, with gradients and without."""
    plain, model = twins(build(kind, drop_rate=0.3, attn_drop_rate=0.3, drop_path_rate=0.3), linears="onednn")
    image = picture()
    check(plain, model, image)
    plain.train(), model.train()
    for guard in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with guard():
            outs = []
            for seed in (1, 1, 2):
                pair = []
                for m in (model, plain):
                    torch.manual_seed(seed)
                    pair.append(m(image))
                assert torch.equal(*pair)
                outs.append(pair[0])
            assert torch.equal(outs[0], outs[1]) and not torch.equal(outs[1], outs[2])
            assert not uses_onednn(lambda: model(image))
    check(plain.eval(), model.eval(), image)


@pytest.mark.parametrize("part", ["drop", "attn", "block", "head"])
@PAIR
def test_parts_in_train_mode_draw(kind, part):
    """Monte Carlo dropout: a model in evaluation but for some of its parts."""
    plain, model = twins(build(kind, drop_rate=0.3, attn_drop_rate=0.3, drop_path_rate=0.3))
    image = picture(8)
    check(plain, model, image)
    for m in (plain, model):
        for name, module in m.named_modules():
            chosen = {
                "drop": type(module).__name__ in ("DropPath", "Dropout"),
                "attn": isinstance(module, Attention),
                "block": isinstance(module, Block) and name.endswith("1"),
                "head": name == "head" or name == "head_drop",
            }[part]
            if chosen:
                module.train()
    found, wanted = [], []
    with torch.no_grad():
        for m, outs in ((model, found), (plain, wanted)):
            torch.manual_seed(1)
            outs += [m(image), m(image)]
    assert_near(found, wanted)
    assert not torch.equal(*found)


@pytest.mark.slow
def test_off_under_compile():
    plain, model = twins(build("vit", **SHALLOW["vit"]))
    images = [picture(2, size) for size in ((64, 64), (40, 88), (72, 56))]
    check(plain, model, images[0])
    found, frames = [], []
    with torch.no_grad():
        for m in (plain, model):
            torch._dynamo.reset()
            counter = CompileCounter()
            compiled = torch.compile(m, backend=counter, fullgraph=True)
            found.append([compiled(image) for image in images])
            frames.append((counter.frame_count, counter.op_count))
        assert frames[0] == frames[1] and frames[0][0] <= 2
        assert apart(found[1], found[0]) == 0
    check(plain, model, images[1])
    torch._dynamo.reset()


@TRACED
def test_off_under_export(kind):
    plain, model = twins(build(kind, **SHALLOW[kind]))
    image = picture(2, (64, 64))
    check(plain, model, image)
    with torch.no_grad():
        programs = [torch.export.export(m, (image,)) for m in (plain, model)]
        assert torch.equal(programs[1].module()(image), programs[0].module()(image))
    operations = [[str(node.target) for node in program.graph.nodes] for program in programs]
    assert operations[0] == operations[1]
    assert not any("mkldnn" in name for name in operations[1])
    assert {*programs[1].constants} == {*programs[0].constants}


@TRACED
def test_off_under_trace(kind):
    plain, model = twins(build(kind))
    image = picture(2, (64, 64))
    check(plain, model, image)
    with torch.no_grad():
        traced = [torch.jit.trace(m, image, check_trace=False) for m in (plain, model)]
        assert torch.equal(traced[1](image), traced[0](image))
    one, other = ([node.kind() for node in t.inlined_graph.nodes()] for t in traced)
    assert one == other


@TRACED
def test_off_under_fx(kind):
    """What is traced is the plain graph; what runs is as exact as the model."""
    plain, model = twins(build(kind))
    check(plain, model, picture())
    leaves = dict(leaf_modules=[*get_notrace_modules()])
    middle = plain.feature_info[0]["module"] + (".blocks.1.drop_path2" if kind == "swin" else ".drop_path2")
    extractors = []
    for m in (plain, model):
        timms = create_feature_extractor(m, {m.feature_info[0]["module"]: "mid", "norm": "last"})
        visions = feature_extraction.create_feature_extractor(m, {middle: "mid", "norm": "last"}, tracer_kwargs=leaves)
        names = feature_extraction.get_graph_node_names(m, tracer_kwargs=leaves)
        extractors.append((timms, visions, names))
    assert extractors[0][2] == extractors[1][2]
    for ours, theirs in zip(extractors[1][:2], extractors[0][:2], strict=True):
        nodes = [[(node.op, str(node.target)) for node in e.graph.nodes] for e in (ours, theirs)]
        assert nodes[0] == nodes[1]
        image = picture(2, (40, 72))
        assert apart(ours(image), theirs(image)) == 0
        with torch.no_grad():
            for _ in range(2):
                assert_near(ours(image), theirs(image))


def test_off_on_other_devices():
    plain, model = twins(build("swin"))
    check(plain, model, picture())
    with torch.no_grad():
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert model(torch.empty(2, 3, 64, 48)).shape == (2, 5)
        assert model.to("meta")(picture().to("meta")).device.type == "meta"
    assert not uses_onednn(lambda: model(picture().to("meta")))


def test_nothing_fake_is_kept():
    plain, model = twins(build("vit"))
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.empty(2, 3, 40, 88))
    check(plain, model, picture())


@pytest.mark.parametrize(("kind", "linears"), [("vit", "torch"), *((kind, "onednn") for kind in KINDS)])
def test_state_dict_copies_and_files(kind, linears, tmp_path):
    plain, model = twins(build(kind), linears=linears)
    image, before = picture(), {name: id(p) for name, p in model.named_parameters()}
    for use in (False, True):
        if use:
            check(plain, model, image)
        state, wanted = model.state_dict(), plain.state_dict()
        assert [*state] == [*wanted] and all(torch.equal(state[name], wanted[name]) for name in wanted)
        assert [n for n, _ in model.named_modules()] == [n for n, _ in plain.named_modules()]
        assert [n for n, _ in model.named_buffers()] == [n for n, _ in plain.named_buffers()]
        assert {name: id(p) for name, p in model.named_parameters()} == before
        sizes = []
        for m in (plain, model):
            file = io.BytesIO()
            torch.save(m, file)
            sizes.append(file.tell())
        assert sizes[1] <= 1.1 * sizes[0], "what is kept was saved"
        check(plain, torch.load(io.BytesIO(file.getvalue()), weights_only=False), image)
        check(plain, pickle.loads(pickle.dumps(model)), image)
        check(plain, copy.deepcopy(model), image)
        vitrel.save(model, tmp_path / "m.safetensors")
        vitrel.save(plain, tmp_path / "p.safetensors")
        with safe_open(tmp_path / "m.safetensors", "pt") as found, safe_open(tmp_path / "p.safetensors", "pt") as expected:
            assert found.metadata() == expected.metadata()
            assert all(torch.equal(found.get_tensor(name), expected.get_tensor(name)) for name in wanted)
        assert "Linear(in_features=" in repr(model) and repr(model).count("\n") == repr(plain).count("\n")
        for (name, own), (_, other) in zip(model.named_modules(), plain.named_modules(), strict=True):
            assert isinstance(own, type(other)), name
    assert (torch.load(io.BytesIO(file.getvalue()), weights_only=False).state_dict()).keys() == state.keys()


@EVERY
def test_twice_is_once_and_restored_is_plain(kind):
    plain, model = twins(build(kind), linears="onednn")
    image = picture()
    again = vitrel.optimize(model, linears="onednn")
    assert again is model
    types = kinds(model)
    check(plain, model, image)
    vitrel.optimize(model, linears="torch")
    check(plain, model, image)
    assert kinds(vitrel.optimize(model, linears="onednn")) == types
    assert kinds(model) != kinds(plain)
    restore(model)
    assert kinds(model) == kinds(plain)
    for own, other in zip(model.modules(), plain.modules(), strict=True):
        assert own.__dict__.keys() == other.__dict__.keys()
    with torch.no_grad():
        assert torch.equal(model(image), plain(image))
    assert not uses_onednn(lambda: model(image))
    restore(model), restore(plain)
    assert kinds(model) == kinds(plain)
    check(plain, vitrel.optimize(model), image)


def test_it_does_something():
    """What the other tests would not notice missing: oneDNN's operators, and terms that are not computed again."""
    plain, model = twins(build("vit"), linears="onednn")
    image = picture()
    with torch.no_grad():
        assert uses_onednn(lambda: model(image)) is torch.backends.mkldnn.is_available()
        assert not uses_onednn(lambda: plain(image))


def refusal_of(model, image):
    try:
        with torch.no_grad():
            model(image)
    except Exception as error:
        return type(error), str(error)
    raise AssertionError("it was accepted")


@PAIR
def test_errors_are_the_plain_models(kind):
    plain, model = twins(build(kind))
    for warm in (False, True):
        for image in (picture(channels=4), picture(size=(1, 40)), picture()[0], picture().double(), "image"):
            assert refusal_of(model, image) == refusal_of(plain, image)
        if not warm:
            check(plain, model, picture())


def test_threads_at_several_sizes():
    plain, model = twins(build("swin"))
    images = [picture(1, size) for size in ((64, 64), (40, 88), (72, 57), (24, 24))] * 4

    def run(image):
        with torch.no_grad():
            return model(image)

    with ThreadPoolExecutor(4) as pool, torch.no_grad():
        assert_near([*pool.map(run, images)], [plain(image) for image in images])


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


@pytest.mark.slow
@HOOKED
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


@HOOKED
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
