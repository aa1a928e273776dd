"""Operators that a model launches, and none that reads a value back from the device."""

import pytest
import timm
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import vitrel
from helpers import each
from helpers.gpu import Unread, autocast
from helpers.launches import Launches
from helpers.variants import MODELS
from vitrel.ops import BACKENDS, use_backend


def few_blocks(name):
    """Keywords for one block, a Swin for a stage with and without a shift and one after it."""
    return {"depth": 1} if "_vit_" in name else {"depths": (2, 1), "num_heads": (1, 2)}


def launches(model, size, train):
    """Operators of the second forward pass, with `train` of a step without the optimizer."""

    image = torch.zeros(1, 3, size, size)

    def run():
        model.zero_grad(set_to_none=True)
        with torch.set_grad_enabled(train):
            out = model(image)
        if train:
            out.sum().backward()

    model.train(train)
    run()
    with Launches() as counted:
        run()
    return counted.count


# The width changes no number of operators, and two blocks (of a stage) are as good as many.
NARROW = {"swin": {"embed_dim": 24, "depths": (2, 2, 2, 2)}, "vit": {"embed_dim": 48, "depth": 2}}


def beit(size):
    return timm.create_model("beit_base_patch16_224", num_heads=6, init_values=None, img_size=size, **NARROW["vit"])


def at(name, **how):
    return lambda size: timm.create_model(name, **how | NARROW["swin" if "swin" in name else "vit"])


SWIN, ANY = {"strict_img_size": False, "drop_path_rate": 0.0}, {"dynamic_img_size": True}
TWINS = {  # (ours, timm's of the same function): {size: operators of ours, forward and training}
    ("vitrel_swin_t", at("swin_tiny_patch4_window7_224", **SWIN)): {224: (133, 512), 256: (135, 548)},
    ("vitrel_swinv2_t", at("swinv2_tiny_window8_256", drop_path_rate=0.0)): {256: (269, 904)},
    ("vitrel_vit_s16_absolute", at("vit_small_patch16_224", **ANY)): {224: (26, 76), 256: (28, 83)},
    ("vitrel_vit_s16_table", beit): {224: (27, 115), 256: (31, 121)},
    ("vitrel_vit_s16_rope_axial", at("vit_small_patch16_rope_224", **ANY)): {256: (43, 109)},
    ("vitrel_vit_s16_rope_mixed", at("vit_small_patch16_rope_mixed_224", **ANY)): {256: (53, 165)},
}


@pytest.mark.slow
@pytest.mark.parametrize(("ours", "twin"), TWINS, ids=lambda given: given if isinstance(given, str) else "timm")
def test_hardly_more_operators_than_timms(ours, twin):
    """At the native size, and at another, which rotations do not tell apart; forward and training."""
    for size, allowed in TWINS[ours, twin].items():
        model = vitrel.create_model(ours, **(NARROW["swin"] | {"drop_path_rate": 0.0} if "swin" in ours else NARROW["vit"]))
        other = twin(size)
        for train in (False, True):
            theirs, count = launches(other, size, train), launches(model, size, train)
            assert count <= allowed[train], f"{ours} at {size}, {train=}: {count} operators"
            assert count <= theirs + 4, f"{ours} at {size}, {train=}: {count}, timm's {theirs}"


@each("name", MODELS)
def test_nothing_is_read_back(name):
    model = vitrel.create_model(name, num_classes=2, **few_blocks(name))
    with Unread():
        model(torch.zeros(1, 3, 48, 80)).sum().backward()


def test_what_reads_back_is_found():
    with pytest.raises(AssertionError, match="_local_scalar_dense reads back"), Unread():
        torch.ones(()).item()
    with pytest.raises(AssertionError, match="index reads back"), Unread():
        torch.ones(3)[torch.ones(3) > 0]


# Together they enter attention in every way, on every backend that serves on a GPU.
KINDS = ["vit_n8_factorized", "vit_n8_deberta", "vit_n8_shaw", "swin_n_rope_mixed", "swinv2_n"]


def on_every_backend(model, image, backward=False):
    """Names of the backends that serve the model."""
    served = []
    for backend in BACKENDS:
        try:
            with use_backend(backend):
                out = model(image)
        except ValueError as error:
            if "refuses" not in str(error):
                raise
            continue
        assert out.shape == (len(image), 2)
        if backward:
            out.sum().backward()
            assert all(p.grad is not None for p in model.parameters())
            model.zero_grad(set_to_none=True)
        served.append(backend)
    return served


@pytest.mark.slow
def test_every_backend_on_a_device_that_holds_no_values():
    """In bfloat16 by autocast; what reads a value raises."""
    served = set()
    for name in KINDS:
        model = vitrel.create_model(f"vitrel_{name}", num_classes=2, device="meta", **few_blocks(f"_{name}"))
        with FakeTensorMode(allow_non_fake_inputs=True), autocast(torch.bfloat16):
            model.to_empty(device="cuda")
            served.update(on_every_backend(model, torch.zeros(2, 3, 48, 80, device="cuda")))
    assert served == set(BACKENDS)


@pytest.mark.slow
def test_backward_passes_on_a_device_that_holds_no_values(monkeypatch):
    """Without a GPU, autograd refuses fake tensors of one."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    served = set()
    for name in KINDS:
        model = vitrel.create_model(f"vitrel_{name}", num_classes=2, device="meta", **few_blocks(f"_{name}"))
        served.update(on_every_backend(model, torch.zeros(2, 3, 48, 80, device="meta"), backward=True))
    assert served == set(BACKENDS)
